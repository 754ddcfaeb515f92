"""The routes under /memd/ that only look.

Rule: nothing here changes what is stored or what a model sees. What may be long is paged or streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from memd import __version__
from memd.admin import history
from memd.admin.receipts import Receipt, summary
from memd.conversation.compaction import injection_budget
from memd.conversation.conversation import Conversation
from memd.entries import checked_topic_id
from memd.errors import BadQuestion, NotFound
from memd.ingest.topics import Topic
from memd.proxy.service import Daemon
from memd.recall.explained import EARLIER, INJECTED, SearchAnswer, search_answer
from memd.recall.retrieve import Budget, Filters, Searchable
from memd.store.disk import DiskFiles
from memd.store.store import Snapshot
from memd.store.tools.disk_usage import TopicDiskUsage, disk_usage
from memd.store.tools.export import export as export_log
from memd.store.topic import TopicStats
from memd.telemetry.metrics import exposed

QUESTION_CHARACTERS_MAX = 100_000
PAGE_MAX = 500
PAGE = 50
PING_SECONDS = 15.0
EXPORTED_AT_ONCE = 200
LATEST_MESSAGES = 20
PREVIEW_CHARACTERS = 400
CHUNK_TURNS_MAX = 20
Result = TypeVar("Result")


class UpstreamHealth(msgspec.Struct, frozen=True):
    """The model server as last seen."""

    url: str
    reachable: bool
    window: int | None
    """Tokens of its context; None: it does not say."""


class Health(msgspec.Struct, frozen=True):
    """Whether it runs, on which folder, and whether the model server answers."""

    status: Literal["ok"]
    version: str
    data_dir: str
    topics: int
    """That are open."""
    upstream: UpstreamHealth


class Stats(msgspec.Struct, frozen=True):
    """What is in memory, and by name what redaction has replaced since the start (None: it is off)."""

    data_dir: str
    memory_bytes: int
    memory_bytes_max: int
    cache_bytes: int
    """Of parsed messages and of the words of chunks, kept because they are asked for again; each bounded."""
    tasks: int
    """That are running or waiting: connections, requests, work in the background."""
    redacted: dict[str, int] | None
    topics: dict[str, TopicStats]


class KnownTopic(TopicDiskUsage, frozen=True, kw_only=True):
    """A topic on disk, and what waits in its buffer."""

    is_open: bool
    conversations: int
    buffered_tokens: int


class KnownTopics(msgspec.Struct, frozen=True):
    """All topics."""

    topics: list[KnownTopic]


class Chunks(msgspec.Struct, frozen=True):
    """Present states of chunks, latest first."""

    chunks: tuple[history.Event, ...]
    next: int | None
    """What to pass as `before` for those that follow; None: there are none."""


class BufferedMessage(msgspec.Struct, frozen=True):
    """One message of a live conversation."""

    role: str | None
    text: str
    """Its beginning."""
    tokens: int
    stored: bool
    left_out: bool
    """It is not in the prompt any more."""


class BufferedConversation(msgspec.Struct, frozen=True):
    """One live conversation."""

    conversation: str
    messages: int
    tokens: int
    """Of what is in the prompt."""
    left_out: int
    stored: int
    last_at: int
    """Microseconds since the epoch."""
    latest: list[BufferedMessage]


class Buffer(msgspec.Struct, frozen=True):
    """The live conversations of a topic, the latest first."""

    conversations: list[BufferedConversation]


class Turns(msgspec.Struct, frozen=True):
    """The latest turns, newest first: receipts without their blocks, and with the number of their candidates."""

    turns: list[dict[str, Any]]


class Replay(msgspec.Struct, frozen=True):
    """A turn, what its question would bring up now, and the ids of the chunks that make the difference."""

    turn: Receipt
    now: SearchAnswer
    gained: list[str]
    lost: list[str]
    kept: list[str]


async def health(daemon: Daemon, request: web.Request, _: str) -> Health:
    """Whether it runs, on which folder, and whether the model server answers."""
    facts = daemon.upstream.facts
    return Health(
        "ok",
        __version__,
        str(daemon.config.data_dir.resolve()),
        len(daemon.topics.opened()),
        UpstreamHealth(daemon.upstream.url, facts.reachable, facts.window),
    )


async def stats(daemon: Daemon, request: web.Request, _: str) -> Stats:
    """What is in memory."""
    known = {topic.id: topic.log.stats() for topic in daemon.topics.opened()}
    return Stats(
        data_dir=str(daemon.config.data_dir.resolve()),
        memory_bytes=sum(one.memory_bytes for one in known.values()),
        memory_bytes_max=daemon.config.store.memory_bytes_max,
        cache_bytes=daemon.cache_bytes,
        tasks=len(asyncio.all_tasks()),
        redacted=dict(daemon.redactor.told) if daemon.redactor else None,
        topics=known,
    )


async def topics(daemon: Daemon, request: web.Request, _: str) -> KnownTopics:
    """All topics, with what is stored of each and what waits in its buffer."""
    on_disk = await _in_thread(lambda: disk_usage(daemon.config.data_dir, DiskFiles()))
    is_open = {topic.id: topic for topic in daemon.topics.opened()}
    told = []
    for one in on_disk:
        topic = is_open.get(one.topic_id)
        conversations = [] if topic is None else topic.buffer.conversations()
        tokens = sum(talk.tokens_between(talk.left_out, len(talk)) for talk in conversations)
        told.append(
            KnownTopic(
                **{name: getattr(one, name) for name in one.__struct_fields__},
                is_open=topic is not None,
                conversations=len(conversations),
                buffered_tokens=tokens,
            )
        )
    return KnownTopics(told)


async def search(daemon: Daemon, request: web.Request, _: str) -> SearchAnswer:
    """What memory would bring up for a question."""
    question = request.query.get("q", "")
    if not question.strip() or len(question) > QUESTION_CHARACTERS_MAX:
        raise BadQuestion(f"q is the question: 1 to {QUESTION_CHARACTERS_MAX:,} characters")
    as_of = history.moment(request.query["as_of"]) if "as_of" in request.query else None
    async with _named_topics(daemon, request) as found:
        logs: Sequence[Searchable] = [topic.log for topic in found]
        if as_of is not None:
            logs = await daemon.retriever.as_of([topic.log for topic in found], as_of)
        retrieved = await daemon.retriever.retrieve(
            question, logs, await prompt_budget(daemon), Filters(relevant_only=False)
        )
        return search_answer(retrieved, as_of)


async def prompt_budget(daemon: Daemon) -> Budget:
    """The budget that a prompt to the present upstream model would get."""
    facts, drift = await daemon.upstream.refresh(wait=False), daemon.counter.drift
    model = facts.model if drift.is_known(facts.model) else drift.latest_model
    tokens = injection_budget(daemon.config.injection.budget_tokens, facts.window)
    return Budget(tokens, drift.factor(model))


async def log_page(daemon: Daemon, request: web.Request, _: str) -> history.Page:
    """The latest entries of the log."""
    before, limit = _page(request)
    async with _snapshots(daemon, request) as snapshots:
        return await _in_thread(lambda: history.log_page(snapshots, before=before, limit=limit))


async def chunks(daemon: Daemon, request: web.Request, _: str) -> Chunks:
    """The present state of chunks."""
    before, limit = _page(request)
    contains, gone_too = request.query.get("contains", ""), request.query.get("all") == "1"
    async with _snapshots(daemon, request) as snapshots:
        page = await _in_thread(
            lambda: history.chunks_page(snapshots, before=before, limit=limit, contains=contains, gone_too=gone_too)
        )
    return Chunks(page.events, page.next)


async def chunk(daemon: Daemon, request: web.Request, named: str) -> history.ChunkStory:
    """Everything about one chunk."""

    def read(snapshots: list[Snapshot]) -> history.ChunkStory:
        snapshot, uuid = history.named(snapshots, named)
        return history.story(snapshot, uuid)

    async with _snapshots(daemon, request) as snapshots:
        story = await _in_thread(lambda: read(snapshots))
    turns_ = await daemon.receipts.latest(CHUNK_TURNS_MAX, topic_id=None, before=None, uuid=story.uuid)
    return msgspec.structs.replace(story, turns=tuple(one.turn_id for one in turns_))


async def buffer(daemon: Daemon, request: web.Request, _: str) -> Buffer:
    """The live conversations of a topic: what is in the prompt, what is stored, what is both."""
    topic_id = checked_topic_id(request.query.get("topic", ""))
    topic = next((one for one in daemon.topics.opened() if one.id == topic_id), None)
    talks = [] if topic is None else [_conversation(talk) for talk in topic.buffer.conversations()]
    return Buffer(sorted(talks, key=lambda talk: -talk.last_at))


def _conversation(talk: Conversation) -> BufferedConversation:
    start = max(0, len(talk) - LATEST_MESSAGES)
    latest = [
        BufferedMessage(
            role=None if item.message is None else item.message.role,
            text="" if item.message is None else item.message.text[:PREVIEW_CHARACTERS],
            tokens=item.tokens,
            stored=position < talk.stored,
            left_out=position < talk.left_out,
        )
        for position, item in enumerate(talk.messages[start:], start)
    ]
    return BufferedConversation(
        conversation=talk.id,
        messages=len(talk),
        tokens=talk.tokens_between(talk.left_out, len(talk)),
        left_out=talk.left_out,
        stored=talk.stored,
        last_at=int(talk.used_at * 1e6),
        latest=latest,
    )


async def turns(daemon: Daemon, request: web.Request, _: str) -> Turns:
    """The latest turns, without their blocks."""
    found = await daemon.receipts.latest(
        _limit(request), topic_id=request.query.get("topic"), before=request.query.get("before"), uuid=None
    )
    return Turns([summary(receipt) for receipt in found])


async def turn(daemon: Daemon, request: web.Request, named: str) -> Receipt:
    """One turn's receipt."""
    return await _receipt(daemon, named)


