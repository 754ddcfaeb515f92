"""Compaction: the token budgets of one request in the model's window, and which messages leave its prompt when the
window gets too small.

Rule: decisions use numbers and marks only. Changes at the beginning of the prompt are rare, because the model reads
everything behind a change anew. Budgets are in the model's own (drifted) tokens.

The window `W` holds system prompt and tools `S`, the reply `R`, this turn's block `I`, the blocks of earlier turns `K`,
and the history. If they do not fit together, they shrink in this order:

    R   to min(max_tokens, max(512, W/16)), unless the upstream counts `max_tokens` against the window
    K   to nothing, all blocks at once
    I   to W/16
    history: its oldest part leaves

A prompt stays valid whatever leaves: results stay with their calls, and a turn with its user message; two user messages
are never adjacent unless the client sent them so. Messages leave oldest first, in this order: whole finished turns;
units of the last finished turn; results of the open turn, each replaced by a line; then its whole units.

A *unit* is a message of the model with the results of its calls; a *turn* is a user message and its units:

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

from memd.conversation.conversation import Conversation, is_answer, is_instruction, is_remembered
from memd.messages import LEADING_ROLES, NO_BLOCK, RESULT_ROLES, Message
from memd.settings.model import BufferSettings, InjectionSettings

UNLIMITED = 1 << 60
"""All thresholds while the window is unknown: nothing leaves the prompt then."""
SOFT_EIGHTHS = 7  # of the hard threshold
REPLY_SHARE = 8
"""A reply without a limit gets an eighth of the window."""
REPLY_SHARE_MAX = 2
"""A client that asks for a reply of more than half the window means "as much as possible", and gets half."""
REPLY_TOKENS_MIN = 512
INJECTION_SHARE_MAX = 4
"""The injection budget is at most a quarter of the window."""
SMALL_BLOCK_TOKENS = 256
"""Size of a block with one or two chunks of the usual length."""
SHRUNK_SHARE = 16
"""The reply and the injection budget shrink to a sixteenth of the window before history leaves."""

_CALL_ID = attrgetter("id")


class Thresholds(msgspec.Struct, frozen=True):
    """Token budgets of one request, all in the model's own (drifted) tokens."""

    injection: int
    """Limit for this turn's block."""
    sticky: int
    """Limit for the blocks of earlier turns, together."""
    soft: int
    """History above this is compacted in the background."""
    hard: int
    """History above this leaves before the request is forwarded."""
    room: int
    """Limit for history and all blocks together: the window without system prompt, tools and the shrunk reply."""
    standing: int
    """Tokens of system prompt and tools."""
    window: int | None = None
    """None if unknown."""

    @property
    def injection_min(self) -> int:
        """The part of the room that is reserved for this turn's block."""
        return self.room - self.hard


def injection_budget(injection_tokens: int, window: int | None) -> int:
    """Return the limit for a turn's block: as configured, but at most a quarter of a known window."""
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
    """Return the budgets for one request.

    Args:
        window: the model's context per slot in tokens; None if unknown.
        counts_reply: the upstream refuses a request whose prompt and `max_tokens` together exceed the window.
        max_tokens: the request's limit on the reply; None or not positive if there is none.
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
    """Return the tokens to reserve for the reply when the window is short of room."""
    if counts_reply and asked is not None and asked + standing_tokens + window // SHRUNK_SHARE <= window:
        return asked  # with less the request would be refused; if even this is too much, it is anyway
    wanted = min(window // REPLY_SHARE if asked is None else asked, window // REPLY_SHARE_MAX)
    return min(wanted, max(REPLY_TOKENS_MIN, window // SHRUNK_SHARE))


def keeps_earlier_blocks(limits: Thresholds, *, text: int, earlier: int, current: int) -> bool:
    """Return whether the blocks of earlier turns may stay; otherwise all of them leave at once.

    They leave if they exceed their own budget or the rest needs their room. In the second case history leaves with
    them, down to half, because all of it is read anew. Letting this turn's block shrink a little first costs less than
    changing the prompt's beginning on every turn in a nearly full window. So only its minimum is reserved, or room for
    a small block if that is more, and at most half of its budget. Simulated at 8k over eight shapes of conversations:
    28 to 98 changes in 200 turns instead of 74 to 140; 1.06 to 1.52 tokens read per new one, not 1.06 to 1.85.

    `text`, `earlier`, `current`: tokens of visible history, earlier turns' blocks, and this turn's block, if any.
    """
    wanted = min(limits.injection // 2, max(limits.injection_min, SMALL_BLOCK_TOKENS))
    return earlier <= limits.sticky and text + earlier + max(current, wanted) <= limits.room


LINE_TOKENS = 40
"""Approximate tokens of a line that replaces a result; results up to twice that size stay."""
CALLS_SHARE = 3
"""Calls and lines of the open turn may take this fraction (a third) of the kept tokens."""
LINE_IDS_MAX = 6
"""Limit on chunk ids in the line."""


class Turn(msgspec.Struct, frozen=True):
    """A turn in the visible part of a conversation; it ends where the next one begins."""

    start: int
    """Position of the user message, or of the first visible message if that is not a user's."""
    units: tuple[range, ...]
    end: int


