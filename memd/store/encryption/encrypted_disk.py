"""A disk on which whatever holds text or vectors is encrypted: a `LocalDisk` over another.

Rule: nothing of a topic reaches the disk below but as frames, temporary files included. Native libraries get their
files in anonymous memory, or none at all. What is no topic's (the lock, addresses, key files, embedding models) passes
as it is.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from memd.errors import CorruptFile, StoreError, StoreWriteFailed, WrongKey
from memd.store.disk import LocalDisk
from memd.store.encryption.encrypted_file import EncryptedAppender, EncryptedFile, check_header, read_whole
from memd.store.encryption.frames import DataKey, FrameTable, Random
from memd.store.encryption.key_files import MasterKey, read_topic_key, write_topic_key
from memd.store.files import TEMPORARY_SUFFIX, Appender, FileChecksum, replace_file, write_pieces
from memd.store.layout import (
    AUDIT_NAME,
    CONVERSION_NAME,
    DIGESTS_SUFFIX,
    ERASURES_NAME,
    FORMER_NAMES,
    MODELS_NAME,
    RECEIPTS_NAME,
    RECEIPTS_OLD_NAME,
    TOPIC_KEY_NAME,
)
from memd.store.log.format import HEADER_BYTES
from memd.store.syscalls import WRITE_REMEDY, anonymous_file, reading, writing

_PLAIN_FOLDERS = {MODELS_NAME, AUDIT_NAME, ERASURES_NAME}
"""Of the data directory: what is in them quotes nothing, but for the digests of what is being erased."""
_FILES_KEPT = 1024
_FOLDERS_KEPT = 65_536
_PIECE_BYTES = 4 << 20


class KeyRing:
    """The keys of one data directory. Any thread may use it."""

    def __init__(self, disk: LocalDisk, data_dir: Path, directory: str, key: DataKey, random: Random) -> None:
        """`directory`: its id; `key`: the directory's own, which wraps those of topics."""
        self.data_dir = data_dir
        self.directory = directory
        self.key = key
        self._plain_files, self._random = disk, random
        self._depth = len(data_dir.parts)
        self._keys: dict[Path, DataKey] = {}
        self._lock = threading.Lock()

    def of_copy(self, data_dir: Path) -> KeyRing:
        """Return the ring of a copy of the directory."""
        return KeyRing(self._plain_files, data_dir, self.directory, self.key, self._random)

    def folder_of(self, path: Path) -> Path | None:
        """Return the folder whose key encrypts a file: a topic's, or the data directory for what is no topic's.

        None: no key does.
        """
        parts = path.parts[self._depth :]
        name = parts[-1].removesuffix(TEMPORARY_SUFFIX) if parts else ""
        if len(parts) < 2:
            return self.data_dir if name in (RECEIPTS_NAME, RECEIPTS_OLD_NAME) else None
        if parts[0] == ERASURES_NAME and len(parts) == 2 and name.endswith(DIGESTS_SUFFIX):
            return self.data_dir
        is_aside = parts[0] == ERASURES_NAME and len(parts) > 2  # a topic's folder, put aside
        depth = 2 if parts[0] == CONVERSION_NAME or is_aside else 1
        is_plain = len(parts) == depth + 1 and name in (TOPIC_KEY_NAME, FORMER_NAMES)
        if (parts[0] in _PLAIN_FOLDERS and not is_aside) or len(parts) <= depth or is_plain:
            return None
        return self.data_dir.joinpath(*parts[:depth])

    def key_of(self, folder: Path, *, writing: bool = False) -> DataKey:
        """Return the key of a folder. Who is `writing` to a folder without files gets a new one.

        Raises:
            WrongKey: there are files, and no key that fits.
        """
        if folder == self.data_dir:
            return self.key
        key = self._keys.get(folder)
        path = folder / TOPIC_KEY_NAME
        if key is not None and not (writing and self._plain_files.size(path) is None):
            return key
        with self._lock:
            if writing and self._plain_files.size(path) is None and not self._has_files(folder):
                key = write_topic_key(self._plain_files, path, self.directory, self.key, self._random)
            else:
                self._keys.pop(folder, None)
                key = read_topic_key(self._plain_files, path, self.directory, self.key)
            self._keys[folder] = key
            return key

    def forget(self, path: Path) -> None:
        """Read the key of a topic again: its folder or its key file was moved, replaced or removed."""
        with self._lock:
            self._keys.pop(path.parent if path.name == TOPIC_KEY_NAME else path, None)

    def _has_files(self, folder: Path) -> bool:
        for name in self._plain_files.names(folder):
            inside = folder / name
            is_folder = self._plain_files.is_directory(inside)
            if self._plain_files.names(inside) if is_folder else name != FORMER_NAMES:
                return not name.startswith(TOPIC_KEY_NAME)
        return False


