"""The output of commands: lines, chunks, and tables also on narrow terminals.

Rule: what others wrote is shown and never obeyed by the terminal. No cell is cut, as an id that is cut can be neither
copied nor told from another: columns with `no_wrap` keep their width, the others break their text; where even that does
not fit, each row becomes a few lines of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memd.wording import for_terminal, instructing_words, name_for_terminal

if TYPE_CHECKING:
    from memd.admin.history import LogEvent
    from memd.recall.explained import FoundChunk

Lines = list[RenderableType]
LEAST = 16
"""A column is made narrower down to its longest word, and down to this where that is longer: a turn's id has 16."""
INDENT = 2
SHOWN_AFTER_SECONDS = 1.0
WIDE = 100_000
"""Columns: nothing is broken."""


def print_lines(lines: Sequence[RenderableType]) -> None:
    """Print to a terminal in its width; elsewhere without breaking lines, and without spaces at their ends."""
    if sys.stdout.isatty():
        console = Console(highlight=False, markup=False)
        console.print(*(fitting(line, console) for line in lines), sep="\n")
        return
    console = Console(highlight=False, markup=False, width=WIDE)
    with console.capture() as captured:
        console.print(*lines, sep="\n")
    click.echo("\n".join(line.rstrip() for line in captured.get().removesuffix("\n").split("\n")))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal after a second, nothing elsewhere; yields what takes how much is done and there is."""
    from rich.progress import Progress  # it takes a moment

    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(what, total=None)
    began = time.monotonic()

    def advanced(done: int, total: int) -> None:
        if time.monotonic() - began > SHOWN_AFTER_SECONDS:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advanced
    finally:
        bar.stop()


def time_of(microseconds: int) -> str:
    """Return a time in this machine's time zone, to the second."""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def indented(text: str, style: str = "", below: int = 0) -> RenderableType:
    """A text of others, moved to the right, with so many empty lines below it."""
    return Padding(Text(for_terminal(text), style), (0, 0, below, INDENT), expand=False)


def marks_of(chunk: FoundChunk | LogEvent) -> list[tuple[str, str]]:
    """The marks beside a chunk's id, each behind two spaces and with its style: where a note or document is from, whose
    it is, and whether it looks like an instruction to a model."""
    place = [f"page {chunk.page}"] if chunk.page else [f"sheet {chunk.sheet}"] if chunk.sheet else []
    words = [chunk.kind, " > ".join(chunk.heading), chunk.source or "", *place, *(f"#{tag}" for tag in chunk.tags)]
    told = [word for word in words if word and chunk.kind != "turn"] + ([f"by {chunk.author}"] if chunk.author else [])
    marks = {"magenta": name_for_terminal(", ".join(told)), "yellow": instructing_words(chunk.instructs)}
    return [(f"  {text}", style) for style, text in marks.items() if text]


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
    wide = console.options.update_width(WIDE)
    too_wide = Measurement.get(console, wide, line).maximum - console.width
    if too_wide <= 0:
        return line
    columns: list[tuple[Column, int, int]] = []  # the natural width of each, and how much it can give
    for column in line.columns:
        parts = (column.header, column.footer, *column.cells)
        header, *cells = (Measurement.get(console, wide, cell) for cell in parts)
        most = max(cell.maximum for cell in (header, *cells))
        least = most if column.no_wrap else max(header.minimum, min(LEAST, max(cell.minimum for cell in cells)))
        columns.append((column, most, most - least))
    if sum(gives for _, _, gives in columns) < too_wide:
        return _as_records(line)
    for column, most, gives in sorted(columns, key=lambda one: -one[2]):
        given = min(gives, too_wide)
        too_wide -= given
        column.width, column.overflow = most - given, "fold"
    return line


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
