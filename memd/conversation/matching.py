"""Matching: which conversation a request belongs to, and how much of it is known already.

Rule: only digests decide: equal chained digests at one position mean equal histories up to there. A client that trims
its history, or rewrites its middle, is recognized by runs of content digests: equal contents in the same order.
Contents that occur once on each side are anchors (a patience diff). Of crossing anchors the longest ascending chain is
used, and each anchor is extended over equal neighbours. A regenerated or split answer is recognized by its text.

A rewritten history loses nothing that the conversation knows. A message that is still there keeps its identity in the
log, its text here and its block; messages that were left out of the prompt stay out. A pruned message in the place of
an earlier one (a tool result that became "[cleared]", an answer without its thoughts) counts as that one, and is not
stored again.

Looking up a request of some hundred messages takes well under a millisecond, regardless of the number of conversations.
So chained digests are computed only where branches part, conversations are never searched one by one, and time is
linear in the messages, whatever they contain.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

import msgspec
from msgspec import UNSET

from memd.conversation.conversation import Buffered, Conversation, History, Rewriting, Run, is_answer, is_instruction
from memd.messages import RESULT_ROLES, ROOT_DIGEST, Message, chain


def common_length(ours: Sequence[Hashable], theirs: Sequence[Hashable], one: int = 0, other: int = 0) -> int:
    """Return the number of equal contents from `one` in ours and `other` in theirs on. Compares slices, which is fast,
    with doubling and then halving length."""
    end = min(len(ours) - one, len(theirs) - other)
    known, step = 0, 4
    while step:
        step = min(step, end - known)
        if ours[one + known : one + known + step] == theirs[other + known : other + known + step]:
            known += step
            step *= 2
        else:
            end, step = known + step - 1, step // 2
    return known


def aligned(history: Sequence[Hashable], conversation: Sequence[Hashable]) -> list[Run]:
    """Return the runs that a history and a conversation share, both given by content digests; ascending in both."""
    history, conversation = list(history), list(conversation)
    head = common_length(history, conversation)
    tail = common_length(history[head:][::-1], conversation[head:][::-1])
    runs: list[Run] = [(0, 0, head)] if head else []
    ours, theirs = head, head
    anchors = _anchors(history[head : len(history) - tail], conversation[head : len(conversation) - tail], head)
    for one, other in (*anchors, (len(history), len(conversation))):
        if one < ours or other < theirs:
            continue  # an earlier anchor has been extended over it
        # Extended backwards to the run before, then forwards.
        while one > ours and other > theirs and history[one - 1] == conversation[other - 1]:
            one, other = one - 1, other - 1
        length = common_length(history, conversation, one, other)
        if length:
            runs.append((one, other, length))
        ours, theirs = one + length, other + length
    return runs


def parts(runs: Sequence[Run], stays: Callable[[int, int], bool]) -> Iterator[Run]:
    """Yield the parts of runs whose messages `stays` accepts, given their two positions."""
    for one, other, length in runs:
        begun = 0
        for i in range(length + 1):
            if i == length or not stays(one + i, other + i):
                if i > begun:
                    yield one + begun, other + begun, i - begun
                begun = i + 1


def gaps(runs: Sequence[Run], history: int, conversation: int) -> list[tuple[range, range]]:
    """Return the gaps between runs, in a history and a conversation of these lengths, unless empty on both sides."""
    found, ours, theirs = list[tuple[range, range]](), 0, 0
    for one, other, length in (*runs, (history, conversation, 0)):
        if one > ours or other > theirs:
            found.append((range(ours, one), range(theirs, other)))
        ours, theirs = one + length, other + length
    return found


def _anchors(history: Sequence[Hashable], conversation: Sequence[Hashable], start: int) -> list[tuple[int, int]]:
    """Return ascending pairs of positions, counted from `start`, of contents that occur once on each side."""
    ours, theirs = _once(history, start), _once(conversation, start)
    shared = ours.keys() & theirs.keys()
    pairs = [(ours[content], theirs[content]) for content in history if content in shared]
    places = [place for _, place in pairs]
    return pairs if places == sorted(places) else _ascending(pairs)


def _once(contents: Sequence[Hashable], start: int) -> dict[Hashable, int]:
    """Return the positions, counted from `start`, of contents that occur once."""
    places = dict(zip(contents, range(start, start + len(contents)), strict=True))
    if len(places) == len(contents):
        return places
    counts = Counter(contents)
    return {content: place for content, place in places.items() if counts[content] == 1}


def _ascending(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest chain of pairs, sorted by the first value, that also ascends in the second; of equal ones, the
    one that ends first: a note that a client moves along with its last message crosses the answer to that."""
    tops: list[int] = []  # the least second value at which a chain of each length ends
    ends: list[int] = []  # index of that pair
    before: list[int] = []
    number = -1
    for at, (_, place) in enumerate(pairs):
        length = bisect_left(tops, place)
        before.append(ends[length - 1] if length else -1)
        number = at if length == len(tops) else number
        tops[length : length + 1] = [place]
        ends[length : length + 1] = [at]
    chain: list[tuple[int, int]] = []
    while number >= 0:
        chain.append(pairs[number])
        number = before[number]
    return chain[::-1]


