"""A consistent copy of a data directory, taken while a daemon serves from it.

Rule: the source is only read and needs no lock. A file of the backup is complete when it has its name, and names appear
in the order in which the daemon gave them: an interrupted backup is the log as it was at some moment, and the next
backup continues from it. No part of the log is ever removed from a backup, except that the next backup also erases text
erased from the source.

The journal is read before the log, so that the log has everything that the journal counts as stored; the active file is
read before the segments are listed (see layout.py). The files of a full segment are never written again, only replaced
by rename, so a hard link is a copy that takes no room; appended files are always copied. Merged indexes are left out:
they come and go while a daemon serves, and it rebuilds them.

`memd log` and the like open a backup as a daemon does, and leave files in it. It remains a backup as long as it has no
content of its own. A backup that may have text, corrections or erasures of its own is left alone. A closed last segment
and files derived from the log do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec

from memd.errors import StoreError, StoreWriteFailed
from memd.store.audit import head_of
from memd.store.claim import file_segment
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
from memd.store.erasure import Erasure, ErasureLedger, begun, is_erasure_of, read_erasures
from memd.store.layout import (
    BACKUPS_NAME,
    KEY_NAME,
    LOCK_NAME,
    RECENT_NAME,
    AuditLayout,
    TopicLayout,
    erasures_dir,
    has_files,
    key_damage,
    segments_before,
    topic_folders_in,
    topic_ids_in,
)
from memd.store.log.format import scan_records
from memd.store.log.journal import records_of
from memd.store.log.recovery import TORN_SUFFIX, Finding, read_log_file, remove_temporaries, save_torn_copy, torn_files
from memd.store.log.segment import read_header
from memd.store.tools.export import active_bytes

Waiting = Callable[[Path, LocalDisk], int]
"""Returns the number of messages of a journal that are in no log yet."""
MARKER_NAME = ".memd-backup"
"""An empty file that marks a folder as a backup; no topic can have this name."""
LISTING_NAME = ".memd-backup-topics"
"""The topics of the backup when it was made, a line each: a lost folder leaves no other trace."""
_YOURS = "nothing was erased here: remove the folder, or choose another one"


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


def backup(data_dir: Path, target: Path, files: LocalDisk, waiting: Waiting | None = None) -> BackupReport:
    """Bring the folder `target`, created if necessary, up to date with what `data_dir` has acknowledged.

    Args:
        waiting: returns the number of messages of a journal that are in no log; None assumes the most it may have.

    Raises:
        StoreError: `target` is neither empty nor an earlier backup, or has entries of its own; memd serves from it or
            another backup writes to it (StoreLocked), or it cannot be written (StoreWriteFailed). An earlier backup
            stays valid.
    """
    _check_target(files, data_dir, target)
    if isinstance(files, EncryptedDisk):
        files = files.with_copy(target)
    files.make_directory(target)
    files.sync_directory(target.parent)
    if files.size(target / MARKER_NAME) is None:
        replace_file(files, target / MARKER_NAME, b"")
    copying = _BackupRun(files)
    is_looked_into = files.size(target / LOCK_NAME) is not None
    with files.lock(target / MARKER_NAME), files.lock(target / LOCK_NAME) if is_looked_into else nullcontext():
        if isinstance(files, EncryptedDisk):
            for name in topic_folders_in(files, target):
                if key_damage(files, TopicLayout(target, name)):
                    files.put_key_back(target / name, data_dir / name)
        if is_looked_into:
            _be_backup_again(files, data_dir, target, waiting)
        if files.size(data_dir / KEY_NAME) is not None:
            replace_file(files, target / KEY_NAME, files.read(data_dir / KEY_NAME))
        erasing = copying.erasures(data_dir, target)
        for topic_id in topic_folders_in(files, data_dir):
            if topic_id in erasing:
                copying.add_finding(
                    data_dir / topic_id, "is being erased, so it was left out; back up again afterwards"
                )
                continue
            copying.topic(TopicLayout(data_dir, topic_id), TopicLayout(target, topic_id))
        copying.audit(AuditLayout(data_dir), AuditLayout(target))
        replace_file(files, target / LISTING_NAME, "".join(f"{one}\n" for one in topic_ids_in(files, target)).encode())
    if is_looked_into:
        files.remove(target / LOCK_NAME)
    return copying.report


def note_backup(data_dir: Path, target: Path, files: LocalDisk) -> None:
    """Note the backup in `target` in the data directory, so that erasures can report it, and in all its backups, so
    that a restored one knows it. The backup is complete without the note."""
    places = [*_noted_backups(data_dir, files), str(target.resolve())]
    for folder in (data_dir, *map(Path, known_backups(data_dir, files)), target):
        with suppress(StoreError):
            note_places(folder, places, files)


def note_places(folder: Path, places: Iterable[str], files: LocalDisk) -> None:
    """Note backups, by folder or bucket, in a data directory or a backup. Raises StoreError: it cannot be written."""
    known = _noted_backups(folder, files)
    if new := [one for one in dict.fromkeys(places) if one not in known]:
        replace_file(files, folder / BACKUPS_NAME, "".join(f"{one}\n" for one in [*known, *new]).encode())


def known_backups(data_dir: Path, files: LocalDisk) -> list[str]:
    """Return the other folders with backups of a data directory, as far as known and still present."""
    own, told = str(data_dir.resolve()), _noted_backups(data_dir, files)
    return [one for one in told if one != own and files.size(Path(one) / MARKER_NAME) is not None]


def known_buckets(data_dir: Path, files: LocalDisk) -> list[str]:
    """Return the buckets that a data directory, or one before it, was restored from."""
    return [one for one in _noted_backups(data_dir, files) if "://" in one]


def _noted_backups(folder: Path, files: LocalDisk) -> list[str]:
    """Return all noted backups, also removed ones and those on a disk that is not mounted."""
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
        raise StoreError(f"{target}: is not empty and not an earlier backup; choose an empty or a new folder")
    if topic_ids_in(files, target) and key_id_of(files, target) != key_id_of(files, data_dir):
        raise StoreError(
            f"{target}: is a backup from before the data directory was encrypted, decrypted or given new keys; choose "
            "another folder, and destroy this one if it should not stay readable"
        )


class _BackupRun:
    def __init__(self, files: LocalDisk) -> None:
        self._files = files
        self.report = BackupReport()

    def erasures(self, data_dir: Path, target: Path) -> set[str]:
        """Erase in the backup the topics that were erased, and record all erasures there. Return the topics that are
        being erased."""
        found, problems = read_erasures(self._files, erasures_dir(data_dir))
        self.report.findings += problems
        ledger = ErasureLedger(self._files, target)
        known = {one.id for one in ledger}
        for erasure in found:
            if erasure.done_at is None or erasure.id in known:
                continue  # once: by now the backup may have what was restored
            layout = TopicLayout(target, erasure.topic_id)
            is_there = erasure.kind == "topic" and self._files.is_directory(layout.directory)
            if is_there and not self._erase_topic(layout, erasure):
                self.add_finding(layout.directory, f"has other text beside that of {erasure}; {_YOURS}")
                continue
            ledger.write(erasure)
        return {one.topic_id for one in begun(found) if one.kind == "topic" and one.done_at is None}

    def _erase_topic(self, layout: TopicLayout, erasure: Erasure) -> bool:
        """Erase the files with text of an erased topic, also those set aside. Return False if one of them has, or may
        have, other text too: nothing was erased.

        A file has later text if the topic was begun anew while it was backed up, or if an old backup was restored over
        the new topic. That text may be nowhere else.
        """
        files, wiper = self._files, Wiper(self._files)
        logs = [*layout.log_files(files), *torn_files(files, [layout.directory, layout.segments])]
        is_its = {path: self._is_its(path, erasure) for path in logs}
        answers = set[bool]().union(*is_its.values())
        if answers == {False}:
            return True  # nothing of it is here any more
        if False not in answers:  # without any entry it had stored nothing, or is the rest of an erased one
            wiper.wipe_folder(layout.directory)
        elif set() in is_its.values() or {True, False} in is_its.values():
            return False
        else:
            own = [path for path in logs if True in is_its[path]]
            numbers = [number for number in layout.segment_ids(files) if layout.bin(number) in own]
            for path in (layout.hot, *layout.indexes_over(files, numbers), *own):  # the source has a journal, or none
                wiper.wipe(path)
        self.report.erased += 1
        return True

    def _is_its(self, path: Path, erasure: Erasure) -> set[bool]:
        """Return whether the entries of a log file are an erased topic's; empty if none can be read."""
        with suppress(StoreError):
            found = read_log_file(self._files.read(path), name=str(path), dimension=None)
            is_named = found.header is None or found.header.topic in erasure.tags
            return {is_named and one.canonical_id <= erasure.highest_id for one in found.entries}
        return set()

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
        if files.size(source.forbidden) is not None:
            replace_file(files, target.forbidden, files.read(source.forbidden))
        elif files.size(target.forbidden) is not None:
            files.remove(target.forbidden)
        try:
            self._log_and_journal(source, target)
        except StoreWriteFailed:
            raise
        except StoreError as error:
            self.add_finding(source.directory, f"could not be backed up completely: {error}")

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
                self.add_finding(path, f"differs from {source.folder / name}, which was changed or cut; it was kept")
                return
            self._put(path, data)
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
        elif damaged := {one.key: told for one in (source, target) if (told := key_damage(files, one))}:
            for path, told in damaged.items():
                self.add_finding(path, told.removeprefix(f"{path}: "))
            return False
        elif files.read(target.key) != key:
            self.add_finding(
                target.directory,
                f"was encrypted with another key than {source.directory} has now: the topic was erased and begun anew; "
                "nothing was changed here, choose another folder",
            )
            return False
        return True

    def _log_and_journal(self, source: TopicLayout, target: TopicLayout) -> None:
        files = self._files
        journal = None if files.size(source.hot) is None else files.read(source.hot)
        active, number = self._active(source)
        if files.is_directory(source.segments):
            # If a power cut undid the rename, the daemon would append to the file that is linked here.
            files.sync_directory(source.segments)
        numbers = segments_before(files, source, active, number)
        before = self._active(target)[1]
        ahead = {*target.segment_ids(files), *([before] if before is not None else [])} - {*numbers, number}
        if ahead:
            self.add_finding(
                target.directory,
                f"has segment {max(ahead)}, which {source.directory} does not have: the source lost it, or this is a "
                "backup of something else; nothing was changed here, choose another folder or restore the source",
            )
            return
        if before in numbers:
            self._file_segment(source, target, numbers[numbers.index(before)])
        for segment_id in numbers:
            self._segment(source, target, segment_id)
        if active is not None:
            self._keep_if_diverged(target, active)
            self._put(target.active, active)
        if journal is not None:
            self._put(target.hot, journal[: scan_records(journal).end])  # up to its last intact record
        if files.size(source.former_names) is not None:
            replace_file(files, target.former_names, files.read(source.former_names))
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

    def _file_segment(self, source: TopicLayout, target: TopicLayout, segment_id: int) -> None:
        """Repeat what the daemon has done to this file since the last backup: fill it, then rotate it."""
        files = self._files
        if files.size(target.bin(segment_id)) is None:
            self._keep_if_diverged(target, files.read(source.bin(segment_id)))
            self._write(target.active, pieces_of(self._files, source.bin(segment_id)))
            file_segment(files, target, segment_id)
        else:
            files.remove(target.active)

    def _segment(self, source: TopicLayout, target: TopicLayout, segment_id: int) -> None:
        files = self._files
        log, *derived = zip(source.of_segment(segment_id), target.of_segment(segment_id), strict=True)
        meta = derived[-1]
        has_index = files.size(meta[0]) is not None
        # A `.meta` has the checksum of its log, so an identical `.meta` means an identical log.
        if has_index and files.size(log[0]) == files.size(log[1]) and self._is_same(*meta):
            self.report.kept += 1
        elif files.size(log[1]) is None or self._is_same(*log):
            self._link_or_copy(*log)
        elif is_erasure_of(files.read(log[0]), files.read(log[1])):
            for path in target.indexes_over(files, [segment_id]):
                Wiper(files).wipe(path)
            self._erase(log[1], files.read(log[0]))
        else:
            self.add_finding(
                log[1],
                f"differs from {log[0]}, although neither is ever written again: one is damaged, or this is a backup "
                "of something else; it was left as it is, run `memd verify` on both folders",
            )
            return
        for one, other in derived:
            if has_index and files.size(one) is not None:
                self._link_or_copy(one, other)

    def _erase(self, target: Path, data: bytes) -> None:
        Wiper(self._files).replace(target, data)
        self.report.erased += 1

    def _link_or_copy(self, source: Path, target: Path) -> None:
        """Link or copy a file that is never written again, unless the backup has it."""
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
            self._write(target, pieces_of(self._files, source))

    def _write(self, path: Path, data: bytes | Iterable[bytes]) -> None:
        replace_file(self._files, path, data)
        self.report.copied += 1
        self.report.bytes_copied += self._files.size(path) or 0

    def _put(self, path: Path, data: bytes) -> None:
        if self._files.size(path) is not None and self._files.read(path) == data:
            self.report.kept += 1
        else:
            self._write(path, data)

    def _keep_if_diverged(self, target: TopicLayout, grown: bytes) -> None:
        """Save a copy of the earlier `active.bin` unless the present one begins with it, apart from erased text.

        An append that was read before its fsync may have failed afterwards or been lost in a power cut.
        """
        if self._files.size(target.active) is not None:
            earlier = self._files.read(target.active)
            if not _goes_on(grown, earlier):
                save_torn_copy(self._files, target.active, earlier)
            elif not grown.startswith(earlier):
                self._erase(target.active, grown[: len(earlier)])

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

    def add_finding(self, path: Path, message: str) -> None:
        """Report something about a file or folder."""
        self.report.findings.append(Finding("damaged", str(path), message))


