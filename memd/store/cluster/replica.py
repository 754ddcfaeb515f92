"""A replica: a folder that follows what is kept of a topic that another daemon writes, and the log opened over it.

Rule: nothing is written but the folder, a cache that nobody trusts after a restart before it was compared. What was
appended is fetched from the end that is known on; all else by the keys of objects, which never change. A refresh that
fails leaves the log as it was. What the owner has erased or replaced is overwritten here; the journal never is on this
disk.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from memd.entries import Entry
from memd.errors import CorruptFile, ObjectMissing, StoreError
from memd.store.cluster.kept import KeptObject, Listing, segment_in
from memd.store.cluster.reading_ahead import read_ahead
from memd.store.cluster.replica_log import ReplicaLog
from memd.store.disk import LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.files import TEMPORARY_SUFFIX, FileChecksum, checksum_of
from memd.store.layout import REPLICA_NAME, TopicLayout, is_derived, replicas_dir
from memd.store.local_shelf import LocalShelf
from memd.store.log.format import HEADER_BYTES
from memd.store.log.journal import payloads_in
from memd.store.log.segment import read_header
from memd.store.parts import StoreShared
from memd.store.shelf import Heads, Position, Stream

GONE_SUFFIX = ".gone"
"""Ends the name of a file that is to be overwritten: nobody opens it any more, some may still read it."""
_TRIES = 16
"""A topic that changes while it is read is read again. Its owner may be busy, and this machine slow."""


class ReadShelf(Protocol):
    """The part of a shelf that replicas need. Every method raises StoreError where that cannot be asked."""

    def heads(self, topic_ids: Collection[str]) -> dict[str, Heads]:
        """See Shelf."""

    def read(self, topic_id: str, stream: Stream, after: Position) -> bytes:
        """See Shelf."""

    def listing(self, topic_id: str) -> Listing | None:
        """See PostgresShelf."""

    def pieces(self, kept: KeptObject) -> Iterator[bytes]:
        """See PostgresShelf."""


class Refreshed(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a refresh."""

    log: ReplicaLog
    """Another one after anything but an append."""
    entries: tuple[Entry, ...]
    """By which it was extended."""
    payloads: tuple[bytes, ...]
    """New records of the journal."""
    is_new_journal: bool
    """They are all that it has."""
    has_erased: bool
    """Something was erased: what was read before is not to be shown any more."""


class _Known(msgspec.Struct, frozen=True):
    """The state of the topic to which the folder is equal."""

    revision: int
    log_revision: int
    log: Position
    keys: dict[str, str]
    """The key of the object that each file is equal to."""
    full: frozenset[int]
    """Segments that were no objects yet when they were fetched, and full."""


class _MovedError(StoreError):
    """The topic has changed while it was read."""


