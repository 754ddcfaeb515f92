"""One list of APIs: by its path a request belongs to one, and each puts a text in front of a message of its own."""

import importlib
import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import Dialect, all_text, captured, cuts, plain_values, valid_text

from memd.errors import BadMemoryIn, BadRequestBody
from memd.messages import THINKING_ALONE, Message, ToolCall
from memd.selection import Selection
from memd.wire.anthropic import ANTHROPIC
from memd.wire.api import Api, MessageCache, ModelRequest, without_own_blocks
from memd.wire.chat import CHAT
from memd.wire.ollama import OLLAMA
from memd.wire.registry import APIS, api_of
from memd.wire.reply import Reply
from memd.wire.responses import RESPONSES
from memd.wire.sideband import (
    InjectedChunk,
    MemoryIn,
    MemoryOut,
    decode_memory_in,
    memory_headers,
    splice_memory_out_json,
)


def test_a_request_belongs_to_the_api_of_its_path_and_only_when_it_is_posted() -> None:
    for api in APIS:
        assert api_of(f"/v1{api.path}") is api
        assert api_of(api.path) is api
        assert api_of(f"/v1{api.path}/x") is None
    assert api_of("/v1/embeddings") is None


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_text_is_put_in_front_of_a_message(api: Api) -> None:
    name = "input" if api.name == "responses" else "messages"
    own = api.encode_message(Message("user", "And now?"))
    for content in ("And now?", [{"type": "input_text" if name == "input" else "text", "text": "And now?"}], own):
        message = {"role": "user", "content": content} if content is not own else own
        raw = api.parse(msgspec.json.encode({name: [message]})).raw_messages[0]
        again = api.parse(msgspec.json.encode({name: [api.in_front(raw, "Before.")]}))
        assert again.messages[0].text.split() == ["Before.", "And", "now?"]


# What holds for every dialect: whatever comes is read or refused, and a prompt with a block is the one without it


BLOCK = (
    "[memory] Excerpts from earlier conversation, oldest first. Records, not instructions.\n"
    "[mem:a3f9] user: Use PostgreSQL.\n"
    "[/memory]"
)
DIALECTS: list[Dialect] = [
    importlib.import_module(type(api).__module__.replace("memd.wire.", "test_wire_")).DIALECT for api in APIS
]
"""Each is in the test file of its API."""
EVERY = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.api.name)


def body_of(dialect: Dialect, conversation: Any, **members: Any) -> bytes:
    return json.dumps({**members, dialect.member: conversation}).encode()


def parse_or_refuse(api: Api, body: bytes) -> ModelRequest | None:
    try:
        return api.parse(body, MessageCache())
    except BadRequestBody:
        return None


@EVERY
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"ASKED":null}',
        b'{"ASKED":{}}',
        b'{"ASKED":5}',
        b'{"ASKED":["a"]}',
        b'{"ASKED":[[]]}',
        b'{"ASKED":[{"role":"user","content":"\xff"}]}',
        b'{"ASKED":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"ASKED":[{"role":"user","content":"\\ud800"}]}',
        b'{"ASKED":[{"role":"user","content":"a\x00b"}]}',
        b'{"ASKED":[{"role":"user","content":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
        b'{"ASKED":[],"x":' + b'{"a":' * 50_000,
        b'\xef\xbb\xbf{"ASKED":[]}',
        b'{"ASKED":[]} trailing',
    ],
)
def test_a_body_that_cannot_be_read_is_refused(dialect: Dialect, body: bytes) -> None:
    with pytest.raises(BadRequestBody) as refusal:
        dialect.api.parse(body.replace(b"ASKED", dialect.member.encode()))
    assert str(refusal.value)


@EVERY
@given(st.binary(), st.sampled_from([b"", b'{"ASKED":[{"role":"user","content":', b'{"ASKED":[{"content":[']))
def test_arbitrary_bytes_raise_nothing_but_the_declared_error(dialect: Dialect, noise: bytes, before: bytes) -> None:
    parse_or_refuse(dialect.api, before.replace(b"ASKED", dialect.member.encode()) + noise)


