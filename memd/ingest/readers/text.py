"""Documents, the choice of a reader, and the readers of text: Markdown by headings, rows of CSV, other text whole.

Rule: pure. A reader returns `GivenSection`s in order, or raises `BadDocument` with the reason. The format follows from
the file's suffix (`assets/formats.toml`). A file that is not valid text is refused with the reason; nothing is guessed
or left out.

Tables of all formats become text here: each row is a paragraph that names its columns, so that a question about a row
finds it. The first suitable row has the column names; rows above it are text.

    Product: Lamp; Price: 20; Stock: 4
"""

from __future__ import annotations

import csv
import itertools
import mimetypes
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from memd.assets import words_of
from memd.errors import BadDocument
from memd.messages import with_line_feeds

SOURCE_CHARACTERS_MAX = 1_000
HEADINGS_MAX = 16


class GivenSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a document that is cut separately: no chunk crosses sections."""

    heading: Annotated[tuple[str, ...], Meta(max_length=HEADINGS_MAX)] = ()
    """Headings above it, outermost first."""
    text: str = ""
    page: int | None = None
    sheet: str | None = None
    said_at: Annotated[int, Meta(ge=0)] | None = None
    """Of a mail, its date in microseconds since the epoch."""


class GivenDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a file."""

    source: Annotated[str, Meta(min_length=1, max_length=SOURCE_CHARACTERS_MAX)]
    """The root's name, and the path below the root."""
    hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the file."""
    sections: tuple[GivenSection, ...]
    root: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")] = ""
    """Distinguishes folders of one name: the first 16 digits of the BLAKE2b of the root's resolved path."""
    renamed_from: str | None = None
    """Its former source, which no longer exists."""


class GivenFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bytes of a file, base64 in JSON."""

    name: Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[^/\x00]+$")]
    content: bytes


OF_TEXT = "text", "markdown", "rows"
"""The readers in this module; the first two need no child process."""


class FileFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How files with some suffixes are read; the table describes the fields."""

    suffixes: str
    reader: str = ""
    bytes_max: int = 0
    needs: str = ""
    instead: str = ""

    @property
    def is_apart(self) -> bool:
        """True if they are read in a child process."""
        return self.reader not in OF_TEXT[:2]


FORMATS = {
    suffix: one
    for one in msgspec.convert(words_of("formats")["formats"], list[FileFormat])
    for suffix in one.suffixes.split()
}


def is_readable(name: str) -> bool:
    """Return True if a file of this name in a folder is read, or refused with a reason. One without a suffix is read if
    it is text."""
    return suffix_of(name) in FORMATS or not suffix_of(name)


def format_of(name: str) -> FileFormat:
    """Return how a file of this name is read; unknown suffixes are read as text."""
    return FORMATS.get(suffix_of(name), FORMATS[".txt"])


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name in lower case, with its dot; empty if it has none."""
    stem, dot, suffix = name.lower().rpartition(".")
    return f".{suffix}" if stem and dot else ""


READ = "memd reads text, web pages, PDF, EPUB, mail and Office documents"
UTF_16 = b"\xff\xfe", b"\xfe\xff"
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
HEADING_CHARACTERS_MAX = 200
LINE_BYTES_MAX = 1_000_000
"""Limit of a line of CSV or TSV."""
SAMPLE_CHARACTERS = 20_000
DELIMITERS = ",;\t|"
_LINES = re.compile(r"(?<=\n)")
"""Begins of lines; `str.splitlines` would also split at form feeds and U+2028."""
_FRONT_MATTER = re.compile(r"---[ \t]*\n([\w-]+[ \t]*:(?:(?!---)[^\n]*\n){1,200})---[ \t]*(?:\n|\Z)")
"""Names and values before a file's text, as written by site generators, Obsidian and Claude Code."""
_NO_TITLE = re.compile(
    r"(?:microsoft|libreoffice|openoffice)\b.*|(?:untitled|unbenannt|document|presentation|slide|word document|"
    r"powerpoint presentation|pptx presentation|\(?anonymous\)?)[ \d]*|.*\.[a-z]{2,5}",
    re.IGNORECASE,
)
"""Titles that programs fill with a file's name or their own."""


