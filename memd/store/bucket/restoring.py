"""Restoring a data directory from a bucket, or from the folder of `memd backup`.

Rule: the folder is new, empty, or has an interrupted restoration, whose files are compared and kept. Until it is
complete it has a marker, and nothing serves from it. Each file is checked before it gets its name. If text was erased
from a topic after the requested time, the topic is restored as of the first state after the erasure, because earlier
states are gone. The ledger of erasures is always the latest. Indexes missing from the bucket are left out: the daemon
rebuilds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import msgspec

from memd.errors import BadQuestion, CorruptFile, DiskFull, ObjectMissing, StoreError, StoreLocked
from memd.store import layout
from memd.store.bucket.objects import (
    IDENTITY_KEY,
    READERS,
    Bucket,
    Catalog,
    KnownFile,
    RoundName,
    Rounds,
    Stretch,
    read_identity,
)
from memd.store.disk import (
    TEMPORARY_SUFFIX,
    FileChecksum,
    LocalDisk,
    checksum_of,
    is_empty_or_begun,
    make_folder,
    only_whole,
    put_in_place,
    replace_file,
    write_pieces,
)
from memd.store.tools.backup import LISTING_NAME, MARKER_NAME, missing_topics, note_places
from memd.wording import counted, day_and_time

_ITS_OWN = (MARKER_NAME, LISTING_NAME, layout.LOCK_NAME, layout.RECENT_NAME)
"""Files of a backup in a folder that are not restored."""
_WHOLE_BYTES = 256 << 10
"""Rounds up to this size are read as a whole, because they have pieces of many files."""
_KEPT = 256
_PIECE_BYTES = 8 << 20
ReadAt = Callable[[str, int, int], bytes]
"""(key of an object, or path of a file; start; end) → its bytes."""
Tell = Callable[[int, int], None]


class RestoreReport(msgspec.Struct, kw_only=True):
    """The outcome of `restore`."""

    at: int
    """The restored moment, in microseconds since the epoch."""
    topics: int = 0
    files: int = 0
    bytes: int = 0
    kept: int = 0
    """Files that an interrupted restoration had written already."""
    notes: list[str] = []
    """Notices for the owner, in sentences."""
    damaged: list[str] = []
    """Damage in the backup, as `memd verify` reports it for the restored files."""


def restore(
    bucket: Bucket, target: Path, files: LocalDisk, until: int | None = None, tell: Tell = lambda done, of: None
) -> RestoreReport:
    """Restore the data directory as of a time, or of the latest in the bucket, into `target`.

    Args:
        until: microseconds since the epoch.
        tell: called with the number of bytes done, and the total.

    Raises:
        BadQuestion: the bucket has nothing of that time.
        NotOurBucket: it has no backup.
        StoreError: the folder is not empty, the bucket cannot be read or the disk not written (DiskFull): run it again.
    """
    identity = read_identity(bucket.get(IDENTITY_KEY), bucket)
    rounds = Rounds(bucket)
    last = _chosen(rounds, bucket, until)
    catalog, notes = _state(rounds, last, until)
    plan = {target / folder / name: file for folder in catalog.topics for name, file in catalog.files(folder).items()}
    report, left_out = _restored(bucket.read, {one.key: one.size for one in rounds.names}, files, plan, target, tell)
    replace_file(files, target / layout.BUCKET_NAME, f"{identity.directory}\n".encode())
    _make_whole(files, target, bucket.url)
    if left_out:
        told = counted(len(left_out), "index file")
        notes.append(f"{told} cannot be had from the bucket and will be built again from the log ({left_out[0]})")
    report.at, report.topics, report.notes = last.at, sum(map(bool, catalog.topics)), notes
    return report


def restore_copy(source: Path, target: Path, files: LocalDisk, tell: Tell = lambda done, of: None) -> RestoreReport:
    """Restore the data directory backed up by `memd backup` to the folder `source` into `target`; see `restore`.

    Raises:
        BadQuestion: there is no such backup.
        StoreLocked: it is being written to.
        StoreError: the folder is not empty, or the disk cannot be read or written (DiskFull): run it again.
    """
    if files.size(source / MARKER_NAME) is None:
        raise BadQuestion(f"{source}: has no backup of memd; give its folder, or s3://BUCKET/PREFIX")
    if any(files.is_locked(source / name) for name in (MARKER_NAME, layout.LOCK_NAME)):
        raise StoreLocked(f"{source}: memd writes to it now; wait until `memd backup` has ended, or stop that daemon")

    def read(path: str, start: int, end: int) -> bytes:
        return files.read_at(Path(path), start, end - start)

    _check_target(files, target)  # before reading it all
    plan = dict(_copied(source, target, files))
    report, _ = _restored(read, {}, files, plan, target, tell)
    _make_whole(files, target, str(source.resolve()))
    report.at = max((file.changed_at for file in plan.values()), default=0) // 1000
    report.topics = len(layout.topic_ids_in(files, target))
    report.damaged = list(map(str, missing_topics(source, files)))
    return report


def _copied(source: Path, target: Path, files: LocalDisk) -> Iterator[tuple[Path, KnownFile]]:
    """Yield the files of a backup in a folder, with the path that each gets."""
    for name in files.names(source):
        path = source / name
        if files.is_directory(path):
            yield from _copied(path, target / name, files)
        elif not name.endswith(TEMPORARY_SUFFIX) and name not in _ITS_OWN:
            size = files.size(path) or 0
            crc = checksum_of(files, path, size).crc
            yield target / name, KnownFile(size, crc, files.changed_at(path), (Stretch(str(path), 0, size),))


def _chosen(rounds: Rounds, bucket: Bucket, until: int | None) -> RoundName:
    moments = rounds.moments
    if not moments:
        raise BadQuestion(f"{bucket.url}: the backup was begun, and nothing is in it yet")
    if until is None:
        return moments[-1]
    if (found := next((one for one in reversed(moments) if one.at <= until), None)) is not None:
        return found
    # The first full second not before it: as `--until` it selects that moment.
    ends = [-(-at // 1_000_000) for at in (min(one.at for one in moments), max(one.at for one in moments))]
    first, latest = (datetime.fromtimestamp(one, UTC).astimezone().strftime("%Y-%m-%dT%H:%M:%S") for one in ends)
    raise BadQuestion(f"{bucket.url}: has nothing from before that time; the earliest is {first}, the latest {latest}")


def _state(rounds: Rounds, last: RoundName, until: int | None) -> tuple[Catalog, list[str]]:
    """Return the files at a moment, but after later erasures of text, and notices about these."""
    (catalog, is_whole), notes = rounds.catalog(last), list[str]()
    if not is_whole:
        notes.append(
            "at that time the bucket did not have everything of the folder yet: topics may be missing or older"
        )
    older = [one for one in rounds.names if one < last and one.generation != last.generation and one.at > last.at]
    if older and until is None:
        notes.append(
            f"another daemon has written later than the one that was restored, until {day_and_time(older[-1].at)}: was "
            "a second one at work? Its last state: --until that time, before the other one began"
        )
    later = Catalog()
    later.topics = dict(catalog.topics)
    erased: dict[str, dict[str, KnownFile]] = {}
    for name, header in rounds.headers([one for one in rounds.names if one > last]):
        later.apply(header, name.key)
        for folder in header.stated_anew:
            erased.setdefault(folder, later.files(folder))
    for folder, clean in erased.items():
        catalog.put(folder, clean)
    if erased:
        notes.append(
            f"{counted(len(erased), 'topic')} from which something was erased since ({', '.join(sorted(erased)[:5])}) "
            "are as they were right after that"
        )
    ledger = {name: one for name, one in later.files("").items() if name.startswith(f"{layout.ERASURES_NAME}/")}
    if ledger:
        own = {name: one for name, one in catalog.files("").items() if not name.startswith(f"{layout.ERASURES_NAME}/")}
        catalog.put("", own | ledger)
    return catalog, notes


def _restored(
    read: ReadAt, sizes: Mapping[str, int], files: LocalDisk, plan: dict[Path, KnownFile], target: Path, tell: Tell
) -> tuple[RestoreReport, list[str]]:
    """Write the files of a plan into a folder; return the figures, and why some derived files were left out. Files of
    an earlier attempt at another time are removed. `sizes`: of the objects that have pieces of many files, and of
    others."""
    _check_target(files, target)
    folders = {folder for path in plan for folder in path.parents if folder.is_relative_to(target)}
    make_folder(files, target)
    replace_file(files, target / layout.RESTORING_NAME, b"")
    _check_room(files, target, plan)
    for folder in sorted(folders - {target}):
        make_folder(files, folder)
    _remove_others(files, target, plan)
    report, left_out, done, total = RestoreReport(at=0), list[str](), 0, sum(file.size for file in plan.values())
    whole = lru_cache(_KEPT)(lambda key: read(key, 0, sizes[key]))

    def pieces(file: KnownFile) -> Iterator[bytes]:
        for extent in file.extents:
            end = extent.offset + extent.length
            if sizes.get(extent.key, _WHOLE_BYTES + 1) <= _WHOLE_BYTES:
                yield whole(extent.key)[extent.offset : end]
            else:
                steps = range(extent.offset, end, _PIECE_BYTES)
                yield from (read(extent.key, start, min(end, start + _PIECE_BYTES)) for start in steps)

    def bring(path: Path) -> tuple[Path, bool, str]:
        return path, *_brought(files, path, plan[path], pieces(plan[path]))

    with ThreadPoolExecutor(READERS, thread_name_prefix="memd-restore") as workers:
        try:
            for path, is_kept, lost in workers.map(bring, sorted(plan)):
                done += plan[path].size
                report.kept += is_kept
                if lost:
                    left_out.append(lost)
                else:
                    report.files, report.bytes = report.files + 1, report.bytes + plan[path].size
                tell(done, total)
        except BaseException:
            workers.shutdown(cancel_futures=True)
            raise
    return report, left_out


def _check_target(files: LocalDisk, target: Path) -> None:
    if not is_empty_or_begun(files, target, layout.RESTORING_NAME):
        raise StoreError(f"{target}: is not empty; choose an empty or a new folder")


def _make_whole(files: LocalDisk, target: Path, source: str) -> None:
    note_places(target, [source], files)
    files.remove(target / layout.RESTORING_NAME)
    files.sync_directory(target)


def _check_room(files: LocalDisk, target: Path, plan: dict[Path, KnownFile]) -> None:
    lacking = sum(file.size - (files.size(path) or 0) for path, file in plan.items())
    free = files.room(target).bytes
    if free is not None and free < lacking:
        raise DiskFull(
            f"{target}: has room for {free:,} bytes, and {lacking:,} are to be restored; make room, or choose another "
            "disk, and run it again"
        )


def _remove_others(files: LocalDisk, folder: Path, plan: dict[Path, KnownFile]) -> None:
    for name in files.names(folder):
        path = folder / name
        if files.is_directory(path):
            _remove_others(files, path, plan)
        elif path not in plan and name != layout.RESTORING_NAME:
            files.remove(path)


def _brought(files: LocalDisk, path: Path, known: KnownFile, pieces: Iterator[bytes]) -> tuple[bool, str]:
    """Write one file; return whether it was there, and why an index was left out."""
    if files.size(path) == known.size and checksum_of(files, path, known.size).crc == known.crc:
        return True, ""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with only_whole(files, temporary):
            if write_pieces(files, temporary, pieces) != FileChecksum(known.size, known.crc):
                raise CorruptFile(
                    f"{next((one.key for one in known.extents), '')}: is damaged; restore to another time"
                )
        put_in_place(files, temporary, path)
    except (ObjectMissing, CorruptFile) as error:
        reason = str(error).rpartition("; ")[0]
        if not layout.is_derived(path.name):
            raise type(error)(
                f"{path}: cannot be had from the backup ({reason}); bring that object back from an older version or a "
                "copy of the bucket, or restore to a time before (memd restore --until)"
            ) from error
        files.remove(path)
        return False, reason
    return False, ""
