"""A crash at each step of `memd encrypt`, `decrypt` and `rekey`.

Rule: as in test_store_crash.py: acknowledged ⊆ recovered ⊆ attempted, and opening a second time changes nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from crash_files import CrashFiles, Loss, PowerCutError
from drafts import DATA_DIR, digest_of, draft, live_contents, open_store, seal_all
from effort import steps
from test_store_crash import stored

from memd.errors import DiskFull, StoreError, StoreLocked, WrongKey
from memd.settings.model import EncryptionSettings
from memd.store.disk import LocalDisk, replace_file
from memd.store.encryption.converting import decrypt, encrypt, rekey
from memd.store.encryption.key_files import MasterKey
from memd.store.encryption.opening import disk_for, encrypted_disk
from memd.store.erasure import Erasure
from memd.store.layout import CONVERSION_NAME, DIGESTS_SUFFIX, KEY_NAME, RECEIPTS_NAME, erasures_dir
from memd.store.tools.verify import verify

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
    assert sorted(stored(disk)) == SAID
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
