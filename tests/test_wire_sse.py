"""The event-stream reader against the WHATWG rules."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.wire.reply import SseParser

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


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges)]


def parse(*fed: bytes) -> list[tuple[bytes, bytes]]:
    parser = SseParser()
    return [(event.name, event.data) for piece in fed for event in parser.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [(b"", b"a")]),
        (b"data:a\r\n\r\ndata:b\r\rdata:c\n\n", [(b"", b"a"), (b"", b"b"), (b"", b"c")]),
        (b"data:  a\n\n", [(b"", b" a")]),
        (b"data\ndata\n\n", [(b"", b"\n")]),
        (b"data: a\ndata: b\n\n", [(b"", b"a\nb")]),
        (b": ping\n\ndata: a\n\n", [(b"", b"a")]),
        (b"event: e\ndata: a\n\ndata: b\n\n", [(b"e", b"a"), (b"", b"b")]),
        (b"event: e\n\ndata: b\n\n", [(b"", b"b")]),
        (b"id: 1\nretry: 5\nother: x\ndatax: no\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", [(b"", b"a")]),
        (b"data: unfinished", []),
        (b"data: unfinished\n", []),
    ],
)
def test_events_follow_the_event_stream_rules(stream: bytes, events: list[tuple[bytes, bytes]]) -> None:
    assert parse(stream) == events
    assert parse(*(bytes([byte]) for byte in stream)) == events


@given(stream_bytes, st.lists(st.integers(min_value=0)))
def test_events_do_not_depend_on_how_the_stream_was_cut(stream: bytes, cuts: list[int]) -> None:
    assert parse(*pieces(stream, cuts)) == parse(stream)


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


@given(stream_bytes)
def test_events_are_those_of_a_plain_reading_of_the_rules(stream: bytes) -> None:
    assert parse(stream) == reference_events(stream)


@given(st.lists(st.integers(min_value=0)), st.integers(min_value=101, max_value=500))
def test_an_event_beyond_the_bound_is_skipped_and_the_next_one_is_read(cuts: list[int], size: int) -> None:
    stream = b"data: a\n\ndata: " + b"x" * size + b"\ndata: more\n\ndata: b\n\n"
    parser = SseParser(event_bytes_max=100)
    assert [event.data for piece in pieces(stream, cuts) for event in parser.feed(piece)] == [b"a", b"b"]
    assert parser.skipped == 1


def test_an_event_of_many_lines_is_bounded_as_a_whole() -> None:
    parser = SseParser(event_bytes_max=100)
    assert parser.feed(b"data: ten more\n" * 20 + b"\ndata: b\n\n")[0].data == b"b"
    assert parser.skipped == 1


def test_keep_alive_comments_never_add_up_to_the_bound() -> None:
    parser = SseParser(event_bytes_max=100)
    for _ in range(100):
        assert parser.feed(b": still here\n") == []
    assert [event.data for event in parser.feed(b"data: a\n\n")] == [b"a"]
    assert parser.skipped == 0


def data_offsets(stream: bytes, *fed: bytes) -> list[tuple[bytes, bytes]]:
    """The data of each event, and the bytes that stand in the stream where it is said to end."""
    parser = SseParser()
    found = [event for piece in fed for event in parser.feed(piece)]
    return [(event.data, stream[: event.data_end]) for event in found]


long_streams = st.lists(
    st.tuples(
        st.sampled_from([TEXT, ROLE, USAGE, DONE, PING, b"event: e\n" + TEXT, b"data: {\ndata: }", b"data: {}\r"]),
        st.integers(1, 60),
    ),
    max_size=5,
).map(lambda runs: b"".join((event + b"\n\n") * times for event, times in runs))


@given(long_streams, st.lists(st.integers(min_value=0)))
def test_a_stream_that_comes_in_large_parts_has_the_same_events_at_the_same_places(
    stream: bytes, cuts: list[int]
) -> None:
    slowly = data_offsets(stream, *(stream[at : at + 100] for at in range(0, len(stream), 100)))
    assert data_offsets(stream, *pieces(stream, cuts)) == data_offsets(stream, stream) == slowly
    assert [data for data, _ in slowly] == [data for _, data in reference_events(stream)]
    assert all(before.endswith(data.rpartition(b"\n")[2]) for data, before in slowly)
