"""Damage of every kind: what is served, what is said, and what is never touched."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from crash_files import CrashFiles
from drafts import (
    DATA_DIR,
    contents,
    digest_of,
    draft,
    live_contents,
    open_journal,
    open_store,
    search,
    two_segments,
    unit_vector,
)

from memd.errors import CorruptFile, ForeignFile, StoreWriteFailed
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_LOG,
    decode_entry,
    decode_header,
    encode_entry,
    encode_header,
    encode_record,
    payload_of,
    scan_records,
)
from memd.store.log.recovery import TORN_KEPT
from memd.store.store import TopicLog
from memd.store.tools.export import export
from memd.store.tools.verify import VerifyReport, verify

TOPIC = DATA_DIR / "talk"
ACTIVE = TOPIC / "active.bin"
BIN = TOPIC / "segments" / "seg_0001.bin"
SECOND = TOPIC / "segments" / "seg_0002.bin"
META = BIN.with_suffix(".meta")
ALL = [f"user: chunk {number}" for number in range(12)]


def disk() -> CrashFiles:
    files: CrashFiles = two_segments(CrashFiles())
    return files


def record_at(files: CrashFiles, path: Path, number: int) -> int:
    return scan_records(files.read(path)).spans[number].offset


def flip(path: Path, record: int, offset: int) -> Callable[[CrashFiles], None]:
    return lambda files: files.flip(path, record_at(files, path, record) + offset)


def cut(path: Path, bytes_lost: int) -> Callable[[CrashFiles], None]:
    return lambda files: files.put(path, files.read(path)[:-bytes_lost])


def cut_before(path: Path, record: int) -> Callable[[CrashFiles], None]:
    return lambda files: files.put(path, files.read(path)[: record_at(files, path, record)])


def zero(path: Path, bytes_lost: int) -> Callable[[CrashFiles], None]:
    return lambda files: files.put(path, files.read(path)[:-bytes_lost] + bytes(bytes_lost))


def remove(*paths: Path) -> Callable[[CrashFiles], None]:
    def run(files: CrashFiles) -> None:
        for path in paths:
            files.remove(path)

    return run


def swap(files: CrashFiles) -> None:
    one, two = files.read(BIN), files.read(SECOND)
    files.put(BIN, two)
    files.put(SECOND, one)


def of_another_topic(files: CrashFiles) -> None:
    header = decode_header(files.read(BIN), magic=MAGIC_LOG, name="")
    other = msgspec.structs.replace(header, topic=b"elsewher")
    files.put(BIN, encode_header(other) + files.read(BIN)[HEADER_BYTES:])


def without(*numbers: int) -> list[str]:
    return [content for number, content in enumerate(ALL) if number not in numbers]


# name: (damage, what is served afterwards, the kinds of findings of `verify`, words in its lines)
LOG_DAMAGE: dict[str, tuple[Callable[[CrashFiles], None], list[str], set[str], str]] = {
    "length in a sealed segment": (flip(BIN, 2, 1), without(2), {"damaged", "derived"}, "seg_0001.bin: bytes"),
    "CRC in a sealed segment": (flip(BIN, 2, 5), without(2), {"damaged", "derived"}, "is lost"),
    "payload in a sealed segment": (flip(BIN, 4, 60), without(4), {"damaged", "derived"}, "at its end"),
    "header of a sealed segment": (lambda f: f.flip(BIN, 9), ALL, {"damaged", "derived"}, "header"),
    "payload in active.bin": (flip(ACTIVE, 0, 60), without(10), {"damaged"}, "active.bin: bytes 80 to"),
    "header of active.bin": (lambda f: f.flip(ACTIVE, 30), ALL, {"damaged"}, "header"),
    "last record of active.bin": (flip(ACTIVE, 1, 60), without(11), {"torn"}, "interrupted write"),
    "active.bin cut short": (cut(ACTIVE, 7), without(11), {"torn"}, "interrupted write"),
    "zeros at the end of active.bin": (zero(ACTIVE, 50), without(11), {"torn"}, "interrupted write"),
    "zeros behind active.bin": (lambda f: f.put(ACTIVE, f.read(ACTIVE) + bytes(4096)), ALL, {"torn"}, "4096 bytes"),
    "sealed segment cut short": (cut(BIN, 7), without(4), {"damaged"}, "not a whole append"),
    "sealed segment missing": (remove(BIN, META), without(0, 1, 2, 3, 4), {"damaged"}, "is missing"),
    "log of a sealed segment missing": (
        remove(SECOND),
        without(5, 6, 7, 8, 9),
        {"damaged"},
        "seg_0002.bin: is missing",
    ),
    "last segments missing": (remove(SECOND, ACTIVE), without(5, 6, 7, 8, 9, 10, 11), {"damaged"}, "is missing"),
    "sealed segment cut between records": (
        cut_before(BIN, 3),
        without(3, 4),
        {"damaged"},
        "what the rest held is lost",
    ),
    "segments swapped": (swap, ALL, {"damaged", "derived"}, "says that it is segment"),
    "segment of another topic": (of_another_topic, without(0, 1, 2, 3, 4), {"foreign"}, "another topic"),
}


NOT_NOTICED_AT_START = {
    # Contents of sealed segments are not read at the start. `verify` reads them, and so does whoever wants the chunk.
    "length in a sealed segment",
    "CRC in a sealed segment",
    "payload in a sealed segment",
}


def readable_contents(topic: TopicLog) -> list[str]:
    snapshot = topic.snapshot()
    found = []
    for hit in search(snapshot, unit_vector("any")[None], 100):
        try:
            found.append(snapshot.read(hit.place).content)
        except CorruptFile:
            continue
    return found


@pytest.mark.parametrize("name", LOG_DAMAGE)
def test_a_damaged_log_serves_the_rest_and_says_what_is_lost(name: str) -> None:
    damage, served, kinds, words = LOG_DAMAGE[name]
    files = disk()
    damage(files)
    logs = {path: files.read(Path(path)) for path in files.contents() if path.endswith(".bin")}
    report = verify(DATA_DIR, files)
    assert kinds_of(report, files) == kinds
    assert any(words in line for line in report.lines), report.lines
    assert report.ok == (kinds == {"torn"})
    for attempt in range(2):
        store = open_store(files, segment_entries_max=5)
        topic = store.topic("talk")
        assert sorted(readable_contents(topic)) == sorted(served)
        if "damaged" in kinds and name not in NOT_NOTICED_AT_START:
            assert "damaged" in {finding.kind for finding in topic.findings}
        assert sorted(readable_contents(topic)) == sorted(served)
        topic.append([draft(f"later {attempt}")])
        served = [*served, f"user: chunk later {attempt}"]
        store.close()
    if "foreign" in kinds:
        with pytest.raises(ForeignFile, match=r"seg_0001\.bin: belongs to another topic, not to 'talk'"):
            list(export(DATA_DIR, files, topic_id=None, live_only=False))
        return
    assert sorted(contents(DATA_DIR, files)) == sorted(served)
    if "missing" in name:
        for path, data in disk().contents().items():
            if path.endswith(".bin") and files.size(Path(path)) is None:
                files.put(Path(path), data)  # a backup had it, and its place is still free
        found = readable_contents(open_store(files, segment_entries_max=5).topic("talk"))
        assert {*found} >= {*served} | ({*ALL} if name != "last segments missing" else {*ALL[:10]})
    if "torn" not in kinds:
        kept = set(files.contents().values())
        assert all(any(found.startswith(data) for found in kept) for data in logs.values()), "the log was cut"


def test_of_an_append_of_several_that_ends_in_damage_the_readable_ones_are_served_and_not_called_lost() -> None:
    files = CrashFiles()
    store = open_store(files, segment_entries_max=5)
    store.topic("talk").append([draft(number) for number in range(2)])
    entries = store.topic("talk").append([draft(number) for number in range(2, 5)])
    store.close()
    flip(BIN, 4, 60)(files)
    [damage] = [line for line in verify(DATA_DIR, files).lines if "seg_0001.bin: bytes" in line]
    assert f"between entry {entries[1].canonical_id} and the end of the file is lost, unless a backup has" in damage
    topic = open_store(files, segment_entries_max=5).topic("talk")
    assert sorted(readable_contents(topic)) == sorted(ALL[:4])


def kinds_of(report: VerifyReport, files: CrashFiles) -> set[str]:
    """The kinds of all findings, the harmless ones too."""
    kinds = {finding.kind for finding in report.damaged}
    return kinds | ({"torn"} if any("an interrupted write;" in line for line in report.lines) else set())


DERIVED_DAMAGE: dict[str, Callable[[CrashFiles], None]] = {
    ".meta missing": remove(META),
    "bit in .meta": lambda f: f.flip(META, 200),
    "bit in the header of .meta": lambda f: f.flip(META, 10),
    ".meta cut short": cut(META, 5),
    ".meta empty": lambda f: f.put(META, b""),
    ".meta of another segment": lambda f: f.put(META, f.read(SECOND.with_suffix(".meta"))),
}


@pytest.mark.parametrize("name", DERIVED_DAMAGE)
def test_derived_files_are_rebuilt_from_the_log(name: str) -> None:
    files = disk()
    whole = files.contents()
    DERIVED_DAMAGE[name](files)
    report = verify(DATA_DIR, files)
    is_missing = files.size(META) is None
    assert report.ok == is_missing, report.lines
    assert all(finding.kind == "derived" for finding in report.damaged)
    store = open_store(files, segment_entries_max=5)
    topic = store.topic("talk")
    assert live_contents(topic) == ALL
    topic.load()
    assert topic.unsealed() == []
    assert "derived" in {finding.kind for finding in store.topic("talk").findings} or is_missing
    assert live_contents(topic) == ALL
    assert live_contents(topic) == ALL
    store.close()
    assert verify(DATA_DIR, files).ok
    rebuilt = files.contents()
    assert {name: data for name, data in rebuilt.items() if not name.endswith(".meta")} == {
        name: data for name, data in whole.items() if not name.endswith(".meta")
    }
    again = open_store(files, segment_entries_max=5).topic("talk")
    again.load()
    assert again.unsealed() == []


def test_columns_of_another_log_file_of_the_same_size_are_made_anew_once_they_are_removed_as_verify_says() -> None:
    files = disk()
    data = files.read(BIN)
    span = scan_records(data).spans[0]
    other = msgspec.structs.replace(decode_entry(payload_of(data, span), dimension=None), content="user: chunk A")
    record = encode_record(encode_entry(other))
    files.put(BIN, data[: span.offset] + record + data[span.offset + len(record) :])
    for _ in range(2):
        [found] = verify(DATA_DIR, files).damaged
        assert found.path == str(META) and "remove this file" in found.message
        store = open_store(files, segment_entries_max=5)
        store.topic("talk").load()
        store.close()
    files.remove(META)
    assert live_contents(open_store(files, segment_entries_max=5).topic("talk")) == ["user: chunk A", *ALL[1:]]
    assert verify(DATA_DIR, files).ok


def test_a_torn_tail_is_kept_and_an_earlier_one_is_not_overwritten_until_there_are_many() -> None:
    files = disk()
    tails = [b"first", b"second", b"second", *(b"torn %d" % number for number in range(TORN_KEPT))]
    for number, garbage in enumerate(tails):
        files.put(ACTIVE, files.read(ACTIVE) + garbage)
        store = open_store(files, segment_entries_max=5)
        store.topic("talk")
        assert [finding.kind for finding in store.topic("talk").findings] == ["torn"]
        store.close()
        if number == 2:
            assert files.read(TOPIC / "active.bin.torn") == b"first"
            assert files.read(TOPIC / "active.bin.torn.2") == b"second"
            report = verify(DATA_DIR, files)
            assert report.ok and any("active.bin.torn.2" in line for line in report.lines)
    kept = [files.read(TOPIC / name) for name in files.names(TOPIC) if ".torn" in name]
    assert sorted(kept) == sorted({*tails[-TORN_KEPT:]})


def test_half_an_append_is_dropped_whole() -> None:
    files = CrashFiles()
    store = open_store(files)
    store.topic("talk").append([draft("one"), draft("two")])
    store.topic("talk").append([draft("three"), draft("four"), draft("five")])
    store.close()
    spans = scan_records(files.read(ACTIVE)).spans
    files.put(ACTIVE, files.read(ACTIVE)[: spans[-1].offset])  # cut exactly between two records
    assert verify(DATA_DIR, files).ok
    assert live_contents(open_store(files).topic("talk")) == ["user: chunk one", "user: chunk two"]
    assert files.size(ACTIVE) == spans[2].offset


@pytest.mark.parametrize("path", [ACTIVE, BIN])
def test_a_file_of_a_newer_format_is_not_touched(path: Path) -> None:
    files = disk()
    header = decode_header(files.read(path), magic=MAGIC_LOG, name="")
    newer = msgspec.structs.replace(header, version=2)
    files.put(path, encode_header(newer) + files.read(path)[HEADER_BYTES:])
    before = files.contents()
    store = open_store(files, segment_entries_max=5)
    if path == ACTIVE:
        with pytest.raises(ForeignFile, match="use a newer memd"):
            store.topic("talk")
    else:
        assert sorted(live_contents(store.topic("talk"))) == sorted(without(0, 1, 2, 3, 4))
        kinds = [finding.kind for finding in store.topic("talk").findings]
        assert kinds == ["foreign"] or "derived" in kinds
    assert files.contents() == before
    assert not verify(DATA_DIR, files).ok


def test_a_file_that_is_none_of_ours_is_not_taken_for_an_empty_log() -> None:
    files = disk()
    files.put(ACTIVE, b"my shopping list, which is longer than any header of a log file could possibly be" * 3)
    before = files.contents()
    with pytest.raises(CorruptFile, match="move it away"):
        open_store(files, segment_entries_max=5).topic("talk")
    assert files.contents() == before


@pytest.mark.parametrize("left", [b"", b"mem", bytes(9000)], ids=["nothing", "a few bytes", "zeros"])
def test_an_active_file_that_a_power_cut_emptied_costs_what_was_in_it_and_no_more(left: bytes) -> None:
    files = disk()
    files.put(ACTIVE, left)
    store = open_store(files, segment_entries_max=5)
    topic = store.topic("talk")
    assert [(one.kind, one.path) for one in topic.findings if "no header and no entry" in one.message] == [
        ("damaged", str(ACTIVE))
    ]
    assert sorted(live_contents(topic)) == sorted(without(10, 11))
    topic.append([draft(10), draft(11)])
    store.close()
    torn = ACTIVE.with_name("active.bin.torn")
    assert (files.read(torn) if left else b"") == left
    assert live_contents(open_store(files, segment_entries_max=5).topic("talk")) == ALL
    assert verify(DATA_DIR, files).ok


def test_damage_that_happens_while_serving_is_noticed_by_the_read() -> None:
    files = disk()
    topic = open_store(files, segment_entries_max=5).topic("talk")
    snapshot = topic.snapshot()
    hits = {hit.canonical_id: hit for hit in search(snapshot, unit_vector("any")[None], 100)}
    offset = record_at(files, BIN, 3)
    files.flip(BIN, offset + 40)
    damaged = sorted(hits)[3]
    with pytest.raises(CorruptFile, match=r"seg_0001\.bin: entry \d+ at offset"):
        snapshot.read(hits[damaged].place)
    assert not topic.has_live_copy(draft(3))


@pytest.mark.parametrize("damaged", [0, 1, 2])
@pytest.mark.parametrize("sealed", [False, True])
def test_messages_of_an_append_that_lost_a_part_do_not_count_as_stored(damaged: int, sealed: bool) -> None:
    files = CrashFiles()
    store = open_store(files, segment_entries_max=9 if sealed else 100)
    for append in range(3):
        store.topic("talk").append([draft(f"{append}.{number}") for number in range(3)])
    store.close()
    flip(BIN if sealed else ACTIVE, 3 + damaged, 20)(files)
    files.remove(META)
    topic = open_store(files, segment_entries_max=100).topic("talk")
    stored = {append: topic.has_digest(digest_of(f"{append}.{(damaged + 1) % 3}")) for append in range(3)}
    # The append right behind the gap of a lost last record cannot be told from the rest of the damaged one.
    assert stored == {0: True, 1: False, 2: damaged != 2}
    assert len(live_contents(topic)) == 8


# The journal


HOT = Path("/talk/hot.log")


def test_a_torn_tail_of_a_journal_is_moved_aside_and_reported() -> None:
    files = CrashFiles.with_directory(HOT.parent)
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
def test_damage_in_the_middle_of_a_journal_keeps_a_copy_and_the_readable_rest(in_header: bool) -> None:
    files = CrashFiles.with_directory(HOT.parent)
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


def test_a_rewrite_of_a_journal_that_fails_leaves_the_old_one_usable() -> None:
    for step in range(5):
        files = CrashFiles.with_directory(HOT.parent)
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
