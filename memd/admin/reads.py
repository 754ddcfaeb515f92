"""The operations that read the memory: search, log, chunks and their history, export, digests, related chunks, names.

Rule: nothing here changes the log or a prompt. Long answers are paged or streamed. Views are computed in a thread on
request and never stored; they read only snapshots. An event names no chunk that its reader may not know (`known_to`).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import date
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta

from memd.admin import routing
from memd.admin.parts import DaemonParts
from memd.admin.routing import Before, Extent, Limit, Listed, chunks_in, get
from memd.entries import STEPS, Entry, Erased, Moment, Status, multiplier_of
from memd.errors import BadQuestion, ErasedMeanwhile, Refused, StoreError
from memd.principals import Principal
from memd.recall.columns import Searchable
from memd.recall.digest import Period, Said
from memd.recall.digest import digest as digest_of
from memd.recall.explained import SearchAnswer, origin_fields, search_answer
from memd.recall.related import Related
from memd.recall.related import related as related_to
from memd.recall.untrusted import instructing_chunk
from memd.selection import EVERYTHING, Selection
from memd.store.lexical.analyzer import Kind, entities_of, key_of, kind_of
from memd.store.lexical.postings import stream_of
from memd.store.log.columns import may_be_wanted, uuid_bytes
from memd.store.log.segment import PendingView
from memd.store.snapshot import Place, chosen, id_before, live_ids, replacement_of, with_sources
from memd.store.store import Snapshot
from memd.store.tools.export import export as export_log
from memd.wording import day_and_time, day_of

LOOKED_THROUGH_MAX = 20_000
"""Limit of chunks read from disk for one page of a filtered list."""
QUARTER_US = 900_000_000
"""In every time zone days begin at a multiple of this, so only few times must be converted to days."""
Known = Callable[[bytes], bool]
"""Returns whether a reader may know the chunk with this uuid."""
EXPORTED_AT_ONCE = 200
CHUNK_TURNS_MAX = 20


KindName = Literal["e-mail", "link", "path", "version", "ticket", "identifier", "name"]
"""`entities.Kind`, as a parameter."""


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log, as people read it."""

    canonical_id: int
    at: int
    """Time it was appended, in microseconds since the epoch."""
    said_at: int
    """Time the chunk was said, in microseconds since the epoch."""
    topic_id: str
    id: str
    uuid: str
    event: str
    """`told`, `replacement` (by an Update), `Helpful`, `Unhelpful`, `Update` (which removed the chunk), `Undo`,
    `re-embedded`, `erased` (its text is gone), `pending` (not in the log yet) or `damaged` (it cannot be read)."""
    reason: str | None
    content: str
    """The chunk's text; for a removed chunk, its last text."""
    roles: tuple[str, ...]
    kind: str
    source: str | None
    tags: tuple[str, ...] = ()
    heading: tuple[str, ...] = ()
    """The title of a note, or the headings above a document's chunk."""
    page: int | None = None
    sheet: str | None = None
    author: str = ""
    """The principal who said it; empty for the owner, or if there are no principals."""
    by: str = ""
    """The principal who wrote this entry: the speaker, or the author of the correction."""
    multiplier: float
    live: bool
    """True if this entry is the chunk's present state and can be recalled."""
    takes_out: bool = False
    """True if this entry removes the chunk; `content` is then the removed text."""
    supersedes: tuple[str, ...]
    """The uuids of the chunks that it replaced."""
    shown: tuple[str, ...] = ()
    """The uuids of the chunks in the prompt of the assistant's message in it."""
    instructs: tuple[str, ...] = ()
    """Signs that a document or tool result in it tries to instruct a model."""


class Transcript(Listed, frozen=True):
    """Some live chunks, oldest first."""

    chunks: tuple[LogEvent, ...]
    of: int
    """Number of all live chunks of the selection."""


class SaidDay(msgspec.Struct, frozen=True):
    """A day (ISO 8601) and the number of chunks said on it."""

    day: str
    chunks: int


