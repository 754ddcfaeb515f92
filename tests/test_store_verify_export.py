"""`verify` and `export`: beside a running daemon, and after it."""

from __future__ import annotations

import msgspec
import pytest
from crash_files import CrashFiles
from drafts import DATA_DIR, draft, open_journal, open_store, seal_all

from memd.errors import BadTopicId, UnknownTopic
from memd.store.tools.export import export
from memd.store.tools.verify import verify

ACTIVE = DATA_DIR / "talk" / "active.bin"


def test_verify_counts_what_it_read() -> None:
    files = CrashFiles()
    store = open_store(files, segment_entries_max=5)
    for number in range(7):
        store.topic("talk").append([draft(number)])
        seal_all(store.topic("talk"))
    journal, _ = open_journal(store.topic("talk").hot_path, files)
    journal.append([b"one", b"two"])
    store.topic("another").append([draft("one")])
    store.close()
    report = verify(DATA_DIR, files)
    assert report.ok and report.damaged == []
    assert (report.counts.topics, report.counts.files, report.counts.records) == (2, 7, 10)
    assert report.counts.bytes == sum(map(len, files.contents().values()))
    assert report.lines == [f"checked 2 topics: 7 files, 10 records, {report.counts.bytes:,} bytes; all whole"]


def test_an_unfinished_append_of_a_running_daemon_is_no_finding_and_not_exported() -> None:
    files = CrashFiles()
    store = open_store(files)
    store.topic("talk").append([draft("one")])
    store.topic("talk").append([draft("two"), draft("three")])
    whole = files.read(ACTIVE)
    for length in range(len(whole) - 1, len(whole) - 400, -23):
        files.put(ACTIVE, whole[:length])
        report = verify(DATA_DIR, files, is_served=True)
        assert report.ok
        assert any("are being written" in line for line in report.lines)
        found = list(export(DATA_DIR, files, topic_id=None, live_only=False))
        assert [entry["content"] for entry in found] == ["user: chunk one"]


def test_export_of_a_topic_that_is_not_there_says_so() -> None:
    files = CrashFiles()
    open_store(files).topic("talk").append([draft("one")])
    with pytest.raises(UnknownTopic, match="there is no topic 'walk'; `memd stats` lists them"):
        next(export(DATA_DIR, files, topic_id="walk", live_only=False))
    with pytest.raises(BadTopicId):
        next(export(DATA_DIR, files, topic_id="../talk", live_only=False))
    assert len(list(export(DATA_DIR, files, topic_id="talk", live_only=False))) == 1


def test_verify_names_damage_in_a_journal() -> None:
    files = CrashFiles()
    store = open_store(files)
    path = store.topic("talk").hot_path
    journal, _ = open_journal(path, files)
    journal.append([msgspec.msgpack.encode({"type": name}) for name in ("one", "two")])
    store.close()
    files.flip(path, 80 + 8)
    report = verify(DATA_DIR, files)
    assert not report.ok
    assert "hot.log: bytes 80 to 98 cannot be read" in report.lines[0]
