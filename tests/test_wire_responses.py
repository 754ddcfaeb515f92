"""Responses: read and captured as the chat messages they stand for, and changed no more than they must be."""

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import Dialect, Played, all_text, captured, cuts, events_stream, json_values, pieces, plain_values

from memd.errors import BadRequestBody
from memd.messages import Message, ToolCall
from memd.wire.chat import CHAT
from memd.wire.reply import SseEvent, Usage
from memd.wire.responses import RESPONSES, ResponsesCapture

Naming = Literal["openai", "llama.cpp"]
"""How events name the item that they are about: by `output_index`, or by `item_id` alone."""

USAGE = {"input_tokens": 22, "output_tokens": 5, "total_tokens": 27, "input_tokens_details": {"cached_tokens": 9}}
HEAD = {"id": "resp_1", "object": "response", "created_at": 1, "model": "tiny"}
REQUIRED = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}

namings = st.sampled_from(["openai", "llama.cpp"])
texts = st.builds(lambda text: ("message", text), all_text)
call_outputs = st.builds(
    lambda arguments: ("function_call", json.dumps(arguments)), st.dictionaries(all_text, st.integers() | all_text)
)
thoughts = st.builds(lambda text: ("reasoning", text), all_text)
outputs = st.lists(texts | call_outputs | thoughts, max_size=4).map(
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
    output: list[dict[str, Any]], at: list[int], naming: Naming = "llama.cpp", status: str = "completed"
) -> list[dict[str, Any]]:
    """The events of a stream with this output, its text and arguments cut at `at`."""
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {**HEAD, "status": "in_progress"}}]
    for place, done in enumerate(output):
        where: dict[str, Any] = {"output_index": place, "content_index": 0} if naming == "openai" else {}
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


def played(output: list[dict[str, Any]], at: list[int], naming: Naming) -> Played:
    whole = json.dumps({**HEAD, "status": "completed", "output": output, "usage": USAGE}).encode()
    stream = events_stream(*events_of(output, at, naming))
    return Played(stream, whole, lambda: echo_of_openai_client(output), Usage(22, 5, 9))


REFUSED = {**item("message", ""), "content": [{"type": "refusal", "refusal": "I cannot."}]}
BEGUN = events_of([item("message", "He")], [])[:2]
CALLED = [item("message", "Hi"), item("function_call", "{}", 1)]
CAPTURED: dict[str, tuple[list[dict[str, Any]], Message | None]] = {
    "an empty message": (events_of([item("message", "")], [])[:2], None),
    "a refusal": (
        [
            {"type": "response.output_item.added", "item": {**REFUSED, "content": []}},
            *({"type": "response.refusal.delta", "delta": piece} for piece in ("I can", "not.")),
        ],
        Message("assistant", "I cannot."),
    ),
    "an event whose type is no text": ([*BEGUN, {"type": [], "delta": "Ha"}], None),
    "nothing but the whole": (
        events_of(CALLED, [])[-1:],
        Message("assistant", "Hi", (ToolCall("call_1", "look", "{}"),)),
    ),
}


@given(outputs, cuts, namings, st.integers(min_value=0))
def test_a_stream_that_breaks_off_keeps_what_came(
    output: list[dict[str, Any]], text_cuts: list[int], naming: Naming, end: int
) -> None:
    events = events_of(output, text_cuts, naming)[:-1]
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


def test_a_refusal_is_the_text_of_the_reply_as_in_its_echo() -> None:
    reply = RESPONSES.parse_reply(json.dumps({"output": [REFUSED]}).encode())
    assert reply.message == Message("assistant", "I cannot.")


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


odd_output = st.fixed_dictionaries(
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
        "output": st.lists(odd_output) | json_values,
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
        "item": odd_output | json_values,
        "response": odd_responses | json_values,
        "delta": st.text() | json_values,
        "output_index": st.integers(0, 2) | json_values,
        "item_id": json_values,
        "error": json_values,
        "message": json_values,
    },
)

