"""The real disk: errors name the file and the remedy, a full disk is told apart, replacing is all or nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest
from drafts import DIMENSION, draft, open_store
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from memd.entries import UTILITY_STEPS_LIMIT, Entry, Status
from memd.errors import CorruptFile, DiskFull, ForeignFile, StoreWriteFailed
from memd.store.disk import LocalDisk
from memd.store.log.format import (
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
from memd.store.syscalls import writing
from memd.store.tools.export import export
from memd.store.tools.verify import verify

FILES = LocalDisk()


def test_appending_reading_and_cutting(tmp_path: Path) -> None:
    path = tmp_path / "file"
    appender = FILES.create(path)
    appender.write(b"0123456789")
    FILES.cut(path, 8)
    appender.write(b"ab")
    appender.sync()
    appender.close()
    appender.close()
    with pytest.raises(StoreWriteFailed, match="closed"):
        appender.write(b"late")
    assert FILES.read(path) == b"01234567ab"
    assert FILES.read_at(path, 6, 100) == b"67ab"
    assert FILES.read_at(path, 60, 100) == b""
    FILES.append_to(path).write(b"!")
    assert FILES.size(path) == 11


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
    contents = [entry["content"] for entry in export(tmp_path, FILES, topic_id=None, live_only=False)]
    assert contents == ["user: chunk first", "user: chunk second"]
    assert verify(tmp_path, FILES).ok


INGEST = """
import sys
from pathlib import Path
from drafts import draft, open_store, seal_all
store = open_store(data_dir=Path(sys.argv[1]), segment_entries_max=7)
topic = store.topic("talk")
for number in range(100_000):
    topic.append([draft(f"{number}.{i}") for i in range(3)])
    print(number, flush=True)
    seal_all(topic)
