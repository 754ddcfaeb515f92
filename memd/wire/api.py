"""The contract that each API of a model server implements: chat completions, responses, Anthropic's, Ollama's.

Rule: an API is stateless and pure. Code outside an API's own module never asks which API it has; `registry.py` lists
them all. A parsed message is kept by its bytes and its parser together, so that two APIs never share one, and a client
that sends its whole history each turn pays for its new messages only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from msgspec import Raw

from memd.caching import ByteCache
from memd.errors import BadRequestBody
from memd.messages import RESULT_ROLES, THINKING_ALONE, Message, Speech
from memd.wire.lenient_json import TEXT, decode_or_none, with_content, with_stand_ins
from memd.wire.reply import Capture, Reply, ReplyStream, SseParser
from memd.wire.request import (
    NOTHING_REPLACED,
    NULL,
    ModelRequest,
    check_objects,
    encode_body,
    first_bound,
    instructions_in,
    list_in,
    memory_in_of,
    top_level,
    without_sideband,
)
from memd.wire.sideband import MemoryOut

Parse = Callable[[Raw], Message]

CACHE_BYTES_MAX = 24 * 1024 * 1024  # about 5,000 messages of 2 KB; a laptop has 48 MB for all caches together
_ENTRY_BYTES = 600  # key, structs and dictionary slots of one cached message (measured with tracemalloc)


class ParsedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message and its content digest, which takes longer to compute than to look up."""

    message: Message
    digest: bytes


