"""The log as people read it: entries as events, the present state of chunks, the story of one chunk.

Rule: everything is read from snapshots; nothing is changed and nothing is kept.

Recent conversations are put together from receipts, with what the model was shown and said in each turn; what is older
than the receipts, or was imported, is read from the log: there a conversation is a source, or what was said in a topic
without a longer pause, since the log does not tell live conversations apart.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from memd.admin.parts import DaemonParts
from memd.admin.queries import ConversationsQuery, Extent, TranscriptQuery, chunks_in
from memd.admin.routing import get
from memd.entries import Entry, Erased, Status, digits_of_id, multiplier_of
from memd.errors import BadQuestion, NotFound, StoreError
from memd.principals import Principal
from memd.recall.corrections import STEPS, replacement_of
from memd.recall.days import day_of
from memd.recall.explained import INJECTED, origin_fields
from memd.recall.instructions import instructing_chunk
from memd.receipts import Receipt
from memd.selection import EVERYTHING, Selection
from memd.store.choice import chosen
from memd.store.lexical.postings import stream_of
from memd.store.log.columns import may_be_wanted, uuid_bytes
from memd.store.pending import NOTHING_PENDING, PendingView, UnstoredText
from memd.store.snapshot import Place, id_before
from memd.store.store import Snapshot, TopicLog
from memd.store.tools.conversations import PAUSE_US
from memd.wire.lenient_json import decode_or_none
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
    waiting: PendingView | None = None
    """The chunks that are not in the log yet, if it is one of them."""


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
    wanted: Selection = EVERYTHING,
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


def read_in_order(snapshots: Sequence[Snapshot], wanted: Selection, skip: int, limit: int) -> Transcript:
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


def said_days(snapshots: Sequence[Snapshot], wanted: Selection) -> tuple[SaidDay, ...]:
    """Count the live chunks of a choice by the day on which they were said, earliest first."""
    counts: Counter[date] = Counter()
    for view in (view for one in snapshots for view in chosen(one, wanted).views.values()):
        quarters, chunks = np.unique(view.rows["said_at"][~view.dead] // QUARTER_US, return_counts=True)
        for quarter, number in zip(quarters.tolist(), chunks.tolist(), strict=True):
            counts[day_of(quarter * QUARTER_US)] += number
    return tuple(SaidDay(one.isoformat(), number) for one, number in sorted(counts.items()))


def story(snapshot: Snapshot, chunk_uuid: bytes, waiting: PendingView | None = None) -> ChunkStory:
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
    replacements = (replacement_of(snapshot, place, chunk_uuid) for place in places)
    return ChunkStory(
        topic_id=snapshot.topic_id,
        id=newest.id,
        uuid=newest.uuid,
        live=newest.live,
        versions=versions,
        before=_neighbour(snapshot, places[-1], before),
        after=_neighbour(snapshot, places[-1], after),
        replaces=tuple(dict.fromkeys(uuid_ for version in versions for uuid_ in version.supersedes)),
        replaced_by=() if newest.live else tuple(one.hex() for one in replacements if one is not None),
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
        waiting = NOTHING_PENDING if is_stored else unstored.chunks()
        snapshot = log.snapshot()  # taken after that: what is stored between the two looks is in one of them
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
    """The chunks that ids name, without the ids that name none; BadQuestion where one names several. See `named`."""
    found = {}
    for one in chunk_ids:
        if digits_of_id(one) is not None:
            with suppress(NotFound):
                found[one] = named(topics, one).uuid
    return found


def _pending_story(topic_id: str, uuid: bytes, pending: PendingView) -> ChunkStory:
    events = {row: _pending(topic_id, one.entry) for row, one in pending.by_row().items()}
    [at] = [row for row, event in events.items() if event.uuid == uuid.hex()]
    event, follows = events[at], pending.columns.follows
    return ChunkStory(
        topic_id=topic_id,
        id=event.id,
        uuid=event.uuid,
        live=True,
        versions=(event,),
        before=events.get(at - 1) if follows[at] else None,
        after=events.get(at + 1) if follows[at + 1 : at + 2].any() else None,
        replaces=(),
        replaced_by=(),
    )


def _is_wanted(one: LogEvent, wanted: Selection) -> bool:
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
        multiplier=multiplier_of(entry.utility_steps),
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


def _ids(
    snapshot: Snapshot, before: int | None, wanted: Selection = EVERYTHING
) -> Iterator[tuple[int, Snapshot, Place]]:
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


TITLE_CHARACTERS = 120
BRANCHES_MAX = 20


class ConversationBrief(msgspec.Struct, kw_only=True):
    """A conversation in a list. It is opened by its id, or where that is None as the part of the log from `began_at` to
    `last_at`, of `source` if it has one."""

    topic_id: str
    conversation: str | None = None
    source: str | None = None
    title: str = ""
    """Its first words."""
    began_at: int
    """When its first and its last message were said, in microseconds since the epoch."""
    last_at: int
    turns: int | None = None
    """Of which there are receipts; None: it is read from the log."""
    chunks: int | None = None
    """In the log; None: it is read from receipts."""


class ConversationsPage(msgspec.Struct, frozen=True):
    """Conversations, the one used last first."""

    conversations: tuple[ConversationBrief, ...]
    of: int
    """How many there are."""


class ConversationTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a conversation: what was asked, what the model was shown, and what it said."""

    turn_id: str
    at: int
    conversation: str
    """Another one's id where this one branched off later."""
    is_step: bool
    is_retry: bool
    status: str
    model: str
    asked: str
    reply: str
    calls: tuple[str, ...]
    block: str | None
    shown: tuple[str, ...]
    injected: int
    """The chunks that were new in this prompt."""
    instructing: tuple[str, ...]
    """The ids of those of them that look like an instruction to a model; see `ScoredChunk.instructs`."""
    memory_tokens: int
    left_out: int
    interrupted: bool
    error: str | None


