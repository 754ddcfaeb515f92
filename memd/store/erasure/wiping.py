"""Overwriting and removing files, and what that does not reach.

Rule: best effort, and honest about it: whatever could not be overwritten is noted, to be told to the owner. A file that
a backup shares (a hard link) is never overwritten: the backup's owner decides about it.
"""

from __future__ import annotations

from pathlib import Path

from memd.store.disk import LocalDisk
from memd.store.files import TEMPORARY_SUFFIX, only_whole, write_beside
from memd.store.layout import TopicLayout
from memd.store.log.recovery import torn_files


class Wiper:
    """Wipes files, and notes those whose bytes may still be somewhere."""

    def __init__(self, files: LocalDisk) -> None:
        self.files = files
        self.left: list[Path] = []
        """Files that were removed or replaced, and not overwritten."""

    def wipe(self, path: Path) -> None:
        """Overwrite and remove a file, if it exists.

        Raises:
            StoreWriteFailed: it cannot be removed.
        """
        if not self.files.wipe(path):
            self.left.append(path)

    def replace(self, path: Path, data: bytes) -> None:
        """Replace the contents of a file durably, and overwrite what it was.

        Raises:
            StoreWriteFailed: it is as it was (DiskFull if the disk is full).
        """
        self.put_in_place(write_beside(self.files, path, data), path)

    def put_in_place(self, temporary: Path, path: Path) -> None:
        """Give a temporary file the name of another, durably, and overwrite that one.

        Raises:
            StoreWriteFailed: the temporary file is gone.
        """
        with only_whole(self.files, temporary):
            if not self.files.replace_wiping(temporary, path):
                self.left.append(path)

    def wipe_folder(self, folder: Path) -> None:
        """Wipe all that is in a folder, and remove it. Doing it again goes on where it ended."""
        for name in self.files.names(folder):
            path = folder / name
            if self.files.is_directory(path):
                self.wipe_folder(path)
            else:
                self.wipe(path)
        self.files.remove_directory(folder)

    def wipe_leftovers(self, layout: TopicLayout) -> None:
        """Wipe a log's temporary files, and those that interrupted writes were moved to: nobody reads either."""
        # By another thread, perhaps at this moment; the second has a header and no text.
        written = {one.name + TEMPORARY_SUFFIX for one in (layout.hot, layout.active)}
        for folder in (layout.directory, layout.segments):
            names = (one for one in self.files.names(folder) if one.endswith(TEMPORARY_SUFFIX) and one not in written)
            for path in (*(folder / name for name in names), *torn_files(self.files, [folder])):
                self.wipe(path)
