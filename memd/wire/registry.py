"""The one list of the APIs in which memory has a part.

Rule: adding an API means a folder of its own and a line here; routes, metrics and the log take it from here.
"""

from __future__ import annotations

from memd.wire.anthropic.api import ANTHROPIC
from memd.wire.api import Api
from memd.wire.chat.api import CHAT
from memd.wire.responses.api import RESPONSES

APIS: tuple[Api, ...] = (CHAT, RESPONSES, ANTHROPIC)
"""No path of one ends like another's, and each has a name of its own."""


def api_of(method: str, path: str) -> Api | None:
    """The API that a request to `path` (without its query) came through; None if memory has no part in it."""
    return next((api for api in APIS if method == "POST" and path.endswith(api.path)), None)
