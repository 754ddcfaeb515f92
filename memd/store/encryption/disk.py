"""The disk of a data directory: plain, or a layer that encrypts all files with text or vectors. Files are read and
appended to by plain offsets.

Rule: a directory is encrypted if it has a `memd.key`. Without its key nothing is read and nothing written; with a key,
a directory with topics in plain text is refused: only `memd encrypt` converts it. The `cryptography` package is an
extra, imported when a key is first used.

Topics reach the disk below only as frames, temporary files included. Files of no topic (the lock, addresses, key files,
embedding models) pass unchanged. Undecryptable bytes read as zeros, never as other bytes. A file without a readable
frame is refused, unless it is empty or its header names the key: with a wrong key, the caller would take all of it for
lost.
"""

from __future__ import annotations

import secrets
import threading
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path

from memd.errors import CorruptFile, DamagedKey, ForeignFile, StoreError, WrongKey
from memd.settings.model import Config, EncryptionSettings
from memd.store import layout
from memd.store.disk import TEMPORARY_SUFFIX, FileChecksum, LocalDisk, make_folder, pieces_of, replace_file
from memd.store.encryption.frames import (
    FRAME_BYTES_MAX,
    DataKey,
    DirectoryKeyFile,
    FrameTable,
    MasterKey,
    TopicKeyFile,
    frame_at,
    new_key,
    read_key_file,
    read_topic_key,
    write_key_file,
    write_topic_key,
)
from memd.store.log.format import (
    FLAG_ENCRYPTED,
    HEADER_BYTES,
    MAGIC_ENCRYPTED,
    MAGIC_JOURNAL,
    MAGIC_LOG,
    MAGIC_META,
    Header,
    decode_any_header,
    encode_header,
)
from memd.wording import counted, pip_install

_INSTALL = f"encryption needs the cryptography package: {pip_install('memd-proxy[encryption]')}"
_PLACES = "encryption.key_file, MEMD_ENCRYPTION_KEY or, where the command takes it, --key-stdin"
_GIVE = f"give its key with {_PLACES}"
UNFINISHED = {
    state: f"is being {changed}: `memd encrypt {command}` was begun and not finished: run it again"
    for state, changed, command in (
        ("encrypting", "encrypted", "on"),
        ("decrypting", "written in plain text", "off"),
        ("renewing", "encrypted anew", "rekey --data"),
    )
}
"""By `DirectoryKeyFile.state`: the words for a directory with an unfinished command."""
_OWN_KINDS = (MAGIC_LOG, MAGIC_JOURNAL, MAGIC_META)

_PLAIN_FOLDERS = {layout.MODELS_NAME, layout.AUDIT_NAME, layout.ERASURES_NAME}
"""Folders in the data directory that quote no text, except the digests of pending erasures."""
_OF_THE_DISK_BELOW = (
    *("identity", "names", "is_directory", "changed_at", "may_write", "make_directory", "remove_directory", "link"),
    *("rename", "remove", "wipe", "sync", "close", "sync_directory"),
    *("lock", "confirm_lock", "is_locked", "room", "try_writing"),
)
"""Names, locks and the disk itself do not depend on encryption."""
_FILES_KEPT, _FOLDERS_KEPT = 1024, 65_536


def check_header(data: bytes, key: DataKey, path: Path) -> bool:
    """Return whether a file begins with an intact header of an encrypted file. Raises ForeignFile: it is not encrypted,
    unlike its neighbours, or with another key."""
    header = decode_any_header(data)
    if header is None:
        return False
    if not header.flags & FLAG_ENCRYPTED:
        raise ForeignFile(
            f"{path}: is not encrypted, but its data directory is; move it away, or put the encrypted file back"
        )
    if header.topic != key.id:
        raise ForeignFile(
            f"{path}: was encrypted with another key than the topic.key beside it: put back the file or the key that "
            "belong together, out of a backup if need be"
        )
    return True


