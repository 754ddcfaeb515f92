"""Finds the chunks related to a chunk, except its neighbours: by meaning, shared rare names, or time.

Rule: reading changes nothing. One of the three relations suffices; several add up in the score. The time of a document
is ignored: it is that of the import, which is the same for many.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from memd.entries import Entry
from memd.recall.columns import sources_of
from memd.selection import Selection
from memd.store.lexical.analyzer import entities_of, key_of
from memd.store.snapshot import Place, chosen, live_ids
from memd.store.store import Snapshot

COSINE_MIN = 0.35
"""Least cosine of a related chunk: any two chunks of one conversation have about 0.2."""
RARE_CHUNKS_MAX = 20
"""A name in more chunks of a topic is not rare."""
RARE_WORDS_MAX = 200
"""A name whose words are in more chunks is not checked; some of those do not have them as a name."""
TIMED_KINDS = ("turn", "note")
SAME_TIME_US = 30 * 60 * 1_000_000
NAMES_WEIGHT, TIME_WEIGHT = 0.4, 0.1
"""Most that a shared rare name and a close time add to the cosine."""


class Related(msgspec.Struct, frozen=True, kw_only=True):
    """A related chunk, and the reasons."""

    topic_id: str
    id: str
    uuid: str
    said_at: int
    roles: tuple[str, ...]
    content: str
    score: float
    cosine: float | None
    """None if the two were embedded by different models."""
    shared: tuple[str, ...]
    """Rare names in both."""
    seconds_apart: int | None
    """None if more than half an hour, or for a document."""


def related(topics: Sequence[Snapshot], snapshot: Snapshot, entry: Entry, limit: int) -> list[Related]:
    """Return the chunks related to a chunk of one of these topics, best first. Raises StoreError: an entry or an index
    cannot be read."""
    own = next(place for place in snapshot.places(entry.uuid) if snapshot.is_live(place))
    beside = {own, *snapshot.neighbours(own)}
    is_comparable = own in snapshot.cosines_at(entry.embedding, [own])
    names = {key_of(name): name for name in entities_of(entry.named_text)}
    of_its_time = Selection(since=entry.said - SAME_TIME_US, until=entry.said + SAME_TIME_US + 1, kinds=TIMED_KINDS)
    found: list[Related] = []
    for one in topics:
        shared = _sharing(one, names)
        then = live_ids(chosen(one, of_its_time)) if entry.kind in TIMED_KINDS else ()
        places = set(one.live_places([*shared, *then]).values())
        if is_comparable:
            near = one.cosines_at(entry.embedding, _near(one, entry, limit + len(beside)))
            places |= {place for place, cosine in near.items() if cosine >= COSINE_MIN}
        if one is snapshot:
            places -= beside
        found += _described(one, entry, sorted(places), shared, is_comparable=is_comparable)
    seen = {entry.uuid.hex()}
    best_first = sorted(found, key=lambda chunk: (-chunk.score, chunk.said_at, chunk.uuid))
    return [chunk for chunk in best_first if chunk.uuid not in seen and not seen.add(chunk.uuid)][:limit]  # type: ignore[func-returns-value]  # it is None


def _near(snapshot: Snapshot, entry: Entry, most: int) -> set[Place]:
    """Return the places of the chunks nearest to one by meaning."""
    found = set[Place]()
    for source in sources_of(snapshot):
        for labels in source.nearest(entry.embedding[None], most):
            segments, rows = source.places(labels[source.counts[labels]])
            found.update(zip(segments.tolist(), rows.tolist(), strict=True))
    return found


def _sharing(snapshot: Snapshot, names: Mapping[str, str]) -> dict[int, dict[str, float]]:
    """Return the chunks with rare ones of these names, by canonical_id: weights by name."""
    shared: dict[int, dict[str, float]] = defaultdict(dict)
    for key, name in names.items():
        places = snapshot.places_with(name)
        if len(places) > RARE_WORDS_MAX:
            continue
        entries = snapshot.read_many(places).values()
        having = [one for one in entries if key in set(map(key_of, entities_of(one.named_text)))]
        for one in having if len(having) <= RARE_CHUNKS_MAX else ():
            shared[one.canonical_id][name] = 1 / math.log2(1 + len(having))
    return shared


def _described(
    snapshot: Snapshot,
    entry: Entry,
    places: Sequence[Place],
    shared: dict[int, dict[str, float]],
    *,
    is_comparable: bool,
) -> list[Related]:
    cosines = snapshot.cosines_at(entry.embedding, places) if is_comparable else {}
    described = []
    for place, other in snapshot.read_many(places).items():
        names = shared.get(other.canonical_id, {})
        apart = abs(other.said - entry.said)
        is_of_its_time = apart <= SAME_TIME_US and {entry.kind, other.kind} <= {*TIMED_KINDS}
        cosine = cosines.get(place)
        time = TIME_WEIGHT * (1 - apart / SAME_TIME_US) if is_of_its_time else 0.0
        described.append(
            Related(
                topic_id=snapshot.topic_id,
                id=other.public_id,
                uuid=other.uuid.hex(),
                said_at=other.said,
                roles=other.roles,
                content=other.displayed,
                score=round(max(0.0, cosine or 0.0) + NAMES_WEIGHT * min(1.0, sum(names.values())) + time, 4),
                cosine=None if cosine is None else round(cosine, 4),
                shared=tuple(names),
                seconds_apart=apart // 1_000_000 if is_of_its_time else None,
            )
        )
    return described
