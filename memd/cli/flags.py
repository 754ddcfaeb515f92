"""Flags, settings and output shared by commands, and the list of the user's data directories.

Rule: nothing here does a command's work. By default a memory is in the working folder, so another folder has another
one. Therefore `memd/memories` below `$XDG_STATE_HOME` (`~/.local/state`) lists their paths for people, latest first. No
command opens a memory because it is listed, and an unreadable or unwritable list is ignored silently.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from memd.errors import BadQuestion, ConfigError, StoreError
from memd.settings.loading import load_config, places_of_settings
from memd.settings.model import Config
from memd.wording import for_terminal, meant

FOUND_SOMETHING = 1
WRONG_USAGE = 2
FILES_TOLD = 10

Command = Callable[..., int]


def say(text: str) -> None:
    """Print a message on stderr, apart from the result."""
    click.echo(f"memd: {for_terminal(text)}", err=True)


class Number(click.IntRange):
    """A whole number within bounds, with memd's own error message."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See `click.ParamType.convert`."""
        try:
            number: int = super().convert(value, param, ctx)
        except click.BadParameter:
            least, most = (None if one is None else f"{one:,}" for one in (self.min, self.max))
            bounds = f" from {least} to {most}" if least and most else f" of at least {least}" if least else ""
            self.fail(f"{value!r} is no whole number{bounds}", param, ctx)
        return number


class Place(click.Path):
    """The path of a file or folder; the error for a missing one says what to name."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """See `click.ParamType.convert`."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            wanted, path = "folder" if self.dir_okay else "file", Path(value)
            if not path.exists():
                self.fail(f"there is no {wanted} {str(path)!r}; name one that there is", param, ctx)
            if path.is_dir() != self.dir_okay:
                is_a = "folder" if path.is_dir() else "file"
                self.fail(f"{str(path)!r} is a {is_a}; name a {wanted}", param, ctx)
            self.fail(f"{str(path)!r} may not be read; name another, or give yourself the right to", param, ctx)


FILE = Place(exists=True, dir_okay=False, path_type=Path)
FOLDER = Place(file_okay=False, path_type=Path)


class OneOf(click.Choice[str]):
    """One of a few words; the error suggests the nearest one. `others`: the suggestion if none is near."""

    def __init__(self, choices: Sequence[str], others: str = "") -> None:
        super().__init__(choices)
        self.others = others

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """See `click.Choice`."""
        all_there_are = f"there are {', '.join(self.choices)}{self.others}"
        return f"there is no {value!r}; {meant(str(value), self.choices, all_there_are)}"


def name_of(parameter: click.Parameter) -> str:
    """Return the name that people see for a parameter: its flag, or its placeholder in the help (QUESTION)."""
    if isinstance(parameter, click.Option):
        return parameter.opts[0]
    return parameter.human_readable_name.strip("[].")


class CommandGroup(click.Group):
    """A group that suggests the nearest command for a misspelt one, and whose help shows first sentences uncut."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the named command. Raises BadQuestion: it does not exist."""
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            lists = f"`{ctx.command_path} --help` lists them"
            raise BadQuestion(f"there is no command {args[0]!r}; {meant(args[0], self.list_commands(ctx), lists)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help."""
        listed = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            helps = ((name, command.help or "") for name, command in listed.items() if command is not None)
            formatter.write_dl([(name, " ".join(help_.partition("\n\n")[0].split())) for name, help_ in helps])


def settings_flags(command: Command) -> Command:
    """Add the flags that every command on a data directory takes."""
    config = click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        help="Settings file. Default: the one MEMD_CONFIG names, else ./config.yaml if there is one.",
    )
    data_dir = click.option(
        "--data-dir", type=Place(file_okay=False), help="Folder of the log. Default: data_dir of the settings."
    )
    return config(data_dir(command))


def upstream_flag(help_: str) -> Callable[[Command], Command]:
    """Add the repeatable flag that names a model server."""
    return click.option("--upstream", metavar="URL", multiple=True, help=help_)


def model_flag(help_: str) -> Callable[[Command], Command]:
    """Add the flag that names a model's file."""
    return click.option("--model", metavar="FILE.gguf", type=FILE, help=help_)


