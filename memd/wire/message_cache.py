"""Parsed messages, kept: each by the hash of its bytes, and the longer lists that come again with more behind them.

Rule: bytes alone decide. A message is known by its bytes and its parser together, so that two APIs never share one. A
list is known as far as it has the bytes of one that was read before, up to the end of that one's last element; what
stands behind it is read as a list of its own. So a client that sends its whole history each turn pays for parsing and
hashing its new messages only.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw

from memd.caching import ByteCache
from memd.messages import DIGEST_BYTES, Message
from memd.speech import THINKING_ALONE, Speech

HISTORIES_BYTES_MAX = 32 * 1024 * 1024
"""Eight histories of 2 MB: a history is held twice, its whole text and the texts of its messages."""
HISTORIES_MAX = 64
"""All of them are compared with each list that comes; most differ in their first bytes."""
MESSAGES_MIN = 16
"""Shorter lists are read again as quickly, and would take the places of longer ones."""
_MESSAGE_BYTES = 150
"""Of a message, beside its text and its parsed form, which `MessageCache` counts (measured with tracemalloc)."""
_WHITE_SPACE = b" \t\r\n"

Parse = Callable[[Raw], Message]


class History(msgspec.Struct, frozen=True):
    """The messages of a list, in parallel: each in its own syntax, parsed, and its digest."""

    raws: list[Raw]
    messages: list[Message]
    digests: list[bytes]


NOTHING_KNOWN = History([], [], [])


class _KnownHistory(NamedTuple):
    beginning: bytes
    """The list's text without the bracket that closes it."""
    parse: Parse
    history: History

    @property
    def size(self) -> int:
        return 2 * len(self.beginning) + _MESSAGE_BYTES * len(self.history.raws)


class Histories:
    """The longer lists that were read last. Thread-safe."""

    def __init__(self, bytes_max: int = HISTORIES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held: list[_KnownHistory] = []
        self._lock = threading.Lock()

    @property
    def bytes_held(self) -> int:
        """Memory that they take."""
        return sum(one.size for one in list(self._held))

    def beginning(self, listed: bytes, parse: Parse) -> tuple[History, bytes]:
        """Return the longest known beginning of a JSON list, read with `parse`, and the list of what is behind it."""
        found = self._longest(listed, parse)
        if found is None:
            return NOTHING_KNOWN, listed
        behind = listed[len(found.beginning) : -1].strip(_WHITE_SPACE)
        if not behind:
            return found.history, b"[]"
        if not behind.startswith(b",") or not behind[1:].strip(_WHITE_SPACE):  # no valid list: its reader says so
            return NOTHING_KNOWN, listed
        return found.history, b"[%b]" % behind[1:]

    def note(self, listed: bytes, parse: Parse, history: History) -> None:
        """Keep what was read of a list, in place of the beginning that was known."""
        beginning = listed.strip(_WHITE_SPACE)[:-1].rstrip(_WHITE_SPACE)
        new = _KnownHistory(beginning, parse, history)
        if len(history.raws) < MESSAGES_MIN or new.size > self._bytes_max:
            return
        with self._lock:
            before = self._longest(listed, parse)
            kept = [one for one in self._held if one is not before]
            left = self._bytes_max - new.size
            self._held = [new]
            for one in kept[: HISTORIES_MAX - 1]:  # newest first
                left -= one.size
                if left < 0:
                    break
                self._held.append(one)

    def _longest(self, listed: bytes, parse: Parse) -> _KnownHistory | None:
        alike = (one for one in self._held if one.parse == parse and listed.startswith(one.beginning))
        return max(alike, key=lambda one: len(one.beginning), default=None)


CACHE_BYTES_MAX = 64 * 1024 * 1024  # about 30,000 messages of 2 KB
_ENTRY_BYTES = 600  # key, structs and dictionary slots of one cached message (measured with tracemalloc)


class ParsedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message and its content digest, which takes longer to compute than to look up."""

    message: Message
    digest: bytes


class MessageCache(ByteCache[bytes, ParsedMessage]):
    """Parsed messages by the hash of their bytes; evicts the least recently used beyond `bytes_max`. Thread-safe."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX, speech: Speech = THINKING_ALONE) -> None:
        """`speech`: finds what was said in each message."""
        super().__init__(bytes_max)
        self._speech = speech
        self.histories = Histories()
        """The lists that messages came in."""

    def parse(self, raws: Sequence[Raw], parse: Callable[[Raw], Message]) -> list[ParsedMessage]:
        """Parse each of `raws` with `parse`, or return what that gave earlier.

        Raises:
            BadRequestBody: `parse` raised it.
        """
        person = hashlib.blake2b(f"{parse.__module__}:{parse.__qualname__}".encode(), digest_size=16).digest()
        keys = [hashlib.blake2b(raw, digest_size=DIGEST_BYTES, person=person).digest() for raw in raws]
        found = []
        for key, raw, parsed in zip(keys, raws, self.use(keys), strict=True):
            parsed = parsed or self.get(key)  # a message that a request has twice is parsed once
            if parsed is None:
                parsed = parsed_message(raw, parse, self._speech)
                self.put(key, parsed, _size_of(parsed))
            found.append(parsed)
        return found


def _size_of(parsed: ParsedMessage) -> int:
    message = parsed.message
    held = _ENTRY_BYTES + sys.getsizeof(message.text) + sys.getsizeof(message.own_words)
    return held + sum(_ENTRY_BYTES + sys.getsizeof(call.arguments) for call in message.tool_calls)


def parsed_message(raw: Raw, parse: Callable[[Raw], Message], speech: Speech = THINKING_ALONE) -> ParsedMessage:
    """Parse `raw` with `parse`, find what was said in it, and compute its digest."""
    message = speech.heard(parse(raw))
    return ParsedMessage(message, message.content_digest)
