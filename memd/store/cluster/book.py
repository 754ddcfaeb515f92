"""Books: small lists that every daemon of a cluster knows: tokens, grants, erasures, …

Rule: whoever changes a book holds its row of `memd_count` until that is done, and counts it up: changes come one after
the other, and who knows the count knows whether there is something new. Daemons ask for the count once a second.
PostgreSQL could tell them (LISTEN) a second sooner; but what it tells is lost with the connection, no pooler of
transactions passes it on, and it costs a connection of its own, so they would have to ask all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import msgspec

from memd.errors import InDoubt
from memd.store.cluster.database import Connection, Database

BookName = Literal["tokens", "grants", "erasures", "retention", "daemons"]
Result = TypeVar("Result")
Rows = Mapping[str, str]
"""JSON by name."""
_HELD_MS = 10_000
"""How long a change may be interrupted (its process was stopped) before the database lets others go on."""


class BookPage(msgspec.Struct, frozen=True):
    """Rows of a book, and how often it had been changed by then."""

    changes: int
    rows: Rows


class SharedBook:
    """One book. Any thread. Its methods raise StoreError where the database cannot be asked."""

    def __init__(self, database: Database, name: BookName) -> None:
        self.name = name
        self.place = f"{database.place} (memd_book, {name})"
        self._database = database

    def changes(self) -> int:
        """How often the book was changed."""
        count = "SELECT changes FROM memd_count WHERE book = %s"
        return int(self._database.ask(lambda connection: connection.execute(count, (self.name,)).fetchone()[0]))

    def read(self, after: int = 0) -> BookPage:
        """Return the rows that were written by later changes than the `after`th; what was removed is not told."""
        return self._database.ask(lambda connection: self.read_on(connection, after))

    def read_on(self, connection: Connection, after: int = 0) -> BookPage:
        """See `read`; asked on this connection."""
        both = (
            "SELECT count.changes, book.name, book.data FROM memd_count count"
            " LEFT JOIN memd_book book ON book.book = count.book AND book.changed > %s"
            " WHERE count.book = %s ORDER BY book.name"
        )
        found = connection.execute(both, (after, self.name)).fetchall()
        return BookPage(found[0][0], {name: data for _, name, data in found if name is not None})

    def change(self, work: Callable[[Rows], Rows]) -> BookPage:
        """Change the book, alone and durably; return what it is then.

        Args:
            work: takes all rows, returns what they are to be; its exceptions leave the book as it was. It is called
                again where the connection was lost and nothing of it was done.

        Raises:
            InDoubt: whether it was done is not known.
            StoreWriteFailed: it was not.
        """
        tried: tuple[Rows, Rows] = {}, {}

        def attempt(connection: Connection) -> BookPage:
            nonlocal tried
            with connection.transaction():
                connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = {_HELD_MS}")
                counted = "UPDATE memd_count SET changes = changes + 1 WHERE book = %s RETURNING changes"
                (changes,) = connection.execute(counted, (self.name,)).fetchone()
                rows = dict(connection.execute("SELECT name, data FROM memd_book WHERE book = %s", (self.name,)))
                if not _is_done(rows, *tried):
                    tried = rows, dict(work(rows))
                    self._write(connection, changes, *tried)
                    rows = dict(tried[1])
            return BookPage(changes, rows)

        return self._again(attempt)

    def put(self, name: str, data: str | None) -> None:
        """Write one row, or remove it (None), whatever the others are."""

        def attempt(connection: Connection) -> None:
            with connection.transaction():
                counted = "UPDATE memd_count SET changes = changes + 1 WHERE book = %s RETURNING changes"
                (changes,) = connection.execute(counted, (self.name,)).fetchone()
                rows: Rows = {} if data is None else {name: data}
                self._write(connection, changes, {name: ""}, rows)

        self._again(attempt)

    def _again(self, attempt: Callable[[Connection], Result]) -> Result:
        try:
            return self._database.again(attempt)
        except InDoubt as error:
            raise InDoubt(
                f"{self.place}: the connection was lost, and nobody knows whether the change was made; look, and make "
                "it again if it was not"
            ) from error

    def _write(self, connection: Connection, changes: int, before: Rows, after: Rows) -> None:
        gone = [name for name in before if name not in after]
        if gone:
            connection.execute("DELETE FROM memd_book WHERE book = %s AND name = ANY(%s)", (self.name, gone))
        written = {name: data for name, data in after.items() if before.get(name) != data}
        if written:
            connection.execute(
                "INSERT INTO memd_book (book, name, data, changed)"
                " SELECT %s, name, data, %s FROM unnest(%s::text[], %s::text[]) AS new (name, data)"
                " ON CONFLICT (book, name) DO UPDATE SET data = excluded.data, changed = excluded.changed",
                (self.name, changes, list(written), list(written.values())),
            )


def _is_done(rows: Rows, before: Rows, after: Rows) -> bool:
    """Whether what led from `before` to `after` is in these rows already."""
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return bool(changed) and all(rows.get(name) == after.get(name) for name in changed)
