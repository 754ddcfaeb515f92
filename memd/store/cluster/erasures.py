"""The erasures of a cluster: a book of the database, so that any daemon can finish one, and each clears its own copies.

Rule: an erasure stays in the book. What a daemon has heard of and followed is noted in its data directory: one that was
away hears of the rest when it starts.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from memd.errors import StoreError
from memd.store.cluster.book import Rows, SharedBook
from memd.store.cluster.database import Database
from memd.store.erasure.ledger import Erasure, Erasures
from memd.store.files import Files, replace_file
from memd.store.layout import followed_file, topic_names_in


class SharedErasures(Erasures):
    """The erasures that all daemons know. See Erasures. Any thread."""

    def __init__(self, book: SharedBook, files: Files, data_dir: Path) -> None:
        super().__init__()
        self._book = book
        self._files = files
        self._file = followed_file(data_dir)
        self._is_new = files.size(self._file) is None and not topic_names_in(files, data_dir)
        """Whether there can be nothing here that was erased before."""
        self._own: set[int] = set()
        self._read = 0
        """Changes of the book that are known."""
        self._has_heard = False
        """Also of an empty book."""
        self._unfollowed: dict[int, Erasure] = {}
        self._mutex = threading.Lock()

    def write(self, erasure: Erasure) -> None:
        """See Erasures."""
        self._book.put(str(erasure.id), msgspec.json.encode(erasure).decode())
        self._known[erasure.id] = erasure
        self._own.add(erasure.id)

    def catch_up(self) -> list[Erasure]:
        """Hear of what other daemons erased; return those that are done, and not followed here yet.

        Raises:
            StoreError: nobody can be asked, or a later memd wrote it.
        """
        with self._mutex:
            if not self._has_heard or self._book.changes() != self._read:
                self._hear()
            return list(self._unfollowed.values())

    def note_followed(self) -> None:
        """Note that nothing of what was heard of is left in this daemon's copies. Raises StoreWriteFailed."""
        with self._mutex:
            self._note()
            self._unfollowed.clear()

    def _hear(self) -> None:
        followed = self._followed()
        is_first = not self._has_heard
        page = self._book.read(self._read)
        for erasure in _erasures_in(page.rows):
            self._known[erasure.id] = erasure
            if erasure.done_at is not None and erasure.id not in self._own:
                self._unfollowed[erasure.id] = erasure
        self._read = page.changes
        if is_first and self._is_new:
            self._unfollowed.clear()
            self._note()
        elif is_first and followed is not None:
            later = _erasures_in(self._book.read(followed).rows)
            self._unfollowed = {one.id: one for one in later if one.id in self._unfollowed}
        self._has_heard = True

    def _note(self) -> None:
        self._files.make_directory(self._file.parent)
        replace_file(self._files, self._file, str(self._read).encode())

    def _followed(self) -> int | None:
        """The changes that had been followed; None: not known, so that all are followed."""
        try:
            return int(self._files.read(self._file)) if self._files.size(self._file) is not None else None
        except (StoreError, ValueError):
            return None


class SharedTimes:
    """Up to when retention has looked at each topic, for all daemons. Any thread; raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, topic_id: str, default: int, /) -> int:
        """The time of a topic."""
        asked = "SELECT retained FROM memd_topic WHERE topic = %s"
        row = self._database.ask(lambda connection: connection.execute(asked, (topic_id,)).fetchone())
        return default if row is None else int(row[0])

    def __setitem__(self, topic_id: str, time: int, /) -> None:
        noted = "UPDATE memd_topic SET retained = greatest(retained, %s) WHERE topic = %s"
        self._database.again(lambda connection: connection.execute(noted, (time, topic_id)))


def _erasures_in(rows: Rows) -> list[Erasure]:
    try:
        return [msgspec.json.decode(data, type=Erasure) for data in rows.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"an erasure in the database cannot be read ({error}); update memd on this machine") from None
