"""The shelf that several daemons share: topics are had with leases, and a claim makes the topic's folder equal to what
is kept.

Rule: leases are on the clock of the database alone. The folder is a cache: before a claim is given out, each of its
files is compared with what is kept, and replaced or removed. So it must never have been anything else (`memd.cluster`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from memd.errors import CorruptFile, StoreError, TopicHeld
from memd.store.bucket.objects import Bucket
from memd.store.cluster.database import Connection, Database
from memd.store.cluster.postgres_claim import (
    PIECE_BYTES,
    KeptObject,
    Listing,
    PostgresClaim,
    places,
    read_manifest,
    segment_in,
)
from memd.store.disk import LocalDisk
from memd.store.files import TEMPORARY_SUFFIX, FileChecksum, checksum_of, only_whole, put_in_place, replace_file
from memd.store.layout import CLUSTER_NAME, TopicLayout, topic_names_in
from memd.store.local_shelf import LocalShelf
from memd.store.log.recovery import torn_files
from memd.store.shelf import Claim, Heads, Position, Stream


class PostgresShelf:
    """The topics of a cluster, as one daemon has them. See Shelf."""

    def __init__(
        self, database: Database, bucket: Bucket, files: LocalDisk, data_dir: Path, *, url: str, lease_seconds: float
    ) -> None:
        """
        Args:
            data_dir: its topics' folders are the cache; whoever lets this write holds the directory's lock.
            url: at which other daemons reach this one; it has a topic until `lease_seconds` after the last `renew`.
        """
        self._database = database
        self._bucket = bucket
        self._files = files
        self._data_dir = data_dir
        self._cached = LocalShelf(files, data_dir)
        self._is_owned = False
        self._check_directory()
        self._url = url
        self._lease = f"{lease_seconds} seconds"

    def claim(self, topic_id: str, *, gone: str = "") -> Claim:
        """See Shelf."""
        TopicLayout(self._data_dir, topic_id)  # a name that can be one
        self._own_directory()
        taken = (
            "INSERT INTO memd_topic AS t (topic, epoch, url, lease_until)"
            " VALUES (%(topic)s, 1, %(url)s, clock_timestamp() + %(lease)s::interval)"
            " ON CONFLICT (topic) DO UPDATE"
            " SET epoch = t.epoch + 1, url = excluded.url, lease_until = excluded.lease_until"
            " WHERE t.url IS NULL OR t.url IN (excluded.url, %(gone)s) OR t.lease_until < clock_timestamp()"
            " RETURNING epoch, log_number, log_end, hot_number, hot_end"
        )
        asked = {"topic": topic_id, "url": self._url, "lease": self._lease, "gone": gone}
        row = self._database.again(lambda connection: connection.execute(taken, asked).fetchone())
        if row is None:
            owner = "SELECT url FROM memd_topic WHERE topic = %s"
            held = self._database.ask(lambda connection: connection.execute(owner, (topic_id,)).fetchone())
            raise TopicHeld(topic_id, (held and held[0]) or "another daemon")
        cache = self._cached.claim(topic_id)
        claim = PostgresClaim(cache, self._database, self._bucket, row[0], places(row[1:]))
        try:
            self._refresh(cache.layout)
            garbage = "SELECT key FROM memd_garbage WHERE topic = %s AND epoch < %s"
            keys = self._database.ask(lambda connection: connection.execute(garbage, (topic_id, row[0])).fetchall())
            claim.remove_objects([key for (key,) in keys])
        except BaseException:
            claim.release()
            raise
        return claim

    def renew(self, claims: Collection[Claim]) -> list[Claim]:
        """See Shelf."""
        longer = (
            "UPDATE memd_topic AS t SET lease_until = clock_timestamp() + %s::interval"
            " FROM unnest(%s::text[], %s::bigint[]) AS mine (topic, epoch)"
            " WHERE t.topic = mine.topic AND t.epoch = mine.epoch AND t.url IS NOT NULL RETURNING t.topic, t.epoch"
        )
        topics, epochs = [one.layout.topic_id for one in claims], [one.epoch for one in claims]
        found = self._database.again(lambda connection: set(connection.execute(longer, (self._lease, topics, epochs))))
        return [one for one in claims if (one.layout.topic_id, one.epoch) not in found]

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

        def read(connection: Connection) -> tuple[list[tuple[int, bytes]], KeptObject | None]:
            rows = connection.execute(
                "SELECT start, data FROM memd_log WHERE topic = %s AND stream = %s AND number = %s"
                " AND start + length(data) > %s ORDER BY start",
                (topic_id, stream, after.number, after.end),
            ).fetchall()
            known = [] if rows or stream == "hot" else read_manifest(connection, topic_id)
            return rows, next((one for one in known if segment_in(one.name) == after.number), None)

        rows, kept = self._database.ask(read)
        if kept is not None:
            return b"".join(self.pieces(kept))[after.end :]
        return b"".join(data for _, data in rows)[max(0, after.end - rows[0][0]) :] if rows else b""

    def listing(self, topic_id: str) -> Listing | None:
        """Return the files of a topic that are kept as objects; None if there is no such topic."""
        asked = (
            "SELECT t.revision, t.log_revision, o.name, o.key, o.bytes, o.crc FROM memd_topic t"
            " LEFT JOIN memd_object o USING (topic) WHERE topic = %s ORDER BY o.name"
        )
        rows = self._database.ask(lambda connection: connection.execute(asked, (topic_id,)).fetchall())
        objects = (KeptObject(row[2], row[3], FileChecksum(row[4], row[5])) for row in rows if row[2] is not None)
        return Listing(rows[0][0], rows[0][1], tuple(objects)) if rows else None

    def topics(self, after: str, limit: int) -> list[str]:
        """See Shelf."""
        page = (
            "SELECT topic FROM memd_topic WHERE topic > %s AND (log_end > 0 OR log_number > 1 OR hot_end > 0)"
            " ORDER BY topic LIMIT %s"
        )
        rows = self._database.ask(lambda connection: connection.execute(page, (after, limit)).fetchall())
        return [row[0] for row in rows]

    def _check_directory(self) -> None:
        """Raise StoreError if the directory is no cache, and holds topics."""
        marker = self._data_dir / CLUSTER_NAME
        if self._files.size(marker) is None and topic_names_in(self._files, self._data_dir):
            raise self._no_cache()

    def _own_directory(self) -> None:
        """Note whose cache the directory is; raises StoreError if it is another cluster's."""
        if self._is_owned:
            return
        marker, own = self._data_dir / CLUSTER_NAME, self._database.cluster.encode()
        if self._files.size(marker) is None:
            self._check_directory()
            replace_file(self._files, marker, own)
        if self._files.read(marker) != own:
            raise self._no_cache()
        self._is_owned = True

    def _no_cache(self) -> StoreError:
        return StoreError(
            f"{self._data_dir}: holds topics that this cluster does not keep, and they would be removed: choose an "
            "empty data_dir"
        )

    # -- the cache ------------------------------------------------------------------------------------------------

    def _refresh(self, layout: TopicLayout) -> None:
        """Make the folder of a topic equal to what is kept."""

        def kept(connection: Connection) -> tuple[list[KeptObject], dict[Path, bytes]]:
            rows = "SELECT stream, number, data FROM memd_log WHERE topic = %s ORDER BY stream, number, start"
            number = "SELECT log_number FROM memd_topic WHERE topic = %s"
            current = connection.execute(number, (layout.topic_id,)).fetchone()
            streams: dict[Path, list[bytes]] = {}
            for stream, found, data in connection.execute(rows, (layout.topic_id,)):
                full = layout.active if current and found == current[0] else layout.bin(found)
                streams.setdefault(layout.hot if stream == "hot" else full, []).append(data)
            return read_manifest(connection, layout.topic_id), {path: b"".join(data) for path, data in streams.items()}

        objects, streams = self._database.ask(kept)
        paths = {layout.directory / one.name: one for one in objects}
        torn = torn_files(self._files, [layout.segments])
        own = [layout.active, layout.hot, layout.forbidden]
        for path in [*own, *(layout.segments / name for name in self._files.names(layout.segments))]:
            if path not in paths and path not in streams and path not in torn:
                self._files.remove(path)
        for path, data in streams.items():
            self._put(path, FileChecksum(len(data), zlib.crc32(data)), partial(iter, [data]))
        for path, one in paths.items():
            self._put(path, one.checksum, partial(self.pieces, one))
        for folder in (layout.segments, layout.directory, layout.data_dir):
            self._files.sync_directory(folder)

    def pieces(self, kept: KeptObject) -> Iterator[bytes]:
        """Read an object, piece by piece. StoreError is raised also where it was replaced and removed meanwhile."""
        size = kept.checksum.bytes
        return (self._bucket.read(kept.key, at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES))

    def _put(self, path: Path, checksum: FileChecksum, pieces: Callable[[], Iterator[bytes]]) -> None:
        """Bring one file of the cache up to date."""
        files = self._files
        if files.size(path) == checksum.bytes and checksum_of(files, path, checksum.bytes) == checksum:
            return
        temporary, crc, size = path.with_name(path.name + TEMPORARY_SUFFIX), 0, 0
        with only_whole(files, temporary):
            with closing(files.create(temporary)) as appender:
                for piece in pieces():
                    appender.write(piece)
                    crc, size = zlib.crc32(piece, crc), size + len(piece)
                appender.sync()
            if FileChecksum(size, crc) != checksum:
                raise CorruptFile(
                    f"{path.name}: its object in the bucket does not match its checksum; restore the bucket"
                )
        put_in_place(files, temporary, path)
