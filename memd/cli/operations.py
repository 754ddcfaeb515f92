"""Commands that show the answer of an operation of memd: path, parameters and answer come from its declaration.

Rule: a command adds how an answer looks and never what it is; the running daemon answers, or one inside the command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

import click
import msgspec
from msgspec import inspect as shape

from memd.admin.routing import route_of
from memd.cli.flags import FOUND_SOMETHING, Command, Number, with_settings
from memd.cli.running import RunningDaemon, daemon_for
from memd.cli.tables import Lines, print_lines
from memd.errors import BadQuestion
from memd.settings.model import Config

Answer = TypeVar("Answer")
json_flag = click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")


class RouteAnswer(msgspec.Struct, Generic[Answer], frozen=True):
    """The answer of an operation, and how it was asked for."""

    answer: Answer
    given: dict[str, Any]
    """The parameters that were given, by their names in the route."""
    daemon: RunningDaemon
    config: Config


def shows(
    operation: Callable[..., Any], *, check: Callable[[str], str] = str, nothing: str = "", **arguments: str
) -> Callable[[Callable[..., tuple[Lines, int]]], Command]:
    """Make a command of a function that takes the answer of an operation that reads, and its own options, and returns
    the lines for people and the exit code.

    Args:
        operation: the handler that declares it.
        check: of the part of the path that varies; raises BadQuestion where it is wrong.
        nothing: said where there are no lines, with exit code 1.
        arguments: by the names of parameters that are no options their metavars; `id` is the part of the path.
    """
    query = route_of(operation).query

    def command_of(lines_of: Callable[..., tuple[Lines, int]]) -> Command:
        def asking(config: Config, as_json: bool, **given: Any) -> int:
            for name, metavar in arguments.items():
                if given[name] is not None and not given[name].strip():
                    raise BadQuestion(f"the {metavar.strip('[]').lower()} is empty; say what to look for")
            id_ = check(given.pop("id")) if "id" in arguments else ""
            chosen = asked_with(query, given)
            own = {name: value for name, value in given.items() if name not in parameters_of(query)}
            with daemon_for(config) as daemon:
                answer = daemon.ask(operation, id_, **chosen)
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
    """The fields of a query or body, by the names that clients give."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def asked_with(query: type[msgspec.Struct], given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a query among the options, those that were given."""
    known = parameters_of(query)
    return {name: value for name, value in given.items() if name in known and value not in (None, (), False)}


def options_of(
    kind: type[msgspec.Struct], *, leave_out: Collection[str] = (), only: Collection[str] = (), **flags: str
) -> Callable[[Command], Command]:
    """Add an option for each field of a query or body, with its description, its bounds and its default.

    Args:
        only: the fields that get one; none: all but those of `leave_out`.
        flags: the flags of those that are not called as their field.
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
        more["type"] = click.Choice(list(map(str, info.values)))
    elif isinstance(info, shape.IntType):
        more["type"] = Number(info.ge, info.le)
    elif isinstance(info, shape.CustomType):
        more["metavar"] = "TIME"
    if field.default not in (msgspec.NODEFAULT, None, "", (), False) and "Default" not in told:
        told = f"{told} Default: {field.default}."
    return click.option(flag, name, help=told, **more)
