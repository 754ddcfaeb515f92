"""The keys: the master key, 32 bytes that the owner keeps in a file, a variable or on standard input; and on the disk a
directory's `memd.key`, wrapped by the master key, and each topic's `topic.key`.

Rule: the master key never appears in a message; a file that others can read is refused before its contents are used. A
key file is replaced as a whole, durably, and a key is on the disk before anything that it encrypts. Errors distinguish
a damaged key file, a wrong key and another directory's key.

`memd.key` and `topic.key` are JSON with a CRC32 over their other members. The master key wraps the directory's key
(with HKDF over the directory's random id), and that wraps the topics' keys, all with AES-256-GCM and random nonces. So
`memd encrypt rekey` replaces one file, and destroying a `topic.key` destroys all that it encrypts.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from memd.errors import DamagedKey, WrongKey
from memd.store.disk import LocalDisk, create_private, read_private, replace_file
from memd.store.encryption.frames import KEY_BYTES, DataKey, derived

_FILE_BYTES_MAX = 4096
OTHERS = 0o077
"""Permissions of all but the owner."""
_FORM = "32 bytes: as they are, as 64 hexadecimal digits or in base64 (`memd encrypt key FILE` makes one)"


class MasterKey:
    """The key that wraps the keys of data directories."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 32 bytes."""
        self._secret = secret
        self.id = derived(secret, b"", b"master id", 8).hex()
        """Distinguishes master keys; reveals nothing of the key."""

    def wrapping(self, directory: bytes) -> DataKey:
        """Return the key that wraps those of one data directory."""
        return DataKey(derived(self._secret, directory, b"wrapping"))

    def key_file(
        self, directory: str, key: DataKey, state: State = "whole", former: DataKey | None = None
    ) -> DirectoryKeyFile:
        """Return the `memd.key` of a directory with these keys."""
        by = self.wrapping(bytes.fromhex(directory))
        return DirectoryKeyFile(
            directory=directory,
            master=self.id,
            state=state,
            key_id=key.id.hex(),
            key=_wrapped(by, key, directory),
            former="" if former is None else _wrapped(by, former, directory),
        )

    def opened(self, path: Path, found: DirectoryKeyFile) -> tuple[DataKey, DataKey | None]:
        """Open the directory's key, and the former one during a renewal. Raises WrongKey: this is not the directory's
        master key."""
        if found.master != self.id:
            raise WrongKey(
                f"{path.parent}: was encrypted with the key {found.master}, the one that was given is {self.id}: "
                "another directory's, or one from before a `memd encrypt rekey`; give the right key"
            )
        by = self.wrapping(bytes.fromhex(found.directory))
        former = _unwrapped(by, found.former, found.directory, path) if found.former else None
        return _unwrapped(by, found.key, found.directory, path), former

    @classmethod
    def parsed(cls, data: bytes, where: str) -> MasterKey:
        """Read a key; errors call its place `where`. Raises WrongKey: it is not one."""
        text = data.strip()
        secret = data if len(data) == KEY_BYTES else _decoded(text)
        if secret is None or len(secret) != KEY_BYTES:
            raise WrongKey(f"{where}: holds no key: it must be {_FORM}")
        return cls(secret)

    @classmethod
    def in_file(cls, path: Path) -> MasterKey:
        """Read the key in a file. Raises WrongKey: it has none, or others than its owner may read it; StoreError: it
        cannot be read."""
        data, mode = read_private(path, _FILE_BYTES_MAX)
        if mode & OTHERS:
            raise WrongKey(f"{path}: others may read this key (mode {mode:04o}); chmod 600 {path}")
        return cls.parsed(data, str(path))


def new_key_file(path: Path) -> MasterKey:
    """Make a key and write it, in base64, to a new file that only its owner may read. Raises StoreWriteFailed: the file
    exists, or cannot be written."""
    secret = secrets.token_bytes(KEY_BYTES)
    create_private(path, base64.b64encode(secret) + b"\n")
    return MasterKey(secret)


