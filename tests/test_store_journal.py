"""hot.log: appended records come back, torn tails are moved to .torn files, a rewrite replaces everything."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from crash_files import CrashFiles
from drafts import open_journal

from memd.errors import DiskFull, StoreWriteFailed
from memd.store.log.format import scan_records

HOT = Path("/talk/hot.log")


def disk() -> CrashFiles:
    files = CrashFiles()
    files.make_directory(HOT.parent)
    files.sync_directory(Path("/"))
    return files


def test_a_rewrite_replaces_everything_and_appends_go_on_behind_it() -> None:
    files = disk()
    journal, _ = open_journal(HOT, files)
    journal.append([b"one", b"two"])
    journal.rewrite([b"two"])
    journal.append([b"three"])
    journal.sync()
    assert open_journal(HOT, files.after_power_cut("lost"))[1] == [b"two", b"three"]


def test_a_torn_tail_is_moved_aside_and_reported() -> None:
    files = disk()
    journal, _ = open_journal(HOT, files)
    journal.append([b"one", b"two"])
    files.put(HOT, files.read(HOT)[:-1])
    journal, payloads = open_journal(HOT, files)
    assert payloads == [b"one"]
    assert [finding.kind for finding in journal.findings] == ["torn"]
    assert files.read(Path("/talk/hot.log.torn")).endswith(b"tw")
    journal.append([b"three"])
    again, payloads = open_journal(HOT, files)
    assert (payloads, again.findings) == ([b"one", b"three"], [])


@pytest.mark.parametrize("in_header", [True, False])
def test_damage_in_the_middle_keeps_a_copy_and_the_readable_rest(in_header: bool) -> None:
    files = disk()
    journal, _ = open_journal(HOT, files)
    one, two, three = (msgspec.msgpack.encode({"type": name}) for name in ("one", "two", "three"))
    journal.append([one, two, three])
    files.flip(HOT, 3 if in_header else scan_records(files.read(HOT)).spans[1].offset + 8)
    image = files.read(HOT)
    journal, payloads = open_journal(HOT, files)
    assert payloads == ([one, two, three] if in_header else [one, three])
    assert [finding.kind for finding in journal.findings] == ["damaged"]
    assert files.read(Path("/talk/hot.log.torn")) == image
    again, same = open_journal(HOT, files)
    assert (same, again.findings) == (payloads, [])


def test_an_append_that_fails_adds_nothing_and_nothing_comes_behind_the_gap_until_it_is_rewritten() -> None:
    files = disk()
    journal, _ = open_journal(HOT, files)
    journal.append([b"one"])
    files.bytes_left = 12
    with pytest.raises(DiskFull):
        journal.append([b"two", b"three"])
    files.bytes_left = None
    with pytest.raises(DiskFull):
        journal.append([b"four"])
    assert open_journal(HOT, files)[1] == [b"one"]
    journal.rewrite([b"one", b"two", b"three", b"four"])
    journal.append([b"five"])
    assert open_journal(HOT, files)[1] == [b"one", b"two", b"three", b"four", b"five"]


def test_a_rewrite_that_fails_leaves_the_old_journal_usable() -> None:
    for step in range(5):
        files = disk()
        journal, _ = open_journal(HOT, files)
        journal.append([b"one"])
        files.fail_at = {files.operations + step}
        with pytest.raises(StoreWriteFailed):
            journal.rewrite([b"two"])
        renamed = scan_records(files.read(HOT)).spans[0].length == 3 and files.read(HOT).endswith(b"two")
        journal.rewrite([b"three"])
        journal.append([b"four"])
        assert open_journal(HOT, files)[1] == [b"three", b"four"]
        assert renamed == (step == 4)