class Replica:
    """One topic. For one thread at a time; the log that it gives out is for any."""

    def __init__(self, source: ReadShelf, shared: StoreShared, data_dir: Path, topic_id: str) -> None:
        """`data_dir`: the folder is below `replicas_dir` in it."""
        self._source = source
        self._shared = shared
        self._files = shared.files
        self._layout = TopicLayout(replicas_dir(data_dir), topic_id)
        self._shelf = LocalShelf(shared.files, self._layout.data_dir)
        self._topic = topic_id
        self._log: ReplicaLog | None = None
        self._known: _Known | None = None
        self._hot: Position | None = None
        self._has_erased = False
        """And nobody was told so yet."""

    def refresh(self, heads: Heads) -> Refreshed | None:
        """Bring the replica up to date with these heads, at least; None: nothing is new.

        Raises:
            StoreError: the log is as it was.
        """
        for _ in range(_TRIES):
            try:
                return self._refreshed(heads)
            except (_MovedError, ObjectMissing) as error:
                found = self._source.heads([self._topic]).get(self._topic)
                if found is None:
                    break
                if isinstance(error, ObjectMissing) and found.revision == heads.revision:
                    raise  # it was not replaced: it is lost
                heads = found
                if self._is_ahead_of(heads):  # the database was restored, or lost its end with a server
                    self._known = self._hot = None
        raise StoreError(f"topic {self._topic}: it changes faster than it can be read; it is tried again")

    def is_equal_to(self, heads: Heads) -> bool:
        """Whether the folder has nothing that was replaced since. It may lack what was appended."""
        if self._known is not None:
            return self._known.revision == heads.revision
        with suppress(StoreError):  # there is none, or it cannot be read
            return self._files.read(self._layout.directory / REPLICA_NAME) == _note_of(heads)
        return False

    def let_go(self) -> None:
        """Close the log. The folder stays."""
        if self._log is not None:
            self._log.close()
        self._log = self._known = self._hot = None

    def remove(self) -> None:
        """Close the log and overwrite the folder: the topic is gone, or was changed since anybody wanted it.

        Raises:
            StoreError: something is left of it.
        """
        wiper = Wiper(self._files)
        if self._log is not None:
            self._log.retire(wiper)
        self.let_go()
        wiper.wipe_folder(self._layout.directory)

    def is_current(self, heads: Heads) -> bool:
        """Whether `refresh` would find nothing new."""
        known = self._known
        return known is not None and (known.revision, known.log, self._hot) == (heads.revision, heads.log, heads.hot)

    def sweep(self) -> None:
        """Overwrite what is not needed any more. Slow, and nobody waits for it: any thread may do it."""
        wiper = Wiper(self._files)
        for folder in (self._layout.directory, self._layout.segments):
            for name in self._files.names(folder):
                if name.endswith(GONE_SUFFIX):
                    wiper.wipe(folder / name)

    def _is_ahead_of(self, heads: Heads) -> bool:
        """Whether the replica has more than these heads: they are of an earlier moment, or something was lost."""
        known, hot = self._known, self._hot
        if known is None or hot is None or known.revision != heads.revision:
            return False
        return heads.log < known.log or heads.hot < hot

    def _refreshed(self, heads: Heads) -> Refreshed | None:
        known, log = self._known, self._log
        if self._is_ahead_of(heads):
            raise _MovedError
        if self.is_current(heads):
            return None
        is_same = known is not None and known.revision == heads.revision
        # The journal first: what is stored meanwhile is in both then, and not in neither.
        hot, payloads, is_new_journal = self._journal(heads, self._hot if is_same else None)
        has_erased, entries = False, tuple[Entry, ...]()
        is_extended = log is not None and known is not None and log.end == known.log
        is_extended &= known is not None and known.log.number == heads.log.number
        if log is None or known is None or not is_same or not (is_extended or known.log == heads.log):
            log, known, has_erased = self._renewed(heads)
        elif known.log != heads.log:
            entries = self._follow(log, heads)
            assert log.end is not None, "it was extended"
            known = msgspec.structs.replace(known, log=log.end)
        self._log, self._known, self._hot = log, known, hot
        return Refreshed(
            log=log, entries=entries, payloads=payloads, is_new_journal=is_new_journal, has_erased=has_erased
        )

    def _journal(self, heads: Heads, before: Position | None) -> tuple[Position, tuple[bytes, ...], bool]:
        """Where the journal ends, its new records, and whether they are all that it has.

        Args:
            before: up to where it is known; None: it may be the journal of another topic of this name.
        """
        if before == heads.hot:
            return before, (), False
        is_new = before is None or before.number != heads.hot.number
        after = Position(heads.hot.number, 0) if before is None or is_new else before
        data = self._behind("hot", after, heads.hot)
        payloads = payloads_in(data, HEADER_BYTES if after.end == 0 else 0)
        return Position(after.number, after.end + len(data)), tuple(payloads), is_new

    def _follow(self, log: ReplicaLog, heads: Heads) -> tuple[Entry, ...]:
        """Extend the log; return what came to it."""
        assert log.end is not None, "there is something to extend"
        data = self._behind("log", log.end, heads.log)
        return log.follow(data) if data else ()

    def _behind(self, stream: Stream, after: Position, end: Position) -> bytes:
        """The bytes of a stream behind a position, at least up to another one in the same file."""
        data = self._source.read(self._topic, stream, after)
        if after.end + len(data) < end.end:
            raise _MovedError
        return data

    # -- everything -----------------------------------------------------------------------------------------------

    def _renewed(self, heads: Heads) -> tuple[ReplicaLog, _Known, bool]:
        """Make the folder equal to what is kept and open the log over it; also say whether something was erased."""
        files, layout, known = self._files, self._layout, self._known
        listing = self._source.listing(self._topic)
        if listing is None or listing.revision != heads.revision:
            raise _MovedError
        for folder in (layout.data_dir, layout.directory, layout.segments):
            files.make_directory(folder)
        with closing(_Fetched(files, layout)) as fetched:
            fetched.file_full(heads.log.number)
            keys = {one.name: one.key for one in listing.objects}
            paths = {layout.directory / one.name: one for one in listing.objects}
            fetched.kept |= paths.keys()
            before = {} if known is None else known.keys
            new = {path: one for path, one in paths.items() if before.get(one.name) != one.key}
            missing = {path: one for path, one in new.items() if not fetched.has(path, one.checksum)}
            with read_ahead(missing.values(), self._source.pieces) as ahead:
                for path, one in missing.items():
                    try:
                        fetched.add(path, one.checksum, ahead(one))
                    except (ObjectMissing, CorruptFile):
                        if not is_derived(path.name):
                            raise
                        fetched.leave_out(path)  # it is searched without, until its owner has built it again
                        del keys[one.name]
            full = self._fetch_full(fetched, listing, heads)
            end = self._fetch_active(fetched, listing, heads)
            now = self._source.heads([self._topic]).get(self._topic)
            if now is None or (now.revision, now.log.number) != (heads.revision, heads.log.number):
                raise _MovedError
            is_equal = self.is_equal_to(heads)
            self._known = None  # until all is done, the folder equals nothing
            files.remove(layout.directory / REPLICA_NAME)
            if self._log is not None:
                self._log.claim.release()
            fetched.put_in_place()
        self._has_erased |= fetched.has_erased
        if self._log is None and not is_equal:
            Wiper(files).wipe_folder(layout.lexical)  # nobody knows whether it has words of what was erased
        elif self._log is not None and self._has_erased:
            self._log.wipe_words(Wiper(files))
        log = ReplicaLog(self._shared, self._shelf.claim(self._topic), self._log)
        fetched.write(layout.directory / REPLICA_NAME, _note_of(heads))
        has_erased, self._has_erased = self._has_erased, False
        return log, _Known(heads.revision, listing.log_revision, end, keys, full), has_erased

    def _fetch_full(self, fetched: _Fetched, listing: Listing, heads: Heads) -> frozenset[int]:
        """Fetch the full segments that are no objects yet; return their numbers."""
        is_same = self._known is not None and self._known.log_revision == listing.log_revision
        known = self._known.full if self._known is not None and is_same else frozenset[int]()
        objects, full = {segment_in(one.name) for one in listing.objects}, set()
        for number in (one for one in range(1, heads.log.number) if one not in objects):
            path = self._layout.bin(number)
            if number not in known:
                data = self._source.read(self._topic, "log", Position(number, 0))
                if not data:
                    continue  # there is none
                fetched.add(path, _checksum(data), [data])
            fetched.kept.add(path)
            full.add(number)
        return frozenset(full)

    def _fetch_active(self, fetched: _Fetched, listing: Listing, heads: Heads) -> Position:
        """Fetch what is new of the file that is appended to; return where it ends."""
        known, log, path = self._known, self._log, self._layout.active
        if heads.log.end == 0:
            return heads.log
        fetched.kept.add(path)
        is_same = known is not None and known.log_revision == listing.log_revision
        if log is not None and known is not None and is_same and log.end == known.log:
            self._follow(log, heads)
            return log.end
        start = Position(heads.log.number, 0)
        data = self._behind("log", start, heads.log)
        fetched.add(path, _checksum(data), [data])
        return Position(start.number, len(data))


