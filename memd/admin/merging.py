"""Putting together the answers to one request from several daemons of a cluster, of which each knows its own part.

Rule: pure. A route that is not here answers for the topics that it names, which their owners or replicas have. The
first answer is that of the daemon that was asked; what concerns a daemon as a whole stays that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import msgspec

from memd.admin.audit import AuditAnswer
from memd.admin.queries import AuditQuery, TopicsQuery, TurnsQuery
from memd.admin.sources import SourceList, SourceStates
from memd.admin.status import BufferedConversations, DaemonStats, KnownTopics
from memd.admin.turns import TurnsPage
from memd.admin.usage import UsageByDay, UsageRow

Merge = Callable[[Sequence[Any], Any], Any]
"""Puts answers together, at least one; the second argument is the query."""
FIRST_THAT_KNOWS = frozenset({"/memd/turns/{id}", "/memd/turns/{id}/replay"})
"""Routes about one thing, which one daemon has: where it is not found, the others are asked."""


def _stats(told: Sequence[DaemonStats], _: Any) -> DaemonStats:
    return msgspec.structs.replace(
        told[0],
        memory_bytes=sum(one.memory_bytes for one in told),
        buffer_bytes=sum(one.buffer_bytes for one in told),
        unstored=sum(one.unstored for one in told),
        topics=reduce(dict.__or__, (one.topics for one in reversed(told))),
    )


def _topics(told: Sequence[KnownTopics], _: Any) -> KnownTopics:
    """Of a topic that several have files of, the one that has it open knows the latest."""
    known = sorted((one for page in told for one in page.topics), key=lambda one: (one.topic_id, one.is_open))
    return KnownTopics(list({one.topic_id: one for one in known}.values()))


def _turns(told: Sequence[TurnsPage], query: TurnsQuery) -> TurnsPage:
    turns = [one for page in told for one in page.turns]
    return TurnsPage(sorted(turns, key=lambda one: -one["at"])[: query.limit])


def _usage(told: Sequence[UsageByDay], _: Any) -> UsageByDay:
    rows: dict[tuple[str, str, str], UsageRow] = {}
    for row in (row for one in told for row in one.rows):
        key = row.day, row.topic_id, row.model
        rows[key] = row if key not in rows else _added(rows[key], row)
    ordered = sorted(sorted(rows, key=lambda key: key[1:]), key=lambda key: key[0], reverse=True)
    since = min((one.since for one in told if one.since is not None), default=None)
    return UsageByDay(tuple(rows[key] for key in ordered), since)


def _added(one: UsageRow, other: UsageRow) -> UsageRow:
    numbers = [field for field in UsageRow.__struct_fields__ if isinstance(getattr(one, field), int)]
    return msgspec.structs.replace(one, **{name: getattr(one, name) + getattr(other, name) for name in numbers})


def _buffer(told: Sequence[BufferedConversations], _: Any) -> BufferedConversations:
    return max(told, key=lambda one: len(one.conversations))


def _sources(told: Sequence[SourceStates], query: TopicsQuery) -> SourceList:
    own, *others = told
    assert isinstance(own, SourceList), "the answer of the daemon that was asked"
    wanted = (one for other in others for one in other.sources if not query.topic or one.topic_id in query.topic)
    return msgspec.structs.replace(own, sources=(*own.sources, *wanted))


def _audit(told: Sequence[AuditAnswer], _: AuditQuery) -> AuditAnswer:
    """The chain stays that of the daemon that was asked: each has its own, and is asked for it itself."""
    since = [one.receipts_since for one in told if one.receipts_since is not None]
    acts = sorted((act for one in told for act in one.acts), key=lambda act: act.at)
    return msgspec.structs.replace(told[0], acts=tuple(acts), receipts_since=max(since, default=None))


ASKED: Mapping[str, str] = {"/memd/sources": "/memd/index"}
"""The route that the others are asked for instead."""
MERGES: Mapping[str, Merge] = {
    "/memd/stats": _stats,
    "/memd/topics": _topics,
    "/memd/turns": _turns,
    "/memd/usage": _usage,
    "/memd/buffer": _buffer,
    "/memd/sources": _sources,
    "/memd/audit": _audit,
}
