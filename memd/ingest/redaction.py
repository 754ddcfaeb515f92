"""Redaction: replaces every secret, and what of persons the settings ask for, by `[redacted:NAME]`.

Rule: pure, and time grows with the length of the text, whatever is in it. Nothing reaches the journal but through
`Redactor.kept`, and nothing the log but through `Redactor.draft`: who makes drafts redacts them before they are
embedded, and the store looks once more at every append (`last_look`). Whoever cuts text redacts it before, as a secret
may lie across a cut, and after, as a pattern may fit only a part. Text without secrets comes back unchanged, the very
same object. What identifies a message (its digests) never changes, so a history that is sent again is recognised.

Each kind of secret has a function that finds its spans in a text, which may be prose, code, a URL and, with escaped
newlines and quotes, JSON inside of JSON. The patterns are in `assets/redaction.toml`; here they are read, beside what
no pattern tells alone: private keys that are cut off, values that are assigned, and persons.

Of persons nothing is imported for what is not asked for. A phone number counts only where its country's numbering plan
has it, a national id where its check digits and its date are right; a layout that other numbers have as well, only
beside a name or in the countries that the settings name. Names are not guessed: who is to be left out is on the list.
Of that whole words are compared, folded: case, accents and other differences of writing that people leave out do not
count.
Where a script writes no spaces between words, or hangs endings on them (Chinese, Japanese, Korean, Thai and others), a
word is found wherever its characters stand. A word of the text takes one look-up, however many are on the list.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import groupby, pairwise
from typing import Any, TypeVar, cast, get_args

import msgspec
from msgspec import UNSET

from memd.assets import words_of
from memd.entries import Draft, Vector
from memd.errors import ConfigError, StoreError
from memd.messages import LEADING_ROLES, rebuilt
from memd.settings.model import LISTED_WORD, IngestSettings, RedactionName
from memd.wording import pip_install

Span = tuple[int, int]
Find = Callable[[str], Iterator[Span]]
"""The spans of a text that are secrets: in order, none empty, none overlapping."""

TABLES = words_of("redaction")
SECRET_GROUP = "secret"  # noqa: S105  # a name


def matches(pattern: re.Pattern[str]) -> Find:
    """Finds the matches of a user's pattern, or of its group `secret`; an empty match does not count."""
    group: str | int = SECRET_GROUP if SECRET_GROUP in pattern.groupindex else 0

    def find(text: str) -> Iterator[Span]:
        spans = (found.span(group) for found in pattern.finditer(text))
        return ((start, end) for start, end in spans if start < end)  # (-1, -1): a group that had no part in it

    return find


def apart(spans: Iterable[Span]) -> Iterator[Span]:
    """Any spans in order, those that overlap joined."""
    begin, end = -1, -1
    for start, stop in sorted(spans):
        if start < end:
            end = max(end, stop)
            continue
        if end > begin:
            yield begin, end
        begin, end = start, stop
    if end > begin:
        yield begin, end


def in_unescaped(find: Find) -> Find:
    r"""A finder that looks at a text as its reader sees it: `\n` in a string of JSON is a line's end, `\u00fc` is ü.

    Finders that look at whole words need that; their spans are given in the places of the text as it is.
    """

    def found(text: str) -> Iterator[Span]:
        parts, position = [], 0
        places: list[int] = []  # of the escapes, in the text that is read,
        left_out = [0]  # and by how much what is behind each of them is further on in the text as it is
        for escape in named("ESCAPE").finditer(text) if "\\" in text else ():
            parts += [text[position : escape.start()], _character(escape)]
            position = escape.end()
            places.append(escape.start() - left_out[-1])
            left_out.append(position - places[-1] - 1)
        for start, end in find("".join([*parts, text[position:]]) if parts else text):
            yield start + left_out[bisect_left(places, start)], end + left_out[bisect_left(places, end)]

    return found


def _character(escape: re.Match[str]) -> str:
    if escape["high"]:
        return chr(0x10000 + ((int(escape["high"], 16) - 0xD800) << 10) + int(escape["low"], 16) - 0xDC00)
    return chr(int(escape["code"], 16)) if escape["code"] else " "


# The rules

_NAME, _NAME_OF = re.compile(r"\{([A-Z_]+)\}"), re.compile(r"([A-Z_]+) = ")
_compiled = cache(re.compile)
AROUND_BEFORE, AROUND_AFTER = 400, 1_000
"""The pattern of a `~` rule is looked for so far around each of its words."""

