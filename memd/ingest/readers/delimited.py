"""CSV and TSV, by Python's own reader: rows of a table.

Rule: in UTF-8; another encoding would have to be guessed. No line is longer than its limit, also while it is read.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.tables import table_text
from memd.ingest.readers.text import decoded

LINE_BYTES_MAX = 1_000_000
SAMPLE_CHARACTERS = 20_000
DELIMITERS = ",;\t|"


def sections(path: Path) -> Iterator[GivenSection]:
    """Yield the one section of a file.

    Raises:
        BadDocument: it is no UTF-8 text, or has a line that is too long.
    """
    lines: list[str] = []
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES_MAX + 1):
            if len(line) > LINE_BYTES_MAX:
                raise BadDocument(f"its line {len(lines) + 1:,} has more than {LINE_BYTES_MAX:,} bytes")
            if b"\0" in line:
                raise BadDocument(f"it is no UTF-8 text (line {len(lines) + 1:,}): save it as UTF-8")
            lines.append(decoded(line))
    try:
        rows = csv.reader(lines, _dialect("".join(lines)[:SAMPLE_CHARACTERS], path.suffix))
        yield GivenSection(text=table_text(rows))
    except csv.Error as error:
        raise BadDocument(f"it is no CSV that can be read ({error})") from None


def _dialect(sample: str, suffix: str) -> type[csv.Dialect] | csv.Dialect:
    try:
        return csv.Sniffer().sniff(sample, DELIMITERS)
    except csv.Error:
        return csv.excel_tab if suffix.lower() == ".tsv" else csv.excel
