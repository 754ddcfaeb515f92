"""Cuts a message's text into the pieces between which a chunk may end. Counterpart of chunking.py, which joins them.

Rule: verbatim. Joined, the pieces are the text, to the last blank. A unit for a reader (a short message or
paragraph, a fenced code block, a list, a table, a stack trace) is one piece where it fits; longer prose is cut into
sentences. Time grows with the length of the text, whatever is in it.

Measured (bench/recall.py): chunks that end between messages and not within them find 3 points more of what a question
needs in 500 tokens, 2 points more in 2,000.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

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
