"""The parts of a question, each of which is searched separately.

Rule: pure. People ask before or behind what they paste, or ask several things at once. One vector and one bag of words
for the whole message would drown the question in the paste, and one question in another. The cost does not grow with
the message: only its ends are read, and only the beginning of each part.
"""

from __future__ import annotations

import itertools
import re

PARTS_MAX = 8
HEAD_CHARACTERS, TAIL_CHARACTERS = 4_000, 16_000
"""Only so much of the beginning and the end of a longer message is read."""
PART_CHARACTERS_MAX = 400
"""Length of a part; the embedder cuts it to PART_TOKENS as well."""
PART_TOKENS = 48

_ASKING = "?？؟\u037e՞፧"
"""Question marks: Latin, Chinese and Japanese, Arabic, Greek (U+037E), Armenian, Ethiopic."""
_GREEK_ASKING = r"(?<=[\u0370-\u03ff\u1f00-\u1fff];)"
"""Greek text mostly uses a semicolon as its question mark. Behind other letters a semicolon ends a line of code."""
_ASKS = re.compile(rf"[{_ASKING}]$|{_GREEK_ASKING}$")
ASKING_MAX = PARTS_MAX - 2
"""More asking sentences would leave no parts for the ends of the message."""
_ENDS = re.compile(rf"(?<=[.!?…{_ASKING}])(?<!\b\d\.)(?<!\b\d\d\.)\s+|{_GREEK_ASKING}\s+|(?<=[。！？])\s*|\n+")
"""Sentence ends, but not behind the number of a list item or a day."""
_CLAUSES = re.compile(r"(?:(?<=\w)[,;:]\s+|[，；：])")
CLAUSE_CHARACTERS_MIN = 16
"""Each clause of a sentence is a part, because it may ask for several things. A shorter clause names nothing to search
for."""
_WRAPPED = re.compile(r"(?m)^(\S.{48,}[\w,])\n(?=\w)")
"""A hard-wrapped line: long, without punctuation at its end, and followed by a line that is not indented."""
TAIL_PIECES, TAIL_PART_CHARACTERS = 44, 200
"""The end of a sentence with more pieces is a part too. Only the beginning of a part is read, and the question may
follow a line of code or a long explanation."""
_PIECE = re.compile(r"[A-Za-z0-9]{1,4}|[^\sA-Za-z0-9]")
"""Approximates word pieces: up to four ASCII letters or digits, or any other single character."""
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
"""Programs wrap the user's words in lines that consist of a tag."""
_ITEM = re.compile(r"\s*(?:[-*•]|\d{1,2}[.)])\s+(?=\S)")


def parts_of(message: str) -> dict[str, bool]:
    """Return at most PARTS_MAX parts of a message, and whether each asks: sentences with a question mark, their clauses
    and the ends of long ones, the last and first sentence, and list items.

    If no sentence has a question mark, all of these ask, including the clauses of the last one: "report the codes of
    the crane, the ferry and the mill" asks for three things. The sentences in between are then context, not asking."""
    if len(message) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        message = f"{message[:HEAD_CHARACTERS]}\n{message[-TAIL_CHARACTERS:]}"
    message = _WRAPPED.sub(r"\1 ", message)
    sentences = [one for one in map(str.strip, _ENDS.split(message)) if any(map(str.isalnum, one))]
    sentences = [one for one in sentences if not _TAG.fullmatch(one)] or sentences
    asking = [one for one in sentences if is_marked(one)][-ASKING_MAX:]
    tails = [tail for one in asking if (tail := _tail(one))]
    clauses = [some for one in asking or sentences[-1:] for some in _clauses(one)]
    items = (one[found.end() :] for one in sentences if (found := _ITEM.match(one)) is not None)
    between = [some for one in sentences[-2:0:-1][:PARTS_MAX] for some in (one, *_clauses(one))] if not asking else []
    beside = {one[:PART_CHARACTERS_MAX] for one in between}
    questions = {one[:PART_CHARACTERS_MAX] for one in itertools.chain(asking, tails, clauses)}
    ends = [*sentences[-1:], *filter(None, map(_tail, sentences[-1:])), *sentences[:1]]
    chosen = itertools.chain(asking, ends, tails, clauses, items, between)
    parts = itertools.islice(dict.fromkeys(one[:PART_CHARACTERS_MAX] for one in chosen), PARTS_MAX)
    return {one: one in questions or not (asking or one in beside) for one in parts}


def is_marked(part: str) -> bool:
    """Return whether a part ends with a question mark."""
    return _ASKS.search(part) is not None


def _tail(sentence: str) -> str:
    """Return the end of a long sentence; empty for a short one."""
    end = sentence[-TAIL_PART_CHARACTERS:]
    places = [found.start() for found in _PIECE.finditer(end)][-TAIL_PIECES - 1 :]
    if len(places) <= TAIL_PIECES and end == sentence:
        return ""
    end = end[places[-TAIL_PIECES:][0] :]
    return end.partition(" ")[2] or end


def _clauses(sentence: str) -> list[str]:
    """Return the clauses of a sentence; empty if there is only one."""
    found = [one for one in _CLAUSES.split(sentence) if len(one) >= CLAUSE_CHARACTERS_MIN]
    return found if len(found) > 1 else []
