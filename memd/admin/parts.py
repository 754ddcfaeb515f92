"""The parts of a running daemon that operations use, and the topics and chunks that they are about.

Rule: an operation is a function of these parts and the request, and keeps no state. The parts are not replaced while
the daemon runs, though most have a state of their own. An unknown topic is the caller's error, except for a note, which
creates its topic. Rights are checked before the topic is looked up, so that neither a refusal nor its timing reveals
whether the topic exists.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from memd.admin.routing import Listed
from memd.entries import Draft, checked_topic_id, digits_of_id
from memd.errors import BadQuestion, NotFound, Refused, StoreError, UnknownTopic
from memd.principals import Principal, Right
from memd.store.log.segment import NOTHING_PENDING
from memd.wording import no_topic, unread_topics

if TYPE_CHECKING:  # a command reads the declarations of operations and needs none of these
    from memd.access import BodyRoom
    from memd.admin.auditing import Auditor
    from memd.admin.oauth.ledger import Ledger
    from memd.admin.status import UpstreamHealth
    from memd.admin.tokens import TokenWatch
    from memd.conversation.tokens import TokenCounter
    from memd.embedding.encoder import Encoder
    from memd.ingest.archiver import Archiver
    from memd.ingest.erasing import Retention
    from memd.ingest.redaction import Redactor
    from memd.ingest.sources.documents import DocumentTaker
    from memd.ingest.sources.watch import SourceWatch
    from memd.ingest.topic import Inquiry
    from memd.ingest.topics import Topic, Topics
    from memd.messages import Speech
    from memd.principals import Principals
    from memd.recall.retrieve import Budget, Retriever
    from memd.receipts import Receipts
    from memd.settings.model import Config
    from memd.store.bucket.writing import BucketTender
    from memd.store.log.segment import PendingView, UnstoredText
    from memd.store.store import Snapshot, Store, TopicLog
    from memd.telemetry.events import Events
    from memd.telemetry.tasks import Tasks

Found = TypeVar("Found", bound=Listed)


class Named(NamedTuple):
    """A chunk found by its id, in the first topic that has it."""

    snapshot: Snapshot
    uuid: bytes
    waiting: PendingView | None = None
    """The pending chunks, if it is one of them."""


class DaemonParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that operations use; a daemon has more."""

    config: Config
    base_url: str
    """Address at which clients find the model."""
    own_url: str
    """Address of memd's own page and routes."""
    local_url: str
    """The same, with an IP address of this machine."""
    store: Store
    topics: Topics
    redactor: Redactor
    encoder: Encoder
    counter: TokenCounter
    retriever: Retriever
    archiver: Archiver
    taker: DocumentTaker
    sources: SourceWatch
    retention: Retention
    receipts: Receipts
    auditor: Auditor
    token_watch: TokenWatch
    ledger: Ledger
    speech: Speech
    events: Events
    tasks: Tasks
    bodies: BodyRoom
    backup: BucketTender | None
    cache_bytes: Callable[[], int]
    """Returns the bytes in the caches of parsed messages, their token counts, and read entries."""
    upstreams: Callable[[], list[UpstreamHealth]]
    """Returns the present state of the model servers, in the order of the settings."""
    budget: Callable[[], Awaitable[Budget]]
    """Returns the budget of a prompt to the present upstream model."""
    exposition: Callable[[str], Awaitable[tuple[bytes, str]]]
    """Returns the metrics in the format that an `Accept` header asks for, with the content type."""
    inquiry: Inquiry | None = None
    """In a cluster, one request's check of the shared log, made after the request came."""

    @property
    def principals(self) -> Principals:
        """The principals who may use the daemon."""
        return self.token_watch.principals

    @property
    def name(self) -> str:
        """This daemon's name in a cluster; empty without a cluster."""
        return "" if self.store.kept is None else self.own_url

    @asynccontextmanager
    async def held(
        self, names: Sequence[str], who: Principal, rights: Sequence[Right] = ("read",), refused: Refused | None = None
    ) -> AsyncIterator[list[Topic]]:
        """Hold the topics of these names, or without names all in which `who` has one of the rights, open during the
        block. `refused`: see `Topics.readable`. Raises Forbidden: `who` lacks the first right in one of them;
        StoreError: a topic cannot be read, or with `refused` none can."""
        wanted = [checked_topic_id(name) for name in names]
        for name in wanted:
            who.check(rights[0], name)
        if not wanted:
            there = await asyncio.get_running_loop().run_in_executor(None, self.store.topic_ids)
            wanted = [name for name in there if any(who.may(right, name) for right in rights)]
        async with self.topics.held(wanted, self.topics.ask(wanted, self.inquiry), refused) as found:
            if missing := {*wanted} - {topic.id for topic in found} - {*(refused or ())}:
                raise BadQuestion(no_topic(min(missing)))
            if refused and not found:
                raise next(iter(refused.values()))
            yield found

    async def read(self, names: Sequence[str], who: Principal, work: Callable[[list[Snapshot]], Found]) -> Found:
        """Run `work` in a thread on snapshots of the topics of these names, or without names of all readable ones, and
        note the others in its answer; raises as `held`."""
        refused: Refused = {}
        async with self.held(names, who, refused=None if names else refused) as found:
            answer = await asyncio.to_thread(work, [topic.log.snapshot() for topic in found])
        return msgspec.structs.replace(answer, note=unread_topics(refused)) if refused else answer

    async def named(
        self, found: Sequence[Topic], chunk_ids: Iterable[str], names: Sequence[str], who: Principal
    ) -> list[Named]:
        """Find chunks in held topics, see `named` below. If `names` excluded another readable topic that has the
        chunk, the error says so."""

        async def in_one_of(topics: Sequence[Topic], chunk_id: str) -> Named:
            return await asyncio.to_thread(named, [(one.log, one.unstored()) for one in topics], chunk_id)

        try:
            return [await in_one_of(found, missing := one) for one in chunk_ids]
        except NotFound as error:
            told = error
            with contextlib.suppress(BadQuestion, StoreError):
                async with self.held([], who) as others:
                    there = (await in_one_of(others if names else (), missing)).snapshot.topic_id
                    told = NotFound(f"topic {', '.join(names)} has no chunk {missing!r}: it is in topic {there}")
            raise told from None

    @asynccontextmanager
    async def held_one(
        self, name: str, who: Principal, right: Right, *, creating: bool = False
    ) -> AsyncIterator[Topic]:
        """Hold the topic of this name open during the block.

        Args:
            creating: create a missing topic.

        Raises:
            Forbidden: `who` lacks the right in it.
            StoreError: it cannot be read or created.
        """
        who.check(right, checked_topic_id(name))
        topic = await (self.topics.get if creating else self.topics.existing)(name)
        if topic is None:
            raise UnknownTopic(no_topic(name))
        with topic.used() if creating else topic.held():
            yield topic


