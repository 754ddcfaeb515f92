"""Can the data directory be used, who uses it, and is the log whole?

Rule: works with and without a running daemon, and only reads, except for a nameless file that tests writing.
"""

from __future__ import annotations

import contextlib
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from memd import __version__
from memd.admin.asking import THE_RIGHT_ONE
from memd.cli.check.result import CheckResult, failed, failed_with, ok, warning
from memd.cli.kept import waiting_messages, waiting_note
from memd.cli.running import RunningDaemon
from memd.errors import StoreError
from memd.store.audit.book import read_book
from memd.store.disk import LocalDisk
from memd.store.disk_trouble import disk_trouble, trouble_by_writing
from memd.store.layout import LOCK_NAME, TopicLayout, topic_ids_in
from memd.store.log.recovery import Finding, torn_files
from memd.store.tools.disk_usage import TopicDiskUsage
from memd.store.tools.verify import verify
from memd.wording import counted, sized

DIRECTORY, ENCRYPTION, LOCK, LOG, AUDIT = "data directory", "encryption", "lock", "log", "audit"
FREE_BYTES_LOW = 512 << 20
"""Below this is a warning: an index of a full segment takes 10 MB, merged ones and a backup many times that."""
READ_BYTES_MAX = 512 << 20
"""Logs up to this are read through, some seconds; larger ones are left to `memd verify`."""
FINDINGS_MAX = 5
READ_ALL = "`memd verify` reads every byte of it"
OTHERS = 0o077
"""Permissions of anybody but the user."""

_MARK_OF = {"damaged": failed, "foreign": failed, "derived": warning}
_REMEDY_OF = {
    "damaged": "put the file back from a backup (memd backup) while memd is stopped; without one the rest is served",
    "foreign": "use the memd that wrote it, or move the file away",
    "derived": "start memd again: what is missing is rebuilt from the log, nothing is lost",
}


def directory(data_dir: Path, files: LocalDisk) -> CheckResult:
    """Check that it exists or can be created, can be written, and has free space."""
    try:
        existing = next(folder for folder in (data_dir, *data_dir.parents) if folder.exists())
        if not files.is_directory(existing):
            return failed(DIRECTORY, f"{existing} is a file", "name a folder with data_dir or --data-dir")
        room = files.room(existing)
        trouble = disk_trouble(existing, room) or trouble_by_writing(existing, files)
        locked_out = next((path for path in _written_to(data_dir, files) if not files.may_write(path)), None)
    except StoreError as error:
        return failed_with(DIRECTORY, error)
    except OSError as error:
        return failed(
            DIRECTORY, f"{data_dir}: {error.strerror or error}", "check the permissions of the folders above it"
        )
    if trouble is not None:
        return failed(DIRECTORY, trouble.what, trouble.remedy)
    if locked_out is not None:
        remedy = "give it to the user that memd runs as (chown), perhaps memd was once started as another"
        return failed(DIRECTORY, f"{locked_out} may not be written by this user", remedy)
    if room.bytes is None:
        return ok(DIRECTORY, f"{data_dir}; its file system does not tell how much is free")
    free = f"{f'{room.bytes / 1e9:,.1f} GB' if room.bytes >= FREE_BYTES_LOW else sized(room.bytes)} free"
    if room.bytes < FREE_BYTES_LOW:
        return warning(DIRECTORY, f"{data_dir}, only {free}", "make room: on a full disk memd stores nothing more")
    return ok(DIRECTORY, f"{data_dir}, {free}" + ("" if existing == data_dir else "; `memd serve` will create it"))


def permissions(data_dir: Path) -> Iterator[CheckResult]:
    """Warn of files that other users of the machine may read, as earlier versions left them; not of a folder without
    anything of memd's, which becomes private when the first daemon begins in it."""
    try:
        is_used = data_dir.is_dir() and any(not path.name.startswith(".") for path in data_dir.iterdir())
        found = list(_open_to_others(data_dir)) if is_used else []
    except OSError as error:
        yield failed(DIRECTORY, f"{data_dir}: {error.strerror or error}", "check the permissions of the folders in it")
        return
    if found:
        more = f" and {counted(len(found) - 1, 'path')} in it" if len(found) > 1 else ""
        said = f"{found[0]}{more} may be read by other users of this machine"
        yield warning(DIRECTORY, said, f"chmod -R go= {shlex.quote(str(data_dir))}")


def lock(data_dir: Path, daemon: RunningDaemon | None, files: LocalDisk) -> CheckResult:
    """Check that nobody holds the directory, or a daemon that answers does."""
    path = data_dir / LOCK_NAME
    if not files.is_locked(path):
        return ok(LOCK, "free: no daemon is running on this folder")
    holder = _holder(path, files)
    if daemon is None:
        return failed(
            LOCK,
            f"held by another process ({holder}), and no daemon answers for this folder",
            "wait if a memd command is at work or a daemon is just starting; else stop that process",
        )
    version = daemon.health().get("version")
    if version is None:
        said = f"held by the daemon at {daemon.url} ({holder}), which does not know this token"
        return failed(LOCK, said, THE_RIGHT_ONE)
    if version != __version__:
        said = f"held by the daemon at {daemon.url} ({holder}), which is memd {version}; this is {__version__}"
        return warning(LOCK, said, "start the daemon again so that it is the installed version")
    return ok(LOCK, f"held by the daemon at {daemon.url} ({holder}), which answers")