Holders = tuple[Conversation, ...]
"""The conversations that have one message, in the order of addition."""

MESSAGE_BYTES, SLOT_BYTES, CONVERSATION_BYTES = 400, 16, 1_800
"""Bytes of a message besides its text, of each place it has, and of a conversation (measured with tracemalloc)."""
CANDIDATES_MAX = 3
"""Limit on conversations compared with a request message by message."""
CLEARLY_MORE = 4
"""A conversation that shares so many times as much with a request as another one clearly is the right one."""


class ConversationIndex:
    """Chained digests and content digests of all messages, each with the conversations that have it."""

    def __init__(self) -> None:
        self._at, self._saying = HolderTable(), HolderTable()
        """By a message's chained digest, and by its content digest."""
        self._standing = HolderTable()
        """By the digest under which a message was first said, if it has another one now."""
        self._contents: dict[Conversation, list[bytes]] = {}
        self._used: dict[Conversation, int] = {}
        """Ordered by last use, latest last."""
        self._uses = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of all messages besides their texts, here and in their conversations; approximate."""
        places = sum(map(len, self._contents.values()))
        return MESSAGE_BYTES * len(self._at) + SLOT_BYTES * places + CONVERSATION_BYTES * len(self._contents)

    def contents(self, conversation: Conversation) -> list[bytes]:
        """Return the content digests of a conversation's messages; not to be changed."""
        return self._contents[conversation]

    def note(self, conversation: Conversation) -> None:
        """Add a conversation's new messages to the index, and make it the most recently used."""
        self._uses += 1
        self._used.pop(conversation, None)
        self._used[conversation] = self._uses
        contents = self._contents.setdefault(conversation, [])
        new = conversation.messages[len(contents) :]
        contents += [item.content_digest for item in new]
        self._at.add([item.digest for item in new], conversation)
        self._saying.add([item.content_digest for item in new], conversation)
        self._standing.add([item.stored_as for item in new if item.stored_as], conversation)

    def remove(self, conversation: Conversation) -> None:
        """Remove a conversation."""
        del self._used[conversation]
        self._at.remove([item.digest for item in conversation.messages], conversation)
        self._saying.remove(self._contents.pop(conversation), conversation)
        self._standing.remove([item.stored_as for item in conversation.messages if item.stored_as], conversation)

    def prefixes(self, contents: Sequence[bytes], session: str | None) -> tuple[int, list[Conversation]]:
        """Return the length of a request's longest known beginning, and the conversations that have it, most recently
        used first; with a session, only its own."""
        known, digest = 0, ROOT_DIGEST
        holders: Collection[Conversation] = ()
        while known < len(contents):
            # A conversation that continues like the request shows how far they agree; there the branches may part.
            step = chain(digest, contents[known])
            further = self._of_session(self._at.holders(step), session)
            if not further:
                break
            guide = max(further, key=self._used.__getitem__)
            known += common_length(contents, self._contents[guide], known, known)
            digest = guide.messages[known - 1].digest
            holders = self._of_session(self._at.holders(digest), session)
        return known, sorted(holders, key=self._used.__getitem__, reverse=True)

    def holders(self, identity: bytes) -> Iterator[Conversation]:
        """Yield the conversations with the message that the log knows by this digest."""
        yield from self._at.holders(identity)
        yield from self._standing.holders(identity)

    def knows(self, contents: Sequence[bytes]) -> bool:
        """Return whether any conversation has any of these contents."""
        return any(map(self._saying.holders, contents))

    def likeliest(self, contents: Sequence[bytes], session: str | None) -> list[Conversation]:
        """Return the few conversations that share most with a request; contents in many conversations count little."""
        saying = [*filter(None, map(self._saying.holders, contents))]
        found, by_id = Counter(map(id, saying)), {id(holders): holders for holders in saying}
        weights: dict[Conversation, float] = {}
        for key, holders in by_id.items():
            weight = found[key] / len(holders)
            for conversation in self._of_session(holders, session):
                weights[conversation] = weights.get(conversation, 0.0) + weight
        best = sorted(weights, key=lambda one: (-weights[one], -self._used[one]))[:CANDIDATES_MAX]
        return [one for one in best if weights[one] * CLEARLY_MORE >= weights[best[0]]]

    def newest(self, session: str | None, author: str | None) -> Conversation | None:
        """Return the conversation used last, by a principal or by anybody (None)."""
        own = (one for one in reversed(self._used) if session in (None, one.session))
        return next((one for one in own if author in (None, one.author)), None)

    def _of_session(self, holders: Collection[Conversation], session: str | None) -> Collection[Conversation]:
        return holders if session is None else [one for one in holders if one.session == session]


