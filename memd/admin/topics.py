"""Topics by name, kept open while a route reads or corrects them.

Rule: an unknown name is the caller's mistake, except where a note is put down: its topic begins with it. A right is
asked for before it is looked whether the topic exists, so that a refusal neither says nor takes the time of that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from memd.entries import Draft, checked_topic_id
from memd.errors import BadQuestion, UnknownTopic
from memd.ingest.topics import Topic, Topics
from memd.principals import Principal, Right
from memd.store.store import Snapshot, TopicLog
from memd.wording import no_topic

Result = TypeVar("Result")


class NamedTopics:
    """Finds topics by their names."""

    def __init__(self, topics: Topics, topic_ids: Callable[[], list[str]]) -> None:
        """`topic_ids` lists the topics on disk; it is called in a thread."""
        self._topics = topics
        self._topic_ids = topic_ids

    @asynccontextmanager
    async def held(
        self, names: Sequence[str], who: Principal, rights: Sequence[Right] = ("read",)
    ) -> AsyncIterator[list[Topic]]:
        """Hold the topics of these names, or if there are none all in which `who` has one of the rights, open while the
        block runs.

        Raises:
            Forbidden: `who` does not have the first right in one of them.
            BadTopicId, BadQuestion: there is no such topic.
            StoreError: a topic cannot be read.
        """
        named = [checked_topic_id(name) for name in names]
        for name in named:
            who.check(rights[0], name)
        async with contextlib.AsyncExitStack() as held:
            wanted = named or await self._allowed(who, rights)
            found = [await self._existing(name) for name in wanted]
            for topic in found:
                held.enter_context(topic.held())
            yield found

    async def read(self, names: Sequence[str], who: Principal, work: Callable[[list[Snapshot]], Result]) -> Result:
        """Do work, in a thread, on snapshots of the topics of these names, or of all that `who` may read; raises as
        `held`."""
        async with self.held(names, who) as found:
            return await asyncio.to_thread(work, [topic.log.snapshot() for topic in found])

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