class ConversationTurns(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, oldest turn first."""

    topic_id: str
    conversation: str
    title: str
    is_whole: bool
    """Whether the receipts reach back to its first message."""
    of: int
    """How many requests it has."""
    turns: tuple[ConversationTurn, ...]
    branches: tuple[str, ...]
    """Other conversations that share its beginning: edited questions, answers that were given anew."""


class _Turn(msgspec.Struct):
    """The members of a receipt that say where its turn stands."""

    turn_id: str
    at: int
    topic_id: str
    conversation: str = ""
    position: int = 0
    branched: tuple[str, int | None] | None = None
    is_retry: bool = False
    asked: str = ""
    line: bytes = b""


class _Strand(msgspec.Struct):
    """All turns with one conversation id, oldest first."""

    turns: list[_Turn]
    parent: str | None = None
    root: str = ""


_turn_decoder = msgspec.json.Decoder(_Turn)


@get(
    "/memd/conversations",
    "read",
    act="read",
    touches=lambda page: Extent(tuple(one.topic_id for one in page.conversations), count=len(page.conversations)),
)
async def conversations(parts: DaemonParts, query: ConversationsQuery, who: Principal) -> ConversationsPage:
    """Conversations with their first words, the one used last first: recent ones from receipts, older and imported
    ones from the log."""
    lines = await parts.receipts.lines(who)
    return await parts.named.read(query.topic, who, lambda found: _conversations_page(lines, found, query))


@get(
    "/memd/conversations/{id}",
    "read",
    act="read",
    touches=lambda told: Extent((told.topic_id,), count=len(told.turns)),
)
async def conversation(
    parts: DaemonParts, conversation_id: str, query: ConversationsQuery, who: Principal
) -> ConversationTurns:
    """One conversation from its beginning, with what the model was shown and said in each turn."""
    for name in query.topic:
        who.check("read", name)
    lines = await parts.receipts.lines(who)
    return await asyncio.to_thread(conversation_of, lines, query.topic, conversation_id, query.skip, query.limit)


@get("/memd/transcript", "read", act="read", touches=lambda told: chunks_in(told.chunks))
async def transcript(parts: DaemonParts, query: TranscriptQuery, who: Principal) -> Transcript:
    """The live chunks of a choice in the order in which they were said, oldest first."""
    if query.contains or query.author:  # would read all of them, for every page
        raise BadQuestion("what is read in order is not chosen by `contains` or `author`; GET /memd/chunks is")

    def read(snapshots: list[Snapshot]) -> Transcript:
        whole = read_in_order(snapshots, query.wanted, query.skip, query.limit)
        return Transcript(tuple(told(one, snapshots, who) for one in whole.chunks), whole.of)

    return await parts.named.read(query.topic, who, read)


def _conversations_page(
    lines: Sequence[bytes], snapshots: Sequence[Snapshot], query: ConversationsQuery
) -> ConversationsPage:
    strands = _strands(lines, query.topic)
    found: list[tuple[ConversationBrief, tuple[Snapshot, Place] | None]] = [(one, None) for one in _recent(strands)]
    reach = _reach(strands)
    for snapshot in snapshots:
        found += [(one, (snapshot, place)) for one, place in _stretches(snapshot, reach.get(snapshot.topic_id))]
    found.sort(key=lambda one: (-one[0].last_at, one[0].topic_id))
    shown = found[query.skip : query.skip + query.limit]
    for brief, first in shown:
        if first is not None:
            entry = first[0].read_many([first[1]]).get(first[1])
            brief.title = _first_words("(damaged)" if entry is None else _opening(entry))
            brief.source = None if entry is None else entry.source
    return ConversationsPage(tuple(one for one, _ in shown), len(found))


def conversation_of(
    lines: Sequence[bytes], topics: Collection[str], conversation_id: str, skip: int, limit: int
) -> ConversationTurns:
    """Put a conversation together from receipts.

    Args:
        topics: look only in these; empty: in all.
        skip: how many of its first requests to leave out.

    Raises:
        NotFound: no receipt tells of it.
        BadQuestion: several topics have one with this id.
    """
    strands = _strands(lines, topics)
    named = [key for key in strands if key[1] == conversation_id]
    if not named:
        why = "its receipts are gone, receipts.enabled is false, or the id is wrong; the log may have it (memd log)"
        raise NotFound(f"there is no conversation {conversation_id[:60]!r}: {why}")
    if len(named) > 1:
        raise BadQuestion(f"conversations of {len(named)} topics have this id; name the topic")
    [(topic_id, _)] = named
    turns = _chain(strands, topic_id, conversation_id)
    family = [
        key[1]
        for key, one in strands.items()
        if key[0] == topic_id and one.root == strands[topic_id, conversation_id].root
    ]
    return ConversationTurns(
        topic_id=topic_id,
        conversation=conversation_id,
        title=_first_words(turns[0].asked),
        is_whole=turns[0].position == 0,
        of=len(turns),
        turns=tuple(_told_turn(turn.line) for turn in turns[skip : skip + limit]),
        branches=tuple(one for one in family if one != conversation_id)[:BRANCHES_MAX],
    )


def _strands(lines: Iterable[bytes], topics: Collection[str]) -> dict[tuple[str, str], _Strand]:
    """Turns by topic and conversation; each dict and list has the oldest first."""
    turns_read: list[_Turn] = []
    for line in lines:
        turn = decode_or_none(_turn_decoder, line)
        if turn is not None and turn.conversation and (not topics or turn.topic_id in topics):
            turn.line = line
            turns_read.append(turn)
    strands: dict[tuple[str, str], _Strand] = {}
    turns_read.sort(key=lambda one: one.at)
    for turn in turns_read:
        strands.setdefault((turn.topic_id, turn.conversation), _Strand([])).turns.append(turn)
    for (topic_id, name), strand in strands.items():
        first = strand.turns[0]
        # One that branched off at its first message shares nothing with the other: they only began with the same words.
        if first.branched is not None and (first.position > 0 or first.branched[1] is None):
            strand.parent = first.branched[0]
        parent = None if strand.parent is None else strands.get((topic_id, strand.parent))
        strand.root = name if parent is None else parent.root or name
    return strands


def _chain(strands: dict[tuple[str, str], _Strand], topic_id: str, conversation_id: str) -> list[_Turn]:
    """The turns of a conversation and, before them, those of the ones that it branched off from."""
    own = strands[topic_id, conversation_id]
    parts = [own.turns]  # the latest first
    seen = {conversation_id}
    while own.parent is not None and own.parent not in seen and (topic_id, own.parent) in strands:
        seen.add(own.parent)
        first = own.turns[0]
        was_rewritten = first.branched is not None and first.branched[1] is None
        own = strands[topic_id, own.parent]
        before = [one for one in own.turns if one.at < first.at]
        parts.append([one for one in before if was_rewritten or one.position < first.position])
    return [turn for part in reversed(parts) for turn in part]


def _recent(strands: dict[tuple[str, str], _Strand]) -> Iterator[ConversationBrief]:
    """One of each family: that which was used last stands for its branches."""
    latest: dict[tuple[str, str], tuple[int, str]] = {}
    for (topic_id, name), strand in strands.items():
        if all(turn.is_retry for turn in strand.turns):
            continue  # the same request again; what was sent first is listed
        family = topic_id, strand.root
        latest[family] = max(latest.get(family, (0, "")), (strand.turns[-1].at, name))
    for (topic_id, _), (last_at, name) in latest.items():
        turns = _chain(strands, topic_id, name)
        yield ConversationBrief(
            topic_id=topic_id,
            conversation=name,
            title=_first_words(turns[0].asked),
            began_at=turns[0].at,
            last_at=last_at,
            turns=len({(one.conversation, one.position) for one in turns}),
        )


def _reach(strands: dict[tuple[str, str], _Strand]) -> dict[str, int]:
    """From when on the receipts tell of a topic's conversations."""
    reach: dict[str, int] = {}
    for (topic_id, _), strand in strands.items():
        reach[topic_id] = min(reach.get(topic_id, strand.turns[0].at), strand.turns[0].at)
    return reach


def _stretches(snapshot: Snapshot, reach: int | None) -> Iterator[tuple[ConversationBrief, Place]]:
    """The conversations of a topic's log, without their titles, and the place of the first chunk of each: one of each
    source of turns, and what was said before the receipts begin."""
    parts = []
    for number, view in snapshot.views.items():
        rows = np.flatnonzero(~view.dead & may_be_wanted(view.rows, Selection(kinds=("turn",))))
        said, source = (view.rows[name][rows].astype(np.int64) for name in ("said_at", "source_hash"))
        parts.append(np.stack([source, said, np.full(len(rows), number), rows.astype(np.int64)]))
    table = np.concatenate(parts, axis=1) if parts else np.empty((4, 0), dtype=np.int64)
    if reach is not None:
        table = table[:, (table[0] != 0) | (table[1] < reach)]
    table = table[:, np.lexsort((table[1], table[0]))]
    source, said = table[0], table[1]
    begins = np.ones(len(said), dtype=np.bool_)
    begins[1:] = (source[1:] != source[:-1]) | ((source[1:] == 0) & (np.diff(said) > PAUSE_US))
    starts = np.flatnonzero(begins).tolist()
    for start, end in zip(starts, [*starts[1:], len(said)], strict=False):
        place = int(table[2, start]), int(table[3, start])
        brief = ConversationBrief(
            topic_id=snapshot.topic_id,
            began_at=int(said[start]),
            last_at=int(said[end - 1]),
            chunks=end - start,
        )
        yield brief, place


def _told_turn(line: bytes) -> ConversationTurn:
    receipt = msgspec.json.decode(line, type=Receipt)
    injected = [one for one in receipt.candidates if one.verdict == INJECTED]
    instructing = tuple(one.id for one in injected if one.instructs)
    names = [name for name in ConversationTurn.__struct_fields__ if name not in ("injected", "instructing")]
    own = {name: getattr(receipt, name) for name in names}
    return ConversationTurn(**own, injected=len(injected), instructing=instructing)


def _opening(entry: Entry) -> str:
    """The words of the first who speaks in a chunk."""
    speakers = () if entry.speakers is UNSET else entry.speakers
    return entry.content[: speakers[1].offset] if len(speakers) > 1 else entry.content


def _first_words(text: str) -> str:
    words = " ".join(text[: TITLE_CHARACTERS * 4].split())
    return words if len(words) <= TITLE_CHARACTERS else f"{words[:TITLE_CHARACTERS].rsplit(' ', 1)[0]} …"
