"""The settings of the store.

Rule: a topic in use stays in memory however large it is.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The open topics that are kept in memory."""

    topic_idle_seconds: Annotated[float, Meta(ge=0.01, le=3_600)] = 600.0
    """A topic without a request for this long is closed; its next request reads it from disk."""
    memory_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] = 4 << 30
    """Above this the least recently used topics are closed sooner; never one in use."""