class EncryptedDisk(LocalDisk):
    """A disk that encrypts over another one; see the module. Thread-safe."""

    def __init__(self, disk: LocalDisk, directory: str, key: DataKey, *data_dirs: Path) -> None:
        """`directory`: the id of the data directory; `key`: its key, which wraps those of topics; `data_dirs`: its
        path, and copies of it. All other paths pass unchanged."""
        self.plain_files = disk
        """The disk below."""
        self._directory, self._directory_key, self._data_dirs = directory, key, data_dirs
        self._keys: dict[Path, tuple[int, DataKey]] = {}
        """The keys of topics by their folders, each with the time of the last change of its file."""
        self._keys_lock = threading.Lock()
        self._tables: OrderedDict[Hashable, tuple[Path, FrameTable]] = OrderedDict()
        """The frames of files, by identity, each with the path that it was read from."""
        self._folder = lru_cache(_FOLDERS_KEPT)(self._folder_of)
        self._lock = threading.Lock()
        for name in _OF_THE_DISK_BELOW:
            setattr(self, name, getattr(disk, name))

    def with_copy(self, data_dir: Path) -> EncryptedDisk:
        """Return a disk that also reads and writes a copy of the data directory."""
        return EncryptedDisk(self.plain_files, self._directory, self._directory_key, *self._data_dirs, data_dir)

    # Reading

    def size(self, path: Path) -> int | None:
        """See LocalDisk."""
        raw_size = self.plain_files.size(path)
        if not raw_size:
            return raw_size
        try:
            key = self._key(path)
            return raw_size if key is None else self._table(path, key).size(raw_size)
        except StoreError:  # reading the file raises it
            return raw_size

    def read(self, path: Path) -> bytes:
        """See LocalDisk."""
        if self._key(path) is None or not self.plain_files.size(path):
            return self.plain_files.read(path)
        return self.read_at(path, 0, self.size(path) or 0)

    def read_pieces(self, path: Path, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """See LocalDisk."""
        key = self._key(path)
        if key is None:
            return self.plain_files.read_pieces(path, pieces)
        found: list[bytes] = []
        for _ in range(2):  # a second time if another process replaced, or cut and rewrote, the file meanwhile
            raw_size = self.plain_files.size(path)
            if not raw_size:
                return self.plain_files.read_pieces(path, pieces)  # raises if there is no file
            table = self._table(path, key)
            is_new = table.place == HEADER_BYTES
            begins = self.plain_files.read_at(path, 0, HEADER_BYTES + FRAME_BYTES_MAX) if is_new else b""
            is_its_key = not is_new or check_header(begins, key, path)
            found, all_opened = table.read(raw_size, pieces)
            if not is_its_key and table.salt is None and frame_at(begins, HEADER_BYTES) is not None:
                raise CorruptFile(
                    f"{path}: nothing in it can be decrypted: it is damaged or another topic's; put the file back, out "
                    "of a backup if need be, or move it away and go on without what it holds"
                )
            if all_opened:
                break
            self._forget(path)
        return found

    # Writing

    def create(self, path: Path) -> None:
        """See LocalDisk."""
        self._key(path, writing=True)
        self.plain_files.create(path)
        self._forget(path)  # systems use the number of a removed file again

    def append(self, path: Path, data: bytes, identity: Hashable | None = None) -> None:
        """See LocalDisk."""
        if (key := self._key(path, writing=True)) is not None and data:
            if table := self._whole_table(path, key):
                data = table.following(data)
            else:
                magic = next((kind for kind in _OWN_KINDS if data.startswith(kind)), MAGIC_ENCRYPTED)
                header = Header(
                    magic=magic, dimension=0, flags=FLAG_ENCRYPTED, segment_id=0, fingerprint="", topic=key.id
                )
                data = encode_header(header) + FrameTable(key, lambda pieces: []).following(data)
        self.plain_files.append(path, data, identity)

    def cut(self, path: Path, size: int) -> None:
        """See LocalDisk. A cut within a frame replaces the file; a crash leaves one of the two."""
        key = self._key(path, writing=True)
        if key is None:
            self.plain_files.cut(path, size)
            return
        table = self._whole_table(path, key)
        kept = None if table is None else table.upto(size)
        self._forget(path)
        if kept is None:
            replace_file(self, path, self.read(path)[:size])
        else:
            self.plain_files.cut(path, kept.place)

    def _whole_table(self, path: Path, key: DataKey) -> FrameTable | None:
        """Return the frames of a file; None if it lacks a header."""
        raw_size = self.plain_files.size(path) or 0
        if raw_size < HEADER_BYTES:
            return None
        if raw_size < self._table(path, key).place:  # another process has cut it
            self._forget(path)
        table = self._table(path, key)
        if table.place == HEADER_BYTES:
            check_header(self.plain_files.read_at(path, 0, HEADER_BYTES), key, path)
        table.cover(raw_size)
        return table

    def map(self, path: Path, expected: FileChecksum) -> memoryview:
        """See LocalDisk."""
        if self._key(path) is None:
            return self.plain_files.map(path, expected)
        data = bytearray()
        for piece in pieces_of(self, path) if self.size(path) == expected.bytes else ():
            data += piece
        if not data or FileChecksum(len(data), zlib.crc32(data)) != expected:
            raise CorruptFile(f"{path}: is missing or does not match its checksum")
        return memoryview(data).toreadonly()

    def damage_of(self, path: Path) -> str | None:
        """See LocalDisk."""
        is_key = path.name == layout.TOPIC_KEY_NAME
        try:
            of = path.with_suffix("") if is_key else path  # any file that the key encrypts
            key = None if self.plain_files.is_directory(path) else self._key(of)
            if key is None or is_key or not self.plain_files.size(path):
                return None
            is_whole = check_header(self.plain_files.read_at(path, 0, HEADER_BYTES), key, path)
        except StoreError as error:
            return str(error)
        return None if is_whole else f"the header (bytes 0 to {HEADER_BYTES}) of the encrypted file is damaged"

    def put_key_back(self, copy: Path, topic: Path) -> None:
        """Give a copy of a topic's folder the topic's key, in place of a missing or damaged one, if it is that of all
        files there."""
        files, own = self.plain_files, topic / layout.TOPIC_KEY_NAME
        folders = copy, copy / layout.TopicLayout(copy.parent, copy.name).segments.name
        paths = [one / name for one in folders for name in files.names(one) if not files.is_directory(one / name)]
        with suppress(StoreError):
            key = read_topic_key(files, own, self._directory, self._directory_key)
            headers = (decode_any_header(files.read_at(path, 0, HEADER_BYTES)) for path in paths)
            if {one.topic for one in headers if one is not None} == {key.id}:
                replace_file(files, copy / layout.TOPIC_KEY_NAME, files.read(own))

    def encrypts(self, path: Path) -> bool:
        """See LocalDisk."""
        return self._folder(path) is not None

    def _folder_of(self, path: Path) -> Path | None:
        """Return the folder whose key encrypts a file: a topic's, or the data directory for files of no topic; None if
        it is not encrypted."""
        data_dir = next((one for one in self._data_dirs if path.is_relative_to(one)), None)
        if data_dir is None:
            return None
        parts = path.relative_to(data_dir).parts
        name = parts[-1].removesuffix(TEMPORARY_SUFFIX) if parts else ""
        if len(parts) < 2:
            return data_dir if name in (layout.RECEIPTS_NAME, layout.RECEIPTS_OLD_NAME) else None
        if parts[0] == layout.ERASURES_NAME and len(parts) == 2 and name.endswith(layout.DIGESTS_SUFFIX):
            return data_dir
        is_aside = parts[0] == layout.ERASURES_NAME and len(parts) > 2  # a topic's folder, moved aside
        depth = 2 if parts[0] == layout.CONVERSION_NAME or is_aside else 1
        is_plain = len(parts) == depth + 1 and name in (layout.TOPIC_KEY_NAME, layout.FORMER_NAMES)
        if (parts[0] in _PLAIN_FOLDERS and not is_aside) or len(parts) <= depth or is_plain:
            return None
        return data_dir.joinpath(*parts[:depth])

    def _key(self, path: Path, *, writing: bool = False) -> DataKey | None:
        """Return the key that encrypts a file; None if it is not encrypted. With `writing`, a folder without files gets
        a new key. Raises WrongKey: there are files, and no matching key."""
        folder = self._folder(path)
        if folder is None or folder in self._data_dirs:
            return None if folder is None else self._directory_key
        files, place = self.plain_files, folder / layout.TOPIC_KEY_NAME
        if (known := self._keys.get(folder)) is not None and known[0] == files.changed_at(place):
            return known[1]
        with self._keys_lock:
            if writing and files.size(place) is None and not self._has_files(folder):
                key = write_topic_key(files, place, self._directory, self._directory_key)
            else:
                key = read_topic_key(files, place, self._directory, self._directory_key)
            self._keys[folder] = files.changed_at(place), key
            return key

    def _has_files(self, folder: Path) -> bool:
        for name in self.plain_files.names(folder):
            inside = folder / name
            is_folder = self.plain_files.is_directory(inside)
            if self.plain_files.names(inside) if is_folder else name != layout.FORMER_NAMES:
                return not name.startswith(layout.TOPIC_KEY_NAME)
        return False

    def _table(self, path: Path, key: DataKey) -> FrameTable:
        identity = self.plain_files.identity(path)
        with self._lock:
            known, table = self._tables.pop(identity, (None, None))
            if table is None or known != path or table.key is not key:
                table = FrameTable(key, partial(self.plain_files.read_pieces, path))
            self._tables[identity] = path, table
            if len(self._tables) > _FILES_KEPT:
                self._tables.popitem(last=False)
            return table

    def _forget(self, path: Path) -> None:
        """Drop a file's frames from the cache."""
        with self._lock:
            self._tables.pop(self.plain_files.identity(path), None)


# The disk of a data directory


def disk_of(config: Config, plain: LocalDisk | None = None, *, creating: bool = False) -> LocalDisk:
    """Return a disk that reads and writes the data directory of the settings, with their key. `plain`: the disk below;
    `creating`: encrypts a directory without topics if there is a key. Raises WrongKey: the key is missing, or not the
    one of this directory, or it is not encrypted yet; StoreError: encryption is requested and its package is not
    installed, or the restoration is not finished."""
    disk, data_dir, settings = plain or LocalDisk(), config.data_dir, config.encryption
    layout.check_restored(disk, data_dir)
    is_encrypted = disk.size(data_dir / layout.KEY_NAME) is not None
    if not is_encrypted and not settings.is_on:
        return disk
    if not settings.is_on:
        raise WrongKey(f"{data_dir}: is encrypted; {_GIVE}")
    check_installed()
    if not is_encrypted and (names := layout.topic_folders_in(disk, data_dir)):
        check_not_lost(disk, data_dir)
        raise WrongKey(
            f"{data_dir}: a key is given, but there is plain text ({counted(len(names), 'topic')}); run "
            "`memd encrypt on` first, while no daemon runs, or take the key out of the settings"
        )
    master = master_key(settings)
    if not is_encrypted and creating:
        make_folder(disk, data_dir)
        with disk.lock(data_dir / layout.LOCK_NAME):
            if disk.size(data_dir / layout.KEY_NAME) is None:  # else another process has just made them
                made = master.key_file(secrets.token_bytes(16).hex(), new_key())
                write_key_file(disk, data_dir / layout.KEY_NAME, made)
    return encrypted_disk(data_dir, master, disk) if is_encrypted or creating else disk


def key_id_of(disk: LocalDisk, data_dir: Path) -> str | None:
    """Return the id of the key that wraps those of the topics; None if the directory is not encrypted. Raises
    DamagedKey: neither its `memd.key` nor the keys of its topics, which name it too, can be read."""
    path, named = data_dir / layout.KEY_NAME, set[str]()
    if disk.size(path) is None:
        return None
    try:
        return read_key_file(disk, path, DirectoryKeyFile).key_id
    except DamagedKey:
        for topic_id in layout.topic_folders_in(disk, data_dir):
            with suppress(WrongKey):
                named.add(read_key_file(disk, layout.TopicLayout(data_dir, topic_id).key, TopicKeyFile).by)
        if len(named) != 1:
            raise
        return named.pop()


def check_not_lost(disk: LocalDisk, data_dir: Path) -> None:
    """Make sure that a directory without `memd.key` has not lost it. Raises WrongKey: it has."""
    for topic_id in layout.topic_folders_in(disk, data_dir):
        topic = layout.TopicLayout(data_dir, topic_id)
        has_key = disk.size(topic.key) is not None
        paths = (topic.active, topic.hot, topic.forbidden, *map(topic.bin, topic.segment_ids(disk)))
        headers = (decode_any_header(disk.read_at(one, 0, HEADER_BYTES)) for one in paths if disk.size(one))
        if has_key or any(one is not None and one.flags == FLAG_ENCRYPTED for one in headers):
            missing = "it" if has_key else f"it, and the {layout.TOPIC_KEY_NAME} of each topic,"
            raise WrongKey(
                f"{data_dir / layout.KEY_NAME}: is missing, but {topic_id} is encrypted; put {missing} back, out of a "
                "backup: nothing can be read without that (where there is none, remove the folders of the topics)"
            )


def check_disk(files: LocalDisk, data_dir: Path) -> None:
    """Make sure that a disk writes to an encrypted directory with its key. Raises WrongKey: it would write plain text
    there."""
    if files.size(data_dir / layout.KEY_NAME) is not None and not files.encrypts(data_dir / layout.RECEIPTS_NAME):
        raise WrongKey(f"{data_dir}: is encrypted; {_GIVE}")


def master_key(settings: EncryptionSettings) -> MasterKey:
    """Return the master key of the settings. Raises WrongKey: there is none, or the file cannot be one."""
    check_installed()
    if settings.key:
        return MasterKey.parsed(settings.key.encode(), "the key in MEMD_ENCRYPTION_KEY, or on standard input,")
    if settings.key_file:
        try:
            return MasterKey.in_file(Path(settings.key_file))
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            remedy = "put the key, or your copy of it, where encryption.key_file says"
            raise WrongKey(f"{settings.key_file}: there is no such file; {remedy}") from None
    raise WrongKey(f"there is no key; give one with {_PLACES}")


def encrypted_disk(data_dir: Path, master: MasterKey, disk: LocalDisk) -> EncryptedDisk:
    """Return the encrypted disk of a directory that has a `memd.key`. Raises WrongKey: the key is not the directory's,
    or a conversion of it is unfinished."""
    path = data_dir / layout.KEY_NAME
    found = read_key_file(disk, path, DirectoryKeyFile)
    key, _ = master.opened(path, found)
    if found.state != "whole":
        raise WrongKey(f"{data_dir}: {UNFINISHED[found.state]}")
    return EncryptedDisk(disk, found.directory, key, data_dir)


def check_installed() -> None:
    """Raise StoreError unless the encryption package is installed."""
    if find_spec("cryptography") is None:
        raise StoreError(_INSTALL)