class HolderTable:
    """The conversations that have each message; messages with the same holders mostly share one tuple of them. A change
    takes time proportional to the conversation's length, however many others have the same messages."""

    def __init__(self) -> None:
        self._holders: dict[bytes, Holders] = {}
        self._alone: dict[Conversation, Holders] = {}
        """The tuple of each conversation alone."""

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, key: bytes) -> Holders:
        """Return the holders of one message."""
        return self._holders.get(key, ())

    def add(self, keys: Sequence[bytes], conversation: Conversation) -> None:
        """Note that a conversation has these messages too."""
        alone = self._alone.setdefault(conversation, (conversation,))
        before = [self._holders.get(key, ()) for key in keys]  # held, so that each keeps its `id`
        more = {id(held): held if conversation in held else (*held, conversation) for held in _each(before)}
        self._holders.update((key, more[id(held)] if held else alone) for key, held in zip(keys, before, strict=True))

    def remove(self, keys: Sequence[bytes], conversation: Conversation) -> None:
        """Remove a conversation, which has these messages and no others."""
        self._alone.pop(conversation, None)
        before = [self._holders.get(key, ()) for key in keys]
        fewer = {id(held): tuple(one for one in held if one is not conversation) for held in _each(before)}
        for key, held in zip(keys, before, strict=True):
            if left := fewer[id(held)]:
                self._holders[key] = left if len(left) > 1 else self._alone[left[0]]
            else:
                self._holders.pop(key, None)


def _each(before: Sequence[Holders]) -> Collection[Holders]:
    return {id(held): held for held in before}.values()


SHARED_MIN, TELLING_TOKENS = 2, 50
"""Messages that a request must share with a conversation to count as an edit or a trimmed history of it. A single one
proves nothing, because many conversations begin with the same words; but an answer of so many tokens, or in the same
session, does, if the questions differ in a reminder only (recorded: one of 27 tokens behind 15 different messages)."""
LAST_EXCHANGE = 2
"""Messages at a conversation's end that a trimmed history may lack or replace: a question and its answer."""
HEAD_MAX = 4
"""Limit on the messages that a client keeps at the front when it drops its middle (Cline keeps two). They stay in the
prompt as long as the client sends them; with more, the history counts as rewritten, and its front can leave."""


