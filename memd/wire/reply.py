"""Replies on their way to the client: streams pass through, get `memory_out`, and are captured.

Rule: a captured `Message` has the same content digest as the client's echo of it in the next request, which identifies
it. Capturing never raises, whatever the upstream sends, and keeps at most `bytes_max`.

A stream passes unchanged except for the added `memory_out`. Until that is added, the bytes of an unfinished event are
held back; afterwards none are. It is not added if an earlier event is not a JSON object or exceeds the parser's limit.
Bytes that pass unchanged are buffered and parsed later in larger pieces, on demand or when too many have accumulated,
so that parsing does not delay the client.

Server-sent events follow the WHATWG rules, however the bytes were split
(https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from memd.errors import MemdError
from memd.messages import Message, ToolCall
from memd.wire.content_codings import BadCoding, TooLarge, Unpacker
from memd.wire.lenient_json import mended
from memd.wire.sideband import MemoryOut, memory_out_member

EVENT_BYTES_MAX = 4 * 1024 * 1024  # a last event may repeat the whole prompt and reply (llama.cpp's __verbose)
DONE = b"[DONE]"

_CR = 13
_BOM = b"\xef\xbb\xbf"


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    """One dispatched event."""

    data: bytes
    """The values of its `data` lines, joined by line feeds."""
    name: bytes
    """The value of its last `event` line, else empty."""
    data_end: int
    """Byte offset in the stream of the end of the last `data` line's value."""


class SseParser:
    """Parses the events of one stream. An event larger than `event_bytes_max` is skipped and counted in `skipped`.
    Bytes after the last empty line of a stream are not an event."""

    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.event_bytes_max = event_bytes_max
        self.skipped = 0
        self.held_from = 0
        """Offset of an unfinished event's first byte: its first `data` line, or else the open line."""
        self._fed = 0  # stream offset of the next byte to be fed
        self._line_from = 0  # stream offset of the open line
        self._line: list[bytes] = []  # pieces of the open line
        self._after_cr = False  # a line feed that follows belongs to the carriage return before it
        self._skipping = False
        self._data: list[bytes] = []
        self._data_end = 0
        self._name = b""

    def feed(self, data: bytes) -> list[SseEvent]:
        """Parse the next bytes of the stream, split anywhere; return the events that they complete, in order."""
        found: list[SseEvent] = []
        at = self._fed
        for piece in data.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            end = at + len(text)
            at += len(piece)
            if end - self.held_from > self.event_bytes_max and not self._skipping:
                self._skipping = True
                self.skipped += 1
                self._data.clear()
            if self._skipping:
                self._line.clear()
            if end == at:  # the line continues
                self._line.append(text)
                self._after_cr = False
                break
            if self._line:
                text = b"".join((*self._line, text))
                self._line.clear()
            if not (self._after_cr and piece == b"\n") and (event := self._end_line(text, end)) is not None:
                found.append(event)
            self._after_cr = piece[-1] == _CR
            self._line_from = at
            if not self._data:
                self.held_from = at
        self._fed = at
        return found

    def _end_line(self, line: bytes, end: int) -> SseEvent | None:
        """Process the line that ends at offset `end`; an empty one dispatches the event."""
        if self._skipping and end > self._line_from:
            return None
        if self._line_from == 0:
            line = line.removeprefix(_BOM)
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
                self._data_end = end
            elif field == b"event":
                self._name = value
            return None
        event = SseEvent(b"\n".join(self._data), self._name, self._data_end) if self._data else None
        self._data.clear()
        self._name = b""
        self._skipping = False
        return event


CAPTURE_BYTES_MAX = 4 * 1024 * 1024  # a million tokens of text
STRUCTURE_BYTES = 256
"""Charged per call, item or block of a reply, so that a stream of empty ones is limited too."""


class Usage(msgspec.Struct, frozen=True):
    """The cost of an exchange in tokens, as reported by the upstream."""

    prompt_tokens: int
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were in the upstream's cache."""


class Reply(msgspec.Struct, frozen=True):
    """The captured reply of one exchange, possibly incomplete."""

    message: Message | None
    """The assistant's message (choice 0); None if there is none."""
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    """The message of an error that came instead of the reply or within it."""