_Check = Callable[[re.Match[str], Sequence[str]], Iterable[Span]]
"""The secrets in a match of a rule with these words."""


class _Rule(msgspec.Struct, frozen=True):
    mode: str
    """^, =, ~ or ?: see the table."""
    words: tuple[str, ...]
    check: _Check
    pattern: str

    def behind(self, word: str) -> re.Pattern[str]:
        """The pattern together with a word, of which it is the rest."""
        begin = NAMED["BEGINS"] + re.escape(word) if self.mode == "^" else f"(?i:{re.escape(word)})"
        return _compiled(begin + self.pattern)


def _lowered(text: str) -> str:
    """The text in lower case, every character at its place."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(character if len(character.lower()) > 1 else character.lower() for character in text)


def _finder(mark: str) -> Find:
    """The finder of one of the built-in patterns."""
    rules, shapes = _RULES.get(mark, ()), _SHAPES.get(mark, ())

    def find(text: str) -> Iterator[Span]:
        spans = [span for shape in shapes for span in shape(text)]
        if rules:
            lowered = _lowered(text)
            long_words = "\n".join(named("LONG_WORD").findall(text)) if any(rule.mode == "^" for rule in rules) else ""
            for rule in rules:
                for found in _matches(rule, text, lowered, long_words):
                    spans += rule.check(found, rule.words)
        yield from apart(spans)

    return find


def _matches(rule: _Rule, text: str, lowered: str, long_words: str) -> Iterator[re.Match[str]]:
    searched, gate = (text, long_words) if rule.mode == "^" else (lowered, lowered)
    if rule.mode == "~":
        for begin, end in apart(_around(lowered, rule.words)):
            pattern = _compiled(rule.pattern)
            for found in pattern.finditer(text, begin, end):
                yield (found if found.end() < end else pattern.match(text, found.start())) or found
    elif rule.mode == "?":
        if not rule.words or any(word in lowered for word in rule.words):
            yield from _compiled(rule.pattern).finditer(text)
    elif rule.words:
        for word in rule.words:
            if word in gate:
                yield from _at(word, rule.behind(word), text, searched)
    elif _compiled(rule.pattern).search(long_words):
        yield from _compiled(rule.pattern).finditer(text)


def _at(word: str, pattern: re.Pattern[str], text: str, searched: str) -> Iterator[re.Match[str]]:
    """The matches that begin with a word, which is looked for in `searched`."""
    at = searched.find(word)
    while at >= 0:
        found = pattern.match(text, at)
        if found is not None:
            yield found
        at = searched.find(word, at + 1 if found is None else found.end())


def _around(lowered: str, words: Iterable[str]) -> Iterator[Span]:
    """The stretches of a text around these words: looking for a word takes a fiftieth of looking for a pattern."""
    for word in words:
        at = lowered.find(word)
        while at >= 0:
            begin, end = max(0, at - AROUND_BEFORE), at + AROUND_AFTER
            while (at := lowered.rfind(word, at + 1, end)) >= 0:
                end = at + AROUND_AFTER
            yield begin, min(end, len(lowered))
            at = lowered.find(word, end)


def _read(written: str) -> tuple[dict[str, str], dict[str, list[_Rule]]]:
    """The named parts, and the rules by their marks."""
    named: dict[str, str] = {}
    rules: dict[str, list[_Rule]] = {}
    forms: list[str] = []
    for raw in filter(None, written.splitlines()):
        line = _NAME.sub(lambda name: named[name[1]], raw)
        if name := _NAME_OF.match(line):
            named[name[1]] = line[name.end() :]
            continue
        mark, where, check, _, pattern = line.split(" | ", 4)
        mode, words = where[0], tuple(where[1:].split(",")) if where[1:] else ()
        if mode != "^":
            words = tuple(re.sub("_$", " ", word).lower() for word in words)
        elif not words:
            forms.append(pattern)
            continue
        rules.setdefault(mark, []).append(_Rule(mode, words, _CHECKS[check], pattern))
    # All shapes of keys in one search.
    form = f"{named['BEGINS']}(?:{'|'.join(forms)}){named['ENDS']}"
    rules["api_key"].append(_Rule("^", (), _CHECKS["-"], form))
    return named, rules


# Checks of rules

CARD_DIGITS_MIN, CARD_DIGITS_MAX = 13, 19
_COMMAND_CHARACTERS_MAX = 1_000  # from a command to its flag
_JWK_CHARACTERS_MAX = 4_096  # of one key, about
_ACCOUNT_CHARACTERS_MAX = 42  # an IBAN's 34 in groups of four
_CARD_NETWORK = re.compile("[3-6]|22[2-9]|2[3-6]|27[01]|2720")
_DOUBLED = {str(digit): sum(map(int, str(2 * digit))) for digit in range(10)}
_IBAN_LENGTHS = {one[:2]: int(one[2:]) for one in TABLES["iban_lengths"].split()}


def _whole(found: re.Match[str], _: Sequence[str]) -> Iterable[Span]:
    return [found.span(found.lastindex or 0)]


def _no_sample(found: re.Match[str], _: Sequence[str]) -> Iterable[Span]:
    """Not as documentation has it: Bearer YOUR_TOKEN."""
    is_sample = re.fullmatch(r"\.++|[A-Z_]{0,40}(?:TOKEN|KEY)", found[found.lastindex or 0])
    return [] if is_sample else [found.span(found.lastindex or 0)]


def _in_jwk(found: re.Match[str], _: Sequence[str]) -> Iterable[Span]:
    around = max(0, found.start() - _JWK_CHARACTERS_MAX), found.end() + _JWK_CHARACTERS_MAX
    return [found.span(1)] if found.string.find("kty", *around) >= 0 else []


def _of_command(found: re.Match[str], commands: Sequence[str]) -> Iterable[Span]:
    """The secret of a flag that stands behind one of these commands, on its line or a continued one."""
    before = found.string[max(0, found.start() - _COMMAND_CHARACTERS_MAX) : found.start()]
    at = len(before)
    while (end := before.rfind("\n", 0, at)) >= 0 and before[:end].rstrip("\r").endswith("\\"):
        at = end
    return [found.span(1)] if any(command in before[end + 1 :] for command in commands) else []


def _cards(found: re.Match[str], _: Sequence[str]) -> Iterator[Span]:
    """Every stretch of groups that begins like a card's number and ends with its check digit, longer ones first."""
    groups = [group.span() for group in re.compile("[0-9]+").finditer(found.string, *found.span(1))]
    first = 0 if len(found[1]) >= CARD_DIGITS_MIN else len(groups)
    while first < len(groups):
        last = _card_from(found.string, groups, first)
        if last is not None:
            yield groups[first][0], groups[last][1]
        first = (first if last is None else last) + 1


