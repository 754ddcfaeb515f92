"""The stream of one reply, read once: its bytes pass on, `memory_out` is added to one event, the reply is captured.

Rule: no byte is changed, and none is added but `memory_out`. Until it is added an unfinished event is held back and
nothing else, afterwards nothing. It is not added if an event turns out to be no JSON object or to be longer than
`event_bytes_max`.
"""

from __future__ import annotations

from typing import Protocol

from memd.wire.capture import Capture, Reply
from memd.wire.sideband import MemoryOut, encode_memory_out
from memd.wire.sse import EVENT_BYTES_MAX, SseEvent, SseParser, SseRun

_WHITE_SPACE = b" \t"


class EventParser(Protocol):
    """Cuts a stream into its events; see `SseParser`."""

    held_from: int
    skipped: int

    def feed(self, data: bytes) -> list[SseEvent | SseRun]:
        """The events that the next bytes complete."""


class ReplyStream:
    """One reply on its way from the upstream to the client."""

    def __init__(
        self,
        capture: Capture,
        out: MemoryOut | None = None,
        *,
        parser: EventParser | None = None,
        event_bytes_max: int = EVENT_BYTES_MAX,
    ) -> None:
        """`parser`: by default one of server-sent events, with `event_bytes_max`."""
        self._capture = capture
        self._parser = SseParser(event_bytes_max) if parser is None else parser
        self._member = b"" if out is None else b',"memory_out":' + encode_memory_out(out)
        self._is_passing = out is None
        self._held = bytearray()
        self._held_from = 0  # stream offset of the first held byte

    @property
    def finished(self) -> bool:
        """Whether the reply came to its end."""
        return self._capture.finished

    @property
    def truncated(self) -> bool:
        """Whether a bound cut the captured reply; then its digest is not that of the client's echo."""
        return self._capture.truncated or self._parser.skipped > 0

    def reply(self, interrupted: bool = False) -> Reply:
        """All that is known so far; `interrupted` marks a reply that did not come to its end."""
        return self._capture.reply(interrupted)

    def feed(self, part: bytes) -> bytes:
        """The bytes to send on now that `part` has come in."""
        was_passing = self._is_passing
        if not was_passing:
            self._held += part
        for item in self._parser.feed(part):
            if not self._is_passing:
                for event in item.events():
                    self._splice_into(event)
            elif isinstance(item, SseEvent):
                self._capture.take(item)
            elif not self._capture.take_run(item.lines):
                for event in item.events():
                    self._capture.take(event)
        return part if was_passing else self._release()

    def flush(self) -> bytes:
        """The bytes that are still held back when the stream has ended."""
        self._is_passing = True
        return self._release()

    def _splice_into(self, event: SseEvent) -> None:
        """Capture an event, and add `memory_out` before its last brace if it belongs there."""
        carries_memory_out = self._capture.take(event)
        if self._is_passing:
            return
        trimmed = event.data.rstrip(_WHITE_SPACE)
        if carries_memory_out and trimmed.endswith(b"}"):
            position = event.data_end - (len(event.data) - len(trimmed)) - 1 - self._held_from
            self._held[position:position] = self._member
            self._is_passing = True
        elif not event.data.lstrip().startswith(b"{"):
            self._is_passing = True

    def _release(self) -> bytes:
        """Take the bytes that need not be held back any longer."""
        self._is_passing = self._is_passing or self._parser.skipped > 0
        ready = len(self._held) if self._is_passing else self._parser.held_from - self._held_from
        released = bytes(self._held[:ready])
        del self._held[:ready]
        self._held_from += ready
        return released
