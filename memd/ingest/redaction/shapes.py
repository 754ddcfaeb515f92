"""The shapes of secrets: the built-in patterns of `ingest.redact`, each a function that finds its spans in a text.

Rule: time grows with the length of the text, whatever is in it. A repetition is possessive, bounded, or begins where no
other attempt has begun; what a span's beginning promises is consumed even if its end is missing: half a secret is one,
too. Secrets stand in prose, in code, in URLs and, with escaped newlines and quotes, in JSON inside of JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from memd.ingest.redaction.accounts import account_numbers
from memd.ingest.redaction.assignments import assigned_secrets
from memd.ingest.redaction.logins import cookies, logins
from memd.ingest.redaction.spans import Find, Span, apart
from memd.ingest.redaction.vendor_keys import vendor_keys
from memd.patterns import late_pattern

SECRET_GROUP = "secret"  # noqa: S105  # a name
"""A pattern with a group of this name means that group alone; without one it means all that it matches."""

CARD_DIGITS_MIN, CARD_DIGITS_MAX = 13, 19
_KEY_CHARACTERS_MAX = 65_536  # of a private key whose beginning is missing

# Where a run of a token's characters begins, its first "eyJ" (the beginning of every JSON object in base64).
_JWT = late_pattern(
    r"(?<![A-Za-z0-9_-])(?>[A-Za-z0-9_-]*?(?=eyJ))"
    r"(?P<secret>eyJ[A-Za-z0-9_-]{6,}+\."
    r"(?:eyJ[A-Za-z0-9_-]{6,}+(?:\.[A-Za-z0-9_-]++)?+|[A-Za-z0-9_-]*+\.[A-Za-z0-9_-]++(?:\.[A-Za-z0-9_-]++){0,2}+))"
)
_BEARER = late_pattern(
    r"authorization[\"'\\]{0,4}[ \t]{0,4}[:=][ \t]{0,4}[\"'\\]{0,4}(?:(?:bearer|basic|token|apikey|bot|pat)[ \t]{1,4}"
    r"(?P<secret>[A-Za-z0-9._~+/=-]++)"
    r"|(?:[A-Za-z][A-Za-z-]{1,20}[ \t]{1,4})?(?P<other>(?=[A-Za-z._~+/=:-]{0,80}[0-9])[A-Za-z0-9._~+/=:-]{16,}+))"
    r"|\bbearer(?:[ \t]{1,4}|%20)(?P<alone>(?=[A-Za-z._~+/=-]*+[0-9])[A-Za-z0-9._~+/=-]{8,}+)",
    re.IGNORECASE,
)
_BEARER_PLACEHOLDER = late_pattern(r"\.++|[A-Z_]{0,40}(?:TOKEN|KEY)")  # as documentation has it
# The part between "user:" and "@", which may have an @ itself; a port and a template are no password.
_URL_CREDENTIALS = late_pattern(
    r"(?<=[A-Za-z0-9]):(?:\\{0,3}/){2}[^\s/:@?#\"'<>\\]{0,256}+:(?!\d{1,5}[?#]|\$?\{|%[({])"
    r"(?P<secret>[^\s/@\"'<>\\]++(?:@(?=[^\s/@\"'<>\\]*+@)[^\s/@\"'<>\\]*+)*+)@"
)
# Not within a hash or behind a decimal point.
_DIGIT_GROUPS = late_pattern(
    r"(?:%20)?(?:(?<=%20)|(?<![A-Fa-f0-9])(?<!\d\.)|(?<=\\[bf])|(?<=\\u[0-9A-Fa-f]{4}))"
    r"(?P<groups>\d{3,}+(?:[ \u00a0-]\d{3,}+)*+)(?![A-Fa-f]|\.\d)"
)
_MANY_DIGITS = late_pattern(r"\d[\d \u00a0-]{11}")
_GROUP = late_pattern(r"\d+")
_NETWORK = late_pattern(r"[3-6]|22[2-9]|2[3-6]|27[01]|2720")  # what the number of a payment card begins with
_DOUBLED = {str(digit): sum(map(int, str(2 * digit))) for digit in range(10)}

_KEY_NAME = r"(?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?"
# Of each also what is left where a chunk ended in the middle of it. "Private-Lines" is PuTTY's.
_KEY_BEGIN = late_pattern(
    rf"-{{4,5}} ?BEGIN {_KEY_NAME} ?-{{4,5}}|\bPrivate-Lines:[ \t]*\d{{1,4}}"
    r"|\A\s{0,2}(?:(?:[A-Z0-9]{1,12} ){0,4}PRIVATE )?KEY(?: BLOCK)?-{4,5}"
)
_KEY_END = late_pattern(rf"-{{4,5}} ?END (?P<whole>{_KEY_NAME} ?-{{4,5}})|-{{4,5}} ?END(?: [A-Z0-9 ]{{0,60}}+)?\s*+\Z")
_UP_TO_KEY_END = late_pattern(r"(?:[^-]++|-(?!-{3,4} ?(?:BEGIN|END) ))*+-{4,5} ?END [A-Z0-9 ]{0,60}+-{0,5}")
_BASE64 = "[A-Za-z0-9+/=]"
_BETWEEN = r"(?:\\{1,8}[nrt]|[\s\"'`>|#,*+\\])"  # also in source code, in quotations and in JSON
_KEY_MATERIAL = late_pattern(
    rf"(?:{_BETWEEN}{{0,40}}+"
    rf"(?:(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset|Private-MAC)\b[^\n\\]{{0,200}}+|{_BASE64}{{16,}}+))*+"
    # The last line may be short: it counts if it looks like one or is a line of its own.
    rf"(?:(?:\r?\n|\\{{1,8}}n)[ \t>|#*\"']{{0,8}}+"
    rf"(?={_BASE64}{{0,15}}[0-9+/=]|{_BASE64}{{1,15}}[\"'`)}}\]]{{0,4}}(?:\Z|\r?\n|\\{{1,8}}n))"
    rf"{_BASE64}{{1,15}}+)?+"
)
_JWK_MEMBER = late_pattern(
    r"\\{0,7}[\"'](?:d|p|q|dp|dq|qi|k)\\{0,7}[\"']\s{0,4}:\s{0,4}\\{0,7}[\"'](?P<secret>[A-Za-z0-9_-]{16,}+)"
)
# "-----BEGIN …PRIVATE KEY" in base64: what stands at "…" decides which of three ways the rest is written.
_ENCODED_KEY = late_pattern(
    r"LS0tLS1CRUdJTi[A-Za-z0-9+/]{1,16}?(?:BSSVZBVEUgS0V|QUklWQVRFIEtFW|UFJJVkFURSBLRV)[A-Za-z0-9+/=]++"
)
_JWK_CHARACTERS_MAX = 4_096  # of one key, about
_KEY_LINE_MIN = 16
_LAST_KEY_LINE = late_pattern(r"[0-9+/=]")  # shorter ones are words, unless a line of a key follows upwards
_KEY_TOKENS = late_pattern(rf"(?P<between>{_BETWEEN}++)|(?P<base64>{_BASE64}++)|.", re.DOTALL)
_KEY_LINE_BREAK = late_pattern(r"\r?\n|\\{1,8}n")
_KEY_LINE = late_pattern(rf"{_BASE64}++")
_FIRST_KEY_LINE = late_pattern(rf"{_BASE64}++(?:\r?\n|\\{{1,8}}n)")
_KEY_WIDTHS = range(48, 81)  # PEM has 64, OpenSSH 70


def matches(pattern: re.Pattern[str]) -> Find:
    """Finds the matches of `pattern`, or of its `SECRET_GROUP`; an empty match does not count."""
    group: str | int = SECRET_GROUP if SECRET_GROUP in pattern.groupindex else 0

    def find(text: str) -> Iterator[Span]:
        spans = (found.span(group) for found in pattern.finditer(text))
        return ((start, end) for start, end in spans if start < end)  # (-1, -1): a group that had no part in it

    return find


def jwts(text: str) -> Iterator[Span]:
    """JSON Web Tokens."""
    return matches(_JWT)(text) if "eyJ" in text else iter(())


def url_credentials(text: str) -> Iterator[Span]:
    """Passwords in URLs."""
    return matches(_URL_CREDENTIALS)(text) if "@" in text else iter(())


def bearer_tokens(text: str) -> Iterator[Span]:
    """The credentials of `Authorization` headers, and what follows "Bearer" and has a digit."""
    lowered = text.lower()
    if "bearer" not in lowered and "authorization" not in lowered:
        return
    for found in _BEARER.finditer(text):
        group = next(group for group in ("secret", "other", "alone") if found[group])
        if not _BEARER_PLACEHOLDER.fullmatch(found[group]):
            yield found.span(group)


def card_numbers(text: str) -> Iterator[Span]:
    """13 to 19 digits, in groups of three or more, that begin like a card's and end with the Luhn check digit.

    Other groups of digits may stand around them: every stretch of groups is tried, longer ones first.
    """
    if not _MANY_DIGITS.search(text):
        return
    for run in _DIGIT_GROUPS.finditer(text):
        if len(run["groups"]) < CARD_DIGITS_MIN:
            continue
        groups = [group.span() for group in _GROUP.finditer(text, *run.span("groups"))]
        first = 0
        while first < len(groups):
            last = _card_from(text, groups, first)
            if last is None:
                first += 1
                continue
            yield groups[first][0], groups[last][1]
            first = last + 1


def private_keys(text: str) -> Iterator[Span]:
    """PEM, OpenSSH, PGP and PuTTY private keys: whole, without their end, without their beginning, without both.

    Without both it is one only where nothing else is in the text: a chunk out of the middle of a key.
    """
    if "----" not in text and "Private-Lines" not in text:
        if _is_middle_of_key(text):
            yield 0, len(text)
        return
    done = 0
    for begin in _KEY_BEGIN.finditer(text):
        if begin.start() < done:
            continue
        yield from _headless_keys(text, done, begin.start())
        whole = _UP_TO_KEY_END.match(text, begin.end()) if "BEGIN" in begin[0] else None
        rest = whole or _KEY_MATERIAL.match(text, begin.end())
        done = begin.end() if rest is None else rest.end()
        yield begin.start(), done
    yield from _headless_keys(text, done, len(text))
    if not done and _is_middle_of_key(text):
        yield 0, len(text)


BUILT_IN: Mapping[str, Find] = {
    "private_key": lambda text: apart([*private_keys(text), *_jwk_members(text), *_encoded_keys(text)]),
    "url_credentials": url_credentials,
    "jwt": jwts,
    "api_key": vendor_keys,
    "bearer_token": bearer_tokens,
    "password": assigned_secrets,
    "login": logins,
    "cookie": cookies,
    "card_number": card_numbers,
    "iban": account_numbers,
}
"""By name, in the order in which they are applied: a secret is named after the first that finds it."""


def _encoded_keys(text: str) -> Iterator[Span]:
    """PEM private keys in base64 once more, as in kubeconfig and in Secrets of Kubernetes."""
    return (found.span() for found in _ENCODED_KEY.finditer(text)) if "LS0tLS1CRUdJTi" in text else iter(())


def _jwk_members(text: str) -> Iterator[Span]:
    """The private members of JSON Web Keys (RFC 7517)."""
    if "kty" in text:
        for found in _JWK_MEMBER.finditer(text):
            around = max(0, found.start() - _JWK_CHARACTERS_MAX), found.end() + _JWK_CHARACTERS_MAX
            if text.find("kty", *around) >= 0:
                yield found.span("secret")


def _headless_keys(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the spans of keys whose beginning is missing, found by their ends."""
    for found in _KEY_END.finditer(text, start, end):
        begin, is_last = found.start(), True
        tokens = list(_KEY_TOKENS.finditer(text, max(start, begin - _KEY_CHARACTERS_MAX), begin))
        for token in reversed(tokens):
            line = token["base64"] or ""
            if len(line) >= _KEY_LINE_MIN or (is_last and _LAST_KEY_LINE.search(line)):
                begin = token.start()
            elif not token["between"] and not (is_last and line):
                break
            is_last = is_last and not line
        if found["whole"] or begin < found.start():
            yield begin, found.end()
            start = found.end()


def _is_middle_of_key(text: str) -> bool:
    """Whether the text is nothing but lines of base64 of one width; the first and the last may be cut off."""
    if _FIRST_KEY_LINE.match(text) is None:
        return False
    lines = _KEY_LINE_BREAK.split(text.rstrip())
    if not all(map(_KEY_LINE.fullmatch, lines)):
        return False
    widths = {len(line) for line in lines[1:-1]}
    return len(widths) == 1 and max(widths) in _KEY_WIDTHS and len(lines[0]) <= max(widths) >= len(lines[-1])


def _card_from(text: str, groups: list[Span], first: int) -> int | None:
    """The last group of the card number that begins with group `first`."""
    if not _NETWORK.match(text, *groups[first]):
        return None
    digits, found = "", None
    for last in range(first, len(groups)):
        digits += text[slice(*groups[last])]
        if len(digits) > CARD_DIGITS_MAX:
            break
        if len(digits) >= CARD_DIGITS_MIN and _passes_luhn(digits):
            found = last
    return found


def _passes_luhn(digits: str) -> bool:
    """ISO/IEC 7812-1, annex B."""
    return (sum(map(int, digits[-1::-2])) + sum(_DOUBLED[digit] for digit in digits[-2::-2])) % 10 == 0
