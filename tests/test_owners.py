"""Any daemon of a cluster answers for any topic: requests are passed on to the daemon that has it."""

from __future__ import annotations

import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx2
import pytest
from daemon_process import Answer, DaemonProcess, ask, wait_until
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from owner_daemons import figure, ground, owner_of
from raw_wire import connected, request
from recording_upstream import RecordingUpstream, chat_answer, recording_upstream, streamed

pytestmark = pytest.mark.process

TOKEN = "a-token-that-is-long-enough-for-anybody"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
FACT = "The lamp of the lighthouse was made in Paris."
QUESTION = "Where was the lamp of the lighthouse made?"
CHAT = "/v1/chat/completions"


class Pair(NamedTuple):
    """Two daemons of a cluster; all topics of the tests are the second one's."""

    asked: DaemonProcess
    owner: DaemonProcess
    upstream: RecordingUpstream

    def tell_owner(self, topic: str, text: str = FACT) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        told = ask(f"{self.owner.base_url}/t/{topic}{CHAT}", body, headers=SHOWN)
        assert owner_of(told) is None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ground() as shared, recording_upstream() as upstream:
        settings = shared.settings(auth={"token": TOKEN}, audit={"record": "always"})
        daemons = [DaemonProcess(tmp_path_factory.mktemp("memd"), upstream.url, settings) for _ in range(2)]
        try:
            yield Pair(daemons[0].start(), daemons[1].start(), upstream)
        finally:
            for daemon in daemons:
                daemon.discard()
                print(repr(daemon))


MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"model": "tiny", "messages": MESSAGES}),
    "responses": ("/v1/responses", {"model": "tiny", "input": QUESTION}),
    "anthropic": ("/v1/messages", {"model": "tiny", "max_tokens": 100, "messages": MESSAGES}),
    "ollama": ("/api/chat", {"model": "tiny", "messages": MESSAGES}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ASKED)
def test_a_chat_is_answered_by_the_daemon_that_has_its_topic(pair: Pair, api: str, stream: bool) -> None:
    pair.tell_owner(topic := f"{api}-{stream}")
    asked_before = len(pair.upstream.requests)
    counted = ("memd_forwarded_requests_total", "memd_requests_total")
    before = [figure(daemon, name, **SHOWN) for daemon in (pair.asked, pair.owner) for name in counted]
    target, body = ASKED[api]
    url = f"{pair.asked.base_url}/t/{topic}{target}"
    told = ask(url, body | {"stream": stream, "memory_in": {}}, headers=SHOWN | {"X-Memory-Session": "one"})
    assert owner_of(told) == pair.owner.base_url and told.headers["X-Memory-Status"] == "injected"
    assert b"memory_out" in told.body or stream
    after = [figure(daemon, name, **SHOWN) for daemon in (pair.asked, pair.owner) for name in counted]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 0, 0, 1]
    [sent] = [one for one in pair.upstream.requests[asked_before:] if one.target == target]
    assert FACT.encode() in sent.body and TOKEN not in str(sent.headers) and sent.header("X-Memory-Hop") is None
    turn = f"{pair.asked.own_url}/memd/turns/{told.headers['X-Memory-Turn']}"
    wait_until(lambda: ask(turn, headers=SHOWN).status == 200, lambda: f"a receipt a moment after the answer: {pair}")
    assert ask(turn, headers=SHOWN).json["topic_id"] == topic


ROUTES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "search": ("/memd/search?q=lamp&topic={topic}", None),
    "log": ("/memd/log?topic={topic}", None),
    "export": ("/memd/export?topic={topic}", None),
    "note": ("/memd/notes", {"topic_id": "{topic}", "notes": [{"content": "The keeper is Ada."}]}),
    "erase": ("/memd/erase", {"topic_id": "{topic}", "before": "2020-01-01"}),
}


@pytest.mark.parametrize("route", ROUTES)
def test_own_routes_are_answered_by_the_daemon_that_has_the_topic(pair: Pair, route: str) -> None:
    pair.tell_owner(topic := f"route-{route}")
    export = f"{pair.owner.own_url}/memd/export?topic={topic}"
    wait_until(lambda: FACT.encode() in ask(export, headers=SHOWN).body, lambda: f"stored: {pair}")
    target, body = ROUTES[route]
    sent = None if body is None else json.loads(json.dumps(body).replace("{topic}", topic))
    told = ask(
        f"{pair.asked.own_url}{target.format(topic=topic)}", sent, headers=SHOWN | {"Origin": pair.asked.own_url}
    )
    assert owner_of(told) == pair.owner.base_url
    if body is None:
        assert told.body == ask(f"{pair.owner.own_url}{target.format(topic=topic)}", headers=SHOWN).body


