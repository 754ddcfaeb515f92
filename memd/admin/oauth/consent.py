"""The page on which a person allows a program to use the memory, and those that say how it went on.

Rule: pure: whole pages without a script, in memd's own style. Every value is a stranger's until it is escaped. A page
never tells whether a token is right without its being shown, and repeats none.
"""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from urllib.parse import urlsplit

from memd.admin.oauth.protocol import AUTHORIZE, SCOPES, Permission, told_host
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
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{refresh}<title>{title} – memd</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/memd/page.css">
</head>
<body>
<header><div class="bar"><span class="brand">memd</span></div></header>
<main class="consent">
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""
_FORM = """<p><b>{name}</b> asks for access to what memd remembers. It calls itself that; nobody checked it.</p>
<dl class="facts">
<div><dt>The answer goes to</dt><dd><b>{host}</b>, at <code>{uri}</code></dd></div>
</dl>
{warning}{problem}<form method="post" action="{action}">
<input type="hidden" name="request" value="{query}">
<fieldset>
<legend>It may</legend>
{rights}
</fieldset>
<label>Only in these topics
<input name="topics" value="{topics}" placeholder="all topics of the token" autocomplete="off" autocapitalize="none"
spellcheck="false" aria-describedby="topics-hint"></label>
<p class="hint" id="topics-hint">Names with spaces between them; <code>*</code> stands for any characters. Empty: all
that your token may use.</p>
<label>Your memd token
<input type="password" name="token" autocomplete="current-password" required aria-describedby="token-hint"></label>
<p class="hint" id="token-hint">The setting <code>auth.token</code>, or what <code>memd token add</code> printed.
{name} gets none of it, but a token of its own: until you revoke it or yours (<code>memd token revoke</code>), or until
it is not used for 30 days.</p>
<p class="buttons"><button class="main" name="answer" value="allow">Allow</button>
<button name="answer" value="refuse" formnovalidate>Refuse</button></p>
</form>
"""
_RIGHT = """<label><input type="checkbox" name="right" value="{right}"{checked}>
<span><b>{right}</b>: {words}</span></label>
"""
_LOOPBACK = (
    '<p class="remark">Any program on this computer can ask like this. Go on only if you have just started it '
    "yourself, from {name}.</p>\n"
)


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
        _RIGHT.format(right=right, words=words, checked=" checked" if right in rights else "")
        for right, words in SCOPES.items()
        if right in permission.scopes
    )
    body = _FORM.format(
        name=name,
        host=escape(told_host(uri)),
        uri=escape(uri),
        warning=_LOOPBACK.format(name=name) if is_this_machine(host) else "",
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
    return _PAGE.format(title=escape(title), body=body, refresh=leading)
