"""The shelf that several daemons share: topics are had with leases, and a claim makes the topic's folder equal to what
is kept.

Rule: leases are on the clock of the database alone. The folder is a cache: before a claim is given out, its files are
made equal to what is kept. So it must never have been anything else (`memd.cluster`).
"""

from __future__ import annotations

import logging
import uuid
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from memd.clock import steady_now
from memd.entries import ID_TURNS
from memd.errors import BadTopicId, CacheGone, ObjectMissing, StoreError, TopicHeld, TopicMoving, WrongKey
from memd.store.bucket.objects import Bucket
from memd.store.cluster.cached_folder import CachedFolder
from memd.store.cluster.database import Connection, Database
from memd.store.cluster.fenced_topic import FencedTopic, forget_garbage, object_key
from memd.store.cluster.kept import (
    KeptObject,
    KeptTopic,
    Listing,
    Places,
    places,
    read_listing,
    read_stream,
    read_topic,
    row_place,
)
from memd.store.cluster.object_keeper import ObjectKeeper
from memd.store.cluster.postgres_claim import PostgresClaim
from memd.store.cluster.sealing import ClusterKeys
from memd.store.disk import LocalDisk
from memd.store.encryption.opening import master_of
from memd.store.files import FileChecksum, replace_file
from memd.store.layout import CLUSTER_NAME, FORBIDDEN, TopicLayout, topic_names_in
from memd.store.local_shelf import LocalShelf
from memd.store.shelf import Claim, Heads, Position, Stream

log = logging.getLogger("memd")

MOVER = "memd move"
"""Begins what `memd move` has in the place of a URL: it answers nobody."""
_READ_TRIES = 3
_LOCK_MS_MAX = 1_500
"""The longest that a claim waits for others' work on the same row: who does it may have been stopped in the middle."""
_FREE = "t.url IS NULL OR t.owner = %(seat)s OR t.url = %(gone)s OR t.lease_until < clock_timestamp()"
_KNOWN = f"SELECT topic, {_FREE} FROM memd_topic AS t WHERE lower(topic) = lower(%(topic)s)"  # noqa: S608
"""Waits for nobody: whose topic it is can be told also while somebody works on its row."""
_TAKEN = (
    "INSERT INTO memd_topic AS t (topic, epoch, url, lease_until, owner, since, key)"  # noqa: S608
    " SELECT %(topic)s, 1, %(url)s, clock_timestamp() + %(lease)s::interval, %(seat)s, 1, %(key)s"
    f" FROM set_config('lock_timeout', '{_LOCK_MS_MAX}', true)"
    " ON CONFLICT (topic) DO UPDATE SET epoch = t.epoch + 1, url = excluded.url,"
    " lease_until = excluded.lease_until, owner = excluded.owner,"
    " since = CASE WHEN t.owner = excluded.owner THEN t.since ELSE t.epoch + 1 END"
    f" WHERE {_FREE} RETURNING epoch, key, (SELECT key IS NULL FROM memd_version), since, id_floor,"
    " log_number, log_end, hot_number, hot_end"
)


class _Granted(NamedTuple):
    topic: FencedTopic
    since: int
    id_floor: int
    ends: Places


