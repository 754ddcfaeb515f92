"""What the tests of every dialect on the wire draw their requests and streams from."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from memd.messages import Message
from memd.wire.api import Api
from memd.wire.reply import CAPTURE_BYTES_MAX, ReplyStream, Usage

valid_text = st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x10F7FF))
"""Without the last private characters, which stand for what is no Unicode (`wire.lenient_json`)."""
all_text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
plain_values = json_values.filter(lambda value: is_plain(value))


def is_plain(value: Any) -> bool:
    """Whether others read this JSON too: no lone surrogates, no NaN."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


Strategy = st.SearchStrategy[Any]


class Played(NamedTuple):
    """A reply as a server sends it in a stream and whole, and what the client that is made for it sends next."""

    stream: bytes
    whole: bytes
    echo: Callable[[], list[Any]]
    usage: Usage


class Dialect(NamedTuple):
    """An API, and what its clients and servers may send."""

    api: Api
    member: str
    """Of a request: it has the conversation."""
    conversations: Strategy
    """As clients send them, with a message that takes a block."""
    odd_conversations: Strategy
    odd_members: Strategy
    odd_streams: Strategy
    odd_answers: Strategy
    broken: tuple[bytes, ...]
    """Streams that say "He" and then that the slot died."""
    error: bytes
    """An answer that says so."""
    replies: Strategy
    """Of `Played`."""
    captured: Mapping[str, tuple[bytes, Message | None]]
    """Streams that servers send otherwise, and their replies."""
    usages: Sequence[tuple[bytes, bytes, Usage | None]] = ()
    """A stream and a whole answer that tell the same of tokens."""
    empty_calls: bytes = b""
    """A stream of a hundred calls of nothing."""


cuts = st.lists(st.integers(min_value=0))


def pieces(whole: Any, at: Sequence[int]) -> list[Any]:
    """A text or bytes in pieces, cut at these places, whatever its length."""
    edges = [0, *sorted(cut % (len(whole) + 1) for cut in at), len(whole)]
    return [whole[start:end] for start, end in pairwise(edges)]


def captured(api: Api, stream: bytes, at: Sequence[int] = (), bytes_max: int = CAPTURE_BYTES_MAX) -> ReplyStream:
    """What has read a stream that came in pieces."""
    reader = api.new_stream(bytes_max, None)
    for piece in pieces(stream, at):
        assert reader.feed(piece) == piece
        reader.reply()  # reads as far as it came, as where a client leaves here
    return reader


def events_stream(*events: dict[str, Any]) -> bytes:
    """The bytes of server-sent events, each named by its type."""
    heads = (f"event: {one['type']}\n" if "type" in one else "" for one in events)
    return b"".join(f"{head}data: {json.dumps(one)}\n\n".encode() for head, one in zip(heads, events, strict=True))
