"""A request to a model, the same for all APIs, and the interface that each API of a model server implements.

Rule: unchanged parts of a request keep their bytes and place; an unchanged body is forwarded as it came. Parsers accept
any bytes, split anywhere, and raise only their declared error. An API is stateless and pure. Code outside an API's
module never asks which API it has; `registry.py` lists them all. Parsed messages are cached by their bytes and parser,
so APIs never share one, and a client that sends its whole history each turn pays only for its new messages.
"""

from __future__ import annotations

import hashlib
import operator
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from msgspec import Raw

from memd.caching import ByteCache
from memd.errors import BadMemoryIn, BadRequestBody
from memd.messages import BLOCK_OPENING, RESULT_ROLES, THINKING_ALONE, Message, Speech, leading_count
from memd.selection import EVERYTHING, Selection
from memd.wire.lenient_json import (
    LIST,
    OBJECT,
    TEXT,
    UNREADABLE,
    decode_or_none,
    is_list,
    is_object,
    is_string,
    lenient_text,
    with_content,
    with_stand_ins,
    without_stand_ins,
)
from memd.wire.reply import Capture, Reply, ReplyStream, SseParser
from memd.wire.sideband import MemoryIn, MemoryOut, decode_memory_in

_TOKENS_BOUND = 2.0**53  # a larger `max_tokens` is no bound (and may be infinite)

_DEPTH_TOLD = 500
"""Nesting depth reported in errors. The readable depth depends on the stack and is always some hundreds."""
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|([\[{])|[\]}]', re.DOTALL)

NOTHING_REPLACED: Mapping[int, str] = {}


class _TextPart(msgspec.Struct, frozen=True):
    text: Raw = Raw()


NULL = Raw(b"null")
_parts_decoder = msgspec.json.Decoder(list[_TextPart])
_number_decoder = msgspec.json.Decoder(float)


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `raw_messages`, `messages`, `digests` and `continues` run in parallel."""

    original: bytes | None
    """The body as it came; None if it had a sideband, which must not be forwarded."""
    fields: dict[str, Raw]
    """The top-level members in order, without the list of messages and the sideband."""
    messages_at: int
    """Number of `fields` before the list of messages."""
    raw_messages: list[Raw]
    """Each message in its API's own syntax."""
    messages: list[Message]
    digests: list[bytes]
    """16-byte content digests."""
    read_before: int = 0
    """Number of leading messages that were cached from earlier requests."""
    continues: list[bool]
    """For each message, True if it shares its list element with the message before it."""
    stream: bool
    model: str
    max_tokens: int | None
    """Limit of the reply in tokens; None if there is none."""
    window: int | None = None
    """The window requested in tokens (Ollama's `num_ctx`); None: the model's."""
    instructions: str
    """Text of the system prompt: from the API's own member, if any, and from the leading system messages."""
    standing_text: str
    """JSON text that takes room in the window besides the messages: tool definitions, separate instructions."""
    memory_in: MemoryIn | None
    """None if absent or malformed."""
    memory_in_error: str | None
    goes_on_with: str = ""
    """Reference to a conversation stored by the upstream, which these messages continue; empty: they are all of it."""
    has_stand_ins: bool = False
    """It contains stand-ins (see `lenient_json`), which are not forwarded."""

    @property
    def user(self) -> str | None:
        """OpenAI's member that distinguishes the users of a program; empty if absent, None if it is not a string."""
        told = self.fields.get("user", NULL)
        return "" if told == NULL else decode_or_none(TEXT, told)

    @property
    def wanted(self) -> Selection:
        """The chunks that may be recalled into it."""
        return EVERYTHING if self.memory_in is None else self.memory_in.filter or EVERYTHING


def instructions_in(raw: Raw, messages: Sequence[Message]) -> str:
    """Join a member's text, or the text parts in it, and the leading system messages."""
    parts = decode_or_none(_parts_decoder, raw) if is_list(raw) else None
    texts = [lenient_text(raw)] if is_string(raw) else [lenient_text(part.text) for part in parts or ()]
    return "\n".join([*texts, *(message.text for message in messages[: leading_count(messages)])])


def without_own_blocks(request: ModelRequest, is_own: Callable[[str], bool], speech: Speech) -> ModelRequest:
    """Return the request without echoes of memory blocks in its messages; `is_own` recognizes memd's own blocks."""
    messages = [
        speech.heard_alone(message, is_own) if BLOCK_OPENING in message.text else message
        for message in request.messages
    ]
    return _with_messages(request, messages)


