"""The text of a file, in sections: Markdown by its headings, other text as a whole.

Rule: pure. A file that cannot be read as text is refused with the reason; nothing is guessed or left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.formats import MARKDOWN, suffix_of

HEADING_CHARACTERS_MAX = 200
_LINES = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")
"""Where a line of Markdown begins; `str.splitlines` also ends one at a form feed or U+2028."""
_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n([\w-]+[ \t]*:(?:(?!---)[^\n]*\n){1,200})---[ \t]*(?:\r?\n|\Z)")
"""Names and values in front of a file, as site generators, Obsidian and Claude Code write them."""
_NO_TITLE = re.compile(
    r"(?:microsoft|libreoffice|openoffice)\b.*|(?:untitled|unbenannt|document|presentation|slide|word document|"
    r"powerpoint presentation|pptx presentation|\(?anonymous\)?)[ \d]*|.*\.[a-z]{2,5}",
    re.IGNORECASE,
)
"""Programs put the name of a file where a document's title belongs, or their own."""


def sections_of(name: str, content: bytes) -> tuple[GivenSection, ...]:
    """Return the sections of a file, in order; none if it says nothing.

    Raises:
        BadDocument: it is no text.
    """
    if b"\0" in content:
        raise BadDocument("it is no text: it has bytes of something else in it")
    text = decoded(content)
    sections = _by_headings(text) if suffix_of(name) in MARKDOWN else [GivenSection(text=text.strip("\r\n"))]
    return tuple(section for section in sections if section.text.strip())


def decoded(content: bytes) -> str:
    """Return UTF-8 text without its mark.

    Raises:
        BadDocument: it is none.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadDocument(f"it is no UTF-8 text (byte {error.start:,}): save it as UTF-8") from None


def _by_headings(text: str) -> list[GivenSection]:
    """The text between headings, each below the headings that it stands under; a heading itself is no text."""
    from markdown_it import MarkdownIt  # it takes long to import, and most daemons read no Markdown

    sections: list[GivenSection] = []
    if front := _FRONT_MATTER.match(text):  # Markdown would take its last line for a heading
        sections, text = [GivenSection((), front[1].strip())], text[front.end() :]
    lines = _LINES.split(text)
    above = Headings()
    begun = 0
    tokens = MarkdownIt("commonmark").disable("inline").parse(text)  # emphasis and links take time by their square
    for opening, inline in itertools.pairwise(tokens):
        if opening.type != "heading_open" or opening.level or opening.map is None:
            continue
        start, end = opening.map
        sections.append(GivenSection(above.path, "".join(lines[begun:start]).strip("\n")))
        above.enter(int(opening.tag[1:]), inline.content)
        begun = end
    return [*sections, GivenSection(above.path, "".join(lines[begun:]).strip("\n"))]


def joined(blocks: Iterable[str]) -> str:
    """Return blocks of text with an empty line between them, items of a list without one."""
    text = ""
    for block in filter(None, (block.strip() for block in blocks)):
        is_next_item = block.startswith("- ") and text.rpartition("\n")[2].startswith("- ")
        text += ("\n" if is_next_item else "\n\n" if text else "") + block
    return text


class Headings:
    """The headings that a place of a document stands under, while it is read from its beginning.

    `title`: the one that the document says it has, which may be none.
    """

    def __init__(self, title: str | None = "") -> None:
        self._open: list[tuple[int, str]] = []
        self.enter(-1, title_of(title))

    @property
    def path(self) -> tuple[str, ...]:
        """The outermost first."""
        return tuple(heading for _, heading in self._open if heading)

    def enter(self, level: int, heading: str) -> None:
        """Go on below a heading; it ends those of its own level and of deeper ones."""
        named = " ".join(heading.split())[:HEADING_CHARACTERS_MAX]
        self._open = [*(one for one in self._open if one[0] < level), (level, named)]


def title_of(said: str | None) -> str:
    """Return a document's own title on one line; empty if there is none."""
    title = " ".join((said or "").split())
    return "" if _NO_TITLE.fullmatch(title) else title