class LogPage(Listed, frozen=True, kw_only=True):
    """Some events, newest first."""

    events: tuple[LogEvent, ...]
    next: int | None
    """The value of `before` for the next page; None: this is the last one."""


class ChunkStory(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk with its history."""

    topic_id: str
    id: str
    uuid: str
    live: bool
    versions: tuple[LogEvent, ...]
    """Oldest first."""
    before: LogEvent | None
    """The live chunks of its stream that were said just before and just after it."""
    after: LogEvent | None
    replaces: tuple[str, ...]
    """The uuids of the chunks that it replaced, and of those that replaced it; without undone replacements."""
    replaced_by: tuple[str, ...]
    turns: tuple[str, ...] = ()
    """The latest turns with it in the prompt."""


class ChunksPage(Listed, frozen=True):
    """Present states of chunks, latest first."""

    chunks: tuple[LogEvent, ...]
    next: int | None
    """The value of `before` for the next page; None: this is the last one."""


class SaidDays(Listed, frozen=True):
    """The days on which something was said, earliest first."""

    days: tuple[SaidDay, ...]


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
) -> LogPage:
    """The latest entries of the log."""
    return await parts.read(query.topic, who, lambda found: latest_entries(found, who, before, limit))


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
    page = await parts.read(query.topic, who, lambda found: latest_entries(found, who, *chosen))
    return ChunksPage(page.events, page.next, note=page.note)


@get("/memd/days", "read")
async def days(parts: DaemonParts, query: routing.FilterQuery, who: Principal) -> SaidDays:
    """How many chunks were said on which day, of this machine's time zone."""
    return await parts.read(query.topic, who, lambda found: SaidDays(said_days(found, query.wanted)))


@get("/memd/chunks/{id}", "read", act="read", touches=lambda story: chunks_in(story.versions), tool="read_memory")
async def chunk(parts: DaemonParts, chunk_id: str, query: routing.TopicsQuery, who: Principal) -> ChunkStory:
    """Read one piece of memory: its whole text, what was said just before and after it, its earlier versions.

    Also one that is not in the log yet.
    """
    async with parts.held(query.topic, who, refused=None if query.topic else {}) as found:
        [named] = await parts.named(found, [chunk_id], query.topic, who)
        known = known_to(who, [topic.log.snapshot() for topic in found])
        story = await asyncio.to_thread(story_of, *named, known)
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


def known_to(who: Principal, snapshots: Sequence[Snapshot]) -> Known:
    """Return the test for a reader; without the right to read every topic it admits only chunks of these."""
    if who.may_everywhere("read"):
        return lambda uuid: True
    return lambda uuid: any(snapshot.knows(uuid) for snapshot in snapshots)


def latest_entries(
    snapshots: Sequence[Snapshot],
    who: Principal,
    before: int | None,
    limit: int,
    states: Literal["every", "last", "live"] = "every",
    wanted: Selection = EVERYTHING,
) -> LogPage:
    """Return the latest entries of these topics, newest first, as `who` may read them. `states`: every entry, each
    chunk's last one, or only the last ones of live chunks."""
    merged = heapq.merge(*(_ids(one, before, wanted) for one in snapshots), key=lambda found: -found[0])
    known, events, read = known_to(who, snapshots), list[LogEvent](), 0
    for canonical_id, snapshot, place in merged:
        if len(events) == limit or read == LOOKED_THROUGH_MAX:
            return LogPage(events=tuple(events), next=canonical_id + 1)
        if states != "every" and not snapshot.is_live(place):
            if states == "live" or int(snapshot.views[place[0]].rows[place[1]]["status"]) == Status.ACTIVE:
                continue
            versions = snapshot.places(snapshot.read(place).uuid)
            if max(map(snapshot.canonical_id, versions)) != canonical_id:
                continue
        read += states != "every"
        event = _event(snapshot, place, known)
        if _is_wanted(event, wanted):
            events.append(event)
    return LogPage(events=tuple(events), next=None)


def read_in_order(
    snapshots: Sequence[Snapshot], who: Principal, wanted: Selection, skip: int, limit: int
) -> Transcript:
    """Return live chunks of a selection in the order said, without the first `skip`."""
    known, parts = known_to(who, snapshots), []
    for number, snapshot in enumerate(snapshots):
        for segment_id, view in chosen(snapshot, wanted).views.items():
            rows = np.flatnonzero(~view.dead)
            said, ids = (view.rows[name][rows].astype(np.int64) for name in ("said_at", "canonical_id"))
            parts.append(np.stack([said, ids, np.full_like(ids, number), np.full_like(ids, segment_id), rows]))
    table = np.concatenate(parts, axis=1) if parts else np.empty((5, 0), dtype=np.int64)
    some = table[:, np.lexsort((table[1], table[0]))][:, skip : skip + limit]
    events = [_event(snapshots[number], (segment, row), known) for number, segment, row in some[2:].T.tolist()]
    return Transcript(tuple(one for one in events if _is_wanted(one, wanted)), table.shape[1])


def said_days(snapshots: Sequence[Snapshot], wanted: Selection) -> tuple[SaidDay, ...]:
    """Count live chunks of a selection by the day they were said, earliest first."""
    counts: Counter[date] = Counter()
    for view in (view for one in snapshots for view in chosen(one, wanted).views.values()):
        quarters, chunks = np.unique(view.rows["said_at"][~view.dead] // QUARTER_US, return_counts=True)
        for quarter, number in zip(quarters.tolist(), chunks.tolist(), strict=True):
            counts[day_of(quarter * QUARTER_US)] += number
    return tuple(SaidDay(one.isoformat(), number) for one, number in sorted(counts.items()))


def story_of(snapshot: Snapshot, chunk_uuid: bytes, waiting: PendingView | None, known: Known) -> ChunkStory:
    """Return the history of a chunk found by `named`; a pending one has one version. Raises StoreError: an entry cannot
    be read."""
    versions: tuple[LogEvent, ...]
    replaced_by: tuple[str, ...]
    if waiting is not None:
        rows, follows = {row: one.entry for row, one in waiting.by_row().items()}, waiting.segment.columns.follows
        [at] = [row for row, entry in rows.items() if entry.uuid == chunk_uuid]
        around = (
            rows.get(at - 1) if follows[at] else None,
            rows.get(at + 1) if follows[at + 1 : at + 2].any() else None,
        )

        def pending(entry: Entry) -> LogEvent:
            facts = {"event": "pending", "at": entry.created_at, "reason": None, "content": entry.displayed}
            return _told(entry, snapshot.topic_id, known, live=True, **facts)

        versions, replaced_by = (pending(rows[at]),), ()
        before, after = (None if one is None else pending(one) for one in around)
    else:
        places = sorted(snapshot.places(chunk_uuid), key=snapshot.canonical_id)
        versions = tuple(_event(snapshot, place, known) for place in places)
        before, after = (_beside(snapshot, places[-1], one, known) for one in snapshot.neighbours(places[-1]))
        replacements = (replacement_of(snapshot, place, chunk_uuid) for place in places)
        replaced_by = () if versions[-1].live else tuple(dict.fromkeys(one.hex() for one in replacements if one))
    return ChunkStory(
        topic_id=snapshot.topic_id,
        id=versions[-1].id,
        uuid=versions[-1].uuid,
        live=versions[-1].live,
        versions=versions,
        before=before,
        after=after,
        replaces=tuple(dict.fromkeys(uuid_ for version in versions for uuid_ in version.supersedes)),
        replaced_by=replaced_by,
    )


def _is_wanted(one: LogEvent, wanted: Selection) -> bool:
    return wanted.admits(one.said_at, one.roles, one.kind, one.source, one.tags, one.content, one.author)


def _told(entry: Entry, topic_id: str, known: Known, **facts: Any) -> LogEvent:
    """Return an entry as an event; `facts`: fields that the entry does not have."""
    return LogEvent(
        canonical_id=entry.canonical_id,
        said_at=entry.said,
        topic_id=topic_id,
        id=entry.public_id,
        uuid=entry.uuid.hex(),
        roles=entry.roles,
        **origin_fields(entry),
        by=entry.written_by,
        multiplier=multiplier_of(entry.utility_steps),
        supersedes=tuple(one.hex() for one in entry.supersedes),
        shown=() if entry.shown is UNSET else tuple(one.hex() for one in entry.shown if known(one)),
        instructs=instructing_chunk(entry),
        **facts,
    )


def _event(snapshot: Snapshot, place: Place, known: Known) -> LogEvent:
    try:
        entry = snapshot.read(place)
    except StoreError as error:
        row = snapshot.views[place[0]].rows[place[1]]
        digits = uuid_bytes(row["uuid_high"], row["uuid_low"]).hex()
        return LogEvent(
            canonical_id=int(row["canonical_id"]),
            at=int(row["canonical_id"]),
            said_at=int(row["origin_id"]),
            topic_id=snapshot.topic_id,
            id=digits[: int(row["public_digits"])],
            uuid=digits,
            event="erased" if isinstance(error, ErasedMeanwhile) else "damaged",
            reason=str(error),
            content="",
            roles=(),
            kind="",
            source=None,
            multiplier=1.0,
            live=snapshot.is_live(place),
            supersedes=(),
        )
    content, kind, reason = entry.displayed, _kind(snapshot, place, entry), entry.reason
    if isinstance(entry.erased, Erased):
        kind, reason = "erased", f"on {day_and_time(entry.erased.at)} by {entry.erased.by or 'somebody'}"
    elif entry.status is not Status.ACTIVE:
        earlier = [one for one in snapshot.history(entry.uuid) if one.canonical_id < entry.canonical_id]
        content = next((one.displayed for one in reversed(earlier) if one.content), "")
    facts = {"live": snapshot.is_live(place), "takes_out": kind != "erased" and entry.status is not Status.ACTIVE}
    return _told(entry, snapshot.topic_id, known, at=entry.at, event=kind, reason=reason, content=content, **facts)


def _kind(snapshot: Snapshot, place: Place, entry: Entry) -> str:
    """Return the kind of change that an entry makes to its chunk."""
    is_live = entry.status is Status.ACTIVE
    plain = "replacement" if is_live and entry.action == "Update" else entry.action or "told"
    earlier = [one for one in snapshot.places(entry.uuid) if snapshot.canonical_id(one) < entry.canonical_id]
    if not is_live or not earlier:
        return plain
    last = max(earlier, key=snapshot.canonical_id)
    try:
        before = snapshot.read(last)
    except StoreError:
        return plain
    parts = ("status", "utility_steps", "action", "reason", "content")
    if any(getattr(before, name) != getattr(entry, name) for name in parts):
        return plain
    # A repeated Helpful beyond the limit changes nothing, but is no re-embedding.
    models = {snapshot.views[segment].segment.header.fingerprint for segment, _ in (last, place)}
    return "re-embedded" if len(models) > 1 or entry.action not in STEPS else plain


def _beside(snapshot: Snapshot, place: Place, other: Place | None, known: Known) -> LogEvent | None:
    """Return the entry adjacent in time, unless it belongs to another stream or cannot be read."""
    if other is None:
        return None
    try:
        is_one_stream = stream_of(snapshot.read(place)) == stream_of(snapshot.read(other))
    except StoreError:
        return None
    return _event(snapshot, other, known) if is_one_stream else None


def _ids(snapshot: Snapshot, before: int | None, wanted: Selection) -> Iterator[tuple[int, Snapshot, Place]]:
    """Yield the entries that may match, newest first."""
    wanted = with_sources(snapshot, wanted)
    bits = {number: may_be_wanted(view.rows, wanted) for number, view in snapshot.views.items()}
    for place in snapshot.latest_places(None if before is None else id_before(snapshot, before)):
        if bits[place[0]][place[1]]:
            yield snapshot.canonical_id(place), snapshot, place
