"""A consistent copy of a data directory, taken while a daemon serves from it.

Rule: the source is only read and needs no lock. A file of the backup is complete when it has its name, and names appear
in the order in which the daemon gave them: an interrupted backup is the log as it was at some moment, and the next
backup continues from it. No part of the log is ever removed from a backup, except that the next backup also erases text
erased from the source.

The journal is read before the log, so that the log has everything that the journal counts as stored; the active file is
read before the segments are listed (see layout.py). The files of a full segment are never written again, only replaced
by rename, so a hard link is a copy that takes no room; appended files are always copied. Merged indexes are left out:
they come and go while a daemon serves, and it rebuilds them.

`memd log` and the like open a backup as a daemon does, and leave files in it: a lock, a closed last segment, indexes.
It remains a backup until something is appended to a log or journal in it, which removes its marker (claim.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec

from memd.errors import StoreError, StoreWriteFailed
from memd.store.audit import head_of
from memd.store.disk import (
    TEMPORARY_SUFFIX,
    LocalDisk,
    Wiper,
    checksum_of,
    is_empty_or_begun,
    pieces_of,
    replace_file,
)
from memd.store.encryption.disk import EncryptedDisk, key_id_of
from memd.store.erasure import Erasure, ErasureLedger, is_erasure_of, read_erasures
from memd.store.layout import (
    BACKUPS_NAME,
    KEY_NAME,
    LOCK_NAME,
    MARKER_NAME,
    RECENT_NAME,
    AuditLayout,
    TopicLayout,
    erasures_dir,
    has_files,
    segments_before,
    topic_folders_in,
    topic_ids_in,
)
from memd.store.log.format import scan_records
from memd.store.log.recovery import TORN_SUFFIX, Finding, read_log_file, remove_temporaries, save_torn_copy
from memd.store.log.segment import read_header
from memd.store.tools.export import active_bytes

LISTING_NAME = ".memd-backup-topics"
"""The topics of the backup when it was made, a line each: a lost folder leaves no other trace."""


class BackupReport(msgspec.Struct):
    """The outcome of `backup`: numbers of files."""

    topics: int = 0
    linked: int = 0
    copied: int = 0
    kept: int = 0
    """Unchanged files that the backup had already."""
    erased: int = 0
    """Files and topics that lost text in the backup, because it was erased since the last one."""
    bytes_copied: int = 0
    findings: list[Finding] = []
    """Files that could not be backed up or contradict an earlier backup."""


def backup(data_dir: Path, target: Path, files: LocalDisk) -> BackupReport:
    """Bring the folder `target`, created if necessary, up to date with what `data_dir` has acknowledged.

    Raises:
        StoreError: `target` is neither empty nor an earlier backup; memd serves from it or another backup writes to it
            (StoreLocked), or it cannot be written (StoreWriteFailed). An earlier backup stays valid.
    """
    _check_target(files, data_dir, target)
    if isinstance(files, EncryptedDisk):
        files = files.with_copy(target)
    files.make_directory(target)
    files.sync_directory(target.parent)
    if files.size(target / MARKER_NAME) is None:
        replace_file(files, target / MARKER_NAME, b"")
    is_looked_into = files.size(target / LOCK_NAME) is not None
    copying = _BackupRun(files, is_looked_into=is_looked_into)
    with files.lock(target / MARKER_NAME), files.lock(target / LOCK_NAME) if is_looked_into else nullcontext():
        if files.size(data_dir / KEY_NAME) is not None:
            replace_file(files, target / KEY_NAME, files.read(data_dir / KEY_NAME))
        files.remove(target / RECENT_NAME)
        copying.erasures(data_dir, target)
        for topic_id in topic_folders_in(files, data_dir):
            copying.topic(TopicLayout(data_dir, topic_id), TopicLayout(target, topic_id))
        copying.audit(AuditLayout(data_dir), AuditLayout(target))
        replace_file(files, target / LISTING_NAME, "".join(f"{one}\n" for one in topic_ids_in(files, target)).encode())
    if is_looked_into:
        files.remove(target / LOCK_NAME)
    return copying.report


def note_backup(data_dir: Path, target: Path, files: LocalDisk) -> None:
    """Note the backup in `target` in the data directory, so that erasures can report it, and in all its backups, so
    that a restored one knows it. The backup is complete without the note."""
    places = [*noted_backups(data_dir, files), str(target.resolve())]
    for folder in (data_dir, *map(Path, known_backups(data_dir, files)), target):
        with suppress(StoreError):
            note_places(folder, places, files)


def note_places(folder: Path, places: Iterable[str], files: LocalDisk) -> None:
    """Note backups, by folder or bucket, in a data directory or a backup. Raises StoreError: it cannot be written."""
    known = noted_backups(folder, files)
    if new := [one for one in dict.fromkeys(places) if one not in known]:
        replace_file(files, folder / BACKUPS_NAME, "".join(f"{one}\n" for one in [*known, *new]).encode())


def known_backups(data_dir: Path, files: LocalDisk) -> list[str]:
    """Return the other folders with backups of a data directory, as far as known and still present."""
    own, told = str(data_dir.resolve()), noted_backups(data_dir, files)
    return [one for one in told if one != own and files.size(Path(one) / MARKER_NAME) is not None]


def noted_backups(folder: Path, files: LocalDisk) -> list[str]:
    """Return all noted backups, also removed ones and those on a disk that is not mounted, and the buckets that a data
    directory, or one before it, was restored from."""
    is_noted = files.size(folder / BACKUPS_NAME) is not None
    return files.read(folder / BACKUPS_NAME).decode("utf-8", "replace").splitlines() if is_noted else []


def missing_topics(folder: Path, files: LocalDisk) -> list[Finding]:
    """Return a finding for each topic that a backup had when it was made, and that is neither present nor erased."""
    if files.size(folder / LISTING_NAME) is None:
        return []
    listed = files.read(folder / LISTING_NAME).decode("utf-8", "replace").split()
    erased = [one.topic_id for one in read_erasures(files, erasures_dir(folder))[0] if one.kind == "topic"]
    lost = sorted({*listed} - {*topic_ids_in(files, folder), *erased})
    return [Finding("damaged", str(folder / one), "is missing: the backup had this topic") for one in lost]


def _check_target(files: LocalDisk, data_dir: Path, target: Path) -> None:
    one, other = data_dir.resolve(), target.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise StoreError(f"{target}: is, contains or lies in the data directory; choose a folder outside")
    if not is_empty_or_begun(files, target, MARKER_NAME):
        was = "is not empty and not an earlier backup"
        if files.size(target / LISTING_NAME) is not None:
            was = "is no backup any more: memd has stored something in it"
        raise StoreError(f"{target}: {was}; choose an empty or a new folder")
    if topic_ids_in(files, target) and key_id_of(files, target) != key_id_of(files, data_dir):
        raise StoreError(
            f"{target}: is a backup from before the data directory was encrypted, decrypted or given new keys; choose "
            "another folder, and destroy this one if it should not stay readable"
        )


class _BackupRun:
    def __init__(self, files: LocalDisk, *, is_looked_into: bool) -> None:
        """`is_looked_into`: whether a command has opened the backup since the last run."""
        self._files, self._is_looked_into = files, is_looked_into
        self.report = BackupReport()

    def erasures(self, data_dir: Path, target: Path) -> None:
        """Erase in the backup the topics that were erased, and record all erasures there."""
        found, problems = read_erasures(self._files, erasures_dir(data_dir))
        self.report.findings += problems
        ledger = ErasureLedger(self._files, target)
        known = {one.id for one in ledger}
        for erasure in found:
            layout = TopicLayout(target, erasure.topic_id)
            if erasure.kind == "topic" and erasure.done_at is not None and self._is_of(layout, erasure):
                Wiper(self._files).wipe_folder(layout.directory)
                self.report.erased += 1
            if erasure.done_at is not None and erasure.id not in known:
                ledger.write(erasure)

    def _is_of(self, layout: TopicLayout, erasure: Erasure) -> bool:
        """Return whether a topic of the backup is the erased one, not a later one of its name."""
        logs = (
            read_log_file(self._files.read(path), name=str(path), dimension=None)
            for path in layout.log_files(self._files)
        )
        first = next((entry for log in logs for entry in log.entries), None)
        return first is not None and first.canonical_id <= erasure.highest_id

    def topic(self, source: TopicLayout, target: TopicLayout) -> None:
        """Bring one topic up to date; an unreadable file becomes a finding and does not stop the rest."""
        files = self._files
        for directory in (target.directory, target.segments):
            files.make_directory(directory)
            files.sync_directory(directory.parent)
            remove_temporaries(files, directory)
        self.report.topics += 1
        if not self._key(source, target):
            return
        Wiper(files).wipe_folder(target.lexical)  # an older memd's words, perhaps of text that was erased since
        for one, other in ((source.forbidden, target.forbidden), (source.former_names, target.former_names)):
            if files.size(one) is not None:
                self._bring(one, other, files.read(one))
            else:
                files.remove(other)
        try:
            self._log_and_journal(source, target)
        except StoreWriteFailed:
            raise
        except StoreError as error:
            self._add_finding(source.directory, f"could not be backed up completely: {error}")

    def audit(self, source: AuditLayout, target: AuditLayout) -> None:
        """Copy the audit and store its head. If the source differs from earlier lines, these stay: a finding."""
        files, last = self._files, b""
        for name in source.names(files):
            data = files.read(source.folder / name)
            data = data[: data.rfind(b"\n") + 1]
            files.make_directory(target.folder)
            path = target.folder / name
            before = files.read(path) if files.size(path) is not None else b""
            if not data.startswith(before):
                self._add_finding(path, f"differs from {source.folder / name}, which was changed or cut; it was kept")
                return
            self._bring(source.folder / name, path, data)
            last = data.splitlines()[-1] if data else last
        head = head_of(last)
        if head is not None:
            replace_file(files, target.head, str(head).encode())

    def _key(self, source: TopicLayout, target: TopicLayout) -> bool:
        """Copy the key of an encrypted topic, before the files it encrypts; False if the backup has another one."""
        files = self._files
        if files.size(source.key) is None:
            return True
        key = files.read(source.key)
        if not has_files(files, target.directory):  # at most the forbidden text, which follows
            replace_file(files, target.key, key)
        elif files.read(target.key) != key:
            self._add_finding(
                target.directory,
                f"was encrypted with another key than {source.directory} has now: the topic was erased and begun anew; "
                "nothing was changed here, choose another folder",
            )
            return False
        return True

    def _log_and_journal(self, source: TopicLayout, target: TopicLayout) -> None:
        files = self._files
        journal = files.read(source.hot) if files.size(source.hot) is not None else None
        active, number = self._active(source)
        if files.is_directory(source.segments):
            # If a power cut undid the rename, the daemon would append to the file that is linked here.
            files.sync_directory(source.segments)
        full = segments_before(files, source, active, number)
        own = 0 if number is None or number in full else number  # 0: by its header it is none, or the number is taken
        numbers = [*full, *([] if active is None else [own])]
        there = {one: target.bin(one) for one in target.segment_ids(files)}
        if files.size(target.active) is not None:
            header = read_header(files, target.active)
            there.setdefault(own if header is None else header.segment_id, target.active)
        if ahead := there.keys() - {*numbers}:
            self._add_finding(
                target.directory,
                f"has segment {ahead.pop()}, which {source.directory} does not have: the source lost it, or this is a "
                "backup of something else; nothing was changed here, choose another folder or restore the source",
            )
            return
        for one in numbers:
            self._log(source, target, one, active if one == own else None, there.get(one))
        if journal is not None:
            self._bring(source.hot, target.hot, journal[: scan_records(journal).end])
        self._torn_tails(source, target)

    def _active(self, layout: TopicLayout) -> tuple[bytes | None, int | None]:
        """Return an `active.bin` up to its last complete append, and the number in its header.

        Both are None without a file; the number is None if the header is damaged.
        """
        data = active_bytes(self._files, layout)
        if data is None:
            return None, None
        found = read_log_file(data, name=str(layout.active), dimension=None)
        return data[: found.whole_end], None if found.header is None else found.header.segment_id

    def _log(
        self, source: TopicLayout, target: TopicLayout, number: int, active: bytes | None, there: Path | None
    ) -> None:
        """Bring one file of the log up to date. `active`: its bytes, if it is not full. `there`: the backup's copy."""
        files = self._files
        path, copy = (source.active, target.active) if active is not None else (source.bin(number), target.bin(number))
        derived = zip(source.of_segment(number)[1:], target.of_segment(number)[1:], strict=True)
        if there not in (None, copy):  # it was filled since, or closed in the backup
            self._wipe_indexes(target, number)
            files.rename(there, copy)
            files.sync_directory(target.segments)
            files.sync_directory(target.directory)
        has_index = active is None and files.size(source.meta(number)) is not None
        is_like_its_index = has_index and files.size(path) == files.size(copy)
        if is_like_its_index and self._is_same(source.meta(number), target.meta(number)):
            self.report.kept += 1  # a `.meta` has the checksum of its log
        elif files.size(copy) is None or (active is None and self._is_same(path, copy)):
            self._bring(path, copy, active)
        else:
            grown, earlier = files.read(path) if active is None else active, files.read(copy)
            if grown.startswith(earlier):
                self._bring(path, copy, active)
            elif is_erasure_of(grown[: len(earlier)], earlier):
                self._wipe_indexes(target, number)
                Wiper(files).replace(copy, grown)
                self.report.erased += 1
            elif active is not None and not self._is_looked_into:
                # An append that was read before its fsync may have failed afterwards or been lost in a power cut.
                save_torn_copy(files, copy, earlier)
                self._bring(path, copy, active)
            else:
                self._add_finding(
                    copy,
                    f"differs from {path}, of which it was a copy: one is damaged, or this is a backup of something "
                    "else; it was left as it is, run `memd verify` on both folders",
                )
                return
        for one, other in derived if has_index else ():
            if files.size(one) is not None:
                self._bring(one, other)

    def _wipe_indexes(self, target: TopicLayout, number: int) -> None:
        for path in target.indexes_over(self._files, [number]):
            Wiper(self._files).wipe(path)

    def _bring(self, source: Path, target: Path, data: bytes | None = None) -> None:
        """Copy a file, unless the backup has it: the bytes that were read, or all of a file that is never written
        again, by a link if possible."""
        files = self._files
        is_there = files.size(target) is not None
        if is_there and (self._is_same(source, target) if data is None else files.read(target) == data):
            self.report.kept += 1
            return
        temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
        if data is None and files.link(source, temporary):
            files.rename(temporary, target)
            files.sync_directory(target.parent)
            self.report.linked += 1
            return
        written = replace_file(files, target, pieces_of(files, source) if data is None else data)
        self.report.copied += 1
        self.report.bytes_copied += written.bytes

    def _torn_tails(self, source: TopicLayout, target: TopicLayout) -> None:
        for directory, copy in ((source.directory, target.directory), (source.segments, target.segments)):
            for name in self._files.names(directory):
                stem, suffix, _ = name.partition(TORN_SUFFIX)
                if suffix and not name.endswith(TEMPORARY_SUFFIX):
                    save_torn_copy(self._files, copy / stem, self._files.read(directory / name))

    def _is_same(self, one: Path, other: Path) -> bool:
        files, identity = self._files, self._files.identity(one)
        if identity is not None and identity == files.identity(other):
            return True
        size = files.size(one)
        if size is None or size != files.size(other):
            return False
        return checksum_of(files, one, size) == checksum_of(files, other, size)

    def _add_finding(self, path: Path, message: str) -> None:
        self.report.findings.append(Finding("damaged", str(path), message))
