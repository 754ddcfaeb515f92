"""The hot buffer of one topic: its open conversations, their blocks, and the recently injected ids.

Rule: every change is an event that goes through `record` and into the journal, so replaying the journal rebuilds the
same buffer and byte for byte the same prompts. This module uses no clock, token budget or disk.

Two daemons may write to the buffer of one topic. Events of different conversations, or of one that only one side
continued, may be applied in any order. If both continued the same conversation, the first one counts. The other side's
messages are received again, as if their client had sent them now; they become a branch, or turn out to be the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat

import msgspec
from msgspec import UNSET, UnsetType

from memd.caching import Latest
from memd.conversation import events, matching
from memd.conversation.compaction import is_stored_kind
from memd.conversation.conversation import Buffered, Conversation, History, TurnKey
from memd.conversation.events import Appended, Branching, BufferEvent, ConversationEvent, OfAll, Placed, PlacedBefore
from memd.conversation.matching import ConversationIndex, Match
from memd.entries import digits_of_id
from memd.messages import BlockChunk, Message, block_digest, stamped
from memd.notes import Note
from memd.principals import surplus

PLACED_KEPT = 1024
"""Limit on block digests kept per topic, 16 bytes each: a client that echoes blocks sends all those of its history."""


class Arrival(msgspec.Struct, frozen=True):
    """The place of a request: its message `i` is the conversation's message `offset + i` (see `Match.head`)."""

    conversation: Conversation
    """It ends with the request's last message, and the request's open turn is visible in it."""
    offset: int
    end: int
    """End of the request's messages, where the reply goes."""
    opened: bool
    head: int = 0
    goes_back: bool = False
    """It goes back to before the end of another conversation; not where it goes on with one, though it rewrites it."""
    leaves_unstored: bool = False
    """The history was rewritten, and messages out of the prompt may be only in the journal."""
    former: Conversation | None = None
    """The longer conversation of which this request is a prefix: a retry, or abandoned once another answer comes."""
    beginning: Message | None = None
    """The beginning of an answer with which the request ended, as the client sent it; see `matching.beginning_of`."""


APART = "apart"
"""The id of a conversation that only a request without a trace has."""
CORRECTABLE_TURNS = 64
"""Number of a topic's latest turns whose shown chunks can be corrected."""


