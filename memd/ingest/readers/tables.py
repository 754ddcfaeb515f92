"""Tables as text: each row a paragraph of its own that names its columns, so that a question about a row finds it.

    Product: Lamp; Price: 20; Stock: 4

Rule: pure. The first row that could be one names the columns; what stands above it is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

HEADER_ROWS_MAX = 20
"""So many rows are looked at for one that names the columns."""
COLUMN_CHARACTERS_MAX = 80
CELL_CHARACTERS_MAX = 20_000


def table_text(rows: Iterable[Sequence[str]]) -> str:
    """Return the text of a table's rows; of cells, white space at their ends does not count."""
    return "\n\n".join(_paragraphs(rows))


def _paragraphs(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    waiting: list[list[str]] = []
    columns: list[str] | None = None
    for row in rows:
        cells = [" ".join(cell[:CELL_CHARACTERS_MAX].split()) for cell in row]
        if not any(cells):
            continue
        if columns is not None:
            yield _named(columns, cells)
        elif _names_columns(cells):
            yield from map(_bare, waiting)
            columns = [cell[:COLUMN_CHARACTERS_MAX] for cell in cells]
            header, waiting = cells, []
            continue
        else:
            waiting.append(cells)
            if len(waiting) > HEADER_ROWS_MAX or _has_figures(cells):
                columns = []
                yield from map(_bare, waiting)
                waiting = []
        header = []
    yield from map(_bare, waiting)
    if columns and header:  # nothing stood below it
        yield _bare(header)


def _names_columns(cells: Sequence[str]) -> bool:
    """Whether a row could name the columns: two cells or more, each another text without figures of its own."""
    given = [cell for cell in cells if cell]
    return len(given) >= 2 and len(set(given)) == len(given) and not _has_figures(cells)


def _has_figures(cells: Sequence[str]) -> bool:
    return any(_is_figure(cell) for cell in cells)


def _is_figure(cell: str) -> bool:
    """Whether a cell is an amount, a date, a percentage: something that is counted and named by its column."""
    return any(one.isdigit() for one in cell) and not any(one.isalpha() for one in cell)


def _named(columns: Sequence[str], cells: Sequence[str]) -> str:
    said = []
    for position, cell in enumerate(cells):
        column = columns[position] if position < len(columns) else ""
        said += [f"{column}: {cell}" if column else cell] if cell else []
    return "; ".join(said)


def _bare(cells: Sequence[str]) -> str:
    return "; ".join(cell for cell in cells if cell)
