"""Removing what no time that is kept needs any more, and what was erased on the disk.

Rule: the oldest full round that has to stay is the last one before the oldest time that is kept. Of what is older, only
the objects stay that it, or the present state, has pieces in. Rounds of which little is in use are emptied: their files
are written anew by the next rounds.

What a folder has now is clean of what was erased, as its disk is; every other byte of it in the bucket goes. Pieces in
rounds are overwritten with zeros, so that all others stay where they are; objects of the folder alone are removed. Done
again it goes on where it ended. Versions that the bucket itself keeps are out of reach.
"""

from __future__ import annotations

from collections.abc import Collection

from memd.store.bucket.catalog import Catalog, Rounds
from memd.store.bucket.format import FILES, RoundHeader, RoundName, Stretch, header_bytes
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


def blank(bucket: Bucket, catalog: Catalog, folders: Collection[str]) -> None:
    """Remove all bytes of these folders that they do not have now.

    Raises:
        BucketError: not all of it is done.
    """
    in_use = {extent for folder in folders for file in catalog.files(folder).values() for extent in file.extents}
    rounds = Rounds(bucket)
    for name, header in rounds.headers([one for one in rounds.every if not one.is_full]):
        spans = [span for span in _own_spans(header, name, folders) if span not in in_use]
        if spans:
            _blank_round(bucket, name, spans)
    keys = {extent.key for extent in in_use}
    for folder in folders:
        if gone := [one.key for one in bucket.listed(f"{FILES}{folder}/") if one.key not in keys]:
            bucket.delete(gone)


def _own_spans(header: RoundHeader, name: RoundName, folders: Collection[str]) -> list[Stretch]:
    """The pieces of these folders in a round."""
    files = [change.file for change in header.changes if change.folder in folders and change.file is not None]
    own = (extent for file in files for extent in file.extents if not extent.key)
    return [Stretch(name.key, extent.offset, extent.length) for extent in own]


def _blank_round(bucket: Bucket, name: RoundName, spans: list[Stretch]) -> None:
    data = bucket.get(name.key)
    if data is None:
        return  # removed meanwhile
    header_bytes(data[-16:], name.key)
    changed = bytearray(data)
    for span in spans:
        changed[span.offset : span.offset + span.length] = bytes(span.length)
    if changed != data:
        bucket.put(name.key, bytes(changed))
