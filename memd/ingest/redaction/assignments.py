"""Finds the values that are assigned to passwords, secrets and tokens: `password = …`, `API_KEY=…`, `"token": "…"`.

Rule: a value that is written out is a secret; a variable, a call, a type or a placeholder is none. Where that cannot be
told apart it is taken for a secret. A value that is refused is short, so that looking inside it again stays linear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memd.patterns import late_pattern

REFUSED_CHARACTERS_MAX = 200
"""A longer value is a secret whatever it looks like."""
VALUE_CHARACTERS_MIN = 4
"""The shortest value without quotes; a quoted one may have a single character."""
TOKEN_CHARACTERS_MIN = 8
"""The shortest value of a `token` (shorter ones are tokens of a language model), and the shortest number, but for
passwords."""
_PATH_CHARACTERS_MAX = 24  # of something like settings.oauth2.password; a token with dots is longer ...
_PATH_DIGITS_MAX = 3  # ... or has more digits; a longer path has none
_FLAG_CHARACTERS_MAX = 48

_KEY = late_pattern(
    r"(?P<key>(?P<password>pass(?:word|wd|phrase|code)|passwort|kennwort|(?<![a-z])pwd|(?<=[_-])pass|\bpass(?==))"
    r"|secret|token|api[_-]?key|credentials?"
    r"|(?:access|auth|private|secret|signing|encryption|master|account|license|subscription|service|storage|shared)"
    r"[_-]?key)"
    r"(?:[_-]?(?:access|key|base|value|text|confirm(?:ation)?|[0-9]{1,2})){0,3}+"
    r"(?P<separator>[\"'`\\\]]{0,5}+"  # the end of the key's own quotes: "password", \"password\", ['password']
    r"(?:[ \t]{0,4}:[ \t]{0,4}[a-z][\w.\[\]|? ]{0,40}?=(?!=)"  # with a type: password: str =
    r"|[ \t]{0,20}(?:=>|:=|={1,3}|!==?|:(?!//|:))|>|[ \t](?=[^\s:=]))[ \t]{0,8}+)",
    re.IGNORECASE,
)
# A key begins so, in lower case: found in a twentieth of the time that looking for `_KEY` takes.
_KEY_BEGINS = late_pattern(
    "pass|pwd|kennwort|secret|token|credential|api[_-]?key"
    "|(?:access|auth|private|signing|encryption|master|account|license|subscription|service|storage|shared)[_-]?key"
)
_QUOTE = late_pattern(r"[bfruBFRU]{0,2}(?P<escapes>\\{0,15})(?P<quote>[\"'`])")
_UNQUOTED = late_pattern(
    r"(?:[^\s\"'`\\<>,;&)\]}|]|\\(?![\"'nrtbfu/])"
    # These belong to it unless they end it: in front of the next parameter, of white space, or of their like.
    r"|[,;&)\]}|](?![\s\"'`\\,;&)\]}|<]|\Z|[\w-]{1,30}[=:]))*+"
)
_CLOSINGS = {char: late_pattern(rf"(?<!\\)(?P<escapes>\\*+)(?:(?P<quote>{char})|\n)") for char in "\"'`"}

_PLACEHOLDER = late_pattern(
    r"\$?\{++[^{}]*+\}++|\$\([^()]*+\)?|\$(?:[A-Z_][A-Z0-9_]*+|[a-z_]++)|<[^<>]*+>|%\(?\w*+\)?[sd]?|%\w++%"
    r"|[*•.xX_-]++|\[redacted:[^\]]*+\].*+"
)
_WORD = late_pattern(
    r"(?:no(?:ne|t|pe)?|null|nil|nan|undefined|true|false|yes|str(?:ing)?|int(?:eger)?|number|bytes?|bool(?:ean)?|any"
    r"|object|optional|required|unknown|void|char|text|varchar|secretstr|self|this|await|new|typing|lambda|function"
    r"|\w*(?:pass(?:word|wd|phrase)?|pwd|secret|token|key|credentials?))[!?.:]*",
    re.IGNORECASE,
)
_IDENTIFIER = late_pattern(r"[A-Za-z_$][A-Za-z_$]*+")
_PATH = late_pattern(r"[A-Za-z_$][\w$]*+(?:(?:\.|->|::|\?\.)[A-Za-z_$][\w$]*+)++")
_CALL = late_pattern(r"(?:[A-Za-z_$][\w$]*+(?:(?:\.|->|::|\?\.)[A-Za-z_$][\w$]*+)*+)?[(\[{]")
_NUMBER = late_pattern(r"[0-9]++(?:\.[0-9]++)")
_FLAG = late_pattern(r"(?:--[\w-]*|(?:^|[^\w-])-[\w-]*)$")
_COMPLAINT = late_pattern(
    r"(?:invalid|expired|wrong|missing|incorrect|bad|forgot(?:ten)?|confirm|repeat|reset|change)[ _-]?\Z", re.IGNORECASE
)
_IN_CODE_MARKS = late_pattern(r"`[\w.-]*+\Z")
_SPACES = " \t"


def assigned_secrets(text: str) -> Iterator[tuple[int, int]]:
    """The spans of the values, without their quotes, in order."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a letter became two
        lowered = "".join(character if len(character.lower()) > 1 else character.lower() for character in text)
    position = 0
    for begin in _KEY_BEGINS.finditer(lowered):
        found = _KEY.match(text, begin.start()) if begin.start() >= position else None
        if found is None:
            continue
        start, end, quoted = _value(text, found.end())
        value = text[start:end]
        position = found.end()
        if len(value) > REFUSED_CHARACTERS_MAX or _is_secret(found, text, value, end, quoted=quoted):
            yield start, end
            position = end


