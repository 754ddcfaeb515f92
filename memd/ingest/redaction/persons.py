"""Finds what of persons is replaced where the settings ask for it: mail addresses, phone numbers, national ids, words.

Rule: nothing is imported for what is not asked for. A phone number counts only where its country's numbering plan has
it, a national id where its check digits and its date are right; a layout that other numbers have as well, only beside a
name or in the countries that the settings name. Names are not guessed: who is to be left out is on the list. Of that
whole words are compared, folded: case, accents and other differences of writing that people leave out do not count.
Where a script writes no spaces between words, or hangs endings on them (Chinese, Japanese, Korean, Thai and others), a
word is found wherever its characters stand. A word of the text takes one look-up, however many are on the list.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from itertools import groupby, pairwise

import msgspec

from memd.caching import late_pattern
from memd.errors import ConfigError
from memd.ingest.redaction.shapes import NAMED, TABLES, Find, Span, apart, in_unescaped
from memd.settings.model import LISTED_WORD, IngestSettings
from memd.wording import pip_install


def personal(settings: IngestSettings) -> dict[str, Find]:
    """The finders that `redact_persons` and `redact_words` ask for, by the names of their marks. Raises ConfigError: a
    package of the extra is not installed, or a country is none."""
    finders: dict[str, Find] = {}
    asked, countries = settings.redact_persons, settings.redact_countries
    if "email" in asked:
        finders["email"] = in_unescaped(mail_addresses)
    try:
        if countries and not {"national_id", "phone"}.isdisjoint(asked):
            known = import_module("phonenumbers").SUPPORTED_REGIONS
            if unknown := [
                one for one in countries if one not in known
            ]:  # their numbers would stay, and nobody be told
                raise ConfigError(
                    f"ingest.redact_countries: {', '.join(unknown)} is no country of ISO 3166 whose numbers are known; "
                    "give its two letters there (GB, not UK; GR, not EL)"
                )
        if "national_id" in asked:
            import_module("stdnum")
            finders["national_id"] = in_unescaped(national_ids(countries))
        if "phone" in asked:
            import_module("phonenumbers")
            finders["phone"] = in_unescaped(phone_numbers(countries))
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"ingest.redact_persons needs the package {missing.name}, which is not installed: "
            f"{pip_install('memd-proxy[persons]')}, and start again"
        ) from None
    if settings.redact_words:
        finders[LISTED_WORD] = listed_words(settings.redact_words)
    return finders


# Mail addresses

_LOCAL_MAX = 64
_LINE_LOOKED_AT = 200
_AROUND_LOCAL = "!#$&'*/=?^`{|}~.-"
_SERVICES = frozenset(("git", "hg", "svn", "gitlab", "gitea", "aur"))
_AT, _LOCAL, _IN_FRONT, _DOMAIN = (
    late_pattern(NAMED[f"MAIL_{part}"]) for part in ("AT", "LOCAL", "IN_FRONT", "DOMAIN")
)
_NO_TOP = late_pattern(f"{NAMED['FILE']}|{NAMED['UNIT_FILE']}")  # logo@2x.png, getty@tty1.service
_SCP_BEHIND, _SSH_BEFORE = late_pattern(NAMED["SCP_BEHIND"]), late_pattern(NAMED["SSH_BEFORE"])


def mail_addresses(text: str) -> Iterator[Span]:
    """The addresses, international ones too, without `mailto:` and angle brackets.

    A login, where no letter can go, is left alone: `git@…`, the user of a URL, `user@host:path` of scp, `ssh user@…`.
    """
    last = 0
    for at in _AT.finditer(text):
        if at.start() < last:
            continue
        # Backwards a run of one script: of 请写信给anna@… it is anna, and all of 用户@…
        local = _LOCAL.match(text[max(0, at.start() - _LOCAL_MAX) : at.start()][::-1])
        # Of a quotation, a link or an assignment these only stand in front of it: 'anna@…', x=anna@…, a/b/anna@…
        name = _IN_FRONT.split(local[0][::-1])[-1].lstrip(_AROUND_LOCAL) if local else ""
        domain = _DOMAIN.match(text, at.end())
        if not name or domain is None or _NO_TOP.fullmatch(domain["top"] or ""):
            continue
        start = at.start() - len(name)
        if name.lower() not in _SERVICES and not _is_login(text, start, domain.end()):
            last = domain.end()
            yield start, last


def _is_login(text: str, start: int, end: int) -> bool:
    before = text[max(0, start - _LINE_LOOKED_AT) : start]
    _, scheme, user = before.rpartition("://")
    is_user = bool(scheme) and not re.search(r"[\s/?#]", user)
    return is_user or bool(_SCP_BEHIND.match(text, end) or _SSH_BEFORE.search(before[before.rfind("\n") + 1 :]))


# Phone numbers, by Google's libphonenumber (its port `phonenumbers`)

_WORD_CHARACTERS = 40
_AREA_DIGITS_MIN = 3  # 030, 0171; people group what follows as they like
_DIGITS_MIN = 7
_TRIES_MAX = 6  # parts of one place that the library looks at
_GROUPS_MAX = 12  # of three numbers in a row; more are a table
_SINGLE_DIGITS_MAX = 3  # 0 and 1 in front of an area
_BEFORE, _BEHIND = 4, 12  # what stands around a number tells that it is none, or is its extension
_DIGITS = re.compile(r"\d+")
_PHONE_BEFORE, _WITH_CODE = late_pattern(NAMED["PHONE_BEFORE"]), late_pattern(NAMED["PHONE_WITH_CODE"])
_GROUPS, _ROW = late_pattern(NAMED["PHONE_GROUPS"]), late_pattern(NAMED["PHONE_ROW"])
_ABROAD = late_pattern(NAMED["PHONE_ABROAD"])


def phone_numbers(countries: Sequence[str]) -> Find:
    """The finder of numbers with a country code, and of those that these countries (ISO 3166) write without one."""
    import phonenumbers as library

    def is_valid(number: str) -> bool:
        try:
            return library.is_valid_number(library.parse(number))
        except library.NumberParseException:
            return False

    def is_written_as_one(number: library.PhoneNumber, groups: Sequence[str]) -> bool:
        """Whether it has the groups that its country writes, or begins with an area code."""
        if groups[0].startswith("0") and len(groups[0]) >= _AREA_DIGITS_MIN:
            return len(groups) > 1
        plan = library.PhoneNumberFormat
        national, abroad = (
            _DIGITS.findall(library.format_number(number, one)) for one in (plan.NATIONAL, plan.INTERNATIONAL)
        )
        return len(groups) > 1 and groups in (national, abroad[1:])

    def numbers(country: str | None, text: str, place: re.Match[str]) -> Iterator[Span]:
        """The numbers that begin in a place of the text."""
        begin = max(0, place.start() - _BEFORE)
        part = text[begin : place.end() + _BEHIND]
        for found in library.PhoneNumberMatcher(part, country, library.Leniency.VALID, _TRIES_MAX):
            start, written = begin + found.start, found.raw_string
            if place.start() <= start < place.end() and (
                re.match(r"[(\s]*(?:[+＋]|00)", written)
                or is_written_as_one(found.number, _DIGITS.findall(written))
                or _is_behind_word(text, start)
            ):
                yield start, begin + found.end

    def find(text: str) -> Iterator[Span]:
        # The library reads 0048… only where it is told from where one calls.
        spans = [found.span() for found in _ABROAD.finditer(text) if is_valid(f"+{found[1]}")]
        spans += (span for at in _WITH_CODE.finditer(text) for span in numbers(None, text, at))
        if countries:
            spans += (span for at in _at_home(text) for country in countries for span in numbers(country, text, at))
        yield from apart(spans)

    return find


def _at_home(text: str) -> Iterator[re.Match[str]]:
    """Digits in groups, and rows of digits behind a word for a phone: the library is slow where most are none."""
    for found in _GROUPS.finditer(text):
        groups = _DIGITS.findall(found[0])
        is_list = len(groups) > _GROUPS_MAX or sum(len(group) == 1 for group in groups) > _SINGLE_DIGITS_MAX
        if not is_list and sum(map(len, groups)) >= _DIGITS_MIN:
            yield found
    yield from (found for found in _ROW.finditer(text) if _is_behind_word(text, found.start()))


def _is_behind_word(text: str, start: int) -> bool:
    return bool(_PHONE_BEFORE.search(text[max(0, start - _WORD_CHARACTERS) : start]))


# National ids

BEFORE_CHARACTERS, BEHIND_CHARACTERS = 60, 24
"""How far from a number its name may stand."""


class _Kind(msgspec.Struct, frozen=True):
    """One kind of number: a line of the table."""

    countries: tuple[str, ...]
    checks: tuple[str, ...]
    names: tuple[str, ...]
    alone: tuple[str, ...]
    at_home: tuple[str, ...]
    named: tuple[str, ...]


def _columns(line: str) -> Iterator[tuple[str, ...]]:
    countries, checks, names, *layouts = line.split(" | ")
    yield from (tuple(countries.split()), tuple(checks.split("+")), tuple(names.split(", ")))
    yield from (tuple(one.split()) if one != "-" else () for one in layouts)


KINDS = [_Kind(*_columns(line)) for line in TABLES["national_ids"].splitlines()]
_ANY_NAME = tuple(TABLES["id_names"].split(", "))
_CLASSES = {"9": "[0-9]", "A": "[A-Z]", "*": "[0-9A-Z]", "_": "[ \u00a0]"}
_NO_SPACES_FROM = "\u0e00"  # scripts without spaces between words
_ID_BEGINS = late_pattern(NAMED["ID_BEGINS"])
_Layout = tuple[re.Pattern[str], list[tuple[_Kind, bool]]]
"""A way to write numbers; who writes them so, and whether a name has to stand beside it."""


def national_ids(countries: Sequence[str]) -> Find:
    """The finder of these numbers; in the countries (ISO 3166) a name need not stand beside them."""
    kinds: dict[str, list[tuple[_Kind, bool]]] = {}
    for kind in KINDS:
        is_home = not set(countries).isdisjoint(kind.countries)
        for layouts, needs_name in ((kind.alone, False), (kind.at_home, not is_home), (kind.named, True)):
            for layout in layouts:
                kinds.setdefault(layout, []).append((kind, needs_name))
    by_beginning: dict[tuple[bool, int], list[_Layout]] = {}  # with digits? how many digits or letters? longest first
    for layout, of in sorted(kinds.items(), key=lambda item: -len(item[0])):
        pattern = re.compile("".join(_CLASSES.get(sign, re.escape(sign)) for sign in layout) + NAMED["ID_RIGHT"])
        beginning = layout[0] == "9", len(layout) - len(layout.lstrip(layout[0]))
        by_beginning.setdefault(beginning, []).append((pattern, of))

    def find(text: str) -> Iterator[Span]:
        end = 0
        for begin in _ID_BEGINS.finditer(text):
            beginning = begin[0].isdigit(), len(begin[0])
            for pattern, of in by_beginning.get(beginning, ()) if begin.start() >= end else ():
                number = pattern.match(text, begin.start())
                if number is not None and _is_one(number, of):
                    end = number.end()
                    yield number.span()
                    break

    return find


def _is_one(number: re.Match[str], kinds: Sequence[tuple[_Kind, bool]]) -> bool:
    around = number.string[max(0, number.start() - BEFORE_CHARACTERS) : number.end() + BEHIND_CHARACTERS].lower()
    is_named = _is_beside(number, around, _ANY_NAME)
    return any(
        _passes(kind.checks, number[0])
        for kind, needs_name in kinds
        if is_named or not needs_name or _is_beside(number, around, kind.names)
    )


def _is_beside(number: re.Match[str], around: str, names: tuple[str, ...]) -> bool:
    """Whether one of these names stands before the number or behind it; `around`: that part of the text, lowered."""
    lowered, pattern = _named(names)
    if not any(name in around for name in lowered):
        return False
    start, end = number.span()
    sides = (max(0, start - BEFORE_CHARACTERS), start), (end, end + BEHIND_CHARACTERS)
    found = [(pattern.search(number.string, begin, stop + 1), stop) for begin, stop in sides]
    return any(name is not None and name.end() <= stop for name, stop in found)


@cache
def _named(names: tuple[str, ...]) -> tuple[list[str], re.Pattern[str]]:
    """Names in small letters, and a pattern that finds them as words of their own.

    One in capitals counts in small letters only if it is a key: "sin": 046454286.
    """
    patterns = []
    for name in names:
        pattern = f"(?i:{re.escape(name)})"
        if name.upper() == name:
            pattern = rf"(?:{re.escape(name)}|{pattern}(?=[\"'\]\\]{{0,4}}[ \t]?[:=]))"
        before, behind = (sign.isalnum() and sign < _NO_SPACES_FROM for sign in (name[0], name[-1]))
        patterns.append((r"(?<![^\W_])" if before else "") + pattern + (r"(?![^\W_])" if behind else ""))
    return [name.lower() for name in names], re.compile("|".join(patterns))


def _passes(checks: Sequence[str], number: str) -> bool:
    """Whether one of the checks finds the number right, as it stands or without the signs between its groups."""
    forms = {re.sub("[ \u00a0]", "", number).upper(), re.sub("[ \u00a0./-]", "", number).upper()}
    return any(_is_right(check, form) for check in checks for form in forms)


def _is_right(check: str, number: str) -> bool:
    try:
        return bool(import_module(f"stdnum.{check}").is_valid(number))
    except Exception:  # `stdnum.cn.ric` has a KeyError for counties that are no more; its check digit was right
        return True


# Listed words

_UNSEEN = "\u00ad\u200b-\u200f\u2060\ufeff"
_RUN_ON = (  # Thai, Lao, Tibetan, Burmese, Khmer, kana, Han, Hangul
    "\u0e00-\u0e7f\u0e80-\u0eff\u0f00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f"
)
_LAST_MARK = 0x1E94A  # no combining mark is behind it but variation selectors
_BETWEEN = late_pattern(r"[\s_'’.,>#*/|‐‑–-]{0,40}")
"""Between the words of a phrase: white space, a line's end in a comment or a quotation, hyphens."""
_LATIN = "[A-Za-z0-9\uff10-\uff5a]"
_GAP = r"[ \u00a0\u3000・·]?"
_FOLDED_MAX = 400
"""A longer run of letters is no word of the list, whose entries have at most 100 characters."""
_SIGNS = late_pattern(f"[{_UNSEEN}\u0591-\u05bd\u05bf-\u05c7\u0640\u064b-\u0652\u0670]")
"""Characters that are not seen, and the vowel signs of Hebrew and Arabic, which are seldom written."""