item_types = st.sampled_from(
    ["message", "function_call", "function_call_output", "custom_tool_call", "reasoning", "item_reference", "odd", 5]
)
part_types = st.sampled_from(["input_text", "output_text", "input_image", "input_file", "refusal", "odd"])
parts = st.fixed_dictionaries(
    {"type": part_types}, optional={"text": plain_values, "image_url": plain_values, "refusal": plain_values}
)


def odd_items(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": item_types | values,
            "role": st.sampled_from(["user", "assistant", "system", "developer"]) | values,
            "content": st.lists(parts | values, max_size=3) | values,
            "output": st.lists(parts | values, max_size=3) | values,
            "call_id": values,
            "name": values,
            "arguments": values,
            "input": values,
            "summary": values,
        },
    )


def body_of(given: Any, **members: Any) -> bytes:
    return json.dumps({"model": "tiny", "input": given, **members}).encode()


def messages_of(given: Any, **members: Any) -> list[Message]:
    return RESPONSES.parse(body_of(given, **members)).messages


def chat_digests(*messages: dict[str, Any]) -> list[bytes]:
    return CHAT.parse(json.dumps({"messages": list(messages)}).encode()).digests


def sent(body: bytes, **changes: Any) -> Any:
    return json.loads(RESPONSES.encode(RESPONSES.parse(body), **changes))


def said(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(text: str, **members: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [part], **members}


CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OTHER_CALL = {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


# Reading


@pytest.mark.parametrize(
    ("items", "chat"),
    [
        ("hi", [said("hi")]),
        ([said("hi")], [said("hi")]),
        ([{"type": "message", **said("hi")}], [said("hi")]),
        ([said([{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "you"}])], [said("hi\nyou")]),
        ([{"role": "developer", "content": "Be brief."}], [{"role": "developer", "content": "Be brief."}]),
        ([answered("yes")], [{"role": "assistant", "content": "yes"}]),
        ([{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "yes"}]),
        (
            [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [{"role": "assistant", "content": None, "refusal": "no"}],
        ),
        (
            [THOUGHT, answered("I look."), CALL, OTHER_CALL, RESULT, {**RESULT, "call_id": "c2"}],
            [
                {
                    "role": "assistant",
                    "content": "I look.",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
                        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
                {"role": "tool", "tool_call_id": "c2", "content": "42"},
            ],
        ),
        (
            [{**RESULT, "output": [{"type": "input_text", "text": "42"}]}],
            [{"role": "tool", "tool_call_id": "c1", "content": "42"}],
        ),
        (
            [
                {"type": "custom_tool_call", "call_id": "c1", "name": "sh", "input": "ls"},
                {"type": "custom_tool_call_output", "call_id": "c1", "output": "a b"},
            ],
            [
                {"role": "assistant", "tool_calls": [{"id": "c1", "custom": {"name": "sh", "input": "ls"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "a b"},
            ],
        ),
    ],
)
def test_a_conversation_has_the_digests_that_it_has_through_chat_completions(items: Any, chat: list[Any]) -> None:
    assert RESPONSES.parse(body_of(items)).digests == chat_digests(*chat)


def test_an_image_has_the_digest_that_it_has_through_chat_completions() -> None:
    url = "data:image/png;base64,AAAA"
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    chat = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"%b"}}]}]}' % url.encode()
    request = RESPONSES.parse(body_of([said([image])]))
    assert request.messages[0].text == "[image]"
    assert request.digests == CHAT.parse(chat).digests
    assert messages_of([said([{**image, "detail": "high"}])]) != request.messages


def test_the_items_of_one_reply_are_one_message_and_keep_their_bytes() -> None:
    body = b'{"input":[{"role":"user","content":"a"}, %b , %b,%b]}'
    call, text = b'{ "type":"function_call","name":"f" }', b'{"role":"assistant", "content":"b\\u00e9"}'
    request = RESPONSES.parse(body % (text, call, b'{"type":"function_call_output","output":"c"}'))
    assert [message.role for message in request.messages] == ["user", "assistant", "tool"]
    assert bytes(request.raw_messages[1]) == text + b"," + call
    assert request.messages[1] == Message("assistant", "bé", (ToolCall("", "f", ""),))
    assert RESPONSES.encode(request, leave_out={0}) == (
        b'{"input":[%b,%b,{"type":"function_call_output","output":"c"}]}' % (text, call)
    )


def test_reasoning_and_references_count_for_nothing_and_unknown_items_for_themselves() -> None:
    assert messages_of([THOUGHT, {"type": "item_reference", "id": "x"}]) == [Message("assistant", "")]
    one, other = (messages_of([{"type": "web_search_call", "id": name}])[0] for name in "ab")
    assert one.text == "[file]"
    assert one.content_digest != other.content_digest
    turned = b'{"input":[{"id":"a", "type" : "web_search_call"}]}'
    assert RESPONSES.parse(turned).messages == [one]
    assert messages_of([{"type": "computer_call_output", "call_id": "c", "output": {"x": 1}}])[0].role == "tool"


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":"\xff"}',
        b'{"input":"\\ud800"}',
        b'{"input":[{"type":"\\ud800"}]}',
        b'{"input":[{"type":"odd","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
    ],
)
def test_a_string_or_an_item_that_cannot_be_read_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestBody) as refusal:
        RESPONSES.parse(body)
    assert str(refusal.value)


