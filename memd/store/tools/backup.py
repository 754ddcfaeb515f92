"""A consistent copy of a data directory, taken while a daemon serves from it.

Rule: the source is only read and needs no lock. A file of the backup is complete when it has its name, and names appear
in the order in which the daemon gave them: whatever interrupts a backup, what is there is the log as it was at some
moment, and the next backup goes on from it. Nothing of the log that a backup has is ever taken out of it again.

The journal is read before the log, so that what it counts as stored is in the log that is read afterwards; the active
file before the segments are listed (see layout.py). A full segment's files are never written again, only replaced by
rename, so a second name for the same file is a copy that takes no room; what is appended to is always copied.
Merged indexes are not taken: they come and go while a daemon serves, and it builds them again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from memd.errors import StoreError, StoreWriteFailed
from memd.store.files import TEMPORARY_SUFFIX, DiskFiles, Files, replace
from memd.store.index.sealed_index import checksum_of
from memd.store.layout import LOCK_NAME, TopicLayout, segments_before, topic_ids_in
from memd.store.log.format import scan
from memd.store.log.recovery import TORN_SUFFIX, Finding, keep_aside, read_log_file, remove_temporaries
from memd.store.opening import rotate

MARKER_NAME = ".memd-backup"
"""An empty file that says that a folder is a backup; no topic can have this name."""

_PIECE_BYTES = 8 << 20  # of a file that is copied; an index may be larger than memory


class Report(msgspec.Struct):
    """What a backup did; files in numbers."""

    topics: int = 0
    linked: int = 0
    copied: int = 0
    kept: int = 0
    """Files of full segments that were there from an earlier backup."""
    bytes_copied: int = 0
    findings: list[Finding] = []
    """What could not be backed up, or does not agree with what was backed up earlier."""


def backup(data_dir: Path, target: Path, files: Files | None = None) -> Report:
    """Bring the folder `target` (made if there is none) up to what is acknowledged in `data_dir` now, or later.

    Raises:
        StoreError: `target` is neither empty nor an earlier backup, or has been served from since; or it is written to
            by another backup (StoreLocked) or cannot be written (StoreWriteFailed). What is in it already stays good.
    """
    files = files or DiskFiles()
    _check_target(files, data_dir, target)
    files.make_directory(target)
    files.sync_directory(target.parent)
    if files.size(target / MARKER_NAME) is None:
        replace(files, target / MARKER_NAME, b"")
    lock = files.lock(target / MARKER_NAME)
    copying = _Copying(files)
    try:
        for topic_id in topic_ids_in(files, data_dir):
            copying.topic(TopicLayout(data_dir, topic_id), TopicLayout(target, topic_id))
    finally:
        lock.release()
    return copying.report


def _check_target(files: Files, data_dir: Path, target: Path) -> None:
    one, other = data_dir.resolve(), target.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise StoreError(f"{target}: is or holds the data directory, or lies in it; choose a folder outside")
    names = files.names(target)
    if names and MARKER_NAME not in names:
        raise StoreError(f"{target}: is not empty and no earlier backup; choose an empty or a new folder")
    if LOCK_NAME in names:
        raise StoreError(
            f"{target}: memd has been served from this backup since, so it has its own future; choose another"
        )


class _Copying:
    def __init__(self, files: Files) -> None:
        self._files = files
        self.report = Report()

    def topic(self, source: TopicLayout, target: TopicLayout) -> None:
        """Bring one topic up to date; what cannot be read of it is a finding and costs nothing else."""
        files = self._files
        for directory in (target.directory, target.segments):
            files.make_directory(directory)
            files.sync_directory(directory.parent)
            remove_temporaries(files, directory)
        self.report.topics += 1
        try:
            self._log_and_journal(source, target)
        except StoreWriteFailed:
            raise
        except StoreError as error:
            self._found(source.directory, f"could not be backed up completely: {error}")

    def _log_and_journal(self, source: TopicLayout, target: TopicLayout) -> None:
        files = self._files
        journal = self._journal(source.hot)
        active = self._whole(source.active)
        number = self._segment_id(source.active, active)
        if files.is_directory(source.segments):
            # A rename that a power cut could undo would give a file that we link back to the daemon to append to.
            files.sync_directory(source.segments)
        numbers = segments_before(files, source, active, number)
        before = self._segment_id(target.active, self._whole(target.active))
        ahead = {*target.segment_ids(files), *([before] if before is not None else [])} - {*numbers, number}
        if ahead:
            self._found(
                target.directory,
                f"has segment {max(ahead)}, which {source.directory} has not: the source lost it, or this is a backup "
                "of something else; nothing was changed here, choose another folder or restore the source",
            )
            return
        if before in numbers:
            self._rotate(source, target, numbers[numbers.index(before)])
        for segment_id in numbers:
            self._segment(source, target, segment_id)
        if active is not None:
            self._replace_active(target, active)
        if journal is not None and (files.size(target.hot) is None or files.read(target.hot) != journal):
            replace(files, target.hot, journal)
            self._copied(len(journal))
        self._torn_tails(source, target)

    def _journal(self, path: Path) -> bytes | None:
        """The journal up to its last whole record."""
        if self._files.size(path) is None:
            return None
        data = self._files.read(path)
        return data[: scan(data).end]

    def _whole(self, path: Path) -> bytes | None:
        """An `active.bin` up to its last whole append; None if there is none (any more)."""
        try:
            data = self._files.read(path)
        except StoreError:
            if self._files.size(path) is None:
                return None
            data = self._files.read(path)  # the daemon gave a full one its place and has begun the next just now
        return data[: read_log_file(data, name=str(path), dimension=None).whole_end]

    def _segment_id(self, path: Path, data: bytes | None) -> int | None:
        """What an `active.bin` says it is; None where there is none, or its header is damaged."""
        header = read_log_file(data, name=str(path), dimension=None).header if data is not None else None
        return header.segment_id if header is not None else None

    def _rotate(self, source: TopicLayout, target: TopicLayout, segment_id: int) -> None:
        """What the daemon did to this file since the last backup: fill it up, then give it its place."""
        files = self._files
        if files.size(target.bin(segment_id)) is None:
            self._keep_if_diverged(target, files.read(source.bin(segment_id)))
            self._copy(source.bin(segment_id), target.active)
            rotate(files, target, segment_id)
        else:
            files.remove(target.active)

    def _segment(self, source: TopicLayout, target: TopicLayout, segment_id: int) -> None:
        log = source.bin(segment_id), target.bin(segment_id)
        index = source.hnsw(segment_id), target.hnsw(segment_id)
        meta = source.meta(segment_id), target.meta(segment_id)
        pairs = [log, index, meta]
        has_index = self._files.size(meta[0]) is not None
        # A `.meta` is written last and holds the checksums of the others: where it is the same, they are.
        sizes_agree = all(self._files.size(one) == self._files.size(other) for one, other in pairs)
        if has_index and sizes_agree and self._is_same(*meta):
            self.report.kept += len(pairs)
        elif self._files.size(log[1]) is None or self._is_same(*log):
            for one, other in pairs if has_index else [log]:
                self._take(one, other)
        else:
            self._found(
                log[1],
                f"differs from {log[0]}, although neither is ever written again: one is damaged, or this is a backup "
                "of something else; it was left as it is, `memd verify` on both folders tells more",
            )

    def _take(self, source: Path, target: Path) -> None:
        """Link or copy a file that is never written again, unless it is there."""
        files = self._files
        if self._is_same(source, target):
            self.report.kept += 1
            return
        temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
        if files.link(source, temporary):
            files.rename(temporary, target)
            files.sync_directory(target.parent)
            self.report.linked += 1
        else:
            self._copy(source, target)

    def _copy(self, source: Path, target: Path) -> None:
        files, temporary = self._files, target.with_name(target.name + TEMPORARY_SUFFIX)
        appender = files.create(temporary)
        offset = 0
        try:
            while piece := files.read_at(source, offset, _PIECE_BYTES):
                appender.write(piece)
                offset += len(piece)
            appender.sync()
        finally:
            appender.close()
        files.rename(temporary, target)
        files.sync_directory(target.parent)
        self._copied(offset)

    def _replace_active(self, target: TopicLayout, active: bytes) -> None:
        if self._files.size(target.active) is not None and self._files.read(target.active) == active:
            return
        self._keep_if_diverged(target, active)
        replace(self._files, target.active, active)
        self._copied(len(active))

    def _keep_if_diverged(self, target: TopicLayout, grown: bytes) -> None:
        """Set the earlier `active.bin` aside if the present one did not grow out of it.

        An append that was read before its fsync may have failed afterwards, or been lost in a power cut.
        """
        if self._files.size(target.active) is not None:
            earlier = self._files.read(target.active)
            if not grown.startswith(earlier):
                keep_aside(self._files, target.active, earlier)

    def _torn_tails(self, source: TopicLayout, target: TopicLayout) -> None:
        for directory, copy in ((source.directory, target.directory), (source.segments, target.segments)):
            for name in self._files.names(directory):
                stem, suffix, _ = name.partition(TORN_SUFFIX)
                if suffix and not name.endswith(TEMPORARY_SUFFIX):
                    keep_aside(self._files, copy / stem, self._files.read(directory / name))

    def _is_same(self, one: Path, other: Path) -> bool:
        files = self._files
        if files.is_same_file(one, other):
            return True
        size = files.size(one)
        if size is None or size != files.size(other):
            return False
        return checksum_of(files, one, size) == checksum_of(files, other, size)

    def _copied(self, size: int) -> None:
        self.report.copied += 1
        self.report.bytes_copied += size

    def _found(self, path: Path, message: str) -> None:
        self.report.findings.append(Finding("damaged", str(path), message))
