"""The parts that were cut and are pending, found by their keys and by the messages that they came from.

Rule: nothing here looks at all of them: tens of thousands may be pending when a few are stored. Thread-safe.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

Key = tuple[bytes, ...]
"""See `unstored.Part.key`."""


class FromMessages(Protocol):
    """Something that came from messages."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of these messages."""


Kept = TypeVar("Kept", bound=FromMessages)


class KeptParts(Generic[Kept]):
    """Parts by their keys. What finds several of them returns them in the order in which they were added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._parts: dict[Key, Kept] = {}
        self._having: dict[bytes, dict[Key, int]] = {}
        self._beginning: dict[bytes, dict[Key, int]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, key: Key) -> Kept | None:
        """The part with this key."""
        return self._parts.get(key)

    def get_many(self, keys: Iterable[Key]) -> list[Kept]:
        """The parts with these keys, without those that are missing."""
        return [part for part in map(self._parts.get, keys) if part is not None]

    def keys(self) -> set[Key]:
        """The keys of all parts."""
        return set(self._parts.copy())

    def values(self) -> list[Kept]:
        """All parts."""
        return list(self._parts.copy().values())

    def keep(self, key: Key, part: Kept) -> Kept:
        """Add a part, and return it."""
        with self._lock:
            number = next(self._numbers)
            self._parts[key] = part
            self._beginning.setdefault(key[0], {})[key] = number
            for digest in part.digests:
                self._having.setdefault(digest, {})[key] = number
        return part

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop the parts with these keys, where there are any."""
        with self._lock:
            for key in keys:
                if (part := self._parts.pop(key, None)) is None:
                    continue
                for table, digest in [(self._beginning, key[0]), *((self._having, one) for one in part.digests)]:
                    table.get(digest, {}).pop(key, None)
                    if not table.get(digest):
                        table.pop(digest, None)

    def having(self, digests: Iterable[bytes]) -> list[Key]:
        """The keys of the parts that came from any of these messages."""
        return self._ordered(self._having, digests)

    def beginning_with(self, digest: bytes) -> list[Key]:
        """The keys that begin with this digest, or with that of a message without a text."""
        return self._ordered(self._beginning, (b"", digest))

    def _ordered(self, table: dict[bytes, dict[Key, int]], digests: Iterable[bytes]) -> list[Key]:
        with self._lock:
            found = dict(itertools.chain.from_iterable(table.get(digest, {}).items() for digest in digests))
        return sorted(found, key=found.__getitem__)
