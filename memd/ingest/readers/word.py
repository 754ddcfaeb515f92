"""DOCX, opened by python-docx: paragraphs below the headings of the styles that Word numbers, tables row by row.

Rule: what a reader of the printed page sees: with insertions, without deletions, comments, headers and footers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docx
from docx.opc.constants import RELATIONSHIP_TYPE
from docx.oxml.ns import qn
from docx.styles.style import BaseStyle
from lxml import etree

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.archive import archive
from memd.ingest.readers.tables import table_text
from memd.ingest.readers.text import Headings, joined

PARAGRAPH, TABLE, ROW, CELL = qn("w:p"), qn("w:tbl"), qn("w:tr"), qn("w:tc")
NUMBERED, STYLE, VALUE = qn("w:numPr"), qn("w:pStyle"), qn("w:val")
MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
TEXTS, SIGN = {qn("w:t"), f"{MATH}t"}, f"{MATH}chr"
AROUND = {
    PARAGRAPH: ("\n", "\n"),
    **dict.fromkeys((qn("w:br"), qn("w:cr")), ("\n", "")),
    qn("w:tab"): ("\t", ""),
    qn("w:noBreakHyphen"): ("-", ""),
    f"{MATH}num": ("(", ")"),
    f"{MATH}den": ("/(", ")"),
    f"{MATH}sup": ("^(", ")"),
    f"{MATH}sub": ("_(", ")"),
    f"{MATH}rad": ("√(", ")"),
    f"{MATH}d": ("(", ")"),
}
"""Elements → what stands in front of and behind their text; formulas on one line, as in `A=π⋅r^(2)`."""
UNSEEN = {
    *(qn("w:del"), qn("w:moveFrom"), qn("w:pPr"), qn("w:rPr"), qn("w:instrText")),
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",  # the same once more for older programs
}
_LEVEL = re.compile(r"heading (\d)", re.IGNORECASE)


def sections(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of a document.

    Raises:
        BadDocument: it is none, is encrypted, has macros or unpacks to too much.
    """
    with archive(path, "DOCX"):
        document = docx.Document(str(path))
    if document.element.body is None:
        raise BadDocument("it is no DOCX that can be read (it has no body)")
    levels = {style.style_id: level for style in document.styles if (level := _level(style)) is not None}
    above = Headings(document.core_properties.title)
    said: list[str] = []
    for block in _blocks(document.element.body):
        level = None if block.tag == TABLE else levels.get(_style(block))
        if level is None:
            said.append(table_text(_rows(block)) if block.tag == TABLE else _paragraph(block))
            continue
        yield GivenSection(above.path, joined(said))
        said = []
        above.enter(level, _text(block))
    yield GivenSection(above.path, joined(said))
    for part in document.part.rels.values():
        if part.reltype in (RELATIONSHIP_TYPE.FOOTNOTES, RELATIONSHIP_TYPE.ENDNOTES) and not part.is_external:
            notes = etree.fromstring(part.target_part.blob, etree.XMLParser(resolve_entities=False, no_network=True))
            yield GivenSection(above.path[:1], joined([_text(one) for one in notes.iter(PARAGRAPH)]))


def _level(style: BaseStyle, depth: int = 0) -> int | None:
    """The level of the headings of a style: of its name, or of the one that it is based on."""
    name = style.name or ""
    found = _LEVEL.fullmatch(name)
    if name.lower() == "title" or found:
        return int(found[1]) if found else 0
    base = getattr(style, "base_style", None)
    return _level(base, depth + 1) if base is not None and depth < 10 else None


def _blocks(parent: Any) -> Iterator[Any]:
    """The paragraphs and tables of a body, in order, also those in content controls and insertions."""
    for child in parent:
        if child.tag in (PARAGRAPH, TABLE):
            yield child
        elif child.tag not in UNSEEN:
            yield from _blocks(child)


def _style(paragraph: Any) -> str:
    found = paragraph.find(f"{qn('w:pPr')}/{STYLE}")
    return "" if found is None else found.get(VALUE, "")


def _paragraph(paragraph: Any) -> str:
    is_item = paragraph.find(f"{qn('w:pPr')}/{NUMBERED}") is not None or _style(paragraph).startswith("List")
    text = _text(paragraph)
    return f"- {text}" if is_item and text else text


def _text(parent: Any) -> str:
    """The text below an element, with text boxes behind what they are anchored in."""
    return "".join(_pieces(parent)).strip("\n")


def _pieces(parent: Any) -> Iterator[str]:
    for child in parent:
        if child.tag in TEXTS:
            yield child.text or ""
        elif child.tag == SIGN:  # of a sum, a product …
            yield child.get(f"{MATH}val", "")
        elif child.tag not in UNSEEN:
            before, behind = AROUND.get(child.tag, ("", ""))
            yield before
            yield from _pieces(child)
            yield behind


def _rows(table: Any) -> Iterator[list[str]]:
    """The cells of a table that is no layout; a table within a cell is text of the cell."""
    for row in table.iter(ROW):
        if next(row.iterancestors(TABLE)) is table:
            yield [_text(cell) for cell in row.iter(CELL) if next(cell.iterancestors(ROW)) is row]
