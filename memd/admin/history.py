"""The log for people: entries as events, present states of chunks, the history of one chunk.

Rule: reads only snapshots, changes nothing and stores nothing. An event names no chunk that its reader may not know
(`known_to`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from memd.admin.routing import Listed
from memd.entries import Entry, Erased, Status, digits_of_id, multiplier_of
from memd.errors import BadQuestion, ErasedMeanwhile, NotFound, StoreError
from memd.principals import Principal
from memd.recall.corrections import STEPS
from memd.recall.days import day_of
from memd.recall.explained import origin_fields
from memd.recall.instructions import instructing_chunk
from memd.selection import EVERYTHING, Selection
from memd.store.lexical.postings import stream_of
from memd.store.log.columns import may_be_wanted, uuid_bytes
from memd.store.log.segment import NOTHING_PENDING, PendingView, UnstoredText
from memd.store.snapshot import Place, chosen, id_before, replacement_of, with_sources
from memd.store.store import Snapshot, TopicLog
from memd.wording import day_and_time

LOOKED_THROUGH_MAX = 20_000
"""Limit of chunks read from disk for one page of a filtered list."""
QUARTER_US = 900_000_000
"""In every time zone days begin at a multiple of this, so only few times must be converted to days."""
Known = Callable[[bytes], bool]
"""Returns whether a reader may know the chunk with this uuid."""


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


class Named(NamedTuple):
    """A chunk found by its id, in the first topic that has it."""

    snapshot: Snapshot
    uuid: bytes
    waiting: PendingView | None = None
    """The pending chunks, if it is one of them."""


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


def known_to(who: Principal, snapshots: Sequence[Snapshot]) -> Known:
    """Return the test for a reader; without the right to read every topic it admits only chunks of these."""
    if who.may_everywhere("read"):
        return lambda uuid: True
    return lambda uuid: any(snapshot.knows(uuid) for snapshot in snapshots)


def log_page(
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
            if max(_canonical_id(snapshot, one) for one in versions) != canonical_id:
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


def story(snapshot: Snapshot, chunk_uuid: bytes, waiting: PendingView | None, known: Known) -> ChunkStory:
    """Return the history of a chunk found by `named`; a pending one has one version. Raises StoreError: an entry cannot
    be read."""
    versions: tuple[LogEvent, ...]
    if waiting is not None:
        events = {}
        for row, entry in ((row, one.entry) for row, one in waiting.by_row().items()):
            facts: dict[str, Any] = {
                "at": entry.created_at,
                "event": "pending",
                "reason": None,
                "content": entry.displayed,
            }
            events[row] = _told(entry, snapshot.topic_id, known, live=True, **facts)
        [at] = [row for row, event in events.items() if event.uuid == chunk_uuid.hex()]
        versions, follows = (events[at],), waiting.segment.columns.follows
        before = events.get(at - 1) if follows[at] else None
        after = events.get(at + 1) if follows[at + 1 : at + 2].any() else None
        replaced_by: tuple[str, ...] = ()
    else:
        places = sorted(snapshot.places(chunk_uuid), key=lambda place: _canonical_id(snapshot, place))
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


def named(topics: Sequence[tuple[TopicLog, UnstoredText]], chunk_id: str) -> Named:
    """Find the chunk, stored or pending, with this public id, or else the one whose uuid begins with these digits.
    Called in a thread, because it may cut text.

    Args:
        topics: where to search, each with its pending text.

    Raises:
        NotFound: there is no such chunk.
        BadQuestion: it is not an id, or several chunks match.
    """
    digits = checked_digits(chunk_id)
    # A whole uuid is unique, so a stored chunk needs no text to be cut.
    is_stored = len(digits) == 32 and any(log.snapshot().knows(bytes.fromhex(digits)) for log, _ in topics)
    found: dict[bytes, tuple[bool, Named]] = {}
    for log, unstored in topics:
        waiting = NOTHING_PENDING if is_stored else unstored.chunks()
        snapshot = log.snapshot()  # taken second, so that a chunk stored in between is in one of them
        for one, is_its in snapshot.named(digits).items():
            found.setdefault(one, (is_its, Named(snapshot, one)))
        for entry in (one.entry for one in waiting if one.entry.uuid.hex().startswith(digits)):
            found.setdefault(entry.uuid, (entry.public_id == digits, Named(snapshot, entry.uuid, waiting)))
    meant = [one for is_its, one in found.values() if is_its] or [one for _, one in found.values()]
    if not meant:
        raise NotFound(f"no chunk has the id {digits!r}; `memd search` and `memd log` show ids")
    if len(meant) > 1:
        names = ", ".join(f"{one.uuid.hex()[:12]} ({one.snapshot.topic_id})" for one in meant[:5])
        raise BadQuestion(f"{digits!r} means {len(meant)} chunks: {names}; give more digits, or the topic")
    return meant[0]


def uuids_of(topics: Sequence[tuple[TopicLog, UnstoredText]], chunk_ids: Iterable[str]) -> dict[str, bytes]:
    """Return the chunks by id, without unknown ids. Raises BadQuestion: an id names several. See `named`."""
    found = {}
    for one in chunk_ids:
        if digits_of_id(one) is not None:
            with suppress(NotFound):
                found[one] = named(topics, one).uuid
    return found


def checked_digits(chunk_id: str) -> str:
    """Return the hexadecimal digits of an id in any notation. Raises BadQuestion: it is not an id."""
    if (digits := digits_of_id(chunk_id)) is None:
        raise BadQuestion(f"{chunk_id[:60]!r} is no chunk's id: those are four or more hex digits, as in [mem:a3f9]")
    return digits


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
    earlier = [one for one in snapshot.places(entry.uuid) if _canonical_id(snapshot, one) < entry.canonical_id]
    if not is_live or not earlier:
        return plain
    last = max(earlier, key=lambda one: _canonical_id(snapshot, one))
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
            yield _canonical_id(snapshot, place), snapshot, place


def _canonical_id(snapshot: Snapshot, place: Place) -> int:
    return int(snapshot.views[place[0]].rows[place[1]]["canonical_id"])
