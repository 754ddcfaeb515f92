"""A live conversation: its messages, what of them is stored, and what is left out of the prompt.

Rule: the client's array is the truth for the live part; a conversation only ever grows. An edit or a regenerated reply
*forks* it and changes nothing in it, so positions and marks stay valid for work under way in the background.

Every message has a digest that is chained to its predecessors', so equal digests at one position mean equal histories
up to there, and the longest known prefix is found by bisection. A conversation has two marks, both counts of messages
from its beginning:

    0 ........ left_out ........ end        0 ........ stored ........ end
    | not in the prompt | in it  |          | in the log       | not yet |

Whole turns leave by the mark. There are exceptions on both sides of it: instructions before it that stay (`kept`), and
behind it messages that left one by one (`gone`) or whose text a line replaces in the prompt (`lines`).

What leaves is durable, in the log or in the journal; a message keeps its text here until it is in the log and out of
the prompt. So either mark may be ahead of the other.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from memd.entries import PUBLIC_ID_DIGITS_MIN
from memd.messages import LEADING_ROLES, ROOT_DIGEST, Block, Message, chain, chain_all

Run = tuple[int, int, int]
"""Messages that both have: where they begin in a history, where in a conversation, how many they are."""

_NAMED = re.compile(rf"\bmem:([0-9a-f]{{{PUBLIC_ID_DIGITS_MIN},32}})")


class Buffered(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One message of a conversation."""

    digest: bytes
    content_digest: bytes
    tokens: int
    """Counted with the bundled tokenizer, before the model's drift."""
    message: Message | None
    """None once the message is stored and out of the prompt: then only its identity matters. Out of the prompt but not
    stored it keeps its text, which is still to be stored and meanwhile found by its words."""
    stored_as: bytes = b""
    """The digest under which it was first said, where a client has rewritten the history before it, or under which the
    log of an earlier version has it."""
    is_pruned: bool = False
    """The client sends less of it than was said: the text here, and what is stored, is not in the prompt."""
    is_repeat: bool = False
    """The log has its text from elsewhere, under another digest. The text stays here, so that it is stored if that is
    lost."""
    is_erased: bool = False
    """Its text was erased: a client that sends it again has it in its prompts, and nothing is stored of it."""

    @property
    def identity(self) -> bytes:
        """The digest by which the log knows it, whatever was rewritten before it since."""
        return self.stored_as or self.digest

    def saying(self, message: Message) -> Buffered:
        """The same with the text that its client has sent again; without it if that was erased."""
        return msgspec.structs.replace(self, message=message.erased if self.is_erased else message)

    @property
    def without_text(self) -> Buffered:
        """The same after its text was erased."""
        left = None if self.message is None else self.message.erased
        return msgspec.structs.replace(self, message=left, is_erased=True)


class Line(msgspec.Struct, frozen=True):
    """A line that stands in the prompt in place of a long result."""

    text: str
    tokens: int
    """Raw, the message around it included."""

    @property
    def chunk_ids(self) -> list[str]:
        """The public ids that it names (see `compaction.line_text`)."""
        return _NAMED.findall(self.text)


class Rewriting(msgspec.Struct, frozen=True, array_like=True):
    """How the messages of a branch come from those of its parent."""

    runs: list[Run]
    """Taken over as they are."""
    added: list[Buffered]
    """The others in order, without chained digests; without a text where the one in `same` has it."""
    same: list[tuple[int, int]]
    """Positions of added messages that count as a message of the parent, each with its place there."""
    stored: int
    left_out: int
    blocks: list[tuple[int, int]]
    """Places of user messages of the parent whose blocks stay, each with its position in the branch."""
    gone: list[int] = []
    """Positions that left the prompt one by one, as in `Departed`."""
    lines: dict[int, Line] = {}
    lost: list[int] = []
    """Positions whose texts the log has lost, as in `Lowered`."""


def is_remembered(message: Message) -> bool:
    """Whether there is something in a message to store; an instruction is stored only once it has left the prompt."""
    return bool(message.said.strip() or message.tool_calls)


def is_answer(message: Message | None) -> bool:
    """Whether the model says or calls something in it; what programs write in its name is none."""
    return message is not None and message.role == "assistant" and is_remembered(message)


