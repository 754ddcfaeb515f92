"""The ZIP archives that Office documents and books are.

Rule: what an archive unpacks to is known before anything is unpacked; `zipfile` reads no more than that of an entry.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lxml import etree

from memd.errors import BadDocument

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
