"""The log on an undamaged disk: appending, public ids, snapshots, the codec, and what a start reads of it."""

import json
import random
import resource
import shutil
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from drafts import (
    DATA_DIR,
    DIMENSION,
    adjusted,
    contents,
    draft,
    live_contents,
    open_journal,
    open_store,
    search,
    unit_vector,
    uuid_of,
)
from golden_files import EXPECTED, GOLDEN, TOPIC, chunk, found, opened, vector, write
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from memd.conversation.events import BufferEvent
from memd.entries import UTILITY_STEPS_LIMIT, Draft, Entry, Speaker, Status
from memd.errors import BadTopicId, CorruptFile, DiskFull, ForeignFile, StoreError, StoreWriteFailed
from memd.ingest.redaction import Redactor
from memd.settings.model import IngestSettings
from memd.store.disk import LocalDisk, writing
from memd.store.index.sealed_index import SealedIndex
from memd.store.layout import is_derived
from memd.store.log.columns import Bits
from memd.store.log.format import (
    FORMAT_VERSION,
    FRAME_BYTES,
    HEADER_BYTES,
    MAGIC_JOURNAL,
    MAGIC_LOG,
    Header,
    decode_entry,
    decode_header,
    encode_entry,
    encode_header,
    encode_record,
    payload_at,
    scan_records,
    topic_tag,
)
from memd.store.log.recovery import read_log_file
from memd.store.store import Store
from memd.store.tools.export import as_line, decode_line, state_of
from memd.store.tools.verify import disk_usage, verify


def with_uuid(start: str, public_id: str | None = None) -> Draft:
    """A new chunk whose uuid begins with these hex digits."""
    digits = (start + uuid_of(start).hex())[:32]
    return msgspec.structs.replace(draft(start), uuid=bytes.fromhex(digits), public_id=public_id)


def test_a_public_id_is_the_shortest_prefix_that_no_other_chunk_of_the_topic_has_or_the_one_that_came_along() -> None:
    topic = open_store(CrashFiles()).topic("talk")
    drafts = [with_uuid("abcd"), with_uuid("abcd77"), with_uuid("abce"), with_uuid("abcd78"), with_uuid("bbbb7")]
    entries = topic.append(drafts)
    ids = [drafts[0].uuid.hex()[:4], "abcd7", "abce", "abcd78", "bbbb"]
    assert [entry.public_id for entry in entries] == ids
    kept, longer = topic.append([with_uuid("cccc1", public_id="cccc1"), with_uuid("abcd5", public_id="abcd")])
    assert kept.public_id == "cccc1"
    assert longer.public_id.startswith("abcd") and len(longer.public_id) > 4, "a chunk here has it"
    again, both = topic.append([with_uuid("bbbb8", public_id="bbbb8"), with_uuid("bbbb9", public_id="bbbb")])
    assert again.public_id == "bbbb8" and both.public_id != "bbbb"


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

    threads = [threading.Thread(target=read) for _ in range(2)]
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
    topic = open_store(CrashFiles()).topic("talk")
    topic.append([draft("one")])
    huge = msgspec.structs.replace(draft("huge"), content="x" * (1 << 20))
    with pytest.raises(StoreError, match="limit"):
        topic.append([draft("fine"), huge])
    assert topic.snapshot().live_count == 1
    assert topic.append([draft("fine")])[0].public_id == uuid_of("fine").hex()[:4]


def test_a_segment_that_two_threads_seal_is_sealed_once_and_not_before_it_is_full(tmp_path: Path) -> None:
    topic, interval = open_store(None, tmp_path, segment_entries_max=2).topic("talk"), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            appending = threads.submit(lambda: [topic.append([draft(number)]) for number in range(301)])
            while not appending.done():
                topic.seal_full()
            appending.result()
    finally:
        sys.setswitchinterval(interval)
    topic.seal_full()
    assert topic.unsealed() == [] and topic.findings == [] and topic.stats().segments == 151
    assert len(list(tmp_path.rglob("*.meta"))) == 150 and verify(tmp_path, LocalDisk()).ok


