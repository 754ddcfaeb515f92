"""`verify` and `export`: beside a running daemon, and after it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from crash_files import CrashFiles
from drafts import DATA_DIR, adjusted, deprecated, draft, open_journal, open_store, seal_all

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


def test_a_rotation_while_reading_hides_and_doubles_nothing() -> None:
    class Rotating(CrashFiles):
        """Rotates twice right after active.bin was read."""

        armed = False

        def read(self, path: Path) -> bytes:
            data = super().read(path)
            if self.armed and path == ACTIVE:
                self.armed = False
                topic.append([draft(f"later {number}") for number in range(5)])
                topic.append([draft(f"latest {number}") for number in range(5)])
            return data

    files = Rotating()
    topic = open_store(files, segment_entries_max=5).topic("talk")
    for number in range(8):
        topic.append([draft(number)])
    expected = [f"user: chunk {number}" for number in range(8)]
    files.armed = True
    found = [entry["content"] for entry in export(DATA_DIR, files, topic_id=None, live_only=False)]
    assert found == expected
    assert verify(DATA_DIR, files).ok
    for number in range(8, 11):
        topic.append([draft(number)])
    files.armed = True
    assert verify(DATA_DIR, files).ok


def test_export_gives_every_entry_of_all_topics_in_order_with_all_fields() -> None:
    files = CrashFiles()
    store = open_store(files, segment_entries_max=3)
    (first,) = store.topic("a").append([draft("one")])
    (other,) = store.topic("b").append([draft("two")])
    store.topic("a").append([adjusted(first, 2)])
    (update,) = store.topic("a").append([msgspec.structs.replace(draft("three"), supersedes=(first.uuid,))])
    store.topic("a").append([deprecated(first)])
    found = list(export(DATA_DIR, files, topic_id=None, live_only=False))
    assert [entry["canonical_id"] for entry in found] == sorted(entry["canonical_id"] for entry in found)
    assert [(entry["topic_id"], entry["status"], entry["live"]) for entry in found] == [
        ("a", "Active", False),
        ("b", "Active", True),
        ("a", "Active", False),
        ("a", "Active", True),
        ("a", "Deprecated", False),
    ]
    assert found[2] == {
        "id": first.public_id,
        "uuid": first.uuid.hex(),
        "topic_id": "a",
        "canonical_id": found[2]["canonical_id"],
        "origin_id": first.canonical_id,
        "status": "Active",
        "live": False,
        "utility_multiplier": 2.25,
        "created_at": "2023-11-14T22:13:20.000000Z",
        "content": "user: chunk one",
        "roles": ["user"],
        "kind": "turn",
        "source": None,
        "supersedes": [],
        "action": "Helpful",
        "reason": "test",
    }
    assert found[3]["supersedes"] == [first.uuid.hex()]
    assert found[4]["content"] == ""
    live = list(export(DATA_DIR, files, topic_id=None, live_only=True))
    assert [entry["uuid"] for entry in live] == [other.uuid.hex(), update.uuid.hex()]
    assert [entry["uuid"] for entry in export(DATA_DIR, files, topic_id="b", live_only=False)] == [other.uuid.hex()]


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
