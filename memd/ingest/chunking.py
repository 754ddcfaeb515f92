"""Cuts a stretch of conversation into the chunks that are stored and recalled.

Rule: verbatim and deterministic: joined, the chunks of a message are its stored text. Messages in a chunk are joined by
a newline. `speakers` tells whose text begins where, and which call a result answers if its chunk does not have the
call; `columns` is the header row of a Markdown table that began in an earlier chunk. Limits count the text as shown,
with the roles before messages, without such calls and rows.

A chunk ends with the first piece that brings it to `min_tokens`; between talk and what would take its vector over (the
steps of a tool loop, fenced code, what a user pasted); but not between a call and the beginning of its result: a result
that does not fit after its call is cut, because questions name the call and want the result. An earlier version set
boundaries where the cosine of neighbouring pieces fell below a threshold. That found no more and cost a sixth of all
processor time (bench/NOTES.md, 2026-11-22): only 0 to 7 % of neighbours were similar enough to be joined.

A message is encoded once; the ends of its tokens give the sizes of its pieces. Cutting takes 0.2 to 0.4 s per megabyte.

Joined, the pieces of a message are exactly its text. A unit (a short message or paragraph, a fenced code block, a list,
a table, a stack trace) is one piece if it fits; longer prose is cut into sentences. Time is linear in the length of any
text.

Measured (bench/recall.py): chunks that end between messages and not within them find 3 points more of what a question
needs in 500 tokens, 2 points more in 2,000.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise

import msgspec
from msgspec import UNSET, UnsetType

from memd.conversation.tokens import TokenCounter
from memd.entries import SHOWN_MAX, Draft, Speaker, role_opening
from memd.messages import CUT, RESULT_ROLES
from memd.settings.model import ChunkingSettings

JOINT = "\n"
TALK_TOKENS_MIN = 8
"""Longer talk shares no chunk with the steps and code beside it; "Look." does."""
PASTED_CHARACTERS_MIN, LOOKED_AT_CHARACTERS, LETTERS_SHARE = 40, 2_000, 0.88
"""With fewer letters and spaces a user's paragraph is taken for pasted code: of 23 kinds of errors, logs and code two
paragraphs have more, and one of 1,000 turns of talk has fewer. A mistake only moves a boundary."""
WHOLE_MINIMA = 2
"""A message or paragraph of at most so many times `min_tokens` is not cut."""
_ESTIMATE_SLACK = 8  # this close to a limit the joined text is counted: the sum of the pieces' tokens is an estimate
_SHARED = 2  # most tokens that two neighbours save when joined
_BLOCK_CHARACTERS = 10_000
"""Length of a long text that is encoded between two steps."""


class Utterance(msgspec.Struct, frozen=True):
    """A message to be stored, or text without a speaker (a note, a page), which has neither role nor digest."""

    text: str
    """The text; for a message, from `messages.stored_text`."""
    role: str | None = None
    digest: bytes | None = None
    name: str = ""
    shown: tuple[bytes, ...] = ()
    said_at: int | UnsetType = UNSET
    author: str | UnsetType = UNSET
    calls: bool = False
    """True if it calls a tool, and its result follows: no chunk ends between the two if both fit."""
    call: str = ""
    """For a result, the beginning of its call on one line (`ToolCall.line`)."""

    @property
    def is_step(self) -> bool:
        """Whether it is a step of a tool loop, not talk."""
        return self.calls or self.role in RESULT_ROLES

    @property
    def opening(self) -> str:
        """The role as shown before the text; empty without one."""
        return "" if self.role is None else role_opening(self.role, self.name)


class _Piece(msgspec.Struct, frozen=True):
    text: str
    message: int
    opening: str | None
    """For the first piece of a message, the role shown before it ("" without a speaker). None for others."""
    tokens: int
    """Tokens of the text, and of the joint and the opening before it in a chunk."""
    calls: bool = False
    """True at the end of a message that calls a tool."""
    is_work: bool = False
    """Whether it is of a call or a result, or code in a message."""
    columns: str = ""
    """The header row of the table within which it begins."""

    @property
    def shown(self) -> str:
        """The text with the joint and opening before it in a chunk."""
        return self.text if self.opening is None else JOINT + self.opening + self.text


class _Text:
    """A text and the ends of its tokens; a *span* is a range of characters."""

    def __init__(self, text: str, tokenizer: TokenCounter, step: Callable[[], None] = lambda: None) -> None:
        self.text = text
        self._ends: list[int] = []
        for start in range(0, len(text), _BLOCK_CHARACTERS):
            step()
            self._ends += [start + end for end in tokenizer.ends(text[start : start + _BLOCK_CHARACTERS])]

    def tokens(self, start: int, end: int) -> int:
        """Count the tokens that end in a span; encoded alone it may have a few more, if it begins within a token."""
        return bisect_right(self._ends, end) - bisect_right(self._ends, start)


def split(
    messages: Sequence[Utterance],
    *,
    settings: ChunkingSettings,
    tokenizer: TokenCounter,
    step: Callable[[], None] = lambda: None,
) -> tuple[Draft, ...]:
    """Split consecutive messages of one conversation, or consecutive texts without a speaker, into chunks.

    They are drafts without identity, vector and time; their `speakers` and `digests` are parallel, and empty for text
    without a speaker. A chunk takes piece after piece until it has `min_tokens` or talk and code meet, does not end
    between a call and the beginning of its result, and ends in any case before `max_tokens`. A chunk that is short
    because its neighbour cannot be taken in is joined to the one before it, if the two fit and are of one kind. `step`
    is called between two pieces; it may wait, or raise what ends the cutting. Raises ValueError: some of `messages`
    have a speaker and some have none, which `speakers` could not tell apart.
    """
    if len({message.role is None for message in messages}) > 1:
        raise ValueError("messages and texts without a speaker are mixed: put them into runs of their own")
    count = cache(tokenizer.count)  # of openings, and of what comes near a limit
    pieces = _pieces(messages, settings, tokenizer, count, step)
    return tuple(_chunk(group, messages) for group in _groups(pieces, settings, tokenizer, count))


def _pieces(
    messages: Sequence[Utterance],
    settings: ChunkingSettings,
    tokenizer: TokenCounter,
    count: Count,
    step: Callable[[], None],
) -> Iterator[_Piece]:
    whole = WHOLE_MINIMA * settings.min_tokens
    for number, message in enumerate(messages):
        text, opening, tables = _Text(message.text, tokenizer, step), message.opening, _tables(message.text)
        most = settings.max_tokens - _ESTIMATE_SLACK
        role = None if message.is_step else message.role
        spans = candidate_pieces(text, opening=count(opening), whole_tokens=whole, max_tokens=most, role=role)
        for start, end, is_code in spans or [(0, 0, False)]:
            step()
            head = count(JOINT + opening) if start == 0 else 0
            is_end = message.calls and end == len(message.text)
            own = opening if start == 0 else None
            tokens, columns = head + text.tokens(start, end), _columns_over(start, tables)
            yield _Piece(message.text[start:end], number, own, tokens, is_end, message.is_step or is_code, columns)


def _groups(
    pieces: Iterable[_Piece], settings: ChunkingSettings, tokenizer: TokenCounter, count: Count
) -> list[list[_Piece]]:
    groups: list[list[_Piece]] = []
    group: list[_Piece] = []
    tokens = 0  # of its pieces, added up: joined they have a few less, and are counted where a limit is near

    def has_most(joined: Sequence[_Piece], total: int, most: int) -> bool:
        return total <= most - _ESTIMATE_SLACK or count(_shown(joined)) <= most

    def has_least(total: int) -> bool:
        slack = max(_ESTIMATE_SLACK, _SHARED * len(group))
        least = settings.min_tokens
        return total >= least + slack or (total >= least and count(_shown(group)) >= least)

    def apart(before: Sequence[_Piece], behind: Sequence[_Piece], talk_tokens: int) -> bool:
        are_work = [any(one.is_work for one in some) for some in (before, behind)]
        return are_work[0] != are_work[1] and talk_tokens >= TALK_TOKENS_MIN

    def close() -> None:
        """End the group; one that stayed short is joined to the one before it where the two fit."""
        is_short = bool(groups and group) and not (has_least(tokens) or apart(groups[-1], group, tokens))
        if is_short and count(_shown(merged := groups[-1] + group)) <= settings.max_tokens:
            groups[-1] = merged
        elif group:
            groups.append(group)

    left = deque(pieces)
    while left:
        piece = left.popleft()
        is_open = bool(group) and group[-1].calls
        fits = has_most([*group, piece], tokens + piece.tokens, settings.max_tokens)
        if is_open and not fits and (room := settings.max_tokens - tokens) >= settings.min_tokens:
            piece, *rest = _divided(piece, room - _ESTIMATE_SLACK, tokenizer)
            left.extendleft(rest)
            fits = has_most([*group, piece], tokens + piece.tokens, settings.max_tokens)
        is_other = bool(group) and apart(group, [piece], tokens if piece.is_work else piece.tokens)
        if not fits or is_other or (not is_open and has_least(tokens)):
            close()
            group, tokens = [], 0
        group.append(piece)
        tokens += piece.tokens
    close()
    return groups


def _divided(piece: _Piece, room: int, tokenizer: TokenCounter) -> list[_Piece]:
    """A piece in two, of which the first takes at most `room` tokens: the beginning of a result, for its call."""
    text = _Text(piece.text, tokenizer)
    head = piece.tokens - text.tokens(0, len(piece.text))
    _, end = next(fitted(text, 0, len(piece.text), max(1, room - head)))
    if end == len(piece.text):
        return [piece]
    first = _Piece(piece.text[:end], piece.message, piece.opening, head + text.tokens(0, end), is_work=piece.is_work)
    tokens, columns = piece.tokens - first.tokens, _columns_over(end, _tables(piece.text)) or piece.columns
    return [first, _Piece(piece.text[end:], piece.message, None, tokens, piece.calls, piece.is_work, columns)]


def _shown(group: Sequence[_Piece]) -> str:
    return "".join(piece.shown for piece in group).removeprefix(JOINT if group and group[0].opening is not None else "")


def _chunk(group: Sequence[_Piece], messages: Sequence[Utterance]) -> Draft:
    parts: list[str] = []
    speakers: list[Speaker] = []
    length = 0
    for position, piece in enumerate(group):
        parts.append(JOINT if piece.opening is not None and position > 0 else "")
        length += len(parts[-1])
        one = messages[piece.message]
        if one.role is not None and (piece.opening is not None or position == 0):
            is_behind = bool(one.call) and one.call.removesuffix(CUT) in " ".join("".join(parts).split())
            speakers.append(Speaker(length, one.role, piece.opening is None, one.name, "" if is_behind else one.call))
        parts.append(piece.text)
        length += len(piece.text)
    told = [messages[number] for number in dict.fromkeys(piece.message for piece in group)]
    shown = tuple(dict.fromkeys(uuid for one in told for uuid in one.shown))
    return Draft(
        uuid=b"",
        vector=b"",
        created_at=0,
        content="".join(parts),
        roles=tuple(dict.fromkeys(speaker.role for speaker in speakers)),
        speakers=tuple(speakers),
        digests=tuple(one.digest for one in told if one.digest is not None),
        shown=shown[:SHOWN_MAX] or UNSET,
        said_at=next((one.said_at for one in told if one.said_at is not UNSET), UNSET),
        author=told[0].author,  # the messages of one run have one
        columns=group[0].columns or UNSET,
    )


_TABLE = re.compile(
    r"^(?=[^\n]*\|)([^\n]{1,500}+)\n"  # a longer row is no header
    r"(?=[^\n]*\|)(?=[^\n]*-)[ \t|:>-]++(?:\n|\Z)"
    r"(?:(?=[^\n]*\|)[^\n]++(?:\n|\Z))*+",
    re.MULTILINE,
)


def _tables(text: str) -> list[tuple[int, int, str]]:
    """Return the Markdown tables of a text, in order: the end of the header row, that of the table, and the row."""
    return [(found.end(1), found.end(), found[1].strip()) for found in _TABLE.finditer(text)] if "|" in text else []


def _columns_over(start: int, tables: Sequence[tuple[int, int, str]]) -> str:
    """Return the header row of the table that goes on at `start`; empty if none does."""
    at = bisect_left(tables, start, key=lambda one: one[0]) - 1
    return tables[at][2] if at >= 0 and start < tables[at][1] else ""


Count = Callable[[str], int]
"""The tokens of a text."""

_LINE = re.compile(r"[^\n]*+\n|[^\n]++")
_WORD = re.compile(r"\s*+\S++|\s++")  # with the blank before it, as the tokenizer has it
_SENTENCE_END = re.compile(r"""[.!?…؟۔।॥]["'”’)\]]*+\s++(?=[^a-z])|[。！？]["”’』」）]*+\s*+""")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_STRUCTURED = re.compile(r"[ \t]+\S|(?:[-*+•]|\d{1,3}[.)])\s|\|")
"""A line that begins like this keeps its paragraph whole: indented (code, stack frames), a list item, a table row."""


Span = tuple[int, int]


def candidate_pieces(
    text: _Text, *, opening: int, whole_tokens: int, max_tokens: int, role: str | None
) -> list[tuple[int, int, bool]]:
    """Cut a text into consecutive pieces of at most `max_tokens` tokens: each a span, and True if it is code in talk.

    A blank line belongs to the piece before it. A piece that is too long is cut at lines, then sentences, then words,
    then characters, each part as long as fits.

    Args:
        opening: tokens shown before the text (`user: `).
        whole_tokens: a paragraph, or a text of talk or code alone, with no more is not cut further.
        role: whose talk it is; None: nobody's, and nothing in it counts as code.
    """
    whole_tokens, end = min(whole_tokens, max_tokens), len(text.text)
    blocks = [(*block, _is_code(text.text, *block[:2], role)) for block in _blocks(text.text)]
    is_mixed = len({is_code for *_, is_code in blocks}) > 1
    if blocks and not is_mixed and opening + text.tokens(0, end) <= whole_tokens:
        return [(0, end, False)]
    pieces: list[tuple[int, int, bool]] = []
    for start, end, is_whole, is_code in blocks:
        is_code &= is_mixed
        if opening + text.tokens(start, end) <= whole_tokens:
            pieces.append((start, end, is_code))
            opening = 0
            continue
        ends = [end] if is_whole else _ends(_SENTENCE_END, text.text, start, end)
        for begin, until in pairwise(chain([start], ends)):
            parts = fitted(text, begin, until, max(1, max_tokens - opening))
            pieces += ((*part, is_code) for part in parts)
            opening = 0
    return pieces


def _is_code(text: str, start: int, end: int, role: str | None) -> bool:
    """Return whether a paragraph of a message is fenced code, or what a user pasted: code, an error, a log."""
    if role is None or _FENCE.match(text, start):
        return role is not None
    said = text[start : min(end, start + LOOKED_AT_CHARACTERS)].strip()
    letters = sum(one.isalpha() or one == " " for one in said)
    return role == "user" and len(said) >= PASTED_CHARACTERS_MIN and letters < LETTERS_SHARE * len(said)


def _ends(unit: re.Pattern[str], text: str, start: int, end: int) -> Iterator[int]:
    """Yield the ends of the lines, sentences or words in a span."""
    for match in unit.finditer(text, start, end):  # not all at once: other threads wait as long
        yield (start := match.end())
    if start < end:
        yield end


def _blocks(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yield paragraphs and fenced code with the blank lines after them: the span, and True if it is kept whole (no
    prose)."""
    begin = start = 0
    fence, whole, ended = "", False, False  # ended: a blank line or a closing fence, only blank lines may follow
    for number, end in enumerate(_ends(_LINE, text, 0, len(text))):
        line = text[start:end]
        opened = _FENCE.match(line)
        if fence:
            ended = _closes(line, fence)
            fence = "" if ended else fence
        elif not line.strip():
            ended = ended or number > 0
        else:
            if start > begin and (ended or opened):
                yield begin, start, whole
                begin, whole = start, False
            ended = False
            fence = opened.group(1) if opened else ""
            whole = whole or bool(opened or _STRUCTURED.match(line))
        start = end
    if start > begin:
        yield begin, start, whole