# Finding records among unreadable bytes: the right ones, and with an effort that grows with the bytes alone


def payload(data: bytes) -> bytes:
    """As an event is written."""
    return msgspec.msgpack.encode({"type": "said", "data": data})


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each checksum."""
    sizes: list[int] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(data: bytes, *arguments: Any) -> Any:
            sizes.append(len(data))
            return function(data, *arguments)

        return called

    monkeypatch.setattr(zlib, "crc32", noted(zlib.crc32))
    return sizes


@pytest.mark.parametrize("damaged_byte", [None, 1, 2, 900], ids=["garbage", "length", "length, by much", "payload"])
def test_what_is_unreadable_is_passed_over_in_time_by_its_length(checked: list[int], damaged_byte: int | None) -> None:
    """Before, every byte was looked at as often as there are damaged records or chance lengths."""
    source = random.Random(2)
    records = [bytearray(encode_record(payload(source.randbytes(2_000)))) for _ in range(1_000)]
    for number, record in enumerate(records):
        if damaged_byte is None and number < 999:
            record[:] = source.randbytes(len(record))
        elif damaged_byte is not None and number % 2:
            record[damaged_byte] ^= 0x15
    data = b"".join(records)
    checked.clear()
    found = scan_records(data, 0)
    assert (len(found.spans), len(found.gaps)) == ((1, 1) if damaged_byte is None else (500, 499))
    assert sum(checked) < (1 if damaged_byte is None else 8) * len(data)


@given(st.data())
def test_the_first_record_behind_any_bytes_is_the_one_that_trying_every_offset_finds(data: st.DataObject) -> None:
    pieces = st.binary(max_size=40) | st.binary(max_size=40).map(lambda some: encode_record(payload(some)))
    some = b"".join(data.draw(st.lists(pieces, max_size=8))).replace(b"\xff\xff", b"\0\0")
    at = next((at for at in range(len(some)) if payload_at(some, at) is not None), None)
    spans = scan_records(some, 0).spans
    assert (spans[0].offset if spans else None) == at


@given(st.text())
def test_no_text_looks_like_a_record_to_the_search(text: str) -> None:
    record = encode_record(payload(b"whole"))
    around = f"儤type{text}儤uuid".encode()
    assert scan_records(around + record, 0).gaps == [(0, len(around))]
    for key in (b"\xa4uuid\xc4\x10", *(b"\xa4type" + bytes([head]) for head in range(0xA1, 0xC0))):
        assert key not in text.encode()


def test_all_that_is_written_is_found_behind_damage() -> None:
    entry = draft("a chunk").as_entry(public_id="0" * 4, canonical_id=7, group_left=0)
    events = [kind.__struct_config__ for kind in get_args(BufferEvent)]
    assert events and all(one.tag_field == "type" and not one.array_like for one in events)
    record = encode_record(encode_entry(entry))
    assert [span.offset for span in scan_records(bytes(FRAME_BYTES) + record, 0).spans] == [FRAME_BYTES]


# `verify` and `export`: beside a running daemon, and after it


ACTIVE = DATA_DIR / "talk" / "active.bin"


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
        assert contents(DATA_DIR, files) == ["user: chunk one"]


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


# The real disk, and the codec: what is written is read back, and any bytes give a value or a declared error


FILES = LocalDisk()


def test_a_write_into_a_missing_directory_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StoreWriteFailed, match=r"none/file: cannot be written \(No such file.*check that the disk"):
        FILES.create(tmp_path / "none" / "file")


@pytest.mark.linux
def test_a_full_disk_is_told_apart_from_other_errors() -> None:
    full = Path("/dev/full")
    with pytest.raises(DiskFull, match="/dev/full: the disk is full; free some space"), writing(full):
        full.write_bytes(b"x")


def test_a_file_size_limit_fails_the_append_and_the_log_stays_whole(tmp_path: Path) -> None:
    """The kernel itself cuts a write in the middle, as a full disk does."""
    store = open_store(data_dir=tmp_path)
    topic = store.topic("talk")
    topic.append([draft("first")])
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StoreWriteFailed):
            topic.append([draft(number) for number in range(10)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    topic.append([draft("second")])
    store.close()
    assert contents(tmp_path, FILES) == ["user: chunk first", "user: chunk second"]
    assert verify(tmp_path, FILES).ok


HEADER = Header(magic=MAGIC_LOG, dimension=DIMENSION, segment_id=7, fingerprint="a" * 32, topic=topic_tag("talk"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"uuid": b"short"},
        {"public_id": "zzzz"},
        {"public_id": uuid_of(1).hex()[:3]},
        {"vector": b"1234"},
        {"origin_id": 6},
        {"canonical_id": 0},
        {"utility_steps": UTILITY_STEPS_LIMIT + 1},
        {"group_left": -1},
    ],
    ids=repr,
)
def test_an_entry_that_contradicts_itself_is_corrupt(wrong: dict[str, Any]) -> None:
    entry = draft(1).as_entry(public_id=uuid_of(1).hex()[:4], canonical_id=5, group_left=0)
    with pytest.raises(CorruptFile, match="contradicts itself"):
        decode_entry(encode_entry(msgspec.structs.replace(entry, **wrong)), dimension=DIMENSION)


def test_a_header_is_read_back_and_says_what_is_wrong_with_it() -> None:
    data = encode_header(HEADER)
    assert len(data) == HEADER_BYTES
    assert decode_header(data, magic=MAGIC_LOG, name="x") == HEADER
    with pytest.raises(ForeignFile, match="kind"):
        decode_header(data, magic=MAGIC_JOURNAL, name="x")
    for newer in (msgspec.structs.replace(HEADER, version=2), msgspec.structs.replace(HEADER, flags=2)):
        with pytest.raises(ForeignFile, match="use a newer memd"):
            decode_header(encode_header(newer), magic=MAGIC_LOG, name="x")
    with pytest.raises(ForeignFile, match="is encrypted"):
        decode_header(encode_header(msgspec.structs.replace(HEADER, flags=1)), magic=MAGIC_LOG, name="x")
    for damaged in [data[:-1], b"", *(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(HEADER_BYTES))]:
        with pytest.raises(CorruptFile, match="header"):
            decode_header(damaged, magic=MAGIC_LOG, name="x")


@given(st.binary(max_size=300))
def test_any_bytes_are_an_entry_or_a_file_or_declared_corrupt(data: bytes) -> None:
    with suppress(CorruptFile):
        decode_entry(data, dimension=DIMENSION)
    for image in (data, encode_header(HEADER) + data):
        log_file = read_log_file(image, name="x", dimension=None)
        assert 0 <= log_file.whole_end <= len(image)
        assert log_file.entries == [] and log_file.whole_count == 0


def test_a_file_that_another_one_replaces_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = LocalDisk(), tmp_path / "file"
    path.write_bytes(b"the old one")
    size = disk.size

    def replaced(one: Path) -> int | None:
        """The moment after somebody looked how long it is."""
        found = size(one)
        (tmp_path / "other").write_bytes(b"the new one, which is longer")
        (tmp_path / "other").replace(one)
        return found

    monkeypatch.setattr(disk, "size", replaced)
    assert disk.read(path) in (b"the old one", b"the new one, which is longer")


# A start and a first search read only what they need


def filled(segments: int, rest: int, *, size: int = 10) -> CrashFiles:
    """That many sealed segments, and `rest` chunks in active.bin, whose contents are long."""
    files = CrashFiles()
    store = open_store(files, segment_entries_max=size)
    for number in range(segments * size + rest):
        long = msgspec.structs.replace(draft(number), content=f"user: chunk {number} {'long ' * 400}")
        store.topic("talk").append([long])
    store.close()
    files.bytes_read.clear()
    return files


def test_a_start_reads_the_ends_of_the_logs_and_a_topic_only_columns() -> None:
    files = filled(4, 8)
    store = open_store(files, segment_entries_max=10)
    read = dict(files.bytes_read)
    assert set(read) == {"active.bin", "seg_0004.bin", "seg_0004.meta"}
    assert read["seg_0004.bin"] == HEADER_BYTES
    files.bytes_read.clear()
    topic = store.topic("talk")
    assert topic.stats().indexes_loaded == 0
    read = dict(files.bytes_read)
    assert {read[f"seg_000{number}.bin"] for number in range(1, 5)} == {HEADER_BYTES}
    files.bytes_read.clear()
    hits = search(topic.snapshot(), unit_vector("q")[None], 3)
    assert topic.is_loaded and topic.stats().indexes_loaded == 4
    logs = [DATA_DIR / "talk" / "segments" / f"seg_000{number}.bin" for number in range(1, 5)]
    assert [files.bytes_read[path.name] for path in logs] == [files.size(path) for path in logs], (
        "once, for the vectors"
    )
    files.bytes_read.clear()
    topic.snapshot().read(hits[0].place)
    assert 0 < sum(bytes_ for name, bytes_ in files.bytes_read.items() if name.endswith(".bin")) < 3000


@pytest.mark.parametrize("damage", ["none", "torn", "flipped", "garbage"])
def test_the_end_of_a_large_log_tells_the_highest_id_and_where_it_is_damaged_all_of_it(damage: str) -> None:
    files = filled(0, 9)
    store = open_store(files, segment_entries_max=10_000)
    long = [msgspec.structs.replace(draft(f"more {n}"), content=f"{n} {'long ' * 400}") for n in range(120)]
    *_, last_but_one, last = [store.topic("talk").append([one])[0].canonical_id for one in long]
    store.close()
    data = files.read(ACTIVE)
    if damage == "torn":
        files.put(ACTIVE, data[:-7])
    elif damage == "flipped":
        files.flip(ACTIVE, scan_records(data).spans[-1].offset - 30)
    elif damage == "garbage":
        files.put(ACTIVE, data + b"garbage")
    files.bytes_read.clear()
    store = open_store(files, now_us=lambda: 1)  # a clock that stands still long before anything was written
    assert damage != "none" or files.bytes_read["active.bin"] == 64 << 10 < len(data)
    [new] = store.topic("other").append([draft("new")])
    assert new.canonical_id == (last_but_one if damage == "torn" else last) + 1


def test_two_threads_that_find_the_same_index_damaged_drop_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files = filled(3, 5)
    store = open_store(files, segment_entries_max=10)
    store.topic("talk").merge((1, 2, 3))
    store.close()
    files.flip(DATA_DIR / "talk" / "segments" / "merged_0001_0003.ivf", 50)
    topic = open_store(files, segment_entries_max=10).topic("talk")
    load, both_failed = SealedIndex.load, threading.Barrier(2, timeout=60)

    def load_together(index: SealedIndex, dead: Bits) -> list[StoreError]:
        try:
            return load(index, dead)
        except StoreError:
            both_failed.wait()
            raise

    monkeypatch.setattr(SealedIndex, "load", load_together)
    with ThreadPoolExecutor(2) as threads:
        for loaded in [threads.submit(topic.load) for _ in range(2)]:
            loaded.result()
    assert [finding.kind for finding in topic.findings] == ["derived"]
    assert topic.is_loaded and len(topic.snapshot().indexes) == 3
    assert len(live_contents(topic)) == 35


def test_topics_are_counted_again_only_where_something_was_stored() -> None:
    files = filled(2, 3)
    store = open_store(files, segment_entries_max=10)
    store.topic("other").append([draft("other")])
    assert [(one.topic_id, one.chunks, one.segments) for one in disk_usage(DATA_DIR, files)] == [
        ("other", 1, 0),
        ("talk", 23, 2),
    ]
    files.bytes_read.clear()
    assert [one.chunks for one in disk_usage(DATA_DIR, files)] == [1, 23] and not files.bytes_read
    (last,) = store.topic("talk").append([draft("more")])
    store.topic("talk").append([adjusted(last, 2)])
    files.bytes_read.clear()
    assert [(one.chunks, one.entries) for one in disk_usage(DATA_DIR, files)] == [(1, 1), (24, 25)]
    assert "active.bin" in files.bytes_read


# A start looks at the topics that were used, and where it cannot know them, at all


RECENT = DATA_DIR / "memd.recent"
NAMES = [f"topic-{number}" for number in range(10)]
STATE = "rules"


def told(store: Store, *names: str) -> int:
    """Append an entry to each of these topics, as the daemon does; the highest id."""
    ids = []
    for name in names:
        log = store.topic(name)
        store.before_write()
        ids += [entry.canonical_id for entry in log.append([draft(1)])]
    return max(ids)


def at_rest(files: CrashFiles) -> int:
    """Ten topics with nothing to do; the highest id."""
    store = open_store(files)
    highest = told(store, *NAMES)
    store.close()
    store = open_store(files)
    assert store.to_look_at(STATE) == sorted(NAMES), "there was no list"
    store.note_at_rest(NAMES, STATE)
    store.close()
    files.bytes_read.clear()
    return highest


def reopened(files: CrashFiles) -> Store:
    """With a clock that was set back to the beginning of time."""
    return open_store(files, now_us=lambda: 1)


def test_a_start_reads_no_file_of_a_topic_at_rest_unless_rules_or_the_model_are_others() -> None:
    files = CrashFiles()
    highest = at_rest(files)
    store = reopened(files)
    assert set(files.bytes_read) == {RECENT.name}
    assert store.to_look_at(STATE) == [] and store.topic_count == len(NAMES) and store.topic_ids() == sorted(NAMES)
    assert store.to_look_at("others") == sorted(NAMES)
    assert told(store, "new") > highest
    store.close()
    store = open_store(files, fingerprint="a" * 32)
    assert set(NAMES) <= set(store.to_look_at(STATE))
    store.note_at_rest([name for name in NAMES if name != "topic-3"], STATE)
    store.close()
    again = open_store(files, fingerprint="a" * 32).to_look_at(STATE)
    assert "topic-3" in again and not {*NAMES} & {*again} - {"topic-3"}, "it could not be looked at"


@pytest.mark.parametrize("loss", LOSSES)
def test_after_a_power_cut_at_any_step_what_was_used_is_looked_at_and_no_id_is_given_twice(loss: Loss) -> None:
    base = CrashFiles()
    at_rest(base)
    steps = 0
    while True:
        files = base.after_power_cut("kept")
        store = reopened(files)
        files.cut_after = files.operations + steps
        acknowledged: dict[str, int] = {}
        try:
            for name in ("topic-3", "new", "topic-7"):
                acknowledged[name] = told(store, name)
        except PowerCutError:
            steps += 1
        else:
            break
        after = files.after_power_cut(loss)
        store = reopened(after)
        assert acknowledged.keys() <= set(store.to_look_at(STATE)), after.contents()[str(RECENT)]
        assert told(store, "topic-1") > max([0, *acknowledged.values()])
    assert steps > 5


def test_a_list_that_grew_long_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memd.store.store._SPARE_BYTES", 80)
    files = CrashFiles()
    store = open_store(files)
    store.note_at_rest([], STATE)
    for name in NAMES:
        store.topic(name)
        store.close_topic(name)
    assert len(files.contents()[str(RECENT)].splitlines()) < len(NAMES)
    assert open_store(files.after_power_cut("kept")).to_look_at(STATE) == []


def put_there(files: CrashFiles) -> None:
    """Somebody copied a topic from elsewhere."""
    files.make_directory(DATA_DIR / "brought")
    files.put(DATA_DIR / "brought" / "hot.log", b"")


HARMS: dict[str, Callable[[CrashFiles], None]] = {
    "torn": lambda files: files.put(RECENT, files.read(RECENT) + b"topic-1"),
    "zeros": lambda files: files.put(RECENT, bytes(300)),
    "of another version": lambda files: files.put(RECENT, files.read(RECENT).replace(b"recent 1", b"recent 2")),
    "not a name": lambda files: files.put(RECENT, files.read(RECENT) + b"../../etc\n"),
    "gone": lambda files: files.remove(RECENT),
    "a topic from elsewhere": put_there,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_where_the_list_cannot_be_trusted_all_topics_are_looked_at(harm: Callable[[CrashFiles], None]) -> None:
    files = CrashFiles()
    highest = at_rest(files)
    harm(files)
    store = reopened(files)
    assert set(NAMES) <= set(store.to_look_at(STATE))
    assert told(store, "topic-0") > highest


def test_on_a_full_disk_there_is_rather_no_list() -> None:
    files = CrashFiles()
    at_rest(files)
    store = open_store(files)
    files.bytes_left = 4
    store.topic("topic-4")
    assert files.size(RECENT) is None
    files.bytes_left = None
    store.note_at_rest([], STATE)
    assert open_store(files.after_power_cut("kept")).to_look_at(STATE) == ["topic-4"]


def test_a_topic_that_somebody_puts_there_is_found_and_one_that_differs_in_case_refused(tmp_path: Path) -> None:
    store = open_store(data_dir=tmp_path)
    told(store, "garden")
    assert store.has_topic("garden") and not store.has_topic("Garden") and not store.has_topic("memd.recent")
    (tmp_path / "brought").mkdir()
    assert not store.has_topic("brought"), "there is nothing in it"
    (tmp_path / "brought" / "hot.log").write_bytes(b"")
    assert store.has_topic("brought")
    for name, there in (("Garden", "garden"), ("BROUGHT", "brought"), ("Memd.Recent", "memd.recent")):
        with pytest.raises(BadTopicId, match=f"differs only in case from '{there}'"):
            store.topic(name)


# The fields of an entry: one definition for drafts, the log, export, import and redaction


SECRET = "sk-0123456789abcdefABCDEF"


def entry(**changes: object) -> Entry:
    made = draft("one").as_entry(public_id="", canonical_id=1_700_000_000_000_001, group_left=0)
    return msgspec.structs.replace(made, public_id=made.uuid.hex()[:4], **changes)


@pytest.mark.parametrize("offsets", [(-1,), (0, 0), (5, 3), (0, 9)])
def test_offsets_that_do_not_ascend_within_the_text_do_not_fit(offsets: tuple[int, ...]) -> None:
    said = entry(content="8 chars.", speakers=tuple(Speaker(offset, "user") for offset in offsets))
    assert not said.speakers_fit
    line = json.dumps(as_line(said, "talk", live=True)).encode()
    with pytest.raises(ValueError, match="offset"):
        decode_line(line)


speakers = st.just(UNSET) | st.lists(st.sampled_from(["user", "tool"]), max_size=3).map(
    lambda roles: tuple(Speaker(offset, role, continues=offset == 1) for offset, role in enumerate(roles))
)


names = st.just(UNSET) | st.text(min_size=1)


@given(st.text(min_size=3), speakers, st.none() | st.text(), st.sampled_from(Status), st.integers(-4, 10), names, names)
def test_the_log_and_a_line_of_an_export_keep_every_field(
    content: str,
    speakers: tuple[Speaker, ...],
    source: str | None,
    status: Status,
    steps: int,
    author: str,
    action_by: str,
) -> None:
    is_active = status is Status.ACTIVE
    vector = unit_vector("one").tobytes() if is_active else b""
    said = entry(
        content=content if is_active else "",
        speakers=speakers if is_active else UNSET,
        source=source,
        status=status,
        utility_steps=steps,
        vector=vector,
        supersedes=(bytes(16),),
        author=author,
        action_by=action_by,
    )
    assert decode_entry(encode_entry(said), dimension=DIMENSION) == said
    topic_id, read = decode_line(msgspec.json.encode(as_line(said, "talk", live=is_active)))
    assert topic_id == "talk"
    assert read == msgspec.structs.replace(said.as_draft(), vector=b"", digests=())
    assert state_of(read) == state_of(said)


def test_a_field_of_a_later_version_is_carried_along_and_redacted() -> None:
    payload = msgspec.msgpack.encode(msgspec.msgpack.decode(encode_entry(entry())) | {"weather": SECRET, "moons": [7]})
    read = decode_entry(payload, dimension=DIMENSION)
    assert read.unknown == {"weather": SECRET, "moons": [7]}
    kept = Redactor.of(IngestSettings(redact=True)).draft(read.as_draft())
    written = msgspec.msgpack.decode(encode_entry(kept.as_entry(public_id="abcd", canonical_id=7, group_left=0)))
    assert (written["weather"], written["moons"]) == ("[redacted:api_key]", [7])


# Every version of the format that memd ever wrote can be read, searched and appended to by this one


NOW = f"v{FORMAT_VERSION}-terms"
"""As it is written now: with a field of records that has come since the version began (`Entry.terms`)."""
VERSIONS = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a golden folder."""
    copy = tmp_path / "memory"
    shutil.copytree(GOLDEN / request.param, copy)
    return copy


