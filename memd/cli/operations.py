"""Commands that print the answer of an operation; path, parameters and answer type come from its declaration.

Rule: a command adds only the layout of an answer; the running daemon answers, or one inside the command. Untrusted text
cannot control the terminal. No table cell is cut, because a cut id can be neither copied nor told from another: columns
with `no_wrap` keep their width, the others wrap, and if even that does not fit, each row becomes several lines.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click
import msgspec
from msgspec import inspect as shape
from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memd.admin.routing import route_of
from memd.cli.flags import FOUND_SOMETHING, Command, Number, OneOf, say, with_settings
from memd.cli.running import RunningDaemon, daemon_for
from memd.errors import BadQuestion
from memd.settings.model import Config
from memd.wording import for_terminal, instructing_words, name_for_terminal

if TYPE_CHECKING:
    from memd.admin.reads import LogEvent
    from memd.recall.explained import FoundChunk

Lines = list[RenderableType]
LEAST = 16
"""A column shrinks to its longest word, or to this if that word is longer: a turn's id has 16 characters."""
INDENT = 2
SHOWN_AFTER_SECONDS = 1.0
TOLD_SECONDS = 10.0
WIDE = 100_000
"""Width in columns at which no line breaks."""


def print_lines(lines: Sequence[RenderableType]) -> None:
    """Print to a terminal in its width; to anything else without line breaks and trailing spaces."""
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
    """Show a bar on a terminal after a second, elsewhere a line now and then; yields a function of done and total.
    SIGTERM interrupts as Ctrl-C does."""
    from rich.progress import Progress  # slow to import

    console, is_over = Console(stderr=True), threading.Event()
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(what, total=None)
    began = time.monotonic()

    def tell() -> None:
        while not is_over.wait(TOLD_SECONDS):
            say(f"{what}: {bar.tasks[0].percentage:.0f} % done after {time.monotonic() - began:.0f} s")

    if bar.disable:
        threading.Thread(target=tell, name="memd-progress", daemon=True).start()
    is_main = threading.current_thread() is threading.main_thread()
    former = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None

    def advanced(done: int, total: int) -> None:
        if time.monotonic() - began > SHOWN_AFTER_SECONDS:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advanced
    finally:
        is_over.set()
        bar.stop()
        if is_main:
            signal.signal(signal.SIGTERM, former)


def time_of(microseconds: int) -> str:
    """Format a time in this machine's time zone, to the second."""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def indented(text: str, style: str = "", below: int = 0) -> RenderableType:
    """Return untrusted text, indented, followed by `below` empty lines."""
    return Padding(Text(for_terminal(text), style), (0, 0, below, INDENT), expand=False)


def marks_of(chunk: FoundChunk | LogEvent) -> list[tuple[str, str]]:
    """Return the marks beside a chunk's id with their styles, each after two spaces: its origin, its author, and a
    warning if it looks like an instruction to a model."""
    place = [f"page {chunk.page}"] if chunk.page else [f"sheet {chunk.sheet}"] if chunk.sheet else []
    words = [
        "" if chunk.kind == "turn" else chunk.kind,
        " > ".join(chunk.heading),
        chunk.source or "",
        *place,
        *(f"#{tag}" for tag in chunk.tags),
    ]
    told = [word for word in words if word] + ([f"by {chunk.author}"] if chunk.author else [])
    marks = {"magenta": name_for_terminal(", ".join(told)), "yellow": instructing_words(chunk.instructs)}
    return [(f"  {text}", style) for style, text in marks.items() if text]


