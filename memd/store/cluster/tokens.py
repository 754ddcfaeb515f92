"""The tokens of `memd token` in a cluster: a book of the database, and a copy of what this machine knew last.

Rule: the copy is for a start while the database is away: who was known is known then. It changes nothing, and nobody
who is not in it is let in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from memd.errors import StoreError
from memd.store.cluster.book import Rows, SharedBook
from memd.store.cluster.database import Connection
from memd.store.token_list import KeptToken, TokenFile


class SharedTokens:
    """See TokenList."""

    is_shared = True

    def __init__(self, book: SharedBook, copy: TokenFile | None = None) -> None:
        """`copy`: where what was read is noted, None if nowhere."""
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
            with suppress(StoreError):  # it is noted with the next change
                self._copy.keep(tokens)
        return tokens

    def read_on(self, connection: Connection) -> tuple[KeptToken, ...]:
        """Return the tokens, asked for on this connection."""
        return self._tokens(self._book.read_on(connection).rows)

    def read_at_start(self) -> tuple[KeptToken, ...]:
        """See TokenList."""
        try:
            return self.read()
        except StoreError:
            return self._copy.read() if self._copy is not None else ()

    def change(self, work: Callable[[tuple[KeptToken, ...]], Sequence[KeptToken]]) -> None:
        """See TokenList."""
        self._book.change(lambda rows: {one.name: _row(one) for one in work(self._tokens(rows))})

    def _tokens(self, rows: Rows) -> tuple[KeptToken, ...]:
        try:
            tokens = [msgspec.json.decode(data, type=KeptToken) for data in rows.values()]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(f"{self.place}: is no list of tokens ({error}); update memd on this machine") from None
        return tuple(sorted(tokens, key=lambda one: (one.since, one.name)))


def _row(one: KeptToken) -> str:
    return msgspec.json.encode(one).decode()
