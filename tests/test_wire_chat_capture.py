"""Captured replies: recognised when the client echoes them, bounded, and never an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import all_text, captured, cuts, events_stream, json_values, pieces

from memd.messages import Message, ToolCall
from memd.wire.chat import CHAT
from memd.wire.reply import Reply, Usage

TIMINGS = {"cache_n": 9, "prompt_n": 13, "predicted_n": 5, "predicted_ms": 1.5}

arguments = st.dictionaries(all_text, st.integers() | all_text | st.none()).map(json.dumps)
calls = st.lists(st.tuples(st.text("abc", min_size=1, max_size=3), arguments), max_size=3)


def chunk(delta: dict[str, Any], finish_reason: str | None = None, index: int = 0, **members: Any) -> dict[str, Any]:
    choice = {"finish_reason": finish_reason, "index": index, "delta": delta}
    head = {"created": 1795210136, "id": "chatcmpl-x", "model": "tiny", "object": "chat.completion.chunk"}
    return {"choices": [choice], **head, **members}


def stream_of(*chunks: Any, done: bool = True) -> bytes:
    return events_stream(*chunks) + (b"data: [DONE]\n\n" if done else b"")


def reply_chunks(content: str | None, tool_calls: list[tuple[str, str]], at: list[int]) -> list[dict[str, Any]]:
    """The chunks that llama.cpp sends for a reply: role first, text in pieces, calls opened and then lengthened."""
    chunks = [chunk({"role": "assistant", "content": None})]
    if content is not None:
        chunks += [chunk({"content": piece}) for piece in pieces(content, at)]
    for index, (name, text) in enumerate(tool_calls):
        opening = {"id": f"call{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        chunks.append(chunk({"tool_calls": [{"index": index, **opening}]}))
        for piece in pieces(text, at):
            chunks.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    chunks.append(chunk({}, "tool_calls" if tool_calls else "stop", timings=TIMINGS))
    return chunks


def echo_of_openai_client(chunks: list[dict[str, Any]]) -> Any:
    """The message that the official client assembles from the chunks, as it sends it in the next request."""
    chat = pytest.importorskip("openai.types.chat")  # here, for it takes seconds
    state = pytest.importorskip("openai.lib.streaming.chat").ChatCompletionStreamState()
    for one in chunks:
        state.handle_chunk(chat.ChatCompletionChunk.model_validate(one))
    return state.current_completion_snapshot.choices[0].message.to_dict(mode="json")


@given(st.none() | all_text, calls, cuts, cuts)
def test_a_captured_reply_is_recognised_in_what_the_openai_client_sends_next(
    content: str | None, tool_calls: list[tuple[str, str]], text_cuts: list[int], byte_cuts: list[int]
) -> None:
    chunks = reply_chunks(content, tool_calls, text_cuts)
    capture = captured(CHAT, stream_of(*chunks), byte_cuts)
    message = capture.reply().message
    assert message is not None and capture.finished and not capture.truncated
    request = CHAT.parse(json.dumps({"messages": [echo_of_openai_client(chunks)]}).encode())
    assert message.content_digest == request.digests[0]
    assert message.text == (content or "")


@given(st.none() | all_text, calls)
def test_a_reply_is_the_same_message_streamed_or_not(content: str | None, tool_calls: list[tuple[str, str]]) -> None:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": f"call{index}", "type": "function", "function": {"name": name, "arguments": text}}
            for index, (name, text) in enumerate(tool_calls)
        ],
    }
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "timings": TIMINGS})
    reply = CHAT.parse_reply(body.encode())
    assert reply.message == captured(CHAT, stream_of(*reply_chunks(content, tool_calls, []))).reply().message
    assert reply.usage == Usage(22, 5, 9)
    assert reply.finish_reason == "stop"


def test_a_refusal_is_the_text_of_the_reply_as_in_its_echo() -> None:
    capture = captured(CHAT, stream_of(chunk({"refusal": "I can"}), chunk({"refusal": "not."}, "stop")))
    message = capture.reply().message
    assert message == Message("assistant", "I cannot.")
    echo = {"role": "assistant", "content": None, "refusal": "I cannot."}
    assert message == CHAT.parse(json.dumps({"messages": [echo]}).encode()).messages[0]


def test_only_choice_0_is_captured() -> None:
    both = stream_of(chunk({"content": "no"}, index=1), chunk({"content": "yes"}), chunk({}, "stop", index=1))
    capture = captured(CHAT, both)
    assert capture.reply().message == Message("assistant", "yes")
    assert capture.reply().finish_reason is None


def test_interleaved_and_parallel_tool_calls_are_kept_apart() -> None:
    deltas = [(1, "b", "["), (0, "a", "{"), (1, None, "]"), (0, None, "}")]
    chunks = [
        chunk({"tool_calls": [{"index": index, "id": name, "function": {"name": name, "arguments": text}}]})
        for index, name, text in deltas
    ]
    message = captured(CHAT, stream_of(*chunks)).reply().message
    assert message == Message("assistant", "", (ToolCall("a", "a", "{}"), ToolCall("b", "b", "[]")))


def test_a_server_that_leaves_out_the_index_and_repeats_the_name_is_understood() -> None:
    deltas: list[dict[str, Any]] = [
        {"id": "1", "function": {"name": "f", "arguments": "{"}},
        {"function": {"name": "f", "arguments": "}"}},
        {"id": "2", "function": {"name": "g", "arguments": {"a": 1}}},
    ]
    message = captured(CHAT, stream_of(*(chunk({"tool_calls": [delta]}) for delta in deltas))).reply().message
    assert message == Message("assistant", "", (ToolCall("1", "f", "{}"), ToolCall("2", "g", '{"a":1}')))


def test_a_legacy_function_call_is_captured() -> None:
    deltas = [{"name": "f", "arguments": "{"}, {"arguments": "}"}]
    message = captured(CHAT, stream_of(*(chunk({"function_call": delta}) for delta in deltas))).reply().message
    assert message == Message("assistant", "", (ToolCall("", "f", "{}"),))


@pytest.mark.parametrize(
    ("members", "usage"),
    [
        ({"timings": TIMINGS}, Usage(22, 5, 9)),
        ({"usage": {"prompt_tokens": 20, "completion_tokens": 3}}, Usage(20, 3, None)),
        ({"usage": {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 7}}}, Usage(20, None, 7)),
        ({"usage": {"prompt_tokens": 20}, "timings": TIMINGS}, Usage(20, None, 9)),
        ({"usage": None, "timings": {}}, None),
        ({"usage": {"prompt_tokens": "20"}}, None),
        ({"usage": {"prompt_tokens": -1}}, None),
        ({"usage": [], "timings": 5}, None),
    ],
)
def test_usage_is_read_from_either_form(members: dict[str, Any], usage: Usage | None) -> None:
    assert captured(CHAT, stream_of({"choices": [], **members})).reply().usage == usage
    assert CHAT.parse_reply(json.dumps(members).encode()).usage == usage


def test_an_error_within_the_stream_leaves_the_reply_unfinished() -> None:
    capture = captured(CHAT, stream_of(chunk({"content": "He"}), {"error": {"code": 500, "message": "slot died"}}))
    assert (capture.reply().error, capture.finished) == ("slot died", False)
    assert capture.reply(interrupted=True).message == Message("assistant", "He", interrupted=True)
    assert CHAT.parse_reply(b'{"error":{"message":"no"}}') == Reply(None, error="no")


@given(st.integers(min_value=0, max_value=60), cuts)
def test_the_reply_is_kept_up_to_the_bound_at_a_whole_character(bytes_max: int, at: list[int]) -> None:
    text = "é€😀a" * 5
    capture = captured(CHAT, stream_of(*(chunk({"content": piece}) for piece in pieces(text, at))), bytes_max=bytes_max)
    message = capture.reply().message
    kept = message.text if message is not None else ""
    assert text.startswith(kept)
    assert len(kept.encode()) <= bytes_max
    assert capture.truncated == (len(text.encode()) > bytes_max)
    assert len(kept.encode()) > bytes_max - 4 or kept == text


def test_a_stream_of_empty_tool_calls_is_bounded() -> None:
    chunks = [chunk({"tool_calls": [{"index": index, "id": ""}]}) for index in range(100)]
    capture = captured(CHAT, stream_of(*chunks), bytes_max=1000)
    message = capture.reply().message
    assert capture.truncated and message is not None
    assert len(message.tool_calls) < 5


deltas = st.dictionaries(
    st.sampled_from(["role", "content", "refusal", "function_call"]), json_values
) | st.fixed_dictionaries(
    {
        "tool_calls": json_values
        | st.lists(st.dictionaries(st.sampled_from(["index", "id", "function", "custom"]), json_values))
    }
)
odd_choices = st.fixed_dictionaries(
    {}, optional={"index": json_values, "delta": deltas | json_values, "message": json_values}
)
odd_answers = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(odd_choices) | json_values,
        "usage": json_values,
        "timings": st.dictionaries(st.sampled_from(["cache_n", "prompt_n"]), json_values) | json_values,
        "error": json_values,
    },
)


fast_parts = st.sampled_from(
    [
        stream_of(chunk({"content": " wörd"}), done=False),
        stream_of(chunk({"content": ' "data: [DONE]" '}), done=False),
        stream_of(chunk({"role": "assistant", "content": None}), done=False),
        stream_of(chunk({"content": "other"}, index=1), done=False),
        stream_of(chunk({"content": "a", "refusal": "b"}), done=False),
        stream_of(chunk({"content": "end"}, "stop", timings=TIMINGS), done=False),
        stream_of({"choices": [], "usage": {"prompt_tokens": 7}}, done=False),
        stream_of({"error": {"message": "no room"}}, done=False),
        stream_of(chunk({"content": "x"}), done=False).replace(b"\n", b"\r\n"),
        stream_of(chunk({"content": "x"}), done=False).replace(b': {"content"', b':\ndata: {"content"'),
        b'data: {"choices":[{"index":0,"delta":{"content":"x"}}\n\ndata: ]}\n\n',
        stream_of(chunk({"content": "x"}), done=False).replace(b"}\n", b"}{}\n"),
        b": still there\n\n",
        b"\n",
        b"data: [DONE]\n\n",
    ]
)


@given(st.lists(st.tuples(fast_parts, st.integers(min_value=1, max_value=200)), max_size=8), cuts, st.integers(0, 9000))
def test_a_stream_that_comes_in_large_parts_is_captured_as_one_that_comes_in_small_ones(
    parts: list[tuple[bytes, int]], at: list[int], bytes_max: int
) -> None:
    stream = b"".join(part * times for part, times in parts)
    slow = captured(CHAT, stream, list(range(0, len(stream), 997)), bytes_max=bytes_max)
    fast = captured(CHAT, stream, at, bytes_max=bytes_max)
    assert (fast.reply(), fast.truncated, fast.finished) == (slow.reply(), slow.truncated, slow.finished)


@pytest.mark.parametrize(("said", "text"), [(("a\ud83d", "\ude00b"), "a😀b"), (("a\ud83d", "b"), "a\ufffdb")])
def test_halves_of_a_character_in_two_pieces_are_one_and_a_half_alone_is_replaced(
    said: tuple[str, ...], text: str
) -> None:
    reply = captured(CHAT, stream_of(*(chunk({"content": piece}) for piece in said))).reply()
    assert reply.message == Message("assistant", text)
