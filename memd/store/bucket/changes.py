"""The changes of a data directory since a backup looked at it: noted as they are made, and found by comparing folders.

Rule: a change is noted after it was made: the folder is due, and which of its files are others now; what a file has
grown by shows in its size. Who takes the notes and reads then has the change, or the note of one that came later. An
append that is under way may be read in halves: its rest follows with the next round, and who restores this one gets an
interrupted write, which the log recovers from.

The journal is read before the log, so that the log has everything that the journal counts as stored, and the active
file before the full ones are listed. Where a file was replaced or rotated meanwhile, the folder is due again. What is
read is what is on the disk: of an encrypted directory, encrypted. Merged and lexical indexes are left out: they are
built again, as are `.torn` files, which nobody reads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Set
from functools import lru_cache
from itertools import islice
from pathlib import Path

import msgspec

from memd.errors import StoreError
from memd.store.bucket.catalog import KnownFile
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, checksum_of
from memd.store.layout import AUDIT_NAME, ERASURES_NAME, KEY_NAME, AuditLayout, TopicLayout, erasures_dir, topic_of

_PLACES_KEPT = 4096
_OF_THE_DIRECTORY = (KEY_NAME, f"{AUDIT_NAME}/", f"{ERASURES_NAME}/")
COMPARED_AT_ONCE = 500
"""Folders of an earlier time that a round compares before what has just changed has its turn again."""
PIECE_BYTES = 8 << 20
ALL = ""
"""The name of a folder in itself: noted, all of its files are compared."""


class ChangedFiles:
    """The folders that are due (a topic's; "" for the data directory's own files). For any thread."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._lock = threading.Lock()
        self._replaced: dict[str, set[str]] = {}
        """Of folders that have changed, the files that did more than grow."""
        self._earlier: dict[str, None] = {}
        """Folders that may have changed before anything was noted."""
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
        """Note that a file was appended to (`grew`); or that it is another one now, was cut, or is gone."""
        with self._lock:
            names = self._replaced.setdefault(folder, set())
            if not grew:
                names.add(name)

    def begin(self, folders: Iterable[str]) -> None:
        """Note that these may have changed before."""
        with self._lock:
            self._earlier = dict.fromkeys(folders)

    def due(self) -> list[str]:
        """The folders of one round: all that have just changed, and some of those of an earlier time."""
        with self._lock:
            earlier = (folder for folder in self._earlier if folder not in self._replaced)
            return [*self._replaced, *islice(earlier, COMPARED_AT_ONCE)]

    def take(self, folder: str) -> set[str]:
        """Return the files of a folder that are others now, and forget them; with `ALL`, any may be."""
        with self._lock:
            names = self._replaced.pop(folder, set())
            if folder in self._earlier:
                del self._earlier[folder]
                names.add(ALL)
            return names

    def replaced(self, folder: str) -> Set[str]:
        """Return those that were noted since."""
        with self._lock:
            return frozenset(self._replaced.get(folder, ()))

    @property
    def earlier(self) -> int:
        """How many folders of an earlier time are left."""
        return len(self._earlier)

    @property
    def is_compared(self) -> bool:
        """Whether no folder is left of which any file may have changed."""
        with self._lock:
            return not self._earlier and not any(ALL in names for names in self._replaced.values())


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


class MovedMeanwhile(StoreError):
    """A file was replaced while it was read."""


class Looker:
    """Compares folders with what the bucket has of them."""

    def __init__(self, disk: NotingDisk, data_dir: Path) -> None:
        self._disk = disk
        self._data_dir = data_dir

    def look(self, folder: str, known: dict[str, KnownFile], replaced: Set[str]) -> tuple[list[Piece], list[str]]:
        """Return the pieces of a folder that the bucket lacks, and the names of files that are gone.

        Args:
            replaced: as it was noted.

        Raises:
            MovedMeanwhile: the folder was changed meanwhile.
            StoreError: it cannot be read now.
        """
        pieces, there, active = [], set(), self._data_dir / folder / "active.bin"
        before = self._disk.identity(active)
        for name, path, is_final in self._names(folder):
            if path == active:
                before = self._disk.identity(path)  # one that takes its place later is noticed in the end
                if before is None:
                    continue  # it went since it was listed, and the next one begins with the next append
            there.add(name)
            piece = self._piece(folder, name, path, is_final, known.get(name), replaced)
            if piece is not None:
                pieces.append(piece)
        if self._disk.identity(active) != before:
            raise MovedMeanwhile(f"{active}: was rotated while its topic was looked at")
        return pieces, [name for name in known if name not in there]

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
        self, folder: str, name: str, path: Path, is_final: bool, known: KnownFile | None, replaced: Set[str]
    ) -> Piece | None:
        """The bytes of a file that the bucket lacks, if any."""
        disk, identity = self._disk, self._disk.identity(path)
        size, changed_at, start = disk.size(path) or 0, disk.changed_at(path), 0
        replaced = replaced | disk.changed.replaced(folder)  # that it was cut was noted before it grew again
        if known is not None and size >= known.size and name not in replaced:
            is_told = ALL not in replaced
            if size == known.size and (is_told or changed_at == known.changed_at):
                return None
            if is_told or checksum_of(disk, path, known.size).crc == known.crc:
                start = known.size
        if known is not None and start == size > 0:
            return None
        return Piece(name, path, start, size, changed_at, is_final, identity, known if start else None)

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
