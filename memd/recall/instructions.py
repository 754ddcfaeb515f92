"""Recognises text in documents and tool results that looks like an instruction to a model.

Rule: pure, and only a label: it excludes, changes and ranks nothing. Only documents and tool results are checked, never
text of the user or the model. Each pattern is bounded, so time is linear in the text. The patterns are those of public
scanners (rebuff, vigil, LLM Guard, garak) that are rare in honest text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import chain

from msgspec import UNSET

from memd.assets import words_of
from memd.caching import late_pattern
from memd.entries import ChunkState
from memd.recall.neutralising import as_searched

CHARACTERS_MAX = 50_000
"""Limit of the text that is checked; chunks have some 1,500 characters."""
TOOL_ROLES = frozenset({"tool", "function"})

_GAP = r"[\s*_\"'’-]{1,3}"  # not the end of a clause
_WORDS = rf"(?:{_GAP}[\w'’]{{1,30}})"


def _order(verbs: str, near: str, nouns: str) -> str:
    return rf"\b(?:{verbs})\b(?={_WORDS}{{0,6}}?{_GAP}(?:{near})\b){_WORDS}{{0,5}}?{_GAP}(?:{nouns})\b"


def _stems(alternatives: str) -> tuple[str, ...]:
    """Return the beginnings of alternatives, up to the first special character."""
    return tuple(re.split(r"[\\\[(?]", one)[0].casefold() for one in alternatives.split("|"))


def _patterns() -> Iterator[tuple[str, Sequence[str], str]]:
    """Yield label, needed words and pattern. A text must contain one of the lower-case words, a check forty times as
    fast as the pattern. The pattern expects single white space."""
    words = words_of("instructions")
    for one in words["order"]:  # verbs, words of which one must be near, nouns: in the word order of the language
        yield "override", _stems(one["verbs"]), _order(**one)
    for pattern in words["run_on"]["patterns"]:
        yield "override", _stems(pattern[3:].partition(")")[0]), pattern
    for one in words["pattern"]:
        pattern = one["pattern"].replace("{models}", words["models"]).replace("{kinds}", words["kinds"])
        yield one["label"], one["needed"], pattern


_PATTERNS = tuple(_patterns())
_COMPILED = [(label, needed, late_pattern(pattern, re.IGNORECASE)) for label, needed, pattern in _PATTERNS]
_IN_ASCII = [(label, found, one) for label, needed, one in _COMPILED if (found := [*filter(str.isascii, needed)])]
# Runs of invisible characters that can encode text (tags except in flags, variation selectors, zero width); reordering.
_UNSEEN = late_pattern(
    "(?<![\U0001f3f4\U000e0020-\U000e007f])[\U000e0020-\U000e007e]{3}|[\ufe00-\ufe0f\U000e0100-\U000e01ef]{4}"
    "|[\u200b-\u200d\u2060-\u2064\ufeff]{6}|[\u202d\u202e]"
)
LABELS = tuple(dict.fromkeys(label for label, _, _ in _PATTERNS))


def instructing(text: str) -> tuple[str, ...]:
    """Return the `LABELS` of a text; empty if it does not look like an instruction to a model."""
    text = text[:CHARACTERS_MAX]
    forms = {as_searched(text)}
    if not text.isascii():  # `as_searched` turns Cyrillic letters into similar Latin ones
        forms.add(unicodedata.normalize("NFKC", text))
    found = {label for form in forms for label in _labels(" ".join(form.split()))}
    if not text.isascii() and _UNSEEN.search(text):
        found.add("hidden")
    return tuple(label for label in LABELS if label in found)


def _labels(searched: str) -> Iterator[str]:
    lowered = searched.casefold()
    for label, needed, pattern in _IN_ASCII if lowered.isascii() else _COMPILED:
        if any(word in lowered for word in needed) and pattern.search(searched):
            yield label


def instructing_chunk(chunk: ChunkState) -> tuple[str, ...]:
    """Return the `LABELS` of a document's chunk, or of the tool results in a turn."""
    if chunk.kind != "document" and TOOL_ROLES.isdisjoint(chunk.roles):
        return ()
    return tuple(dict.fromkeys(chain.from_iterable(map(instructing, _foreign(chunk)))))


def _foreign(chunk: ChunkState) -> Sequence[str]:
    if chunk.kind == "document":
        return [chunk.displayed]
    if chunk.speakers is UNSET:  # a record of an older memd, with the roles in the text
        return [chunk.content] if TOOL_ROLES.issuperset(chunk.roles) else ()
    return [text for speaker, text in chunk.stretches if speaker.role in TOOL_ROLES]
