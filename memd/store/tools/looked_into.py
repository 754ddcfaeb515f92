"""A backup that somebody has looked into: `memd log` and the like open it as a daemon does, and leave files in it.

Rule: it is a backup for as long as it has nothing of its own. Whatever may have been said, corrected or erased in it is
a reason to leave it alone; that its last segment was closed, and what is built from the log, is none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memd.errors import CorruptFile, StoreError
from memd.store.disk import LocalDisk
from memd.store.erasure.ledger import read_erasures
from memd.store.erasure.stub import is_erasure_of
from memd.store.erasure.wiping import Wiper
from memd.store.layout import RECENT_NAME, TopicLayout, erasures_dir, topic_folders_in
from memd.store.log.format import HEADER_BYTES, MAGIC_LOG, decode_header
from memd.store.log.journal import payloads_in

Waiting = Callable[[Path, LocalDisk], int]
"""How many messages of a journal are in no log yet."""


def be_backup_again(files: LocalDisk, data_dir: Path, target: Path, waiting: Waiting | None) -> None:
    """Make a folder what the last backup of `data_dir` left, but for what is newer in the same log.

    Raises:
        StoreError: it has, or may have, entries of its own; nothing was changed.

    Args:
        waiting: None: whatever is in a journal, and not in that of the source.
    """
    erased = [{one.id for one in read_erasures(files, erasures_dir(folder))[0]} for folder in (target, data_dir)]
    topics = [(TopicLayout(data_dir, name), TopicLayout(target, name)) for name in topic_folders_in(files, target)]
    if not erased[0] <= erased[1] or any(_has_own(files, *pair, waiting) for pair in topics):
        raise StoreError(
            f"{target}: memd has been served from this backup, so it has entries of its own; choose another folder"
        )
    for source, layout in topics:
        _reopen_last(files, source, layout)
        Wiper(files).wipe_folder(layout.lexical)  # it has words of what may have been erased since
    files.remove(target / RECENT_NAME)


def _has_own(files: LocalDisk, source: TopicLayout, target: TopicLayout, waiting: Waiting | None) -> bool:
    logs = {target.bin(number): number for number in target.segment_ids(files)}
    if files.size(target.active) is not None:
        logs[target.active] = _number(files, target.active)
    if not all(_is_known(files, path, source, number) for path, number in logs.items()):
        return True
    told, known = (
        payloads_in(files.read(one)) if files.size(one) is not None else [] for one in (target.hot, source.hot)
    )
    return not set(told) <= set(known) and (waiting is None or waiting(target.hot, files) > 0)


def _is_known(files: LocalDisk, path: Path, source: TopicLayout, number: int) -> bool:
    """Whether the segment of the source begins with a log file, but for what was erased there since."""
    full = source.bin(number)
    if files.is_same_file(path, full):
        return True
    # Once it is full it is no longer the active one: looked for in this order, it is not missed.
    is_active = files.size(source.active) is not None and _number(files, source.active) == number
    for one in (*([source.active] if is_active else []), full):
        if files.size(one) is not None:
            earlier, grown = files.read(path), files.read(one)
            if grown.startswith(earlier) or is_erasure_of(grown[: len(earlier)], earlier):
                return True
    return False


def _number(files: LocalDisk, path: Path) -> int:
    """The number in the header of a log file; 0, which no segment has, if it is damaged."""
    with suppress(CorruptFile):
        return decode_header(files.read_at(path, 0, HEADER_BYTES), magic=MAGIC_LOG, name=str(path)).segment_id
    return 0


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