class HotBuffer:
    """All open conversations of a topic, most recently used last."""

    def __init__(self, new_id: Callable[[], str], window_turns: int = CORRECTABLE_TURNS) -> None:
        self._new_id = new_id
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._index = ConversationIndex()
        self._injected: list[events.Injected] = []
        self._window_turns = window_turns
        self._placed: Latest[bytes, None] = Latest(PLACED_KEPT)
        """Digests of the latest blocks in prompts, in the order of first use."""
        self.notes: dict[bytes, Note] = {}
        """Notes that are not in the log yet, by id."""
        self._unsaved: list[BufferEvent] = []
        self._touched: dict[str | bytes, None] = {}

    # -- for requests ---------------------------------------------------------------------------------------

    def receive(self, history: History, now: float, said_at: int | UnsetType = UNSET, author: str = "") -> Arrival:
        """Find or open the conversation of a request and append the request's new messages.

        Args:
            now: see `memd.clock.steady_now`.
            said_at, author: of new messages, see `stamped`; others keep theirs.
        """
        found = self._found(history)
        parent, kept = found.conversation, matching.kept_count(found, history.messages)
        beginning = matching.beginning_of(history.messages)
        known_as = history.stored_as() if len(history) - found.known > matching.LAST_EXCHANGE or found.runs else ()
        if parent is not None and (heard := matching.heard_again(found, history.messages)):
            heard = dict(zip(heard, stamped(heard.values(), said_at, author), strict=True))
            self.record(events.Heard(parent.id, heard))
        new = stamped(history.messages[0 if found.runs else kept :], said_at, author)
        history = msgspec.structs.replace(history, messages=[*history.messages[: len(history) - len(new)], *new])
        if parent is not None and found.runs:
            way = matching.rewriting_to(parent, found.runs, history, known_as)
            name = self._new_id()
            self.record(events.Branched(name, parent.id, way, now, history.session or parent.session))
            start, place, length = found.runs[-1]  # behind which there may be nothing but the beginning of an answer
            is_cut_short = beginning is not None and start + length == len(history) - 1
            dropped_from = matching.answer_start(parent, place + length) if is_cut_short else None
            self.record(events.Abandoned(parent.id, dropped_from))
            branch = self._conversations[name]
            arrival = Arrival(branch, 0, len(branch), opened=False, goes_back=len(branch) <= len(parent))
            leaves_unstored = branch.departed_end > branch.stored
            return msgspec.structs.replace(arrival, leaves_unstored=leaves_unstored, beginning=beginning)
        again = [] if parent is None else parent.messages[found.offset + kept : found.offset + found.known]
        conversation = self._open(history.session, now) if parent is None else self._fork(parent, found.offset + kept)
        added = history.behind(conversation, kept, known_as)
        for place, former in enumerate(again):
            added[place] = added[place].without_text if former.is_erased else added[place]
        self.record(Appended(conversation.id, added, now))
        end = found.offset + len(history)
        goes_back = parent is not None and parent is not conversation
        arrival = Arrival(conversation, found.offset, end, parent is None, found.head, goes_back, beginning=beginning)
        if parent is None or not goes_back:
            return arrival
        if found.known < len(history):
            position = found.offset + kept
            self._abandon(parent, position, answered=matching.replaces_answer(parent, position, new))
            return arrival
        return msgspec.structs.replace(arrival, former=parent)

    def glance(self, history: History) -> Arrival:
        """Like `receive`, but without a trace: the request gets a detached copy of the conversation."""
        found, apart = self._found(history).conversation, HotBuffer(lambda: APART)
        if found is not None:
            apart._take_in(found.copied())
        return apart.receive(history, 0.0)

    def reply(self, arrival: Arrival, message: Message, tokens: int, now: float) -> Conversation:
        """Append the model's answer and return the conversation that holds it.

        A different answer at the same place (regenerate) becomes a branch, and the branch with the former answer is
        abandoned, unless the new answer was interrupted: half an answer replaces none. If the client went on without
        the answer, the client's branch stays.
        """
        conversation, former, position = arrival.conversation, arrival.former, arrival.end
        whole = message
        if arrival.beginning is not None and message.role == "assistant":
            whole, message = matching.joined(arrival.beginning, message)
        answer = History([message], [message.content_digest], lambda *_: [tokens])
        if position == len(conversation):
            if former is not None and self.is_open(former):
                if former.messages[position].content_digest == message.content_digest:
                    self.take_arrivals(conversation, former)
                    self.record(events.Closed(conversation.id))  # a retry with the same answer: nothing new
                    return former
                if not message.interrupted:
                    self._abandon(former, position, answered=True)
            if whole is not message and not (conversation.stored >= position or conversation.messages[-1].is_erased):
                return self._continue(conversation, whole, tokens, now)
            self._append(conversation, answer, now)
            return conversation
        there = conversation.messages[position]
        if there.content_digest == message.content_digest:
            return conversation
        branch = self._fork(conversation, position)
        self._append(branch, answer, now)
        if there.message is not None and there.message.role == "assistant" and not message.interrupted:
            self._abandon(conversation, position, answered=True)
        else:
            self._append(conversation, History([], [], lambda *_: []), conversation.used_at)  # stays the latest
        return branch

    @contextmanager
    def awaited(self, conversation: Conversation) -> Iterator[None]:
        """Mark a conversation as being answered while the block runs: it is not idle, however long that takes, and its
        turn stays open."""
        conversation.awaiting += 1
        self._touched[conversation.id] = None
        try:
            yield
        finally:
            conversation.awaiting -= 1
            self._touched[conversation.id] = None

    def note_arrival(
        self, conversation: Conversation, key: TurnKey, now: float, freeze_seconds: float, head: int = 0
    ) -> bool:
        """Record the arrival of a request; True if the same one arrived less than `freeze_seconds` ago, a retry. An
        arrival after `now`, because a clock was set back across a restart, does not count. `head`: see `Arrived`."""
        first, _ = conversation.arrivals.get(key, (now + 1, 0))
        if 0 <= now - first <= freeze_seconds:
            return True
        self.record(events.Arrived(conversation.id, key, now, head))
        return False

    def take_arrivals(self, one: Conversation, into: Conversation) -> None:
        """Add the arrivals of a conversation to another one, so that a retry is recognized there."""
        for key, (at, head) in one.arrivals.items():
            if key not in into.arrivals:
                self.record(events.Arrived(into.id, key, at, head))

    def record(self, event: BufferEvent) -> None:
        """Change the buffer by an event."""
        self._apply(event)
        self._unsaved.append(event)

    def remove_blocks(self, conversation: Conversation, digests: Sequence[bytes]) -> None:
        """Remove blocks from the prompt for good; digests without a block are ignored."""
        present = [digest for digest in digests if digest in conversation.blocks]
        if present:
            self.record(events.Removed(conversation.id, present))

    def has_placed(self, text: str) -> bool:
        """Return whether this block was in a prompt; this distinguishes echoes of memd's blocks from imitations."""
        return block_digest(text) in self._placed

    def resolve(self, shown_id: str) -> BlockChunk | None:
        """Find the most recently injected chunk with this shown id or this full uuid."""
        digits = digits_of_id(shown_id)
        shown = (chunk for turn in reversed(self._injected) for chunk in turn.chunks)
        return next((one for one in shown if digits in (one.shown_id, one.uuid.hex())), None)

    def injected_uuids(self) -> set[bytes]:
        """Return the uuids of recently injected chunks."""
        return {chunk.uuid for turn in self._injected for chunk in turn.chunks}

    # -- for the archiver ---------------------------------------------------------------------------------

    def mark(
        self,
        conversation: Conversation,
        *,
        stored: int = 0,
        left_out: int = 0,
        instructions: Sequence[int] = (),
        repeats: Sequence[int] = (),
    ) -> None:
        """Advance the marks, see `Marked`; they never move back. Messages to leave out must be durable."""
        marks = max(stored, conversation.stored), max(left_out, conversation.left_out)
        self.record(events.Marked(conversation.id, *marks, list(instructions), list(repeats)))

    def lower_marks(self, is_in_log: Callable[[bytes], bool]) -> None:
        """Move all marks back to match the log, after it lost messages that the journal counts as stored."""
        for one in self.conversations():
            told: list[int] = []
            untold: list[int] = []  # only the client still has their text
            for position, item in enumerate(one.messages[: min(one.stored, one.wanted_end)]):
                is_vouched_for = position < one.settled if item.message is None else is_stored_kind(item.message)
                if is_vouched_for and not item.is_erased and not is_in_log(item.identity):
                    (untold if item.message is None else told).append(position)
            stored, left_out = min([one.stored, *told]), min([one.left_out, *untold])
            if untold or (stored, left_out) != (one.stored, one.left_out):
                self.record(events.Lowered(one.id, stored, left_out, untold))

    def conversations(self) -> list[Conversation]:
        """Return all open conversations, least recently used first."""
        return list(self._conversations.values())

    def take_touched(self) -> list[str | bytes]:
        """Return the ids of conversations that were opened, changed or closed since the last call, and of notes added
        or stored, each once."""
        touched, self._touched = [*self._touched], {}
        return touched

    def lives_on(self, item: Buffered, conversation: Conversation) -> bool:
        """Return whether another conversation that is not abandoned has the message too."""
        return any(one is not conversation and not one.abandoned for one in self.holders(item.identity))

    def holders(self, identity: bytes) -> Iterator[Conversation]:
        """Yield the conversations with the message that the log knows by this digest."""
        return self._index.holders(identity)

    @property
    def memory_bytes(self) -> int:
        """Memory of all messages besides their texts; approximate."""
        return self._index.memory_bytes

    @property
    def has_unstored(self) -> bool:
        """Whether notes or messages are pending."""
        return bool(self.notes) or any(one.stored < one.wanted_end or one.owed for one in self._conversations.values())

    @property
    def unstored_count(self) -> int:
        """Number of pending notes and messages; a message in several branches counts once."""
        live = self._conversations.values()
        waiting = {one.messages[at].identity for one in live for at in (*range(one.stored, one.wanted_end), *one.owed)}
        return len(self.notes) + len(waiting)

    def is_open(self, conversation: Conversation) -> bool:
        """Return whether the conversation is still in the buffer; it may be closed while a request uses it."""
        return self._conversations.get(conversation.id) is conversation

    # -- for sharing daemons ------------------------------------------------------------------------------------

    def of_id(self, conversation_id: str) -> Conversation | None:
        """Return the open conversation with this id, or None."""
        return self._conversations.get(conversation_id)

    def holder_of(self, digest: bytes) -> Conversation | None:
        """Return a conversation that has the message with this digest at its place, abandoned ones last."""
        holders = [one for one in self.holders(digest) if any(item.digest == digest for item in one.messages)]
        return max(holders, key=lambda one: (not one.abandoned, one.used_at), default=None)

    def rejoined(self, arrival: Arrival, digest: bytes) -> Arrival | None:
        """Return where a request's reply goes now; `digest`: that of its last message at its place. None if its
        conversation was closed."""
        one, end = arrival.conversation, arrival.end
        if self.is_open(one) and (end > len(one) or not end or one.messages[end - 1].digest == digest):
            return arrival
        holder = self.holder_of(digest)
        return None if holder is None else msgspec.structs.replace(arrival, conversation=holder, former=None)

    def exchange(self, kept: HotBuffer, except_for: Collection[str]) -> None:
        """Take over another buffer's state except for some conversations; those in both stay the same objects."""
        mine = self._conversations
        self._touched |= dict.fromkeys((*mine, *self.notes, *kept.notes))
        self._conversations, self._index = OrderedDict(), ConversationIndex()
        for name, one in kept._conversations.items():
            if name not in except_for:
                self._take_in(mine[name].become(one) if name in mine else one)
        for name in except_for:
            self._take_in(mine[name])
        self._injected, self._placed, self.notes = kept._injected, kept._placed, kept.notes

    @property
    def unsaved(self) -> Sequence[BufferEvent]:
        """The events that the next `take_unsaved` returns."""
        return self._unsaved

    def leave_unsaved(self, events: Sequence[BufferEvent]) -> None:
        """Put events that were applied before all others of the next `take_unsaved`."""
        self._unsaved = [*events, *self._unsaved]

    # -- journal ------------------------------------------------------------------------------------------------

    def take_unsaved(self) -> list[BufferEvent]:
        """Return the events since the last call, in order, for the journal."""
        events, self._unsaved = self._unsaved, []
        return events

    def replay(self, events: Sequence[BufferEvent]) -> None:
        """Apply the events of a journal; those of closed conversations are skipped."""
        for event in events:
            self._apply(event)

    def retelling(self) -> Callable[[], list[BufferEvent]]:
        """Return a function that makes the shortest journal of the present buffer, in any thread; it may take
        seconds."""
        notes = [events.Noted(note_id, note) for note_id, note in self.notes.items()]
        placed = [PlacedBefore(list(self._placed))] if self._placed else []
        begun: list[BufferEvent] = [*placed, *self._injected, *notes]
        as_now = [one.copied() for one in self._conversations.values()]
        return lambda: [*begun, *events.retold(as_now)]

    # -- private ------------------------------------------------------------------------------------------------

    def _found(self, history: History) -> Match:
        """Return the place of a request. A client that continues after part of an answer has rewritten its history."""
        found, messages = matching.match(self._index, history), history.messages
        parent, known = found.conversation, found.known
        if parent is not None and found.runs and not any(found.runs[0][:2]) and found.runs[0][2] < len(messages):
            known = found.runs[0][2]
            is_continued = matching.continued_answer(parent, known, messages[known]) is not None
            return Match(parent, 0, known, runs=found.runs[:1]) if is_continued else found
        if parent is None or found.runs or found.head or not 0 < known < len(messages):
            return found
        place = matching.shortened_answer(parent, found.offset + known, messages[known])
        is_split = place is not None and matching.split_into(parent.messages[place], messages[known:]) > 1
        if place is None or (is_split and place >= parent.stored):
            return found
        return Match(parent, 0, known, runs=((0, found.offset, known),))

    def _open(self, session: str | None, now: float) -> Conversation:
        name = self._new_id()
        self.record(events.Opened(name, session, now))
        return self._conversations[name]

    def _fork(self, conversation: Conversation, position: int) -> Conversation:
        """Return this conversation if it ends at `position`, else a new branch that does."""
        if position == len(conversation):
            return conversation
        name = self._new_id()
        self.record(events.Forked(name, conversation.id, position))
        return self._conversations[name]

    def _abandon(self, conversation: Conversation, position: int, *, answered: bool = False) -> None:
        """Abandon the branch behind `position`, where the client continues differently, or the model has `answered`
        differently. Skipped if it may be another client's: a conversation with the same short beginning that is longer
        than an answer."""
        if position >= matching.SHARED_MIN or len(conversation) == position + 1:
            dropped_from = matching.answer_start(conversation, position) if answered else None
            self.record(events.Abandoned(conversation.id, dropped_from))

    def _continue(self, conversation: Conversation, whole: Message, tokens: int, now: float) -> Conversation:
        """Put an answer in the place of its beginning, with which the request ended: clients send them back as one
        message. (Behind a beginning that is in the log the rest is a message; see `matching.shortened_answer`.)"""
        start = len(conversation) - 1
        branch = self._fork(conversation, start)
        self.mark(branch, stored=min(conversation.stored, start))
        count = conversation.messages[start].tokens + tokens
        self._append(branch, History([whole], [whole.content_digest], lambda *_: [count]), now)
        is_over = conversation.awaiting <= 1  # nobody else waits for an answer in it
        self.record(events.Closed(conversation.id) if is_over else events.Abandoned(conversation.id, start))
        return branch

    def _append(self, conversation: Conversation, history: History, now: float) -> None:
        self.record(Appended(conversation.id, history.behind(conversation), now))

    def _apply(self, event: BufferEvent) -> None:
        if isinstance(event, events.Injected):
            self._injected.append(event)
            if len(self._injected) > self._window_turns:
                authors = [one.author for one in self._injected]
                for leaving in surplus(zip(authors, repeat(1), strict=False), self._window_turns):
                    del self._injected[leaving.place]
        elif isinstance(event, PlacedBefore):
            for digest in event.blocks:
                self._placed.setdefault(digest)
        elif isinstance(event, events.Noted):
            self.notes[event.id] = event.note
            self._touched[event.id] = None
        elif isinstance(event, events.NoteStored):
            self.notes.pop(event.id, None)
            self._touched[event.id] = None
        elif isinstance(event, events.Forgotten):
            digests, uuids = frozenset(event.digests), frozenset(event.uuids)
            self._touched |= dict.fromkeys(self._conversations)
            for conversation in self._conversations.values():
                conversation.forget(digests, uuids)
        elif isinstance(event, events.Opened):
            self._take_in(Conversation(event.conversation, event.session), event.at)
        elif isinstance(event, Branching):
            if (parent := self._conversations.get(event.parent)) is None:
                return
            if isinstance(event, events.Forked):
                self._take_in(parent.fork(event.conversation, event.position))
            else:
                self._take_in(parent.rewritten(event.conversation, event.session, event.rewriting), event.at)
        elif (subject := self._conversations.get(event.conversation)) is None:
            return
        elif isinstance(event, events.Closed):
            del self._conversations[event.conversation]
            self._touched[event.conversation] = None
            self._index.remove(subject)
        else:
            self._apply_to(subject, event)

    def _take_in(self, conversation: Conversation, used_at: float | None = None) -> None:
        conversation.used_at = conversation.used_at if used_at is None else used_at
        self._conversations[conversation.id] = conversation
        self._touched[conversation.id] = None
        self._index.note(conversation)

    def _apply_to(self, conversation: Conversation, event: ConversationEvent) -> None:
        self._touched[conversation.id] = None
        events.apply(event, conversation)
        if isinstance(event, Appended):
            self._conversations.move_to_end(conversation.id)
            self._index.note(conversation)
        elif isinstance(event, Placed) and event.block.chunks:
            self._placed.setdefault(block_digest(event.block.text))


