"""Nobody waits for somebody else's memory: requests are answered while texts are being embedded for the log."""

import asyncio
import http.client
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import without_rests
from conftest import MakeDaemon
from daemon_in_process import Client, daemon_in_process, until
from daemon_process import ask
from drafts import search
from numpy.typing import NDArray
from recording_upstream import RecordingUpstream, Response

from memd.daemon import app
from memd.embedding import priority
from memd.embedding.embedder import Embedder
from memd.embedding.priority import Priority
from memd.entries import Status
from memd.settings.model import BufferSettings

FACT = "The spare key hangs behind the barometer."
QUESTION = "Where does the spare key hang?"
LONG = "Seventeen crates of oranges went to the harbour. " * 30


class Gated(Embedder):
    """The bundled model, which embeds texts for the log only while `gate` is open; queries always."""

    def __init__(self, real: Embedder) -> None:
        self._real = real
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.name, self.dimension, self.fingerprint = real.name, real.dimension, real.fingerprint
        self.batch_texts = real.batch_texts

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(60)
        return self._real.embed_many(texts)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        return self._real.embed_query(text)


@pytest.fixture
def embedder(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> Gated:
    gated = Gated(embedder)
    monkeypatch.setattr(app, "load_embedder", lambda *_, **__: gated)
    return gated


@pytest.fixture
async def client(tmp_path: Path, embedder: Gated) -> AsyncIterator[Client]:
    async with daemon_in_process(tmp_path, buffer=BufferSettings(soft_tokens=256, hard_tokens=4000)) as client:
        yield client
        embedder.gate.set()


async def _told(client: Client, topic: str, *texts: str, **memory_in: object) -> dict[str, Any]:
    """What memory says of a request with these texts by turns."""
    status, _, answer = await client.ask(*texts, memory_in={"topic_id": topic, **memory_in})
    assert status == 200
    out: dict[str, Any] = answer["memory_out"]
    return out


@pytest.fixture
async def ingesting(client: Client, embedder: Gated) -> list[str]:
    """A conversation whose compaction has begun and does not come to its end, in a topic that knows the fact."""
    await _told(client, "harbour", FACT)
    await client.stored("harbour")
    embedder.gate.clear()
    texts = [LONG, "Noted.", LONG + "And on.", "Noted.", "How many crates?"]
    await _told(client, "harbour", *texts)
    assert await asyncio.to_thread(embedder.waiting.wait, 60)
    return [*texts, "Noted."]


@pytest.mark.usefixtures("ingesting")
@pytest.mark.parametrize("topic", ["harbour", "elsewhere"])
async def test_a_new_chat_is_answered_with_memory_while_another_is_being_stored(client: Client, topic: str) -> None:
    out = await _told(client, topic, QUESTION)
    assert bool(out["injected_chunks"]) == (topic == "harbour")


async def test_a_conversation_goes_on_while_it_is_being_stored_itself(
    client: Client, ingesting: list[str], embedder: Gated
) -> None:
    assert (await _told(client, "harbour", *ingesting, QUESTION))["injected_chunks"]
    assert not embedder.gate.is_set()


@pytest.mark.usefixtures("ingesting")
async def test_corrections_are_durable_while_a_conversation_is_being_stored(client: Client) -> None:
    [named] = [chunk["id"] for chunk in (await _told(client, "harbour", QUESTION))["injected_chunks"]]
    correction = {"chunk_ids": [named], "action": "Unhelpful", "reason": "it moved"}
    assert "signals" not in await _told(client, "harbour", "It moved.", corrections=[correction])
    about = await asyncio.to_thread(client.daemon.encoder.embed_parts, [QUESTION], 60)
    snapshot = client.daemon.store.topic("harbour").snapshot()
    assert min(snapshot.read(hit.place).utility_steps for hit in search(snapshot, about, 10)) < 0


async def test_a_correction_whose_client_left_and_asked_again_is_applied(client: Client, embedder: Gated) -> None:
    await _told(client, "harbour", FACT)
    await client.stored("harbour")
    shown = (await _told(client, "harbour", QUESTION))["injected_chunks"][0]["id"]  # best first: the fact
    update = {"chunk_ids": [shown], "action": "Update", "reason": "moved", "content": "The spare key is in the shed."}
    asked = {"topic_id": "harbour", "corrections": [update]}
    embedder.gate.clear()
    embedder.waiting.clear()
    leaving = asyncio.create_task(client.ask("Thanks, noted.", memory_in=asked))
    assert await asyncio.to_thread(embedder.waiting.wait, 60)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await until(lambda: client.daemon.metrics.in_flight == 0)
    embedder.gate.set()
    _, _, answer = await client.ask("Thanks, noted.", memory_in=asked)
    assert answer["memory_out"].get("signals", []) == []
    topic = await client.daemon.topics.get("harbour")
    chunk = topic.buffer.resolve(shown)
    assert chunk is not None
    uuid = chunk.uuid

    def is_applied() -> bool:
        entry = topic.log.snapshot().find(uuid)
        return entry is not None and entry.status is Status.DEPRECATED

    await until(is_applied)  # the second answer need not wait for what the first request began


# Requests go first, and what is stored in the background is stored all the same


def test_it_begins_nothing_in_the_gap_between_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "WAIT_SECONDS_MAX", 60.0)
    monkeypatch.setattr(priority, "WAITS_MAX", float("inf"))
    monkeypatch.setattr(priority, "QUIET_SECONDS", 0.2)
    requests = priority.Priority()
    work = requests.for_background()
    with requests.held():
        pass
    released = time.monotonic()
    work.give_way()
    assert time.monotonic() - released >= 0.15