def renamed(request: ModelRequest, name: str) -> ModelRequest:
    """Return the request with this name on nameless user messages; the forwarded bytes stay unchanged."""
    messages = [
        msgspec.structs.replace(one, name=name) if (one.opens_turn or one.is_result) and not one.name else one
        for one in request.messages
    ]
    return _with_messages(request, messages)


def _with_messages(request: ModelRequest, messages: list[Message]) -> ModelRequest:
    if all(map(operator.is_, messages, request.messages)):
        return request
    each = zip(messages, request.messages, request.digests, strict=True)
    digests = [digest if now is before else now.content_digest for now, before, digest in each]
    return msgspec.structs.replace(request, messages=messages, digests=digests)


def top_level(body: bytes) -> dict[str, Raw]:
    """Split a body into its top-level members. Raises BadRequestBody: it is not a JSON object."""
    try:
        return OBJECT.decode(body)
    except RecursionError as error:
        raise BadRequestBody(f"the request body is nested too deeply, around byte {_deep_at(body)}") from error
    except ValueError as error:
        raise BadRequestBody(f"the request body is not a readable JSON object: {error}") from error


def objects_in(members: Mapping[str, Raw], name: str) -> list[Raw]:
    """Return the elements of the member `name`. Raises BadRequestBody: it is not a list of objects."""
    elements = list_in(members, name)
    check_objects(elements, name)
    return elements


def list_in(members: Mapping[str, Raw], name: str) -> list[Raw]:
    """Return the elements of the member `name`, each of which should be an object. Raises BadRequestBody: it is not a
    list."""
    if name not in members:
        raise BadRequestBody(f"the request body has no `{name}`; it must be a list of objects")
    try:
        return LIST.decode(members[name])
    except UNREADABLE as error:
        raise BadRequestBody(f"`{name}` is not a list of objects: {error}") from error


def check_objects(elements: Sequence[Raw], name: str) -> None:
    """Check that the elements of the member `name` are objects. Raises BadRequestBody: one is not."""
    for position, raw in enumerate(elements):
        if not is_object(raw):
            raise BadRequestBody(f"`{name}[{position}]` is not an object")


def without_sideband(
    members: Mapping[str, Raw], list_name: str, *, reads: bool
) -> tuple[dict[str, Raw], int, list[Raw]]:
    """Return the other members, how many come before the list, and every `memory_in` in order of precedence. Without
    `reads`, `memory_in` counts as another member."""
    fields: dict[str, Raw] = {}
    messages_at = 0
    in_metadata: list[Raw] = []
    on_top: list[Raw] = []
    for name, raw in members.items():
        if name == list_name:
            messages_at = len(fields)
        elif name == "memory_in" and reads:
            on_top.append(raw)
        elif name == "metadata" and reads:
            rest = decode_or_none(OBJECT, raw)
            if rest is None or "memory_in" not in rest:
                fields[name] = raw
                continue
            in_metadata.append(rest.pop("memory_in"))
            if rest:
                fields[name] = Raw(msgspec.json.encode(rest))
        else:
            fields[name] = raw
    return fields, messages_at, in_metadata + on_top


def _deep_at(body: bytes) -> int:
    """Return the offset at which brackets are nested `_DEPTH_TOLD` deep."""
    depth = 0
    for found in _BRACKET.finditer(body):
        if found[1]:
            depth += 1
        elif found[0] in b"]}":
            depth -= 1
        if depth == _DEPTH_TOLD:
            return found.start()
    return len(body)


def first_bound(fields: Mapping[str, Raw], names: Sequence[str]) -> int | None:
    """Return the first of `names` with a number from 0 on; -1 means unbounded in llama.cpp, other types are ignored."""
    for name in names:
        try:
            number = _number_decoder.decode(fields[name])
        except (KeyError, *UNREADABLE):
            continue
        if 0 <= number < _TOKENS_BOUND:
            return int(number)
    return None


Parse = Callable[[Raw], Message]

CACHE_BYTES_MAX = 14 * 1024 * 1024  # about 5,000 messages of 2 KB; a laptop has 38 MB for all caches together
_ENTRY_BYTES = 600  # key, structs and dictionary slots of one cached message (measured with tracemalloc)


class ParsedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message and its content digest, which is slower to compute than to look up."""

    message: Message
    digest: bytes


class MessageCache(ByteCache[tuple[Parse, bytes], ParsedMessage]):
    """Parsed messages by the SHA-256 of their bytes, which take as much memory as the text. Evicts the least recently
    used beyond `bytes_max`. Thread-safe."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX, speech: Speech = THINKING_ALONE) -> None:
        """`speech`: finds the words said in each message."""
        super().__init__(bytes_max)
        self._speech = speech

    def parse(self, raws: Sequence[Raw], parse: Parse) -> tuple[list[ParsedMessage], int]:
        """Parse each of `raws` with `parse`, or return its cached result; also return how many leading ones were
        cached. Raises BadRequestBody: from `parse`."""
        keys = [(parse, hashlib.sha256(raw).digest()) for raw in raws]
        held = self.use(keys)
        known = next((place for place, one in enumerate(held) if one is None), len(held))
        found = [one for one in held[:known] if one is not None]
        for key, raw, parsed in zip(keys[known:], raws[known:], held[known:], strict=True):
            parsed = parsed or self.get(key)  # a message that occurs twice in a request is parsed once
            if parsed is None:
                message = self._speech.heard(parse(raw))
                parsed = ParsedMessage(message, message.content_digest)
                held_bytes = _ENTRY_BYTES + sys.getsizeof(message.text) + sys.getsizeof(message.own_words)
                held_bytes += sum(_ENTRY_BYTES + sys.getsizeof(call.arguments) for call in message.tool_calls)
                self.put(key, parsed, held_bytes)
            found.append(parsed)
        return found, known


