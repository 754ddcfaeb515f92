"""The log as people read it: entries as events, the present state of chunks, the story of one chunk.

Rule: everything is read from snapshots; nothing is changed and nothing is kept.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from memd.entries import Entry, Erased, Status, digits_of_id
from memd.errors import BadQuestion, NotFound, StoreError
from memd.principals import Principal
from memd.recall.corrections import STEPS, replacement_of
from memd.recall.days import day_of
from memd.recall.explained import origin_fields
from memd.recall.instructions import instructing_chunk
from memd.store.choice import chosen
from memd.store.lexical.postings import stream_of
from memd.store.log.columns import may_be_wanted, uuid_bytes
from memd.store.order import id_before
from memd.store.pending import PendingRun, UnstoredText
from memd.store.snapshot import Place
from memd.store.store import Snapshot, TopicLog
from memd.wanted import EVERYTHING, Wanted
from memd.wording import day_and_time

LOOKED_THROUGH_MAX = 20_000
"""Chunks that one page of a filtered list may read from disk."""
QUARTER_US = 900_000_000
"""Days begin at one of these in every time zone, so that few moments have to be turned into days."""


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log, as people read it."""

    canonical_id: int
    at: int
    """When it was appended, in microseconds since the epoch."""
    said_at: int
    """When the chunk was said."""
    topic_id: str
    id: str
    uuid: str
    event: str
    """`told`, `replacement` (by an Update), `Helpful`, `Unhelpful`, `Update` (taken out by one), `Undo`, `re-embedded`,
    `erased`: its text is gone, `pending`: said, and not in the log yet, or `damaged`: it cannot be read."""
    reason: str | None
    content: str
    """The chunk's text; of a chunk that was taken out, its last text."""
    roles: tuple[str, ...]
    kind: str
    source: str | None
    tags: tuple[str, ...] = ()
    heading: tuple[str, ...] = ()
    """Of a note its title, of a document's chunk the headings above it."""
    page: int | None = None
    sheet: str | None = None
    author: str = ""
    """The principal who said it; empty for the owner, and where there are none."""
    by: str = ""
    """The principal who wrote this entry: who said it, or made the correction."""
    multiplier: float
    live: bool
    """Whether this entry is the chunk's present state and can be recalled."""
    supersedes: tuple[str, ...]
    """The uuids of the chunks that it replaced."""
    shown: tuple[str, ...] = ()
    """The uuids of the chunks that memory showed to the assistant that speaks in it."""
    instructs: tuple[str, ...] = ()
    """The signs that a document or a tool's result in it looks like an instruction to a model."""


class Transcript(msgspec.Struct, frozen=True):
    """Some live chunks, oldest first."""

    chunks: tuple[LogEvent, ...]
    of: int
    """How many there are."""


class SaidDay(msgspec.Struct, frozen=True):
    """A day (ISO 8601), and how many chunks were said on it."""

    day: str
    chunks: int


class Named(NamedTuple):
    """The chunk that an id means, and the first topic that has it."""

    snapshot: Snapshot
    uuid: bytes
    waiting: PendingRun | None = None
    """The chunks said together with it, itself among them, if it is not in the log yet."""


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some events, newest first."""

    events: tuple[LogEvent, ...]
    next: int | None
    """The value of `before` for the next page; None: this is the last one."""


class ChunkStory(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk with its whole history."""

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
    """The uuids of the chunks that it replaced, and of those that replaced it: none where that was undone."""
    replaced_by: tuple[str, ...]
    turns: tuple[str, ...] = ()
    """The latest turns that put it into the prompt."""


def log_page(snapshots: Sequence[Snapshot], *, before: int | None, limit: int) -> LogPage:
    """Return the latest entries of these topics, newest first."""
    merged = heapq.merge(*(_ids(one, before) for one in snapshots), key=lambda found: -found[0])
    events = [_event(snapshot, place) for (_, snapshot, place), _ in zip(merged, range(limit), strict=False)]
    return LogPage(events=tuple(events), next=events[-1].canonical_id if len(events) == limit else None)


