"""The operations on the daemon itself: health, memory use, topics, buffers, metrics, and live events.

Rule: nothing here changes the log or a prompt. A principal without the right to read everything learns that the
cluster's database is unavailable, but not its address.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from memd import __version__
from memd.admin.parts import DaemonParts
from memd.admin.routing import Extent, TheTopic, WholeAnswer, get
from memd.clock import shown_time
from memd.entries import checked_topic_id
from memd.errors import DiskFull, ReadOnlyDisk
from memd.principals import Principal
from memd.store.bucket.writing import BackupHealth
from memd.store.disk import Trouble
from memd.store.tools.verify import TopicDiskUsage, disk_usage
from memd.store.topic import TopicStats
from memd.wording import outdated, with_remedy

if TYPE_CHECKING:
    from memd.conversation.conversation import Conversation
    from memd.ingest.topics import Topic, Topics

RETRY_SECONDS = 60
PING_SECONDS = 15.0
LATEST_MESSAGES = 20
PREVIEW_CHARACTERS = 400
TROUBLED_MAX = 10
"""Limit of topics named in troubles; the cause is mostly the same."""


class UpstreamHealth(msgspec.Struct, frozen=True):
    """A model server as last seen."""

    url: str
    reachable: bool
    window: int | None
    """Tokens of its context; None if it does not report them."""
    model: str = ""
    """Empty if it does not report one, or has several."""
    in_flight: int = 0
    """Requests in progress at this server."""
    reason: str = ""
    """Reason why requests go to other servers; empty if they do not."""


class DaemonHealth(msgspec.Struct, frozen=True):
    """Whether the daemon runs, on which folder, and whether the model server answers."""

    status: Literal["ok"]
    version: str
    data_dir: str
    topics: int
    """Number of open topics."""
    memory: Literal["ok", "degraded"]
    """Degraded if the disk is in trouble, a topic's last write failed (so that new messages are at risk), a topic
    cannot be read, or the cluster's database is unavailable."""
    trouble: str | None
    """The first of these troubles in one line; None if there is none."""
    troubles: list[Trouble]
    """All troubles, also of the backup, of indexes and of the settings."""
    upstream: UpstreamHealth
    """The model server; with several, the first that answers."""
    upstreams: list[UpstreamHealth]
    changed_settings: list[str]
    """Keys of settings changed in the file but not loaded by the daemon; always empty for callers who may not read
    everything."""
    model_url: str
    """Address for clients, without `/v1`."""
    own_url: str


class ClusterHealth(msgspec.Struct, frozen=True):
    """This daemon's part in a cluster, as it is now."""

    place: str
    """Address of the database."""
    trouble: str
    """Reason why it is unavailable; empty if it is available."""
    trouble_seconds: float


class DaemonStats(msgspec.Struct, frozen=True):
    """Memory use of the readable open topics. The daemon's figures are None for callers who may not read all topics."""

    data_dir: str
    memory_bytes: int
    memory_bytes_max: int
    cache_bytes: int | None
    """Caches of parsed messages, token counts, chunks and their words, each bounded. For the whole daemon."""
    buffer_bytes: int
    """Open conversations without the texts of their messages, and pending chunks."""
    tasks: int | None
    """Asyncio tasks: connections, requests, background work. For the whole daemon."""
    background_tasks: int | None
    """Tasks without a waiting request; a topic has at most a few, however much work it has."""
    unstored: int
    """Messages that are in a journal and not in the log yet."""
    embedding_backlog: int | None
    """Chunks being stored that wait for the embedding model; words find them meanwhile. For the whole daemon."""
    redacted: dict[str, int] | None
    """Redactions since the start by pattern, for the whole daemon; also None if redaction is off."""
    backup: BackupHealth | None
    """Backup to the settings' bucket; None if there is none, or the caller may not read every topic."""
    cluster: ClusterHealth | None
    """None without a cluster, or if the caller may not read every topic."""
    topics: dict[str, TopicStats]


class KnownTopic(TopicDiskUsage, frozen=True, kw_only=True):
    """A topic on disk, and the size of its buffer."""

    is_open: bool
    conversations: int
    buffered_tokens: int
    unstored: int
    """Messages and notes that are not in the log yet, but can already be found."""


class KnownTopics(msgspec.Struct, frozen=True):
    """All topics."""

    topics: list[KnownTopic]


class BufferedMessage(msgspec.Struct, frozen=True):
    """One message of a live conversation."""

    role: str | None
    text: str
    """Beginning of its text."""
    tokens: int
    stored: bool
    left_out: bool
    """True if it is no longer in the prompt."""
    line: str | None
    """The line that replaces it in the prompt; None: none."""


