"""Anthropic's messages: the same conversation as through chat completions, written again as it was, and captured."""

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_wire_chat import calls
from wire_cases import Dialect, Played, captured, cuts, events_stream, json_values, pieces, valid_text

from memd.messages import Message, ToolCall
from memd.wire.anthropic import ANTHROPIC
from memd.wire.chat import CHAT
from memd.wire.reply import Usage

Event = dict[str, Any]
ERROR = {"type": "error", "error": {"type": "api_error", "message": "slot died"}}
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


def played(said: str | None, tool_calls: list[tuple[str, str]], at: list[int]) -> Played:
    content: list[Event] = [{"type": "thinking", "thinking": "hm", "signature": ""}]
    content += [] if said is None else [{"type": "text", "text": said}]
    content += [
        {"type": "tool_use", "id": f"call{number}", "name": called, "input": json.loads(arguments)}
        for number, (called, arguments) in enumerate(tool_calls)
    ]
    usage = {**PROMPT, "output_tokens": 5}
    whole = json.dumps({"role": "assistant", "content": content, "stop_reason": "x", "usage": usage}).encode()
    events = reply_events(said, tool_calls, at)
    return Played(events_stream(*events), whole, lambda: [echo_of_anthropic_client(events)], Usage(31, 5, 30))


AROUND_CALLS = [start(), *block(0, {"type": "text", "text": "I "}, *text_deltas("read"))]
AROUND_CALLS += [*call_block(1, 1, "f", '{"a"', ":1}"), *call_block(2, 2, "g")]
AROUND_CALLS += [*block(3, {"type": "text", "text": ""}, *text_deltas("both")), *end("tool_use")]
USAGES = [
    (PROMPT, 31, 30),
    ({"input_tokens": 20}, 20, None),
    ({"input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 4}, 7, 2),
]
"""The prompt is what was read and what the cache had."""


def test_what_a_servers_own_tool_did_is_recognised_in_what_clients_send_next() -> None:
    searched = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
    results = [{"type": "web_search_result", "url": "https://e.org", "title": "Tides", "encrypted_content": "x"}]
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": results}
    asked = [{"type": "input_json_delta", "partial_json": piece} for piece in ('{"query"', ': "tides"}')]
    said = block(2, {"type": "text", "text": ""}, *text_deltas("High at noon."))
    events = [start(), *block(0, searched, *asked), *block(1, found), *said, *end()]
    message = captured(ANTHROPIC, events_stream(*events)).reply().message
    assert message is not None and message.text == "[file]\n[file]\nHigh at noon."
    content: list[dict[str, Any]] = [searched | {"input": {"query": "tides"}}, found]
    content.append({"type": "text", "text": "High at noon."})
    for blocks in (content, [dict(sorted(one.items())) for one in content]):
        assert echoed({"role": "assistant", "content": blocks}).content_digest == message.content_digest


def test_a_stream_that_breaks_off_keeps_what_came_of_text_and_calls() -> None:
    events = [start(), *block(0, {"type": "text", "text": ""}, *text_deltas("I read")), *call_block(1, 1, "f", '{"a')]
    capture = captured(ANTHROPIC, events_stream(*events)[:-5])
    assert not capture.finished
    calls = (ToolCall("call1", "f", '{"a'),)
    assert capture.reply(interrupted=True).message == Message("assistant", "I read", calls, interrupted=True)


odd_deltas = st.dictionaries(
    st.sampled_from(["type", "text", "partial_json", "stop_reason"]),
    json_values | st.sampled_from(["text_delta", "input_json_delta"]),
)
odd_content = st.dictionaries(
    st.sampled_from(["type", "text", "id", "name", "input", "source"]),
    json_values | st.sampled_from(["text", "tool_use", "tool_result", "image"]),
)
kinds = ["message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop", "error"]
odd_events = st.fixed_dictionaries(
    {"type": st.sampled_from(kinds)},
    optional={
        "index": st.integers(0, 2) | json_values,
        "message": st.fixed_dictionaries({"usage": json_values}) | json_values,
        "content_block": odd_content | json_values,
        "delta": odd_deltas | json_values,
        "usage": st.dictionaries(st.sampled_from(["input_tokens", "output_tokens"]), json_values) | json_values,
        "error": json_values,
        "role": json_values,
        "content": st.lists(odd_content | json_values) | json_values,
    },
)

PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CACHED = {"cache_control": {"type": "ephemeral"}}

block_types = st.sampled_from(["text", "image", "tool_result", "tool_use", "thinking", "document"])
blocks = st.fixed_dictionaries(
    {"type": block_types},
    optional={
        "text": valid_text,
        "source": st.just(PNG["source"]),
        "tool_use_id": st.sampled_from("ab"),
        "content": valid_text,
        "cache_control": st.just({"type": "ephemeral"}),
    },
)
contents = st.none() | valid_text | st.lists(blocks, max_size=5)
anthropic_messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents})
odd_blocks = st.dictionaries(
    st.sampled_from(["type", "text", "source", "id", "name", "input", "tool_use_id", "content"]),
    json_values | st.sampled_from(["text", "image", "tool_use", "tool_result"]),
)
odd_messages = st.fixed_dictionaries(
    {}, optional={"role": st.just("user") | json_values, "content": st.lists(odd_blocks | json_values) | json_values}
)
odd_bodies = st.dictionaries(
    st.sampled_from(["model", "stream", "max_tokens", "system", "tools", "metadata", "memory_in"]), json_values
)


