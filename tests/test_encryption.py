"""The encrypted disk: the same bytes at the same offsets as a plain one, whatever is torn, cut, moved or flipped.

Rule: `files.raw` is what a thief has; the witness of a test is its bytes.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import random
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from conftest import MakeDaemon, Serving
from crash_files import CrashFiles, Loss, PowerCutError
from daemon_process import DaemonProcess, ask, wait_until
from drafts import (
    DATA_DIR,
    contents,
    digest_of,
    draft,
    live_contents,
    open_journal,
    open_store,
    two_segments,
    unit_vector,
)
from effort import scaled, steps
from encrypted_files import EncryptedCrashFiles
from numpy.typing import NDArray
from recording_upstream import RecordingUpstream, chat_answer

from memd.cli.main import main
from memd.errors import CorruptFile, DiskFull, ForeignFile, StoreError, StoreLocked, WrongKey
from memd.settings.model import Config, EncryptionSettings
from memd.store.disk import LocalDisk, replace_file
from memd.store.encryption.converting import decrypt, encrypt, rekey
from memd.store.encryption.disk import disk_of, encrypted_disk
from memd.store.encryption.frames import (
    FRAME_OVERHEAD,
    NONCE_BYTES,
    PIECE_BYTES,
    DataKey,
    FrameTable,
    MasterKey,
    frame_at,
    frames_of,
    new_key_file,
)
from memd.store.erasure import Erasure
from memd.store.layout import (
    CLUSTER_NAME,
    CONVERSION_NAME,
    DIGESTS_SUFFIX,
    KEY_NAME,
    RECEIPTS_NAME,
    TopicLayout,
    erasures_dir,
    topic_ids_in,
)
from memd.store.log.format import HEADER_BYTES
from memd.store.tools.export import exported_entries
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
            one.create(FILE)
        for _ in range(30):
            size = plain.size(FILE) or 0
            what = chance.random()
            if what < 0.6:
                data = chance.randbytes(chance.choice([1, 50, 700, PIECE_BYTES, 2 * PIECE_BYTES + 7]))
                for one in (plain, files):
                    one.append(FILE, data)
            elif what < 0.8:
                cut = chance.randint(0, size)
                for one in (plain, files):
                    one.cut(FILE, cut)
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
        files.append(FILE, b"the same bytes")
        raw = files.raw.read(FILE)
        assert raw != before
        before = raw
        at = HEADER_BYTES
        while (frame := frame_at(raw, at)) is not None:
            seen.append(raw[at + 36 : at + 36 + NONCE_BYTES])
            at += frame.bytes
        assert at == len(raw)
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
        files.create(path)
        for number in range(4):
            files.append(path, letter * 10 + b"%d" % number)
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
def test_damage_to_the_only_frame_of_a_file_costs_not_the_topic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        lambda: again.append(FILE, b"more"),
        lambda: open_store(again, segment_entries_max=5).topic("talk"),
    ):
        with pytest.raises(WrongKey, match="out of a backup"):
            attempt()
    assert again.contents() == before


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
    store.close()
    files.create(DATA_DIR / RECEIPTS_NAME)
    files.append(DATA_DIR / RECEIPTS_NAME, RECEIPT)
    files.sync(DATA_DIR / RECEIPTS_NAME)
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
            disk_of(Config(data_dir=DATA_DIR, encryption=settings), files)
    for other, (_, begin, _) in CONVERSIONS.items():
        if not other.startswith(name.split()[0]):
            with pytest.raises(WrongKey, match=r"was begun and not finished: run it again|the one that was given is"):
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
        lambda: disk_of(Config(data_dir=DATA_DIR, encryption=EncryptionSettings(key="o" * 32)), files, creating=True),
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


# Under the real daemon and the real commands


RARE = [f"zanzibar{word}quokka" for word in ("lamp", "gull", "paint", "ferry", "foghorn", "keeper")]
ANSWER = "The vermilion walrus agrees with that."
SETTINGS = {"segment": {"max_entries": 10}, "buffer": {"soft_tokens": 300, "hard_tokens": 700}}


def key_file(folder: Path, name: str = "key") -> Path:
    path = folder / name
    new_key_file(path)
    return path


def bytes_below(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, path.read_bytes()


def memd(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, [str(one) for one in arguments], prog_name="memd")


def vectors_in(daemon: DaemonProcess, settings: EncryptionSettings) -> list[NDArray[np.float32]]:
    disk = disk_of(Config(data_dir=daemon.data_dir, encryption=settings))
    found = exported_entries(daemon.data_dir, disk, topic_ids_in(disk, daemon.data_dir), live_only=False)
    return [np.frombuffer(entry.vector, dtype="<f4") for _, entry, _ in found if entry.vector]


def test_no_byte_below_the_data_directory_is_text_or_vector_while_a_daemon_works_is_killed_and_ends(
    serving: Serving, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    upstream.answer = lambda request: chat_answer(request, ANSWER)
    settings = EncryptionSettings(key_file=str(key_file(tmp_path)))
    daemon = serving({**SETTINGS, "encryption": {"key_file": settings.key_file}})
    history = []
    for word in RARE:
        history.append({"role": "user", "content": f"I have to tell you of the {word} at the pier. " * 12})
        history.append({"role": "assistant", "content": daemon.chat(history).reply})
    wait_until(lambda: len(vectors_in(daemon, settings)) >= len(RARE), lambda: repr(daemon))
    assert "memd.receipts" in [path.name for path in daemon.data_dir.iterdir()]
    for path, data in bytes_below(daemon.data_dir):
        assert not any(word.encode() in data for word in RARE), path
    daemon.kill()
    daemon.start()
    daemon.chat([{"role": "user", "content": f"What do you know of the {RARE[0]}?"}])
    assert f"of the {RARE[0]} at the pier" in upstream.prompts[-1], "and it is remembered"
    wait_until(lambda: any(path.suffix == ".meta" for path in daemon.data_dir.rglob("*")), lambda: repr(daemon))
    topics = ask(f"{daemon.own_url}/memd/topics")
    assert topics.status == 200 and topics.json["topics"][0]["segments"], topics
    assert ask(f"{daemon.own_url}/memd/backup", {"folder": str(tmp_path / "backup")}).status == 200
    assert daemon.terminate() == 0
    vectors = vectors_in(daemon, settings)
    pieces = [form[at : at + 16].tobytes() for one in vectors for form in (one, one.astype("<f2")) for at in (0, 100)]
    wanted = [*(word.encode() for word in RARE), b"vermilion", b"walrus", *pieces]
    for folder in (daemon.data_dir, tmp_path / "backup"):
        for path, data in bytes_below(folder):
            assert [one for one in wanted if one in data] == [], path
        assert "all whole" in memd("verify", folder, MEMD_ENCRYPTION_KEY_FILE=settings.key_file).output
    turns = LocalDisk().read(daemon.data_dir / "memd.receipts")
    assert turns[:8] == b"memd.enc"


REFUSED = (
    ["verify"],
    ["stats"],
    ["export"],
    ["backup", "elsewhere"],
    ["search", "gull"],
    ["audit"],
    ["remember", "a gull"],
    ["reembed"],
    ["encrypt", "on"],
    ["decrypt"],
    ["serve", "--port", "0"],
)


@pytest.fixture
def encrypted(tmp_path: Path) -> Path:
    """An encrypted directory with a topic; `key` beside it is its key, `other` another one."""
    key_file(tmp_path)
    key_file(tmp_path, "other")
    folder = tmp_path / "memory"
    settings = EncryptionSettings(key_file=str(tmp_path / "key"))
    files = disk_of(Config(data_dir=folder, encryption=settings), creating=True)
    store = open_store(files, folder, segment_entries_max=2, dimension=384, fingerprint="")
    store.topic("talk").append([draft("gull", dimension=384)])
    store.close()
    return folder


def test_a_command_that_asks_the_running_daemon_needs_no_key(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    daemon = make_daemon(upstream.url, {"encryption": {"key_file": str(key_file(tmp_path))}}).start()
    body = {"notes": [{"content": "The crane needs oil."}]}
    assert ask(f"{daemon.own_url}/memd/notes", body).status == 200
    told = memd("search", "What does the crane need?", "--data-dir", daemon.data_dir)
    assert told.exit_code == 0 and "The crane needs oil." in told.output, told.output

    def log() -> str:  # where a note is as soon as it is embedded
        return memd("log", "--data-dir", daemon.data_dir).output

    wait_until(lambda: "The crane needs oil." in log(), log)


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command[0])
def test_without_the_key_or_with_a_wrong_one_a_command_says_so_and_writes_nothing(
    encrypted: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(encrypted.parent)
    before = [(path, data) for path, data in bytes_below(encrypted.parent) if path.name != "memd.lock"]
    missing = memd(*command, "--data-dir", encrypted)
    assert missing.exit_code == 1 and "key" in missing.output and "encryption.key_file" in missing.output
    wrong = memd(*command, "--data-dir", encrypted, MEMD_ENCRYPTION_KEY_FILE="other")
    assert wrong.exit_code == 1 and "another directory's, or one from before a `memd encrypt rekey`" in wrong.output
    assert [(path, data) for path, data in bytes_below(encrypted.parent) if path.name != "memd.lock"] == before


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o622])
def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(WrongKey, match=f"others may read this key \\(mode {mode:04o}\\); chmod 600"):
        MasterKey.in_file(path)


def test_a_key_is_the_same_in_each_form_and_one_that_is_gone_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    text = path.read_text().strip()
    one = MasterKey.in_file(path)
    raw = base64.b64decode(text)
    forms = [
        raw,
        raw.hex().encode(),
        raw.hex().upper().encode() + b"\n",
        text.replace("+", "-").replace("/", "_").encode(),
    ]
    assert {MasterKey.parsed(form, "x").id for form in forms} == {one.id}
    for wrong in (b"", raw[:-1], raw.hex()[:-2].encode(), b"z" * 64, b"\xff" * 64, b"a passphrase, which is no key"):
        with pytest.raises(WrongKey, match="x: holds no key"):
            MasterKey.parsed(wrong, "x")
    (empty := tmp_path / "empty").touch(0o600)
    with pytest.raises(WrongKey):
        MasterKey.in_file(empty)

    open_store(None, memory := tmp_path / "memory").close()
    done = memd("encrypt", "on", "--data-dir", memory, MEMD_ENCRYPTION_KEY_FILE=str(tmp_path / "gone"))
    assert done.exit_code == 1 and f"{tmp_path / 'gone'}: there is no such file; put the key" in done.output


def test_where_the_package_is_missing_that_is_said_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    assert memd("remember", "The oars are in the loft.", "--data-dir", memory).exit_code == 0
    monkeypatch.setattr("memd.store.encryption.disk.find_spec", lambda name: None)
    refused = memd("stats", "--data-dir", memory, MEMD_ENCRYPTION_KEY="a" * 64)
    assert refused.exit_code == 1 and "needs the cryptography package" in refused.output, refused.output


def test_a_new_key_never_replaces_one(tmp_path: Path) -> None:
    told = memd("key", "new", tmp_path / "key")
    id_ = MasterKey.in_file(tmp_path / "key").id
    assert told.exit_code == 0 and f"Its id, which memd calls it by, is {id_}; the file is what to copy." in told.output
    made = (tmp_path / "key").read_bytes()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    again = memd("key", "new", tmp_path / "key")
    assert again.exit_code == 2 and "is there already" in again.output
    assert (tmp_path / "key").read_bytes() == made


@pytest.mark.parametrize(
    ("command", "being"),
    [("on", "encrypted"), ("off", "written in plain text"), ("rekey --data", "encrypted anew")],
)
def test_what_was_begun_and_not_finished_is_told_with_the_command_that_goes_on(
    encrypted: Path, command: str, being: str
) -> None:
    master, other = (MasterKey.in_file(encrypted.parent / name) for name in ("key", "other"))

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    if command == "on":
        decrypt(encrypted, master, LocalDisk(), _tell_nobody)
    begin = {
        "on": partial(encrypt, encrypted, master),
        "off": partial(decrypt, encrypted, master),
        "rekey --data": partial(rekey, encrypted, master, other, data=True),
    }
    with pytest.raises(KeyboardInterrupt):
        begin[command](disk=LocalDisk(), tell=interrupted)
    given = "other" if command.startswith("rekey") else "key"
    environment = {"MEMD_ENCRYPTION_KEY_FILE": str(encrypted.parent / given)}
    begun = f"{encrypted}: is being {being}: `memd encrypt {command}` was begun and not finished: run it again"
    state = memd("encrypt", "--data-dir", encrypted, **environment)
    assert state.exit_code == 1 and state.output.startswith(f"{begun}.\n")
    another = memd("encrypt", "off" if command == "on" else "on", "--data-dir", encrypted, **environment)
    assert another.exit_code == 1 and another.stderr == f"memd: {begun}\n"


def test_the_state_tells_whether_the_key_fits_and_of_a_cluster_s_copy_nothing(encrypted: Path) -> None:
    (garbage := encrypted.parent / "garbage").write_text("no key at all")
    garbage.chmod(0o600)
    key_file(encrypted.parent, "open").chmod(0o644)
    for name, why in (("other", "another directory's"), ("garbage", "holds no key"), ("open", "chmod 600")):
        path = encrypted.parent / name
        told = memd("encrypt", "--data-dir", encrypted, MEMD_ENCRYPTION_KEY_FILE=str(path))
        assert told.exit_code == 1 and why in told.stderr and "The settings have" not in told.stdout, told.output

    (encrypted / CLUSTER_NAME).write_text("")
    told = memd("encrypt", "--data-dir", encrypted)
    assert told.exit_code == 1 and not told.stdout and "is the cache of a cluster" in told.stderr


def test_a_plain_directory_is_encrypted_rekeyed_and_decrypted_by_commands(tmp_path: Path) -> None:
    folder, old, new = tmp_path / "memory", key_file(tmp_path, "old"), key_file(tmp_path, "new")
    where: list[str | Path] = ["--data-dir", folder]
    with_old, with_new = {"MEMD_ENCRYPTION_KEY_FILE": str(old)}, {"MEMD_ENCRYPTION_KEY": new.read_text().strip()}
    store = open_store(None, folder, segment_entries_max=2, dimension=384, fingerprint="")
    store.topic("talk").append([draft(bird, dimension=384) for bird in ("gull", "tern")])
    store.topic("talk").append([draft("wren", dimension=384)])
    store.close()
    (folder / "memd.receipts").write_bytes(b'{"asked":"zanzibar"}\n')
    refused = memd("stats", *where, **with_old).output
    assert "run `memd encrypt on` first" in refused and "or take the key out of the settings" in refused
    assert memd("backup", tmp_path / "plain", *where).exit_code == 0
    checked = memd("verify", tmp_path / "plain", **with_old)
    assert checked.exit_code == 0 and "backup is in plain text" in checked.output and "all whole" in checked.output
    plain = memd("encrypt", *where, **with_old)
    assert plain.exit_code == 1 and plain.output.startswith(f"{folder}: is in plain text. To encrypt it, stop memd and")
    assert "make a key (`memd encrypt key FILE`)" in memd("encrypt", *where).output
    stdin = CliRunner().invoke(main, ["encrypt", "on", "--key-stdin", "--data-dir", str(folder)], input=old.read_text())
    assert stdin.exit_code == 0 and "is encrypted with the key" in stdin.output, stdin.output
    assert "\n  talk/segments/" in stdin.output and ".memd-encrypting" not in stdin.output  # the backup shares it
    assert not any(b"zanzibar" in data for _, data in bytes_below(folder))
    assert "is encrypted already" in memd("encrypt", "on", *where, **with_old).output
    told = memd("encrypt", *where, **with_old)
    assert told.exit_code == 0 and "\nThe settings have this key.\n" in told.output
    told = memd("encrypt", *where)
    assert told.exit_code == 0 and told.output.startswith(
        f"{folder}: is encrypted with the key {MasterKey.in_file(old).id}.\n"
    )
    told = memd("rekey", *where, "--new-key-file", new, **with_old)
    assert told.exit_code == 0 and "name it in the settings" in told.output, told.output
    assert memd("verify", *where, **with_old).exit_code == 1
    assert memd("verify", *where, **with_new).exit_code == 0
    back = tmp_path / "backup"
    assert memd("backup", back, *where, **with_new).exit_code == 0
    assert memd("verify", back, **with_new).exit_code == 0
    assert memd("verify", back).exit_code == 1
    (back / "memd.key").rename(tmp_path / "lost")
    lost = memd("verify", back, **with_new)
    assert lost.exit_code == 1 and "is missing" in lost.output and "plain text" not in lost.output
    (tmp_path / "lost").rename(back / "memd.key")
    again = tmp_path / "restored"
    assert memd("restore", back, again).exit_code == 0
    assert [memd("verify", again, **with_new).exit_code, memd("verify", again).exit_code] == [0, 1]
    assert memd("decrypt", *where, **with_new).exit_code == 0
    assert memd("verify", *where).exit_code == 0
    assert (folder / "memd.receipts").read_bytes() == b'{"asked":"zanzibar"}\n'
    assert (
        "from before the data directory was encrypted, decrypted or given new keys"
        in memd("backup", back, *where).output
    )
    assert sorted(path.name for path in (folder / "talk").iterdir()) == ["active.bin", "segments"]


@pytest.fixture
def backed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An encrypted directory with three topics, and its backup."""
    monkeypatch.setenv("MEMD_ENCRYPTION_KEY_FILE", str(key_file(tmp_path)))
    folder, back = tmp_path / "memory", tmp_path / "backup"
    store = open_store(None, folder, segment_entries_max=2, dimension=384, fingerprint="")
    for topic_id in ("ann", "bob", "eve"):
        store.topic(topic_id).append([draft(bird, dimension=384) for bird in ("gull", "tern", "wren")])
    store.close()
    assert memd("encrypt", "on", "--data-dir", folder).exit_code == 0
    assert memd("backup", back, "--data-dir", folder).exit_code == 0
    return folder, back


