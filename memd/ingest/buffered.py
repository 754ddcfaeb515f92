"""All that a topic's buffer has and its log has not, as one search finds it.

Rule: its parts are listed on the event loop, which owns the buffer, and cut in the thread of the search (unstored.py).
A conversation that did not change is neither listed nor joined again.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection

from memd.conversation.conversation import Conversation
from memd.conversation.hot_buffer import HotBuffer
from memd.ingest.unstored import Part, PartCutter, PartRun, note_parts, owed_parts, parts_of
from memd.store.pending import PendingChunk, PendingRun, UnstoredText


class ListedParts:
    """The parts of each conversation, listed when it has changed only, and behind the last of them where it has grown:
    listing takes 20 µs a turn, and each request asks for all of them."""

    def __init__(self) -> None:
        self._listed: dict[str, tuple[int, int, PartRun]] = {}
        """By conversation: `changes` and length at that time, and the parts."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the chunks that were joined, beside what they have by themselves; approximate."""
        joined = (parts.spoken.cut for _, _, parts in self._listed.values())
        return sum(run.columns_bytes for cut, run in joined if len(cut) > 1)

    def of(self, conversation: Conversation) -> PartRun:
        """Its parts as of now, without those owed."""
        changes, length, parts = self._listed.get(conversation.id, (-1, 0, PartRun()))
        if changes == conversation.changes:
            left = bisect.bisect_right(parts, conversation.stored, key=lambda part: part.end)
            parts = PartRun(parts[left:]) if left else parts  # without what was stored since
        is_known = changes == conversation.changes and bool(parts) and parts[0].begin >= conversation.stored
        if is_known and length == len(conversation):
            pass
        elif is_known and len(parts) > 1:  # the last one may go on
            parts = PartRun((*parts[:-1], *parts_of(conversation, begin=parts[-2].end)))
        else:
            parts = PartRun(parts_of(conversation))
        self._listed[conversation.id] = conversation.changes, len(conversation), parts
        return parts

    def forget_but(self, conversations: Collection[str]) -> None:
        """Drop those of other conversations."""
        for gone in self._listed.keys() - conversations:
            del self._listed[gone]


class BufferedText(UnstoredText):
    """All that a buffer has and the log has not, as it is now; see `UnstoredText`."""

    def __init__(self, buffer: HotBuffer, cutter: PartCutter, listed: ListedParts) -> None:
        """`listed`: the parts as they were listed the last time; brought up to date."""
        self._cutter = cutter
        conversations = buffer.conversations()
        waiting = {one.id: one for one in conversations if one.stored < one.wanted_end}
        listed.forget_but(waiting.keys())
        self._parts = [listed.of(one) for one in waiting.values()]
        self._parts += [PartRun(owed_parts(one)) for one in conversations if one.owed]
        self._parts += [PartRun((part,)) for part in note_parts(buffer)]

    def __bool__(self) -> bool:
        return any(self._parts)

    def has_others_than(self, digests: Collection[bytes]) -> bool:
        """See `UnstoredText.has_others_than`."""
        return any(part.has_others_than(digests) for parts in self._parts for part in parts)

    def chunks(self, but: Collection[bytes] = (), until: float | None = None) -> list[PendingRun]:
        """See `UnstoredText.chunks`."""
        self._cutter.forget_but(self._parts)
        seen: set[bytes] = set()  # branches share their beginning
        found = []
        for parts in self._parts:
            spoken = parts.spoken if parts.said.isdisjoint(but) else parts.without(but)
            cut, run = self._cutter.joined(spoken, until)
            self.is_partial |= len(cut) < len(spoken)
            if len(run.uuids) < len(run) or not seen.isdisjoint(run.uuids):
                new: dict[bytes, PendingChunk] = {}
                for chunk in run:
                    if chunk.entry.uuid not in seen:
                        new.setdefault(chunk.entry.uuid, chunk)
                run = PendingRun(new.values())
            seen |= run.uuids
            found.append(run)
        return found

    def part_with(self, uuid: bytes) -> Part | None:
        """The part with the chunk with this uuid; None if it is not pending. Called in a thread."""
        for parts in self._parts:
            for part, cut in zip(parts, self._cutter.cut(parts), strict=True):
                if uuid in cut.chunks.uuids:
                    return part
        return None
