"""The ledger: this daemon's grants, stored in a file or, in a cluster, in a book of the database.

Rule: no secret is handed out before it is stored, and an ended grant never returns because the disk was full. The store
has digests; its only secret is the key that seals client ids, which grants no access by itself.

In a cluster all daemons share the grants: a code or refresh token works once, at whichever daemon it is used. A
daemon's file is then a copy, used at a start without the database.
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
from memd.store.shared.books import BookPage, SharedBook

log = logging.getLogger("memd")
SECRET_BYTES = 32
GONE = "the token with which the program was allowed this is gone; ask again"
Result = TypeVar("Result")


class _LedgerFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    key: str = ""
    """Hexadecimal digits."""
    grants: tuple[Grant, ...] = ()
    codes: dict[str, GivenCode] = {}
    """In a cluster; a file has none."""

    @classmethod
    def read(cls, data: bytes, place: str, remedy: str, changes: int = 0) -> LedgerState:
        """Return the state in a file or book. Raises StoreError: it cannot be read."""
        try:
            kept = msgspec.json.decode(data, type=cls)
            key = bytes.fromhex(kept.key)
        except ValueError as error:
            raise StoreError(f"{place}: is no list of grants ({error}); {remedy}") from None
        return LedgerState(key=key, grants=kept.grants, codes=kept.codes, changes=changes)


class GrantFile:
    """The grants in a data directory, changed by one process. Thread-safe. Raises StoreError if it cannot be read or
    changed, as `SharedGrants` does."""

    def __init__(self, files: LocalDisk, path: Path) -> None:
        self._files = files
        self._path = path
        self._state: LedgerState | None = None

    def read(self) -> LedgerState:
        """Return its content; an empty state if there is no file."""
        if self._state is None:
            self._state = LedgerState()
            if self._files.size(self._path) is not None:
                remedy = "remove it, and let the programs ask again"
                self._state = _LedgerFile.read(self._files.read(self._path), str(self._path), remedy)
        return self._state

    def change(self, work: Callable[[LedgerState], LedgerState]) -> LedgerState:
        """Replace the state by the result of `work`, durably, and return it. If writing fails, the file has no new
        grants, but ended ones stay ended."""
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
    """The grants shared by all daemons of a cluster; same members as `GrantFile`."""

    def __init__(self, book: SharedBook) -> None:
        self.book = book

    def read(self) -> LedgerState:
        """See GrantFile."""
        return self._state_of(self.book.page())

    def change(self, work: Callable[[LedgerState], LedgerState]) -> LedgerState:
        """See GrantFile."""

        def changed(data: bytes | None) -> bytes:
            state = work(self._state_of(BookPage(0, data)))
            kept = _LedgerFile(key=state.key.hex(), grants=state.grants, codes=dict(state.codes))
            return msgspec.json.encode(kept)

        return self._state_of(self.book.change(changed))

    def _state_of(self, page: BookPage) -> LedgerState:
        return _LedgerFile.read(page.data or b"{}", self.book.place, self.book.remedy, page.changes)


GrantList = GrantFile | SharedGrants


class Ledger:
    """The grants; each change is stored before its result is returned."""

    def __init__(
        self,
        file: GrantFile,
        known: Callable[[str], Principal | None],
        clock: Callable[[], float] = time.time,
        shared: SharedGrants | None = None,
    ) -> None:
        """`known`: returns the principal of a token by its SHA-256 in hexadecimal digits; None if revoked. `clock`:
        seconds since 1970. `shared`: the cluster's grants, of which the file is a copy; None without a cluster."""
        self._file = file
        self._shared = shared
        self._known = known
        self._clock = clock
        self._turn = asyncio.Lock()
        """Serializes changes on the event loop, so that only one at a time waits in a thread."""
        self._changing = threading.Lock()
        """Serializes threads: a change goes on after its client has left, beside the next one."""
        self._state = LedgerState()
        try:
            self._state = file.read()
        except StoreError as error:
            log.warning("the programs that were allowed to use memory have to ask again", extra={"error": error})

    @property
    def key(self) -> bytes:
        """Seals client ids; empty before the first registration."""
        return self._state.key

    @property
    def seen(self) -> int:
        """Number of the last change of the cluster's book that is known here."""
        return self._state.changes or -1

    async def catch_up(self) -> None:
        """Load changes by other daemons; without the database, keep the known state."""
        if self._shared is not None:
            with suppress(StoreError):  # the watch over the tokens reports it
                if await asyncio.to_thread(self._shared.book.stamp) != self.seen:
                    async with self._turn:
                        await asyncio.to_thread(self._adopt, self._shared.read)
                    await self.key_to_register()

    def live(self) -> tuple[Grant, ...]:
        """Return the live grants, oldest first."""
        return tuple(one for one in self._state.grants if self._now() < one.until and self._is_somebodys(one))

    async def key_to_register(self) -> bytes:
        """Return the key, created and stored on first use; in a cluster on the first look at the book, so that all
        daemons know it in time. Raises StoreError: it cannot be stored."""
        if not self.key:
            key = secrets.token_bytes(SECRET_BYTES)
            await self._change(lambda state: (msgspec.structs.replace(state, key=state.key or key), None))
        return self.key

    async def allow(self, permission: Permission, allowed: Allowed) -> str:
        """Return the code for a client that a person allowed. Raises StoreError: the other daemons cannot be
        informed."""
        code = new_secret()
        await self._change(lambda state: (state.allowed(permission, allowed, code, self._now()), None))
        return code

    async def tokens_for(self, asked: TokenRequest) -> Tokens:
        """Return tokens for a code or a refresh token. Raises OAuthRefused: it is not accepted; StoreError: the tokens
        cannot be stored, so they are not given."""
        return await self._change(lambda state: state.asked(asked, new_secret, self._now()))

    def acting(self, access_token: str) -> Grant | None:
        """Return the grant of a valid access token; None if it is not valid."""
        found = self._state.acting(access_token, self._now())
        return found if found is not None and self._is_somebodys(found) else None

    async def revoke(self, token: str) -> None:
        """End the grant of an access or refresh token, if valid. Raises StoreError: it has ended, but may return after
        a restart."""
        await self._change(lambda state: (state.revoked(token), None))

    async def end(self, grant_id: str) -> bool:
        """End a grant; return whether it existed. Raises StoreError: it has ended, but may return after a restart."""
        return await self._change(
            lambda state: (state.ended(grant_id), any(one.id == grant_id for one in state.grants))
        )

    async def _change(self, change: Callable[[LedgerState], tuple[LedgerState, Result | OAuthRefused]]) -> Result:
        outcome: list[Result | OAuthRefused] = []
        reasons: dict[str, str] = {}

        def work(state: LedgerState) -> LedgerState:
            if self._shared is None:  # in a cluster a token may be known, but not here yet
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
                    await asyncio.to_thread(self._adopt, self._file.read)  # ended grants
                raise
        if isinstance(outcome[0], OAuthRefused):
            raise outcome[0]
        return outcome[0]

    def _adopt(self, read: Callable[[], LedgerState], reasons: Mapping[str, str] = MappingProxyType({})) -> None:
        """Load a state, and log which programs gained or lost access.

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
                with suppress(StoreError):  # the next change writes the copy
                    self._file.change(lambda _: msgspec.structs.replace(self._state, codes={}))

    def _is_somebodys(self, grant: Grant) -> bool:
        """Return whether the token that allowed it is still valid."""
        return self._known(grant.principal_sha256) is not None

    def _now(self) -> int:
        return int(self._clock())


def _told(grant: Grant) -> dict[str, str]:
    fields = {"grant": grant.id, "program": grant.program, "principal": grant.principal}
    return fields | {"rights": " ".join(grant.rights), "topics": " ".join(grant.topics) or "all"}


def new_secret() -> str:
    """Return a new code or token, of 256 bits."""
    return secrets.token_urlsafe(SECRET_BYTES)
