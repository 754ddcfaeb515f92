"""A power cut or an I/O error at every single operation of everything the store writes.

What must hold afterwards: acknowledged ⊆ recovered ⊆ attempted, appends whole or absent, order kept, and opening a
second time changes nothing on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from drafts import DATA_DIR, adjusted, contents, deprecated, draft, live_contents, open_journal, open_store
from effort import steps
from encrypted_files import EncryptedCrashFiles

from memd.entries import Draft, Entry
from memd.errors import StoreError
from memd.store.disk import LocalDisk
from memd.store.store import Store
from memd.store.tools.verify import verify

HOT = DATA_DIR / "talk" / "hot.log"


class Witness:
    """The appends that were attempted and acknowledged, as lists of groups of contents."""

    def __init__(self) -> None:
        self.attempted: list[list[str]] = []
        self.acknowledged: list[list[str]] = []


def at_once(work: Callable[[], object]) -> bool:
    work()
    return True


def ingest(files: LocalDisk, witness: Witness, attempt: Callable[[Callable[[], object]], bool] = at_once) -> None:
    """Appends of several sizes across rotations, seals, corrections. `attempt` does each and says whether it worked."""
    stores: list[Store] = []
    while not attempt(lambda: stores.append(open_store(files, segment_entries_max=5))):
        pass
    while not attempt(lambda: stores[0].topic("talk")):
        pass
    topic = stores[0].topic("talk")
    known: list[Entry] = []

    def append(drafts: list[Draft]) -> None:
        witness.attempted.append([d.content for d in drafts])
        if attempt(lambda: known.extend(topic.append(drafts))):
            witness.acknowledged.append(witness.attempted[-1])

    for number, size in enumerate((1, 3, 2, 4, 1)):
        append([draft(f"{number}.{i}") for i in range(size)])
        assert live_contents(topic) == flat(witness.acknowledged)
    for correction in (adjusted(known[0], 2), deprecated(known[len(known) // 2])):
        append([correction])
    stores[0].close()


def flat(groups: list[list[str]]) -> list[str]:
    return [content for group in groups for content in group]


def operations_of(run: Callable[[Any], object], disk: Disk = CrashFiles) -> int:
    files = disk()
    run(files)
    operations: int = files.operations
    return operations


Disk = Callable[[], Any]
DISKS = pytest.mark.parametrize("disk", [CrashFiles, EncryptedCrashFiles])


@DISKS
@pytest.mark.parametrize("loss", LOSSES)
def test_after_a_power_cut_anywhere_all_is_there_and_a_second_start_changes_nothing(loss: Loss, disk: Disk) -> None:
    for cut in steps(0, operations_of(lambda files: ingest(files, Witness()), disk), loss):
        files, witness = disk(), Witness()
        files.cut_after = cut
        with pytest.raises(PowerCutError):
            ingest(files, witness)
        again = files.after_power_cut(loss)
        store = open_store(again, segment_entries_max=5)
        topic = store.topic("talk")
        found, wanted = contents(DATA_DIR, again), flat(witness.acknowledged)
        in_doubt = witness.attempted[len(witness.acknowledged) :]
        assert found == wanted or found == wanted + flat(in_doubt), f"cut at {cut}: {files.log[cut]}"
        assert verify(DATA_DIR, again).ok, verify(DATA_DIR, again).lines
        assert [finding.kind for finding in topic.findings if finding.kind not in ("torn", "derived")] == []
        live = contents(DATA_DIR, again, live_only=True)
        assert live_contents(topic) == live
        store.close()
        before = again.contents()
        store = open_store(again, segment_entries_max=5)
        assert live_contents(store.topic("talk")) == live
        store.close()
        assert again.contents() == before
        assert disk is CrashFiles or not any(b"user: chunk" in data for data in before.values())
        final = again.after_power_cut("lost")
        assert live_contents(open_store(final, segment_entries_max=5).topic("talk")) == live


@pytest.mark.parametrize("loss", LOSSES)
def test_a_power_cut_during_recovery_is_recovered_from(loss: Loss) -> None:
    ingest(files := CrashFiles(), Witness())
    writes = [number for number, what in enumerate(files.log) if what.startswith("sync active.bin")]
    files, witness = CrashFiles(), Witness()
    files.cut_after = writes[-3]
    with pytest.raises(PowerCutError):
        ingest(files, witness)
    left = files.after_power_cut(loss)
    probe = left.after_power_cut("lost")
    live_contents(open_store(probe, segment_entries_max=5).topic("talk"))
    for cut in steps(0, probe.operations, loss):
        broken = left.after_power_cut("lost")
        broken.cut_after = cut
        with pytest.raises(PowerCutError):
            open_store(broken, segment_entries_max=5).topic("talk")
        again = broken.after_power_cut(loss)
        open_store(again, segment_entries_max=5).topic("talk")
        assert contents(DATA_DIR, again)[: len(flat(witness.acknowledged))] == flat(witness.acknowledged)
        assert verify(DATA_DIR, again).ok


@DISKS
def test_an_io_error_at_any_operation_fails_one_append_and_nothing_else(disk: Disk) -> None:
    for number in steps(0, operations_of(lambda files: ingest(files, Witness()), disk)):
        files, witness = disk(), Witness()
        files.fail_at = {number}
        ingest(files, witness, despite_errors)
        acknowledged = flat(witness.acknowledged)
        assert contents(DATA_DIR, files) == acknowledged, f"failed at {number}: {files.log[number]}"
        assert verify(DATA_DIR, files).ok
        again = files.after_power_cut("lost")
        store = open_store(again, segment_entries_max=5)
        store.topic("talk")
        assert contents(DATA_DIR, again) == acknowledged, f"failed at {number}: {files.log[number]}"


@DISKS
def test_errors_at_three_operations_in_a_row_lose_nothing_that_was_acknowledged(disk: Disk) -> None:
    for number in steps(0, operations_of(lambda files: ingest(files, Witness()), disk)):
        files, witness = disk(), Witness()
        files.fail_at = {number, number + 1, number + 2}
        ingest(files, witness, despite_errors)
        acknowledged = flat(witness.acknowledged)
        # Where neither the sync nor cutting back nor the retry worked, a whole append may be left at the end.
        assert contents(DATA_DIR, files)[: len(acknowledged)] == acknowledged, (
            f"failed at {number}: {files.log[number]}"
        )
        again = files.after_power_cut("lost")
        open_store(again, segment_entries_max=5).topic("talk")
        assert contents(DATA_DIR, again) == acknowledged


@pytest.mark.parametrize("loss", LOSSES)
def test_a_journal_rewrite_leaves_the_old_or_the_new_journal(loss: Loss) -> None:
    def run(files: CrashFiles) -> None:
        files.make_directory(DATA_DIR)
        files.make_directory(HOT.parent)
        files.sync_directory(DATA_DIR.parent)
        files.sync_directory(DATA_DIR)
        journal, _ = open_journal(HOT, files)
        journal.append([b"one", b"two"])
        journal.sync()
        done.append([b"one", b"two"])
        journal.rewrite([b"two"])
        done.append([b"two"])
        journal.append([b"three"])
        journal.sync()
        done.append([b"two", b"three"])

    states: list[list[bytes]] = [[], [b"one"], [b"one", b"two"], [b"two"], [b"two", b"three"]]
    done: list[list[bytes]] = []
    for cut in steps(0, operations_of(run)):
        files, done = CrashFiles(), [[]]
        files.cut_after = cut
        with pytest.raises(PowerCutError):
            run(files)
        again = files.after_power_cut(loss)
        if not again.is_directory(HOT.parent):
            continue
        _, payloads = open_journal(HOT, again)
        assert payloads in states[states.index(done[-1]) :]
        before = again.contents()
        assert open_journal(HOT, again)[1] == payloads
        assert again.contents() == before


def despite_errors(work: Callable[[], object]) -> bool:
    try:
        work()
    except StoreError:
        return False
    return True
