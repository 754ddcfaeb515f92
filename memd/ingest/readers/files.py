"""Reads one file after the other into sections: the face of this folder.

Rule: a file is refused for its kind or size before any of it is read.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.child import ReadRequest
from memd.ingest.readers.formats import EXTRA, MARKDOWN, TEXT_FORMAT, UNREADABLE, FileFormat, format_of, suffix_of
from memd.ingest.readers.process import ReadingProcess
from memd.ingest.readers.text import sections_of

MARKDOWN_HERE_BYTES_MAX = 32_000
"""Longer Markdown is read in the process: there is some that takes time by the square of its length (200 KB of quotes
forty seconds)."""
READ_SECONDS_MAX = 120
"""For one file: the largest that may be read takes half of that, on a slow machine."""


class FileReader:
    """Reads files; long Markdown and what is no text in a process of its own. Use it in one thread at a time, and close
    it."""

    def __init__(self, process: ReadingProcess | None = None, seconds_max: int = READ_SECONDS_MAX) -> None:
        self._process = process or ReadingProcess()
        self._seconds_max = seconds_max

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; it is started again when it is needed."""
        self._process.close()

    def sections(self, path: Path, name: str = "") -> tuple[GivenSection, ...]:
        """Return the sections of a file, in order; none if it says nothing.

        `name`: the file's, if a link to it has another one.

        Raises:
            BadDocument: with the reason why it is not read.
            OSError: it cannot be opened.
        """
        name, size = name or path.name, path.stat().st_size
        way = checked(name, size)
        if way is TEXT_FORMAT and not _is_long_markdown(name, size):
            return sections_of(name, path.read_bytes())
        answer = self._process.ask(ReadRequest(os.fsencode(path.absolute()), way.reader, self._seconds_max))
        if answer.reason:
            raise BadDocument(answer.reason)
        return answer.sections

    def sections_of(self, name: str, content: bytes) -> tuple[GivenSection, ...]:
        """Return the sections of a file of this name that is in memory; see `sections`."""
        is_text = format_of(name) is TEXT_FORMAT and suffix_of(name) not in UNREADABLE
        if is_text and not _is_long_markdown(name, len(content)):
            return sections_of(name, content)
        with tempfile.NamedTemporaryFile(prefix="memd-", suffix=suffix_of(name)) as file:
            file.write(content)
            file.flush()
            return self.sections(Path(file.name))


def _is_long_markdown(name: str, size: int) -> bool:
    return suffix_of(name) in MARKDOWN and size > MARKDOWN_HERE_BYTES_MAX


def checked(name: str, size: int) -> FileFormat:
    """Return how a file of this name and this many bytes is read.

    Raises:
        BadDocument: with the reason why it is not.
    """
    instead = UNREADABLE.get(suffix_of(name))
    if instead is not None:
        raise BadDocument(f"files of this kind cannot be read: {instead}")
    way = format_of(name)
    if size > way.bytes_max:
        raise BadDocument(f"it has {size:,} bytes, and a file of this kind may have {way.bytes_max:,}")
    if size == 0 and way is not TEXT_FORMAT:
        raise BadDocument("it is empty")
    if way.needs and importlib.util.find_spec(way.needs) is None:
        raise BadDocument(f"reading it needs more libraries: {EXTRA}")
    return way
