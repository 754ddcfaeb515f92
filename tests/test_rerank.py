"""A reranker behind `rerank.url`: stubs of Jina's and TEI's APIs, the real llama-server, and what servers do wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MakeDaemon
from daemon_process import ask, wait_until
from llama_server import running_llama
from recording_upstream import RecordingUpstream, Request, Response, recording_upstream

from memd.errors import ConfigError, RerankError
from memd.recall.rerank import Reranker
from memd.settings.loading import load_config
from memd.settings.model import RerankSettings

SECRET = "sk-very-secret"
TEXTS = ["The lamp is lit.", "The key hangs behind the bicycle.", "Bread is baked on Fridays."]
WHERE = "Where does the key hang?"


def score(text: str) -> float:
    return -float(len(text))  # logits may be negative; here the shortest text is the best


def answered(body: object, status: int = 200) -> Response:
    return Response((json.dumps(body).encode(),), status)


def jina(request: Request) -> Response:
    """As strict as pydantic with `extra: forbid`."""
    asked = json.loads(request.body)
    if request.target not in ("/v1/rerank", "/rerank"):
        return answered({"detail": "Not Found"}, 404)
    if asked.keys() != {"model", "query", "documents"} or not all(isinstance(text, str) for text in asked["documents"]):
        return answered({"error": {"message": f"unexpected {sorted(asked)}"}}, 422)
    best_first = sorted(enumerate(asked["documents"]), key=lambda one: -score(one[1]))
    rows = [{"index": number, "relevance_score": score(text)} for number, text in best_first]
    return answered({"model": "m", "results": rows})


def tei(request: Request) -> Response:
    asked = json.loads(request.body)
    if request.target != "/rerank":
        return Response((b"",), 404)
    if "texts" not in asked:
        return Response((b"Failed to deserialize the JSON body into the target type: missing field `texts`",), 422)
    return answered([{"index": number, "score": score(one)} for number, one in enumerate(asked["texts"])][::-1])


@pytest.fixture
def server() -> Iterator[RecordingUpstream]:
    with recording_upstream() as running:
        running.answers_all = True
        running.answer = jina
        yield running


def at(url: str, timeout_ms: int = 5_000) -> Reranker:
    return Reranker(RerankSettings(url=url, api_key=SECRET, timeout_ms=timeout_ms))


@pytest.mark.parametrize(
    ("api", "path"),
    [(jina, ""), (jina, "/"), (jina, "/v1"), (jina, "/v1/rerank"), (jina, "/rerank"), (tei, ""), (tei, "/rerank")],
)
def test_both_apis_are_found_out_and_asked_at_once_from_then_on(
    api: object, path: str, server: RecordingUpstream
) -> None:
    server.answer = api  # type: ignore[assignment]  # either of the two above
    reranker = at(server.url + path)
    for _ in range(2):
        assert reranker.scores(WHERE, TEXTS) == [score(text) for text in TEXTS]
    assert len(server.requests) <= 3 and server.requests[-1].target == server.requests[-2].target
    assert {request.header("Authorization") for request in server.requests} == {f"Bearer {SECRET}"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[]", "scores of other texts than the 3"),
        (b'{"results": [{"index": 0, "relevance_score": 1}]}', "scores of other texts than the 3"),
        (b'[{"index": 0, "score": 1}, {"index": 1, "score": NaN}, {"index": 2, "score": 1}]', "scores of other texts"),
        (b'[{"index": 0}]', "without scores"),
        (b'[{"index": Infinity, "score": 1}]', "without scores"),
        (b'[{"index": 0, "score": %s}]' % (b"9" * 400), "without scores"),
        (b"<html>", "without scores"),
        (b'{"results": 7}', "without scores"),
    ],
)
def test_an_answer_without_a_score_for_each_text_is_refused(body: bytes, said: str, server: RecordingUpstream) -> None:
    server.answer = lambda _: Response((body,))
    with pytest.raises(RerankError, match=said):
        at(server.url).scores(WHERE, TEXTS)


def test_what_the_server_says_is_shown_without_the_key(server: RecordingUpstream) -> None:
    server.answer = lambda _: answered({"error": {"message": f"start it with --reranking, {SECRET}"}}, 501)
    with pytest.raises(RerankError, match=r"answers 501 to /v1/rerank: start it with --reranking, \*\*\*"):
        at(server.url).scores(WHERE, TEXTS)


def test_an_address_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("rerank: {url: 'localhost:8080'}")
    with pytest.raises(ConfigError, match=r"rerank\.url.*give http://HOST:PORT"):
        load_config(tmp_path / "config.yaml", {}, {})


def test_a_daemon_tells_the_best_in_its_order_and_keeps_its_own_where_it_fails_or_is_late(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, server: RecordingUpstream
) -> None:
    settings = {"rerank": {"url": server.url, "timeout_ms": 400, "api_key": SECRET}, "retrieval": {"min_score": 0.0}}
    daemon = make_daemon(upstream.url, settings).start()
    for text in TEXTS:
        daemon.chat([{"role": "user", "content": text}])
    daemon.wait_stored(*TEXTS)

    def asked() -> tuple[list[str], str | None]:
        found = ask(f"{daemon.own_url}/memd/search?q=Where+does+the+key+hang%3F&role=user").json
        return [next(text for text in TEXTS if text in one["content"]) for one in found["chunks"]], found["note"]

    shortest_first, note = asked()
    assert shortest_first == sorted(TEXTS, key=len) and note is None
    assert "ok" in daemon.run("check", "--config", str(daemon.config)).stdout.split("reranker")[0].splitlines()[-1]

    server.answer = lambda _: answered({"error": "overloaded"}, 503)
    own, note = asked()
    assert own[0] == TEXTS[1] and note is not None and "Not reranked" in note and "503" in note and SECRET not in note
    again, note = asked()
    assert again == own and note is not None and "failed a moment ago" in note

    gate = threading.Event()
    server.answer = lambda _: Response((b"", b"[]"), gate=gate)
    wait_until(lambda: "does not answer in time" in (asked()[1] or ""), lambda: daemon.log.read_text())
    gate.set()
    answer = daemon.chat([{"role": "user", "content": WHERE}], {"X-Memory-Mode": "readonly"})
    assert answer.headers["X-Memory-Status"] == "injected" and TEXTS[1] in upstream.prompts[-1]
    server.answer = jina
    wait_until(lambda: asked()[1] is None, lambda: daemon.log.read_text())
    assert asked()[0] == shortest_first


def test_the_real_llama_server_reranks(scripted_gguf: Path, tmp_path: Path) -> None:
    log = tmp_path / "llama.log"
    with running_llama(scripted_gguf, context=512, log=log, settings=["embedding=1", "pooling_type=4"]) as url:
        scores = at(url, 30_000).scores(WHERE, TEXTS)
        assert len(scores) == 3 and scores == pytest.approx(at(f"{url}/rerank", 30_000).scores(WHERE, TEXTS))


def test_a_llama_server_without_a_reranker_says_what_it_lacks(llama: str) -> None:
    with pytest.raises(RerankError, match=r"answers 501 to /v1/rerank: .*rerank"):
        at(llama).scores(WHERE, TEXTS)