def is_instruction(message: Message | None) -> bool:
    """Whether this is a system or developer message; in mid-conversation it stays when its neighbours leave."""
    return message is not None and message.role in LEADING_ROLES


class Counted(msgspec.Struct, frozen=True):
    """A model's own count of a prompt, beside ours: only what changes afterwards must be estimated."""

    model: str
    raw_tokens: int
    prompt_tokens: int
    attachments: int = 0
    """Images in it; what one takes differs from model to model and from image to image."""


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
        self.origin: tuple[str, int | None] | None = None
        """The conversation that it was forked from, and where; None for where: its client rewrote the history. Not
        journalled: receipts tell it of the turn that it was forked in."""
        self.messages: list[Buffered] = []
        self.stored = 0
        self.left_out = 0
        self.gone: set[int] = set()
        """Positions from `left_out` on that left the prompt one by one."""
        self.kept: set[int] = set()
        """Positions of instructions before `left_out` that are still in the prompt."""
        self.owed: set[int] = set()
        """Positions of instructions that left the prompt and are not in the log yet, wherever `stored` is."""
        self.lost: set[int] = set()
        """Positions whose text the log has lost: stored when the client sends it again, wherever `left_out` is."""
        self.lines: dict[int, Line] = {}
        """By position: what stands in the prompt in place of a result."""
        self.former_lines: dict[int, Line] = {}
        """Those that have left since and whose results are not in the log yet: they are stored as a line named them."""
        self.blocks: dict[bytes, Block] = {}
        """By the digest of the user message that each stands before."""
        self.arrivals: dict[TurnKey, float] = {}
        """The first arrival of each recent request, in seconds of the caller's clock."""
        self.abandoned = False
        """Its client continued from an earlier point. What was said here is stored all the same."""
        self.dropped_from: int | None = None
        """From here on it is an answer that was given anew elsewhere: only that one is stored."""
        self.used_at = 0.0
        self.changes = 0
        """How often something else changed than that messages were appended or stored: what is known of its beginning
        holds as long as this does."""
        self.awaiting = 0
        """The requests of it that a model answers just now; not journalled: nobody answers what was asked before."""
        self.counted: Counted | None = None
        """Of the latest prompt; not journalled, the next answer tells it again."""

    def become(self, other: Conversation) -> Conversation:
        """Take everything over from another one, which is not used any more."""
        counted, changes, awaiting = self.counted, self.changes + 1, self.awaiting
        self.__dict__.update(other.__dict__)
        self.counted, self.changes, self.awaiting = counted, changes, awaiting
        return self

    def copied(self) -> Conversation:
        """The same as it is now, which does not change any more."""
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
        """The position up to which its messages are stored."""
        return len(self.messages) if self.dropped_from is None else self.dropped_from

    @property
    def author(self) -> str:
        """The principal who said the latest of it; empty for the owner."""
        return next((str(item.message.author or "") for item in reversed(self.messages) if item.message), "")

    @property
    def has_erased(self) -> bool:
        """Whether the text of a message of it was erased, so that only here it is known that it was said."""
        return any(item.is_erased for item in self.messages)

    @property
    def is_answered(self) -> bool:
        """Whether the last word is the model's, so that no answer is awaited."""
        last = self.messages[-1].message if self.messages else None
        return last is not None and last.role == "assistant"

    @property
    def end_digest(self) -> bytes:
        """The digest that the next message is chained to."""
        return self.messages[-1].digest if self.messages else ROOT_DIGEST

    def is_visible(self, position: int) -> bool:
        """Whether the message is in the prompt, or a line in its place."""
        return position in self.kept if position < self.left_out else position not in self.gone

    def visible_positions(self, end: int | None = None) -> list[int]:
        """The positions of the messages in the prompt, ascending, up to before `end`."""
        behind = range(self.left_out, len(self.messages) if end is None else end)
        return [*sorted(self.kept), *(behind if not self.gone else (p for p in behind if p not in self.gone))]

    def left_out_count(self, end: int | None = None) -> int:
        """How many of the messages before `end` are not in the prompt."""
        end = len(self) if end is None else end
        gone = sum(self.left_out <= position < end for position in self.gone)
        return min(end, self.left_out) + gone - len(self.kept)

    def tokens_at(self, position: int) -> int:
        """Raw tokens that the message takes in the prompt: none if it left, those of the line in its place."""
        if not self.is_visible(position):
            return 0
        line = self.lines.get(position)
        return self.messages[position].tokens if line is None else line.tokens

    def visible_tokens(self) -> int:
        """Raw tokens of all that is in the prompt."""
        return self.tokens_of(self.visible_positions())

    def tokens_of(self, positions: Iterable[int]) -> int:
        """Raw tokens of these messages in the prompt, all of them visible; there may be thousands."""
        messages, lines = self.messages, self.lines
        if not lines:
            return sum([messages[position].tokens for position in positions])
        return sum([(lines.get(position) or messages[position]).tokens for position in positions])

    def tokens_between(self, start: int, end: int) -> int:
        """Raw tokens of the messages from `start` to before `end`."""
        return sum(buffered.tokens for buffered in self.messages[start:end])

    def last_user_position(self, end: int | None = None) -> int | None:
        """The position of the last user message before `end`, where the open turn begins; None if there is none."""
        for position in range((len(self) if end is None else end) - 1, -1, -1):
            message = self.messages[position].message
            if message is not None and message.opens_turn:
                return position
        return None

    def mark_stored(self, position: int, instructions: Iterable[int] = (), repeats: Iterable[int] = ()) -> None:
        """Note that everything before `position` is in the log, and the instructions at these positions are; `repeats`:
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
        """Take everything before `position` out of the prompt, with its blocks; instructions stay. It is durable."""
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
        """Take these messages out of the prompt one by one, and put lines in place of others. They must be durable."""
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
        """Move the marks back, to before what is not in the log after all. What has its text here is visible again;
        what has none is `gone` until its client sends it again. Those in `lost` are awaited even when the conversation
        has gone on without them."""
        self.lost.update(lost)
        self.gone |= {p for p in range(left_out, self.left_out) if self.messages[p].message is None}
        self.kept = {position for position in self.kept if position < left_out}
        self.stored, self.left_out = min(stored, self.stored), min(left_out, self.left_out)

    def mark_returned(self, left_out: int, messages: Mapping[int, Message]) -> None:
        """Bring everything from `left_out` on back into the prompt; `messages`: texts that are not here any more."""
        self.changes += 1
        self.left_out = min(left_out, self.left_out)
        self.kept = {position for position in self.kept if position < self.left_out}
        self.gone, self.lines = set(), {}
        for position, message in messages.items():
            self.messages[position] = self.messages[position].saying(message)

    def mark_heard(self, messages: Mapping[int, Message]) -> None:
        """Take in texts that were lost, by position: to be stored, and visible again if nothing behind them left."""
        for position, message in messages.items():
            self.messages[position] = self.messages[position].saying(message)
            if position < self.left_out and is_instruction(message):
                self.owed.add(position)
        self.gone.difference_update(messages)
        self.lost.difference_update(messages)
        self.stored = min([self.stored, *messages])

    def forget(self, digests: Collection[bytes], uuids: Collection[bytes]) -> None:
        """Drop the text of these messages, and the blocks that show one of these chunks. Marks and places stay as they
        are, so a client that sends the messages again is known, and nothing is stored."""
        self.changes += 1
        for position, item in enumerate(self.messages):
            if item.identity in digests:
                self.messages[position] = item.without_text
        shown = [key for key, block in self.blocks.items() if any(chunk.uuid in uuids for chunk in block.chunks)]
        for key in shown:
            del self.blocks[key]

    @property
    def departed_end(self) -> int:
        """The position behind the last message that left, or that a line replaced: up to there all is to be stored."""
        return max(self.left_out, 1 + max(self.gone, default=-1), 1 + max(self.lines, default=-1))

    @property
    def settled(self) -> int:
        """Everything before this position is in the log and out of the prompt, and has no text here any more."""
        return min(self.stored, self.left_out)

    def _drop_line(self, position: int) -> None:
        if (line := self.lines.pop(position, None)) is not None and position >= self.stored:
            self.former_lines[position] = line

    def _drop_texts(self, positions: Iterable[int]) -> None:
        """Drop the texts that neither a prompt nor the log needs; that there was nothing to store stays known."""
        for index in positions:
            item = self.messages[index]
            if index < self.settled and index not in self.kept and index not in self.owed and not item.is_repeat:
                left = None if item.message is None or is_remembered(item.message) else item.message.without_text
                self.messages[index] = msgspec.structs.replace(item, message=left)

    def fork(self, conversation_id: str, at: int) -> Conversation:
        """A new conversation with the first `at` messages of this one. A question that was answered before the fork is
        to be stored once more, together with its new answer. Where a journal is damaged, there may be fewer messages
        than that."""
        at = min(at, len(self))
        branch = self.copied()  # with its arrivals: a retry is one wherever it ends up
        branch.id, branch.origin = conversation_id, (self.id, at)
        branch.abandoned, branch.dropped_from, branch.changes, branch.awaiting = False, None, 0, 0
        del branch.messages[at:]
        asked = branch.messages[-1].message if at else None
        begun = at - 1 if asked is not None and asked.opens_turn else at
        branch.stored, branch.left_out = min(self.stored, begun), min(self.left_out, at)
        for positions in (branch.gone, branch.kept, branch.owed, branch.lost):
            positions -= {position for position in positions if position >= at}
        for lines in (branch.lines, branch.former_lines):
            for position in [one for one in lines if one >= at]:
                del lines[position]
        shared = {buffered.digest for buffered in branch.messages}
        branch.blocks = {digest: block for digest, block in self.blocks.items() if digest in shared}
        return branch

    def rewritten(self, conversation_id: str, session: str | None, way: Rewriting) -> Conversation:
        """A new conversation with a history that the client rewrote."""
        branch = Conversation(conversation_id, session)
        branch.origin = self.id, None
        same, added = dict(way.same), iter(way.added)
        for start, place, length in [*way.runs, (len(way.added) + len(self), len(self), 0)]:
            for item in islice(added, max(0, start - len(branch))):
                former = self.messages[same[len(branch)]] if same.get(len(branch), len(self)) < len(self) else None
                branch._extend([item if former is None else _standing_for(item, former)])
            taken = self.messages[place : place + length]
            if branch.end_digest == (self.messages[place - 1].digest if 0 < place <= len(self) else ROOT_DIGEST):
                branch.messages += taken  # so far nothing was rewritten
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
        """Append messages from elsewhere, chained to those before; they stay known by the digests that they had."""
        digest = self.end_digest
        for item in items:
            digest, former = chain(digest, item.content_digest), item.identity
            stored_as = b"" if former == digest else former
            self.messages.append(msgspec.structs.replace(item, digest=digest, stored_as=stored_as))


def _standing_for(item: Buffered, former: Buffered) -> Buffered:
    """A message that counts as a former one, with that one's text if it has it still."""
    if former.message is None and item.message is not None:
        former = former.saying(item.message)
    changes = {"digest": b"", "content_digest": item.content_digest, "tokens": item.tokens}
    is_pruned = former.is_pruned or item.is_pruned
    return msgspec.structs.replace(former, **changes, stored_as=former.identity, is_pruned=is_pruned)


