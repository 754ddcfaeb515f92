"""Tokens and grants between a folder and a cluster, for `memd move`.

Rule: added to those that are there, and never in their place. Done again it finds itself done. The other side keeps its
own: a secret that is to hold on one side alone is taken back on the other.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from memd.admin.oauth.ledger import LedgerFile, kept_file
from memd.admin.oauth.shared_ledger import LedgerState, Rows, rows_of, state_in
from memd.store.disk import DiskFiles
from memd.store.files import replace_file
from memd.store.layout import GRANTS_NAME
from memd.store.shared.books import SharedBook, SharedTokens
from memd.store.shared.seam import SharedLog
from memd.store.token_list import KeptToken, TokenFile, TokenList


class CopiedRights(msgspec.Struct, frozen=True):
    """The names of tokens, and the number of grants."""

    tokens: tuple[str, ...]
    """Those that are new there."""
    left: tuple[str, ...]
    """Those whose name or secret another one has there: they were not copied."""
    grants: int


def copy_rights(folder: Path, kept_there: SharedLog, *, is_into_cluster: bool) -> CopiedRights:
    """Copy the tokens; the grants too where no program has registered yet, as its id holds only there.

    Raises:
        StoreError: a side cannot be read or written; what was copied is there.
    """
    shared, own = SharedTokens(SharedBook(kept_there, "tokens")), TokenFile(DiskFiles(), folder)
    tokens, left = copy_tokens(own, shared) if is_into_cluster else copy_tokens(shared, own)
    book, path = SharedBook(kept_there, "grants"), folder / GRANTS_NAME
    kept = kept_file(DiskFiles(), path)
    grants = 0
    if is_into_cluster and kept is not None:
        given = LedgerState(bytes.fromhex(kept.key), kept.grants, {})

        def joined(rows: Rows) -> Rows:
            return rows if state_in(rows).key not in (b"", given.key) else {**rows_of(given), **rows}

        before = state_in(book.read().rows).grants
        grants = len(state_in(book.change(joined).rows).grants) - len(before)
    elif not is_into_cluster and kept is None:
        state = state_in(book.read().rows)
        if state.key:
            told = LedgerFile(key=state.key.hex(), grants=state.grants)
            replace_file(DiskFiles(), path, msgspec.json.encode(told))
            grants = len(state.grants)
    return CopiedRights(tokens, left, grants)


def copy_tokens(source: TokenList, target: TokenList) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy tokens; return the names of those that are new, and of those that cannot be there beside another one."""
    wanted, new, left = source.read(), list[KeptToken](), list[KeptToken]()

    def joined(kept: tuple[KeptToken, ...]) -> tuple[KeptToken, ...]:
        names, digests = {one.name for one in kept}, {one.token_sha256.lower() for one in kept}
        new[:] = [one for one in wanted if one.name not in names and one.token_sha256.lower() not in digests]
        left[:] = [one for one in wanted if one not in new and one not in kept]
        return (*kept, *new)

    if wanted:
        target.change(joined)
    return tuple(one.name for one in new), tuple(one.name for one in left)