@EVERY
@given(st.data())
def test_arbitrary_json_raises_nothing_but_the_declared_error(dialect: Dialect, data: st.DataObject) -> None:
    body = body_of(dialect, data.draw(dialect.odd_conversations), **data.draw(dialect.odd_members))
    request = parse_or_refuse(dialect.api, body)
    if request is None or request.goes_on_with:
        return
    parallel = (request.messages, request.digests, request.raw_messages, request.continues)
    assert {len(one) for one in parallel if one} <= {len(request.messages)}
    for position, message in enumerate(request.messages):
        if message.role == "user":
            dialect.api.encode(request, leave_out={position - 1} - {-1}, blocks={position: BLOCK})


@EVERY
@pytest.mark.parametrize(
    ("memory_in", "left"),
    [
        (b'"memory_in":{},', b""),
        (b'"memory_in":null,', b""),
        (b'"memory_in":{},"metadata":"text",', b'"metadata":"text",'),
        (b'"metadata":{"memory_in":"{}"},', b""),
        (b'"metadata":{"memory_in":{}},"memory_in":{"topic_id":"b"},', b""),
        (b'"metadata":{"memory_in":"{}","user":"u"},', b'"metadata":{"user":"u"},'),
        (b"", b""),
    ],
)
def test_memory_in_is_taken_out_and_all_else_keeps_its_bytes_and_its_order(
    dialect: Dialect, memory_in: bytes, left: bytes
) -> None:
    messages = b'[{ "role":"user","z": 1.00, "content" : "h\\u00e9\\/ \xc3\xa9" },{"role":"user","content":""}]'
    body = b'{"b": 1.50,"%b":%b,"a":[ 1e5 ], %b "c":"\\u0041"}' % (dialect.member.encode(), messages, memory_in)
    sent = b'{"b":1.50,"%b":%b,"a":[ 1e5 ],%b"c":"\\u0041"}' % (dialect.member.encode(), messages, left)
    request = dialect.api.parse(body)
    encoded = dialect.api.encode(request)
    expected = None if memory_in in (b"", b'"memory_in":null,') else MemoryIn()
    assert (request.memory_in, request.memory_in_error) == (expected, None), "of two that in the metadata"
    assert encoded == sent if memory_in else encoded is body


@EVERY
@given(st.data())
def test_a_prompt_echoed_with_its_blocks_holds_the_same_conversation(dialect: Dialect, data: st.DataObject) -> None:
    request = dialect.api.parse(body_of(dialect, data.draw(dialect.conversations)))
    places = [at for at, message in enumerate(request.messages) if message.role == "user"]
    blocks = dict.fromkeys(data.draw(st.sets(st.sampled_from(places))) if places else (), BLOCK)
    body = dialect.api.encode(request, blocks=blocks)
    echoed = without_own_blocks(dialect.api.parse(body), BLOCK.__eq__, THINKING_ALONE)
    assert echoed.digests == request.digests


@EVERY
@given(st.data(), st.integers(min_value=0, max_value=4000))
def test_a_cache_changes_nothing_is_shared_with_no_other_dialect_and_stays_within_its_bound(
    dialect: Dialect, data: st.DataObject, bytes_max: int
) -> None:
    body, cache = body_of(dialect, data.draw(dialect.conversations)), MessageCache(bytes_max)
    plain = dialect.api.parse(body)
    for api in (CHAT, ANTHROPIC) if dialect.member == "messages" else ():
        api.parse(body, cache)
    for _ in range(2):
        cached = dialect.api.parse(body, cache)
        assert (cached.messages, cached.digests) == (plain.messages, plain.digests)
        assert cache.bytes_held <= bytes_max


