"""Parsed messages, kept by their bytes.

Rule: bytes alone decide. A message is known by its bytes and its parser together, so that two APIs never share one. So
a client that sends its whole history each turn pays for parsing and hashing its new messages only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Raw

from memd.caching import ByteCache
from memd.messages import Message
from memd.speech import THINKING_ALONE, Speech

Parse = Callable[[Raw], Message]

CACHE_BYTES_MAX = 24 * 1024 * 1024  # about 5,000 messages of 2 KB; a laptop has 48 MB for all caches together
_ENTRY_BYTES = 600  # key, structs and dictionary slots of one cached message (measured with tracemalloc)


class ParsedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message and its content digest, which takes longer to compute than to look up."""

    message: Message
    digest: bytes


class MessageCache(ByteCache[tuple[Parse, bytes], ParsedMessage]):
    """Parsed messages by their bytes; evicts the least recently used beyond `bytes_max`. Thread-safe."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX, speech: Speech = THINKING_ALONE) -> None:
        """`speech`: finds what was said in each message."""
        super().__init__(bytes_max)
        self._speech = speech

    def parse(self, raws: Sequence[Raw], parse: Parse) -> tuple[list[ParsedMessage], int]:
        """Parse each of `raws` with `parse`, or return what that gave earlier; and how many of the first it had given.

        Raises:
            BadRequestBody: `parse` raised it.
        """
        keys = [(parse, bytes(raw)) for raw in raws]
        held = self.use(keys)
        known = next((place for place, one in enumerate(held) if one is None), len(held))
        found = [one for one in held[:known] if one is not None]
        for key, raw, parsed in zip(keys[known:], raws[known:], held[known:], strict=True):
            parsed = parsed or self.get(key)  # a message that a request has twice is parsed once
            if parsed is None:
                parsed = parsed_message(raw, parse, self._speech)
                self.put(key, parsed, _size_of(parsed) + sys.getsizeof(key[1]))
            found.append(parsed)
        return found, known


def _size_of(parsed: ParsedMessage) -> int:
    message = parsed.message
    held = _ENTRY_BYTES + sys.getsizeof(message.text) + sys.getsizeof(message.own_words)
    return held + sum(_ENTRY_BYTES + sys.getsizeof(call.arguments) for call in message.tool_calls)


def parsed_message(raw: Raw, parse: Callable[[Raw], Message], speech: Speech = THINKING_ALONE) -> ParsedMessage:
    """Parse `raw` with `parse`, find what was said in it, and compute its digest."""
    message = speech.heard(parse(raw))
    return ParsedMessage(message, message.content_digest)
