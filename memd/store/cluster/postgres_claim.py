"""A claim to a topic of a cluster: what is written goes to the database and the bucket, and into the folder.

Rule: every statement that writes names the epoch of its claim, so that a claim which was taken over changes nothing,
however late its writes arrive. A PUT cannot be fenced: an object has a key of its own and counts from the moment at
which its row of the manifest is written, under the epoch; in the same transaction leave the rows that it replaces. The
database is written first, the folder follows; only an append is in the folder before, and is cut off again if it fails.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from memd.errors import BucketError, CorruptFile, Fenced, InDoubt, StoreError, StoreWriteFailed
from memd.store.bucket.objects import Bucket
from memd.store.cluster.database import Connection, Database
from memd.store.erasure.wiping import Wiper
from memd.store.files import FileChecksum, checksum_of, only_whole
from memd.store.local_shelf import LocalClaim
from memd.store.log.format import MAGIC_LOG, decode_header
from memd.store.shelf import Position, Stream

PIECE_BYTES = 8 << 20
Result = TypeVar("Result")
Places = dict[Stream, Position]


class KeptObject(msgspec.Struct, frozen=True):
    """A row of the manifest."""

    name: str
    """Of the file, from the topic's folder on."""
    key: str
    checksum: FileChecksum


class Listing(msgspec.Struct, frozen=True):
    """The files of a topic that are kept as objects, at one moment."""

    revision: int
    """See `Heads.revision`."""
    log_revision: int
    """The one since which the log's stream was only appended to."""
    objects: tuple[KeptObject, ...]