def _closes(line: str, fence: str) -> bool:
    """Return True if `line` ends a code block opened by `fence`: only the same character, at least as often."""
    bare = line.strip()
    return len(bare) >= len(fence) and bare == fence[0] * len(bare)


def fitted(
    text: _Text, start: int, end: int, limit: int, units: Sequence[re.Pattern[str]] = (_LINE, _SENTENCE_END, _WORD)
) -> Iterator[Span]:
    """Yield the span if it has at most `limit` tokens, else its parts, cut at the largest possible units."""
    if text.tokens(start, end) <= limit:
        yield start, end
        return
    if not units:
        yield from _characters(text, start, end, limit)
        return
    begin, at = start, start  # begin and end of the present part
    for until in _ends(units[0], text.text, start, end):
        if begin < at and text.tokens(begin, until) > limit:
            yield begin, at
            begin = at
        if text.tokens(at, until) > limit:
            yield from fitted(text, at, until, limit, units[1:])
            begin = until
        at = until
    if begin < at:
        yield begin, at


def _characters(text: _Text, start: int, end: int, limit: int) -> Iterator[Span]:
    """Cut a span into slices of equal length, aimed at 8/9 of `limit`; a slice that is still too long is cut again."""
    slices = max(2, -(-text.tokens(start, end) * 9 // (limit * 8)))
    size = -(-(end - start) // slices)
    for begin in range(start, end, size):
        until = min(begin + size, end)
        if size == 1 or text.tokens(begin, until) <= limit:
            yield begin, until
        else:
            yield from _characters(text, begin, until, limit)