def check_changes(who: Principal, topic: TopicLog, drafts: Iterable[Draft], author: str) -> None:
    """Check that `who` may append these entries if they change chunks of others, or messages that others have said too
    (they are stored once). `author`: `who`'s name in the log. Raises Forbidden: `who` lacks the right to correct there;
    StoreError: an entry cannot be read."""
    if not who.may("correct", topic.topic_id):
        snapshot = topic.snapshot()
        known = (snapshot.find(uuid) for uuid in {draft.uuid for draft in drafts})
        if any(one is not None and (one.author != author or (one.kind == "turn" and one.digests)) for one in known):
            who.check("correct", topic.topic_id)


def named(topics: Sequence[tuple[TopicLog, UnstoredText]], chunk_id: str) -> Named:
    """Find the chunk, stored or pending, with this public id, or else the one whose uuid begins with these digits.
    Called in a thread, because it may cut text.

    Args:
        topics: where to search, each with its pending text.

    Raises:
        NotFound: there is no such chunk.
        BadQuestion: it is not an id, or several chunks match.
    """
    if (digits := digits_of_id(chunk_id)) is None:
        raise BadQuestion(f"{chunk_id[:60]!r} is no chunk's id: those are four or more hex digits, as in [mem:a3f9]")
    # A whole uuid is unique, so a stored chunk needs no text to be cut.
    is_stored = len(digits) == 32 and any(log.snapshot().knows(bytes.fromhex(digits)) for log, _ in topics)
    found: dict[bytes, tuple[bool, Named]] = {}
    for log, unstored in topics:
        waiting = NOTHING_PENDING if is_stored else unstored.chunks()
        snapshot = log.snapshot()  # taken second, so that a chunk stored in between is in one of them
        for one, is_its in snapshot.named(digits).items():
            found.setdefault(one, (is_its, Named(snapshot, one)))
        for entry in (one.entry for one in waiting if one.entry.uuid.hex().startswith(digits)):
            found.setdefault(entry.uuid, (entry.public_id == digits, Named(snapshot, entry.uuid, waiting)))
    meant = [one for is_its, one in found.values() if is_its] or [one for _, one in found.values()]
    if not meant:
        raise NotFound(f"no chunk has the id {digits!r}; `memd search` and `memd log` show ids")
    if len(meant) > 1:
        names = ", ".join(f"{one.uuid.hex()[:12]} ({one.snapshot.topic_id})" for one in meant[:5])
        raise BadQuestion(f"{digits!r} means {len(meant)} chunks: {names}; give more digits, or the topic")
    return meant[0]


def uuids_of(topics: Sequence[tuple[TopicLog, UnstoredText]], chunk_ids: Iterable[str]) -> dict[str, bytes]:
    """Return the chunks by id, without unknown ids. Raises BadQuestion: an id names several. See `named`."""
    found = {}
    for one in chunk_ids:
        if digits_of_id(one) is not None:
            with contextlib.suppress(NotFound):
                found[one] = named(topics, one).uuid
    return found
