"""The first step of a turn: the conversation of a request, its new messages, whether it is a retry, and its prompt: the
visible messages, the memory blocks between them, and their tokens.

Rule: `readonly` leaves no trace: such a request gets a detached copy of its conversation. A prompt changes no
conversation. A position counts messages of the conversation, an index those of the request; they differ by `offset` and
the leading system messages. Instructions at the end have no position.

A thin client sends only new messages, and memd puts the buffered turns in front. memd must make that prompt valid for a
strict chat template even after failed requests, stopped tool loops or simultaneous requests. It mends only the prompt;
the conversation keeps everything that was said. The client's new messages are never mended.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from memd.clock import steady_now
from memd.conversation import compaction
from memd.conversation.conversation import History, TurnKey, is_answer
from memd.conversation.events import ConversationEvent, apply
from memd.conversation.hot_buffer import APART, Arrival
from memd.conversation.tokens import TokenCounter
from memd.errors import Refused
from memd.ingest.topic import Inquiry, Topic
from memd.ingest.topics import Topics
from memd.messages import (
    RESULT_ROLES,
    ROOT_DIGEST,
    Block,
    BlockChunk,
    Message,
    Speech,
    ToolCall,
    chain_all,
    leading_count,
    spoken_end,
)
from memd.proxy.reading import Asked
from memd.proxy.upstream.pool import Assignment, Hints, UpstreamPool, trail_of
from memd.store.erasure import ForbiddenText
from memd.wire.api import ModelRequest, without_own_blocks

UNANSWERED = Message("assistant", "[no answer]")
"""Inserted between results that the model never answered and the user's next message."""
_GONE = Message("user", "")
"""Stands in for a message that has left the conversation; the prompt leaves it out too."""


class Front(msgspec.Struct, frozen=True):
    """The buffered turns that memd puts in front of a thin client's messages."""

    messages: tuple[tuple[int, Message], ...] = ()
    """Each with its position in the conversation; -1 for one that memd adds."""
    joined: str = ""
    """Text of unanswered user messages, to put in front of the client's first message."""

    @property
    def positions(self) -> frozenset[int]:
        """Positions of those messages."""
        return frozenset(position for position, _ in self.messages)


def _mended(shown: Sequence[tuple[int, Message]], live_end: int) -> Front:
    """Make a history, given as positions and messages, valid for a strict template; messages from `live_end` on are the
    client's and stay. A call stands in the answer before its result, whenever that comes; without one it is left
    out."""
    called: dict[str, deque[ToolCall]] = {}  # the latest calls with each id, or without one, in order
    kept: list[tuple[int, Message, list[ToolCall]]] = []
    answer: list[ToolCall] | None = None  # the calls of the answer before the present results, where memd writes it
    for position, message in shown:
        is_live = position >= live_end
        called |= {call.id: deque() for call in message.tool_calls}
        for call in message.tool_calls:
            called[call.id].append(call)
        calls = called.get(message.tool_call_id, deque())
        if message.role not in RESULT_ROLES:
            answer = [] if message.role == "assistant" and not is_live else None
        elif not (calls or is_live):
            continue
        elif calls and (answer is not None or not kept or kept[-1][0] < live_end):
            if answer is None:
                answer = []
                kept.append((-1, Message("assistant", ""), answer))
            answer.append(calls.popleft() if len(calls) > 1 else calls[0])
        kept.append((position, message, answer if message.role == "assistant" and answer is not None else []))
    front: list[tuple[int, Message]] = []
    joined = ""
    for position, message, calls_of in kept:
        if message.role == "assistant" and position < live_end:
            message = msgspec.structs.replace(message, tool_calls=tuple(calls_of))
            if not (message.text.strip() or calls_of):
                continue
        if message.role == "user" and front and front[-1][1].role == "user":
            joined = front.pop()[1].text
            message = msgspec.structs.replace(message, text=f"{joined}\n\n{message.text}")
        elif message.role == "user" and front and front[-1][1].role in RESULT_ROLES:
            front.append((-1, UNANSWERED))
        if position >= live_end:
            break
        front.append((position, message))
        joined = ""
    return Front(tuple(front), joined)