def clashing(theirs: Iterable[BufferEvent], own: Iterable[BufferEvent]) -> set[str]:
    """Return the conversations that both sides continued, or one side closed, and our own branches from those."""
    their_grown, their_closed, their_subjects = _subjects(theirs)
    grown, closed, subjects = _subjects(own)
    found = (their_grown & grown) | (their_closed & subjects) | (closed & their_subjects)
    for event in own:
        if isinstance(event, Branching) and event.parent in found:
            found.add(event.conversation)
    return found


def rebased(
    buffer: HotBuffer, kept: HotBuffer, theirs: Sequence[BufferEvent] | None, own: Sequence[BufferEvent]
) -> None:
    """Replace a buffer's state by the stored one, plus its own events that are not stored yet.

    Its conversations stay the same objects, because running requests hold them.

    Args:
        buffer: has all of its own events; `own` are those that are not stored. Its unsaved events are replaced.
        kept: as rebuilt from the rows.
        theirs: events in the rows that the buffer did not have; None if unknown.
    """
    subjects = _subjects(own)[2]
    if theirs is None:
        clash = {name for name in subjects if kept.of_id(name) is not None or buffer.of_id(name) is None}
        begun = {one.conversation: one.parent for one in own if isinstance(one, Branching)}
        clash |= {name for name, parent in begun.items() if parent in clash or kept.of_id(parent) is None}
    else:
        clash = clashing(theirs, own)
    former = [one.copied() for one in buffer.conversations() if one.id in clash]
    own_alone = {one.id for one in buffer.conversations()} & subjects - clash
    buffer.exchange(kept, except_for=own_alone)
    buffer.take_unsaved()
    left = [event for event in own if isinstance(event, OfAll) or event.conversation not in clash]
    buffer.replay([event for event in left if isinstance(event, OfAll)])
    if theirs is not None:
        buffer.replay([event for event in theirs if not isinstance(event, OfAll) and event.conversation in own_alone])
    buffer.leave_unsaved(left)
    for one in former:
        _received_again(buffer, one)


