"""Tokens by day, topic and model, and figures over time: the time that memory took, what it found, the log's size.

Rule: nothing is kept for this. Requests are added up from the receipts and reach as far back as those do
(`receipts.bytes_max`); the log is added up from the columns of its entries and reaches back to its beginning. Tokens
are the model server's own counts where it told them, else memd's estimate. Periods are of this machine's time zone.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from memd.admin.history import QUARTER_US
from memd.admin.parts import DaemonParts
from memd.admin.routing import PeriodQuery, get
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


class UsageRow(msgspec.Struct, frozen=True):
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


class _Verdict(msgspec.Struct, frozen=True):
    verdict: str = ""


class RequestCost(msgspec.Struct, frozen=True):
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


_decoder = msgspec.json.Decoder(RequestCost)


def _costs(lines: Iterable[bytes], query: PeriodQuery) -> tuple[int | None, list[RequestCost]]:
    """When the oldest of some receipts is of, and those of a topic and time that are asked for."""
    read = (decode_or_none(_decoder, line) for line in lines)
    costs = [cost for cost in read if cost is not None]  # None: torn, or the first line of a file
    wanted = [one for one in costs if (not query.topic or one.topic_id in query.topic) and query.has(one.at)]
    return min((cost.at for cost in costs), default=None), wanted


def _tokens(answered: Sequence[RequestCost]) -> dict[str, Any]:
    """The members of a row or period that tell the tokens of requests that were answered."""
    prompts = (one.forwarded_tokens if one.prompt_tokens is None else one.prompt_tokens for one in answered)
    return {
        "prompt_tokens": sum(prompts),
        "cached_tokens": sum(one.cached_tokens or 0 for one in answered),
        "completion_tokens": sum(one.completion_tokens or 0 for one in answered),
        "memory_tokens": sum(one.memory_tokens for one in answered),
    }


@get("/memd/usage", "read")
async def usage(parts: DaemonParts, query: PeriodQuery, who: Principal) -> UsageByDay:
    """The tokens of requests by day, topic and model."""
    for name in query.topic:
        who.check("read", name)
    return await asyncio.to_thread(lambda: usage_of(parts.receipts.lines(who), query))


def usage_of(lines: Iterable[bytes], query: PeriodQuery) -> UsageByDay:
    """Add up receipts, whatever their order."""
    grouped: dict[tuple[str, str, str], list[RequestCost]] = defaultdict(list)
    oldest, costs = _costs(lines, query)
    for cost in (one for one in costs if one.was_answered):
        day = f"{datetime.fromtimestamp(cost.at / 1e6, UTC).astimezone():%Y-%m-%d}"
        grouped[day, cost.topic_id, cost.model].append(cost)
    rows = []
    for key, some in sorted(grouped.items(), key=lambda one: one[0][1:]):
        estimated = sum(one.prompt_tokens is None and one.forwarded_tokens > 0 for one in some)
        rows.append(UsageRow(*key, requests=len(some), estimated=estimated, **_tokens(some)))
    return UsageByDay(tuple(sorted(rows, key=lambda row: row.day, reverse=True)), oldest)


Length = Literal["hour", "day", "week"]
LENGTHS_US: dict[Length, int] = {"hour": 3_600_000_000, "day": 86_400_000_000, "week": 604_800_000_000}
PERIODS_WANTED = 100
"""Of `auto`: more than a picture has room for tell nobody more."""
PERIODS_MAX = 2_000
"""The latest are told; forty years of weeks are fewer."""


class FiguresPeriod(msgspec.Struct, frozen=True, kw_only=True):
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
    begins = _beginnings(by, first, last)
    in_period: dict[int, list[RequestCost]] = defaultdict(list)
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


def _requests(costs: Sequence[RequestCost]) -> dict[str, Any]:
    answered = [cost for cost in costs if cost.was_answered]
    asked = [cost for cost in costs if cost.question is not None]
    shown = [sum(one.verdict == INJECTED for one in cost.candidates) for cost in asked]
    memory_ms = [cost.timings_ms["memory"] for cost in costs if "memory" in cost.timings_ms]
    first_byte_ms = [cost.timings_ms["upstream"] for cost in answered if "upstream" in cost.timings_ms]
    return {
        **_tokens(answered),
        "requests": len(costs),
        "questions": len(asked),
        "found": sum(map(bool, shown)),
        "injected": sum(shown),
        "memory_ms": _percentile(memory_ms, 50),
        "memory_ms_high": _percentile(memory_ms, 95),
        "first_byte_ms": _percentile(first_byte_ms, 50),
    }


def _percentile(values: Sequence[float], share: int) -> float | None:
    return round(float(np.percentile(values, share)), 3) if values else None
