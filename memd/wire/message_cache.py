"""Parsed messages, kept by the hash of their bytes.

Rule: the bytes and the parser together are the key, so that two APIs never share a message. A client that
sends its whole history each turn pays for parsing and hashing its new messages only.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Raw

from memd.caching import ByteCache
from memd.messages import DIGEST_BYTES, Message
from memd.speech import THINKING_ALONE, Speech
from memd.wire.histories import Histories

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