def _value(text: str, position: int) -> tuple[int, int, bool]:
    """The start and end, without quotes, of the value at `position`, and whether it is quoted.

    A string that is not closed ends with its line.
    """
    opened = _QUOTE.match(text, position)
    if opened is None:
        return position, _end_of(_UNQUOTED, text, position), False
    quote, depth, start = opened["quote"], len(opened["escapes"]), opened.end()
    if text.startswith(quote * 2, start):
        end = text.find(quote * 3, start + 2, start + 4096)
        if end >= 0:
            return start + 2, end, True
    for closing in _CLOSINGS[quote].finditer(text, start):
        escapes = len(closing["escapes"])
        if closing["quote"] is None:
            return start, closing.start(), True
        # In JSON within JSON each level doubles the backslashes and adds one: a string that opens with `depth` of them
        # is closed by as many, or with pairs of escaped ones before it. Fewer close what the string is in.
        if escapes < depth or escapes % (2 * (depth + 1)) == depth:
            return start, closing.start() + max(0, escapes - depth), True
    return start, len(text), True


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    return position if found is None else found.end()


def _is_secret(found: re.Match[str], text: str, value: str, end: int, *, quoted: bool) -> bool:
    separator = found["separator"].lstrip("\"'`\\]")
    key, is_password = found["key"].lower(), found["password"] is not None
    before = text[max(0, found.start() - _FLAG_CHARACTERS_MAX) : found.start()]
    if text[found.end() : found.end() + 1] == "`" and _IN_CODE_MARKS.search(before):
        return False  # `password=`, as documentation has it
    if not value or value.startswith("[redacted:") or _PLACEHOLDER.fullmatch(value):
        return False
    if separator.strip() == "" and not _is_flag(text, found.start()):
        return False
    if separator == ">" and not text.startswith("</", end):
        return False
    if len(value) < TOKEN_CHARACTERS_MIN and (key == "token" or (value.isdecimal() and not is_password)):
        return False
    if quoted:
        return not _is_message(before, value, key)
    if len(value) < VALUE_CHARACTERS_MIN or (key == "pwd" and value[0] in "/~"):
        return False
    if separator == "=" and found["key"].isupper():
        return True  # a line of an environment: no language in which the value could be an expression
    return not _is_expression(value, text, end) and _looks_random(value, text, end, separator, is_password=is_password)


def _is_flag(text: str, position: int) -> bool:
    """Whether the word at `position` is a command's flag: --password, --db-password."""
    word = text[max(0, position - _FLAG_CHARACTERS_MAX) : position]
    return bool(_FLAG.search(word))


def _is_message(before: str, value: str, key: str) -> bool:
    """Whether a program says this to people, of the secret that it names: `"invalidToken": "This token is unknown"`."""
    named = _COMPLAINT.search(before) is not None and key.replace("_", " ") in value.lower()
    return named and " " in value and not any(map(str.isdigit, value))


def _is_expression(value: str, text: str, end: int) -> bool:
    """Return whether the value is program text instead of a secret."""
    bare = value.rstrip(".,;:)]}")
    if _CALL.match(value) or _WORD.fullmatch(bare) or text[end : end + 1] == "(":
        return True
    digits = sum(map(str.isdigit, bare))
    return bool(_PATH.fullmatch(bare)) and digits <= (_PATH_DIGITS_MAX if len(bare) < _PATH_CHARACTERS_MAX else 0)


def _looks_random(value: str, text: str, end: int, separator: str, *, is_password: bool) -> bool:
    if any(map(str.isdigit, value)):
        return is_password or not _NUMBER.fullmatch(value)
    if not is_password:
        return False
    if _IDENTIFIER.fullmatch(value) and "_" in value:
        return False
    # "Password: please choose one" is a sentence; what is alone up to the end of its line is a value.
    following = text[end : end + 8].lstrip(_SPACES)
    return not separator.startswith(":") or not following[:1].isalpha() or following == text[end : end + 8]
