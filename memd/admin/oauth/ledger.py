"""The ledger: who may use memory over OAuth, with which tokens; stored in a file or, in a cluster, in a book of the
database.

Rule: no secret is handed out before it is stored, and an ended grant never returns because the disk was full. Of a
secret only its SHA-256 is stored, except for the key that seals client ids, which grants no access by itself. Codes and
refresh tokens work once. A second use ends the grant: one of the two users is a thief (OAuth 2.1 section 4.3.1).

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
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from memd.admin.oauth.protocol import Permission, TokenRequest
from memd.errors import OAuthRefused, StoreError
from memd.principals import Principal, Right, digest_of, surplus
from memd.store.disk import LocalDisk, replace_file
from memd.store.shared.books import BookPage, SharedBook, encode_named, named

log = logging.getLogger("memd")
SECRET_BYTES = 32
CODE_SECONDS = 60
ACCESS_SECONDS = 3_600
REFRESH_SECONDS = 30 * 86_400
"""Counted from the last issue of tokens: a program unused for so long has to ask again."""
GRANTS_MAX = 256
CODES_MAX = 256
"""Limit for all principals together; the oldest code of the principal with the most is evicted (`memd.principals`)."""
SPENT_MAX = 32
"""Most recently used-up refresh tokens per grant that are still recognized. An older one is refused too, without ending
the grant."""
REFRESH_UNKNOWN = (
    "the refresh token is not known: it was revoked, not used for 30 days, or made room for another, as there are at "
    f"most {GRANTS_MAX} programs; ask again"
)
_KEY, _GRANT, _CODE = "key", "grant/", "code/"
"""Names in the book of a cluster."""
Result = TypeVar("Result")


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """The person's answer."""

    principal: str
    principal_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Digest of the token with which it was allowed; the grant ends with that token."""
    rights: tuple[Right, ...]
    topics: tuple[str, ...]
    """Patterns; empty: all topics of the principal."""


class GivenGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A grant as shown to people."""

    id: str
    program: str
    """The program's own name for itself."""
    principal: str
    rights: tuple[Right, ...]
    topics: tuple[str, ...]
    created_at: int
    until: int
    """Expiry unless it is used before; in seconds since 1970, like `created_at`."""


