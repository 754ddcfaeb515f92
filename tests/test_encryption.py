"""The encrypted disk: the same bytes at the same offsets as a plain one, whatever is torn, cut, moved or flipped.

Rule: `files.raw` is what a thief has; the witness of a test is its bytes.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import random
import secrets
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from crash_files import CrashFiles, Loss, PowerCutError
from drafts import (
    DATA_DIR,
    contents,
    digest_of,
    draft,
    live_contents,
    open_journal,
    open_store,
    seal_all,
    two_segments,
    unit_vector,
)
from effort import scaled, steps
from encrypted_files import DIRECTORY_KEY, EncryptedCrashFiles

from memd.errors import CorruptFile, DiskFull, ForeignFile, StoreError, StoreLocked, WrongKey
from memd.settings.model import EncryptionSettings
from memd.store.disk import LocalDisk, replace_file
from memd.store.encryption.converting import decrypt, encrypt, rekey
from memd.store.encryption.disk import EncryptedDisk, KeyRing, disk_for, encrypted_disk
from memd.store.encryption.frames import (
    FRAME_OVERHEAD,
    NONCE_BYTES,
    PIECE_BYTES,
    DataKey,
    FrameTable,
    frame_at,
    frames_of,
)
from memd.store.encryption.key_files import MasterKey
from memd.store.erasure import Erasure
from memd.store.layout import (
    CONVERSION_NAME,
    DIGESTS_SUFFIX,
    KEY_NAME,
    RECEIPTS_NAME,
    TOPIC_KEY_NAME,
    TopicLayout,
    erasures_dir,
)
from memd.store.log.format import HEADER_BYTES
from memd.store.tools.verify import verify

TOPIC = DATA_DIR / "talk"
FILE = TOPIC / "active.bin"


def disk() -> EncryptedCrashFiles:
    """With a journal."""
    files: EncryptedCrashFiles = two_segments(EncryptedCrashFiles())
    journal, _ = open_journal(DATA_DIR / "talk" / "hot.log", files)
    journal.append([b"an event", b"another event"])
    journal.sync()
    return files


def folder_of(files: EncryptedCrashFiles) -> list[Path]:
    """The files that are encrypted."""
    return [path for path in map(Path, files.contents()) if files.encrypts(path)]


def test_a_file_reads_as_a_plain_one_whatever_is_appended_cut_and_read_at_any_place() -> None:
    for seed in range(scaled(20)):
        chance, plain, files = random.Random(seed), CrashFiles(), EncryptedCrashFiles()
        for one in (plain, files):
            one.make_directory(DATA_DIR)
            one.make_directory(TOPIC)
        appenders = [plain.create(FILE), files.create(FILE)]
        for _ in range(30):
            size = plain.size(FILE) or 0
            what = chance.random()
            if what < 0.6:
                data = chance.randbytes(chance.choice([1, 50, 700, PIECE_BYTES, 2 * PIECE_BYTES + 7]))
                for appender in appenders:
                    appender.write(data)
            elif what < 0.8:
                for appender in appenders:
                    appender.close()
                cut = chance.randint(0, size)
                for one in (plain, files):
                    one.cut(FILE, cut)
                appenders = [plain.append_to(FILE), files.append_to(FILE)]
            offset, length = chance.randint(0, size + 9), chance.choice([0, 1, 80, 5000, 10**6])
            assert files.size(FILE) == plain.size(FILE)
            assert files.read_at(FILE, offset, length) == plain.read_at(FILE, offset, length)
            assert files.read_pieces(FILE, [(offset, 9), (0, 80)]) == plain.read_pieces(FILE, [(offset, 9), (0, 80)])
        assert files.read(FILE) == plain.read(FILE) and files.read_pieces(FILE, []) == []


def test_nothing_that_was_written_stands_on_the_disk_and_no_nonce_stands_there_twice() -> None:
    files, before = disk(), b""
    for path in folder_of(files):
        raw = files.raw.read(path)
        assert files.read(path) != raw
        for number in range(12):
            vector = unit_vector(number)
            assert b"chunk %d" % number not in raw
            for form in (vector.tobytes(), vector.astype(np.float16).tobytes()):
                assert form[:8] not in raw and form[8:] not in raw
    seen: list[bytes] = []
    for _ in range(3):  # the same place again and again, as after interrupted writes
        files.cut(FILE, HEADER_BYTES)
        appender = files.append_to(FILE)
        appender.write(b"the same bytes")
        raw = files.raw.read(FILE)
        assert raw != before
        before = raw
        at = HEADER_BYTES
        while (frame := frame_at(raw, at)) is not None:
            seen.append(raw[at + 36 : at + 36 + NONCE_BYTES])
            at += frame.bytes
        assert at == len(raw)
        appender.close()
    assert len({*seen}) >= 4, "the header's frame and one for each time"


def test_every_flipped_bit_is_noticed_and_no_other_text_is_ever_read() -> None:
    whole = disk()
    told = contents(DATA_DIR, whole)
    for number, path in enumerate(folder_of(whole)):
        for offset in range(number, len(whole.raw.read(path)), 2_477 // scaled(100)):
            files = whole.after_power_cut("kept")
            files.flip(path, offset)
            report = verify(DATA_DIR, files)
            assert len(report.lines) > 1, f"{path} at {offset}: {report.lines}"  # in the last append it is a torn tail
            try:
                found = contents(DATA_DIR, files)
            except StoreError:
                continue
            assert {*found} <= {*told}


def test_damage_costs_the_append_that_it_is_in_and_nothing_else() -> None:
    files = disk()
    path = TopicLayout(DATA_DIR, "talk").bin(1)
    raw = files.raw.read(path)
    frames = list(itertools.takewhile(bool, (frame_at(raw, at) for at in _places(raw))))
    assert len(frames) == 6, "the header and five appends"
    for number, frame in enumerate(frames[1:]):
        assert frame is not None
        for offset in (0, 5, 10, 15, 25, 40, 60, frame.bytes - 20, frame.bytes - 2):
            damaged = files.after_power_cut("kept")
            damaged.flip(path, frame.place + offset)
            assert contents(DATA_DIR, damaged) == [f"user: chunk {other}" for other in range(12) if other != number], (
                offset
            )


def _places(raw: bytes) -> list[int]:
    places = [HEADER_BYTES]
    while (frame := frame_at(raw, places[-1])) is not None:
        places.append(frame.place + frame.bytes)
    return places


def test_a_frame_that_was_moved_swapped_or_repeated_is_not_read() -> None:
    files = EncryptedCrashFiles()
    files.make_directory(DATA_DIR)
    files.make_directory(TOPIC)
    other = TOPIC / "hot.log"
    for path, letter in ((FILE, b"a"), (other, b"b")):
        with closing(files.create(path)) as appender:
            for number in range(4):
                appender.write(letter * 10 + b"%d" % number)
    mine, foreign = files.raw.read(FILE), files.raw.read(other)
    size = 11 + FRAME_OVERHEAD
    head, *frames = mine[:HEADER_BYTES], *(mine[at : at + size] for at in _places(mine)[:-1])
    stranger = foreign[HEADER_BYTES + size : HEADER_BYTES + 2 * size]
    plain = [b"a" * 10 + b"%d" % number for number in range(4)]
    for changed in (
        [frames[0], stranger, frames[2], frames[3]],
        [frames[0], frames[2], frames[1], frames[3]],
        [frames[0], frames[0], frames[2], frames[3]],
        [frames[1], frames[2], frames[3]],
    ):
        files.raw.put(FILE, head + b"".join(changed))
        found = EncryptedCrashFiles(files.raw).read(FILE)
        assert len(found) >= 44 and found != b"".join(plain)
        for number in range(4):
            piece = found[11 * number : 11 * (number + 1)]
            assert piece in (plain[number], bytes(11)), changed


def test_what_the_key_of_another_topic_encrypted_is_refused_and_left_alone() -> None:
    files = disk()
    open_store(files, segment_entries_max=5).topic("other").append([draft("other")])
    key, other = TopicLayout(DATA_DIR, "talk").key, TopicLayout(DATA_DIR, "other").key
    files.raw.put(key, files.raw.read(other))
    damaged = EncryptedCrashFiles(files.raw.after_power_cut("kept"))
    before = damaged.contents()
    with pytest.raises(ForeignFile, match="another key"):
        open_store(damaged, segment_entries_max=5).topic("talk")
    # Where the header is damaged as well, a key that opens nothing must not pass for a file of which nothing is left.
    damaged.flip(FILE, 0)
    with pytest.raises(CorruptFile, match="nothing in it can be decrypted"):
        damaged.read(FILE)
    damaged.flip(FILE, 0)
    assert damaged.contents() == before


@pytest.mark.parametrize("name", ["hot.log", "active.bin"])
def test_damage_to_the_only_frame_of_a_file_costs_what_is_in_it_and_not_the_topic(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = disk()

    def copied(old: Path, new: Path) -> bool:
        files.raw.put(new, files.raw.read(old))
        return True

    monkeypatch.setattr(files, "link", copied)
    open_journal(TOPIC / "hot.log", files)[0].rewrite([b"one", b"two"])
    replace_file(files, FILE, files.read(FILE))
    files.flip(TOPIC / name, HEADER_BYTES + 60)
    damaged = files.raw.read(TOPIC / name)
    topic = open_store(files, segment_entries_max=5).topic("talk")
    journal, payloads = open_journal(TOPIC / "hot.log", files)
    assert payloads == ([] if name == "hot.log" else [b"one", b"two"])
    assert ("user: chunk 11" in live_contents(topic)) == (name == "hot.log")
    assert files.raw.read(TOPIC / f"{name}.torn") == damaged, "as it was on the disk"
    [told] = [str(one) for one in (*topic.findings, *journal.findings)]
    assert name in told and f"{name}.torn" in told
    topic.append([draft("said later")])
    journal.append([b"three"])
    assert open_journal(TOPIC / "hot.log", files)[1] == [*payloads, b"three"]


@pytest.mark.parametrize("spoiled", [b"", b"{}", b"flip"])
def test_a_key_file_of_a_topic_that_is_missing_or_damaged_is_told_and_no_new_one_is_made(spoiled: bytes) -> None:
    files = disk()
    key = TopicLayout(DATA_DIR, "talk").key
    if spoiled == b"flip":
        files.flip(key, 60)
    elif spoiled:
        files.raw.put(key, spoiled)
    else:
        files.raw.remove(key)
    again = EncryptedCrashFiles(files.raw.after_power_cut("kept"))
    before = again.contents()
    for attempt in (
        lambda: again.read(FILE),
        lambda: again.create(TOPIC / "new"),
        lambda: again.append_to(FILE),
        lambda: open_store(again, segment_entries_max=5).topic("talk"),
    ):
        with pytest.raises(WrongKey, match="out of a backup"):
            attempt()
    assert again.contents() == before


def test_a_topic_whose_key_was_destroyed_cannot_be_read_and_its_name_can_be_used_again() -> None:
    files = disk()
    files.wipe(TOPIC / TOPIC_KEY_NAME)
    with pytest.raises(WrongKey):
        EncryptedCrashFiles(files.raw).read(FILE)
    with pytest.raises(WrongKey):
        files.create(TOPIC / "new")
    for path in folder_of(files):
        files.remove(path)
    with closing(open_store(files)) as store:
        store.topic("talk").append([draft("anew")])
    assert live_contents(open_store(EncryptedCrashFiles(files.raw)).topic("talk")) == ["user: chunk anew"]


def test_a_disk_of_another_directory_key_opens_nothing() -> None:
    files = disk()
    for directory, key in (("00" * 16, DataKey(bytes(32))), ("11" * 16, DIRECTORY_KEY)):
        ring = KeyRing(files.raw, DATA_DIR, directory, key)
        with pytest.raises(WrongKey, match="another data directory"):
            EncryptedDisk(files.raw, [ring]).read(FILE)


def test_a_plain_file_among_encrypted_ones_is_refused() -> None:
    files, plain = disk(), CrashFiles()
    open_store(plain).topic("talk").append([draft("forged")])
    files.raw.put(FILE, plain.read(FILE))
    with pytest.raises(ForeignFile, match="is not encrypted"):
        open_store(EncryptedCrashFiles(files.raw), segment_entries_max=5).topic("talk")


def test_a_file_that_was_cut_between_two_looks_at_it_has_a_size_all_the_same() -> None:
    assert FrameTable(DataKey(bytes(32)), lambda pieces: [b""] * len(pieces)).size(500) == 500 - HEADER_BYTES


def test_the_bytes_of_a_frame_are_those_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    key, salt = DataKey(bytes(range(32))), bytes(16)
    counter = itertools.count()

    def given(length: int) -> bytes:
        return bytes(next(counter) % 256 for _ in range(length))

    monkeypatch.setattr(secrets, "token_bytes", given)
    [first] = frames_of(b"hello", key, salt, start=0, number=0)
    second = b"".join(frames_of(b"\x01" * (PIECE_BYTES + 1), key, salt, start=5, number=1))
    assert key.id.hex() == "1ec275cc3c7e1011"
    wanted = (
        "8f6d64e50500000000000000000000000000000000000000000000000000000000000000000102030405060708090a0b"
        "27ab84a8e31b421874fab978b45813e7d92d315c8f05000000"
    )
    assert first.hex() == wanted
    assert hashlib.sha256(second).hexdigest() == "9e63652234dbd603f6928206c30600b3b13e989e40ec173716b998c392a0e69e"


def test_a_store_on_an_encrypted_directory_without_its_disk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "memd.key").write_text("{}")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(WrongKey, match="is encrypted; give its key with"):
        open_store(data_dir=tmp_path)
    assert sorted(tmp_path.iterdir()) == before


# A crash at each step of `memd encrypt`, `decrypt` and `rekey`: acknowledged ⊆ recovered ⊆ attempted


OLD, NEW = MasterKey(b"o" * 32), MasterKey(b"n" * 32)
TEXT = b"user: chunk"
RECEIPT = b'{"asked":"user: chunk 1"}\n'
Convert = Callable[[CrashFiles], object]


def plain_directory() -> CrashFiles:
    """Two topics and receipts."""
    files = CrashFiles()
    store = open_store(files, segment_entries_max=2)
    for name in ("talk", "walk"):
        topic = store.topic(name)
        for number in range(3):
            topic.append([draft(f"{name} {number}")])
        seal_all(topic)
    store.close()
    with_receipts = files.create(DATA_DIR / RECEIPTS_NAME)
    with_receipts.write(RECEIPT)
    with_receipts.sync()
    files.sync_directory(DATA_DIR)
    return files


def encrypted_directory() -> CrashFiles:
    files = plain_directory()
    encrypt(DATA_DIR, OLD, files, _tell_nobody)
    return files


def _tell_nobody(topic_id: str) -> None:
    pass


CONVERSIONS: dict[str, tuple[Callable[[], CrashFiles], Convert, MasterKey | None]] = {
    "encrypt": (plain_directory, lambda files: encrypt(DATA_DIR, OLD, files, _tell_nobody), OLD),
    "decrypt": (encrypted_directory, lambda files: decrypt(DATA_DIR, OLD, files, _tell_nobody), None),
    "rekey": (encrypted_directory, lambda files: rekey(DATA_DIR, OLD, NEW, files, _tell_nobody, data=False), NEW),
    "rekey --data": (encrypted_directory, lambda files: rekey(DATA_DIR, OLD, NEW, files, _tell_nobody, data=True), NEW),
}
SAID = sorted(f"user: chunk {name} {number}" for name in ("talk", "walk") for number in range(3))


def disk_with(files: CrashFiles, master: MasterKey | None) -> LocalDisk:
    return files if master is None else encrypted_disk(DATA_DIR, master, files)


def check_whole(files: CrashFiles, master: MasterKey | None) -> None:
    """All is there under this key (None: in plain text), nothing is left over, and a daemon can work with it."""
    disk = disk_with(files, master)
    assert sorted(contents(DATA_DIR, disk)) == SAID
    assert disk.read(DATA_DIR / RECEIPTS_NAME) == RECEIPT
    assert verify(DATA_DIR, disk).ok, verify(DATA_DIR, disk).lines
    has_text = any(TEXT in data for data in files.contents().values())
    assert has_text == (master is None)
    assert CONVERSION_NAME not in files.names(DATA_DIR)
    assert (KEY_NAME in files.names(DATA_DIR)) == (master is not None)
    store = open_store(disk, segment_entries_max=2)
    assert len(live_contents(store.topic("talk"))) == 3
    store.close()


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("loss", ["kept", "reordered"])
def test_a_conversion_that_was_cut_off_at_any_operation_goes_on_where_it_stopped(name: str, loss: Loss) -> None:
    make, convert, after = CONVERSIONS[name]
    whole = make()
    first = whole.operations
    convert(whole)
    last = whole.operations
    check_whole(whole, after)
    for cut in [first, *steps(first + 1, last)][:: 1 if name == "rekey" else 7]:
        files = make()
        files.cut_after = cut
        with pytest.raises(PowerCutError):
            convert(files)
        again = files.after_power_cut(loss)
        with suppress(WrongKey):  # where it was done when the power failed
            convert(again)
        check_whole(again, after)


@pytest.mark.parametrize("name", ["encrypt", "decrypt", "rekey --data"])
def test_the_digests_of_what_is_being_erased_are_under_the_key_and_go_when_it_is_done(name: str) -> None:
    make, convert, after = CONVERSIONS[name]
    files, before = make(), None if name == "encrypt" else OLD
    digests = digest_of("a message") + digest_of("another one")
    erasure = Erasure(id=1 << 40, kind="chunks", topic_id="talk", at=1, by="ann", chunks=1, digests=digests)

    def is_plain() -> bool:
        return any(digests in data or base64.b64encode(digests) in data for data in files.contents().values())

    store = open_store(disk_with(files, before), segment_entries_max=2)
    store.ledger.write(erasure)
    store.close()
    assert is_plain() == (before is None)
    convert(files)
    assert is_plain() == (after is None)
    store = open_store(disk_with(files, after), segment_entries_max=2)
    assert store.ledger.pending == [erasure]
    store.ledger.write(msgspec.structs.replace(erasure, digests=b"", done_at=2))
    assert not [path for path in files.contents() if path.endswith(DIGESTS_SUFFIX)]
    replace_file(disk_with(files, after), erasures_dir(DATA_DIR) / f"5{DIGESTS_SUFFIX}", digests)  # and no more
    store.close()
    open_store(disk_with(files, after), segment_entries_max=2).close()
    assert not [path for path in files.contents() if path.endswith(DIGESTS_SUFFIX)]


@pytest.mark.parametrize("name", ["encrypt", "decrypt", "rekey --data"])
def test_while_a_conversion_is_unfinished_nothing_is_served_and_no_other_one_begins(name: str) -> None:
    make, convert, after = CONVERSIONS[name]
    files = make()
    files.fail_at = {files.operations + 60}
    with pytest.raises(StoreError):
        convert(files)
    before = files.contents()
    for settings in (EncryptionSettings(key="o" * 32), EncryptionSettings(key="n" * 32), EncryptionSettings()):
        with pytest.raises(WrongKey):
            disk_for(DATA_DIR, settings, files)
    for other, (_, begin, _) in CONVERSIONS.items():
        if not other.startswith(name.split()[0]):
            with pytest.raises(WrongKey, match=r"run that one again|the one that was given is"):
                begin(files)
    assert {path: data for path, data in files.contents().items() if "memd.lock" not in path} == before
    convert(files)
    check_whole(files, after)


def test_nothing_is_converted_under_a_running_daemon() -> None:
    files = plain_directory()
    store = open_store(files, segment_entries_max=2)
    with pytest.raises(StoreLocked):
        encrypt(DATA_DIR, OLD, files, _tell_nobody)
    store.close()
    assert KEY_NAME not in files.names(DATA_DIR)


@pytest.mark.parametrize("lost", [[KEY_NAME], [KEY_NAME, "talk/topic.key", "walk/topic.key"]])
def test_a_directory_that_has_lost_its_keys_is_not_encrypted_once_more(lost: list[str]) -> None:
    files = encrypted_directory()
    for name in lost:
        files.remove(DATA_DIR / name)
    before = files.contents()
    for attempt in (
        lambda: encrypt(DATA_DIR, OLD, files, _tell_nobody),
        lambda: disk_for(DATA_DIR, EncryptionSettings(key="o" * 32), files, creating=True),
    ):
        with pytest.raises(WrongKey, match="is missing, but talk is encrypted"):
            attempt()
    assert files.contents() == before


def test_a_full_disk_leaves_a_directory_that_can_be_encrypted_later() -> None:
    files = plain_directory()
    files.bytes_left = 2000
    with pytest.raises(DiskFull):
        encrypt(DATA_DIR, OLD, files, _tell_nobody)
    files.bytes_left = None
    encrypt(DATA_DIR, OLD, files, _tell_nobody)
    check_whole(files, OLD)
