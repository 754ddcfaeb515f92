"""Looks at the sources of the settings again and again: at the start, when the file system tells, now and then.

Rule: of the event loop; a look runs in one thread of low priority, which gives way to requests before each file. A
source that cannot be looked at keeps its documents and says why; nothing of this stops the daemon. In a cluster the
files are those of the daemon that has the settings, and their documents go to whichever has the topic.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from memd.embedding.priority import GivenUp, Priority
from memd.entries import topic_called
from memd.errors import BadSource, MemdError
from memd.ingest.indexer import background_thread
from memd.ingest.readers.text import GivenDocument
from memd.ingest.sources.documents import DocumentTaker, KnownDocument, TakenDocument, known_documents
from memd.ingest.sources.look import Chosen, Exclusions, Look, Seen, Source, is_below, look
from memd.ingest.topics import Topic, Topics
from memd.settings.model import AUTO_TOPIC, Config, SourceSettings
from memd.telemetry.events import Events
from memd.telemetry.tasks import Tasks

log = logging.getLogger("memd")
State = Literal["waiting", "looking", "fine", "failed"]

TOLD_MAX = 100
"""Problems of one source that are told one by one."""
RETRY_SECONDS = 30.0
"""After a look that failed on memd's side: the model, the disk."""
INTERVAL_SECONDS_MIN = 1.0
DEBOUNCE_MS, STEP_MS = 400, 100
"""Changes are gathered until none has come for a step, for the first time at most."""
ROOTS_SECONDS = 5.0
"""The interval at which it is seen whether a source's folder has come, gone or been replaced."""


class FileProblem(msgspec.Struct, frozen=True):
    """A file or folder that was left out."""

    source: str
    reason: str


class SourceState(msgspec.Struct, frozen=True, kw_only=True):
    """A source of the settings, as it stands."""

    path: str
    daemon: str = ""
    """In a cluster, which one reads it."""
    topic_id: str
    name: str
    """Stands in front of its documents' names; empty before the first look."""
    state: State
    files: int
    """Of the last look, or of the one under way: what is to be looked at, and what was."""
    done: int
    written: int
    taken_out: int
    """Chunks."""
    looked_at: int | None
    """When the last look began, in microseconds since the epoch."""
    seconds: float
    """Of that look."""
    error: str
    """Why the last look failed, or nothing."""
    problems: tuple[FileProblem, ...]
    problem_count: int
    is_watched: bool
    """Whether the file system tells of changes."""


class _WatchedSource:
    """One source, and what is known of it."""

    def __init__(self, settings: SourceSettings, apart: Path) -> None:
        chosen = Chosen(
            exclude=(*settings.exclude, str(apart)), formats=settings.formats, follow_links=settings.follow_links
        )
        self.source = Source(path=Path(settings.path), chosen=chosen)
        self.topic_id = topic_of(Path(settings.path)) if settings.topic == AUTO_TOPIC else settings.topic
        self.seen: dict[str, Seen] = {}
        self.progress = Look()
        self.error = ""
        self.looked_at: int | None = None
        self.seconds = 0.0
        self.is_due = self.is_forced = self.is_looking = self.is_watched = False
        self.root = ""
        """Where it was when it was watched last, resolved."""
        self.leaving: Sequence[str] = ()
        """Documents whose files are gone, while they are taken out."""

    @property
    def state(self) -> SourceState:
        progress = self.progress
        ended: State = "failed" if self.error else "fine" if self.looked_at is not None else "waiting"
        return SourceState(
            path=str(self.source.path),
            topic_id=self.topic_id,
            name=progress.name,
            state="looking" if self.is_looking else "waiting" if self.is_due else ended,
            files=progress.files,
            done=progress.done,
            written=progress.written,
            taken_out=progress.taken_out,
            looked_at=self.looked_at,
            seconds=self.seconds,
            error=self.error,
            problems=tuple(FileProblem(*one) for one in progress.problems[:TOLD_MAX]),
            problem_count=len(progress.problems),
            is_watched=self.is_watched,
        )

    def concerns(self, path: str) -> bool:
        """Whether a change at this path, which may be a file's or a folder's, can be one of its documents'."""
        below = path.removeprefix(self.root).strip("/")
        if not is_below(path, self.root) or any(
            part.startswith(".") and part != ".gitignore" for part in below.split("/")
        ):
            return False
        return not Exclusions(self.source.chosen.exclude).have(path, below)