class MessageCache(ByteCache[tuple[Parse, bytes], ParsedMessage]):
    """Parsed messages by their bytes; evicts the least recently used beyond `bytes_max`. Thread-safe."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX, speech: Speech = THINKING_ALONE) -> None:
        """`speech`: finds what was said in each message."""
        super().__init__(bytes_max)
        self._speech = speech

    def parse(self, raws: Sequence[Raw], parse: Parse) -> tuple[list[ParsedMessage], int]:
        """Parse each of `raws` with `parse`, or return what that gave earlier; and how many of the first it had given.
        Raises BadRequestBody: `parse` raised it."""
        keys = [(parse, bytes(raw)) for raw in raws]
        held = self.use(keys)
        known = next((place for place, one in enumerate(held) if one is None), len(held))
        found = [one for one in held[:known] if one is not None]
        for key, raw, parsed in zip(keys[known:], raws[known:], held[known:], strict=True):
            parsed = parsed or self.get(key)  # a message that a request has twice is parsed once
            if parsed is None:
                message = self._speech.heard(parse(raw))
                parsed = ParsedMessage(message, message.content_digest)
                self.put(key, parsed, _size_of(parsed) + sys.getsizeof(key[1]))
            found.append(parsed)
        return found, known


def _size_of(parsed: ParsedMessage) -> int:
    message = parsed.message
    held = _ENTRY_BYTES + sys.getsizeof(message.text) + sys.getsizeof(message.own_words)
    return held + sum(_ENTRY_BYTES + sys.getsizeof(call.arguments) for call in message.tool_calls)


class Api:
    """One API. Most of them have OpenAI's errors, and one element of the list for each message."""

    name: str
    """As in the log and the metrics."""
    path: str
    """The end of the path of its requests."""
    count_path: str
    """The path at which llama-server counts a request's prompt tokens; its answer has `input_tokens`."""
    stream_type = "text/event-stream"
    """The content type of a streamed reply."""
    list_name = "messages"
    """The member of a body that holds the messages."""
    result_member = "content"
    """The member of a tool's result that holds its text."""
    bounds: tuple[str, ...] = ()
    """The members that bound the reply; the first that is a number counts."""
    standing: tuple[str, ...] = ()
    """The members that take room in the window beside the messages."""
    instructions = ""
    """The member that holds the system prompt; empty: it is among the messages."""
    parse_one: Parse
    """Parses one of `ModelRequest.raw_messages`."""
    capture: type[Capture]
    parser: type[SseParser] = SseParser
    """Splits it into events."""

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """Parse a request. Raises BadRequestBody: `body` is no request of this API."""
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
        """Make a request of a body's top-level members; of one that appears twice the last counts, as in llama.cpp.

        Args:
            continues: whether each message is in the same element as the one before; None: each is its own.
            goes_on_with: see `ModelRequest`. Such a request is forwarded as it is, and its sideband is not read.

        Raises:
            BadRequestBody: a message is unreadable or nested too deeply.
        """
        try:
            try:
                parsed, known = (MessageCache() if cache is None else cache).parse(raw_messages, self.parse_one)
            except BadRequestBody:
                check_objects(raw_messages, self.list_name)  # not before: of a long history nearly all is known
                raise
            messages = [one.message for one in parsed]
            fields, messages_at, sidebands = without_sideband(members, self.list_name, reads=not goes_on_with)
            memory_in, memory_in_error = memory_in_of(sidebands)
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
        """Encode the body to forward: `request` without the messages at the indices `leave_out`, with `blocks`.

        `replaced`: by the index of a result, a tool's or one in the user's name, the text that takes the place of its
        content; it stays the answer to its call. `blocks`: by the index of a user's message the text to put in front of
        its content; where the message is left out, the text is too.
        """
        if request.original is not None and not leave_out and not blocks and not replaced:
            return request.original
        return encode_body(request, self.list_name, self.elements(request, frozenset(leave_out), replaced, blocks))

    def elements(
        self, request: ModelRequest, left_out: frozenset[int], replaced: Mapping[int, str], blocks: Mapping[int, str]
    ) -> list[Raw] | Raw:
        """The elements of the list to forward, see `encode`; a single one that is no object stands for itself."""
        elements: list[Raw] = []
        begin = 0
        for position in sorted({*left_out, *blocks, *replaced}):
            elements += request.raw_messages[begin:position]
            begin = position + 1
            if position in left_out:
                continue
            raw = request.raw_messages[position]
            if position in blocks:
                raw = self.in_front(raw, blocks[position])
            elif position in replaced:
                is_tools = request.messages[position].role in RESULT_ROLES
                raw = with_content(raw, replaced[position], self.result_member if is_tools else "content")
            elements.append(raw)
        return elements + request.raw_messages[begin:]

    def encode_message(self, message: Message) -> Raw:
        """Encode a message in the syntax of `raw_messages`, without attachments; the text has `[image]` for each."""
        raise NotImplementedError

    def in_front(self, raw: Raw, text: str) -> Raw:
        """Put `text` and an empty line in front of the content of a user's message in the syntax of `raw_messages`."""
        raise NotImplementedError

    def continues(self, message: Message, previous: Message | None) -> bool:
        """Tell whether a message must share one element of the list with the message before it."""
        return False

    def new_stream(
        self, bytes_max: int, out: MemoryOut | None, *, codings: Sequence[str] = (), reads_late: bool = False
    ) -> ReplyStream:
        """Return a reader for a streamed reply that captures at most `bytes_max` of it and adds `out` to the stream.

        `codings`, `reads_late`: see `ReplyStream`.
        """
        unread = bytes_max if reads_late else 0
        capture, parser = self.capture(bytes_max), self.parser()
        return ReplyStream(capture, out, parser=parser, codings=codings, bytes_max=bytes_max, unread_bytes_max=unread)

    def parse_reply(self, body: bytes) -> Reply:
        """Parse a reply that was not streamed; a body that is none gives an empty `Reply`."""
        raise NotImplementedError

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """Encode an error in the API's own shape."""
        return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


def read_request(api: Api, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
    """Parse a request of `api` as `Api.parse` does, also one whose text is no Unicode at some places. Raises
    BadRequestBody: `body` is no request of this API."""
    try:
        return api.parse(body, cache)
    except BadRequestBody:
        readable = with_stand_ins(body)
        if readable == body:
            raise
    request = api.parse(readable, cache)
    original = None if request.original is None else body
    return msgspec.structs.replace(request, original=original, has_stand_ins=True)
