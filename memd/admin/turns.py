"""Turns, conversations, usage and figures, from receipts and, beyond them, from the log.

Rule: a turn is known only by its receipt; old turns, and all turns without `receipts.enabled`, are unknown. Recent
conversations are assembled from receipts; older and imported ones are read from the log. There, a conversation is a
source, or the messages of a topic without a longer pause, because the log does not distinguish live conversations.
Usage and figures are computed on request; tokens are the model server's counts if reported, otherwise memd's estimate.
Periods are in this machine's time zone.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from memd.admin import routing
from memd.admin.parts import DaemonParts
from memd.admin.reads import QUARTER_US, Transcript, read_in_order
from memd.admin.routing import Extent, Limit, Listed, Skip, chunks_in, get
from memd.entries import WallTime
from memd.errors import BadQuestion, NotFound, Refused
from memd.principals import Principal
from memd.recall.columns import Searchable
from memd.recall.explained import EARLIER, INJECTED, ScoredChunk, SearchAnswer, search_answer
from memd.receipts import Receipt, summary
from memd.selection import Selection
from memd.store.log.columns import ROW, may_be_wanted
from memd.store.snapshot import Place
from memd.store.store import Snapshot
from memd.store.tools.export import PAUSE_US
from memd.wire.lenient_json import decode_or_none

TITLE_CHARACTERS = 120
BRANCHES_MAX = 20


class ConversationsQuery(routing.TopicsQuery, frozen=True, kw_only=True):
    """`GET /memd/conversations`, `GET /memd/conversations/{id}`."""

    skip: Skip = 0
    limit: Limit = routing.PAGE


class TurnsPage(msgspec.Struct, frozen=True):
    """The latest turns, newest first: receipts without their blocks, and with the number of their candidates."""

    turns: list[dict[str, Any]]


class TurnReplay(msgspec.Struct, frozen=True):
    """A turn, the chunks that its question gets now (or got from the chunks stored then), and the differing ids."""

    turn: Receipt
    now: SearchAnswer
    gained: list[str]
    lost: list[str]
    kept: list[str]


def _candidates_in(turn: Receipt, candidates: Sequence[ScoredChunk]) -> Extent:
    return Extent((turn.topic_id,)).and_of(chunks_in(candidates))


@get(
    "/memd/turns",
    "read",
    act="read",
    touches=lambda page: Extent(tuple(one["topic_id"] for one in page.turns), count=len(page.turns)),
)
async def turns(
    parts: DaemonParts,
    who: Principal,
    *,
    topic: routing.OnlyTopic = None,
    before: Annotated[str | None, Meta(description="Only turns older than the one with this id.")] = None,
    limit: Limit = routing.PAGE,
    steps: Annotated[
        bool, Meta(description="Also the later steps of tool loops; without them each turn has `steps`.")
    ] = True,
) -> TurnsPage:
    """The latest turns, without their blocks."""
    if topic is not None:
        who.check("read", topic)
    chosen = partial(parts.receipts.latest, topic_id=topic, before=before, with_steps=steps)
    turns = []
    for receipt, at in await asyncio.to_thread(chosen, limit, who):
        counted_steps = {} if steps else {"steps": len(at), "steps_until": max(at, default=0)}
        turns.append(summary(receipt) | counted_steps)
    return TurnsPage(turns)


@get("/memd/receipts", "read", act="read", streams="application/jsonl")
async def receipts(parts: DaemonParts, who: Principal) -> routing.WholeAnswer:
    """All receipts that this daemon keeps, a JSON line each, the newest first."""
    lines = await asyncio.to_thread(lambda: b"\n".join(parts.receipts.lines(who)))
    return routing.WholeAnswer(lines, "application/jsonl")


@get("/memd/turns/{id}", "read", act="read", touches=lambda turn: _candidates_in(turn, turn.candidates))
async def turn(parts: DaemonParts, turn_id: str, who: Principal) -> Receipt:
    """One turn's receipt."""
    receipt = await asyncio.to_thread(parts.receipts.find, turn_id, who) if turn_id.isalnum() else None
    if receipt is None:
        why = "it is not written yet, too old, receipts.enabled is false, or the id is wrong or not whole"
        raise NotFound(f"there is no receipt of turn {turn_id[:60]!r}: {why}")
    return receipt


