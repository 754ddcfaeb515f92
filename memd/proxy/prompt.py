"""The prompt of one request: its visible messages, the memory blocks between them, and their tokens.

Rule: nothing here changes a conversation. A position counts in the conversation, an index in
the request; `offset` and the leading system messages are the difference between the two.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from memd.conversation.conversation import Conversation
from memd.conversation.hot_buffer import Arrival
from memd.messages import ROOT_DIGEST, Block, BlockChunk, Message, stored_text
from memd.wire.api import Api, Placement
from memd.wire.request import Insertion, ModelRequest

_GONE = Message("user", "")
"""In a thin client's history the place of a message that has left the prompt, and leaves this one too."""


class Prompt:
    """A request in its conversation. Marks and blocks are looked up at each call, because compaction moves them."""

    def __init__(self, api: Api, request: ModelRequest, arrival: Arrival, lead: int, standing_tokens: int) -> None:
        self._api = api
        self._request = request
        self._arrival = arrival
        self._lead = lead
        self.standing_tokens = standing_tokens
        """Raw tokens of the leading system messages and the tool definitions."""
        users = [position for position in self._visible() if self._message(position).opens_turn]
        self.turn_position = max(users, default=None)
        """Where the open turn begins; None if no user message is visible."""
        self._user_positions = {self.conversation.messages[position].digest: position for position in users}

    @property
    def conversation(self) -> Conversation:
        """The conversation that the request belongs to."""
        return self._arrival.conversation

    @property
    def turn_digest(self) -> bytes | None:
        """The digest of the user message that opened the turn."""
        return None if self.turn_position is None else self.conversation.messages[self.turn_position].digest

    def user_texts(self) -> Iterator[str]:
        """The words of the visible user messages, newest first; messages that only programs wrote have none."""
        for position in reversed(self._visible()):
            message = self._message(position)
            if message.role == "user" and message.said.strip():
                yield message.said

    def latest_step(self) -> str:
        """The text and calls of the assistant's latest message in the open turn; empty if there is none."""
        for position in reversed(self._visible()):
            message = self._message(position)
            if position == self.turn_position:
                return ""
            if message.role == "assistant":
                return stored_text(message)
        return ""

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
    def has_block(self) -> bool:
        """Whether recall was done for the turn; its block may be empty."""
        return self.turn_digest in self.conversation.blocks

    @property
    def has_attachments(self) -> bool:
        """Whether there are images, whose tokens differ from model to model."""
        return any(message.attachments for message in self._request.messages)

    def visible_digests(self) -> set[bytes]:
        """The digests of the messages that are whole in the prompt."""
        conversation = self.conversation
        shown = [conversation.messages[position] for position in self._visible() if position not in conversation.lines]
        return {item.digest for item in shown} | {item.identity for item in shown if not item.is_pruned}

    def blocks(self) -> list[tuple[int, Block]]:
        """The blocks in the prompt, each with the position of the message that it stands before."""
        found = []
        for digest, block in self.conversation.blocks.items():
            position = self._user_positions.get(digest)
            if block.chunks and position is not None and self._is_visible(position):
                found.append((position, block))
        return sorted(found, key=lambda placed: placed[0])

    def chunks(self) -> list[BlockChunk]:
        """The chunks that those blocks show."""
        return [chunk for _, block in self.blocks() for chunk in block.chunks]

    def block_tokens(self) -> int:
        """Raw tokens of those blocks."""
        return sum(block.tokens for _, block in self.blocks())

    def tokens(self) -> int:
        """Raw tokens of the whole prompt."""
        return self.standing_tokens + self.history_tokens() + self.block_tokens()

    def history_tokens(self) -> int:
        """Raw tokens of the visible messages."""
        conversation, head = self.conversation, self._arrival.head
        counted = [conversation.tokens_at(p) if p >= head else conversation.messages[p].tokens for p in self._visible()]
        return sum(counted)

    def body(self, placement: Placement | None) -> bytes:
        """Encode the body to forward; `placement` None leaves all memory out."""
        insertions = []
        if placement is not None:
            insertions = [Insertion(self._index(position), block.text) for position, block in self.blocks()]
        visible = self._visible()
        shown = {self._index(position) for position in visible}
        gone = [index for index in range(self._lead, len(self._request.messages)) if index not in shown]
        lines = self.conversation.lines
        replaced = {self._index(position): lines[position].text for position in visible if position in lines}
        return self._api.encode(
            self._request,
            leave_out=gone,
            replaced=replaced,
            insertions=insertions,
            placement=placement or "merged",
        )

    def _visible(self) -> list[int]:
        """The positions of the visible messages: a head that the client keeps, and those that did not leave."""
        first = self._arrival.offset + self._arrival.head
        behind = (position for position in self.conversation.visible_positions(self._arrival.end) if position >= first)
        return [*range(self._arrival.head), *behind]

    def _is_visible(self, position: int) -> bool:
        is_sent = position >= self._arrival.offset + self._arrival.head
        return position < self._arrival.head or (is_sent and self.conversation.is_visible(position))

    def _message(self, position: int) -> Message:
        return self._request.messages[self._index(position)]

    def _index(self, position: int) -> int:
        return self._lead + (position if position < self._arrival.head else position - self._arrival.offset)


def with_live_turns(api: Api, request: ModelRequest, arrival: Arrival, lead: int) -> tuple[ModelRequest, Arrival]:
    """Put the visible turns of the buffer in front of the request of a thin client, which sends only new messages."""
    conversation = arrival.conversation
    live = conversation.messages[min(conversation.kept, default=conversation.left_out) : arrival.offset]
    messages = [_GONE if item.message is None else item.message for item in live]
    raw = [api.encode_message(message) for message in messages]
    before = [None, *messages][: len(messages)]
    continues = [api.continues(message, previous) for message, previous in zip(messages, before, strict=True)]
    digests = [item.content_digest for item in live]
    completed = msgspec.structs.replace(
        request,
        original=None,
        raw_messages=[*request.raw_messages[:lead], *raw, *request.raw_messages[lead:]],
        messages=[*request.messages[:lead], *messages, *request.messages[lead:]],
        continues=[*request.continues[:lead], *continues, *request.continues[lead:]],
        digests=[*request.digests[:lead], *digests, *request.digests[lead:]],
    )
    return completed, msgspec.structs.replace(arrival, offset=arrival.offset - len(live))
