"""Server-sent events: an incremental reader, and the one change that memd makes to a stream.

Rule: bytes may be split anywhere and the result is the same; what is kept of an unfinished event is bounded. The reader
follows the WHATWG rules (https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation).
The splicer changes no byte, it only adds some.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from memd.wire.sideband import MemoryOut, encode_memory_out

EVENT_BYTES_MAX = 4 * 1024 * 1024  # a last event may repeat the whole prompt and reply (llama.cpp's __verbose)
DONE = b"[DONE]"

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"
_DATA = b"data: "
_OBJECT_BEGIN, _OBJECT_END = _DATA + b"{", b"}\n\n"
_BATCH_BYTES = 16 * 1024  # what is made of them stays in the processor's cache
_WHITE_SPACE = b" \t"


class SseEvent(msgspec.Struct, frozen=True):
    """One dispatched event."""

    data: bytes
    """The values of its `data` lines, joined by line feeds."""
    name: bytes
    """The value of its last `event` line, else empty."""
    data_end: int
    """Where in the stream, counted in bytes from its start, the value of the last `data` line ends."""


class SseParser:
    """Feed it a stream in any pieces; it returns the events that they complete.

    An event that grows beyond `event_bytes_max` is skipped and `skipped` is counted up. What follows the last empty
    line of a stream is no event.
    """

    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.event_bytes_max = event_bytes_max
        self.skipped = 0
        self.held_from = 0
        """Where the bytes start that could still become part of an event: the first `data` line or the open line."""
        self._fed = 0  # stream offset of the next byte to be fed
        self._line_from = 0  # stream offset of the open line
        self._line: list[bytes] = []  # pieces of the open line
        self._after_cr = False  # a line feed that comes next belongs to the carriage return before it
        self._skipping = False
        self._data: list[bytes] = []
        self._data_end = 0
        self._name = b""

    def open_event_end(self, data: bytes) -> int:
        """How many bytes of `data`, which is fed next, may still belong to an event that has begun."""
        return data.find(b"\n\n") + 2 if self._is_amid_event else 0

    def object_lines(self, data: bytes, start: int) -> tuple[bytes, int]:
        """The data of some events that `data[start:]`, which is fed next, begins with, one to a line, and where they
        end; nothing unless all up to there is single `data` lines from a brace to a brace, as model servers send them.

        For who can read many at once: no JSON value goes on from one of these lines to the next. What was read is not
        to be fed: call `pass_over`.
        """
        end = data.rfind(_OBJECT_END, start, start + min(_BATCH_BYTES, self.event_bytes_max)) + len(_OBJECT_END)
        if self._is_amid_event or end <= start + len(_OBJECT_END) or not data.startswith(_OBJECT_BEGIN, start):
            return b"", start
        lines = data[start + len(_DATA) : end - 2].replace(_OBJECT_END + _OBJECT_BEGIN, b"}\n{")
        is_plain = data.count(b"\n", start, end) == 2 * (lines.count(b"\n") + 1) and b"\r" not in lines
        return (lines, end) if is_plain else (b"", start)

    def pass_over(self, size_bytes: int) -> None:
        """Whole events of that many bytes were read otherwise."""
        self._fed += size_bytes
        self._open_line(self._fed)

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that `data` completes, in order."""
        events, start = self._plain(data)
        if self._after_cr and data:
            start = 1 if data.startswith(b"\n") else 0
            self._open_line(self._fed + start)
            self._after_cr = False
        for match in _LINE_END.finditer(data, start):
            self._add(data[start : match.start()], self._fed + match.start())
            event = self._end_line(self._fed + match.start())
            if event is not None:
                events.append(event)
            start = match.end()
            self._open_line(self._fed + start)
        self._add(data[start:], self._fed + len(data))
        if data:
            self._after_cr = data.endswith(b"\r")
        self._fed += len(data)
        return events

    def _plain(self, data: bytes) -> tuple[list[SseEvent], int]:
        """The events that `data` begins with as long as each is one `data` line and a line feed, as model servers send
        them, and where what follows begins. It is what `feed` would find, at a third of the time."""
        events: list[SseEvent] = []
        start = 0
        if self._is_amid_event or b"\r" in data:
            return events, start
        while (end := data.find(b"\n\n", start)) >= 0:
            if not data.startswith(_DATA, start) or data.find(b"\n", start, end) >= 0:
                break
            if end - start > self.event_bytes_max:
                break
            events.append(SseEvent(data[start + len(_DATA) : end], b"", self._fed + end))
            start = end + 2
        if start:
            self._open_line(self._fed + start)
        return events, start

    @property
    def _is_amid_event(self) -> bool:
        return bool(self._line or self._data or self._name or self._skipping or self._after_cr)

    def _open_line(self, offset: int) -> None:
        self._line_from = offset
        if not self._data:
            self.held_from = offset

    def _add(self, piece: bytes, end: int) -> None:
        """Lengthen the open line, unless its event has become too long."""
        if not self._skipping and end - self.held_from > self.event_bytes_max:
            self._skipping = True
            self.skipped += 1
            self._line.clear()
            self._data.clear()
        if piece and not self._skipping:
            self._line.append(piece)

    def _end_line(self, end: int) -> SseEvent | None:
        """Take in the line that ends at offset `end`; an empty one dispatches the event."""
        line = b"".join(self._line)
        self._line.clear()
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


class MemoryOutSplicer:
    """Adds `memory_out` to the first event of a stream that `carries` it; all other bytes pass unchanged, in order.

    Until then it holds back an unfinished event and nothing else, afterwards nothing. It gives up, and lets everything
    pass, when the stream turns out not to be one of JSON objects or an event is longer than `event_bytes_max`.
    """

    def __init__(
        self, out: MemoryOut, carries: Callable[[bytes], bool], event_bytes_max: int = EVENT_BYTES_MAX
    ) -> None:
        """`carries` says of an event's data whether the member belongs there; it may raise on what it cannot read."""
        self.spliced = False
        self._carries = carries
        self._member = b',"memory_out":' + encode_memory_out(out)
        self._parser = SseParser(event_bytes_max)
        self._held = bytearray()
        self._held_from = 0  # stream offset of the first held byte
        self._passing = False

    def feed(self, data: bytes) -> bytes:
        """The bytes to send on now that `data` has come in."""
        if self._passing:
            return data
        self._held += data
        for event in self._parser.feed(data):
            splice_at = self._splice_offset(event)
            if splice_at is not None:
                position = splice_at - self._held_from
                self._held[position:position] = self._member
                self.spliced = True
            if self.spliced or not event.data.lstrip().startswith(b"{"):
                return self._pass_on()
        if self._parser.skipped:
            return self._pass_on()
        ready = self._parser.held_from - self._held_from
        released = bytes(self._held[:ready])
        del self._held[:ready]
        self._held_from += ready
        return released

    def flush(self) -> bytes:
        """What is still held when the stream has ended."""
        return self._pass_on()

    def _pass_on(self) -> bytes:
        self._passing = True
        released = bytes(self._held)
        self._held = bytearray()
        return released

    def _splice_offset(self, event: SseEvent) -> int | None:
        """Where in the stream the last brace of the event stands, if it carries the member."""
        trimmed = event.data.rstrip(_WHITE_SPACE)
        try:
            carries = trimmed.endswith(b"}") and self._carries(event.data)
        except (ValueError, RecursionError):
            return None
        return event.data_end - (len(event.data) - len(trimmed)) - 1 if carries else None
