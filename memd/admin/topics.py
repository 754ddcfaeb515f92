"""Topics by name, kept open while a route reads or corrects them.

Rule: an unknown name is the caller's mistake, except where a note is put down: its topic begins with it. A right is
asked for before it is looked whether the topic exists, so that a refusal neither says nor takes the time of that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar

from memd.entries import Draft, checked_topic_id
from memd.errors import BadQuestion, UnknownTopic
from memd.ingest.topics import Topic, Topics
from memd.principals import Principal, Right
from memd.store.store import TopicLog
from memd.wording import no_topic

_left_out: ContextVar[list[str] | None] = ContextVar("memd_left_out", default=None)


@contextlib.contextmanager
def noting_left_out() -> Iterator[list[str]]:
    """Collect the topics that are left out of answers about several while the block runs: they cannot be read now."""
    noted: list[str] = []
    before = _left_out.set(noted)
    try:
        yield noted
    finally:
        _left_out.reset(before)


def _note_left_out(topic_ids: Sequence[str]) -> None:
    if (noted := _left_out.get()) is not None:
        noted += topic_ids


class NamedTopics:
    """Finds topics by their names."""

    def __init__(self, topics: Topics, topic_ids: Callable[[], list[str]]) -> None:
        """`topic_ids` lists the topics on disk; it is called in a thread."""
        self._topics = topics
        self._topic_ids = topic_ids

    @property
    def is_shared(self) -> bool:
        """Whether there may be other daemons that have topics."""
        return self._topics.replicas is not None

    @asynccontextmanager
    async def held(
        self, names: Sequence[str], who: Principal, rights: Sequence[Right] = ("read",)
    ) -> AsyncIterator[list[Topic]]:
        """Hold the topics of these names, or if there are none all in which `who` has one of the rights, open while the
        block runs. In a cluster several are only to be read (`Topic.is_writable`).

        Raises:
            Forbidden: `who` does not have the first right in one of them.
            BadTopicId, BadQuestion: there is no such topic.
            TopicLost: one is another daemon's by now, and what was read in the block may be old.
            StoreError: a topic cannot be read.
        """
        named = [checked_topic_id(name) for name in names]
        for name in named:
            who.check(rights[0], name)
        async with contextlib.AsyncExitStack() as held:
            wanted = named or await self._allowed(who, rights)
            if self.is_shared and len(named) != 1:
                found = await self._readable(wanted, are_named=bool(named))
            else:
                found = [await self._existing(name) for name in wanted]
            for topic in found:
                held.enter_context(topic.held())
            yield found
            if tuple(rights) == ("read",):  # what is written is fenced by itself
                for topic in found:
                    await self._topics.check(topic)

    @asynccontextmanager
    async def held_if_there(self, names: Sequence[str], who: Principal) -> AsyncIterator[list[Topic]]:
        """Hold those of these topics that still exist and `who` may read open while the block runs.

        Raises:
            StoreError: a topic cannot be read.
        """
        found = (await self._topics.readable([one for one in names if who.may("read", one)])).topics
        with contextlib.ExitStack() as held:
            for topic in found:
                held.enter_context(topic.held())
            yield list(found)

    @asynccontextmanager
    async def held_one(self, name: str, who: Principal, right: Right) -> AsyncIterator[Topic]:
        """Hold the topic of this name open while the block runs.

        Raises:
            Forbidden: `who` does not have the right in it.
            BadTopicId, UnknownTopic: there is no such topic.
            StoreError: it cannot be read.
        """
        who.check(right, checked_topic_id(name))
        topic = await self._topics.existing(name)
        if topic is None:
            raise UnknownTopic(no_topic(name))
        with topic.held():
            yield topic
            if right == "read":
                await self._topics.check(topic)

    @asynccontextmanager
    async def held_or_new(self, name: str, who: Principal) -> AsyncIterator[Topic]:
        """Hold the topic of this name open while the block runs; one that does not exist yet is created.

        Raises:
            Forbidden: `who` may not write there.
            BadTopicId: it is no topic's name.
            StoreError: it cannot be read or created.
        """
        who.check("write", checked_topic_id(name))
        topic = await self._topics.get(name)
        with topic.used():
            yield topic

    async def _existing(self, name: str) -> Topic:
        topic = await self._topics.existing(name)
        if topic is None:
            raise BadQuestion(no_topic(name))
        return topic

    async def _readable(self, names: Sequence[str], *, are_named: bool) -> list[Topic]:
        """Those of several topics that can be read now; it is noted which are left out."""
        readable = await self._topics.readable(names)
        found = {topic.id: topic for topic in readable.topics}
        missing = [name for name in names if name not in found]
        if missing and are_named and readable.is_fresh:
            raise BadQuestion(no_topic(missing[0]))
        _note_left_out(missing)
        return list(found.values())

    async def _allowed(self, who: Principal, rights: Sequence[Right]) -> list[str]:
        there = await asyncio.get_running_loop().run_in_executor(None, self._topic_ids)
        return [name for name in there if any(who.may(right, name) for right in rights)]


def check_changes(who: Principal, topic: TopicLog, drafts: Iterable[Draft], author: str) -> None:
    """Make sure that `who` may append these entries where they change chunks of others in the topic.

    Args:
        author: `who` as the log names them.

    Raises:
        Forbidden: `who` has no right to correct there.
        StoreError: an entry cannot be read.
    """
    if not who.may("correct", topic.topic_id):
        snapshot = topic.snapshot()
        known = (snapshot.find(uuid) for uuid in {draft.uuid for draft in drafts})
        if any(one is not None and one.author != author for one in known):
            who.check("correct", topic.topic_id)
