"""The tokens that a running daemon knows, read again; the operations on them; the proof by which commands know it.

Rule: a list that cannot be read, or is being written, changes nothing: whoever it let in before is let in still, and
the log says why; the other list counts all the same, so that a token is taken back also while the settings are wrong.
What was closed is never opened by a list that is gone. A list that other daemons have too is looked at whether or not
a token is needed yet.

No route makes, shows or takes back a token: that is done on the machine itself (`memd token`), by whoever may read the
data directory anyway. The secret of the proof is made anew at each start and never leaves its file (0600, in the data
directory). An answer holds for the address that was asked and no other: whoever listens there and passes the challenge
on gets one that is of no use. Where `auth.token` is not set, commands show what is derived from the secret.
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

if TYPE_CHECKING:  # a command reads the declarations of operations, and needs none of these
    from memd.ingest.topic import Inquiry
    from memd.telemetry.tasks import Tasks


class OwnRights(msgspec.Struct, frozen=True):
    """A principal, as it is told itself."""

    name: str
    topics: tuple[str, ...]
    """Patterns; `*` stands for any characters."""
    rights: tuple[Right, ...]


class ReloadBody(Body, frozen=True):
    """The body of `POST /memd/tokens/reload`: empty."""


class TokensRead(msgspec.Struct, frozen=True):
    """The tokens are as the lists have them."""

    reloaded: bool = True
    changes: str = ""
    """The names of those that are new, gone or others than before, in words."""


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
    """The system's name of the user who runs this process, or its number."""
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
    """Return the token of commands on this machine: whoever may read the data directory is its owner."""
    return hmac.new(secret.encode(), b"memd: a command of the owner\n", hashlib.sha256).hexdigest()


def new_secret() -> str:
    """A secret of 256 bits, also fit to be a challenge: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def proof_of(secret: str, url: str, challenge: str) -> str:
    """Return the only right answer to a challenge."""
    message = _CONTEXT + f"{url}\n{challenge}".encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


log = logging.getLogger("memd")

LOOK_SECONDS = 1.0
HEAR_SECONDS = 1.0
"""The longest that a request with a token that is not known waits to hear whether another daemon knows it."""
SETTLED_SECONDS = 0.5
"""A settings file that has not changed for so long is read: editors empty it before they write."""
Stamps = tuple[object, FileStamp]
"""Of the list of `memd token`, and of the settings file."""


class TokenWatch:
    """Keeps the principals as the lists have them. Belongs to the event loop."""

    def __init__(self, auth: AuthSettings, listed: TokenList, source: SettingsSource | None) -> None:
        """`auth`: the settings at the start. `listed`: the list of `memd token`. `source`: where the settings are read
        again, None if nowhere."""
        self.principals = Principals()
        self.secret = new_secret()
        """With which the daemon proves to commands that it has the data directory."""
        if not auth.token:  # else commands show that
            self.principals.lend(command_token(self.secret), OWNER)
        self._auth = auth
        """As last taken from the settings, and beside it the tokens that `memd token` kept then."""
        self._kept: tuple[TokenSettings, ...] = ()
        self._taken = AuthSettings()
        """Whom the principals are made of."""
        self._reading = asyncio.Lock()
        self._listed = listed
        self._source = source
        self._seen: Stamps = (None, None)
        self._trouble: StoreError | None = None
        """Why the list cannot be asked now whether it has changed."""
        self._followers: list[Callable[[], Awaitable[None]]] = []
        self._heard: dict[str, Callable[[], object]] = {TOKENS_NAME: lambda: self._seen[0]}
        """Of books that other daemons have too: how often they had been changed by what is known of them here."""
        self._tasks: Tasks | None = None
        self._noted: Callable[[str, str], None] = lambda places, changes: None
        self._looking = asyncio.Lock()
        self._looks, self._look_began = 0, 0.0

    def load(self) -> None:
        """Read the lists at the start, in this thread. Raises MemdError: a list is not what it should be."""
        self._seen = self._stamps()
        self._take(self._auth, self._listed.read_at_start())

    def also(self, book: str, follower: Callable[[], Awaitable[None]], heard: Callable[[], object]) -> None:
        """Have another book that daemons share looked at whenever the lists are. `heard`: up to which change it was."""
        self._followers.append(follower)
        self._heard[book] = heard

    async def reload(self, noted: Callable[[str], None] = lambda changes: None) -> str:
        """Read the lists again: that of `memd token`, and the settings if they have changed and nobody writes them now.

        Args:
            noted: is told which tokens are others than before, in words, also where it raises; not where none is.

        Returns:
            The same words; empty where none is.

        Raises:
            MemdError: a list is not what it should be, and its tokens stay; the other one has been taken.
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
        """See `SettingsSource.changed`; none where the settings came from nowhere."""
        return [] if self._source is None else self._source.changed(self._auth)

    async def tend(self, tasks: Tasks, noted: Callable[[str, str], None]) -> None:
        """Look at the lists every second, until cancelled; not where no token is needed: then `memd token` has to tell.
        `noted`: is told the files that changed, and which tokens are others than before."""
        if self._listed.is_shared or not self.principals.is_open:
            self._tasks, self._noted = tasks, noted
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await self.catch_up()

    async def hear(self, inquiry: Inquiry) -> None:
        """Look at the lists before a request is let in, waiting no longer than a request should. `inquiry`: one about
        the books, asked after the request came."""
        if self._trouble is None:
            try:
                ends = await asyncio.wait_for(asyncio.shield(inquiry.answer), HEAR_SECONDS)
            except (StoreError, TimeoutError):
                return
            changes = {book: news.heads.get("kept", 0) for book, news in ends.items()}
            if all(changes[book] == heard() for book, heard in self._heard.items()):
                return
        is_stuck = self._looking.locked() and steady_now() - self._look_began > HEAR_SECONDS
        if self._tasks is not None and self._trouble is None and not is_stuck:
            await asyncio.wait([self._tasks.spawn(self.catch_up(), "hearing of tokens")], timeout=HEAR_SECONDS)

    async def catch_up(self) -> None:
        """Look at the lists once, unless somebody else has begun to since this was called."""
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
        """The lists as they are now, or as they were where one cannot be read; `settled`: the settings' file before."""
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
        """Know these tokens from now on; raises ConfigError where they contradict each other: then those of before.

        Returns:
            Which are others than before, in words.
        """
        self._auth, self._kept = auth, kept
        for _, problem in token_problems((*auth.tokens, *kept), auth.token):
            raise ConfigError(f"{self._listed.place} beside auth.tokens: {problem} (`memd token list`)")
        before, self._taken = self._taken, msgspec.structs.replace(auth, tokens=(*auth.tokens, *kept))
        self.principals.exchange(known_principals(self._taken))
        return token_changes(before, self._taken)

    def _stamps(self) -> Stamps:
        """The stamps; of a list that cannot be asked the one that was seen."""
        try:
            listed, self._trouble = self._listed.stamp(), None
        except StoreError as error:
            listed, self._trouble = self._seen[0], error
        return listed, stamp_of(None if self._source is None else self._source.path)
