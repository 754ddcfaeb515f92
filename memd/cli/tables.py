"""Tables on narrow terminals.

Rule: no cell is cut, as an id that is cut can be neither copied nor told from another. Columns with `no_wrap` keep
their width, the others break their text; where even that does not fit, each row becomes a few lines of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

LEAST = 16
"""A column is made narrower down to its longest word, and down to this where that is longer: a turn's id has 16."""
INDENT = 2
WIDE = 100_000


def table(*columns: str, right: Collection[str] = (), whole: Collection[str] = (), **more: Any) -> Table:
    """Return a table without rows; the columns of `whole` keep their width."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", **more)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=name in whole)
    return made


def fitting(line: RenderableType, console: Console) -> RenderableType:
    """Return what is printed on the console in place of a line: the line, unless it is a table that is too wide."""
    if not isinstance(line, Table):
        return line
    too_wide = Measurement.get(console, console.options.update_width(WIDE), line).maximum - console.width
    if too_wide <= 0:
        return line
    widths = [_measured(column, console) for column in line.columns]
    gives = [0 if column.no_wrap else most - least for column, (least, most) in zip(line.columns, widths, strict=True)]
    if sum(gives) < too_wide:
        return _as_records(line)
    for column, (_, most), most_given in sorted(zip(line.columns, widths, gives, strict=True), key=lambda one: -one[2]):
        given = min(most_given, too_wide)
        too_wide -= given
        column.width, column.overflow = most - given, "fold"
    return line


def _measured(column: Column, console: Console) -> tuple[int, int]:
    """The least and the natural width of a column."""
    wide = console.options.update_width(WIDE)
    header, *cells = (Measurement.get(console, wide, cell) for cell in (column.header, column.footer, *column.cells))
    least = max(header.minimum, min(LEAST, max(cell.minimum for cell in cells)))
    return least, max(cell.maximum for cell in (header, *cells))


def _as_records(table: Table) -> RenderableType:
    """The table with its rows one below the other: the first cell that says something, then the others by name."""
    names = [str(column.header) for column in table.columns]
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    if table.show_footer:
        rows.append(tuple(column.footer for column in table.columns))
    records: list[RenderableType] = [] if table.title is None else [Text(str(table.title))]
    for row in rows:
        said = [(name, text) for name, cell in zip(names, row, strict=True) if (text := str(cell))]
        records += [Text(value, style="bold") for _, value in said[:1]]
        told = ", ".join(f"{name} {value}" for name, value in said[1:])
        records.append(Padding(Text(told), (0, 0, 0, INDENT), expand=False))
    return Group(*records)