def _card_from(text: str, groups: list[Span], first: int) -> int | None:
    """The last group of the card number that begins with group `first`. Its check digit: ISO/IEC 7812-1, annex B."""
    digits, found = "", None
    for last in range(first, len(groups) if _CARD_NETWORK.match(text, *groups[first]) else 0):
        digits += text[slice(*groups[last])]
        if len(digits) > CARD_DIGITS_MAX:
            break
        total = sum(map(int, digits[-1::-2])) + sum(_DOUBLED[digit] for digit in digits[-2::-2])
        if len(digits) >= CARD_DIGITS_MIN and total % 10 == 0:
            found = last
    return found


def _account(found: re.Match[str], _: Sequence[str]) -> Iterable[Span]:
    """An account's number counts if its length and its check digits (ISO 7064, MOD 97-10) are right."""
    length, begin = _IBAN_LENGTHS.get(found[0][:2]), found.start()
    written = re.match(r"(?:[ \u00a0-]?[A-Z0-9])*+", found.string[begin : begin + _ACCOUNT_CHARACTERS_MAX])
    places = [place for place, sign in enumerate(written[0] if written else "") if sign not in " \u00a0-"]
    if length is None or len(places) < length:
        return []
    end = begin + places[length - 1] + 1
    number = "".join(found.string[begin + place] for place in places[:length])
    is_right = int("".join(str(int(sign, 36)) for sign in number[4:] + number[:4])) % 97 == 1
    return [(begin, end)] if is_right and not re.match("[A-Za-z0-9]", found.string[end : end + 1]) else []


_CHECKS: Mapping[str, _Check] = {
    "-": _whole,
    "sample": _no_sample,
    "jwk": _in_jwk,
    "command": _of_command,
    "luhn": _cards,
    "iban": _account,
}
NAMED, _RULES = _read(TABLES["rules"])
"""The parts of patterns that have a name there."""


@cache
def named(part: str) -> re.Pattern[str]:
    """Such a part as a pattern; compiled at its first use, as few texts need it."""
    return re.compile(NAMED[part])


# Private keys

_KEY_CHARACTERS_MAX = 65_536  # of a key whose beginning is missing
_KEY_LINE_MIN = 16
_KEY_WIDTHS = range(48, 81)  # PEM has 64, OpenSSH 70


