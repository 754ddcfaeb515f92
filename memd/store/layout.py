"""The names of all files in the data directory.

Rule: no other module builds a file name. A reader beside a running daemon opens `active.bin` first and lists the
segments afterwards: then it may see a segment twice if the daemon rotates in between, but never misses one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from memd.entries import TOPIC_ID_PATTERN, checked_topic_id
from memd.errors import BadTopicId, ForeignFile, StoreError
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk
from memd.store.log.format import Header, topic_tag

LOCK_NAME = "memd.lock"
ADDRESS_NAME = "memd.url"
"""The URL of the daemon that holds the lock, for commands. It may be stale after a crash, so the server there has to
prove that it has the secret."""
SECRET_NAME = "memd.secret"  # noqa: S105  # the name of a file
"""The secret with which the daemon that holds the lock proves its identity to commands."""
TOKENS_NAME = "memd.tokens"  # the name of a file
"""The tokens of `memd token`, by their SHA-256. They belong to this machine: neither backed up nor verified."""
TOKENS_LOCK_NAME = "memd.tokens.lock"  # as above
RECEIPTS_NAME = "memd.receipts"
RECEIPTS_OLD_NAME = "memd.receipts.old"
RECENT_NAME = "memd.recent"
"""The topics that a start has to check; see store.py."""
GRANTS_NAME = "memd.grants"
"""The programs that may use memory over OAuth. Not backed up: a restore would bring back revoked ones."""
MODELS_NAME = "memd.models"
"""Added embedding models, and measurements of models: derived, so neither backed up nor verified."""
KEY_NAME = "memd.key"
"""The key of an encrypted data directory, wrapped by the master key."""
TOPIC_KEY_NAME = "topic.key"
"""The key of an encrypted topic, wrapped by the directory's. Without it the topic cannot be read."""
CONVERSION_NAME = ".memd-encrypting"
"""The folder in which topics are encrypted, decrypted or given new keys; no topic can have this name."""
AUDIT_NAME = "memd.audit"
FORMER_NAMES = "former_names"
"""Beside `active.bin`: the topic's former names, one on each line. People write it, memd reads it."""
FORBIDDEN = "forbidden"
"""Beside `active.bin`: digests of text that must never be stored again."""
BACKUPS_NAME = "memd.backups"
"""The folders of backups that were made, one on each line."""
ERASURES_NAME = "memd.erasures"
"""The folder of erasures, finished and pending."""
DIGESTS_SUFFIX = ".digests"
"""In the folder of erasures: digests of the messages of a pending erasure."""
BUCKET_NAME = "memd.bucket"
"""The id under which this data directory is backed up to a bucket, so that no other one overwrites that backup."""
RESTORING_NAME = ".memd-restoring"
"""In a folder whose restoration from a bucket is not complete; no topic can have this name."""
CLUSTER_NAME = "memd.cluster"
"""In the copy of a cluster: the cluster's identity."""
RETENTION_NAME = "memd.retention"
"""A book of a cluster: the time up to which retention has checked each topic."""
RIGHTS_BOOKS = TOKENS_NAME, GRANTS_NAME
BOOK_NAMES = frozenset({*RIGHTS_BOOKS, "memd.erasures", RETENTION_NAME})
"""The books that the daemons of a cluster share are topics of these names, which no user's topic can have."""
_REPLACED = (CLUSTER_NAME, ADDRESS_NAME, SECRET_NAME, RECENT_NAME, GRANTS_NAME, KEY_NAME, TOKENS_NAME, BUCKET_NAME)
_OWN_NAMES = {
    *(LOCK_NAME, RECEIPTS_NAME, RECEIPTS_OLD_NAME, MODELS_NAME, AUDIT_NAME, TOKENS_LOCK_NAME, BACKUPS_NAME),
    *(ERASURES_NAME, RETENTION_NAME, *_REPLACED),
    *(name + TEMPORARY_SUFFIX for name in (*_REPLACED, BACKUPS_NAME)),
}
_OWN_FOLDED = {name.casefold(): name for name in _OWN_NAMES}
_SEGMENTS = "segments"
_SEGMENT = re.compile(r"seg_(\d{4,9})\.(bin|hnsw|meta|words)")
_MONTH = re.compile(r"\d{4}-(?:0[1-9]|1[0-2])\.jsonl")
_OF_TOPIC = re.compile(rf"active\.|hot\.|{FORMER_NAMES}|lexical")
_OF_SEGMENTS = re.compile(r"seg_\d|merged_\d")
_MERGED = re.compile(r"merged_(\d{4,9})_(\d{4,9})\.(?:ivf|hnsw|meta|words)")


