"""The first step of a turn: find the conversation of a request, its new messages, and whether it is a retry.

Rule: `readonly` leaves no trace: such a request gets a detached copy of its conversation.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from memd.clock import steady_now
from memd.conversation.conversation import History, TurnKey
from memd.conversation.events import ConversationEvent, apply
from memd.conversation.hot_buffer import APART, Arrival
from memd.conversation.tokens import TokenCounter
from memd.errors import Refused
from memd.ingest.topic import Inquiry, Topic
from memd.ingest.topics import Topics
from memd.messages import Block, Message, Speech, chain_all, leading_count, spoken_end
from memd.proxy.prompt import Prompt
from memd.proxy.reading import Asked
from memd.proxy.upstream.pool import Assignment, Hints, UpstreamPool, trail_of
from memd.wire.api import ModelRequest, without_own_blocks

LOOKED_UP_AT_ONCE = 100
"""Limit on new messages looked up in the log on the event loop; a thousand take 20 ms."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A request in its conversation."""

    asked: Asked
    assignment: Assignment
    """The model server for the request; must be released."""
    topic: Topic
    related: tuple[Topic, ...]
    is_fresh: bool
    """False if a related topic could not be read or, in a cluster, could not be brought up to date."""
    at: int
    """Microseconds since the epoch at which it arrived."""
    arrival: Arrival
    """The place of the reply."""
    prompt: Prompt
    key: TurnKey | None
    """Identifies retries of the request; None in `readonly`, which applies nothing."""
    is_retry: bool
    """The same request arrived a moment ago."""
    head: int
    """The log's head when it arrived for the first time."""
    needs_block: bool
    """Memory is recalled: this is neither a step of a tool loop nor a retry whose block is still valid."""
    is_step: bool
    """A later step of a tool loop."""

    @property
    def request(self) -> ModelRequest:
        """The request as parsed by its API's module."""
        return self.asked.request

    @property
    def is_traced(self) -> bool:
        """True if the request may leave a trace."""
        return self.asked.mode == "full"

    @property
    def replaced(self) -> frozenset[bytes]:
        """Identities of the answers that the sender got in this turn before, which are no memory for it. But a single
        question that comes again much later begins a new chat."""
        one = self.prompt.conversation
        is_same = (self.is_retry or self.arrival.end > 1) and one.author == self.asked.who.author
        return one.replaced.get(self.prompt.turn_digest or b"", frozenset()) if is_same else frozenset()

    def record(self, event: ConversationEvent) -> None:
        """Apply an event to its conversation, in the buffer or in the detached copy."""
        if self.is_traced:
            self.topic.buffer.record(event)
        else:
            apply(event, self.prompt.conversation)

    def log_fields(self, error: Exception | None = None) -> dict[str, object]:
        """Return the fields of a log line about the request."""
        return {"turn": self.asked.turn_id, "topic": self.topic.id, "error": error}