def test_where_requests_leave_no_gap_it_goes_on_after_a_while() -> None:
    first = Priority()
    work = first.for_background()
    with first.held():
        for _ in range(3):
            work.give_way()  # would never return if it waited for the request


def test_a_daemon_rests_while_other_programs_want_the_processor_and_a_command_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delayed, rested = itertools.count(), list[float]()
    monkeypatch.setattr(priority, "DELAYS", without_rests.DELAYS)
    monkeypatch.setattr(priority, "_delayed_seconds", lambda: float(next(delayed)))
    monkeypatch.setattr(time, "sleep", rested.append)
    for is_awaited, rests in ((False, [priority.WAIT_SECONDS_MAX] * 2), (True, [])):
        work = Priority(is_awaited=is_awaited).for_background()
        rested.clear()
        for _ in range(3):
            work.give_way()
        assert rested == rests


# One huge request: it is answered, and nobody else waits for it


CALLS = 100_000
SHARE_MAX = 1 / 3
"""Of the time that the request takes; it was 3/4 when it was read on the event loop."""


def test_a_request_with_a_hundred_thousand_calls_holds_up_nobody(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    upstream.answer = lambda _: Response(
        (b'{"choices":[{"index":0,"message":{"role":"assistant","content":"Yes."}}]}',)
    )
    daemon = make_daemon(upstream.url).start()
    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": f"call_{number}", "type": "function", "function": function} for number in range(CALLS)]
    messages = [
        {"role": "user", "content": "Look everywhere."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "Here it is."},
    ]
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    daemon.chat([{"role": "user", "content": "Hello."}])  # what is loaded when it is needed first
    waited: list[float] = []
    is_answered = threading.Event()

    def others() -> None:
        connection = http.client.HTTPConnection(urlsplit(daemon.base_url).netloc)
        while not is_answered.is_set():
            began = time.monotonic()
            connection.request("GET", "/memd/health")
            connection.getresponse().read()
            waited.append(time.monotonic() - began)
        connection.close()

    beside = threading.Thread(target=others)
    beside.start()
    began = time.monotonic()
    answer = ask(f"{daemon.base_url}/v1/chat/completions", body)
    took = time.monotonic() - began
    is_answered.set()
    beside.join()
    assert (answer.status, answer.headers["X-Memory-Status"]) == (200, "none")
    assert upstream.chats[-1].body == body
    assert max(waited) < took * SHARE_MAX, (took, sorted(waited)[-5:])
