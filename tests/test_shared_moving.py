"""Topics between a folder and a shared log, where power or process ends at any operation: run again it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest
from crash_files import CrashFiles, Loss, PowerCutError
from drafts import DIMENSION, draft
from folder_log import FolderLog

from memd.errors import StoreError
from memd.store.layout import CLUSTER_NAME, TopicLayout
from memd.store.log.format import encode_record
from memd.store.log.journal import read_journal
from memd.store.shared.moving import Step, into_folder, into_log
from memd.store.shared.seam import SharedLog
from memd.store.store import ModelId, Store, StoreShared
from memd.store.tools.verify import verify

FOLDER = Path("/memory")
TOPICS = {"harbour": 3, "lighthouse": 2}
"""How many groups each has."""
SAID = b"\x93said\x01\x02"


def filled(kept: SharedLog) -> SharedLog:
    """With the topics, and something in the buffer of each."""
    files = CrashFiles.with_directory(Path("/daemon"))
    shared = StoreShared(model=ModelId(DIMENSION, "f"), segment_entries_max=100, files=files)
    with closing(Store(Path("/daemon"), shared, kept=kept)) as store:
        for name, groups in TOPICS.items():
            for group in range(groups):
                store.topic(name).append([draft(f"{name} {group} {number}") for number in range(2)])
            assert kept.append(name, "hot", 0, 1, encode_record(SAID), generation=1)
    return kept


def entries(steps: Iterable[Step]) -> dict[str, tuple[str, int]]:
    """What became of each topic."""
    return {one.topic: (one.outcome, one.entries) for _, _, one in steps}


WHOLE = {name: ("moved", 2 * groups) for name, groups in TOPICS.items()}


@pytest.mark.parametrize("loss", ["kept", "lost", "reordered"])
def test_a_move_into_a_folder_that_ended_at_any_operation_goes_on(tmp_path: Path, loss: Loss) -> None:
    kept = filled(FolderLog(tmp_path / "log"))
    for cut_after in itertools.count():
        files = CrashFiles.with_directory(FOLDER)
        files.cut_after = files.operations + cut_after
        try:
            entries(into_folder(kept, FOLDER, files))
            break
        except PowerCutError:
            files = files.after_power_cut(loss)
        assert entries(into_folder(kept, FOLDER, files)) == WHOLE, cut_after
        assert files.size(FOLDER / CLUSTER_NAME) is None
        assert verify(FOLDER, files, is_served=False).ok
        assert [read_journal(TopicLayout(FOLDER, name).hot, files) for name in TOPICS] == [[SAID], [SAID]]
    assert cut_after > 20


@pytest.mark.parametrize("fault", ["away", "doubt"])
def test_a_move_into_a_log_that_ended_at_any_call_goes_on(tmp_path: Path, fault: str) -> None:
    files = CrashFiles.with_directory(FOLDER)
    entries(into_folder(filled(FolderLog(tmp_path / "first")), FOLDER, files))

    def fails_at(number: int) -> Callable[[str], str]:
        calls = itertools.count()
        return lambda _: fault if next(calls) == number else ""

    for number in itertools.count():
        kept = FolderLog(tmp_path / f"log{number}")
        kept.fails = fails_at(number)
        try:
            entries(into_log(FOLDER, files, kept))
            break
        except StoreError:
            kept.fails = lambda _: ""
        assert entries(into_log(FOLDER, files, kept)) == WHOLE, number
        for name, groups in TOPICS.items():
            assert len(kept.since(name, {"log": 0}).rows) == groups
            assert [row.data for row in kept.since(name, {"hot": 0}).rows] == [encode_record(SAID)]
    assert number > 8
