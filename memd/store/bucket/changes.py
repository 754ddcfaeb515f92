"""The changes of a data directory since a backup looked at it: noted as they are made, and found by comparing folders.

Rule: a change is noted after it was made. Who takes a note and reads the file then has the change, or the note of one
that came later. An append that is under way may be read in halves: its rest follows with the next round, and who
restores this one gets an interrupted write, which the log recovers from.

The journal is read before the log, so that the log has everything that the journal counts as stored, and the active
file before the full ones are listed. Where a file was replaced or rotated meanwhile, all of it is done again. What is
read is what is on the disk: of an encrypted directory, encrypted. Merged and lexical indexes are left out: they are
built again, as are `.torn` files, which nobody reads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from memd.errors import StoreError
from memd.store.bucket.catalog import KnownFile
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, checksum_of
from memd.store.layout import AUDIT_NAME, ERASURES_NAME, KEY_NAME, AuditLayout, TopicLayout, erasures_dir, topic_of

_PLACES_KEPT = 4096
_OF_THE_DIRECTORY = (KEY_NAME, f"{AUDIT_NAME}/", f"{ERASURES_NAME}/")

PIECE_BYTES = 8 << 20
_TRIES = 4


Notes = dict[str, bool]
"""By name in a folder: whether more has changed than that the file grew."""


class ChangedFiles:
    """The notes, by folder (a topic's; "" for the data directory's own files) and name in it. For any thread."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._lock = threading.Lock()
        self._notes: dict[str, Notes] = {}
        self.place_of = lru_cache(_PLACES_KEPT)(self._place_of)
        """The folder and the name of a file; None: nothing that is ever backed up."""

    def _place_of(self, path: Path) -> tuple[str, str] | None:
        if path.name.endswith(TEMPORARY_SUFFIX) or not path.is_relative_to(self._data_dir):
            return None
        name = path.relative_to(self._data_dir).as_posix()
        if topic_id := topic_of(name):
            return topic_id, name[len(topic_id) + 1 :]
        return ("", name) if name.startswith(_OF_THE_DIRECTORY) else None

    def note(self, folder: str, name: str, *, grew: bool = False) -> None:
        """Note that a file was appended to; or that it is another one now, was cut, or is gone."""
        with self._lock:
            notes = self._notes.setdefault(folder, {})
            notes[name] = not grew or notes.get(name, False)

    def folders(self) -> list[str]:
        """The folders in which something has changed."""
        with self._lock:
            return list(self._notes)

    def take(self, folder: str) -> Notes:
        """Return the notes of a folder, and forget them."""
        with self._lock:
            return self._notes.pop(folder, {})

    def give_back(self, folder: str, taken: Notes) -> None:
        """Note again what could not be backed up."""
        with self._lock:
            self._notes[folder] = merged(taken, self._notes.get(folder, {}))

    def __bool__(self) -> bool:
        return bool(self._notes)


def merged(earlier: Notes, later: Notes) -> Notes:
    """Return the notes of both times as one."""
    return {name: earlier.get(name, False) or later.get(name, False) for name in earlier | later}


