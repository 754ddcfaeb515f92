"""The prompt of one request: its visible messages, the memory blocks between them, and their tokens.

Rule: nothing here changes a conversation. A position counts in the conversation, an index in the request; `offset` and
the leading system messages are the difference between the two.

A thin client sends only what is new: memd puts the buffered turns in front of it. memd wrote this prompt, so it is
valid for a strict chat template whatever happened before: failed requests, stopped tool loops, two requests at once.
What was said stays as it is in the conversation; only the prompt is mended. The client's own new messages are its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from memd.conversation import compaction
from memd.conversation.conversation import Conversation, is_answer
from memd.conversation.hot_buffer import Arrival
from memd.messages import RESULT_ROLES, ROOT_DIGEST, Block, BlockChunk, Message
from memd.principals import OWNER, Principal
from memd.store.erasure import ForbiddenText
from memd.wire.api import Api, ModelRequest

UNANSWERED = Message("assistant", "[no answer]")
"""Stands between results that the model did not come to answer and the user's next words."""
_GONE = Message("user", "")
"""The place of a message that has left the prompt, and leaves this one too."""


class Mended(msgspec.Struct, frozen=True):
    """The differences between the visible messages and those in the prompt, by position in the conversation."""

    joined: dict[int, str] = {}
    """Unanswered messages of a user before this one, whose own messages are not in the prompt: their text in front."""
    hidden: frozenset[int] = frozenset()
    """Not in the prompt: calls without all their results, and results without their calls."""
    covered: frozenset[int] = frozenset()
    """Not in the prompt as messages of their own, but as part of a later one (`joined`)."""
    bare: frozenset[int] = frozenset()
    """In the prompt without their calls, which have no results."""
    unanswered: tuple[int, ...] = ()
    """In front of these stands `UNANSWERED`; ascending."""

    def shift(self, position: int) -> int:
        """The number of messages that were put in before the message at this position."""
        return bisect_right(self.unanswered, position)


_NOTHING_MENDED = Mended()


class LiveTurns(msgspec.Struct, frozen=True):
    """A request with its history, which a client sends itself unless it is a thin one."""

    request: ModelRequest
    arrival: Arrival
    mended: Mended = _NOTHING_MENDED


def with_live_turns(api: Api, request: ModelRequest, arrival: Arrival, lead: int) -> LiveTurns:
    """Put the visible turns of the buffer in front of the request of a thin client, which sends only new messages."""
    conversation = arrival.conversation
    start = min(conversation.kept, default=conversation.left_out)
    live = conversation.messages[start : arrival.offset]
    messages = [_GONE if item.message is None else item.message for item in live] + request.messages[lead:]
    mended = _mended(conversation, range(start, arrival.offset), messages)
    raws = list(map(api.encode_message, messages[: len(live)])) + request.raw_messages[lead:]
    digests = [item.content_digest for item in live] + request.digests[lead:]
    continues = [*map(api.continues, messages[: len(live)], [None, *messages]), *request.continues[lead:]]
    history: list[tuple[bytes, Message, bytes, bool]] = []
    for position, (raw, message, digest, same) in enumerate(
        zip(raws, messages, digests, continues, strict=True), start
    ):
        if position in mended.bare:
            raw = api.encode_message(msgspec.structs.replace(message, tool_calls=()))
        if position in mended.joined:
            raw = api.in_front(raw, mended.joined[position])
        if position in mended.unanswered:
            history.append((api.encode_message(UNANSWERED), UNANSWERED, UNANSWERED.content_digest, False))
        history.append((raw, message, digest, same))
    completed = msgspec.structs.replace(
        request,
        original=None,
        raw_messages=[*request.raw_messages[:lead], *(msgspec.Raw(raw) for raw, _, _, _ in history)],
        messages=[*request.messages[:lead], *(message for _, message, _, _ in history)],
        digests=[*request.digests[:lead], *(digest for _, _, digest, _ in history)],
        continues=[*request.continues[:lead], *(same for _, _, _, same in history)],
    )
    return LiveTurns(completed, msgspec.structs.replace(arrival, offset=start), mended)


def _mended(conversation: Conversation, live: range, messages: Sequence[Message]) -> Mended:
    """Mend the live part of a history: `messages` from the position `live.start` on, the client's new ones included."""
    shown = [
        (position, message)
        for position, message in enumerate(messages, live.start)
        if position >= live.stop or conversation.is_visible(position)
    ]
    hidden, bare = _broken_calls(shown, live.stop)
    joined: dict[int, str] = {}
    covered: set[int] = set()
    unanswered: list[int] = []
    before: tuple[int, Message] | None = None
    for position, message in shown:
        if position in hidden:
            continue
        if before is not None and message.role == "user" and before[0] < live.stop:
            if before[1].role == "user":
                covered.add(before[0])
                joined[position] = "\n\n".join(filter(None, (joined.pop(before[0], ""), before[1].text)))
            elif before[1].role in RESULT_ROLES:
                unanswered.append(position)
        before = position, message
    return Mended(joined, frozenset(hidden), frozenset(covered), frozenset(bare), tuple(unanswered))


