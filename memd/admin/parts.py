"""The parts of a running daemon that operations work with, and the topics that they are about.

Rule: an operation is a function of these and of what is asked; it keeps nothing. Nothing here is changed while the
daemon runs, though most of it has a state of its own. An unknown topic is the caller's mistake, except where a note is
put down: its topic begins with it. A right is asked for before it is looked whether the topic exists, so that a refusal
neither says nor takes the time of that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from memd.admin.history import Named, named
from memd.entries import Draft, checked_topic_id
from memd.errors import BadQuestion, NotFound, Refused, StoreError, UnknownTopic
from memd.principals import Principal, Right
from memd.wording import no_topic

if TYPE_CHECKING:  # a command reads the declarations of operations, and needs none of these
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
    from memd.store.store import Snapshot, Store, TopicLog
    from memd.telemetry.events import Events
    from memd.telemetry.tasks import Tasks

Result = TypeVar("Result")


class DaemonParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts; a daemon has more of them."""

    config: Config
    base_url: str
    """Where clients find the model."""
    own_url: str
    """Where memd's own page and routes are."""
    local_url: str
    """The same, by an IP address of this machine."""
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
    backup: BucketTender | None
    cache_bytes: Callable[[], int]
    """Bytes in the caches of parsed messages, their token counts, and entries that were read."""
    upstreams: Callable[[], list[UpstreamHealth]]
    """The model servers as they are seen now, in the order of the settings."""
    budget: Callable[[], Awaitable[Budget]]
    """The budget that a prompt to the present upstream model would get."""
    exposition: Callable[[str], Awaitable[tuple[bytes, str]]]
    """The metrics in the format that an `Accept` header asks for, and the content type."""
    inquiry: Inquiry | None = None
    """In a cluster, of one request: a look at the shared log since it came."""

    @property
    def principals(self) -> Principals:
        """Who may use it."""
        return self.token_watch.principals

    @property
    def name(self) -> str:
        """This daemon's in a cluster; empty: it is alone."""
        return "" if self.store.kept is None else self.own_url

    @asynccontextmanager
    async def held(
        self,
        names: Sequence[str],
        who: Principal,
        rights: Sequence[Right] = ("read",),
        refused: Refused | None = None,
    ) -> AsyncIterator[list[Topic]]:
        """Hold the topics of these names, or if there are none all in which `who` has one of the rights, open while the
        block runs. `refused`: see `Topics.readable`.

        Raises:
            Forbidden: `who` does not have the first right in one of them.
            BadTopicId, BadQuestion: there is no such topic.
            StoreError: a topic cannot be read.
        """
        wanted = [checked_topic_id(name) for name in names]
        for name in wanted:
            who.check(rights[0], name)
        if not wanted:
            there = await asyncio.get_running_loop().run_in_executor(None, self.store.topic_ids)
            wanted = [name for name in there if any(who.may(right, name) for right in rights)]
        async with self.topics.held(wanted, self.topics.ask(wanted, self.inquiry), refused) as found:
            if missing := {*wanted} - {topic.id for topic in found} - {*(refused or ())}:
                raise BadQuestion(no_topic(min(missing)))
            yield found

    async def read(self, names: Sequence[str], who: Principal, work: Callable[[list[Snapshot]], Result]) -> Result:
        """Do work, in a thread, on snapshots of the topics of these names, or of all that `who` may read and that can
        be read; raises as `held`."""
        async with self.held(names, who, refused=None if names else {}) as found:
            return await asyncio.to_thread(work, [topic.log.snapshot() for topic in found])

    def held_if_there(
        self, names: Sequence[str], who: Principal, refused: Refused
    ) -> AbstractAsyncContextManager[list[Topic]]:
        """Hold those of these topics that still exist and `who` may read open while the block runs. `refused`: see
        `Topics.readable`."""
        return self.topics.held([one for one in names if who.may("read", one)], refused=refused)

    async def named(
        self, found: Sequence[Topic], chunk_ids: Iterable[str], names: Sequence[str], who: Principal
    ) -> list[Named]:
        """Find chunks in topics that are held, see `history.named`. If they were asked for by these names, and another
        one that `who` may read has the chunk, the error says so."""

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
        """Hold the topic of this name open while the block runs.

        Args:
            creating: one that does not exist yet is created.

        Raises:
            Forbidden: `who` does not have the right in it.
            BadTopicId, UnknownTopic: there is no such topic.
            StoreError: it cannot be read or created.
        """
        who.check(right, checked_topic_id(name))
        topic = await (self.topics.get if creating else self.topics.existing)(name)
        if topic is None:
            raise UnknownTopic(no_topic(name))
        with topic.used() if creating else topic.held():
            yield topic


def check_changes(who: Principal, topic: TopicLog, drafts: Iterable[Draft], author: str) -> None:
    """Make sure that `who` may append these entries where they change chunks of others in the topic, or what was said:
    others may have said the same, and it is kept once. `author`: `who` as the log names them. Raises Forbidden: `who`
    has no right to correct there; StoreError: an entry cannot be read."""
    if not who.may("correct", topic.topic_id):
        snapshot = topic.snapshot()
        known = (snapshot.find(uuid) for uuid in {draft.uuid for draft in drafts})
        if any(one is not None and (one.author != author or (one.kind == "turn" and one.digests)) for one in known):
            who.check("correct", topic.topic_id)
