"""A live conversation: its messages, which of them are stored, and which are left out of the prompt.

Rule: the client's list of messages is the truth for the live part; a conversation only grows. An edit or a regenerated
reply *forks* it without changing it, so positions and marks stay valid for background work.

Each message has a digest chained to its predecessors', so equal digests at one position mean equal histories up to
there, and bisection finds the longest known prefix. A conversation has two marks, both counts of messages from its
beginning:

    0 ........ left_out ........ end        0 ........ stored ........ end
    | not in the prompt | in it  |          | in the log       | not yet |

Whole turns leave by the mark. Exceptions: instructions before it that stay (`kept`), and messages behind it that left
one by one (`gone`) or are replaced by a line in the prompt (`lines`).

Messages that left are durable, in the log or in the journal. A message keeps its text here until it is in the log and
out of the prompt; so either mark may be ahead of the other.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice, takewhile

import msgspec

from memd.entries import PUBLIC_ID_DIGITS_MIN
from memd.messages import LEADING_ROLES, ROOT_DIGEST, Block, Message, chain, chain_all

Run = tuple[int, int, int]
"""Messages that both have: start in a history, start in a conversation, and length."""

_NAMED = re.compile(rf"\bmem:([0-9a-f]{{{PUBLIC_ID_DIGITS_MIN},32}})")


class Buffered(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One message of a conversation."""

    digest: bytes
    content_digest: bytes
    tokens: int
    """Counted with the bundled tokenizer, without the model's drift."""
    message: Message | None
    """None once the message is stored and out of the prompt, when only its identity matters. Until it is stored it
    keeps its text, which can be found by its words meanwhile."""
    stored_as: bytes = b""
    """The digest under which it was first said, if a client has rewritten the history before it, or under which the log
    of an earlier version has it."""
    is_pruned: bool = False
    """The client sends only a part of it; the full text is kept here and in the log, but is not in the prompt."""
    is_repeat: bool = False
    """The log has its text from elsewhere, under another digest. The text stays here, to be stored if that copy is
    lost."""
    is_erased: bool = False
    """Its text was erased. A client that sends it again still has it in its prompts, but nothing of it is stored."""

    @property
    def identity(self) -> bytes:
        """The digest by which the log knows it, even if the history before it was rewritten."""
        return self.stored_as or self.digest

    def saying(self, message: Message) -> Buffered:
        """Return a copy with the text that the client sent again; without it if erased."""
        return msgspec.structs.replace(self, message=message.erased if self.is_erased else message)

    @property
    def without_text(self) -> Buffered:
        """A copy after its text was erased."""
        left = None if self.message is None else self.message.erased
        return msgspec.structs.replace(self, message=left, is_erased=True)


class Line(msgspec.Struct, frozen=True):
    """A line in the prompt that replaces a long result."""

    text: str
    tokens: int
    """Raw, including the message around it."""

    @property
    def chunk_ids(self) -> list[str]:
        """The public ids in it (see `compaction.line_text`)."""
        return _NAMED.findall(self.text)


class Rewriting(msgspec.Struct, frozen=True, array_like=True):
    """The derivation of a branch's messages from those of its parent."""

    runs: list[Run]
    """Runs taken over unchanged."""
    added: list[Buffered]
    """The others in order, without chained digests; without text if the parent's message in `same` has it."""
    same: list[tuple[int, int]]
    """Positions of added messages that count as one of the parent's, each with that one's position."""
    stored: int
    left_out: int
    blocks: list[tuple[int, int]]
    """Positions of the parent's user messages whose blocks stay, each with its position in the branch."""
    gone: list[int] = []
    """Positions that left the prompt one by one, as in `Departed`."""
    lines: dict[int, Line] = {}
    lost: list[int] = []
    """Positions whose texts the log has lost, as in `Lowered`."""


def is_remembered(message: Message) -> bool:
    """Return whether a message has something to store; an instruction is stored only once it has left the prompt."""
    return bool(message.said.strip() or message.tool_calls)


def is_answer(message: Message | None) -> bool:
    """Return whether the model says or calls something in it; text that programs write as the model does not count."""
    return message is not None and message.role == "assistant" and is_remembered(message)


