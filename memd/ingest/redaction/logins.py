"""Finds what lets somebody in without a name of its own: passwords of commands, cookies of sessions.

Rule: time grows with the length of the text: a pattern is bounded, and begins at a word that text seldom has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memd.ingest.redaction.spans import Span, apart
from memd.ingest.redaction.told import told
from memd.ingest.redaction.written_out import written_out
from memd.patterns import late_pattern

_COMMAND_CHARACTERS_MAX = 1_000
"""A flag belongs to a command that stands so far before it, at most."""
_NEXT = r"(?:[ \t\r\n]|\\{1,8}[nrt]){1,40}+"
_QUOTED = r"(?:\\{0,3}[\"'])"
# A user and a password: of curl and its like, of Docker's and npm's files, of netrc and NuGet. A variable is none.
_FLAGS = late_pattern(
    rf"(?<![\w-])(?:-u|-U|-a|--user|--proxy-user|--auth)(?:=|[ \t]{{0,4}}){_QUOTED}?"
    r"(?:[^\s:\"'\\$]{1,80}:|:)(?P<secret>(?![/$<{\\])[^\s\"'\\]{2,})"
)
_FLAGS_OF = ("curl", "http ", "https ", "wget", "xh ")
_SHORT_FLAGS = late_pattern(rf"(?<![\w-])-[pa][ \t]{{0,4}}{_QUOTED}?(?P<secret>(?![-/$<{{\\])[^\s\"'\\]{{4,}})")
_SHORT_FLAGS_OF = ("sshpass", "docker login", "podman login", "mysql", "redis-cli", "mongo", "az login")
_FILES = late_pattern(
    rf"(?:machine{_NEXT}[^\s\\]{{1,200}}|default){_NEXT}login{_NEXT}[^\s\\]{{1,200}}{_NEXT}password{_NEXT}"
    r"(?P<netrc>[^\s\\\"']{2,})"
    r"|\\{0,3}\"(?:auth|identitytoken|registrytoken)\\{0,3}\"[ \t]{0,4}:[ \t]{0,4}\\{0,3}\""
    r"(?P<docker>[A-Za-z0-9+/=._-]{8,}+)"
    r"|(?:(?m:^)|:)_auth[ \t]{0,4}=[ \t]{0,4}[\"']?(?P<npm>[A-Za-z0-9+/]{8,}+={0,2}+)(?![\w.(])"
    r"|<add[ \t]{1,4}key=\\{0,3}\"[^\"<>\n]{0,60}(?i:password|secret|token|key)\\{0,3}\"[ \t]{1,4}"
    r"value=\\{0,3}\"(?P<nuget>[^\"\\\n]{4,})",
)
_WORDS_OF_FILES = ("login ", "login\t", '"auth', 'auth\\"', 'token"', "_auth", "<add")

_HEADERS = late_pattern(
    rf"\b(?:set-)?cookies?{_QUOTED}?[ \t]{{0,4}}[:=][ \t]{{0,4}}{_QUOTED}?"
    r"(?P<secret>[!#$%&*+.^_`|~0-9A-Za-z-]{1,80}=(?![ \t])[^\s\"'\\;]{8,}+"
    r"(?:;[ \t]{0,2}[^\"'\\\r\n;]{1,4096}+){0,50}+)",
    re.IGNORECASE,
)
_SESSIONS = late_pattern(  # in lower case
    r"(?:sess(?:ion)?(?:[_.-]?(?:id|key|token))?|(?<![a-z])sid|remember_(?:me|user)_?\w{0,20}|cf_clearance|(?<![a-z])li_at)"
    rf"{_QUOTED}?[ \t]{{0,2}}[:=][ \t]{{0,2}}{_QUOTED}?"
    r"(?P<secret>(?=[a-z_%.-]{0,60}[0-9])(?=[0-9_%.-]{0,60}[a-z])[a-z0-9_%.+/-]{20,}+)(?![(\[])"
)


def logins(text: str) -> Iterator[Span]:
    """The passwords of `curl -u`, `sshpass -p` and the like, of netrc, Docker's, npm's and NuGet's files, in manifests
    and SQL."""
    spans: list[Span] = [*written_out(text), *told(text)]
    if any(word in text for word in _FLAGS_OF):
        spans += _of_commands(_FLAGS, _FLAGS_OF, text)
    if any(word in text for word in _SHORT_FLAGS_OF):
        spans += _of_commands(_SHORT_FLAGS, _SHORT_FLAGS_OF, text)
    if any(word in text for word in _WORDS_OF_FILES):
        spans += [found.span(found.lastgroup or 0) for found in _FILES.finditer(text)]
    yield from apart(spans)


def cookies(text: str) -> Iterator[Span]:
    """The contents of `Cookie` and `Set-Cookie` headers, and the values of session cookies wherever they stand."""
    lowered = text.lower()
    spans: list[Span] = []
    if "cookie" in lowered:
        spans += [found.span("secret") for found in _HEADERS.finditer(text)]
    if len(lowered) == len(text):  # else a letter became two, and the places are others
        spans += [found.span("secret") for found in _SESSIONS.finditer(lowered)]
    yield from apart(spans)


def _of_commands(pattern: re.Pattern[str], commands: tuple[str, ...], text: str) -> Iterator[Span]:
    """The secrets of flags that stand behind one of these commands, on its line or a continued one."""
    for found in pattern.finditer(text):
        before = text[max(0, found.start() - _COMMAND_CHARACTERS_MAX) : found.start()]
        line = before[_line_start(before) :]
        if any(command in line for command in commands):
            yield found.span("secret")


def _line_start(before: str) -> int:
    """Where the command begins that goes on at the end of `before`: lines that end with a backslash go on."""
    at = len(before)
    while (end := before.rfind("\n", 0, at)) >= 0 and before[:end].rstrip("\r").endswith("\\"):
        at = end
    return end + 1