class PostgresShelf:
    """The topics of a cluster, as one daemon has them. See Shelf."""

    def __init__(
        self,
        database: Database,
        bucket: Bucket,
        files: LocalDisk,
        data_dir: Path,
        *,
        url: str,
        lease_seconds: float,
        seat: str = "",
    ) -> None:
        """
        Args:
            data_dir: its topics' folders are the cache; whoever lets this write holds the directory's lock.
            url: at which other daemons reach this one; it has a topic until `lease_seconds` after the last `renew`.
            seat: tells it from all others, whatever their URLs are; else the directory, which has one daemon, does.
        """
        self._database = database
        self._keys = ClusterKeys(database, master_of(files, data_dir))
        self._objects = ObjectKeeper(bucket, self._keys)
        self._files = files
        self._data_dir = data_dir
        self._cached = LocalShelf(files, data_dir)
        self._is_owned = False
        self._seat = seat
        self._marked = b""
        """The file that says whose cache the directory is, once that is known."""
        self._id_turn: int | None = None
        self._refreshing: dict[str, FencedTopic] = {}
        """Granted, and not given out yet: to bring a large topic's folder up to date may take longer than a lease."""
        self._owning = Lock()  # topics are claimed in several threads
        self._check_directory()
        self._url = url
        self._lease_seconds = lease_seconds
        self._lease = f"{lease_seconds} seconds"

    def check_key(self) -> None:
        """Raise WrongKey where what is kept cannot be opened with this daemon's key; nothing if nobody can say."""
        try:
            self._keys.join()
        except WrongKey:
            raise
        except StoreError:
            pass

    def claim(self, topic_id: str, *, gone: str = "") -> PostgresClaim:
        """See Shelf."""
        granted = self._granted(topic_id, gone)
        topic = granted.topic
        self._refreshing[topic_id] = topic
        try:
            kept, garbage = self._database.ask(lambda connection: self._kept(connection, topic, granted.ends))
            cache = self._cached.claim(topic_id)
            folder = CachedFolder(self._files, cache.layout)
            for lost in folder.make_equal(kept.files(cache.layout), self._objects.pieces):
                said = "an index is lost in the bucket; it is built again from the log"
                log.warning(said, extra={"topic": topic_id, "error": lost})
        except BaseException:
            with suppress(StoreError):
                topic.release()
            raise
        finally:
            del self._refreshing[topic_id]
        claim = PostgresClaim(
            cache,
            topic,
            self._objects,
            kept,
            since=granted.since,
            id_floor=granted.id_floor,
            id_turn=self._id_turn,
        )
        claim.remove_objects(garbage)
        return claim

    def _granted(self, topic_id: str, gone: str = "") -> _Granted:
        """Claim a topic, without its folder."""
        TopicLayout(self._data_dir, topic_id)  # a name that can be one
        self._own_directory()
        asked = {"topic": topic_id, "url": self._url, "seat": self._seat, "lease": self._lease, "gone": gone}
        asked["key"] = self._keys.new()

        def claimed(connection: Connection) -> tuple[Any, ...] | None:
            there = connection.execute(_KNOWN, asked).fetchone()
            if there is not None and there[0] != topic_id:
                raise BadTopicId(
                    f"topic_id {topic_id!r} differs only in case from {there[0]!r}, which is there; use that name"
                )
            if there is not None and not there[1]:
                return None
            found: tuple[Any, ...] | None = connection.execute(_TAKEN, asked).fetchone()
            return found

        began = steady_now()
        row = self._database.again(claimed)
        if row is None:
            owner = "SELECT url FROM memd_topic WHERE topic = %s"
            held = self._database.ask(lambda connection: connection.execute(owner, (topic_id,)).fetchone())
            holder = (held and held[0]) or "another daemon"
            if holder.startswith(MOVER):
                raise TopicMoving(topic_id, holder)
            if holder == self._url:
                raise StoreError(
                    f"topic {topic_id}: another daemon has it that calls itself {self._url}, too, or did so until a "
                    "moment ago with another data_dir; if it still runs, set store.own_url of each daemon to its own "
                    "address"
                )
            raise TopicHeld(topic_id, holder)
        topic = FencedTopic(self._database, topic_id, row[0], row[1], self._keys.seal(row[1]))
        topic.renewed_at = began
        if row[2] != self._keys.is_plain:
            topic.release()
            raise WrongKey(f"{self._database.place}: another daemon has just encrypted the new cluster; restart memd")
        return _Granted(topic, row[3], row[4], places(row[5:]))

    def _kept(self, connection: Connection, topic: FencedTopic, ends: Places) -> tuple[KeptTopic, list[str]]:
        """A topic as it is kept, and the keys of what earlier claims to it have left."""
        garbage = "SELECT key FROM memd_garbage WHERE topic = %s AND epoch < %s"
        keys = [key for (key,) in connection.execute(garbage, (topic.topic_id, topic.epoch))]
        return read_topic(connection, topic.topic_id, ends, topic.key, topic.seal), keys

    def renew(self, claims: Collection[Claim]) -> list[Claim]:
        """See Shelf; raises CacheGone where the directory is not this daemon's cache any more."""
        self._check_cache(claims)
        longer = (
            "UPDATE memd_topic AS t SET lease_until = clock_timestamp() + %s::interval"
            " FROM unnest(%s::text[], %s::bigint[]) AS mine (topic, epoch)"
            " WHERE t.topic = mine.topic AND t.epoch = mine.epoch AND t.url IS NOT NULL RETURNING t.topic, t.epoch"
        )
        mine = [one.fenced[0] for one in claims if isinstance(one, PostgresClaim)]
        mine += self._refreshing.copy().values()
        asked = (self._lease, [one.topic_id for one in mine], [one.epoch for one in mine])
        began = steady_now()
        found = self._database.again(
            lambda connection: set(connection.execute(longer, asked)), urgent_seconds=self._lease_seconds
        )
        for one in mine:
            if (one.topic_id, one.epoch) in found:
                one.renewed_at = began
        return [one for one in claims if (one.layout.topic_id, one.epoch) not in found]

    def holder(self, topic_id: str) -> str | None:
        """Return the URL of the other daemon that has a topic; None: none has it, or this one."""
        asked = "SELECT url FROM memd_topic WHERE topic = %s AND url <> %s AND lease_until >= clock_timestamp()"
        row = self._database.ask(lambda connection: connection.execute(asked, (topic_id, self._url)).fetchone())
        return None if row is None or row[0].startswith(MOVER) else str(row[0])

    def heads(self, topic_ids: Collection[str]) -> dict[str, Heads]:
        """See Shelf."""
        rows = self._database.ask(
            lambda connection: connection.execute(
                "SELECT topic, CASE WHEN url IS NULL THEN 0 ELSE epoch END, revision,"
                " log_number, log_end, hot_number, hot_end FROM memd_topic"
                " WHERE topic = ANY(%s) AND (log_end > 0 OR log_number > 1 OR hot_end > 0)",
                (list(topic_ids),),
            ).fetchall()
        )
        return {row[0]: Heads(row[1], **places(row[3:]), revision=row[2]) for row in rows}

    def read(self, topic_id: str, stream: Stream, after: Position) -> bytes:
        """See Shelf."""

        layout = TopicLayout(self._data_dir, topic_id)
        for _ in range(_READ_TRIES):
            key, first, rows = self._database.ask(lambda connection: read_stream(connection, layout, stream, after))
            with suppress(ObjectMissing):  # it was replaced at this moment
                found = [] if first is None else list(self._objects.pieces(first, after.end))
                start = after.end + sum(map(len, found))
                seal = self._keys.seal(key)
                for at, data in rows:
                    opened = seal.opened(data, row_place(topic_id, stream, after.number, at))
                    found.append(opened[max(0, start - at) :])
                return b"".join(found)
        raise StoreError(f"topic {topic_id}: an object of its {stream} is missing in the bucket; restore the bucket")

    def listing(self, topic_id: str) -> Listing | None:
        """Return the files of a topic that are kept as objects; None if there is no such topic."""
        return self._database.ask(lambda connection: read_listing(connection, topic_id))

    def pieces(self, kept: KeptObject) -> Iterator[bytes]:
        """Read an object, piece by piece. StoreError is raised also where it was replaced and removed meanwhile."""
        return self._objects.pieces(kept)

    def topics(self, after: str, limit: int) -> list[str]:
        """See Shelf."""
        page = (
            "SELECT topic FROM memd_topic WHERE topic > %s AND (log_end > 0 OR log_number > 1 OR hot_end > 0)"
            " ORDER BY topic LIMIT %s"
        )
        rows = self._database.ask(lambda connection: connection.execute(page, (after, limit)).fetchall())
        return [row[0] for row in rows]

    def unfinished(self, limit: int) -> list[str]:
        """See Shelf."""
        self._own_directory()
        left = (
            "SELECT topic FROM memd_topic WHERE (url IS NOT NULL OR lease_until = '-infinity')"
            " AND (lease_until < clock_timestamp() - %s::interval OR owner = %s) ORDER BY lease_until LIMIT %s"
        )
        asked = (self._lease, self._seat, limit)  # a lease later, so that who asks for a topic gets it
        rows = self._database.ask(lambda connection: connection.execute(left, asked).fetchall())
        return [row[0] for row in rows]

    def forget(self, topic_id: str, *, erasure: int = 0, id_floor: int = 0, forbidden: bytes = b"") -> list[str]:
        """See Shelf."""
        granted = self._granted(topic_id)
        return self._forgotten(granted.topic, granted.ends, erasure, id_floor, forbidden)

    def forget_claimed(self, claim: PostgresClaim) -> list[str]:
        """Like `forget`, under a claim: whatever was written since by others stays, and Fenced is raised."""
        return self._forgotten(*claim.fenced, 0, claim.id_floor, b"")

    def _forgotten(
        self, granted: FencedTopic, ends: Places, erasure: int, id_floor: int, forbidden: bytes
    ) -> list[str]:
        topic_id = granted.topic_id
        try:
            kept, _ = self._database.ask(lambda connection: self._kept(connection, granted, ends))
            before = kept.manifest.get(FORBIDDEN)
            words = forbidden or (b"" if before is None else b"".join(self._objects.pieces(before)))
            key = self._keys.new()  # the old one may be in backups, with what it opens
            topic = FencedTopic(self._database, topic_id, granted.epoch, key, self._keys.seal(key))
            objects = []
            if words:
                place, checksum = object_key(topic, FORBIDDEN), FileChecksum(len(words), zlib.crc32(words))
                objects = [KeptObject(FORBIDDEN, place, checksum, sealed_by=key)]
                topic.announce([place])
                self._objects.put([(objects[0], [words])])
            topic.forget(objects, erasure, id_floor)
        except BaseException:
            with suppress(StoreError):
                granted.release()
            raise
        return self.sweep(topic_id)

    def sweep(self, topic_id: str) -> list[str]:
        """See Shelf."""
        left = "SELECT g.key FROM memd_garbage g JOIN memd_topic t USING (topic) WHERE topic = %s AND g.epoch < t.epoch"
        rows = self._database.ask(lambda connection: connection.execute(left, (topic_id,)).fetchall())
        keys = [key for (key,) in rows]
        if not keys or self._objects.delete(keys):
            forget_garbage(self._database, topic_id, keys)
            return []
        return keys

    def _check_directory(self) -> None:
        """Raise StoreError if the directory is no cache, and holds topics."""
        marker = self._data_dir / CLUSTER_NAME
        if self._files.size(marker) is None and topic_names_in(self._files, self._data_dir):
            raise self._no_cache()

    def _own_directory(self) -> None:
        """Note whose cache the directory is; raises StoreError if it, or the bucket, is another cluster's."""
        with self._owning:
            if self._is_owned:
                return
            marker, own = self._data_dir / CLUSTER_NAME, self._database.cluster
            if self._files.size(marker) is None:
                self._check_directory()
                replace_file(self._files, marker, f"{own} {uuid.uuid4().hex}\n".encode())
            marked = self._files.read(marker)
            found, _, seat = marked.decode("ascii", "replace").strip().partition(" ")
            if found != own or not seat:
                raise self._no_cache()
            if not self._seat:
                self._id_turn = self._database.again(lambda connection: _turn_of(connection, seat))
                self._seat, self._marked = seat, marked
            self._keys.join()
            any_object = "SELECT EXISTS (SELECT FROM memd_object)"
            is_used = self._database.ask(lambda connection: connection.execute(any_object).fetchone()[0])
            self._is_owned = self._objects.is_of(own, is_used=is_used)

    def _check_cache(self, claims: Collection[Claim]) -> None:
        """End the claims whose folders were removed; raise CacheGone if all of the directory was, or was replaced."""
        marker = self._data_dir / CLUSTER_NAME
        if self._marked and (self._files.size(marker) is None or self._files.read(marker) != self._marked):
            raise CacheGone(
                f"{self._data_dir}: was removed or replaced while memd ran; it ends, so that other daemons take its "
                "topics: start it again, and it fills the folder anew"
            )
        for claim in claims:
            if isinstance(claim, PostgresClaim):
                claim.check_folder()

    def _no_cache(self) -> StoreError:
        return StoreError(
            f"{self._data_dir}: holds topics that this cluster does not keep, and they would be removed: choose an "
            "empty data_dir"
        )


def _turn_of(connection: Connection, seat: str) -> int:
    """The turn of a seat among the ids; a new one gets that which was least recently begun with."""
    begun = (
        "INSERT INTO memd_seat (seat, turn) SELECT %s, turn FROM generate_series(0, %s) AS turn"
        " LEFT JOIN memd_seat USING (turn) GROUP BY turn ORDER BY max(at) NULLS FIRST, turn LIMIT 1"
        " ON CONFLICT (seat) DO UPDATE SET at = excluded.at RETURNING turn"
    )
    with connection.transaction():
        connection.execute("LOCK TABLE memd_seat IN EXCLUSIVE MODE")
        return int(connection.execute(begun, (seat, ID_TURNS - 1)).fetchone()[0])