def private_keys(text: str) -> Iterator[Span]:
    """PEM, OpenSSH, PGP and PuTTY private keys: whole, without their end, without their beginning, without both.

    Without both it is one only where nothing else is in the text: a chunk out of the middle of a key.
    """
    done = 0
    if "----" in text or "Private-Lines" in text:
        for begin in named("KEY_BEGIN").finditer(text):
            if begin.start() < done:
                continue
            yield from _headless_keys(text, done, begin.start())
            whole = named("KEY_UP_TO_END").match(text, begin.end()) if "BEGIN" in begin[0] else None
            rest = whole or named("KEY_MATERIAL").match(text, begin.end())
            done = begin.end() if rest is None else rest.end()
            yield begin.start(), done
        yield from _headless_keys(text, done, len(text))
    if not done and named("KEY_MIDDLE").match(text):  # lines of base64: of one width, but for the first and the last
        widths = [*map(len, re.split(r"\r?\n|\\{1,8}n", text.rstrip()))]
        if len(set(widths[1:-1])) == 1 and widths[1] in _KEY_WIDTHS and widths[0] <= widths[1] >= widths[-1]:
            yield 0, len(text)


def _headless_keys(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the spans of keys whose beginning is missing, found by their ends."""
    for found in named("KEY_END").finditer(text, start, end):
        begin, is_last = found.start(), True
        tokens = list(named("KEY_TOKENS").finditer(text, max(start, begin - _KEY_CHARACTERS_MAX), begin))
        for token in reversed(tokens):
            line = token["line"] or ""
            # A short line is a word, unless a line of a key follows upwards.
            if len(line) >= _KEY_LINE_MIN or (is_last and re.search("[0-9+/=]", line)):
                begin = token.start()
            elif not token["between"] and not (is_last and line):
                break
            is_last = is_last and not line
        if found["whole"] or begin < found.start():
            yield begin, found.end()
            start = found.end()


# Values that are assigned: written out it is a secret; a variable, a call, a type or a placeholder is none

REFUSED_CHARACTERS_MAX = 200
"""A longer value is a secret whatever it looks like, so that looking again inside one that is refused stays linear."""
VALUE_CHARACTERS_MIN = 4
"""The shortest value without quotes; a quoted one may have a single character."""
TOKEN_CHARACTERS_MIN = 8
"""The shortest value of a `token` (shorter ones are tokens of a language model), and the shortest number, but for
passwords."""
_PATH_CHARACTERS_MAX = 24  # of something like settings.oauth2.password; a token with dots is longer ...
_PATH_DIGITS_MAX = 3  # ... or has more digits; a longer path has none
_FLAG_CHARACTERS_MAX = 48


def assigned_secrets(text: str) -> Iterator[Span]:
    """The values of passwords, secrets and tokens, without quotes: `password = …`, `API_KEY=…`, `"token": "…"`."""
    position = 0
    for begin in named("ASSIGNED_BEGINS").finditer(_lowered(text)):
        found = named("ASSIGNED").match(text, begin.start()) if begin.start() >= position else None
        if found is None:
            continue
        start, end, quoted = _value(text, found.end())
        position = found.end()
        if end - start > REFUSED_CHARACTERS_MAX or _is_secret(found, text, start, end, quoted=quoted):
            yield start, end
            position = end


def _value(text: str, position: int) -> tuple[int, int, bool]:
    """The start and end, without quotes, of the value at `position`, and whether it is quoted.

    A string that is not closed ends with its line.
    """
    opened = named("VALUE_QUOTE").match(text, position)
    if opened is None:
        bare = named("VALUE_UNQUOTED").match(text, position)
        return position, bare.end() if bare else position, False
    quote, depth, start = opened["quote"], len(opened["escapes"]), opened.end()
    if text.startswith(quote * 2, start):
        end = text.find(quote * 3, start + 2, start + 4096)
        if end >= 0:
            return start + 2, end, True
    for closing in named("VALUE_CLOSING").finditer(text, start):
        escapes = len(closing["escapes"])
        if closing["quote"] is None:
            return start, closing.start(), True
        # In JSON within JSON each level doubles the backslashes and adds one: a string that opens with `depth` of them
        # is closed by as many, or with pairs of escaped ones before it. Fewer close what the string is in.
        if closing["quote"] == quote and (escapes < depth or escapes % (2 * (depth + 1)) == depth):
            return start, closing.start() + max(0, escapes - depth), True
    return start, len(text), True


def _is_secret(found: re.Match[str], text: str, start: int, end: int, *, quoted: bool) -> bool:
    """Whether a value is written out. Where that cannot be told it is taken for a secret."""
    value, behind = text[start:end], text[end : end + 8]
    separator, key, is_password = found["separator"].lstrip("\"'`\\]"), found["key"].lower(), bool(found["password"])
    before = text[max(0, found.start() - _FLAG_CHARACTERS_MAX) : found.start()]
    digits = sum(map(str.isdigit, value))
    if not value or named("PLACEHOLDER").fullmatch(value):
        return False
    if text.startswith("`", found.end()) and re.search(r"`[\w.-]*+\Z", before):  # `password=`, as documentation has it
        return False
    if (separator.isspace() and not named("FLAG").search(before)) or (separator == ">" and not behind.startswith("</")):
        return False
    if len(value) < TOKEN_CHARACTERS_MIN and (key == "token" or (value.isdecimal() and not is_password)):
        return False
    if quoted:  # not if a program says it to people: "invalidToken": "This token is unknown"
        is_of_it = bool(named("COMPLAINT").search(before)) and key.replace("_", " ") in value.lower()
        return digits > 0 or " " not in value or not is_of_it
    if len(value) < VALUE_CHARACTERS_MIN or (key == "pwd" and value[0] in "/~"):
        return False
    if separator == "=" and found["key"].isupper():
        return True  # a line of an environment: no language in which the value could be an expression
    bare = value.rstrip(".,;:)]}")
    if named("PROGRAM_CALL").match(value) or named("PROGRAM_WORD").fullmatch(bare) or behind.startswith("("):
        return False
    if named("PROGRAM_PATH").fullmatch(bare) and digits <= (
        _PATH_DIGITS_MAX if len(bare) < _PATH_CHARACTERS_MAX else 0
    ):
        return False
    if digits:
        return is_password or not re.fullmatch(r"[0-9]++\.[0-9]++", value)
    if not is_password or ("_" in value and re.fullmatch(r"[A-Za-z_$]++", value)):
        return False
    # "Password: please choose one" is a sentence; what is alone up to the end of its line is a value.
    following = behind.lstrip(" \t")
    return not separator.startswith(":") or not following[:1].isalpha() or following == behind


_SHAPES: Mapping[str, Sequence[Find]] = {"private_key": [private_keys], "password": [assigned_secrets]}
BUILT_IN: Mapping[str, Find] = {mark: _finder(mark) for mark in get_args(RedactionName)}
"""By name, in the order in which they are applied: a secret is named after the first that finds it."""


# Persons


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
            if unknown := sorted({*countries} - known):  # their numbers would stay, and nobody be told
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


def mail_addresses(text: str) -> Iterator[Span]:
    """The addresses, international ones too, without `mailto:` and angle brackets.

    A login, where no letter can go, is left alone: `git@…`, the user of a URL, `user@host:path` of scp, `ssh user@…`.
    """
    last = 0
    for at in named("MAIL_AT").finditer(text):
        if at.start() < last:
            continue
        # Backwards a run of one script: of 请写信给anna@… it is anna, and all of 用户@…
        local = named("MAIL_LOCAL").match(text[max(0, at.start() - _LOCAL_MAX) : at.start()][::-1])
        # Of a quotation, a link or an assignment these only stand in front of it: 'anna@…', x=anna@…, a/b/anna@…
        name = named("MAIL_IN_FRONT").split(local[0][::-1])[-1].lstrip(_AROUND_LOCAL) if local else ""
        domain = named("MAIL_DOMAIN").match(text, at.end())
        if not name or domain is None or named("NO_TOP").fullmatch(domain["top"] or ""):
            continue
        start = at.start() - len(name)
        if name.lower() not in _SERVICES and not _is_login(text, start, domain.end()):
            last = domain.end()
            yield start, last


def _is_login(text: str, start: int, end: int) -> bool:
    before = text[max(0, start - _LINE_LOOKED_AT) : start]
    _, scheme, user = before.rpartition("://")
    is_user = bool(scheme) and not re.search(r"[\s/?#]", user)
    return is_user or bool(
        named("SCP_BEHIND").match(text, end) or named("SSH_BEFORE").search(before[before.rfind("\n") + 1 :])
    )


# Phone numbers, by Google's libphonenumber (its port `phonenumbers`)

_WORD_CHARACTERS = 40
_AREA_DIGITS_MIN = 3  # 030, 0171; people group what follows as they like
_DIGITS_MIN = 7
_TRIES_MAX = 6  # parts of one place that the library looks at
_GROUPS_MAX = 12  # of three numbers in a row; more are a table
_SINGLE_DIGITS_MAX = 3  # 0 and 1 in front of an area
_BEFORE, _BEHIND = 4, 12  # what stands around a number tells that it is none, or is its extension
_DIGITS = re.compile(r"\d+")


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
        spans = [found.span() for found in named("PHONE_ABROAD").finditer(text) if is_valid(f"+{found[1]}")]
        spans += (span for at in named("PHONE_WITH_CODE").finditer(text) for span in numbers(None, text, at))
        if countries:
            spans += (span for at in _at_home(text) for country in countries for span in numbers(country, text, at))
        yield from apart(spans)

    return find


def _at_home(text: str) -> Iterator[re.Match[str]]:
    """Digits in groups, and rows of digits behind a word for a phone: the library is slow where most are none."""
    for found in named("PHONE_GROUPS").finditer(text):
        groups = _DIGITS.findall(found[0])
        is_list = len(groups) > _GROUPS_MAX or sum(len(group) == 1 for group in groups) > _SINGLE_DIGITS_MAX
        if not is_list and sum(map(len, groups)) >= _DIGITS_MIN:
            yield found
    yield from (found for found in named("PHONE_ROW").finditer(text) if _is_behind_word(text, found.start()))


def _is_behind_word(text: str, start: int) -> bool:
    return bool(named("PHONE_BEFORE").search(text[max(0, start - _WORD_CHARACTERS) : start]))


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
        for begin in named("ID_BEGINS").finditer(text):
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
    lowered, pattern = _words_of(names)
    if not any(name in around for name in lowered):
        return False
    start, end = number.span()
    sides = (max(0, start - BEFORE_CHARACTERS), start), (end, end + BEHIND_CHARACTERS)
    found = [(pattern.search(number.string, begin, stop + 1), stop) for begin, stop in sides]
    return any(name is not None and name.end() <= stop for name, stop in found)


@cache
def _words_of(names: tuple[str, ...]) -> tuple[list[str], re.Pattern[str]]:
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
    try:
        return any(import_module(f"stdnum.{check}").is_valid(form) for check in checks for form in forms)
    except Exception:  # `stdnum.cn.ric` has a KeyError for counties that are no more; its check digit was right
        return True


# Listed words

_UNSEEN = "\u00ad\u200b-\u200f\u2060\ufeff"
_RUN_ON = (  # Thai, Lao, Tibetan, Burmese, Khmer, kana, Han, Hangul
    "\u0e00-\u0e7f\u0e80-\u0eff\u0f00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f"
)
_LAST_MARK = 0x1E94A  # no combining mark is behind it but variation selectors
_BETWEEN = re.compile(r"[\s_'’.,>#*/|‐‑–-]{0,40}")
"""Between the words of a phrase: white space, a line's end in a comment or a quotation, hyphens."""
_LATIN = "[A-Za-z0-9\uff10-\uff5a]"
_GAP = r"[ \u00a0\u3000・·]?"
_FOLDED_MAX = 400
"""A longer run of letters is no word of the list, whose entries have at most 100 characters."""
_SIGNS = re.compile(f"[{_UNSEEN}\u0591-\u05bd\u05bf-\u05c7\u0640\u064b-\u0652\u0670]")
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

    words = [*words]
    runs = {word for word in words if re.search(f"[{_RUN_ON}]", word)}
    phrases = {tuple(map(folded, a_word.findall(word))) for word in words if word not in runs} - {()}
    find_phrases = _longest(phrases, lambda one, other: bool(_BETWEEN.fullmatch(one.string, one.end(), other.start())))
    find_runs = _longest({tuple("".join(map(folded, a_cluster.findall(word)))) for word in runs} - {()})

    def of_words(text: str) -> Iterator[Span]:
        places = [*a_word.finditer(text)] if phrases else []
        yield from find_phrases([folded(place[0][:_FOLDED_MAX]) for place in places], places)

    def of_runs(text: str) -> Iterator[Span]:
        for run in a_run.finditer(text):
            signs = [(sign, one) for one in a_cluster.finditer(text, *run.span()) for sign in folded(one[0])]
            yield from find_runs([sign for sign, _ in signs], [one for _, one in signs])

    def find(text: str) -> Iterator[Span]:
        # As it stands too: \t in a path of Windows is no tab, but the beginning of \tomasz.
        spans = [*of_words(text), *(in_unescaped(of_words)(text) if "\\" in text else ())]
        yield from apart([*spans, *(in_unescaped(of_runs)(text) if runs else ())])

    return find


def _longest(
    known: Collection[tuple[str, ...]],
    are_joined: Callable[[re.Match[str], re.Match[str]], bool] = lambda one, other: True,
) -> Callable[[Sequence[str], Sequence[re.Match[str]]], Iterator[Span]]:
    """Finds where the longest of these stand in a row of units, which have these places. `are_joined`: whether two
    units in a row belong together."""
    lengths: dict[str, dict[int, None]] = {}  # of those that begin with a unit, the longest first
    for one in sorted(known, key=len, reverse=True):
        lengths.setdefault(one[0], {})[len(one)] = None

    def find(units: Sequence[str], places: Sequence[re.Match[str]]) -> Iterator[Span]:
        done = 0
        for at, first in enumerate(units):
            for length in lengths.get(first, ()) if at >= done else ():
                some = places[at : at + length]
                if tuple(units[at : at + length]) in known and all(are_joined(*two) for two in pairwise(some)):
                    done = at + length
                    yield some[0].start(), some[-1].end()
                    break

    return find


# The redactor

MARK_OPENING = "[redacted:"
PSEUDONYM_OPENING = "redacted-"
_PSEUDONYM = re.compile(PSEUDONYM_OPENING + r"[0-9a-f]{16}")
_USUAL_ROLES = LEADING_ROLES | {"user", "assistant", "tool", "function"}
_PASSES_MAX = 4
"""After so many passes, a text in which a user's pattern still finds something is replaced as a whole."""

_Kept = TypeVar("_Kept", bound=msgspec.Struct)
_AS_NAME = {"author", "action", "action_by", "id", "kind", "name", "session", "tool_call_id"}
_AS_IT_IS = {"conversation", "parent", "public_id", "shown_id", "topic_id"}
"""Fields of messages, notes, events and drafts: a name has a pseudonym in place of a secret, equal ones stay equal;
memd's own ids have none. Every other field is text, one that is added later too."""


class Redactor:
    """Replaces the matches of its patterns, which are compiled once; without patterns nothing. Thread-safe."""

    def __init__(self, patterns: Mapping[str, Find]) -> None:
        self.names = tuple(patterns)
        self._patterns = patterns
        self._mark = re.compile(r"\[redacted:(" + "|".join(map(re.escape, patterns)) + r")\]")
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, settings: IngestSettings) -> Redactor:
        """The redactor that the settings ask for: secrets, then persons, then the user's own patterns. Raises
        ConfigError: a package that the settings need is not installed."""
        if not settings.redact:
            return cls({})
        secrets = {name: find for name, find in BUILT_IN.items() if name in settings.redact_builtin}
        own = {name: matches(re.compile(pattern)) for name, pattern in settings.redact_patterns.items()}
        return cls(secrets | personal(settings) | own)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def text(self, text: str) -> str:
        """`text` with its secrets replaced. Done twice, it changes nothing more."""
        return self._replaced(text, ())[0]

    def arguments(self, arguments: str) -> str:
        """A tool call's arguments; JSON stays JSON, as chat templates read it."""
        redacted = self.text(arguments)
        if redacted == arguments or not _is_json(arguments) or _is_json(redacted):
            return redacted
        return json.dumps({"redacted": redacted}, ensure_ascii=False)

    def identifier(self, name: str) -> str:
        """A redacted identifier (of a session, a call); different ones stay different."""
        return name if self.text(name) == name else self.pseudonym(name)

    def pseudonym(self, name: str) -> str:
        """A hash in place of a name, the same for equal ones."""
        if _PSEUDONYM.fullmatch(name):
            return name
        return PSEUDONYM_OPENING + hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def kept(self, value: _Kept) -> _Kept:
        """A message as it may be kept, a note, or a change of the hot buffer as it may be journalled."""
        return cast("_Kept", rebuilt(value, self._field)) if self._patterns else value

    def _field(self, value: Any, field: str) -> Any:
        """A text as a field of this name has it."""
        if field in _AS_IT_IS:
            return value
        if not isinstance(value, str):
            return None
        if field in ("role", "roles"):
            return value if value in _USUAL_ROLES else self.identifier(value)
        treat = {"arguments": self.arguments}.get(field, self.identifier if field in _AS_NAME else self.text)
        return treat(value)

    def draft(self, draft: Draft) -> Draft:
        """An entry as it may be stored, but with the vector of the content that it had."""
        if not self._patterns:
            return draft
        speakers = () if draft.speakers is UNSET else draft.speakers
        content, offsets = self._replaced(draft.content, [speaker.offset for speaker in speakers])
        moved = {  # of messages that begin within one secret the last one remains: its text follows
            offset: msgspec.structs.replace(speaker, offset=offset)
            for offset, speaker in zip(offsets, speakers, strict=True)
            if offset < len(content) or content == draft.content
        }
        fields = {"content": "", "speakers": UNSET if draft.speakers is UNSET else tuple(moved.values())}
        kept = self.kept(msgspec.structs.replace(draft, **fields))  # the content is not looked at twice
        kept = msgspec.structs.replace(kept, content=content)
        return draft if kept == draft else kept

    def marks(self, texts: Sequence[str]) -> Counter[str]:
        """The number of marks of each name in these texts."""
        if not self._patterns:
            return Counter()
        return Counter(found[1] for text in texts if MARK_OPENING in text for found in self._mark.finditer(text))

    def replaced(self, draft: Draft, kept: Draft) -> Counter[str]:
        """The number of secrets of each name that were replaced on the way from `draft` to `kept`."""
        return self.marks(_texts(kept)) - self.marks(_texts(draft))

    def count(self, replaced: Mapping[str, int]) -> None:
        """Add to `counts` what was stored redacted."""
        with self._lock:
            self._counts.update(replaced)

    @property
    def counts(self) -> dict[str, int]:
        """The number of secrets that were replaced in stored text, by name."""
        with self._lock:
            return {name: self._counts[name] for name in self.names if self._counts[name]}

    def _replaced(self, text: str, offsets: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Return `text` with its secrets replaced, and the new positions of the characters at `offsets`."""
        for _ in range(_PASSES_MAX):
            before = text
            for name, find in self._patterns.items():
                spans = self._secrets(text, find)
                if spans:
                    mark = f"{MARK_OPENING}{name}]"
                    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
                    text = mark.join(text[start:end] for start, end in zip(starts, ends, strict=True))
                    offsets = [_moved(offset, spans, len(mark)) for offset in offsets]
            if text == before:
                return text, offsets
        return mark, [0 for _ in offsets]

    def _secrets(self, text: str, find: Find) -> list[Span]:
        """Return the spans that a pattern finds, without those within an earlier mark."""
        marks = [mark.span() for mark in self._mark.finditer(text)] if MARK_OPENING in text else []
        spans = []
        for start, end in find(text):
            while marks and marks[0][1] <= start:
                marks.pop(0)
            if not (marks and marks[0][0] <= start and end <= marks[0][1]):
                spans.append((start, end))
        return spans


NO_REDACTION = Redactor({})


def redacted_drafts(drafts: Iterable[Draft], redactor: Redactor, embed: Callable[[str], Vector]) -> list[Draft]:
    """The drafts as they may be appended: redacted and counted, with the vectors of what is left of their contents.

    A correction copies a chunk that may have been stored before redaction was on.
    """
    redacted = []
    for draft in drafts:
        kept = redactor.draft(draft)
        redactor.count(redactor.replaced(draft, kept))
        if draft.vector and kept.content != draft.content:
            kept = msgspec.structs.replace(kept, vector=embed(kept.embedded_text).astype("<f4").tobytes())
        redacted.append(kept)
    return redacted


def last_look(redactor: Redactor) -> Callable[[Draft], Draft]:
    """The filter through which the store lets every draft go: it redacts, and never embeds.

    Text without a vector (a correction's reason) is redacted here at the latest. The content of an active draft has its
    vector already, so it must come redacted: the filter raises StoreError where it does not, and nothing is stored.
    """

    def filtered(draft: Draft) -> Draft:
        kept = redactor.draft(draft)
        if draft.vector and kept.content != draft.content:
            raise StoreError(
                f"a draft of chunk {draft.uuid.hex()} has text in it that ingest.redact replaces, and was not stored: "
                "please report this, it should have been redacted before"
            )
        return kept

    return filtered


def _texts(draft: Draft) -> list[str]:
    return [text for text in (draft.content, draft.source, draft.reason) if text is not None]


def _moved(offset: int, spans: Sequence[Span], mark_length: int) -> int:
    """The new offset of a character after marks replaced the spans: behind the mark if it was within a span."""
    shift = 0
    for start, end in spans:
        if offset <= start:
            break
        shift += mark_length - (end - start)
        offset = max(offset, end)
    return offset + shift


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
