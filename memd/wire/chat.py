"""The body of `POST /v1/chat/completions`: read for memd, and written again with the least possible change.

Rule: what memd does not change keeps its bytes and its place; a body with nothing to change is passed on as it came.
Messages are parsed one by one in `chat_message.py`; a client that sends its whole history each turn pays for the new
ones only (`MessageCache`).
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Raw

from memd.errors import BadMemoryIn, BadRequestBody
from memd.messages import DIGEST_BYTES, Message
from memd.wire.chat_message import UNREADABLE, encode_message, parse_message, with_text_in_front
from memd.wire.sideband import MemoryIn, decode_memory_in

__all__ = [
    "ChatRequest",
    "Insertion",
    "MessageCache",
    "ParsedMessage",
    "Placement",
    "encode_chat",
    "encode_message",
    "parse_chat",
]

Placement = Literal["separate", "merged"]
"""A block as a message of its own, or in front of the content of the message that it precedes."""

CACHE_BYTES_MAX = 64 * 1024 * 1024  # about 30,000 messages of 2 KB
_TOKENS_BOUND = 2.0**53  # a larger `max_tokens` is no bound (and may be infinite)
_CACHE_ENTRY_BYTES = 600  # key, structs and dictionary slots of one cached message (measured with tracemalloc)

_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_list_decoder = msgspec.json.Decoder(list[Raw])
_text_decoder = msgspec.json.Decoder(str)
_number_decoder = msgspec.json.Decoder(float)


class ParsedMessage(msgspec.Struct, frozen=True):
    """A message and its content digest, which is costly enough to be kept."""

    message: Message
    digest: bytes


class MessageCache:
    """Parsed messages by the hash of their bytes, the least recently used dropped beyond `bytes_max`. Thread-safe."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        self._entries: OrderedDict[bytes, tuple[ParsedMessage, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def parse(self, raw: Raw) -> ParsedMessage:
        """`raw` parsed, now or earlier.

        Raises:
            BadRequestBody: see `parse_message`.
        """
        key = hashlib.blake2b(raw, digest_size=DIGEST_BYTES).digest()
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
                return known[0]
        parsed = _parsed(raw)
        self._keep(key, parsed)
        return parsed

    def _keep(self, key: bytes, parsed: ParsedMessage) -> None:
        held = _CACHE_ENTRY_BYTES + sys.getsizeof(parsed.message.text)
        held += sum(_CACHE_ENTRY_BYTES + sys.getsizeof(call.arguments) for call in parsed.message.tool_calls)
        with self._lock:
            if held > self.bytes_max or key in self._entries:
                return
            self._entries[key] = (parsed, held)
            self.bytes_held += held
            while self.bytes_held > self.bytes_max:
                _, (_, dropped) = self._entries.popitem(last=False)
                self.bytes_held -= dropped


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat-completions request. `raw_messages`, `messages` and `digests` run in parallel."""

    original: bytes | None
    """The body as it came, if it may be forwarded as it came; None once a sideband was taken out."""
    fields: dict[str, Raw]
    """The other top-level members in their order, without `messages` and the sideband."""
    messages_at: int
    """How many of `fields` stand before `messages`."""
    raw_messages: list[Raw]
    messages: list[Message]
    digests: list[bytes]
    """16-byte content digests."""
    stream: bool
    model: str
    max_tokens: int | None
    """`max_completion_tokens`, `max_tokens` or `n_predict`; None if the reply is not bounded."""
    tools_text: str
    """The JSON text of `tools` and `functions`, for counting: they take their room in the window."""
    memory_in: MemoryIn | None
    """None: the request carried none, or a malformed one."""
    memory_in_error: str | None
    """What is wrong with a malformed MemoryIn."""


class Insertion(msgspec.Struct, frozen=True):
    """A block to be shown before the message at `position`, an index into `raw_messages`."""

    position: int
    text: str


def parse_chat(body: bytes, cache: MessageCache | None = None) -> ChatRequest:
    """`body` as a chat request. Of members that appear twice the last counts, as in llama.cpp.

    Raises:
        BadRequestBody: not a JSON object with a list `messages` of objects, nested too deeply, or not valid Unicode.
    """
    members = _top_level(body)
    raw_messages = _raw_messages(members)
    try:
        parsed = [cache.parse(raw) if cache is not None else _parsed(raw) for raw in raw_messages]
        fields, messages_at, sidebands = _without_sideband(members)
        memory_in, memory_in_error = _memory_in(sidebands)
        return ChatRequest(
            original=None if sidebands else body,
            fields=fields,
            messages_at=messages_at,
            raw_messages=raw_messages,
            messages=[one.message for one in parsed],
            digests=[one.digest for one in parsed],
            stream=bytes(fields.get("stream", b"")) == b"true",
            model=_text_or_empty(fields.get("model")),
            max_tokens=_max_tokens(fields),
            tools_text="".join(
                bytes(fields[name]).decode(errors="replace") for name in ("tools", "functions") if name in fields
            ),
            memory_in=memory_in,
            memory_in_error=memory_in_error,
        )
    except RecursionError as error:
        raise BadRequestBody("the request body is nested too deeply") from error


def encode_chat(
    request: ChatRequest,
    *,
    leave_out: Collection[int] = (),
    insertions: Sequence[Insertion] = (),
    placement: Placement = "separate",
    block_role: str = "developer",
) -> bytes:
    """The body to forward: `request` without the messages at the indices `leave_out`, with `insertions` placed.

    'separate': `{"role": block_role, "content": text}` before the message. 'merged': the text in front of the message's
    content. Several insertions at one position keep their order; one before a message that is left out goes with it.

    Raises:
        ValueError: an insertion's position is not an index of a message.
    """
    if request.original is not None and not leave_out and not insertions:
        return request.original
    left_out = frozenset(leave_out)
    texts: dict[int, list[str]] = {}
    for insertion in insertions:
        if not 0 <= insertion.position < len(request.raw_messages):
            raise ValueError(f"insertion at {insertion.position}, but there are {len(request.raw_messages)} messages")
        texts.setdefault(insertion.position, []).append(insertion.text)
    messages: list[Raw] = []
    for position, raw in enumerate(request.raw_messages):
        if position in left_out:
            continue
        blocks = texts.get(position, [])
        if blocks and placement == "merged":
            messages.append(with_text_in_front(raw, "\n\n".join(blocks)))
            continue
        messages += [Raw(msgspec.json.encode({"role": block_role, "content": text})) for text in blocks]
        messages.append(raw)
    return _encode_body(request, messages)


def _encode_body(request: ChatRequest, messages: list[Raw]) -> bytes:
    members = list(request.fields.items())
    body: dict[str, Raw | list[Raw]] = dict(members[: request.messages_at])
    body["messages"] = messages
    body.update(members[request.messages_at :])
    return msgspec.json.encode(body)


def _parsed(raw: Raw) -> ParsedMessage:
    message = parse_message(raw)
    return ParsedMessage(message, message.content_digest)


def _top_level(body: bytes) -> dict[str, Raw]:
    try:
        return _object_decoder.decode(body)
    except UNREADABLE as error:
        raise BadRequestBody(f"the request body is not a readable JSON object: {error}") from error


def _raw_messages(members: Mapping[str, Raw]) -> list[Raw]:
    if "messages" not in members:
        raise BadRequestBody("the request body has no `messages`; it must be a list of objects")
    try:
        raw_messages = _list_decoder.decode(members["messages"])
    except UNREADABLE as error:
        raise BadRequestBody(f"`messages` is not a list of objects: {error}") from error
    for position, raw in enumerate(raw_messages):
        if not bytes(memoryview(raw)[:1]) == b"{":
            raise BadRequestBody(f"`messages[{position}]` is not an object")
    return raw_messages


def _without_sideband(members: Mapping[str, Raw]) -> tuple[dict[str, Raw], int, list[Raw]]:
    """The other members, how many of them stand before `messages`, and every `memory_in`, the one that counts first."""
    fields: dict[str, Raw] = {}
    messages_at = 0
    in_metadata: list[Raw] = []
    on_top: list[Raw] = []
    for name, raw in members.items():
        if name == "messages":
            messages_at = len(fields)
        elif name == "memory_in":
            on_top.append(raw)
        elif name == "metadata":
            rest = _as_object(raw)
            if rest is None or "memory_in" not in rest:
                fields[name] = raw
                continue
            in_metadata.append(rest.pop("memory_in"))
            if rest:
                fields[name] = Raw(msgspec.json.encode(rest))
        else:
            fields[name] = raw
    return fields, messages_at, in_metadata + on_top


def _memory_in(sidebands: Iterable[Raw]) -> tuple[MemoryIn | None, str | None]:
    """The first MemoryIn that is not null, or what is wrong with it."""
    for raw in sidebands:
        if bytes(raw) == b"null":
            continue
        try:
            return decode_memory_in(raw), None
        except BadMemoryIn as error:
            return None, str(error)
    return None, None


def _as_object(raw: Raw) -> dict[str, Raw] | None:
    try:
        return _object_decoder.decode(raw)
    except UNREADABLE:
        return None


def _text_or_empty(raw: Raw | None) -> str:
    try:
        return _text_decoder.decode(raw) if raw is not None else ""
    except UNREADABLE:
        return ""


def _max_tokens(fields: Mapping[str, Raw]) -> int | None:
    """The first bound that is a number from 0; -1 means unbounded to llama.cpp, and null or text means nothing."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        try:
            number = _number_decoder.decode(fields[name])
        except (KeyError, *UNREADABLE):
            continue
        if 0 <= number < _TOKENS_BOUND:
            return int(number)
    return None
