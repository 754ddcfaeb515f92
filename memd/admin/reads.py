"""The operations that read the memory: search, log, chunks, export, digests, related chunks, names.

Rule: nothing here changes the log or a prompt. Long answers are paged or streamed. Views are computed in a thread on
request and never stored.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from memd.admin import history, routing
from memd.admin.parts import DaemonParts
from memd.admin.routing import Before, Extent, Limit, Listed, chunks_in, get
from memd.entries import Moment
from memd.errors import BadQuestion, Refused
from memd.principals import Principal
from memd.recall.columns import Searchable
from memd.recall.digest import Period, Said
from memd.recall.digest import digest as digest_of
from memd.recall.explained import SearchAnswer, search_answer
from memd.recall.related import Related
from memd.recall.related import related as related_to
from memd.store.lexical.analyzer import Kind, entities_of, key_of, kind_of
from memd.store.snapshot import chosen, live_ids
from memd.store.store import Snapshot
from memd.store.tools.export import export as export_log

EXPORTED_AT_ONCE = 200
CHUNK_TURNS_MAX = 20


KindName = Literal["e-mail", "link", "path", "version", "ticket", "identifier", "name"]
"""`entities.Kind`, as a parameter."""


class ChunksPage(Listed, frozen=True):
    """Present states of chunks, latest first."""

    chunks: tuple[history.LogEvent, ...]
    next: int | None
    """The value of `before` for the next page; None: this is the last one."""


class SaidDays(Listed, frozen=True):
    """The days on which something was said, earliest first."""

    days: tuple[history.SaidDay, ...]


@get("/memd/search", "read", act="search", touches=lambda answer: chunks_in(answer.chunks), tool="search_memory")
async def search(
    parts: DaemonParts,
    query: routing.FilterQuery,
    who: Principal,
    *,
    q: Annotated[str, Meta(min_length=1, max_length=100_000, pattern=r"\S", description="The question.")],
    as_of: Annotated[
        Moment | None, Meta(description="Search what was stored up to this time (2026-11-20T14:30) or canonical_id.")
    ] = None,
    limit: Limit = routing.PAGE_MAX,
) -> SearchAnswer:
    """Search what was said, noted or read before, by meaning and words: the best pieces with ids, times, sources.

    They are the chunks that the question would get, and why.
    """
    from memd.recall.retrieve import Filters  # a command imports this module and retrieves nothing

    refused: Refused = {}
    async with parts.held(query.topic, who, refused=refused) as found:
        logs: Sequence[Searchable] = [topic.log for topic in found]
        if as_of is not None:
            logs = await parts.retriever.as_of([topic.log for topic in found], as_of, refused)
        filters = Filters(everything=True, wanted=query.wanted, asked_at=as_of)
        retrieved = await parts.retriever.retrieve(q, logs, await parts.budget(), filters, refused)
    return search_answer(retrieved, None if as_of is None else int(as_of), limit=limit)


@get("/memd/log", "read", act="read", touches=lambda page: chunks_in(page.events))
async def log_page(
    parts: DaemonParts,
    query: routing.TopicsQuery,
    who: Principal,
    *,
    before: Before = None,
    limit: Limit = routing.PAGE,
) -> history.LogPage:
    """The latest entries of the log."""
    return await parts.read(query.topic, who, lambda found: history.log_page(found, who, before, limit))


@get("/memd/chunks", "read", act="read", touches=lambda page: chunks_in(page.chunks))
async def chunks(
    parts: DaemonParts,
    query: routing.FilterQuery,
    who: Principal,
    *,
    before: Before = None,
    limit: Limit = routing.PAGE,
    all: Annotated[bool, Meta(description="Also those that were taken out.")] = False,  # noqa: A002  # as clients say
) -> ChunksPage:
    """The present state of chunks."""
    states: Literal["last", "live"] = "last" if all else "live"
    chosen = before, limit, states, query.wanted
    page = await parts.read(query.topic, who, lambda found: history.log_page(found, who, *chosen))
    return ChunksPage(page.events, page.next, note=page.note)


@get("/memd/days", "read")
async def days(parts: DaemonParts, query: routing.FilterQuery, who: Principal) -> SaidDays:
    """How many chunks were said on which day, of this machine's time zone."""
    return await parts.read(query.topic, who, lambda found: SaidDays(history.said_days(found, query.wanted)))


