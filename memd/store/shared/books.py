"""The tokens that `memd token` keeps, in a file of the data directory; and the small books that the daemons of a
cluster share instead: tokens, grants, erasures, and the progress of retention.

Rule: tokens are changed by one command at a time, and as a whole or not at all; only the SHA-256 of a secret is stored.
The settings' own list is `auth.tokens`; a reader refuses a name or a token that is in both.

A book is a topic `memd.…`, which no client can name. Most are one row, replaced as a whole after reading the previous
one: JSON by name. Erasures are a permanent row each. Daemons of the version before read and write the same rows. A
daemon keeps a copy of the tokens for a start without the database.
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
from memd.store import layout
from memd.store.disk import LocalDisk, replace_file
from memd.store.erasure import Erasure, Erasures
from memd.store.shared.postgres import News, Row, SharedLog, Stream


class KeptToken(TokenSettings, frozen=True, kw_only=True):
    """A token, and the creation time of its secret, in microseconds since the epoch."""

    since: int


class _TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[KeptToken, ...]
    version: Literal[1] = 1


Work = Callable[[bytes | None], bytes]
"""Returns the next content of a book; may be called again."""
_TRIES = 50


class BookPage(msgspec.Struct, frozen=True):
    """The content of a book, and the number of its changes so far."""

    changes: int
    data: bytes | None


class FileBook:
    """A file that one command at a time replaces as a whole. Thread-safe."""

    is_shared = False
    """Whether other daemons have it too, so that it may change without a command on this machine."""
    remedy = "put back the file as it was, or remove it and make the tokens anew with `memd token add`"

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        self.path = data_dir / layout.TOKENS_NAME
        self.place = str(self.path)
        """Location, for messages."""
        self._files = files
        self._lock = data_dir / layout.TOKENS_LOCK_NAME

    def stamp(self) -> object:
        """Return a value that changes with the content. Raises StoreError: it cannot be read."""
        return stamp_of(self.path)

    def read(self) -> bytes | None:
        """Return the content; None if there is none yet. Raises StoreError: it cannot be read."""
        return self._files.read(self.path) if self._files.size(self.path) is not None else None

    def change(self, work: Work) -> object:
        """Replace the content by the result of `work`, durably; an exception of `work` leaves it unchanged. Raises
        StoreError: it is unchanged (StoreLocked: another command changes it now); InDoubt: it is unknown whether it
        changed."""
        try:
            lock = self._files.lock(self._lock)
        except StoreLocked:
            raise StoreLocked(f"{self.path.parent}: another `memd token` changes the tokens now; try again") from None
        with lock:
            return self.write(work(self.read()))

    def write(self, data: bytes) -> object:
        """Replace the content, durably. Raises StoreWriteFailed: it is unchanged."""
        return replace_file(self._files, self.path, data)


class SharedBook:
    """One book of a cluster. Thread-safe. Its methods raise StoreError if the database is unreachable."""

    is_shared = True
    remedy = "update memd on this machine"

    def __init__(self, kept: SharedLog, name: str) -> None:
        """`name`: one of `layout.BOOK_NAMES`."""
        self.place = f"{kept.place} ({name})"
        self._kept, self._topic = kept, name
        self._page, self._generation = BookPage(0, None), 0
        self._mutex = threading.Lock()

    def stamp(self) -> int:
        """Return the number of changes to the book."""
        return self.page().changes

    def read(self) -> bytes | None:
        """See FileBook."""
        return self.page().data

    def page(self) -> BookPage:
        """Return the content and the number of its changes; it is transferred only after one."""
        news = self._kept.since(self._topic, {"kept": self._page.changes})
        with self._mutex:
            self._generation = news.generation
            for row in news.of("kept"):
                if row.last > self._page.changes:
                    self._page = BookPage(row.last, row.data)
            return self._page

    def change(self, work: Work) -> BookPage:
        """See FileBook; return the new content. `work` is called again if another daemon was faster."""
        for _ in range(_TRIES):
            page = self.page()
            if (data := work(page.data)) == page.data:
                return page
            new = BookPage(page.changes + 1, data)
            row = Row("kept", new.changes, data, is_base=True)
            try:
                if self._kept.append(self._topic, page.changes, row, generation=self._generation):
                    return new
            except InDoubt as error:
                with suppress(StoreError):
                    if self.page() == new:
                        return new
                raise InDoubt(
                    f"{self.place}: the connection was lost, and nobody knows whether the change was made; look, and "
                    "make it again if it was not"
                ) from error
        raise StoreWriteFailed(f"{self.place}: others change it all the time; try again")


class TokenList:
    """The tokens of `memd token`, in the file of a data directory, or for all daemons of a cluster. Thread-safe."""

    def __init__(self, book: FileBook | SharedBook, copy: FileBook | None = None) -> None:
        """`copy`: where to save the tokens after reading; None for nowhere."""
        self.place, self.is_shared, self.stamp = book.place, book.is_shared, book.stamp
        self._book, self._copy = book, copy

    def read(self) -> tuple[KeptToken, ...]:
        """Return the tokens. Raises StoreError: the list cannot be read, or is invalid."""
        tokens = self._tokens(self._book.read())
        if self._copy is not None:
            with suppress(StoreError):  # the next change saves it
                self._copy.write(_file_of(tokens))
        return tokens

    def read_at_start(self) -> tuple[KeptToken, ...]:
        """Return the tokens, from this machine's copy if the database is unreachable; raises as `read`."""
        try:
            return self.read()
        except StoreError:
            if self._copy is None:
                raise
            return self._tokens(self._copy.read())

    def change(self, work: Callable[[tuple[KeptToken, ...]], Sequence[KeptToken]]) -> None:
        """Replace the list by the result of `work`; see `FileBook.change`."""
        encoded = _book_of if self.is_shared else _file_of
        self._book.change(lambda data: encoded(work(self._tokens(data))))

    def _tokens(self, data: bytes | None) -> tuple[KeptToken, ...]:
        try:
            if not self.is_shared:
                return () if data is None else msgspec.json.decode(data, type=_TokenFile).tokens
            tokens = (msgspec.json.decode(one, type=KeptToken) for one in named(data).values())
            return tuple(sorted(tokens, key=lambda one: (one.since, one.name)))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(f"{self.place}: is no list of tokens ({error}); {self._book.remedy}") from None


