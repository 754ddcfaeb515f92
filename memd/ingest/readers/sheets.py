"""XLSX, XLSM, XLSB, XLS and ODS, by calamine: a sheet is a section of rows.

Rule: values as the file has them; formulas and macros are neither read nor run.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

from python_calamine import CalamineError, CalamineWorkbook, PasswordError, SheetTypeEnum

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.archive import OLE, archive
from memd.ingest.readers.tables import table_text

CELLS_MAX = 20_000_000
"""Of a sheet, empty ones within its corners included: each takes 24 bytes."""


def sections(path: Path) -> Iterator[GivenSection]:
    """Yield the sheets of a workbook that have something in them.

    Raises:
        BadDocument: it is none, is encrypted, or is too large.
    """
    with path.open("rb") as file:
        is_old = file.read(len(OLE)) == OLE
    if not is_old:
        with archive(path, "workbook"):
            pass
    try:
        workbook = CalamineWorkbook.from_path(path)
        for sheet in workbook.sheets_metadata:
            if sheet.typ is SheetTypeEnum.WorkSheet:
                yield _section(workbook, sheet.name)
    except PasswordError:
        raise BadDocument("it is encrypted: save it without a password") from None
    except CalamineError as error:
        raise BadDocument(f"it is no workbook that can be read ({error})") from None


def _section(workbook: CalamineWorkbook, name: str) -> GivenSection:
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
