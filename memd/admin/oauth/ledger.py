"""The ledger: the grants of this daemon, and the file that keeps them over a restart.

Rule: nothing is handed out before it is on the disk, and nothing that ended comes back because the disk was full. The
file has digests and no secret but the key that seals the ids of clients, which opens nothing by itself.

In a cluster all daemons have the same grants, in its database: a code and a refresh token are taken once, whichever
daemons they are shown to.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec

from memd.admin.oauth.grants import Allowed, GivenCode, Grant, Grants, Tokens
from memd.admin.oauth.protocol import Permission, TokenRequest
from memd.errors import OAuthRefused, StoreError
from memd.principals import Principal
from memd.store.files import Files, replace_file

log = logging.getLogger("memd")
SECRET_BYTES = 32
Result = TypeVar("Result")


class LedgerFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file, in JSON."""

    version: int = 1
    key: str
    """In hexadecimal digits: seals the ids of clients."""
    grants: tuple[Grant, ...] = ()


def kept_file(files: Files, path: Path) -> LedgerFile | None:
    """Read the file; None: there is none.

    Raises:
        StoreError: it cannot be read.
    """
    if files.size(path) is None:
        return None
    try:
        kept = msgspec.json.decode(files.read(path), type=LedgerFile)
        bytes.fromhex(kept.key)
    except ValueError as error:
        raise StoreError(f"{path}: is no list of grants ({error}); remove it, and let the programs ask again") from None
    return kept


def end_kept(files: Files, path: Path, grant_id: str) -> bool:
    """End a grant in the file, where no daemon runs; whether there was one.

    Raises:
        StoreError: the file cannot be read or written.
    """
    kept = kept_file(files, path)
    if kept is None or grant_id not in (one.id for one in kept.grants):
        return False
    left = tuple(one for one in kept.grants if one.id != grant_id)
    replace_file(files, path, msgspec.json.encode(msgspec.structs.replace(kept, grants=left)))
    return True


class Ledger:
    """The grants, each change of which is on the disk before anybody hears of it. See `SharedLedger` too."""

    def __init__(
        self,
        files: Files,
        path: Path,
        writer: Executor,
        known: Callable[[str], Principal | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            writer: has one thread, so that the last version is the one that stays.
            known: finds whose token one is, by its SHA-256 in hexadecimal digits; None: nobody's any more.
            clock: seconds since 1970.
        """
        self._files = files
        self._path = path
        self._writer = writer
        self._known = known
        self._clock = clock
        self._changing = asyncio.Lock()
        self.key = b""
        """Seals the ids of clients; empty before the first one registered."""
        self._grants = self._read()

    async def catch_up(self) -> None:
        """Know what other daemons have given and ended meanwhile; where nobody can be asked, what was known."""

    def live(self) -> tuple[Grant, ...]:
        """Return the grants that are not over, oldest first."""
        return tuple(one for one in self._grants.all() if self._now() < one.refresh_until and self._is_somebodys(one))

    async def key_to_register(self) -> bytes:
        """Return that key, made and kept when it is first needed.

        Raises:
            StoreError: it cannot be kept.
        """
        async with self._changing:
            if not self.key:
                key = secrets.token_bytes(SECRET_BYTES)
                await self._save(key)
                self.key = key
            return self.key

    async def allow(self, permission: Permission, allowed: Allowed) -> str:
        """Return the code for a client that a person allowed to go on; it is not kept over a restart.

        Raises:
            StoreError: it cannot be told to the other daemons.
        """
        return self._grants.allow(permission, allowed, self._now())

    async def tokens_for(self, asked: TokenRequest) -> Tokens:
        """Return tokens for a code or a refresh token.

        Raises:
            OAuthRefused: there are none for it.
            StoreError: they cannot be kept, so they are not given.
        """
        return await self._changed(lambda grants: grants.tokens_for(asked, self._now()))

    def acting(self, access_token: str) -> Grant | None:
        """Return the grant for which an access token stands now; None if it stands for none."""
        found = self._grants.acting(access_token, self._now())
        return found if found is not None and self._is_somebodys(found) else None

    async def revoke(self, token: str) -> None:
        """End the grant of an access or refresh token, if it is one.

        Raises:
            StoreError: it has ended, but may be back after a restart.
        """
        await self._changed(lambda grants: grants.revoke(token))

    async def end(self, grant_id: str) -> bool:
        """End a grant; whether there was one.

        Raises:
            StoreError: it has ended, but may be back after a restart.
        """
        return await self._changed(lambda grants: grants.end(grant_id))

    async def _changed(self, change: Callable[[Grants], Result]) -> Result:
        async with self._changing:
            before = self._grants.all()
            for one in before:
                if not self._is_somebodys(one):
                    self._grants.end(one.id)
            try:
                return change(self._grants)
            finally:  # also where it refuses: that may have ended a grant
                if self._grants.all() != before:
                    await self._save_or_take_back(before)

    async def _save_or_take_back(self, before: Iterable[Grant]) -> None:
        try:
            await self._save(self.key)
        except StoreError:
            self._grants.take_back(before)
            raise
        finally:
            tell_changes(before, self._grants.all(), self._grants.made_room)

    async def _save(self, key: bytes) -> None:
        data = msgspec.json.encode(LedgerFile(key=key.hex(), grants=self._grants.all()))
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, replace_file, self._files, self._path, data)

    def _read(self) -> Grants:
        """Read the file, if there is one; one that cannot be read is as none: clients have to ask again."""
        kept = None
        try:
            kept = kept_file(self._files, self._path)
        except StoreError as error:
            log.warning("the programs that were allowed to use memory have to ask again", extra={"error": error})
        if kept is not None:
            self.key = bytes.fromhex(kept.key)
        return Grants(new_secret, kept.grants if kept is not None else ())

    def _is_somebodys(self, grant: Grant) -> bool:
        """Whether the token with which it was allowed is one of memd's still."""
        return self._known(grant.principal_sha256) is not None

    def _now(self) -> int:
        return int(self._clock())


def new_secret() -> str:
    """Another code or token, of 256 bits."""
    return secrets.token_urlsafe(SECRET_BYTES)


def tell_changes(before: Iterable[Grant], after: Iterable[Grant], reasons: Mapping[str, str]) -> None:
    """Log which programs may use the memory now and could not before, and the other way round.

    `reasons`: see `Grants.made_room`.
    """
    old, new = {one.id: one for one in before}, {one.id: one for one in after}
    for told, grants, others in (
        ("a program may use memory", new, old),
        ("a program may no longer use memory", old, new),
    ):
        for one in grants.values():
            if one.id not in others:
                fields = {"grant": one.id, "program": one.client_name, "principal": one.principal}
                fields |= {"rights": " ".join(one.rights), "topics": " ".join(one.topics) or "all"}
                why = {"reason": reasons[one.id]} if one.id in reasons and grants is old else {}
                log.info(told, extra={**fields, **why})


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
        reasons: dict[str, str] = {}

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
            reasons.update(grants.made_room)
            return rows_of(LedgerState(state.key, grants.all(), grants.codes))

        async with self._changing:
            await self._adopt(await asyncio.to_thread(self._book.change, work), reasons)
        if isinstance(outcome[0], OAuthRefused):
            raise outcome[0]
        return outcome[0]

    async def _adopt(self, page: Any, reasons: Mapping[str, str] = MappingProxyType({})) -> None:
        before, state = self._grants.all(), state_in(page.rows)
        self._grants, self.key, self.seen = Grants(new_secret, state.grants), state.key, page.changes
        if before != state.grants:
            tell_changes(before, state.grants, reasons)
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
