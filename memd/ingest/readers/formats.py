"""Readers of other files: office documents, pages, books, mail and PDF. Each has its name in `assets/formats.toml`, and
is called in the child process of files.py.

Rule: they return the text of the printed page, with insertions, without deletions, comments, headers and footers.
Formulas and macros are neither read nor run. The unpacked size of an archive is checked before anything is unpacked;
`zipfile` reads no more than that of an entry.
"""

from __future__ import annotations

import datetime
import itertools
import posixpath
import re
import time
import urllib.parse
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from lxml import etree, html
from lxml.html import defs

from memd.errors import BadDocument
from memd.ingest.readers.text import GivenSection, Headings, joined, marked_table_text, table_text

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument

UNPACKED_BYTES_MAX = 300_000_000
ENTRIES_MAX = 20_000
OLE = bytes.fromhex("d0cf11e0a1b11ae1")
"""The first bytes of Office files from before 2007, and of encrypted ones."""


@contextmanager
def archive(path: Path, called: str) -> Iterator[zipfile.ZipFile]:
    """Yield the archive, and turn errors of libraries in the block into reasons. Raises BadDocument: it is none, is
    encrypted, has macros, unpacks to too much or is broken."""
    with path.open("rb") as file:
        if file.read(len(OLE)) == OLE:
            raise BadDocument(f"it is encrypted, or older than {called}: save it as {called} without a password")
    try:
        with zipfile.ZipFile(path) as opened:
            entries = opened.infolist()
            unpacked = sum(entry.file_size for entry in entries)
            if len(entries) > ENTRIES_MAX:
                raise BadDocument(f"it has {len(entries):,} files in it, and may have {ENTRIES_MAX:,}")
            if unpacked > UNPACKED_BYTES_MAX:
                raise BadDocument(f"it unpacks to {unpacked:,} bytes, and may to {UNPACKED_BYTES_MAX:,}")
            if any(entry.flag_bits & 1 for entry in entries):
                raise BadDocument("it is encrypted: save it without a password")
            if any(name.endswith("vbaProject.bin") for name in opened.namelist()):
                raise BadDocument(f"it has macros: save it as {called}, which has none")
            yield opened
    except (zipfile.BadZipFile, NotImplementedError, EOFError, KeyError, ValueError, etree.XMLSyntaxError) as error:
        raise BadDocument(f"it is no {called} that can be read ({error})") from None


def xml_of(opened: zipfile.ZipFile, name: str) -> etree._Element:
    """Return the root of an XML file in an archive, without replacing entities or loading other files. Raises
    BadDocument: it is missing, or is no XML."""
    parser = etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=False)
    try:
        return etree.fromstring(opened.read(name), parser)
    except KeyError:
        raise BadDocument(f"it has no {name} in it") from None
    except etree.XMLSyntaxError as error:
        raise BadDocument(f"{name} in it is no XML that can be read ({error.msg})") from None


# DOCX, by python-docx

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
"""Elements → text before and after theirs; formulas are on one line, as in `A=π⋅r^(2)`."""
UNSEEN = {
    *(f"{W}del", f"{W}moveFrom", f"{W}pPr", f"{W}rPr", f"{W}instrText"),
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",  # a duplicate for older programs
}
_LEVEL = re.compile(r"heading (\d)", re.IGNORECASE)