def table(*columns: str, right: Collection[str] = (), whole: Collection[str] = (), **more: Any) -> Table:
    """Return a table without rows; columns in `whole` keep their width."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", **more)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=name in whole)
    return made


def fitting(line: RenderableType, console: Console) -> RenderableType:
    """Return the line as printed on the console; a table that is too wide is narrowed, or becomes records."""
    if not isinstance(line, Table):
        return line
    wide = console.options.update_width(WIDE)
    too_wide = Measurement.get(console, wide, line).maximum - console.width
    if too_wide <= 0:
        return line
    columns: list[tuple[Column, int, int]] = []  # each with its natural width and how much it can shrink
    for column in line.columns:
        parts = (column.header, column.footer, *column.cells)
        header, *cells = (Measurement.get(console, wide, cell) for cell in parts)
        most = max(cell.maximum for cell in (header, *cells))
        least = most if column.no_wrap else max(header.minimum, min(LEAST, max(cell.minimum for cell in cells)))
        columns.append((column, most, most - least))
    if sum(gives for _, _, gives in columns) < too_wide:
        return _as_records(line)
    left = [gives for *_, gives in columns]
    for _ in range(too_wide):
        left[left.index(max(left))] -= 1
    for (column, most, gives), one in zip(columns, left, strict=True):
        column.width, column.overflow = most - gives + one, "fold"
    return line


def _as_records(table: Table) -> RenderableType:
    """Return the rows as records: the first cell that is not empty, then the others with their names."""
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


Answer = TypeVar("Answer")
json_flag = click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")


class RouteAnswer(msgspec.Struct, Generic[Answer], frozen=True):
    """The answer of an operation, and its request."""

    answer: Answer
    given: dict[str, Any]
    """The given parameters, by their names in the route."""
    daemon: RunningDaemon
    config: Config


def shows(
    operation: Callable[..., Any], *, nothing: str = "", listing: Callable[..., Any] | None = None, **arguments: str
) -> Callable[[Callable[..., tuple[Lines, int]]], Command]:
    """Make a command from a function that takes the answer of a reading operation and its own options, and returns the
    lines for people and the exit code.

    Args:
        operation: the handler with the declaration.
        nothing: printed if there are no lines, with exit code 1.
        listing: the handler that answers if no argument is given, or only one of its own parameters.
        arguments: metavars, by name, of parameters that are arguments, not options; `id` is the part of the path.
    """
    query = route_of(operation).query

    def command_of(lines_of: Callable[..., tuple[Lines, int]]) -> Command:
        def asking(config: Config, as_json: bool, **given: Any) -> int:
            for name, metavar in arguments.items():
                if given[name] is not None and not given[name].strip():
                    raise BadQuestion(f"the {metavar.strip('[]').lower()} is empty; say what to look for")
            id_ = given.pop("id") if "id" in arguments else ""
            asked, chosen = operation, asked_with(query, given)
            own = {name: value for name, value in given.items() if name not in parameters_of(query)}
            if listing is not None and not arguments.keys() & chosen.keys():
                asked, filters = listing, chosen.keys() - {"limit"}
                if not filters or not filters <= parameters_of(route_of(listing).query).keys() or any(own.values()):
                    context = click.get_current_context()
                    missing = next(one for one in context.command.params if isinstance(one, click.Argument))
                    raise click.MissingParameter(ctx=context, param=missing)
            with daemon_for(config) as daemon:
                answer = daemon.ask(asked, id_, **chosen)
                lines, exit_code = lines_of(RouteAnswer(answer, chosen, daemon, config), **own)
            if nothing and not lines and not as_json:
                lines, exit_code = [nothing], FOUND_SOMETHING
            show(answer, lines, as_json=as_json)
            return exit_code

        command: Command = functools.update_wrapper(asking, lines_of)
        for name, metavar in reversed(arguments.items()):
            command = click.argument(name, metavar=metavar, required=not metavar.startswith("["))(command)
        return with_settings()(options_of(query, leave_out=arguments)(json_flag(command)))

    return command_of


def show(answer: object, lines: Lines, *, as_json: bool) -> None:
    """Print an answer, as JSON or as lines for people."""
    click.echo(msgspec.json.encode(answer)) if as_json else print_lines(lines)


def parameters_of(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a query or body, by the names that clients use."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def asked_with(query: type[msgspec.Struct], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options that are parameters of a query."""
    known = parameters_of(query)
    return {name: value for name, value in given.items() if name in known and value not in (None, (), False)}


def options_of(
    kind: type[msgspec.Struct], *, leave_out: Collection[str] = (), only: Collection[str] = (), **flags: str
) -> Callable[[Command], Command]:
    """Add an option for each field of a query or body, with its description, bounds and default.

    Args:
        only: the fields that get an option; empty: all except `leave_out`.
        flags: flags that differ from their field's name.
    """
    names = [name for name in parameters_of(kind) if name not in leave_out and (not only or name in only)]

    def with_options(command: Command) -> Command:
        for name in reversed(names):
            command = _option(kind, name, flags.get(name) or f"--{name.replace('_', '-')}")(command)
        return command

    return with_options


def _option(kind: type[msgspec.Struct], name: str, flag: str) -> Callable[[Command], Command]:
    field = parameters_of(kind)[name]
    info = shape.type_info(field.type)
    assert isinstance(info, shape.Metadata), f"{kind.__name__}.{name} has no description"
    told, info = str((info.extra_json_schema or {})["description"]), info.type
    more: dict[str, Any] = {}
    if isinstance(info, shape.UnionType):
        info = next(one for one in info.types if not isinstance(one, shape.NoneType | shape.IntType))
    if isinstance(info, shape.VarTupleType | shape.ListType):
        more, info = {"multiple": True}, info.item_type
        if "may be given again" not in told:
            told = f"{told.removesuffix('.')}; may be given again."
    if isinstance(info, shape.BoolType):
        more["is_flag"] = True
    elif isinstance(info, shape.LiteralType):
        more["type"] = OneOf(list(map(str, info.values)))
    elif isinstance(info, shape.IntType):
        more["type"] = Number(info.ge, info.le)
    elif isinstance(info, shape.CustomType):
        more["metavar"] = "TIME"
    if field.default not in (msgspec.NODEFAULT, None, "", (), False) and "Default" not in told:
        told = f"{told} Default: {field.default}."
    return click.option(flag, name, help=told, **more)
