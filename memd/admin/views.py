"""The routes that look at the memory as a whole: digests, what belongs together, names.

Rule: views, computed in a thread when asked and never stored; nothing here changes the log or a prompt.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec

from memd.admin.acts import Extent, chunks_in
from memd.admin.history import named
from memd.admin.queries import DigestQuery, EntitiesQuery, RelatedQuery
from memd.admin.routing import get
from memd.admin.topics import NamedTopics
from memd.errors import BadQuestion
from memd.principals import Principal
from memd.recall.digest import Period, Said, digest
from memd.recall.related import Related, related
from memd.store.choice import chosen, live_ids
from memd.store.lexical.entities import Kind, entities_of, key_of, kind_of
from memd.store.pending import UnstoredText
from memd.store.store import Snapshot, TopicLog

DIGESTED_MAX = 20_000
"""Chunks of which a digest is made: a minute of work for a large topic is nobody's wish."""
LATEST = 5
"""Chunks that the list of names gives for each."""


class Digest(msgspec.Struct, frozen=True):
    """A digest: periods of one length."""

    by: Literal["day", "week"]
    periods: tuple[Period, ...]
    """Oldest first; those in which nothing was said are left out."""


class RelatedChunks(msgspec.Struct, frozen=True):
    """The chunks that belong to one without being said beside it."""

    topic_id: str
    id: str
    chunks: tuple[Related, ...]


class ChunkName(msgspec.Struct, frozen=True):
    """Where a chunk is found."""

    topic_id: str
    id: str


class Entity(msgspec.Struct, frozen=True, kw_only=True):
    """A name, as it is written most often, and the chunks that have it."""

    name: str
    kind: Kind
    count: int
    """Of the chunks."""
    chunks: tuple[ChunkName, ...]
    """The latest of them; all, up to `limit`, where the name was asked for."""


class Entities(msgspec.Struct, frozen=True):
    """Names, those in most chunks first."""

    entities: tuple[Entity, ...]
    total: int
    """How many there are, with those beyond `limit`."""


class ViewRoutes:
    """Views of what is stored."""

    def __init__(self, topics: NamedTopics) -> None:
        self._topics = topics

    @get("/memd/digest", "read", act="read", touches=lambda told: Extent(count=len(told.periods)))
    async def digest(self, query: DigestQuery, who: Principal) -> Digest:
        """A digest of what was said, by day or week: key sentences (LexRank), and words that set each apart."""
        async with self._topics.held(query.topic, who) as found:
            snapshots = [topic.log.snapshot() for topic in found]
            return await asyncio.get_running_loop().run_in_executor(None, _digest, snapshots, query)

    @get("/memd/chunks/{id}/related", "read", act="read", touches=lambda found: chunks_in(found.chunks))
    async def related(self, chunk_id: str, query: RelatedQuery, who: Principal) -> RelatedChunks:
        """The chunks that belong to one without being said beside it: by meaning, rare names or time."""
        async with self._topics.held(query.topic, who) as found:
            topics = [(topic.log, topic.unstored()) for topic in found]
            return await asyncio.get_running_loop().run_in_executor(None, _related, topics, chunk_id, query.limit)

    @get("/memd/entities", "read", act="read", touches=lambda found: Extent(count=len(found.entities)))
    async def entities(self, query: EntitiesQuery, who: Principal) -> Entities:
        """Names and identifiers in what is stored, found by rules, and the chunks that have each."""
        async with self._topics.held(query.topic, who) as found:
            logs = [topic.log for topic in found]
            return await asyncio.get_running_loop().run_in_executor(None, _entities, logs, query)


def _digest(snapshots: Sequence[Snapshot], query: DigestQuery) -> Digest:
    chosen_ids = [(snapshot, live_ids(chosen(snapshot, query.wanted))) for snapshot in snapshots]
    if (count := sum(len(ids) for _, ids in chosen_ids)) > DIGESTED_MAX:
        raise BadQuestion(f"that is {count:,} chunks, and a digest reads {DIGESTED_MAX:,}; choose fewer by from and to")
    said = []
    for snapshot, ids in chosen_ids:
        entries = snapshot.read_many(snapshot.live_places(ids).values()).values()
        said += [Said(snapshot.topic_id, entry) for entry in entries if query.wanted.admits_entry(entry)]
    by, periods = digest(said, query.by, query.sentences)
    return Digest(by, tuple(periods))


def _related(topics: Sequence[tuple[TopicLog, UnstoredText]], chunk_id: str, limit: int) -> RelatedChunks:
    snapshot, uuid, waiting = named(topics, chunk_id)
    if waiting is not None:
        raise BadQuestion(f"the chunk {chunk_id} is not in the log yet: ask again once it is; `memd show` shows it")
    snapshots = [snapshot if snapshot.topic_id == log.topic_id else log.snapshot() for log, _ in topics]
    entry = snapshot.find(uuid)
    if entry is None or entry.uuid not in {snapshot.read(place).uuid for place in _live(snapshot, uuid)}:
        raise BadQuestion(f"the chunk {chunk_id} was taken out by a correction; `memd show {chunk_id}` tells by which")
    return RelatedChunks(snapshot.topic_id, entry.public_id, tuple(related(snapshots, snapshot, entry, limit)))


def _live(snapshot: Snapshot, uuid: bytes) -> list[tuple[int, int]]:
    return [place for place in snapshot.places(uuid) if snapshot.is_live(place)]


def _entities(logs: Sequence[TopicLog], query: EntitiesQuery) -> Entities:
    wanted_key = None if query.name is None else key_of(query.name)
    written: dict[str, Counter[str]] = defaultdict(Counter)
    having: dict[str, list[tuple[int, Snapshot]]] = defaultdict(list)
    snapshots = [log.snapshot() for log in logs]
    if query.name is None and (count := sum(one.live_count for one in snapshots)) > DIGESTED_MAX:
        raise BadQuestion(
            f"that is {count:,} chunks, and names are read in {DIGESTED_MAX:,}; choose a topic, or a name"
        )
    for snapshot in snapshots:
        places = (
            snapshot.live_places(live_ids(snapshot)).values()
            if query.name is None
            else snapshot.places_with(query.name)
        )
        for entry in snapshot.read_many(places).values():
            for name in entities_of(entry.named_text):
                key = key_of(name)
                if wanted_key in (None, key):
                    written[key][name] += 1
                    having[key].append((entry.canonical_id, snapshot))
    most_first = sorted(having, key=lambda key: (-len(having[key]), key))
    kept = [key for key in most_first if not query.kind or kind_of(written[key].most_common(1)[0][0]) in query.kind]
    shown = LATEST if wanted_key is None else query.limit
    return Entities(tuple(_entity(written[key], having[key], shown) for key in kept[: query.limit]), len(kept))


def _entity(written: Counter[str], having: Sequence[tuple[int, Snapshot]], shown: int) -> Entity:
    name = written.most_common(1)[0][0]
    latest = sorted(having, key=lambda one: -one[0])[:shown]
    chunks = []
    for canonical_id, snapshot in latest:
        place = snapshot.place(canonical_id)
        if place is not None:
            chunks.append(ChunkName(snapshot.topic_id, snapshot.read(place).public_id))
    return Entity(name=name, kind=kind_of(name), count=len(having), chunks=tuple(chunks))
