"""The log of a topic that another daemon writes: read here, and extended by what that daemon has appended.

Rule: nothing of it is decided here. What is appended was acknowledged by the owner; all else that changes a log (a full
segment, an index, an erasure) comes as files, and the log is opened anew over them.
"""

from __future__ import annotations

from collections.abc import Sequence

from memd.entries import Draft, Entry
from memd.errors import CorruptFile, StoreWriteFailed
from memd.store.erasure.rewriting import records_in
from memd.store.erasure.wiping import Wiper
from memd.store.parts import StoreShared
from memd.store.shelf import Claim, Position
from memd.store.topic import TopicLog
from memd.store.transitions import after_append


class ReplicaLog(TopicLog):
    """The log of a replica. `follow` for one thread, all else for any."""

    def __init__(self, shared: StoreShared, claim: Claim, before: ReplicaLog | None = None) -> None:
        """Open the files of a folder.

        Args:
            before: the log as it was opened the last time. It stays readable, and follows no more.
        """
        super().__init__(shared, claim)

    @property
    def end(self) -> Position | None:
        """The end of the file that can be extended; None: there is none."""
        return None if self._active is None else Position(self._active.segment_id, self._end)

    def append(self, drafts: Sequence[Draft], made_at: int = 0) -> list[Entry]:
        """Refuse: the owner writes.

        Raises:
            StoreWriteFailed: always.
        """
        raise StoreWriteFailed(f"topic {self.topic_id}: another daemon writes it, here it is only read; write there")

    def unsealed(self) -> list[int]:
        """None: indexes come from the owner."""
        return []

    def due_merge(self, budget_ms: float) -> None:
        """None: as above."""

    def follow(self, data: bytes) -> tuple[Entry, ...]:
        """Take in what the owner has appended behind `end`, whole appends; return the entries.

        Raises:
            StoreError: it is not that, or the folder cannot be written; nothing was taken in.
        """
        with self._state:
            active = self._active
            assert active is not None, "there is an end"
            entries, spans = records_in(data, self._end)
            if not spans or spans[-1].end != self._end + len(data):
                raise CorruptFile(
                    f"topic {self.topic_id}: what was appended at {self._end} of segment {active.segment_id} cannot be "
                    "read; check the database"
                )
            knows = self._snapshot.knows
            fresh = {entry.uuid for entry in entries if not knows(entry.uuid)}
            self.claim.append("log", self._end, data, sync=False)
            self._end += len(data)
            self._snapshot = after_append(self._snapshot, active, entries, spans, fresh)
            for entry in entries:
                self._reserved.pop(entry.uuid, None)
            self._public_ids.assign([entry.as_draft() for entry in entries if entry.uuid in fresh], {})
            self._shared.clock.observe(entries[-1].canonical_id)
            return tuple(entries)

    def wipe_words(self, wiper: Wiper) -> None:
        """Wipe the folder of words of a former version, which has words of what was erased."""
        wiper.wipe_folder(self._layout.lexical)