class Departure(msgspec.Struct, frozen=True):
    """The messages to leave a prompt next. Empty if nothing may leave."""

    left_out: int = 0
    """Whole turns: everything before this position leaves, except instructions."""
    gone: tuple[int, ...] = ()
    """Later positions that leave one by one."""
    replaced: tuple[int, ...] = ()
    """Positions of results to replace by a line."""

    @property
    def is_empty(self) -> bool:
        """True if nothing leaves."""
        return not (self.left_out or self.gone or self.replaced)

    @property
    def end(self) -> int:
        """End of the last leaving message; the conversation must be durable up to there."""
        return max((self.left_out, *(position + 1 for position in (*self.gone, *self.replaced))))


class Left(msgspec.Struct, frozen=True):
    """Count of the messages and tokens that are not in a prompt."""

    messages: int
    replaced: int
    """Results replaced by a line."""
    tokens: int
    """Raw tokens."""

    def since(self, before: Left) -> Left:
        """Return how much of this has left since `before`; what came back is not counted."""
        each = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(before), strict=True)
        return Left(*(max(0, now - then) for now, then in each))


def turns(conversation: Conversation) -> list[Turn]:
    """Return the visible turns, oldest first. The last one is open, or was answered a moment ago."""
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
    """Choose the messages that leave next: `excess_tokens` and `fraction` of the rest, as far as they may leave.

    If the last turn must shrink, its block counts as kept, and as many results as needed that the model has read become
    lines. Whole units leave only if that is not enough, or if their calls and lines take much. The prompt is then
    halved once more, because each departure makes the model read everything behind it anew, and the turn recalls.

    Args:
        excess_tokens: raw tokens above the prompt's limit; 0 if no request waits for room.
        upto: only messages before this position may leave, because the others are not durable.
        forced: the request would be refused otherwise, so as much of the open turn's last unit leaves as must.
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
        if forced:  # of the unit that the model has not read yet, only as much as necessary
            chosen.wanted = excess_tokens
            chosen.replace_results([newest])
            chosen.replace_results([newest], longer_than=LINE_TOKENS)
    if not excess_tokens and chosen.freed < wanted // 2:
        return Departure()  # no request waits for room, and the model would read all that follows anew
    return chosen.departure


def return_position(
    conversation: Conversation, opened: Sequence[int], first: int, *, whole_max: float, part_max: float
) -> int | None:
    """Return where the part begins that returns to a branch's prompt after another branch left it out.

    That is everything if it has at most `whole_max` raw tokens, else the newest turns that fit into `part_max`. None if
    the prompt already shows as much.

    Args:
        opened: positions at which turns begin, ascending.
        first: messages before it are not in the request.
    """
    if conversation.tokens_between(first, len(conversation)) <= whole_max:
        start = first
    else:
        # Bisection, because there may be tens of thousands.
        at = bisect_left(opened, True, key=lambda one: conversation.tokens_between(one, len(conversation)) <= part_max)
        start = opened[at] if at < len(opened) else len(conversation)
    returning = conversation.tokens_between(start, len(conversation))
    return start if start < len(conversation) and returning > conversation.visible_tokens() else None


def left_of(conversation: Conversation) -> Left:
    """Return how much of a conversation is not in its prompt."""
    tokens = conversation.tokens_between(0, len(conversation)) - conversation.visible_tokens()
    return Left(conversation.left_out_count(), len(conversation.lines), tokens)


class _Chosen:
    """Collects the messages to leave until `wanted` tokens are free."""

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
        """Take a finished turn, or only units of it if the turn is more than wanted or exceeds the limit."""
        places = range(turn.start, turn.end)
        may_leave = turn.end <= self.limit
        if not may_leave or self.freed + sum(self._tokens(place) for place in places) > self.wanted:
            self.take_units(turn.units[:-1])  # not the last one, without which the user message would stand alone
        if self.is_short and may_leave and turn.start == self._left_out:
            self.freed += sum(self._tokens(place) for place in places if place not in self._gone)
            self._left_out = turn.end
            self._gone.difference_update(places)

    def take_units(self, units: Iterable[range]) -> None:
        """Take whole units, without the instructions in them."""
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
        """Return the tokens freed by these messages, beyond those that a line has freed already."""
        return sum(self._tokens(place) - self._saved(place) for place in positions)

    def _tokens(self, position: int) -> int:
        is_kept = is_instruction(self._conversation.messages[position].message)
        return 0 if is_kept else self._conversation.tokens_at(position)

    def _saved(self, position: int) -> int:
        """Return the tokens freed already by a line chosen for this position."""
        return self._conversation.messages[position].tokens - LINE_TOKENS if position in self._replaced else 0


def cut_positions(conversation: Conversation, answered: Mapping[int, int] | None = None) -> list[int]:
    """Return the positions at which the visible part may be cut, ascending: user messages that open a turn, also the
    last. The message at a cut stays; the start of the visible part is no cut. `answered`: see `_answered`, if known."""
    answered = _answered(conversation) if answered is None else answered
    start = conversation.left_out
    cuts: list[int] = []
    for position, item in enumerate(conversation.messages[start:], start):
        if item.message is not None and item.message.opens_turn and position > start:
            cuts.append(position)
        while cuts and cuts[-1] > answered.get(position, position):
            cuts.pop()  # a user spoke between a call and this result
    return cuts


def _answered(conversation: Conversation) -> dict[int, int]:
    """Return the position of each visible result's call, by the result's position. Models reuse ids in later turns, so
    the latest call counts. Many calls may be without a result."""
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
    """Return the first position before `end` with results that the model has not read: of interrupted calls, or
    reported by a program with the next question. `end` if it has read all."""
    found = end
    for position in range(end - 1, conversation.left_out - 1, -1):
        message = conversation.messages[position].message
        if is_answer(message):
            return found
        if message is not None and (message.role in RESULT_ROLES or message.is_result):
            found = position
    return end


def _turn(conversation: Conversation, start: int, end: int, answered: Mapping[int, int]) -> Turn:
    """Return the turn in [start, end). A unit continues until all results of its calls have come."""
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
    """Return the oldest mid-conversation instructions that must leave to keep the rest within `tokens_max` (raw)."""
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
    """Return the end of the last finished turn, up to which a running conversation can be stored."""
    if is_finished(conversation):
        return len(conversation)
    return max(cut_positions(conversation), default=conversation.left_out)


def is_finished(conversation: Conversation) -> bool:
    """Return whether no turn is open: the last message is an assistant's without tool calls, or nothing is visible."""
    if conversation.left_out == len(conversation):
        return True
    last = conversation.messages[-1].message
    return last is not None and last.role == "assistant" and not last.tool_calls


