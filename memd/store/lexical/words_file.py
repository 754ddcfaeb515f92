"""The `.words` files: what recall needs of sealed segments beside their vectors.

Rule: derived from the log and never the truth. A file vouches for itself and names the segments that it is of, as they
were when it was written; one that does not fit is made anew.

    .words:  | header (magic "memd.idx", of the first segment) | one record |

The record's payload is a MessagePack map with the fields of `_Stored`: the columns of `SealedColumns` as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import UNSET

from memd.entries import Entry, Vector
from memd.errors import StoreError
from memd.store.files import Files
from memd.store.lexical.postings import FORMAT, ChunkTerms, SealedColumns, place_in_stream
from memd.store.log.format import (
    HEADER_BYTES,
    MAGIC_META,
    META_VERSION,
    decode_header,
    encode_header,
    encode_record,
    payload_at,
)
from memd.store.log.segment import SealedSegment

READ_AT_ONCE = 250
_COLUMNS = {
    "terms": "<u4",
    "starts": "<u4",
    "rows": "<u4",
    "impacts": "u1",
    "tokens": "<u2",
    "follows": "?",
    "shown_starts": "<u4",
    "shown_uuids": "<u8",
    "mean_sum": "<f8",
}


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    segments: tuple[tuple[int, int, int], ...]
    """Of each its number, its rows, and the CRC-32 of its .bin when it was sealed."""
    columns: dict[str, bytes]
    length_sum: int
    mean_count: int


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Stored)


def encode_words(segments: Sequence[SealedSegment], columns: SealedColumns) -> bytes:
    """The content of the file of these segments."""
    stored = _Stored(
        format=FORMAT,
        segments=_identity(segments),
        columns={name: getattr(columns, name).astype(kind).tobytes() for name, kind in _COLUMNS.items()},
        length_sum=columns.length_sum,
        mean_count=columns.mean_count,
    )
    header = msgspec.structs.replace(segments[0].header, magic=MAGIC_META, version=META_VERSION)
    return encode_header(header) + encode_record(_encoder.encode(stored))


def read_words(files: Files, path: Path, segments: Sequence[SealedSegment]) -> SealedColumns | None:
    """Read the file of these segments; None if there is none that is whole and theirs."""
    if files.size(path) is None:
        return None
    try:
        data = files.read(path)
        decode_header(data, magic=MAGIC_META, name=str(path))
        payload = payload_at(data, HEADER_BYTES)
        stored = None if payload is None else _decoder.decode(payload)
    except (StoreError, msgspec.MsgspecError):
        return None
    if stored is None or stored.format != FORMAT or stored.segments != _identity(segments):
        return None
    columns = {name: np.frombuffer(stored.columns[name], kind) for name, kind in _COLUMNS.items()}
    return SealedColumns(**columns, length_sum=stored.length_sum, mean_count=stored.mean_count)


def columns_from_log(segment: SealedSegment, count_tokens: Callable[[Entry], int]) -> SealedColumns:
    """Make the columns of a segment from its records; slow where those are of an old version, and lack their terms."""
    terms: list[ChunkTerms | None] = []
    tokens: list[int] = []
    shown: list[tuple[bytes, ...]] = []
    vectors: list[Vector] = []
    follows = np.zeros(len(segment.rows), np.bool_)
    last = None
    for start in range(0, len(segment.rows), READ_AT_ONCE):
        for entry in segment.read_many(segment.rows[start : start + READ_AT_ONCE]):
            stream = None if entry is None else place_in_stream(entry)
            follows[len(terms)] = stream is not None and stream == last
            last = stream
            if entry is None or not entry.content:
                terms.append(None)
                tokens.append(0)
                shown.append(())
                continue
            known = None if entry.terms is UNSET else ChunkTerms.decoded(entry.terms)
            terms.append(known or ChunkTerms.of(entry.indexed_text))
            tokens.append(count_tokens(entry) if entry.line_tokens is UNSET else entry.line_tokens)
            shown.append(() if entry.shown is UNSET else entry.shown)
            vectors.append(entry.embedding)
    matrix = np.array(vectors, np.float32).reshape(len(vectors), segment.header.dimension)
    return SealedColumns.of(terms, tokens, follows, shown, matrix)


def _identity(segments: Sequence[SealedSegment]) -> tuple[tuple[int, int, int], ...]:
    return tuple((one.segment_id, len(one.rows), one.bin_crc) for one in segments)