@get("/memd/turns/{id}/replay", "read", act="search", touches=lambda told: _candidates_in(told.turn, told.now.chunks))
async def replay(
    parts: DaemonParts,
    turn_id: str,
    who: Principal,
    *,
    then: Annotated[bool, Meta(description="Search what was stored when the turn began, not what is stored now.")] = (
        False
    ),
) -> TurnReplay:
    """The chunks that the same question, with the same filter, would get now, compared with those of the turn."""
    from memd.recall.retrieve import Budget, Filters  # a command imports this module and retrieves nothing

    receipt = await turn(parts, turn_id, who)
    if receipt.question is None:
        raise BadQuestion("memory was not asked in this turn: it showed the block of an earlier one, or none")
    refused: Refused = {}
    topics = [one for one in (receipt.topic_id, *receipt.related) if who.may("read", one)]
    async with parts.topics.held(topics, refused=refused) as found:  # those that are still there
        logs: Sequence[Searchable] = [topic.log for topic in found]
        if then:
            logs = await parts.retriever.as_of([topic.log for topic in found], WallTime(receipt.at), refused)
        budget = Budget(receipt.budget_tokens, parts.counter.drift.factor(receipt.model), receipt.room_tokens)
        earlier = {bytes.fromhex(one.uuid) for one in receipt.candidates if one.verdict == EARLIER}
        new, visible = {one.id for one in receipt.candidates if one.verdict == INJECTED}, set[bytes]()
        for talk in filter(None, [one.buffer.of_id(receipt.conversation) for one in found]):  # the one it was asked in
            blocks = [chunk for block in talk.blocks.values() for chunk in block.chunks]
            earlier |= {chunk.uuid for chunk in blocks if chunk.shown_id in {*receipt.shown} - new}
            visible = talk.digests_shown(talk.visible_positions())
        filters = Filters(
            visible_digests=visible,
            shown_uuids=earlier,
            wanted=receipt.filter,
            asked_at=receipt.at,
            step=receipt.step,
            everything=True,
        )
        retrieved = await parts.retriever.retrieve(receipt.question, logs, budget, filters, refused)
    now = search_answer(retrieved, receipt.at if then else None)
    before = {one.uuid: one.id for one in receipt.candidates if one.verdict in (INJECTED, EARLIER)}
    since = {one.uuid: one.id for one in now.chunks if one.verdict in (INJECTED, EARLIER)}
    return TurnReplay(
        turn=receipt,
        now=now,
        gained=[id_ for uuid, id_ in since.items() if uuid not in before],
        lost=[id_ for uuid, id_ in before.items() if uuid not in since],
        kept=[id_ for uuid, id_ in before.items() if uuid in since],
    )