class Grant(Allowed, frozen=True, kw_only=True):
    """One person's permission for one program. Times are in seconds since 1970, digests hexadecimal."""

    id: str
    program: str = msgspec.field(name="client_name")
    client_sha256: str
    """Digest of the client's id."""
    created_at: int
    access_sha256: str = ""
    access_until: int = 0
    refresh_sha256: str = ""
    until: int = msgspec.field(default=0, name="refresh_until")
    spent: tuple[str, ...] = ()
    """Digests of used-up refresh tokens, newest last."""

    @property
    def given(self) -> GivenGrant:
        """The grant without its digests."""
        return GivenGrant(**{name: getattr(self, name) for name in GivenGrant.__struct_fields__})


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request for tokens (RFC 6749 section 5.1)."""

    access_token: str
    token_type: str = "Bearer"  # noqa: S105  # a kind of token
    expires_in: int = ACCESS_SECONDS
    refresh_token: str
    scope: str


class GivenCode(msgspec.Struct, frozen=True):
    """A code issued to a program."""

    permission: Permission
    allowed: Allowed
    until: int
    grant_id: str = ""
    """The grant made from it; empty until it is used."""


class LedgerState(msgspec.Struct, kw_only=True):
    """All grants and the outstanding codes, as a change finds them and leaves them. `now`: seconds since 1970."""

    key: bytes = b""
    """Seals client ids; empty before the first registration."""
    grants: dict[str, Grant] = {}
    """By their ids, oldest first."""
    codes: dict[str, GivenCode] = {}
    """By their SHA-256, oldest first. A file has none, because codes do not survive a restart."""
    changes: int = 0
    """Number of changes of the book."""
    made_room: dict[str, str] = {}
    """Reasons for grants evicted by the last change, by their ids."""

    def copy(self) -> LedgerState:
        """Return a copy to be changed."""
        return LedgerState(key=self.key, grants={**self.grants}, codes={**self.codes}, changes=self.changes)

    def end(self, is_over: Callable[[Grant], bool]) -> bool:
        """End grants; return whether there were any."""
        ended = [one.id for one in self.grants.values() if is_over(one)]
        for grant_id in ended:
            del self.grants[grant_id]
        return bool(ended)

    def allow(self, permission: Permission, allowed: Allowed, now: int) -> str:
        """Return a code for a client that a person allowed."""
        code = _new_secret()
        self.codes = {digest: one for digest, one in self.codes.items() if now < one.until}
        self.codes[_sha256(code)] = GivenCode(permission, allowed, now + CODE_SECONDS)
        digests = list(self.codes)
        for leaving in surplus(((one.allowed.principal, 1) for one in self.codes.values()), CODES_MAX):
            del self.codes[digests[leaving.place]]
        return code

    def tokens_for(self, asked: TokenRequest, now: int) -> Tokens:
        """Return tokens for a code or refresh token, which is then used up. Raises OAuthRefused: it is unknown or
        another client's, or was used before, which ends the grant."""
        return (self._refreshed if asked.verifier is None else self._exchanged)(asked, now)

    def _exchanged(self, asked: TokenRequest, now: int) -> Tokens:
        digest = _sha256(asked.secret)
        code = self.codes.get(digest)
        if code is None or code.permission.client_id != asked.client_id or now >= code.until:
            raise _void(f"the code is not known: it is another program's, or older than {CODE_SECONDS} s")
        if code.grant_id:  # the code may have been stolen (RFC 6749 section 4.1.2)
            self.grants.pop(code.grant_id, None)
            raise _void("the code has served before, so its tokens are void; ask again")
        grant_id = _sha256(_new_secret())[:8]
        self.codes[digest] = msgspec.structs.replace(code, grant_id=grant_id)
        if not code.permission.is_shown_by(asked.verifier or ""):
            raise _void("code_verifier does not belong to the code_challenge; ask again")
        if asked.redirect_uri not in (None, code.permission.redirect_uri):
            raise _void("redirect_uri is another one than before; ask again")
        self._make_room(now, code.allowed.principal)
        grant = Grant(
            id=grant_id,
            program=code.permission.client.name,
            client_sha256=_sha256(asked.client_id),
            created_at=now,
            **msgspec.structs.asdict(code.allowed),
        )
        return self._given(grant, now)

    def _refreshed(self, asked: TokenRequest, now: int) -> Tokens:
        digest, client = _sha256(asked.secret), _sha256(asked.client_id)
        if self.end(lambda grant: digest in grant.spent):
            raise _void("the refresh token has served before; its grant is void, ask again")
        for grant in self.grants.values():
            if digest == grant.refresh_sha256 and client == grant.client_sha256 and now < grant.until:
                return self._given(msgspec.structs.replace(grant, spent=(*grant.spent, digest)[-SPENT_MAX:]), now)
        raise _void(REFRESH_UNKNOWN)

    def _given(self, grant: Grant, now: int) -> Tokens:
        access, refresh = _new_secret(), _new_secret()
        self.grants[grant.id] = msgspec.structs.replace(
            grant,
            access_sha256=_sha256(access),
            access_until=now + ACCESS_SECONDS,
            refresh_sha256=_sha256(refresh),
            until=now + REFRESH_SECONDS,
        )
        return Tokens(access_token=access, refresh_token=refresh, scope=" ".join(grant.rights))

    def _make_room(self, now: int, principal: str) -> None:
        """End expired grants and, to leave room for one more grant of this principal, the least recently used ones of
        the principal with the most."""
        self.end(lambda one: now >= one.until)
        live = sorted(self.grants.values(), key=lambda one: one.until)
        for leaving in surplus([*((one.principal, 1) for one in live), (principal, 1)], GRANTS_MAX):
            grant_id = live[leaving.place].id
            self.made_room[grant_id] = leaving.why(GRANTS_MAX, "programs")
            del self.grants[grant_id]


Change = Callable[[LedgerState], Any]
"""Changes a state in place."""


class _LedgerFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    key: str = ""
    """Hexadecimal digits."""
    grants: tuple[Grant, ...] = ()


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
                try:
                    kept = msgspec.json.decode(self._files.read(self._path), type=_LedgerFile)
                    self._state = LedgerState(key=bytes.fromhex(kept.key), grants={one.id: one for one in kept.grants})
                except ValueError as error:
                    why = f"is no list of grants ({error}); remove it, and let the programs ask again"
                    raise StoreError(f"{self._path}: {why}") from None
        return self._state

    def change(self, work: Change) -> LedgerState:
        """Change the grants, durably, and return them. If writing fails, the file has no new grants, but ended ones
        stay ended."""
        before = self.read()
        work(after := before.copy())
        if (before.key, before.grants) != (after.key, after.grants):
            kept = _LedgerFile(key=after.key.hex(), grants=tuple(after.grants.values()))
            try:
                replace_file(self._files, self._path, msgspec.json.encode(kept))
            except StoreError:
                left = {grant_id: one for grant_id, one in before.grants.items() if grant_id in after.grants}
                self._state = LedgerState(key=before.key, grants=left, codes=after.codes)
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

    def change(self, work: Change) -> LedgerState:
        """See GrantFile."""

        def changed(data: bytes | None) -> bytes:
            work(state := self._state_of(BookPage(0, data)))
            rows: dict[str, object] = {_KEY: state.key.hex()} if state.key else {}
            rows |= {_GRANT + grant_id: one for grant_id, one in state.grants.items()}
            return encode_named(rows | {_CODE + digest: one for digest, one in state.codes.items()})

        return self._state_of(self.book.change(changed))

    def _state_of(self, page: BookPage) -> LedgerState:
        state = LedgerState(changes=page.changes)
        try:
            for name, data in named(page.data).items():
                if name.startswith(_GRANT):
                    state.grants[name.removeprefix(_GRANT)] = msgspec.json.decode(data, type=Grant)
                elif name.startswith(_CODE):
                    state.codes[name.removeprefix(_CODE)] = msgspec.json.decode(data, type=GivenCode)
                elif name == _KEY:
                    state.key = bytes.fromhex(msgspec.json.decode(data, type=str))
        except ValueError as error:
            raise StoreError(f"{self.book.place}: is no list of grants ({error}); {self.book.remedy}") from None
        state.grants = dict(sorted(state.grants.items(), key=lambda item: (item[1].created_at, item[0])))
        state.codes = dict(sorted(state.codes.items(), key=lambda item: item[1].until))
        return state


