"""Newline-delimited JSON: an incremental parser.

Rule: the lines do not depend on how the bytes were split; the bytes kept of an unfinished one are bounded.
"""

from __future__ import annotations

from memd.wire.sse import EVENT_BYTES_MAX, SseEvent

_FIELD = b"data:"


class LineParser:
    """Parses one stream; see `EventParser`. A line is an event; one that grows beyond `line_bytes_max` is skipped.

    The field name of a server-sent event in front of a line is no part of it: llama-server answers its `/api/chat` so.
    """

    def __init__(self, line_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.line_bytes_max = line_bytes_max
        self.skipped = 0
        self.held_from = 0
        """Offset of the first byte of the unfinished line."""
        self._fed = 0  # stream offset of the next byte to be fed
        self._line: list[bytes] = []  # pieces of the unfinished line
        self._skipping = False

    def feed(self, data: bytes) -> list[SseEvent]:
        """Parse the next bytes of the stream, split anywhere; return the lines that they complete, in order."""
        found: list[SseEvent] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._add(data[start:end], self._fed + end)
            line = b"".join(self._line).rstrip()
            trailing = self._fed + end - self.held_from - len(line)
            self._line.clear()
            if line:
                found.append(SseEvent(line.removeprefix(_FIELD).lstrip(), b"", self._fed + end - trailing))
            self._skipping = False
            start = end + 1
            self.held_from = self._fed + start
        self._add(data[start:], self._fed + len(data))
        self._fed += len(data)
        return found

    def _add(self, piece: bytes, end: int) -> None:
        """Append to the unfinished line, unless it has become too long."""
        if not self._skipping and end - self.held_from > self.line_bytes_max:
            self._skipping = True
            self.skipped += 1
            self._line.clear()
        if piece and not self._skipping:
            self._line.append(piece)
