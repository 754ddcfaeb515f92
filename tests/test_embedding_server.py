"""Embedding models behind an address: llama-server, stubs of OpenAI's and Ollama's APIs, and what servers do wrong."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from archiver_stage import HashEmbedder
from conftest import Serving
from daemon_process import DaemonProcess, ask, wait_until
from llama_server import running_llama
from recording_upstream import HOLD_SECONDS_MAX, RecordingUpstream, Request, Response, recording_upstream

from memd.embedding.http import HttpEmbedder
from memd.embedding.loading import load_embedder
from memd.errors import EmbeddingError, RerankError
from memd.recall.rerank import Reranker
from memd.settings.model import EmbeddingSettings, RerankSettings

KEY = "The spare key hangs behind the blue bicycle."
WHERE = "Where does the spare key hang?"
BAKER = "The baker in Mill Lane sells cinnamon pastry on Fridays."
SECRET = "sk-very-secret"
HASH = HashEmbedder()


def vectors_of(texts: Sequence[str]) -> list[list[float]]:
    return [(2 * vector).tolist() for vector in HASH.embed_many(texts)]  # not of length one


def openai(request: Request) -> Response:
    if not request.target.endswith("/v1/embeddings"):
        return Response((b'{"error": "not found"}',), status=404)
    texts = json.loads(request.body)["input"]
    data = [{"index": number, "embedding": one} for number, one in enumerate(vectors_of(texts))]
    return Response((json.dumps({"data": data[::-1], "model": "m"}).encode(),))


def ollama(request: Request) -> Response:
    if request.target != "/api/embed":
        return Response((b"404 page not found",), status=404)
    asked = json.loads(request.body)
    if asked["model"] != "nomic":
        return Response(
            (json.dumps({"error": f"model {asked['model']!r} not found, try pulling it first"}).encode(),), 404
        )
    return Response((json.dumps({"model": "nomic", "embeddings": vectors_of(asked["input"])}).encode(),))


@pytest.fixture
def server() -> Iterator[RecordingUpstream]:
    with recording_upstream() as running:
        running.answers_all = True
        running.answer = openai
        yield running


def at(url: str, *, seconds: float = 10.0, name: str = "m", **settings: object) -> HttpEmbedder:
    return HttpEmbedder(EmbeddingSettings(model="http", url=url, name=name, **settings), seconds)  # type: ignore[arg-type]  # a test's own settings


def refusing(status: int, said: str) -> Callable[[Request], Response]:
    return lambda _: Response((json.dumps({"error": {"message": said}}).encode(),), status)


def inputs(server: RecordingUpstream) -> list[list[str]]:
    return [json.loads(request.body)["input"] for request in server.requests]


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/embeddings"])
def test_texts_go_in_batches_in_order_and_come_back_with_length_one(path: str, server: RecordingUpstream) -> None:
    embedder = at(server.url + path, api_key=SECRET, query_prefix="q: ", text_prefix="t: ")
    texts = [f"Lamp {number} is lit." for number in range(20)]
    found = embedder.embed_many(texts)
    assert inputs(server)[1:] == [[f"t: {text}" for text in texts[:16]], [f"t: {text}" for text in texts[16:]]]
    assert found == pytest.approx(HASH.embed_many([f"t: {text}" for text in texts]), abs=1e-6)
    assert embedder.embed_query(WHERE)[0] == pytest.approx(HASH.embed(f"q: {WHERE}"), abs=1e-6)
    assert {request.header("Authorization") for request in server.requests} == {f"Bearer {SECRET}"}
    assert {json.loads(request.body)["model"] for request in server.requests} == {"m"}
    assert embedder.embed_many([]).shape == (0, 16)


@pytest.mark.parametrize("path", ["", "/api/embed"])
def test_ollamas_api_is_found_out(path: str, server: RecordingUpstream) -> None:
    server.answer = ollama
    embedder = at(server.url + path, name="nomic")
    assert embedder.embed(KEY) == pytest.approx(HASH.embed(KEY), abs=1e-6)
    assert server.requests[-1].target == "/api/embed"
    with pytest.raises(EmbeddingError, match=r"model 'other' not found"):
        at(server.url + path, name="other")


def test_a_server_need_not_be_up_if_the_log_has_vectors_of_its_model(server: RecordingUpstream) -> None:
    known = at(server.url)
    settings = EmbeddingSettings(model="http", url="http://127.0.0.1:1", name="m")
    embedder = load_embedder(settings, stored={(384, "f" * 32), (16, known.fingerprint)})
    assert (embedder.dimension, embedder.fingerprint) == (16, known.fingerprint)
    with pytest.raises(EmbeddingError, match=r"127\.0\.0\.1:1 cannot be reached"):
        embedder.embed_query(WHERE)
    with pytest.raises(EmbeddingError, match="cannot be reached"):
        load_embedder(settings, stored={(384, "f" * 32)})


def test_a_long_text_counts_by_its_pieces_and_a_refused_one_by_its_halves(server: RecordingUpstream) -> None:
    embedder = at(server.url)
    text = "".join(f"lamp {number} " for number in range(600))
    pieces = [text[start : start + 2000] for start in range(0, len(text), 2000)]
    assert embedder.embed_query(text) == pytest.approx(HASH.embed_many(pieces), abs=1e-6)

    def limited(request: Request) -> Response:
        longest = max(map(len, json.loads(request.body)["input"]))
        return openai(request) if longest <= 600 else refusing(500, "input is too large to process")(request)

    server.answer = limited
    halves = HASH.embed_many([text[:500], text[500:1000]]).mean(axis=0)
    found = embedder.embed_many([text[:1000], KEY])
    assert found[0] == pytest.approx(halves / np.linalg.norm(halves), abs=1e-5)
    assert found[1] == pytest.approx(HASH.embed(KEY), abs=1e-6)


def test_what_a_server_does_wrong_is_named_and_the_key_is_not_shown(server: RecordingUpstream) -> None:
    embedder = at(server.url, api_key=SECRET)
    server.answer = refusing(401, f"Incorrect API key provided: {SECRET}")
    with pytest.raises(EmbeddingError, match=r"answers 401 .*provided: \*\*\*$"):
        embedder.embed(KEY)
    server.answer = lambda _: Response((json.dumps({"data": [{"index": 0, "embedding": [1.0, 2.0]}]}).encode(),))
    with pytest.raises(EmbeddingError, match=r"vectors of 2 components, and those in the log .* have 16"):
        embedder.embed(KEY)
    data = b'{"data": [{"index": %s, "embedding": %s}]}'
    beyond = data % (b"0", b"[%s]" % b", ".join([b"1e39"] * 16))
    odd = (beyond, data % (b"0", b'"AAAA"'), data % (b"Infinity", b"[1]"), data % (b"0", b"[%s]" % (b"9" * 400)))
    for body in (b"<html>", b"[]", b'{"data": []}', *odd):
        server.answer = lambda _, body=body: Response((body,))  # type: ignore[misc]  # a lambda with a default
        with pytest.raises(EmbeddingError, match=r"with something else than vectors|with an array of shape"):
            embedder.embed(KEY)


def test_texts_of_a_compaction_are_tried_again(server: RecordingUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memd.embedding.http.RETRY_SECONDS", (0.0, 0.0))
    embedder = at(server.url)
    answers = iter([refusing(503, "Loading model"), refusing(503, "Loading model"), openai])
    server.answer = lambda request: next(answers)(request)
    assert embedder.embed_many([KEY]).shape == (1, 16)


def test_a_server_that_hangs_costs_a_question_its_time_and_the_next_one_nothing(server: RecordingUpstream) -> None:
    embedder = at(server.url, seconds=0.2)
    gate = threading.Event()
    server.answer = lambda request: openai(request)._replace(gate=gate)
    began = time.monotonic()
    with pytest.raises(EmbeddingError, match="does not answer in time"):
        embedder.embed_query(WHERE)
    assert time.monotonic() - began < HOLD_SECONDS_MAX / 2, "and not until the server answers"
    asked = len(server.requests)
    with pytest.raises(EmbeddingError, match="failed a moment ago"):
        embedder.embed_query(WHERE)
    assert len(server.requests) == asked
    gate.set()
    embedder.embed_many([KEY])  # what succeeds ends the pause
    assert embedder.embed_query(WHERE).shape == (1, 16)


def test_closing_ends_a_request_that_hangs(server: RecordingUpstream) -> None:
    embedder = at(server.url)
    gate = threading.Event()
    server.answer = lambda request: openai(request)._replace(gate=gate)
    failed: list[Exception] = []

    def embed() -> None:
        try:
            embedder.embed_many([KEY])
        except EmbeddingError as error:
            failed.append(error)

    asked = len(server.requests)
    thread = threading.Thread(target=embed)
    thread.start()
    wait_until(lambda: len(server.requests) > asked, lambda: "not asked")
    embedder.close()
    thread.join(60)
    gate.set()
    assert failed and not thread.is_alive()


@pytest.fixture
def daemon(serving: Serving, server: RecordingUpstream) -> DaemonProcess:
    """It embeds with the server, and was told where the key hangs."""
    settings = {
        "embedding": {"model": "http", "url": server.url, "name": "m", "api_key": SECRET},
        "compaction": {"retry_seconds": 0.1},
        "retrieval": {"recall_budget_ms": 5_000},  # so that a busy machine hears in time that it fails
    }
    daemon = serving(settings)
    daemon.chat([{"role": "user", "content": KEY}])
    daemon.wait_stored(KEY)
    return daemon


def test_a_daemon_with_a_server_that_goes_away_and_comes_back_loses_nothing(
    daemon: DaemonProcess, upstream: RecordingUpstream, server: RecordingUpstream
) -> None:
    checked = daemon.run("check", "--config", str(daemon.config)).stdout
    assert f"m at {server.url}, 16 dimensions" in " ".join(checked.split())
    server.answer = refusing(503, "Loading model")
    daemon.restart()  # it starts without the server
    answer = daemon.chat([{"role": "user", "content": WHERE}])
    assert answer.headers["X-Memory-Status"] == "degraded:embedding" and KEY in upstream.prompts[-1]
    daemon.chat([{"role": "user", "content": BAKER}])
    told = daemon.run("check", "--config", str(daemon.config))
    assert told.returncode == 1 and "answers 503 to /v1/embeddings: Loading model" in " ".join(told.stdout.split())
    assert SECRET not in told.stdout + daemon.log.read_text()
    server.answer = openai
    daemon.wait_stored(BAKER)


def test_a_server_that_answers_later_than_a_recall_waits_is_no_failure(
    serving: Serving, upstream: RecordingUpstream, server: RecordingUpstream
) -> None:
    daemon = serving({"embedding": {"model": "http", "url": server.url, "name": "m"}})
    daemon.chat([{"role": "user", "content": KEY}])
    daemon.wait_stored(KEY)
    gate = threading.Event()
    server.answer = lambda request: openai(request)._replace(gate=gate)
    answer = daemon.chat([{"role": "user", "content": WHERE}])
    assert answer.headers["X-Memory-Status"] == "injected" and KEY in upstream.prompts[-1]
    gate.set()


def of_another_model(request: Request) -> Response:
    told = json.loads(openai(request).parts[0])
    for one in told.get("data", ()):
        one["embedding"] = one["embedding"][::-1]
    return Response((json.dumps(told).encode(),))


def test_a_daemon_tells_another_model_behind_the_same_name_and_stores_nothing_with_it(
    daemon: DaemonProcess, upstream: RecordingUpstream, server: RecordingUpstream
) -> None:
    server.answer = of_another_model
    daemon.chat([{"role": "user", "content": BAKER}])
    said = "another model has this name now"
    wait_until(lambda: said in daemon.log.read_text(), daemon.log.read_text)
    daemon.restart()
    answer = daemon.chat([{"role": "user", "content": WHERE}])
    assert answer.headers["X-Memory-Status"] == "degraded:embedding" and KEY in upstream.prompts[-1]
    told = daemon.run("check", "--config", str(daemon.config))
    assert told.returncode == 1 and said in " ".join(told.stdout.split())
    assert all(BAKER not in one["content"] for one in daemon.export(settled=False))
    server.answer = openai
    daemon.wait_stored(BAKER)


def test_each_part_of_a_question_of_a_chat_is_embedded_once(
    daemon: DaemonProcess, upstream: RecordingUpstream, server: RecordingUpstream
) -> None:
    server.requests.clear()
    before = "I looked in every room of the house and in the garden twice today."
    daemon.chat([{"role": "user", "content": f"{before} {WHERE}"}])
    assert KEY in upstream.prompts[-1]
    asked = [text for request in server.requests for text in json.loads(request.body)["input"]]
    assert sorted(asked) == sorted([before, WHERE])


def test_the_real_llama_server_embeds(scripted_gguf: Path, tmp_path: Path) -> None:
    log = tmp_path / "llama.log"
    with running_llama(scripted_gguf, context=512, log=log, settings=["embedding=1", "pooling_type=1"]) as url:
        embedder = at(url)
        texts = [f"Lamp {number} is lit." for number in range(20)] + ["lamp " * 300]
        found = embedder.embed_many(texts)
        assert found.shape == (21, embedder.dimension) and embedder.dimension == 64
        assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-4)
        assert embedder.embed_query(texts[3])[0] @ found[3] == pytest.approx(1, abs=1e-3)


# A reranker behind rerank.url


TEXTS = ["The lamp is lit.", "The key hangs behind the bicycle.", "Bread is baked on Fridays."]
WHICH = "Where does the key hang?"


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
def reranking() -> Iterator[RecordingUpstream]:
    with recording_upstream() as running:
        running.answers_all = True
        running.answer = jina
        yield running


def reranker_at(url: str, timeout_ms: int = 5_000) -> Reranker:
    return Reranker(RerankSettings(url=url, api_key=SECRET, timeout_ms=timeout_ms))


@pytest.mark.parametrize(
    ("api", "path"),
    [(jina, ""), (jina, "/"), (jina, "/v1"), (jina, "/v1/rerank"), (jina, "/rerank"), (tei, ""), (tei, "/rerank")],
)
def test_both_apis_are_found_out_and_then_asked_at_once(api: object, path: str, reranking: RecordingUpstream) -> None:
    reranking.answer = api  # type: ignore[assignment]  # either of the two above
    reranker = reranker_at(reranking.url + path)
    for _ in range(2):
        assert reranker.scores(WHICH, TEXTS) == [score(text) for text in TEXTS]
    assert len(reranking.requests) <= 3 and reranking.requests[-1].target == reranking.requests[-2].target
    assert {request.header("Authorization") for request in reranking.requests} == {f"Bearer {SECRET}"}


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
def test_an_answer_without_all_scores_is_refused(body: bytes, said: str, reranking: RecordingUpstream) -> None:
    reranking.answer = lambda _: Response((body,))
    with pytest.raises(RerankError, match=said):
        reranker_at(reranking.url).scores(WHICH, TEXTS)


def test_what_the_server_says_is_shown_without_the_key(reranking: RecordingUpstream) -> None:
    reranking.answer = lambda _: answered({"error": {"message": f"start it with --reranking, {SECRET}"}}, 501)
    with pytest.raises(RerankError, match=r"answers 501 to /v1/rerank: start it with --reranking, \*\*\*"):
        reranker_at(reranking.url).scores(WHICH, TEXTS)


def test_a_daemon_tells_the_best_in_its_order_and_keeps_its_own_where_it_fails_or_is_late(
    serving: Serving, upstream: RecordingUpstream, reranking: RecordingUpstream
) -> None:
    settings = {"rerank": {"url": reranking.url, "timeout_ms": 400, "api_key": SECRET}, "retrieval": {"min_score": 0.0}}
    daemon = serving(settings)
    for text in TEXTS:
        daemon.chat([{"role": "user", "content": text}])
    daemon.wait_stored(*TEXTS)

    def asked() -> tuple[list[str], str | None]:
        found = ask(f"{daemon.own_url}/memd/search?q=Where+does+the+key+hang%3F&role=user").json
        assert found["is_reranked"] == (found["note"] is None)
        return [next(text for text in TEXTS if text in one["content"]) for one in found["chunks"]], found["note"]

    shortest_first, note = asked()
    assert shortest_first == sorted(TEXTS, key=len) and note is None
    assert "ok" in daemon.run("check", "--config", str(daemon.config)).stdout.split("reranker")[0].splitlines()[-1]

    reranking.answer = lambda _: answered({"error": "overloaded"}, 503)
    own, note = asked()
    assert own[0] == TEXTS[1] and note is not None and "Not reranked" in note and "503" in note and SECRET not in note
    again, note = asked()
    assert again == own and note is not None and "failed a moment ago" in note

    gate = threading.Event()
    reranking.answer = lambda _: Response((b"", b"[]"), gate=gate)
    wait_until(lambda: "does not answer in time" in (asked()[1] or ""), lambda: daemon.log.read_text())
    gate.set()
    answer = daemon.chat([{"role": "user", "content": WHICH}], {"X-Memory-Mode": "readonly"})
    assert answer.headers["X-Memory-Status"] == "injected" and TEXTS[1] in upstream.prompts[-1]
    reranking.answer = jina
    wait_until(lambda: asked()[1] is None, lambda: daemon.log.read_text())
    assert asked()[0] == shortest_first


def test_the_real_llama_server_reranks(scripted_gguf: Path, tmp_path: Path) -> None:
    log = tmp_path / "llama.log"
    with running_llama(scripted_gguf, context=512, log=log, settings=["embedding=1", "pooling_type=4"]) as url:
        scores = reranker_at(url, 30_000).scores(WHICH, TEXTS)
        assert len(scores) == 3 and scores == pytest.approx(reranker_at(f"{url}/rerank", 30_000).scores(WHICH, TEXTS))


def test_a_llama_server_without_a_reranker_says_what_it_lacks(llama: str) -> None:
    with pytest.raises(RerankError, match=r"answers 501 to /v1/rerank: .*rerank"):
        reranker_at(llama).scores(WHICH, TEXTS)
