"""Erasing in a bucket: what was erased on the disk leaves the objects that had it.

Rule: what a folder has now is clean, as its disk is; every other byte of it in the bucket goes. Pieces in rounds are
overwritten with zeros, so that all others stay where they are; objects of the folder alone are removed. Done again it
goes on where it ended. Versions that the bucket itself keeps are out of reach.
"""

from __future__ import annotations

from collections.abc import Collection

from memd.store.bucket.catalog import Catalog, Rounds
from memd.store.bucket.format import FILES, RoundHeader, RoundName, Stretch, header_bytes
from memd.store.bucket.objects import Bucket


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
