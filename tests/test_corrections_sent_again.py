"""A request with corrections that is sent again after a kill: they are applied, and once."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from archiver_stage import HashEmbedder
from conftest import MakeDaemon
from daemon_process import Answer, DaemonProcess, wait_until
from recording_upstream import RecordingUpstream, Request, Response, chat_answer, recording_upstream

FACT = "The spare key hangs behind the blue bicycle."
MOVED = "The spare key hangs in the shed."
QUESTION = "Where does the spare key hang?"
EMBEDDER = HashEmbedder()


class Gate:
    """Holds up the requests that have a text in them, once it is closed."""

    def __init__(self) -> None:
        self._text: bytes | None = None
        self._opened = threading.Event()
        self.reached = threading.Event()

    def close(self, text: str) -> None:
        self._text = text.encode()

    def open(self) -> None:
        self._text = None
        self._opened.set()

    def pass_through(self, request: Request) -> None:
        if self._text is not None and self._text in request.body:
            self.reached.set()
            self._opened.wait()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def daemon(make_daemon: MakeDaemon, upstream: RecordingUpstream, gate: Gate) -> Iterator[DaemonProcess]:
    """A daemon that is about to be killed, with an embedding server and a model that can be held up."""

    def embedded(request: Request) -> Response:
        gate.pass_through(request)
        vectors = EMBEDDER.embed_many(json.loads(request.body)["input"]).tolist()
        return Response((json.dumps({"data": [{"index": i, "embedding": v} for i, v in enumerate(vectors)]}).encode(),))

    def answered(request: Request) -> Response:
        gate.pass_through(request)
        return chat_answer(request)

    upstream.answer = answered
    with recording_upstream() as server:
        server.answers_all, server.answer = True, embedded
        embedding = {"model": "http", "url": f"{server.url}/v1", "name": "hash"}
        daemon = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 0}, "embedding": embedding}).start()
        daemon.chat([{"role": "user", "content": FACT}])
        daemon.wait_stored("blue bicycle")
        yield daemon
        gate.open()
        daemon.kill()


class Correcting:
    """A chat that was shown the chunk, and its next request, which corrects it."""

    def __init__(self, daemon: DaemonProcess, **correction: str) -> None:
        self._daemon = daemon
        history = [{"role": "user", "content": QUESTION}]
        answer = daemon.chat(history, memory_in={})
        shown = [chunk["id"] for chunk in answer.json["memory_out"]["injected_chunks"]]
        assert len(shown) == 1
        history += [
            {"role": "assistant", "content": answer.reply},
            {"role": "user", "content": "Thanks, that will do."},
        ]
        self._history = history
        self._memory_in: dict[str, Any] = {"corrections": [{"chunk_ids": shown, "reason": "checked", **correction}]}

    def send(self) -> Answer:
        return self._daemon.chat(self._history, memory_in=self._memory_in)

    def send_and_kill(self, gate: Gate) -> None:
        """Kill the daemon when the request has come to the gate and into the journal."""

        def send() -> None:
            with contextlib.suppress(OSError):
                self.send()

        sending = threading.Thread(target=send)
        sending.start()
        assert gate.reached.wait(60)
        journal = self._daemon.data_dir / "default" / "hot.log"
        wait_until(lambda: b"that will do" in journal.read_bytes(), lambda: "not in the journal")
        self._daemon.kill()
        sending.join()
        gate.open()
        self._daemon.start()


def newest(daemon: DaemonProcess) -> list[tuple[str, float]]:
    """The first lines of the live chunks about the key, with their multipliers."""
    live = (
        (entry["content"].split("\n")[0], entry["utility_multiplier"]) for entry in daemon.export() if entry["live"]
    )
    return [one for one in live if "spare key hangs" in one[0]]


def test_what_a_kill_has_kept_from_being_corrected_is_corrected_when_it_is_asked_again(
    daemon: DaemonProcess, gate: Gate
) -> None:
    correcting = Correcting(daemon, action="Update", content=MOVED)
    gate.close(MOVED)  # the embedding server has it, and nothing is in the log yet
    correcting.send_and_kill(gate)
    assert [content for content, _ in newest(daemon)] == [FACT]
    answer = correcting.send()
    assert answer.json["memory_out"].get("signals", []) == []
    assert [content for content, _ in newest(daemon)] == [MOVED]


def test_what_was_corrected_before_a_kill_is_not_corrected_twice(daemon: DaemonProcess, gate: Gate) -> None:
    correcting = Correcting(daemon, action="Helpful")
    gate.close("that will do")  # the model has the request, and the log the correction
    correcting.send_and_kill(gate)
    assert newest(daemon) == [(FACT, 1.5)]
    answer = correcting.send()
    assert answer.json["memory_out"].get("signals", []) == []
    assert newest(daemon) == [(FACT, 1.5)]