def body_of(*messages: Any, **members: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": list(messages), **members}).encode()


def parsed(*messages: Any) -> list[Message]:
    return ANTHROPIC.parse(body_of(*messages)).messages


def sent(body: bytes, **changes: Any) -> Any:
    return json.loads(ANTHROPIC.encode(ANTHROPIC.parse(body), **changes))


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def use(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


# Reading


def test_a_conversation_has_the_digests_that_it_has_through_chat_completions() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    anthropic = [
        {"role": "user", "content": [text("look", **CACHED), {**PNG, **CACHED}, url]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                text("I read."),
                use("1", "read", {"b": 1, "a": [1.0]}),
                use("2", "list", {}),
            ],
        },
        {"role": "user", "content": [result("1", "one"), result("2", [text("two"), PNG], is_error=True), text("so?")]},
        {"role": "assistant", "content": "Done."},
    ]
    images = ["data:image/png;base64,AAAA", "http://x/y.png"]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"a":[1],"b":1}'}},
        {"id": "2", "type": "function", "function": {"name": "list", "arguments": ""}},
    ]
    chat = [
        {"role": "user", "content": [text("look"), *parts]},
        {"role": "assistant", "content": "I read.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": [text("two"), parts[0]]},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": [text("Done.")]},
    ]
    through_chat = json.dumps({"messages": chat}, separators=(",", ":")).encode()
    assert ANTHROPIC.parse(body_of(*anthropic)).digests == CHAT.parse(through_chat).digests


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([text("a"), text("b", citations=[])], "a\nb"),
        (["a", {"text": "b"}], "a\nb"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking", "data": "x"}, text("a")], "a"),
        ([{"type": "document", "source": {}}, {"type": "image"}, {"type": "image", "source": 5}, 7], 4),
        ([text("a"), {"type": "text"}], "a\n"),
        ({"type": "tool_result"}, '{"type": "tool_result"}'),
        ('say "tool_result"', 'say "tool_result"'),
    ],
)
def test_the_text_of_a_message_is_read_from_every_form_of_content(content: Any, said: str | int) -> None:
    [message] = parsed({"role": "user", "content": content})
    if isinstance(said, int):
        assert len(message.attachments) == said
    else:
        assert message == Message("user", said)


@pytest.mark.parametrize("content", ["", [], None, [text("")]])
def test_a_tool_that_answered_nothing_is_one_empty_message(content: Any) -> None:
    [message] = parsed({"role": "user", "content": [result("1", content)]})
    assert message == Message("tool", "", tool_call_id="1")


def test_a_request_that_goes_on_with_a_thread_of_the_upstream_s_is_left_to_it() -> None:
    message = {"role": "user", "content": [result("1", "one")]}
    asked = body_of(message, thread={"type": "continue", "previous_message_id": "m"}, memory_in={})
    request = ANTHROPIC.parse(asked)
    assert request.goes_on_with == "thread m" and ANTHROPIC.encode(request) == asked
    for thread in ({"type": "create"}, {}, None, 5, "continue", {"type": 5}):
        assert not ANTHROPIC.parse(body_of(message, thread=thread)).goes_on_with


# Writing


@given(st.lists(anthropic_messages, max_size=5), st.sampled_from([{}, {"memory_in": {}}]))
def test_pieces_joined_again_are_the_elements_that_they_came_from(messages: list[Any], more: dict[str, Any]) -> None:
    assert sent(body_of(*messages, **more)) == json.loads(body_of(*messages))