@pytest.mark.parametrize("merges", [False, True])
def test_an_old_log_is_searched_with_its_old_indexes_and_merged_anew(golden: Path, merges: bool) -> None:
    store = opened(golden)
    topic = store.topic(TOPIC)
    topic.load()
    assert topic.findings == [] and topic.unsealed() == []
    is_merged = any(golden.rglob("merged_*.ivf"))
    assert is_merged or not list(golden.rglob("merged_*")), "an older memd's is removed"
    full: list[tuple[int, ...]] = [(1, 2)] if is_merged else [(1,), (2,), (3,)]
    assert topic.due_merge() == (() if is_merged else (1, 2, 3)), "a file whose entries have no words is full"
    if merges and not is_merged:
        topic.merge((1, 2, 3))
        full = [(1, 2, 3)]
    assert [view.index.segment_ids for view in topic.snapshot().indexes] == full
    expected = {entry["canonical_id"]: entry for entry in json.loads((golden / EXPECTED).read_text())["export"]}
    for number in range(8):
        query = np.frombuffer(vector(number), dtype=np.float32)
        hits = search(topic.snapshot(), query.reshape(1, DIMENSION), 100)
        live = {canonical_id for canonical_id, entry in expected.items() if entry["live"]}
        assert {hit.canonical_id for hit in hits} == live
        entry = topic.snapshot().read(max(hits, key=lambda hit: hit.cosine).place)
        assert entry.content == expected[entry.canonical_id]["content"]
        assert float(query @ entry.embedding) == 1.0 or number == 1, "number 1 was replaced"


def test_an_old_log_is_whole_reads_as_it_did_and_is_appended_to_and_sealed(golden: Path) -> None:
    report = verify(golden, LocalDisk())
    assert report.ok, report.lines
    assert found(golden) == json.loads((golden / EXPECTED).read_text())
    before = found(golden)["export"]
    store = opened(golden)
    store.topic(TOPIC).append([chunk(8, "user: new"), chunk(9, "user: newer")])
    store.close()
    assert verify(golden, LocalDisk()).ok
    after = found(golden)["export"]
    assert after[: len(before)] == before
    assert [entry["content"] for entry in after[len(before) :]] == ["user: new", "user: newer"]


def test_this_version_writes_the_same_log_byte_for_byte(tmp_path: Path) -> None:
    """If this fails, the format has changed: that needs a new version number and a new golden folder."""
    assert [f"v{number}" for number in range(1, FORMAT_VERSION + 1)] + [NOW] == VERSIONS
    write(tmp_path)
    golden = GOLDEN / NOW
    names = _logs_in(golden)
    assert _logs_in(tmp_path) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (golden / name).read_bytes(), name


def _logs_in(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not is_derived(path.name))
    return {str(path.relative_to(folder)) for path in files}
