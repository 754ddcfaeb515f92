"""A client that sends only what is new (`X-Memory-History: daemon`): memd puts the live turns in front of it."""

from __future__ import annotations

import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess
from recording_upstream import RecordingUpstream, Request, Response
from strict_llama import REPLY_HEADER, StrictLlama

from memd.conversation.events import decode_event
from memd.conversation.hot_buffer import HotBuffer
from memd.store.disk import LocalDisk
from memd.store.log.journal import read_journal

THIN = {"X-Memory-History": "daemon"}
KILLS = 5


def shown(upstream: RecordingUpstream) -> list[tuple[str, str]]:
    """Role and text of the messages that the model was shown last."""
    body = json.loads(upstream.chats[-1].body)
    return [(message["role"], message["content"]) for message in body["messages"]]


def say(daemon: DaemonProcess, text: str, **headers: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    assert daemon.chat(messages, headers={**THIN, **headers}).status == 200


def test_the_live_turns_stand_before_what_is_new_also_after_a_restart(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    say(served, "hello")
    say(served, "hello")  # the same words again are a new turn, not the conversation's first
    served.restart()
    say(served, "goodbye")
    roles = [role for role, _ in shown(upstream)]
    texts = [text for role, text in shown(upstream) if role == "user"]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert texts == ["hello", "hello", "goodbye"]


def answers_in_journal(daemon: DaemonProcess) -> int:
    """The answers that the journal has, read as a start would."""
    buffer = HotBuffer(lambda: "new", 64)
    buffer.replay([decode_event(one) for one in read_journal(daemon.data_dir / "default" / "hot.log", LocalDisk())])
    roles = [one.message.role for talk in buffer.conversations() for one in talk.messages if one.message is not None]
    return roles.count("assistant")


@pytest.mark.parametrize(
    ("fsync", "headers", "stream"),
    [("always", THIN, True), ("interval", THIN, False), ("interval", THIN, True), ("always", {}, False)],
)
def test_a_daemon_killed_right_after_the_complete_answer_has_it_in_the_journal(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, fsync: str, headers: dict[str, str], stream: bool
) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"journal_fsync": fsync, "store_after_seconds": 3600}})
    for number in range(KILLS):
        daemon.start()
        body = {"model": "tiny", "stream": stream, "messages": [{"role": "user", "content": f"Question {number}"}]}
        asked = urllib.request.Request(
            f"{daemon.base_url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Memory-Session": str(number), **headers},
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()
        daemon.kill()
        assert answers_in_journal(daemon) == number + 1


def asked(daemon: DaemonProcess, messages: str | list[dict[str, Any]], **headers: str) -> int:
    new = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return daemon.chat(new, headers={**THIN, **headers}).status


CALLS = [{"id": name, "type": "function", "function": {"name": "read", "arguments": "{}"}} for name in ("one", "two")]
RESULTS = [{"role": "tool", "tool_call_id": name, "content": f"the file {name}"} for name in ("one", "two")]


@pytest.fixture
def strict(upstream: RecordingUpstream) -> StrictLlama:
    strict = StrictLlama(8192)
    strict.replies["calls"] = {"role": "assistant", "content": None, "tool_calls": CALLS}
    strict.replies["says and calls"] = {"role": "assistant", "content": "I look.", "tool_calls": CALLS}
    upstream.answer, upstream.answers_all = strict, True
    return strict


def prompt(strict: StrictLlama) -> list[tuple[str, str | None]]:
    assert not strict.prompts[-1].problems
    return [(one["role"], one.get("content")) for one in strict.prompts[-1].messages]


def fail_once(upstream: RecordingUpstream, strict: StrictLlama) -> None:
    """The next request to the model fails."""

    def failing(request: Request) -> Response:
        if not request.target.endswith("/chat/completions"):
            return strict(request)
        upstream.answer = strict
        return Response((b'{"error":{"code":503,"message":"overloaded"}}',), status=503)

    upstream.answer = failing


def test_questions_that_failed_stand_in_front_of_the_next_one(
    served: DaemonProcess, upstream: RecordingUpstream, strict: StrictLlama
) -> None:
    assert asked(served, "My name is Ann.") == 200
    for question in ("What is my name?", "Are you there?"):
        fail_once(upstream, strict)
        assert asked(served, question) == 503
    for question, said in (("Hello?", "What is my name?\n\nAre you there?\n\nHello?"), ("And now?", "And now?")):
        assert asked(served, question) == 200
        assert prompt(strict)[-1] == ("user", said)
    served.restart()
    assert asked(served, "After the restart?") == 200
    users = [text for role, text in prompt(strict) if role == "user"]
    assert users == [
        "My name is Ann.",
        "What is my name?\n\nAre you there?\n\nHello?",
        "And now?",
        "After the restart?",
    ]


@pytest.mark.parametrize("results", [0, 1], ids=["no result", "one of two"])
def test_a_question_instead_of_the_results_leaves_the_calls_out(
    served: DaemonProcess, strict: StrictLlama, results: int
) -> None:
    strict.allowed[""] = frozenset(["a call without its result"]) if results else frozenset()
    assert asked(served, "Do it", **{REPLY_HEADER: "calls"}) == 200
    assert not results or asked(served, RESULTS[:1], **{REPLY_HEADER: "none"}) == 400
    assert asked(served, "Never mind.") == 200
    assert prompt(strict) == [("user", "Do it\n\nNever mind.")]
    assert asked(served, "Thanks.", **{REPLY_HEADER: "says and calls"}) == 200
    assert asked(served, "Stop.") == 200
    assert prompt(strict)[2:] == [("user", "Thanks."), ("assistant", "I look."), ("user", "Stop.")]


def test_results_without_an_answer_stay_and_the_next_question_is_valid(
    served: DaemonProcess, upstream: RecordingUpstream, strict: StrictLlama
) -> None:
    assert asked(served, "Do it", **{REPLY_HEADER: "calls"}) == 200
    fail_once(upstream, strict)
    assert asked(served, RESULTS) == 503
    assert asked(served, RESULTS) == 200, "a retry"
    fail_once(upstream, strict)
    assert asked(served, [{"role": "user", "content": "And?"}]) == 503
    assert asked(served, "Again", **{REPLY_HEADER: "calls"}) == 200
    fail_once(upstream, strict)
    assert asked(served, RESULTS) == 503
    assert asked(served, "What was in them?") == 200
    shown = prompt(strict)
    assert shown[-4:] == [
        ("tool", "the file one"),
        ("tool", "the file two"),
        ("assistant", "[no answer]"),
        ("user", "What was in them?"),
    ]
    assert ("user", "And?\n\nAgain") in shown


def test_the_second_of_two_requests_at_once_stands_behind_the_first(
    served: DaemonProcess, upstream: RecordingUpstream, strict: StrictLlama
) -> None:
    both = threading.Barrier(2)

    def together(request: Request) -> Response:
        if request.target.endswith("/chat/completions"):
            both.wait(60)
        return strict(request)

    upstream.answer = together
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda text: asked(served, text), ("First?", "Second?"))) == [200, 200]
    upstream.answer = strict
    assert sorted(len(one.messages) for one in strict.prompts) == [1, 1]
    other = "How warm is the sea in July?"  # near to none of the two, so that it is the prompt's last words
    assert asked(served, other) == 200
    assert prompt(strict)[-1] == ("user", other)