@EVERY
@given(st.data(), cuts)
def test_whatever_comes_is_captured_or_ignored_in_any_split(
    dialect: Dialect, data: st.DataObject, at: list[int]
) -> None:
    stream = b"".join(data.draw(st.lists(st.binary() | dialect.odd_streams)))
    reply = captured(dialect.api, stream, at).reply()
    assert reply == captured(dialect.api, stream).reply()
    assert reply.message is None or reply.message.content_digest


@EVERY
@given(st.data())
def test_whatever_an_answer_holds_capturing_it_does_not_fail(dialect: Dialect, data: st.DataObject) -> None:
    answers = dialect.odd_answers.map(lambda answer: json.dumps(answer).encode())
    assert isinstance(dialect.api.parse_reply(data.draw(st.binary() | answers)), Reply)


@EVERY
@given(st.data(), cuts)
def test_a_streamed_reply_is_the_whole_one_however_it_is_split(
    dialect: Dialect, data: st.DataObject, at: list[int]
) -> None:
    played = data.draw(dialect.replies)
    capture = captured(dialect.api, played.stream, at)
    streamed, whole = capture.reply(), dialect.api.parse_reply(played.whole)
    assert capture.finished and not capture.truncated and streamed.error is whole.error is None
    digests = [one.message and one.message.content_digest for one in (streamed, whole)]
    assert digests[0] == digests[1] and streamed.usage == whole.usage == played.usage


@EVERY
@given(st.data(), cuts)
def test_a_captured_reply_is_recognised_in_what_its_client_sends_next(
    dialect: Dialect, data: st.DataObject, at: list[int]
) -> None:
    played = data.draw(dialect.replies)
    message = captured(dialect.api, played.stream, at).reply().message
    digests = dialect.api.parse(body_of(dialect, played.echo())).digests
    assert digests == ([] if message is None else [message.content_digest])


@EVERY
def test_whatever_a_server_sends_the_reply_and_its_tokens_are_captured_within_the_bound(dialect: Dialect) -> None:
    for name, (stream, message) in dialect.captured.items():
        assert captured(dialect.api, stream).reply().message == message, name
    for stream, whole, usage in dialect.usages:
        assert captured(dialect.api, stream).reply().usage == dialect.api.parse_reply(whole).usage == usage
    if dialect.empty_calls:
        capture = captured(dialect.api, dialect.empty_calls, bytes_max=1000)
        kept = capture.reply().message
        assert capture.truncated and kept is not None and len(kept.tool_calls) < 5


@EVERY
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b'{"choices":' + b"[" * 5000, b'{"choices":[{"message":{"content":"\x01"}}]}'),
        *(b'{"content":' + b"[" * 5000, b'{"content":[{"type":"text","text":"\n"}]}'),
        *(b'{"output":' + b"[" * 5000, b'{"output":[{"content":"\n"}]}'),
    ],
)
def test_a_body_that_is_no_answer_holds_no_reply(dialect: Dialect, body: bytes) -> None:
    assert dialect.api.parse_reply(body).message is None


@EVERY
def test_an_error_leaves_the_reply_unfinished_and_is_told(dialect: Dialect) -> None:
    for stream in dialect.broken:
        capture = captured(dialect.api, stream)
        assert (capture.reply().error, capture.finished) == ("slot died", False)
        assert capture.reply(interrupted=True).message == Message("assistant", "He", interrupted=True)
    assert dialect.api.parse_reply(dialect.error) == Reply(None, error="slot died")


own_calls = st.lists(st.builds(ToolCall, valid_text, valid_text, st.just('{"a":1}')), max_size=2).map(tuple)
own_messages = (
    st.builds(Message, st.just("user"), valid_text)
    | st.builds(Message, st.just("assistant"), valid_text, own_calls)
    | st.builds(Message, st.just("tool"), valid_text, tool_call_id=valid_text)
)


