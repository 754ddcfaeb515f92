"""The tokens of requests by day, topic and model, added up from the receipts.

Rule: nothing is kept for this: it reaches as far back as the receipts do (`receipts.bytes_max`), and says so. Tokens
are the model server's own counts where it told them, else memd's estimate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from datetime import UTC, datetime

import msgspec

from memd.admin.queries import UsageQuery
from memd.admin.receipts import Receipts
from memd.admin.routing import get
from memd.principals import Principal
from memd.wire.lenient_json import decode_or_none


class UsageRow(msgspec.Struct):
    """The requests of one day, topic and model."""

    day: str
    """In this machine's time zone: 2026-11-20."""
    topic_id: str
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of the prompts that the model server had in its cache."""
    completion_tokens: int = 0
    memory_tokens: int = 0
    """The part of the prompts that was memory, as memd counts it."""
    estimated: int = 0
    """Requests whose prompt the model server did not count."""


class UsageByDay(msgspec.Struct, frozen=True):
    """The latest days first."""

    rows: tuple[UsageRow, ...]
    since: int | None
    """When the oldest receipt is of, in microseconds since the epoch; None: there is none."""


class RequestCost(msgspec.Struct):
    """The members of a receipt that are added up."""

    at: int
    topic_id: str
    model: str = ""
    http_status: int | None = None
    memory_tokens: int = 0
    forwarded_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def was_answered(self) -> bool:
        """Whether the model server took the prompt."""
        return self.http_status is not None and self.http_status < 400

    @property
    def read_tokens(self) -> int:
        """Tokens of the prompt: the model server's own count where it told it, else memd's estimate."""
        return self.forwarded_tokens if self.prompt_tokens is None else self.prompt_tokens


_decoder = msgspec.json.Decoder(RequestCost)


class UsageRoutes:
    """The tokens that requests took."""

    def __init__(self, receipts: Receipts) -> None:
        self._receipts = receipts

    @get("/memd/usage", "read")
    async def usage(self, query: UsageQuery, who: Principal) -> UsageByDay:
        """The tokens of requests by day, topic and model."""
        for name in query.topic:
            who.check("read", name)
        lines = await self._receipts.lines(who)
        return await asyncio.to_thread(usage_of, lines, query.topic, query.since, query.to)


def usage_of(
    lines: Iterable[bytes], topics: Collection[str] = (), since: int | None = None, to: int | None = None
) -> UsageByDay:
    """Add up receipts, whatever their order.

    Args:
        topics: only these; empty: all.
        since, to: only what was asked from the one to before the other, in microseconds since the epoch.
    """
    rows: dict[tuple[str, str, str], UsageRow] = {}
    oldest: int | None = None
    for line in lines:
        cost = decode_or_none(_decoder, line)
        if cost is None:  # torn, or the first line of a file
            continue
        oldest = cost.at if oldest is None else min(oldest, cost.at)
        is_wanted = (not topics or cost.topic_id in topics) and (since or 0) <= cost.at < (to or 1 << 62)
        if is_wanted and cost.was_answered:
            day = f"{datetime.fromtimestamp(cost.at / 1e6, UTC).astimezone():%Y-%m-%d}"
            key = day, cost.topic_id, cost.model
            _add(rows.setdefault(key, UsageRow(*key)), cost)
    ordered = sorted(rows, key=lambda key: (key[1], key[2]))
    return UsageByDay(tuple(rows[key] for key in sorted(ordered, key=lambda key: key[0], reverse=True)), oldest)


def _add(row: UsageRow, cost: RequestCost) -> None:
    row.requests += 1
    row.prompt_tokens += cost.read_tokens
    row.cached_tokens += cost.cached_tokens or 0
    row.completion_tokens += cost.completion_tokens or 0
    row.memory_tokens += cost.memory_tokens
    row.estimated += cost.prompt_tokens is None