class EncryptedDisk:
    """See the module. It is a `LocalDisk`."""

    def __init__(
        self,
        disk: LocalDisk,
        rings: Sequence[KeyRing],
        master: MasterKey | None = None,
    ) -> None:
        """`rings`: of each data directory that is encrypted; all other paths pass as they are."""
        self.master = master
        """The key that wraps those of the rings; None: it is not known here."""
        self.plain_files = disk
        """The disk below."""
        self.rings = tuple(rings)
        self._files: OrderedDict[Path, EncryptedFile] = OrderedDict()
        self._folders: dict[Path, tuple[KeyRing, Path] | None] = {}
        self._lock = threading.Lock()
        # Names, locks and the disk itself are those of the disk below.
        self.identity, self.names, self.is_directory = disk.identity, disk.names, disk.is_directory
        self.changed_at, self.may_write = disk.changed_at, disk.may_write
        self.make_directory, self.remove_directory = disk.make_directory, disk.remove_directory
        self.link, self.sync_directory = disk.link, disk.sync_directory
        self.lock, self.confirm_lock, self.is_locked = disk.lock, disk.confirm_lock, disk.is_locked
        self.room, self.try_writing = disk.room, disk.try_writing

    # Reading

    def size(self, path: Path) -> int | None:
        """See Files."""
        raw_size = self.plain_files.size(path)
        if not raw_size:
            return raw_size
        try:
            key = self._key(path)
        except WrongKey:  # whoever reads the file is told
            return raw_size
        return raw_size if key is None else self._file(path, key).size(self.plain_files, raw_size)

    def read(self, path: Path) -> bytes:
        """See Files."""
        key, data = self._key(path), self.plain_files.read(path)
        if key is None or not data:
            return data
        return read_whole(key, data, path)

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        """See Files."""
        return self.read_pieces(path, [(offset, length)])[0]

    def read_pieces(self, path: Path, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """See Files."""
        key = self._key(path)
        if key is None:
            return self.plain_files.read_pieces(path, pieces)
        file = self._files.get(path)
        if (
            file is not None
            and file.key is key
            and (covered := file.read_covered(self.plain_files, pieces)) is not None
        ):
            return covered
        found: list[bytes] = []
        for _ in range(2):  # again where the file was replaced, or cut and written anew by another process, meanwhile
            raw_size = self.plain_files.size(path)
            if not raw_size:
                return self.plain_files.read_pieces(path, pieces)  # raises where there is no file
            file = self._file(path, key)
            if file.table.place == HEADER_BYTES:
                check_header(self.plain_files.read_at(path, 0, HEADER_BYTES), key, path)
            found, all_opened = file.read(self.plain_files, raw_size, pieces)
            if all_opened:
                break
            self._forget(path)
        return found

    # Writing

    def create(self, path: Path) -> Appender:
        """See Files."""
        key = self._key(path, writing=True)
        self._forget(path)
        inner = self.plain_files.create(path)
        return inner if key is None else EncryptedAppender(inner, key, None, secrets.token_bytes)

    def append_to(self, path: Path) -> Appender:
        """See Files."""
        key = self._key(path, writing=True)
        if key is None:
            return self.plain_files.append_to(path)
        self._forget(path)
        table = self._whole_table(path, key)
        inner = self.plain_files.append_to(path)
        return EncryptedAppender(inner, key, table, secrets.token_bytes, lambda size: self._cut(path, key, size))

    def _whole_table(self, path: Path, key: DataKey) -> FrameTable | None:
        """The frames of a file; None if it has not even a header."""
        raw_size, table = self.plain_files.size(path) or 0, FrameTable(key)
        if raw_size < HEADER_BYTES:
            return None
        check_header(self.plain_files.read_at(path, 0, HEADER_BYTES), key, path)
        table.cover(lambda offset, length: self.plain_files.read_at(path, offset, length), raw_size)
        return table

    def _cut(self, path: Path, key: DataKey, size: int) -> tuple[Appender, FrameTable]:
        """Replace a file by its first `size` plain bytes, which end within a frame; a crash leaves one or the other."""
        replace_file(self, path, self.read(path)[:size])
        table = self._whole_table(path, key)
        assert table is not None, "it has bytes"
        return self.plain_files.append_to(path), table

    def rename(self, old: Path, new: Path) -> None:
        """See Files."""
        self.plain_files.rename(old, new)
        self._forget(old)
        self._forget(new)

    def remove(self, path: Path) -> None:
        """See Files."""
        self.plain_files.remove(path)
        self._forget(path)

    def wipe(self, path: Path) -> bool:
        """See LocalDisk."""
        is_gone = self.plain_files.wipe(path)
        self._forget(path)
        return is_gone

    def replace_wiping(self, new: Path, path: Path) -> bool:
        """See LocalDisk."""
        is_gone = self.plain_files.replace_wiping(new, path)
        self._forget(path)
        return is_gone

    # Native libraries

    def save_native(self, path: Path, save: Callable[[str], None]) -> None:
        """See LocalDisk. The library writes to anonymous memory."""
        if self._key(path, writing=True) is None:
            self.plain_files.save_native(path, save)
            return
        self.plain_files.confirm_lock()
        with anonymous_file() as memory:
            with writing(path):
                try:
                    save(memory.name)
                except RuntimeError as error:  # pybind11 turns C++ exceptions into this
                    raise StoreWriteFailed(f"{path}: the index could not be made ({error}); {WRITE_REMEDY}") from error
            write_pieces(self, path, memory.pieces(_PIECE_BYTES))

    def load_native(self, path: Path, expected: FileChecksum, load: Callable[[str], None]) -> None:
        """See LocalDisk. The library reads anonymous memory; the tags of the frames vouch for it."""
        key = self._key(path)
        if key is None:
            self.plain_files.load_native(path, expected, load)
            return
        problem = CorruptFile(f"{path}: is missing or does not match its checksum")
        raw_size = self.plain_files.size(path)
        if not raw_size or expected.bytes <= 0:
            raise problem
        with anonymous_file() as memory, reading(path):
            with memory.filled(expected.bytes) as view:
                if not self._file(path, key).read_into(self.plain_files, raw_size, view):
                    raise problem
            load(memory.name)

    def damage_of(self, path: Path) -> str | None:
        """See Files."""
        try:
            key = None if self.plain_files.is_directory(path) else self._key(path)
            if key is None or not self.plain_files.size(path):
                return None
            is_whole = check_header(self.plain_files.read_at(path, 0, HEADER_BYTES), key, path)
        except StoreError as error:
            return str(error)
        return None if is_whole else f"the header (bytes 0 to {HEADER_BYTES}) of the encrypted file is damaged"

    def encrypts(self, path: Path) -> bool:
        """See LocalDisk."""
        return self._folder(path) is not None

    def _folder(self, path: Path) -> tuple[KeyRing, Path] | None:
        if path in self._folders:
            return self._folders[path]
        ring = next((one for one in self.rings if path.is_relative_to(one.data_dir)), None)
        folder = None if ring is None else ring.folder_of(path)
        if len(self._folders) >= _FOLDERS_KEPT:
            self._folders = {}
        found = self._folders[path] = None if ring is None or folder is None else (ring, folder)
        return found

    def _key(self, path: Path, *, writing: bool = False) -> DataKey | None:
        """The key that encrypts a file; None: it is not encrypted."""
        found = self._folder(path)
        return None if found is None else found[0].key_of(found[1], writing=writing)

    def _file(self, path: Path, key: DataKey) -> EncryptedFile:
        identity = self.plain_files.identity(path)
        with self._lock:
            file = self._files.get(path)
            if file is None or file.identity != identity or file.key is not key:
                file = self._files[path] = EncryptedFile(path, key, identity, FrameTable(key))
                while len(self._files) > _FILES_KEPT:
                    self._files.popitem(last=False)
            self._files.move_to_end(path)
            return file

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._files.pop(path, None)
        for ring in self.rings:
            ring.forget(path)
