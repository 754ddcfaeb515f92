"""The text of a file, in sections: Markdown by its headings, other text as a whole.

Rule: pure. A file that cannot be read as text is refused with the reason; nothing is guessed or left out.
"""

from __future__ import annotations

import itertools
import re

from markdown_it import MarkdownIt

from memd.documents import GivenSection
from memd.errors import BadDocument

FILE_BYTES_MAX = 2_000_000
MARKDOWN = frozenset({".md", ".markdown", ".mdown", ".mkd"})
TEXT = frozenset(
    {
        *(".txt", ".text", ".log", ".rst", ".adoc", ".org", ".tex", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml"),
        *(".toml", ".ini", ".cfg", ".conf", ".xml", ".html", ".htm", ".css", ".scss", ".py", ".pyi", ".js", ".mjs"),
        *(".cjs", ".ts", ".tsx", ".jsx", ".vue", ".svelte", ".java", ".kt", ".kts", ".scala", ".groovy", ".go", ".rs"),
        *(".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".swift", ".m", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs"),
        *(".ml", ".ex", ".exs", ".erl", ".clj", ".sh", ".bash", ".zsh", ".fish", ".ps1", ".bat", ".sql", ".graphql"),
        *(".proto", ".tf", ".gradle", ".cmake", ".mk"),
    }
)
NAMES = frozenset({"readme", "license", "changelog", "makefile", "dockerfile", "notes", "todo", "contributing"})
"""Files without a suffix that are text."""
HEADING_CHARACTERS_MAX = 200
_LINES = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")
"""Where a line of Markdown begins; `str.splitlines` also ends one at a form feed or U+2028."""


def is_readable(name: str) -> bool:
    """Whether a file of this name is read where a whole folder is added."""
    stem, dot, suffix = name.lower().rpartition(".")
    return f".{suffix}" in MARKDOWN | TEXT if stem and dot else name.lower() in NAMES


def sections_of(name: str, content: bytes) -> tuple[GivenSection, ...]:
    """Return the sections of a file, in order; none if it says nothing.

    Raises:
        BadDocument: it is no text, or too large.
    """
    if len(content) > FILE_BYTES_MAX:
        raise BadDocument(f"it has {len(content):,} bytes, and a file may have {FILE_BYTES_MAX:,}")
    if b"\0" in content:
        raise BadDocument("it is no text: it has bytes of something else in it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadDocument(f"it is no UTF-8 text (byte {error.start:,})") from None
    is_markdown = "." + name.lower().rpartition(".")[2] in MARKDOWN
    sections = _by_headings(text) if is_markdown else [GivenSection(text=text)]
    return tuple(section for section in sections if section.text.strip())


def _by_headings(text: str) -> list[GivenSection]:
    """The text between headings, each below the headings that it stands under; a heading itself is no text."""
    lines = _LINES.split(text)
    sections: list[GivenSection] = []
    path: list[tuple[int, str]] = []
    begun = 0
    tokens = MarkdownIt("commonmark").disable("inline").parse(text)  # emphasis and links take time by their square
    for opening, inline in itertools.pairwise(tokens):
        if opening.type != "heading_open" or opening.level or opening.map is None:
            continue
        start, end = opening.map
        sections.append(GivenSection(_words(path), "".join(lines[begun:start]).strip("\n")))
        depth = int(opening.tag[1:])
        path = [*(one for one in path if one[0] < depth), (depth, " ".join(inline.content.split()))]
        begun = end
    return [*sections, GivenSection(_words(path), "".join(lines[begun:]).strip("\n"))]


def _words(path: list[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(heading[:HEADING_CHARACTERS_MAX] for _, heading in path if heading)