def word(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of a document. Raises BadDocument: it is none, is encrypted, has macros or unpacks to too
    much."""
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
            said.append(_of_rows(block) if block.tag == TABLE else _paragraph(block))
            continue
        yield above.section(joined(said))
        said = []
        above.enter(level, _text(block))
    yield above.section(joined(said))
    for part in document.part.rels.values():
        if part.reltype in (RELATIONSHIP_TYPE.FOOTNOTES, RELATIONSHIP_TYPE.ENDNOTES) and not part.is_external:
            notes = etree.fromstring(part.target_part.blob, etree.XMLParser(resolve_entities=False, no_network=True))
            if text := joined([_text(one) for one in notes.iter(PARAGRAPH)]):
                yield GivenSection(above.path[:1], text)


def _level(style: Any, depth: int = 0) -> int | None:
    """Return the heading level of a style, by its name or that of a style that it is based on."""
    name = style.name or ""
    found = _LEVEL.fullmatch(name)
    if name.lower() == "title" or found:
        return int(found[1]) if found else 0
    base = getattr(style, "base_style", None)
    return _level(base, depth + 1) if base is not None and depth < 10 else None


def _blocks(parent: Any) -> Iterator[Any]:
    """Yield the paragraphs and tables of a body, in order, including those in content controls and insertions."""
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
    """Return the text below an element, with text boxes after their anchors."""
    return "".join(_pieces(parent)).strip("\n")


def _pieces(parent: Any) -> Iterator[str]:
    for child in parent:
        if child.tag in TEXTS:
            yield child.text or ""
        elif child.tag == SIGN:  # the sign of a sum, a product …
            yield child.get(f"{MATH}val", "")
        elif child.tag not in UNSEEN:
            before, behind = AROUND.get(child.tag, ("", ""))
            yield before
            yield from _pieces(child)
            yield behind


def _of_rows(table: Any) -> str:
    """Return the text of a table that is not just layout; a table within a cell is text of the cell."""
    own = [row for row in table.iter(ROW) if next(row.iterancestors(TABLE)) is table]
    cells = [[_text(cell) for cell in row.iter(CELL) if next(cell.iterancestors(ROW)) is row] for row in own]
    names = [row.find(f"{W}trPr/{W}tblHeader") is not None for row in own]
    return marked_table_text(cells, [[is_name] * len(row) for row, is_name in zip(cells, names, strict=True)])


# PPTX, by python-pptx

NESTED_MAX = 20


def slides(path: Path) -> Iterator[GivenSection]:
    """Yield the slides of a presentation; a slide's number is its page. Raises BadDocument: it is none, is encrypted,
    has macros or unpacks to too much."""
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
        yield above.section(joined(said), number)


def _texts(shapes: Iterable[Any], title_id: int | None, depth: int = 0) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _texts(shape.shapes, title_id, depth + 1) if depth < NESTED_MAX else ()
        elif getattr(shape, "has_table", False):
            yield table_text([cell.text for cell in row.cells] for row in shape.table.rows)
        elif shape.has_text_frame and shape.shape_id != title_id:
            yield shape.text_frame.text


# Workbooks (XLSX, XLSM, XLSB, XLS, ODS), by calamine

CELLS_MAX = 20_000_000
"""Limit of a sheet's cells, including empty ones within its corners: each takes 24 bytes."""


def sheets(path: Path) -> Iterator[GivenSection]:
    """Yield the non-empty sheets of a workbook. Raises BadDocument: it is none, is encrypted, or is too large."""
    from python_calamine import CalamineError, CalamineWorkbook, PasswordError, SheetTypeEnum

    with path.open("rb") as file:
        is_old = file.read(len(OLE)) == OLE
    if not is_old:
        with archive(path, "workbook"):
            pass
    try:
        workbook = CalamineWorkbook.from_path(path)
        for name in (one.name for one in workbook.sheets_metadata if one.typ is SheetTypeEnum.WorkSheet):
            sheet = workbook.get_sheet_by_name(name)
            if sheet.total_height * sheet.total_width > CELLS_MAX:
                size = f"{sheet.total_height:,} rows of {sheet.total_width:,} cells"
                raise BadDocument(f"its sheet {name[:100]!r} has {size}")
            rows = ([_shown(value) for value in row] for row in sheet.iter_rows())
            yield GivenSection(text=table_text(rows), sheet=name)
    except PasswordError:
        raise BadDocument("it is encrypted: save it without a password") from None
    except CalamineError as error:
        raise BadDocument(f"it is no workbook that can be read ({error})") from None


def _shown(value: object) -> str:
    """Return a value as people write it: whole numbers without a fraction, days without a time."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, datetime.datetime):
        midnight = datetime.time()
        return value.date().isoformat() if value.time() == midnight else value.isoformat(" ", "minutes")
    return str(value)


# Pages: HTML by lxml, the main part of a page by its headings. Left out are scripts, navigation, headers, footers,
# forms unless they contain everything, and elements marked as no text (`nav`, `aside`, `hidden` …). Nothing is guessed
# from names of classes or the density of links, which loses a fifth of long pages (bench/NOTES.md).

HEADINGS = {f"h{level}": level for level in range(1, 7)}
CELLS = "td", "th"
UNREAD = frozenset(
    {
        *("script", "style", "noscript", "template", "svg", "math", "iframe", "object", "canvas", "select", "button"),
        *("nav", "aside", "footer", "dialog", "title", "input", "textarea", "audio", "video"),
    }
)
UNREAD_ROLES = frozenset({"navigation", "banner", "contentinfo", "search", "complementary", "menu", "dialog"})
HTML5 = {"article", "body", "details", "figcaption", "figure", "header", "hgroup", "main", "section", "summary"}
BLOCKS = (defs.block_tags - {"del", "ins"}) | HTML5
_SPACE = re.compile(r"[ \t\r\n\f]+")
_UNSHOWN = re.compile(r"(?:^|[;\s])(?:display\s*:\s*none|visibility\s*:\s*hidden)\b", re.IGNORECASE)


def page(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of a page. Raises BadDocument: it is empty or no HTML."""
    yield from page_sections(path.read_bytes())


def page_sections(content: bytes, above: Headings | None = None) -> Iterator[GivenSection]:
    """Yield the sections of a page's bytes. `above`: the headings above it, else the page's own title.
    Raises BadDocument: it is empty or no HTML."""
    encoding = None  # the page's own declaration applies unless it is valid UTF-8
    with suppress(UnicodeDecodeError):
        encoding = content.decode() and "utf-8"
    try:
        parser = html.HTMLParser(encoding=encoding, no_network=True, remove_comments=True, remove_pis=True)
        root = html.document_fromstring(content, parser)
    except etree.LxmlError as error:
        raise BadDocument(f"it is no HTML that can be read ({error})") from None
    above = above or Headings(root.findtext("head/title"))
    for element in [one for one in root.iterdescendants() if _is_unread(one)]:
        _empty(element)
    forms = root.findall(".//form")
    whole, *within = (len("".join(one.text_content().split())) for one in (root, *forms))
    for form in forms if sum(within) < whole else ():
        _empty(form)
    mains = [one for one in root.iter("main", "article") if one.text_content().strip()]
    bodies = [one for one in mains if one.tag == "main"] or mains
    yield from _PageWalk(above).sections(bodies[0] if len(bodies) == 1 else root)


class _PageWalk:
    """One traversal of a tree, in text order."""

    def __init__(self, above: Headings) -> None:
        self._above = above
        self._blocks: list[str] = []
        self._inline: list[str] = []

    def sections(self, root: Any) -> Iterator[GivenSection]:
        """Yield the sections below an element, by headings."""
        steps = etree.iterwalk(root, events=("start", "end"))
        for event, element in steps:
            tag = element.tag
            if event == "end":
                self._end(tag)
                self._inline.append(element.tail or "" if element is not root else "")
            elif tag in HEADINGS:
                self._end("p")
                yield from self._section()
                self._above.enter(HEADINGS[tag], element.text_content())
                steps.skip_subtree()
            elif tag == "table" and _is_data(element):
                self._end(tag)
                self._blocks.append(_text_of_table(element))
                steps.skip_subtree()
            elif tag == "pre":
                self._end(tag)
                self._blocks.append(f"```\n{element.text_content().strip(chr(10))}\n```")
                steps.skip_subtree()
            else:
                self._end(tag)
                self._inline += ["\v" if tag == "br" else "- " if tag == "li" else "", element.text or ""]
        self._end("p")
        yield from self._section()

    def _end(self, tag: str) -> None:
        """End the paragraph at the begin or end of such an element."""
        if tag in BLOCKS:
            text = _SPACE.sub(" ", "".join(self._inline)).replace("\v", "\n").strip()
            self._inline = []
            self._blocks += [text] if text != "-" else []

    def _section(self) -> Iterator[GivenSection]:
        text, self._blocks = joined(self._blocks), []
        yield self._above.section(text)


def _empty(element: Any) -> None:
    """Take an element's content away. (`drop_tree` joins the texts around it, in time that grows with their square.)"""
    element.clear(keep_tail=True)
    element.tag = "span"


def _is_unread(element: Any) -> bool:
    hidden = element.get("hidden") is not None or element.get("aria-hidden") == "true"
    hidden = hidden or _UNSHOWN.search(element.get("style", "")) is not None
    is_head = element.tag == "header" and next(element.iterancestors("article", "main", "section"), None) is None
    heading = next(element.iterancestors(*HEADINGS), None) if element.tag == "button" else None
    is_heading = heading is not None and heading.text_content().strip() == element.text_content().strip()
    return (element.tag in UNREAD and not is_heading) or hidden or is_head or element.get("role") in UNREAD_ROLES


def _is_data(table: Any) -> bool:
    """Return True if a table has rows of columns, and no nested table; else it is layout."""
    rows = table.iter("tr")
    return table.find(".//table") is None and any(sum(cell.tag in CELLS for cell in row) > 1 for row in rows)


def _text_of_table(table: Any) -> str:
    for part in table.iter("br", *BLOCKS):  # keeps the words of a cell's blocks apart
        part.text, part.tail = f" {part.text or ''}", f" {part.tail or ''}"
    rows = [[cell for cell in row if cell.tag in CELLS] for row in table.iter("tr")]
    names = ([cell.tag == "th" or next(cell.iterancestors("thead"), None) is not None for cell in row] for row in rows)
    return marked_table_text([[cell.text_content() for cell in row] for row in rows], [*names])


# Books: EPUB, pages in the order of the spine; other pages are not read.

CONTAINER, RIGHTS = "META-INF/container.xml", "META-INF/rights.xml"
SPACES = {
    "c": "urn:oasis:names:tc:opendocument:xmlns:container",
    "opf": "http://www.idpf.org/2007/opf",
    "dc": "http://purl.org/dc/elements/1.1/",
}


def book(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of a book, below its title. Raises BadDocument: it is none, is encrypted, or unpacks to too
    much."""
    with archive(path, "EPUB") as opened:
        if RIGHTS in opened.namelist():
            raise BadDocument("it is encrypted (DRM)")
        rootfile = xml_of(opened, CONTAINER).find(".//c:rootfile", SPACES)
        if rootfile is None:
            raise BadDocument(f"it is no EPUB that can be read ({CONTAINER} names no book)")
        package = xml_of(opened, rootfile.get("full-path", ""))
        above = Headings(package.findtext(".//dc:title", None, SPACES))
        names = {one.get("id"): one.get("href", "") for one in package.iterfind(".//opf:manifest/opf:item", SPACES)}
        folder = posixpath.dirname(rootfile.get("full-path", ""))
        for one in package.iterfind(".//opf:spine/opf:itemref", SPACES):
            chapter = _read(opened, folder, names.get(one.get("idref"), ""))
            if chapter.strip():
                above.enter(1, "")
                yield from page_sections(chapter, above)


def _read(opened: zipfile.ZipFile, folder: str, href: str) -> bytes:
    """Return a file of the book; empty if it is missing."""
    name = posixpath.normpath(posixpath.join(folder, urllib.parse.unquote(href.partition("#")[0])))
    return opened.read(name) if name in opened.namelist() else b""


# Mail

ENVELOPE = "From", "To", "Cc", "Date"
BODIES = "text/plain", "text/html"
SHORT_LETTERS_MAX = 1_000
"""A longer plain part (without addresses) is no stub ("your program shows no HTML")."""
PAGE_BESIDE_BYTES_MAX = 200_000
"""Longer HTML beside a plain part is not read: of a mail, Gmail shows 102 KB."""
_WRAPPED = re.compile(r"(?<=[\u0e00-\u0eff\u3000-\u9fff])\s+(?=[\u0e00-\u0eff\u3000-\u9fff])")
"""Ends of lines in scripts without spaces between words."""
_WORD = re.compile(r"[^\W_]+|[\u2190-\u2bff\U0001f000-\U0001ffff]")
"""A word, a number, a part of an address, or a picture."""


def mail(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of each mail of an EML or mbox file, below its subject and with its date: sender, recipients
    and text, of HTML by its headings. Of a mail in an mbox that cannot be read otherwise (nested too deeply …) the
    headers are. Raises BadDocument: it is none."""
    import email.parser
    import email.policy
    import mailbox

    class Lenient(email.policy.EmailPolicy):
        """A header that the library's parser stumbles over is text, and says nothing about its part."""

        def header_fetch_parse(self, name: str, value: str) -> Any:
            try:
                return super().header_fetch_parse(name, value)
            except (AttributeError, IndexError, TypeError, ValueError):
                is_text = not name.lower().startswith("content-")
                return " ".join(value.split()) if is_text else self.header_factory(name, "")

    parser: Any = email.parser.BytesParser(policy=Lenient())
    with path.open("rb") as file:
        is_box = file.read(len(b"From ")) == b"From "
        file.seek(0)
        box: Any = mailbox.mbox(path, create=False) if is_box else None
        for one in map(box.get_file, box.iterkeys()) if is_box else [file]:
            try:
                yield from _of_mail(parser.parse(one), is_box)
            except Exception:  # any error of the library with a broken mail
                if not is_box:
                    raise
                one.seek(0)
                yield from _of_mail(parser.parse(one, headersonly=True), is_box)


def _of_mail(mail: Any, is_boxed: bool) -> list[GivenSection]:
    above = Headings()
    above.enter(0, mail["Subject"] or "")
    first, *others = _body(mail, above)
    envelope = "\n".join(f"{name}: {mail[name]}" for name in ENVELOPE if mail[name])
    if not (envelope or is_boxed):
        raise BadDocument(f"it is no mail that can be read: it has no {', no '.join(ENVELOPE)}")
    attached = "\n".join(f"[file: {name}]" for part in mail.iter_attachments() if (name := part.get_filename()))
    sections = [msgspec.structs.replace(first, text=joined((envelope, first.text, attached))), *others]
    return [msgspec.structs.replace(section, said_at=_sent_at(mail)) for section in sections]


def _body(mail: Any, above: Headings) -> list[GivenSection]:
    """Return the sections of a mail's first text. Of a short plain part and its alternative in HTML: of the one that
    has all words of the other, in their order; if neither has, of both."""
    part = _first(mail, *BODIES)
    around = (one for one in mail.walk() if one.get_content_type() == "multipart/alternative")
    beside = next((one for one in around if any(inner is part for inner in one.iter_parts())), part)
    bodies = [one for kind in BODIES if beside is not None and (one := _first(beside, kind)) is not None]
    own = _read_part(bodies[0], above) if bodies else []
    letters = sum(len(word) for one in own for word in one.text.split() if "://" not in word)
    if bodies[1:] and letters < SHORT_LETTERS_MAX and len(bodies[1].get_payload(decode=True)) <= PAGE_BESIDE_BYTES_MAX:
        page = _read_part(bodies[1], above)
        if not _has_all(own, page):
            text = page[0].text if _has_all(page, own) else joined((own[0].text, page[0].text))
            return [msgspec.structs.replace(page[0], text=text), *page[1:]]
    return own or [GivenSection(above.path, "")]


def _first(part: Any, *kinds: str) -> Any:
    """Return the first part of these types that is no attachment and in no enclosed mail; None if there is none."""
    if part.get_content_maintype() == "multipart":  # its `get_body` stumbles over one without parts
        return next((found for one in part.iter_parts() if (found := _first(one, *kinds)) is not None), None)
    return part if part.get_content_type() in kinds and not part.is_attachment() else None


def _read_part(part: Any, above: Headings) -> list[GivenSection]:
    """Return the sections of a part, as UTF-8 if its encoding is unknown or none of text; none of no HTML."""
    try:
        text = str(part.get_content())
    except (LookupError, ValueError, TypeError):
        text = str(part.get_payload(decode=True), errors="replace")
    if part.get_content_subtype() == "plain":
        return [GivenSection(above.path, text)]
    with suppress(BadDocument):
        return [*page_sections(text.encode(errors="replace"), above)]
    return []


def _has_all(sections: Iterable[GivenSection], others: Iterable[GivenSection]) -> bool:
    """Return True if the sections have all words of the others, in their order."""
    texts = ("\n".join("\n".join((*one.heading, one.text)) for one in part).casefold() for part in (sections, others))
    words, other_words = (iter(_WORD.findall(_WRAPPED.sub("", text))) for text in texts)
    return all(word in words for word in other_words)


def _sent_at(mail: Any) -> int | None:
    """Return a mail's date in microseconds since the epoch; None if it has none that can be true."""
    date = getattr(mail["Date"], "datetime", None)
    at = 0.0 if date is None else (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp()
    return int(at * 1e6) if 0 < at < time.time() + 86_400 else None


# PDF, by pdfium: a section begins at each page, and at each heading of the outline that is found on the page.
# Text is in the order of the file, which for columns is the reading order.

PAGES_MAX = 10_000
OUTLINE_MAX = 20_000
SHORT_LINE = 0.75
"""A line shorter than this share of a page's usual line ends a paragraph. A few lines are longer, where pdfium has
joined a hyphenated word."""
_CONTROL = dict.fromkeys(set(range(32)) - {9, 10})
_LEADERS = re.compile(r"(?: ?[.·…]){4,} ?")
_NUMBER = re.compile(r"^(?:chapter |section )?(?:\d+|[ivxlc]+(?=[. ])|[a-z](?=\.))(?:\.\d+)*[.:)]? +", re.IGNORECASE)

Outline = dict[int, list[tuple[int, str]]]
"""Page, from 0 → level and text of the headings there."""


def pdf(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of a PDF. Raises BadDocument: it is none, is encrypted, has too many pages or no text."""
    import pypdfium2
    from pypdfium2 import raw

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
        for section in _of_page(_text_of_page(document, number), outline[number], above, number + 1):
            has_text |= bool(section.text)
            yield section
    if not has_text:
        raise BadDocument("none of its pages has text (is it a scan?): let a program recognise its text first (OCR)")


def _outline(document: PdfDocument) -> Outline:
    found: Outline = defaultdict(list)
    for one in itertools.islice(document.get_toc(), OUTLINE_MAX):
        target = one.get_dest()
        page = None if target is None else target.get_index()
        if page is not None:
            found[page].append((one.level + 1, one.get_title()))
    return found


def _text_of_page(document: PdfDocument, number: int) -> str:
    """Return the text of a page; none if it cannot be loaded, like viewers."""
    from pypdfium2 import PdfiumError

    try:
        page = document[number]
    except PdfiumError:
        return ""
    with closing(page), closing(page.get_textpage()) as text:
        said = text.get_text_bounded()
    said = said.replace("\r\n", "\n").replace("\r", " ").translate(_CONTROL)  # 2 is a hyphen at the end of a line
    return _LEADERS.sub(" … ", said)


def _of_page(text: str, begun: list[tuple[int, str]], above: Headings, page: int) -> Iterator[GivenSection]:
    """Cut a page at lines that are the outline's next headings; headings without a line apply from the page's top."""
    lines = text.split("\n")
    plain = [_plain(line) for line in lines]
    done = 0
    for level, title in begun:
        heading = _plain(title)
        at = next((at for at in range(done, len(lines)) if plain[at] == heading), None)
        if at is not None:
            yield _section(lines[done:at], above, page)
            done = at + 1
        above.enter(level, title)
    yield _section(lines[done:], above, page)


def _plain(line: str) -> str:
    return _NUMBER.sub("", " ".join(line.split())).casefold()


def _section(lines: list[str], above: Headings, page: int) -> GivenSection:
    lengths = sorted(map(len, lines))
    width = SHORT_LINE * lengths[len(lengths) * 3 // 4] if lengths else 0
    return above.section("".join(line + ("\n" if len(line) >= width else "\n\n") for line in lines).strip(), page)