class History(msgspec.Struct, frozen=True):
    """The messages of a request behind the leading system messages, and their content digests."""

    messages: Sequence[Message]
    contents: Sequence[bytes]
    count: Callable[[Sequence[Message], Sequence[bytes]], Sequence[int]]
    """Counts the raw tokens of some of them: of a long history only what is new is asked for."""
    session: str | None = None
    """The client's own name for the conversation, if it gave one."""
    is_thin: bool = False
    """The client sends only new messages."""
    author: str | None = None
    """The principal who sends it, whose conversations alone are continued by their session; None: anybody's are."""
    stored_as: Callable[[], Sequence[bytes]] = tuple
    """For each message the digest under which the log of an earlier version has it, or none; asked for a history of
    which more than an exchange is not known."""

    def __len__(self) -> int:
        return len(self.messages)

    def behind(self, conversation: Conversation, start: int = 0, stored_as: Sequence[bytes] = ()) -> list[Buffered]:
        """The messages from `start` on, as they stand behind a conversation's end. `stored_as`: see `Buffered`."""
        messages, contents = self.messages[start:], self.contents[start:]
        known_as = stored_as[start:] or [b""] * len(contents)
        digests = chain_all(contents, conversation.end_digest)
        return list(map(Buffered, digests, contents, self.count(messages, contents), messages, known_as))