def servers_of(upstream: Sequence[str]) -> dict[str, object]:
    """Return the setting for the model servers of the command line; empty if there are none."""
    if len(upstream) > 1:
        return {"upstream.urls": list(upstream)}
    return {"upstream.url": upstream[0]} if upstream else {}


def with_settings(
    load: Callable[[Path | None, dict[str, Any]], Config] | None = None, *, takes_key: bool = False
) -> Callable[[Callable[..., int]], Command]:
    """Make a command on a data directory from a function; it adds the flags and passes the settings as `config`.
    `load`: returns the settings; None: `config_of_existing`. `takes_key`: add `key_flag` too."""

    def with_flags(command: Callable[..., int]) -> Command:
        @functools.wraps(command)
        def configured(config_path: Path | None, data_dir: str | None, key_stdin: bool = False, **given: Any) -> int:
            named = {"data_dir": data_dir, "encryption.key": key_of(key_stdin)}
            return command(config=(load or config_of_existing)(config_path, named), **given)

        return settings_flags(key_flag(configured) if takes_key else configured)

    return with_flags


def key_flag(command: Command) -> Command:
    """Add the flag that reads the encryption master key from standard input; no flag takes the key itself."""
    return click.option(
        "--key-stdin", is_flag=True, help="Read the key of the encrypted data directory from standard input: one line."
    )(command)


def key_of(key_stdin: bool) -> str | None:
    """Return the next line of standard input if `key_stdin`, otherwise None. Raises ConfigError: there is no line."""
    if not key_stdin:
        return None
    if not (line := sys.stdin.readline().strip()):
        raise ConfigError("standard input has no key: give it in one line")
    return line


def removed_files(left: Sequence[str], why: str) -> str:
    """Say what became of old files. `left`: those that could not be overwritten, and `why`."""
    told = "The old files were overwritten and removed"
    end = "Flash disks, file systems that copy on write, snapshots and backups may keep old blocks."
    if not left:
        return f"{told}. {end}"
    more = [f"and {len(left) - FILES_TOLD:,} more"] if len(left) > FILES_TOLD else []
    told += f", but for {len(left):,} that could not be overwritten, because {why}:"
    return "\n  ".join([told, *map(for_terminal, left[:FILES_TOLD]), *more]) + f"\n{end}"


def config_of(path: Path | None, given: dict[str, Any], *, tells_each: bool = False) -> Config:
    """Return the settings, overridden by the given flags (None: not given). Reports settings of earlier versions: one
    line each, or one line for several unless `tells_each`. Raises ConfigError: a setting is wrong."""
    flags = {key: value for key, value in given.items() if value is not None}
    told: list[str] = []
    config = load_config(path, os.environ, flags, tell=told.append)
    if len(told) > 1 and not tells_each:
        place = told[0].partition(": ")[0]
        told = [f"{len(told)} settings have no effect any more, from {place} on; `memd check` says why, and what to do"]
    for line in told:
        say(line)
    return config


def config_of_existing(path: Path | None, given: dict[str, Any]) -> Config:
    """Return the settings, as `config_of`, for a command on an existing memory. Raises ConfigError: a setting is wrong,
    or see `check_memory`."""
    config = config_of(path, given)
    if not config.cluster.is_on:  # a cache may be missing
        check_memory(config.data_dir, memory_elsewhere(config))
    return config


def check_memory(folder: Path, elsewhere: str = "") -> None:
    """Raise ConfigError unless a folder exists and has files of memd or is empty, as an empty memory is. `elsewhere`:
    says where else a memory is."""
    from memd.store.disk import LocalDisk
    from memd.store.layout import is_memory  # imports numpy, which --help does not need

    is_folder = folder.is_dir()
    is_empty = is_folder and all(one.name.startswith(".") for one in folder.iterdir())  # ignores .gitkeep
    if not (is_empty or is_memory(LocalDisk(), folder)):
        what = "is no memory: it has nothing of memd in it" if is_folder else "there is no such folder"
        names = "name a data directory (--data-dir) or a backup; `memd serve`, `memd add` and `memd remember` begin one"
        raise ConfigError(elsewhere or f"{folder}: {what}; {names}")