class Match(msgspec.Struct, frozen=True):
    """The place of a request in a conversation: its message `i` is the conversation's message `offset + i`. Its first
    `head` messages are the conversation's first, which a client that trims its history may keep."""

    conversation: Conversation | None
    """None if no conversation matches."""
    offset: int = 0
    known: int = 0
    """Number of the request's messages that the conversation has already, including the head."""
    head: int = 0
    runs: tuple[Run, ...] = ()
    """If not empty, the history was rewritten: the messages shared with the conversation; `offset` and `head` are then
    meaningless."""


def match(index: ConversationIndex, history: History) -> Match:
    """Find the conversation that a request continues. With a session only its own conversation counts, and a request
    that shares nothing with it is appended; a thin client's messages are always appended. Neither is appended to a
    message of another principal, which would appear as the sender's own in the prompt."""
    contents, session, thin = list(history.contents), history.session, history.is_thin
    newest = index.newest(session, history.author) if thin or session is not None else None
    if thin:
        return Match(None) if newest is None else _newest_only(newest, contents)
    known, holders = index.prefixes(contents, session)
    # Of several branches that share equally much, the one that ends there is continued.
    ending = next((one for one in holders if len(one) == known), None)
    best = Match(ending or holders[0], 0, known) if known else Match(None)
    new = contents[known:]
    if known and (not new or (ending is not None and (len(new) <= LAST_EXCHANGE or not index.knows(new)))):
        return best
    compared = dict.fromkeys([*holders[:2], *index.likeliest(contents, session)])
    explained = [_trimmed(index.contents(one), one, contents) for one in compared]
    explained += [_rewritten(index.contents(one), one, history) for one in compared]
    # Of equals the first, because an edit is the simplest explanation.
    best = max([best, *itertools.chain.from_iterable(explained)], key=lambda one: one.known)
    if best.conversation is None and newest is not None:
        return _newest_only(newest, contents)
    return best


def kept_count(found: Match, messages: Sequence[Message]) -> int:
    """Return how many of a request's messages keep their place in the conversation: usually all known ones. But the
    request's open turn must be visible, so a request that goes back behind `left_out` adds that turn as new. (A head
    that the client keeps stays in the prompt as long as the client sends it.)"""
    if found.conversation is None:
        return 0
    visible_from = found.conversation.left_out - found.offset
    opened = max(0, len(messages) - 1)
    while opened > 0 and not messages[opened].opens_turn:
        opened -= 1
    return min(found.known, opened) if found.head <= opened < visible_from else found.known


def heard_again(found: Match, messages: Sequence[Message]) -> dict[int, Message]:
    """Return the messages of a request whose text was lost, by their positions in the conversation."""
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


def _trimmed(known: list[bytes], conversation: Conversation, contents: list[bytes]) -> Iterator[Match]:
    """Match a client that keeps the end of its history, or its head and its end, by the longest run that reaches the
    conversation's end. It may lack or replace some of the last exchange (an edit, or a reply it never got), but two
    messages in a row must agree. The kept end may begin with the words that follow the kept head, so the head may be a
    little shorter than the shared beginning."""
    shared, end = common_length(contents, known), len(known) - LAST_EXCHANGE
    for head in (0, *range(min(shared, HEAD_MAX), max(0, shared - LAST_EXCHANGE - 1), -1)):
        behind = head + 1 if head else 0
        overlap = _overlap(known[behind : max(0, end)], contents[head:])
        for offset in range(max(behind, end - max(1, overlap)), end + 1):
            length = common_length(contents, known, head, offset)
            if length >= SHARED_MIN:
                yield Match(conversation, offset - head, head + length, head)
                break


