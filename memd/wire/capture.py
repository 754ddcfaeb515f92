"""The model's reply, read on the side of the answer that the client gets: what the captures of all APIs share.

Rule: the captured `Message` has the content digest of the same reply echoed by the client in its next request, so it is
recognised then. Capturing never raises, whatever the upstream sends, and never keeps more than `bytes_max`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from memd.messages import Message
from memd.wire.sse import SseEvent

CAPTURE_BYTES_MAX = 4 * 1024 * 1024  # a million tokens of text


class Usage(msgspec.Struct, frozen=True):
    """What the upstream says the exchange cost, in its own tokens."""

    prompt_tokens: int
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """How many of the prompt's tokens it did not have to read again."""


class Reply(msgspec.Struct, frozen=True):
    """The outcome of an exchange."""

    message: Message | None
    """The assistant's message of choice 0; None if there is none."""
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    """The text of the error that came instead of a reply or within it."""


class Capture(Protocol):
    """Puts a reply together from the events of one stream. An implementation names this as its base class."""

    @property
    def truncated(self) -> bool:
        """Whether text was dropped for a bound."""

    @property
    def finished(self) -> bool:
        """Whether the reply came to its end."""

    def take(self, event: SseEvent) -> bool:
        """Capture what the next event says; return whether `memory_out` belongs in it."""

    def take_run(self, lines: bytes) -> bool:
        """Capture what the events of an `SseRun` say; False, and nothing is captured, if they must be taken singly."""
        return False

    def reply(self, interrupted: bool = False) -> Reply:
        """All that is known so far; `interrupted` marks a reply that did not come to its end."""


class Room:
    """How much of a reply is still kept; nothing is kept after the first cut."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_left = bytes_max
        self.exceeded = False

    def cut(self, piece: str) -> bytes:
        """`piece` in UTF-8, cut at a whole character where the room ends."""
        encoded = piece.encode()
        if len(encoded) > self._bytes_left:
            encoded = encoded[: self._bytes_left].decode(errors="ignore").encode()
            self.exceeded = True
            self._bytes_left = 0
        else:
            self._bytes_left -= len(encoded)
        return encoded

    def take(self, size_bytes: int) -> bool:
        """Whether there is room for a structure of that size, or for the growth of one; takes it."""
        if self._bytes_left < size_bytes:
            self.exceeded = True
            return False
        self._bytes_left -= size_bytes
        return True


def count_of(value: Any) -> int | None:
    """A number of tokens; None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def error_text(error: Any) -> str | None:
    """What an error says; None if there is no error."""
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else str(error)[:1000]
