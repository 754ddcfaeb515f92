"""Finds passwords and keys where programs write them out: manifests, SQL, files of hashes, messages of installers.

Rule: each pattern is bounded and is tried only on a text that has the word it needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memd.ingest.redaction.spans import Span, apart
from memd.patterns import late_pattern

_QUOTE = r"(?:\\{0,7}[\"'])"
_SPACE = r"[ \t]{0,4}"
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_RANDOM = r"(?=[A-Za-z_./+=-]{0,80}[0-9])[A-Za-z0-9_./+=-]"  # a word with a digit near its beginning
# Each behind a word of it, in lower case.
_PATTERNS = {
    # Kubernetes, ECS, Compose: - name: DB_PASSWORD ⏎ value: …; "name": "API_KEY", "value": "…". Not a reference.
    "value": late_pattern(
        rf"name{_QUOTE}?{_SPACE}[:=]{_SPACE}{_QUOTE}?[\w.-]{{0,60}}?"
        r"(?:passw(?:or)?d|passphrase|_pass|secret|token|credentials?|(?:api|access|private)[_-]?key)\w{0,20}"
        rf"{_QUOTE}?{_SPACE},?(?:\s|\\{{1,7}}[nrt]){{0,60}}+{_QUOTE}?value{_QUOTE}?{_SPACE}[:=]{_SPACE}{_QUOTE}?"
        r"(?P<secret>(?![$<{\[])[^\s\"'\\,}]{4,})",
        re.IGNORECASE,
    ),
    "'": late_pattern(
        r"(?:identified(?: with [\w'\"]{1,40})?(?: by| as)(?: password)?"
        r"|(?:with|(?:user|role) [\w'\"@%.-]{1,80}) password"
        r"|set password for [\w'\"@%.-]{1,80} =) {1,4}\\{0,3}'(?P<secret>[^'\\\n]{4,200})(?=\\{0,3}')",
        re.IGNORECASE,
    ),
    "$": late_pattern(  # crypt(5), bcrypt, Argon2: /etc/shadow, htpasswd
        r"(?<![A-Za-z0-9$])\$(?:[156y]|2[abxy]|apr1|argon2(?:id|[id]))\$(?P<secret>[A-Za-z0-9./$=,+-]{22,300})"
    ),
    "pass": late_pattern(  # not a lone word
        rf"{_QUOTE}pass{_QUOTE}{_SPACE}:{_SPACE}{_QUOTE}"
        r"(?P<secret>(?=[a-z]{0,80}[^a-z\"'\\])[^\"'\\\n]{6,200})"
    ),
    "temporary password": late_pattern(r"emporary password (?:is generated )?for \S{1,80}: (?P<secret>\S{4,200})"),
    "key": late_pattern(
        rf"\b(?:api|access|secret|license) key(?: is)?{_SPACE}[:=]{_SPACE}[\"'`\\]{{0,4}}"
        rf"(?P<secret>{_RANDOM}{{16,200}})",
        re.IGNORECASE,
    ),
    "secret": late_pattern(  # of Vault, Consul and Nomad
        rf"secret[_ -]?id{_QUOTE}?[ \t]{{0,12}}[:=]{_SPACE}[ \t]{{0,12}}{_QUOTE}?(?P<secret>{_UUID})", re.IGNORECASE
    ),
    "://": late_pattern(r"://(?P<secret>(?=[A-Za-z_-]{0,60}[0-9])[A-Za-z0-9_-]{20,255})@"),  # a token as the user
}


def written_out(text: str) -> Iterator[Span]:
    """Passwords, their hashes and keys, where the words around them say what they are."""
    lowered = text.lower()
    patterns = [pattern for word, pattern in _PATTERNS.items() if word in lowered]
    yield from apart(found.span("secret") for pattern in patterns for found in pattern.finditer(text))