class Receiver(msgspec.Struct, frozen=True):
    """Finds the conversations of requests."""

    topics: Topics
    pool: UpstreamPool
    counter: TokenCounter
    speech: Speech
    retry_seconds: float
    """The same request within this time counts as a retry."""
    global_topics: tuple[str, ...]
    """Topics related to every topic."""

    def read_by(self, asked: Asked) -> list[str]:
        """Return the topics that a request may read: its own and the related ones, each once."""
        named = () if asked.request.memory_in is None else asked.request.memory_in.related_topic_ids
        ids = dict.fromkeys((asked.topic_id, *named, *self.global_topics))
        return [topic_id for topic_id in ids if topic_id == asked.topic_id or asked.who.may("read", topic_id)]

    async def receive(self, asked: Asked, topic: Topic, inquiry: Inquiry | None) -> Received:
        """Find or open the conversation, and append the new messages; `inquiry`: see `Topic.follow`. Raises MemdError:
        a topic cannot be opened."""
        at, now = time.time_ns() // 1000, steady_now()
        request = without_own_blocks(asked.request, topic.buffer.has_placed, self.speech)
        asked = msgspec.structs.replace(asked, request=request)
        lead = leading_count(request.messages)
        end = len(request.messages) if asked.has_only_new else max(lead, spoken_end(request.messages))
        messages, digests = request.messages[lead:end], request.digests[lead:end]
        stored_as = partial(_stored_as, topic, messages, digests)
        if sum([1 + len(one.tool_calls) for one in request.messages[request.read_before :]]) > LOOKED_UP_AT_ONCE:
            stored_as = partial(list[bytes], await asyncio.to_thread(stored_as))
        session, author = asked.session, asked.who.author
        history = History(messages, digests, self.counter.messages, session, asked.has_only_new, author, stored_as)
        if asked.mode == "full":
            arrival = topic.buffer.receive(history, now, at, author)
        else:
            arrival = topic.buffer.glance(history)
        if asked.mode == "full" and arrival.leaves_unstored:
            await topic.make_durable()
        standing = [*request.messages[:lead], *request.messages[end:]]
        standing_tokens = sum(self.counter.messages(standing, [*request.digests[:lead], *request.digests[end:]]))
        standing_tokens += self.counter.estimate_again(request.standing_text)
        prompt = Prompt(asked, arrival, lead, standing_tokens)
        key, is_retry, head = None, False, 0
        if asked.mode == "full":
            memory_in = hashlib.blake2b(msgspec.msgpack.encode(request.memory_in), digest_size=16).digest()
            key = TurnKey(prompt.last_digest, memory_in)
            is_retry = topic.buffer.note_arrival(prompt.conversation, key, now, self.retry_seconds, topic.log.head)
            _, head = prompt.conversation.arrivals[key]
        # Unreadable related topics are treated as absent.
        refused: Refused = {}
        related = tuple(await self.topics.readable(self.read_by(asked)[1:], inquiry, refused))
        repeats = is_retry and prompt.has_block and _still_counts(prompt.turn_block, (topic, *related))
        return Received(
            asked=asked,
            assignment=self.pool.assign(partial(_hints, asked, arrival)),
            topic=topic,
            related=related,
            is_fresh=not refused and all(one.is_fresh for one in related),
            at=at,
            arrival=arrival,
            prompt=prompt,
            key=key,
            is_retry=is_retry,
            head=head,
            needs_block=not prompt.is_step and not repeats,
            is_step=prompt.has_results,
        )


def _hints(asked: Asked, arrival: Arrival) -> Hints:
    """Return the routing hints. They contain memd's conversation ids, which survive restarts and clients that trim."""
    conversation = arrival.conversation
    origin = () if conversation.origin is None else (conversation.origin[0],)
    names = [name for name in (conversation.id, *origin) if name != APART]
    sent = conversation.messages[arrival.offset : arrival.end]
    digests = [] if asked.has_only_new else [item.digest for item in sent]
    trail = trail_of(asked.request, names, digests, goes_on=asked.has_only_new and not arrival.opened)
    return Hints(model=asked.request.model, trail=trail, only_computes=True)


def _stored_as(topic: Topic, messages: Sequence[Message], digests: Sequence[bytes]) -> list[bytes]:
    """Return for each message the digest by which a log from before the normal form has it, or empty bytes."""
    former = [message.former_digest for message in messages]
    if former == list(digests):
        return []
    known, now = chain_all(former), chain_all(digests)
    return [
        old if old != new and topic.log.has_digest(old) and not topic.log.has_digest(new) else b""
        for old, new in zip(known, now, strict=True)
    ]


def _still_counts(block: Block | None, topics: Sequence[Topic]) -> bool:
    """Return whether a block has chunks and none of them was superseded or deprecated since, as far as these topics
    (its own first) show. An empty block does not count: an answer may have been stored since. A chunk without an entry
    is still pending, or from another topic."""
    if block is None or not block.chunks:
        return False
    snapshots = [topic.log.snapshot() for topic in topics]
    of_each = ([(one, list(one.places(chunk.uuid))) for one in snapshots] for chunk in block.chunks)
    known = (next((found for found in each if found[1]), None) for each in of_each)
    return all(found is None or any(map(found[0].is_live, found[1])) for found in known)
