"""Chat completions: what memd reads and captures from any body or stream, and how little it changes when it writes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import Dialect, Played, all_text, captured, cuts, events_stream, json_values, pieces, valid_text

from memd.messages import Message, ToolCall
from memd.wire.chat import CHAT, parse_message, with_text_in_front
from memd.wire.reply import Usage

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


def played(content: str | None, tool_calls: list[tuple[str, str]], at: list[int]) -> Played:
    made = [
        {"id": f"call{index}", "type": "function", "function": {"name": name, "arguments": text}}
        for index, (name, text) in enumerate(tool_calls)
    ]
    message = {"role": "assistant", "content": content, "reasoning_content": "hm", "tool_calls": made}
    whole = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "timings": TIMINGS})
    chunks = reply_chunks(content, tool_calls, at)
    return Played(stream_of(*chunks), whole.encode(), lambda: [echo_of_openai_client(chunks)], Usage(22, 5, 9))


def called(delta: dict[str, Any]) -> dict[str, Any]:
    return chunk({"tool_calls": [delta]})


INTERLEAVED = [(1, "b", "["), (0, "a", "{"), (1, None, "]"), (0, None, "}")]
CAPTURED: dict[str, tuple[list[Any], Message]] = {
    "a refusal": ([chunk({"refusal": "I can"}), chunk({"refusal": "not."}, "stop")], Message("assistant", "I cannot.")),
    "choice 0 alone": (
        [chunk({"content": "no"}, index=1), chunk({"content": "yes"}), chunk({}, "stop", index=1)],
        Message("assistant", "yes"),
    ),
    "interleaved calls": (
        [
            called({"index": index, "id": name, "function": {"name": name, "arguments": text}})
            for index, name, text in INTERLEAVED
        ],
        Message("assistant", "", (ToolCall("a", "a", "{}"), ToolCall("b", "b", "[]"))),
    ),
    "no index, and the name again": (
        [
            called({"id": "1", "function": {"name": "f", "arguments": "{"}}),
            called({"function": {"name": "f", "arguments": "}"}}),
            called({"id": "2", "function": {"name": "g", "arguments": {"a": 1}}}),
        ],
        Message("assistant", "", (ToolCall("1", "f", "{}"), ToolCall("2", "g", '{"a":1}'))),
    ),
    "a legacy function call": (
        [chunk({"function_call": one}) for one in ({"name": "f", "arguments": "{"}, {"arguments": "}"})],
        Message("assistant", "", (ToolCall("", "f", "{}"),)),
    ),
    "halves of a character": (
        [chunk({"content": "a\ud83d"}), chunk({"content": "\ude00b"})],
        Message("assistant", "a😀b"),
    ),
    "half a character": ([chunk({"content": "a\ud83d"}), chunk({"content": "b"})], Message("assistant", "a\ufffdb")),
}


USAGES: list[tuple[dict[str, Any], Usage | None]] = [
    ({"timings": TIMINGS}, Usage(22, 5, 9)),
    ({"usage": {"prompt_tokens": 20, "completion_tokens": 3}}, Usage(20, 3, None)),
    ({"usage": {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 7}}}, Usage(20, None, 7)),
    ({"usage": {"prompt_tokens": 20}, "timings": TIMINGS}, Usage(20, None, 9)),
    ({"usage": None, "timings": {}}, None),
    ({"usage": {"prompt_tokens": "20"}}, None),
    ({"usage": {"prompt_tokens": -1}}, None),
    ({"usage": [], "timings": 5}, None),
]


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


part_types = st.sampled_from(["text", "image_url", "input_audio", "file", "refusal", "thinking"])
parts = st.fixed_dictionaries({"type": part_types}, optional={"text": valid_text, "image_url": st.just({"url": "x"})})
contents = st.none() | valid_text | st.lists(parts, max_size=4)
chat_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={"content": contents, "name": valid_text},
)
odd_members = st.sampled_from(["role", "content", "refusal", "tool_calls", "function_call", "tool_call_id", "name"])
odd_messages = st.dictionaries(odd_members, json_values)
odd_bodies = st.dictionaries(
    st.sampled_from(["model", "stream", "max_tokens", "n_predict", "metadata", "memory_in", "tools", "x"]), json_values
)
DIALECT = Dialect(
    *(CHAT, "messages", st.lists(chat_messages, min_size=1, max_size=6)),
    st.lists(odd_messages | json_values, max_size=4),
    odd_bodies,
    odd_answers.map(lambda answer: events_stream(answer)),
    odd_answers,
    (stream_of(chunk({"content": "He"}), {"error": {"code": 500, "message": "slot died"}}),),
    b'{"error":{"message":"slot died"}}',
    st.builds(played, st.none() | all_text, calls, cuts),
    {name: (stream_of(*chunks), message) for name, (chunks, message) in CAPTURED.items()},
    [(stream_of({"choices": [], **told}), json.dumps(told).encode(), usage) for told, usage in USAGES],
    stream_of(*(chunk({"tool_calls": [{"index": index, "id": ""}]}) for index in range(100))),
)


def body_of(*messages: Any, **members: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": list(messages), **members}).encode()


def message_of(**members: Any) -> Message:
    return parse_message(json.dumps(members).encode())


def sent(body: bytes, **changes: Any) -> Any:
    return json.loads(CHAT.encode(CHAT.parse(body), **changes))


# Reading


@pytest.mark.parametrize(
    ("members", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"n_predict": -1}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": True}, None),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_tokens": 0}, 0),
        ({"n_predict": 12.0}, 12),
        ({"max_tokens": 10**400}, None),
    ],
)
def test_a_bound_on_the_reply_is_a_number_from_zero(members: dict[str, Any], max_tokens: int | None) -> None:
    assert CHAT.parse(body_of(**members)).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"content": "a"}, "a"),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": [{"type": "text", "text": "a"}, "b", {"text": "c"}]}, "a\nb\nc"),
        ({"content": [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]}, "a\nno"),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]}, "a"),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": "a", "reasoning_content": "b", "reasoning": "c"}, "a"),
        ({"content": 5}, "5"),
        ({"content": {"a": 1}}, '{"a": 1}'),
        ({"content": "nul \u0000 and \U0001f600"}, "nul \u0000 and \U0001f600"),
    ],
)
def test_the_text_of_a_message_is_read_from_every_form_of_content(members: dict[str, Any], text: str) -> None:
    assert message_of(role="user", **members).text == text


def test_parts_that_are_not_text_stand_by_their_name_and_digest() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    audio, file = {"type": "input_audio", "input_audio": {}}, {"type": "file", "file": {}}
    message = message_of(role="user", content=[image, {"type": "text", "text": "what?"}, audio, file, 7])
    assert message.text == "[image]\nwhat?\n[audio]\n[file]\n[file]"
    assert [len(digest) for digest in message.attachments] == [16] * 4
    one, two = (message_of(role="user", content=[part]).content_digest for part in (image, other))
    assert one != two


def test_tool_calls_are_read_from_every_form() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "function": {"name": "g", "arguments": {"a": 1}}},
        {"id": "3", "type": "custom", "custom": {"name": "h", "input": "raw"}},
        {"id": "4"},
        "odd",
    ]
    assert message_of(role="assistant", content=None, tool_calls=calls).tool_calls == (
        ToolCall("1", "f", '{"a": 1}'),
        ToolCall("2", "g", '{"a": 1}'),
        ToolCall("3", "h", "raw"),
        ToolCall("4", "", ""),
        ToolCall("", "", '"odd"'),
    )
    legacy = message_of(role="assistant", content=None, function_call={"name": "f", "arguments": "{}"})
    assert legacy.tool_calls == (ToolCall("", "f", "{}"),)
    result = message_of(role="tool", tool_call_id="1", name="f", content="42")
    assert (result.tool_call_id, result.name, result.text) == ("1", "f", "42")
    assert parse_message(CHAT.encode_message(result)) == result


def test_deeply_nested_tool_arguments_are_kept_as_text() -> None:
    arguments = "[" * 800 + "]" * 800
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    request = CHAT.parse(body_of({"role": "assistant", "content": None, "tool_calls": [call]}))
    assert request.messages[0].tool_calls[0].arguments == arguments


# The elements of one answer


TEXT = {"role": "assistant", "content": "I look it up."}
CALLS: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}],
    }
    for call_id, content, arguments in (("c1", None, "{}"), ("c2", "", '{"a": 1}'))
]
RESULTS = [{"role": "tool", "tool_call_id": call_id, "content": f"found {call_id}"} for call_id in ("c1", "c2")]
ASKED, THANKED = {"role": "user", "content": "Look it up."}, {"role": "assistant", "content": "There it was."}
WHOLE = TEXT | {"tool_calls": [*CALLS[0]["tool_calls"], *CALLS[1]["tool_calls"]]}


@pytest.mark.parametrize("parts", [[TEXT, *CALLS], [*CALLS, TEXT], [CALLS[0], TEXT, CALLS[1]], [WHOLE]])
def test_an_answer_whose_client_sends_it_in_parts_is_the_one_that_was_given(parts: list[dict[str, Any]]) -> None:
    whole = CHAT.parse(body_of(ASKED, WHOLE, *RESULTS, THANKED))
    body = body_of(ASKED, *parts, *RESULTS, THANKED)
    request = CHAT.parse(body)
    assert (request.messages, request.digests) == (whole.messages, whole.digests)
    assert sent(body, leave_out={0})["messages"] == [*parts, *RESULTS, THANKED]
    assert sent(body, leave_out={1, 2, 3})["messages"] == [ASKED, THANKED]
    assert sent(body, blocks={1: "B"})["messages"][1]["content"].startswith("B")


@pytest.mark.parametrize(
    "others",
    [
        [TEXT, THANKED],
        [TEXT, CALLS[0]],
        [TEXT, CALLS[0], ASKED],
        [CALLS[0], TEXT, RESULTS[1]],
        [TEXT, THANKED | CALLS[0] | {"content": "x"}, RESULTS[0]],
        [TEXT | {"name": "one"}, CALLS[0] | {"name": "two"}, RESULTS[0]],
        [{"role": "user", "name": "assistant", "content": "x"}, CALLS[0], RESULTS[0]],
    ],
)
def test_what_need_not_be_one_answer_stays_as_it_was_sent(others: list[dict[str, Any]]) -> None:
    assert len(CHAT.parse(body_of(ASKED, *others)).messages) == 1 + len(others)


def test_of_the_assistants_messages_side_by_side_only_the_answer_with_the_results_is_one() -> None:
    messages = CHAT.parse(body_of(ASKED, THANKED, TEXT, *CALLS, *RESULTS)).messages
    assert [(one.role, one.text, len(one.tool_calls)) for one in messages[:3]] == [
        ("user", "Look it up.", 0),
        ("assistant", "There it was.", 0),
        ("assistant", "I look it up.", 2),
    ]


# Writing


def test_messages_are_left_out_and_blocks_stand_in_front_of_what_is_said() -> None:
    body = body_of(*({"role": "user", "content": letter} for letter in "abcd"))
    assert sent(body, leave_out={0, 1}, blocks={1: "gone", 3: "one"})["messages"] == [
        {"role": "user", "content": "c"},
        {"role": "user", "content": "one\n\nd"},
    ]


@pytest.mark.parametrize(
    ("content", "merged"),
    [
        (b'"h\\u00e9"', b'"B\\n\\nh\\u00e9"'),
        (b'""', b'"B\\n\\n"'),
        (b"null", b'"B"'),
        (b"[]", b'[{"type":"text","text":"B\\n\\n"}]'),
        (b"[ ]", b'[{"type":"text","text":"B\\n\\n"} ]'),
        (b'[ {"type":"text", "text":"a"} ]', b'[{"type":"text","text":"B\\n\\n"}, {"type":"text", "text":"a"} ]'),
        (b"5", b"5"),
    ],
)
def test_a_merged_block_goes_in_front_of_every_form_of_content(content: bytes, merged: bytes) -> None:
    message = b'{"role":"user","content":%s,"x":1.0}'
    assert bytes(with_text_in_front(message % content, "B")) == message % merged


def test_a_merged_block_becomes_the_content_where_there_is_none() -> None:
    assert bytes(with_text_in_front(b'{"role":"user"}', "B")) == b'{"role":"user","content":"B"}'
