"""The routes that read the memory: search, the log, chunks, the export.

Rule: nothing here changes the log or a prompt. Long answers are paged or streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from memd.admin import history
from memd.admin.access import is_let_in_still
from memd.admin.acts import COUNTED, chunks_in
from memd.admin.queries import ChunksQuery, ExportQuery, FilterQuery, LogQuery, SearchQuery, TopicsQuery
from memd.admin.receipts import Receipts
from memd.admin.routing import get
from memd.admin.topics import NamedTopics
from memd.principals import Principal
from memd.recall.columns import Searchable
from memd.recall.explained import SearchAnswer, search_answer
from memd.recall.retrieve import Budget, Filters, Retriever
from memd.store.disk import LocalDisk
from memd.store.store import Snapshot
from memd.store.tools.export import export as export_log

EXPORTED_AT_ONCE = 200
CHUNK_TURNS_MAX = 20
Result = TypeVar("Result")


class ChunksPage(msgspec.Struct, frozen=True):
    """Present states of chunks, latest first."""

    chunks: tuple[history.LogEvent, ...]
    next: int | None
    """The value of `before` for the next page; None: this is the last one."""


class SaidDays(msgspec.Struct, frozen=True):
    """The days on which something was said, earliest first."""

    days: tuple[history.SaidDay, ...]


class SearchRoutes:
    """Recall for people and programs."""

    def __init__(self, topics: NamedTopics, retriever: Retriever, budget: Callable[[], Awaitable[Budget]]) -> None:
        """`budget` returns the budget that a prompt to the present model would get."""
        self._topics = topics
        self._retriever = retriever
        self._budget = budget

    @get(
        "/memd/search",
        "read",
        act="search",
        touches=lambda answer: chunks_in(answer.chunks),
        tool="search_memory",
    )
    async def search(self, query: SearchQuery, who: Principal) -> SearchAnswer:
        """Search what was said, noted or read before, by meaning and words: the best pieces with ids, times, sources.

        They are the chunks that the question would get, and why.
        """
        async with self._topics.held(query.topic, who) as found:
            logs: Sequence[Searchable] = [topic.log for topic in found]
            if query.as_of is not None:
                logs = await self._retriever.as_of([topic.log for topic in found], query.as_of)
            filters = Filters(everything=True, wanted=query.wanted, asked_at=query.as_of)
            retrieved = await self._retriever.retrieve(query.q, logs, await self._budget(), filters)
        return search_answer(retrieved, None if query.as_of is None else int(query.as_of), limit=query.limit)


class LogRoutes:
    """The log, by entry and by chunk."""

    def __init__(self, topics: NamedTopics, receipts: Receipts, data_dir: Path, files: LocalDisk) -> None:
        self._topics = topics
        self._receipts = receipts
        self._data_dir = data_dir
        self._files = files

    @get("/memd/log", "read", act="read", touches=lambda page: chunks_in(page.events))
    async def log_page(self, query: LogQuery, who: Principal) -> history.LogPage:
        """The latest entries of the log."""
        return await self._page(
            query, who, lambda snapshots: history.log_page(snapshots, before=query.before, limit=query.limit)
        )

    @get("/memd/chunks", "read", act="read", touches=lambda page: chunks_in(page.chunks))
    async def chunks(self, query: ChunksQuery, who: Principal) -> ChunksPage:
        """The present state of chunks."""

        def read(snapshots: list[Snapshot]) -> history.LogPage:
            return history.chunks_page(
                snapshots, before=query.before, limit=query.limit, wanted=query.wanted, gone_too=query.all
            )

        page = await self._page(query, who, read)
        return ChunksPage(page.events, page.next)

    @get("/memd/days", "read")
    async def days(self, query: FilterQuery, who: Principal) -> SaidDays:
        """How many chunks were said on which day, of this machine's time zone."""
        return SaidDays(await self._read_snapshots(query, who, lambda found: history.said_days(found, query.wanted)))

    @get(
        "/memd/chunks/{id}",
        "read",
        act="read",
        touches=lambda story: chunks_in(story.versions),
        tool="read_memory",
    )
    async def chunk(self, chunk_id: str, query: TopicsQuery, who: Principal) -> history.ChunkStory:
        """Read one piece of memory: its whole text, what was said just before and after it, its earlier versions.

        Also one that is not in the log yet.
        """
        async with self._topics.held(query.topic, who) as found:
            topics = [(topic.log, topic.unstored()) for topic in found]

            def told() -> history.ChunkStory:
                story = history.story(*history.named(topics, chunk_id))
                return history.told_story(story, [log.snapshot() for log, _ in topics], who)

            story = await _in_thread(told)
        turns = await self._receipts.latest(CHUNK_TURNS_MAX, who, topic_id=None, before=None, uuid=story.uuid)
        return msgspec.structs.replace(story, turns=tuple(one.turn_id for one in turns))

    @get("/memd/export", "read", act="export", streams="application/jsonl")
    async def export(self, query: ExportQuery, request: web.Request, who: Principal) -> web.StreamResponse:
        """The log as JSON Lines, as `memd export` writes it."""
        if query.topic is not None:
            async with self._topics.held([query.topic], who):
                pass  # it exists, which is all that matters: the export reads the files
        lines = export_log(
            self._data_dir,
            self._files,
            topic_id=query.topic,
            live_only=query.live,
            is_wanted=lambda topic_id: who.may("read", topic_id),
            tells_others=who.may_everywhere("read"),
        )
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl", "Cache-Control": "no-store"})
        await response.prepare(request)
        while part := await _in_thread(lambda: b"".join(_encoded(lines))):
            if not is_let_in_still(request):
                if request.transport is not None:
                    request.transport.abort()  # so that nobody takes it for the whole
                return response
            await response.write(part)
            request[COUNTED] = request.get(COUNTED, 0) + part.count(b"\n")
        await response.write_eof()
        return response

    async def _page(
        self, query: TopicsQuery, who: Principal, read: Callable[[list[Snapshot]], history.LogPage]
    ) -> history.LogPage:
        """Read a page of events, and leave out of it what `who` may not know."""

        def told(snapshots: list[Snapshot]) -> history.LogPage:
            page = read(snapshots)
            return history.LogPage(
                events=tuple(history.told(one, snapshots, who) for one in page.events), next=page.next
            )

        return await self._read_snapshots(query, who, told)

    async def _read_snapshots(
        self, query: TopicsQuery, who: Principal, read: Callable[[list[Snapshot]], Result]
    ) -> Result:
        """Read, in a thread, from snapshots of the topics that a query names."""
        async with self._topics.held(query.topic, who) as found:
            snapshots = [topic.log.snapshot() for topic in found]
            return await _in_thread(lambda: read(snapshots))


def _encoded(lines: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    for entry, _ in zip(lines, range(EXPORTED_AT_ONCE), strict=False):
        yield msgspec.json.encode(entry) + b"\n"


async def _in_thread(work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(None, work)
