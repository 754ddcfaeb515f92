"""Turns: their receipts, and what their questions would get now.

Rule: these operations read receipts alone: an old turn, or any without `receipts.enabled`, is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from memd.admin.parts import DaemonParts
from memd.admin.queries import Extent, ReplayQuery, TurnsQuery, chunks_in
from memd.admin.routing import get
from memd.entries import WallTime
from memd.errors import BadQuestion, NotFound
from memd.principals import Principal
from memd.recall.columns import Searchable
from memd.recall.explained import EARLIER, INJECTED, ScoredChunk, SearchAnswer, search_answer
from memd.recall.retrieve import Budget, Filters
from memd.receipts import Receipt, summary


class TurnsPage(msgspec.Struct, frozen=True):
    """The latest turns, newest first: receipts without their blocks, and with the number of their candidates."""

    turns: list[dict[str, Any]]


class TurnReplay(msgspec.Struct, frozen=True):
    """A turn, the chunks that its question gets now (or got out of what was stored then), and the ids that make the
    difference."""

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
async def turns(parts: DaemonParts, query: TurnsQuery, who: Principal) -> TurnsPage:
    """The latest turns, without their blocks."""
    if query.topic is not None:
        who.check("read", query.topic)
    found = await parts.receipts.latest(
        query.limit, who, topic_id=query.topic, before=query.before, with_steps=query.steps
    )
    told = (summary(receipt) | {"steps": len(at), "steps_until": max(at, default=0)} for receipt, at in found)
    return TurnsPage([summary(receipt) for receipt, _ in found] if query.steps else list(told))


@get("/memd/receipts", "read", act="read", streams="application/jsonl")
async def receipts(parts: DaemonParts, who: Principal) -> web.StreamResponse:
    """All receipts that this daemon keeps, a JSON line each, the newest first."""
    lines = await parts.receipts.lines(who)
    return web.Response(
        body=b"\n".join(lines), headers={"Content-Type": "application/jsonl", "Cache-Control": "no-store"}
    )


@get("/memd/turns/{id}", "read", act="read", touches=lambda turn: _candidates_in(turn, turn.candidates))
async def turn(parts: DaemonParts, turn_id: str, who: Principal) -> Receipt:
    """One turn's receipt."""
    receipt = await parts.receipts.find(turn_id, who) if turn_id.isalnum() else None
    if receipt is None:
        why = "it is not written yet, too old, receipts.enabled is false, or the id is wrong or not whole"
        raise NotFound(f"there is no receipt of turn {turn_id[:60]!r}: {why}")
    return receipt


@get("/memd/turns/{id}/replay", "read", act="search", touches=lambda told: _candidates_in(told.turn, told.now.chunks))
async def replay(parts: DaemonParts, turn_id: str, query: ReplayQuery, who: Principal) -> TurnReplay:
    """The chunks that the same question, with the same filter, would get now, compared with those of the turn."""
    receipt = await turn(parts, turn_id, who)
    if receipt.question is None:
        raise BadQuestion("memory was not asked in this turn: it showed the block of an earlier one, or none")
    async with parts.named.held_if_there((receipt.topic_id, *receipt.related), who) as found:
        logs: Sequence[Searchable] = [topic.log for topic in found]
        if query.then:
            logs = await parts.retriever.as_of([topic.log for topic in found], WallTime(receipt.at))
        budget = Budget(receipt.budget_tokens, parts.counter.drift.factor(receipt.model), receipt.room_tokens)
        earlier = {bytes.fromhex(one.uuid) for one in receipt.candidates if one.verdict == EARLIER}
        filters = Filters(
            shown_uuids=earlier, wanted=receipt.filter, asked_at=receipt.at, step=receipt.step, everything=True
        )
        retrieved = await parts.retriever.retrieve(receipt.question, logs, budget, filters)
    now = search_answer(retrieved, receipt.at if query.then else None)
    then = {one.uuid: one.id for one in receipt.candidates if one.verdict in (INJECTED, EARLIER)}
    since = {one.uuid: one.id for one in now.chunks if one.verdict in (INJECTED, EARLIER)}
    return TurnReplay(
        turn=receipt,
        now=now,
        gained=[id_ for uuid, id_ in since.items() if uuid not in then],
        lost=[id_ for uuid, id_ in then.items() if uuid not in since],
        kept=[id_ for uuid, id_ in then.items() if uuid in since],
    )
