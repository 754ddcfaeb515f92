"""The page on which a person allows a program to use the memory, and those that say how it went on.

Rule: pure: whole pages without a script, in memd's own style. Every value is a stranger's until it is escaped. A page
never tells whether a token is right without its being shown, and repeats none.
"""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from urllib.parse import urlsplit

from memd.admin.oauth.protocol import AUTHORIZE, SCOPES, Permission, told_host
from memd.assets import words_of
from memd.settings.url import is_this_machine

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_WORDS: dict[str, str] = words_of("consent")


def asking(permission: Permission, query: str, *, rights: Collection[str], topics: str = "", problem: str = "") -> str:
    """Return the page that asks a person.

    Args:
        query: of the request for permission; it comes back with the answer.
        rights: those that are ticked.
        topics: as the person wrote them.
        problem: why the answer before could not be taken.
    """
    uri, name = permission.redirect_uri, escape(permission.client.name)
    host = urlsplit(uri).hostname or ""
    ticks = (
        _WORDS["right"].format(right=right, words=words, checked=" checked" if right in rights else "")
        for right, words in SCOPES.items()
        if right in permission.scopes
    )
    body = _WORDS["form"].format(
        name=name,
        host=escape(told_host(uri)),
        uri=escape(uri),
        warning=_WORDS["loopback"].format(name=name) if is_this_machine(host) else "",
        problem=f'<p class="problem" role="alert">{escape(problem)}</p>\n' if problem else "",
        action=AUTHORIZE,
        query=escape(query),
        rights="".join(ticks).rstrip(),
        topics=escape(topics),
    )
    return _page("May this program use your memory?", body)


def going_back(permission: Permission, url: str, *, is_allowed: bool) -> str:
    """Return the page that leads the browser back to the program with the answer.

    A page and no redirection: browsers hold what follows a form to the page's `form-action`, also where the program
    leads on to, and an address that opens a program would leave the form standing.
    """
    title = "Allowed" if is_allowed else "Refused"
    name = escape(permission.client.name)
    body = f'<p>{name} is told so now. If nothing happens: <a href="{escape(url)}">back to {name}</a>.</p>'
    return _page(title, f"{body}\n<p>You can close this page then.</p>", refresh=url)


def refusing(problem: str, back: str = "") -> str:
    """Return the page that says why a request cannot be answered; `back`: where the program can be told so."""
    link = f'\n<p><a href="{escape(back)}">Back to the program</a></p>' if back else ""
    return _page("This request cannot be answered", f'<p class="problem">{escape(problem)}</p>{link}')


def _page(title: str, body: str, refresh: str = "") -> str:
    leading = f'<meta http-equiv="refresh" content="0;url={escape(refresh)}">\n' if refresh else ""
    return _WORDS["page"].format(title=escape(title), body=body, refresh=leading)