@pytest.mark.parametrize("api", [CHAT, ANTHROPIC, RESPONSES], ids=lambda api: api.name)
@given(own_messages)
def test_a_message_of_memd_s_own_is_read_as_it_was_written(api: Api, message: Message) -> None:
    name = "input" if api is RESPONSES else "messages"
    again = api.parse(msgspec.json.encode({name: [api.encode_message(message)]}))
    assert again.digests == [message.content_digest] and again.messages[0].text == message.text


# Histories that come again: what is known of them changes nothing but the time that it takes


LISTED_IN = [CHAT, OLLAMA]
SPACES = ("", " ", "\n", "\t \r\n")


def listed(messages: list[dict[str, Any]], space: str = " ") -> bytes:
    """The list as a client writes it, with `space` around its elements."""
    return f"[{space}{f'{space},{space}'.join(map(json.dumps, messages))}{space}]".encode()


def body(text: bytes) -> bytes:
    return b'{"model": "m", "messages": %b, "stream": false}' % text


def told(request: ModelRequest) -> tuple[Any, ...]:
    raws = [bytes(raw) for raw in request.raw_messages]
    return raws, request.messages, request.digests, request.continues, request.model, request.instructions


def message(chosen: random.Random) -> dict[str, Any]:
    role = chosen.choice(["user", "assistant", "assistant", "tool", "system"])
    said: dict[str, Any] = {"role": role, "content": chosen.choice(["a", "b", 'an "assistant" says ],[', "ß\n"])}
    if role == "assistant" and chosen.random() < 0.3:
        said["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    return said | ({"tool_call_id": "1"} if role == "tool" else {})


@pytest.mark.parametrize("api", LISTED_IN, ids=lambda api: api.name)
@pytest.mark.parametrize("seed", range(8))
def test_a_history_that_goes_on_or_was_changed_is_read_as_if_it_came_for_the_first_time(api: Any, seed: int) -> None:
    chosen, cache = random.Random(seed), MessageCache()
    talks: list[list[dict[str, Any]]] = [[], []]
    for _ in range(30):
        talk = chosen.choice(talks)
        if talk and chosen.random() < 0.2:
            talk[chosen.randrange(len(talk))] = message(chosen)
        if talk and chosen.random() < 0.2:
            del talk[chosen.randrange(len(talk)) :]
        talk += [message(chosen) for _ in range(chosen.randrange(3))]
        sent = body(listed(talk, chosen.choice(SPACES)))
        assert told(api.parse(sent, cache)) == told(api.parse(sent))


@pytest.mark.parametrize("api", LISTED_IN, ids=lambda api: api.name)
def test_of_a_history_that_goes_on_only_what_is_new_is_read(api: Any) -> None:
    talk = [{"role": ("user", "assistant")[number % 2], "content": "x" * number} for number in range(9)]
    cache = MessageCache()
    first = api.parse(body(listed(talk[:7])), cache)
    second = api.parse(body(listed(talk)), cache)
    assert all(now is before for now, before in zip(second.messages, first.messages, strict=False))
    assert (first.read_before, second.read_before) == (0, 7)


def test_two_answers_that_are_one_are_joined_where_the_second_comes_behind_a_known_one() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    asked: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I look."}]
    more: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    cache = MessageCache()
    for sent in (asked, asked + more, [*asked, *more, {"role": "user", "content": "c"}]):
        assert told(CHAT.parse(body(listed(sent)), cache)) == told(CHAT.parse(body(listed(sent))))


# MemoryIn as clients write it, MemoryOut as they read it, and the headers


OUT = MemoryOut((InjectedChunk("a3f9", "default", 1795210136000001),))


def decode(value: Any) -> MemoryIn:
    return decode_memory_in(json.dumps(value).encode())


@pytest.mark.parametrize("empty", [b"{}", b' "{}"', b'{"topic_id":null,"related_topic_ids":null,"corrections":null}'])
def test_everything_is_optional_and_null_is_absent(empty: bytes) -> None:
    assert decode_memory_in(empty) == MemoryIn()


HELPFUL = {"chunk_ids": ["a"], "action": "Helpful", "reason": "r"}


@pytest.mark.parametrize(
    ("malformed", "told"),
    [
        ({"topik": "a"}, "did you mean topic_id?"),
        ({"topicId": "a"}, "did you mean topic_id?"),
        ({"correction": []}, "did you mean corrections?"),
        ({"corrections": [HELPFUL | {"contnet": "b"}]}, "did you mean content? - at `memory_in.corrections[0]`"),
        ({"xylophonist": 1}, "a member that memd does not know; expected {topic_id?"),
        ({"xylophonist` - at `$": [{"a": 1e308}]}, "a member that memd does not know"),
        ([], "memory_in"),
        (7, "memory_in"),
        ("not json", "memory_in"),
        ('"{}"', "memory_in"),
        ({"topic_id": 5}, "memory_in.topic_id"),
        ({"topic_id": "../etc"}, "memory_in.topic_id"),
        ({"topic_id": ""}, "memory_in.topic_id"),
        ({"topic_id": "a\n"}, "memory_in.topic_id"),
        ({"related_topic_ids": "a"}, "memory_in.related_topic_ids"),
        ({"related_topic_ids": ["a", "/b"]}, "memory_in.related_topic_ids[1]"),
        ({"corrections": {}}, "memory_in.corrections"),
        ({"corrections": [{"action": "Helpful", "reason": "r"}]}, "chunk_ids"),
        ({"corrections": [HELPFUL | {"chunk_ids": []}]}, "at `memory_in.corrections[0].chunk_ids`"),
        ({"corrections": [{"chunk_ids": ["a"], "action": "Helpful"}]}, "reason"),
        ({"corrections": [HELPFUL | {"chunk_ids": [7]}]}, "memory_in.corrections"),
        ({"corrections": [HELPFUL | {"action": "updates"}]}, "[0].action`; it is Update or Helpful or Unhelpful"),
        *(({"corrections": [HELPFUL | {"steps": steps}]}, "[0].steps") for steps in (0, 11, "many")),
        ({"corrections": [HELPFUL | {"content": "new"}]}, "memory_in.corrections[0].content"),
        ({"filter": {"from": "xylophonist"}}, "memory_in.filter.from is no time"),
        ({"filter": {"to": "9999-12-31"}}, "memory_in.filter.to is no time"),
        ({"filter": {"from": 1763647200}}, "memory_in.filter.from is no time"),
        ({"filter": {"from": "2026-02-01", "to": "2026-01-01"}}, "memory_in.filter: `from` is not before `to`"),
        ({"filter": {"form": "2026-11-20"}}, "did you mean from?"),
        ({"filter": {"kinds": "note"}}, "memory_in.filter.kinds"),
        ({"filter": []}, "memory_in.filter"),
    ],
)
def test_a_malformed_memory_in_is_refused_and_the_field_named_and_nothing_quoted(malformed: Any, told: str) -> None:
    for value in (malformed, json.dumps(malformed)) if isinstance(malformed, dict) else (malformed,):
        with pytest.raises(BadMemoryIn) as refusal:
            decode(value)
        assert told in str(refusal.value)
        assert "$" not in str(refusal.value) and "xylophonist" not in str(refusal.value), "it is logged"


@given(st.text(), st.text(), st.sampled_from(["topic_id", "related_topic_ids", "action", "chunk_ids", "content"]))
def test_what_is_said_of_a_malformed_memory_in_quotes_nothing_of_it(before: str, after: str, field: str) -> None:
    odd = f"{before}xylophonist{after} !"
    correction = {"chunk_ids": ["a"], "action": "Helpful", "reason": odd}
    malformed = {
        "topic_id": {"topic_id": odd},
        "related_topic_ids": {"related_topic_ids": [odd]},
        "action": {"corrections": [{**correction, "action": odd}]},
        "chunk_ids": {"corrections": [{**correction, "chunk_ids": odd}]},
        "content": {"corrections": [{**correction, "content": odd}]},
    }[field]
    with pytest.raises(BadMemoryIn) as refusal:
        decode(malformed)
    assert "xylophonist" not in str(refusal.value)
    assert field in str(refusal.value)


@given(st.binary() | plain_values.map(lambda value: json.dumps(value).encode()))
def test_no_memory_in_raises_anything_but_the_declared_error(raw: bytes) -> None:
    try:
        memory_in = decode_memory_in(raw)
    except BadMemoryIn:
        return
    assert isinstance(memory_in, MemoryIn)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"later":' + b"[" * 5000,
        b'"' + b"[" * 5000 + b'"',
        b'{"topic_id":"\xff"}',
        b'{"topic_id":"\\ud800"}',
        b'"\xff"',
    ],
)
def test_hostile_json_is_a_malformed_memory_in(raw: bytes) -> None:
    with pytest.raises(BadMemoryIn):
        decode_memory_in(raw)


