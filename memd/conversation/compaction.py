"""The model's window: the token budgets of one request, and the part of a conversation that leaves its prompt when the
window gets too small for it.

Rule: decisions from numbers and marks alone; those that change the beginning of the prompt are rare, because the model
reads everything behind a change anew. Budgets are in the model's own (drifted) tokens.

In the window `W`, beside system prompt and tools `S`, there is the reply `R`, this turn's block `I`, the blocks of
earlier turns `K` and the history. Where they do not fit together, they give way in this order:

    R   to min(max_tokens, max(512, W/16)), unless the upstream counts `max_tokens` against the window
    K   to nothing, all blocks at once
    I   to W/16
    history: its oldest part leaves

A prompt stays valid whatever leaves: results with their calls, a turn with its user message, no two user messages side
by side where the client had none. What leaves goes from the oldest to the newest, in this order: whole finished turns;
units of the last finished turn; of the open turn the results, each replaced by a line, then whole units.

A *unit* is a message that the model wrote, with the results of its calls; a *turn* is a user's message and its units:

    user | assistant, tool, tool | assistant, tool | assistant
           `----- unit -----'      `--- unit --'     `-unit-'
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec

from memd.conversation.conversation import Conversation, Line, is_answer, is_instruction, is_remembered
from memd.messages import LEADING_ROLES, NO_BLOCK, RESULT_ROLES, Message
from memd.settings.model import BufferSettings, InjectionSettings

UNLIMITED = 1 << 60
"""The thresholds as long as no window is known: then nothing leaves the prompt."""
SOFT_EIGHTHS = 7  # of the hard threshold
REPLY_SHARE = 8
"""A reply of unknown length is given an eighth of the window."""
REPLY_SHARE_MAX = 2
"""A client that asks for more than half the window as reply means "as much as possible": half is kept for it."""
REPLY_TOKENS_MIN = 512
INJECTION_SHARE_MAX = 4
"""The injection budget gets at most a quarter of the window."""
SMALL_BLOCK_TOKENS = 256
"""A block that shows a chunk of the usual length, or two."""
SHRUNK_SHARE = 16
"""The reply and the injection budget shrink to a sixteenth of the window before history leaves."""

_CALL_ID = attrgetter("id")


class Thresholds(msgspec.Struct, frozen=True):
    """Token budgets of one request, all in the model's own (drifted) tokens."""

    injection: int
    """The most that this turn's block may take."""
    sticky: int
    """The most that the blocks of earlier turns may take together."""
    soft: int
    """History above this is compacted in the background."""
    hard: int
    """History above this leaves before the request is forwarded."""
    room: int
    """For history and all blocks together: the window without system prompt and tools, and the shrunk reply."""
    standing: int
    """The tokens of system prompt and tools."""
    window: int | None = None
    """None: not known."""

    @property
    def injection_min(self) -> int:
        """The part of the room that history may not have: it is this turn's block's."""
        return self.room - self.hard


