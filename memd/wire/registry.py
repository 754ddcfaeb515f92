"""The list of the APIs with memory.

Rule: a new API needs a module and a line here; routes, metrics and the log follow from it.
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
    """Return the API of a request path (without query), or None. Trailing slashes are ignored, because HTTP libraries
    add one when joining a base URL and a path."""
    return next((api for api in APIS if path.rstrip("/").endswith(api.path)), None)