def config_to_begin(path: Path | None, given: dict[str, Any]) -> Config:
    """Return the settings, as `config_of`, for a command that may create a memory. Raises ConfigError: a setting is
    wrong, or a memd runs on another folder's memory and the user did not name one."""
    config = config_of(path, given)
    path, places = places_of_settings(path, os.environ, {})
    is_told = path is not None or "data_dir" in places or given["data_dir"] is not None or config.cluster.is_on
    is_served = functools.partial(_is_used, only_served=True)
    if not is_told and not config.data_dir.exists() and (served := next(_noted(is_served), None)):
        raise ConfigError(
            f"memd runs on {served}, and this folder has no memory of its own: for that one give --data-dir {served} "
            f"(or set MEMD_DATA_DIR), for a new one here --data-dir {Config().data_dir}"
        )
    return config


def refuse_cluster(config: Config, instead: str) -> None:
    """Make sure that a data directory holds its topics itself. `instead`: advice if it does not. Raises StoreError: it
    is the cache of a cluster."""
    from memd.store.layout import CLUSTER_NAME  # imports numpy, which --help does not need

    if config.cluster.is_on or (config.data_dir / CLUSTER_NAME).exists():
        raise StoreError(f"{config.data_dir}: is the cache of a cluster, which keeps its topics elsewhere; {instead}")


KEPT_MAX = 20
NAMED_MAX = 3
_CANNOT_BE_READ = (OSError, ValueError, RuntimeError)
"""Errors of the list: on the disk, in its text, or because the user has no home."""


def note_memory(config: Config) -> None:
    """Add a daemon's data directory to the list; if it is empty, say where else something is remembered."""
    data_dir = config.data_dir
    if elsewhere := memory_elsewhere(config):
        say(elsewhere)
    with suppress(*_CANNOT_BE_READ):
        path, known = _note()
        if known[:1] != [data_dir]:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [data_dir, *(one for one in known if one != data_dir and one.is_dir())][:KEPT_MAX]
            path.write_text("".join(f"{one}\n" for one in kept if "\n" not in str(one)))


def memory_elsewhere(config: Config) -> str:
    """Say where else something is remembered or a memd runs; empty unless the user named no memory, and the working
    folder's is empty and without a memd."""
    data_dir, context = config.data_dir, click.get_current_context(silent=True)
    is_named = "MEMD_DATA_DIR" in os.environ or (context is not None and context.params.get("data_dir") is not None)
    if config.cluster.is_on or is_named or data_dir != Config().data_dir.absolute() or _is_used(data_dir):
        return ""
    others = [str(one) for one in _noted(_is_used) if one != data_dir]
    if not others:
        return ""
    return (
        f"nothing is remembered yet in {data_dir}, the memory of this folder. If you meant another one "
        f"({', '.join(others[:NAMED_MAX])}), name it: --data-dir {others[0]}, or MEMD_DATA_DIR, or in a settings file"
    )


def _noted(is_meant: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield the listed memories that match, latest first, without backups, which are only inspected."""
    from memd.store.tools.backup import MARKER_NAME  # imports numpy, which --help does not need

    with suppress(*_CANNOT_BE_READ):
        yield from (one for one in _note()[1] if is_meant(one) and not (one / MARKER_NAME).exists())


def _is_used(folder: Path, *, only_served: bool = False) -> bool:
    """Return whether a daemon holds a folder or, unless `only_served`, topics are in it."""
    from memd.store.disk import LocalDisk
    from memd.store.layout import LOCK_NAME, topic_ids_in

    with suppress(OSError, StoreError):
        disk = LocalDisk()
        return disk.is_locked(folder / LOCK_NAME) or (not only_served and bool(topic_ids_in(disk, folder)))
    return False


def _note() -> tuple[Path, list[Path]]:
    """Return the path of the list and the data directories in it; raises `_CANNOT_BE_READ`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    path = (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "memd" / "memories"
    return path, [Path(line) for line in path.read_text().splitlines()] if path.exists() else []