def sections_of(name: str, content: bytes) -> tuple[GivenSection, ...]:
    """Return the sections of a file, in order; none if it has no text. Raises BadDocument: it is no valid text."""
    reader = format_of(name).reader
    if reader == "rows":
        for number, line in enumerate(content.split(b"\n"), 1):
            if len(line) > LINE_BYTES_MAX:
                raise BadDocument(f"its line {number:,} has more than {LINE_BYTES_MAX:,} bytes")
            if b"\0" in line:  # as in the UTF-16 of spreadsheets
                raise BadDocument(f"it is no UTF-8 text (line {number:,}): save it as UTF-8")
    try:
        if b"\0" in content:
            raise BadDocument(_no_text(name, content, content.index(b"\0")))
        text = with_line_feeds(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadDocument(_no_text(name, content, error.start)) from None
    if reader == "markdown":
        sections = _by_headings(text)
    else:
        sections = [GivenSection(text=_rows(text, suffix_of(name)) if reader == "rows" else text.strip("\n"))]
    return tuple(with_text(sections))


def other_kind(name: str) -> str:
    """Return the message that a file of this name is of an unreadable kind; empty if it may be text."""
    suffix = suffix_of(name)
    kind = mimetypes.encodings_map.get(suffix) or mimetypes.types_map.get(suffix, "text/")
    return "" if suffix in FORMATS or kind.startswith("text/") else f"it is no text but {kind}; {READ}"


def _no_text(name: str, content: bytes, byte: int) -> str:
    if kind := other_kind(name):
        return kind
    if not content.startswith(UTF_16) and _CONTROL.search(content):
        no_text = "it is no text: it has bytes of something else in it"
        return no_text if suffix_of(name) in FORMATS else f"{no_text}; {READ}"
    return f"it is no UTF-8 text (byte {byte:,}): save it as UTF-8"


def _rows(text: str, suffix: str) -> str:
    """Return the text of CSV or TSV, parsed by Python's `csv`."""
    try:
        try:
            dialect: type[csv.Dialect] = csv.Sniffer().sniff(text[:SAMPLE_CHARACTERS], DELIMITERS)
            dialect.doublequote = True  # by RFC 4180; the sniffer sets False if its sample has no quote in quotes
        except csv.Error:
            dialect = csv.excel_tab if suffix == ".tsv" else csv.excel
        return table_text(csv.reader(_LINES.split(text), dialect))
    except csv.Error as error:
        raise BadDocument(f"it is no CSV that can be read ({error})") from None


def _by_headings(text: str) -> list[GivenSection]:
    """Return the texts between headings, each with the headings above it."""
    from markdown_it import MarkdownIt  # it takes long to import, and most daemons read no Markdown

    sections: list[GivenSection] = []
    if front := _FRONT_MATTER.match(text):  # Markdown would take its last line for a heading
        text = text[front.end() :]
    lines = _LINES.split(text)
    above = Headings()
    begun = 0
    tokens = MarkdownIt("commonmark").disable("inline").parse(text)  # emphasis and links take quadratic time
    for opening, inline in itertools.pairwise(tokens):
        if opening.type != "heading_open" or opening.level or opening.map is None:
            continue
        start, end = opening.map
        sections.append(above.section("".join(lines[begun:start]).strip("\n")))
        above.enter(int(opening.tag[1:]), inline.content)
        begun = end
    sections.append(above.section("".join(lines[begun:]).strip("\n")))
    if front:  # it has the date and subject of the text
        sections = [*with_text(sections)] or [GivenSection(above.path)]
        sections[0] = GivenSection(sections[0].heading, joined((front[1], sections[0].text)))
    return sections


def with_text(sections: Iterable[GivenSection]) -> Iterator[GivenSection]:
    """Yield the sections with text; a heading with nothing below it counts as text."""
    before = GivenSection()
    for section, following in itertools.pairwise(itertools.chain(sections, [before])):
        *above, last = section.heading or ("",)
        depth = len(section.heading)
        is_known = before.heading[:depth] == section.heading
        goes_on = following.heading[:depth] == section.heading and (following.text or following.heading[depth:])
        if section.text.strip():
            yield section
        elif last and not is_known and not goes_on:
            yield msgspec.structs.replace(section, heading=tuple(above), text=last)
        before = section


def joined(blocks: Iterable[str]) -> str:
    """Return blocks of text with an empty line between them, items of a list without one."""
    text = ""
    for block in filter(None, (block.strip() for block in blocks)):
        is_next_item = block.startswith("- ") and text.rpartition("\n")[2].startswith("- ")
        text += ("\n" if is_next_item else "\n\n" if text else "") + block
    return text


class Headings:
    """The headings above the current position of a document that is read from its beginning.

    `title`: the document's own title, if any.
    """

    def __init__(self, title: str | None = "") -> None:
        self._open: list[tuple[int, str]] = []
        self.enter(-1, title_of(title))

    @property
    def path(self) -> tuple[str, ...]:
        """Headings, outermost first."""
        return tuple(heading for _, heading in self._open if heading)

    def section(self, text: str, page: int | None = None) -> GivenSection:
        """Return the text here with its headings; without text, they are included only directly below one."""
        level, heading = self._open[-1]
        return GivenSection(self.path if text or (level >= 0 and heading) else (), text, page)

    def enter(self, level: int, heading: str) -> None:
        """Enter a heading, which ends those of its own level and of deeper ones."""
        named = " ".join(heading.split())[:HEADING_CHARACTERS_MAX]
        self._open = [*(one for one in self._open if one[0] < level), (level, named)]


def title_of(said: str | None) -> str:
    """Return a document's own title on one line; empty if there is none."""
    title = " ".join((said or "").split())
    return "" if _NO_TITLE.fullmatch(title) else title


HEADER_ROWS_MAX = 20
"""Rows that are searched for the one with the column names."""
COLUMN_CHARACTERS_MAX = 80
CELL_CHARACTERS_MAX = 20_000


def table_text(rows: Iterable[Sequence[str]]) -> str:
    """Return the text of a table's rows; white space in cells is normalised."""
    shown = (cells for row in rows if any(cells := _normal(row)))
    first = list(itertools.islice(shown, HEADER_ROWS_MAX + 1))
    named = [_names_columns(cells, first[at + 1 :]) for at, cells in enumerate(first)]
    header = next((at for at, cells in enumerate(first) if named[at] or any(map(_is_figure, cells))), -1)
    every = enumerate(itertools.chain(first, shown))
    return _text_of((cells, [at == header and named[at]] * len(cells)) for at, cells in every)


def marked_table_text(rows: Sequence[Sequence[str]], names: Sequence[Sequence[bool]]) -> str:
    """Return the text of a table that may mark cells as names: of the columns in a row of nothing else, otherwise of
    the next cell. If none is marked, it is as in `table_text`, but of two columns the first row is not their names."""
    if any(len(row) > 2 for row in rows) and not any(map(any, names)):
        return table_text(rows)
    every = zip(map(_normal, rows), names, strict=True)
    return _text_of((row, [not one or mark for one, mark in zip(row, marks, strict=True)]) for row, marks in every)


def _normal(row: Sequence[str]) -> list[str]:
    return [" ".join(cell[:CELL_CHARACTERS_MAX].split()) for cell in row]


def _text_of(rows: Iterable[tuple[Sequence[str], Sequence[bool]]]) -> str:
    """Return the text of rows of cells, each with which of them are names, or empty. A last row of names is text."""
    said, columns = list[str](), list[str]()
    shown = (row for row in rows if any(row[0]))
    for (cells, names), (_, below) in itertools.pairwise(itertools.chain(shown, [((), ())])):
        if all(names) and len({*cells, ""}) > 2 and not all(below):
            columns = [cell[:COLUMN_CHARACTERS_MAX] for cell in cells]
        else:
            said.append(_named([] if all(names) else columns, cells, names))
    return "\n\n".join(said)


_PERIOD = re.compile(r"(?:\d\d?[./-]){0,2}(?:19|20)\d\d|(?:19|20)\d\d(?:[./-]\d\d?){1,2}")
"""A year, a month or a day, as columns are named."""


def _names_columns(cells: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return True if a row may name the columns: at least two texts, and no figures but periods above other values."""
    figures = [at for at, cell in enumerate(cells) if _is_figure(cell)]
    values = [row[at] for row in below for at in figures if row[at : at + 1] not in ([], [""])]
    others = sum(_PERIOD.fullmatch(one) is None for one in values)
    is_named = not figures or (all(_PERIOD.fullmatch(cells[at]) for at in figures) and 2 * others > len(values))
    return is_named and len(set(filter(None, cells))) >= 2


def _is_figure(cell: str) -> bool:
    """Return True if a cell is a figure (an amount, a date, a percentage), which its column names."""
    return any(one.isdigit() for one in cell) and not any(one.isalpha() for one in cell)


def _named(columns: Sequence[str], cells: Sequence[str], names: Sequence[bool]) -> str:
    said, is_named = list[str](), False
    for position, (cell, is_name) in enumerate(zip(cells, names, strict=True)):
        column = columns[position] if position < len(columns) else ""
        if cell and is_named and not is_name:
            said[-1] = f"{said[-1].removesuffix(':')}: {cell}"
        elif cell:
            said.append(f"{column}: {cell}" if column else cell)
        is_named = is_name and bool(cell) and not columns
    return "; ".join(said)