def _overlap(known: list[bytes], contents: Sequence[bytes]) -> int:
    """Return the length of the longest end of `known` with which `contents` begins, or 0. Takes linear time by the
    prefix function of Knuth, Morris and Pratt, even if few words recur everywhere."""
    if not contents or contents[0] not in known:
        return 0
    known = known[known.index(contents[0]) :]
    if known == contents[: len(known)]:
        return len(known)
    joined = [*contents[: len(known)], b"", *known]  # no content is b"", so no match crosses it
    lengths = [0]  # per position, the length of the longest run that ends there and begins the contents
    for content in joined[1:]:
        length = lengths[-1]
        while length and content != joined[length]:
            length = lengths[length - 1]
        lengths.append(length + (content == joined[length]))
    return lengths[-1]


def _rewritten(known: list[bytes], conversation: Conversation, history: History) -> Iterator[Match]:
    """Match a client that edits, deletes or prunes within its history, by all runs that agree, wherever they are."""
    runs = aligned(history.contents, known)
    if not runs or runs[-1][0] == runs[-1][1] == 0:
        return  # only a prefix
    known_count = sum(length for _, _, length in runs)
    if runs[0][:2] != (0, 0) and known_count < max(SHARED_MIN, (len(history) - 1) // 2):
        former = conversation.messages[0].message
        is_alike = former is not None and _is_part(history.messages[0].said, former.said)
        is_told = history.session is not None or conversation.tokens_between(1, len(conversation)) >= TELLING_TOKENS
        if not (is_alike and is_told) or runs != [(1, 1, len(conversation) - 1)]:
            return  # another conversation with the same words
    yield Match(conversation, 0, known_count, 0, tuple(runs))


def _is_part(one: str, other: str) -> bool:
    """Return whether one of two texts is whole lines of the other; a word of it would prove nothing."""
    short, long = sorted((one, other), key=len)
    return bool(short.strip()) and f"\n{short}\n" in f"\n{long}\n"


def _newest_only(conversation: Conversation, contents: Sequence[bytes]) -> Match:
    """Match a thin client: its messages follow the end. Those that the conversation ends with, because nobody answered
    them, are sent again."""
    known = _overlap([buffered.content_digest for buffered in conversation.messages], contents)
    return Match(conversation, len(conversation) - known, known)


# -- regenerated and split answers ---------------------------------------------------------------------------------


def answer_start(conversation: Conversation, position: int) -> int | None:
    """Return the start of the answer behind `position` that a regenerated one replaces: after the results of its calls,
    which nobody repeats. None if there is no answer, or a user spoke after it."""
    tail = [None if item.message is None else item.message.role for item in conversation.messages[position:]]
    if tail[:1] != ["assistant"] or None in tail or "user" in tail:
        return None
    start = max((place + 1 for place, role in enumerate(tail) if role != "assistant"), default=0)
    return position + start if start < len(tail) else None


def replaces_answer(conversation: Conversation, position: int, messages: Sequence[Message]) -> bool:
    """Return whether these messages, with which a client continues at `position`, take the place of the answer there:
    they contain another one (of several choices, or edited), or the whole answer in parts. Some clients send each of
    an answer's calls as a message of its own, followed by its result."""
    if len(conversation) != position + 1 or (answer := conversation.messages[position].message) is None:
        return False
    parts = [one for one in itertools.takewhile(lambda one: not one.opens_turn, messages) if one.role == answer.role]
    if not answer.tool_calls:
        return any(map(is_answer, parts))
    told = Counter(call.form for part in parts for call in part.tool_calls)
    is_said = not answer.said.strip() or any(part.said.strip() == answer.said.strip() for part in parts)
    return is_said and Counter(call.form for call in answer.tool_calls) <= told and not answer.attachments


def beginning_of(messages: Sequence[Message]) -> Message | None:
    """Return the beginning of an answer with which a request ends: a prefill, or an answer to continue. llama.cpp
    continues a last assistant message; "continue" of its page, of Open WebUI, LibreChat and SillyTavern send it so,
    as their users edited it and with white space of their own."""
    last = messages[-1] if messages else None
    return last if last is not None and last.role == "assistant" and not last.tool_calls else None


def joined(beginning: Message, message: Message) -> tuple[Message, Message]:
    """Return an answer joined with its beginning, and what came behind that; some servers repeat the beginning."""
    if message.text.startswith(beginning.text):
        return message, msgspec.structs.replace(message, text=message.text[len(beginning.text) :], own_words=UNSET)
    said = beginning.said + message.said if beginning.said + message.said != beginning.text + message.text else UNSET
    return msgspec.structs.replace(message, text=beginning.text + message.text, own_words=said), message


# -- the way to a rewritten history ------------------------------------------------------------------------


def rewriting_to(
    parent: Conversation, runs: Sequence[Run], history: History, stored_as: Sequence[bytes] = ()
) -> Rewriting:
    """Return the rewriting from `parent` to a request's history, given their common runs. `stored_as`: see
    `Buffered`."""
    nothing = [b""] * len(history)
    tokens = history.count(history.messages, history.contents)
    items = list(map(Buffered, nothing, history.contents, tokens, history.messages, stored_as or nothing))
    places = _places(parent, runs, items)
    left_out = _left_out(parent, places, items)
    # Without messages that return to the prompt and whose text the parent has dropped.
    kept = list(parts(runs, lambda ours, place: ours < left_out or parent.messages[place].message is not None))
    added: list[Buffered] = []
    same: list[tuple[int, int]] = []
    for ours, _ in gaps(kept, len(items), len(parent)):
        for position in ours:
            item, place = items[position], places.get(position)
            if place is not None:
                same.append((position, place))
                if (former := parent.messages[place].message) is not None:
                    is_pruned = former.said.strip() not in history.messages[position].said
                    item = msgspec.structs.replace(item, message=None, is_pruned=is_pruned)
            added.append(item)
    blocks = [
        (place, position)
        for position, place in places.items()
        if parent.blocks and position >= left_out and parent.messages[place].digest in parent.blocks
    ]
    stored = next((p for p in range(len(items)) if places.get(p, len(parent)) >= parent.stored), len(items))
    # Messages that the model has not answered yet are in the prompt, even if their text has left it before.
    answered = next((p for p in range(len(items) - 1, -1, -1) if is_answer(items[p].message)), 0)
    gone = [position for position in _gone(parent, places, items, left_out) if position <= answered]
    lines = {
        start + i: parent.lines[place + i]
        for start, place, length in kept
        for i in range(length if parent.lines else 0)
        if place + i in parent.lines and left_out <= start + i <= answered and start + i not in gone
    }
    return Rewriting(kept, added, same, stored, left_out, blocks, gone, lines)


def _places(parent: Conversation, runs: Sequence[Run], items: Sequence[Buffered]) -> dict[int, int]:
    """Return the parent's position of each of the history's messages that it has, pruned or not; ascending."""
    places = {start + i: place + i for start, place, length in runs for i in range(length)}
    pruned = {
        position: place
        for ours, theirs in gaps(runs, len(items), len(parent))
        if len(ours) == len(theirs)
        for position, place in zip(ours, theirs, strict=True)
        if _is_pruned(items[position].message, parent.messages[place].message)
    }
    start, place, length = runs[-1]
    if start + length < len(items):
        shortened = shortened_answer(parent, place + length, items[start + length].message)
        if shortened is not None:
            count = split_into(parent.messages[shortened], [one.message for one in items[start + length :]])
            pruned |= dict.fromkeys(range(start + length, start + length + count), shortened)
    return dict(sorted((places | pruned).items())) if pruned else places


def split_into(answer: Buffered, messages: Sequence[Message | None]) -> int:
    """Return into how many of these messages a client split an answer; 1 if it did not. What was taken for the answer's
    beginning was another agent's message then, and the model did not go on with it."""
    told = (one.said for one in itertools.takewhile(is_answer, messages) if one is not None)
    whole = None if answer.message is None else answer.message.said
    return next((count for count, said in enumerate(itertools.accumulate(told), 1) if said == whole), 1)


def continued_answer(parent: Conversation, start: int, message: Message | None) -> int | None:
    """Return the position of the end of an answer which a client joined with its beginning at `start`: it asked to
    continue that, with words in between (SillyTavern's nudge) or none."""
    for place in range(start + 1, min(start + 3, len(parent)) if is_answer(message) else 0):
        rest, known = parent.messages[place].message, parent.messages[start].content_digest
        if message is None or rest is None or rest.tool_calls or not is_answer(rest):
            continue
        begun, found, behind = message.said.rpartition(rest.said.strip())
        if found and not behind.strip() and Message("assistant", begun).content_digest == known:
            return place
    return None


def shortened_answer(parent: Conversation, start: int, message: Message | None) -> int | None:
    """Return the position, within the open turn at `start`, of the answer of which a client kept only this beginning or
    end, or to which it added a name. It may have stopped the answer, shortened old ones, or hidden a prefill, and may
    have dropped the calls before it. See `continued_answer` too."""
    if (end := continued_answer(parent, start, message)) is not None:
        return end
    for place in range(start, len(parent)):
        former = parent.messages[place].message
        if former is None or message is None or former.opens_turn:
            return None
        whole, said = former.said.strip(), message.said.strip()
        if _is_pruned(message, former) and (whole.startswith(said) or whole.endswith(said) or said.endswith(whole)):
            return place if message.role == "assistant" else None
    return None


_NAMED = re.compile(r"(?:[^:\n]{1,64}:\s?)?")


def _is_pruned(message: Message | None, former: Message | None) -> bool:
    """Return whether a message is the client's shortened version of a former one in the same place."""
    if message is None or former is None or message.role != former.role:
        return False
    if message.attachments or [one.form for one in message.tool_calls] != [one.form for one in former.tool_calls]:
        return False
    if message.role == "assistant" and _NAMED.fullmatch(message.said.removesuffix(former.said)):
        return True  # the client added its agent's name: LangGraph does, and SillyTavern in the text
    if len(message.said) >= len(former.said):
        return False
    if message.role in RESULT_ROLES:
        return message.tool_call_id == former.tool_call_id
    return bool(message.said.strip()) and message.said.strip() in former.said


def _gone(parent: Conversation, places: dict[int, int], items: Sequence[Buffered], left_out: int) -> list[int]:
    """Return the positions of messages that had left the parent's prompt one by one; units leave as a whole."""
    found = [position for position, place in places.items() if position < left_out and place in parent.owed]
    if not parent.gone:
        return found
    calls: dict[str, bool] = {}
    is_unit_gone = False
    for position in range(left_out, len(items)):
        message = items[position].message
        is_gone = places.get(position) in parent.gone
        if message is not None and message.role in RESULT_ROLES:
            is_gone = calls.get(message.tool_call_id, is_gone)
        elif message is not None:
            if is_answer(message) or message.opens_turn:
                is_unit_gone = is_gone
            elif not is_instruction(message):
                is_gone = is_unit_gone
            calls.update((call.id, is_gone) for call in message.tool_calls)
        if is_gone:
            found.append(position)
    return found


def _left_out(parent: Conversation, places: dict[int, int], items: Sequence[Buffered]) -> int:
    """Return the branch's `left_out`: the user message after the last one that is out of the parent's prompt, at most
    the one that opened the turn. 0 if the parent lacked most of the history before that."""
    if not parent.left_out:
        return 0
    out = [position for position, place in places.items() if place < parent.left_out]
    if not out or 2 * len(out) < out[-1]:
        return 0
    users = [position for position, item in enumerate(items) if item.message is not None and item.message.opens_turn]
    return next((position for position in users if position > out[-1]), users[-1] if users else 0)
