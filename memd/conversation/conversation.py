"""A live conversation: its messages, what of them is stored, and what is left out of the prompt.

Rule: the client's array is the truth for the live part; a conversation only ever grows. An edit or a regenerated reply
*forks* it and changes nothing in it, so positions and marks stay valid for work under way in the background.

Every message has a digest that is chained to its predecessors', so equal digests at one position mean equal histories
up to there, and the longest known prefix is found by bisection. A conversation has two marks, both counts of messages
from its beginning, and neither waits for the other: `stored` (in the log up to here) and `left_out` (out of the prompt
up to here). Who moves `left_out` beyond `stored` has forced the journal to disk first. A message keeps its text until
both marks have passed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memd.messages import ROOT_DIGEST, Block, Message


class Buffered(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    digest: bytes
    content_digest: bytes
    tokens: int
    """Counted with the bundled tokenizer, before the model's drift."""
    message: Message | None
    """None once the message is stored and out of the prompt: then only its identity matters. Out of the prompt but not
    stored it keeps its text, which is still to be stored and meanwhile found by its words."""


class TurnKey(msgspec.Struct, frozen=True):
    """Two requests with equal keys are one request, sent twice."""

    last_digest: bytes
    memory_in: bytes
    """Digest of the MemoryIn that came with it."""


class Conversation:
    """One path through the tree of histories. Positions count messages after the leading system messages."""

    def __init__(self, conversation_id: str, session: str | None = None) -> None:
        self.id = conversation_id
        self.session = session
        self.messages: list[Buffered] = []
        self.stored = 0
        self.left_out = 0
        self.blocks: dict[bytes, Block] = {}
        """By the digest of the user message that each stands before."""
        self.arrivals: dict[TurnKey, float] = {}
        """The first arrival of each recent request, in seconds of the caller's clock."""
        self.abandoned = False
        """Its client continued from an earlier point (edit, regenerate): unstored messages are no longer wanted."""
        self.used_at = 0.0

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        state = "abandoned " if self.abandoned else ""
        return f"<Conversation {self.id} {state}left_out={self.left_out} stored={self.stored} end={len(self)}>"

    @property
    def end_digest(self) -> bytes:
        """The digest that the next message is chained to."""
        return self.messages[-1].digest if self.messages else ROOT_DIGEST

    def common_length(self, digests: Sequence[bytes]) -> int:
        """The number of leading messages shared with a history, which is given by its chained digests."""
        low, high = 0, min(len(self.messages), len(digests))
        while low < high:  # equal digests at a position mean equal histories up to it: bisect
            middle = (low + high + 1) // 2
            if self.messages[middle - 1].digest == digests[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def tokens_between(self, start: int, end: int) -> int:
        """Raw tokens of the messages from `start` to before `end`."""
        return sum(buffered.tokens for buffered in self.messages[start:end])

    def last_user_position(self, end: int | None = None) -> int | None:
        """The position of the last user message before `end`, where the open turn begins; None if there is none."""
        for position in range((len(self) if end is None else end) - 1, -1, -1):
            message = self.messages[position].message
            if message is not None and message.role == "user":
                return position
        return None

    def mark_stored(self, position: int) -> None:
        """Note that everything before `position` is in the log."""
        done = self.settled
        self.stored = max(self.stored, position)
        self._drop_texts(done)

    def mark_left_out(self, position: int) -> None:
        """Take everything before `position` out of the prompt, with its blocks. It must be durable."""
        for buffered in self.messages[self.left_out : position]:
            self.blocks.pop(buffered.digest, None)
        done = self.settled
        self.left_out = max(self.left_out, position)
        self._drop_texts(done)

    @property
    def settled(self) -> int:
        """Everything before this position is in the log and out of the prompt, and has no text here any more."""
        return min(self.stored, self.left_out)

    def _drop_texts(self, start: int) -> None:
        for index in range(start, self.settled):
            self.messages[index] = msgspec.structs.replace(self.messages[index], message=None)

    def fork(self, conversation_id: str, at: int) -> Conversation:
        """A new conversation with the first `at` messages of this one."""
        branch = Conversation(conversation_id, self.session)
        branch.messages = self.messages[:at]
        branch.stored, branch.left_out = min(self.stored, at), min(self.left_out, at)
        shared = {buffered.digest for buffered in branch.messages}
        branch.blocks = {digest: block for digest, block in self.blocks.items() if digest in shared}
        branch.arrivals = dict(self.arrivals)  # a retry is one wherever it ends up
        branch.used_at = self.used_at
        return branch
