"""Where the open conversations of a topic have what a request says: the index of matching.

Rule: a request of some hundred messages is looked up in well under a millisecond, however many conversations there
are. So no chained digest is computed but where branches part, and nothing is searched conversation by conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memd.conversation.aligning import common_length
from memd.conversation.conversation import Conversation
from memd.messages import ROOT_DIGEST, chain

Holders = tuple[Conversation, ...]
"""The conversations that have one message. Neighbouring messages share one tuple, as they have the same holders."""

MESSAGE_BYTES, SLOT_BYTES, CONVERSATION_BYTES = 400, 16, 1_800
"""Memory of a message beside its text, of each place that it has, and of a conversation (measured with
tracemalloc)."""
CANDIDATES_MAX = 3
"""Conversations that are compared with a request message by message."""
CLEARLY_MORE = 4
"""A conversation that shares so many times as much with a request as another leaves no doubt about which it is."""


class ConversationIndex:
    """Chained digests and contents of all messages, each with the conversations that have it."""

    def __init__(self) -> None:
        self._at: dict[bytes, Holders] = {}
        self._saying: dict[bytes, Holders] = {}
        self._standing: dict[bytes, Holders] = {}
        """By the digest under which a message was first said, where that is not its own any more."""
        self._contents: dict[Conversation, list[bytes]] = {}
        self._used: dict[Conversation, int] = {}
        self._uses = 0

    @property
    def memory_bytes(self) -> int:
        """Memory of all messages beside their texts, here and in their conversations; approximate."""
        places = sum(map(len, self._contents.values()))
        return MESSAGE_BYTES * len(self._at) + SLOT_BYTES * places + CONVERSATION_BYTES * len(self._contents)

    def contents(self, conversation: Conversation) -> list[bytes]:
        """The content digests of a conversation's messages; not to be changed."""
        return self._contents[conversation]

    def note(self, conversation: Conversation) -> None:
        """Bring a conversation's new messages into the index, and make it the one used last."""
        self._uses += 1
        self._used[conversation] = self._uses
        contents = self._contents.setdefault(conversation, [])
        new = conversation.messages[len(contents) :]
        contents += [item.content_digest for item in new]
        _add(self._at, [item.digest for item in new], conversation)
        _add(self._saying, [item.content_digest for item in new], conversation)
        _add(self._standing, [item.stored_as for item in new if item.stored_as], conversation)

    def remove(self, conversation: Conversation) -> None:
        """Forget a conversation."""
        del self._used[conversation]
        contents = self._contents.pop(conversation)
        _remove(self._at, [item.digest for item in conversation.messages], conversation)
        _remove(self._saying, contents, conversation)
        _remove(self._standing, [item.stored_as for item in conversation.messages if item.stored_as], conversation)

    def prefixes(self, contents: Sequence[bytes], session: str | None) -> tuple[int, list[Conversation]]:
        """The longest known beginning of a request, and the conversations that have it, most recently used first.

        Args:
            contents: the request's content digests.
            session: then only conversations of this session are considered.
        """
        known, digest, holders = 0, ROOT_DIGEST, Holders()
        while known < len(contents):
            # Whoever goes on like the request shows how far they go together; there the branches may part.
            step = chain(digest, contents[known])
            further = self._of_session(self._at.get(step, ()), session)
            if not further:
                break
            guide = max(further, key=self._used.__getitem__)
            known += common_length(contents, self._contents[guide], known, known)
            digest = guide.messages[known - 1].digest
            holders = self._of_session(self._at[digest], session)
        return known, self._newest_first(holders)

    def holders(self, identity: bytes) -> Holders:
        """The conversations that have the message which the log knows by this digest."""
        return self._at.get(identity, ()) + self._standing.get(identity, ())

    def knows(self, contents: Sequence[bytes]) -> bool:
        """Whether any conversation has any of these contents."""
        return not self._saying.keys().isdisjoint(contents)

    def likeliest(self, contents: Sequence[bytes], session: str | None) -> list[Conversation]:
        """The few conversations that share most with a request; what many conversations say counts little."""
        found = Counter(map(id, map(self._saying.get, contents)))
        by_id = {id(holders): holders for holders in map(self._saying.get, contents) if holders is not None}
        weights: dict[Conversation, float] = {}
        for key, holders in by_id.items():
            weight = found[key] / len(holders)
            for conversation in self._of_session(holders, session):
                weights[conversation] = weights.get(conversation, 0.0) + weight
        best = sorted(weights, key=lambda one: (-weights[one], -self._used[one]))[:CANDIDATES_MAX]
        return [one for one in best if weights[one] * CLEARLY_MORE >= weights[best[0]]]

    def newest(self, session: str | None) -> Conversation | None:
        """The conversation used last."""
        return max(self._of_session(tuple(self._used), session), key=self._used.__getitem__, default=None)

    def _newest_first(self, holders: Holders) -> list[Conversation]:
        return sorted(holders, key=self._used.__getitem__, reverse=True)

    def _of_session(self, holders: Holders, session: str | None) -> Holders:
        if session is None:
            return holders
        return tuple(one for one in holders if one.session == session)


def _add(table: dict[bytes, Holders], keys: Sequence[bytes], conversation: Conversation) -> None:
    alone: Holders = (conversation,)
    changed: dict[int, tuple[Holders, Holders]] = {}  # messages with the same holders share one tuple again
    for key in keys:
        present = table.get(key)
        if present is None:
            table[key] = alone
            continue
        known = changed.get(id(present))
        if known is None:
            known = present, present if conversation in present else (*present, conversation)
            changed[id(present)] = known
        table[key] = known[1]


def _remove(table: dict[bytes, Holders], keys: Sequence[bytes], conversation: Conversation) -> None:
    changed: dict[int, tuple[Holders, Holders]] = {}
    for key in keys:
        present = table.get(key, ())
        known = changed.get(id(present))
        if known is None:
            known = present, tuple(one for one in present if one is not conversation)
            changed[id(present)] = known
        if known[1]:
            table[key] = known[1]
        else:
            table.pop(key, None)