class PostgresClaim:
    """A claim to a topic of a cluster. See Claim."""

    def __init__(self, cache: LocalClaim, database: Database, bucket: Bucket, epoch: int, ends: Places) -> None:
        """`ends`: of the streams, as far as they are durable."""
        self.files = cache.files
        self.layout = cache.layout
        self.epoch = epoch
        self._topic = cache.layout.topic_id
        self._cache = cache
        self._database = database
        self._bucket = bucket
        self._ends = ends
        self._unsynced: dict[Stream, list[bytes]] = {"log": [], "hot": []}
        self._doubt: InDoubt | None = None

    def resume(self, stream: Stream, at: int) -> None:
        """See Claim."""
        if at != self._ends[stream].end:
            raise Fenced(
                f"topic {self._topic}: its folder ends at {at}, what is kept at {self._ends[stream].end}: something "
                "else writes there; nothing is appended, restart memd"
            )
        self._cache.resume(stream, at)

    def append(self, stream: Stream, at: int, data: bytes, *, sync: bool = True) -> None:
        """See Claim."""
        self._check()
        self._cache.append(stream, at, data, sync=False)
        self._unsynced[stream].append(data)
        if sync:
            self.sync(stream)

    def sync(self, stream: Stream) -> None:
        """See Claim."""
        self._check()
        data, (number, at) = b"".join(self._unsynced[stream]), msgspec.structs.astuple(self._ends[stream])
        if not data:
            return
        try:
            self._write(lambda connection: self._insert(connection, stream, Position(number, at), data))
        except StoreWriteFailed:
            with suppress(StoreError):  # nothing is behind that which is kept
                self._cache.resume(stream, at)
            raise
        finally:
            self._unsynced[stream] = []
        self._ends[stream] = Position(number, at + len(data))

    def roll(self, stream: Stream, temporary: Path, wiper: Wiper | None = None) -> None:
        """See Claim."""
        with only_whole(self.files, temporary):
            self._check()
            data = self.files.read(temporary)
            number = self._ends[stream].number + 1
            if stream == "log":
                number = decode_header(data, magic=MAGIC_LOG, name=str(temporary)).segment_id
            end = Position(number, len(data))
            self._write(lambda connection: self._replace(connection, stream, end, data))
            self._ends[stream], self._unsynced[stream] = end, []
        self._cache.roll(stream, temporary, wiper)

    def rotate(self, segment_id: int) -> None:
        """See Claim."""

        def rotate(connection: Connection) -> None:
            with self._fenced(connection) as ends:
                if ends["log"] != Position(segment_id + 1, 0):  # else it was done a moment ago
                    self._expect(ends, "log", self._ends["log"])
                    self._set_end(connection, "log", Position(segment_id + 1, 0))

        self._check()
        assert self._ends["log"].number == segment_id, "the segment that is appended to"
        self._write(rotate)
        self._ends["log"] = Position(segment_id + 1, 0)
        self._cache.rotate(segment_id)

    def publish(self, written: Mapping[Path, Path], trims: Iterable[Path] = (), wiper: Wiper | None = None) -> None:
        """See Claim."""
        with only_whole(self.files, *(temporary for path, temporary in written.items() if temporary != path)):
            self._check()
            trimmed = list(trims)
            if not written and not trimmed:
                return
            gone = {self._name(path) for path in [*written, *trimmed]}
            before = self._database.ask(lambda connection: read_manifest(connection, self._topic))
            kept = [self._describe(path, temporary) for path, temporary in written.items()]
            if kept:
                self._write(lambda connection: self._announce(connection, kept))
            for one, source in zip(kept, written.values(), strict=True):
                self._upload(source, one)
            self._write(lambda connection: self._list(connection, kept, sorted(gone)))
        old = [one.key for one in before if one.name in gone]
        left = self.remove_objects(old)
        if wiper is not None:
            wiper.left += map(Path, left)
        self._cache.publish(written, trimmed, wiper)

    def release(self) -> None:
        """See Claim."""
        with suppress(StoreError):
            for stream, unsynced in self._unsynced.items():
                if unsynced:
                    self.sync(stream)
        self._cache.release()
        free = "UPDATE memd_topic SET url = NULL, epoch = epoch + 1 WHERE topic = %s AND epoch = %s"
        with suppress(StoreError):  # else the lease ends by itself
            self._database.again(lambda connection: connection.execute(free, (self._topic, self.epoch)))

    def remove_objects(self, keys: Collection[str]) -> list[str]:
        """Remove garbage from the bucket; returns the keys of what is still there, for the next claim to remove."""
        if not keys:
            return []
        try:
            self._bucket.delete(list(keys))
        except BucketError:
            return list(keys)
        rows = "DELETE FROM memd_garbage WHERE topic = %s AND key = ANY(%s)"
        with suppress(StoreError):  # done again, it finds none
            self._database.again(lambda connection: connection.execute(rows, (self._topic, list(keys))))
        return []

    # -- what is done in the database, under the epoch ------------------------------------------------------------

    def _insert(self, connection: Connection, stream: Stream, at: Position, data: bytes) -> None:
        """Append a group with one statement. Done again, it finds itself done."""
        end = at.end + len(data)
        moved = (
            f"WITH moved AS (UPDATE memd_topic SET {stream}_end = %s"  # noqa: S608  # of two words
            f" WHERE topic = %s AND epoch = %s AND {stream}_number = %s AND {stream}_end = %s RETURNING 1)"
            " INSERT INTO memd_log (topic, stream, number, start, epoch, data) SELECT %s, %s, %s, %s, %s, %s FROM moved"
        )
        row = (self._topic, stream, at.number, at.end, self.epoch, data)
        done = connection.execute(moved, (end, self._topic, self.epoch, at.number, at.end, *row))
        if done.rowcount != 1:
            with self._fenced(connection) as ends:
                self._expect(ends, stream, Position(at.number, end))

    def _replace(self, connection: Connection, stream: Stream, end: Position, data: bytes) -> None:
        with self._fenced(connection):
            rows = "DELETE FROM memd_log WHERE topic = %s AND stream = %s AND (stream = 'hot' OR number = %s)"
            connection.execute(rows, (self._topic, stream, end.number))
            connection.execute(
                "INSERT INTO memd_log (topic, stream, number, start, epoch, data) VALUES (%s, %s, %s, 0, %s, %s)",
                (self._topic, stream, end.number, self.epoch, data),
            )
            self._set_end(connection, stream, end)
            if stream == "log":
                self._revise(connection)
                rolled = "UPDATE memd_topic SET log_revision = revision WHERE topic = %s"
                connection.execute(rolled, (self._topic,))

    def _revise(self, connection: Connection) -> None:
        """Let replicas see that more has changed than what is behind the ends that they know."""
        revised = "UPDATE memd_topic SET revision = nextval('memd_revision') WHERE topic = %s"
        connection.execute(revised, (self._topic,))

    def _set_end(self, connection: Connection, stream: Stream, end: Position) -> None:
        place = f"UPDATE memd_topic SET {stream}_number = %s, {stream}_end = %s WHERE topic = %s"  # noqa: S608
        connection.execute(place, (end.number, end.end, self._topic))

    def _list(self, connection: Connection, kept: list[KeptObject], gone: list[str]) -> None:
        """Write the manifest, without the objects that are replaced or trimmed, and trim the log."""
        keys = [one.key for one in kept]
        with self._fenced(connection):
            connection.execute(
                "WITH old AS (DELETE FROM memd_object WHERE topic = %s AND name = ANY(%s) RETURNING key)"
                " INSERT INTO memd_garbage SELECT %s, key, %s FROM old WHERE NOT key = ANY(%s)",
                (self._topic, gone, self._topic, self.epoch, keys),
            )
            connection.execute("DELETE FROM memd_garbage WHERE topic = %s AND key = ANY(%s)", (self._topic, keys))
            for one in kept:
                connection.execute(
                    "INSERT INTO memd_object (topic, name, key, crc, bytes) VALUES (%s, %s, %s, %s, %s)",
                    (self._topic, one.name, one.key, one.checksum.crc, one.checksum.bytes),
                )
                if (number := segment_in(one.name)) is not None:
                    self._trim(connection, number, one)
            self._revise(connection)

    def _announce(self, connection: Connection, kept: list[KeptObject]) -> None:
        """Note the objects that are about to be written, as garbage: that is what a crash makes of them."""
        with self._fenced(connection):
            for one in kept:
                row = (self._topic, one.key, self.epoch)
                connection.execute("INSERT INTO memd_garbage VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", row)

    def _trim(self, connection: Connection, number: int, kept: KeptObject) -> None:
        """Remove the rows of a full segment, whose object has just got its row."""
        rows = "DELETE FROM memd_log WHERE topic = %s AND stream = 'log' AND number = %s RETURNING length(data)"
        lengths = [row[0] for row in connection.execute(rows, (self._topic, number))]
        if lengths and sum(lengths) != kept.checksum.bytes:
            raise CorruptFile(
                f"topic {self._topic}: {kept.name} has {kept.checksum.bytes:,} bytes here and {sum(lengths):,} in the "
                "database: something else changed the folder; nothing was published, restart memd"
            )

    @contextmanager
    def _fenced(self, connection: Connection) -> Iterator[Places]:
        """A transaction in which the topic is this claim's; raises Fenced where it is not."""
        with connection.transaction():
            row = connection.execute(
                "SELECT epoch, url, log_number, log_end, hot_number, hot_end FROM memd_topic"
                " WHERE topic = %s FOR UPDATE",
                (self._topic,),
            ).fetchone()
            if row is None or row[0] != self.epoch:
                self._cache.release()
                owner = "another daemon" if row is None or row[1] is None else row[1]
                raise Fenced(f"topic {self._topic}: {owner} has it by now; nothing more is written to it here")
            yield places(row[2:])

    def _expect(self, ends: Places, stream: Stream, expected: Position) -> None:
        if ends[stream] != expected:
            self._cache.release()
            raise Fenced(
                f"topic {self._topic}: its {stream} ends at {ends[stream].end}, not at {expected.end}: another claim "
                "wrote it; nothing is written, restart memd"
            )

    def _write(self, work: Callable[[Connection], Result]) -> Result:
        try:
            return self._database.again(work)
        except InDoubt as error:
            self._doubt = error
            raise

    def _check(self) -> None:
        if self._doubt is not None:
            raise self._doubt.with_traceback(None)
        self._cache.check()

    # -- objects --------------------------------------------------------------------------------------------------

    def _describe(self, path: Path, source: Path) -> KeptObject:
        size, name = self.files.size(source) or 0, self._name(path)
        key = f"{self._topic}/{self.epoch:010d}/{uuid.uuid4().hex}/{PurePosixPath(name).name}"
        return KeptObject(name, key, checksum_of(self.files, source, size))

    def _upload(self, source: Path, kept: KeptObject) -> None:
        starts = range(0, kept.checksum.bytes, PIECE_BYTES)
        try:
            self._bucket.put(kept.key, (self.files.read_at(source, at, PIECE_BYTES) for at in starts))
        except BucketError as error:
            raise StoreWriteFailed(str(error)) from error

    def _name(self, path: Path) -> str:
        return path.relative_to(self.layout.directory).as_posix()


def read_manifest(connection: Connection, topic_id: str) -> list[KeptObject]:
    """Return the objects that count, by name."""
    rows = "SELECT name, key, bytes, crc FROM memd_object WHERE topic = %s ORDER BY name"
    return [KeptObject(row[0], row[1], FileChecksum(row[2], row[3])) for row in connection.execute(rows, (topic_id,))]


def places(row: tuple[int, ...]) -> Places:
    """Return where the streams end: (number, end) of the log, then of the journal."""
    return {"log": Position(row[0], row[1]), "hot": Position(row[2], row[3])}


def segment_in(name: str) -> int | None:
    """The number of the segment whose log this file is."""
    stem, _, suffix = PurePosixPath(name).name.partition(".")
    return int(stem.removeprefix("seg_")) if suffix == "bin" and stem.startswith("seg_") else None
