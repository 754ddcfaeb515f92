"""The tokens that `memd token` keeps: one file in the data directory, of whoever may read that.

Rule: replaced as a whole, by one command at a time; no secret is in it, only what SHA-256 makes of it. The settings'
own list is `auth.tokens`; a name or a token that is in both is refused by whoever reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from memd.errors import StoreError, StoreLocked
from memd.settings.tokens import TokenSettings
from memd.store.disk import LocalDisk
from memd.store.files import Files, replace_file
from memd.store.layout import TOKENS_LOCK_NAME, TOKENS_NAME


class KeptToken(TokenSettings, frozen=True, kw_only=True):
    """One of the tokens, and since when there is its secret, in microseconds since the epoch."""

    since: int


class _TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[KeptToken, ...]
    version: Literal[1] = 1


def kept_tokens(files: Files, data_dir: Path) -> tuple[KeptToken, ...]:
    """Return the tokens; none where there is no file.

    Raises:
        StoreError: the file cannot be read, or is not what it should be.
    """
    path = data_dir / TOKENS_NAME
    if files.size(path) is None:
        return ()
    try:
        return msgspec.json.decode(files.read(path), type=_TokenFile).tokens
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{path}: is no list of tokens ({error}); put back the file as it was, or remove it and make the tokens "
            "anew with `memd token add`"
        ) from None


def keep_tokens(files: Files, data_dir: Path, tokens: Sequence[KeptToken]) -> None:
    """Replace the list, durably.

    Raises:
        StoreWriteFailed: it is as it was.
    """
    replace_file(files, data_dir / TOKENS_NAME, msgspec.json.format(msgspec.json.encode(_TokenFile(tuple(tokens)))))


@contextmanager
def changing_tokens(files: LocalDisk, data_dir: Path) -> Iterator[None]:
    """Keep other commands from changing the list while the block runs.

    Raises:
        StoreLocked: one does it now.
    """
    try:
        lock = files.lock(data_dir / TOKENS_LOCK_NAME)
    except StoreLocked:
        raise StoreLocked(f"{data_dir}: another `memd token` changes the tokens now; try again") from None
    try:
        yield
    finally:
        lock.release()
