"""A topic's folder as the cache of what is kept in a cluster.

Rule: `make_equal` leaves each file as it is kept. It believes that a file is the object it was, without reading it, if
the note beside it says so, the manifest still names the same object, whose key is never used twice, and neither size
nor time of change are others since. So whatever writes to a file, or is interrupted in it, makes it be read and
compared; only a disk that changes bytes by itself does not, and that is found as it is without a cluster, by the
checksums of what is read. A file is durable before it is noted, not when it is fetched. An index that is lost costs its
topic nothing but time, as it is built from the log; the log itself is nowhere else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from memd.errors import CorruptFile, ObjectMissing, StoreError
from memd.store.cluster.kept import KeptFile, KeptObject, segment_in
from memd.store.cluster.reading_ahead import ReadObject, read_ahead
from memd.store.disk import LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.files import TEMPORARY_SUFFIX, FileChecksum, checksum_of, only_whole
from memd.store.layout import TopicLayout, is_derived
from memd.store.log.recovery import torn_files
from memd.store.log.segment import read_header


class _Noted(msgspec.Struct, frozen=True, array_like=True):
    """A file that was equal to its object."""

    key: str
    at: int
    bytes: int
    changed_at: int


_decoder = msgspec.json.Decoder(dict[str, _Noted])


class CachedFolder:
    """The folder of one topic. For one thread, which has its claim."""

    def __init__(self, files: LocalDisk, layout: TopicLayout) -> None:
        self._files = files
        self._layout = layout
        self._wiper = Wiper(files)

    def make_equal(self, kept: Mapping[Path, KeptFile], read: ReadObject) -> list[StoreError]:
        """Make the folder equal to what is kept. What it loses may have been erased elsewhere, and is overwritten.

        Returns:
            Why files are left out: their objects are missing or damaged, and whoever opens the topic builds them again.

        Raises:
            ObjectMissing: the object of a file is missing that nothing else has.
            CorruptFile: it is not what the manifest says.
            StoreError: the bucket cannot be read, or the folder not be written.
        """
        files, layout, noted = self._files, self._layout, self._noted()
        self._rename_full(kept)
        torn = torn_files(files, [layout.segments])
        own = [layout.active, layout.hot, layout.forbidden]
        has_lost = False
        for path in [*own, *(layout.segments / name for name in files.names(layout.segments))]:
            if path not in kept and path not in torn and files.size(path) is not None:
                has_lost |= self._is_log(path)
                self._wiper.wipe(path)
        missing = {
            path: one for path, one in kept.items() if not self._is_equal(path, one, noted.get(self._name(path)))
        }
        left_out: list[StoreError] = []
        with read_ahead([one.first for one in missing.values() if one.first is not None], read) as ahead:
            for path, one in missing.items():
                try:
                    has_lost |= not self._fetch(path, one, ahead) and self._is_log(path)
                except (ObjectMissing, CorruptFile) as error:
                    if not is_derived(path.name):
                        raise type(error)(self._lost(path, error)) from error
                    left_out.append(error)
                    self._wiper.wipe(path)
        if has_lost:
            for name in files.names(layout.lexical):
                self._wiper.wipe(layout.lexical / name)
        for folder in (layout.segments, layout.directory, layout.data_dir):
            files.sync_directory(folder)
        return left_out

    def note(self, objects: Mapping[Path, KeptObject]) -> None:
        """Note which files are equal to their objects. Without the note they are compared, so no error is one."""
        files, known, noted = self._files, self._noted(), {}
        with suppress(StoreError):
            for path, one in objects.items():
                found = _Noted(one.key, one.at, one.checksum.bytes, files.changed_at(path))
                if files.size(path) != one.checksum.bytes:
                    continue
                name = self._name(path)
                if known.get(name) != found:
                    with closing(files.append_to(path)) as file:
                        file.sync()
                noted[name] = found
            if noted != known:
                path, data = self._layout.cached, msgspec.json.encode(noted)
                temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
                with only_whole(files, temporary), closing(files.create(temporary)) as file:
                    file.write(data)
                files.rename(temporary, path)

    def _noted(self) -> dict[str, _Noted]:
        path = self._layout.cached
        try:
            return {} if self._files.size(path) is None else _decoder.decode(self._files.read(path))
        except (StoreError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def _is_equal(self, path: Path, kept: KeptFile, noted: _Noted | None) -> bool:
        files, first = self._files, kept.first
        if first is not None and not kept.rows and noted is not None and files.size(path) == noted.bytes:
            is_known = (noted.key, noted.at, noted.bytes) == (first.key, first.at, first.checksum.bytes)
            if is_known and noted.changed_at == files.changed_at(path):
                return True
        checksum = kept.checksum
        return files.size(path) == checksum.bytes and checksum_of(files, path, checksum.bytes) == checksum

    def _fetch(self, path: Path, kept: KeptFile, read: ReadObject) -> bool:
        """Fetch a file, not durably; whether what it was is only continued by what it becomes."""
        files, size = self._files, 0
        before = files.size(path)
        crc = crc_before = 0
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        with only_whole(files, temporary):
            with closing(files.create(temporary)) as appender:
                for piece in _pieces(kept, read):
                    appender.write(piece)
                    crc_before = zlib.crc32(piece[: max(0, (before or 0) - size)], crc_before)
                    crc, size = zlib.crc32(piece, crc), size + len(piece)
            if FileChecksum(size, crc) != kept.checksum:
                place = "its object" if kept.first is None else f"the object {kept.first.key}"
                raise CorruptFile(f"{path.name}: {place} in the bucket does not match its checksum; restore the bucket")
        if before is None:
            files.rename(temporary, path)
            return True
        is_beginning = before <= size and checksum_of(files, path, before).crc == crc_before
        self._wiper.put_in_place(temporary, path)
        return is_beginning

    def _rename_full(self, kept: Mapping[Path, KeptFile]) -> None:
        """Where others have filled the segment that was appended to here, it has another name since."""
        header = read_header(self._files, self._layout.active)
        full = None if header is None or header.segment_id < 1 else self._layout.bin(header.segment_id)
        if full is not None and full in kept and self._files.size(full) is None:
            self._files.rename(self._layout.active, full)

    def _lost(self, path: Path, error: StoreError) -> str:
        """The words about a file that is lost and cannot be built again."""
        return (
            f"topic {self._layout.topic_id}: {self._name(path)} is nowhere else, and cannot be had from the bucket "
            f"({str(error).rpartition('; ')[0]}); put that object back, from an older version or a copy of the bucket, "
            "or from the data_dir of a daemon that had the topic"
        )

    def _is_log(self, path: Path) -> bool:
        return path == self._layout.active or segment_in(path.name) is not None

    def _name(self, path: Path) -> str:
        return path.relative_to(self._layout.directory).as_posix()


def _pieces(kept: KeptFile, read: ReadObject) -> Iterable[bytes]:
    if kept.first is not None:
        yield from read(kept.first)
    yield from kept.rows