def _decoded(text: bytes) -> bytes | None:
    try:
        if len(text) == 2 * KEY_BYTES:
            return bytes.fromhex(text.decode("ascii"))
        return base64.b64decode(text.replace(b"-", b"+").replace(b"_", b"/"), validate=True)
    except (ValueError, binascii.Error):
        return None


_FORMAT = 1
State = Literal["whole", "encrypting", "decrypting", "renewing"]
"""whole: no command is pending. The others: a command was begun and must be finished before memd serves."""


class DirectoryKeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """`memd.key`."""

    format: int = _FORMAT
    directory: str
    """A random id, 32 hex digits; a copy of the directory has the same."""
    master: str
    """The id of the master key."""
    state: State = "whole"
    key_id: str
    key: str
    """The directory's key, wrapped by the master key."""
    former: str = ""
    """The previous key, during a renewal."""
    crc: int = 0


class TopicKeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """`topic.key`."""

    format: int = _FORMAT
    directory: str
    by: str
    """The id of the directory's key that wraps it."""
    key: str
    crc: int = 0


AnyKeyFile = TypeVar("AnyKeyFile", DirectoryKeyFile, TopicKeyFile)


def read_key_file(files: LocalDisk, path: Path, kind: type[AnyKeyFile]) -> AnyKeyFile:
    """Read a key file without opening its key. Raises DamagedKey, or WrongKey: it is of a newer
    format."""
    if files.size(path) is None:
        raise DamagedKey(
            f"{path}: is missing; without it nothing that it encrypts can be read: put it back, out of a backup if "
            "need be (where the topic was erased, its key is gone for good: remove its folder)"
        )
    try:
        found = msgspec.json.decode(files.read(path), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = None
    if found is None or found.crc != _crc(found):
        raise DamagedKey(f"{path}: is damaged; put it back, out of a backup")
    if found.format > _FORMAT:
        raise WrongKey(f"{path}: is of format {found.format}, this memd reads up to {_FORMAT}; use a newer memd")
    return found


def write_key_file(files: LocalDisk, path: Path, contents: AnyKeyFile) -> None:
    """Write a key file durably."""
    replace_file(files, path, msgspec.json.encode(msgspec.structs.replace(contents, crc=_crc(contents))) + b"\n")


def new_key() -> DataKey:
    """Return a new random key."""
    return DataKey(secrets.token_bytes(KEY_BYTES))


def write_topic_key(files: LocalDisk, path: Path, directory: str, by: DataKey) -> DataKey:
    """Make a random key for a topic and write its `topic.key`, durably."""
    key = new_key()
    wrapped = _wrapped(by, key, directory)
    write_key_file(files, path, TopicKeyFile(directory=directory, by=by.id.hex(), key=wrapped))
    return key


def read_topic_key(files: LocalDisk, path: Path, directory: str, by: DataKey) -> DataKey:
    """Open the key of a topic. Raises WrongKey: there is none, or it is another directory's."""
    found = read_key_file(files, path, TopicKeyFile)
    if found.directory != directory or found.by != by.id.hex():
        raise WrongKey(
            f"{path}: belongs to another data directory, or is from before a `memd encrypt rekey --data`; put back the "
            "one that was here"
        )
    return _unwrapped(by, found.key, directory, path)


_SALT = b"keys"


def _wrapped(by: DataKey, key: DataKey, directory: str) -> str:
    return base64.b64encode(by.seal(key.secret, _SALT, _bound(directory))).decode()


def _unwrapped(by: DataKey, text: str, directory: str, path: Path) -> DataKey:
    with suppress(binascii.Error):
        if (secret := by.opened(base64.b64decode(text, validate=True), _SALT, _bound(directory))) is not None:
            return DataKey(secret)
    raise DamagedKey(f"{path}: its key cannot be opened: it was changed; put it back, out of a backup")


def _bound(directory: str) -> bytes:
    return b"memd key of " + directory.encode()


def _crc(contents: AnyKeyFile) -> int:
    return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(contents, crc=0)))
