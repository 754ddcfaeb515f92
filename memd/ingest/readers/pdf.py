"""PDF, by pdfium: a page is a section, and another one begins at each heading of the outline that stands on the page.

Rule: text is in the order in which the file has it, which for columns is that of reading.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pypdfium2
from pypdfium2 import raw

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.text import Headings

PAGES_MAX = 10_000
OUTLINE_MAX = 20_000
SHORT_LINE = 0.75
"""A line of less than this share of what most lines of a page have ends a paragraph; a few are longer, those of which
pdfium has joined the halves of a divided word."""
_CONTROL = dict.fromkeys(set(range(32)) - {9, 10})
_LEADERS = re.compile(r"(?: ?[.·…]){4,} ?")
_NUMBER = re.compile(r"^(?:chapter |section )?(?:\d+|[ivxlc]+(?=[. ])|[a-z](?=\.))(?:\.\d+)*[.:)]? +", re.IGNORECASE)

Outline = dict[int, list[tuple[int, str]]]
"""Page, from 0 → level and words of the headings that begin there."""


def sections(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of a PDF.

    Raises:
        BadDocument: it is none, is encrypted, has too many pages or no text.
    """
    try:
        document = pypdfium2.PdfDocument(path)
        pages = len(document)
    except pypdfium2.PdfiumError as error:
        if error.err_code == raw.FPDF_ERR_PASSWORD:
            raise BadDocument("it is encrypted: save it without a password") from None
        raise BadDocument("it is no PDF that can be read") from None
    if pages > PAGES_MAX:
        raise BadDocument(f"it has {pages:,} pages, and may have {PAGES_MAX:,}")
    above = Headings(document.get_metadata_value("Title"))
    outline = _outline(document)
    has_text = False
    for number in range(pages):
        for section in _of_page(_text(document, number), outline[number], above, number + 1):
            has_text = True
            yield section
    if not has_text:
        raise BadDocument("none of its pages has text (is it a scan?): let a program recognise its text first (OCR)")


def _outline(document: pypdfium2.PdfDocument) -> Outline:
    found: Outline = defaultdict(list)
    for count, one in enumerate(document.get_toc()):
        if count >= OUTLINE_MAX:
            break
        target = one.get_dest()
        page = None if target is None else target.get_index()
        if page is not None:
            found[page].append((one.level + 1, one.get_title()))
    return found


def _text(document: pypdfium2.PdfDocument, number: int) -> str:
    """The text of a page; of one that cannot be loaded none, as viewers show it."""
    try:
        page = document[number]
    except pypdfium2.PdfiumError:
        return ""
    try:
        text = page.get_textpage()
        said = text.get_text_bounded()
        text.close()
    finally:
        page.close()
    said = said.replace("\r\n", "\n").replace("\r", " ").translate(_CONTROL)  # 2 is a hyphen at the end of a line
    return _LEADERS.sub(" … ", said)


def _of_page(text: str, begun: list[tuple[int, str]], above: Headings, page: int) -> Iterator[GivenSection]:
    """A page, cut where a line is the next heading of the outline; headings without such a line count from its top."""
    lines = text.split("\n")
    plain = [_plain(line) for line in lines]
    done = 0
    for level, title in begun:
        wanted = _plain(title)
        at = next((at for at in range(done, len(lines)) if plain[at] == wanted), None)
        if at is not None:
            yield from _section(lines[done:at], above, page)
            done = at + 1
        above.enter(level, title)
    yield from _section(lines[done:], above, page)


def _plain(line: str) -> str:
    return _NUMBER.sub("", " ".join(line.split())).casefold()


def _section(lines: list[str], above: Headings, page: int) -> Iterator[GivenSection]:
    lengths = sorted(map(len, lines))
    width = SHORT_LINE * lengths[len(lengths) * 3 // 4] if lengths else 0
    text = "".join(line + ("\n" if len(line) >= width else "\n\n") for line in lines).strip()
    if text:
        yield GivenSection(above.path, text, page=page)
