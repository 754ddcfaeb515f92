"""Public ids: the short names under which clients and models speak of chunks.

Rule: a chunk's public id is a prefix of its uuid's hex digits and never changes. When it is assigned, no other chunk of
the topic begins with the same digits; only an adopted chunk keeps the id it was shown under, unless that is taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence

from memd.entries import PUBLIC_ID_DIGITS_MIN, Draft
from memd.store.index.uuid_index import UuidIndex

UUID_BITS = 128
UUID_DIGITS = UUID_BITS // 4


class PublicIds:
    """All uuids of a topic, of which new ones get public ids. For one thread."""

    def __init__(self, uuid_index: UuidIndex, others: Iterable[bytes], public_id_of: Callable[[bytes], str]) -> None:
        """Take the uuids of the topic.

        Args:
            uuid_index: of the sealed segments.
            others: the uuids of the other segments.
            public_id_of: returns the public id of a chunk that the topic has.
        """
        self._uuid_index = uuid_index
        self._others = sorted(set(others))
        self._public_id_of = public_id_of

    def assign(self, drafts: Sequence[Draft], new: dict[bytes, str]) -> list[str]:
        """Return the public id of each draft, and add to `new` those of chunks that the topic does not have yet."""
        neighbours = self._uuid_index.nearest([draft.uuid for draft in drafts])
        return [self._assign(draft, near, new) for draft, near in zip(drafts, neighbours, strict=True)]

    def note(self, uuids: Iterable[bytes]) -> None:
        """Note chunks that the topic got with the ids that they had."""
        known = set(self._others)
        for uuid in uuids:
            if uuid not in known:
                insort(self._others, uuid)

    def discard(self, uuids: Iterable[bytes]) -> None:
        """Forget the new uuids of an append that failed."""
        failed = set(uuids)
        self._others = [uuid for uuid in self._others if uuid not in failed]

    def _assign(self, draft: Draft, neighbours: Sequence[bytes], new: dict[bytes, str]) -> str:
        if draft.uuid in new:
            return new[draft.uuid]
        at = bisect_left(self._others, draft.uuid)
        if draft.uuid in neighbours or self._others[at : at + 1] == [draft.uuid]:
            return self._public_id_of(draft.uuid)
        shown = draft.public_id
        assert shown is None or draft.uuid.hex().startswith(shown), "a public id is a prefix of the uuid"
        taken = {new.get(other) or self._public_id_of(other) for other in self._with_prefix(shown)} if shown else set()
        if not shown or shown in taken:
            shown = _unique_prefix(draft.uuid, [*self._others[max(0, at - 1) : at + 1], *neighbours])
        new[draft.uuid] = shown
        insort(self._others, draft.uuid)
        return shown

    def _with_prefix(self, digits: str) -> list[bytes]:
        """The uuids that begin with these digits."""
        even = digits[: len(digits) - len(digits) % 2]
        uuids = self._uuid_index.uuids_with_prefix(digits)
        for other in self._others[bisect_left(self._others, bytes.fromhex(even)) :]:
            if not other.hex().startswith(even):
                break
            if other.hex().startswith(digits):
                uuids.append(other)
        return uuids


def _unique_prefix(uuid: bytes, neighbours: Sequence[bytes]) -> str:
    """The shortest prefix of a new uuid, at least PUBLIC_ID_DIGITS_MIN digits, that no other uuid begins with.

    `neighbours` are those just before and after it in hex order.
    """
    number = int.from_bytes(uuid, "big")
    # Two uuids share the leading hex digits before the highest bit in which they differ.
    differing = min([number ^ int.from_bytes(other, "big") for other in neighbours], default=1 << UUID_BITS)
    shared = UUID_DIGITS - (differing.bit_length() + 3) // 4
    return uuid.hex()[: max(PUBLIC_ID_DIGITS_MIN, shared + 1)]