def spoil(key: Path, *, is_lost: bool) -> None:
    data = bytearray(key.read_bytes())
    data[60] ^= 1
    key.unlink()
    if not is_lost:
        key.write_bytes(data)


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_damaged_key_of_a_topic_is_one_finding_and_all_others_are_read(
    backed_up: tuple[Path, Path], is_lost: bool
) -> None:
    back = backed_up[1]
    restored = back.with_name("restored")
    spoil(back / "bob" / "topic.key", is_lost=is_lost)
    for told in (memd("verify", back), memd("restore", back, restored), memd("verify", restored)):
        assert told.exit_code == 1 and told.output.count("topic.key: is ") == 1, told.output
    assert "checked 3 topics: " in memd("verify", restored).output


@pytest.mark.parametrize("is_looked_into", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_the_damaged_key_of_a_topic_in_a_backup_is_put_right_by_the_next_one(
    backed_up: tuple[Path, Path], is_lost: bool, is_looked_into: bool
) -> None:
    folder, back = backed_up
    if is_looked_into:
        assert memd("log", "--data-dir", back).exit_code == 0
    spoil(back / "bob" / "topic.key", is_lost=is_lost)
    told = memd("backup", back, "--data-dir", folder)
    assert told.exit_code == 0 and memd("verify", back).exit_code == 0, told.output


def test_the_damaged_key_of_a_topic_is_one_finding_of_a_backup_and_all_others_are_backed_up(
    backed_up: tuple[Path, Path],
) -> None:
    folder, back = backed_up
    spoil(folder / "bob" / "topic.key", is_lost=False)
    (back / "eve" / "topic.key").unlink()
    shutil.rmtree(folder / "eve")  # so nobody has its key
    told = memd("backup", back, "--data-dir", folder)
    assert told.exit_code == 1 and told.output.count("bob/topic.key: ") == 1, told.output
    assert "erased" not in told.output and "2 topics" in told.output
    shutil.copy(back / "bob" / "topic.key", folder / "bob" / "topic.key")
    assert memd("backup", back, "--data-dir", folder).exit_code == 0


def test_the_damaged_key_of_a_backup_is_put_right_by_the_next_one_and_told_by_a_restoration(
    backed_up: tuple[Path, Path],
) -> None:
    folder, back = backed_up
    spoil(back / "memd.key", is_lost=False)
    told = memd("restore", back, back.with_name("restored"))
    assert told.exit_code == 1 and "damaged: " in told.output and "memd.key: is damaged" in told.output
    assert memd("backup", back, "--data-dir", folder).exit_code == 0
    assert memd("verify", back).exit_code == 0