def models_dir(data_dir: Path) -> Path:
    """Return the folder of embedding models; it may be missing."""
    return data_dir / MODELS_NAME


def erasures_dir(data_dir: Path) -> Path:
    """Return the folder of erasures; it may be missing."""
    return data_dir / ERASURES_NAME


def followed_file(data_dir: Path) -> Path:
    """Return the file, in the copy of a cluster, that lists the cluster's erasures already followed here."""
    return erasures_dir(data_dir) / "followed"


class AuditLayout:
    """The files of the audit."""

    def __init__(self, data_dir: Path) -> None:
        self.folder = data_dir / AUDIT_NAME
        self.head = self.folder / "head"
        self.lock = self.folder / "lock"

    def names(self, files: LocalDisk) -> list[str]:
        """Return the names of the monthly files, oldest first."""
        return [name for name in files.names(self.folder) if _MONTH.fullmatch(name)]


class TopicLayout:
    """The files of one topic."""

    def __init__(self, data_dir: Path, topic_id: str) -> None:
        if topic_id in _OWN_NAMES:
            raise BadTopicId(f"topic_id {topic_id!r} is the name of one of memd's files; choose another")
        self.topic_id = checked_topic_id(topic_id)
        self.data_dir = data_dir
        self.directory = data_dir / topic_id
        self.segments = self.directory / _SEGMENTS
        self.active = self.directory / "active.bin"
        self.hot = self.directory / "hot.log"
        self.former_names = self.directory / FORMER_NAMES
        self.key = self.directory / TOPIC_KEY_NAME
        self.forbidden = self.directory / FORBIDDEN
        self.lexical = self.directory / "lexical"
        """A folder of words from an older memd."""

    def bin(self, segment_id: int) -> Path:
        """Return the log of a full segment."""
        return self.segments / f"seg_{segment_id:04d}.bin"

    def meta(self, segment_id: int) -> Path:
        """Return the columns of a full segment."""
        return self.bin(segment_id).with_suffix(".meta")

    def merged_index(self, first: int, last: int) -> Path:
        """Return the merged vector index over the segments from `first` to `last`."""
        return self.segments / f"merged_{first:04d}_{last:04d}.ivf"

    def merged_meta(self, first: int, last: int) -> Path:
        """Return the `.meta` of a merged index."""
        return self.merged_index(first, last).with_suffix(".meta")

    def words(self, first: int, last: int) -> Path:
        """Return the columns of words of the segments from `first` to `last`."""
        index = self.bin(first) if first == last else self.merged_index(first, last)
        return index.with_suffix(".words")

    def of_segment(self, segment_id: int) -> list[Path]:
        """Return the files of a full segment; a backup has them all."""
        return [self.bin(segment_id), self.words(segment_id, segment_id), self.meta(segment_id)]

    def merged(self, first: int, last: int) -> list[Path]:
        """Return the files of a merged index, the one that vouches for it first."""
        return [self.merged_meta(first, last), self.merged_index(first, last), self.words(first, last)]

    def merges(self, files: LocalDisk) -> list[tuple[int, int]]:
        """Return (first, last) of every merged index that has a file on disk, sorted."""
        found = (_MERGED.fullmatch(name) for name in files.names(self.segments))
        return sorted({(int(match[1]), int(match[2])) for match in found if match is not None})

    def indexes_over(self, files: LocalDisk, segment_ids: Collection[int]) -> list[Path]:
        """Return the files of every vector index over one of these segments, the vouching `.meta` first."""
        merged = [one for one in self.merges(files) if any(one[0] <= number <= one[1] for number in segment_ids)]
        paths = [path for one in merged for path in self.merged(*one)]
        for log in map(self.bin, segment_ids):  # an `.hnsw` is an older memd's
            paths += [log.with_suffix(ending) for ending in (".meta", ".hnsw", ".words")]
        return paths

    def segment_ids(self, files: LocalDisk) -> list[int]:
        """Return the numbers of the full segments on disk, ascending."""
        found = (_SEGMENT.fullmatch(name) for name in files.names(self.segments))
        return sorted(int(match[1]) for match in found if match is not None and match[2] == "bin")

    def log_files(self, files: LocalDisk) -> list[Path]:
        """Return the files of the log on disk, oldest first."""
        active = [self.active] if files.size(self.active) is not None else []
        return [*map(self.bin, self.segment_ids(files)), *active]

    def next_segment_id(self, files: LocalDisk) -> int:
        """Return the first number that no file has, not even an index whose segment is missing."""
        found = (_SEGMENT.fullmatch(name) for name in files.names(self.segments))
        numbers = [int(match[1]) for match in found if match is not None]
        return max([0, *numbers, *(last for _, last in self.merges(files))]) + 1

    def missing_segment_ids(self, files: LocalDisk, active_id: int | None) -> list[int]:
        """Return the numbers of full segments that must have existed and do not, ascending.

        `active_id`: the number in the header of `active.bin`; None if there is none.
        """
        following = max(self.next_segment_id(files), active_id or 0)
        return sorted(set(range(1, following)) - set(self.segment_ids(files)) - {active_id})