def _file_of(tokens: Sequence[KeptToken]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(_TokenFile(tuple(tokens))))


def _book_of(tokens: Sequence[KeptToken]) -> bytes:
    return encode_named({one.name: one for one in tokens})


def named(data: bytes | None) -> dict[str, str]:
    """Return the JSON in a book by its names. Raises msgspec.MsgspecError: it is none."""
    return msgspec.json.decode(data or b"{}", type=dict[str, str])


def encode_named(values: Mapping[str, object]) -> bytes:
    """Return the content of a book."""
    return msgspec.json.encode({name: msgspec.json.encode(value).decode() for name, value in values.items()})


class SharedTimes:
    """The time up to which retention has checked each topic, for all daemons. Thread-safe; raises StoreError."""

    def __init__(self, kept: SharedLog) -> None:
        self._book = SharedBook(kept, layout.RETENTION_NAME)

    def get(self, topic_id: str, default: int, /) -> int:
        """Return the time of a topic."""
        return int(named(self._book.read()).get(topic_id, default))

    def __setitem__(self, topic_id: str, time: int, /) -> None:
        def later(data: bytes | None) -> bytes:
            times = named(data)
            return msgspec.json.encode(times | {topic_id: str(max(time, int(times.get(topic_id, 0))))})

        self._book.change(later)


