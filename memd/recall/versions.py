"""The newest version of what is to be shown, where the search did not find it: an agent that reads a file again and
again makes more versions of it than there are candidates, and older ones may match better.

Rule: reading changes nothing, and what was superseded or taken out is no version. Segments without an index are looked
through for each of the best chunks; an index is asked about those of which more than one version was found; what has
no vector yet is compared by its words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memd.entries import Entry
from memd.errors import StoreError
from memd.recall.echoes import is_echo
from memd.recall.ranking import Candidate, Ranked, alike_within, is_visible
from memd.recall.topic_search import TopicSearch
from memd.settings.model import UtilitySettings
from memd.store.log.columns import Bits, Floats
from memd.store.snapshot import Place
from memd.store.views import IndexView
from memd.wanted import Wanted

BEST_MAX, FIRST = 32, 8
"""Of so many of the best chunks a newer version is looked for, of the first of them apart from the others: what may be
a version of a worse one takes no row from theirs."""
ROWS_MAX = 256
"""Entries of a segment that are compared with these: the latest of those that are about as like the question. Chunks of
which more than one version was found are compared with all of these."""
COSINE_ERROR = 1e-4
"""More than that of products of float32."""
PART_DIMENSIONS = 32
"""Vectors are no further apart than in so many of their dimensions: few are compared in all."""
ASKED_MAX = 4
"""Chunks that an index is asked about: each takes 0.1 ms for 5,000 entries."""
NEAREST, NEAREST_MAX = 32, 512
"""How many of the nearest it is asked for, and for how many at most where all of these are nearly the same."""
READ_MAX = 16
"""The latest versions that are looked at: some may be in the prompt, or only repeat what they were shown."""
PENDING_MAX = 32
"""The latest chunks without a vector that are compared."""
SHARED_WORDS = 0.9
"""Such a chunk is a version of another if it is about as long and shares so many of the words."""

_Order = tuple[int, int]
"""See `Candidate.order`."""


class _Versions(NamedTuple):
    """Chunks that are nearly the same, some of which are to be shown."""

    best: Candidate
    newest: _Order
    """Of those."""
    is_several: bool


class _Found(NamedTuple):
    """A newer version; the highest is the newest."""

    order: _Order
    search: int
    """The number of its topic's search."""
    place: Place


def newest_versions(
    searches: Sequence[TopicSearch],
    ranked: Sequence[Ranked],
    *,
    least: float,
    asked: frozenset[str],
    visible_digests: Collection[bytes],
    wanted: Wanted,
) -> dict[bytes, bytes]:
    """Make candidates of the newest versions of the best chunks that are to be shown; returns what `rank` calls newest.

    Args:
        searches: the request's own topic first.
        ranked: with those that were excluded.
        least: the cosine from which on two chunks are nearly the same.
        asked: the words of the question.

    Raises:
        StoreError: neither an index nor the log can be read.
    """
    groups = _groups(ranked)
    found: list[list[_Found]] = [[] for _ in groups]
    for number, search in enumerate(searches if groups else ()):
        for more in _scanned(search, groups, least), _asked(search, groups, least), _pending(search, groups):
            for group, order, place in more:
                if order > groups[group].newest:
                    found[group].append(_Found(order, number, place))
    known = {one.candidate.entry.uuid: one.candidate for one in ranked} if any(found) else {}
    newest: dict[bytes, bytes] = {}
    for shown, newer in zip(groups, found, strict=True):
        for one in sorted(newer, reverse=True)[:READ_MAX]:
            search, entry = searches[one.search], _read(searches[one.search], one.place)
            if (
                entry is not None
                and alike_within(entry)[0] == alike_within(shown.best.entry)[0]
                and entry.utility_steps >= 0
                and wanted.admits_entry(entry)
                and not is_visible(entry, visible_digests)
                and not is_echo(entry, known, asked)
                and (search is searches[0] or not searches[0].snapshot.knows(entry.uuid))
            ):
                newest[entry.uuid] = shown.best.entry.uuid
                search.include_at([one.place])
                break
    return newest


def _groups(ranked: Sequence[Ranked]) -> list[_Versions]:
    """The best chunks that are to be shown, each with what is nearly the same."""
    alike: dict[bytes, list[Ranked]] = {}
    for one in ranked:
        if one.best is not None and (len(alike) < BEST_MAX or one.best.entry.uuid in alike):
            alike.setdefault(one.best.entry.uuid, []).append(one)
    groups = []
    for members in alike.values():
        best, newest = members[0].best or members[0].candidate, (-1, -1)
        for one in members:
            if one.excluded is None and not one.candidate.is_echo:
                newest = max(newest, one.candidate.order)
        groups.append(_Versions(best, newest, len(members) > 1))
    return groups


