"""Topics between a folder and a shared log: the bytes of every record are copied unchanged, then compared.

Rule: nothing is removed from the source. Existing rows and records are compared and not written again, so running an
interrupted move again resumes it. A folder into which topics are moved is a copy of the log until all of it is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec

from memd.errors import MoveRefused, Rewritten, StoreError
from memd.store.disk import LocalDisk
from memd.store.erasure import encode_forbidden, read_forbidden
from memd.store.layout import CLUSTER_NAME, LOCK_NAME, TopicLayout, topic_ids_in
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_LOG,
    Header,
    decode_header,
    encode_header,
    encode_record,
    scan_records,
)
from memd.store.log.journal import Journal, SharedMark, read_journal, records_of
from memd.store.log.recovery import find_damage, read_log_file
from memd.store.shared.postgres import Row, SharedLog, Stream, topics_in
from memd.store.shared.shared_topic import SharedTopicLog
from memd.store.store import ModelId, Store, StoreShared
from memd.store.topic import TopicLog

_SEGMENT_ENTRIES = 5_000


class MovedTopic(msgspec.Struct, frozen=True):
    """The outcome of one topic."""

    topic: str
    outcome: Literal["moved", "refused"]
    entries: int = 0
    bytes: int = 0
    note: str = ""


Step = tuple[int, int, MovedTopic]
"""Number of topics done, the total, and the last one done."""


def into_folder(
    kept: SharedLog, folder: Path, files: LocalDisk, topics: Collection[str] | None = None
) -> Iterator[Step]:
    """Write topics into a folder that is empty, or has an unfinished move. Raises StoreError: the folder has topics of
    its own, or one side cannot be used. Resumable."""
    names = topics_in(kept) if topics is None else sorted(topics)
    models = (header for name in names if (header := _first_header(kept, name)) is not None)
    model = next(models, None)
    with closing(
        Store(
            folder,
            StoreShared(
                model=ModelId(1 if model is None else model.dimension, "" if model is None else model.fingerprint),
                segment_entries_max=_SEGMENT_ENTRIES,
                files=files,
            ),
            kept=kept,
        )
    ) as store:
        for number, name in enumerate(names, start=1):
            yield number, len(names), _into_folder(kept, store, name)
    files.remove(folder / CLUSTER_NAME)


def into_log(folder: Path, files: LocalDisk, kept: SharedLog, topics: Collection[str] | None = None) -> Iterator[Step]:
    """Append the topics of a folder, on which no daemon runs, to a shared log that does not have them. Raises
    StoreError: one side cannot be used. Resumable."""
    lock = files.lock(folder / LOCK_NAME)
    try:
        names = topic_ids_in(files, folder) if topics is None else sorted(topics)
        for number, name in enumerate(names, start=1):
            try:
                moved = _into_log(TopicLayout(folder, name), files, kept)
            except MoveRefused as error:
                moved = MovedTopic(name, "refused", note=str(error))
            yield number, len(names), moved
    finally:
        lock.release()


def _into_folder(kept: SharedLog, store: Store, name: str) -> MovedTopic:
    while True:
        try:
            _copy(kept, store.topic(name))
            break
        except Rewritten:  # text was erased, or the move was interrupted before its first record was here
            store.drop_copy(name)
    store.close_topic(name)
    layout, files = TopicLayout(store.data_dir, name), store.files
    for path in layout.log_files(files):
        files.sync(path)
    return _compared(kept, layout, files)


def _copy(kept: SharedLog, log: TopicLog) -> None:
    """Read a topic, or the rest of it. Raises Rewritten: the records here are not the beginning of it."""
    assert isinstance(log, SharedTopicLog), "of a log that is shared"
    journal, _ = Journal.open(log.claim)
    if not log.head:
        log.generation = kept.ends([log.topic_id])[log.topic_id].generation
        journal.rewrite([], mark=SharedMark(log.generation, 0))  # so that a resumed move knows its generation
    log.catch_up()
    rows = list(_rows(kept, log.topic_id, "hot"))
    payloads = [payload for row in rows for payload in records_of(row.data, 0).payloads]
    kept_payloads = [one for one in payloads if one != b"\xc0"]  # it marks an empty buffer
    journal.rewrite(kept_payloads, mark=SharedMark(log.generation, rows[-1].last if rows else 0))


def _into_log(layout: TopicLayout, files: LocalDisk, kept: SharedLog) -> MovedTopic:
    news = kept.since(layout.topic_id, {"log": 0, "hot": 0, "kept": 0}, limit=1)
    generation, heads = news.generation, news.heads
    head = heads.get("log", 0)
    ends = {last for last, _, _ in _groups(layout, files)}
    if head and head not in ends:
        raise MoveRefused(f"there is another topic of this name in {kept.place}; nothing was changed")
    for last, header, records in _groups(layout, files):
        if last <= head:
            continue
        if not kept.append(layout.topic_id, head, Row("log", last, header + records), generation=generation):
            raise StoreError(f"topic {layout.topic_id}: a daemon of the cluster appends to it; stop that one first")
        generation, head = generation or 1, last
    payloads = read_journal(layout.hot, files)
    if payloads and not heads.get("hot"):
        data = b"".join(map(encode_record, payloads))
        kept.append(layout.topic_id, 0, Row("hot", 1, data, is_base=True), generation=generation)
        generation = generation or 1
    if (forbidden := read_forbidden(files, layout)) and not heads.get("kept"):
        kept.append(
            layout.topic_id, 0, Row("kept", 1, encode_forbidden(forbidden), is_base=True), generation=generation
        )
    return _compared(kept, layout, files)


def _compared(kept: SharedLog, layout: TopicLayout, files: LocalDisk) -> MovedTopic:
    """Read both sides again, and make sure that the log has the records of the folder; daemons may append meanwhile.
    Raises MoveRefused: it does not."""
    rows, entries, size = _rows(kept, layout.topic_id, "log"), 0, 0
    for last, _, records in _groups(layout, files):
        row = next(rows, None)
        if row is None or row.last != last or row.data[HEADER_BYTES:] != records:
            raise MoveRefused(
                f"what was stored up to entry {last} is not the same in the folder and in {kept.place}; nothing was "
                "removed, look at both with `memd verify`"
            )
        entries, size = entries + len(scan_records(records, 0).spans), size + len(records)
    return MovedTopic(layout.topic_id, "moved", entries=entries, bytes=size)


def _groups(layout: TopicLayout, files: LocalDisk) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield the groups of a topic's log: the id of the last entry, the header of the file, and the records."""
    paths = layout.log_files(files)
    for path in paths:
        data = files.read(path)
        log_file = read_log_file(data, name=str(path), dimension=None)
        if log_file.header is None or find_damage(log_file, is_last=path == paths[-1]):
            raise MoveRefused(f"{path}: is damaged; `memd verify` says what is lost, a backup may have it")
        begin = None
        for entry, span in zip(log_file.entries[: log_file.whole_count], log_file.spans, strict=False):
            begin = span.offset if begin is None else begin
            if not entry.group_left:
                yield entry.canonical_id, encode_header(log_file.header), data[begin : span.end]
                begin = None


def _rows(kept: SharedLog, name: str, stream: Stream) -> Iterator[Row]:
    after = 0
    while rows := kept.since(name, {stream: after}).of(stream):
        yield from rows
        after = rows[-1].last


def _first_header(kept: SharedLog, name: str) -> Header | None:
    rows = kept.since(name, {"log": 0}, limit=1).of("log")
    return decode_header(rows[0].data, magic=MAGIC_LOG, name=name) if rows else None