@given(st.lists(odd_items(plain_values), max_size=4))
def test_items_of_any_shape_become_messages_and_are_written_as_they_came(items: list[dict[str, Any]]) -> None:
    body = body_of(items)
    request = RESPONSES.parse(body)
    lengths = {len(request.messages), len(request.digests), len(request.raw_messages), len(request.continues)}
    assert len(lengths) == 1
    assert RESPONSES.encode(request) is body
    assert sent(body_of(items, memory_in={})) == json.loads(body)


# Writing


def test_a_string_stays_one_until_something_is_placed_beside_it() -> None:
    body = b'{"input":"h\\u00e9", "memory_in":{},"x":1.0}'
    request = RESPONSES.parse(body)
    assert RESPONSES.encode(request) == b'{"input":"h\\u00e9","x":1.0}'
    assert RESPONSES.encode(request, blocks={0: "B"}) == (
        b'{"input":[{"type":"message","role":"user","content":"B\\n\\nh\\u00e9"}],"x":1.0}'
    )


users = st.builds(said, all_text | st.lists(parts, max_size=3))
turns = st.lists(users | st.sampled_from([answered("yes"), CALL, OTHER_CALL, RESULT, THOUGHT]), min_size=1, max_size=6)
ERRORS = (
    b'data: {"type":"error","code":"x","message":"slot died"}\n\n',
    b'data: {"type":"error","error":{"message":"slot died"}}\n\n',
    b'event: error\ndata: {"code":500,"message":"slot died","type":"server_error"}\n\n',
    b'data: {"error":{"code":500,"message":"slot died"}}\n\n',
)
IGNORED = b"data: no JSON\n\n" + events_stream({"type": "response.output_item.added", "item": 5})
DIALECT = Dialect(
    *(RESPONSES, "input", st.builds(lambda before, last: [*before, last], turns, users)),
    json_values | st.lists(odd_items(json_values), max_size=4),
    st.just({}),
    odd_events.map(lambda event: events_stream(event)),
    odd_responses,
    tuple(events_stream(*events_of([item("message", "He")], [])[:3]) + IGNORED + error for error in ERRORS),
    b'{"error":{"message":"slot died"}}',
    st.builds(played, outputs, cuts, namings),
    {name: (events_stream(*events), message) for name, (events, message) in CAPTURED.items()},
)


@given(turns, st.data())
def test_what_is_left_out_is_gone_and_the_rest_is_as_it_was(items: list[Any], data: st.DataObject) -> None:
    request = RESPONSES.parse(body_of(items))
    indices = st.integers(min_value=0, max_value=len(request.messages) - 1)
    gone = data.draw(st.sets(indices))
    left = json.loads(RESPONSES.encode(request, leave_out=gone))["input"]
    kept = [raw for position, raw in enumerate(request.raw_messages) if position not in gone]
    assert left == json.loads(b"[%b]" % b",".join(map(bytes, kept)))
