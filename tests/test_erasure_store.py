"""Erasing in the store: no byte stays, ids and places do, and whatever interrupts it, it is finished.

Rule: the witness is the bytes of every file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from drafts import (
    DATA_DIR,
    adjusted,
    deprecated,
    draft,
    live_contents,
    open_store,
    seal_all,
    search,
    unit_vector,
    uuid_of,
)
from effort import steps

from memd.admin.history import log_page
from memd.entries import Draft, Erased
from memd.errors import StoreError
from memd.principals import OWNER
from memd.store.disk import Appender, LocalDisk, Wiper
from memd.store.erasure import Erasure, ForbiddenText, stub_payload
from memd.store.layout import TopicLayout
from memd.store.log.format import decode_entry, encode_entry
from memd.store.store import Store, TopicLog
from memd.store.tools.backup import backup
from memd.store.tools.verify import verify

DISK = LocalDisk()
MARK = Erased(at=1_700_000_900_000_000, by="ann")


def word(name: int | str) -> str:
    """What stands in the text of a chunk and nowhere else."""
    return f"kestrel{name}quartz"


def told(name: int) -> Draft:
    """A chunk with a word of its own."""
    return msgspec.structs.replace(draft(name), content=f"user: {word(name)}")


def filled(store: Store, count: int) -> TopicLog:
    """A topic with `count` chunks, five a segment, all full ones sealed."""
    topic = store.topic("talk")
    for number in range(count):
        topic.append([told(number)])
    seal_all(topic)
    return topic


def traces(contents: dict[str, bytes], name: int) -> list[str]:
    """The files that have the words of a chunk, or bytes of its vector."""
    vector = unit_vector(name).tobytes()
    return [path for path, data in contents.items() if word(name).encode() in data or vector[:16] in data]


def on_disk(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ids(topic: TopicLog) -> set[tuple[bytes, str, int, int]]:
    """What stays of each entry, erased or not."""
    snapshot = topic.snapshot()
    entries = [snapshot.read(place) for place in snapshot.latest_places()]
    return {(one.uuid, one.public_id, one.origin_id, one.created_at) for one in entries}


def test_who_has_an_earlier_snapshot_gets_no_empty_text_and_stores_nothing_of_it() -> None:
    topic = filled(open_store(CrashFiles(), segment_entries_max=5), 12)
    before = topic.snapshot()
    hits = {hit.uuid: hit for hit in search(before, unit_vector(3)[None], 100)}
    known = before.find(uuid_of(3))
    topic.erase({uuid_of(3), uuid_of(11)}, MARK, Wiper(topic._files))
    assert known is not None
    with pytest.raises(StoreError, match="was erased"):
        topic.append([adjusted(known, 1)])
    assert before.read(hits[uuid_of(4)].place).content == f"user: {word(4)}"
    for number in (3, 11):
        hit = hits[uuid_of(number)]
        with pytest.raises(StoreError, match="erased a moment ago"):
            before.read(hit.place)
        assert before.read_many([hit.place]) == {}
    events = {one.uuid: one.event for one in log_page([before], OWNER, None, 100).events}
    assert [events[uuid_of(number).hex()] for number in (3, 4, 11)] == ["erased", "told", "erased"], (
        "nothing is damaged"
    )


class AppendingDisk(LocalDisk):
    """Does something just before a file of the log is written anew without a text."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], object]] = []

    def create(self, path: Path) -> Appender:
        appender = super().create(path)
        if path.name.endswith(".bin.tmp") and path.name != "active.bin.tmp" and self.meanwhile:
            self.meanwhile.pop()()
        return appender


def test_a_file_that_is_begun_while_the_one_before_is_rewritten_is_another_one(tmp_path: Path) -> None:
    disk = AppendingDisk()
    store = open_store(disk, tmp_path, segment_entries_max=50)
    topic = filled(store, 30)
    disk.meanwhile.append(lambda: [topic.append([told(number)]) for number in range(30, 60)])
    topic.erase({uuid_of(7)}, MARK, Wiper(disk))
    assert disk.meanwhile == [] and topic.snapshot().live_count == 59
    store.close()
    assert verify(tmp_path, DISK).damaged == []
    kept = [f"user: {word(number)}" for number in range(60) if number != 7]
    assert live_contents(open_store(None, tmp_path, segment_entries_max=50).topic("talk")) == kept
    assert traces(on_disk(tmp_path), 7) == []


def test_while_a_merged_index_is_overwritten_all_else_that_it_had_is_found(tmp_path: Path) -> None:
    disk, found = AppendingDisk(), list[str]()
    topic = filled(open_store(disk, tmp_path, segment_entries_max=5), 42)
    topic.merge([1, 2, 3, 4, 5, 6, 7, 8])
    disk.meanwhile.append(lambda: found.extend(live_contents(topic)))
    topic.erase({uuid_of(7)}, MARK, Wiper(disk))
    assert not list(tmp_path.rglob("merged_*")), "it was of the erased one, too"
    assert {f"user: {word(number)}" for number in range(42) if number != 7} <= set(found)


