"""The tokens that `memd token` keeps: a file in the data directory, of whoever may read that; or, in a cluster, a book
of the database (`shared/books.py`).

Rule: changed by one command at a time, and as a whole or not at all; no secret is in it, only what SHA-256 makes of it.
The settings' own list is `auth.tokens`; a name or a token that is in both is refused by whoever reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from memd.errors import StoreError, StoreLocked
from memd.settings.loading import stamp_of
from memd.settings.model import TokenSettings
from memd.store.disk import LocalDisk, replace_file
from memd.store.layout import TOKENS_LOCK_NAME, TOKENS_NAME


class KeptToken(TokenSettings, frozen=True, kw_only=True):
    """One of the tokens, and since when there is its secret, in microseconds since the epoch."""

    since: int


class _TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[KeptToken, ...]
    version: Literal[1] = 1


class TokenList:
    """Where the tokens are kept: a file in the data directory. Any thread."""

    place: str
    """For people."""
    is_shared = False
    """Whether other daemons have it too, so that it may change without a command on this machine."""

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        self.path = data_dir / TOKENS_NAME
        self.place = str(self.path)
        self._files = files
        self._lock = data_dir / TOKENS_LOCK_NAME

    def stamp(self) -> object:
        """By what the list is told from itself before. Raises StoreError where it cannot be asked."""
        return stamp_of(self.path)

    def read(self) -> tuple[KeptToken, ...]:
        """Return the tokens. Raises StoreError: it cannot be read, or is not what it should be."""
        if self._files.size(self.path) is None:
            return ()
        try:
            return msgspec.json.decode(self._files.read(self.path), type=_TokenFile).tokens
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(
                f"{self.path}: is no list of tokens ({error}); put back the file as it was, or remove it and make the "
                "tokens anew with `memd token add`"
            ) from None

    def read_at_start(self) -> tuple[KeptToken, ...]:
        """Return the tokens, as this machine knew them last where nobody can be asked; raises as `read`."""
        return self.read()

    def change(self, work: Callable[[tuple[KeptToken, ...]], Sequence[KeptToken]]) -> None:
        """Replace the list by what `work` makes of it, durably; an exception of it leaves the list as it was.

        Raises:
            StoreError: the list is as it was (StoreLocked: another command changes it now).
            InDoubt: nobody knows whether it is.
        """
        try:
            lock = self._files.lock(self._lock)
        except StoreLocked:
            raise StoreLocked(f"{self.path.parent}: another `memd token` changes the tokens now; try again") from None
        with lock:
            self.keep(work(self.read()))

    def keep(self, tokens: Sequence[KeptToken]) -> None:
        """Replace the list, durably. Raises StoreWriteFailed: it is as it was."""
        replace_file(self._files, self.path, msgspec.json.format(msgspec.json.encode(_TokenFile(tuple(tokens)))))
