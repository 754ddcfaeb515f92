"""EPUB: the chapters of a book, in the order of its spine, each by its headings.

Rule: what the spine does not name is not read.
"""

from __future__ import annotations

import posixpath
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.archive import archive, xml_of
from memd.ingest.readers.html import page_sections
from memd.ingest.readers.text import Headings

CONTAINER, RIGHTS = "META-INF/container.xml", "META-INF/rights.xml"
SPACES = {
    "c": "urn:oasis:names:tc:opendocument:xmlns:container",
    "opf": "http://www.idpf.org/2007/opf",
    "dc": "http://purl.org/dc/elements/1.1/",
}


def sections(path: Path) -> Iterator[GivenSection]:
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