def _be_backup_again(files: LocalDisk, data_dir: Path, target: Path, waiting: Waiting | None) -> None:
    """Restore a folder to the state of the last backup of `data_dir`, but keep newer entries of the same log.

    Raises:
        StoreError: it has, or may have, entries of its own; nothing was changed.

    Args:
        waiting: None counts everything in a journal that is not in the source's.
    """
    erased = [{one.id for one in read_erasures(files, erasures_dir(folder))[0]} for folder in (target, data_dir)]
    topics = [(TopicLayout(data_dir, name), TopicLayout(target, name)) for name in topic_folders_in(files, target)]
    topics = [pair for pair in topics if not any(key_damage(files, one) for one in pair)]  # those are left as they are
    if not erased[0] <= erased[1] or any(_has_own(files, *pair, waiting) for pair in topics):
        raise StoreError(
            f"{target}: memd has been served from this backup, so it has entries of its own; choose another folder"
        )
    for source, layout in topics:
        _reopen_last(files, source, layout)
        Wiper(files).wipe_folder(layout.lexical)  # it may have words of text that was erased since
    files.remove(target / RECENT_NAME)


def _has_own(files: LocalDisk, source: TopicLayout, target: TopicLayout, waiting: Waiting | None) -> bool:
    logs = {target.bin(number): number for number in target.segment_ids(files)}
    if files.size(target.active) is not None:
        header = read_header(files, target.active)
        logs[target.active] = 0 if header is None else header.segment_id  # 0: no segment has it
    if not all(_is_known(files, path, source, number) for path, number in logs.items()):
        return True
    told, known = (
        records_of(files.read(one)).payloads if files.size(one) is not None else [] for one in (target.hot, source.hot)
    )
    return not set(told) <= set(known) and (waiting is None or waiting(target.hot, files) > 0)