def of_both(daemon: DaemonProcess, path: str, has: Callable[[Any], bool] = lambda _: True) -> Answer:
    """What a daemon tells of both, once the other one answers it in time and `has` is so.

    A daemon that has had no topic yet learns the cluster's name, by which the others know it, a moment after its start;
    receipts come a moment after the answer.
    """
    told: list[Answer] = []

    def is_whole() -> bool:
        told.append(ask(f"{daemon.own_url}{path}", headers=SHOWN))
        assert told[-1].status == 200, told[-1].body
        return told[-1].headers["X-Memory-Left-Out"] is None and has(told[-1].json)

    wait_until(is_whole, lambda: f"{path}: {told[-1].headers} {told[-1].body!r}")
    return told[-1]


def test_whoever_answers_notes_it_with_the_address_of_the_client(pair: Pair) -> None:
    pair.tell_owner("audited")
    ask(f"{pair.asked.own_url}/memd/search?q=lamp&topic=audited", headers=SHOWN)
    for daemon in (
        pair.owner,
        pair.asked,
    ):  # whichever is asked for the audit tells of it, and who has it in its record

        def noted(told: Any) -> list[Any]:
            return [one for one in told["acts"] if one["act"] != "start" and one["what"] == "GET /memd/search"]

        [act] = noted(of_both(daemon, "/memd/audit?topic=audited", lambda told: bool(noted(told))).json)
        assert (act["from"], act["daemon"]) == ("127.0.0.1", pair.owner.base_url)


def test_several_topics_are_read_through_any_daemon(pair: Pair) -> None:
    pair.tell_owner("one-of-several")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "The oil of the lamp comes by boat."}]}
    ask(f"{pair.asked.base_url}/t/another-of-several{CHAT}", body, headers=SHOWN)
    for named in ("&topic=one-of-several&topic=another-of-several", ""):
        for daemon in (pair.asked, pair.owner):
            told = of_both(
                daemon,
                f"/memd/search?q=lamp+lighthouse+oil+boat{named}",
                lambda told: {"one-of-several", "another-of-several"} <= {one["topic_id"] for one in told["chunks"]},
            )
            assert told.headers["X-Memory-Owner"] is None
    erased = ask(f"{pair.asked.own_url}/memd/erase", {"chunk_ids": [told.json["chunks"][0]["id"]]}, headers=SHOWN)
    assert erased.status == 400 and "name the topic" in erased.body.decode()


def test_what_all_daemons_know_is_told_by_each(pair: Pair) -> None:
    pair.tell_owner("known-by-all")
    body = {"model": "tiny", "messages": [{"role": "user", "content": FACT}]}
    ask(f"{pair.asked.base_url}/t/own{CHAT}", body, headers=SHOWN)
    for daemon in (pair.asked, pair.owner):
        of_both(daemon, "/memd/stats", lambda told: {"known-by-all", "own"} <= told["topics"].keys())
        for path, name in (("/memd/topics", "topics"), ("/memd/turns?limit=500", "turns"), ("/memd/usage", "rows")):

            def has_both(told: Any, name: str = name) -> bool:
                return {"known-by-all", "own"} <= {one["topic_id"] for one in told[name]}

            of_both(daemon, path, has_both)
        assert of_both(daemon, "/memd/buffer?topic=known-by-all").json["conversations"]


