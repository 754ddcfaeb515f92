"""The live conversations of one topic: which one a request belongs to, what in it is new, stored, and left out.

Rule: the client's array is the truth for the live part; a conversation only ever grows. An edit or a regenerated reply
does not change it but *forks* it, so positions and marks stay valid for whatever is under way in the background.

Every message has a digest that is chained to its predecessors', so equal digests at one position mean equal histories
up to there, and the longest known prefix is found by bisection. A conversation has two marks, both counts of messages
from its beginning:

    0 ......... left_out ......... stored ......... end
    | in the log, not   | in the log and  | only in the
    | in the prompt     | in the prompt   | hot buffer
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from memd.messages import ROOT_DIGEST, Block, Message, chain_all

SHARED_MIN = 2
"""Messages that a request must share with a conversation before it is taken for an edit of it or for its trimmed
history. One alone proves nothing: many conversations begin with the same words."""
LAST_EXCHANGE = 2
"""Messages at the end of a conversation that a trimmed history may lack or replace: a question and its answer."""


class Buffered(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    digest: bytes
    content_digest: bytes
    tokens: int
    """Counted with the bundled tokenizer, before the model's drift."""
    message: Message | None
    """None once the message is in the log and out of the prompt: then only its identity matters."""


class TurnKey(msgspec.Struct, frozen=True):
    """What makes two requests the same one, sent twice."""

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
        """By the digest of the user message that the block stands before."""
        self.arrivals: dict[TurnKey, float] = {}
        """When each recent request first came, in seconds of the caller's clock."""
        self.abandoned = False
        """Its client went on from an earlier point (edit, regenerate): what is not stored yet is no longer wanted."""
        self.used_at = 0.0

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        state = "abandoned " if self.abandoned else ""
        return f"<Conversation {self.id} {state}left_out={self.left_out} stored={self.stored} end={len(self)}>"

    @property
    def end_digest(self) -> bytes:
        """What the next message is chained to."""
        return self.messages[-1].digest if self.messages else ROOT_DIGEST

    def common_length(self, digests: Sequence[bytes]) -> int:
        """How many leading messages this conversation shares with a history given by its digests."""
        low, high = 0, min(len(self.messages), len(digests))
        while low < high:  # equal digests at a position mean equal histories up to it: bisect
            middle = (low + high + 1) // 2
            if self.messages[middle - 1].digest == digests[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def tokens_between(self, start: int, end: int) -> int:
        """Raw tokens of the messages from `start` up to but not including `end`."""
        return sum(buffered.tokens for buffered in self.messages[start:end])

    def last_user_position(self, end: int | None = None) -> int | None:
        """Where the open turn begins: the last user message before `end`; None if there is none."""
        for position in range((len(self) if end is None else end) - 1, -1, -1):
            message = self.messages[position].message
            if message is not None and message.role == "user":
                return position
        return None

    def mark_stored(self, position: int) -> None:
        """Everything before `position` is in the log."""
        self.stored = max(self.stored, position)

    def mark_left_out(self, position: int) -> None:
        """Everything before `position` leaves the prompt; it must be stored. Its blocks leave with it."""
        if position > self.stored:
            raise ValueError(f"only stored messages may be left out: {position} > {self.stored}")
        for index in range(self.left_out, position):
            buffered = self.messages[index]
            self.blocks.pop(buffered.digest, None)
            self.messages[index] = msgspec.structs.replace(buffered, message=None)
        self.left_out = max(self.left_out, position)

    def fork(self, conversation_id: str, at: int) -> Conversation:
        """A new conversation that shares the first `at` messages."""
        branch = Conversation(conversation_id, self.session)
        branch.messages = self.messages[:at]
        branch.stored, branch.left_out = min(self.stored, at), min(self.left_out, at)
        shared = {buffered.digest for buffered in branch.messages}
        branch.blocks = {digest: block for digest, block in self.blocks.items() if digest in shared}
        branch.arrivals = dict(self.arrivals)  # a retry is one wherever it ends up
        branch.used_at = self.used_at
        return branch


class Match(msgspec.Struct, frozen=True):
    """Where a request's messages belong: its message `i` is the conversation's message `offset + i`.

    But for the first `head` ones, which are the conversation's first: a client that trims its history may keep them.
    """

    conversation: Conversation | None
    """None: nothing like it is known."""
    offset: int = 0
    known: int = 0
    """How many of the request's messages the conversation already has, the head included."""
    head: int = 0

    @property
    def reaches_end(self) -> bool:
        """Whether what is known goes as far as the conversation does."""
        return self.conversation is not None and self.offset + self.known == len(self.conversation)


def match(
    conversations: Iterable[Conversation], content_digests: Sequence[bytes], session: str | None, *, thin: bool = False
) -> Match:
    """Find the conversation that a request goes on with.

    Args:
        conversations: the topic's open conversations, most recently used first.
        content_digests: the request's messages after the leading system messages, each by itself (not chained).
        session: what the client calls the conversation, if it says so; then only that one is looked at, and a request
            that shares nothing with it is appended to it.
        thin: the client sends only what is new: whatever it says is appended, however it begins.
    """
    candidates = [c for c in conversations if session is None or c.session == session]
    if thin:
        return _newest_only(candidates[0], content_digests) if candidates else Match(None)
    digests = chain_all(content_digests)
    prefixes = [Match(c, 0, c.common_length(digests)) for c in candidates]
    # Of several branches that share as much, the one that ends there is simply continued.
    best = max(prefixes, key=lambda one: (one.known, one.reaches_end), default=Match(None))
    if best.known and (best.known == len(digests) or best.reaches_end):
        return best
    pinned = [run for one in prefixes if (run := _rejoin_behind_head(one, content_digests)) is not None]
    runs = [run for c in candidates if (run := _rejoin(c, content_digests)) is not None]
    best = max([best, *pinned, *runs], key=lambda one: one.known)  # of equals the first: an edit is the simplest
    if best.known:
        return best
    if session is not None and candidates:
        return _newest_only(candidates[0], content_digests)
    return Match(None)


def _rejoin_behind_head(prefix: Match, content_digests: Sequence[bytes]) -> Match | None:
    """Match a client that keeps the beginning and the end of its history and drops what is between them.

    The end may begin with the very words that would have come next, so the kept beginning may be a little shorter than
    what both share.
    """
    found: Match | None = None
    for head in range(prefix.known, max(0, prefix.known - LAST_EXCHANGE - 1), -1):
        assert prefix.conversation is not None, "something is known"
        run = _rejoin(prefix.conversation, content_digests[head:], after=head)
        if run is not None and (found is None or head + run.known > found.known):
            found = Match(prefix.conversation, run.offset - head, head + run.known, head)
    return found


def _rejoin(conversation: Conversation, content_digests: Sequence[bytes], *, after: int = -1) -> Match | None:
    """Match a client that trims its own history: the longest run of the conversation, from somewhere in it to its end.

    Its last exchange may be missing or different (an edit, a reply that the client never got), but two messages in a
    row must agree. It begins behind the position `after`.
    """
    known = [buffered.content_digest for buffered in conversation.messages]
    theirs = list(content_digests)
    for offset in range(after + 1, len(known) - SHARED_MIN + 1):
        agreed = max(SHARED_MIN, len(known) - LAST_EXCHANGE - offset)
        if known[offset : offset + agreed] == theirs[:agreed]:
            tail = zip(known[offset + agreed :], theirs[agreed:], strict=False)
            more = itertools.takewhile(lambda pair: pair[0] == pair[1], tail)
            return Match(conversation, offset, agreed + sum(1 for _ in more))
    return None


def _newest_only(conversation: Conversation, content_digests: Sequence[bytes]) -> Match:
    """Match a client that sends only what is new: behind the end, unless that is what it sent last (a retry)."""
    offset = max(0, len(conversation) - len(content_digests))
    if [buffered.content_digest for buffered in conversation.messages[offset:]] == list(content_digests):
        return Match(conversation, offset, len(content_digests))
    return Match(conversation, len(conversation), 0)
