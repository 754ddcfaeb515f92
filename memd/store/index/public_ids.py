"""Public ids: the short names under which clients and models speak of chunks.

Rule: a chunk's public id is a prefix of its uuid's hex digits and never changes. When it is given, no other chunk of
the topic begins with the same digits; only an adopted chunk keeps the id it was shown under, unless that is taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from memd.entries import PUBLIC_ID_DIGITS_MIN
from memd.store.index.superseded import Directory

UUID_BITS = 128
UUID_DIGITS = UUID_BITS // 4


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

    def beside(self, uuids: Sequence[bytes]) -> list[list[bytes]]:
        """For each uuid those of the sealed segments that are nearest to it, itself among them if it is there."""
        return self.directory.nearest(uuids)

    def knows(self, uuid: bytes, beside: Sequence[bytes]) -> bool:
        """Whether the topic has it; `beside`: see there."""
        at = bisect_left(self._others, uuid)
        return uuid in beside or self._others[at : at + 1] == [uuid]

    def unique_prefix(self, uuid: bytes, beside: Sequence[bytes]) -> str:
        """The shortest prefix of a new uuid, at least PUBLIC_ID_DIGITS_MIN digits, that no other uuid begins with."""
        at = bisect_left(self._others, uuid)
        near = [*self._others[max(0, at - 1) : at + 1], *beside]
        number = int.from_bytes(uuid, "big")
        # Two uuids share the leading hex digits before the highest bit in which they differ.
        differing = min([number ^ int.from_bytes(other, "big") for other in near], default=1 << UUID_BITS)
        shared = UUID_DIGITS - (differing.bit_length() + 3) // 4
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
