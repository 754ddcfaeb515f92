"""The tokens that `memd token` keeps, in a file of the data directory; and the small books that the daemons of a
cluster share instead: tokens, grants, erasures, and the progress of retention.

Rule: tokens are changed by one command at a time, and as a whole or not at all; only the SHA-256 of a secret is stored.
The settings' own list is `auth.tokens`; a reader refuses a name or a token that is in both.

A book is a topic `memd.…`, which no client can name. Most are one row, replaced as a whole after reading the previous
one; erasures are a permanent row each. A daemon keeps a copy of the tokens for a start without the database.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from memd.errors import InDoubt, StoreError, StoreLocked, StoreWriteFailed
from memd.settings.loading import stamp_of
from memd.settings.model import TokenSettings
from memd.store.disk import LocalDisk, replace_file
from memd.store.erasure import Erasure, Erasures
from memd.store.layout import TOKENS_LOCK_NAME, TOKENS_NAME, followed_file, topic_names_in
from memd.store.shared.postgres import News, Row, SharedLog, Stream


class KeptToken(TokenSettings, frozen=True, kw_only=True):
    """A token, and the creation time of its secret, in microseconds since the epoch."""

    since: int


class _TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[KeptToken, ...]
    version: Literal[1] = 1


class TokenList:
    """The stored tokens: a file in the data directory. Thread-safe."""

    place: str
    """Location, for messages."""
    is_shared = False
    """Whether other daemons have it too, so that it may change without a command on this machine."""

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        self.path = data_dir / TOKENS_NAME
        self.place = str(self.path)
        self._files = files
        self._lock = data_dir / TOKENS_LOCK_NAME

    def stamp(self) -> object:
        """Return a value that changes with the list. Raises StoreError: it cannot be read."""
        return stamp_of(self.path)

    def read(self) -> tuple[KeptToken, ...]:
        """Return the tokens. Raises StoreError: the list cannot be read, or is invalid."""
        if self._files.size(self.path) is None:
            return ()
        try:
            return msgspec.json.decode(self._files.read(self.path), type=_TokenFile).tokens
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(
                f"{self.path}: is no list of tokens ({error}); put back the file as it was, or remove it and make the "
                "tokens anew with `memd token add`"
            ) from None

    def read_at_start(self) -> tuple[KeptToken, ...]:
        """Return the tokens, from this machine's copy if the database is unreachable; raises as `read`."""
        return self.read()

    def change(self, work: Callable[[tuple[KeptToken, ...]], Sequence[KeptToken]]) -> None:
        """Replace the list by the result of `work`, durably; an exception of `work` leaves the list unchanged.

        Raises:
            StoreError: the list is unchanged (StoreLocked: another command changes it now).
            InDoubt: it is unknown whether it changed.
        """
        try:
            lock = self._files.lock(self._lock)
        except StoreLocked:
            raise StoreLocked(f"{self.path.parent}: another `memd token` changes the tokens now; try again") from None
        with lock:
            self.keep(work(self.read()))

    def keep(self, tokens: Sequence[KeptToken]) -> None:
        """Replace the list, durably. Raises StoreWriteFailed: it is unchanged."""
        replace_file(self._files, self.path, msgspec.json.format(msgspec.json.encode(_TokenFile(tuple(tokens)))))


# The books of a cluster

Rows = Mapping[str, str]
"""JSON by name."""
BOOK_PREFIX = "memd."
_TRIES = 50


class BookPage(msgspec.Struct, frozen=True):
    """A book, and the number of its changes so far."""

    changes: int
    rows: Rows


class SharedBook:
    """One book. Thread-safe. Its methods raise StoreError if the database is unreachable."""

    def __init__(self, kept: SharedLog, name: str) -> None:
        self.place = f"{kept.place} ({BOOK_PREFIX}{name})"
        self._kept, self._topic = kept, BOOK_PREFIX + name
        self._page, self._generation = BookPage(0, {}), 0
        self._mutex = threading.Lock()

    def changes(self) -> int:
        """Return the number of changes to the book."""
        return self.read().changes

    def read(self) -> BookPage:
        """Return all rows; they are transferred only after a change."""
        known = self._page
        news = self._kept.since(self._topic, {"kept": known.changes})
        with self._mutex:
            self._generation = news.generation
            for row in news.of("kept"):
                if row.last > self._page.changes:
                    self._page = BookPage(row.last, msgspec.json.decode(row.data, type=dict[str, str]))
            return self._page

    def change(self, work: Callable[[Rows], Rows]) -> BookPage:
        """Change the book, durably; return the new state.

        Args:
            work: takes all rows, returns the new ones; its exceptions leave the book unchanged. It is called again if
                another daemon was faster.

        Raises:
            InDoubt: it is unknown whether the book changed.
            StoreWriteFailed: it did not.
        """
        for _ in range(_TRIES):
            page = self.read()
            rows = dict(work(page.rows))
            if rows == page.rows:
                return page
            data, last = msgspec.json.encode(rows), page.changes + 1
            try:
                if self._kept.append(
                    self._topic, page.changes, Row("kept", last, data, is_base=True), generation=self._generation
                ):
                    return BookPage(last, rows)
            except InDoubt as error:
                with suppress(StoreError):
                    if self.read() == BookPage(last, rows):
                        return self._page
                raise InDoubt(
                    f"{self.place}: the connection was lost, and nobody knows whether the change was made; look, and "
                    "make it again if it was not"
                ) from error
        raise StoreWriteFailed(f"{self.place}: others change it all the time; try again")


