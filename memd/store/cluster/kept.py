"""A topic of a cluster as it is kept: the manifest of its objects, and the rows behind them.

Rule: reads, and changes nothing. A file of the topic is its object, and behind that its rows: of a full segment one or
the other, of a stream's last file both, where something was appended since it was frozen. What belongs together is read
in one statement.
"""

from __future__ import annotations

import zlib
from pathlib import Path, PurePosixPath

import msgspec

from memd.store.cluster.database import Connection
from memd.store.cluster.sealing import Seal
from memd.store.files import FileChecksum
from memd.store.layout import TopicLayout
from memd.store.shelf import Position, Stream

FROZEN = "frozen"
"""Ends the keys of objects with the ends of streams."""
Places = dict[Stream, Position]


class KeptObject(msgspec.Struct, frozen=True):
    """A row of the manifest: a file, or its first bytes."""

    name: str
    """Of the file, from the topic's folder on. That of a log is the one that it has once it is full."""
    key: str
    checksum: FileChecksum
    at: int = 0
    """Where it begins in the object."""
    sealed_by: str = ""
    """The topic's key, wrapped; empty: the object is plain."""

    @property
    def is_frozen(self) -> bool:
        """Whether it is what a stream had when its topic was let go: rows may be behind it since."""
        return self.key.endswith(f"/{FROZEN}")


class Listing(msgspec.Struct, frozen=True):
    """The files of a topic that are kept as objects, at one moment."""

    revision: int
    """See `Heads.revision`."""
    log_revision: int
    """The one since which the log's stream was only appended to."""
    objects: tuple[KeptObject, ...]
    """Those that are whole."""


class KeptFile(msgspec.Struct):
    """A file as it is kept."""

    first: KeptObject | None = None
    rows: list[bytes] = []

    @property
    def checksum(self) -> FileChecksum:
        """Of the whole file."""
        size, crc = (self.first.checksum.bytes, self.first.checksum.crc) if self.first else (0, 0)
        for data in self.rows:
            size, crc = size + len(data), zlib.crc32(data, crc)
        return FileChecksum(size, crc)


class KeptTopic(msgspec.Struct):
    """A topic as it is kept."""

    ends: Places
    manifest: dict[str, KeptObject] = {}
    rows: dict[tuple[Stream, int], list[bytes]] = {}
    """The data of what has rows, by number."""

    def files(self, layout: TopicLayout) -> dict[Path, KeptFile]:
        """Return the files by their paths."""
        found: dict[Path, KeptFile] = {}
        for name, one in self.manifest.items():
            found.setdefault(self._path(layout, layout.directory / name), KeptFile()).first = one
        for (stream, number), data in self.rows.items():
            path = layout.hot if stream == "hot" else self._path(layout, layout.bin(number))
            found.setdefault(path, KeptFile()).rows = data
        return found

    def _path(self, layout: TopicLayout, path: Path) -> Path:
        return layout.active if path == layout.bin(self.ends["log"].number) else path


def name_of(layout: TopicLayout, stream: Stream, number: int) -> str:
    """Return the name under which a stream has its first bytes in the manifest."""
    return (layout.hot if stream == "hot" else layout.bin(number)).relative_to(layout.directory).as_posix()


def segment_in(name: str) -> int | None:
    """The number of the segment whose log this file is."""
    stem, _, suffix = PurePosixPath(name).name.partition(".")
    return int(stem.removeprefix("seg_")) if suffix == "bin" and stem.startswith("seg_") else None


def places(row: tuple[int, ...]) -> Places:
    """Return where the streams end: (number, end) of the log, then of the journal."""
    return {"log": Position(row[0], row[1]), "hot": Position(row[2], row[3])}


def row_place(topic_id: str, stream: Stream, number: int, start: int) -> str:
    """Return the place to which a row is sealed."""
    return f"{topic_id} {stream} {number} {start}"


def read_topic(connection: Connection, topic_id: str, ends: Places, key: str, seal: Seal) -> KeptTopic:
    """Read all that is kept of a topic, the contents of its objects apart."""
    kept = KeptTopic(ends)
    rows = "SELECT stream, number, start, data FROM memd_log WHERE topic = %s ORDER BY stream, number, start"
    for stream, number, start, data in connection.execute(rows, (topic_id,)):
        opened = seal.opened(data, row_place(topic_id, stream, number, start))
        kept.rows.setdefault((stream, number), []).append(opened)
    manifest = "SELECT name, key, bytes, crc, at FROM memd_object WHERE topic = %s ORDER BY name"
    for name, place, size, crc, at in connection.execute(manifest, (topic_id,)):
        kept.manifest[name] = KeptObject(name, place, FileChecksum(size, crc), at, key)
    return kept


def read_listing(connection: Connection, topic_id: str) -> Listing | None:
    """Read the files that are kept as objects; None if there is no such topic."""
    asked = (
        "SELECT t.revision, t.log_revision, o.name, o.key, o.bytes, o.crc, o.at, t.key FROM memd_topic t"
        " LEFT JOIN memd_object o USING (topic) WHERE topic = %s ORDER BY o.name"
    )
    rows = connection.execute(asked, (topic_id,)).fetchall()
    named = (row for row in rows if row[2] is not None)
    objects = (KeptObject(row[2], row[3], FileChecksum(row[4], row[5]), row[6], row[7]) for row in named)
    return Listing(rows[0][0], rows[0][1], tuple(one for one in objects if not one.is_frozen)) if rows else None


def read_stream(
    connection: Connection, layout: TopicLayout, stream: Stream, after: Position
) -> tuple[str, KeptObject | None, list[tuple[int, bytes]]]:
    """Read the rows that are behind a position or over it, as they are, with their starts.

    Returns:
        The topic's key, what is kept before the rows, and these.
    """
    found = connection.execute(
        "WITH rows AS (SELECT start, data FROM memd_log WHERE topic = %(topic)s AND stream = %(stream)s"
        " AND number = %(number)s AND start >= coalesce((SELECT max(start) FROM memd_log WHERE topic = %(topic)s"
        " AND stream = %(stream)s AND number = %(number)s AND start <= %(end)s), 0))"
        " SELECT start, data, NULL::text, NULL::text, NULL::bigint, NULL::bigint, NULL::bigint FROM rows"
        " UNION ALL SELECT -1, NULL, key, NULL, NULL, NULL, NULL FROM memd_topic WHERE topic = %(topic)s"
        " UNION ALL SELECT 0, NULL, name, key, bytes, crc, at FROM memd_object AS o WHERE topic = %(topic)s"
        " AND name = %(name)s AND bytes > %(end)s AND (%(stream)s = 'log' OR"
        " %(number)s = (SELECT hot_number FROM memd_topic AS t WHERE t.topic = o.topic)) ORDER BY 1",
        {
            "topic": layout.topic_id,
            "stream": stream,
            "number": after.number,
            "end": after.end,
            "name": name_of(layout, stream, after.number),
        },
    ).fetchall()
    if not found:
        return "", None, []
    key = found[0][2]
    objects = (
        KeptObject(row[2], row[3], FileChecksum(row[4], row[5]), row[6], key) for row in found[1:] if row[1] is None
    )
    return key, next(objects, None), [(row[0], row[1]) for row in found if row[1] is not None]