class SharedErasures(Erasures):
    """The erasures shared by all daemons, a row each; the last one of an id counts. See Erasures. Thread-safe."""

    _STREAM: Stream = "hot"

    def __init__(self, kept: SharedLog, files: LocalDisk, data_dir: Path) -> None:
        super().__init__()
        self._kept, self._topic = kept, layout.ERASURES_NAME
        self._with_digests: dict[int, frozenset[int]] = {}
        """The numbers of rows with digests, and the erasures that those belong to."""
        self._files, self._file = files, layout.followed_file(data_dir)
        self._is_new = files.size(self._file) is None and not layout.topic_names_in(files, data_dir)
        """Whether nothing here can have been erased before."""
        self._read = self._generation = 0
        self._own: set[int] = set()
        self._unfollowed: dict[int, Erasure] = {}
        self._mutex = threading.Lock()

    def write(self, erasure: Erasure) -> None:
        """See Erasures. The digests are in the row with which a request has begun, for whoever finishes it."""
        request = {**self._known, erasure.id: erasure}.values() if erasure.done_at is None else ()
        digests = {one.id: one.digests for one in request if (one.request_end or one.id) == erasure.id and one.digests}
        bare = msgspec.structs.asdict(msgspec.structs.replace(erasure, digests=b""))
        data = msgspec.json.encode(_ErasureRow(**bare, request_digests=digests))
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
                    self._take_digests_out()
                    return
        raise StoreWriteFailed(f"{self._kept.place}: others erase all the time; try again")

    def catch_up(self) -> list[Erasure]:
        """Read other daemons' erasures; return the finished ones not yet followed here. Raises StoreError: the
        database is unreachable, or a later memd wrote it."""
        with self._mutex:
            self._hear()
            self._take_digests_out()
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
                heard = _erasure_row(row.data)
                known = self._known.get(heard.id)
                digests = known.digests if known is not None and heard.done_at is None else b""
                erasure = heard.erasure(digests)
                self._known[erasure.id] = erasure
                self._take_digests_in(row.last, heard)
                self._read = row.last
                if erasure.done_at is not None and erasure.id not in self._own and row.last > followed:
                    self._unfollowed[erasure.id] = erasure
            if not news.rows:
                return

    def _take_digests_in(self, last: int, heard: _ErasureRow) -> None:
        if heard.request_digests:
            self._with_digests[last] = frozenset(heard.request_digests)
        for erasure_id, digests in heard.request_digests.items():
            if (known := self._known.get(erasure_id)) is not None and known.done_at is None:
                self._known[erasure_id] = msgspec.structs.replace(known, digests=digests)

    def _take_digests_out(self) -> None:
        """Remove the digests of finished erasures from the rows: a guess of the text could be verified with them. What
        fails is done the next time, by any daemon."""
        for last, ids in list(self._with_digests.items()):
            left = frozenset(one for one in ids if self._known[one].done_at is None)
            if left == ids:
                continue
            with suppress(StoreError):
                news = self._kept.since(self._topic, {self._STREAM: last - 1}, limit=1)
                row = _erasure_row(news.rows[0].data)
                digests = {one: digests for one, digests in row.request_digests.items() if one in left}
                data = msgspec.json.encode(msgspec.structs.replace(row, request_digests=digests))
                rows = {(self._STREAM, last): data}
                if digests == row.request_digests or self._kept.rewrite(self._topic, news.generation, rows):
                    self._with_digests[last] = left
                    if not left:
                        del self._with_digests[last]

    def _followed(self) -> int:
        if self._is_new and not self._read:
            return 1 << 62
        with suppress(StoreError, ValueError):
            return int(self._files.read(self._file)) if self._files.size(self._file) is not None else 0
        return 0


class _ErasureRow(Erasure, frozen=True, kw_only=True):
    """An erasure as the others read it."""

    request_digests: dict[int, bytes] = msgspec.field(default_factory=dict)
    """In the last row of a request: the digests of its unfinished erasures, by id."""

    def erasure(self, digests: bytes) -> Erasure:
        """Return the erasure, with its digests."""
        members = {name: getattr(self, name) for name in Erasure.__struct_fields__}
        return Erasure(**{**members, "digests": digests})


def _erasure_row(data: bytes) -> _ErasureRow:
    try:
        return msgspec.json.decode(data, type=_ErasureRow)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"an erasure in the database cannot be read ({error}); update memd on this machine") from None