class SharedTokens(TokenList):
    """The tokens of `memd token`. See TokenList."""

    is_shared = True

    def __init__(self, book: SharedBook, copy: TokenList | None = None) -> None:
        """`copy`: where to save the tokens after reading; None for nowhere."""
        self.place = book.place
        self._book = book
        self._copy = copy

    def stamp(self) -> object:
        """See TokenList."""
        return self._book.changes()

    def read(self) -> tuple[KeptToken, ...]:
        """See TokenList."""
        tokens = self._tokens(self._book.read().rows)
        if self._copy is not None:
            with suppress(StoreError):  # the next change saves it
                self._copy.keep(tokens)
        return tokens

    def read_at_start(self) -> tuple[KeptToken, ...]:
        """See TokenList."""
        try:
            return self.read()
        except StoreError:
            return self._copy.read() if self._copy is not None else ()

    def change(self, work: Callable[[tuple[KeptToken, ...]], Sequence[KeptToken]]) -> None:
        """See TokenList."""
        self._book.change(lambda rows: {one.name: _json(one) for one in work(self._tokens(rows))})

    def _tokens(self, rows: Rows) -> tuple[KeptToken, ...]:
        try:
            tokens = [msgspec.json.decode(data, type=KeptToken) for data in rows.values()]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(f"{self.place}: is no list of tokens ({error}); update memd on this machine") from None
        return tuple(sorted(tokens, key=lambda one: (one.since, one.name)))


class SharedTimes:
    """The time up to which retention has checked each topic, for all daemons. Thread-safe; raises StoreError."""

    def __init__(self, book: SharedBook) -> None:
        self._book = book

    def get(self, topic_id: str, default: int, /) -> int:
        """Return the time of a topic."""
        return int(self._book.read().rows.get(topic_id, default))

    def __setitem__(self, topic_id: str, time: int, /) -> None:
        self._book.change(lambda rows: {**rows, topic_id: str(max(time, int(rows.get(topic_id, 0))))})


class SharedErasures(Erasures):
    """The erasures shared by all daemons, a row each; the last one of an id counts. See Erasures. Thread-safe."""

    _STREAM: Stream = "hot"

    def __init__(self, kept: SharedLog, files: LocalDisk, data_dir: Path) -> None:
        super().__init__()
        self._kept, self._topic = kept, BOOK_PREFIX + "erasures"
        self._files, self._file = files, followed_file(data_dir)
        self._is_new = files.size(self._file) is None and not topic_names_in(files, data_dir)
        """Whether nothing here can have been erased before."""
        self._read = self._generation = 0
        self._own: set[int] = set()
        self._unfollowed: dict[int, Erasure] = {}
        self._mutex = threading.Lock()

    def write(self, erasure: Erasure) -> None:
        """See Erasures. Message digests are not sent: a guess of the text could be verified with them."""
        data = msgspec.json.encode(msgspec.structs.replace(erasure, digests=b""))
        with self._mutex:
            self._files.make_directory(self._file.parent)
            self._own.add(erasure.id)
            for _ in range(_TRIES):
                self._hear()
                last = self._read + 1
                if self._kept.append(
                    self._topic, self._read, Row(self._STREAM, last, data), generation=self._generation
                ):
                    self._known[erasure.id] = erasure
                    return
        raise StoreWriteFailed(f"{self._kept.place}: others erase all the time; try again")

    def catch_up(self) -> list[Erasure]:
        """Read other daemons' erasures; return the finished ones not yet followed here. Raises StoreError: the
        database is unreachable, or a later memd wrote it."""
        with self._mutex:
            self._hear()
            return list(self._unfollowed.values())

    def note_followed(self) -> None:
        """Note that no text of the erasures read so far is left in this daemon's copies. Raises StoreWriteFailed."""
        with self._mutex:
            self._files.make_directory(self._file.parent)
            replace_file(self._files, self._file, str(self._read).encode())
            self._unfollowed.clear()

    def _hear(self) -> None:
        followed = self._followed()
        while True:
            news: News = self._kept.since(self._topic, {self._STREAM: self._read})
            self._generation = news.generation
            for row in news.of(self._STREAM):
                erasure = _erasure(row.data)
                known = self._known.get(erasure.id)
                kept_digests = known.digests if known is not None and erasure.done_at is None else b""
                self._known[erasure.id] = msgspec.structs.replace(erasure, digests=kept_digests)
                self._read = row.last
                if erasure.done_at is not None and erasure.id not in self._own and row.last > followed:
                    self._unfollowed[erasure.id] = erasure
            if not news.rows:
                return

    def _followed(self) -> int:
        if self._is_new and not self._read:
            return 1 << 62
        with suppress(StoreError, ValueError):
            return int(self._files.read(self._file)) if self._files.size(self._file) is not None else 0
        return 0


def _erasure(data: bytes) -> Erasure:
    try:
        return msgspec.json.decode(data, type=Erasure)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"an erasure in the database cannot be read ({error}); update memd on this machine") from None


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
