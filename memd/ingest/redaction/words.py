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
from itertools import pairwise

from memd.ingest.redaction.spans import Find, Span, apart
from memd.ingest.redaction.unescaped import in_unescaped
from memd.store.lexical.languages import fold

_UNSEEN = "\u00ad\u200b-\u200f\u2060\ufeff"
_RUN_ON = (  # Thai, Lao, Tibetan, Burmese, Khmer, kana, Han, Hangul
    "\u0e00-\u0e7f\u0e80-\u0eff\u0f00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f"
)
_LAST_MARK = 0x1E94A  # no combining mark is behind it but variation selectors


def _ranges(codes: Iterable[int]) -> str:
    """The codes as ranges of a character class."""
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)


_MARKS = _ranges(code for code in range(0x300, _LAST_MARK + 1) if unicodedata.category(chr(code))[0] == "M") + _UNSEEN
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
    phrases: dict[str, set[int]] = {}
    """The first word of an entry, and of how many words the entries are that begin with it."""
    entries: set[str] = set()
    runs: set[str] = set()
    for word in words:
        if re.search(f"[{_RUN_ON}]", word):
            runs.add("".join(map(_folded, _CLUSTER.findall(word))))
        elif parts := [_folded(part) for part in _WORD.findall(word)]:
            entries.add(" ".join(parts))
            phrases.setdefault(parts[0], set()).add(len(parts))
    return _finder(phrases, entries, runs)


def _finder(phrases: dict[str, set[int]], entries: set[str], runs: set[str]) -> Find:
    longest_first = {first: sorted(lengths, reverse=True) for first, lengths in phrases.items()}
    sizes: dict[str, list[int]] = {}
    for entry in sorted(runs, key=len, reverse=True):
        if len(entry) not in sizes.setdefault(entry[:2], []):
            sizes[entry[:2]].append(len(entry))

    def of_words(text: str) -> Iterator[Span]:
        found = _WORD.finditer(text)
        ahead: list[tuple[str, int, int]] = []  # words that were read but not yet tried as the first
        while ahead or (ahead := _next(found)):
            lengths = longest_first.get(ahead[0][0])
            length = next((one for one in lengths if _has(text, ahead, found, one, entries)), 0) if lengths else 0
            if length:
                yield ahead[0][1], ahead[length - 1][2]
            del ahead[: length or 1]

    def of_runs(text: str) -> Iterator[Span]:
        return (span for run in _RUN.finditer(text) for span in _in_run(run, runs, sizes))

    def find(text: str) -> Iterator[Span]:
        # As it stands too: \t in a path of Windows is no tab, but the beginning of \tomasz.
        spans = [*of_words(text), *in_unescaped(of_words)(text)] if "\\" in text else [*of_words(text)]
        if runs:
            spans += in_unescaped(of_runs)(text)
        yield from apart(spans)

    return find


def _next(found: Iterator[re.Match[str]]) -> list[tuple[str, int, int]]:
    """The next word of a text, folded, and its place; none at the end."""
    word = next(found, None)
    return [] if word is None else [(_folded(word[0][:_FOLDED_MAX]), word.start(), word.end())]


def _has(
    text: str, ahead: list[tuple[str, int, int]], found: Iterator[re.Match[str]], length: int, entries: set[str]
) -> bool:
    """Whether an entry of `length` words stands where `ahead` begins, which gets the words that this reads."""
    while len(ahead) < length and (read := _next(found)):
        ahead += read
    if " ".join(word for word, _, _ in ahead[:length]) not in entries:
        return False
    return all(_BETWEEN.fullmatch(text, one[2], other[1]) for one, other in pairwise(ahead[:length]))


def _in_run(run: re.Match[str], runs: set[str], sizes: dict[str, list[int]]) -> Iterator[Span]:
    folded, starts, ends = [], [], []
    for cluster in _CLUSTER.finditer(run[0]):
        for character in _folded(cluster[0]):
            folded.append(character)
            starts.append(run.start() + cluster.start())
            ends.append(run.start() + cluster.end())
    characters, at = "".join(folded), 0
    while at < len(characters):
        tried = [*sizes.get(characters[at : at + 2], ()), *sizes.get(characters[at], ())]
        size = next((one for one in tried if characters[at : at + one] in runs), 0)
        if size:
            yield starts[at], ends[at + size - 1]
        at += size or 1
