"""The extent of an act, for the audit: which topics and chunks, and how many.

Rule: nothing that was said; of what a client wrote only names of topics and ids of chunks. Each operation declares its
act, each query and body the extent that it names (routing.py, queries.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from memd.entries import CHUNK_ID_PATTERN, TOPIC_ID_PATTERN

IDS_MAX = 100
TOPICS_MAX = 64
"""Of one line; `count` says how many there were."""
ALL_TOPICS = "*"
"""The topics of an act that names none."""
FORBIDDEN = 403
BEFOREHAND = frozenset({"export", "backup", "erase", "token"})
"""Acts that are not done unless a line that they begin is on disk."""
COUNTED = web.RequestKey("counted", int)
"""Where the handler of a streamed answer says how many entries it sent."""


class Extent(msgspec.Struct, frozen=True):
    """The extent of an act."""

    topics: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    count: int | None = None
    detail: str = ""

    def and_of(self, answer: Extent) -> Extent:
        """The extent of a request and its answer, as much of both as a line holds."""
        topics, ids = (*self.topics, *answer.topics), (*self.ids, *answer.ids)
        everything = (ALL_TOPICS,) if ALL_TOPICS in topics else ()
        return Extent(names_of(topics) or everything, _ids(ids), answer.count, answer.detail or self.detail)


def chunks_in(chunks: Iterable[Any]) -> Extent:
    """The extent of an answer with chunks, each of which has its topic and its uuid."""
    listed = list(chunks)
    return Extent(tuple(one.topic_id for one in listed), tuple(one.uuid for one in listed), len(listed))


def names_of(named: Iterable[str]) -> tuple[str, ...]:
    """The names of topics among what a client gave as such, as many as a line holds."""
    return tuple(dict.fromkeys(one for one in named if TOPIC_ID_PATTERN.fullmatch(one)))[:TOPICS_MAX]


def _ids(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one for one in given if CHUNK_ID_PATTERN.fullmatch(one)))[:IDS_MAX]