@get("/memd/chunks/{id}", "read", act="read", touches=lambda story: chunks_in(story.versions), tool="read_memory")
async def chunk(parts: DaemonParts, chunk_id: str, query: routing.TopicsQuery, who: Principal) -> history.ChunkStory:
    """Read one piece of memory: its whole text, what was said just before and after it, its earlier versions.

    Also one that is not in the log yet.
    """
    async with parts.held(query.topic, who, refused=None if query.topic else {}) as found:
        [named] = await parts.named(found, [chunk_id], query.topic, who)
        known = history.known_to(who, [topic.log.snapshot() for topic in found])
        story = await asyncio.to_thread(history.story, *named, known)
    turns = await asyncio.to_thread(parts.receipts.latest, CHUNK_TURNS_MAX, who, uuid=story.uuid)
    return msgspec.structs.replace(story, turns=tuple(one.turn_id for one, _ in turns))


@get("/memd/export", "read", act="export", streams="application/jsonl")
async def export(
    parts: DaemonParts,
    who: Principal,
    *,
    topic: routing.OnlyTopic = None,
    live: Annotated[bool, Meta(description="Only chunks as they are now.")] = False,
) -> AsyncIterator[bytes]:
    """The log as JSON Lines, as `memd export` writes it."""
    if topic is not None:
        async with parts.held([topic], who):
            pass  # raises if it does not exist; the export reads the files
    lines = export_log(
        parts.config.data_dir,
        parts.store.files,
        topic_id=topic,
        live_only=live,
        is_wanted=lambda topic_id: who.may("read", topic_id),
        tells_others=who.may_everywhere("read"),
    )
    encoded = (msgspec.json.encode(entry) + b"\n" for entry in lines)
    while part := await asyncio.to_thread(lambda: b"".join(islice(encoded, EXPORTED_AT_ONCE))):
        yield part


DIGESTED_MAX = 20_000
"""Limit of chunks in a digest: a digest of a whole large topic would take a minute."""
LATEST = 5
"""Chunks per name in the list of names."""


class Digest(Listed, frozen=True):
    """A digest: periods of one length."""

    by: Literal["day", "week"]
    periods: tuple[Period, ...]
    """Oldest first, without empty periods."""


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
    """Number of its chunks."""
    chunks: tuple[ChunkName, ...]
    """The latest of them; all, up to `limit`, if the name was asked for."""


class Entities(Listed, frozen=True):
    """Names, those in most chunks first."""

    entities: tuple[Entity, ...]
    total: int
    """Number of all names, including those beyond `limit`."""


@get("/memd/digest", "read", act="read", touches=lambda told: Extent(count=len(told.periods)))
async def digest(
    parts: DaemonParts,
    query: routing.FilterQuery,
    who: Principal,
    *,
    by: Annotated[
        Literal["auto", "day", "week"],
        Meta(description="The length of a period; auto: days, of two weeks or more weeks."),
    ] = "auto",
    sentences: Annotated[int, Meta(ge=0, le=50, description="The most key sentences of a period.")] = 3,
) -> Digest:
    """A digest of what was said, by day or week: key sentences (LexRank), and words that set each apart."""

    def digested(snapshots: list[Snapshot]) -> Digest:
        chosen_ids = [(snapshot, live_ids(chosen(snapshot, query.wanted))) for snapshot in snapshots]
        _check_count(sum(len(ids) for _, ids in chosen_ids), "a digest reads", "choose fewer by from and to")
        said = []
        for snapshot, ids in chosen_ids:
            entries = snapshot.read_many(snapshot.live_places(ids).values()).values()
            said += [Said(snapshot.topic_id, entry) for entry in entries if query.wanted.admits_entry(entry)]
        length, periods = digest_of(said, by, sentences)
        return Digest(length, tuple(periods))

    return await parts.read(query.topic, who, digested)


