"""Office documents: DOCX by python-docx, PPTX by python-pptx, workbooks (XLSX, XLSM, XLSB, XLS, ODS) by calamine.

Rule: what a reader of the printed page sees: with insertions, without deletions, comments, headers and footers.
Formulas and macros are neither read nor run. What an archive unpacks to is known before anything is unpacked; `zipfile`
reads no more than that of an entry.
"""

from __future__ import annotations

import datetime
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lxml import etree

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.text import Headings, joined, table_text

if TYPE_CHECKING:
    from python_calamine import CalamineWorkbook

UNPACKED_BYTES_MAX = 300_000_000
ENTRIES_MAX = 20_000
OLE = bytes.fromhex("d0cf11e0a1b11ae1")
"""The files of Office before 2007, and encrypted ones of today, begin with this."""


@contextmanager
def archive(path: Path, called: str) -> Iterator[zipfile.ZipFile]:
    """Yield the archive; whatever a library says about it within is said as a reason.

    Raises:
        BadDocument: it is none, is encrypted, has macros, unpacks to too much or is broken.
    """
    with path.open("rb") as file:
        if file.read(len(OLE)) == OLE:
            raise BadDocument(f"it is encrypted, or older than {called}: save it as {called} without a password")
    try:
        with zipfile.ZipFile(path) as opened:
            _check(opened)
            if any(name.endswith("vbaProject.bin") for name in opened.namelist()):
                raise BadDocument(f"it has macros: save it as {called}, which has none")
            yield opened
    except (zipfile.BadZipFile, NotImplementedError, EOFError, KeyError, ValueError, etree.XMLSyntaxError) as error:
        raise BadDocument(f"it is no {called} that can be read ({error})") from None


def _check(opened: zipfile.ZipFile) -> None:
    entries = opened.infolist()
    unpacked = sum(entry.file_size for entry in entries)
    if len(entries) > ENTRIES_MAX:
        raise BadDocument(f"it has {len(entries):,} files in it, and may have {ENTRIES_MAX:,}")
    if unpacked > UNPACKED_BYTES_MAX:
        raise BadDocument(f"it unpacks to {unpacked:,} bytes, and may to {UNPACKED_BYTES_MAX:,}")
    if any(entry.flag_bits & 1 for entry in entries):
        raise BadDocument("it is encrypted: save it without a password")


def xml_of(opened: zipfile.ZipFile, name: str) -> etree._Element:
    """Return the root of an XML file in an archive; entities are not replaced and nothing else is loaded.

    Raises:
        BadDocument: it is not there, or is no XML.
    """
    parser = etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=False)
    try:
        return etree.fromstring(opened.read(name), parser)
    except KeyError:
        raise BadDocument(f"it has no {name} in it") from None
    except etree.XMLSyntaxError as error:
        raise BadDocument(f"{name} in it is no XML that can be read ({error.msg})") from None


W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
PARAGRAPH, TABLE, ROW, CELL = f"{W}p", f"{W}tbl", f"{W}tr", f"{W}tc"
NUMBERED, STYLE, VALUE = f"{W}numPr", f"{W}pStyle", f"{W}val"
MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
TEXTS, SIGN = {f"{W}t", f"{MATH}t"}, f"{MATH}chr"
AROUND = {
    PARAGRAPH: ("\n", "\n"),
    **dict.fromkeys((f"{W}br", f"{W}cr"), ("\n", "")),
    f"{W}tab": ("\t", ""),
    f"{W}noBreakHyphen": ("-", ""),
    f"{MATH}num": ("(", ")"),
    f"{MATH}den": ("/(", ")"),
    f"{MATH}sup": ("^(", ")"),
    f"{MATH}sub": ("_(", ")"),
    f"{MATH}rad": ("√(", ")"),
    f"{MATH}d": ("(", ")"),
}
"""Elements → what stands in front of and behind their text; formulas on one line, as in `A=π⋅r^(2)`."""
UNSEEN = {
    *(f"{W}del", f"{W}moveFrom", f"{W}pPr", f"{W}rPr", f"{W}instrText"),
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",  # the same once more for older programs
}
_LEVEL = re.compile(r"heading (\d)", re.IGNORECASE)


def word(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of a document.

    Raises:
        BadDocument: it is none, is encrypted, has macros or unpacks to too much.
    """
    import docx  # each of these libraries takes long to import, and most files need one of them
    from docx.opc.constants import RELATIONSHIP_TYPE

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


def _level(style: Any, depth: int = 0) -> int | None:
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
    found = paragraph.find(f"{W}pPr/{STYLE}")
    return "" if found is None else found.get(VALUE, "")


def _paragraph(paragraph: Any) -> str:
    is_item = paragraph.find(f"{W}pPr/{NUMBERED}") is not None or _style(paragraph).startswith("List")
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


NESTED_MAX = 20


def slides(path: Path) -> Iterator[GivenSection]:
    """Yield the slides of a presentation; a slide's number is its page.

    Raises:
        BadDocument: it is none, is encrypted, has macros or unpacks to too much.
    """
    import pptx

    with archive(path, "PPTX"):
        presentation = pptx.Presentation(str(path))
    above = Headings(presentation.core_properties.title)
    for number, slide in enumerate(presentation.slides, 1):
        title = slide.shapes.title
        above.enter(1, "" if title is None else title.text_frame.text)
        said = list(_texts(slide.shapes, None if title is None else title.shape_id))
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            said.append(slide.notes_slide.notes_text_frame.text)
        yield GivenSection(above.path, joined(said) or " ".join(above.path[-1:]), page=number)


def _texts(shapes: Iterable[Any], title_id: int | None, depth: int = 0) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _texts(shape.shapes, title_id, depth + 1) if depth < NESTED_MAX else ()
        elif getattr(shape, "has_table", False):
            yield table_text([cell.text for cell in row.cells] for row in shape.table.rows)
        elif shape.has_text_frame and shape.shape_id != title_id:
            yield shape.text_frame.text


CELLS_MAX = 20_000_000
"""Of a sheet, empty ones within its corners included: each takes 24 bytes."""


def sheets(path: Path) -> Iterator[GivenSection]:
    """Yield the sheets of a workbook that have something in them.

    Raises:
        BadDocument: it is none, is encrypted, or is too large.
    """
    from python_calamine import CalamineError, CalamineWorkbook, PasswordError, SheetTypeEnum

    with path.open("rb") as file:
        is_old = file.read(len(OLE)) == OLE
    if not is_old:
        with archive(path, "workbook"):
            pass
    try:
        workbook = CalamineWorkbook.from_path(path)
        for sheet in workbook.sheets_metadata:
            if sheet.typ is SheetTypeEnum.WorkSheet:
                yield _sheet(workbook, sheet.name)
    except PasswordError:
        raise BadDocument("it is encrypted: save it without a password") from None
    except CalamineError as error:
        raise BadDocument(f"it is no workbook that can be read ({error})") from None


def _sheet(workbook: CalamineWorkbook, name: str) -> GivenSection:
    sheet = workbook.get_sheet_by_name(name)
    if sheet.total_height * sheet.total_width > CELLS_MAX:
        raise BadDocument(f"its sheet {name[:100]!r} has {sheet.total_height:,} rows of {sheet.total_width:,} cells")
    rows = ([_shown(value) for value in row] for row in sheet.iter_rows())
    return GivenSection(text=table_text(rows), sheet=name)


def _shown(value: object) -> str:
    """A value as people write it: whole numbers without a fraction, days without a time."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, datetime.datetime):
        midnight = datetime.time()
        return value.date().isoformat() if value.time() == midnight else value.isoformat(" ", "minutes")
    return str(value)
