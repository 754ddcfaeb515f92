"""The parts of a question, each of which asks for itself.

Rule: pure. People ask at the end of what they paste, at its beginning, or several things at once; a text has one vector
and one bag of words, so a long paste would drown the question and one question the other. The cost does not grow with
the message: its ends are looked at, and of each part the beginning.
"""

from __future__ import annotations

import itertools
import re

PARTS_MAX = 8
HEAD_CHARACTERS, TAIL_CHARACTERS = 4_000, 16_000
"""Of a longer message only its ends are looked at."""
PART_CHARACTERS_MAX = 400
"""Of a part; the embedder cuts it to `PART_TOKENS` besides."""
PART_TOKENS = 48

_ASKING = "?？؟\u037e՞፧"
"""Question marks: Latin, Chinese and Japanese, Arabic, Greek (U+037E), Armenian, Ethiopic."""
_GREEK_ASKING = r"(?<=[\u0370-\u03ff\u1f00-\u1fff];)"
"""Greek is mostly typed with a semicolon, which behind other letters ends a line of code."""
_ASKS = re.compile(rf"[{_ASKING}]$|{_GREEK_ASKING}$")
ASKING_MAX = PARTS_MAX - 2
"""Beside more of them the ends of the message would be no parts."""
_ENDS = re.compile(rf"(?<=[.!?…{_ASKING}])(?<!\b\d\.)(?<!\b\d\d\.)\s+|{_GREEK_ASKING}\s+|(?<=[。！？])\s*|\n+")
"""Not behind the number of an item or a day."""
_CLAUSES = re.compile(r"(?:(?<=\w)[,;:]\s+|[，；：])")
CLAUSE_CHARACTERS_MIN = 16
"""Of a sentence that asks for several things each is a part; a shorter clause names nothing to look for."""
_WRAPPED = re.compile(r"(?m)^(\S.{48,}[\w,])\n(?=\w)")
"""The end of a line that goes on in the next: a long one, without a mark at its end or an indent behind it."""
TAIL_PIECES, TAIL_PART_CHARACTERS = 44, 200
"""A sentence with more pieces has its end as a part too, for of a part the beginning is read, and a question may stand
at the end: behind a line of code, or a long explanation."""
_PIECE = re.compile(r"[A-Za-z0-9]{1,4}|[^\sA-Za-z0-9]")
"""The pieces that a tokenizer makes of a text, roughly: other than English letters it takes one by one."""
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
"""Programs put what the user said between lines of these."""
_ITEM = re.compile(r"\s*(?:[-*•]|\d{1,2}[.)])\s+(?=\S)")


def parts_of(message: str) -> dict[str, bool]:
    """The sentences that ask with their clauses and the ends of long ones, the last and the first sentence, the items
    of a list: at most `PARTS_MAX`, and whether each asks. Where no sentence asks all of them do, the last with its
    clauses: "report the codes of the crane, the ferry and the mill" asks for three things without a mark. What stands
    between first and last is told beside them then."""
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
    """Whether a part ends with a question mark."""
    return _ASKS.search(part) is not None


def _tail(sentence: str) -> str:
    """The end of a long sentence; empty where it is short."""
    end = sentence[-TAIL_PART_CHARACTERS:]
    places = [found.start() for found in _PIECE.finditer(end)][-TAIL_PIECES - 1 :]
    if len(places) <= TAIL_PIECES and end == sentence:
        return ""
    end = end[places[-TAIL_PIECES:][0] :]
    return end.partition(" ")[2] or end


def _clauses(sentence: str) -> list[str]:
    """The clauses of a sentence; none where it is a single one."""
    found = [one for one in _CLAUSES.split(sentence) if len(one) >= CLAUSE_CHARACTERS_MIN]
    return found if len(found) > 1 else []