def listed_words(words: Iterable[str]) -> Find:
    """The finder of these words and phrases; an entry without a letter or digit finds nothing."""
    from memd.store.lexical.analyzer import fold

    codes = (code for code in range(0x300, _LAST_MARK + 1) if unicodedata.category(chr(code))[0] == "M")
    ranges = [[code for _, code in run] for _, run in groupby(enumerate(codes), lambda at: at[1] - at[0])]
    marks = "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in ranges) + _UNSEEN
    a_word = re.compile(rf"[^\W_{_RUN_ON}](?:[^\W_{_RUN_ON}]|[{marks}])*+")
    a_run = re.compile(rf"(?:(?<!{_LATIN}){_LATIN}++{_GAP})?+[{_RUN_ON}](?:{_GAP}[{_RUN_ON}{marks}A-Za-z0-9])*+")
    a_cluster = re.compile(rf"[^\s・·](?:[{marks}\u3099\u309a\uff9e\uff9f]*+)")

    def folded(word: str) -> str:
        if word.isascii():
            return word.lower()
        return fold(_SIGNS.sub("", unicodedata.normalize("NFKC", word)).casefold())

    phrases: set[tuple[str, ...]] = set()
    lengths: dict[str, list[int]] = {}  # of the phrases that begin with a word, in words, the longest first
    runs: set[str] = set()
    sizes: dict[str, list[int]] = {}  # of the runs that begin with one or two characters
    for word in words:
        if re.search(f"[{_RUN_ON}]", word):
            runs.add("".join(map(folded, a_cluster.findall(word))))
        else:
            phrases.add(tuple(map(folded, a_word.findall(word))))
    for phrase in sorted(filter(None, phrases), key=len, reverse=True):
        if len(phrase) not in lengths.setdefault(phrase[0], []):
            lengths[phrase[0]].append(len(phrase))
    for run in sorted(runs, key=len, reverse=True):
        if len(run) not in sizes.setdefault(run[:2], []):
            sizes[run[:2]].append(len(run))

    def of_words(text: str) -> Iterator[Span]:
        places = [*a_word.finditer(text)] if lengths else []
        read = [folded(place[0][:_FOLDED_MAX]) for place in places]
        done = 0
        for at, first in enumerate(read):
            for length in lengths.get(first, ()) if at >= done else ():
                parts = places[at : at + length] if tuple(read[at : at + length]) in phrases else []
                if parts and all(_BETWEEN.fullmatch(text, one.end(), other.start()) for one, other in pairwise(parts)):
                    done = at + length
                    yield parts[0].start(), parts[-1].end()
                    break

    def of_runs(text: str) -> Iterator[Span]:
        for run in a_run.finditer(text):
            clusters = [(sign, one) for one in a_cluster.finditer(text, *run.span()) for sign in folded(one[0])]
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
