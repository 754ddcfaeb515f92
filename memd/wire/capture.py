"""Captured replies: the types and functions that the captures of all APIs share.

Rule: a captured `Message` has the content digest of the same reply as the client echoes it in its next request, which
is how it is recognised then. Capturing never raises, whatever the upstream sends, and keeps at most `bytes_max`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from memd.messages import Message
from memd.wire.sse import SseEvent

CAPTURE_BYTES_MAX = 4 * 1024 * 1024  # a million tokens of text


class Usage(msgspec.Struct, frozen=True):
    """The cost of an exchange in the upstream's tokens, as the upstream states it."""

    prompt_tokens: int
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """The prompt's tokens that were in the upstream's cache."""


class Reply(msgspec.Struct, frozen=True):
    """The reply of one exchange, as far as it was captured."""

    message: Message | None
    """The assistant's message (choice 0); None if there is none."""
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    """The message of an error that came instead of the reply or within it."""


class Capture(Protocol):
    """Puts a reply together from the events of one stream. An implementation names this as its base class."""

    @property
    def truncated(self) -> bool:
        """Whether text was dropped because of the bound."""

    @property
    def finished(self) -> bool:
        """Whether the reply came to its end."""

    def take(self, event: SseEvent) -> bool:
        """Capture the next event; return whether `memory_out` belongs in it."""

    def take_run(self, lines: bytes) -> bool:
        """Capture the events of an `SseRun` at once; False if that is not possible, and then nothing is captured."""
        return False

    def reply(self, interrupted: bool = False) -> Reply:
        """Return the reply so far; `interrupted` marks one that did not come to its end."""


class ByteBudget:
    """The bytes of a reply that may still be captured; none after the first cut."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_left = bytes_max
        self.exceeded = False

    def cut(self, piece: str) -> bytes:
        """Spend the budget on `piece`; return it in UTF-8, cut at a whole character where the budget ends."""
        encoded = piece.encode()
        if len(encoded) > self._bytes_left:
            encoded = encoded[: self._bytes_left].decode(errors="ignore").encode()
            self.exceeded = True
            self._bytes_left = 0
        else:
            self._bytes_left -= len(encoded)
        return encoded

    def take(self, size_bytes: int) -> bool:
        """Spend `size_bytes` on a structure; False if the budget does not have them. A negative size is given back."""
        if self._bytes_left < size_bytes:
            self.exceeded = True
            return False
        self._bytes_left -= size_bytes
        return True


def count_of(value: Any) -> int | None:
    """Return a decoded value if it is a count of tokens, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def error_text(error: Any) -> str | None:
    """Return the message of a decoded error; None if there is no error."""
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else str(error)[:1000]