def _is_known(files: LocalDisk, path: Path, source: TopicLayout, number: int) -> bool:
    """Return whether the source's segment begins with a log file, apart from text erased there since."""
    full = source.bin(number)
    if files.identity(path) == files.identity(full):
        return True
    # First the active file, then the segment, so that a rotation in between does not hide it.
    header = read_header(files, source.active)
    is_active = header is not None and header.segment_id == number
    places = (*([source.active] if is_active else []), full)
    return any(_goes_on(files.read(one), files.read(path)) for one in places if files.size(one) is not None)


def _goes_on(grown: bytes, earlier: bytes) -> bool:
    """Return whether a log file begins with an earlier state of it, apart from text erased since."""
    return grown.startswith(earlier) or is_erasure_of(grown[: len(earlier)], earlier)


def _reopen_last(files: LocalDisk, source: TopicLayout, target: TopicLayout) -> None:
    """Undo the closing of a segment to which the source has appended since, or still may."""
    numbers = target.segment_ids(files)
    if not numbers or files.size(source.bin(numbers[-1])) == files.size(target.bin(numbers[-1])):
        return
    for path in target.indexes_over(files, numbers[-1:]):
        Wiper(files).wipe(path)
    files.rename(target.bin(numbers[-1]), target.active)
    files.sync_directory(target.segments)
    files.sync_directory(target.directory)
