"""Cuts a stretch of conversation into the chunks that are stored.

Rule: verbatim. The chunks of a message, put together, are its stored text; only the fixed windows that stand in when
time runs out overlap. Messages meet with a newline inside a chunk, and `speakers` says whose text lies where. Limits
count the text as it is shown, with the roles that are written in front of messages.

Measured: neighbouring sentences have a cosine of 0.12 to 0.23 (median; chat, technical prose) with the bundled model,
parts of source code 0.44. Only 0 %, 2 % and 7 % of neighbours reach 0.75, so with that threshold nearly every piece's
end is a boundary and chunks of prose come out just over `min_tokens` (55 tokens on average); longer ones are code,
lists and tables kept whole. A decision costs 2 to 5 ms; everything else takes 1.6 to 2.7 s per megabyte, of prose, of
one word or of one-letter lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from memd.entries import Speaker, Vector, role_opening
from memd.ingest.pieces import Count, candidate_pieces, fitted, words
from memd.settings.model import ChunkingSettings

JOINT = "\n"
WHOLE_MINIMA = 2
"""A message or paragraph of at most so many times `min_tokens` is not cut."""
WINDOW_LEEWAY = 7
"""A fixed window may be a seventh shorter or longer than `window_tokens` (150 to 200 for 175), to end with a piece."""
_ESTIMATE_SLACK = 8  # this near to the limit the joined text is counted: the pieces' tokens added up are an estimate


class Utterance(msgspec.Struct, frozen=True):
    """A message to be remembered, or text without a speaker (a note, a page): that has neither role nor digest."""

    text: str
    """Of a message: from `messages.stored_text`."""
    role: str | None = None
    digest: bytes | None = None

    @property
    def opening(self) -> str:
        """The role as it is written in front of the text where that is shown; empty without one."""
        return "" if self.role is None else role_opening(self.role)


class Chunk(msgspec.Struct, frozen=True):
    """A chunk without identity or vector. `speakers` and `digests` are parallel: one of each per message in it.

    Both are empty for text without a speaker.
    """

    content: str
    speakers: tuple[Speaker, ...]
    digests: tuple[bytes, ...]


class Split(msgspec.Struct, frozen=True):
    """The chunks in order, and whether some of them are fixed windows because time ran out."""

    chunks: tuple[Chunk, ...]
    used_fallback: bool


class _Piece(msgspec.Struct, frozen=True):
    text: str
    message: int
    opening: str | None
    """On the first piece of a message: the role shown in front of it ("" without a speaker). None on the others."""
    ends: bool
    """The last part of a candidate piece: always, except for the words that windows are made of."""
    tokens: int
    """Its share in a chunk, a joint and the opening before it included."""

    @property
    def shown(self) -> str:
        """The text with the joint before it inside a chunk."""
        return self.text if self.opening is None else JOINT + self.opening + self.text


def split(
    messages: Sequence[Utterance],
    *,
    settings: ChunkingSettings,
    count: Count,
    embed: Callable[[str], Vector],
    expired: Callable[[], bool],
) -> Split:
    """Split consecutive messages of one conversation, or consecutive texts without a speaker, into chunks.

    A chunk takes piece after piece until it has `min_tokens`; from then on it ends where the cosine between its last
    piece and the next falls below `similarity`, and in any case before `max_tokens`. A chunk that is short because
    its neighbour cannot be taken in is joined to the one before it, if the two fit.

    Args:
        count: raw tokens of a text (`TokenCounter.count`).
        embed: unit vector of a text. Called only where a boundary is in question, once per piece; a caller that
            memoises it gets the vector of a chunk of one piece for nothing.
        expired: whether the time for finding boundaries is used up; asked before each decision. From then on, the chunk
            in the making included, the rest is cut into fixed windows.

    Raises:
        ValueError: some of `messages` have a speaker and some have none, which `speakers` could not tell apart.
    """
    if len({message.role is None for message in messages}) > 1:
        raise ValueError("messages and texts without a speaker are mixed: put them into runs of their own")
    pieces = _pieces(messages, settings, count)
    groups, position = _by_meaning(pieces, settings, count, embed, expired)
    rest = pieces[position:]
    if rest:
        groups += _windows(rest, settings, count)
    return Split(tuple(_chunk(group, messages) for group in groups), used_fallback=bool(rest))


def _pieces(messages: Sequence[Utterance], settings: ChunkingSettings, count: Count) -> list[_Piece]:
    pieces = []
    for number, message in enumerate(messages):
        texts = candidate_pieces(
            message.text,
            opening=message.opening,
            whole_tokens=WHOLE_MINIMA * settings.min_tokens,
            max_tokens=settings.max_tokens,
            count=count,
        )
        for position, text in enumerate(texts or [""]):
            opening = message.opening if position == 0 else None
            pieces.append(_piece(text, number, opening, True, count))
    return pieces


def _piece(text: str, message: int, opening: str | None, ends: bool, count: Count) -> _Piece:
    piece = _Piece(text, message, opening, ends, 0)
    return msgspec.structs.replace(piece, tokens=count(piece.shown))


def _by_meaning(
    pieces: Sequence[_Piece],
    settings: ChunkingSettings,
    count: Count,
    embed: Callable[[str], Vector],
    expired: Callable[[], bool],
) -> tuple[list[list[_Piece]], int]:
    """Return groups of pieces, one per chunk, and the number of pieces in them: all, unless the time ran out."""
    vector = lru_cache(maxsize=2)(embed)  # a decision's second piece is often the next one's first
    groups: list[list[_Piece]] = []
    group: list[_Piece] = []
    tokens = 0
    for position, piece in enumerate(pieces):
        joined = _tokens_with(group, tokens, piece, settings.max_tokens, count)
        ends = joined > settings.max_tokens
        if not ends and tokens >= settings.min_tokens and count(_shown(group)) >= settings.min_tokens:
            if expired():
                return groups, position - len(group)
            ends = float(vector(group[-1].text) @ vector(piece.text)) < settings.similarity
        if ends:
            _close(group, groups, settings, count)
            group, joined = [], piece.tokens
        group.append(piece)
        tokens = joined
    _close(group, groups, settings, count)
    return groups, len(pieces)


def _close(group: list[_Piece], groups: list[list[_Piece]], settings: ChunkingSettings, count: Count) -> None:
    """Add a finished group; one that stayed short is joined to the group before it where the two fit."""
    if groups and count(_shown(group)) < settings.min_tokens:
        merged = groups[-1] + group
        if count(_shown(merged)) <= settings.max_tokens:
            groups[-1] = merged
            return
    if group:
        groups.append(group)


def _tokens_with(group: Sequence[_Piece], tokens: int, piece: _Piece, max_tokens: int, count: Count) -> int:
    """The tokens of `group` (which has `tokens`) and `piece` together, exact where the limit is near."""
    total = tokens + piece.tokens
    return total if total <= max_tokens - _ESTIMATE_SLACK else count(_shown([*group, piece]))


def _windows(pieces: Sequence[_Piece], settings: ChunkingSettings, count: Count) -> list[list[_Piece]]:
    """Fixed windows over the words of `pieces`, each beginning with the last words of the one before it."""
    window_max = min(settings.window_tokens + settings.window_tokens // WINDOW_LEEWAY, settings.max_tokens)
    window_min = min(settings.window_tokens - settings.window_tokens // WINDOW_LEEWAY, window_max)
    overlap_max = min(settings.overlap_tokens, window_max // 2)
    units = _units(pieces, max(1, window_max // 8), count)
    windows: list[list[_Piece]] = []
    start = end = 0
    while end < len(units):
        total, end = 0, start
        while end < len(units) and (end == start or total + units[end].tokens <= window_max):
            total += units[end].tokens
            end += 1
            if total >= window_min and units[end - 1].ends and count(_shown(units[start:end])) >= window_min:
                break
        windows.append(units[start:end])
        begun, start, overlap = start, end, 0
        while start > begun + 1 and overlap + units[start - 1].tokens <= overlap_max:
            start -= 1
            overlap += units[start].tokens
    return windows


def _units(pieces: Sequence[_Piece], limit: int, count: Count) -> list[_Piece]:
    """Return the words of `pieces`; words of more than `limit` tokens are cut, so that every window advances."""
    units = []
    for piece in pieces:
        texts = [part for word in words(piece.text) or [""] for part in fitted(word, limit, count)]
        for position, text in enumerate(texts):
            opens = piece.opening if position == 0 else None
            units.append(_piece(text, piece.message, opens, position == len(texts) - 1, count))
    return units


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
        role = messages[piece.message].role
        if role is not None and (piece.opening is not None or position == 0):
            speakers.append(Speaker(length, role, continues=piece.opening is None))
        parts.append(piece.text)
        length += len(piece.text)
    numbers = dict.fromkeys(piece.message for piece in group)
    digests = (messages[number].digest for number in numbers)
    return Chunk("".join(parts), tuple(speakers), tuple(digest for digest in digests if digest is not None))
