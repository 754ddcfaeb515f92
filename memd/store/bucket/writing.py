"""The backup of a running daemon: changes in a data directory are written to a bucket, in rounds every few seconds, by
a separate thread.

Rule: nothing waits for it. A failed round leaves the bucket's valid state unchanged, and its changes are due again. The
data is read from the disk when it is sent and never held for later, so an unreachable bucket costs only a note for each
changed folder. It is retried with back-off up to a minute; the log reports the failure once and the recovery once.
Before it writes, a round checks whether another daemon has begun to write here; if so it never writes again.

Objects that no retained time needs are removed. The oldest full round to keep is the last one before the oldest
retained time. Older objects stay only if that round, or the present state, has pieces in them. Rounds with little in
use are emptied: the next rounds rewrite their files.

Erased text is removed too. A folder's present files are free of it, as on the disk; all its other bytes in the bucket
go. Pieces in rounds are overwritten with zeros, so that all others keep their offsets; objects of the folder alone are
removed. This is resumable. Versions that the bucket itself keeps are out of reach.

A change is noted after it was made, so reading after taking the notes sees the change, or a later note exists. In a due
folder, files that were noted, or whose size or time differs from the bucket's, are compared by checksum: if a file
begins with all that the bucket has of it, the rest is sent, else all of it. A start, after changes without notes, does
the same with all folders.

The journal is read before the log, so that the log has everything that the journal counts as stored, and the active
file before the full ones are listed. If a file was replaced or rotated meanwhile, the folder is due again. An append in
progress may be read in part; a restoration of that round treats it as an interrupted write. Files are sent as on the
disk, so an encrypted directory's are encrypted. Merged indexes and `.torn` files are left out.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path

import msgspec

from memd.errors import BucketError, CorruptFile, NotOurBucket, ObjectMissing, StoreError
from memd.settings.model import Config
from memd.store.bucket.objects import (
    FILES,
    IDENTITY_KEY,
    OWNER_KEY,
    Bucket,
    Catalog,
    FileChange,
    Identity,
    KnownFile,
    Owner,
    RoundHeader,
    RoundName,
    Rounds,
    Stretch,
    encode_round,
    read_identity,
)
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, replace_file
from memd.store.encryption.disk import key_id_of
from memd.store.erasure import read_erasures
from memd.store.layout import (
    AUDIT_NAME,
    BACKUPS_NAME,
    BUCKET_NAME,
    ERASURES_NAME,
    KEY_NAME,
    AuditLayout,
    TopicLayout,
    erasures_dir,
    topic_names_in,
    topic_of,
)

log = logging.getLogger("memd")

ALONE_BYTES = 4 << 20
"""A longer file gets its own object, sent in parts."""
BATCH_BYTES = 8 << 20
"""A round object has at most this and one folder's pieces."""
COMPARED_AT_ONCE = 500
"""Folders that a round compares besides those just changed."""
EXTENTS_MAX = 512
"""A file in more pieces is rewritten as one, because its restoration takes a request for each."""
FULL_AFTER_ROUNDS = 360
DAY_US = 86_400_000_000
"""Longest time between full rounds and between cleanings. A single file is sent before the round that names it, and
clocks differ, so it is removed a day later than necessary."""
REWRITTEN_BYTES = 16 << 20
"""Limit on bytes that one cleaning causes to be rewritten."""
RETRY_SECONDS_MAX = 60.0
_PLACES_KEPT = 4096
_OF_THE_DIRECTORY = (KEY_NAME, BACKUPS_NAME, f"{AUDIT_NAME}/", f"{ERASURES_NAME}/")
_PIECE_BYTES = 8 << 20


_Mark = tuple[str, str, Hashable, int, int]
"""Of a file being sent: folder, name, identity, size, time of last change."""


class NotingDisk(LocalDisk):
    """The real file system; notes the changed files in a data directory by folder: a topic's, or "" for the directory
    itself. Thread-safe."""

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

    def note(self, path: Path) -> None:
        """See LocalDisk."""
        if (place := self._place_of(path)) is not None:
            self.note_again(place[0], [place[1]])

    def note_again(self, folder: str, names: Iterable[str]) -> None:
        """Note a folder as due, and files in it."""
        with self._noting:
            self._noted.setdefault(folder, set()).update(names)

    @property
    def due(self) -> list[str]:
        """The folders with changes."""
        with self._noting:
            return list(self._noted)

    def take(self, folder: str) -> set[str]:
        """Return the changed files of a folder, and drop its notes."""
        with self._noting:
            return self._noted.pop(folder, set())


