"""Which conversation a request belongs to, and how much of it is known already.

Rule: digests decide, nothing else: equal chained digests at one position mean equal histories up to there. A client
that trims its own history, or rewrites its middle, is recognised by runs of content digests. An answer that is given
anew or in parts is recognised by what it says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import msgspec
from msgspec import UNSET

from memd.conversation import aligning
from memd.conversation.aligning import Run
from memd.conversation.conversation import Conversation
from memd.conversation.index import ConversationIndex
from memd.messages import Message

SHARED_MIN = 2
"""Messages that a request must share with a conversation before it is taken for an edit of it or for its trimmed
history. One alone proves nothing: many conversations begin with the same words."""
LAST_EXCHANGE = 2
"""Messages at the end of a conversation that a trimmed history may lack or replace: a question and its answer."""
HEAD_MAX = 4
"""Messages that a client which drops its middle keeps at the front (Cline keeps two). They stay in the prompt for as
long as it sends them, so where it keeps more, its history is taken for a rewritten one, whose front can leave."""


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
    runs: tuple[Run, ...] = ()
    """The history was rewritten: these are the messages that it has in common with the conversation, and neither
    `offset` nor `head` says anything."""


def match(
    index: ConversationIndex, content_digests: Sequence[bytes], session: str | None, *, thin: bool = False
) -> Match:
    """Find the conversation that a request continues.

    Args:
        index: the topic's open conversations.
        content_digests: the request's messages after the leading system messages, each by itself (not chained).
        session: the client's name of the conversation, if it gives one; then only that conversation is considered,
            and a request that shares nothing with it is appended.
        thin: the client sends only new messages: they are appended, however they begin.
    """
    contents = list(content_digests)
    newest = index.newest(session) if thin or session is not None else None
    if thin:
        return Match(None) if newest is None else _newest_only(newest, contents)
    known, holders = index.prefixes(contents, session)
    # Of several branches that share equally much, the one that ends there is continued.
    ending = next((one for one in holders if len(one) == known), None)
    best = Match(ending or holders[0], 0, known) if known else Match(None)
    new = contents[known:]
    if known and (not new or (ending is not None and (len(new) <= LAST_EXCHANGE or not index.knows(new)))):
        return best
    best = _by_runs(index, contents, session, best, holders)
    if best.conversation is None and newest is not None:
        return _newest_only(newest, contents)
    return best


def kept_count(found: Match, messages: Sequence[Message]) -> int:
    """How many of a request's messages stay where the conversation has them: all that it knows, with one exception.

    The request's open turn must be visible, so a request that goes back behind `left_out` brings that turn along as
    new. (A head that the client keeps stays in the prompt as long as the client sends it.)
    """
    if found.conversation is None:
        return 0
    visible_from = found.conversation.left_out - found.offset
    opened = max(0, len(messages) - 1)
    while opened > 0 and not messages[opened].opens_turn:
        opened -= 1
    return min(found.known, opened) if found.head <= opened < visible_from else found.known


def heard_again(found: Match, messages: Sequence[Message]) -> dict[int, Message]:
    """Return, by their positions in the conversation, those messages of a request whose text was lost."""
    conversation = found.conversation
    if conversation is None or not (conversation.gone or conversation.lost):
        return {}
    places = {found.offset + i: i for i in range(found.head, found.known)} | {i: i for i in range(found.head)}
    if found.runs:
        places = {place + i: start + i for start, place, length in found.runs for i in range(length)}
    textless = {position for position in conversation.gone if conversation.messages[position].message is None}
    return {
        position: messages[places[position]] for position in sorted(textless | conversation.lost) if position in places
    }


def _by_runs(
    index: ConversationIndex,
    contents: list[bytes],
    session: str | None,
    prefix: Match,
    holders: Sequence[Conversation],
) -> Match:
    """The best explanation of a history that is no continuation: of equals the first, an edit being the simplest."""
    candidates = index.likeliest(contents, session)
    pinned = (_rejoin_behind_head(index.contents(one), one, prefix.known, contents) for one in holders[:2])
    trimmed = (_rejoin(index.contents(one), one, contents) for one in candidates)
    options = [prefix, *(one for one in (*pinned, *trimmed) if one is not None)]
    compared = dict.fromkeys([*holders[:1], *candidates])
    options += [one for one in (_rewritten(index.contents(one), one, contents) for one in compared) if one is not None]
    return max(options, key=lambda one: one.known)


def _rewritten(known: list[bytes], conversation: Conversation, contents: list[bytes]) -> Match | None:
    """Match a client that edits, deletes or prunes within its history: by all runs that agree, wherever they are."""
    runs = aligning.aligned(contents, known)
    shared = aligning.total(runs)
    if not runs or runs[-1][0] == runs[-1][1] == 0:
        return None  # nothing but a prefix
    if runs[0][:2] != (0, 0) and shared < max(SHARED_MIN, (len(contents) - 1) // 2):
        return None  # another conversation in which the same was said
    return Match(conversation, 0, shared, 0, tuple(runs))


def _rejoin_behind_head(
    known: list[bytes], conversation: Conversation, shared: int, contents: list[bytes]
) -> Match | None:
    """Match a client that keeps the beginning and the end of its history and drops the middle.

    The kept end may begin with the same words that follow the kept beginning, so the true head may be a little shorter
    than the `shared` prefix.
    """
    found: Match | None = None
    for head in range(min(shared, HEAD_MAX), max(0, shared - LAST_EXCHANGE - 1), -1):
        run = _rejoin(known, conversation, contents[head:], after=head)
        if run is not None and (found is None or head + run.known > found.known):
            found = Match(conversation, run.offset - head, head + run.known, head)
    return found


def _rejoin(known: list[bytes], conversation: Conversation, contents: list[bytes], *, after: int = -1) -> Match | None:
    """Match a client that trims its own history: find the longest run from behind `after` to the conversation's end.

    The last exchange may be missing or different (an edit, or a reply that the client never got), but two messages in a
    row must agree.
    """
    end = len(known) - LAST_EXCHANGE
    overlap = _overlap(known[after + 1 : max(0, end)], contents)
    for offset in [end - overlap] if overlap >= SHARED_MIN else range(max(after + 1, end - 1), end + 1):
        agreed = max(SHARED_MIN, end - offset)
        if known[offset : offset + agreed] == contents[:agreed]:
            more = aligning.common_length(contents, known, agreed, offset + agreed)
            return Match(conversation, offset, agreed + more)
    return None


def _overlap(known: list[bytes], contents: list[bytes]) -> int:
    """The length of the longest end of `known` that `contents` begins with, or 0.

    In linear time, by the prefix function of Knuth, Morris and Pratt: where few words recur, each place begins like it.
    """
    if not contents or contents[0] not in known:
        return 0
    known = known[known.index(contents[0]) :]
    if known == contents[: len(known)]:
        return len(known)
    joined = [*contents[: len(known)], b"", *known]  # nothing says b"": no match goes on beyond it
    lengths = [0]  # for each place, of the longest run that ends there and begins the contents
    for content in joined[1:]:
        length = lengths[-1]
        while length and content != joined[length]:
            length = lengths[length - 1]
        lengths.append(length + (content == joined[length]))
    return lengths[-1]


def _newest_only(conversation: Conversation, content_digests: Sequence[bytes]) -> Match:
    """Match a thin client: its messages come behind the end, unless the conversation ends with them (a retry)."""
    offset = max(0, len(conversation) - len(content_digests))
    if [buffered.content_digest for buffered in conversation.messages[offset:]] == list(content_digests):
        return Match(conversation, offset, len(content_digests))
    return Match(conversation, len(conversation), 0)


# -- answers that are given anew or in parts ------------------------------------------------------------------------


def answer_start(conversation: Conversation, position: int) -> int | None:
    """Where the answer behind `position` begins that is dropped once the model has answered anew: behind the results of
    its calls, which nobody says again. None if there is no answer, or if somebody spoke after it."""
    tail = [None if item.message is None else item.message.role for item in conversation.messages[position:]]
    if tail[:1] != ["assistant"] or None in tail or "user" in tail:
        return None
    start = max((place + 1 for place, role in enumerate(tail) if role != "assistant"), default=0)
    return position + start if start < len(tail) else None


def is_sent_in_parts(conversation: Conversation, position: int, messages: Sequence[Message]) -> bool:
    """Whether these messages, with which a client goes on at `position`, have all that the answer there says.

    Some clients send each of an answer's calls with its result behind it, as a message of its own.
    """
    if len(conversation) != position + 1 or (answer := conversation.messages[position].message) is None:
        return False
    parts = [one for one in takewhile(lambda one: not one.opens_turn, messages) if one.role == answer.role]
    told = Counter(call.form for part in parts for call in part.tool_calls)
    is_said = not answer.said.strip() or any(part.said.strip() == answer.said.strip() for part in parts)
    return is_said and Counter(call.form for call in answer.tool_calls) <= told and not answer.attachments


def prefill(conversation: Conversation, position: int, message: Message) -> Message | None:
    """The beginning of an answer that a request ended with: a prefill, or an answer that is to be continued.

    llama.cpp goes on from a last message of the assistant's; Open WebUI's and LibreChat's "continue" send it so.
    """
    last = conversation.messages[position - 1].message if position else None
    if last is None or last.role != "assistant" or last.tool_calls or message.role != "assistant":
        return None
    return last


def joined(beginning: Message, message: Message) -> Message:
    """An answer with its beginning; some servers repeat that one themselves."""
    if message.text.startswith(beginning.text):
        return message
    said = beginning.said + message.said if beginning.said + message.said != beginning.text + message.text else UNSET
    return msgspec.structs.replace(message, text=beginning.text + message.text, own_words=said)