def is_instruction(message: Message | None) -> bool:
    """Return whether this is a system or developer message; in mid-conversation it stays when its neighbours leave."""
    return message is not None and message.role in LEADING_ROLES


class Counted(msgspec.Struct, frozen=True):
    """A model's own count of a prompt, beside ours; only later changes need an estimate."""

    model: str
    raw_tokens: int
    prompt_tokens: int
    attachments: int = 0
    """Number of images in it; their tokens differ by model and image."""


class TurnKey(msgspec.Struct, frozen=True):
    """Two requests with equal keys are one request, sent twice."""

    last_digest: bytes
    memory_in: bytes
    """Digest of the request's MemoryIn."""


class Conversation:
    """One path through the tree of histories. Positions count messages after the leading system messages."""

    def __init__(self, conversation_id: str, session: str | None = None) -> None:
        self.id = conversation_id
        self.session = session
        self.origin: tuple[str, int | None] | None = None
        """The conversation it was forked from, and the position; None if its client rewrote the history. Not
        journalled, because only receipts report it, for the turn in which it was forked."""
        self.messages: list[Buffered] = []
        self.stored = 0
        self.left_out = 0
        self.gone: set[int] = set()
        """Positions from `left_out` on that left the prompt one by one."""
        self.kept: set[int] = set()
        """Positions of instructions before `left_out` that are still in the prompt."""
        self.owed: set[int] = set()
        """Positions of instructions that left the prompt and are not in the log yet, regardless of `stored`."""
        self.lost: set[int] = set()
        """Positions whose text the log has lost; stored when the client sends it again, regardless of `left_out`."""
        self.lines: dict[int, Line] = {}
        """Lines in the prompt that replace results, by position."""
        self.former_lines: dict[int, Line] = {}
        """Lines that have left before their results were stored, which are stored with the ids in the line."""
        self.blocks: dict[bytes, Block] = {}
        """By the digest of the user message behind each."""
        self.replaced: dict[bytes, frozenset[bytes]] = {}
        """Identities of the answers that a turn got before its branch, by its user message's digest. Not journalled."""
        self.arrivals: dict[TurnKey, tuple[float, int]] = {}
        """First arrival of each recent request, in seconds of the caller's clock, and the log's head then."""
        self.abandoned = False
        """Its client continued from an earlier point. Its messages are stored all the same."""
        self.dropped_from: int | None = None
        """Start of an answer that was regenerated elsewhere; only the new answer is stored."""
        self.used_at = 0.0
        self.changes = 0
        """Counts changes other than appending and storing messages. Facts about its beginning stay valid while this is
        equal."""
        self.awaiting = 0
        """Number of its requests that a model is answering now. Not journalled, because a restart ends them."""
        self.counted: Counted | None = None
        """Count of the latest prompt. Not journalled, because the next answer repeats it."""

    def become(self, other: Conversation) -> Conversation:
        """Take everything over from another one, which is no longer used, except what only this daemon knows."""
        counted, changes, awaiting = self.counted, self.changes + 1, self.awaiting
        used_at = self.used_at if len(self) == len(other) else other.used_at  # it has grown now
        self.__dict__.update(other.__dict__)
        self.counted, self.changes, self.awaiting, self.used_at = counted, changes, awaiting, used_at
        return self

    def copied(self) -> Conversation:
        """Return a copy of its present state."""
        twin = copy.copy(self)
        twin.messages, twin.gone, twin.kept = [*self.messages], {*self.gone}, {*self.kept}
        twin.owed, twin.lost = {*self.owed}, {*self.lost}
        twin.lines, twin.former_lines = {**self.lines}, {**self.former_lines}
        twin.blocks, twin.arrivals = {**self.blocks}, {**self.arrivals}
        return twin

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        state = "abandoned " if self.abandoned else ""
        return f"<Conversation {self.id} {state}left_out={self.left_out} stored={self.stored} end={len(self)}>"

    @property
    def wanted_end(self) -> int:
        """End of the messages to be stored."""
        return len(self.messages) if self.dropped_from is None else self.dropped_from

    @property
    def author(self) -> str:
        """The principal who said its latest message; empty for the owner."""
        return next((str(item.message.author or "") for item in reversed(self.messages) if item.message), "")

    @property
    def has_erased(self) -> bool:
        """True if a message's text was erased, so that only this conversation still knows of the message."""
        return any(item.is_erased for item in self.messages)

    @property
    def is_answered(self) -> bool:
        """True if the last message is the model's, so that no answer is awaited."""
        last = self.messages[-1].message if self.messages else None
        return last is not None and last.role == "assistant"

    @property
    def end_digest(self) -> bytes:
        """The digest to which the next message is chained."""
        return self.messages[-1].digest if self.messages else ROOT_DIGEST

    def is_visible(self, position: int) -> bool:
        """Return whether the message, or a line in its place, is in the prompt."""
        return position in self.kept if position < self.left_out else position not in self.gone

    def visible_positions(self, end: int | None = None) -> list[int]:
        """Return the positions of the messages in the prompt before `end`, ascending."""
        behind = range(self.left_out, len(self.messages) if end is None else end)
        return [*sorted(self.kept), *(behind if not self.gone else (p for p in behind if p not in self.gone))]

    def digests_shown(self, positions: Iterable[int]) -> set[bytes]:
        """Return the digests of the messages at these positions, without results that a line replaces."""
        shown = [self.messages[position] for position in positions if position not in self.lines]
        stored = [item.stored_as for item in shown if item.stored_as and not item.is_pruned]
        return {item.digest for item in shown}.union(stored)

    def left_out_count(self, end: int | None = None) -> int:
        """Return how many of the messages before `end` are not in the prompt."""
        end = len(self) if end is None else end
        gone = sum(self.left_out <= position < end for position in self.gone)
        return min(end, self.left_out) + gone - len(self.kept)

    def tokens_at(self, position: int) -> int:
        """Return the raw tokens of a message in the prompt: 0 if it left, those of the line if one replaces it."""
        if not self.is_visible(position):
            return 0
        line = self.lines.get(position)
        return self.messages[position].tokens if line is None else line.tokens

    def visible_tokens(self) -> int:
        """Return the raw tokens of all visible messages."""
        return self.tokens_of(self.visible_positions())

    def tokens_of(self, positions: Iterable[int]) -> int:
        """Return the raw tokens of these visible messages; there may be thousands."""
        messages, lines = self.messages, self.lines
        if not lines:
            return sum([messages[position].tokens for position in positions])
        return sum([(lines.get(position) or messages[position]).tokens for position in positions])

    def tokens_between(self, start: int, end: int) -> int:
        """Return the raw tokens of the messages from `start` to before `end`."""
        return sum(buffered.tokens for buffered in self.messages[start:end])

    def last_user_position(self) -> int | None:
        """Return the position of the last user message, which opens the turn; None if there is none."""
        messages = ((position, self.messages[position].message) for position in reversed(range(len(self))))
        return next((position for position, one in messages if one is not None and one.opens_turn), None)

    def mark_stored(self, position: int, instructions: Iterable[int] = (), repeats: Iterable[int] = ()) -> None:
        """Note that everything before `position`, and the instructions at these positions, are in the log; `repeats`:
        see `Buffered.is_repeat`."""
        for index in repeats:
            self.messages[index] = msgspec.structs.replace(self.messages[index], is_repeat=True)
        done = self.settled
        self.stored = max(self.stored, position)
        self.former_lines = {index: line for index, line in self.former_lines.items() if index >= self.stored}
        self._drop_texts(range(done, self.settled))
        self.owed.difference_update(instructions)
        self._drop_texts(instructions)

    def mark_left_out(self, position: int) -> None:
        """Remove everything before `position`, which must be durable, from the prompt, with its blocks; instructions
        stay."""
        if position <= self.left_out:
            return
        self.changes += 1
        for index in range(self.left_out, position):
            buffered = self.messages[index]
            self.blocks.pop(buffered.digest, None)
            self._drop_line(index)
            if index not in self.gone and is_instruction(buffered.message):
                self.kept.add(index)
            self.gone.discard(index)
        done = self.settled
        self.left_out = max(self.left_out, position)
        self._drop_texts(range(done, self.settled))

    def mark_gone(self, positions: Iterable[int], lines: Mapping[int, Line]) -> None:
        """Remove messages from the prompt one by one, and replace others by lines. They must be durable."""
        self.changes += 1
        for position in (one for one in positions if one < len(self)):
            self._drop_line(position)
            if is_instruction(self.messages[position].message):
                self.owed.add(position)
            if position < self.left_out:
                self.kept.discard(position)
            else:
                self.gone.add(position)
        self.lines.update((position, line) for position, line in lines.items() if position < len(self))

    def mark_lost(self, stored: int, left_out: int, lost: Iterable[int]) -> None:
        """Move the marks back to before messages that the log turns out to lack. Those with text here become visible
        again; the others are `gone` until the client sends them again. Those in `lost` are awaited even if the
        conversation has moved on."""
        self.lost.update(lost)
        self.gone |= {p for p in range(left_out, self.left_out) if self.messages[p].message is None}
        self.kept = {position for position in self.kept if position < left_out}
        self.stored, self.left_out = min(stored, self.stored), min(left_out, self.left_out)

    def mark_returned(self, left_out: int, messages: Mapping[int, Message]) -> None:
        """Return everything from `left_out` on to the prompt; `messages`: texts that were dropped here."""
        self.changes += 1
        self.left_out = min(left_out, self.left_out)
        self.kept = {position for position in self.kept if position < self.left_out}
        self.gone, self.lines = set(), {}
        for position, message in messages.items():
            self.messages[position] = self.messages[position].saying(message)

    def mark_heard(self, messages: Mapping[int, Message]) -> None:
        """Take lost texts, by position: to be stored, and visible again unless something behind them left."""
        for position, message in messages.items():
            self.messages[position] = self.messages[position].saying(message)
            if position < self.left_out and is_instruction(message):
                self.owed.add(position)
        self.gone.difference_update(messages)
        self.lost.difference_update(messages)
        self.stored = min([self.stored, *messages])

    def forget(self, digests: Collection[bytes], uuids: Collection[bytes]) -> None:
        """Drop the text of these messages, and blocks that show one of these chunks. Marks and positions stay, so the
        messages are recognized if a client sends them again, and are not stored."""
        self.changes += 1
        for position, item in enumerate(self.messages):
            if item.identity in digests:
                self.messages[position] = item.without_text
        shown = [key for key, block in self.blocks.items() if any(chunk.uuid in uuids for chunk in block.chunks)]
        for key in shown:
            del self.blocks[key]

    @property
    def departed_end(self) -> int:
        """End of the last message that left or was replaced by a line; everything before it must be stored."""
        return max(self.left_out, 1 + max(self.gone, default=-1), 1 + max(self.lines, default=-1))

    @property
    def settled(self) -> int:
        """Everything before this position is in the log and out of the prompt, and its text was dropped here."""
        return min(self.stored, self.left_out)

    def _drop_line(self, position: int) -> None:
        if (line := self.lines.pop(position, None)) is not None and position >= self.stored:
            self.former_lines[position] = line

    def _drop_texts(self, positions: Iterable[int]) -> None:
        """Drop texts that neither a prompt nor the log needs; messages that had nothing to store stay recognizable."""
        for index in positions:
            item = self.messages[index]
            if index < self.settled and index not in self.kept and index not in self.owed and not item.is_repeat:
                left = None if item.message is None or is_remembered(item.message) else item.message.without_text
                self.messages[index] = msgspec.structs.replace(item, message=left)

    def fork(self, conversation_id: str, at: int) -> Conversation:
        """Return a new conversation with the first `at` messages (fewer if a journal is damaged). A question answered
        before the fork is stored once more, with its new answer."""
        at = min(at, len(self))
        branch = self.copied()  # with its arrivals, so that a retry is recognized in either
        branch.id, branch.origin = conversation_id, (self.id, at)
        branch.abandoned, branch.dropped_from, branch.changes, branch.awaiting = False, None, 0, 0
        del branch.messages[at:]
        asked = branch.messages[-1].message if at else None
        begun = at - 1 if asked is not None and asked.opens_turn else at
        branch.stored, branch.left_out = min(self.stored, begun), min(self.left_out, at)
        for positions in (branch.gone, branch.kept, branch.owed, branch.lost):
            positions -= {position for position in positions if position >= at}
        branch.lines = {position: line for position, line in self.lines.items() if position < at}
        branch.former_lines = {position: line for position, line in self.former_lines.items() if position < at}
        if (opened := branch.last_user_position()) is not None:
            turn = branch.messages[opened].digest
            answer = takewhile(lambda one: one.message is None or not one.message.opens_turn, self.messages[at:])
            before = self.replaced.get(turn, frozenset[bytes]())
            branch.replaced = {**self.replaced, turn: before.union(one.identity for one in answer)}
        shared = {buffered.digest for buffered in branch.messages}
        branch.blocks = {digest: block for digest, block in self.blocks.items() if digest in shared}
        return branch

    def rewritten(self, conversation_id: str, session: str | None, way: Rewriting) -> Conversation:
        """Return a new conversation with a history that the client rewrote."""
        branch = Conversation(conversation_id, session)
        branch.origin = self.id, None
        same, added = dict(way.same), iter(way.added)
        for start, place, length in [*way.runs, (len(way.added) + len(self), len(self), 0)]:
            for item in islice(added, max(0, start - len(branch))):
                former = self.messages[same[len(branch)]] if same.get(len(branch), len(self)) < len(self) else None
                branch._extend([item if former is None else _standing_for(item, former)])
            taken = self.messages[place : place + length]
            if branch.end_digest == (self.messages[place - 1].digest if 0 < place <= len(self) else ROOT_DIGEST):
                branch.messages += taken  # nothing was rewritten so far
            else:
                branch._extend(taken)
        for place, position in way.blocks:
            if max(place - len(self), position - len(branch)) < 0 and self.messages[place].digest in self.blocks:
                branch.blocks[branch.messages[position].digest] = self.blocks[self.messages[place].digest]
        branch.mark_stored(min(way.stored, len(branch)))
        branch.mark_left_out(min(way.left_out, len(branch)))
        branch.mark_gone(way.gone, way.lines)
        branch.lost = {position for position in way.lost if position < len(branch)}
        return branch

    def _extend(self, items: Iterable[Buffered]) -> None:
        """Append messages from elsewhere, chained to those before; they stay known by their former digests."""
        digest = self.end_digest
        for item in items:
            digest, former = chain(digest, item.content_digest), item.identity
            stored_as = b"" if former == digest else former
            self.messages.append(msgspec.structs.replace(item, digest=digest, stored_as=stored_as))


