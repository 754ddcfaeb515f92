"""The ledger of a cluster: grants, codes and the key of the clients' ids are a book of the database.

Rule: a change is made to what the database has, alone, and holds here once that is done; so a code serves once and a
refresh token once, whichever daemons they are shown to. Codes are kept too, by their SHA-256: a program may show its
code to another daemon than the one that gave it. Where the database is away, who is known goes on being known, and
nothing is given or ended. The file in the data directory is a copy, for a start while that is so.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from memd.admin.oauth.grants import Allowed, GivenCode, Grant, Grants
from memd.admin.oauth.ledger import SECRET_BYTES, Ledger, Result, new_secret, tell_changes
from memd.admin.oauth.protocol import Permission
from memd.errors import OAuthRefused, StoreError

Rows = Mapping[str, str]
GONE = "the token with which the program was allowed this is gone; ask again"
_KEY, _GRANT, _CODE = "key", "grant/", "code/"


class GrantBook(Protocol):
    """The book of the database. Counterpart: memd/store/shared/books.py."""

    def changes(self) -> int:
        """How often it was changed."""

    def read(self) -> Any:
        """Its `changes` and `rows`."""

    def change(self, work: Callable[[Rows], Rows]) -> Any:
        """Replace its rows by what `work` makes of them; return as `read`."""


class LedgerState(msgspec.Struct, frozen=True):
    """All that is in the book."""

    key: bytes
    grants: tuple[Grant, ...]
    """Oldest first."""
    codes: Mapping[str, GivenCode]
    """By their SHA-256, the oldest first."""


class SharedLedger(Ledger):
    """The grants that all daemons of a cluster know."""

    def __init__(self, book: GrantBook, *copied: Any, **more: Any) -> None:
        """`copied`, `more`: those of Ledger, for the copy."""
        super().__init__(*copied, **more)
        self._book = book
        self.seen = -1
        """Up to which change of the book this is known."""

    async def catch_up(self) -> None:
        """See Ledger."""
        with suppress(StoreError):  # the watch over the tokens has told it
            if await asyncio.to_thread(self._book.changes) == self.seen:
                return
            async with self._changing:
                await self._adopt(await asyncio.to_thread(self._book.read))
            await self.key_to_register()

    async def key_to_register(self) -> bytes:
        """See Ledger. It is made with the first look at the book, so that all daemons know it before it is needed."""
        if not self.key:
            key = secrets.token_bytes(SECRET_BYTES)

            def keyed(rows: Rows) -> Rows:
                state = state_in(rows)
                return rows_of(msgspec.structs.replace(state, key=state.key or key))

            async with self._changing:
                await self._adopt(await asyncio.to_thread(self._book.change, keyed))
        return self.key

    async def allow(self, permission: Permission, allowed: Allowed) -> str:
        """See Ledger."""
        return await self._changed(lambda grants: grants.allow(permission, allowed, self._now()))

    async def _changed(self, change: Callable[[Grants], Result]) -> Result:
        outcome: list[Result | OAuthRefused] = []

        def work(rows: Rows) -> Rows:
            state = state_in(rows)
            grants = Grants(new_secret, state.grants, state.codes)
            try:
                result: Result | OAuthRefused = change(grants)
                if not all(map(self._is_somebodys, set(grants.all()).difference(state.grants))):
                    grants, result = Grants(new_secret, state.grants, state.codes), OAuthRefused("invalid_grant", GONE)
            except OAuthRefused as refusal:  # it may have ended a grant
                result = refusal
            outcome[:] = [result]
            return rows_of(LedgerState(state.key, grants.all(), grants.codes))

        async with self._changing:
            await self._adopt(await asyncio.to_thread(self._book.change, work))
        if isinstance(outcome[0], OAuthRefused):
            raise outcome[0]
        return outcome[0]

    async def _adopt(self, page: Any) -> None:
        before, state = self._grants.all(), state_in(page.rows)
        self._grants, self.key, self.seen = Grants(new_secret, state.grants), state.key, page.changes
        if before != state.grants:
            tell_changes(before, state.grants)
        with suppress(StoreError):  # the copy is written with the next change
            await self._save(self.key)


def state_in(rows: Rows) -> LedgerState:
    """Return the state that is in the rows of the book.

    Raises:
        StoreError: a later memd wrote them.
    """
    try:
        grants = [msgspec.json.decode(data, type=Grant) for name, data in rows.items() if name.startswith(_GRANT)]
        codes = {
            name.removeprefix(_CODE): msgspec.json.decode(data, type=GivenCode)
            for name, data in rows.items()
            if name.startswith(_CODE)
        }
        key = bytes.fromhex(msgspec.json.decode(rows[_KEY], type=str)) if _KEY in rows else b""
    except ValueError as error:
        raise StoreError(f"the grants in the database cannot be read ({error}); update memd on this machine") from None
    by_age = sorted(codes.items(), key=lambda item: item[1].until)
    return LedgerState(key, tuple(sorted(grants, key=lambda one: (one.created_at, one.id))), dict(by_age))


def rows_of(state: LedgerState) -> Rows:
    """Return the rows of a state."""
    grants = {_GRANT + one.id: _json(one) for one in state.grants}
    codes = {_CODE + digest: _json(one) for digest, one in state.codes.items()}
    return {**({_KEY: _json(state.key.hex())} if state.key else {}), **grants, **codes}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
