"""The ledger: the grants of this daemon, and the list that keeps them: a file, or in a cluster a book of the database.

Rule: nothing is handed out before it is kept, and nothing that ended comes back because the disk was full. The list has
digests and no secret but the key that seals the ids of clients, which opens nothing by itself.

In a cluster all daemons have the same grants: a code and a refresh token are taken once, whichever daemons they are
shown to. A daemon's file is a copy then, for a start while nobody can be asked.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from memd.admin.oauth.protocol import Allowed, GivenCode, Grant, LedgerState, Permission, TokenRequest, Tokens
from memd.errors import OAuthRefused, StoreError
from memd.principals import Principal
from memd.store.disk import LocalDisk, replace_file
from memd.store.shared.books import BookPage, Rows, SharedBook

log = logging.getLogger("memd")
SECRET_BYTES = 32
GONE = "the token with which the program was allowed this is gone; ask again"
_KEY, _GRANT, _CODE = "key", "grant/", "code/"
Result = TypeVar("Result")


class _LedgerFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    key: str
    """In hexadecimal digits."""
    grants: tuple[Grant, ...] = ()


class GrantFile:
    """The grants in a data directory, which one process changes. Any thread; raises StoreError where it cannot be read
    or changed, as `SharedGrants` does."""

    def __init__(self, files: LocalDisk, path: Path) -> None:
        self._files = files
        self._path = path
        self._state: LedgerState | None = None

    def read(self) -> LedgerState:
        """Return all that is in it; nothing where there is no file."""
        if self._state is None:
            self._state = LedgerState()
            if self._files.size(self._path) is not None:
                try:
                    kept = msgspec.json.decode(self._files.read(self._path), type=_LedgerFile)
                    self._state = LedgerState(key=bytes.fromhex(kept.key), grants=kept.grants)
                except ValueError as error:
                    why = f"is no list of grants ({error}); remove it, and let the programs ask again"
                    raise StoreError(f"{self._path}: {why}") from None
        return self._state

    def change(self, work: Callable[[LedgerState], LedgerState]) -> LedgerState:
        """Replace its state by what `work` makes of it, durably; return it. Where it cannot be written, nothing new is
        in it, but what has ended has ended."""
        before = self.read()
        after = work(before)
        if (before.key, before.grants) != (after.key, after.grants):
            ids, kept = {one.id for one in after.grants}, _LedgerFile(key=after.key.hex(), grants=after.grants)
            try:
                replace_file(self._files, self._path, msgspec.json.encode(kept))
            except StoreError:
                left = before.without(lambda one: one.id not in ids)
                self._state = msgspec.structs.replace(left, codes=after.codes)
                raise
        self._state = after
        return after


class SharedGrants:
    """The grants that all daemons of a cluster know, with the members of `GrantFile`."""

    def __init__(self, book: SharedBook) -> None:
        self.book = book

    def read(self) -> LedgerState:
        """See GrantFile."""
        return self._state_in(self.book.read())

    def change(self, work: Callable[[LedgerState], LedgerState]) -> LedgerState:
        """See GrantFile."""

        def rows_after(rows: Rows) -> Rows:
            state = work(self._state_in(BookPage(0, rows)))
            told: dict[str, object] = {_KEY: state.key.hex()} if state.key else {}
            told |= {_GRANT + one.id: one for one in state.grants}
            told |= {_CODE + digest: one for digest, one in state.codes.items()}
            return {name: msgspec.json.encode(value).decode() for name, value in told.items()}

        return self._state_in(self.book.change(rows_after))

    def _state_in(self, page: BookPage) -> LedgerState:
        """The state that is in the book; raises StoreError where a later memd wrote it."""
        grants, codes, key = list[Grant](), list[tuple[str, GivenCode]](), b""
        try:
            for name, data in page.rows.items():
                if name.startswith(_GRANT):
                    grants.append(msgspec.json.decode(data, type=Grant))
                elif name.startswith(_CODE):
                    codes.append((name.removeprefix(_CODE), msgspec.json.decode(data, type=GivenCode)))
                elif name == _KEY:
                    key = bytes.fromhex(msgspec.json.decode(data, type=str))
        except ValueError as error:
            why = f"cannot be read ({error}); update memd on this machine"
            raise StoreError(f"the grants in the database {why}") from None
        return LedgerState(
            key=key,
            grants=tuple(sorted(grants, key=lambda one: (one.created_at, one.id))),
            codes=dict(sorted(codes, key=lambda item: item[1].until)),
            changes=page.changes,
        )


GrantList = GrantFile | SharedGrants


class Ledger:
    """The grants, each change of which is kept before anybody hears of it."""

    def __init__(
        self,
        file: GrantFile,
        known: Callable[[str], Principal | None],
        clock: Callable[[], float] = time.time,
        shared: SharedGrants | None = None,
    ) -> None:
        """`known`: finds whose token one is, by its SHA-256 in hexadecimal digits; None: nobody's any more. `clock`:
        seconds since 1970. `shared`: those of a cluster, of which the file is a copy; None: there is none."""
        self._file = file
        self._shared = shared
        self._known = known
        self._clock = clock
        self._turn = asyncio.Lock()
        """One change waits in a thread at a time, whoever asks."""
        self._changing = threading.Lock()
        """Held in threads alone: one whose client has left goes on beside the next."""
        self._state = LedgerState()
        try:
            self._state = file.read()
        except StoreError as error:
            log.warning("the programs that were allowed to use memory have to ask again", extra={"error": error})

    @property
    def key(self) -> bytes:
        """Seals the ids of clients; empty before the first one registered."""
        return self._state.key

    @property
    def seen(self) -> int:
        """Up to which change of the cluster's book this is known."""
        return self._state.changes or -1

    async def catch_up(self) -> None:
        """Know what other daemons have given and ended meanwhile; where nobody can be asked, what was known."""
        if self._shared is not None:
            with suppress(StoreError):  # the watch over the tokens has told it
                if await asyncio.to_thread(self._shared.book.changes) != self.seen:
                    async with self._turn:
                        await asyncio.to_thread(self._adopt, self._shared.read)
                    await self.key_to_register()

    def live(self) -> tuple[Grant, ...]:
        """Return the grants that are not over, oldest first."""
        return tuple(one for one in self._state.grants if self._now() < one.until and self._is_somebodys(one))

    async def key_to_register(self) -> bytes:
        """Return that key, made and kept when it is first needed; in a cluster with the first look at the book, so that
        all daemons know it before it is needed. Raises StoreError: it cannot be kept."""
        if not self.key:
            key = secrets.token_bytes(SECRET_BYTES)
            await self._change(lambda state: (msgspec.structs.replace(state, key=state.key or key), None))
        return self.key

    async def allow(self, permission: Permission, allowed: Allowed) -> str:
        """Return the code for a client that a person allowed to go on. Raises StoreError: it cannot be told to the
        other daemons."""
        code = new_secret()
        await self._change(lambda state: (state.allowed(permission, allowed, code, self._now()), None))
        return code

    async def tokens_for(self, asked: TokenRequest) -> Tokens:
        """Return tokens for a code or a refresh token. Raises OAuthRefused: there are none for it; StoreError: they
        cannot be kept, so they are not given."""
        return await self._change(lambda state: state.asked(asked, new_secret, self._now()))

    def acting(self, access_token: str) -> Grant | None:
        """Return the grant for which an access token stands now; None if it stands for none."""
        found = self._state.acting(access_token, self._now())
        return found if found is not None and self._is_somebodys(found) else None

    async def revoke(self, token: str) -> None:
        """End the grant of an access or refresh token, if it is one. Raises StoreError: it has ended, but may be back
        after a restart."""
        await self._change(lambda state: (state.revoked(token), None))

    async def end(self, grant_id: str) -> bool:
        """End a grant; whether there was one. Raises StoreError: it has ended, but may be back after a restart."""
        return await self._change(
            lambda state: (state.ended(grant_id), any(one.id == grant_id for one in state.grants))
        )

    async def _change(self, change: Callable[[LedgerState], tuple[LedgerState, Result | OAuthRefused]]) -> Result:
        outcome: list[Result | OAuthRefused] = []
        reasons: dict[str, str] = {}

        def work(state: LedgerState) -> LedgerState:
            if self._shared is None:  # elsewhere a token may be known that is not known here yet
                state = state.without(lambda one: not self._is_somebodys(one))
            after, result = change(state)  # a refusal may have ended a grant
            if not all(map(self._is_somebodys, set(after.grants).difference(state.grants))):
                after, result = state, OAuthRefused("invalid_grant", GONE)
            outcome[:] = [result]
            reasons.update(after.made_room)
            return msgspec.structs.replace(after, made_room={})

        async with self._turn:
            try:
                await asyncio.to_thread(self._adopt, lambda: (self._shared or self._file).change(work), reasons)
            except StoreError:
                if self._shared is None:
                    await asyncio.to_thread(self._adopt, self._file.read)  # what has ended
                raise
        if isinstance(outcome[0], OAuthRefused):
            raise outcome[0]
        return outcome[0]

    def _adopt(self, read: Callable[[], LedgerState], reasons: Mapping[str, str] = MappingProxyType({})) -> None:
        """Know this state from now on, and log which programs may use the memory now and could not before, or no more.

        `reasons`: see `LedgerState.made_room`.
        """
        with self._changing:
            old = {one.id: one for one in self._state.grants}
            self._state = read()
            new = {one.id: one for one in self._state.grants}
            for one in (one for one in new.values() if one.id not in old):
                log.info("a program may use memory", extra=_told(one))
            for one in (one for one in old.values() if one.id not in new):
                why = {"reason": reasons[one.id]} if one.id in reasons else {}
                log.info("a program may no longer use memory", extra={**_told(one), **why})
            if self._shared is not None:
                with suppress(StoreError):  # the copy is written with the next change
                    self._file.change(lambda _: msgspec.structs.replace(self._state, codes={}))

    def _is_somebodys(self, grant: Grant) -> bool:
        """Whether the token with which it was allowed is one of memd's still."""
        return self._known(grant.principal_sha256) is not None

    def _now(self) -> int:
        return int(self._clock())


def _told(grant: Grant) -> dict[str, str]:
    fields = {"grant": grant.id, "program": grant.program, "principal": grant.principal}
    return fields | {"rights": " ".join(grant.rights), "topics": " ".join(grant.topics) or "all"}


def new_secret() -> str:
    """Another code or token, of 256 bits."""
    return secrets.token_urlsafe(SECRET_BYTES)