def _standing_for(item: Buffered, former: Buffered) -> Buffered:
    """Return a message that replaces a former one, with that one's text if it still has it."""
    if former.message is None and item.message is not None:
        former = former.saying(item.message)
    changes = {"digest": b"", "content_digest": item.content_digest, "tokens": item.tokens}
    is_pruned = former.is_pruned or item.is_pruned
    return msgspec.structs.replace(former, **changes, stored_as=former.identity, is_pruned=is_pruned)


class History(msgspec.Struct, frozen=True):
    """A request's messages after the leading system messages, and their content digests."""

    messages: Sequence[Message]
    contents: Sequence[bytes]
    count: Callable[[Sequence[Message], Sequence[bytes]], Sequence[int]]
    """Counts the raw tokens of some of them; for a long history only new ones are counted."""
    session: str | None = None
    """The client's own name for the conversation, if any."""
    is_thin: bool = False
    """The client sends only new messages."""
    author: str | None = None
    """The sending principal; only their conversations are continued by session. None: anybody's."""
    stored_as: Callable[[], Sequence[bytes]] = tuple
    """Returns for each message the digest by which an earlier version's log has it, or empty. Called if more than one
    exchange of the history is unknown."""

    def __len__(self) -> int:
        return len(self.messages)

    def behind(self, conversation: Conversation, start: int = 0, stored_as: Sequence[bytes] = ()) -> list[Buffered]:
        """Return the messages from `start` on, chained to a conversation's end. `stored_as`: see `Buffered`."""
        messages, contents = self.messages[start:], self.contents[start:]
        known_as = stored_as[start:] or [b""] * len(contents)
        digests = chain_all(contents, conversation.end_digest)
        return list(map(Buffered, digests, contents, self.count(messages, contents), messages, known_as))
