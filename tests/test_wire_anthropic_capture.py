"""Replies captured through Anthropic's API: recognised when the client echoes them, bounded, and never an error."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_wire_chat_capture import calls
from wire_cases import captured, cuts, events_stream, json_values, pieces, valid_text

from memd.messages import Message, ToolCall
from memd.wire.anthropic import ANTHROPIC, AnthropicCapture
from memd.wire.reply import Reply, SseEvent, Usage

Event = dict[str, Any]
PROMPT = {"cache_read_input_tokens": 30, "input_tokens": 1, "output_tokens": 0}


def start(**usage: int) -> Event:
    message: Event = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "tiny"}
    rest = {"stop_reason": None, "stop_sequence": None, "usage": usage or PROMPT}
    return {"type": "message_start", "message": {**message, **rest}}


def block(index: int, opening: Event, *deltas: Event) -> list[Event]:
    return [
        {"type": "content_block_start", "index": index, "content_block": opening},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def text_deltas(*said: str) -> list[Event]:
    return [{"type": "text_delta", "text": piece} for piece in said]


def call_block(index: int, number: int, called: str, *partial: str) -> list[Event]:
    opening = {"type": "tool_use", "id": f"call{number}", "name": called, "input": {}}
    return block(index, opening, *({"type": "input_json_delta", "partial_json": piece} for piece in partial))


def end(reason: str = "end_turn") -> list[Event]:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return [{"type": "message_delta", "delta": delta, "usage": {"output_tokens": 5}}, {"type": "message_stop"}]


def reply_events(said: str | None, tool_calls: list[tuple[str, str]], at: list[int]) -> list[Event]:
    """The events that llama.cpp sends for a reply: thinking, text in pieces, calls opened and then lengthened."""
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    events = [start(), {"type": "ping"}, *block(0, thinking, {"type": "thinking_delta", "thinking": "hm"})]
    if said is not None:
        events += block(1, {"type": "text", "text": ""}, *text_deltas(*pieces(said, at)))
    for number, (called, arguments) in enumerate(tool_calls):
        events += call_block(1 + (said is not None) + number, number, called, *pieces(arguments, at))
    return events + end("tool_use" if tool_calls else "end_turn")


@functools.cache
def official_client() -> Any:
    """The official client, which is answered with what it asks."""
    anthropic = pytest.importorskip("anthropic")  # here, for it takes seconds, as httpx2, with which it speaks HTTP
    httpx2 = pytest.importorskip("httpx2")

    def what_was_asked(request: Any) -> Any:
        [message] = json.loads(request.content)["messages"]
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, content=message["content"])

    transport = httpx2.MockTransport(what_was_asked)
    return anthropic.Anthropic(api_key="-", http_client=httpx2.Client(transport=transport))


def echo_of_anthropic_client(events: list[Event]) -> Any:
    """The message that the official client assembles from the events, as it sends it in the next request."""
    asked = events_stream(*events).decode()
    messages = [{"role": "user", "content": asked}]
    with official_client().messages.stream(model="tiny", max_tokens=9, messages=messages) as stream:
        content = stream.get_final_message().content
    return {"role": "assistant", "content": [block.to_dict(mode="json") for block in content]}


def echoed(message: Any) -> Message:
    [parsed] = ANTHROPIC.parse(json.dumps({"messages": [message]}).encode()).messages
    return parsed


@given(st.none() | valid_text, calls, cuts, cuts)
def test_a_captured_reply_is_recognised_in_what_the_anthropic_client_sends_next(
    said: str | None, tool_calls: list[tuple[str, str]], text_cuts: list[int], byte_cuts: list[int]
) -> None:
    events = reply_events(said, tool_calls, text_cuts)
    capture = captured(ANTHROPIC, events_stream(*events), byte_cuts)
    message = capture.reply().message
    assert message is not None and capture.finished and not capture.truncated
    echo = echoed(echo_of_anthropic_client(events))
    assert message.content_digest == echo.content_digest
    assert message.text == (said or "")


@given(st.none() | valid_text, calls)
def test_a_reply_is_the_same_message_streamed_or_not(said: str | None, tool_calls: list[tuple[str, str]]) -> None:
    content: list[Event] = [{"type": "thinking", "thinking": "hm", "signature": ""}]
    content += [] if said is None else [{"type": "text", "text": said}]
    content += [
        {"type": "tool_use", "id": f"call{number}", "name": called, "input": json.loads(arguments)}
        for number, (called, arguments) in enumerate(tool_calls)
    ]
    usage = {**PROMPT, "output_tokens": 5}
    answer = {"role": "assistant", "content": content, "stop_reason": "x", "usage": usage}
    reply = ANTHROPIC.parse_reply(json.dumps(answer).encode())
    streamed = captured(ANTHROPIC, events_stream(*reply_events(said, tool_calls, []))).reply()
    assert reply.message is not None and streamed.message is not None
    assert reply.message.content_digest == streamed.message.content_digest
    assert (reply.usage, reply.finish_reason) == (Usage(31, 5, 30), "x")
    assert streamed.usage == reply.usage


@pytest.mark.parametrize(
    ("usage", "prompt_tokens", "cached"),
    [
        (PROMPT, 31, 30),
        ({"input_tokens": 20}, 20, None),
        ({"input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 4}, 7, 2),
    ],
)
def test_the_prompt_is_what_was_read_and_what_the_cache_had(
    usage: dict[str, int], prompt_tokens: int, cached: int | None
) -> None:
    reply = captured(ANTHROPIC, events_stream(start(**usage), *end())).reply()
    assert reply.usage == Usage(prompt_tokens, 5, cached)
    whole = ANTHROPIC.parse_reply(json.dumps({"content": [], "usage": {**usage, "output_tokens": 5}}).encode())
    assert whole.usage == reply.usage


def test_parallel_calls_and_text_around_them_are_kept_apart() -> None:
    events = [start(), *block(0, {"type": "text", "text": "I "}, *text_deltas("read"))]
    events += [*call_block(1, 1, "f", '{"a"', ":1}"), *call_block(2, 2, "g")]
    events += block(3, {"type": "text", "text": ""}, *text_deltas("both"))
    message = captured(ANTHROPIC, events_stream(*events, *end("tool_use"))).reply().message
    calls = (ToolCall("call1", "f", '{"a":1}'), ToolCall("call2", "g", "{}"))
    assert message == Message("assistant", "I read\nboth", calls)


def test_an_error_within_the_stream_leaves_the_reply_unfinished() -> None:
    error = {"type": "error", "error": {"type": "api_error", "message": "slot died"}}
    begun = block(0, {"type": "text", "text": ""}, *text_deltas("He"))
    capture = captured(ANTHROPIC, events_stream(start(), *begun, error))
    assert not capture.finished
    reply = capture.reply(interrupted=True)
    assert (reply.error, reply.message) == ("slot died", Message("assistant", "He", interrupted=True))
    assert ANTHROPIC.parse_reply(json.dumps(error).encode()) == Reply(None, error="slot died")


def test_a_stream_that_breaks_off_keeps_what_came_of_text_and_calls() -> None:
    events = [start(), *block(0, {"type": "text", "text": ""}, *text_deltas("I read")), *call_block(1, 1, "f", '{"a')]
    capture = captured(ANTHROPIC, events_stream(*events)[:-5])
    assert not capture.finished
    calls = (ToolCall("call1", "f", '{"a'),)
    assert capture.reply(interrupted=True).message == Message("assistant", "I read", calls, interrupted=True)


def test_a_stream_of_empty_blocks_is_bounded() -> None:
    events = [one for index in range(100) for one in call_block(index, index, "f")]
    capture = captured(ANTHROPIC, events_stream(*events), bytes_max=1000)
    message = capture.reply().message
    assert capture.truncated and message is not None
    assert len(message.tool_calls) < 4


def test_memory_out_belongs_in_the_event_that_starts_the_message() -> None:
    events = [{"type": "ping"}, start(), *block(0, {"type": "text", "text": ""}), *end()]
    capture = AnthropicCapture()
    carrying = [capture.take(SseEvent(json.dumps(one).encode(), b"", 0)) for one in events]
    assert carrying == [False, True] + [False] * (len(events) - 2)


odd_deltas = st.dictionaries(
    st.sampled_from(["type", "text", "partial_json", "stop_reason"]),
    json_values | st.sampled_from(["text_delta", "input_json_delta"]),
)
odd_blocks = st.dictionaries(
    st.sampled_from(["type", "text", "id", "name", "input", "source"]),
    json_values | st.sampled_from(["text", "tool_use", "tool_result", "image"]),
)
kinds = ["message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop", "error"]
odd_events = st.fixed_dictionaries(
    {"type": st.sampled_from(kinds)},
    optional={
        "index": st.integers(0, 2) | json_values,
        "message": st.fixed_dictionaries({"usage": json_values}) | json_values,
        "content_block": odd_blocks | json_values,
        "delta": odd_deltas | json_values,
        "usage": st.dictionaries(st.sampled_from(["input_tokens", "output_tokens"]), json_values) | json_values,
        "error": json_values,
        "role": json_values,
        "content": st.lists(odd_blocks | json_values) | json_values,
    },
)
