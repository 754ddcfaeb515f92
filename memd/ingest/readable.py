"""Topics that are only read, as whoever wants to read sees them.

Rule: nothing is written for it.
"""

from __future__ import annotations

from typing import NamedTuple

from memd.ingest.topic import Topic


class Readable(NamedTuple):
    """Topics to be read."""

    topics: tuple[Topic, ...]
    is_fresh: bool
    """They are all there, with all that was acknowledged before they were asked for."""