def chunks_page(
    snapshots: Sequence[Snapshot],
    *,
    before: int | None,
    limit: int,
    wanted: Wanted = EVERYTHING,
    gone_too: bool = False,
) -> LogPage:
    """Return the present state of chunks, latest first.

    Args:
        gone_too: include chunks that were taken out.
    """
    merged = heapq.merge(*(_ids(one, before, wanted) for one in snapshots), key=lambda found: -found[0])
    events: list[LogEvent] = []
    read = 0
    for canonical_id, snapshot, place in merged:
        if len(events) == limit or read == LOOKED_THROUGH_MAX:
            return LogPage(events=tuple(events), next=canonical_id + 1)
        if not snapshot.is_live(place) and not (gone_too and _is_taken_out(snapshot, place)):
            continue
        read += 1
        event = _event(snapshot, place)
        if _is_wanted(event, wanted):
            events.append(event)
    return LogPage(events=tuple(events), next=None)


def transcript(snapshots: Sequence[Snapshot], wanted: Wanted, skip: int, limit: int) -> Transcript:
    """Return the live chunks of a choice in the order in which they were said, without the first `skip`."""
    parts = []
    for number, snapshot in enumerate(snapshots):
        for segment_id, view in chosen(snapshot, wanted).views.items():
            rows = np.flatnonzero(~view.dead)
            said, ids = (view.rows[name][rows].astype(np.int64) for name in ("said_at", "canonical_id"))
            parts.append(np.stack([said, ids, np.full_like(ids, number), np.full_like(ids, segment_id), rows]))
    table = np.concatenate(parts, axis=1) if parts else np.empty((5, 0), dtype=np.int64)
    some = table[:, np.lexsort((table[1], table[0]))][:, skip : skip + limit]
    events = [_event(snapshots[number], (segment, row)) for number, segment, row in some[2:].T.tolist()]
    return Transcript(tuple(one for one in events if _is_wanted(one, wanted)), table.shape[1])


