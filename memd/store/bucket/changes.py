"""The changes of a data directory since a backup looked at it: which folders have some, and the bytes that are new.

Rule: a change is noted after it was made: its folder is due, and the file is another one now, unless it only grew; what
it has grown by shows in its size. So who takes the notes and reads then has the change, or the note of one that came
later. Of a folder of which nothing was noted, as no backup ran, files are compared with the checksums in the bucket.

The journal is read before the log, so that the log has everything that the journal counts as stored, and the active
file before the full ones are listed. Where a file was replaced or rotated meanwhile, the folder is due again; an append
that is under way may be read in halves, which is an interrupted write for who restores that round. What is read is what
is on the disk: of an encrypted directory, encrypted. Merged indexes and `.torn` files are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from functools import lru_cache
from pathlib import Path

import msgspec

from memd.errors import StoreError
from memd.store.bucket.rounds import KnownFile
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, checksum_of
from memd.store.layout import AUDIT_NAME, ERASURES_NAME, KEY_NAME, AuditLayout, TopicLayout, erasures_dir, topic_of

_PLACES_KEPT = 4096
_OF_THE_DIRECTORY = (KEY_NAME, f"{AUDIT_NAME}/", f"{ERASURES_NAME}/")
_PIECE_BYTES = 8 << 20


class NotingDisk(LocalDisk):
    """The real file system; what is changed in a data directory is noted by folder: a topic's, or "" for the files of
    the directory itself. For any thread."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__()
        self._noting = threading.Lock()
        self._noted: dict[str, set[str]] = {}

        def place_of(path: Path) -> tuple[str, str] | None:
            if path.name.endswith(TEMPORARY_SUFFIX) or not path.is_relative_to(data_dir):
                return None
            name = path.relative_to(data_dir).as_posix()
            if topic_id := topic_of(name):
                return topic_id, name[len(topic_id) + 1 :]
            return ("", name) if name.startswith(_OF_THE_DIRECTORY) else None

        self._place_of = lru_cache(_PLACES_KEPT)(place_of)

    def note(self, path: Path, *, grew: bool = False) -> None:
        """See LocalDisk."""
        if (place := self._place_of(path)) is not None:
            with self._noting:
                names = self._noted.setdefault(place[0], set())
                if not grew:
                    names.add(place[1])

    def note_replaced(self, folder: str, name: str) -> None:
        """Note that a file has to be sent anew, whatever the bucket has of it."""
        with self._noting:
            self._noted.setdefault(folder, set()).add(name)

    @property
    def due(self) -> list[str]:
        """The folders in which something has changed."""
        with self._noting:
            return list(self._noted)

    def take(self, folder: str) -> set[str]:
        """Return the files of a folder that are others now, or were cut, and forget them."""
        with self._noting:
            return self._noted.pop(folder, set())

    def replaced(self, folder: str) -> Set[str]:
        """Return those that were noted since."""
        with self._noting:
            return frozenset(self._noted.get(folder, ()))


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
        self._disk, self._data_dir = disk, data_dir

    def look(
        self, folder: str, known: dict[str, KnownFile], replaced: Set[str] | None
    ) -> tuple[list[Piece], list[str]]:
        """Return the pieces of a folder that the bucket lacks, and the names of files that are gone.

        Args:
            replaced: the files that are others now; None: any may be.

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
            if (piece := self._piece(folder, name, path, is_final, known.get(name), replaced)) is not None:
                pieces.append(piece)
        if self._disk.identity(active) != before:
            raise MovedMeanwhile(f"{active}: was rotated while its topic was looked at")
        return pieces, [name for name in known if name not in there]

    def _names(self, folder: str) -> Iterator[tuple[str, Path, bool]]:
        """The files of a folder that are there: name, path, and whether it is never appended to."""
        disk, base = self._disk, self._data_dir / folder
        if folder:
            layout = TopicLayout(self._data_dir, folder)
            # The key first: nothing of the topic can be read without it.
            paths = [layout.key, layout.former_names, layout.forbidden, layout.hot, layout.active]
        else:
            audit, ledger = AuditLayout(base), erasures_dir(base)
            paths = [base / KEY_NAME, *(audit.folder / name for name in audit.names(disk)), audit.head]
            paths += [ledger / name for name in disk.names(ledger) if name.endswith(".json")]
        yield from ((one.relative_to(base).as_posix(), one, False) for one in paths if disk.size(one) is not None)
        if folder:
            full = (path for number in layout.segment_ids(disk) for path in layout.of_segment(number))
            yield from ((one.relative_to(base).as_posix(), one, True) for one in full if disk.size(one) is not None)

    def _piece(
        self, folder: str, name: str, path: Path, is_final: bool, known: KnownFile | None, replaced: Set[str] | None
    ) -> Piece | None:
        """The bytes of a file that the bucket lacks, if any."""
        disk, identity = self._disk, self._disk.identity(path)
        size, changed_at, start = disk.size(path) or 0, disk.changed_at(path), 0
        # That it was cut was noted before it grew again, perhaps a moment ago.
        is_other = name in (replaced or ()) or name in disk.replaced(folder)
        if known is not None and size >= known.size and not is_other:
            if size == known.size and (replaced is not None or changed_at == known.changed_at):
                return None
            if replaced is not None or checksum_of(disk, path, known.size).crc == known.crc:
                start = known.size
            if start == size > 0:
                return None
        return Piece(name, path, start, size, changed_at, is_final, identity, known if start else None)

    def read(self, piece: Piece) -> Iterator[bytes]:
        """Yield its bytes.

        Raises:
            MovedMeanwhile: the path names another file by now, or a shorter one.
        """
        for offset in range(piece.start, piece.end, _PIECE_BYTES):
            wanted = min(_PIECE_BYTES, piece.end - offset)
            try:
                data = self._disk.read_at(piece.path, offset, wanted)
            except StoreError as error:
                if self._disk.size(piece.path) is not None:
                    raise
                raise MovedMeanwhile(str(error)) from error
            if len(data) < wanted or self._disk.identity(piece.path) != piece.identity:
                raise MovedMeanwhile(f"{piece.path}: was replaced while it was read")
            yield data
