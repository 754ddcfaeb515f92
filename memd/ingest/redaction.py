"""Redaction: replaces secrets, and personal data selected in the settings, by `[redacted:NAME]`.

Rule: pure, and linear in the length of any text. Everything in the journal passed `Redactor.kept`, and everything in
the log `Redactor.draft`. Drafts are redacted before they are embedded, and the store checks every append again
(`last_look`). Text is redacted before cutting, because a secret may lie across a cut, and after it, because a pattern
may match only a part. Text without secrets is returned as the same object. The digests of a message never change, so a
history that is sent again is recognised.

Each kind of secret has a function that finds its spans in a text: prose, code, URLs, or JSON nested in JSON, with
escaped newlines and quotes. The patterns are in `assets/redaction.toml`. This module has the cases that no pattern can
decide alone: truncated private keys, assigned values, and personal data.

Packages for personal data are imported only if needed. A phone number must be valid in its country's numbering plan, a
national id must have valid check digits and date. Ambiguous layouts count only next to the id's name, or in countries
named in the settings. Names of persons are not guessed but listed. Listed words match whole words, folded: case,
accents and similar differences are ignored. In scripts without spaces, or with attached endings (Chinese, Japanese,
Korean, Thai and others), a listed word matches anywhere. Each word of a text costs one look-up, however long the list.
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
from memd.caching import ENGINE
from memd.entries import Draft
from memd.errors import ConfigError, StoreError
from memd.messages import LEADING_ROLES, rebuilt
from memd.settings.model import LISTED_WORD, IngestSettings, RedactionName
from memd.wording import pip_install

Span = tuple[int, int]
Find = Callable[[str], Iterator[Span]]
"""Finds the secrets of a text: ordered, non-empty spans that do not overlap."""

TABLES = words_of("redaction")
SECRET_GROUP = "secret"  # noqa: S105  # a name


def matches(pattern: re.Pattern[str]) -> Find:
    """Return a finder of the non-empty matches of a user's pattern, or of its group `secret`."""
    group: str | int = SECRET_GROUP if SECRET_GROUP in pattern.groupindex else 0

    def find(text: str) -> Iterator[Span]:
        spans = (found.span(group) for found in pattern.finditer(text))
        return ((start, end) for start, end in spans if start < end)  # (-1, -1): the group did not match

    return find


