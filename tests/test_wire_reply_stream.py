"""A reply's stream: read by WHATWG's rules; `memory_out` goes into one event, every other byte passes as it came."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import pieces

from memd.wire.chat import CHAT, ChatCapture
from memd.wire.reply import CAPTURE_BYTES_MAX, READ_BYTES, ReplyStream, SseEvent, SseParser
from memd.wire.sideband import InjectedChunk, MemoryOut

ROLE = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":17952,'
    b'"id":"chatcmpl-x","model":"tiny","system_fingerprint":"b0-unknown","object":"chat.completion.chunk"}'
)
TEXT = b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"} \xc3\xa9"}}],"id":"chatcmpl-x"}'
LAST = b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"timings":{"cache_n":9,"prompt_n":13}}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":22}}'
PING = b": ping"
DONE = b"data: [DONE]"

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
stream_bytes = st.lists(
    st.sampled_from([b"data", b"data: x", b"data:", b":", b"event: e", b"{}", b" ", b"\xef\xbb\xbf"])
    | line_ends
    | st.binary(max_size=6)
    | st.sampled_from([ROLE, TEXT, USAGE, PING, DONE])
).map(b"".join)


def parse(*fed: bytes) -> list[tuple[bytes, bytes]]:
    parser = SseParser()
    return [(event.name, event.data) for piece in fed for event in parser.feed(piece)]


def reference_events(stream: bytes) -> list[tuple[bytes, bytes]]:
    """The rules once more, on the whole stream at once and as plainly as can be."""
    lines = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    events, data, name = [], list[bytes](), b""
    for line in lines[:-1]:
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if line == b"":
            events += [(name, b"\n".join(data))] if data else []
            data, name = [], b""
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return events


@given(stream_bytes, st.lists(st.integers(min_value=0)))
def test_events_are_those_of_a_plain_reading_of_the_rules_however_the_stream_was_cut(
    stream: bytes, cuts: list[int]
) -> None:
    assert parse(*pieces(stream, cuts)) == reference_events(stream)


@given(st.lists(st.integers(min_value=0)), st.integers(min_value=101, max_value=500))
def test_an_event_beyond_the_bound_is_skipped_and_the_next_one_is_read(cuts: list[int], size: int) -> None:
    stream = b"data: a\n\ndata: " + b"x" * size + b"\ndata: more\n\ndata: b\n\n"
    parser = SseParser(event_bytes_max=100)
    assert [event.data for piece in pieces(stream, cuts) for event in parser.feed(piece)] == [b"a", b"b"]
    assert parser.skipped == 1


def test_an_event_of_many_lines_is_bounded_as_a_whole_and_comments_never_add_up() -> None:
    parser = SseParser(event_bytes_max=100)
    assert parser.feed(b"data: ten more\n" * 20 + b"\ndata: b\n\n")[0].data == b"b"
    assert parser.skipped == 1

    parser = SseParser(event_bytes_max=100)
    for _ in range(100):
        assert parser.feed(b": still here\n") == []
    assert [event.data for event in parser.feed(b"data: a\n\n")] == [b"a"]
    assert parser.skipped == 0


OUT = MemoryOut((InjectedChunk("a3f9", "default", 7),))
MEMBER = b',"memory_out":{"injected_chunks":[{"id":"a3f9","topic_id":"default","canonical_id":7}]}'


def new_stream(out: MemoryOut | None = OUT) -> ReplyStream:
    return CHAT.new_stream(CAPTURE_BYTES_MAX, out)


def splice(*fed: bytes) -> bytes:
    stream = new_stream()
    return b"".join([*(stream.feed(piece) for piece in fed), stream.flush()])


@given(
    st.lists(st.tuples(st.sampled_from([PING, USAGE]), line_ends)),
    st.sampled_from([ROLE, TEXT]),
    st.lists(st.tuples(st.sampled_from([ROLE, TEXT, PING, USAGE, LAST, DONE]), line_ends)),
    line_ends,
    st.lists(st.integers(min_value=0)),
)
def test_memory_out_goes_into_the_first_chunk_with_a_choice_and_nothing_else_changes(
    before: list[tuple[bytes, bytes]], first: bytes, after: list[tuple[bytes, bytes]], line_end: bytes, cuts: list[int]
) -> None:
    head = b"".join(event + end * 2 for event, end in before)
    tail = line_end * 2 + b"".join(event + end * 2 for event, end in after)
    assert splice(*pieces(head + first + tail, cuts)) == head + first[:-1] + MEMBER + b"}" + tail


@given(stream_bytes, st.lists(st.integers(min_value=0)))
def test_without_the_added_field_the_stream_is_what_came(stream: bytes, cuts: list[int]) -> None:
    spliced = splice(*pieces(stream, cuts))
    assert spliced == splice(stream)
    assert spliced.replace(MEMBER, b"", 1) == stream


@given(stream_bytes)
def test_only_an_unfinished_event_is_held_back(stream: bytes) -> None:
    reader = new_stream()
    complete = stream + b"\n\n"  # ends every open event
    assert reader.feed(complete) + reader.feed(b"") == splice(complete)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_chunk_spread_over_several_data_lines_stays_one_json_object(end: bytes) -> None:
    stream = end.join([b'data: {"choices":', b"data:  [{}]", b"data: } ", b"", b"data: [DONE]", b"", b""])
    (_, data), done = parse(splice(stream))
    assert json.loads(data)["memory_out"]["injected_chunks"][0]["id"] == "a3f9"
    assert done == (b"", b"[DONE]")


@pytest.mark.parametrize(
    "stream",
    [
        b"data: [DONE]\n\n" + TEXT + b"\n\n",
        b"data: not json\n\n" + TEXT + b"\n\n",
        b"<html>\n\n<body></body>",
        b'data: {"error":{"message":"no"}}\n\n',
        b'data: {"choices":null}\n\ndata: {"choices":7}\n\n',
        b'data: {"choices":[1]\n\n',
        b"data: " + b'{"a":[' * 3000 + b"\n\n",
    ],
)
def test_a_stream_without_a_chunk_to_add_to_passes_unchanged(stream: bytes) -> None:
    assert splice(stream) == stream


def test_a_first_event_beyond_the_bound_ends_the_holding_back() -> None:
    stream = ReplyStream(ChatCapture(), OUT, parser=SseParser(50))
    assert stream.feed(b"data: " + b"x" * 40) == b""
    assert stream.feed(b"x" * 20) == b"data: " + b"x" * 60
    assert stream.feed(b"y") == b"y"


@given(stream_bytes, st.lists(st.integers(min_value=0)))
def test_the_reply_is_the_same_whether_memory_out_is_added_or_not_and_whenever_it_is_read(
    stream: bytes, cuts: list[int]
) -> None:
    adding, passing, late = new_stream(), new_stream(None), CHAT.new_stream(CAPTURE_BYTES_MAX, None, reads_late=True)
    for piece in pieces(stream, cuts):
        adding.feed(piece)
        assert passing.feed(piece) == late.feed(piece) == piece
        assert passing.finished == adding.finished
    assert passing.flush() == late.flush() == b""
    for one in (passing, late):
        assert (one.reply(), one.finished, one.truncated) == (adding.reply(), adding.finished, adding.truncated)


def test_what_has_passed_is_read_in_steps_and_never_more_of_it_kept_than_the_bound() -> None:
    taken = 0

    class Counting(ChatCapture):
        def take(self, event: SseEvent) -> bool:
            nonlocal taken
            taken += 1
            return super().take(event)

    bytes_max = 4 * READ_BYTES
    stream = ReplyStream(Counting(), unread_bytes_max=bytes_max)
    events = bytes_max // len(TEXT + b"\n\n")
    for _ in range(events):
        stream.feed(TEXT + b"\n\n")
    assert taken == 0
    for _ in range(events):
        stream.feed(TEXT + b"\n\n")
    assert events - READ_BYTES / len(TEXT) <= taken <= events + 2 * READ_BYTES / len(TEXT)
    steps = [taken]
    while stream.read():
        steps.append(taken)
    assert len(steps) >= 3 and taken == 2 * events


def test_a_step_over_a_packed_stream_reads_little_of_it_for_it_unpacks_to_much() -> None:
    words = b"".join(TEXT.replace(b"-x", b"-%x" % (number * 7919 % 65536)) + b"\n\n" for number in range(20_000))
    packed = gzip.compress(words)
    stream = CHAT.new_stream(CAPTURE_BYTES_MAX, None, codings=["gzip"], reads_late=True)
    stream.feed(packed)
    steps = 1
    while stream.read():
        steps += 1
    assert len(words) / steps < 3 * READ_BYTES
