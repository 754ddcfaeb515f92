"""`/v1/responses` on a real llama.cpp: the same memory as behind chat completions, and nothing else that is different.

Rule: the model is the witness of what was in its prompt, the upstream asked directly the witness of what it would say.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from conftest import REPLY, REPLY_WITH_MEMORY, WINDOW, MakeDaemon
from daemon_process import Answer, DaemonProcess, Headers, Stream, ask, user
from openai_responses import TOOL, TOOL_ARGUMENTS
from recording_upstream import RecordingUpstream, Request, Response

from memd.wire.chat import CHAT
from memd.wire.responses import RESPONSES

FORGETFUL = "".join(REPLY)
REMEMBERING = "".join(REPLY_WITH_MEMORY)
FACT = "Please note: the release word for the lighthouse lamp is cinnamon-42, written on the plate."
QUESTION = "What is the release word for the lighthouse lamp?"
TOOLS = [TOOL]


@pytest.fixture(scope="module")
def server_url(llama: str) -> str:
    return llama


@pytest.fixture
def daemon(in_topic: DaemonProcess) -> DaemonProcess:
    """In front of the real llama.cpp."""
    return in_topic


def respond(daemon: DaemonProcess, given: object, headers: Headers | None = None, **more: Any) -> Answer:
    """A response, not streaming; `more` are further members of the body."""
    return ask(f"{daemon.base_url}/v1/responses", {"model": "tiny", "input": given, **more}, headers=headers)


def streamed(daemon: DaemonProcess, given: object, **more: Any) -> list[dict[str, Any]]:
    """The events of a streamed response."""
    with opened(daemon, given, **more) as stream:
        return list(stream)


def opened(daemon: DaemonProcess, given: object, **more: Any) -> Stream:
    """A streamed response, open: iterate over it, or leave it."""
    body = json.dumps({"model": "tiny", "input": given, "stream": True, **more}).encode()
    request = urllib.request.Request(f"{daemon.base_url}/v1/responses", body, {"Content-Type": "application/json"})
    return Stream(urllib.request.urlopen(request, timeout=120))


def text_of(response: dict[str, Any]) -> str:
    """What is said in a response."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


def reply_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return text_of(answer.json)


@pytest.mark.parametrize("as_items", [False, True], ids=["string", "items"])
def test_a_fact_told_through_chat_completions_is_recalled_in_a_response(daemon: DaemonProcess, as_items: bool) -> None:
    assert daemon.chat([user(FACT)]).reply == FORGETFUL
    answer = respond(daemon, [user(QUESTION)] if as_items else QUESTION, instructions="Be brief.")
    assert reply_of(answer) == REMEMBERING
    assert answer.headers["X-Memory-Status"] == "injected"
    assert "memory_out" not in answer.json


def test_one_conversation_goes_on_through_the_other_api(daemon: DaemonProcess) -> None:
    first = respond(daemon, FACT)
    history = [user(FACT), {"role": "assistant", "content": reply_of(first)}, user("And the boat?")]
    second = daemon.chat(history)
    output = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": second.reply}]}
    reply_of(respond(daemon, [history[0], *first.json["output"], history[2], output, user("And the goat?")]))
    daemon.wait_stored(FACT, "boat")
    contents = [entry["content"] for entry in daemon.export()]
    assert sum(FACT in content for content in contents) == 1
    assert sum("boat" in content for content in contents) == 1


def test_memory_out_is_in_the_body_and_on_the_event_that_ends_the_stream(daemon: DaemonProcess) -> None:
    respond(daemon, FACT, metadata={"memory_in": json.dumps({"topic_id": "lamp"})})
    answer = respond(daemon, QUESTION, metadata={"memory_in": json.dumps({"topic_id": "lamp"}), "user": "u"})
    [chunk] = answer.json["memory_out"]["injected_chunks"]
    assert chunk["topic_id"] == "lamp"
    assert answer.headers["X-Memory-Injected"] == chunk["id"]
    events = streamed(daemon, "Quickly: " + QUESTION, memory_in={"topic_id": "lamp"})
    *others, last = events
    assert last["type"] == "response.completed"
    assert text_of(last["response"]) == REMEMBERING
    assert chunk["id"] in [one["id"] for one in last["memory_out"]["injected_chunks"]]
    assert not any("memory_out" in event for event in others)