def apart(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans in order, with overlapping ones joined."""
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
    r"""Return a finder that searches the unescaped text: `\n` in a JSON string is a line's end, `\u00fc` is ü.

    Finders of whole words need that. The spans refer to the original text.
    """

    def found(text: str) -> Iterator[Span]:
        parts, position = [], 0
        places: list[int] = []  # positions of the escapes in the unescaped text,
        left_out = [0]  # and for the text after each, its shift in the original
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
_compiled = cache(ENGINE.compile)
AROUND_BEFORE, AROUND_AFTER = 400, 1_000
"""Characters around each word of a `~` rule that are searched for its pattern."""

_Check = Callable[[re.Match[str], Sequence[str]], Iterable[Span]]
"""Returns the secrets in a match of a rule with these words."""


class _Rule(msgspec.Struct, frozen=True):
    mode: str
    """^, =, ~ or ?; see the table."""
    words: tuple[str, ...]
    check: _Check
    pattern: str

    def behind(self, word: str) -> re.Pattern[str]:
        """Return a word followed by the pattern."""
        begin = NAMED["BEGINS"] + re.escape(word) if self.mode == "^" else f"(?i:{re.escape(word)})"
        compiled: re.Pattern[str] = _compiled(begin + self.pattern)
        return compiled


def _lowered(text: str) -> str:
    """Return the text in lower case, without changing positions."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(character if len(character.lower()) > 1 else character.lower() for character in text)


def _finder(mark: str) -> Find:
    """Return the finder of a built-in pattern."""
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
    """Yield the matches that begin with a word; the word is searched for in `searched`."""
    at = searched.find(word)
    while at >= 0:
        found = pattern.match(text, at)
        if found is not None:
            yield found
        at = searched.find(word, at + 1 if found is None else found.end())


def _around(lowered: str, words: Iterable[str]) -> Iterator[Span]:
    """Yield the spans around these words: finding a word takes a fiftieth of the time of a pattern."""
    for word in words:
        at = lowered.find(word)
        while at >= 0:
            begin, end = max(0, at - AROUND_BEFORE), at + AROUND_AFTER
            while (at := lowered.rfind(word, at + 1, end)) >= 0:
                end = at + AROUND_AFTER
            yield begin, min(end, len(lowered))
            at = lowered.find(word, end)


def _read(written: str) -> tuple[dict[str, str], dict[str, list[_Rule]]]:
    """Return the named parts, and the rules by mark."""
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
    """Accept values that are no placeholders of documentation (Bearer YOUR_TOKEN)."""
    is_sample = re.fullmatch(r"\.++|[A-Z_]{0,40}(?:TOKEN|KEY)", found[found.lastindex or 0])
    return [] if is_sample else [found.span(found.lastindex or 0)]


def _in_jwk(found: re.Match[str], _: Sequence[str]) -> Iterable[Span]:
    around = max(0, found.start() - _JWK_CHARACTERS_MAX), found.end() + _JWK_CHARACTERS_MAX
    return [found.span(1)] if found.string.find("kty", *around) >= 0 else []


def _of_command(found: re.Match[str], commands: Sequence[str]) -> Iterable[Span]:
    """Return the secret of a flag after one of these commands, on the same line or a continued one."""
    before = found.string[max(0, found.start() - _COMMAND_CHARACTERS_MAX) : found.start()]
    at = len(before)
    while (end := before.rfind("\n", 0, at)) >= 0 and before[:end].rstrip("\r").endswith("\\"):
        at = end
    return [found.span(1)] if any(command in before[end + 1 :] for command in commands) else []


def _cards(found: re.Match[str], _: Sequence[str]) -> Iterator[Span]:
    """Yield runs of groups that begin like a card's number and end with its check digit, longest first."""
    groups = [group.span() for group in re.compile("[0-9]+").finditer(found.string, *found.span(1))]
    first = 0 if len(found[1]) >= CARD_DIGITS_MIN else len(groups)
    while first < len(groups):
        last = _card_from(found.string, groups, first)
        if last is not None:
            yield groups[first][0], groups[last][1]
        first = (first if last is None else last) + 1


def _card_from(text: str, groups: list[Span], first: int) -> int | None:
    """Return the last group of the card number that begins with group `first`. Check digit: ISO/IEC 7812-1, annex B."""
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
    """Accept account numbers with valid length and check digits (ISO 7064, MOD 97-10)."""
    length, begin = _IBAN_LENGTHS.get(found[0][:2]), found.start()
    written = ENGINE.match(r"(?:[ \u00a0-]?[A-Z0-9])*+", found.string[begin : begin + _ACCOUNT_CHARACTERS_MAX])
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
"""The named parts of patterns in the table."""


@cache
def named(part: str) -> re.Pattern[str]:
    """Return a named part as a pattern, compiled at its first use, because few texts need it."""
    compiled: re.Pattern[str] = ENGINE.compile(NAMED[part])
    return compiled


# Private keys

_KEY_CHARACTERS_MAX = 65_536  # of a key whose beginning is missing
_KEY_LINE_MIN = 16
_KEY_WIDTHS = range(48, 81)  # PEM has 64, OpenSSH 70


def private_keys(text: str) -> Iterator[Span]:
    """Find PEM, OpenSSH, PGP and PuTTY private keys: whole, or without their end, their beginning or both.

    Without both, a key must be the whole text: a chunk from the middle of a key.
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
    if not done and named("KEY_MIDDLE").match(text):  # base64 in lines of one width, except the first and the last
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


# Assigned values: literals are secrets; variables, calls, types and placeholders are not

REFUSED_CHARACTERS_MAX = 200
"""Longer values always count as secrets, so that searching again inside refused ones stays linear."""
VALUE_CHARACTERS_MIN = 4
"""The shortest value without quotes; a quoted one may have a single character."""
TOKEN_CHARACTERS_MIN = 8
"""The shortest value of a `token` (shorter ones are tokens of a language model), and the shortest number, except for
passwords."""
_PATH_CHARACTERS_MAX = 24  # of something like settings.oauth2.password; a token with dots is longer ...
_PATH_DIGITS_MAX = 3  # ... or has more digits; a longer path has none
_FLAG_CHARACTERS_MAX = 48


def assigned_secrets(text: str) -> Iterator[Span]:
    """Find the values of passwords, secrets and tokens, without quotes: `password = …`, `API_KEY=…`, `"token": "…"`."""
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
    """Return start and end, without quotes, of the value at `position`, and True if it is quoted.

    An unclosed string ends with its line.
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
        # is closed by as many, or with pairs of escaped ones before it. Fewer close the string around it.
        if closing["quote"] == quote and (escapes < depth or escapes % (2 * (depth + 1)) == depth):
            return start, closing.start() + max(0, escapes - depth), True
    return start, len(text), True


def _is_secret(found: re.Match[str], text: str, start: int, end: int, *, quoted: bool) -> bool:
    """Return True if a value is a literal, or may be one."""
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
    if quoted:  # except a program's message to people: "invalidToken": "This token is unknown"
        is_of_it = bool(named("COMPLAINT").search(before)) and key.replace("_", " ") in value.lower()
        return digits > 0 or " " not in value or not is_of_it
    if len(value) < VALUE_CHARACTERS_MIN or (key == "pwd" and value[0] in "/~"):
        return False
    if separator == "=" and found["key"].isupper():
        return True  # an environment variable: its value cannot be an expression
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
    # "Password: please choose one" is a sentence; a single word up to the end of its line is a value.
    following = behind.lstrip(" \t")
    return not separator.startswith(":") or not following[:1].isalpha() or following == behind


_SHAPES: Mapping[str, Sequence[Find]] = {"private_key": [private_keys], "password": [assigned_secrets]}
BUILT_IN: Mapping[str, Find] = {mark: _finder(mark) for mark in get_args(RedactionName)}
"""Finders by name, in the order of application: a secret is named after the first that finds it."""


# Persons


def personal(settings: IngestSettings) -> dict[str, Find]:
    """Return the finders selected by `redact_persons` and `redact_words`, by the names of their marks. Raises
    ConfigError: a package of the extra is not installed, or a country is unknown."""
    finders: dict[str, Find] = {}
    asked, countries = settings.redact_persons, settings.redact_countries
    if "email" in asked:
        finders["email"] = in_unescaped(mail_addresses)
    try:
        if countries and not {"national_id", "phone"}.isdisjoint(asked):
            known = import_module("phonenumbers").SUPPORTED_REGIONS
            if unknown := sorted({*countries} - known):  # their numbers would silently stay
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
    """Find mail addresses, including international ones, without `mailto:` and angle brackets.

    Logins, which are no mail addresses, stay: `git@…`, the user of a URL, `user@host:path` of scp, `ssh user@…`.
    """
    last = 0
    for at in named("MAIL_AT").finditer(text):
        if at.start() < last:
            continue
        # Backwards, a run of one script: anna in 请写信给anna@…, and all of 用户@…
        local = named("MAIL_LOCAL").match(text[max(0, at.start() - _LOCAL_MAX) : at.start()][::-1])
        # Signs of a quotation, a link or an assignment precede the name: 'anna@…', x=anna@…, a/b/anna@…
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
_AREA_DIGITS_MIN = 3  # 030, 0171; people group the rest as they like
_DIGITS_MIN = 7
_TRIES_MAX = 6  # parts of one place that the library tries
_GROUPS_MAX = 12  # of three numbers in a row; more are a table
_SINGLE_DIGITS_MAX = 3  # 0 and 1 before an area
_BEFORE, _BEHIND = 4, 12  # context of a number, which may disqualify it, or be its extension
_DIGITS = re.compile(r"\d+")


def phone_numbers(countries: Sequence[str]) -> Find:
    """Return a finder of numbers with a country code, and of those of these countries (ISO 3166) without one."""
    import phonenumbers as library

    def is_valid(number: str) -> bool:
        try:
            return library.is_valid_number(library.parse(number))
        except library.NumberParseException:
            return False

    def is_written_as_one(number: library.PhoneNumber, groups: Sequence[str]) -> bool:
        """Return True if it is grouped as usual in its country, or begins with an area code."""
        if groups[0].startswith("0") and len(groups[0]) >= _AREA_DIGITS_MIN:
            return len(groups) > 1
        plan = library.PhoneNumberFormat
        national, abroad = (
            _DIGITS.findall(library.format_number(number, one)) for one in (plan.NATIONAL, plan.INTERNATIONAL)
        )
        return len(groups) > 1 and groups in (national, abroad[1:])

    def numbers(country: str | None, text: str, place: re.Match[str]) -> Iterator[Span]:
        """Yield the numbers that begin in a place of the text."""
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
        # The library reads 0048… only if it is given the caller's country.
        spans = [found.span() for found in named("PHONE_ABROAD").finditer(text) if is_valid(f"+{found[1]}")]
        spans += (span for at in named("PHONE_WITH_CODE").finditer(text) for span in numbers(None, text, at))
        if countries:
            spans += (span for at in _at_home(text) for country in countries for span in numbers(country, text, at))
        yield from apart(spans)

    return find


def _at_home(text: str) -> Iterator[re.Match[str]]:
    """Yield grouped digits, and ungrouped ones after a word for a phone: the library is slow on other numbers."""
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
"""Largest distance of a number's name before and after it."""


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
"""A layout of numbers; the kinds that use it, each with True if it needs a name beside it."""


def national_ids(countries: Sequence[str]) -> Find:
    """Return a finder of national ids; those of these countries (ISO 3166) need no name beside them."""
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
    """Return True if one of these names is close to the number; `around`: that part of the text in lower case."""
    lowered, pattern = _words_of(names)
    if not any(name in around for name in lowered):
        return False
    start, end = number.span()
    sides = (max(0, start - BEFORE_CHARACTERS), start), (end, end + BEHIND_CHARACTERS)
    found = [(pattern.search(number.string, begin, stop + 1), stop) for begin, stop in sides]
    return any(name is not None and name.end() <= stop for name, stop in found)


@cache
def _words_of(names: tuple[str, ...]) -> tuple[list[str], re.Pattern[str]]:
    """Return the names in lower case, and a pattern that finds them as whole words.

    A name in capitals matches in lower case only as a key: "sin": 046454286.
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
    """Return True if a check accepts the number, as written or without the signs between its groups."""
    forms = {re.sub("[ \u00a0]", "", number).upper(), re.sub("[ \u00a0./-]", "", number).upper()}
    try:
        return any(import_module(f"stdnum.{check}").is_valid(form) for check in checks for form in forms)
    except Exception:  # `stdnum.cn.ric` raises KeyError for former counties, after its check digit was right
        return True


# Listed words

_UNSEEN = "\u00ad\u200b-\u200f\u2060\ufeff"
_RUN_ON = (  # Thai, Lao, Tibetan, Burmese, Khmer, kana, Han, Hangul
    "\u0e00-\u0e7f\u0e80-\u0eff\u0f00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f"
)
_LAST_MARK = 0x1E94A  # only variation selectors are beyond it
_BETWEEN = re.compile(r"[\s_'’.,>#*/|‐‑–-]{0,40}")
"""Separators of the words of a phrase: white space, a line's end in a comment or a quotation, hyphens."""
_LATIN = "[A-Za-z0-9\uff10-\uff5a]"
_GAP = r"[ \u00a0\u3000・·]?"
_FOLDED_MAX = 400
"""Characters of a word that are compared; entries of the list have at most 100."""
_SIGNS = re.compile(f"[{_UNSEEN}\u0591-\u05bd\u05bf-\u05c7\u0640\u064b-\u0652\u0670]")
"""Invisible characters, and the vowel signs of Hebrew and Arabic, which are seldom written."""


def listed_words(words: Iterable[str]) -> Find:
    """Return a finder of these words and phrases; an entry without a letter or digit finds nothing."""
    from memd.store.lexical.analyzer import fold

    codes = (code for code in range(0x300, _LAST_MARK + 1) if unicodedata.category(chr(code))[0] == "M")
    ranges = [[code for _, code in run] for _, run in groupby(enumerate(codes), lambda at: at[1] - at[0])]
    marks = "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in ranges) + _UNSEEN
    a_word = ENGINE.compile(rf"[^\W_{_RUN_ON}](?:[^\W_{_RUN_ON}]|[{marks}])*+")
    a_run = ENGINE.compile(rf"(?:(?<!{_LATIN}){_LATIN}++{_GAP})?+[{_RUN_ON}](?:{_GAP}[{_RUN_ON}{marks}A-Za-z0-9])*+")
    a_cluster = ENGINE.compile(rf"[^\s・·](?:[{marks}\u3099\u309a\uff9e\uff9f]*+)")

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
        # Also without unescaping: \t in a path of Windows is no tab, but the beginning of \tomasz.
        spans = [*of_words(text), *(in_unescaped(of_words)(text) if "\\" in text else ())]
        yield from apart([*spans, *(in_unescaped(of_runs)(text) if runs else ())])

    return find


def _longest(
    known: Collection[tuple[str, ...]],
    are_joined: Callable[[re.Match[str], re.Match[str]], bool] = lambda one, other: True,
) -> Callable[[Sequence[str], Sequence[re.Match[str]]], Iterator[Span]]:
    """Return a finder of the longest known sequences in a sequence of units with their places. `are_joined`: tells if
    two consecutive units belong together."""
    lengths: dict[str, dict[int, None]] = {}  # by first unit, the lengths of known sequences, longest first
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
"""If a user's pattern still matches after so many passes, the whole text is replaced."""

_Kept = TypeVar("_Kept", bound=msgspec.Struct)
_AS_NAME = {"author", "action", "action_by", "id", "kind", "name", "session", "tool_call_id"}
_AS_IT_IS = {"conversation", "parent", "public_id", "shown_id", "topic_id"}
"""Fields of messages, notes, events and drafts. Secrets in names become pseudonyms, equal for equal names; memd's own
ids are kept. All other fields, including future ones, are redacted as text."""


class Redactor:
    """Replaces the matches of its patterns, if it has any. Thread-safe."""

    def __init__(self, patterns: Mapping[str, Find]) -> None:
        self.names = tuple(patterns)
        self._patterns = patterns
        self._mark = re.compile(r"\[redacted:(" + "|".join(map(re.escape, patterns)) + r")\]")
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, settings: IngestSettings) -> Redactor:
        """Return the redactor of the settings: secrets, then personal data, then the user's own patterns. Raises
        ConfigError: a package that the settings need is not installed."""
        if not settings.redact:
            return cls({})
        secrets = {name: find for name, find in BUILT_IN.items() if name in settings.redact_builtin}
        own = {name: matches(re.compile(pattern)) for name, pattern in settings.redact_patterns.items()}
        return cls(secrets | personal(settings) | own)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def text(self, text: str) -> str:
        """Return `text` with its secrets replaced; idempotent."""
        return self._replaced(text, ())[0]

    def arguments(self, arguments: str) -> str:
        """Redact a tool call's arguments; JSON stays JSON, because chat templates parse it."""
        redacted = self.text(arguments)
        if redacted == arguments or not _is_json(arguments) or _is_json(redacted):
            return redacted
        return json.dumps({"redacted": redacted}, ensure_ascii=False)

    def identifier(self, name: str) -> str:
        """Redact an identifier (of a session, a call); different ones stay different."""
        return name if self.text(name) == name else self.pseudonym(name)

    def pseudonym(self, name: str) -> str:
        """Return a hash to replace a name, equal for equal names."""
        if _PSEUDONYM.fullmatch(name):
            return name
        return PSEUDONYM_OPENING + hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def kept(self, value: _Kept) -> _Kept:
        """Redact a message, a note, or an event of the hot buffer, for the journal."""
        return cast("_Kept", rebuilt(value, self._field)) if self._patterns else value

    def _field(self, value: Any, field: str) -> Any:
        """Redact the value of a field with this name; None to descend into it."""
        if field in _AS_IT_IS:
            return value
        if not isinstance(value, str):
            return None
        if field in ("role", "roles"):
            return value if value in _USUAL_ROLES else self.identifier(value)
        treat = {"arguments": self.arguments}.get(field, self.identifier if field in _AS_NAME else self.text)
        return treat(value)

    def draft(self, draft: Draft) -> Draft:
        """Redact a draft; its vector stays that of the former content."""
        if not self._patterns:
            return draft
        speakers = () if draft.speakers is UNSET else draft.speakers
        content, offsets = self._replaced(draft.content, [speaker.offset for speaker in speakers])
        moved = {  # of messages that begin within one secret only the last remains, whose text follows
            offset: msgspec.structs.replace(speaker, offset=offset)
            for offset, speaker in zip(offsets, speakers, strict=True)
            if offset < len(content) or content == draft.content
        }
        fields = {"content": "", "speakers": UNSET if draft.speakers is UNSET else tuple(moved.values())}
        kept = self.kept(msgspec.structs.replace(draft, **fields))  # the content is not redacted twice
        kept = msgspec.structs.replace(kept, content=content)
        return draft if kept == draft else kept

    def marks(self, texts: Sequence[str]) -> Counter[str]:
        """Count the marks in these texts, by name."""
        if not self._patterns:
            return Counter()
        return Counter(found[1] for text in texts if MARK_OPENING in text for found in self._mark.finditer(text))

    def replaced(self, draft: Draft, kept: Draft) -> Counter[str]:
        """Count the secrets that were replaced between `draft` and `kept`, by name."""
        return self.marks(_texts(kept)) - self.marks(_texts(draft))

    def count(self, replaced: Mapping[str, int]) -> None:
        """Add replaced secrets of stored text to `counts`."""
        with self._lock:
            self._counts.update(replaced)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of secrets replaced in stored text, by name."""
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


def redacted_drafts(drafts: Iterable[Draft], redactor: Redactor, embed: Callable[[str], bytes]) -> list[Draft]:
    """Return the drafts redacted and counted, with new vectors if their contents changed.

    A correction copies a chunk that may have been stored before redaction was enabled.
    """
    redacted = []
    for draft in drafts:
        kept = redactor.draft(draft)
        redactor.count(redactor.replaced(draft, kept))
        if draft.vector and kept.content != draft.content:
            kept = msgspec.structs.replace(kept, vector=embed(kept.embedded_text))
        redacted.append(kept)
    return redacted


def last_look(redactor: Redactor) -> Callable[[Draft], Draft]:
    """Return the filter that the store applies to every draft: it redacts, and never embeds.

    Text without a vector (a correction's reason) is redacted here at the latest. The content of an active draft already
    has its vector, so it must be redacted before: otherwise the filter raises StoreError, and nothing is stored.
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
    """Return the new offset of a character after marks replaced the spans: after the mark if it was within a span."""
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
