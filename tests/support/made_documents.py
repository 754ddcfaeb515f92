"""Documents of foreign formats, made on the spot."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docx
import pptx
import xlsxwriter
from docx.oxml import OxmlElement
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen.canvas import Canvas


def pdf(path: Path, pages: Sequence[str], title: str = "", password: str = "") -> Path:
    """Pages of lines; a line that begins with `#` is a heading in the outline too."""
    encryption = StandardEncryption(password, password) if password else None
    canvas = Canvas(str(path), encrypt=encryption, invariant=True)
    canvas.setTitle(title or "untitled")
    for number, page in enumerate(pages):
        height = 800
        for place, line in enumerate(page.split("\n")):
            heading = line.lstrip("#").strip()
            if heading != line.strip():
                canvas.bookmarkPage(f"{number}-{place}")
                canvas.addOutlineEntry(heading, f"{number}-{place}", len(line) - len(line.lstrip("#")) - 1)
            canvas.drawString(60, height, heading)
            height -= 14
        canvas.showPage()
    canvas.save()
    return path


def word(path: Path, blocks: Sequence[str | Sequence[Sequence[str]]]) -> Path:
    """Paragraphs, headings (`# …`), items (`- …`) and tables, whose first row is marked as their header."""
    document = docx.Document()
    for block in blocks:
        if not isinstance(block, str):
            table = document.add_table(len(block), len(block[0]))
            for row, cells in zip(table.rows, block, strict=True):
                for cell, text in zip(row.cells, cells, strict=True):
                    cell.text = text
            table.rows[0]._tr.get_or_add_trPr().append(OxmlElement("w:tblHeader"))
        elif block.startswith("#"):
            level = len(block) - len(block.lstrip("#"))
            document.add_heading(block.lstrip("# "), level)
        else:
            document.add_paragraph(block.removeprefix("- "), "List Bullet" if block.startswith("- ") else None)
    document.save(str(path))
    return path


def slides(path: Path, titles_and_texts: Sequence[tuple[str, str]], notes: str = "") -> Path:
    """A title and a text each; the notes are the last one's."""
    presentation = pptx.Presentation()
    for title, text in titles_and_texts:
        slide: Any = presentation.slides.add_slide(presentation.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, text
    if notes:
        slide.notes_slide.notes_text_frame.text = notes
    presentation.save(str(path))
    return path


def workbook(path: Path, sheets: Mapping[str, Sequence[Sequence[Any]]]) -> Path:
    """Rows by the sheet's name."""
    with xlsxwriter.Workbook(str(path), {"default_date_format": "yyyy-mm-dd"}) as book:
        for name, rows in sheets.items():
            sheet = book.add_worksheet(name)
            for number, row in enumerate(rows):
                sheet.write_row(number, 0, row)
    return path


def book(path: Path, title: str, chapters: Sequence[str]) -> Path:
    """An EPUB of chapters in HTML."""
    names = [f"c{number}.xhtml" for number, _ in enumerate(chapters)]
    items = "".join(f'<item id="{name}" href="{name}" media-type="application/xhtml+xml"/>' for name in names)
    spine = "".join(f'<itemref idref="{name}"/>' for name in names)
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f"<dc:title>{title}</dc:title></metadata><manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    )
    files = {"META-INF/container.xml": container, "OEBPS/book.opf": package}
    files |= {f"OEBPS/{name}": f"<html><body>{text}</body></html>" for name, text in zip(names, chapters, strict=True)}
    return archive(path, files)


def archive(path: Path, files: Mapping[str, str | bytes]) -> Path:
    """A ZIP of these files."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return path


def replaced(path: Path, name: str, content: bytes) -> Path:
    """The same archive with another content of one file."""
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as opened:
        files = {one: opened.read(one) for one in opened.namelist()}
    return archive(path, files | {name: content})
