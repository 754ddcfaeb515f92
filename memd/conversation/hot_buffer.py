"""The hot buffer of one topic: its open conversations, their blocks, and the ids that were recently injected.

Rule: every change is an event that is applied through one door and kept for the journal, so replaying the journal
gives back the same buffer, byte for byte the same prompts. This module decides nothing about time, tokens or disks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import msgspec

from memd.conversation.conversation import Buffered, Conversation, TurnKey
from memd.conversation.events import (
    Abandoned,
    Appended,
    Arrived,
    Closed,
    Event,
    Forked,
    Injected,
    Marked,
    Opened,
    Placed,
    Removed,
)
from memd.conversation.matching import SHARED_MIN, Match, match
from memd.messages import Block, BlockChunk, Message, chain_all

ARRIVALS_KEPT = 16
"""Recent requests remembered per conversation: more than a client retries at once."""


class Arrival(msgspec.Struct, frozen=True):
    """What a request turned out to be. Its message `i` is at `offset + i` of the conversation (see `Match.head`)."""

    conversation: Conversation
    """It ends with the request's last message, and the request's open turn is in its visible part."""
    offset: int
    end: int
    """The conversation's length as far as this request knows it; the reply goes here."""
    opened: bool
    head: int = 0
    former: Conversation | None = None
    """The longer conversation that this request goes back in: a retry or, once another answer comes, given up."""


