"""Ollama's own API: requests and replies as its clients send and read them, and whatever else may come."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_wire_chat import chat_messages
from wire_cases import Dialect, Played

from memd.messages import Message, ToolCall
from memd.wire.ollama import OLLAMA
from memd.wire.reply import Usage
from memd.wire.sideband import MemoryOut

OUT = MemoryOut(())
CALL = {"function": {"name": "read", "arguments": {"path": "log", "lines": 3}}}
PIECES: list[dict[str, Any]] = [
    {"content": "", "thinking": "Let me see."},
    {"content": "On it"},
    {"content": "."},
    {"content": "", "tool_calls": [{"id": "call_1", **CALL}]},
    {"content": "", "tool_calls": [{"function": {"name": "list", "arguments": {}}}]},
]
END = {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"}
ECHO = {"role": "assistant", "content": "On it.", "tool_calls": [CALL, {"function": {"name": "list", "arguments": {}}}]}
ASKED = {"role": "user", "content": "Hi", "images": ["aGVsbG8="]}
odd_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["role", "content", "images", "tool_calls", "tool_name", "function", "arguments", "x"]),
            inner,
        )
    ),
    max_leaves=12,
)
COUNTED = {"prompt_eval_count": 26, "eval_count": 5}
WHOLE = {"message": {**ECHO, "thinking": "Let me see."}, "done": True, "done_reason": "stop", **COUNTED}
EVENT = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]}


def lines(end: str = "\n") -> bytes:
    told = [{"message": {"role": "assistant", **piece}, "done": False} for piece in PIECES]
    return b"".join((json.dumps(line) + end).encode() for line in (*told, {**END, **COUNTED}))


DIALECT = Dialect(
    *(OLLAMA, "messages", st.lists(chat_messages, max_size=3).map(lambda told: [*told, ASKED])),
    st.lists(odd_values, max_size=4),
    st.dictionaries(st.sampled_from(["options", "stream", "tools"]), odd_values),
    odd_values.map(lambda value: json.dumps({"message": value, "done": value}).encode() + b"\n"),
    odd_values.map(lambda value: {"message": value, "done": value}),
    (b'{"message":{"role":"assistant","content":"He"},"done":false}\n{"error":"slot died"}\n',),
    b'{"error":"slot died"}',
    st.just(Played(lines(), json.dumps(WHOLE).encode(), lambda: [ECHO], Usage(26, 5, None))),
    {
        "what llama-server streams at this path": (
            b"data: " + json.dumps(EVENT).encode() + b"\n\ndata: [DONE]\n\n",
            Message("assistant", "Hi"),
        )
    },
)


def request_of(messages: list[Any], **more: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": messages, **more}).encode()


@given(st.lists(st.integers(1, 60), max_size=40), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_a_streamed_reply_is_captured_as_its_client_echoes_it_however_it_is_split(sizes: list[int], end: str) -> None:
    body, stream = lines(end), OLLAMA.new_stream(1 << 20, OUT)
    passed, start = b"", 0
    for size in [*sizes, len(body)]:
        passed += stream.feed(body[start : start + size])
        start += size
    passed += stream.flush()
    reply = stream.reply()
    echo = OLLAMA.parse(request_of([ECHO])).messages[0]
    assert stream.finished and not stream.truncated
    assert reply.message is not None and reply.message.content_digest == echo.content_digest
    assert (reply.usage and (reply.usage.prompt_tokens, reply.usage.completion_tokens), reply.finish_reason) == (
        (26, 5),
        "stop",
    )
    told = [json.loads(line) for line in passed.split(b"\n") if line.strip()]
    assert [list(line) for line in told if "memory_out" in line] == [["message", "done", "memory_out"]]
    without = [{name: value for name, value in line.items() if name != "memory_out"} for line in told]
    assert without == [json.loads(line) for line in body.split(b"\n") if line.strip()]


def test_what_llama_server_answers_whole_at_this_path_is_captured_too() -> None:
    message = {"role": "assistant", "content": "Hi"}
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    assert OLLAMA.parse_reply(json.dumps(whole).encode()).message == Message("assistant", "Hi")


def test_a_line_beyond_the_bound_is_skipped_and_the_next_one_is_read() -> None:
    stream = OLLAMA.new_stream(1 << 20, OUT)
    passed = b"".join(stream.feed(b"x" * (1 << 20)) for _ in range(6)) + stream.feed(b"\n") + stream.feed(lines())
    assert passed + stream.flush() == b"x" * (6 << 20) + b"\n" + lines()
    assert stream.finished and stream.truncated


@pytest.mark.parametrize(
    ("options", "max_tokens", "window"),
    [
        ({"num_predict": 128, "num_ctx": 8192}, 128, 8192),
        ({"num_predict": -1, "num_ctx": 0}, None, None),
        ({"num_predict": -2, "num_ctx": "8192"}, None, None),
        ([], None, None),
        (None, None, None),
    ],
)
def test_the_options_bound_reply_and_window(options: Any, max_tokens: int | None, window: int | None) -> None:
    request = OLLAMA.parse(request_of([{"role": "user", "content": "Hi"}], options=options))
    assert (request.max_tokens, request.window, request.stream) == (max_tokens, window, True)
    assert not OLLAMA.parse(request_of([], stream=False)).stream


def test_images_and_the_names_of_tools_count() -> None:
    asked = [
        {"role": "user", "content": "What is this?", "images": ["aGVsbG8=", "d29ybGQ="]},
        {"role": "tool", "content": "A lamp.", "tool_name": "look"},
    ]
    picture, result = OLLAMA.parse(request_of(asked)).messages
    assert picture.text == "What is this?\n[image]\n[image]" and len(set(picture.attachments)) == 2
    assert (result.name, result.text) == ("look", "A lamp.")


@pytest.mark.parametrize(
    "message",
    [
        Message("assistant", "On it.", tool_calls=(ToolCall("", "read", '{"path": "log"}'),)),
        Message("assistant", "", tool_calls=(ToolCall("", "read", "not an object"), ToolCall("", "list", "{}"))),
        Message("tool", "A lamp.", name="look"),
        Message("user", "Hi", name="ada"),
    ],
)
def test_a_message_that_is_put_in_again_has_objects_as_arguments(message: Message) -> None:
    encoded = json.loads(bytes(OLLAMA.encode_message(message)))
    assert all(isinstance(call["function"]["arguments"], dict) for call in encoded.get("tool_calls", ()))
    again = OLLAMA.parse(request_of([encoded])).messages[0]
    assert (again.role, again.text, again.name) == (message.role, message.text, message.name)
    if message.text == "On it.":
        assert again.content_digest == message.content_digest


def test_a_block_stands_in_front_of_the_content() -> None:
    request = OLLAMA.parse(request_of([ASKED], keep_alive=-1))
    sent = json.loads(OLLAMA.encode(request, blocks={0: "[memory] x [/memory]"}))
    assert sent["keep_alive"] == -1
    [asked] = sent["messages"]
    assert asked == {"role": "user", "content": "[memory] x [/memory]\n\nHi", "images": ["aGVsbG8="]}