class ReplyPart(msgspec.Struct):
    """A text or call of a reply that may still grow."""

    is_call: bool = False
    call_id: str = ""
    name: str = ""
    text: bytearray = msgspec.field(default_factory=bytearray)
    """The text, or the arguments of the call."""
    whole: Message | None = None
    """The complete part, if it came at once."""

    def message(self) -> Message:
        """Return the part as a message of its own."""
        if self.whole is not None:
            return self.whole
        text = mended(self.text.decode())
        if self.is_call:
            return Message("assistant", "", (ToolCall(self.call_id, self.name, text),))
        return Message("assistant", text)


class Capture:
    """Assembles a reply from the events of one stream; each API has its own subclass."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX) -> None:
        self.error: str | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.truncated = False
        """True if the limit was reached and something was dropped; nothing is captured after that."""
        self._bytes_left = bytes_max
        self._parts: dict[int | str, ReplyPart] = {}
        """By place or name."""
        self._begun = False
        """True once a message has begun, even an empty one."""
        self._ended = False

    @property
    def finished(self) -> bool:
        """True if the reply is complete."""
        return self.error is None and (self._ended or self.finish_reason is not None)

    def take(self, event: SseEvent) -> bool:
        """Capture the next event; return whether `memory_out` belongs in it."""
        raise NotImplementedError

    def take_whole(self, body: bytes) -> None:
        """Capture a reply that was not streamed; a body that is not a reply captures nothing."""
        self.take(SseEvent(body, b"", 0))
        self._ended = True

    def message(self) -> Message | None:
        """Return the assistant's message so far; None if nothing of it has come."""
        places = sorted(self._parts, key=lambda key: key if isinstance(key, int) else 0)
        message = joined_answer([self._parts[place].message() for place in places])
        says = message.text or message.tool_calls or message.attachments
        is_one = says or (self.finished and self._begun)
        return msgspec.structs.replace(message, role="assistant") if is_one else None

    def reply(self, interrupted: bool = False) -> Reply:
        """Return the reply so far; `interrupted` marks an incomplete one."""
        message = self.message()
        if message is not None and interrupted:
            message = msgspec.structs.replace(message, interrupted=True)
        return Reply(message, self.usage, self.finish_reason, self.error)

    def _part(self, key: int | str, *, is_call: bool = False, size_bytes: int = 0) -> ReplyPart | None:
        """Return the part at this place, creating one of `size_bytes` if needed; None if the limit is reached."""
        part = self._parts.get(key)
        if part is None and self._spend(STRUCTURE_BYTES + size_bytes):
            self._begun, part = True, ReplyPart(is_call)
            self._parts[key] = part
        return part

    def _append(self, kept: bytearray, piece: str) -> None:
        kept += self._cut(piece)

    def _name(self, part: ReplyPart, call_id: str, name: str) -> None:
        """Set the call's id and name if not known yet."""
        part.call_id = part.call_id or self._cut(call_id).decode()
        part.name = part.name or self._cut(name).decode()

    def _cut(self, piece: str) -> bytes:
        """Return a piece in UTF-8, cut between characters at the limit."""
        encoded = piece.encode()
        if len(encoded) > self._bytes_left:
            encoded = encoded[: self._bytes_left].decode(errors="ignore").encode()
            self.truncated = True
            self._bytes_left = 0
        else:
            self._bytes_left -= len(encoded)
        return encoded

    def _spend(self, size_bytes: int) -> bool:
        """Reserve so many bytes and return whether there was room; a negative size releases them."""
        if self._bytes_left < size_bytes:
            self.truncated = True
            return False
        self._bytes_left -= size_bytes
        return True


def joined_answer(parts: Sequence[Message]) -> Message:
    """Join the parts of one answer; a single message is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    return Message(
        role="assistant",
        text="\n".join(part.text for part in parts if part.text),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        name=next((part.name for part in parts if part.name), ""),
        attachments=tuple(digest for part in parts for digest in part.attachments),
    )


def usage_of(usage: Any, prompt: str, completion: str) -> Usage | None:
    """Read the `usage` of OpenAI's APIs, given its members' names; None if it lacks the prompt's tokens."""
    told = usage if isinstance(usage, dict) else {}
    details = told.get(f"{prompt}_details")
    cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else None
    prompt_tokens = count_of(told.get(prompt))
    return None if prompt_tokens is None else Usage(prompt_tokens, count_of(told.get(completion)), cached)


