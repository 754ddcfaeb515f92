"""The shapes of secrets: the built-in patterns of `ingest.redact`, each a function that finds its spans in a text.

Rule: time grows with the length of the text, whatever is in it. The patterns are in `assets/redaction.toml`; here they
are read, beside the two shapes that no pattern tells alone: private keys that are cut off, and values that are
assigned. Secrets stand in prose, in code, in URLs and, with escaped newlines and quotes, in JSON inside of JSON.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import get_args

import msgspec

from memd.assets import words_of
from memd.caching import late_pattern
from memd.settings.model import RedactionName

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
        for escape in _ESCAPE.finditer(text) if "\\" in text else ():
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
BEFORE_CHARACTERS, AFTER_CHARACTERS = 400, 1_000
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
            long_words = "\n".join(_LONG_WORD.findall(text)) if any(rule.mode == "^" for rule in rules) else ""
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
            begin, end = max(0, at - BEFORE_CHARACTERS), at + AFTER_CHARACTERS
            while (at := lowered.rfind(word, at + 1, end)) >= 0:
                end = at + AFTER_CHARACTERS
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
_DIGITS = late_pattern("[0-9]+")
_CARD_NETWORK = late_pattern("[3-6]|22[2-9]|2[3-6]|27[01]|2720")
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
    groups = [group.span() for group in _DIGITS.finditer(found.string, *found.span(1))]
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
_LONG_WORD, _ESCAPE = late_pattern(NAMED["LONG_WORD"]), late_pattern(NAMED["ESCAPE"])

# Private keys

_KEY_CHARACTERS_MAX = 65_536  # of a key whose beginning is missing
_KEY_LINE_MIN = 16
_KEY_WIDTHS = range(48, 81)  # PEM has 64, OpenSSH 70
_KEY_BEGIN, _KEY_END = late_pattern(NAMED["KEY_BEGIN"]), late_pattern(NAMED["KEY_END"])
_KEY_UP_TO_END, _KEY_MATERIAL = late_pattern(NAMED["KEY_UP_TO_END"]), late_pattern(NAMED["KEY_MATERIAL"])
_KEY_TOKENS, _KEY_MIDDLE = late_pattern(NAMED["KEY_TOKENS"]), late_pattern(NAMED["KEY_MIDDLE"])


def private_keys(text: str) -> Iterator[Span]:
    """PEM, OpenSSH, PGP and PuTTY private keys: whole, without their end, without their beginning, without both.

    Without both it is one only where nothing else is in the text: a chunk out of the middle of a key.
    """
    done = 0
    if "----" in text or "Private-Lines" in text:
        for begin in _KEY_BEGIN.finditer(text):
            if begin.start() < done:
                continue
            yield from _headless_keys(text, done, begin.start())
            whole = _KEY_UP_TO_END.match(text, begin.end()) if "BEGIN" in begin[0] else None
            rest = whole or _KEY_MATERIAL.match(text, begin.end())
            done = begin.end() if rest is None else rest.end()
            yield begin.start(), done
        yield from _headless_keys(text, done, len(text))
    if not done and _KEY_MIDDLE.match(text):  # lines of base64: of one width, but for the first and the last
        widths = [*map(len, re.split(r"\r?\n|\\{1,8}n", text.rstrip()))]
        if len(set(widths[1:-1])) == 1 and widths[1] in _KEY_WIDTHS and widths[0] <= widths[1] >= widths[-1]:
            yield 0, len(text)


def _headless_keys(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the spans of keys whose beginning is missing, found by their ends."""
    for found in _KEY_END.finditer(text, start, end):
        begin, is_last = found.start(), True
        tokens = list(_KEY_TOKENS.finditer(text, max(start, begin - _KEY_CHARACTERS_MAX), begin))
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
_ASSIGNED, _ASSIGNED_BEGINS = late_pattern(NAMED["ASSIGNED"]), late_pattern(NAMED["ASSIGNED_BEGINS"])
_QUOTE, _CLOSING = late_pattern(NAMED["VALUE_QUOTE"]), late_pattern(NAMED["VALUE_CLOSING"])
_UNQUOTED, _PLACEHOLDER = late_pattern(NAMED["VALUE_UNQUOTED"]), late_pattern(NAMED["PLACEHOLDER"])
_WORD, _PATH, _CALL = (late_pattern(NAMED[f"PROGRAM_{part}"]) for part in ("WORD", "PATH", "CALL"))
_COMPLAINT, _FLAG = late_pattern(NAMED["COMPLAINT"]), late_pattern(NAMED["FLAG"])


def assigned_secrets(text: str) -> Iterator[Span]:
    """The values of passwords, secrets and tokens, without quotes: `password = …`, `API_KEY=…`, `"token": "…"`."""
    position = 0
    for begin in _ASSIGNED_BEGINS.finditer(_lowered(text)):
        found = _ASSIGNED.match(text, begin.start()) if begin.start() >= position else None
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
    opened = _QUOTE.match(text, position)
    if opened is None:
        bare = _UNQUOTED.match(text, position)
        return position, bare.end() if bare else position, False
    quote, depth, start = opened["quote"], len(opened["escapes"]), opened.end()
    if text.startswith(quote * 2, start):
        end = text.find(quote * 3, start + 2, start + 4096)
        if end >= 0:
            return start + 2, end, True
    for closing in _CLOSING.finditer(text, start):
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
    if not value or _PLACEHOLDER.fullmatch(value):
        return False
    if text.startswith("`", found.end()) and re.search(r"`[\w.-]*+\Z", before):  # `password=`, as documentation has it
        return False
    if (separator.isspace() and not _FLAG.search(before)) or (separator == ">" and not behind.startswith("</")):
        return False
    if len(value) < TOKEN_CHARACTERS_MIN and (key == "token" or (value.isdecimal() and not is_password)):
        return False
    if quoted:  # not if a program says it to people: "invalidToken": "This token is unknown"
        is_of_it = bool(_COMPLAINT.search(before)) and key.replace("_", " ") in value.lower()
        return digits > 0 or " " not in value or not is_of_it
    if len(value) < VALUE_CHARACTERS_MIN or (key == "pwd" and value[0] in "/~"):
        return False
    if separator == "=" and found["key"].isupper():
        return True  # a line of an environment: no language in which the value could be an expression
    bare = value.rstrip(".,;:)]}")
    if _CALL.match(value) or _WORD.fullmatch(bare) or behind.startswith("("):
        return False
    if _PATH.fullmatch(bare) and digits <= (_PATH_DIGITS_MAX if len(bare) < _PATH_CHARACTERS_MAX else 0):
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