async def replay(daemon: Daemon, request: web.Request, named: str) -> Replay:
    """What the same question would bring up now, beside what it did."""
    receipt = await _receipt(daemon, named)
    if receipt.question is None:
        raise BadQuestion("memory was not asked in this turn: it showed the block of an earlier one, or none")
    logs = []
    async with contextlib.AsyncExitStack() as held:
        for topic_id in (receipt.topic_id, *receipt.related):
            topic = await daemon.topics.existing(topic_id)
            if topic is not None:
                held.enter_context(topic.held())
                logs.append(topic.log)
        budget = Budget(receipt.budget_tokens, daemon.counter.drift.factor(receipt.model))
        earlier = {bytes.fromhex(one.uuid) for one in receipt.candidates if one.verdict == EARLIER}
        filters = Filters(shown_uuids=earlier, relevant_only=False)
        now = search_answer(await daemon.retriever.retrieve(receipt.question, logs, budget, filters))
    then = {one.uuid: one.id for one in receipt.candidates if one.verdict in (INJECTED, EARLIER)}
    since = {one.uuid: one.id for one in now.chunks if one.verdict in (INJECTED, EARLIER)}
    return Replay(
        turn=receipt,
        now=now,
        gained=[id_ for uuid, id_ in since.items() if uuid not in then],
        lost=[id_ for uuid, id_ in then.items() if uuid not in since],
        kept=[id_ for uuid, id_ in then.items() if uuid in since],
    )