def said_days(snapshots: Sequence[Snapshot], wanted: Wanted) -> tuple[SaidDay, ...]:
    """Count the live chunks of a choice by the day on which they were said, earliest first."""
    counts: Counter[date] = Counter()
    for view in (view for one in snapshots for view in chosen(one, wanted).views.values()):
        quarters, chunks = np.unique(view.rows["said_at"][~view.dead] // QUARTER_US, return_counts=True)
        for quarter, number in zip(quarters.tolist(), chunks.tolist(), strict=True):
            counts[day_of(quarter * QUARTER_US)] += number
    return tuple(SaidDay(one.isoformat(), number) for one, number in sorted(counts.items()))


def story(snapshot: Snapshot, chunk_uuid: bytes, waiting: PendingRun | None = None) -> ChunkStory:
    """Read the whole history of a chunk of a topic, see `Named`; one that is not in the log yet has one version.

    Raises:
        StoreError: an entry cannot be read.
    """
    if waiting is not None:
        return _pending_story(snapshot.topic_id, chunk_uuid, waiting)
    places = sorted(snapshot.places(chunk_uuid), key=lambda place: _canonical_id(snapshot, place))
    versions = tuple(_event(snapshot, place) for place in places)
    before, after = snapshot.neighbours(places[-1])
    newest = versions[-1]
    return ChunkStory(
        topic_id=snapshot.topic_id,
        id=newest.id,
        uuid=newest.uuid,
        live=newest.live,
        versions=versions,
        before=_neighbour(snapshot, places[-1], before),
        after=_neighbour(snapshot, places[-1], after),
        replaces=tuple(dict.fromkeys(uuid_ for version in versions for uuid_ in version.supersedes)),
        replaced_by=() if newest.live else _replacements(snapshot, places, chunk_uuid),
    )


def told(event: LogEvent, snapshots: Sequence[Snapshot], who: Principal) -> LogEvent:
    """An event without the ids of chunks that none of these topics has, unless `who` may read every topic."""
    if not event.shown or who.may_everywhere("read"):
        return event
    shown = (one for one in event.shown if any(snapshot.knows(bytes.fromhex(one)) for snapshot in snapshots))
    return msgspec.structs.replace(event, shown=tuple(shown))


def told_story(whole: ChunkStory, snapshots: Sequence[Snapshot], who: Principal) -> ChunkStory:
    """A story without such ids; see `told`."""
    beside = (one and told(one, snapshots, who) for one in (whole.before, whole.after))
    versions = tuple(told(one, snapshots, who) for one in whole.versions)
    return msgspec.structs.replace(whole, versions=versions, **dict(zip(("before", "after"), beside, strict=True)))


def _replacements(snapshot: Snapshot, places: Sequence[Place], chunk_uuid: bytes) -> tuple[str, ...]:
    found = (replacement_of(snapshot, place, chunk_uuid) for place in places)
    return tuple(one.hex() for one in found if one is not None)


def named(topics: Sequence[tuple[TopicLog, UnstoredText]], chunk_id: str) -> Named:
    """Find the chunk that an id or the first digits of a uuid name, stored or not: the one whose public id they are, or
    else the one whose uuid begins with them. Called in a thread: text may be cut first.

    Args:
        topics: to look in, each with its text that is not stored.

    Raises:
        NotFound: there is none.
        BadQuestion: it is not an id, or several chunks match.
    """
    digits = checked_digits(chunk_id)
    # Nothing else has a whole uuid, so for one that is stored no text is cut.
    is_stored = len(digits) == 32 and any(log.snapshot().knows(bytes.fromhex(digits)) for log, _ in topics)
    found: dict[bytes, tuple[bool, Named]] = {}
    for log, unstored in topics:
        runs = () if is_stored else unstored.chunks()
        snapshot = log.snapshot()  # taken after that: what is stored between the two looks is in one of them
        for one, is_its in snapshot.named(digits).items():
            found.setdefault(one, (is_its, Named(snapshot, one)))
        for run in runs:
            for entry in (chunk.entry for chunk in run if chunk.entry.uuid.hex().startswith(digits)):
                found.setdefault(entry.uuid, (entry.public_id == digits, Named(snapshot, entry.uuid, run)))
    meant = [one for is_its, one in found.values() if is_its] or [one for _, one in found.values()]
    if not meant:
        raise NotFound(f"no chunk has the id {digits!r}; `memd search` and `memd log` show ids")
    if len(meant) > 1:
        names = ", ".join(f"{one.uuid.hex()[:12]} ({one.snapshot.topic_id})" for one in meant[:5])
        raise BadQuestion(f"{digits!r} means {len(meant)} chunks: {names}; give more digits, or the topic")
    return meant[0]


def uuids_of(topics: Sequence[tuple[TopicLog, UnstoredText]], chunk_ids: Iterable[str]) -> dict[str, bytes]:
    """The chunks that ids name, without the ids that name none; BadQuestion where one names several. See `named`."""
    found = {}
    for one in chunk_ids:
        if digits_of_id(one) is not None:
            with suppress(NotFound):
                found[one] = named(topics, one).uuid
    return found


def _pending_story(topic_id: str, uuid: bytes, run: PendingRun) -> ChunkStory:
    [at] = [place for place, chunk in enumerate(run) if chunk.entry.uuid == uuid]
    event = _pending(topic_id, run[at].entry)
    return ChunkStory(
        topic_id=topic_id,
        id=event.id,
        uuid=event.uuid,
        live=True,
        versions=(event,),
        before=_pending(topic_id, run[at - 1].entry) if at else None,
        after=_pending(topic_id, run[at + 1].entry) if at + 1 < len(run) else None,
        replaces=(),
        replaced_by=(),
    )


def _is_wanted(one: LogEvent, wanted: Wanted) -> bool:
    return wanted.admits(one.said_at, one.roles, one.kind, one.source, one.tags, one.content, one.author)


def checked_digits(chunk_id: str) -> str:
    """The hexadecimal digits of an id, however it is written; BadQuestion if it is none."""
    if (digits := digits_of_id(chunk_id)) is None:
        raise BadQuestion(f"{chunk_id[:60]!r} is no chunk's id: those are four digits or more, as in [mem:a3f9]")
    return digits


def _pending(topic_id: str, entry: Entry) -> LogEvent:
    return LogEvent(
        canonical_id=entry.canonical_id,
        at=entry.created_at,
        said_at=entry.said,
        topic_id=topic_id,
        id=entry.public_id,
        uuid=entry.uuid.hex(),
        event="pending",
        reason=None,
        content=entry.displayed,
        roles=entry.roles,
        **origin_fields(entry),
        by=entry.written_by,
        multiplier=1.0,
        live=True,
        supersedes=(),
        instructs=instructing_chunk(entry),
    )


def _event(snapshot: Snapshot, place: Place) -> LogEvent:
    try:
        entry = snapshot.read(place)
    except StoreError as error:
        return _damaged(snapshot, place, str(error))
    content = entry.displayed
    if isinstance(entry.erased, Erased):
        reason = f"on {day_and_time(entry.erased.at)} by {entry.erased.by or 'somebody'}"
        entry = msgspec.structs.replace(entry, action="erased", reason=reason)
    elif entry.status is not Status.ACTIVE:
        earlier = [one for one in snapshot.history(entry.uuid) if one.canonical_id < entry.canonical_id]
        content = next((one.displayed for one in reversed(earlier) if one.content), "")
    return LogEvent(
        canonical_id=entry.canonical_id,
        at=entry.at,
        said_at=entry.said,
        topic_id=snapshot.topic_id,
        id=entry.public_id,
        uuid=entry.uuid.hex(),
        event=_kind(snapshot, place, entry),
        reason=entry.reason,
        content=content,
        roles=entry.roles,
        **origin_fields(entry),
        by=entry.written_by,
        multiplier=snapshot.utility.multiplier(entry.utility_steps),
        live=snapshot.is_live(place),
        supersedes=tuple(one.hex() for one in entry.supersedes),
        shown=() if entry.shown is UNSET else tuple(one.hex() for one in entry.shown),
        instructs=instructing_chunk(entry),
    )


def _neighbour(snapshot: Snapshot, place: Place, other: Place | None) -> LogEvent | None:
    """The entry beside another one in time, unless it belongs to another stream or cannot be read."""
    if other is None:
        return None
    try:
        is_one_stream = stream_of(snapshot.read(place)) == stream_of(snapshot.read(other))
    except StoreError:
        return None
    return _event(snapshot, other) if is_one_stream else None


def _damaged(snapshot: Snapshot, place: Place, problem: str) -> LogEvent:
    row = snapshot.views[place[0]].rows[place[1]]
    digits = uuid_bytes(row["uuid_high"], row["uuid_low"]).hex()
    return LogEvent(
        canonical_id=int(row["canonical_id"]),
        at=int(row["canonical_id"]),
        said_at=int(row["origin_id"]),
        topic_id=snapshot.topic_id,
        id=digits[: int(row["public_digits"])],
        uuid=digits,
        event="damaged",
        reason=problem,
        content="",
        roles=(),
        kind="",
        source=None,
        multiplier=1.0,
        live=snapshot.is_live(place),
        supersedes=(),
    )


def _kind(snapshot: Snapshot, place: Place, entry: Entry) -> str:
    is_live = entry.status is Status.ACTIVE
    plain = "replacement" if is_live and entry.action == "Update" else entry.action or "told"
    earlier = [one for one in snapshot.places(entry.uuid) if _canonical_id(snapshot, one) < entry.canonical_id]
    if not is_live or not earlier:
        return plain
    last = max(earlier, key=lambda one: _canonical_id(snapshot, one))
    try:
        before = snapshot.read(last)
    except StoreError:
        return plain
    if _said_of(before) != _said_of(entry):
        return plain
    # The same praise again, beyond which nothing changes, is praise all the same.
    is_other_model = _fingerprint(snapshot, last) != _fingerprint(snapshot, place)
    return "re-embedded" if is_other_model or entry.action not in STEPS else plain


def _said_of(entry: Entry) -> tuple[object, ...]:
    return entry.status, entry.utility_steps, entry.action, entry.reason, entry.content


def _fingerprint(snapshot: Snapshot, place: Place) -> str:
    return snapshot.views[place[0]].segment.header.fingerprint


def _ids(snapshot: Snapshot, before: int | None, wanted: Wanted = EVERYTHING) -> Iterator[tuple[int, Snapshot, Place]]:
    """The entries that may be wanted, newest first."""
    bits = {number: may_be_wanted(view.rows, wanted) for number, view in snapshot.views.items()}
    for place in snapshot.latest_places(None if before is None else id_before(snapshot, before)):
        if bits[place[0]][place[1]]:
            yield _canonical_id(snapshot, place), snapshot, place


def _canonical_id(snapshot: Snapshot, place: Place) -> int:
    return int(snapshot.views[place[0]].rows[place[1]]["canonical_id"])


def _is_taken_out(snapshot: Snapshot, place: Place) -> bool:
    """Return whether the entry is its chunk's last one and takes it out."""
    row = snapshot.views[place[0]].rows[place[1]]
    if int(row["status"]) == Status.ACTIVE:
        return False
    entry = snapshot.read(place)
    return max(_canonical_id(snapshot, one) for one in snapshot.places(entry.uuid)) == entry.canonical_id
