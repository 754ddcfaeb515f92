"""The rights that the daemons of a cluster share: their tokens and grants, who of them is believed, and erasures.

Rule: all of it is looked at once a second. What cannot be looked at stays as it was known, and nobody new is let in. A
daemon that has not seen the database yet knows whom it knew the last time, and sees the tokens before it sees a topic.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

import msgspec

from memd.admin.oauth.ledger import Ledger
from memd.admin.oauth.shared_ledger import SharedLedger
from memd.admin.proof import new_secret
from memd.errors import StoreError
from memd.principals import Principals, digest_of
from memd.proxy.token_watch import TokenWatch
from memd.store.cluster.book import SharedBook
from memd.store.cluster.database import Connection
from memd.store.cluster.erasures import SharedTimes
from memd.store.cluster.joining import Cluster
from memd.store.cluster.tokens import SharedTokens
from memd.store.disk import DiskFiles
from memd.store.files import Files
from memd.store.layout import GRANTS_NAME
from memd.store.token_list import TokenFile

SAID_AGAIN_SECONDS = 86_400
FORGOTTEN_SECONDS = 30 * SAID_AGAIN_SECONDS
"""A daemon that has said nothing for so long is believed no more; it said so each day while it ran."""


class SayingOfDaemon(msgspec.Struct, frozen=True):
    """A daemon, as it tells the others of itself: never its secret."""

    secret_sha256: str
    at: int
    """In seconds since 1970."""


class DaemonTrust:
    """Which daemons are believed when they ask in somebody's name. Each has a secret of its own until it ends."""

    def __init__(
        self, book: SharedBook, own_url: str, principals: Principals, clock: Callable[[], float] = time.time
    ) -> None:
        self._book = book
        self._own_url = own_url
        self._principals = principals
        self._clock = clock
        self._said_at = 0.0
        self._read = -1
        self._secret = new_secret()

    async def catch_up(self) -> None:
        """Say who this is, and hear who the others are; where nobody can be asked, those stay who were known."""
        with suppress(StoreError):  # the watch over the tokens has told it
            await asyncio.to_thread(self._catch_up)

    async def end(self) -> None:
        """Be believed no more."""
        if self._said_at:
            with suppress(StoreError):  # the secret ends with this process
                await asyncio.to_thread(self._book.put, self._own_url, None)

    def _catch_up(self) -> None:
        now = self._clock()
        if now - self._said_at > SAID_AGAIN_SECONDS:
            saying = SayingOfDaemon(digest_of(self._secret).hex(), int(now))
            self._book.put(self._own_url, msgspec.json.encode(saying).decode())
            self._said_at, self._principals.own_secret = now, self._secret
        if self._book.changes() == self._read:
            return
        page = self._book.read()
        said = [msgspec.json.decode(data, type=SayingOfDaemon) for data in page.rows.values()]
        heard = {bytes.fromhex(one.secret_sha256) for one in said if now - one.at < FORGOTTEN_SECONDS}
        self._principals.daemons, self._read = frozenset(heard), page.changes


class SharedRights:
    """All of it, of one daemon."""

    def __init__(self, cluster: Cluster, data_dir: Path) -> None:
        self._cluster = cluster
        self._data_dir = data_dir
        self.tokens = SharedTokens(SharedBook(cluster.database, "tokens"), TokenFile(DiskFiles(), data_dir))
        self.looked_at = SharedTimes(cluster.database)
        """By retention."""
        self._trust: DaemonTrust | None = None

    def expect(self, watch: TokenWatch) -> None:
        """Have the tokens taken up before anything else is done in a database that was away until then."""
        loop = asyncio.get_running_loop()

        def take(connection: Connection) -> None:
            loop.call_soon_threadsafe(watch.take, self.tokens.read_on(connection))

        self._cluster.database.at_first = take

    def ledger(self, files: Files, writer: Executor, watch: TokenWatch) -> Ledger:
        """The grants of programs, looked at with the tokens."""
        book = SharedBook(self._cluster.database, "grants")
        ledger = SharedLedger(book, files, self._data_dir / GRANTS_NAME, writer, watch.principals.known)
        watch.also(ledger.catch_up)
        return ledger

    async def begin(self, watch: TokenWatch) -> None:
        """Ask, and be asked, in somebody's name."""
        book = SharedBook(self._cluster.database, "daemons")
        self._trust = DaemonTrust(book, self._cluster.own_url, watch.principals)
        watch.also(self._trust.catch_up)
        await watch.catch_up()

    async def end(self) -> None:
        """Be believed no more: the daemon ends."""
        if self._trust is not None:
            await self._trust.end()
