"""Disk usage of a data directory: topics, entries, bytes.

Rule: writes nothing, needs no lock and works beside a running daemon. Sealed segments are counted from their `.meta`.
Only the rest of the log is read, and only again if a file has changed: the page requests all topics at every view.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from memd.errors import StoreError
from memd.store.disk import LocalDisk
from memd.store.layout import TopicLayout, is_derived, topic_ids_in
from memd.store.log.columns import ROW, Records, superseded
from memd.store.tools.export import log_columns


class TopicDiskUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One topic on disk."""

    topic_id: str
    chunks: int
    """Number of live chunks."""
    entries: int
    segments: int
    """Number of full segments."""
    log_bytes: int
    """The log and the journal: all that a backup needs."""
    derived_bytes: int
    """Indexes and columns, which can be rebuilt."""
    chunks_by_model: dict[str, int]
    """Live chunks by the fingerprint of the embedding model, without files whose header is damaged."""
    trouble: str = ""
    """Why the log cannot be read, so that nothing of it is counted; empty if it can."""

    def chunks_of_others(self, fingerprint: str) -> int:
        """Return the number of live chunks that a model with another fingerprint embedded."""
        return sum(count for model, count in self.chunks_by_model.items() if model != fingerprint)


def disk_usage(data_dir: Path, files: LocalDisk) -> list[TopicDiskUsage]:
    """Return the usage of all topics, sorted by name. Raises StoreError: the directory cannot be read."""
    return [_topic(files, TopicLayout(data_dir, topic_id)) for topic_id in topic_ids_in(files, data_dir)]


Stamps = dict[Path, tuple[int, int]]
"""Size and time of the last change of each log file."""
_known: WeakKeyDictionary[LocalDisk, dict[Path, tuple[Stamps, TopicDiskUsage]]] = WeakKeyDictionary()
"""The last counts, by the folder of a topic."""


def _topic(files: LocalDisk, layout: TopicLayout) -> TopicDiskUsage:
    log_bytes = derived_bytes = 0
    stamps: Stamps = {}
    for directory in (layout.directory, layout.segments):
        for path in (directory / name for name in files.names(directory)):
            if files.is_directory(path):
                continue
            size = files.size(path) or 0
            if is_derived(path.name):
                derived_bytes += size
            else:
                log_bytes += size
            if path.suffix == ".bin":
                stamps[path] = size, files.changed_at(path)
    known = _known.setdefault(files, {})
    if (counted := known.get(layout.directory)) is None or counted[0] != stamps:
        counted = known[layout.directory] = stamps, _counted(files, layout)
    return msgspec.structs.replace(counted[1], log_bytes=log_bytes, derived_bytes=derived_bytes)


def _counted(files: LocalDisk, layout: TopicLayout) -> TopicDiskUsage:
    found, trouble = [], ""
    try:
        found = list(log_columns(files, layout))
    except StoreError as error:
        trouble = str(error)
    records: Records = np.concatenate([np.empty(0, ROW), *(rows for *_, rows in found)])
    live, by_model, end = ~superseded(records), Counter[str](), 0
    for _, header, rows in found:
        count = int(np.count_nonzero(live[end : (end := end + len(rows))]))
        if header is not None and count:
            by_model[header.fingerprint] += count
    return TopicDiskUsage(
        topic_id=layout.topic_id,
        chunks=int(np.count_nonzero(live)),
        entries=len(records),
        segments=sum(paths[0] != layout.active for paths, _, _ in found),
        log_bytes=0,
        derived_bytes=0,
        chunks_by_model=dict(by_model),
        trouble=trouble,
    )
