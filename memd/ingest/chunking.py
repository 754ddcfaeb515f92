"""Cuts a stretch of conversation into the chunks that are stored and recalled.

Rule: verbatim, and the same text is always cut the same way: the chunks of a message, put together, are its stored
text. Messages meet with a newline inside a chunk, and `speakers` says whose text lies where. Limits count the text as
it is shown, with the roles that are written in front of messages.

A chunk ends with the first piece with which it has `min_tokens`, but not between a call and the beginning of its
result: one that does not fit behind its call is cut there, for questions name the one and want the other. Setting
boundaries where the cosine of neighbouring pieces falls below a threshold, as an earlier version did, finds no more and
cost a sixth of all processor time (measured: bench/NOTES.md, 2026-11-22): only 0 to 7 % of neighbours were similar
enough to be joined. Cutting takes 0.5 s per megabyte.

Joined, the pieces of a message are its text, to the last blank. A unit for a reader (a short message or paragraph, a
fenced code block, a list, a table, a stack trace) is one piece where it fits; longer prose is cut into sentences. Time
grows with the length of the text, whatever is in it.

Measured (bench/recall.py): chunks that end between messages and not within them find 3 points more of what a question
needs in 500 tokens, 2 points more in 2,000.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import msgspec
from msgspec import UNSET, UnsetType

from memd.entries import Speaker, role_opening
from memd.settings.model import ChunkingSettings

JOINT = "\n"
WHOLE_MINIMA = 2
"""A message or paragraph of at most so many times `min_tokens` is not cut."""
_ESTIMATE_SLACK = 8  # this near to a limit the joined text is counted: the pieces' tokens added up are an estimate
_SHARED = 2  # tokens that two neighbours have less together than apart, at most


class Utterance(msgspec.Struct, frozen=True):
    """A message to be remembered, or text without a speaker (a note, a page): that has neither role nor digest."""

    text: str
    """Of a message: from `messages.stored_text`."""
    role: str | None = None
    digest: bytes | None = None
    name: str = ""
    """See `Speaker.name`."""
    shown: tuple[bytes, ...] = ()
    """See `Message.shown`."""
    said_at: int | UnsetType = UNSET
    """See `Message.said_at`."""
    author: str | UnsetType = UNSET
    """See `Message.author`."""
    calls: bool = False
    """It calls a tool, and what follows is the result: no chunk ends between the two where both fit."""

    @property
    def opening(self) -> str:
        """The role as it is written in front of the text where that is shown; empty without one."""
        return "" if self.role is None else role_opening(self.role, self.name)


class Chunk(msgspec.Struct, frozen=True):
    """A chunk without identity or vector. `speakers` and `digests` are parallel: one of each per message in it.

    Both are empty for text without a speaker.
    """

    content: str
    speakers: tuple[Speaker, ...]
    digests: tuple[bytes, ...]
    shown: tuple[bytes, ...] = ()
    """Of all its messages together."""
    said_at: int | UnsetType = UNSET
    """Of its first message that has one."""
    author: str | UnsetType = UNSET
    """Of its first message: the messages of one run have one author."""


class _Piece(msgspec.Struct, frozen=True):
    text: str
    message: int
    opening: str | None
    """On the first piece of a message: the role shown in front of it ("" without a speaker). None on the others."""
    calls: bool = False
    """It is the end of a message that calls a tool."""

    @property
    def shown(self) -> str:
        """The text with the joint before it inside a chunk."""
        return self.text if self.opening is None else JOINT + self.opening + self.text


def split(messages: Sequence[Utterance], *, settings: ChunkingSettings, count: Count) -> tuple[Chunk, ...]:
    """Split consecutive messages of one conversation, or consecutive texts without a speaker, into chunks.

    A chunk takes piece after piece until it has `min_tokens`, does not end between a call and the beginning of its
    result, and ends in any case before `max_tokens`. A chunk that is
    short because its neighbour cannot be taken in is joined to the one before it, if the two fit.

    Args:
        count: raw tokens of a text (`TokenCounter.count`).

    Raises:
        ValueError: some of `messages` have a speaker and some have none, which `speakers` could not tell apart.
    """
    if len({message.role is None for message in messages}) > 1:
        raise ValueError("messages and texts without a speaker are mixed: put them into runs of their own")
    count = cache(count)  # each piece is weighed alone, before it is cut further, and where a chunk begins with it
    return tuple(_chunk(group, messages) for group in _groups(_pieces(messages, settings, count), settings, count))


def _pieces(messages: Sequence[Utterance], settings: ChunkingSettings, count: Count) -> Iterator[_Piece]:
    whole = WHOLE_MINIMA * settings.min_tokens
    for number, message in enumerate(messages):
        opening: str | None = message.opening
        cut = candidate_pieces(
            message.text, opening=message.opening, whole_tokens=whole, max_tokens=settings.max_tokens, count=count
        )
        for left, text in zip(range(len(cut) - 1, -1, -1), cut, strict=True) if cut else [(0, "")]:
            yield _Piece(text, number, opening, message.calls and not left)
            opening = None


def _groups(pieces: Iterable[_Piece], settings: ChunkingSettings, count: Count) -> list[list[_Piece]]:
    """The pieces of each chunk."""
    groups: list[list[_Piece]] = []
    group: list[_Piece] = []
    tokens = 0  # of its pieces, added up: joined they have a few less, and are counted where a limit is near

    def has_most(joined: Sequence[_Piece], total: int, most: int) -> bool:
        return total <= most - _ESTIMATE_SLACK or count(_shown(joined)) <= most

    def has_least(total: int) -> bool:
        slack = max(_ESTIMATE_SLACK, _SHARED * len(group))
        least = settings.min_tokens
        return total >= least + slack or (total >= least and count(_shown(group)) >= least)

    def close() -> None:
        """End the group; one that stayed short is joined to the one before it where the two fit."""
        if groups and not has_least(tokens) and count(_shown(merged := groups[-1] + group)) <= settings.max_tokens:
            groups[-1] = merged
        elif group:
            groups.append(group)

    left = deque(pieces)
    while left:
        piece = left.popleft()
        is_open = bool(group) and group[-1].calls
        fits = has_most([*group, piece], tokens + count(piece.shown), settings.max_tokens)
        if is_open and not fits and (room := settings.max_tokens - tokens) >= settings.min_tokens:
            piece, *rest = _divided(piece, room - _ESTIMATE_SLACK, count)
            left.extendleft(rest)
            fits = has_most([*group, piece], tokens + count(piece.shown), settings.max_tokens)
        if not fits or (not is_open and has_least(tokens)):
            close()
            group, tokens = [], 0
        group.append(piece)
        tokens += count(piece.shown)
    close()
    return groups


def _divided(piece: _Piece, room: int, count: Count) -> list[_Piece]:
    """A piece in two, of which the first takes at most `room` tokens: the beginning of a result, for its call."""
    first, *others = fitted(piece.text, max(1, room - count(piece.opening or "")), count)
    if not others:
        return [piece]
    return [_Piece(first, piece.message, piece.opening), _Piece("".join(others), piece.message, None, piece.calls)]


def _shown(group: Sequence[_Piece]) -> str:
    """The text of a chunk as it is shown."""
    return "".join(piece.shown for piece in group).removeprefix(JOINT if group and group[0].opening is not None else "")


def _chunk(group: Sequence[_Piece], messages: Sequence[Utterance]) -> Chunk:
    parts: list[str] = []
    speakers: list[Speaker] = []
    length = 0
    for position, piece in enumerate(group):
        parts.append(JOINT if piece.opening is not None and position > 0 else "")
        length += len(parts[-1])
        role, name = messages[piece.message].role, messages[piece.message].name
        if role is not None and (piece.opening is not None or position == 0):
            speakers.append(Speaker(length, role, piece.opening is None, name))
        parts.append(piece.text)
        length += len(piece.text)
    numbers = dict.fromkeys(piece.message for piece in group)
    digests = tuple(digest for number in numbers if (digest := messages[number].digest) is not None)
    shown = dict.fromkeys(uuid for number in numbers for uuid in messages[number].shown)
    said_at = next((at for number in numbers if (at := messages[number].said_at) is not UNSET), UNSET)
    author = messages[group[0].message].author
    return Chunk("".join(parts), tuple(speakers), digests, tuple(shown), said_at, author)


Count = Callable[[str], int]
"""The tokens of a text."""

_TOKEN_CHARACTERS = 8  # more than text has per token; what is longer is not counted to see whether it is short
_LINE = re.compile(r"[^\n]*+\n|[^\n]++")
_WORD = re.compile(r"\s*+\S++|\s++")  # with the blank before it, as the tokenizer has it
_SENTENCE_END = re.compile(r"""[.!?…؟۔।॥]["'”’)\]]*+\s++(?=[^a-z])|[。！？]["”’』」）]*+\s*+""")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_STRUCTURED = re.compile(r"[ \t]+\S|(?:[-*+•]|\d{1,3}[.)])\s|\|")
"""A line that begins like this keeps its paragraph whole: indented (code, stack frames), a list item, a table row."""


def candidate_pieces(text: str, *, opening: str, whole_tokens: int, max_tokens: int, count: Count) -> list[str]:
    """Cut `text` into pieces of at most `max_tokens` tokens; `"".join(pieces) == text`.

    A blank line belongs to the piece before it. A piece that is too long is cut at lines, then sentences, then words,
    then characters, each part as long as fits.

    Args:
        opening: what is written in front of `text` where it is shown (`user: `); it counts with the first piece.
        whole_tokens: a text, or a paragraph of it, that has no more is not cut further.
    """
    if text and _is_short(opening + text, min(whole_tokens, max_tokens), count):
        return [text]
    pieces: list[str] = []
    for block, whole in _blocks(text):
        if _is_short(opening + block, min(whole_tokens, max_tokens), count):
            pieces.append(block)
            opening = ""
            continue
        for piece in [block] if whole else _sentences(block):
            pieces += fitted(piece, max(1, max_tokens - count(opening)), count)
            opening = ""
    return pieces


def _is_short(text: str, tokens_max: int, count: Count) -> bool:
    return 0 < len(text) <= tokens_max * _TOKEN_CHARACTERS and count(text) <= tokens_max


def fitted(text: str, limit: int, count: Count) -> list[str]:
    """`text` itself if it has at most `limit` tokens, else its parts, cut at the largest boundaries that do."""
    return _fitted(text, limit, count, (_lines, _sentences, words))


def words(text: str) -> Iterator[str]:
    """`text` cut before the white space in front of each word."""
    return (match.group() for match in _WORD.finditer(text))


def _lines(text: str) -> Iterator[str]:
    return (match.group() for match in _LINE.finditer(text))  # not all at once: other threads wait as long


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for match in _SENTENCE_END.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def _blocks(text: str) -> Iterator[tuple[str, bool]]:
    """Yield paragraphs and fenced code with the blank lines after them, and whether each is kept whole (not prose)."""
    block: list[str] = []
    fence, whole, ended = "", False, False  # ended: a blank line or a closing fence, only blank lines may follow
    for number, line in enumerate(_lines(text)):
        opened = _FENCE.match(line)
        if fence:
            ended = _closes(line, fence)
            fence = "" if ended else fence
        elif not line.strip():
            ended = ended or number > 0
        else:
            if block and (ended or opened):
                yield "".join(block), whole
                block, whole = [], False
            ended = False
            fence = opened.group(1) if opened else ""
            whole = whole or bool(opened or _STRUCTURED.match(line))
        block.append(line)
    if block:
        yield "".join(block), whole


def _closes(line: str, fence: str) -> bool:
    """Whether `line` ends a code block that `fence` opened: at least as many of the same character and nothing else."""
    bare = line.strip()
    return len(bare) >= len(fence) and bare == fence[0] * len(bare)


def _fitted(text: str, limit: int, count: Count, cutters: tuple[Callable[[str], Iterable[str]], ...]) -> list[str]:
    tokens = count(text)
    if tokens <= limit:
        return [text]
    if not cutters:
        return _characters(text, tokens, limit, count)
    parts: list[str] = []
    packed, total = "", 0
    for unit in cutters[0](text):
        unit_tokens = count(unit)
        if packed and total + unit_tokens > limit:
            parts.append(packed)
            packed, total = "", 0
        if unit_tokens > limit:
            parts += _fitted(unit, limit, count, cutters[1:])
        else:
            packed, total = packed + unit, total + unit_tokens
    return [*parts, packed] if packed else parts


def _characters(text: str, tokens: int, limit: int, count: Count) -> list[str]:
    """`text` in slices of equal length, aimed at 8/9 of `limit`; a slice that is still too long is cut again."""
    slices = max(2, -(-tokens * 9 // (limit * 8)))
    size = -(-len(text) // slices)
    if size == 1:
        return list(text)
    parts: list[str] = []
    for start in range(0, len(text), size):
        part = text[start : start + size]
        part_tokens = count(part)
        parts += [part] if part_tokens <= limit else _characters(part, part_tokens, limit, count)
    return parts
