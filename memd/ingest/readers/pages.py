"""Pages: HTML by lxml, the main part of a page by its headings; EPUB, a book of them in the order of its spine.

Rule: scripts, navigation, headers and footers of a page, and what says itself that it is no text of it (`nav`, `aside`,
`hidden` …), are left out; nothing is guessed from names of classes or the density of links, which loses a fifth of long
pages (bench/NOTES.md). What a book's spine does not name is not read.
"""

from __future__ import annotations

import posixpath
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from lxml import etree, html
from lxml.html import defs

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.office import archive, xml_of
from memd.ingest.readers.text import Headings, joined, table_text

HEADINGS = {f"h{level}": level for level in range(1, 7)}
UNREAD = frozenset(
    {
        *("script", "style", "noscript", "template", "svg", "math", "iframe", "object", "canvas", "select", "button"),
        *("nav", "aside", "footer", "form", "dialog", "title", "input", "textarea", "audio", "video"),
    }
)
UNREAD_ROLES = frozenset({"navigation", "banner", "contentinfo", "search", "complementary", "menu", "dialog"})
HTML5 = {"article", "body", "details", "figcaption", "figure", "header", "hgroup", "main", "section", "summary"}
BLOCKS = (defs.block_tags - {"del", "ins"}) | HTML5
_SPACE = re.compile(r"[ \t\r\n\f]+")


def page(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of a page.

    Raises:
        BadDocument: it is empty or no HTML.
    """
    yield from page_sections(path.read_bytes())


def page_sections(content: bytes, above: Headings | None = None) -> Iterator[GivenSection]:
    """Yield the sections of a page's bytes.

    Args:
        above: the headings that it stands under, else the page's own title.

    Raises:
        BadDocument: it is empty or no HTML.
    """
    try:
        parser = html.HTMLParser(encoding=_encoding(content), no_network=True, remove_comments=True, remove_pis=True)
        root = html.document_fromstring(content, parser)
    except etree.LxmlError as error:
        raise BadDocument(f"it is no HTML that can be read ({error})") from None
    above = above or Headings(root.findtext("head/title"))
    for element in [one for one in root.iterdescendants() if _is_unread(one)]:
        element.drop_tree()
    mains = [one for one in root.iter("main", "article") if one.text_content().strip()]
    bodies = [one for one in mains if one.tag == "main"] or mains
    yield from _PageWalk(above).sections(bodies[0] if len(bodies) == 1 else root)


def _encoding(content: bytes) -> str | None:
    """UTF-8 where it is; else what the page says (None)."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return "utf-8"


class _PageWalk:
    """One way through a tree, in the order of the text."""

    def __init__(self, above: Headings) -> None:
        self._above = above
        self._blocks: list[str] = []
        self._inline: list[str] = []

    def sections(self, root: Any) -> Iterator[GivenSection]:
        """Yield what stands below an element, by its headings."""
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
                self._blocks.append(table_text(_rows(element)))
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
        """End a paragraph where an element of its kind begins or ends."""
        if tag in BLOCKS:
            text = _SPACE.sub(" ", "".join(self._inline)).replace("\v", "\n").strip()
            self._inline = []
            self._blocks += [text] if text != "-" else []

    def _section(self) -> Iterator[GivenSection]:
        text, self._blocks = joined(self._blocks), []
        if text:
            yield GivenSection(self._above.path, text)


def _is_unread(element: Any) -> bool:
    hidden = element.get("hidden") is not None or element.get("aria-hidden") == "true"
    is_head = element.tag == "header" and next(element.iterancestors("article", "main", "section"), None) is None
    return element.tag in UNREAD or hidden or is_head or element.get("role") in UNREAD_ROLES


def _is_data(table: Any) -> bool:
    """Whether a table has rows of columns, and no other table: else it is only how the page is laid out."""
    return table.find(".//table") is None and any(len(row) > 1 for row in table.iter("tr"))


def _rows(table: Any) -> Iterator[list[str]]:
    for part in table.iter("br", *BLOCKS):  # words of two blocks of a cell are two words
        part.text, part.tail = f" {part.text or ''}", f" {part.tail or ''}"
    for row in table.iter("tr"):
        yield [cell.text_content() for cell in row if cell.tag in ("td", "th")]


CONTAINER, RIGHTS = "META-INF/container.xml", "META-INF/rights.xml"
SPACES = {
    "c": "urn:oasis:names:tc:opendocument:xmlns:container",
    "opf": "http://www.idpf.org/2007/opf",
    "dc": "http://purl.org/dc/elements/1.1/",
}


def book(path: Path) -> Iterator[GivenSection]:
    """Yield the sections of a book, below its title.

    Raises:
        BadDocument: it is none, is encrypted, or unpacks to too much.
    """
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


def _read(opened: ZipFile, folder: str, href: str) -> bytes:
    """A file of the book; empty if it is not there."""
    name = posixpath.normpath(posixpath.join(folder, urllib.parse.unquote(href.partition("#")[0])))
    return opened.read(name) if name in opened.namelist() else b""