def log(
    data_dir: Path, topics: list[TopicDiskUsage], files: LocalDisk, *, is_cache: bool = False
) -> Iterator[CheckResult]:
    """Check that the log is whole; a large one is only counted, and in a cluster it is elsewhere."""
    if is_cache:
        yield ok(LOG, f"in the cluster; of {counted(len(topics), 'topic')} there is something in the cache", READ_ALL)
        return
    stored = sum(topic.log_bytes + topic.derived_bytes for topic in topics)
    chunks = sum(topic.chunks for topic in topics)
    said = f"{counted(len(topics), 'topic')}, {counted(chunks, 'chunk')}, {sized(stored)}"
    if not topics:
        yield ok(LOG, "nothing is stored yet")
        return
    yield from _twins([topic.topic_id for topic in topics])
    try:
        waiting = waiting_note(waiting_messages(data_dir, files))
    except StoreError as error:
        yield failed_with(LOG, error)
    else:
        said += f"; {waiting}" if waiting else ""
    if stored > READ_BYTES_MAX:
        yield ok(LOG, f"{said}; counted, not read through", READ_ALL)
        return
    try:
        report = verify(data_dir, files, is_served=files.is_locked(data_dir / LOCK_NAME))
    except StoreError as error:
        yield failed_with(LOG, error)
        return
    if report.ok:
        yield ok(LOG, f"{said}; read through and whole")
    yield from _set_aside(data_dir, topics, files)
    yield from map(_outcome_of, report.damaged[:FINDINGS_MAX])
    more = len(report.damaged) - FINDINGS_MAX
    if more > 0:
        yield failed(LOG, f"{counted(more, 'finding')} more", "`memd verify` lists them all")


def audit(data_dir: Path, files: LocalDisk) -> Iterator[CheckResult]:
    """Check that no line of the audit is missing or was changed, if there is one."""
    try:
        kept = read_book(files, data_dir, lambda _: False)
    except StoreError as error:
        yield failed_with(AUDIT, error)
        return
    if kept is not None and kept.findings:
        more = f" and {counted(len(kept.findings) - 1, 'finding')} more" if len(kept.findings) > 1 else ""
        remedy = "`memd audit --verify` lists all; compare it with the audit in a backup, and ask who could write there"
        yield failed(AUDIT, f"{kept.findings[0]}{more}", remedy)
    elif kept is not None:
        yield ok(AUDIT, f"{counted(kept.head.n, 'line')}, none missing and none changed")


def _twins(topic_ids: list[str]) -> Iterator[CheckResult]:
    """Warn of topics that would share a folder on another file system; today none is created."""
    seen: dict[str, str] = {}
    for topic_id in topic_ids:
        other = seen.setdefault(topic_id.casefold(), topic_id)
        if other != topic_id:
            said = f"the topics {other!r} and {topic_id!r} differ only in case: on macOS or Windows they would be mixed"
            yield warning(LOG, said, "before you move them there, give one another name: memd export, memd add --topic")


def _set_aside(data_dir: Path, topics: list[TopicDiskUsage], files: LocalDisk) -> Iterator[CheckResult]:
    """Tell of the `.torn` files."""
    layouts = [TopicLayout(data_dir, topic.topic_id) for topic in topics]
    torn = torn_files(files, [folder for layout in layouts for folder in (layout.directory, layout.segments)])
    if torn:
        size = sum(files.size(path) or 0 for path in torn)
        said = f"{counted(len(torn), 'interrupted write')} set aside, {counted(size, 'byte')}: {torn[0]}"
        hint = "memd reads none of them; remove them if nothing is missed"
        yield ok(LOG, said + (", …" if len(torn) > 1 else ""), hint)


def _outcome_of(finding: Finding) -> CheckResult:
    return _MARK_OF[finding.kind](LOG, str(finding), _REMEDY_OF[finding.kind])


def _open_to_others(path: Path) -> Iterator[Path]:
    """A path and those below it with which other users may do anything."""
    with contextlib.suppress(
        FileNotFoundError, NotADirectoryError
    ):  # yet to be created, or removed by a running daemon a moment ago
        status = path.stat()
        if status.st_mode & OTHERS and (status.st_size or not stat.S_ISREG(status.st_mode)):
            yield path
        for below in sorted(path.iterdir()) if path.is_dir() else ():
            yield from _open_to_others(below)


def _written_to(data_dir: Path, files: LocalDisk) -> Iterator[Path]:
    """The existing files that a daemon writes to. One run as another user leaves files that this user cannot write."""
    names = [data_dir, data_dir / LOCK_NAME]
    for topic_id in topic_ids_in(files, data_dir):
        layout = TopicLayout(data_dir, topic_id)
        names += [layout.directory, layout.segments, layout.active, layout.hot]
    yield from (path for path in names if path.exists())


def _holder(path: Path, files: LocalDisk) -> str:
    try:
        return files.read(path).decode(errors="replace").strip() or "which has not said who it is"
    except StoreError:
        return "unknown"