def is_derived(name: str) -> bool:
    """Return whether a file of a topic, by its name, is built from the log: columns of a segment, or an index."""
    return name.endswith((".meta", ".hnsw", ".ivf", ".words"))


def segments_before(files: LocalDisk, layout: TopicLayout, active: bytes | None, segment_id: int | None) -> list[int]:
    """Return the full segments on disk that an `active.bin` read before does not contain.

    Beside a running daemon, that file may have been rotated into one of the segments since. `active`: the contents of
    that `active.bin`; None if there was none. `segment_id`: the number in its header; None if there is none.
    """
    numbers = layout.segment_ids(files)
    if active and segment_id in numbers and files.read(layout.bin(segment_id)).startswith(active):
        return [number for number in numbers if number < segment_id]
    return numbers


def check_topic(files: LocalDisk, directory: Path, header: Header | None, path: Path) -> None:
    """Make sure that a file in a topic's directory belongs to the topic; a damaged header is accepted.

    A directory that was renamed on purpose has a file with its former names, so that its files are recognised. Raises
    ForeignFile: it is another topic's.
    """
    if header is None or header.topic in map(topic_tag, [directory.name, *former_names(files, directory)]):
        return
    owner = next((name for name in topic_ids_in(files, directory.parent) if topic_tag(name) == header.topic), None)
    of = f"the topic {owner!r}" if owner else "another topic"
    raise ForeignFile(
        f"{path}: belongs to {of}, not to {directory.name!r}: move it back. If you have renamed the topic's folder on "
        f"purpose, write its former name into a file {directory / FORMER_NAMES}; then all of its files are read"
    )


def former_names(files: LocalDisk, directory: Path) -> list[str]:
    """Return the former names of a topic, by its folder."""
    former = directory / FORMER_NAMES
    return files.read(former).decode("utf-8-sig", "replace").split() if files.size(former) is not None else []


