"""The settings of encryption at rest.

Rule: the key itself comes from the environment or from standard input, never out of a file of settings, which is copied
and shown to others; `loading` refuses it there.
"""

from __future__ import annotations

import msgspec


class EncryptionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Encryption of the data directory."""

    key_file: str = ""
    """The file with the master key, which nobody but its owner may read; empty: the data directory is plain text."""
    key: str = ""
    """The master key itself, never in a settings file: from MEMD_ENCRYPTION_KEY or standard input. It goes before
    `key_file`."""

    @property
    def is_on(self) -> bool:
        """Whether there is a key."""
        return bool(self.key or self.key_file)
