"""Removing what no time that is kept needs any more.

Rule: the oldest full round that has to stay is the last one before the oldest time that is kept. Of what is older, only
the objects stay that it, or the present state, has pieces in. Rounds of which little is in use are emptied: their files
are written anew by the next rounds.
"""

from __future__ import annotations

from memd.store.bucket.catalog import Catalog, Rounds
from memd.store.bucket.format import FILES
from memd.store.bucket.objects import Bucket

MARGIN_US = 86_400_000_000
"""A file by itself is sent before the round that names it; and clocks differ."""
REWRITTEN_BYTES = 16 << 20
"""The most that one cleaning has written anew."""


def clean(bucket: Bucket, catalog: Catalog, since: int) -> list[tuple[str, str]]:
    """Remove objects that no time from `since` on needs; return the files (folder, name) to write anew.

    Raises:
        BucketError: not all is removed; the next time goes on.
    """
    rounds = Rounds(bucket)
    bases = [name for name in rounds.moments if name.is_full and name.at <= since]
    if not bases:
        return []
    base = bases[-1]
    needed = catalog.keys() | rounds.catalog(base).keys()
    gone = [name.key for name in rounds.every if name < base and name.key not in needed]
    alone = (one for one in bucket.listed(FILES) if one.changed_at < base.at - MARGIN_US)
    gone += [one.key for one in alone if one.key not in needed]
    if gone:
        bucket.delete(gone)
    return _sparse(catalog, {name.key: name.size for name in rounds.names if name < base})


def _sparse(catalog: Catalog, sizes: dict[str, int]) -> list[tuple[str, str]]:
    """The files that have pieces in old rounds of which less than half is in use."""
    used: dict[str, int] = {}
    for _, _, extent in catalog.extents():
        used[extent.key] = used.get(extent.key, 0) + extent.length
    sparse = {key for key, size in sizes.items() if 2 * used.get(key, size) < size}
    found: dict[tuple[str, str], int] = {}
    for folder, name, extent in catalog.extents():
        if extent.key in sparse and sum(found.values()) < REWRITTEN_BYTES:
            found[folder, name] = found.get((folder, name), 0) + extent.length
    return list(found)
