"""Server-sent events: an incremental parser.

Rule: the events do not depend on how the bytes were split; the bytes kept of an unfinished event are bounded. The
parser follows the WHATWG rules
(https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation).
"""

from __future__ import annotations

import re

import msgspec

EVENT_BYTES_MAX = 4 * 1024 * 1024  # a last event may repeat the whole prompt and reply (llama.cpp's __verbose)
DONE = b"[DONE]"

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"
_EVENT, _DATA, _EVENT_END = b"event: ", b"data: ", b"\n\n"


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
        start, size = 0, len(data)
        is_simple = b"\r" not in data
        while start < size:
            is_amid_event = self._line or self._data or self._name or self._skipping or self._after_cr
            if is_simple and not is_amid_event:
                start = self._read_simple_events(data, start, found)
            if start < size:
                end = data.find(_EVENT_END, start)
                end = size if end < 0 else end + len(_EVENT_END)
                self._read_lines(data, start, end, found)
                start = end
        self._fed += size
        return found

    def _read_simple_events(self, data: bytes, start: int, found: list[SseEvent]) -> int:
        """Read events of one `data` line after at most one `event` line, as model servers send them; return the end of
        the last one. `_read_lines` would find the same in three times the time."""
        first = start
        while (end := data.find(_EVENT_END, start)) >= 0 and end - start <= self.event_bytes_max:
            name, data_from = b"", start
            if data.startswith(_EVENT, start):
                data_from = data.find(b"\n", start, end) + 1
                name = data[start + len(_EVENT) : data_from - 1]
            if not data.startswith(_DATA, data_from) or data.find(b"\n", data_from, end) >= 0:
                break
            found.append(SseEvent(data[data_from + len(_DATA) : end], name, self._fed + end))
            start = end + len(_EVENT_END)
        if start > first:
            self._open_line(self._fed + start)
        return start

    def _read_lines(self, data: bytes, start: int, end: int, found: list[SseEvent]) -> None:
        """Read `data[start:end]` line by line, whatever it contains."""
        if self._after_cr:
            start += data.startswith(b"\n", start)
            self._open_line(self._fed + start)
        for match in _LINE_END.finditer(data, start, end):
            self._add(data[start : match.start()], self._fed + match.start())
            event = self._end_line(self._fed + match.start())
            if event is not None:
                found.append(event)
            start = match.end()
            self._open_line(self._fed + start)
        self._add(data[start:end], self._fed + end)
        self._after_cr = data.endswith(b"\r", 0, end)

    def _open_line(self, offset: int) -> None:
        self._line_from = offset
        if not self._data:
            self.held_from = offset

    def _add(self, piece: bytes, end: int) -> None:
        """Append to the open line, unless its event has become too long."""
        if not self._skipping and end - self.held_from > self.event_bytes_max:
            self._skipping = True
            self.skipped += 1
            self._line.clear()
            self._data.clear()
        if piece and not self._skipping:
            self._line.append(piece)

    def _end_line(self, end: int) -> SseEvent | None:
        """Process the line that ends at offset `end`; an empty one dispatches the event."""
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
