"""Captured responses: recognised when the client echoes them, bounded, and never an error."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import all_text, captured, cuts, events_stream, json_values, pieces

from memd.messages import Message, ToolCall
from memd.wire.reply import SseEvent, Usage
from memd.wire.responses import RESPONSES, ResponsesCapture

Dialect = Literal["openai", "llama.cpp"]
"""How events name the item that they are about: by `output_index`, or by `item_id` alone."""

USAGE = {"input_tokens": 22, "output_tokens": 5, "total_tokens": 27, "input_tokens_details": {"cached_tokens": 9}}
HEAD = {"id": "resp_1", "object": "response", "created_at": 1, "model": "tiny"}
REQUIRED = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}

dialects = st.sampled_from(["openai", "llama.cpp"])
texts = st.builds(lambda text: ("message", text), all_text)
calls = st.builds(
    lambda arguments: ("function_call", json.dumps(arguments)), st.dictionaries(all_text, st.integers() | all_text)
)
thoughts = st.builds(lambda text: ("reasoning", text), all_text)
outputs = st.lists(texts | calls | thoughts, max_size=4).map(
    lambda told: [item(kind, text, number) for number, (kind, text) in enumerate(told)]
)


def item(kind: str, text: str, number: int = 0) -> dict[str, Any]:
    """An item as llama.cpp writes one that is done."""
    if kind == "message":
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
        members: dict[str, Any] = {"id": f"msg_{number}", "role": "assistant", "content": [part]}
    elif kind == "function_call":
        members = {"id": f"fc_{number}", "call_id": f"call_{number}", "name": "look", "arguments": text}
    else:
        thought = {"type": "reasoning_text", "text": text}
        members = {"id": f"rs_{number}", "summary": [], "content": [thought], "encrypted_content": ""}
    return {"type": kind, "status": "completed", **members}


def events_of(
    output: list[dict[str, Any]], at: list[int], dialect: Dialect = "llama.cpp", status: str = "completed"
) -> list[dict[str, Any]]:
    """The events of a stream with this output, its text and arguments cut at `at`."""
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {**HEAD, "status": "in_progress"}}]
    for place, done in enumerate(output):
        where: dict[str, Any] = {"output_index": place, "content_index": 0} if dialect == "openai" else {}
        where["item_id"] = done["id"]
        empty: dict[str, Any] = {"content": []} if done["type"] != "function_call" else {"arguments": ""}
        opening = {**done, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "item": opening, **where})
        kind = {"message": "output_text", "reasoning": "reasoning_text"}.get(done["type"], "function_call_arguments")
        whole = done["arguments"] if "arguments" in done else done["content"][0]["text"]
        events += [{"type": f"response.{kind}.delta", "delta": piece, **where} for piece in pieces(whole, at)]
        events.append({"type": f"response.{kind}.done", "text": whole, **where})
        events.append({"type": "response.output_item.done", "item": done, **where})
    response = {**HEAD, "status": status, "output": output, "usage": USAGE}
    return [*events, {"type": f"response.{status}", "response": response}]


def echo_of_openai_client(output: list[dict[str, Any]]) -> list[Any]:
    """The items that the official client hands out and takes in its next request."""
    responses = pytest.importorskip("openai.types.responses")  # here, for it takes seconds
    response = responses.Response.model_validate({**HEAD, **REQUIRED, "output": output})
    return [one.to_dict(mode="json") for one in response.output]


@given(outputs, cuts, cuts, dialects)
def test_a_captured_reply_is_recognised_in_what_the_openai_client_sends_next(
    output: list[dict[str, Any]], text_cuts: list[int], byte_cuts: list[int], dialect: Dialect
) -> None:
    capture = captured(RESPONSES, events_stream(*events_of(output, text_cuts, dialect)), byte_cuts)
    message = capture.reply().message
    assert capture.finished and not capture.truncated
    request = RESPONSES.parse(json.dumps({"input": echo_of_openai_client(output)}).encode())
    assert [message] if message is not None else request.messages == []
    if message is not None:
        assert [message.content_digest] == request.digests


@given(outputs, dialects)
def test_a_reply_is_the_same_message_streamed_or_not(output: list[dict[str, Any]], dialect: Dialect) -> None:
    body = json.dumps({**HEAD, "status": "completed", "output": output, "usage": USAGE}).encode()
    reply = RESPONSES.parse_reply(body)
    assert reply == captured(RESPONSES, events_stream(*events_of(output, [], dialect))).reply()
    assert (reply.usage, reply.finish_reason, reply.error) == (Usage(22, 5, 9), "completed", None)


@given(outputs, cuts, dialects, st.integers(min_value=0))
def test_a_stream_that_breaks_off_keeps_what_came(
    output: list[dict[str, Any]], text_cuts: list[int], dialect: Dialect, end: int
) -> None:
    events = events_of(output, text_cuts, dialect)[:-1]
    capture = captured(RESPONSES, events_stream(*events[: end % (len(events) + 1)]))
    message = capture.reply(interrupted=True).message
    assert not capture.finished
    assert message is None or message.interrupted
    whole = captured(RESPONSES, events_stream(*events)).reply().message
    if whole is not None and message is not None:
        assert whole.text.startswith(message.text)
        assert len(whole.tool_calls) >= len(message.tool_calls)


def test_a_broken_stream_keeps_what_was_said_of_an_item_that_never_was_done() -> None:
    events = events_of([item("message", "Hello there"), item("function_call", '{"a":1}', 1)], [5])
    begun = captured(RESPONSES, events_stream(*events[:3])).reply(True).message
    assert begun == Message("assistant", "Hello", interrupted=True)
    [*_, done, conclusion] = events
    assert done["type"] == "response.output_item.done" and conclusion["type"] == "response.completed"
    call = ToolCall("call_1", "look", '{"a":1}')
    cut = captured(RESPONSES, events_stream(*events[:-3])).reply(True).message
    assert cut == Message("assistant", "Hello there", (call,), interrupted=True)


def test_a_reply_that_reached_its_bound_is_finished_and_one_that_failed_is_not() -> None:
    output = [item("message", "Hi")]
    bounded = captured(RESPONSES, events_stream(*events_of(output, [], status="incomplete")))
    assert (bounded.finished, bounded.reply().finish_reason) == (True, "incomplete")
    failed = captured(RESPONSES, events_stream(*events_of(output, [], status="failed")))
    assert (failed.finished, failed.reply().error) == (False, "the response failed")
    told = {"type": "response.failed", "response": {"status": "failed", "error": {"code": "x", "message": "slot died"}}}
    assert captured(RESPONSES, events_stream(told)).reply().error == "slot died"


@pytest.mark.parametrize(
    "told",
    [
        b'data: {"type":"error","code":"x","message":"slot died"}\n\n',
        b'data: {"type":"error","error":{"message":"slot died"}}\n\n',
        b'event: error\ndata: {"code":500,"message":"slot died","type":"server_error"}\n\n',
        b'data: {"error":{"code":500,"message":"slot died"}}\n\n',
    ],
)
def test_an_error_within_the_stream_leaves_the_reply_unfinished(told: bytes) -> None:
    capture = captured(RESPONSES, events_stream(*events_of([item("message", "He")], [])[:3]) + told)
    assert (capture.reply().error, capture.finished) == ("slot died", False)
    assert capture.reply(interrupted=True).message == Message("assistant", "He", interrupted=True)


def test_a_refusal_is_the_text_of_the_reply_as_in_its_echo() -> None:
    done = {**item("message", ""), "content": [{"type": "refusal", "refusal": "I cannot."}]}
    message = captured(RESPONSES, events_stream(*events_of([item("message", "")], [])[:2])).reply().message
    assert message is None
    opened = [{"type": "response.output_item.added", "item": {**done, "content": []}}]
    opened += [{"type": "response.refusal.delta", "delta": piece} for piece in ("I can", "not.")]
    assert captured(RESPONSES, events_stream(*opened)).reply().message == Message("assistant", "I cannot.")
    assert RESPONSES.parse_reply(json.dumps({"output": [done]}).encode()).message == Message("assistant", "I cannot.")


def test_an_event_whose_type_is_no_text_says_nothing() -> None:
    begun = events_of([item("message", "He")], [])[:2]
    odd = {"type": [], "delta": "Ha"}
    assert captured(RESPONSES, events_stream(*begun, odd)).reply(True).message is None


def test_a_server_that_sends_nothing_but_the_whole_is_understood() -> None:
    output = [item("message", "Hi"), item("function_call", "{}", 1)]
    [*_, conclusion] = events_of(output, [])
    message = captured(RESPONSES, events_stream(conclusion)).reply().message
    assert message == Message("assistant", "Hi", (ToolCall("call_1", "look", "{}"),))


@given(st.integers(min_value=0, max_value=900), cuts, st.booleans())
def test_the_reply_is_kept_up_to_the_bound_at_a_whole_character(bytes_max: int, at: list[int], done: bool) -> None:
    text = "é€😀a" * 50
    events = events_of([item("message", text)], at)
    capture = captured(RESPONSES, events_stream(*(events if done else events[:-3])), bytes_max=bytes_max)
    message = capture.reply().message
    kept = message.text if message is not None else ""
    assert text.startswith(kept)
    assert len(kept.encode()) <= bytes_max
    assert capture.truncated == (kept != text)


def test_memory_out_belongs_in_the_event_that_ends_the_stream() -> None:
    for status in ("completed", "incomplete", "failed"):
        capture = ResponsesCapture()
        events = [SseEvent(json.dumps(one).encode(), b"", 0) for one in events_of([], [], status=status)]
        assert [capture.take(event) for event in events] == [False, True]


odd_items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "custom_tool_call", "odd"]) | json_values,
        "content": json_values,
        **dict.fromkeys(("id", "call_id", "name", "arguments"), json_values),
    },
)
odd_responses = st.fixed_dictionaries(
    {},
    optional={
        "output": st.lists(odd_items) | json_values,
        "usage": st.dictionaries(st.sampled_from(["input_tokens", "input_tokens_details"]), json_values) | json_values,
        "status": json_values,
        "error": json_values,
    },
)
event_types = st.sampled_from(
    [
        *(f"response.output_item.{end}" for end in ("added", "done")),
        *(f"response.{kind}.delta" for kind in ("output_text", "refusal", "function_call_arguments")),
        *(f"response.{end}" for end in ("completed", "incomplete", "failed")),
        "error",
    ]
)
odd_events = st.fixed_dictionaries(
    {},
    optional={
        "type": event_types | json_values,
        "item": odd_items | json_values,
        "response": odd_responses | json_values,
        "delta": st.text() | json_values,
        "output_index": st.integers(0, 2) | json_values,
        "item_id": json_values,
        "error": json_values,
        "message": json_values,
    },
)
