"""Tokens by day, topic and model, and figures over time: the time that memory took, what it found, the log's size.

Rule: nothing is kept for this. Requests are added up from the receipts and reach as far back as those do
(`receipts.bytes_max`); the log is added up from the columns of its entries and reaches back to its beginning. Tokens
are the model server's own counts where it told them, else memd's estimate. Periods are of this machine's time zone.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from memd.admin.history import QUARTER_US
from memd.admin.parts import DaemonParts
from memd.admin.queries import PeriodQuery
from memd.admin.routing import get
from memd.principals import Principal
from memd.recall.explained import INJECTED
from memd.store.log.columns import ROW
from memd.store.store import Snapshot
from memd.wire.lenient_json import decode_or_none


class FiguresQuery(PeriodQuery, frozen=True, kw_only=True):
    """`GET /memd/figures`."""

    by: Annotated[
        Literal["auto", "hour", "day", "week"],
        Meta(description="The length of a period; auto: the shortest that makes no more than 100."),
    ] = "auto"


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


class _Verdict(msgspec.Struct):
    verdict: str = ""


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
    question: str | None = None
    candidates: tuple[_Verdict, ...] = ()
    timings_ms: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def was_answered(self) -> bool:
        """Whether the model server took the prompt."""
        return self.http_status is not None and self.http_status < 400

    def add_to(self, row: UsageRow | FiguresPeriod) -> None:
        """Add the tokens of a request that was answered."""
        row.prompt_tokens += self.forwarded_tokens if self.prompt_tokens is None else self.prompt_tokens
        row.cached_tokens += self.cached_tokens or 0
        row.completion_tokens += self.completion_tokens or 0
        row.memory_tokens += self.memory_tokens


_decoder = msgspec.json.Decoder(RequestCost)


def _costs(lines: Iterable[bytes], query: PeriodQuery) -> tuple[int | None, list[RequestCost]]:
    """When the oldest of some receipts is of, and those of a topic and time that are asked for."""
    read = (decode_or_none(_decoder, line) for line in lines)
    costs = [cost for cost in read if cost is not None]  # None: torn, or the first line of a file
    wanted = [one for one in costs if (not query.topic or one.topic_id in query.topic) and query.has(one.at)]
    return min((cost.at for cost in costs), default=None), wanted


@get("/memd/usage", "read")
async def usage(parts: DaemonParts, query: PeriodQuery, who: Principal) -> UsageByDay:
    """The tokens of requests by day, topic and model."""
    for name in query.topic:
        who.check("read", name)
    return await asyncio.to_thread(lambda: usage_of(parts.receipts.lines(who), query))


def usage_of(lines: Iterable[bytes], query: PeriodQuery) -> UsageByDay:
    """Add up receipts, whatever their order."""
    rows: dict[tuple[str, str, str], UsageRow] = {}
    oldest, costs = _costs(lines, query)
    for cost in (one for one in costs if one.was_answered):
        day = f"{datetime.fromtimestamp(cost.at / 1e6, UTC).astimezone():%Y-%m-%d}"
        key = day, cost.topic_id, cost.model
        cost.add_to(row := rows.setdefault(key, UsageRow(*key)))
        row.requests += 1
        row.estimated += cost.prompt_tokens is None and cost.forwarded_tokens > 0
    ordered = sorted(rows.values(), key=lambda row: (row.topic_id, row.model))
    return UsageByDay(tuple(sorted(ordered, key=lambda row: row.day, reverse=True)), oldest)


Length = Literal["hour", "day", "week"]
LENGTHS_US: dict[Length, int] = {"hour": 3_600_000_000, "day": 86_400_000_000, "week": 604_800_000_000}
PERIODS_WANTED = 100
"""Of `auto`: more than a picture has room for tell nobody more."""
PERIODS_MAX = 2_000
"""The latest are told; forty years of weeks are fewer."""


class FiguresPeriod(msgspec.Struct, kw_only=True):
    """One hour, day or week. Times are None where there was no request."""

    at: int
    """Its beginning, in microseconds since the epoch."""
    requests: int = 0
    prompt_tokens: int = 0
    """The model server's own count where it told it, else memd's estimate; of a prompt that was answered."""
    cached_tokens: int = 0
    """The part of the prompts that the model server had in its cache."""
    completion_tokens: int = 0
    memory_tokens: int = 0
    """The part of the prompts that was memory, as memd counts it."""
    questions: int = 0
    """Questions to memory, and those for which it found something to show."""
    found: int = 0
    injected: int = 0
    """Chunks that it showed for them."""
    memory_ms: float | None = None
    """The median of the time that memory took, and what one in twenty exceeded."""
    memory_ms_high: float | None = None
    first_byte_ms: float | None = None
    """The median of the time until the model server's first byte, memory's time not included."""
    stored: int = 0
    """Entries that were written to the log."""
    log_bytes: int = 0
    """Of all entries so far, their columns included."""


class FiguresOverTime(msgspec.Struct, frozen=True, kw_only=True):
    """Periods without a gap, earliest first."""

    by: Length
    periods: tuple[FiguresPeriod, ...]
    since: int | None
    """When the oldest receipt is of, in microseconds since the epoch; requests before it are unknown. None: there is
    none."""


Grown = Mapping[int, tuple[int, int]]
"""Quarters of hours since the epoch: entries that were written in it, and their bytes."""


@get("/memd/figures", "read")
async def figures(parts: DaemonParts, query: FiguresQuery, who: Principal) -> FiguresOverTime:
    """Tokens, the time that memory took, what it found, and the size of the log, by hour, day or week."""
    grown = await parts.read(query.topic, who, _grown)
    return await asyncio.to_thread(lambda: figures_of(parts.receipts.lines(who), grown, query))


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
    """Add up receipts, whatever their order, and the growth of the log."""
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
    begins = np.array(_beginnings(by, first, last))
    periods = [FiguresPeriod(at=one) for one in begins.tolist()]
    in_period: dict[int, list[RequestCost]] = defaultdict(list)
    for cost in (one for one in costs if one.at >= periods[0].at):
        in_period[int(begins.searchsorted(cost.at, "right")) - 1].append(cost)
    for number, some in in_period.items():
        _add_requests(periods[number], some)
    added: Counter[int] = Counter()
    log_bytes = 0  # with what it had before the first period
    for quarter, (entries, size) in grown.items():
        if (at := quarter * QUARTER_US) < periods[0].at:
            log_bytes += size
        elif at < (query.to or 1 << 63):
            number = int(begins.searchsorted(at, "right")) - 1
            periods[number].stored += entries
            added[number] += size
    for number, period in enumerate(periods):
        log_bytes += added[number]
        period.log_bytes = log_bytes
    return FiguresOverTime(by=by, periods=tuple(periods), since=oldest)


def _beginnings(by: Length, first_us: int, last_us: int) -> list[int]:
    """The beginnings of the latest periods that reach from one moment to another."""
    first_us = max(first_us, last_us - LENGTHS_US[by] * (PERIODS_MAX - 1))
    at = datetime.fromtimestamp(first_us / 1e6, UTC).astimezone().replace(minute=0, second=0, microsecond=0)
    if by != "hour":
        at = at.replace(hour=0) - timedelta(days=at.weekday() if by == "week" else 0)
    begins = []
    while (begin := int(at.timestamp() * 1e6)) <= last_us:
        begins.append(begin)
        if by == "hour":
            at = (at.astimezone(UTC) + timedelta(hours=1)).astimezone()
        else:  # by the calendar: a day may have 23 hours
            at = (at.replace(tzinfo=None) + timedelta(days=7 if by == "week" else 1)).astimezone()
    return begins


def _add_requests(period: FiguresPeriod, costs: Sequence[RequestCost]) -> None:
    answered = [cost for cost in costs if cost.was_answered]
    asked = [cost for cost in costs if cost.question is not None]
    shown = [sum(one.verdict == INJECTED for one in cost.candidates) for cost in asked]
    period.requests = len(costs)
    for cost in answered:
        cost.add_to(period)
    period.questions, period.found, period.injected = len(asked), sum(map(bool, shown)), sum(shown)
    memory_ms = [cost.timings_ms["memory"] for cost in costs if "memory" in cost.timings_ms]
    if memory_ms:
        period.memory_ms = round(float(np.median(memory_ms)), 3)
        period.memory_ms_high = round(float(np.percentile(memory_ms, 95)), 3)
    first_byte_ms = [cost.timings_ms["upstream"] for cost in answered if "upstream" in cost.timings_ms]
    if first_byte_ms:
        period.first_byte_ms = round(float(np.median(first_byte_ms)), 3)