def _received_again(buffer: HotBuffer, one: Conversation) -> None:
    """Add a conversation's messages to the buffer, unless it has them."""
    items = one.messages
    start = next((i + 1 for i in range(len(items) - 1, -1, -1) if items[i].message is None), 0)
    tail = items[start:]
    messages = [item.message for item in tail if item.message is not None]
    if not tail or buffer.holder_of(items[-1].digest) is not None:
        target = buffer.holder_of(items[-1].digest) if items else None
    else:
        contents, tokens = [item.content_digest for item in tail], [item.tokens for item in tail]
        target = buffer.receive(
            History(messages, contents, lambda some, _: tokens[len(tokens) - len(some) :], one.session), one.used_at
        ).conversation
    if target is not None:
        known = {item.digest for item in target.messages}
        for digest, block in one.blocks.items():
            if digest in known and digest not in target.blocks:
                buffer.record(Placed(target.id, digest, block))
        buffer.take_arrivals(one, target)


def _subjects(told: Iterable[BufferEvent]) -> tuple[set[str], set[str], set[str]]:
    """Return the conversations that grow, those that are closed, and all."""
    grown, closed, subjects = set(), set(), set()
    for event in told:
        if isinstance(event, OfAll):
            continue
        subjects.add(event.conversation)
        if isinstance(event, Branching):
            subjects.add(event.parent)
        if isinstance(event, Appended | events.Opened | Branching):
            grown.add(event.conversation)
        elif isinstance(event, events.Closed):
            closed.add(event.conversation)
    return grown, closed, subjects