@get("/memd/chunks/{id}/related", "read", act="read", touches=lambda found: chunks_in(found.chunks))
async def related(
    parts: DaemonParts, chunk_id: str, query: routing.TopicsQuery, who: Principal, *, limit: Limit = 10
) -> RelatedChunks:
    """The chunks that belong to one without being said beside it: by meaning, rare names or time."""
    async with parts.held(query.topic, who, refused=None if query.topic else {}) as found:
        [(snapshot, uuid, waiting)] = await parts.named(found, [chunk_id], query.topic, who)

        def read() -> RelatedChunks:
            told = f"`memd show {chunk_id}`"
            if waiting is not None:
                raise BadQuestion(f"the chunk {chunk_id} is not in the log yet: ask again once it is; {told} shows it")
            entry = snapshot.find(uuid)
            if entry is None or not any(map(snapshot.is_live, snapshot.places(uuid))):
                raise BadQuestion(f"the chunk {chunk_id} was taken out by a correction; {told} tells by which")
            others = [snapshot if snapshot.topic_id == one.id else one.log.snapshot() for one in found]
            return RelatedChunks(snapshot.topic_id, entry.public_id, tuple(related_to(others, snapshot, entry, limit)))

        return await asyncio.to_thread(read)


@get("/memd/entities", "read", act="read", touches=lambda found: Extent(count=len(found.entities)))
async def entities(
    parts: DaemonParts,
    query: routing.TopicsQuery,
    who: Principal,
    *,
    name: Annotated[str | None, Meta(description="Only this name, in any case, with all its chunks.")] = None,
    kind: Annotated[tuple[KindName, ...], Meta(description="Only names written like this; may be given again.")] = (),
    limit: Limit = routing.PAGE,
) -> Entities:
    """Names and identifiers in what is stored, found by rules, and the chunks that have each."""
    return await parts.read(query.topic, who, lambda found: _entities(found, name, kind, limit))


def _check_count(chunks: int, read: str, remedy: str) -> None:
    if chunks > DIGESTED_MAX:
        raise BadQuestion(f"that is {chunks:,} chunks, and {read} {DIGESTED_MAX:,}; {remedy}")


def _entities(snapshots: Sequence[Snapshot], wanted: str | None, kinds: Sequence[KindName], limit: int) -> Entities:
    wanted_key = None if wanted is None else key_of(wanted)
    written: dict[str, Counter[str]] = defaultdict(Counter)
    having: dict[str, list[tuple[int, ChunkName]]] = defaultdict(list)
    if wanted is None:
        _check_count(sum(one.live_count for one in snapshots), "names are read in", "choose a topic, or a name")
    for snapshot in snapshots:
        every = () if wanted is not None else snapshot.live_places(live_ids(snapshot)).values()
        places = every if wanted is None else snapshot.places_with(wanted)
        for entry in snapshot.read_many(places).values():
            for name in entities_of(entry.named_text):
                key = key_of(name)
                if wanted_key in (None, key):
                    written[key][name] += 1
                    having[key].append((entry.canonical_id, ChunkName(snapshot.topic_id, entry.public_id)))
    names = {key: counts.most_common(1)[0][0] for key, counts in written.items()}
    most_first = sorted(having, key=lambda key: (-len(having[key]), key))
    kept = [key for key in most_first if not kinds or kind_of(names[key]) in kinds]
    found = []
    for key in kept[:limit]:
        latest = sorted(having[key], key=lambda one: -one[0])[: LATEST if wanted_key is None else limit]
        chunks = tuple(name for _, name in latest)
        found.append(Entity(name=names[key], kind=kind_of(names[key]), count=len(having[key]), chunks=chunks))
    return Entities(tuple(found), len(kept))
