"""Server-sent events: an incremental parser.

Rule: the events do not depend on how the bytes were split; the bytes kept of an unfinished event are bounded. The
parser follows the WHATWG rules
(https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation).
"""

from __future__ import annotations

import msgspec

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
    """Offset in the stream, in bytes, at which the value of the last `data` line ends."""


class SseParser:
    """Parses the events of one stream.

    An event that grows beyond `event_bytes_max` is skipped and counted in `skipped`. Bytes after the last empty line of
    a stream are no event.
    """

    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.event_bytes_max = event_bytes_max
        self.skipped = 0
        self.held_from = 0
        """Offset of the first byte of an unfinished event: of its first `data` line, else of the open line."""
        self._fed = 0  # stream offset of the next byte to be fed
        self._line_from = 0  # stream offset of the open line
        self._line: list[bytes] = []  # pieces of the open line
        self._after_cr = False  # a line feed that comes next belongs to the carriage return before it
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
            if end == at:  # the line goes on
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
