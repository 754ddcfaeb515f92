"""A request to a model, whatever API it came through: what memd reads of it, and what every API does alike.

Rule: what memd does not change keeps its bytes and its place; a body with nothing to change is passed on as it came.
Messages are parsed one by one; a client that sends its whole history each turn pays for the new ones only
(`MessageCache`). What an API has to itself is in its own module (`chat.py`, `responses.py`, `anthropic.py`).
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import Raw

from memd.errors import BadMemoryIn, BadRequestBody
from memd.messages import DIGEST_BYTES, Message
from memd.wire.capture import Capture, Reply
from memd.wire.chat.message import UNREADABLE
from memd.wire.sideband import MemoryIn, decode_memory_in

Placement = Literal["separate", "merged"]
"""A block as a message of its own, or in front of the content of the message that it precedes."""

CACHE_BYTES_MAX = 64 * 1024 * 1024  # about 30,000 messages of 2 KB
_TOKENS_BOUND = 2.0**53  # a larger `max_tokens` is no bound (and may be infinite)
_CACHE_ENTRY_BYTES = 600  # key, structs and dictionary slots of one cached message (measured with tracemalloc)

_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_list_decoder = msgspec.json.Decoder(list[Raw])
_BRACE = ord("{")
_text_decoder = msgspec.json.Decoder(str)
_number_decoder = msgspec.json.Decoder(float)


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `raw_messages`, `messages`, `digests` and `continues` run in parallel."""

    original: bytes | None
    """The body as it came, if it may be forwarded as it came; None once a sideband was taken out."""
    fields: dict[str, Raw]
    """The other top-level members in their order, without the list of messages and the sideband."""
    messages_at: int
    """How many of `fields` stand before the list of messages."""
    raw_messages: list[Raw]
    """Each message in its API's own syntax."""
    messages: list[Message]
    digests: list[bytes]
    """16-byte content digests."""
    continues: list[bool]
    """Whether the message came in one element of the list with the message before it."""
    stream: bool
    model: str
    max_tokens: int | None
    """None if the reply is not bounded."""
    standing_text: str
    """What takes room in the window besides the messages, as JSON text: tool definitions, instructions apart."""
    memory_in: MemoryIn | None
    """None: the request carried none, or a malformed one."""
    memory_in_error: str | None
    """What is wrong with a malformed MemoryIn."""


class Insertion(msgspec.Struct, frozen=True):
    """A block to be shown before the message at `position`, an index into `raw_messages`."""

    position: int
    text: str


class Api(Protocol):
    """One of the APIs that agents speak. Stateless."""

    name: str
    """For the log and the metrics."""
    path: str
    """How the path of its requests ends."""
    count_path: str
    """Where llama-server counts a request's prompt tokens; the answer has `input_tokens`."""

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """`body` as a request.

        Raises:
            BadRequestBody: it is none.
        """

    def encode(
        self,
        request: ModelRequest,
        *,
        leave_out: Collection[int] = (),
        insertions: Sequence[Insertion] = (),
        placement: Placement = "separate",
    ) -> bytes:
        """The body to forward: `request` without the messages at the indices `leave_out`, with `insertions` placed.

        Several insertions at one position keep their order; one before a message that is left out goes with it.
        """

    def encode_message(self, message: Message) -> Raw:
        """A message of ours in the syntax of `raw_messages`; attachments are gone, `[image]` stays in the text."""

    def continues(self, message: Message, previous: Message | None) -> bool:
        """Whether a message of ours has to stand in one element of the list with the one before it."""

    def new_capture(self, bytes_max: int) -> Capture:
        """What assembles the reply out of a stream."""

    def reply_of(self, body: bytes) -> Reply:
        """The outcome of an exchange that was not streamed; a body that is no answer gives an empty `Reply`."""

    def carries_memory_out(self, data: bytes) -> bool:
        """Whether `memory_out` belongs to the stream event with this data, a JSON object."""

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """An error in the API's own shape."""


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

    def parse(self, raws: Sequence[Raw], parse: Callable[[Raw], Message]) -> list[ParsedMessage]:
        """Each of `raws` parsed, now or earlier. The same bytes must mean the same to every `parse` that is ever given.

        Raises:
            BadRequestBody: as `parse` does.
        """
        person = parse.__module__.encode()[-16:]
        keys = [hashlib.blake2b(raw, digest_size=DIGEST_BYTES, person=person).digest() for raw in raws]
        with self._lock:
            known = [self._entries.get(key) for key in keys]
            for key, entry in zip(keys, known, strict=True):
                if entry is not None:
                    self._entries.move_to_end(key)
        found = []
        for key, raw, entry in zip(keys, raws, known, strict=True):
            entry = entry or self._entries.get(key)  # the same message twice in one request is parsed once
            parsed = _parsed(raw, parse) if entry is None else entry[0]
            if entry is None:
                self._keep(key, parsed)
            found.append(parsed)
        return found

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


