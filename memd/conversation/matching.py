"""Which conversation a request belongs to, and how much of it is known already.

Rule: digests decide, nothing else: equal chained digests at one position mean equal histories up to there. A client
that trims its own history is recognised by runs of content digests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from memd.conversation.conversation import Conversation
from memd.messages import chain_all

SHARED_MIN = 2
"""Messages that a request must share with a conversation before it is taken for an edit of it or for its trimmed
history. One alone proves nothing: many conversations begin with the same words."""
LAST_EXCHANGE = 2
"""Messages at the end of a conversation that a trimmed history may lack or replace: a question and its answer."""


class Match(msgspec.Struct, frozen=True):
    """The place of a request in a conversation: its message `i` is the conversation's message `offset + i`.

    Its first `head` messages are the conversation's first: a client that trims its history may keep them.
    """

    conversation: Conversation | None
    """None: no conversation matches."""
    offset: int = 0
    known: int = 0
    """How many of the request's messages the conversation has already, the head included."""
    head: int = 0

    @property
    def reaches_end(self) -> bool:
        """Whether the match extends to the conversation's end."""
        return self.conversation is not None and self.offset + self.known == len(self.conversation)


def match(
    conversations: Iterable[Conversation], content_digests: Sequence[bytes], session: str | None, *, thin: bool = False
) -> Match:
    """Find the conversation that a request continues.

    Args:
        conversations: the topic's open conversations, most recently used first.
        content_digests: the request's messages after the leading system messages, each by itself (not chained).
        session: the client's name of the conversation, if it gives one; then only that conversation is considered,
            and a request that shares nothing with it is appended.
        thin: the client sends only new messages: they are appended, however they begin.
    """
    candidates = [c for c in conversations if session is None or c.session == session]
    if thin:
        return _newest_only(candidates[0], content_digests) if candidates else Match(None)
    digests = chain_all(content_digests)
    prefixes = [Match(c, 0, c.common_length(digests)) for c in candidates]
    # Of several branches that share equally much, the one that ends there is continued.
    best = max(prefixes, key=lambda one: (one.known, one.reaches_end), default=Match(None))
    if best.known and (best.known == len(digests) or best.reaches_end):
        return best
    pinned = [run for one in prefixes if (run := _rejoin_behind_head(one, content_digests)) is not None]
    runs = [run for c in candidates if (run := _rejoin(c, content_digests)) is not None]
    best = max(
        [best, *pinned, *runs], key=lambda one: one.known
    )  # of equals the first: an edit is the simplest explanation
    if best.known:
        return best
    if session is not None and candidates:
        return _newest_only(candidates[0], content_digests)
    return Match(None)


def _rejoin_behind_head(prefix: Match, content_digests: Sequence[bytes]) -> Match | None:
    """Match a client that keeps the beginning and the end of its history and drops the middle.

    The kept end may begin with the same words that follow the kept beginning, so the true head may be a little shorter
    than the shared prefix.
    """
    found: Match | None = None
    for head in range(prefix.known, max(0, prefix.known - LAST_EXCHANGE - 1), -1):
        assert prefix.conversation is not None, "a known prefix has a conversation"
        run = _rejoin(prefix.conversation, content_digests[head:], after=head)
        if run is not None and (found is None or head + run.known > found.known):
            found = Match(prefix.conversation, run.offset - head, head + run.known, head)
    return found


def _rejoin(conversation: Conversation, content_digests: Sequence[bytes], *, after: int = -1) -> Match | None:
    """Match a client that trims its own history: find the longest run from behind `after` to the conversation's end.

    The last exchange may be missing or different (an edit, or a reply that the client never got), but two messages in a
    row must agree.
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
    """Match a thin client: its messages come behind the end, unless the conversation ends with them (a retry)."""
    offset = max(0, len(conversation) - len(content_digests))
    if [buffered.content_digest for buffered in conversation.messages[offset:]] == list(content_digests):
        return Match(conversation, offset, len(content_digests))
    return Match(conversation, len(conversation), 0)