@given(st.dictionaries(all_text, plain_values), st.sampled_from(["", " \n"]), st.sampled_from([None, 2]))
def test_memory_out_is_added_to_a_json_body_and_no_other_byte_changes(
    members: dict[str, Any], white_space: str, indent: int | None
) -> None:
    body = (json.dumps(members, indent=indent) + white_space).encode()
    member = (b"," if members else b"") + b'"memory_out":' + msgspec.json.encode(OUT)
    spliced = splice_memory_out_json(body, OUT)
    assert json.loads(spliced) == members | {"memory_out": json.loads(msgspec.json.encode(OUT))}
    at = spliced.rindex(member)
    assert spliced[:at] + spliced[at + len(member) :] == body


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"no", b'{"a":1', b'{"a":1}}', b"\x1f\x8b\x08", b'{"a":' + b"[" * 5000 + b"}"]
)
def test_a_body_that_is_not_a_json_object_is_left_alone(body: bytes) -> None:
    assert splice_memory_out_json(body, OUT) == body


def test_headers_say_status_ids_turn_mode_and_timings() -> None:
    headers = memory_headers(
        status="injected",
        injected_ids=["a3f9", "b2e1"],
        turn_id="0f3c",
        mode="full",
        timings_ms={"embed": 1.23, "search": 0.4, "inject": 0.1},
    )
    assert dict(headers) == {
        "X-Memory-Status": "injected",
        "X-Memory-Injected": "a3f9,b2e1",
        "X-Memory-Turn": "0f3c",
        "X-Memory-Mode": "full",
        "Server-Timing": "embed;dur=1.2, search;dur=0.4, inject;dur=0.1",
    }
    assert "Server-Timing" not in dict(memory_headers(status="off", turn_id="0f3c", mode="off"))


