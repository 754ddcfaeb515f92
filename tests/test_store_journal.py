"""hot.log: appended records come back, torn tails are moved to .torn files, a rewrite replaces everything."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from crash_files import CrashFiles
from drafts import open_journal
from hypothesis import given
from hypothesis import strategies as st

from memd.errors import DiskFull, ForeignFile, StoreWriteFailed
from memd.store.disk import LocalDisk
from memd.store.log.format import MAGIC_LOG, Header, encode_header, scan_records

HOT = Path("/talk/hot.log")


def disk() -> CrashFiles:
    files = CrashFiles()
    files.make_directory(HOT.parent)
    files.sync_directory(Path("/"))
    return files


@given(st.lists(st.lists(st.binary(min_size=1, max_size=20), max_size=4), max_size=5))
def test_what_was_appended_comes_back_in_order(groups: list[list[bytes]]) -> None:
    files = disk()
    journal, payloads = open_journal(HOT, files)
    assert payloads == []
    for group in groups:
        journal.append(group)
    journal.sync()
    assert open_journal(HOT, files.after_power_cut("lost"))[1] == [payload for group in groups for payload in group]


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


def test_another_kind_of_file_is_refused() -> None:
    files = disk()
    open_journal(HOT, files)
    data = bytearray(files.read(HOT))
    header = Header(magic=MAGIC_LOG, dimension=8, segment_id=1, fingerprint="f", topic=bytes(8))
    files.put(HOT, encode_header(header) + bytes(data[80:]))
    with pytest.raises(ForeignFile):
        open_journal(HOT, files)


def test_a_journal_on_a_real_disk(tmp_path: Path) -> None:
    path = tmp_path / "hot.log"
    journal, _ = open_journal(path, LocalDisk())
    journal.append([b"one"])
    journal.sync()
    journal.rewrite([b"two"])
    journal.append([b"three"])
    with path.open("ab") as file:
        file.write(b"\x05\0\0\0torn")
    assert open_journal(path, LocalDisk())[1] == [b"two", b"three"]
    assert (tmp_path / "hot.log.torn").exists()