def test_a_streamed_reply_is_recognised_in_the_next_request_and_stored_once(
    make_daemon: MakeDaemon, llama: str
) -> None:
    daemon = make_daemon(llama).start()
    history: list[Any] = [user(FACT)]
    for question in ("Is the lamp lit?", "Is the door shut?"):
        history += streamed(daemon, history)[-1]["response"]["output"]
        history.append(user(question))
    streamed(daemon, history)
    daemon.restart()
    streamed(daemon, history)
    daemon.wait_stored("cinnamon-42", "Is the door shut?")
    contents = [entry["content"] for entry in daemon.export()]
    assert len(contents) == len(set(contents))
    assert sum("cinnamon-42" in content for content in contents) == 1


def test_a_thin_client_sends_only_what_is_new(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    upstream.answer = response_answer
    daemon = make_daemon(upstream.url).start()
    for text in ("hello", "goodbye"):
        assert respond(daemon, text, {"X-Memory-History": "daemon"}).status == 200
    sent = json.loads(upstream.requests[-1].body)["input"]
    assert [(item["role"], item["content"]) for item in sent] == [
        ("user", "hello"),
        ("assistant", [{"type": "output_text", "text": "Noted.", "annotations": []}]),
        ("user", "goodbye"),
    ]


def response_answer(request: Request) -> Response:
    """A short reply to a response request."""
    part = {"type": "output_text", "text": "Noted.", "annotations": []}
    output = [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}]
    return Response((json.dumps({"id": "resp_1", "object": "response", "output": output}).encode(),))


@pytest.mark.parametrize(
    "body",
    [
        {"model": "tiny"},
        {"model": "tiny", "input": 5},
        {"model": "tiny", "input": [{"type": "item_reference", "id": "msg_1"}]},
        {"model": "tiny", "input": [{"type": "message", "role": "user", "content": [{"type": "odd"}]}]},
        {"model": "tiny", "input": "x", "previous_response_id": "resp_1"},
        {"model": "tiny", "input": "x" * 2 * WINDOW, "stream": True},
    ],
)
def test_an_error_of_the_upstream_comes_through_as_it_is(
    daemon: DaemonProcess, llama: str, body: dict[str, Any]
) -> None:
    direct = ask(f"{llama}/v1/responses", body)
    through = ask(f"{daemon.base_url}/v1/responses", body)
    assert direct.status >= 400
    assert (through.status, through.body) == (direct.status, direct.body)


def test_the_model_s_prompt_with_a_block_is_the_one_of_chat_completions(llama: str) -> None:
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        user("What is on the shelf?"),
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": TOOL_ARGUMENTS}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Dust."},
        {"role": "assistant", "content": "Dust."},
        {"role": "user", "content": [{"type": "text", "text": "And the word?"}]},
    ]
    items: list[Any] = [
        user("What is on the shelf?"),
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": TOOL_ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Dust."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Dust."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And the word?"}]},
    ]
    counts = []
    for api, body in ((CHAT, {"messages": chat}), (RESPONSES, {"input": items, "instructions": "Be brief."})):
        request = api.parse(json.dumps({"model": "tiny", **body}).encode())
        blocks = {len(request.messages) - 1: "[memory]\n[mem:a3f9] user: It is cinnamon-42.\n[/memory]"}
        counts.append(ask(llama + api.count_path, api.encode(request, blocks=blocks)).json)
    assert counts[0] == counts[1]
    assert counts[0]["input_tokens"] > 100