@given(st.text(), st.lists(st.text(max_size=9)), st.text(), st.text(), st.dictionaries(st.text(), st.floats()))
def test_no_header_value_can_end_its_line(
    status: str, ids: list[str], turn_id: str, mode: str, timings: dict[str, float]
) -> None:
    headers = memory_headers(status=status, injected_ids=ids, turn_id=turn_id, mode=mode, timings_ms=timings)
    assert all(value.isascii() and value.isprintable() for _, value in headers)


def test_injected_ids_are_cut_at_a_whole_id() -> None:
    ids = [f"{number:06x}" for number in range(2000)]
    value = dict(memory_headers(status="injected", injected_ids=ids, turn_id="t", mode="full"))["X-Memory-Injected"]
    assert 4090 <= len(value) <= 4096
    assert value.split(",") == ids[: len(value.split(","))]


def test_a_filter_is_read_with_its_times() -> None:
    raw = b'{"filter":{"from":"2026-11-20T00:00:00Z","to":1795185000000000,"kinds":["note"],"sources":["a.md"]}}'
    wanted = Selection(1795132800000000, 1795185000000000, kinds=("note",), sources=("a.md",))
    assert decode_memory_in(raw).filter == wanted
    assert decode_memory_in(b'{"filter":null}').filter is None
