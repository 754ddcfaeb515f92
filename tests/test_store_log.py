"""Appending, superseding, public ids, snapshots, sealing and reopening, on an undamaged disk."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from crash_files import CrashFiles
from drafts import (
    adjusted,
    draft,
    open_store,
    seal_all,
    search,
    uuid_of,
)

from memd.entries import Draft, Entry
from memd.errors import BadTopicId, StoreError, StoreLocked
from memd.store.store import Store, TopicLog


def with_uuid(start: str, public_id: str | None = None) -> Draft:
    """A new chunk whose uuid begins with these hex digits."""
    digits = (start + uuid_of(start).hex())[:32]
    return msgspec.structs.replace(draft(start), uuid=bytes.fromhex(digits), public_id=public_id)


def filled(files: CrashFiles, sizes: list[int], *, sealed: bool = False) -> tuple[TopicLog, list[Entry]]:
    """A topic with segments of 5, filled in groups of these sizes."""
    topic = open_store(files, segment_entries_max=5).topic("talk")
    entries = []
    for number, size in enumerate(sizes):
        entries += topic.append([draft(f"{number}.{i}") for i in range(size)])
        if sealed:
            seal_all(topic)
    return topic, entries


def open_store_again(files: CrashFiles) -> Store:
    return open_store(files.after_power_cut("lost"), segment_entries_max=5)


# Public ids


def test_a_public_id_is_the_shortest_prefix_that_no_other_chunk_of_the_topic_has() -> None:
    topic = open_store(CrashFiles()).topic("talk")
    drafts = [with_uuid("abcd"), with_uuid("abcd77"), with_uuid("abce"), with_uuid("abcd78")]
    entries = topic.append(drafts)
    own = drafts[0].uuid.hex()
    assert [entry.public_id for entry in entries] == [own[:4], "abcd7", "abce", "abcd78"]


def test_an_adopted_chunk_keeps_its_id_unless_a_chunk_here_has_it() -> None:
    topic = open_store(CrashFiles()).topic("talk")
    topic.append([with_uuid("abcd"), with_uuid("bbbb7")])
    kept, longer = topic.append([with_uuid("cccc1", public_id="cccc1"), with_uuid("abcd5", public_id="abcd")])
    assert kept.public_id == "cccc1"
    assert longer.public_id.startswith("abcd") and len(longer.public_id) > 4
    again, both = topic.append([with_uuid("bbbb8", public_id="bbbb8"), with_uuid("bbbb9", public_id="bbbb")])
    assert again.public_id == "bbbb8"
    assert both.public_id != "bbbb"


# Snapshots and sealing


def test_a_segment_is_full_after_the_append_that_fills_it_and_groups_are_not_split() -> None:
    files = CrashFiles()
    topic, _ = filled(files, [4, 4, 1])
    assert topic.unsealed() == [1]
    assert topic.snapshot().views[1].live_count == 8
    seal_all(topic)
    assert topic.unsealed() == []
    assert sorted(name.rpartition("/")[2] for name in files.contents()) == [
        "active.bin",
        "seg_0001.bin",
        "seg_0001.hnsw",
        "seg_0001.meta",
        "seg_0001.words",
    ]


@pytest.mark.thorough
def test_readers_search_while_the_writer_appends_and_seals(tmp_path: Path) -> None:
    store = open_store(data_dir=tmp_path, segment_entries_max=20)
    topic = store.topic("talk")
    entries = topic.append([draft("anchor")])
    done = threading.Event()
    problems: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                snapshot = topic.snapshot()
                hits = search(snapshot, entries[0].embedding[None], 10)
                assert hits[0].uuid == entries[0].uuid
                assert len(hits) == min(10, snapshot.live_count)
                for hit in hits:
                    assert snapshot.read(hit.place).canonical_id == hit.canonical_id
        except BaseException as error:
            problems.append(error)

    def seal() -> None:
        while not done.is_set():
            seal_all(topic)

    threads = [threading.Thread(target=target) for target in (read, read, seal)]
    for thread in threads:
        thread.start()
    newest = entries[0]
    for number in range(60):
        topic.append([draft(f"{number}.{i}") for i in range(3)])
        if number % 5 == 0:
            (newest,) = topic.append([adjusted(newest, number % 3)])
    done.set()
    for thread in threads:
        thread.join()
    assert problems == []
    store.close()


# The directory


@pytest.mark.process
def test_a_second_daemon_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from memd.store.store import Store\n"
        "store = Store.open(Path(sys.argv[1]), dimension=8, fingerprint='f', segment_entries_max=10)\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StoreLocked, match=rf"in use by another memd \(pid {other.pid}, started "):
            open_store(data_dir=tmp_path)
        other.kill()  # the lock dies with the process
        other.wait()
        open_store(data_dir=tmp_path).close()


@pytest.mark.parametrize("topic_id", ["", "..", ".", "a/b", "/etc", "a\0b", "-a", "ä", "a" * 129, "memd.lock", "a\n"])
def test_a_hostile_topic_id_never_reaches_the_disk(topic_id: str) -> None:
    files = CrashFiles()
    store = open_store(files)
    before = files.operations
    with pytest.raises(BadTopicId):
        store.topic(topic_id)
    assert files.operations == before


def test_a_draft_beyond_the_limit_is_refused_and_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memd.store.log.format.PAYLOAD_BYTES_MAX", 1 << 20)  # the words of 128 MiB would take a minute
    files = CrashFiles()
    topic, _ = filled(files, [1])
    huge = msgspec.structs.replace(draft("huge"), content="x" * (1 << 20))
    with pytest.raises(StoreError, match="limit"):
        topic.append([draft("fine"), huge])
    assert topic.snapshot().live_count == 1
    assert topic.append([draft("fine")])[0].public_id == uuid_of("fine").hex()[:4]


def test_unknown_fields_survive_a_correction_and_a_restart() -> None:
    files = CrashFiles()
    topic = open_store(files).topic("talk")
    topic.append([msgspec.structs.replace(draft("one"), unknown={"mood": ["calm", 3]})])
    found = open_store_again(files).topic("talk").snapshot().find(uuid_of("one"))
    assert found is not None
    assert found.unknown == {"mood": ["calm", 3]}


def test_ids_of_a_failed_append_are_free_again() -> None:
    files = CrashFiles()
    topic = open_store(files).topic("talk")
    topic.append([draft("one")])
    files.bytes_left = 10
    with pytest.raises(StoreError):
        topic.append([with_uuid("abcd1")])
    files.bytes_left = None
    assert topic.append([with_uuid("abcd2")])[0].public_id == "abcd"