class SourceWatch:
    """Keeps the documents of the settings' sources as their files are."""

    def __init__(
        self, config: Config, topics: Topics, taker: DocumentTaker, priority: Priority, tasks: Tasks, events: Events
    ) -> None:
        self._sources = [_WatchedSource(one, config.data_dir.resolve()) for one in config.sources]
        self._interval_seconds = config.ingest.reindex_seconds
        self._topics, self._taker, self._tasks, self._events = topics, taker, tasks, events
        self._thread = background_thread("memd-sources")
        self._turn = priority.for_background()
        self._working = asyncio.Lock()

    def states(self) -> tuple[SourceState, ...]:
        """The sources, as they stand."""
        return tuple(one.state for one in self._sources)

    def ask(self, *, force: bool = False) -> None:
        """Look at all sources soon. `force`: read every file again, also those that have not changed."""
        for one in self._sources:
            one.is_due, one.is_forced = True, one.is_forced or force
        self._look_later()

    def has(self, topic_id: str, source: str) -> bool:
        """Whether documents of this name would come back, since a source of the settings has them."""
        return any(
            one.topic_id == topic_id and one.progress.name and is_below(source, one.progress.name) and not one.error
            for one in self._sources
            if source not in one.leaving
        )

    async def tend(self) -> None:
        """Look at them at the start, when something changes and now and then, until cancelled."""
        if not self._sources or not self._interval_seconds:
            return
        watching = self._tasks.spawn(self._watch(), "watching sources")
        try:
            while True:
                self.ask()
                await asyncio.sleep(max(INTERVAL_SECONDS_MIN, self._interval_seconds))
        finally:
            watching.cancel()

    def stop(self) -> None:
        """End a look under way before its next file, or in the middle of a long one, and begin none."""
        self._turn.end()
        self._taker.stop()

    async def close(self) -> None:
        """End the thread."""
        self.stop()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _look_later(self) -> None:
        self._tasks.spawn(self._look(), "looking at sources")

    async def _look(self) -> None:
        async with self._working:
            while not self._turn.has_ended and (due := next((one for one in self._sources if one.is_due), None)):
                await self._look_at(due)

    async def _look_at(self, one: _WatchedSource) -> None:
        force, began, before = one.is_forced, time.monotonic(), one.error
        one.is_due, one.is_forced, one.is_looking = False, False, True
        one.looked_at, one.progress = time.time_ns() // 1000, Look(name=one.progress.name)
        keeper = _TopicKeeper(self._topics, self._taker, one)

        def work() -> None:
            look(one.source, keeper, one.seen, one.progress, force=force, step=self._turn.give_way)

        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)
            one.error = ""
        except GivenUp:
            return
        except MemdError as error:
            one.error = str(error)
            if self._turn.has_ended:
                return
            if not isinstance(error, BadSource):
                one.is_forced = force
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._again, one)
        finally:
            one.is_looking, one.seconds = False, time.monotonic() - began
        fields = {"source": str(one.source.path), "topic": one.topic_id}
        if one.error and one.error != before:
            log.warning("a source cannot be looked at", extra={**fields, "error": one.error})
        elif one.progress.written or one.progress.taken_out:
            done = {"files": one.progress.files, "written": one.progress.written, "taken_out": one.progress.taken_out}
            log.info("looked at a source", extra={**fields, **done})
        self._events.publish("source", {"path": str(one.source.path), "topic_id": one.topic_id})

    def _again(self, one: _WatchedSource) -> None:
        if not self._turn.has_ended:
            one.is_due = True
            self._look_later()

    async def _watch(self) -> None:
        """Look at what the file system tells has changed; watch anew when a folder has come, gone or been replaced."""
        said, places = "", self._places()
        while True:
            try:
                if places:
                    await self._watch_while(places)
            except (OSError, RuntimeError) as error:  # too many folders for inotify, a file system without it
                if str(error) != said:
                    log.warning("sources are not watched, only looked at now and then", extra={"error": error})
                said = str(error)
            for one in self._sources:
                one.is_watched = False
            while (now := self._places()) == places:  # noqa: ASYNC110 - nobody else tells of a mount
                await asyncio.sleep(ROOTS_SECONDS)
            places = now
            self.ask()

    async def _watch_while(self, places: dict[str, tuple[int, int]]) -> None:
        from watchfiles import awatch  # loads a library, which most need not

        logging.getLogger("watchfiles").setLevel(logging.WARNING)  # else a line for each change
        for one in self._sources:
            one.is_watched = one.root in places
        async for changes in awatch(
            *places,
            watch_filter=None,
            debounce=DEBOUNCE_MS,
            step=STEP_MS,
            rust_timeout=int(ROOTS_SECONDS * 1000),
            yield_on_timeout=True,
            ignore_permission_denied=True,
        ):
            changed = [one for one in self._sources if any(one.concerns(path) for _, path in changes)]
            for one in changed:
                one.is_due = True
            if changed:
                self._look_later()
            if self._places() != places:
                return

    def _places(self) -> dict[str, tuple[int, int]]:
        """The folders that are there now, resolved, each with its device and inode."""
        places = {}
        for one in self._sources:
            one.root = os.path.realpath(one.source.path)
            try:
                status = Path(one.root).stat()
            except OSError:
                continue
            places[one.root] = status.st_dev, status.st_ino
        return places


class _TopicKeeper:
    """The documents of a source's topic, for a look in its thread; see `Keeper`. Made on the event loop.

    Only those that the owner wrote, as this does: whatever others hand over under a source's name stays beside its own.
    """

    def __init__(self, topics: Topics, taker: DocumentTaker, source: _WatchedSource) -> None:
        self._loop = asyncio.get_running_loop()
        self._topics, self._taker, self._source = topics, taker, source

    def known(self) -> Sequence[KnownDocument]:

        async def listed() -> Sequence[KnownDocument]:
            async with self._topics.held([self._source.topic_id]) as found:
                snapshots = [topic.log.snapshot() for topic in found]
                return [one for some in snapshots for one in await asyncio.to_thread(known_documents, some, "")]

        return asyncio.run_coroutine_threadsafe(listed(), self._loop).result()

    def take(self, document: GivenDocument) -> TakenDocument:
        return self._done(lambda topic: self._taker.take(topic, document, is_apart=True))

    def remove(self, sources: Sequence[str]) -> TakenDocument:
        self._source.leaving = sources
        try:
            return self._done(lambda topic: self._taker.remove(topic, sources, is_apart=True))
        finally:
            self._source.leaving = ()

    def _done(self, work: Callable[[Topic], Awaitable[TakenDocument]]) -> TakenDocument:
        async def done() -> TakenDocument:
            topic = await self._topics.get(self._source.topic_id)
            with topic.held():
                return await work(topic)

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result()


def topic_of(folder: Path) -> str:
    """Return the topic that is called as a folder, with `-` for what no topic's name has."""
    return topic_called(folder.resolve().name)