def goes_on(conversation: Conversation) -> bool:
    """Return whether the last turn will continue: a model is answering it now, or results of calls are missing. An
    interrupted question, or one from before a restart, gets no answer."""
    if is_finished(conversation):
        return False
    last = conversation.messages[-1].message
    return conversation.awaiting > 0 or last is None or bool(last.tool_calls)


def is_stored_kind(message: Message | None, *, instructions: bool = False) -> bool:
    """Return whether a message is stored: not if it says nothing; an instruction only on request, once it has left."""
    return message is not None and (instructions or message.role not in LEADING_ROLES) and is_remembered(message)


def line_text(tokens: int, chunk_ids: Sequence[str]) -> str:
    """Return the line that replaces a result of so many tokens, with its chunks' ids if known."""
    shown = " ".join(f"mem:{chunk_id}" for chunk_id in chunk_ids[:LINE_IDS_MAX])
    more = f" and {len(chunk_ids) - LINE_IDS_MAX} more" if len(chunk_ids) > LINE_IDS_MAX else ""
    return f"[memd: {tokens:,} tokens of this result are in memory{' as ' if shown else ''}{shown}{more}]"


def part_starts(messages: Iterable[Message | None]) -> Iterator[int]:
    """Yield the positions at which parts begin. Each part is cut into chunks separately, so that the same text always
    gives the same chunks, whatever is stored together.

    A part is a turn without tool calls, or a result in the user's name with its answer. A turn with calls has one part
    per round of calls and results: the first includes the text before it, the last the answer after it. None means a
    message without text.
    """
    has_result = False
    for position, message in enumerate(messages):
        is_call = message is not None and bool(message.tool_calls)
        if position == 0 or message is None or message.opens_turn or message.is_result or (is_call and has_result):
            yield position
            has_result = False
        has_result = has_result or (message is not None and message.role in RESULT_ROLES)


def contiguous(positions: Sequence[int], starts: Collection[int] = ()) -> list[list[int]]:
    """Return runs of adjacent positions, because text that was not adjacent must not share a chunk. `starts`: positions
    that always begin a run."""
    starts = set(starts)
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1 and position not in starts:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs
