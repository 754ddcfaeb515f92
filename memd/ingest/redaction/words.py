"""Finds the words and phrases of `ingest.redact_words`.

Rule: one look-up in a table for each word of the text, however many words are on the list. Compared are whole words,
folded: case, accents and other differences of writing that people leave out do not count. Where a script writes no
spaces between words, or hangs endings on them (Chinese, Japanese, Korean, Thai and others), a word is found wherever
its characters stand.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

from memd.ingest.redaction.shapes import Find, Span, apart, in_unescaped
from memd.store.lexical.analyzer import fold

_UNSEEN = "\u00ad\u200b-\u200f\u2060\ufeff"
_RUN_ON = (  # Thai, Lao, Tibetan, Burmese, Khmer, kana, Han, Hangul
    "\u0e00-\u0e7f\u0e80-\u0eff\u0f00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f"
)
_LAST_MARK = 0x1E94A  # no combining mark is behind it but variation selectors
_CODES = (code for code in range(0x300, _LAST_MARK + 1) if unicodedata.category(chr(code))[0] == "M")
_RANGES = [[code for _, code in run] for _, run in groupby(enumerate(_CODES), lambda at: at[1] - at[0])]
_MARKS = "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in _RANGES) + _UNSEEN
_WORD = re.compile(rf"[^\W_{_RUN_ON}](?:[^\W_{_RUN_ON}]|[{_MARKS}])*+")
_BETWEEN = re.compile(r"[\s_'’.,>#*/|‐‑–-]{0,40}")
"""Between the words of a phrase: white space, a line's end in a comment or a quotation, hyphens."""
_LATIN = "[A-Za-z0-9\uff10-\uff5a]"
_GAP = r"[ \u00a0\u3000・·]?"
_RUN = re.compile(rf"(?:(?<!{_LATIN}){_LATIN}++{_GAP})?+[{_RUN_ON}](?:{_GAP}[{_RUN_ON}{_MARKS}A-Za-z0-9])*+")
_CLUSTER = re.compile(rf"[^\s・·](?:[{_MARKS}\u3099\u309a\uff9e\uff9f]*+)")
_FOLDED_MAX = 400
"""A longer run of letters is no word of the list, whose entries have at most 100 characters."""
_SIGNS = re.compile(f"[{_UNSEEN}\u0591-\u05bd\u05bf-\u05c7\u0640\u064b-\u0652\u0670]")
"""Characters that are not seen, and the vowel signs of Hebrew and Arabic, which are seldom written."""


def _folded(word: str) -> str:
    if word.isascii():
        return word.lower()
    return fold(_SIGNS.sub("", unicodedata.normalize("NFKC", word)).casefold())


def listed_words(words: Iterable[str]) -> Find:
    """The finder of these words and phrases; an entry without a letter or digit finds nothing."""
    phrases: set[tuple[str, ...]] = set()
    lengths: dict[str, list[int]] = {}  # of the phrases that begin with a word, in words, the longest first
    runs: set[str] = set()
    sizes: dict[str, list[int]] = {}  # of the runs that begin with one or two characters
    for word in words:
        if re.search(f"[{_RUN_ON}]", word):
            runs.add("".join(map(_folded, _CLUSTER.findall(word))))
        else:
            phrases.add(tuple(map(_folded, _WORD.findall(word))))
    for phrase in sorted(filter(None, phrases), key=len, reverse=True):
        if len(phrase) not in lengths.setdefault(phrase[0], []):
            lengths[phrase[0]].append(len(phrase))
    for run in sorted(runs, key=len, reverse=True):
        if len(run) not in sizes.setdefault(run[:2], []):
            sizes[run[:2]].append(len(run))

    def of_words(text: str) -> Iterator[Span]:
        places = [*_WORD.finditer(text)] if lengths else []
        read = [_folded(place[0][:_FOLDED_MAX]) for place in places]
        done = 0
        for at, first in enumerate(read):
            for length in lengths.get(first, ()) if at >= done else ():
                parts = places[at : at + length] if tuple(read[at : at + length]) in phrases else []
                if parts and all(_BETWEEN.fullmatch(text, one.end(), other.start()) for one, other in pairwise(parts)):
                    done = at + length
                    yield parts[0].start(), parts[-1].end()
                    break

    def of_runs(text: str) -> Iterator[Span]:
        for run in _RUN.finditer(text):
            clusters = [(sign, one) for one in _CLUSTER.finditer(text, *run.span()) for sign in _folded(one[0])]
            signs, at = "".join(sign for sign, _ in clusters), 0
            while at < len(signs):
                tried = [*sizes.get(signs[at : at + 2], ()), *sizes.get(signs[at], ())]
                size = next((one for one in tried if signs[at : at + one] in runs), 0)
                if size:
                    yield clusters[at][1].start(), clusters[at + size - 1][1].end()
                at += size or 1

    def find(text: str) -> Iterator[Span]:
        # As it stands too: \t in a path of Windows is no tab, but the beginning of \tomasz.
        spans = [*of_words(text), *(in_unescaped(of_words)(text) if "\\" in text else ())]
        yield from apart([*spans, *(in_unescaped(of_runs)(text) if runs else ())])

    return find
