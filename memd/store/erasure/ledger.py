"""The erasures of a data directory: what is being erased, and what was.

Rule: one small file for each, in the folder `memd.erasures`; it is written before anything is erased, and says when all
of it is done. It has ids, and never a text. It stays: that is how a restored backup is noticed that brings back what
was erased, and how ids stay above those that are gone. The digests of the messages, with which who guesses the text
could check his guess, are in a file beside it as long as they are needed, which is encrypted where the topics are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from memd.entries import Erased
from memd.errors import StoreError
from memd.store.disk import LocalDisk
from memd.store.files import Files, replace_file
from memd.store.layout import DIGESTS_SUFFIX, TopicLayout, erasures_dir
from memd.store.log.columns import Records, uuid_halves
from memd.store.log.recovery import Finding
from memd.wording import counted, day_and_time

Kind = Literal["chunks", "age", "topic"]
"""chunks: those that were named; age: those that were said before a time; topic: all of it, with its folder."""
_SUFFIX = ".json"


class Erasure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One erasure, in one topic."""

    id: int
    """A canonical_id that no entry has."""
    kind: Kind
    topic_id: str
    at: int
    """When it was asked for, in microseconds since the epoch."""
    by: str
    chunks: int
    entries: int = 0
    highest_id: int = 0
    """Of a topic: no entry that was erased has a higher canonical_id."""
    uuids: bytes = b""
    """Of the chunks, 16 bytes each; none of a topic."""
    digests: bytes = b""
    """Of their messages, 16 bytes each, until it is done: what is still to be found in `hot.log`. In a file beside."""
    forbid: bool = False
    """Whether the messages are never to be stored again."""
    is_moved: bool = False
    """Of a topic: whether its folder has been put aside, so that one of the same name is another one."""
    done_at: int | None = None

    @property
    def mark(self) -> Erased:
        """The fact, as entries have it."""
        return Erased(at=self.at, by=self.by)

    @property
    def chunk_uuids(self) -> frozenset[bytes]:
        """The uuids of the chunks."""
        return frozenset(self.uuids[at : at + 16] for at in range(0, len(self.uuids), 16))

    @property
    def message_digests(self) -> frozenset[bytes]:
        """The digests of the messages that the chunks came from."""
        return frozenset(self.digests[at : at + 16] for at in range(0, len(self.digests), 16))

    def __str__(self) -> str:
        what = f"topic {self.topic_id}" if self.kind == "topic" else counted(self.chunks, "chunk")
        where = f" ({counted(self.chunks, 'chunk')})" if self.kind == "topic" else f" of topic {self.topic_id}"
        is_being = "" if self.done_at is not None else "is being "
        return f"{what}{where} {is_being}erased on {day_and_time(self.at)} by {self.by}"


class Erasures(ABC):
    """All erasures, done and under way, oldest first. Any thread may read and write."""

    def __init__(self, known: Iterable[Erasure] = ()) -> None:
        """`known`: those that are kept already."""
        self._known = {one.id: one for one in known}

    @abstractmethod
    def write(self, erasure: Erasure) -> None:
        """Write an erasure, durably. Raises StoreWriteFailed: it is as it was."""

    def __iter__(self) -> Iterator[Erasure]:
        return iter(sorted(self._known.values(), key=lambda one: one.id))

    @property
    def pending(self) -> list[Erasure]:
        """Those that are not done, oldest first."""
        return [one for one in self if one.done_at is None]

    @property
    def highest_id(self) -> int:
        """An id that all ids which are known to have been given out and erased are not above; 0 if none were."""
        return max((max(one.id, one.highest_id) for one in self), default=0)


class ErasureLedger(Erasures):
    """The erasures of one data directory. See Erasures: each has a file of its own."""

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        self._files = files
        self._folder = erasures_dir(data_dir)
        super().__init__(read_erasures(files, self._folder)[0])
        needed = {_digests_file(self._folder, one) for one in self.pending}
        with suppress(StoreError):  # on a disk that is read-only
            for name in files.names(self._folder):
                if name.endswith(DIGESTS_SUFFIX) and self._folder / name not in needed:
                    files.wipe(self._folder / name)

    def write(self, erasure: Erasure) -> None:
        """Write an erasure, durably.

        Raises:
            StoreWriteFailed: the file is as it was (DiskFull if the disk is full).
        """
        if not self._files.is_directory(self._folder):
            self._files.make_directory(self._folder)
            self._files.sync_directory(self._folder.parent)
        digests = _digests_file(self._folder, erasure)
        if erasure.digests:
            replace_file(self._files, digests, erasure.digests)
        bare = msgspec.structs.replace(erasure, digests=b"")
        replace_file(self._files, self._folder / f"{erasure.id}{_SUFFIX}", msgspec.json.encode(bare))
        if not erasure.digests:
            self._files.wipe(digests)
        self._known[erasure.id] = erasure


def read_erasures(files: Files, folder: Path) -> tuple[list[Erasure], list[Finding]]:
    """Return the erasures in a folder, oldest first, and a finding for each file that cannot be read."""
    found, problems = [], []
    for name in files.names(folder):
        if not name.endswith(_SUFFIX):
            continue  # what is being erased, or half a file
        try:
            erasure = msgspec.json.decode(files.read(folder / name), type=Erasure)
            digests = _digests_file(folder, erasure)
            if erasure.done_at is None and files.size(digests) is not None:
                erasure = msgspec.structs.replace(erasure, digests=files.read(digests))
            found.append(erasure)
        except (StoreError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            problems.append(Finding("damaged", str(folder / name), f"says nothing readable of an erasure: {error}"))
    return sorted(found, key=lambda one: one.id), problems


def _digests_file(folder: Path, erasure: Erasure) -> Path:
    return folder / f"{erasure.id}{DIGESTS_SUFFIX}"


def returned(erasures: Collection[Erasure], layout: TopicLayout, records: list[Records]) -> list[Finding]:
    """Return a finding for each erasure that is done and whose text is in the topic again: a backup was restored.

    Args:
        records: the columns of all the topic's entries.
    """
    return [
        Finding(
            "returned",
            str(layout.directory),
            f"{one} is there again, as a backup had it; `memd erase --resume` erases it once more",
        )
        for one in erasures
        if one.topic_id == layout.topic_id and one.done_at is not None and _is_back(one, records)
    ]


def _is_back(erasure: Erasure, records: list[Records]) -> bool:
    if erasure.kind == "topic":
        return any(int(rows["canonical_id"].min(initial=1 << 63)) <= erasure.highest_id for rows in records)
    halves = [uuid_halves(uuid) for uuid in erasure.chunk_uuids]
    high = np.array([one for one, _ in halves], dtype=np.uint64)
    lows = {int(low) for _, low in halves}
    for rows in records:
        found = rows[np.isin(rows["uuid_high"], high) & (rows["status"] == 0)]
        if any(int(low) in lows for low in found["uuid_low"].tolist()):
            return True
    return False


def finding_of(erasure: Erasure, folder: Path) -> Finding:
    """Return the erasure as a fact; one that is not done is more than that."""
    if erasure.done_at is None:
        return Finding("unfinished", str(folder), f"{erasure}; start memd, or run `memd erase --resume`: it goes on")
    return Finding("notice", str(folder), str(erasure))