async def events(daemon: Daemon, request: web.Request, _: str) -> web.StreamResponse:
    """Turns, what is stored and what is corrected as it happens, as server-sent events, until the client leaves."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    with daemon.events.listening() as queue, contextlib.suppress(ConnectionError):
        await response.write(b": memd\n\n")
        while not daemon.events.have_ended():
            try:
                name, value = await asyncio.wait_for(queue.get(), PING_SECONDS)
                if daemon.events.have_ended():
                    break
                await response.write(f"event: {name}\ndata: {msgspec.json.encode(value).decode()}\n\n".encode())
            except TimeoutError:
                await response.write(b": ping\n\n")
    return response


async def export(daemon: Daemon, request: web.Request, _: str) -> web.StreamResponse:
    """The log as JSON Lines, as `memd export` writes it."""
    topic_id = request.query.get("topic")
    if topic_id is not None and await daemon.topics.existing(checked_topic_id(topic_id)) is None:
        raise history.no_topic(topic_id)
    lines = export_log(
        daemon.config.data_dir, DiskFiles(), topic_id=topic_id, live_only=request.query.get("live") == "1"
    )
    response = web.StreamResponse(headers={"Content-Type": "application/jsonl", "Cache-Control": "no-store"})
    await response.prepare(request)
    while part := await _in_thread(lambda: b"".join(_encoded(lines))):
        await response.write(part)
    await response.write_eof()
    return response


async def metrics(daemon: Daemon, request: web.Request, _: str) -> web.StreamResponse:
    """Figures for Prometheus; docs/operations.md lists them."""
    body, content_type = await exposed(daemon, request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


def _encoded(lines: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    for entry, _ in zip(lines, range(EXPORTED_AT_ONCE), strict=False):
        yield msgspec.json.encode(entry) + b"\n"


async def _receipt(daemon: Daemon, turn_id: str) -> Receipt:
    receipt = await daemon.receipts.find(turn_id) if turn_id.isalnum() else None
    if receipt is None:
        raise NotFound(f"there is no receipt of turn {turn_id[:60]!r}: it is too old, or receipts.enabled is false")
    return receipt


@asynccontextmanager
async def _named_topics(daemon: Daemon, request: web.Request) -> AsyncIterator[list[Topic]]:
    """The topics that a query names, or all; open as long as the block runs."""
    named = [checked_topic_id(topic_id) for topic_id in request.query.getall("topic", [])]
    async with contextlib.AsyncExitStack() as held:
        found = []
        for topic_id in named or await _in_thread(daemon.store.topic_ids):
            topic = await daemon.topics.existing(topic_id)
            if topic is None:
                raise history.no_topic(topic_id)
            held.enter_context(topic.held())
            found.append(topic)
        yield found


@asynccontextmanager
async def _snapshots(daemon: Daemon, request: web.Request) -> AsyncIterator[list[Snapshot]]:
    async with _named_topics(daemon, request) as found:
        yield [topic.log.snapshot() for topic in found]


def _page(request: web.Request) -> tuple[int | None, int]:
    before = request.query.get("before")
    return None if before is None else history.moment(before), _limit(request)


def _limit(request: web.Request) -> int:
    asked = request.query.get("limit", str(PAGE))
    if not asked.isdecimal() or not 1 <= int(asked[:6]) <= PAGE_MAX:
        raise BadQuestion(f"limit is a number from 1 to {PAGE_MAX}")
    return int(asked)


async def _in_thread(work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(None, work)
