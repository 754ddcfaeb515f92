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


def api_of(method: str, path: str) -> Api | None:
    """Return the API of a request to `path` (without its query); None if it is a request without memory. Slashes at its
    end do not count: HTTP libraries add one where a base URL and a path are joined."""
    path = path.rstrip("/")
    return next((api for api in APIS if method == "POST" and path.endswith(api.path)), None)
