"""Long Markdown, in the process with limits.

Rule: it is read as short Markdown is.
"""

from __future__ import annotations

from pathlib import Path

from memd.documents import GivenSection
from memd.ingest.readers.text import sections_of


def sections(path: Path) -> tuple[GivenSection, ...]:
    """Return the sections of a file, whatever it is called; see `sections_of`."""
    return sections_of("long.md", path.read_bytes())
