"""The master key: 32 bytes that the owner keeps, in a file, a variable or on standard input.

Rule: the key is never part of a message. A file that others could read is refused before its contents are looked at.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from pathlib import Path

from memd.errors import WrongKey
from memd.store.encryption.frames import KEY_BYTES, DataKey, derived
from memd.store.syscalls import create_private, read_private

_FILE_BYTES_MAX = 4096
OTHERS = 0o077
"""Permissions of anybody but the owner."""
_FORM = "32 bytes: as they are, as 64 hexadecimal digits or in base64 (`memd encrypt key FILE` makes one)"


class MasterKey:
    """The key under which the keys of data directories are wrapped."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 32 bytes."""
        self._secret = secret
        self.id = derived(secret, b"", b"master id", 8).hex()
        """Tells master keys apart; says nothing of the key."""

    def wrapping(self, directory: bytes) -> DataKey:
        """Return the key that wraps those of one data directory."""
        return DataKey(derived(self._secret, directory, b"wrapping"))

    @classmethod
    def parsed(cls, data: bytes, where: str) -> MasterKey:
        """Read a key; errors call its place `where`.

        Raises:
            WrongKey: it is none.
        """
        text = data.strip()
        secret = data if len(data) == KEY_BYTES else _decoded(text)
        if secret is None or len(secret) != KEY_BYTES:
            raise WrongKey(f"{where}: holds no key: it must be {_FORM}")
        return cls(secret)

    @classmethod
    def in_file(cls, path: Path) -> MasterKey:
        """Read the key in a file.

        Raises:
            WrongKey: it holds none, or others than its owner may read it.
            StoreError: it cannot be read.
        """
        data, mode = read_private(path, _FILE_BYTES_MAX)
        if mode & OTHERS:
            raise WrongKey(f"{path}: others may read this key (mode {mode:04o}); chmod 600 {path}")
        return cls.parsed(data, str(path))


def new_key_file(path: Path) -> MasterKey:
    """Make a key and write it, in base64, to a new file that only its owner may read.

    Raises:
        StoreWriteFailed: there is such a file, or it cannot be written.
    """
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