class MovedMeanwhile(StoreError):
    """A file was replaced while it was read."""


class _Batch:
    """A round in preparation."""

    def __init__(self) -> None:
        self.changes: list[FileChange] = []
        self.data: list[bytes] = []
        self.size = 0
        self.taken: dict[str, set[str]] = {}
        """The noted files by folder; due again if the round fails."""


class BucketWriter:
    """Keeps the backup of one data directory up to date."""

    def __init__(
        self,
        bucket: Bucket,
        disk: NotingDisk,
        data_dir: Path,
        keep_days: int,
        now_us: Callable[[], int],
        random: Callable[[int], bytes],
    ) -> None:
        self.bucket = bucket
        self._disk, self._data_dir, self._keep_us = disk, data_dir, keep_days * DAY_US
        self._now_us, self._random = now_us, random
        self._catalog = Catalog()
        self._generation = ""
        self._number = self._last_at = self._sent = 0
        self._uncompared: dict[str, None] = {}
        """Folders in which any file may have changed before notes were taken."""
        self._anew: set[tuple[str, str]] = set()
        """Files to rewrite although the bucket has them, by folder and name."""
        self._batch = _Batch()
        self._alone: dict[_Mark, KnownFile] = {}
        """Files that were sent, but whose round is not written yet."""
        self._unread: set[str] = set()
        """Unreadable folders; each was logged once."""
        self._may_erase = False
        self._is_whole = False
        """Whether everything present at some time is in the bucket."""
        self._full_at = self._cleaned_at = 0
        self._full_bytes = self._header_bytes = self._rounds_since = 0

    @property
    def is_begun(self) -> bool:
        """Whether `begin` has succeeded."""
        return bool(self._generation)

    @property
    def to_compare(self) -> int:
        """Number of folders still to be compared since the start."""
        return len(self._uncompared)

    def begin(self) -> None:
        """Begin a generation: read the bucket's state; the next rounds compare all folders with it.

        Raises:
            NotOurBucket: it has the backup of another directory.
            BucketError: it cannot be read or written; it may be tried again.
            StoreError: the data directory cannot be read.
        """
        self._identify()
        rounds, owner = Rounds(self.bucket), self._owner()
        owners = [name.generation for name in rounds.names] + ([owner.generation] if owner is not None else [])
        number = max((int(one.partition("-")[0]) for one in owners), default=0) + 1
        generation = f"{number:08d}-{self._random(4).hex()}"
        self.bucket.put(OWNER_KEY, msgspec.json.encode(Owner(generation)))
        last = rounds.moments[-1] if rounds.moments else None
        self._catalog, self._is_whole = self._found(rounds, last)
        self._number, self._last_at = 0, last.at if last is not None else 0
        self._generation = generation
        try:
            self._write_full()
        except StoreError:
            self._generation = ""
            raise
        self._uncompared.update(dict.fromkeys(["", *topic_names_in(self._disk, self._data_dir), *self._catalog.topics]))

    def round(self) -> bool:
        """Write the changes since the last round. Return whether the bucket has all that was there before. Raises
        NotOurBucket: another daemon writes here now; BucketError: the bucket is unreachable; the changes are due again.
        """
        due = dict.fromkeys([*self._disk.due, *islice(self._uncompared, COMPARED_AT_ONCE)])
        if not due:
            return True
        self._check_owner()
        at, is_whole = self._now_us(), True
        try:
            for folder in due:
                is_whole &= self._add(folder)
                if self._batch.size >= BATCH_BYTES:
                    self._flush(at, is_whole=False)
            is_whole &= not self._uncompared
            self._flush(at, is_whole=is_whole)
        except BaseException:
            for folder, names in self._batch.taken.items():
                self._disk.note_again(folder, names)
            self._batch = _Batch()
            raise
        return is_whole

    def tidy(self) -> None:
        """Erase in the bucket text erased on the disk, remove what is too old, and write a full round if due. Raises
        BucketError: something is left to do; the next call resumes."""
        if self._uncompared:
            return
        at = self._now_us()
        is_worth_it = self._rounds_since >= FULL_AFTER_ROUNDS and self._header_bytes >= self._full_bytes
        is_full_due = is_worth_it or (self._rounds_since > 0 and at - self._full_at >= DAY_US)
        is_cleaning_due = self._rounds_since > 0 and at - self._cleaned_at >= DAY_US
        if not (self._may_erase or is_full_due or is_cleaning_due):
            return
        self._check_owner()
        if self._may_erase:
            self._may_erase = not self._erase()
        if is_full_due:
            self._write_full()
        if is_cleaning_due:
            self._anew.update(_cleaned(self.bucket, self._catalog, at - self._keep_us))
            for folder, name in self._anew:
                self._disk.note_again(folder, [name])
            self._cleaned_at = at

    # -- a round ---------------------------------------------------------------------------------------------------

    def _add(self, folder: str) -> bool:
        """Add the changes in a folder to the batch. Return False if a file is unreadable now: it stays due."""
        batch = self._batch
        size, count = batch.size, len(batch.data)
        noted = batch.taken[folder] = self._disk.take(folder)
        self._uncompared.pop(folder, None)
        known, there, changes = self._catalog.files(folder), set[str](), list[FileChange]()
        try:
            for name, path in self._files(folder):
                there.add(name)
                if (change := self._change(folder, name, path, known.get(name), name in noted)) is not None:
                    changes.append(change)
        except BucketError:
            raise
        except StoreError as error:
            self._disk.note_again(folder, noted)
            batch.size = size  # none of it, because the journal must not be newer than the log
            del batch.data[count:]
            if not isinstance(error, MovedMeanwhile) and folder not in self._unread:
                told = "a folder cannot be backed up now; it is tried again"
                log.warning(told, extra={"topic": folder, "error": error})
                self._unread.add(folder)
            return False
        self._unread.discard(folder)
        self._may_erase |= not folder
        batch.changes += [*changes, *(FileChange(folder, name, "gone") for name in known if name not in there)]
        return True

    def _files(self, folder: str) -> Iterator[tuple[str, Path]]:
        """Yield the names and paths of a folder's files in the order of reading. Raises MovedMeanwhile: the active file
        was rotated after it was read."""
        disk, base = self._disk, self._data_dir / folder
        if not folder:
            audit, ledger = AuditLayout(base), erasures_dir(base)
            paths = [
                base / KEY_NAME,
                base / BACKUPS_NAME,
                *(audit.folder / name for name in audit.names(disk)),
                audit.head,
            ]
            paths += [ledger / name for name in disk.names(ledger) if name.endswith(".json")]
            yield from ((one.relative_to(base).as_posix(), one) for one in paths if disk.size(one) is not None)
            return
        layout = TopicLayout(self._data_dir, folder)
        # The key first: nothing of the topic can be read without it.
        for path in (layout.key, layout.former_names, layout.forbidden, layout.hot, layout.active):
            active = disk.identity(layout.active)
            if disk.size(path) is not None:
                yield path.name, path
        full = [path for number in layout.segment_ids(disk) for path in layout.of_segment(number)]
        if disk.identity(layout.active) != active:
            raise MovedMeanwhile(f"{layout.active}: was rotated while its topic was read")
        yield from ((one.relative_to(base).as_posix(), one) for one in full if disk.size(one) is not None)

    def _change(self, folder: str, name: str, path: Path, known: KnownFile | None, is_noted: bool) -> FileChange | None:
        """Read the bytes of a file that the bucket lacks, and send them if it gets its own object; None if none."""
        disk, identity = self._disk, self._disk.identity(path)
        size, changed_at = disk.size(path) or 0, disk.changed_at(path)
        if (folder, name) in self._anew or (known is not None and len(known.extents) >= EXTENTS_MAX):
            known = None
        if known is not None:
            if not is_noted and (size, changed_at) == (known.size, known.changed_at):
                return None
            if size < known.size or _crc_of(self._read(path, identity, 0, known.size)) != known.crc:
                known = None
            elif size == known.size:
                return None
        start, crc = (known.size, known.crc) if known is not None else (0, 0)
        pieces = self._read(path, identity, start, size)
        if (folder and "/" in name) or size - start > ALONE_BYTES:  # of a full segment, or long
            file = self._sent_alone((folder, name, identity, size, changed_at), pieces, size - start, crc)
        else:
            batch, data = self._batch, b"".join(pieces)
            file = KnownFile(size, zlib.crc32(data, crc), changed_at, (Stretch("", batch.size, len(data)),))
            batch.data.append(data)
            batch.size += len(data)
        return FileChange(folder, name, "grown" if start else "new", file)

    def _read(self, path: Path, identity: Hashable, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a file. Raises MovedMeanwhile: the path now names another file, or a shorter one."""
        for offset in range(start, end, _PIECE_BYTES):
            wanted = min(_PIECE_BYTES, end - offset)
            try:
                data = self._disk.read_at(path, offset, wanted)
            except StoreError as error:
                if self._disk.size(path) is not None:
                    raise
                raise MovedMeanwhile(str(error)) from error
            if len(data) < wanted or self._disk.identity(path) != identity:
                raise MovedMeanwhile(f"{path}: was replaced while it was read")
            yield data

    def _sent_alone(self, mark: _Mark, data: Iterator[bytes], length: int, crc: int) -> KnownFile:
        """Send the last `length` bytes of a file as an object, unless a failed round has; `crc`: of those before."""
        if mark in self._alone:
            return self._alone[mark]
        folder, name, _, size, changed_at = mark
        self._sent += 1
        key = f"{FILES}{folder or '_'}/{name}.{self._generation}-{self._sent:06d}"
        failed: list[StoreError] = []

        def pieces() -> Iterator[bytes]:
            nonlocal crc
            try:
                for one in data:
                    crc = zlib.crc32(one, crc)
                    yield one
            except StoreError as error:  # obstore replaces it by an error of its own
                failed.append(error)
                raise

        try:
            self.bucket.put(key, pieces() if length > ALONE_BYTES else b"".join(pieces()))
        except StoreError as error:
            raise (failed[0] if failed else error) from None
        self._alone[mark] = KnownFile(size, crc, changed_at, (Stretch(key, 0, length),))
        return self._alone[mark]

    def _flush(self, at: int, *, is_whole: bool) -> None:
        """Write the batch as a round, unless it is empty; `is_whole`: everything present is then in the bucket."""
        batch, is_whole = self._batch, self._is_whole or is_whole
        if batch.changes or is_whole != self._is_whole:
            self._write(RoundHeader(at=at, is_whole=is_whole, changes=tuple(batch.changes)), batch.data)
        self._is_whole = is_whole
        self._batch, self._alone = _Batch(), {}

    def _write(self, header: RoundHeader, data: list[bytes]) -> None:
        at = self._last_at = max(header.at, self._last_at + 1)
        header = msgspec.structs.replace(header, at=at)
        name = RoundName(self._generation, self._number, at, header.topics is not None)
        encoded = encode_round(header, data)
        self.bucket.put(name.key, encoded)
        self._number += 1
        self._rounds_since += 1
        self._header_bytes += len(encoded) - sum(map(len, data))
        self._catalog.apply(header, name.key)
        self._anew.difference_update((one.folder, one.name) for one in header.changes)

    # -- between rounds --------------------------------------------------------------------------------------------

    def _write_full(self) -> None:
        topics, erasures = dict(self._catalog.topics), tuple(sorted(self._catalog.erasures))
        self._header_bytes = 0
        self._write(RoundHeader(at=self._now_us(), is_whole=self._is_whole, topics=topics, erasures=erasures), [])
        self._full_bytes, self._header_bytes = self._header_bytes, 0
        self._full_at, self._rounds_since = self._last_at, 0

    def _erase(self) -> bool:
        """Apply to the bucket the erasures on the disk since. Return whether all were applied."""
        found = read_erasures(self._disk, erasures_dir(self._data_dir))[0]
        new = [one for one in found if one.done_at is not None and one.id not in self._catalog.erasures]
        if not new:
            return True
        if not self.round():  # the last one may have read a folder before an erasure in it
            return False
        at, folders = self._now_us(), tuple(sorted({one.topic_id for one in new}))
        files = [(folder, self._catalog.files(folder)) for folder in folders]
        changes = [FileChange(one, name, "new", file) for one, known in files for name, file in known.items()]
        self._write(RoundHeader(at=at, is_whole=True, changes=tuple(changes), stated_anew=folders), [])
        _blank(self.bucket, self._catalog, folders)
        self._write(RoundHeader(at=at, is_whole=True, erasures=tuple(one.id for one in new)), [])
        log.info("what was erased is erased in the bucket too", extra={"topics": len(folders)})
        return True

    # -- ownership -------------------------------------------------------------------------------------------------

    def _identify(self) -> None:
        """Make sure that the prefix belongs to this directory, or claim it."""
        path = self._data_dir / BUCKET_NAME
        own = self._disk.read(path).decode("ascii", "replace").strip() if self._disk.size(path) else ""
        stored = self.bucket.get(IDENTITY_KEY)
        key_id = key_id_of(self._disk, self._data_dir)
        if stored is None:
            own = own or self._random(16).hex()
            replace_file(self._disk, path, f"{own}\n".encode())
            self.bucket.put(IDENTITY_KEY, msgspec.json.encode(Identity(1, own, key_id)))
            stored = self.bucket.get(IDENTITY_KEY)  # another directory may have claimed it at this moment
        identity = read_identity(stored, self.bucket)
        if identity.directory != own:
            raise NotOurBucket(
                f"{self.bucket.url}: has the backup of another data directory than {self._data_dir}: choose another "
                f"prefix, or, if the disk of that one was lost, stop memd and run memd restore {self.bucket.url} DIR"
            )
        if identity.key_id != key_id:
            raise NotOurBucket(
                f"{self.bucket.url}: is a backup from before the data directory was encrypted, decrypted or given new "
                "keys; choose another prefix, and empty this one if it should not stay readable"
            )

    def _found(self, rounds: Rounds, last: RoundName | None) -> tuple[Catalog, bool]:
        """Return the state of the bucket after the previous generations, and whether it was ever whole. Files whose
        objects are gone or too short are left out: the next rounds send them again."""
        if last is None:
            return Catalog(), False
        try:
            catalog, is_whole = rounds.catalog(last)
        except (CorruptFile, ObjectMissing) as error:
            log.warning("the backup is begun anew, as a part of it is missing", extra={"error": error})
            return Catalog(), False
        sizes = {one.key: one.size for one in rounds.every} | {one.key: one.size for one in self.bucket.listed(FILES)}
        for folder in list(catalog.topics):
            files = catalog.files(folder)
            lost = [
                name
                for name, file in files.items()
                if any(one.offset + one.length > sizes.get(one.key, 0) for one in file.extents)
            ]
            if lost:
                log.warning("the bucket has lost files; they are sent again", extra={"topic": folder, "files": lost})
                catalog.put(folder, {name: file for name, file in files.items() if name not in lost})
        return catalog, is_whole

    def _owner(self) -> Owner | None:
        found = self.bucket.get(OWNER_KEY)
        try:
            return None if found is None else msgspec.json.decode(found, type=Owner)
        except msgspec.MsgspecError:
            raise CorruptFile(f"{self.bucket.url}/{OWNER_KEY}: cannot be read; remove it") from None

    def _check_owner(self) -> None:
        owner = self._owner()
        if owner is not None and owner.generation != self._generation:
            raise NotOurBucket(
                f"{self.bucket.url}: another daemon has begun to write here; this one writes no more. If two folders "
                "have become of one, give one of them another prefix and remove its memd.bucket"
            )


def _crc_of(pieces: Iterable[bytes]) -> int:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def _cleaned(bucket: Bucket, catalog: Catalog, since: int) -> Collection[tuple[str, str]]:
    """Remove objects that no time from `since` on needs. Return the files (folder, name) to rewrite, because less than
    half of an old round with their pieces is in use. Raises BucketError: not all is removed; the next call resumes."""
    rounds, used = Rounds(bucket), Counter[str]()
    base = next((name for name in reversed(rounds.moments) if name.is_full and name.at <= since), None)
    if base is None:
        return []
    for _, _, extent in catalog.extents():
        used[extent.key] += extent.length
    needed = {extent.key for _, _, extent in rounds.catalog(base)[0].extents()} | used.keys()
    gone = [name.key for name in rounds.every if name < base and name.key not in needed]
    alone = (one for one in bucket.listed(FILES) if one.changed_at < base.at - DAY_US)
    gone += [one.key for one in alone if one.key not in needed]
    if gone:
        bucket.delete(gone)
    sparse = {name.key for name in rounds.names if name < base and 2 * used[name.key] < name.size}
    found = Counter[tuple[str, str]]()
    for folder, name, extent in catalog.extents():
        if extent.key in sparse and found.total() < REWRITTEN_BYTES:
            found[folder, name] += extent.length
    return found


def _blank(bucket: Bucket, catalog: Catalog, folders: Collection[str]) -> None:
    """Remove all bytes of these folders that their present files do not use. Raises BucketError: it is not finished."""
    in_use = {extent for folder in folders for file in catalog.files(folder).values() for extent in file.extents}
    rounds = Rounds(bucket)
    for name, header in rounds.headers([one for one in rounds.every if not one.is_full]):
        files = [change.file for change in header.changes if change.folder in folders and change.file is not None]
        own = [Stretch(name.key, one.offset, one.length) for file in files for one in file.extents if not one.key]
        spans = [span for span in own if span not in in_use]
        data = bucket.get(name.key) if spans else None
        if data is None:
            continue  # nothing to blank, or removed meanwhile
        changed = bytearray(data)
        for span in spans:
            changed[span.offset : span.offset + span.length] = bytes(span.length)
        if changed != data:
            bucket.put(name.key, bytes(changed))
    keys = {extent.key for extent in in_use}
    for folder in folders:
        if gone := [one.key for one in bucket.listed(f"{FILES}{folder}/") if one.key not in keys]:
            bucket.delete(gone)


class BackupHealth(msgspec.Struct, frozen=True):
    """The present state of the backup."""

    bucket: str
    lag_seconds: float
    """The cost of a lost disk: seconds since the last moment up to which everything is in the bucket."""
    trouble: str | None
    """The last error, until it works again."""
    topics_left: int
    """Topics present at the start that are not yet compared with the bucket."""
    requests: int
    bytes_sent: int
    """Since the start, as `requests`."""


class BucketTender:
    """Keeps a backup up to date until it is stopped."""

    def __init__(self, writer: BucketWriter, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer, self._seconds, self._clock = writer, seconds, clock
        self._whole_at = clock()
        self._trouble: str | None = None
        self._failures = 0
        self._is_over = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memd-backup", daemon=True)

    @classmethod
    def of(cls, config: Config, disk: LocalDisk, env: Mapping[str, str]) -> BucketTender | None:
        """Return the backup of the settings, not begun; None if there is none.

        `disk`: the one of the data directory, below its encryption. Raises BucketError: obstore is not installed, or
        the settings contradict each other.
        """
        if not isinstance(disk, NotingDisk):
            return None
        settings, bucket = config.backup, Bucket.of(config.backup, env)
        writer = BucketWriter(
            bucket, disk, config.data_dir, settings.keep_days, lambda: time.time_ns() // 1000, secrets.token_bytes
        )
        return cls(writer, settings.seconds)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds_max: float) -> None:
        """Write the last changes, and end; the next start sends what a slow bucket has not accepted by then."""
        self._stop.set()
        self._thread.join(seconds_max)
        if self._thread.is_alive():
            log.warning("the last changes are not in the bucket yet: the next start sends them")

    @property
    def lag_seconds(self) -> float:
        """See BackupHealth."""
        return max(0.0, self._clock() - self._whole_at)

    @property
    def health(self) -> BackupHealth:
        """The present state of the backup."""
        bucket = self._writer.bucket
        left, sent = self._writer.to_compare, (bucket.requests, bucket.bytes_sent)
        return BackupHealth(bucket.url, round(self.lag_seconds, 3), self._trouble, left, *sent)

    def _run(self) -> None:
        while not self._is_over:
            is_last = self._stop.is_set()
            wait = self.step()
            if is_last:
                return
            self._stop.wait(wait)

    def step(self) -> float:
        """Do the work that is due; return the seconds until there is more."""
        began = self._clock()
        try:
            if not self._writer.is_begun:
                self._writer.begin()
            left = self._writer.to_compare
            if self._writer.round():
                self._whole_at = began
            if left and self._writer.to_compare:
                return 0.0
            self._writer.tidy()
        except StoreError as error:
            return self._failed(error)
        except Exception as error:  # a bug must not end the backup in silence
            log.exception("the backup met a bug; it is tried again")
            return self._failed(StoreError(f"a bug: {type(error).__name__}; the log has its traceback"))
        if self._trouble is not None:
            log.info("the backup to the bucket works again", extra={"lag_seconds": round(self.lag_seconds, 1)})
        self._trouble, self._failures = None, 0
        return max(0.0, self._seconds - (self._clock() - began))

    def _failed(self, error: StoreError) -> float:
        self._failures += 1
        if str(error) != self._trouble:
            log.error("the backup to the bucket fails; requests go on, and it is tried again", extra={"error": error})
        self._trouble = str(error)
        self._is_over = isinstance(error, NotOurBucket) and self._writer.is_begun
        return float(min(RETRY_SECONDS_MAX, self._seconds * 2 ** min(self._failures, 10)))