"""


@pytest.mark.process
def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    for round_number in range(3):
        folder = tmp_path / str(round_number)
        command = [sys.executable, "-c", INGEST, str(folder)]
        tests = Path(__file__).parent
        paths = os.pathsep.join([str(tests / "support"), str(tests.parent)])
        environment = {**os.environ, "PYTHONPATH": paths}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for _ in range(20 + round_number):
                acknowledged = int(process.stdout.readline())
            assert verify(folder, FILES, is_served=True).ok  # beside the running writer
            process.kill()
            acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
        store = open_store(data_dir=folder, segment_entries_max=7)
        store.topic("talk")
        store.close()
        report = verify(folder, FILES)
        assert report.ok, report.lines
        contents = [entry["content"] for entry in export(folder, FILES, topic_id=None, live_only=False)]
        wanted = [f"user: chunk {number}.{i}" for number in range(acknowledged + 1) for i in range(3)]
        assert contents[: len(wanted)] == wanted
        assert len(contents) in (len(wanted), len(wanted) + 3)


# The codec: what is written is read back, and any bytes whatever give a value or a declared error


HEADER = Header(magic=MAGIC_LOG, dimension=DIMENSION, segment_id=7, fingerprint="a" * 32, topic=topic_tag("talk"))
texts = st.text(max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 1 << 60) | texts | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
payload_lists = st.lists(
    st.binary(max_size=60).map(lambda data: msgspec.msgpack.encode({"type": "said", "data": data})), max_size=6
)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    uuid = draw(st.binary(min_size=16, max_size=16))
    canonical_id = draw(st.integers(1, (1 << 63) - 1))
    status = draw(st.sampled_from(Status))
    vector_bytes = 4 * DIMENSION if status is Status.ACTIVE else 0
    names = texts.filter(lambda name: name not in Entry.__struct_fields__)
    return Entry(
        uuid=uuid,
        public_id=uuid.hex()[: draw(st.integers(4, 32))],
        canonical_id=canonical_id,
        vector=draw(st.binary(min_size=vector_bytes, max_size=vector_bytes)),
        content=draw(texts),
        status=status,
        origin_id=draw(st.integers(1, canonical_id)),
        utility_steps=draw(st.integers(-UTILITY_STEPS_LIMIT, UTILITY_STEPS_LIMIT)),
        created_at=draw(st.integers(0, 1 << 62)),
        roles=tuple(draw(st.lists(texts, max_size=3))),
        digests=tuple(draw(st.lists(st.binary(min_size=16, max_size=16), max_size=3))),
        kind=draw(texts),
        source=draw(st.none() | texts),
        supersedes=tuple(draw(st.lists(st.binary(min_size=16, max_size=16), max_size=2))),
        action=draw(st.none() | texts),
        reason=draw(st.none() | texts),
        group_left=draw(st.integers(0, 100)),
        author=draw(st.just(UNSET) | texts),
        action_by=draw(st.just(UNSET) | texts),
        unknown=draw(st.dictionaries(names, values, max_size=3)),
    )


@given(entries())
def test_an_entry_is_read_back_as_it_was_written_with_its_unknown_fields(entry: Entry) -> None:
    assert decode_entry(encode_entry(entry), dimension=DIMENSION) == entry


@given(st.binary(min_size=1, max_size=200))
def test_any_payload_is_an_entry_or_declared_corrupt(payload: bytes) -> None:
    try:
        decode_entry(payload, dimension=DIMENSION)
    except CorruptFile:
        pass


@given(entries(), st.data())
def test_an_entry_that_contradicts_itself_is_corrupt(entry: Entry, data: st.DataObject) -> None:
    wrong: dict[str, object] = data.draw(
        st.sampled_from(
            [
                {"uuid": b"short"},
                {"public_id": "zzzz"},
                {"public_id": entry.uuid.hex()[:3]},
                {"vector": b"1234"},
                {"origin_id": entry.canonical_id + 1},
                {"canonical_id": 0},
                {"utility_steps": UTILITY_STEPS_LIMIT + 1},
                {"group_left": -1},
            ]
        )
    )
    with pytest.raises(CorruptFile):
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


def test_the_bytes_are_those_of_the_documented_format() -> None:
    header = encode_header(HEADER)
    assert header[:24] == b"memd.log" + b"".join(n.to_bytes(4, "little") for n in (1, DIMENSION, 0, 7))
    assert header[24:56] == b"a" * 32
    assert header[64:76] == bytes(12)
    assert header[76:] == zlib.crc32(header[:76]).to_bytes(4, "little")
    record = encode_record(b"payload")
    length = (7).to_bytes(4, "little")
    assert record == length + zlib.crc32(length + b"payload").to_bytes(4, "little") + b"payload"


@given(payload_lists, st.binary(max_size=50))
def test_a_scan_finds_every_record_before_garbage(payloads: list[bytes], garbage: bytes) -> None:
    whole = b"".join(map(encode_record, payloads))
    found = scan_records(whole + garbage, 0)
    assert [payload_at(whole + garbage, span.offset) for span in found.spans][: len(payloads)] == payloads
    assert not found.gaps or found.gaps[0][0] >= len(whole)


@given(payload_lists.filter(len), st.data())
def test_one_flipped_bit_loses_one_record(payloads: list[bytes], data: st.DataObject) -> None:
    image = bytearray(b"".join(map(encode_record, payloads)))
    position = data.draw(st.integers(0, len(image) - 1))
    image[position] ^= 1 << data.draw(st.integers(0, 7))
    found = scan_records(bytes(image), 0)
    survivors = [payload_at(bytes(image), span.offset) for span in found.spans]
    ends = [sum(map(len, map(encode_record, payloads[: i + 1]))) for i in range(len(payloads))]
    hit = next(i for i, end in enumerate(ends) if position < end)
    assert survivors == payloads[:hit] + payloads[hit + 1 :]


def test_zeros_are_not_records() -> None:
    assert scan_records(bytes(1000), 0).spans == []
    assert payload_at(bytes(FRAME_BYTES), 0) is None


@given(st.binary(max_size=300))
def test_any_file_is_read_without_an_undeclared_error(data: bytes) -> None:
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
