"""The running daemon's tokens, their reloading and operations; the proof by which commands recognize the daemon.

Rule: a list that is unreadable or being written changes nothing: its tokens stay valid and the log says why. The other
list is still loaded, so that a token can be revoked while the settings are wrong. A lost list never opens what was
closed. A list shared with other daemons is watched whether or not a token is needed yet.

No route makes, shows or revokes a token; `memd token` does so on the machine itself, for users who may read the data
directory anyway. The proof's secret is new at each start and never leaves its file (0600, in the data directory). A
proof is valid only for the address that was asked, so relaying the challenge from another address is useless. Without
`auth.token`, commands send a token derived from the secret.
"""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from memd.admin.parts import DaemonParts
from memd.admin.routing import Body, Extent, get, post
from memd.clock import steady_now
from memd.errors import ConfigError, MemdError, StoreError
from memd.principals import OWNER, Principal, Principals, Right
from memd.settings.loading import FileStamp, SettingsSource, stamp_of, token_problems
from memd.settings.model import AuthSettings, TokenSettings, known_principals, token_changes
from memd.store.layout import TOKENS_NAME
from memd.store.shared.books import TokenList

if TYPE_CHECKING:  # a command reads the declarations of operations and needs none of these
    from memd.ingest.topic import Inquiry
    from memd.telemetry.tasks import Tasks


class OwnRights(msgspec.Struct, frozen=True):
    """A principal's own name, topics and rights."""

    name: str
    topics: tuple[str, ...]
    """Patterns; `*` matches any characters."""
    rights: tuple[Right, ...]


class ReloadBody(Body, frozen=True):
    """The body of `POST /memd/tokens/reload`: empty."""


class TokensRead(msgspec.Struct, frozen=True):
    """The tokens now match the lists."""

    reloaded: bool = True
    changes: str = ""
    """Names of new, removed and changed tokens, in words."""


@get("/memd/me", "any")
async def me(parts: DaemonParts, who: Principal) -> OwnRights:
    """The name, the topics and the rights of the token that asks."""
    return OwnRights(who.name, who.topics, tuple(sorted(who.rights)))


@post(
    "/memd/tokens/reload",
    "admin",
    act="settings",
    touches=lambda read: Extent(detail=f"tokens {read.changes}" if read.changes else "no token has changed"),
)
async def reload_tokens(parts: DaemonParts, body: ReloadBody) -> TokensRead:
    """Read the tokens of the settings and of `memd token` again: one that was revoked is refused from now on."""
    return TokensRead(changes=await parts.token_watch.reload())


def user_name() -> str:
    """Return the system's name, or number, of the user who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


PROOF = "/memd/proof"
_CONTEXT = b"memd: this daemon has the data directory\n"


class Proof(msgspec.Struct, frozen=True):
    """The answer to a challenge."""

    proof: str
    """HMAC-SHA256 of the address and the challenge with the secret, in hexadecimal digits."""


@get(PROOF, "open")
async def prove(
    parts: DaemonParts,
    *,
    challenge: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", description="64 hexadecimal digits, chosen at random.")],
) -> Proof:
    """The proof that this daemon has the data directory; for commands, see docs/format.md."""
    return Proof(proof_of(parts.token_watch.secret, parts.local_url, challenge))


def command_token(secret: str) -> str:
    """Return the token of commands on this machine: a user who can read the data directory is its owner."""
    return hmac.new(secret.encode(), b"memd: a command of the owner\n", hashlib.sha256).hexdigest()


def new_secret() -> str:
    """Return a secret of 256 bits as 64 hexadecimal digits; also used as a challenge."""
    return secrets.token_hex(32)


def proof_of(secret: str, url: str, challenge: str) -> str:
    """Return the only correct answer to a challenge."""
    message = _CONTEXT + f"{url}\n{challenge}".encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


log = logging.getLogger("memd")

LOOK_SECONDS = 1.0
HEAR_SECONDS = 1.0
"""Limit for a request with an unknown token to wait for news from other daemons."""
SETTLED_SECONDS = 0.5
"""A settings file is read once unchanged for so long, because editors empty it before writing."""
Stamps = tuple[object, FileStamp]
"""Stamps of `memd token`'s list and of the settings file."""