# -- what the modules of the APIs are made of -----------------------------------------------------------------------


def request_from(
    body: bytes,
    members: Mapping[str, Raw],
    *,
    list_name: str,
    raw_messages: list[Raw],
    continues: list[bool],
    parse: Callable[[Raw], Message],
    cache: MessageCache | None,
    bounds: Sequence[str],
    standing: Sequence[str],
) -> ModelRequest:
    """A request out of a body's top-level members; of members that appear twice the last counts, as in llama.cpp.

    Args:
        list_name: the member that holds the messages.
        parse: makes a message of one of `raw_messages`.
        bounds: members that bound the reply, the one that counts first.
        standing: members that take room in the window besides the messages.

    Raises:
        BadRequestBody: a message cannot be read, or is nested too deeply.
    """
    try:
        parsed = [_parsed(raw, parse) for raw in raw_messages] if cache is None else cache.parse(raw_messages, parse)
        fields, messages_at, sidebands = _without_sideband(members, list_name)
        memory_in, memory_in_error = _memory_in(sidebands)
        return ModelRequest(
            original=None if sidebands else body,
            fields=fields,
            messages_at=messages_at,
            raw_messages=raw_messages,
            messages=[one.message for one in parsed],
            digests=[one.digest for one in parsed],
            continues=continues,
            stream=bytes(fields.get("stream", b"")) == b"true",
            model=_text_or_empty(fields.get("model")),
            max_tokens=_first_bound(fields, bounds),
            standing_text="".join(bytes(fields[name]).decode(errors="replace") for name in standing if name in fields),
            memory_in=memory_in,
            memory_in_error=memory_in_error,
        )
    except RecursionError as error:
        raise BadRequestBody("the request body is nested too deeply") from error


def top_level(body: bytes) -> dict[str, Raw]:
    """A body's members.

    Raises:
        BadRequestBody: it is not a JSON object.
    """
    try:
        return _object_decoder.decode(body)
    except UNREADABLE as error:
        raise BadRequestBody(f"the request body is not a readable JSON object: {error}") from error


def objects_in(members: Mapping[str, Raw], name: str) -> list[Raw]:
    """The elements of the member `name`.

    Raises:
        BadRequestBody: it is not a list of objects.
    """
    if name not in members:
        raise BadRequestBody(f"the request body has no `{name}`; it must be a list of objects")
    try:
        elements = _list_decoder.decode(members[name])
    except UNREADABLE as error:
        raise BadRequestBody(f"`{name}` is not a list of objects: {error}") from error
    for position, raw in enumerate(elements):
        if memoryview(raw)[0] != _BRACE:
            raise BadRequestBody(f"`{name}[{position}]` is not an object")
    return elements


def texts_by_position(request: ModelRequest, insertions: Iterable[Insertion]) -> dict[int, list[str]]:
    """The texts to be inserted before each message.

    Raises:
        ValueError: an insertion's position is not an index of a message.
    """
    texts: dict[int, list[str]] = {}
    for insertion in insertions:
        if not 0 <= insertion.position < len(request.raw_messages):
            raise ValueError(f"insertion at {insertion.position}, but there are {len(request.raw_messages)} messages")
        texts.setdefault(insertion.position, []).append(insertion.text)
    return texts


def encode_body(request: ModelRequest, list_name: str, elements: list[Raw] | Raw) -> bytes:
    """The body with other messages: a list, or what stands instead of one."""
    members = list(request.fields.items())
    body: dict[str, Raw | list[Raw]] = dict(members[: request.messages_at])
    body[list_name] = elements
    body.update(members[request.messages_at :])
    return msgspec.json.encode(body)


def _parsed(raw: Raw, parse: Callable[[Raw], Message]) -> ParsedMessage:
    message = parse(raw)
    return ParsedMessage(message, message.content_digest)


def _without_sideband(members: Mapping[str, Raw], list_name: str) -> tuple[dict[str, Raw], int, list[Raw]]:
    """The other members, how many of them stand before the list, and every `memory_in`, the one that counts first."""
    fields: dict[str, Raw] = {}
    messages_at = 0
    in_metadata: list[Raw] = []
    on_top: list[Raw] = []
    for name, raw in members.items():
        if name == list_name:
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


def _first_bound(fields: Mapping[str, Raw], names: Sequence[str]) -> int | None:
    """The first of these that is a number from 0; -1 means unbounded to llama.cpp, and null or text means nothing."""
    for name in names:
        try:
            number = _number_decoder.decode(fields[name])
        except (KeyError, *UNREADABLE):
            continue
        if 0 <= number < _TOKENS_BOUND:
            return int(number)
    return None
