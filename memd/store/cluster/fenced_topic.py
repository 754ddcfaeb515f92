"""The statements by which a claim writes to the database, of which each names its epoch.

Rule: all or nothing of a call is done; done again, it finds itself done. A claim that was taken over changes nothing.
Who waits for others in a transaction does not keep the topic's row for long, were he stopped in the middle.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from memd.errors import CorruptFile, Fenced
from memd.store.cluster.database import Connection, Database
from memd.store.cluster.kept import KeptObject, Places, places, row_place, segment_in
from memd.store.cluster.sealing import Seal
from memd.store.shelf import Position, Stream

_IDLE_MS_MAX = "5000"
"""After which a transaction ends whose daemon was stopped or cut off: nobody could claim the topic while it lasts."""
_ROW = "INSERT INTO memd_log (topic, stream, number, start, epoch, data) VALUES (%s, %s, %s, %s, %s, %s)"


def object_key(topic: FencedTopic, name: str) -> str:
    """Return the key of an object that is about to be written, which none has or had."""
    return f"{topic.topic_id}/{topic.epoch:010d}/{uuid.uuid4().hex}/{name}"


class Thawed(msgspec.Struct, frozen=True):
    """The first bytes of a stream, that become a row again."""

    stream: Stream
    number: int
    name: str
    """In the manifest."""
    data: bytes


class FencedTopic:
    """A topic under one epoch. Every method raises as `Database.again`, and Fenced. For any thread."""

    def __init__(self, database: Database, topic_id: str, epoch: int, key: str, seal: Seal) -> None:
        """`key`: the topic's, wrapped, which `seal` uses; empty: nothing is encrypted."""
        self._database = database
        self.topic_id = topic_id
        self.epoch = epoch
        self.key = key
        self.seal = seal
        self.renewed_at = -math.inf
        """See Claim."""

    def insert(self, stream: Stream, at: Position, data: bytes) -> None:
        """Append a group, with one statement."""
        end = at.end + len(data)
        moved = (
            f"WITH moved AS (UPDATE memd_topic SET {stream}_end = %s"  # noqa: S608  # of two words
            f" WHERE topic = %s AND epoch = %s AND {stream}_number = %s AND {stream}_end = %s RETURNING 1)"
            " INSERT INTO memd_log (topic, stream, number, start, epoch, data) SELECT %s, %s, %s, %s, %s, %s FROM moved"
        )
        row = self._row(stream, at.number, at.end, data)
        asked = (end, self.topic_id, self.epoch, at.number, at.end, *row)

        def insert(connection: Connection) -> None:
            if connection.execute(moved, asked).rowcount != 1:
                with self._fenced(connection) as ends:
                    self._expect(ends, stream, Position(at.number, end))

        self._database.again(insert)

    def replace(
        self, stream: Stream, end: Position, data: bytes, first: KeptObject | None, thawed: Sequence[Thawed]
    ) -> None:
        """Replace or begin a stream.

        Args:
            first: what an object has of it.
            thawed: what else is in that object, which is to go; if others have not replaced it by now.
        """

        row = self._row(stream, end.number, 0, data)
        again = {one.name: self._row(one.stream, one.number, 0, one.data) for one in thawed}

        def replace(connection: Connection) -> None:
            with self._fenced(connection):
                rows = "DELETE FROM memd_log WHERE topic = %s AND stream = %s AND (stream = 'hot' OR number = %s)"
                connection.execute(rows, (self.topic_id, stream, end.number))
                connection.execute(_ROW, row)
                self._set_end(connection, stream, end)
                if stream == "log":
                    self._revise(connection)
                    rolled = "UPDATE memd_topic SET log_revision = revision WHERE topic = %s"
                    connection.execute(rolled, (self.topic_id,))
                if first is not None:
                    names = [first.name, *again]
                    old = "DELETE FROM memd_object WHERE topic = %s AND key = %s AND name = ANY(%s) RETURNING name"
                    gone = {name for (name,) in connection.execute(old, (self.topic_id, first.key, names))}
                    for name in gone & again.keys():
                        connection.execute(_ROW, again[name])
                    self._discard(connection, [first.key])

        self._database.again(replace)

    def rotate(self, segment_id: int, end: Position) -> None:
        """Let the log go on with the next segment."""

        def rotate(connection: Connection) -> None:
            with self._fenced(connection) as ends:
                if ends["log"] != Position(segment_id + 1, 0):  # else it was done a moment ago
                    self._expect(ends, "log", end)
                    self._set_end(connection, "log", Position(segment_id + 1, 0))

        self._database.again(rotate)

    def announce(self, keys: Collection[str]) -> None:
        """Note the objects that are about to be written, as garbage: that is what a crash makes of them."""

        def announce(connection: Connection) -> None:
            with self._fenced(connection):
                self._add_garbage(connection, keys)

        self._database.again(announce)

    def publish(self, objects: Sequence[KeptObject], gone: Collection[str]) -> None:
        """Write the manifest, without what is trimmed or replaced (`gone`, by name), and trim the log."""

        def publish(connection: Connection) -> None:
            with self._fenced(connection):
                self._list(connection, objects, gone)
                self._revise(connection)

        self._database.again(publish)

    def freeze(self, objects: Sequence[KeptObject], ends: Places, *, unfinished: bool) -> None:
        """Write the manifest, trim what its objects have of both streams, which end there, and let the topic go."""

        def freeze(connection: Connection) -> None:
            with self._fenced(connection) as found:
                for stream, end in ends.items():
                    self._expect(found, stream, end)
                self._list(connection, objects, [one.name for one in objects])
                self._let_go(connection, unfinished=unfinished)

        self._database.again(freeze)

    def release(self, *, unfinished: bool = False) -> None:
        """Let the topic go; nothing is done if another claim was granted since."""
        self._database.again(lambda connection: self._let_go(connection, unfinished=unfinished))

    def forget(self, kept: Sequence[KeptObject], erasure: int, id_floor: int) -> None:
        """Remove all that is kept but these objects, and let the topic go; from now on it has the key of this. See
        `Shelf.forget`."""

        def forget(connection: Connection) -> None:
            with self._fenced(connection):
                if not self._begin_anew(connection, erasure, id_floor):
                    self._let_go(connection, unfinished=False)
                    return
                connection.execute("DELETE FROM memd_log WHERE topic = %s", (self.topic_id,))
                names = "SELECT name FROM memd_object WHERE topic = %s"
                self._list(connection, kept, [name for (name,) in connection.execute(names, (self.topic_id,))])
                self._revise(connection)

        self._database.again(forget)

    def _begin_anew(self, connection: Connection, erasure: int, id_floor: int) -> bool:
        """Let a topic be as one that never was, and let it go; False: that was done, and it has begun anew since."""
        anew = (
            "UPDATE memd_topic SET url = NULL, epoch = epoch + 1, since = epoch + 1, owner = '', log_number = 1,"
            " log_end = 0, hot_number = 0, hot_end = 0, forgotten = greatest(forgotten, %s),"
            " id_floor = greatest(id_floor, %s), key = %s WHERE topic = %s AND (%s = 0 OR forgotten < %s)"
        )
        asked = (erasure, id_floor, self.key, self.topic_id, erasure, erasure)
        return bool(connection.execute(anew, asked).rowcount)

    def disown(self, keys: Collection[str]) -> list[str]:
        """Note objects as garbage that were written after somebody else had claimed the topic, and had removed garbage;
        return those that are. One that counts after all, as an answer said that was lost, is none."""
        found = (
            "INSERT INTO memd_garbage (topic, key, epoch) SELECT %s, mine.key, %s FROM unnest(%s::text[]) AS mine (key)"
            " WHERE NOT EXISTS (SELECT FROM memd_object AS o WHERE o.topic = %s AND o.key = mine.key)"
            " ON CONFLICT (topic, key) DO UPDATE SET epoch = memd_garbage.epoch RETURNING key"
        )
        asked = (self.topic_id, self.epoch, list(keys), self.topic_id)
        return self._database.again(lambda connection: [key for (key,) in connection.execute(found, asked)])

    def forget_garbage(self, keys: Collection[str]) -> None:
        """Note that objects are gone."""
        forget_garbage(self._database, self.topic_id, keys)

    def _row(self, stream: Stream, number: int, start: int, data: bytes) -> tuple[object, ...]:
        sealed = self.seal.sealed(data, row_place(self.topic_id, stream, number, start))
        return self.topic_id, stream, number, start, self.epoch, sealed

    # -- parts of a transaction -----------------------------------------------------------------------------------

    @contextmanager
    def _fenced(self, connection: Connection) -> Iterator[Places]:
        """A transaction in which the topic is this claim's; raises Fenced where it is not."""
        with connection.transaction():
            row = connection.execute(
                "SELECT epoch, url, log_number, log_end, hot_number, hot_end,"
                " set_config('idle_in_transaction_session_timeout', %s, true)"
                " FROM memd_topic WHERE topic = %s FOR UPDATE",
                (_IDLE_MS_MAX, self.topic_id),
            ).fetchone()
            if row is None or row[0] != self.epoch:
                owner = "another daemon" if row is None or row[1] is None else row[1]
                raise Fenced(f"topic {self.topic_id}: {owner} has it by now; nothing more is written to it here")
            yield places(row[2:6])

    def _expect(self, ends: Places, stream: Stream, expected: Position) -> None:
        if ends[stream] != expected:
            raise Fenced(
                f"topic {self.topic_id}: its {stream} ends at {ends[stream].end}, not at {expected.end}: another claim "
                "wrote it; nothing is written, restart memd"
            )

    def _set_end(self, connection: Connection, stream: Stream, end: Position) -> None:
        place = f"UPDATE memd_topic SET {stream}_number = %s, {stream}_end = %s WHERE topic = %s"  # noqa: S608
        connection.execute(place, (end.number, end.end, self.topic_id))

    def _revise(self, connection: Connection) -> None:
        """Let replicas see that more has changed than what is behind the ends that they know."""
        revised = "UPDATE memd_topic SET revision = nextval('memd_revision') WHERE topic = %s"
        connection.execute(revised, (self.topic_id,))

    def _let_go(self, connection: Connection, *, unfinished: bool) -> None:
        free = (
            "UPDATE memd_topic SET url = NULL, epoch = epoch + 1,"
            " lease_until = CASE WHEN %s THEN '-infinity' ELSE lease_until END WHERE topic = %s AND epoch = %s"
        )
        connection.execute(free, (unfinished, self.topic_id, self.epoch))

    def _list(self, connection: Connection, objects: Sequence[KeptObject], gone: Collection[str]) -> None:
        keys = {one.key for one in objects}
        old = "DELETE FROM memd_object WHERE topic = %s AND name = ANY(%s) RETURNING name, key, bytes"
        replaced = {row[0]: row[1:] for row in connection.execute(old, (self.topic_id, sorted(gone)))}
        connection.execute("DELETE FROM memd_garbage WHERE topic = %s AND key = ANY(%s)", (self.topic_id, list(keys)))
        for one in objects:
            connection.execute(
                "INSERT INTO memd_object (topic, name, key, crc, bytes, at) VALUES (%s, %s, %s, %s, %s, %s)",
                (self.topic_id, one.name, one.key, one.checksum.crc, one.checksum.bytes, one.at),
            )
            self._trim(connection, one, replaced[one.name][1] if one.name in replaced else 0)
        self._discard(connection, {key for key, _ in replaced.values()} - keys)

    def _trim(self, connection: Connection, kept: KeptObject, before: int) -> None:
        """Remove the rows of a log or the journal, whose object has just got its row; `before`: bytes before those."""
        number, is_journal = segment_in(kept.name), kept.name == "hot.log"
        if number is None and not is_journal:
            return
        rows = "DELETE FROM memd_log WHERE topic = %s AND stream = %s AND (stream = 'hot' OR number = %s)"
        asked = (self.topic_id, "hot" if is_journal else "log", number)
        lengths = [row[0] for row in connection.execute(f"{rows} RETURNING length(data)", asked)]
        found = before + sum(lengths) - len(lengths) * self.seal.overhead
        if lengths and found != kept.checksum.bytes:
            raise CorruptFile(
                f"topic {self.topic_id}: {kept.name} has {kept.checksum.bytes:,} bytes here and {found:,} "
                "in the database: something else changed the folder; nothing was published, restart memd"
            )

    def _discard(self, connection: Connection, keys: Collection[str]) -> None:
        """Note as garbage what no row of the manifest names any more."""
        named = "SELECT DISTINCT key FROM memd_object WHERE topic = %s AND key = ANY(%s)"
        still = {key for (key,) in connection.execute(named, (self.topic_id, list(keys)))} if keys else set()
        self._add_garbage(connection, set(keys) - still)

    def _add_garbage(self, connection: Connection, keys: Collection[str]) -> None:
        for key in keys:
            row = (self.topic_id, key, self.epoch)
            connection.execute("INSERT INTO memd_garbage VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", row)


def forget_garbage(database: Database, topic_id: str, keys: Collection[str]) -> None:
    """Note that objects of a topic are gone; no claim to it is needed."""
    rows = "DELETE FROM memd_garbage WHERE topic = %s AND key = ANY(%s)"
    database.again(lambda connection: connection.execute(rows, (topic_id, list(keys))))