def _scanned(search: TopicSearch, groups: Sequence[_Versions], least: float) -> Iterator[tuple[int, _Order, Place]]:
    """Versions in the segments without an index: of which group, how new, and where.

    The cosines of two texts to a question are no further apart than their vectors.
    """
    apart = math.sqrt(max(0.0, 2 - 2 * least)) + COSINE_ERROR
    several = [number for number, group in enumerate(groups) if group.is_several]
    first, others = _first_and_others(range(len(groups)))
    for segment_id, view in search.searched.views.items():
        for numbers, rows_max in (first, ROWS_MAX), (others, ROWS_MAX), (several, len(view.rows)):
            if view.matrix is None or not numbers:
                continue
            own, vectors = _vectors(groups, numbers, view.matrix.shape[1])
            counts = ~view.dead
            if own and (cosine := search.cosines.get(segment_id)) is not None:
                alike = [groups[group].best.parts.similarity for group in own]
                counts &= (cosine >= min(alike) - apart) & (cosine <= max(alike) + apart)
            rows = _perhaps_near(view.matrix, np.flatnonzero(counts)[-rows_max:], vectors, least)
            at, columns = np.nonzero(view.matrix[rows] @ vectors.T >= least)
            near = rows[at]
            orders = zip(*(view.rows[name][near].tolist() for name in ("said_at", "origin_id")), strict=True)
            for column, order, row in zip(columns.tolist(), orders, near.tolist(), strict=True):
                yield own[column], order, (segment_id, row)


def _perhaps_near(matrix: Floats, rows: NDArray[np.intp], vectors: Floats, least: float) -> NDArray[np.intp]:
    """Those of some rows that may be near one of the vectors, as they are in some dimensions: |a - b|² is 2 - 2ab."""
    ours, theirs = matrix[rows, :PART_DIMENSIONS], vectors[:, :PART_DIMENSIONS]
    apart = 1 - least + COSINE_ERROR
    nearer = ours @ theirs.T - np.einsum("ij,ij->i", theirs, theirs) / 2
    is_near: Bits = (nearer >= np.einsum("ij,ij->i", ours, ours)[:, None] / 2 - apart).any(axis=1)
    return rows[is_near]


def _asked(search: TopicSearch, groups: Sequence[_Versions], least: float) -> Iterator[tuple[int, _Order, Place]]:
    """The same in the indexes."""
    several = [number for number, group in enumerate(groups) if group.is_several][:ASKED_MAX]
    for numbers, view in itertools.product(_first_and_others(several), search.searched.indexes if several else ()):
        own, vectors = _vectors(groups, numbers, view.index.segments[0].header.dimension)
        if not own:
            continue
        places = _near(view, vectors, least, search.searched.utility)
        rows = [search.searched.views[segment_id].rows[row] for segment_id, row in places]
        orders = [(int(row["said_at"]), int(row["origin_id"])) for row in rows]
        oldest = min(groups[group].newest for group in own)
        latest = sorted(zip(orders, places, strict=True), reverse=True)[:READ_MAX]
        latest = [(order, place) for order, place in latest if order > oldest]
        search.read_ahead(place for _, place in latest)
        for order, place in latest:
            if (entry := _read(search, place)) is not None:
                near = np.flatnonzero(vectors @ entry.embedding >= least)
                yield from ((own[column], order, place) for column in near.tolist())


def _near(view: IndexView, vectors: Floats, least: float, utility: UtilitySettings) -> list[Place]:
    """The places that an index finds of what is nearly the same as one of these."""
    count = NEAREST
    while True:
        places: list[Place] = []
        for part in view.search(vectors, count, utility):
            is_near = part.cosine >= least
            places += zip(part.segment_ids[is_near].tolist(), part.rows[is_near].tolist(), strict=True)
        if len(places) < count or count >= NEAREST_MAX:
            return places
        count *= 4


def _pending(search: TopicSearch, groups: Sequence[_Versions]) -> Iterator[tuple[int, _Order, Place]]:
    """The same among what has no vector yet."""
    latest = search.pending.last(PENDING_MAX)
    shown = [(len(group.best.entry.content), frozenset(group.best.entry.content.split())) for group in groups if latest]
    for place in latest:
        entry = search.pending.entry(place[1])
        length, words = len(entry.content), frozenset(entry.content.split())
        for number, (size, others) in enumerate(shown):
            is_as_long = SHARED_WORDS * length <= size <= length / SHARED_WORDS
            if is_as_long and len(words & others) >= SHARED_WORDS * max(len(words), len(others)):
                yield number, (entry.said, entry.origin_id), place


def _first_and_others(numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    return [one for one in numbers if one < FIRST], [one for one in numbers if one >= FIRST]


def _vectors(groups: Sequence[_Versions], numbers: Sequence[int], dimension: int) -> tuple[list[int], Floats]:
    """Those of some groups that have vectors of this dimension, and the vectors of the best of each, as rows."""
    own = [number for number in numbers if len(groups[number].best.entry.vector) == 4 * dimension]
    vectors = b"".join(groups[number].best.entry.vector for number in own)
    return own, np.frombuffer(vectors, "<f4").reshape(len(own), dimension)


def _read(search: TopicSearch, place: Place) -> Entry | None:
    try:
        return search.read(place)
    except StoreError:  # a damaged entry costs its own chunk and no other
        return None
