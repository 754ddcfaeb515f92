"""Upstreams that take longer for an answer than a conversation may be idle."""

from __future__ import annotations

import threading

from conftest import MakeDaemon
from daemon_process import wait_until
from recording_upstream import RecordingUpstream, Request, Response, chat_answer

QUESTION = "Where does the spare key of the lighthouse hang?"
LOST = "Which day is the ferry late?"
CRATE, WHERE = "The crate ZQ48351 stands in hall V49932B.", "In which hall does the crate ZQ48351 stand?"


def test_a_question_waits_for_its_answer_however_long_the_model_takes(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    gate = threading.Event()

    def answer(request: Request) -> Response:
        if LOST.encode() in request.body:
            return Response((b'{"error": {"message": "broken"}}',), status=500)
        [body] = chat_answer(request).parts
        return Response((body[:1], body[1:]), gate=gate)

    upstream.answer = answer
    daemon = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 0.2, "idle_seconds": 1}}).start()
    asking = threading.Thread(target=daemon.chat, args=([{"role": "user", "content": QUESTION}],))
    asking.start()
    wait_until(lambda: bool(upstream.chats), lambda: "it was not asked")
    daemon.chat([{"role": "user", "content": LOST}])

    def stored() -> list[str]:
        return [entry["content"] for entry in daemon.export(settled=False)]

    wait_until(lambda: LOST in stored(), lambda: f"idle, and not stored: {stored()}")
    assert QUESTION not in stored(), "asked before that one"
    gate.set()
    asking.join()
    wait_until(lambda: any(text.startswith(f"{QUESTION}\n") for text in stored()), lambda: f"{stored()}")


def test_what_was_said_without_an_answer_is_found_in_the_next_chat_also_after_a_kill(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    def answer(request: Request) -> Response:
        if CRATE.encode() in request.body and WHERE.encode() not in request.body:
            return Response((b'{"error": {"message": "broken"}}',), status=500)
        return chat_answer(request)

    upstream.answer = answer
    daemon = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 300}}).start()
    daemon.chat([{"role": "user", "content": CRATE}])

    def is_found() -> bool:
        daemon.chat([{"role": "user", "content": WHERE}], {"X-Memory-Mode": "readonly"})
        return CRATE in upstream.chats[-1].body.decode()

    for _ in range(2):
        wait_until(is_found, lambda: "it is not found")
        daemon.kill()
        daemon.start()
