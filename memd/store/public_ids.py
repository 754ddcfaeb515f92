"""Public ids: the short names under which clients and models speak of chunks.

Rule: a chunk's public id is a prefix of its uuid's hex digits and never changes. When it is given, no other chunk of
the topic begins with the same digits; only an adopted chunk keeps the id it was shown under, unless that is taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from memd.chunks import PUBLIC_ID_DIGITS_MIN
from memd.store.superseded import Directory

UUID_DIGITS = 32


class KnownUuids:
    """All uuids of a topic: those of the sealed segments in a directory, the others in a sorted list."""

    def __init__(self, directory: Directory, others: Iterable[bytes]) -> None:
        self.directory = directory
        self._others = sorted(set(others))

    def add(self, uuid: bytes) -> None:
        """Remember one more; not one that is known already."""
        insort(self._others, uuid)

    def discard(self, uuids: Iterable[bytes]) -> None:
        """Forget uuids whose append failed."""
        gone = set(uuids)
        self._others = [uuid for uuid in self._others if uuid not in gone]

    def unique_prefix(self, uuid: bytes) -> str:
        """The shortest prefix, at least PUBLIC_ID_DIGITS_MIN digits, that no other uuid begins with."""
        at = bisect_left(self._others, uuid)
        near = self._others[max(0, at - 1) : at + 2] + self.directory.neighbours(uuid)
        shared = max((_shared_digits(uuid, other) for other in near if other != uuid), default=0)
        return uuid.hex()[: max(PUBLIC_ID_DIGITS_MIN, shared + 1)]

    def others_with_prefix(self, uuid: bytes, digits: str) -> list[bytes]:
        """The uuids other than `uuid` that begin with these digits."""
        even = digits[: len(digits) - len(digits) % 2]
        found = self.directory.uuids_with_prefix(digits)
        for other in self._others[bisect_left(self._others, bytes.fromhex(even)) :]:
            if not other.hex().startswith(even):
                break
            if other.hex().startswith(digits):
                found.append(other)
        return [other for other in found if other != uuid]


def _shared_digits(one: bytes, other: bytes) -> int:
    """How many leading hex digits two different uuids share: those before the highest bit in which they differ."""
    differing = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return UUID_DIGITS - (differing.bit_length() + 3) // 4