def test_conversations_and_figures_are_put_together_from_the_receipts_of_all_daemons(pair: Pair) -> None:
    """Also of a topic that was another daemon's before, as the receipts stay where they were written."""

    def requests(told: Any) -> int:
        return sum(int(one["requests"]) for one in told["periods"])

    def has(counted: Callable[[Any], int], known: int) -> Callable[[Any], bool]:
        return lambda told: counted(told) == known

    def with_receipts(told: Any) -> int:
        return sum(one["conversation"] is not None for one in told["conversations"])

    pair.tell_owner("moving")
    pair.owner.wait_stored(FACT)
    of_both(pair.owner, "/memd/figures?topic=moving", has(requests, 1))
    pair.owner.restart()
    told = ask(f"{pair.asked.base_url}/t/moving{CHAT}", ASKED["chat"][1], headers=SHOWN)
    assert owner_of(told) is None
    pair.tell_owner("staying")
    for daemon in (pair.asked, pair.owner):
        for named, known in (("?topic=moving", 2), ("?topic=moving&topic=staying", 3)):
            of_both(daemon, f"/memd/conversations{named}", has(with_receipts, known))
            of_both(daemon, f"/memd/figures{named}", has(requests, known))
        # The log is counted once, by whoever is asked, as soon as all that was said is in it.
        both = "/memd/figures?topic=moving&topic=staying"
        of_both(daemon, both, lambda told: sum(one["stored"] for one in told["periods"]) == 3)
    [talk] = of_both(pair.asked, "/memd/conversations?topic=staying").json["conversations"]
    turns = of_both(pair.asked, f"/memd/conversations/{talk['conversation']}").json
    assert (turns["title"], turns["of"]) == (FACT, 1)


def test_whoever_does_not_answer_is_named(pair: Pair) -> None:
    pair.owner.send_signal(signal.SIGSTOP)
    try:
        for route in ("conversations", "figures", "sources", "audit"):
            told = ask(f"{pair.asked.own_url}/memd/{route}", headers=SHOWN)
            assert (told.status, told.headers["X-Memory-Left-Out"]) == (200, pair.owner.base_url)
    finally:
        pair.owner.send_signal(signal.SIGCONT)


def test_what_happens_at_other_daemons_is_told_as_it_happens(pair: Pair) -> None:
    pair.tell_owner("followed")
    client = connected(pair.asked.own_url)
    client.send(request(b"GET", b"/memd/events", f"Authorization: Bearer {TOKEN}".encode()))
    assert b" 200 " in client.read_head()
    told = b""
    for number in itertools.count():  # until the other one is followed
        pair.tell_owner("followed", f"The keeper has {number} cats.")
        while client.is_readable(0.2):
            told += client.read_chunk()
        if b"event: turn" in told and b'"followed"' in told:
            break
    client.close()


async def test_tools_reach_topics_of_other_daemons(pair: Pair) -> None:
    pair.tell_owner("tools")
    url = f"{pair.asked.own_url}/mcp"
    async with (
        httpx2.AsyncClient(headers=SHOWN) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        told = await client.call_tool("search_memory", {"query": QUESTION, "topics": ["tools"]})
    assert FACT in str(told)


def test_a_request_that_was_passed_on_goes_no_further(pair: Pair) -> None:
    pair.tell_owner("once")
    body = {"model": "tiny", "messages": MESSAGES}
    for daemon in (pair.asked, pair.owner):
        told = ask(f"{daemon.base_url}/t/once{CHAT}", body, headers=SHOWN | {"X-Memory-Hop": "forged"})
        assert told.status == 421 and told.headers["X-Memory-Hop"] is None, "nobody learns the mark"
        assert ask(f"{daemon.base_url}/t/once{CHAT}", body, headers=SHOWN | {"X-Memory-Hop": "é"}).status == 421
    own = ask(f"{pair.owner.base_url}/memd/search?q=lamp&topic=once", headers=SHOWN | {"X-Memory-Hop": "forged"})
    assert own.status == 421, "memd's own routes are not at the model's address"


def test_a_client_that_leaves_ends_its_request_at_the_owner(pair: Pair) -> None:
    pair.tell_owner("leaving")
    gate = threading.Event()
    pair.upstream.answer = lambda _: streamed("One two", gate)
    try:
        body = json.dumps({"model": "tiny", "stream": True, "messages": MESSAGES}).encode()
        client = connected(pair.asked.base_url)
        client.send(
            request(b"POST", f"/t/leaving{CHAT}".encode(), f"Authorization: Bearer {TOKEN}".encode(), body=body)
        )
        assert b" 200 " in client.read_head()
        assert figure(pair.owner, "memd_requests_in_flight", **SHOWN) == 1
        client.abort()
        wait_until(lambda: figure(pair.owner, "memd_requests_in_flight", **SHOWN) == 0, lambda: repr(pair.owner))
    finally:
        gate.set()
        pair.upstream.answer = chat_answer