class _Fetched:
    """New files of a replica, beside their places until all are there."""

    def __init__(self, files: LocalDisk, layout: TopicLayout) -> None:
        self.kept: set[Path] = set()
        """The files that the folder is to have."""
        self.has_erased = False
        """A file of the log did not merely grow."""
        self._files = files
        self._layout = layout
        self._beside: dict[Path, Path] = {}

    def file_full(self, number: int) -> None:
        """File what was appended to, where the owner is at a later segment."""
        files, layout = self._files, self._layout
        header = read_header(files, layout.active)
        if header is not None and header.segment_id < number and files.size(layout.bin(header.segment_id)) is None:
            files.rename(layout.active, layout.bin(header.segment_id))

    def has(self, path: Path, checksum: FileChecksum) -> bool:
        """Whether a file is there already."""
        size = self._files.size(path)
        return size == checksum.bytes and checksum_of(self._files, path, size) == checksum

    def add(self, path: Path, checksum: FileChecksum, pieces: Iterable[bytes]) -> None:
        """Fetch a file, unless it is there.

        Raises:
            StoreError: it cannot be read or written (CorruptFile if it is not what it should be).
        """
        files, size = self._files, self._files.size(path)
        before = None if size is None else checksum_of(files, path, size)
        if before == checksum:
            return
        temporary = self._beside[path] = path.with_name(path.name + TEMPORARY_SUFFIX)
        found = self.write(temporary, *pieces)
        if found != checksum:
            raise CorruptFile(f"{path.name}: its object in the bucket does not match its checksum; restore the bucket")
        if before is not None and path.suffix == ".bin":
            is_longer = before.bytes <= checksum.bytes and checksum_of(files, temporary, before.bytes) == before
            self.has_erased |= not is_longer

    def leave_out(self, path: Path) -> None:
        """Do without a file, whatever is in its place."""
        self.kept.discard(path)
        if (temporary := self._beside.pop(path, None)) is not None:
            self._files.remove(temporary)

    def write(self, path: Path, *pieces: bytes) -> FileChecksum:
        """Write a file, not durably."""
        crc = size = 0
        with closing(self._files.create(path)) as appender:
            for piece in pieces:
                appender.write(piece)
                crc, size = zlib.crc32(piece, crc), size + len(piece)
        return FileChecksum(size, crc)

    def put_in_place(self) -> None:
        """Put the new files in their places, and those aside that are not kept."""
        files, layout, wiper = self._files, self._layout, Wiper(self._files)
        for path, temporary in self._beside.items():
            if files.size(path) is None:
                files.rename(temporary, path)
            else:
                wiper.put_in_place(temporary, path)
        leftover = layout.active.with_name(layout.active.name + TEMPORARY_SUFFIX)
        own = [
            layout.active,
            leftover,
            layout.forbidden,
            *(layout.segments / name for name in files.names(layout.segments)),
        ]
        for path in own:
            if path not in self.kept and path.suffix != GONE_SUFFIX and files.size(path) is not None:
                self.has_erased |= path.suffix == ".bin"
                files.rename(path, path.with_name(path.name + GONE_SUFFIX))
        self._beside = {}

    def close(self) -> None:
        """Remove what has not got its place."""
        for temporary in self._beside.values():
            with suppress(StoreError):
                self._files.remove(temporary)


def _note_of(heads: Heads) -> bytes:
    return f"{heads.revision}\n".encode()


def _checksum(data: bytes) -> FileChecksum:
    return FileChecksum(len(data), zlib.crc32(data))


def replicas_in(files: LocalDisk, data_dir: Path) -> list[str]:
    """Return the topics of which there is a folder."""
    folder = replicas_dir(data_dir)
    return [name for name in files.names(folder) if files.is_directory(folder / name)]