def test_every_block_keeps_its_bytes_and_its_place() -> None:
    content = [b'{ "type":"tool_result" , "tool_use_id":"1","n": 1.00 }', b'{"type":"text","text":"\\u0041","q":{ }}']
    body = b'{"messages":[{"role":"user","content":[%s]}],"memory_in":{}}' % b", ".join(content)
    assert ANTHROPIC.encode(ANTHROPIC.parse(body)) == (
        b'{"messages":[{"role":"user","content":[%s]}]}' % b",".join(content)
    )

    odd = [text("first"), result("1", "one"), text("second"), result("2", "two")]
    body = body_of({"role": "user", "content": odd}, memory_in={})
    assert [one.role for one in ANTHROPIC.parse(body).messages] == ["tool", "tool", "user"]
    assert sent(body)["messages"] == [{"role": "user", "content": odd}]
    assert sent(body, blocks={2: "B"})["messages"][0]["content"] == [text("B\n\n"), *odd]
    assert sent(body, leave_out={0})["messages"][0]["content"] == [odd[0], *odd[2:]]


def test_tool_results_leave_with_their_turn_and_the_text_beside_them_stays() -> None:
    asked = {"role": "user", "content": "read"}
    called = {"role": "assistant", "content": [use("1", "read", {}), use("2", "read", {})]}
    answered = {"role": "user", "content": [result("1", "one"), result("2", "two"), text("so?", **CACHED), PNG], "x": 1}
    body = body_of(asked, called, answered)
    assert sent(body, leave_out=range(4), blocks={4: "B"})["messages"] == [
        {"role": "user", "content": [text("B\n\n"), text("so?", **CACHED), PNG], "x": 1}
    ]
    assert sent(body, leave_out={4})["messages"][2]["content"] == [result("1", "one"), result("2", "two")]
    assert sent(body, leave_out={2, 3, 4})["messages"] == [asked, called]


def test_a_block_stands_behind_the_tool_results_and_before_the_rest() -> None:
    body = body_of({"role": "user", "content": [result("1", "one"), text("so?")]}, {"role": "user", "content": "and?"})
    assert sent(body, blocks={1: "B", 2: "C"})["messages"] == [
        {"role": "user", "content": [result("1", "one"), text("B\n\n"), text("so?")]},
        {"role": "user", "content": "C\n\nand?"},
    ]


user_messages = st.fixed_dictionaries(
    {"role": st.just("user"), "content": valid_text | st.lists(blocks.filter(lambda block: len(block) > 1), max_size=5)}
)
DIALECT = Dialect(
    *(ANTHROPIC, "messages", st.lists(user_messages, min_size=1, max_size=6)),
    st.lists(odd_messages | json_values, max_size=4),
    odd_bodies,
    odd_events.map(lambda event: events_stream(event)),
    odd_events,
    (events_stream(start(), *block(0, {"type": "text", "text": ""}, *text_deltas("He")), ERROR),),
    json.dumps(ERROR).encode(),
    st.builds(played, st.none() | valid_text, calls, cuts),
    {
        "calls between texts": (
            events_stream(*AROUND_CALLS),
            Message("assistant", "I read\nboth", (ToolCall("call1", "f", '{"a":1}'), ToolCall("call2", "g", "{}"))),
        )
    },
    [
        (
            events_stream(start(**usage), *end()),
            json.dumps({"content": [], "usage": {**usage, "output_tokens": 5}}).encode(),
            Usage(tokens, 5, cached),
        )
        for usage, tokens, cached in USAGES
    ],
    events_stream(*(one for index in range(100) for one in call_block(index, index, "f"))),
)


# Messages of memd's own


@pytest.mark.parametrize(
    ("arguments", "forwarded"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("{", {"arguments": "{"}), ("[1]", {"arguments": "[1]"})],
)
def test_an_encoded_call_has_an_object_as_its_input(arguments: str, forwarded: Any) -> None:
    message = Message("assistant", "I read.", (ToolCall("1", "read", arguments),))
    assert json.loads(bytes(ANTHROPIC.encode_message(message))) == {
        "role": "assistant",
        "content": [text("I read."), use("1", "read", forwarded)],
    }
    without_text = json.loads(bytes(ANTHROPIC.encode_message(Message("assistant", "", message.tool_calls))))
    assert [block["type"] for block in without_text["content"]] == ["tool_use"]