class Prompt:
    """A request in its conversation. Marks and blocks are looked up at each call, because compaction moves them."""

    def __init__(self, asked: Asked, arrival: Arrival, lead: int, standing_tokens: int) -> None:
        """The prompt leaves out blocks with chunks of topics that the asking principal may not read."""
        self._api = asked.api
        self._front = Front()
        self._request = asked.request
        self._arrival = arrival
        self.conversation = arrival.conversation
        """The conversation that the request belongs to."""
        self._live_end = arrival.offset if asked.is_thin else 0
        """Positions before it are history that memd supplies for a thin client."""
        self._lead = lead
        self._who = asked.who
        self.standing_tokens = standing_tokens
        """Raw tokens of the system messages at the front and at the end, and the tool definitions."""
        self._has_attachments = any(message.attachments for message in self._request.messages)
        self._listed: tuple[int, list[int], int] = -1, [], 0
        self._placed: tuple[tuple[int, tuple[tuple[bytes, Block], ...]], list[tuple[int, Block]]] = (-1, ()), []
        self.turn_position = next(filter(self._opens_turn, reversed(self._visible())), None)
        """Position of the message that opened the current turn; None if no user message is visible."""
        opened = None if self.turn_position is None else self.conversation.messages[self.turn_position]
        self.turn_digest = None if opened is None else opened.digest
        """The digest of the user message that opened the turn."""

    def return_position(self, *, whole_max: float, part_max: float) -> int | None:
        """See `compaction.return_position`; None if the request goes on or lacks part of the history."""
        arrival, conversation = self._arrival, self.conversation
        if not arrival.goes_back or arrival.head or self._live_end or not conversation.left_out_count():
            return None
        sent = range(arrival.offset, min(arrival.end, len(conversation)))
        opened = [position for position in sent if self._message(position).opens_turn]
        return compaction.return_position(conversation, opened, arrival.offset, whole_max=whole_max, part_max=part_max)

    def texts_from(self, position: int) -> dict[int, Message]:
        """Return the messages from a position on whose text the conversation has dropped, by position."""
        messages = self.conversation.messages
        return {one: self._message(one) for one in range(position, self._arrival.end) if messages[one].message is None}

    def user_texts(self) -> Iterator[str]:
        """Yield the words of visible user messages, newest first, without messages that only programs wrote."""
        return (message.said for message in self._newest_first() if message.opens_turn and message.said.strip())

    def asks_erased(self, forbidden: ForbiddenText) -> bool:
        """Return whether a message since the latest user message was erased here or is forbidden. The client may still
        send erased words to the model, but no record of the request may contain them."""
        for position in reversed(self._visible()):
            item, sent = self.conversation.messages[position], self._message(position)
            is_gone = item.message is not None and not item.message.said.strip() and bool(sent.said.strip())
            if is_gone or forbidden.has_message(item.identity, sent):
                return True
            if sent.opens_turn and sent.said.strip():
                return False
        return False

    def latest_step(self) -> Message | None:
        """Return the assistant's latest message in the open turn, or None."""
        opened = None if self.turn_position is None else self._message(self.turn_position)
        for message in self._newest_first():
            if is_answer(message):
                return message
            if message is opened:
                return None
        return None

    @property
    def last_digest(self) -> bytes:
        """The digest of the last message; being chained, it identifies the whole list."""
        return self.conversation.messages[self._arrival.end - 1].digest if self._arrival.end else ROOT_DIGEST

    @property
    def is_step(self) -> bool:
        """True for a later step of a tool loop whose turn already has its block."""
        begun = self.turn_position is not None and self.turn_position < self._arrival.end - 1
        return begun and self.has_block

    @property
    def has_results(self) -> bool:
        """True if the open turn already has tool results, so that this is a later step of its loop."""
        behind = (p for p in self._visible() if self.turn_position is not None and p > self.turn_position)
        return any(one.role in RESULT_ROLES or one.is_result for one in map(self._message, behind))

    @property
    def has_block(self) -> bool:
        """True once memory was recalled for the turn; its block may be empty."""
        return self.turn_digest in self.conversation.blocks

    def attachments(self) -> int:
        """Return the number of images in the prompt; their token count depends on the model."""
        if not self._has_attachments:
            return 0
        return sum(len(self._message(one).attachments) for one in self._visible() if one >= self._live_end)

    def visible_digests(self) -> set[bytes]:
        """Return the digests of the messages that are complete in the prompt."""
        return self.conversation.digests_shown(self._visible())

    def blocks(self) -> list[tuple[int, Block]]:
        """Return the blocks in the prompt, each with the position of the message it precedes. Cached until the
        conversation changes, because a request asks nine times."""
        present = self.conversation.changes, tuple(self.conversation.blocks.items())
        if self._placed[0] != present:
            blocks = {digest: block for digest, block in present[1] if block.chunks and self._may_be_shown(block)}
            messages, visible = self.conversation.messages, self._visible() if blocks else []
            places = [position for position in visible if messages[position].digest in blocks]
            found = [(position, blocks[messages[position].digest]) for position in filter(self._opens_turn, places)]
            self._placed = present, found
        return self._placed[1]

    def chunks(self) -> list[BlockChunk]:
        """Return the chunks in those blocks."""
        return [chunk for _, block in self.blocks() for chunk in block.chunks]

    def left_out(self) -> int:
        """Return how many messages of the conversation up to this request are not in the prompt."""
        return self.conversation.left_out_count(self._arrival.end)

    def replaced(self) -> int:
        """Return how many results are shortened to a line."""
        return sum(position < self._arrival.end for position in self.conversation.lines)

    def block_tokens(self) -> int:
        """Return the raw tokens of those blocks."""
        return sum(block.tokens for _, block in self.blocks())

    def tokens(self) -> int:
        """Return the raw tokens of the whole prompt."""
        self._visible()
        return self.standing_tokens + self._listed[2] + self.block_tokens()

    def body(self, *, with_memory: bool = True) -> bytes:
        """Encode the body to forward."""
        blocks = {position: block.text for position, block in self.blocks()} if with_memory else {}
        visible, request, lines, gone = self._visible(), self._request, self.conversation.lines, list[int]()
        front = {position: self._lead + number for number, (position, _) in enumerate(self._front.messages)}
        if self._live_end:
            visible = [position for position in visible if position >= self._live_end]
            request = self._behind([message for _, message in self._front.messages])
        sent = range(self._lead, self._lead + self._arrival.end - self._arrival.offset)
        if len(visible) < len(sent):
            shown = set(map(self._index, visible))
            gone = [index for index in sent if index not in shown]
        put = len(self._front.messages)
        replaced = {put + self._index(one): lines[one].text for one in visible if one in lines} if lines else {}
        in_front = {front.get(one, put + self._index(one)): text for one, text in blocks.items()}
        leave_out = [put + index for index in gone]
        return self._api.encode(request, leave_out=leave_out, replaced=replaced, blocks=in_front)

    def _behind(self, live: list[Message]) -> ModelRequest:
        """Return the request with the buffered turns inserted after its leading messages."""
        api, request, lead = self._api, self._request, self._lead
        raws = [*request.raw_messages[:lead], *map(api.encode_message, live), *request.raw_messages[lead:]]
        if self._front.joined:
            raws[lead + len(live)] = api.in_front(raws[lead + len(live)], self._front.joined)
        continues = map(api.continues, live, [None, *live])
        return msgspec.structs.replace(
            request,
            original=None,
            raw_messages=raws,
            messages=[*request.messages[:lead], *live, *request.messages[lead:]],
            continues=[*request.continues[:lead], *continues, *request.continues[lead:]],
        )

    @property
    def turn_block(self) -> Block | None:
        """The turn's block; None if it has none or it may not be shown."""
        block = None if self.turn_digest is None else self.conversation.blocks.get(self.turn_digest)
        return block if block is not None and self._may_be_shown(block) else None

    def _may_be_shown(self, block: Block) -> bool:
        """Return whether a block has chunks, all of them readable, and was made for the asking principal."""
        topic_ids = {chunk.topic_id for chunk in block.chunks}
        is_own = (block.reader or "") == self._who.author
        return bool(topic_ids) and is_own and all(self._who.may("read", one) for one in topic_ids)

    def _visible(self) -> list[int]:
        """Return positions of visible messages: the head that the client keeps, and those that did not leave. Cached
        with their tokens until the conversation changes: there may be thousands, and a request asks ten times."""
        conversation, head = self.conversation, self._arrival.head
        if self._listed[0] != conversation.changes:
            first, kept = (0, range(0)) if self._live_end else (self._arrival.offset + head, range(head))
            behind = [position for position in conversation.visible_positions(self._arrival.end) if position >= first]
            if self._live_end:
                self._front = _mended([(position, self._shown(position)) for position in behind], self._live_end)
            tokens = conversation.tokens_of(behind) + sum([conversation.messages[position].tokens for position in kept])
            self._listed = conversation.changes, [*kept, *behind], tokens
        return self._listed[1]

    def _newest_first(self) -> Iterator[Message]:
        return (self._message(position) for position in reversed(self._visible()))

    def _opens_turn(self, position: int) -> bool:
        is_shown = position >= self._live_end or position in self._front.positions
        return is_shown and self._message(position).opens_turn

    def _shown(self, position: int) -> Message:
        """Return a message, with the line that replaces its text, if any."""
        message, line = self._message(position), self.conversation.lines.get(position)
        return message if line is None else msgspec.structs.replace(message, text=line.text)

    def _message(self, position: int) -> Message:
        if position < self._live_end:
            return self.conversation.messages[position].message or _GONE
        return self._request.messages[self._index(position)]

    def _index(self, position: int) -> int:
        return self._lead + (position if position < self._arrival.head else position - self._arrival.offset)


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
