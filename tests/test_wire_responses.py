"""Responses requests: read as the chat messages they stand for, and changed no more than they must be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_wire_responses_capture import odd_events, odd_responses
from wire_cases import Dialect, all_text, events_stream, json_values, plain_values

from memd.errors import BadRequestBody
from memd.messages import Message, ToolCall
from memd.wire.chat import CHAT
from memd.wire.responses import RESPONSES, parse_items

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


def test_what_memd_needs_to_know_is_read() -> None:
    request = RESPONSES.parse(
        body_of("hi", stream=True, max_output_tokens=7, max_tokens=9, instructions="Be brief.", tools=[{"a": 1}])
    )
    assert (request.model, request.stream, request.max_tokens) == ("tiny", True, 7)
    assert request.messages == [Message("user", "hi")]
    assert request.standing_text == '"Be brief."[{"a": 1}]'
    assert request.continues == [False]


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


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
def test_a_request_that_does_not_stand_for_itself_is_forwarded_as_it_is(name: str) -> None:
    asked = body_of("hi", **{name: "resp_1"}, memory_in={})
    request = RESPONSES.parse(asked)
    assert request.goes_on_with == f'{name} "resp_1"' and RESPONSES.encode(request) == asked
    assert messages_of("hi", **{name: None}) == messages_of("hi", **{name: ""}) == [Message("user", "hi")]


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


def test_untouched_members_and_items_keep_their_bytes_and_their_order() -> None:
    untouched = b'{ "role":"user","z": 1.00, "content" : "h\\u00e9\\/ \xc3\xa9" }'
    body = b'{"b": 1.50,"input":[' + untouched + b',{"role":"user","content":[]}],"a":[ 1e5 ],"c":"\\u0041"}'
    assert RESPONSES.encode(RESPONSES.parse(body), blocks={1: "B"}) == (
        b'{"b":1.50,"input":['
        + untouched
        + b',{"role":"user","content":[{"type":"input_text","text":"B\\n\\n"}]}],"a":[ 1e5 ],"c":"\\u0041"}'
    )


users = st.builds(said, all_text | st.lists(parts, max_size=3))
turns = st.lists(users | st.sampled_from([answered("yes"), CALL, OTHER_CALL, RESULT, THOUGHT]), min_size=1, max_size=6)
DIALECT = Dialect(
    *(RESPONSES, "input", st.builds(lambda before, last: [*before, last], turns, users)),
    json_values | st.lists(odd_items(json_values), max_size=4),
    st.just({}),
    odd_events.map(lambda event: events_stream(event)),
    odd_responses,
)


@given(turns, st.data())
def test_what_is_left_out_is_gone_and_the_rest_is_as_it_was(items: list[Any], data: st.DataObject) -> None:
    request = RESPONSES.parse(body_of(items))
    indices = st.integers(min_value=0, max_value=len(request.messages) - 1)
    gone = data.draw(st.sets(indices))
    left = json.loads(RESPONSES.encode(request, leave_out=gone))["input"]
    kept = [raw for position, raw in enumerate(request.raw_messages) if position not in gone]
    assert left == json.loads(b"[%b]" % b",".join(map(bytes, kept)))


calls = st.lists(st.builds(ToolCall, all_text, all_text, st.just('{"a":1}')), max_size=3).map(tuple)
own_messages = (
    st.builds(Message, st.sampled_from(["user", "developer"]), all_text)
    | st.builds(Message, st.just("assistant"), all_text, calls)
    | st.builds(Message, st.just("tool"), all_text, tool_call_id=all_text)
)


@given(own_messages)
def test_a_message_of_ours_is_read_as_it_was_written(message: Message) -> None:
    assert parse_items(RESPONSES.encode_message(message)).content_digest == message.content_digest