class Api:
    """One API. The defaults fit most: OpenAI's errors, and one list element per message."""

    name: str
    """Name in the log and the metrics."""
    path: str
    """End of its requests' path."""
    count_path: str
    """Path at which llama-server counts a request's prompt tokens; the answer has `input_tokens`."""
    stream_type = "text/event-stream"
    """Content type of a streamed reply."""
    list_name = "messages"
    """Member of a body with the messages."""
    result_member = "content"
    """Member of a tool result with its text."""
    bounds: tuple[str, ...] = ()
    """Members that limit the reply; the first with a number counts."""
    standing: tuple[str, ...] = ()
    """Members that take room in the window besides the messages."""
    instructions = ""
    """Member with the system prompt; empty: it is among the messages."""
    parse_one: Parse
    """Parses one of `ModelRequest.raw_messages`."""
    capture: type[Capture]
    parser: type[SseParser] = SseParser
    """Splits a stream into events."""

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """Parse a request. Raises BadRequestBody: `body` is not a request of this API."""
        members = top_level(body)
        return self.request(body, members, list_in(members, self.list_name), cache)

    def request(
        self,
        body: bytes,
        members: Mapping[str, Raw],
        raw_messages: list[Raw],
        cache: MessageCache | None,
        *,
        continues: list[bool] | None = None,
        goes_on_with: str = "",
    ) -> ModelRequest:
        """Build a request from a body's top-level members; of a duplicate the last counts, as in llama.cpp. With
        `goes_on_with` it is forwarded unchanged and its sideband is not read. Raises BadRequestBody: a message is
        unreadable or nested too deeply."""
        try:
            try:
                parsed, known = (MessageCache() if cache is None else cache).parse(raw_messages, self.parse_one)
            except BadRequestBody:
                check_objects(raw_messages, self.list_name)  # only now: most of a long history is cached
                raise
            messages = [one.message for one in parsed]
            fields, messages_at, sidebands = without_sideband(members, self.list_name, reads=not goes_on_with)
            memory_in, memory_in_error = None, None
            try:
                given = next((raw for raw in sidebands if bytes(raw) != b"null"), None)
                memory_in = None if given is None else decode_memory_in(given)
            except BadMemoryIn as error:
                memory_in_error = str(error)
            standing = (bytes(fields[name]).decode(errors="replace") for name in self.standing if name in fields)
            return ModelRequest(
                original=None if sidebands else body,
                fields=fields,
                messages_at=messages_at,
                raw_messages=raw_messages,
                messages=messages,
                digests=[one.digest for one in parsed],
                read_before=known,
                continues=continues or [False] * len(raw_messages),
                stream=bytes(fields.get("stream", b"")) == b"true",
                model=decode_or_none(TEXT, fields.get("model", NULL)) or "",
                max_tokens=first_bound(fields, self.bounds),
                instructions=instructions_in(fields.get(self.instructions, NULL), messages),
                standing_text="".join(standing),
                memory_in=memory_in,
                memory_in_error=memory_in_error,
                goes_on_with=goes_on_with,
            )
        except RecursionError as error:
            raise BadRequestBody("the request body is nested too deeply") from error

    def encode(
        self,
        request: ModelRequest,
        *,
        leave_out: Collection[int] = (),
        replaced: Mapping[int, str] = NOTHING_REPLACED,
        blocks: Mapping[int, str] = NOTHING_REPLACED,
    ) -> bytes:
        """Encode the body to forward: `request` without the messages at the indices `leave_out`, and with `blocks`.

        `replaced`: text that replaces the content of results, a tool's or one in the user's name, by index; each stays
        the answer to its call. `blocks`: text to put in front of user messages, by index; if the message is left out,
        so is the text.
        """
        if request.original is not None and not leave_out and not blocks and not replaced:
            return request.original
        members = list(request.fields.items())
        body: dict[str, Raw | list[Raw]] = dict(members[: request.messages_at])
        elements = self.elements(request, frozenset(leave_out), replaced, blocks)
        body[self.list_name] = elements[0] if len(elements) == 1 and is_string(elements[0]) else elements
        body.update(members[request.messages_at :])
        encoded = msgspec.json.encode(body)
        return without_stand_ins(encoded) if request.has_stand_ins else encoded

    def elements(
        self, request: ModelRequest, left_out: frozenset[int], replaced: Mapping[int, str], blocks: Mapping[int, str]
    ) -> list[Raw]:
        """Return the list elements to forward, see `encode`; a single string stands for itself."""
        elements: list[Raw] = []
        begin = 0
        for position in sorted({*left_out, *blocks, *replaced}):
            elements += request.raw_messages[begin:position]
            begin = position + 1
            raw = request.raw_messages[position]
            if position in left_out:
                continue
            if position in blocks:
                elements.append(self.in_front(raw, blocks[position]))
            else:
                elements.append(self.with_result(raw, request.messages[position].role, replaced[position]))
        return elements + request.raw_messages[begin:]

    def with_result(self, raw: Raw, role: str, text: str) -> Raw:
        """Replace the content of a result, a tool's or one in the user's name, by `text`."""
        return with_content(raw, text, self.result_member if role in RESULT_ROLES else "content")

    def encode_message(self, message: Message) -> Raw:
        """Encode a message in the syntax of `raw_messages`, without attachments; its text has `[image]` for each."""
        raise NotImplementedError

    def in_front(self, raw: Raw, text: str) -> Raw:
        """Put `text` and an empty line in front of the content of a user message in the syntax of `raw_messages`."""
        raise NotImplementedError

    def continues(self, message: Message, previous: Message | None) -> bool:
        """Return whether a message must share a list element with the message before it."""
        return False

    def new_stream(
        self, bytes_max: int, out: MemoryOut | None, *, codings: Sequence[str] = (), reads_late: bool = False
    ) -> ReplyStream:
        """Return a reader for a streamed reply that captures at most `bytes_max` of it; see `ReplyStream`."""
        unread = bytes_max if reads_late else 0
        capture, parser = self.capture(bytes_max), self.parser()
        return ReplyStream(capture, out, parser=parser, codings=codings, bytes_max=bytes_max, unread_bytes_max=unread)

    def parse_reply(self, body: bytes) -> Reply:
        """Parse a reply that was not streamed; returns an empty `Reply` if it is not one."""
        capture = self.capture(sys.maxsize)
        capture.take_whole(body)
        return capture.reply()

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """Encode an error in the API's own shape."""
        return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


def read_request(api: Api, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
    """Parse a request with `api.parse`, even if some of its text is not Unicode. Raises BadRequestBody: `body` is not a
    request of this API."""
    try:
        return api.parse(body, cache)
    except BadRequestBody:
        readable = with_stand_ins(body)
        if readable == body:
            raise
    request = api.parse(readable, cache)
    original = None if request.original is None else body
    return msgspec.structs.replace(request, original=original, has_stand_ins=True)
