"""Parsed messages, kept by the hash of their bytes.

Rule: the bytes and the parser together are the key, so that two APIs never share a message. A client that
sends its whole history each turn pays for parsing and hashing its new messages only.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Raw

from memd.messages import DIGEST_BYTES, Message
from memd.speech import THINKING_ALONE, Speech

CACHE_BYTES_MAX = 64 * 1024 * 1024  # about 30,000 messages of 2 KB
_ENTRY_BYTES = 600  # key, structs and dictionary slots of one cached message (measured with tracemalloc)


class ParsedMessage(msgspec.Struct, frozen=True):
    """A message and its content digest, which takes longer to compute than to look up."""

    message: Message
    digest: bytes


class MessageCache:
    """Parsed messages by the hash of their bytes; evicts the least recently used beyond `bytes_max`. Thread-safe."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX, speech: Speech = THINKING_ALONE) -> None:
        """`speech`: finds what was said in each message."""
        self.bytes_max = bytes_max
        self._speech = speech
        self.bytes_held = 0
        self._entries: OrderedDict[bytes, tuple[ParsedMessage, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def parse(self, raws: Sequence[Raw], parse: Callable[[Raw], Message]) -> list[ParsedMessage]:
        """Parse each of `raws` with `parse`, or return what that gave earlier.

        Raises:
            BadRequestBody: `parse` raised it.
        """
        person = hashlib.blake2b(f"{parse.__module__}:{parse.__qualname__}".encode(), digest_size=16).digest()
        keys = [hashlib.blake2b(raw, digest_size=DIGEST_BYTES, person=person).digest() for raw in raws]
        with self._lock:
            known = [self._entries.get(key) for key in keys]
            for key, entry in zip(keys, known, strict=True):
                if entry is not None:
                    self._entries.move_to_end(key)
        found = []
        for key, raw, entry in zip(keys, raws, known, strict=True):
            entry = entry or self._entries.get(key)  # a message that a request has twice is parsed once
            parsed = parsed_message(raw, parse, self._speech) if entry is None else entry[0]
            if entry is None:
                self._keep(key, parsed)
            found.append(parsed)
        return found

    def _keep(self, key: bytes, parsed: ParsedMessage) -> None:
        held = _ENTRY_BYTES + sys.getsizeof(parsed.message.text) + sys.getsizeof(parsed.message.own_words)
        held += sum(_ENTRY_BYTES + sys.getsizeof(call.arguments) for call in parsed.message.tool_calls)
        with self._lock:
            if held > self.bytes_max or key in self._entries:
                return
            self._entries[key] = (parsed, held)
            self.bytes_held += held
            while self.bytes_held > self.bytes_max:
                _, (_, dropped) = self._entries.popitem(last=False)
                self.bytes_held -= dropped


def parsed_message(raw: Raw, parse: Callable[[Raw], Message], speech: Speech = THINKING_ALONE) -> ParsedMessage:
    """Parse `raw` with `parse`, find what was said in it, and compute its digest."""
    message = speech.heard(parse(raw))
    return ParsedMessage(message, message.content_digest)