class TopicNames:
    """The names of the topics in a directory: listed once, so that no request has to list a hundred thousand.

    On a case-insensitive file system, as on macOS and Windows, two topics whose names differ only in case would share a
    folder. So no store gets both, on any system: it may be moved. Thread-safe; a race may leave a name out until the
    next listing.
    """

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        self._files = files
        self._data_dir = data_dir
        self._list()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def has(self, topic_id: str) -> bool:
        """Return whether there is a topic of exactly this name, with a file, also one that was put there meanwhile."""
        return topic_id not in _OWN_NAMES and has_files(self._files, self._data_dir / topic_id) and self._is(topic_id)

    def add(self, topic_id: str) -> bool:
        """Note that a topic is opened. Return whether it is new, so that its folder must be made. Raises BadTopicId: a
        topic, or a file of memd's, has a name that differs from it only in case."""
        is_there = self._files.is_directory(self._data_dir / topic_id)
        if is_there and self._is(topic_id):
            return False
        folded = topic_id.casefold()
        taken = _OWN_FOLDED.get(folded) or self._by_folded.get(folded, topic_id)
        if taken != topic_id and (taken in _OWN_NAMES or taken in self._files.names(self._data_dir)):
            there = f"{taken!r}, which is there; use that name"
            raise BadTopicId(f"topic_id {topic_id!r} differs only in case from {there}")
        self._names.add(topic_id)
        self._by_folded[folded] = topic_id
        return not is_there

    def remove(self, topic_id: str) -> None:
        """Note that a topic's folder is gone."""
        self._names.discard(topic_id)
        self._by_folded.pop(topic_id.casefold(), None)

    def _is(self, topic_id: str) -> bool:
        if topic_id not in self._names:
            self._list()
        return topic_id in self._names

    def _list(self) -> None:
        self._names = set(topic_names_in(self._files, self._data_dir))
        self._by_folded = {name.casefold(): name for name in self._names}


def check_restored(files: LocalDisk, data_dir: Path) -> None:
    """Make sure that a folder is no interrupted restoration. Raises StoreError: it is."""
    if files.size(data_dir / RESTORING_NAME) is not None:
        raise StoreError(f"{data_dir}: its restoration is not finished: run memd restore again until it ends")


def check_no_cluster(files: LocalDisk, data_dir: Path) -> None:
    """Make sure that a folder is no copy of a cluster, if no cluster is configured. Raises StoreError: it is."""
    if files.size(data_dir / CLUSTER_NAME) is not None:
        raise StoreError(
            f"{data_dir}: is the copy of a cluster, which has the topics and tokens: give cluster.database (--config), "
            "or another data_dir"
        )


def topic_of(name: str) -> str:
    """Return the topic that a path in the data directory, written with slashes, belongs to; empty if none."""
    first = name.partition("/")[0]
    return first if TOPIC_ID_PATTERN.fullmatch(first) and first not in _OWN_NAMES else ""


def topic_names_in(files: LocalDisk, data_dir: Path) -> list[str]:
    """Return the names that can be topics, sorted."""
    return [name for name in files.names(data_dir) if TOPIC_ID_PATTERN.fullmatch(name) and name not in _OWN_NAMES]


def topic_ids_in(files: LocalDisk, data_dir: Path) -> list[str]:
    """Return the topics that have a file, sorted. A full disk may have left an empty directory."""
    return [name for name in topic_names_in(files, data_dir) if has_files(files, data_dir / name)]


def topic_folders_in(files: LocalDisk, data_dir: Path) -> list[str]:
    """Return the topics that have a file or a list of forbidden text, sorted."""
    names = topic_names_in(files, data_dir)
    return [name for name in names if has_files(files, folder := data_dir / name) or FORBIDDEN in files.names(folder)]


def has_files(files: LocalDisk, directory: Path) -> bool:
    """Return whether a topic's folder has memd's files besides a key, `forbidden` and an empty folder of segments."""
    names = files.names(directory)
    in_segments = files.names(directory / _SEGMENTS) if _SEGMENTS in names else []
    return any(map(_OF_TOPIC.match, names)) or any(map(_OF_SEGMENTS.match, in_segments))


def key_damage(files: LocalDisk, topic: TopicLayout) -> str | None:
    """Return a description of damage to the key of an encrypted topic that has files."""
    return files.damage_of(topic.key) if has_files(files, topic.directory) else None


def is_memory(files: LocalDisk, data_dir: Path) -> bool:
    """Return whether a folder is a data directory, a backup of one, or the remains of one."""
    own = (name in _OWN_NAMES or name.startswith(".memd-") for name in files.names(data_dir))
    return any(own) or bool(topic_ids_in(files, data_dir))