def test_what_an_append_is_creating_is_no_leftover(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    topic = filled(store, 3)
    layout = TopicLayout(tmp_path, "talk")
    (begun := layout.active.with_name("active.bin.tmp")).write_bytes(b"a header")
    (left := layout.active.with_name("active.bin.erased.tmp")).write_bytes(b"half of it")
    topic.erase({uuid_of(1)}, MARK, Wiper(DISK))
    assert begun.read_bytes() == b"a header" and not left.exists()


@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_interrupts_it_doing_it_again_finishes_it(loss: Loss) -> None:
    def prepared() -> tuple[CrashFiles, TopicLog]:
        files = CrashFiles()
        topic = filled(open_store(files, segment_entries_max=5), 17)
        praised = topic.snapshot().find(uuid_of(8))
        assert praised is not None
        topic.append([adjusted(praised, 2)])
        topic.merge([1, 2])
        return files, topic

    gone = {uuid_of(1), uuid_of(8), uuid_of(16)}
    kept = [f"user: {word(number)}" for number in range(17) if number not in (1, 8, 16)]
    probe, topic = prepared()
    start, known = probe.operations, ids(topic)
    assert all(traces(probe.contents(), number) for number in (1, 8, 16))
    assert topic.erase(gone, MARK, Wiper(probe)) == 4
    for cut in steps(start, probe.operations, loss):
        files, topic = prepared()
        files.cut_after = cut
        with pytest.raises(PowerCutError):
            topic.erase(gone, MARK, Wiper(files))
        after = files.after_power_cut(loss)
        again = open_store(after, segment_entries_max=5).topic("talk")
        assert set(live_contents(again)) >= set(kept), probe.log[cut]
        seal_all(again)
        again.erase(gone, MARK, wiper := Wiper(after))
        assert wiper.left == []
        assert live_contents(again) == kept and ids(again) == known, probe.log[cut]
        for number in (1, 8, 16):
            assert traces(after.contents(), number) == [], probe.log[cut]
        assert verify(DATA_DIR, after).damaged == []


def erased(store: Store, erasure: Erasure) -> None:
    if not erasure.is_moved:
        store.retire(erasure.topic_id)
        erasure = store.put_topic_aside(erasure, ForbiddenText())
    store.wipe_aside(erasure, Wiper(store.files))
    store.ledger.write(msgspec.structs.replace(erasure, done_at=store.clock.now_us()))


def test_ids_do_not_come_back_after_a_clock_was_set_back(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    topic = store.topic("talk")
    store.clock.observe(1_900_000_000_000_000)
    [last] = topic.append([told(1)])
    erasure = Erasure(
        id=store.clock.next(), kind="topic", topic_id="talk", at=1, by="ann", chunks=1, highest_id=last.canonical_id
    )
    store.ledger.write(erasure)
    erased(store, erasure)
    store.close()
    [new] = open_store(None, tmp_path).topic("talk").append([told(1)])
    assert new.canonical_id > last.canonical_id


@pytest.mark.parametrize("by", ["ann", "a" * 300, ""])
@pytest.mark.parametrize("size", [0, 1, 5, 9, 20, 40, 60, 255, 256, 300, 65_535, 65_536, 70_000])
def test_a_stub_is_as_long_as_the_record_was_and_says_nothing_of_it(by: str, size: int) -> None:
    entry = draft(1).as_entry(public_id=uuid_of(1).hex()[:4], canonical_id=5, group_left=0)
    for one in (
        msgspec.structs.replace(entry, content="x" * size),
        msgspec.structs.replace(
            deprecated(entry).as_entry(public_id=uuid_of(1).hex()[:4], canonical_id=5, group_left=0),
            reason="x" * size,
            digests=(),
        ),
    ):
        payload = encode_entry(one)
        stub = stub_payload(one, Erased(at=MARK.at, by=by), len(payload))
        assert len(stub) == len(payload) and (size == 0 or b"xx" not in stub)
        read = decode_entry(stub, dimension=8)
        assert (read.uuid, read.canonical_id, read.content, read.vector) == (one.uuid, 5, "", b"")


def test_the_next_backup_loses_what_was_erased_and_keeps_the_rest(tmp_path: Path) -> None:
    source, target = tmp_path / "memory", tmp_path / "backup"
    store = open_store(None, source, segment_entries_max=5)
    topic = filled(store, 13)
    store.topic("other").append([told(50)])
    backup(source, target, DISK)
    assert traces(on_disk(target), 2) and traces(on_disk(target), 12) and traces(on_disk(target), 50)
    topic.erase({uuid_of(2), uuid_of(12)}, MARK, Wiper(DISK))
    erasure = Erasure(id=store.clock.next(), kind="topic", topic_id="other", at=MARK.at, by="ann", chunks=1)
    store.ledger.write(erasure)
    erased(store, erasure)
    store.topic("other").append([told(51)])
    seal_all(topic)
    report = backup(source, target, DISK)
    assert report.findings == [] and report.erased >= 3
    assert [number for number in (2, 12, 50) if traces(on_disk(target), number)] == []
    assert traces(on_disk(target), 51) and traces(on_disk(target), 3)
    assert verify(target, DISK).damaged == [] and verify(source, DISK).damaged == []
    assert backup(source, target, DISK).erased == 0
    assert live_contents(open_store(None, target, segment_entries_max=5).topic("talk")) == live_contents(topic)
