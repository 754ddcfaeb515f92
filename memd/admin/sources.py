"""The routes of sources: folders of the settings, which the daemon reads by itself.

Rule: a request never names a folder: whoever may ask need not be allowed to read what the daemon may.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from memd.admin.acts import Extent
from memd.admin.documents import documents_in
from memd.admin.queries import Body, TopicsQuery
from memd.admin.routing import get, post
from memd.admin.topics import NamedTopics
from memd.ingest.sources.documents import KnownDocument
from memd.ingest.sources.tending import SourceState, SourceTender
from memd.principals import Principal


class IndexBody(Body, kw_only=True):
    """The body of `POST /memd/index`."""

    force: Annotated[bool, Meta(description="Read every file again, also those that have not changed.")] = False


class SourceStates(msgspec.Struct, frozen=True):
    """The sources of the settings."""

    sources: tuple[SourceState, ...]


class KnownSource(msgspec.Struct, frozen=True, kw_only=True):
    """Documents of one folder, or a file by itself."""

    topic_id: str
    name: str
    documents: int
    chunks: int
    at: int
    """When something of it changed here last, in microseconds since the epoch."""


class SourceList(SourceStates, frozen=True):
    """The sources of the settings, and all that documents are kept of."""

    known: tuple[KnownSource, ...] = ()


class SourceRoutes:
    """Sources: how they stand, and looking at them now."""

    def __init__(self, topics: NamedTopics, tender: SourceTender, daemon: str) -> None:
        """`daemon`: this one's name in a cluster; empty: it is alone."""
        self._daemon = daemon
        self._topics = topics
        self._tender = tender

    @get("/memd/sources", "read")
    async def sources(self, query: TopicsQuery, who: Principal) -> SourceList:
        """The sources of the settings with their state, and all folders and files that documents are kept of."""
        known = await documents_in(self._topics, query.topic, who)
        states = tuple(one for one in self._readable(who) if not query.topic or one.topic_id in query.topic)
        return SourceList(states, tuple(_by_source(known)))

    @get("/memd/index", "read")
    async def looks(self, who: Principal) -> SourceStates:
        """The sources of the settings with their state alone."""
        return SourceStates(self._readable(who))

    @post(
        "/memd/index",
        "admin",
        act="write",
        touches=lambda told: Extent(tuple(one.topic_id for one in told.sources), count=len(told.sources)),
        tool="index_memory",
    )
    async def index(self, body: IndexBody) -> SourceStates:
        """Have the folders that the user's settings name read again now, and say how they stand.

        They are read in the background; `GET /memd/index` tells how far that is.
        """
        self._tender.ask(force=body.force)
        return SourceStates(tuple(map(self._named, self._tender.states())))

    def _readable(self, who: Principal) -> tuple[SourceState, ...]:
        return tuple(self._named(one) for one in self._tender.states() if who.may("read", one.topic_id))

    def _named(self, state: SourceState) -> SourceState:
        return msgspec.structs.replace(state, daemon=self._daemon)


def _by_source(documents: list[KnownDocument]) -> list[KnownSource]:
    grouped: dict[tuple[str, str], list[KnownDocument]] = {}
    for one in documents:
        grouped.setdefault((one.topic_id, one.source.partition("/")[0]), []).append(one)
    return [
        KnownSource(
            topic_id=topic_id,
            name=name,
            documents=len(group),
            chunks=sum(one.chunks for one in group),
            at=max(one.at for one in group),
        )
        for (topic_id, name), group in grouped.items()
    ]