GrantList = GrantFile | SharedGrants


class Ledger:
    """The grants of a daemon; each change is stored before its result is returned. Its coroutines raise StoreError: the
    change cannot be stored, so nothing is given; what it ended has ended, but may return after a restart."""

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
        return tuple(one for one in self._state.grants.values() if self._now() < one.until and self._is_somebodys(one))

    def acting(self, access_token: str) -> Grant | None:
        """Return the grant of a valid access token; None if it is not valid."""
        digest = _sha256(access_token)
        found = next((one for one in self._state.grants.values() if one.access_sha256 == digest), None)
        is_valid = found is not None and self._now() < found.access_until and self._is_somebodys(found)
        return found if is_valid else None

    async def key_to_register(self) -> bytes:
        """Return the key, created and stored on first use; in a cluster on the first look at the book, so that all
        daemons know it in time."""

        def make(state: LedgerState) -> None:
            state.key = state.key or secrets.token_bytes(SECRET_BYTES)

        if not self.key:
            await self._change(make)
        return self.key

    async def allow(self, permission: Permission, allowed: Allowed) -> str:
        """Return the code for a client that a person allowed."""
        return await self._change(lambda state: state.allow(permission, allowed, self._now()))

    async def tokens_for(self, asked: TokenRequest) -> Tokens:
        """Return tokens for a code or a refresh token. Raises OAuthRefused: it is not accepted."""
        return await self._change(lambda state: state.tokens_for(asked, self._now()))

    async def revoke(self, token: str) -> None:
        """End the grant of an access or refresh token, if valid (RFC 7009 section 2.1)."""
        digest = _sha256(token)
        await self._change(lambda state: state.end(lambda one: digest in (one.access_sha256, one.refresh_sha256)))

    async def end(self, grant_id: str) -> bool:
        """End a grant; return whether it existed."""
        return await self._change(lambda state: state.end(lambda one: one.id == grant_id))

    async def _change(self, change: Callable[[LedgerState], Result]) -> Result:
        outcome: list[Result | OAuthRefused] = []
        reasons: dict[str, str] = {}

        def work(state: LedgerState) -> None:
            if self._shared is None:  # in a cluster a token may be known, but not here yet
                state.end(lambda one: not self._is_somebodys(one))
            before = {**state.grants}
            try:
                outcome[:] = [change(state)]
            except OAuthRefused as refusal:  # it may have ended a grant
                outcome[:] = [refusal]
            if state.end(lambda one: before.get(one.id) != one and not self._is_somebodys(one)):
                gone = "the token with which the program was allowed this is gone; ask again"
                outcome[:] = [_void(gone)]
            reasons.update(state.made_room)

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
        """Load a state, and log which programs gained or lost access. `reasons`: see `LedgerState.made_room`."""
        with self._changing:
            old = self._state.grants
            self._state = read()
            new = self._state.grants
            for one in (one for grant_id, one in new.items() if grant_id not in old):
                log.info("a program may use memory", extra=_told(one))
            for one in (one for grant_id, one in old.items() if grant_id not in new):
                log.info("a program may no longer use memory", extra=_told(one) | {"reason": reasons.get(one.id)})
            if self._shared is not None:
                with suppress(StoreError):  # the next change writes the copy
                    self._file.change(self._copy_to)

    def _copy_to(self, state: LedgerState) -> None:
        state.key, state.grants = self._state.key, self._state.grants

    def _is_somebodys(self, grant: Grant) -> bool:
        """Return whether the token that allowed it is still valid."""
        return self._known(grant.principal_sha256) is not None

    def _now(self) -> int:
        return int(self._clock())


def _told(grant: Grant) -> dict[str, str | None]:
    fields: dict[str, str | None] = {"grant": grant.id, "program": grant.program, "principal": grant.principal}
    return fields | {"rights": " ".join(grant.rights), "topics": " ".join(grant.topics) or "all"}


def _void(why: str) -> OAuthRefused:
    return OAuthRefused("invalid_grant", why)


def _new_secret() -> str:
    """Return a new code or token, of 256 bits."""
    return secrets.token_urlsafe(SECRET_BYTES)


def _sha256(secret: str) -> str:
    """Return the SHA-256 of a secret as received, in hexadecimal digits."""
    return digest_of(secret).hex()
