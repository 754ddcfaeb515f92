"""The list of the APIs with memory.

Rule: an API is added with a module of its own and a line here; routes, metrics and the log follow from it.
"""

from __future__ import annotations

from memd.wire.anthropic import ANTHROPIC
from memd.wire.api import Api
from memd.wire.chat import CHAT
from memd.wire.ollama import OLLAMA
from memd.wire.responses import RESPONSES

APIS: tuple[Api, ...] = (CHAT, RESPONSES, ANTHROPIC, OLLAMA)
"""No `path` ends like another, and each `name` is unique."""


def api_of(path: str) -> Api | None:
    """Return the API to which `path` (without its query) belongs, where a POST to it has memory; None if there is none.
    Slashes at its end do not count: HTTP libraries add one where a base URL and a path are joined."""
    return next((api for api in APIS if path.rstrip("/").endswith(api.path)), None)