def injection_budget(injection_tokens: int, window: int | None) -> int:
    """The tokens that a turn's block may take: those configured, of a known window at most a quarter."""
    return injection_tokens if window is None else min(injection_tokens, window // INJECTION_SHARE_MAX)


def thresholds(
    buffer: BufferSettings,
    given: InjectionSettings,
    *,
    window: int | None,
    counts_reply: bool,
    max_tokens: int | None,
    standing_tokens: int,
) -> Thresholds:
    """The budgets for one request.

    Args:
        window: the model's context per slot in tokens; None if it is not known.
        counts_reply: the upstream refuses a request whose prompt and `max_tokens` together exceed the window.
        max_tokens: the reply's limit from the request; None or not positive if it has none.
        standing_tokens: the leading system messages and the tool definitions.
    """
    soft, hard = buffer.soft_tokens, buffer.hard_tokens
    injection = injection_budget(given.budget_tokens, window)
    kept = injection if window is None else min(injection, window // SHRUNK_SHARE)
    room = UNLIMITED
    if window is not None:
        asked = max_tokens if max_tokens is not None and max_tokens > 0 else None
        room = max(0, window - _reply(window, asked, standing_tokens, counts_reply) - standing_tokens)
    if hard != "auto":
        room = min(room, hard + kept)
    hard_tokens = max(0, room - kept)
    soft_tokens = hard_tokens * SOFT_EIGHTHS // 8 if soft == "auto" else min(soft, hard_tokens)
    return Thresholds(injection, given.sticky_tokens, soft_tokens, hard_tokens, room, standing_tokens, window)


def _reply(window: int, asked: int | None, standing_tokens: int, counts_reply: bool) -> int:
    """The tokens that are kept for the reply where the window is short of room."""
    if counts_reply and asked is not None and asked + standing_tokens + window // SHRUNK_SHARE <= window:
        return asked  # with less kept for it the request would be refused; where even this is too much, it is anyway
    wanted = min(window // REPLY_SHARE if asked is None else asked, window // REPLY_SHARE_MAX)
    return min(wanted, max(REPLY_TOKENS_MIN, window // SHRUNK_SHARE))


def keeps_earlier_blocks(limits: Thresholds, *, text: int, earlier: int, current: int) -> bool:
    """Whether the blocks of earlier turns may stay; if not, all of them leave at once.

    They leave when they exceed their own budget, or when the rest needs their room; in the second case history leaves
    with them, down to half, because all of it is read anew. To let this turn's block shrink a little first costs less
    than a change of the prompt's beginning on every turn of a window that is nearly full (what it may shrink to, but
    room for a small one and at most half, is kept for it; simulated at 8k over eight shapes of conversations: 28 to 98
    changes in 200 turns instead of 74 to 140, read over new 1.06 to 1.52 instead of 1.06 to 1.85).

    `text`, `earlier`, `current`: the tokens of visible history, earlier turns' blocks, and this turn's, if it has one.
    """
    wanted = min(limits.injection // 2, max(limits.injection_min, SMALL_BLOCK_TOKENS))
    return earlier <= limits.sticky and text + earlier + max(current, wanted) <= limits.room


def earlier_blocks(conversation: Conversation, current: bytes | None) -> dict[bytes, int]:
    """The raw tokens of the visible blocks of earlier turns, by the digest of the message that each stands before;
    `current` is that of the message that opened the present turn."""
    if not any(block.tokens and digest != current for digest, block in conversation.blocks.items()):
        return {}  # without a look at thousands of messages
    start, messages, blocks = conversation.left_out, conversation.messages, conversation.blocks
    with_block = [place for place in range(start, len(messages)) if messages[place].digest in blocks]
    visible = (messages[place].digest for place in with_block if conversation.is_visible(place))
    return {digest: tokens for digest in visible if digest != current and (tokens := blocks[digest].tokens)}


LINE_TOKENS = 40
"""About the tokens of the line that takes a result's place; a result of no more than twice as many stays."""
CALLS_SHARE = 3
"""Calls and lines of the open turn may take a third of what it may keep."""
LINE_IDS_MAX = 6
"""Ids of chunks that the line names."""


class Turn(msgspec.Struct, frozen=True):
    """A turn of the visible part of a conversation; it ends where the next one begins."""

    start: int
    """The position of the user's message; of the first visible message, where that is not a user's."""
    units: tuple[range, ...]
    end: int


class Departure(msgspec.Struct, frozen=True):
    """The parts of a conversation that leave its prompt next. Empty, nothing may leave."""

    left_out: int = 0
    """Whole turns: everything before this position leaves, its instructions excepted."""
    gone: tuple[int, ...] = ()
    """Positions behind it that leave one by one."""
    replaced: tuple[int, ...] = ()
    """Positions of results in whose place a line stays."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing leaves."""
        return not (self.left_out or self.gone or self.replaced)

    @property
    def end(self) -> int:
        """The position behind the last message that leaves: up to there the conversation must be durable."""
        return max((self.left_out, *(position + 1 for position in (*self.gone, *self.replaced))))

    def takes_behind(self, position: int) -> bool:
        """Whether something behind this position leaves one by one."""
        return any(place > position for place in (*self.gone, *self.replaced))


class Shown(msgspec.Struct, frozen=True):
    """The messages that are in a prompt, as long as the conversation has these `changes`."""

    changes: int
    positions: list[int]
    lines: dict[int, Line]
    """By position: what stands in the place of one."""


class Left(msgspec.Struct, frozen=True):
    """The messages and tokens that left a prompt."""

    messages: int
    replaced: int
    """Results in whose place a line stays."""
    tokens: int
    """Raw."""

    def __bool__(self) -> bool:
        return self.tokens > 0


def turns(conversation: Conversation) -> list[Turn]:
    """The turns of the visible part, oldest first. The last one is open, or was answered a moment ago."""
    if conversation.left_out == len(conversation):
        return []
    answered = _answered(conversation)
    starts = [conversation.left_out, *cut_positions(conversation, answered), len(conversation)]
    return [_turn(conversation, start, end, answered) for start, end in itertools.pairwise(starts)]


def departure(
    conversation: Conversation,
    *,
    fraction: float,
    excess_tokens: int = 0,
    upto: int | None = None,
    forced: bool = False,
) -> Departure:
    """Choose what leaves next: `excess_tokens` and `fraction` of what the prompt may keep, where that may leave.

    Where the last turn must give way, its block counts as kept, and the results that the model has read become lines,
    as many as it takes. Whole units leave only where that does not make room, or where their calls and lines take much,
    and then down to half of that again: each time that one leaves, all behind it is read anew, and the turn recalls.

    Args:
        excess_tokens: the tokens (raw) that the prompt has beyond what it may keep; 0 if no request waits for room.
        upto: only what stands before this position may leave, for what is not durable.
        forced: the request would be refused otherwise: of the open turn's last unit, too, as much leaves as must.
    """
    visible = turns(conversation)
    if not visible:
        return Departure()
    limit = len(conversation) if upto is None else upto
    *finished, last = visible
    kept_max = max(0, conversation.visible_tokens() - excess_tokens)
    wanted = excess_tokens + math.ceil(kept_max * fraction)
    chosen = _Chosen(conversation, wanted, limit if forced else min(limit, _read_end(conversation, last.start)))
    for turn in finished:
        chosen.take_turn(turn)
    chosen.limit = limit
    if chosen.is_short and (excess_tokens or finished_end(conversation) == len(conversation)):
        *read, newest = last.units or (range(0),)
        block = conversation.blocks.get(conversation.messages[last.start].digest, NO_BLOCK)
        chosen.wanted += math.ceil(block.tokens * fraction)
        chosen.replace_results(read)
        if chosen.is_short and (
            chosen.freed < excess_tokens or chosen.tokens_of(itertools.chain(*read)) >= kept_max // CALLS_SHARE
        ):
            chosen.wanted = wanted + math.ceil(kept_max * (1 - fraction) * fraction)
            chosen.take_units(read)
        if forced:  # of the unit that the model has not read yet what must leave, and no more
            chosen.wanted = excess_tokens
            chosen.replace_results([newest])
            chosen.replace_results([newest], longer_than=LINE_TOKENS)
    if not excess_tokens and chosen.freed < wanted // 2:
        return Departure()  # nobody waits for it, and the model would read all behind it anew
    return chosen.departure


def return_position(
    conversation: Conversation, opened: Sequence[int], first: int, *, whole_max: float, part_max: float
) -> int | None:
    """Where the part begins that comes back into the prompt of a branch, which takes over what another one left out.

    All of it, where that takes no more than `whole_max` tokens (raw); else the newest turns that `part_max` has room
    for. None if the prompt shows as much already.

    Args:
        opened: the positions at which turns begin, ascending.
        first: what stands before it is not in the request.
    """
    if conversation.tokens_between(first, len(conversation)) <= whole_max:
        start = first
    else:
        # Looked for by halves: there may be tens of thousands.
        at = bisect_left(opened, True, key=lambda one: conversation.tokens_between(one, len(conversation)) <= part_max)
        start = opened[at] if at < len(opened) else len(conversation)
    returning = conversation.tokens_between(start, len(conversation))
    return start if start < len(conversation) and returning > conversation.visible_tokens() else None


def shown_of(conversation: Conversation) -> Shown:
    """The messages that are in the prompt now."""
    return Shown(conversation.changes, conversation.visible_positions(), dict(conversation.lines))


def left_since(shown: Shown, conversation: Conversation) -> Left:
    """The part that has left the prompt since then."""
    if shown.changes == conversation.changes:
        return Left(0, 0, 0)
    messages = conversation.messages
    before = ((p, (shown.lines.get(p) or messages[p]).tokens) for p in shown.positions)
    changed = {p: size - now for p, size in before if (now := conversation.tokens_at(p)) < size}
    gone = sum(not conversation.is_visible(position) for position in changed)
    return Left(messages=gone, replaced=len(changed) - gone, tokens=sum(changed.values()))


class _Chosen:
    """Collects what leaves, until `wanted` tokens are free."""

    def __init__(self, conversation: Conversation, wanted: int, limit: int) -> None:
        self._conversation = conversation
        self.wanted = wanted
        self.limit = limit
        self._left_out = conversation.left_out
        self._gone: set[int] = set()
        self._replaced: set[int] = set()
        self.freed = 0

    @property
    def is_short(self) -> bool:
        return self.freed < self.wanted

    @property
    def departure(self) -> Departure:
        if self._left_out == self._conversation.left_out and not self._gone and not self._replaced:
            return Departure()
        return Departure(self._left_out, tuple(sorted(self._gone)), tuple(sorted(self._replaced)))

    def take_turn(self, turn: Turn) -> None:
        """Take a finished turn, or units of it, if all of it is more than is wanted or goes beyond the limit."""
        places = range(turn.start, turn.end)
        may_leave = turn.end <= self.limit
        if not may_leave or self.freed + sum(self._tokens(place) for place in places) > self.wanted:
            self.take_units(turn.units[:-1])  # without the last, its user's message would stand alone
        if self.is_short and may_leave and turn.start == self._left_out:
            self.freed += sum(self._tokens(place) for place in places if place not in self._gone)
            self._left_out = turn.end
            self._gone.difference_update(places)

    def take_units(self, units: Iterable[range]) -> None:
        """Take whole units, but for the instructions in them."""
        for unit in units:
            if not self.is_short or unit.stop > self.limit:
                return
            left = [
                p
                for p in unit
                if self._conversation.is_visible(p) and not is_instruction(self._conversation.messages[p].message)
            ]
            self.freed += self.tokens_of(left)
            self._gone.update(left)
            self._replaced.difference_update(left)

    def replace_results(self, units: Iterable[range], longer_than: int = 2 * LINE_TOKENS) -> None:
        for unit in units:
            if unit.stop > self.limit:
                return
            for place in unit:
                if self.is_short and self._is_long_result(place, longer_than):
                    self._replaced.add(place)
                    self.freed += self._saved(place)

    def _is_long_result(self, position: int, longer_than: int) -> bool:
        item = self._conversation.messages[position]
        is_shown = self._conversation.is_visible(position) and position not in self._conversation.lines
        is_result = item.message is not None and (item.message.role in RESULT_ROLES or bool(item.message.is_result))
        return is_shown and is_result and item.tokens > longer_than

    def tokens_of(self, positions: Iterable[int]) -> int:
        """The tokens that leave with these messages, beside what a line has freed already."""
        return sum(self._tokens(place) - self._saved(place) for place in positions)

    def _tokens(self, position: int) -> int:
        is_kept = is_instruction(self._conversation.messages[position].message)
        return 0 if is_kept else self._conversation.tokens_at(position)

    def _saved(self, position: int) -> int:
        """The tokens that a line chosen for this position has freed already."""
        return self._conversation.messages[position].tokens - LINE_TOKENS if position in self._replaced else 0


def cut_positions(conversation: Conversation, answered: Mapping[int, int] | None = None) -> list[int]:
    """Where the visible part may be cut, ascending: the positions of user messages that open a turn, the last included.
    The message at a cut stays in the prompt; the start of the visible part is no cut. `answered`: if it is known."""
    answered = _answered(conversation) if answered is None else answered
    start = conversation.left_out
    cuts: list[int] = []
    for position, item in enumerate(conversation.messages[start:], start):
        if item.message is not None and item.message.opens_turn and position > start:
            cuts.append(position)
        while cuts and cuts[-1] > answered.get(position, position):
            cuts.pop()  # somebody spoke between a call and this result of it
    return cuts


def _answered(conversation: Conversation) -> dict[int, int]:
    """By the position of each visible result: that of the message that called for it. Models use an id again in later
    turns, so the latest call counts. There may be many calls that nothing answers."""
    start = conversation.left_out
    visible = [(at, item.message) for at, item in enumerate(conversation.messages[start:], start) if item.message]
    ids = {message.tool_call_id for _, message in visible if message.role in RESULT_ROLES}
    called_at: dict[str, int] = {}
    answered: dict[int, int] = {}
    for position, message in visible:
        if message.role in RESULT_ROLES and message.tool_call_id in called_at:
            answered[position] = called_at[message.tool_call_id]
        if message.tool_calls and ids:
            called_at.update(dict.fromkeys(ids.intersection(map(_CALL_ID, message.tool_calls)), position))
    return answered


def _read_end(conversation: Conversation, end: int) -> int:
    """The position before `end` from which on the model has not read results: of calls that a user interrupted, or that
    a program gives it in the user's name with the next question. `end` if it has read all."""
    found = end
    for position in range(end - 1, conversation.left_out - 1, -1):
        message = conversation.messages[position].message
        if is_answer(message):
            return found
        if message is not None and (message.role in RESULT_ROLES or message.is_result):
            found = position
    return end


def _turn(conversation: Conversation, start: int, end: int, answered: Mapping[int, int]) -> Turn:
    """The turn from `start` to before `end`. A unit goes on until all results of its calls have come."""
    answered_until = {called: position for position, called in answered.items() if start <= position < end}
    begins: list[int] = []
    held_until = -1
    for position in range(start, end):
        message = conversation.messages[position].message
        if position > held_until and is_answer(message):
            begins.append(position)
        held_until = max(held_until, answered_until.get(position, -1))
    return Turn(start, tuple(range(*pair) for pair in itertools.pairwise([*begins, end])), end)


def surplus_instructions(conversation: Conversation, tokens_max: int) -> list[int]:
    """The oldest instructions in mid-conversation that must leave for the rest to take at most `tokens_max` (raw)."""
    messages = conversation.messages
    said = ((p, messages[p].message) for p in conversation.visible_positions())
    present = [p for p, message in said if message is not None and message.role in LEADING_ROLES]
    left = sum(conversation.tokens_at(position) for position in present)
    surplus = []
    for position in present:
        if left <= tokens_max:
            break
        surplus.append(position)
        left -= conversation.tokens_at(position)
    return surplus


def finished_end(conversation: Conversation) -> int:
    """The end of the last finished turn, up to which a conversation can be stored while it goes on."""
    if is_finished(conversation):
        return len(conversation)
    return max(cut_positions(conversation), default=conversation.left_out)


def is_finished(conversation: Conversation) -> bool:
    """Whether no turn is open: the last message is an assistant's without tool calls, or all has left the prompt."""
    if conversation.left_out == len(conversation):
        return True
    last = conversation.messages[-1].message
    return last is not None and last.role == "assistant" and not last.tool_calls


def goes_on(conversation: Conversation) -> bool:
    """Whether more of the last turn is to come: its answer, which a model gives just now, or the results of its calls.
    A question that was left, or asked before a restart, has no answer to wait for."""
    if is_finished(conversation):
        return False
    last = conversation.messages[-1].message
    return conversation.awaiting > 0 or last is None or bool(last.tool_calls)


def is_stored_kind(message: Message | None, *, instructions: bool = False) -> bool:
    """Whether a message is stored: not one that says nothing; an instruction only if asked for, once it has left."""
    return message is not None and (instructions or message.role not in LEADING_ROLES) and is_remembered(message)


def line_text(tokens: int, chunk_ids: Sequence[str]) -> str:
    """The line in place of a result of so many tokens, with the ids of its chunks where they are known."""
    shown = " ".join(f"mem:{chunk_id}" for chunk_id in chunk_ids[:LINE_IDS_MAX])
    more = f" and {len(chunk_ids) - LINE_IDS_MAX} more" if len(chunk_ids) > LINE_IDS_MAX else ""
    return f"[memd: {tokens:,} tokens of this result are in memory{' as ' if shown else ''}{shown}{more}]"


def part_starts(messages: Iterable[Message | None]) -> Iterator[int]:
    """Yield the positions at which the parts begin that are cut into chunks each on its own, so that the same text is
    always cut the same way, whatever is stored together.

    A part is a turn without tool calls, or a result in the user's name with the answer to it. In a turn with calls it
    is one round of calls with their results: the first with what is said before it, the last with the answer behind it.
    None stands for a message without text.
    """
    has_result = False
    for position, message in enumerate(messages):
        is_call = message is not None and bool(message.tool_calls)
        if position == 0 or message is None or message.opens_turn or message.is_result or (is_call and has_result):
            yield position
            has_result = False
        has_result = has_result or (message is not None and message.role in RESULT_ROLES)


def contiguous(positions: Sequence[int], starts: Collection[int] = ()) -> list[list[int]]:
    """Runs of neighbouring positions: text that did not stand together must not be joined in one chunk. `starts`: where
    a run begins in any case."""
    starts = set(starts)
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1 and position not in starts:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs
