"""Names in a text, by rules: people, places and products by their capitals, and what only a name can be written like.

Rule: pure, and no model: what these rules miss is not in the index of names, and nothing else depends on that. Capitals
tell names in scripts that have them, except in German, where every noun has one; in Chinese, Arabic, Hindi and the like
only identifiers are found.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

from memd.caching import late_pattern
from memd.store.lexical.analyzer import fold, is_stopword, language_of_text

NAME_CHARACTERS_MAX = 80
"""A longer one is a key, a link with parameters or base64, by which nobody asks."""
NAMES_MAX = 200
"""Of one chunk: a listing of a folder is no reason for an index of its own."""


class Kind(enum.StrEnum):
    """The way in which a name is written."""

    EMAIL = "e-mail"
    LINK = "link"
    PATH = "path"
    VERSION = "version"
    TICKET = "ticket"
    IDENTIFIER = "identifier"
    NAME = "name"


# Each part has a largest length: without one a long run of letters takes time by its square.
_PART, _WORD = r"[\w.@-]{1,64}", r"[^\W_]{1,64}"
_WRITTEN = {
    Kind.EMAIL: r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}",
    Kind.LINK: r"https?://[^\s<>\"'`()\[\]{}]{1,300}",
    Kind.PATH: rf"(?<![\w/.~@-])(?:(?:~|\.{{1,2}})?/{_PART}(?:/{_PART}){{1,16}}"
    rf"|(?:{_PART}/){{1,16}}[\w@-]{{1,64}}\.\w{{1,10}}|{_PART}(?:/{_PART}){{2,16}})/?",
    Kind.VERSION: r"\bv\d{1,9}(?:\.\d{1,9}){0,5}[\w.-]{0,32}\b|\b\d{1,9}\.\d{1,9}\.\d{1,9}[\w.-]{0,32}\b",
    Kind.TICKET: r"\b[A-Z][A-Z0-9]{1,9}-\d{1,12}\b|(?<!\w)#\d{2,12}\b",
    Kind.IDENTIFIER: rf"\b{_WORD}(?:_{_WORD}){{1,16}}\b"
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
_PLAIN = frozenset(
    re.findall(
        r"\w+",
        "monday tuesday wednesday thursday friday saturday sunday mon tue tues wed thu thur thurs fri sat sun january "
        "february march april may june july august september october november december jan feb mar apr jun jul aug sep "
        "sept oct nov dec today tomorrow yesterday tonight ok hello hey hi bye wow oh dear congrats congratulations "
        "great good nice last next since whenever wish todo fixme note btw fyi lol omg asap aka etc user assistant "
        "system tool monsieur madame mr mrs ms dr",
    )
)
"""Capitalised words that name nothing that anybody looks for."""
_CAPITALISED_NOUNS = ("de",)
"""Languages in which a capital tells no name."""


def key_of(name: str) -> str:
    """The form under which a name is looked up: in small letters, without accents."""
    return fold(name.lower())


def entities_of(text: str) -> list[str]:
    """Return the names in a text as they are written there, each once, in order."""
    found: dict[str, str] = {}
    for name in (*_written(text), *_capitalised(text)):
        if 1 < len(name) <= NAME_CHARACTERS_MAX:
            found.setdefault(key_of(name), name)
    return list(found.values())[:NAMES_MAX]


def kind_of(name: str) -> Kind:
    """How a name from `entities_of` is written."""
    token = _TOKEN.fullmatch(name)
    return Kind.NAME if token is None or token.lastgroup is None else Kind[token.lastgroup]


def _written(text: str) -> Iterator[str]:
    """Names by the way in which only names are written."""
    for token in _TOKEN.finditer(text):
        name = token[0].rstrip(".,;:!?-")
        if not _DATE.fullmatch(name) and any(map(str.isalnum, name)) and not name.isdecimal() and not _is_plain(name):
            yield name


def _capitalised(text: str) -> Iterator[str]:
    """Runs of capitalised words; of one that opens a sentence, what is a name elsewhere."""
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
    """Whether a capitalised word is none of a name's: a function word, a day, a greeting."""
    lower = _POSSESSIVE.sub("", word).lower()
    return len(lower) < 2 or is_stopword(lower) or lower in _PLAIN