class NotingDisk(LocalDisk):
    """The real file system; what is changed in a data directory is noted."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__()
        self.changed = ChangedFiles(data_dir)

    def note(self, path: Path, *, grew: bool = False) -> None:
        """See LocalDisk."""
        if (place := self.changed.place_of(path)) is not None:
            self.changed.note(*place, grew=grew)


class Piece(msgspec.Struct, frozen=True):
    """Bytes of a file that the bucket lacks."""

    name: str
    path: Path
    start: int
    """All before it stays as it is in the bucket."""
    end: int
    changed_at: int
    is_final: bool
    """Whether the file is never appended to again."""
    identity: object
    known: KnownFile | None
    """The part that stays, if any."""


class FolderChanges(msgspec.Struct, frozen=True):
    """The difference of one folder."""

    pieces: list[Piece]
    gone: list[str]
    notes: Notes
    """The notes of it, which are taken."""


class MovedMeanwhile(StoreError):
    """A file was replaced while it was read."""


class Looker:
    """Compares folders with what the bucket has of them."""

    def __init__(self, disk: NotingDisk, data_dir: Path) -> None:
        self._disk = disk
        self._data_dir = data_dir

    def look(self, folder: str, known: dict[str, KnownFile], *, all_of_it: bool) -> FolderChanges:
        """Return what has changed in a folder; with `all_of_it`, also what was changed before it was noted.

        Raises:
            StoreError: it cannot be read now; what was noted of it is noted again.
        """
        notes: Notes = {}
        try:
            for _ in range(_TRIES):
                notes = merged(notes, self._disk.changed.take(folder))
                if (found := self._once(folder, known, notes, all_of_it)) is not None:
                    return found
        except StoreError:
            self._disk.changed.give_back(folder, notes)
            raise
        self._disk.changed.give_back(folder, notes)
        raise MovedMeanwhile(f"{self._data_dir / folder}: changes faster than it can be read; it is tried again")

    def _once(self, folder: str, known: dict[str, KnownFile], notes: Notes, every: bool) -> FolderChanges | None:
        """None: the folder was changed meanwhile."""
        pieces, there = [], set()
        every = every or "" in notes  # the folder itself was put in its place, or away
        active = self._data_dir / folder / "active.bin" if folder else None
        before = self._disk.identity(active) if active is not None else None
        for name, path, is_final in self._names(folder):
            if name == "active.bin":
                before = self._disk.identity(path)  # one that takes its place later is noticed in the end
                self._take_again(folder, notes)  # what the journal counts as stored is noted by now
                if before is None:
                    continue  # it went since it was listed, and the next one begins with the next append
            there.add(name)
            piece = self._piece(name, path, is_final, known.get(name), notes.get(name), every)
            if piece is not None:
                pieces.append(piece)
        if active is not None and self._disk.identity(active) != before:
            return None
        return FolderChanges(pieces, [name for name in known if name not in there], notes)

    def _take_again(self, folder: str, notes: Notes) -> None:
        """Take what was noted since of the log; of files that were looked at before it, the next look takes it."""
        newer = self._disk.changed.take(folder)
        of_the_log = {name: note for name, note in newer.items() if name == "active.bin" or "/" in name}
        if later := {name: note for name, note in newer.items() if name not in of_the_log}:
            self._disk.changed.give_back(folder, later)
        notes |= merged(notes, of_the_log)

    def _names(self, folder: str) -> Iterator[tuple[str, Path, bool]]:
        """The files of a folder that are there: name, path, and whether it is never appended to."""
        disk = self._disk
        if not folder:
            audit = AuditLayout(self._data_dir)
            paths = [self._data_dir / KEY_NAME, *(audit.folder / name for name in audit.names(disk)), audit.head]
            ledger = erasures_dir(self._data_dir)
            paths += [ledger / name for name in disk.names(ledger) if name.endswith(".json")]
            found = [(path.relative_to(self._data_dir).as_posix(), path, False) for path in paths]
        else:
            layout = TopicLayout(self._data_dir, folder)
            # The key first: nothing of the topic can be read without it.
            first = (layout.key, layout.former_names, layout.forbidden, layout.hot, layout.active)
            found = [(path.name, path, False) for path in first]
        yield from (one for one in found if disk.size(one[1]) is not None)
        if folder:
            for number in layout.segment_ids(disk):
                for path in layout.of_segment(number):
                    if disk.size(path) is not None:
                        yield path.relative_to(layout.directory).as_posix(), path, True

    def _piece(
        self, name: str, path: Path, is_final: bool, known: KnownFile | None, is_replaced: bool | None, every: bool
    ) -> Piece | None:
        """`is_replaced`: as it was noted; None: it was not."""
        disk, size = self._disk, self._disk.size(path) or 0
        if known is None or is_replaced or size < known.size:
            return self._made(name, path, 0, size, is_final, None)
        # Of an audit, to which other processes append too, there are no notes.
        may_have_grown = every or is_replaced is not None or (name.startswith(AUDIT_NAME) and name.endswith(".jsonl"))
        if not may_have_grown or (size == known.size and (not every or disk.changed_at(path) == known.changed_at)):
            return None
        if every and checksum_of(disk, path, known.size).crc != known.crc:
            return self._made(name, path, 0, size, is_final, None)
        return self._made(name, path, known.size, size, is_final, known) if size > known.size else None

    def _made(self, name: str, path: Path, start: int, end: int, is_final: bool, known: KnownFile | None) -> Piece:
        disk = self._disk
        return Piece(name, path, start, end, disk.changed_at(path), is_final, disk.identity(path), known)

    def read(self, piece: Piece) -> Iterator[bytes]:
        """Yield its bytes.

        Raises:
            MovedMeanwhile: the path names another file by now, or a shorter one.
        """
        for offset in range(piece.start, piece.end, PIECE_BYTES):
            wanted = min(PIECE_BYTES, piece.end - offset)
            try:
                data = self._disk.read_at(piece.path, offset, wanted)
            except StoreError as error:
                if self._disk.size(piece.path) is not None:
                    raise
                raise MovedMeanwhile(str(error)) from error
            if len(data) < wanted or self._disk.identity(piece.path) != piece.identity:
                raise MovedMeanwhile(f"{piece.path}: was replaced while it was read")
            yield data