def _broken_calls(shown: Sequence[tuple[int, Message]], live_end: int) -> tuple[set[int], set[int]]:
    """The positions of what a strict template refuses: messages to leave out, and messages to show without calls. Calls
    at the very end may still get their results."""
    hidden: set[int] = set()
    bare: set[int] = set()
    at = 0
    while at < len(shown):
        position, message = shown[at]
        end = at + 1
        while end < len(shown) and shown[end][1].role in RESULT_ROLES:
            end += 1
        called = {call.id for call in message.tool_calls}
        results = shown[at + (message.role not in RESULT_ROLES) : end]
        missing = called - {result.tool_call_id for _, result in results}
        if missing and position < live_end and end < len(shown):
            (bare if message.text.strip() else hidden).add(position)
            called = set()
        hidden.update(place for place, one in results if place < live_end and one.tool_call_id not in called)
        at = end
    return hidden, bare


class Prompt:
    """A request in its conversation. Marks and blocks are looked up at each call, because compaction moves them."""

    def __init__(self, api: Api, live: LiveTurns, lead: int, standing_tokens: int, who: Principal = OWNER) -> None:
        """`who`: sees no blocks with chunks of topics that it may not read, though others of its conversation do."""
        self._api = api
        self._mended = live.mended
        self._request = live.request
        self._arrival = live.arrival
        self._lead = lead
        self._who = who
        self.standing_tokens = standing_tokens
        """Raw tokens of the leading system messages and the tool definitions."""
        self._has_attachments = any(message.attachments for message in self._request.messages)
        self._listed: tuple[int, list[int], int] = -1, [], 0
        self._placed: tuple[tuple[int, tuple[tuple[bytes, Block], ...]], list[tuple[int, Block]]] = (-1, ()), []
        self.turn_position = next(filter(self._opens_turn, reversed(self._visible())), None)
        """Where the open turn begins; None if no user message is visible."""

    @property
    def conversation(self) -> Conversation:
        """The conversation that the request belongs to."""
        return self._arrival.conversation

    @property
    def turn_digest(self) -> bytes | None:
        """The digest of the user message that opened the turn."""
        return None if self.turn_position is None else self.conversation.messages[self.turn_position].digest

    def return_position(self, *, whole_max: float, part_max: float) -> int | None:
        """See `compaction.return_position`; None where the request is no branch, or does not have the whole history."""
        arrival, conversation = self._arrival, self.conversation
        if not arrival.branched or arrival.head or self._mended.covered or not conversation.left_out_count():
            return None
        sent = range(arrival.offset, min(arrival.end, len(conversation)))
        opened = [position for position in sent if self._message(position).opens_turn]
        return compaction.return_position(conversation, opened, arrival.offset, whole_max=whole_max, part_max=part_max)

    def texts_from(self, position: int) -> dict[int, Message]:
        """By position: the messages from there on whose text the conversation does not have any more."""
        messages = self.conversation.messages
        return {one: self._message(one) for one in range(position, self._arrival.end) if messages[one].message is None}

    def user_texts(self) -> Iterator[str]:
        """The words of the visible user messages, newest first; messages that only programs wrote have none."""
        return (message.said for message in self._newest_first() if message.opens_turn and message.said.strip())

    def asks_erased(self, forbidden: ForbiddenText, texts: int) -> bool:
        """Whether something among the latest messages, up to so many of the user's, was erased here or is forbidden. A
        prompt has what the client sends; what is kept of it must not bring erased words back."""
        for position in reversed(self._visible()):
            item, sent = self.conversation.messages[position], self._message(position)
            is_gone = item.message is not None and not item.message.said.strip() and bool(sent.said.strip())
            if is_gone or forbidden.has_message(item.identity, sent):
                return True
            texts -= sent.opens_turn and bool(sent.said.strip())
            if not texts:
                return False
        return False

    def latest_step(self) -> Message | None:
        """The assistant's latest message in the open turn; None if there is none."""
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
        """Whether this is a later step of a tool loop: the turn has its block already."""
        begun = self.turn_position is not None and self.turn_position < self._arrival.end - 1
        return begun and self.has_block

    @property
    def has_results(self) -> bool:
        """Whether the open turn has results of tools already: this is a later step of its loop."""
        behind = (p for p in self._visible() if self.turn_position is not None and p > self.turn_position)
        return any(one.role in RESULT_ROLES or one.is_result for one in map(self._message, behind))

    @property
    def has_block(self) -> bool:
        """Whether recall was done for the turn; its block may be empty."""
        return self.turn_digest in self.conversation.blocks

    def attachments(self) -> int:
        """The images in the prompt, whose tokens differ from model to model."""
        if not self._has_attachments:
            return 0
        return sum(len(self._message(position).attachments) for position in self._visible())

    def visible_digests(self) -> set[bytes]:
        """The digests of the messages that are whole in the prompt."""
        conversation = self.conversation
        messages, lines = conversation.messages, conversation.lines
        shown = [messages[position] for position in self._visible() if position not in lines]
        stored = [item.stored_as for item in shown if item.stored_as and not item.is_pruned]
        return {item.digest for item in shown}.union(stored)

    def blocks(self) -> list[tuple[int, Block]]:
        """The blocks in the prompt, each with the position of the message that it stands before. Found anew only where
        that may have changed: a request asks nine times."""
        present = self.conversation.changes, tuple(self.conversation.blocks.items())
        if self._placed[0] != present:
            blocks = {digest: block for digest, block in present[1] if block.chunks and self._may_be_shown(block)}
            messages, visible = self.conversation.messages, self._visible() if blocks else []
            places = [position for position in visible if messages[position].digest in blocks]
            found = [(position, blocks[messages[position].digest]) for position in filter(self._opens_turn, places)]
            self._placed = present, found
        return self._placed[1]

    def chunks(self) -> list[BlockChunk]:
        """The chunks that those blocks show."""
        return [chunk for _, block in self.blocks() for chunk in block.chunks]

    def left_out(self) -> int:
        """How many messages of the conversation up to here are not in the prompt."""
        return self.conversation.left_out_count(self._arrival.end)

    def replaced(self) -> int:
        """How many results have a line in their place."""
        return sum(position < self._arrival.end for position in self.conversation.lines)

    def block_tokens(self) -> int:
        """Raw tokens of those blocks."""
        return sum(block.tokens for _, block in self.blocks())

    def tokens(self) -> int:
        """Raw tokens of the whole prompt."""
        self._visible()
        return self.standing_tokens + self._listed[2] + self.block_tokens()

    def body(self, *, with_memory: bool = True) -> bytes:
        """Encode the body to forward."""
        blocks = {self._index(position): block.text for position, block in self.blocks()} if with_memory else {}
        visible, gone, replaced = self._visible(), list[int](), dict[int, str]()
        if len(visible) < len(self._request.messages) - self._lead or self._mended.covered:
            shown = {self._index(position) for position in visible if position not in self._mended.covered}
            shown |= {self._index(position) - 1 for position in self._mended.unanswered if position in visible[1:]}
            gone = [index for index in range(self._lead, len(self._request.messages)) if index not in shown]
        if lines := self.conversation.lines:
            replaced = {self._index(position): lines[position].text for position in visible if position in lines}
        return self._api.encode(self._request, leave_out=gone, replaced=replaced, blocks=blocks)

    @property
    def turn_block(self) -> Block | None:
        """The block of the turn; None if it has none, or it may not be shown."""
        block = None if self.turn_digest is None else self.conversation.blocks.get(self.turn_digest)
        return block if block is not None and self._may_be_shown(block) else None

    def _may_be_shown(self, block: Block) -> bool:
        """Whether it shows something, nothing that may not be read, and says `user` of none but who asks."""
        topic_ids = {chunk.topic_id for chunk in block.chunks}
        is_own = (block.reader or "") == self._who.author
        return bool(topic_ids) and is_own and all(self._who.may("read", one) for one in topic_ids)

    def _visible(self) -> list[int]:
        """The positions of the visible messages: a head that the client keeps, and those that did not leave. Listed,
        with their tokens, only where that may have changed: there are thousands, and a request asks ten times."""
        conversation, head = self.conversation, self._arrival.head
        if self._listed[0] != conversation.changes:
            first, hidden = self._arrival.offset + head, self._mended.hidden
            behind = [position for position in conversation.visible_positions(self._arrival.end) if position >= first]
            kept: Sequence[int] = range(head)
            if hidden:
                behind = [position for position in behind if position not in hidden]
                kept = [position for position in kept if position not in hidden]
            tokens = conversation.tokens_of(behind) + sum([conversation.messages[position].tokens for position in kept])
            self._listed = conversation.changes, [*kept, *behind], tokens
        return self._listed[1]

    def _newest_first(self) -> Iterator[Message]:
        return (self._message(position) for position in reversed(self._visible()))

    def _opens_turn(self, position: int) -> bool:
        return position not in self._mended.covered and self._message(position).opens_turn

    def _message(self, position: int) -> Message:
        return self._request.messages[self._index(position)]

    def _index(self, position: int) -> int:
        if position < self._arrival.head:
            return self._lead + position
        shift = self._mended.shift(position) if self._mended.unanswered else 0
        return self._lead + position - self._arrival.offset + shift
