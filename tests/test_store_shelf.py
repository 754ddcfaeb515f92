"""The contract of shelves, kept by the one that is the data directory itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from crash_files import LOSSES, CrashFiles, PowerCutError
from drafts import DATA_DIR
from effort import steps
from shelf_contract import Ground, ShelfContract

from memd.store.layout import LOCK_NAME
from memd.store.local_shelf import LocalShelf
from memd.store.shelf import Shelf


class Directory:
    """A data directory on a disk that loses what it may lose. See Ground."""

    def __init__(self, files: CrashFiles | None = None) -> None:
        self.files = files or CrashFiles()
        self.files.make_directory(DATA_DIR)
        self.files.sync_directory(DATA_DIR.parent)

    def shelf(self) -> Shelf:
        self.files.lock(DATA_DIR / LOCK_NAME)
        return LocalShelf(self.files, DATA_DIR)

    another = shelf

    def lose_answer(self) -> None:
        now = self.files.operations
        self.files.fail_at = {now + 1, now + 2, now + 3}  # the sync, and cutting back what it left

    def crashes(self, work: Callable[[Shelf], object]) -> Iterator[Shelf]:
        whole = Directory()
        start = whole.files.operations
        work(whole.shelf())
        for loss in LOSSES:
            for cut in steps(start, whole.files.operations):
                directory = Directory()
                directory.files.cut_after = cut
                with pytest.raises(PowerCutError):
                    work(directory.shelf())
                yield Directory(directory.files.after_power_cut(loss)).shelf()


class TestLocalShelf(ShelfContract):
    """The contract, on a local disk."""

    @pytest.fixture
    def ground(self) -> Ground:
        return Directory()
