"""The prompt of one request: its visible messages, the memory blocks between them, and their tokens.

Rule: nothing here changes a conversation. A position counts messages of the conversation, an index those of the
request; they differ by `offset` and the leading system messages. Instructions at the end have no position.

A thin client sends only new messages, and memd puts the buffered turns in front. memd must make that prompt valid for a
strict chat template even after failed requests, stopped tool loops or simultaneous requests. It mends only the prompt;
the conversation keeps everything that was said. The client's new messages are never mended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from memd.conversation import compaction
from memd.conversation.conversation import is_answer
from memd.conversation.hot_buffer import Arrival
from memd.messages import RESULT_ROLES, ROOT_DIGEST, Block, BlockChunk, Message, ToolCall
from memd.proxy.reading import Asked
from memd.store.erasure import ForbiddenText
from memd.wire.api import ModelRequest

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