class TokenWatch:
    """Keeps the principals in step with the lists. Used on the event loop."""

    def __init__(self, auth: AuthSettings, listed: TokenList, source: SettingsSource | None) -> None:
        """`auth`: settings at the start. `listed`: the list of `memd token`. `source`: where to read the settings
        again; None: nowhere."""
        self.principals = Principals()
        self.secret = new_secret()
        """Proves to commands that the daemon has the data directory."""
        if not auth.token:  # otherwise commands send auth.token
            self.principals.lend(command_token(self.secret), OWNER)
        self._auth = auth
        """As last read from the settings; `_kept`: `memd token`'s list at that time."""
        self._kept: tuple[TokenSettings, ...] = ()
        self._taken = AuthSettings()
        """The source of the present principals."""
        self._reading = asyncio.Lock()
        self._listed = listed
        self._source = source
        self._seen: Stamps = (None, None)
        self._trouble: StoreError | None = None
        """The error of the last look at the list; None if it worked."""
        self._followers: list[Callable[[], Awaitable[None]]] = []
        self._heard: dict[str, Callable[[], object]] = {TOKENS_NAME: lambda: self._seen[0]}
        """For books shared with other daemons: returns the last change known here."""
        self._tasks: Tasks | None = None
        self._noted: Callable[[str, str], None] = lambda places, changes: None
        self._looking = asyncio.Lock()
        self._looks, self._look_began = 0, 0.0

    def load(self) -> None:
        """Read the lists at the start, blocking. Raises MemdError: a list is invalid."""
        self._seen = self._stamps()
        self._take(self._auth, self._listed.read_at_start())

    def also(self, book: str, follower: Callable[[], Awaitable[None]], heard: Callable[[], object]) -> None:
        """Watch another shared book together with the lists. `heard`: returns the last change known here."""
        self._followers.append(follower)
        self._heard[book] = heard

    async def reload(self, noted: Callable[[str], None] = lambda changes: None) -> str:
        """Read the lists again: that of `memd token`, and the settings if they changed and nobody is writing them.

        Args:
            noted: called with the changes of tokens, in words, even if this raises; not called without changes.

        Returns:
            The same words; empty without changes.

        Raises:
            MemdError: a list is invalid and its tokens stay; the other one was loaded.
        """
        async with self._reading:
            for follower in self._followers:
                await follower()
            before = await asyncio.to_thread(self._stamps)
            if before[1] != self._seen[1]:
                await asyncio.sleep(SETTLED_SECONDS)
            auth, kept, problems = await asyncio.to_thread(self._read, before[1])
            if changes := self._take(auth, kept):
                noted(changes)
            told = {"tokens": len(auth.tokens) + len(kept), "changes": changes or None}
            log.info("the tokens were read again", extra=told)
            if problems:
                raise problems[0]
            return changes

    def changed_settings(self) -> list[str]:
        """See `SettingsSource.changed`; none without a source."""
        return [] if self._source is None else self._source.changed(self._auth)

    async def tend(self, tasks: Tasks, noted: Callable[[str, str], None]) -> None:
        """Watch the lists every second, until cancelled. If no token is needed it ends: `memd token` then notifies the
        daemon. `noted`: called with the changed files and the changes of tokens."""
        if self._listed.is_shared or not self.principals.is_open:
            self._tasks, self._noted = tasks, noted
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await self.catch_up()

    async def hear(self, inquiry: Inquiry) -> None:
        """Look at the lists before a request is let in, but only for a limited time. `inquiry`: asked about the books
        after the request came."""
        if self._trouble is None:
            await asyncio.wait([inquiry.answer], timeout=HEAR_SECONDS)
            if not inquiry.answer.done() or inquiry.answer.exception() is not None:
                return
            changes = {book: news.heads.get("kept", 0) for book, news in inquiry.answer.result().items()}
            if all(changes[book] == heard() for book, heard in self._heard.items()):
                return
        is_stuck = self._looking.locked() and steady_now() - self._look_began > HEAR_SECONDS
        if self._tasks is not None and self._trouble is None and not is_stuck:
            await asyncio.wait([self._tasks.spawn(self.catch_up(), "hearing of tokens")], timeout=HEAR_SECONDS)

    async def catch_up(self) -> None:
        """Look at the lists once, unless another caller's look began after this call."""
        looks = self._looks
        async with self._looking:
            if self._looks == looks:
                self._looks, self._look_began = looks + 1, steady_now()
                await self._look()

    async def _look(self) -> None:
        had_trouble = self._trouble is not None
        stamps = await asyncio.to_thread(self._stamps)
        if had_trouble != (self._trouble is not None):
            known = {"known": len(self.principals.names)}
            if self._trouble is None:
                log.info("the tokens can be asked for again", extra=known)
            else:
                log.warning("the tokens cannot be asked for", extra={**known, "error": self._trouble})
        places = self._listed.place, "" if self._source is None else str(self._source.path)
        others = [place for place, now, then in zip(places, stamps, self._seen, strict=True) if now != then]
        if others:
            try:
                await self.reload(partial(self._noted, ", ".join(others)))
            except MemdError as error:
                log.error("these tokens stay as they were", extra={"error": error})
        elif self._trouble is None:
            for follower in self._followers:
                await follower()

    def _read(self, settled: FileStamp) -> tuple[AuthSettings, tuple[TokenSettings, ...], list[MemdError]]:
        """Read the lists; an unreadable one keeps its value. `settled`: previous stamp of the settings file."""
        auth, kept, problems = self._auth, self._kept, list[MemdError]()
        tokens_stamp, settings_stamp = self._stamps()
        try:
            kept = self._listed.read()
        except MemdError as error:
            problems.append(error)
        is_settled = settings_stamp == settled
        if self._source is not None and is_settled and settings_stamp != self._seen[1]:
            try:
                read, path = self._source.read().auth, self._source.path
                if path is not None and settings_stamp is not None and settings_stamp[1] == 0:
                    raise ConfigError(f"{path}: is empty, as an interrupted write leaves it; write it anew")
                is_settled = self._stamps()[1] == settled
                auth = read if is_settled else auth
            except MemdError as error:
                problems.append(error)
        self._seen = tokens_stamp, settings_stamp if is_settled else self._seen[1]
        return auth, kept, problems

    def _take(self, auth: AuthSettings, kept: tuple[TokenSettings, ...]) -> str:
        """Load these tokens. Raises ConfigError: they contradict each other, and the previous ones stay.

        Returns:
            The changes, in words.
        """
        self._auth, self._kept = auth, kept
        for _, problem in token_problems((*auth.tokens, *kept), auth.token):
            raise ConfigError(f"{self._listed.place} beside auth.tokens: {problem} (`memd token list`)")
        before, self._taken = self._taken, msgspec.structs.replace(auth, tokens=(*auth.tokens, *kept))
        self.principals.exchange(known_principals(self._taken))
        return token_changes(before, self._taken)

    def _stamps(self) -> Stamps:
        """Return the stamps; for an unavailable list the last one seen."""
        try:
            listed, self._trouble = self._listed.stamp(), None
        except StoreError as error:
            listed, self._trouble = self._seen[0], error
        return listed, stamp_of(None if self._source is None else self._source.path)