class BufferedConversation(msgspec.Struct, frozen=True):
    """One live conversation."""

    conversation: str
    messages: int
    tokens: int
    """Tokens of the messages in the prompt."""
    in_prompt: int
    """Messages in the prompt, including those replaced by a line."""
    replaced: int
    """Messages replaced by a line in the prompt."""
    left_out: int
    stored: int
    last_at: int
    """Microseconds since the epoch."""
    latest: list[BufferedMessage]


class BufferedConversations(msgspec.Struct, frozen=True):
    """The live conversations of a topic, latest first."""

    conversations: list[BufferedConversation]


@get("/memd/health", "any")
async def health(parts: DaemonParts, who: Principal) -> DaemonHealth:
    """Whether the daemon runs, on which folder, and whether the model server answers."""
    data_dir = str(parts.config.data_dir.resolve())
    topics, sees_all = _visible(parts.topics, who), who.may_everywhere("read")
    troubles = _troubles(parts, topics, who)
    backup = parts.backup.health if parts.backup is not None and sees_all else None
    late = [_trouble(backup.trouble, _ago(backup.lag_seconds))] if backup is not None and backup.trouble else []
    sealing = (topic.log.troubles.get("seal") for topic in topics)
    late += map(_trouble, islice(filter(None, sealing), TROUBLED_MAX))
    changed = await asyncio.to_thread(parts.token_watch.changed_settings) if sees_all else []
    late += [_trouble(outdated(changed))] if changed else []
    upstreams = parts.upstreams()
    return DaemonHealth(
        status="ok",
        version=__version__,
        data_dir=data_dir,
        topics=len(topics),
        memory="degraded" if troubles else "ok",
        trouble=str(troubles[0]) if troubles else None,
        troubles=[*troubles, *late],
        upstream=next((one for one in upstreams if one.reachable), upstreams[0]),
        upstreams=upstreams,
        changed_settings=changed,
        model_url=parts.base_url,
        own_url=parts.own_url,
    )


@get("/memd/stats", "read")
async def stats(parts: DaemonParts, who: Principal) -> DaemonStats:
    """Memory use of the open topics."""
    visible, is_all, kept = _visible(parts.topics, who), who.may_everywhere("read"), parts.store.kept
    cluster = ClusterHealth(kept.place, kept.trouble, kept.trouble_seconds) if kept is not None and is_all else None
    topics = {topic.id: topic.log.stats() for topic in visible}
    return DaemonStats(
        data_dir=str(parts.config.data_dir.resolve()),
        memory_bytes=sum(one.memory_bytes for one in topics.values()),
        memory_bytes_max=parts.config.store.memory_bytes_max,
        cache_bytes=parts.cache_bytes() if is_all else None,
        embedding_backlog=parts.encoder.backlog if is_all else None,
        buffer_bytes=sum(topic.buffer_bytes for topic in visible),
        tasks=len(asyncio.all_tasks()) if is_all else None,
        background_tasks=len(parts.tasks) if is_all else None,
        unstored=sum(topic.buffer.unstored_count for topic in visible),
        redacted=dict(parts.redactor.counts) if parts.redactor and is_all else None,
        backup=parts.backup.health if parts.backup is not None and is_all else None,
        cluster=cluster,
        topics=topics,
    )


@get("/memd/topics", "read", tool="list_topics")
async def topics(parts: DaemonParts, who: Principal) -> KnownTopics:
    """List the topics, each a memory of its own, with how much each holds."""
    on_disk = await asyncio.get_running_loop().run_in_executor(
        None, disk_usage, parts.config.data_dir, parts.store.files
    )
    is_open, waiting = {topic.id: topic for topic in parts.topics.opened()}, parts.topics.waiting
    known = []
    for one in on_disk:
        if not who.may("read", one.topic_id):
            continue
        topic = is_open.get(one.topic_id)
        conversations = [] if topic is None else topic.buffer.conversations()
        tokens = sum(talk.visible_tokens() for talk in conversations)
        known.append(
            KnownTopic(
                **{name: getattr(one, name) for name in one.__struct_fields__},
                is_open=topic is not None,
                conversations=len(conversations),
                buffered_tokens=tokens,
                unstored=waiting.get(one.topic_id, 0) if topic is None else topic.buffer.unstored_count,
            )
        )
    return KnownTopics(known)


@get("/memd/buffer", "read", act="read", touches=lambda told: Extent(count=len(told.conversations)))
async def buffer(parts: DaemonParts, who: Principal, *, topic: TheTopic) -> BufferedConversations:
    """The live conversations of a topic: which messages are in the prompt, which are stored, which are both."""
    who.check("read", topic_id := checked_topic_id(topic))
    opened = [one for one in parts.topics.opened() if one.id == topic_id]
    talks = [_conversation(talk) for one in opened for talk in one.buffer.conversations()]
    shown = await asyncio.to_thread(lambda: [_previewed(parts.redactor.kept(talk)) for talk in talks])
    return BufferedConversations(sorted(shown, key=lambda talk: -talk.last_at))


