"""Finds e-mail addresses, international ones too.

Rule: looked for around each `@`, a bounded way to both sides. What is a login and no letter can go there is left alone:
`git@…`, the user of a URL, `user@host:path` of scp, the address behind `ssh`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memd.ingest.redaction.spans import Span, apart

_LOCAL_MAX = 64
_LINE_LOOKED_AT = 200
_AT = re.compile(r"(?<=[\w+-])(?:@|%40|&#64;|[ ]?[\[({][ ]?(?:at|AT|@)[ ]?[\])}][ ]?)(?=[^\W_])")
_EAST = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"  # no space parts a name from the words before it
# Read backwards. A run of one script: 请写信给anna@… is anna, and 用户@… all of it.
_LOCAL = re.compile(rf"(?:[{_EAST}]++|(?:[^\W{_EAST}]|[!#$&'*+/=?^`{{|}}~.-])++)")
_IN_FRONT = re.compile(r"[=/`{|?&]|(?<![^\W_])'")
_AROUND_LOCAL = "!#$&'*/=?^`{|}~.-"
_DOMAIN = re.compile(
    r"(?:[^\W_](?:[^\W_]|-){0,62}+(?:\.|[ ]?[\[({][ ]?(?:dot|DOT|\.)[ ]?[\])}][ ]?)){1,8}"
    r"(?:xn--[a-z0-9-]{2,59}|(?P<top>[A-Za-z]{2,24})|[^\W\d_A-Za-z]{2,24})(?![A-Za-z0-9_@-])"
)
_NO_TOPS = frozenset(
    {
        *("png", "jpg", "jpeg", "gif", "svg", "webp", "avif", "ico", "js", "mjs", "ts", "tsx", "jsx", "css", "scss"),
        *("map", "json", "html", "htm", "vue", "yaml", "yml", "toml", "txt"),
        *("service", "timer", "socket", "slice", "scope", "target", "mount", "automount", "device", "path", "swap"),
    }
)
"""Ends of names of files (logo@2x.png) and of units (getty@tty1.service)."""
_SERVICES = frozenset(("git", "hg", "svn", "gitlab", "gitea", "aur"))
_CODE_BEHIND = re.compile(r"\(|:(?:[/~.]|\d{1,5}/|[\w.-]{1,80}/|[\w-]{1,80}\.git\b)")
_COMMAND_BEFORE = re.compile(
    r"(?<![\w-])(?:ssh|sftp|mosh|sshfs|autossh|ssh-copy-id)"
    r"(?:[ \t]++-{1,2}[^\s-]\S*+(?:[ \t]++(?!-)[^\s@]++)?+)*+[ \t]++[\"']?\Z"
)


def mail_addresses(text: str) -> Iterator[Span]:
    """The addresses, without `mailto:` and angle brackets."""
    yield from apart(_found(text))


def _found(text: str) -> Iterator[Span]:
    last = 0
    for at in _AT.finditer(text):
        if at.start() < last:
            continue
        start = _local_start(text, at.start())
        domain = _DOMAIN.match(text, at.end())
        if start == at.start() or domain is None or (domain["top"] or "").lower() in _NO_TOPS:
            continue
        if not _is_login(text, start, at.start(), domain.end()):
            last = domain.end()
            yield start, last


def _local_start(text: str, at: int) -> int:
    """Where the part before the @ begins; `at` if there is none."""
    found = _LOCAL.match(text[max(0, at - _LOCAL_MAX) : at][::-1])
    if found is None:
        return at
    local = text[at - found.end() : at]
    # Of a quotation, a link or an assignment these only stand in front of it: 'anna@…', x=anna@…, a/b/anna@…
    local = _IN_FRONT.split(local)[-1]
    return at - len(local.lstrip(_AROUND_LOCAL))


def _is_login(text: str, start: int, at: int, end: int) -> bool:
    if text[start:at].lower() in _SERVICES or _CODE_BEHIND.match(text, end):
        return True
    before = text[max(0, start - _LINE_LOOKED_AT) : start]
    scheme = before.rfind("://")
    if scheme >= 0 and not re.search(r"[\s/?#]", before[scheme + 3 :]):
        return True
    return bool(_COMMAND_BEFORE.search(before[before.rfind("\n") + 1 :]))