def count_of(value: Any) -> int | None:
    """Return a decoded value if it is a token count, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def error_text(error: Any) -> str | None:
    """Return the message of a decoded error; None if there is no error."""
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else str(error)[:1000]


_WHITE_SPACE = b" \t"
READ_BYTES, PACKED_READ_BYTES = 64 * 1024, 2048
"""Bytes parsed at once, about a millisecond; compressed ones expand about thirtyfold."""
UNPACKED_TIMES = 8
"""A compressed stream is unpacked up to so many times `bytes_max`, because events have more than text."""


class ReplyStream(msgspec.Struct, eq=False):
    """Reads one reply on its way from the upstream to the client."""

    capture: Capture
    out: MemoryOut | None = None
    """Still to be added to the stream; a stream with `codings` gets none."""
    parser: SseParser = msgspec.field(default_factory=SseParser)
    codings: Sequence[str] = ()
    bytes_max: int = CAPTURE_BYTES_MAX
    """Limit on the captured reply; a compressed stream is unpacked up to `UNPACKED_TIMES` as far."""
    unread_bytes_max: int = 0
    """Limit on bytes that have passed unparsed; 0: parse each part as it passes."""
    problem: MemdError | None = None
    """Why the reply could not be parsed further."""
    unpacker: Unpacker | None = None
    unread: bytearray = msgspec.field(default_factory=bytearray)
    """Bytes that have passed but are not parsed yet."""
    held: bytearray = msgspec.field(default_factory=bytearray)
    held_from: int = 0
    """Offset in the stream of the first held byte."""

    def __post_init__(self) -> None:
        self.out = None if self.codings else self.out

    @property
    def finished(self) -> bool:
        """True if the reply is complete."""
        self._read_all()
        return self.capture.finished

    @property
    def truncated(self) -> bool:
        """True if a limit cut the captured reply; its digest then differs from that of the client's echo."""
        self._read_all()
        return self.capture.truncated or self.parser.skipped > 0

    def reply(self, interrupted: bool = False) -> Reply:
        """See `Capture.reply`."""
        self._read_all()
        return self.capture.reply(interrupted)

    def feed(self, part: bytes) -> bytes:
        """Take the next bytes of the stream; return the bytes to send to the client now."""
        if self.out is not None:
            self.held += part
            self._take(part)
            return self._release()
        if self.problem is None:
            self.unread += part
            while len(self.unread) > self.unread_bytes_max:
                self.read()
        return part

    def flush(self) -> bytes:
        """Return the bytes still held back; call it when the stream has ended."""
        self.out = None
        return self._release()

    def read(self) -> bool:
        """Parse some of the buffered bytes; return whether more are left."""
        size = PACKED_READ_BYTES if self.codings else READ_BYTES
        part = bytes(self.unread[:size])
        del self.unread[:size]
        try:
            self.unpacker = self.unpacker or Unpacker(self.codings, UNPACKED_TIMES * self.bytes_max)
            for piece in self.unpacker.feed(part):
                self._take(piece)
        except (BadCoding, TooLarge) as problem:
            self.problem = problem
            self.unread.clear()
        return bool(self.unread)

    def _read_all(self) -> None:
        while self.unread:
            self.read()

    def _take(self, part: bytes) -> None:
        for event in self.parser.feed(part):
            carries_memory_out = self.capture.take(event)
            if self.out is None:
                continue
            trimmed = event.data.rstrip(_WHITE_SPACE)
            if carries_memory_out and trimmed.endswith(b"}"):  # `memory_out` goes before the closing brace
                position = event.data_end - (len(event.data) - len(trimmed)) - 1 - self.held_from
                self.held[position:position] = b"," + memory_out_member(self.out)
                self.out = None
            elif not event.data.lstrip().startswith(b"{"):
                self.out = None

    def _release(self) -> bytes:
        """Return the held bytes that need not be held any longer."""
        if self.parser.skipped:
            self.out = None
        ready = len(self.held) if self.out is None else self.parser.held_from - self.held_from
        released = bytes(self.held[:ready])
        del self.held[:ready]
        self.held_from += ready
        return released
