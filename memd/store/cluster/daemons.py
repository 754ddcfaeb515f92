"""The daemons of a cluster, as each tells the others of itself.

Rule: what has to be the same at all of them is told as marks, which can be compared and show nothing. A row is written
at the start and every some seconds, and removed at the end; times are the database's. Nothing depends on
it: it is there so that a difference is said, by the daemons and by `memd check`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from memd.errors import StoreError
from memd.settings.model import Config
from memd.settings.tokens import auth_mark
from memd.store.cluster.database import CONNECT_SECONDS, Database
from memd.store.log.format import ModelId

log = logging.getLogger("memd")

MODEL, AUTH, BUCKET = "embedding.model", "auth.*", "store.bucket"
DISK = "disk"
"""No setting: the trouble with its disk, as long as there is one."""
SEEN_SECONDS = 60.0
"""Who has not been heard of for so long has ended without a word."""
_RETRY_SECONDS = 1.0
_LATELY = (
    "SELECT url, boot, version, marks FROM memd_daemon WHERE seen_at > clock_timestamp() - %s * interval '1 second'"
    " ORDER BY url"
)
_REMEDIES = {
    MODEL: "chunks of one are not found at the other: set the same model everywhere, then memd reembed",
    AUTH: "a token that is good at one is refused at the other: set the same auth.* everywhere",
    BUCKET: "a topic that one has filled cannot be opened by the other: set the same store.bucket everywhere",
}


class DaemonRow(msgspec.Struct, frozen=True, kw_only=True):
    """A daemon, as it tells of itself."""

    url: str
    boot: str
    """Another one at each start."""
    version: str
    marks: Mapping[str, str]
    """Setting → what is equal at two daemons if it is set alike; and DISK."""


def marks_of(config: Config, model: ModelId | None) -> dict[str, str]:
    """Return what has to be the same at all daemons of a cluster. None: the model is not known."""
    marks = {AUTH: auth_mark(config.auth), BUCKET: config.store.bucket.rstrip("/")}
    ingest = msgspec.structs.replace(config.ingest, reindex_seconds=0)  # changes nothing of what is stored
    marks |= {"ingest.*": _digest(ingest), "retention": _digest(config.retention)}
    if model is not None:
        marks[MODEL] = f"{config.embedding.model} ({model.fingerprint[:12]}, {model.dimension})"
    return marks


def seen(database: Database) -> list[DaemonRow]:
    """Return the daemons that were heard of lately. Raises StoreError where the database cannot be asked."""
    return database.ask(lambda connection: list(map(_row, connection.execute(_LATELY, (SEEN_SECONDS,)).fetchall())))


def announce(database: Database, own: DaemonRow) -> list[DaemonRow]:
    """Write the row of a daemon; return those that there were before it, its own included.

    Raises:
        StoreError: the database cannot be asked.
    """
    written = (
        "WITH own AS (INSERT INTO memd_daemon (url, boot, version, marks) VALUES (%s, %s, %s, %s)"
        " ON CONFLICT (url) DO UPDATE SET boot = excluded.boot, version = excluded.version, marks = excluded.marks,"
        " seen_at = clock_timestamp()), old AS"
        " (DELETE FROM memd_daemon WHERE seen_at < clock_timestamp() - interval '1 day') "
    )
    row = (own.url, own.boot, own.version, msgspec.json.encode(own.marks).decode(), SEEN_SECONDS)
    return database.again(lambda connection: list(map(_row, connection.execute(written + _LATELY, row).fetchall())))


def different(one: DaemonRow, other: DaemonRow) -> Iterator[tuple[str, str]]:
    """Yield what is set differently at two daemons, each with what to do."""
    for name in sorted((one.marks.keys() & other.marks.keys()) - {DISK}):
        if one.marks[name] != other.marks[name]:
            values = f": {one.marks[name]} and {other.marks[name]}" if name in (MODEL, BUCKET) else ""
            remedy = _REMEDIES.get(name, f"what is stored depends on who has a topic: set the same {name} everywhere")
            yield f"{name} is not the same at {one.url} and {other.url}{values}", remedy


class DaemonNotices:
    """Tells the other daemons of this one, in a thread of its own, and its owner of differences, once each."""

    def __init__(self, database: Database, url: str, version: str, marks: Mapping[str, str]) -> None:
        self._database = database
        self._own = DaemonRow(url=url, boot=secrets.token_hex(8), version=version, marks=marks)
        self._told: set[str] = set()
        self._is_known = False
        self._is_over = False
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memd-daemons", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def leave(self) -> None:
        """End, and remove the row, by which the others see that this daemon ends in good order. A second call does
        nothing; without any it is forgotten by itself."""
        if self._is_over:
            return
        self._is_over = True
        self._hurry.set()
        self._thread.join(CONNECT_SECONDS)
        gone, own = "DELETE FROM memd_daemon WHERE url = %s AND boot = %s", (self._own.url, self._own.boot)
        with suppress(StoreError):
            self._database.again(lambda connection: connection.execute(gone, own) and None)

    def tell_of_disk(self, trouble: str) -> None:
        """Tell the others at once that the disk of this daemon is in trouble; empty: that it is not."""
        marks = {name: mark for name, mark in self._own.marks.items() if name != DISK}
        self._own = msgspec.structs.replace(self._own, marks=marks | ({DISK: trouble} if trouble else {}))
        self._hurry.set()

    def _run(self) -> None:
        while not self._is_over:
            self._hurry.clear()
            with suppress(StoreError):  # the renewals of claims say that the database is away
                self._announce()
            if not self._is_over:
                self._hurry.wait(SEEN_SECONDS / 4 if self._is_known else _RETRY_SECONDS)

    def _announce(self) -> None:
        for other in announce(self._database, self._own):
            if other.url != self._own.url:
                for said, remedy in different(self._own, other):
                    self._say(f"{said}; {remedy}")
            elif self._is_known and other.boot != self._own.boot:
                self._say(
                    f"another daemon has the same store.own_url, {self._own.url}, and they take each other's topics; "
                    "give each its own"
                )
        self._is_known = True

    def _say(self, said: str) -> None:
        if said not in self._told:
            self._told.add(said)
            log.error("the daemons of this cluster do not fit together", extra={"problem": said})


def _row(found: tuple[str, str, str, str]) -> DaemonRow:
    url, boot, version, marks = found
    return DaemonRow(url=url, boot=boot, version=version, marks=msgspec.json.decode(marks, type=dict[str, str]))


def _digest(settings: object) -> str:
    return hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()[:16]
