"""Scans the sources of the settings at the start, on changes of the file system, and periodically.

Rule: used on the event loop. Scans run in one low-priority thread, which yields to requests before each file. A source
that cannot be scanned keeps its documents and reports the reason; no failure stops the daemon. In a cluster each daemon
reads the files of its own settings, and sends the documents to the daemon with the topic.
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
"""Most problems of one source that are listed."""
RETRY_SECONDS = 30.0
"""Delay of a retry after a failure of memd itself: the model, the disk."""
INTERVAL_SECONDS_MIN = 1.0
DEBOUNCE_MS, STEP_MS = 400, 100
"""Changes are collected until none arrives for STEP_MS, for DEBOUNCE_MS at most."""
ROOTS_SECONDS = 5.0
"""Interval of checks for source folders that appeared, disappeared or were replaced."""


class FileProblem(msgspec.Struct, frozen=True):
    """A file or folder that was left out."""

    source: str
    reason: str


class SourceState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a source of the settings."""

    path: str
    daemon: str = ""
    """In a cluster, the daemon that reads it."""
    topic_id: str
    name: str
    """Prefix of its documents' names; empty before the first scan."""
    state: State
    files: int
    """Number of files of the last or running scan; `done`: those finished."""
    done: int
    written: int
    taken_out: int
    """Number of chunks removed; `written`: added."""
    looked_at: int | None
    """Start of the last scan, in microseconds since the epoch."""
    seconds: float
    """Duration of that scan."""
    error: str
    """Reason why the last scan failed, or empty."""
    problems: tuple[FileProblem, ...]
    problem_count: int
    is_watched: bool
    """True if the file system reports changes."""


class _WatchedSource:
    """A source and its scan state."""

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
        """Resolved path when it was last watched."""
        self.leaving: Sequence[str] = ()
        """Documents being removed, because their files are gone."""

    @property
    def state(self) -> SourceState:
        progress = self.progress
        ended: State = "failed" if self.error else "fine" if self.looked_at is not None else "waiting"
        return SourceState(
            path=str(self.source.path),
            topic_id=self.topic_id,
            state="looking" if self.is_looking else "waiting" if self.is_due else ended,
            **{name: getattr(progress, name) for name in ("name", "files", "done", "written", "taken_out")},
            looked_at=self.looked_at,
            seconds=self.seconds,
            error=self.error,
            problems=tuple(FileProblem(*one) for one in progress.problems[:TOLD_MAX]),
            problem_count=len(progress.problems),
            is_watched=self.is_watched,
        )

    def concerns(self, path: str) -> bool:
        """Return True if a change at this path, of a file or folder, may affect its documents."""
        below = path.removeprefix(self.root).strip("/")
        if not is_below(path, self.root) or any(
            part.startswith(".") and part != ".gitignore" for part in below.split("/")
        ):
            return False
        return not Exclusions(self.source.chosen.exclude).have(path, below)


class SourceWatch:
    """Keeps the documents of the settings' sources up to date with their files."""

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
        """Return the states of the sources."""
        return tuple(one.state for one in self._sources)

    def ask(self, *, force: bool = False) -> None:
        """Scan all sources soon. `force`: read unchanged files, too."""
        for one in self._sources:
            one.is_due, one.is_forced = True, one.is_forced or force
        self._look_later()

    def has(self, topic_id: str, source: str) -> bool:
        """Return True if a document of this name would come back after removal, because a source has it."""
        return any(
            one.topic_id == topic_id and one.progress.name and is_below(source, one.progress.name) and not one.error
            for one in self._sources
            if source not in one.leaving
        )

    async def tend(self) -> None:
        """Scan them at the start, on changes and periodically, until cancelled."""
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
        """Stop a running scan before its next file, or within a long one, and start no more."""
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
        """Scan sources whose files changed; restart the watch when a folder appeared, disappeared or was replaced."""
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
            while (now := self._places()) == places:  # noqa: ASYNC110 - mounts are not reported
                await asyncio.sleep(ROOTS_SECONDS)
            places = now
            self.ask()

    async def _watch_while(self, places: dict[str, tuple[int, int]]) -> None:
        from watchfiles import awatch  # loads a library that most do not need

        logging.getLogger("watchfiles").setLevel(logging.WARNING)  # else it logs a line per change
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
        """Return device and inode of the existing folders, by resolved path."""
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
    """The documents of a source's topic, for a scan in its thread; see `Keeper`. Created on the event loop.

    It has only the owner's documents: those of others under the same name are kept separately.
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
    """Return the topic named after a folder, with `-` for characters that a topic's name may not have."""
    return topic_called(folder.resolve().name)
