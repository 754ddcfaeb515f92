"""A claim to a topic of a cluster: what is written goes to the database and the bucket, and into the folder.

Rule: every statement that writes names the epoch of its claim, so that a claim which was taken over changes nothing,
however late its writes arrive. A PUT cannot be fenced: an object has a key of its own and counts from the moment at
which its row of the manifest is written, under the epoch; in the same transaction leave the rows that it replaces. The
database is written first, the folder follows; only an append is in the folder before, and is cut off again if it fails.
A topic that is let go has no rows any more: it is frozen, the ends of both streams into one object.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import msgspec

from memd.errors import CorruptFile, Fenced, InDoubt, StoreError, StoreWriteFailed
from memd.store.cluster.cached_folder import CachedFolder
from memd.store.cluster.fenced_topic import FencedTopic, Thawed, object_key
from memd.store.cluster.kept import FROZEN, KeptObject, KeptTopic, Places, name_of, segment_in
from memd.store.cluster.object_keeper import PIECE_BYTES, ObjectKeeper
from memd.store.erasure.wiping import Wiper
from memd.store.files import FileChecksum, check_file, checksum_of, only_whole
from memd.store.local_shelf import LocalClaim
from memd.store.log.format import MAGIC_LOG, decode_header
from memd.store.shelf import Position, Stream


class PostgresClaim:
    """A claim to a topic of a cluster. See Claim."""

    def __init__(
        self,
        cache: LocalClaim,
        topic: FencedTopic,
        objects: ObjectKeeper,
        kept: KeptTopic,
        *,
        since: int,
        id_floor: int,
        id_turn: int | None,
    ) -> None:
        """`kept`: of the topic, to which the folder is made equal before anything is written."""
        self.files = cache.files
        self.layout = cache.layout
        self.epoch = topic.epoch
        self.since = since
        self.id_floor = id_floor
        self.id_turn = id_turn
        self._cache = cache
        self._cached = CachedFolder(cache.files, cache.layout)
        self._topic = topic
        self._objects = objects
        self._paths: dict[Stream, Path] = {"log": cache.layout.active, "hot": cache.layout.hot}
        self._ends = kept.ends
        self._manifest = dict(kept.manifest)
        self._with_rows = set(kept.rows)
        """The streams, by number, that have rows."""
        self._crcs = {path: one.checksum.crc for path, one in kept.files(cache.layout).items()}
        """Of streams and full logs as they are kept, so that nothing else that got into their files is ever frozen."""
        self._unsynced: dict[Stream, list[bytes]] = {"log": [], "hot": []}
        self._doubt: InDoubt | None = None
        self._is_let_go = False

    @property
    def fenced(self) -> tuple[FencedTopic, Places]:
        """The topic under this claim's epoch, and where its streams end."""
        return self._topic, self._ends

    @property
    def renewed_at(self) -> float:
        """See Claim."""
        return self._topic.renewed_at

    @property
    def is_over(self) -> bool:
        """See Claim."""
        return self._doubt is not None or self._cache.is_over

    def check_folder(self) -> None:
        """Be over if the topic's folder was removed: it is claimed again then, which fills the folder anew."""
        if not self.files.is_directory(self.layout.directory):
            self._cache.release()

    def resume(self, stream: Stream, at: int) -> None:
        """See Claim."""
        if at != (end := self._ends[stream].end):
            raise Fenced(
                f"topic {self._topic.topic_id}: its folder ends at {at}, what is kept at {end}: something else writes "
                "there; nothing is appended, restart memd"
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
        data, end = b"".join(self._unsynced[stream]), self._ends[stream]
        if not data:
            return
        self._with_rows.add((stream, end.number))
        try:
            self._write(lambda: self._topic.insert(stream, end, data))
        except StoreWriteFailed:
            with suppress(StoreError):  # nothing is behind that which is kept
                self._cache.resume(stream, end.end)
            raise
        finally:
            self._unsynced[stream] = []
        self._ends[stream] = Position(end.number, end.end + len(data))
        path = self._paths[stream]
        self._crcs[path] = zlib.crc32(data, self._crcs.get(path, 0))

    def roll(self, stream: Stream, temporary: Path, wiper: Wiper | None = None) -> None:
        """See Claim."""
        with only_whole(self.files, temporary):
            self._check()
            data = self.files.read(temporary)
            number = self._ends[stream].number + 1
            if stream == "log":
                number = decode_header(data, magic=MAGIC_LOG, name=str(temporary)).segment_id
            end, first = Position(number, len(data)), self._manifest.get(name_of(self.layout, stream, number))
            thawed = [] if wiper is None or first is None else list(self._thawed(first))
            self._with_rows |= {(stream, number), *((one.stream, one.number) for one in thawed)}
            self._write(lambda: self._topic.replace(stream, end, data, first, thawed))
            self._ends[stream], self._unsynced[stream] = end, []
            self._crcs[self._paths[stream]] = zlib.crc32(data)
        if first is not None:
            self._drop([first.name, *(one.name for one in thawed)], wiper)
        self._cache.roll(stream, temporary, wiper)

    def rotate(self, segment_id: int) -> None:
        """See Claim."""
        self._check()
        end = self._ends["log"]
        assert end.number == segment_id, "the segment that is appended to"
        self._write(lambda: self._topic.rotate(segment_id, end))
        self._ends["log"] = Position(segment_id + 1, 0)
        self._crcs[self.layout.bin(segment_id)] = self._crcs.pop(self.layout.active, 0)
        self._cache.rotate(segment_id)

    def publish(self, written: Mapping[Path, Path], trims: Iterable[Path] = (), wiper: Wiper | None = None) -> None:
        """See Claim."""
        with only_whole(self.files, *(temporary for path, temporary in written.items() if temporary != path)):
            self._check()
            trimmed = list(trims)
            if not written and not trimmed:
                return
            gone = {self._name(path) for path in [*written, *trimmed]}
            kept = [self._describe(path, temporary) for path, temporary in written.items()]
            if kept:
                self._write(lambda: self._topic.announce([one.key for one in kept]))
            with self._disowned(kept):
                for one, source in zip(kept, written.values(), strict=True):
                    self._objects.put([(one, self._pieces(source, one.checksum.bytes))])
                self._write(lambda: self._topic.publish(kept, gone))
            self._crcs |= {path: one.checksum.crc for path, one in zip(written, kept, strict=True)}
        self._drop(gone, wiper, kept)
        self._cache.publish(written, trimmed, wiper)

    def release(self, *, unfinished: bool = False) -> None:
        """See Claim."""
        if self._is_let_go:
            return
        self._is_let_go, is_free = True, False
        with suppress(StoreError):
            for stream in self._paths:
                self.sync(stream)
            is_free = self._freeze(unfinished=unfinished)
        self._cache.release()
        if not is_free:
            with suppress(StoreError):  # else the lease ends by itself
                self._topic.release(unfinished=unfinished)

    def _freeze(self, *, unfinished: bool) -> bool:
        """Put all that has rows into objects, and let the topic go; False: it has to be let go without."""
        ends, key, at = self._ends, object_key(self._topic, FROZEN), 0
        tail: list[tuple[KeptObject, Iterator[bytes]]] = []
        full = [number for stream, number in sorted(self._with_rows) if stream == "log" and number < ends["log"].number]
        kept = [self._describe(path, path) for path in map(self.layout.bin, full)]
        for stream, path in self._paths.items():
            number, end = msgspec.structs.astuple(ends[stream])
            if (stream, number) in self._with_rows and end:
                checksum = FileChecksum(end, self._crcs[path])
                check_file(self.files, path, checksum)
                name = name_of(self.layout, stream, number)
                tail.append((KeptObject(name, key, checksum, at, self._topic.key), self._pieces(path, end)))
                at += self._objects.size(tail[-1][0])
        kept += [one for one, _ in tail]
        if kept and self._objects.is_away:
            return False
        if kept:
            self._topic.announce({one.key for one in kept})
            with self._disowned(kept):
                for number, one in zip(full, kept, strict=False):
                    self._objects.put([(one, self._pieces(self.layout.bin(number), one.checksum.bytes))])
                if tail:
                    self._objects.put(tail)
        self._cached.note(self._cached_objects(kept))
        if not kept:
            return False
        with self._disowned(kept):
            self._topic.freeze(kept, ends, unfinished=unfinished)
        self._drop([one.name for one in kept], None, kept)
        return True

    @contextmanager
    def _disowned(self, kept: Iterable[KeptObject]) -> Iterator[None]:
        """Remove objects again that were written too late."""
        try:
            yield
        except Fenced:
            with suppress(StoreError):
                self.remove_objects(self._topic.disown({one.key for one in kept}))
            raise

    def _cached_objects(self, kept: Iterable[KeptObject]) -> dict[Path, KeptObject]:
        """The objects to which files of the folder are equal, with these."""
        manifest = self._manifest | {one.name: one for one in kept}
        return {
            path: file.first for path, file in KeptTopic(self._ends, manifest).files(self.layout).items() if file.first
        }

    def remove_objects(self, keys: Collection[str]) -> list[str]:
        """Remove garbage from the bucket; returns the keys of what is still there, for the next claim to remove."""
        if not keys:
            return []
        if not self._objects.delete(keys):
            return list(keys)
        with suppress(StoreError):  # done again, it finds none
            self._topic.forget_garbage(keys)
        return []

    def _drop(self, names: Iterable[str], wiper: Wiper | None, kept: Iterable[KeptObject] = ()) -> None:
        """Take files out of the manifest as it is known here, put others in, and remove the objects of which nothing
        counts any more."""
        old = {self._manifest.pop(name).key for name in names if name in self._manifest}
        for one in kept:
            self._manifest[one.name] = one
            if (number := segment_in(one.name)) is not None:
                self._with_rows.discard(("log", number))
        left = self.remove_objects(old - {one.key for one in self._manifest.values()})
        if wiper is not None:
            wiper.left += map(Path, left)

    def _thawed(self, first: KeptObject) -> Iterator[Thawed]:
        """The rest of the object that has the first bytes of a stream which is wiped."""
        for stream, path in self._paths.items():
            name = name_of(self.layout, stream, self._ends[stream].number)
            one = self._manifest.get(name)
            if one is not None and one.key == first.key and name != first.name:
                if checksum_of(self.files, path, one.checksum.bytes) != one.checksum:
                    raise CorruptFile(f"{path}: is not what is kept; nothing was erased, restart memd")
                yield Thawed(stream, self._ends[stream].number, name, self.files.read_at(path, 0, one.checksum.bytes))

    def _write(self, work: Callable[[], None]) -> None:
        try:
            work()
        except InDoubt as error:
            self._doubt = error
            raise
        except Fenced:
            self._cache.release()
            raise

    def _check(self) -> None:
        if self._doubt is not None:
            raise self._doubt.with_traceback(None)
        self._cache.check()

    def _describe(self, path: Path, source: Path) -> KeptObject:
        """Return the object that a file becomes; raises CorruptFile if it is a full log and not as it was written."""
        name, checksum = self._name(path), checksum_of(self.files, source, self.files.size(source) or 0)
        known = self._crcs.get(path)
        if path == source and known not in (None, checksum.crc):
            raise CorruptFile(f"{path}: something else changed it; nothing was published, restart memd")
        key = object_key(self._topic, PurePosixPath(name).name)
        return KeptObject(name, key, checksum, sealed_by=self._topic.key)

    def _pieces(self, path: Path, size: int) -> Iterator[bytes]:
        return (self.files.read_at(path, at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.layout.directory).as_posix()