class ConversationBrief(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation in a list. It is opened by its id, or if that is None as the part of the log from `began_at` to
    `last_at`, of `source` if it has one."""

    topic_id: str
    conversation: str | None = None
    source: str | None = None
    title: str = ""
    """Its first words."""
    began_at: int
    """Times of its first and last message, in microseconds since the epoch."""
    last_at: int
    turns: int | None = None
    """Number of turns with a receipt; None if it is read from the log."""
    chunks: int | None = None
    """Number of chunks in the log; None if it is read from receipts."""


class ConversationsPage(Listed, frozen=True):
    """Conversations, the one used last first."""

    conversations: tuple[ConversationBrief, ...]
    of: int
    """Number of all conversations."""


class ConversationTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a conversation: what was asked, what the model was shown, and what it said."""

    turn_id: str
    at: int
    conversation: str
    """Id of this conversation, or of the one that it branched off from later."""
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
    """Number of chunks that were new in this prompt."""
    instructing: tuple[str, ...]
    """Ids of new chunks that look like an instruction to a model; see `ScoredChunk.instructs`."""
    memory_tokens: int
    left_out: int
    interrupted: bool
    error: str | None
    note: str | None


class ConversationTurns(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, oldest turn first."""

    topic_id: str
    conversation: str
    title: str
    is_whole: bool
    """True if the receipts reach back to its first message."""
    of: int
    """Number of its requests."""
    turns: tuple[ConversationTurn, ...]
    branches: tuple[str, ...]
    """Other conversations with the same beginning: edited questions, regenerated answers."""


class _Verdict(msgspec.Struct, frozen=True):
    verdict: str = ""


class TurnFacts(msgspec.Struct, frozen=True):
    """The members of a receipt needed for conversations and sums; decoding all of it takes twice as long."""

    at: int
    topic_id: str
    conversation: str = ""
    position: int = 0
    branched: tuple[str, int | None] | None = None
    is_retry: bool = False
    asked: str = ""
    model: str = ""
    http_status: int | None = None
    memory_tokens: int = 0
    forwarded_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    question: str | None = None
    candidates: tuple[_Verdict, ...] = ()
    timings_ms: dict[str, float] = msgspec.field(default_factory=dict)
    line: bytes = b""
    """The receipt, for a turn of a conversation."""

    @property
    def was_answered(self) -> bool:
        """True if the model server accepted the prompt."""
        return self.http_status is not None and self.http_status < 400

    @property
    def parent(self) -> str | None:
        """The conversation that this one, as its first turn, branched off from. One that branched off at its first
        message shares nothing with the other: only their first words are the same."""
        is_branch = self.branched is not None and (self.position > 0 or self.branched[1] is None)
        return self.branched[0] if self.branched is not None and is_branch else None


_facts_decoder = msgspec.json.Decoder(TurnFacts)
_Strands = dict[tuple[str, str], list[TurnFacts]]
"""Turns by topic and conversation, oldest first."""


@get(
    "/memd/conversations",
    "read",
    act="read",
    touches=lambda page: Extent(tuple(one.topic_id for one in page.conversations), count=len(page.conversations)),
)
async def conversations(parts: DaemonParts, query: ConversationsQuery, who: Principal) -> ConversationsPage:
    """Conversations with their first words, the one used last first: recent ones from receipts, older and imported
    ones from the log."""

    def page(snapshots: Sequence[Snapshot]) -> ConversationsPage:
        strands, reach = _strands(parts.receipts.lines(who), query.topic), dict[str, int]()
        for (topic_id, _), strand in strands.items():  # oldest first
            reach.setdefault(topic_id, strand[0].at)
        found: list[tuple[ConversationBrief, tuple[Snapshot, Place] | None]] = [(one, None) for one in _recent(strands)]
        for snapshot in snapshots:
            found += [(one, (snapshot, place)) for one, place in _stretches(snapshot, reach.get(snapshot.topic_id))]
        found.sort(key=lambda one: (-one[0].last_at, one[0].topic_id))
        shown = found[query.skip : query.skip + query.limit]
        return ConversationsPage(tuple(one if at is None else _titled(one, *at) for one, at in shown), len(found))

    return await parts.read(query.topic, who, page)


@get(
    "/memd/conversations/{id}", "read", act="read", touches=lambda told: Extent((told.topic_id,), count=len(told.turns))
)
async def conversation(
    parts: DaemonParts, conversation_id: str, query: ConversationsQuery, who: Principal
) -> ConversationTurns:
    """One conversation from its beginning, with what the model was shown and said in each turn."""
    for name in query.topic:
        who.check("read", name)
    return await asyncio.to_thread(lambda: conversation_of(parts.receipts.lines(who), conversation_id, query))


@get("/memd/transcript", "read", act="read", touches=lambda told: chunks_in(told.chunks))
async def transcript(
    parts: DaemonParts, query: routing.FilterQuery, who: Principal, *, skip: Skip = 0, limit: Limit = routing.PAGE
) -> Transcript:
    """The live chunks of a choice in the order in which they were said, oldest first."""
    if query.contains or query.author:  # would read all chunks for every page
        raise BadQuestion("what is read in order is not chosen by `contains` or `author`; GET /memd/chunks is")
    read = partial(read_in_order, who=who, wanted=query.wanted, skip=skip, limit=limit)
    return await parts.read(query.topic, who, read)


def _titled(brief: ConversationBrief, snapshot: Snapshot, first: Place) -> ConversationBrief:
    """Return a conversation of the log with its title, or with the first speaker's words in its first chunk."""
    entry = snapshot.read_many([first]).get(first)
    if entry is None:
        return msgspec.structs.replace(brief, title="(damaged)")
    said = entry.content[: stretches[1][0].offset] if len(stretches := entry.stretches) > 1 else entry.content
    return msgspec.structs.replace(brief, title=_first_words(next(iter(entry.heading), said)), source=entry.source)


def conversation_of(lines: Iterable[bytes], conversation_id: str, query: ConversationsQuery) -> ConversationTurns:
    """Assemble a conversation from receipts. Raises NotFound: no receipt has it; BadQuestion: several topics have one
    with this id."""
    strands = _strands(lines, query.topic)
    named = [key for key in strands if key[1] == conversation_id]
    if not named:
        why = "its receipts are gone, receipts.enabled is false, or the id is wrong; the log may have it (memd log)"
        raise NotFound(f"there is no conversation {conversation_id[:60]!r}: {why}")
    if len(named) > 1:
        raise BadQuestion(f"conversations of {len(named)} topics have this id; name the topic")
    [(topic_id, _)] = named
    root, turns = _line_of(strands, topic_id, conversation_id)
    told = []
    for turn in turns[query.skip : query.skip + query.limit]:
        receipt = msgspec.json.decode(turn.line, type=Receipt)
        injected = [one for one in receipt.candidates if one.verdict == INJECTED]
        names = set(ConversationTurn.__struct_fields__) - {"injected", "instructing"}
        known: dict[str, Any] = {name: getattr(receipt, name) for name in names}
        instructing = tuple(one.id for one in injected if one.instructs)
        told.append(ConversationTurn(**known, injected=len(injected), instructing=instructing))
    family = [name for one, name in strands if one == topic_id and _line_of(strands, topic_id, name)[0] == root]
    return ConversationTurns(
        topic_id=topic_id,
        conversation=conversation_id,
        title=_first_words(turns[0].asked),
        is_whole=turns[0].position == 0,
        of=len(turns),
        turns=tuple(told),
        branches=tuple(one for one in family if one != conversation_id)[:BRANCHES_MAX],
    )


def _strands(lines: Iterable[bytes], topics: Collection[str]) -> _Strands:
    turns: list[TurnFacts] = []
    for line in lines:
        turn = decode_or_none(_facts_decoder, line)
        if turn is not None and turn.conversation and (not topics or turn.topic_id in topics):
            turns.append(msgspec.structs.replace(turn, line=line))
    strands: _Strands = defaultdict(list)
    for turn in sorted(turns, key=lambda one: one.at):
        strands[turn.topic_id, turn.conversation].append(turn)
    return dict(strands)


def _line_of(strands: _Strands, topic_id: str, conversation_id: str) -> tuple[str, list[TurnFacts]]:
    """Return the first known ancestor of a conversation, and its turns, after those of its ancestors before the
    branch."""
    own, seen = strands[topic_id, conversation_id], [conversation_id]
    parts = [own]  # latest first
    while (parent := own[0].parent) is not None and parent not in seen and (topic_id, parent) in strands:
        first, own = own[0], strands[topic_id, parent]
        was_rewritten = first.branched is not None and first.branched[1] is None
        before = [one for one in own if one.at < first.at]
        parts.append([one for one in before if was_rewritten or one.position < first.position])
        seen.append(parent)
    return seen[-1], [turn for part in reversed(parts) for turn in part]


def _recent(strands: _Strands) -> Iterator[ConversationBrief]:
    """Yield one conversation per family of branches: the one used last."""
    latest: dict[tuple[str, str], tuple[int, str]] = {}
    for (topic_id, name), turns in strands.items():
        if all(turn.is_retry for turn in turns):
            continue  # a repeated request; the first one is listed
        family = topic_id, _line_of(strands, topic_id, name)[0]
        latest[family] = max(latest.get(family, (0, "")), (turns[-1].at, name))
    for (topic_id, _), (last_at, name) in latest.items():
        _, turns = _line_of(strands, topic_id, name)
        yield ConversationBrief(
            topic_id=topic_id,
            conversation=name,
            title=_first_words(turns[0].asked),
            began_at=turns[0].at,
            last_at=last_at,
            turns=len({(one.conversation, one.position) for one in turns}),
        )


def _stretches(snapshot: Snapshot, reach: int | None) -> Iterator[tuple[ConversationBrief, Place]]:
    """Yield the conversations of a topic's log, without titles, each with the place of its first chunk: those of each
    source, and messages from before the receipts."""
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
            topic_id=snapshot.topic_id, began_at=int(said[start]), last_at=int(said[end - 1]), chunks=end - start
        )
        yield brief, place


def _first_words(text: str) -> str:
    words = " ".join(text[: TITLE_CHARACTERS * 4].split())
    return words if len(words) <= TITLE_CHARACTERS else f"{words[:TITLE_CHARACTERS].rsplit(' ', 1)[0]} …"


class FiguresQuery(routing.PeriodQuery, frozen=True, kw_only=True):
    """`GET /memd/figures`."""

    by: Annotated[
        Literal["auto", "hour", "day", "week"],
        Meta(description="The length of a period; auto: the shortest that makes no more than 100."),
    ] = "auto"


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, and the tokens of those that the model server answered."""

    requests: int = 0
    prompt_tokens: int = 0
    """The model server's count if reported, otherwise memd's estimate."""
    cached_tokens: int = 0
    """Tokens of the prompts that the model server had cached."""
    completion_tokens: int = 0
    memory_tokens: int = 0
    """Tokens of memory in the prompts, by memd's count."""


class UsageRow(Spent, frozen=True, kw_only=True):
    """The answered requests of one day, topic and model."""

    day: str
    """In this machine's time zone: 2026-11-20."""
    topic_id: str
    model: str
    estimated: int = 0
    """Requests whose prompt the model server did not count."""


class UsageByDay(msgspec.Struct, frozen=True):
    """Usage by day, latest first."""

    rows: tuple[UsageRow, ...]
    since: int | None
    """Time of the oldest receipt, in microseconds since the epoch; None: there is none."""


def _costs(lines: Iterable[bytes], query: routing.PeriodQuery) -> tuple[int | None, list[TurnFacts]]:
    """Return the time of the oldest receipt, and the receipts of the query's topics and period."""
    read = (decode_or_none(_facts_decoder, line) for line in lines)
    costs = [cost for cost in read if cost is not None]  # None: torn, or the first line of a file
    wanted = [one for one in costs if (not query.topic or one.topic_id in query.topic) and query.has(one.at)]
    return min((cost.at for cost in costs), default=None), wanted


def _spent(costs: Sequence[TurnFacts]) -> dict[str, Any]:
    """Return the members of `Spent`."""
    answered = [one for one in costs if one.was_answered]
    prompts = (one.forwarded_tokens if one.prompt_tokens is None else one.prompt_tokens for one in answered)
    return {
        "requests": len(costs),
        "prompt_tokens": sum(prompts),
        "cached_tokens": sum(one.cached_tokens or 0 for one in answered),
        "completion_tokens": sum(one.completion_tokens or 0 for one in answered),
        "memory_tokens": sum(one.memory_tokens for one in answered),
    }


@get("/memd/usage", "read")
async def usage(parts: DaemonParts, query: routing.PeriodQuery, who: Principal) -> UsageByDay:
    """The tokens of requests by day, topic and model."""
    for name in query.topic:
        who.check("read", name)
    return await asyncio.to_thread(lambda: usage_of(parts.receipts.lines(who), query))


def usage_of(lines: Iterable[bytes], query: routing.PeriodQuery) -> UsageByDay:
    """Add up receipts in any order."""
    grouped: dict[tuple[str, str, str], list[TurnFacts]] = defaultdict(list)
    oldest, costs = _costs(lines, query)
    for cost in (one for one in costs if one.was_answered):
        day = f"{datetime.fromtimestamp(cost.at / 1e6, UTC).astimezone():%Y-%m-%d}"
        grouped[day, cost.topic_id, cost.model].append(cost)
    rows = []
    for (day, topic_id, model), some in sorted(grouped.items(), key=lambda one: one[0][1:]):
        estimated = sum(one.prompt_tokens is None and one.forwarded_tokens > 0 for one in some)
        rows.append(UsageRow(day=day, topic_id=topic_id, model=model, estimated=estimated, **_spent(some)))
    return UsageByDay(tuple(sorted(rows, key=lambda row: row.day, reverse=True)), oldest)


Length = Literal["hour", "day", "week"]
LENGTHS_US: dict[Length, int] = {"hour": 3_600_000_000, "day": 86_400_000_000, "week": 604_800_000_000}
PERIODS_WANTED = 100
"""Limit of periods for `auto`: a chart has no room for more."""
PERIODS_MAX = 2_000
"""Limit of periods, the latest ones; forty years of weeks are fewer."""


class FiguresPeriod(Spent, frozen=True, kw_only=True):
    """One hour, day or week. Times are None if there was no request."""

    at: int
    """Its beginning, in microseconds since the epoch."""
    questions: int = 0
    """Questions to memory, and questions with a result (`found`)."""
    found: int = 0
    injected: int = 0
    """Chunks shown for them."""
    memory_ms: float | None = None
    """Milliseconds that memory took: the median, and the 95th percentile (`memory_ms_high`)."""
    memory_ms_high: float | None = None
    first_byte_ms: float | None = None
    """Median milliseconds until the model server's first byte, without memory's time."""
    stored: int = 0
    """Entries written to the log."""
    log_bytes: int = 0
    """Bytes of all entries so far, including their columns."""


class FiguresOverTime(Listed, frozen=True, kw_only=True):
    """Contiguous periods, earliest first."""

    by: Length
    periods: tuple[FiguresPeriod, ...]
    since: int | None
    """Time of the oldest receipt, in microseconds since the epoch; earlier requests are unknown. None: there is
    none."""


Grown = Mapping[int, tuple[int, int]]
"""Entries written, and their bytes, by quarter-hour since the epoch."""


@get("/memd/figures", "read")
async def figures(parts: DaemonParts, query: FiguresQuery, who: Principal) -> FiguresOverTime:
    """Tokens, the time that memory took, what it found, and the size of the log, by hour, day or week."""
    lines = parts.receipts.lines
    return await parts.read(query.topic, who, lambda found: figures_of(lines(who), _grown(found), query))


def _grown(snapshots: Sequence[Snapshot]) -> Grown:
    entries: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for rows in (view.rows for snapshot in snapshots for view in snapshot.views.values()):
        quarters, inverse, counts = np.unique(
            rows["canonical_id"] // QUARTER_US, return_inverse=True, return_counts=True
        )
        lengths = np.bincount(inverse, weights=rows["length"], minlength=len(quarters))
        for quarter, count, length in zip(quarters.tolist(), counts.tolist(), lengths.tolist(), strict=True):
            entries[quarter] += count
            sizes[quarter] += int(length) + count * ROW.itemsize
    return {quarter: (entries[quarter], sizes[quarter]) for quarter in sorted(entries)}


def figures_of(lines: Iterable[bytes], grown: Grown, query: FiguresQuery) -> FiguresOverTime:
    """Add up receipts in any order, and the growth of the log."""
    oldest, costs = _costs(lines, query)
    moments = [cost.at for cost in costs] + [one * QUARTER_US for one in grown if query.has(one * QUARTER_US)]
    if not moments:
        return FiguresOverTime(by="hour" if query.by == "auto" else query.by, periods=(), since=oldest)
    first, last = min(moments), max(moments)
    by: Length = "week"
    if query.by != "auto":
        by = query.by
    elif fits := [one for one, length in LENGTHS_US.items() if last - first <= length * PERIODS_WANTED]:
        by = fits[0]
    begins = _beginnings(by, first, last)
    in_period: dict[int, list[TurnFacts]] = defaultdict(list)
    for cost in costs:
        in_period[bisect_right(begins, cost.at) - 1].append(cost)
    stored, added = Counter[int](), Counter[int]()  # -1: before the first period
    for quarter, (entries, size) in grown.items():
        if (at := quarter * QUARTER_US) < (query.to or 1 << 63):
            number = bisect_right(begins, at) - 1
            stored[number] += entries
            added[number] += size
    periods, log_bytes = [], added[-1]
    for number, at in enumerate(begins):
        log_bytes += added[number]
        told = _requests(in_period[number])
        periods.append(FiguresPeriod(at=at, stored=stored[number], log_bytes=log_bytes, **told))
    return FiguresOverTime(by=by, periods=tuple(periods), since=oldest)


def _beginnings(by: Length, first_us: int, last_us: int) -> list[int]:
    """Return the starts of the periods between two times, at most the latest PERIODS_MAX."""
    first_us = max(first_us, last_us - LENGTHS_US[by] * (PERIODS_MAX - 1))
    at = datetime.fromtimestamp(first_us / 1e6, UTC).astimezone().replace(minute=0, second=0, microsecond=0)
    if by != "hour":
        at = at.replace(hour=0) - timedelta(days=at.weekday() if by == "week" else 0)
    begins = []
    while (begin := int(at.timestamp() * 1e6)) <= last_us:
        begins.append(begin)
        if by == "hour":
            at = (at.astimezone(UTC) + timedelta(hours=1)).astimezone()
        else:  # by the calendar, because a day may have 23 hours
            at = (at.replace(tzinfo=None) + timedelta(days=7 if by == "week" else 1)).astimezone()
    return begins


def _requests(costs: Sequence[TurnFacts]) -> dict[str, Any]:
    asked = [cost for cost in costs if cost.question is not None]
    shown = [sum(one.verdict == INJECTED for one in cost.candidates) for cost in asked]
    memory_ms = [cost.timings_ms["memory"] for cost in costs if "memory" in cost.timings_ms]
    first_byte_ms = [
        cost.timings_ms["upstream"] for cost in costs if cost.was_answered and "upstream" in cost.timings_ms
    ]
    return {
        **_spent(costs),
        "questions": len(asked),
        "found": sum(map(bool, shown)),
        "injected": sum(shown),
        "memory_ms": _percentile(memory_ms, 50),
        "memory_ms_high": _percentile(memory_ms, 95),
        "first_byte_ms": _percentile(first_byte_ms, 50),
    }


def _percentile(values: Sequence[float], share: int) -> float | None:
    return round(float(np.percentile(values, share)), 3) if values else None