@get("/memd/events", "read", act="read", streams="text/event-stream")
async def events(parts: DaemonParts, who: Principal) -> AsyncIterator[bytes]:
    """Turns, stored chunks and corrections as they happen, as server-sent events, until the client disconnects or
    its token is taken back."""
    with parts.events.subscription(who.author) as queue:
        yield b": memd\n\n"
        while True:
            try:
                kind, value = await asyncio.wait_for(queue.get(), PING_SECONDS)
            except TimeoutError:
                yield b": ping\n\n"
                continue
            if kind == "end":
                if value is not None:  # evicted: a browser would otherwise reconnect at once
                    told = msgspec.json.encode(value)
                    yield b"retry: %d\nevent: end\ndata: %s\n\n" % (1_000 * RETRY_SECONDS, told)
                break
            if who.may("read", value["topic_id"]):
                yield b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(_told(value, who)))


@get("/memd/metrics", "admin", streams="text/plain")
async def metrics(parts: DaemonParts, headers: Mapping[str, str]) -> WholeAnswer:
    """Metrics for Prometheus; docs/operations.md lists them."""
    return WholeAnswer(*await parts.exposition(headers.get("Accept", "")))


def _told(value: dict[str, Any], who: Principal) -> dict[str, Any]:
    """Return an event without related topics, and ids of their chunks, that the principal may not read."""
    others = {name: value[name] for name in ("related", "shown_from") if value.get(name)}
    told = value | {name: [one for one in given if who.may("read", one)] for name, given in others.items()}
    return told if "shown" not in value or told == value else told | {"shown": []}


def _visible(topics: Topics, who: Principal) -> list[Topic]:
    return [topic for topic in topics.opened() if who.may("read", topic.id)]


def _conversation(talk: Conversation) -> BufferedConversation:
    start = max(0, len(talk) - LATEST_MESSAGES)
    latest = [
        BufferedMessage(
            role=None if item.message is None else item.message.role,
            text="" if item.message is None else item.message.text,
            tokens=item.tokens,
            stored=position < talk.stored,
            left_out=not talk.is_visible(position),
            line=None if position not in talk.lines else talk.lines[position].text,
        )
        for position, item in enumerate(talk.messages[start:], start)
    ]
    left_out = talk.left_out_count()
    return BufferedConversation(
        conversation=talk.id,
        messages=len(talk),
        tokens=talk.visible_tokens(),
        in_prompt=len(talk) - left_out,
        replaced=len(talk.lines),
        left_out=left_out,
        stored=talk.stored,
        last_at=int(shown_time(talk.used_at) * 1e6),
        latest=latest,
    )


def _previewed(talk: BufferedConversation) -> BufferedConversation:
    """Return only the beginnings of texts. They are redacted before, because a cut key would not be recognized."""
    replace = msgspec.structs.replace
    return replace(talk, latest=[replace(one, text=one.text[:PREVIEW_CHARACTERS]) for one in talk.latest])


def _troubles(parts: DaemonParts, topics: Sequence[Topic], who: Principal) -> list[Trouble]:
    """Return the troubles that put new messages at risk or make memory incomplete. `topics`: the open ones that `who`
    may read; the database's address is shown only to those who may read all."""
    disk, kept = parts.topics.disk.trouble, parts.store.kept
    found = [] if disk is None else [Trouble(disk.what, disk.since, disk.remedy)]
    refused = [error for topic_id, error in parts.topics.refused.items() if who.may("read", topic_id)]
    refused += [error for topic in topics if (error := topic.log.troubles.get("load")) is not None]
    found += map(_trouble, refused[:TROUBLED_MAX])
    told = [(topic, error) for topic in topics if (error := topic.write_trouble) is not None]
    if disk is not None:  # the topics have the same trouble
        told = [(topic, error) for topic, error in told if not isinstance(error, DiskFull | ReadOnlyDisk)]
    found += [_trouble(error, topic.trouble_since) for topic, error in told[:TROUBLED_MAX]]
    if kept is not None and kept.trouble:
        found = [one for one in found if "PostgreSQL" not in one.what]  # the topics have the same trouble
        text = kept.trouble if who.may_everywhere("read") else "the database cannot be used; ask who runs this memd"
        found.append(_trouble(text, _ago(kept.trouble_seconds)))
    return found


def _trouble(text: object, since: int = 0) -> Trouble:
    happened, remedy = with_remedy(str(text))
    return Trouble(happened, since, remedy)


def _ago(seconds: float) -> int:
    return int((time.time() - seconds) * 1e6)