class HotBuffer:
    """All open conversations of a topic, most recently used last."""

    def __init__(self, new_id: Callable[[], str], window_turns: int) -> None:
        self._new_id = new_id
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._injected: deque[list[BlockChunk]] = deque(maxlen=window_turns)
        self._unsaved: list[Event] = []

    # -- what requests do ---------------------------------------------------------------------------------------

    def receive(
        self,
        messages: Sequence[Message],
        content_digests: Sequence[bytes],
        tokens: Sequence[int],
        *,
        session: str | None,
        now: float,
        thin: bool = False,
    ) -> Arrival:
        """Find or open the conversation of a request and append what is new in it.

        Args:
            messages, content_digests, tokens: the request's messages after the leading system messages, in parallel.
            session: the client's own name for the conversation, if it gave one.
            now: seconds of a clock that survives a restart.
            thin: the client sends only what is new.
        """
        found = match(reversed(self._conversations.values()), content_digests, session, thin=thin)
        parent, kept = found.conversation, _kept(found, messages)
        conversation = self._open(session, now) if parent is None else self._fork(parent, found.offset + kept)
        self._append(conversation, messages[kept:], content_digests[kept:], tokens[kept:], now)
        end = found.offset + len(messages)
        arrival = Arrival(conversation, found.offset, end, opened=parent is None, head=found.head)
        if parent is None or parent is conversation:
            return arrival
        if found.known < len(messages):
            self._abandon(parent, found.offset + kept)
            return arrival
        return msgspec.structs.replace(arrival, former=parent)

    def glance(
        self,
        messages: Sequence[Message],
        content_digests: Sequence[bytes],
        tokens: Sequence[int],
        *,
        session: str | None,
        thin: bool = False,
    ) -> Arrival:
        """Like `receive`, for a request that must leave no trace: the conversation it gets is a detached copy."""
        found = match(reversed(self._conversations.values()), content_digests, session, thin=thin)
        parent, kept = found.conversation, _kept(found, messages)
        copy = Conversation("glance", session) if parent is None else parent.fork("glance", found.offset + kept)
        copy.messages += _buffered(copy, messages[kept:], content_digests[kept:], tokens[kept:])
        return Arrival(copy, found.offset, len(copy), opened=parent is None, head=found.head)

    def reply(self, arrival: Arrival, message: Message, tokens: int, now: float) -> Conversation:
        """Append the model's answer and return the conversation that has it now.

        Another answer than before at the same place (regenerate) is a branch of its own, and the branch with the former
        answer is given up. So is an answer for which the client did not wait, but then the client's branch stays.
        """
        conversation, former, position = arrival.conversation, arrival.former, arrival.end
        answer = [message], [message.content_digest], [tokens]
        if position == len(conversation):
            if former is not None and self.is_open(former):
                if former.messages[position].content_digest == message.content_digest:
                    self.close(conversation)  # a retry with the same answer: nothing new
                    return former
                self._abandon(former, position)
            self._append(conversation, *answer, now)
            return conversation
        there = conversation.messages[position]
        if there.content_digest == message.content_digest:
            return conversation
        branch = self._fork(conversation, position)
        self._append(branch, *answer, now)
        if there.message is not None and there.message.role == "assistant":
            self._abandon(conversation, position)
        else:
            self._append(conversation, [], [], [], conversation.used_at)  # stays the one used last
        return branch

    def is_retry(self, conversation: Conversation, key: TurnKey, now: float, freeze_seconds: float) -> bool:
        """Whether this very request came before, less than `freeze_seconds` ago; if not, it counts as arrived now."""
        first = conversation.arrivals.get(key)
        if first is not None and now - first <= freeze_seconds:
            return True
        self._record(Arrived(conversation.id, key, now))
        return False

    def place(self, conversation: Conversation, digest: bytes, block: Block) -> None:
        """Keep `block` in front of the user message with that digest for as long as the message is visible."""
        self._record(Placed(conversation.id, digest, block))

    def remove_blocks(self, conversation: Conversation, digests: Sequence[bytes]) -> None:
        """Take blocks out of the prompt for good; digests without a block are ignored."""
        present = [digest for digest in digests if digest in conversation.blocks]
        if present:
            self._record(Removed(conversation.id, present))

    def injected(self, chunks: Sequence[BlockChunk]) -> None:
        """Note what one turn showed the model: these ids may be corrected now."""
        self._record(Injected(list(chunks)))

    def resolve(self, shown_id: str) -> BlockChunk | None:
        """The recently injected chunk that was shown under this id, or has it as its full uuid; newest first."""
        wanted = shown_id.replace("-", "").lower()
        for chunks in reversed(self._injected):
            for chunk in chunks:
                if wanted in (chunk.shown_id, chunk.uuid.hex()):
                    return chunk
        return None

    # -- what the archiver does ---------------------------------------------------------------------------------

    def mark(self, conversation: Conversation, *, stored: int = 0, left_out: int = 0) -> None:
        """Advance the marks; they never go back."""
        self._record(Marked(conversation.id, max(stored, conversation.stored), max(left_out, conversation.left_out)))

    def close(self, conversation: Conversation) -> None:
        """Forget a conversation; what it held must be in the log or abandoned."""
        self._record(Closed(conversation.id))

    def conversations(self) -> list[Conversation]:
        """All open conversations, least recently used first."""
        return list(self._conversations.values())

    @property
    def has_unstored(self) -> bool:
        """Whether a conversation has messages that are only here and still wanted."""
        return any(not one.abandoned and one.stored < len(one) for one in self._conversations.values())

    def is_open(self, conversation: Conversation) -> bool:
        """False once it was closed while somebody else still held it."""
        return self._conversations.get(conversation.id) is conversation

    # -- journal ------------------------------------------------------------------------------------------------

    def take_unsaved(self) -> list[Event]:
        """The events since the last call, for the journal; in order."""
        events, self._unsaved = self._unsaved, []
        return events

    def replay(self, events: Sequence[Event]) -> None:
        """Rebuild from a journal. Events about conversations that are no longer there are skipped."""
        for event in events:
            self._apply(event)

    def as_events(self) -> list[Event]:
        """The shortest journal that gives this buffer."""
        events: list[Event] = [Injected(chunks) for chunks in self._injected]
        for conversation in self._conversations.values():
            name = conversation.id
            events.append(Opened(name, conversation.session, conversation.used_at))
            events.append(Appended(name, list(conversation.messages), conversation.used_at))
            if conversation.abandoned:
                events.append(Abandoned(name))
            events.append(Marked(name, conversation.stored, conversation.left_out))
            events += [Arrived(name, key, at) for key, at in conversation.arrivals.items()]
            events += [Placed(name, digest, block) for digest, block in conversation.blocks.items()]
        return events

    # -- private ------------------------------------------------------------------------------------------------

    def _open(self, session: str | None, now: float) -> Conversation:
        name = self._new_id()
        self._record(Opened(name, session, now))
        return self._conversations[name]

    def _fork(self, conversation: Conversation, position: int) -> Conversation:
        """A conversation that ends at `position`: this one if it does."""
        if position == len(conversation):
            return conversation
        name = self._new_id()
        self._record(Forked(name, conversation.id, position))
        return self._conversations[name]

    def _abandon(self, conversation: Conversation, position: int) -> None:
        """Give up what stands behind `position`, unless it is more than an answer and hardly anything stands before it:
        then the client that goes on elsewhere may be another one, which only began with the same words."""
        if position >= SHARED_MIN or len(conversation) == position + 1:
            self._record(Abandoned(conversation.id))

    def _append(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        content_digests: Sequence[bytes],
        tokens: Sequence[int],
        now: float,
    ) -> None:
        added = _buffered(conversation, messages, content_digests, tokens)
        self._record(Appended(conversation.id, added, now))

    def _record(self, event: Event) -> None:
        self._apply(event)
        self._unsaved.append(event)

    def _apply(self, event: Event) -> None:
        if isinstance(event, Injected):
            self._injected.append(event.chunks)
            return
        if isinstance(event, Opened):
            conversation = Conversation(event.conversation, event.session)
            conversation.used_at = event.at
            self._conversations[event.conversation] = conversation
            return
        subject = self._conversations.get(event.parent if isinstance(event, Forked) else event.conversation)
        if subject is None:
            return
        if isinstance(event, Forked):
            self._conversations[event.conversation] = subject.fork(event.conversation, event.position)
        elif isinstance(event, Closed):
            del self._conversations[event.conversation]
        else:
            self._apply_to(subject, event)

    def _apply_to(
        self, conversation: Conversation, event: Appended | Abandoned | Marked | Arrived | Placed | Removed
    ) -> None:
        if isinstance(event, Appended):
            conversation.messages += event.messages
            conversation.used_at = event.at
            conversation.abandoned = False
            self._conversations.move_to_end(conversation.id)
        elif isinstance(event, Abandoned):
            conversation.abandoned = True
        elif isinstance(event, Marked):
            conversation.mark_stored(min(event.stored, len(conversation)))
            conversation.mark_left_out(min(event.left_out, conversation.stored))
        elif isinstance(event, Arrived):
            conversation.arrivals.pop(event.key, None)
            conversation.arrivals[event.key] = event.at
            while len(conversation.arrivals) > ARRIVALS_KEPT:
                del conversation.arrivals[next(iter(conversation.arrivals))]
        elif isinstance(event, Placed):
            conversation.blocks[event.digest] = event.block
        else:
            for digest in event.digests:
                conversation.blocks.pop(digest, None)


def _kept(found: Match, messages: Sequence[Message]) -> int:
    """How many of a request's messages stay where the conversation has them.

    Those that it knows, except that the request's open turn must not be out of the prompt: a request that goes back so
    far brings that turn along as new. (A head that the client keeps stays in the prompt as long as it does so.)
    """
    if found.conversation is None:
        return 0
    visible_from = found.conversation.left_out - found.offset
    opened = max(0, len(messages) - 1)
    while opened > 0 and messages[opened].role != "user":
        opened -= 1
    return min(found.known, opened) if found.head <= opened < visible_from else found.known


def _buffered(
    conversation: Conversation, messages: Sequence[Message], content_digests: Sequence[bytes], tokens: Sequence[int]
) -> list[Buffered]:
    digests = chain_all(content_digests, conversation.end_digest)
    return [
        Buffered(digest, content_digest, count, message)
        for digest, content_digest, count, message in zip(digests, content_digests, tokens, messages, strict=True)
    ]
