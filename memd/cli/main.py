"""The `memd` command: a group that imports a command's module on first use.

Rule: a command reads its flags, calls the code that does the work and turns the outcome into an exit code: 0 fine, 1 a
finding or failure, 2 wrong usage or settings. Errors, including click's, are one line on stderr with a remedy; any
other exception is a bug and keeps its traceback. `memd --help` needs only the list below, because importing the
commands' modules takes up to a second.
"""

from __future__ import annotations

import codecs
import gc
import importlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

import click
from click.shell_completion import CompletionItem, get_completion_class

from memd import __version__
from memd.cli.flags import FOUND_SOMETHING, WRONG_USAGE, CommandGroup, OneOf, name_of, say, settings_flags
from memd.errors import BadQuestion, BadTopicId, ConfigError, MemdError, NotFound, UnknownTopic
from memd.wording import meant

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Every day": {
        "serve": ("serve", "Run the daemon until Ctrl-C or SIGTERM."),
        "setup": ("setup", "Write memd's base URL into the agents that are installed."),
        "check": ("check.report", "Say whether everything is ready, and if not, what to do."),
        "search": ("views", "Show the chunks that a new chat with QUESTION would get."),
        "add": ("sources", "Remember what stands in the files and folders PATH..."),
        "remember": ("sources", "Remember TEXT, without a chat."),
        "turn": ("views", "Show what memory did in a turn, and why."),
        "log": ("views", "Show what happened to the memory, newest first."),
        "correct": ("changes", "Mark the chunks ID... as helpful, unhelpful or wrong."),
        "undo": ("changes", "Take back the latest correction of the chunk ID."),
    },
    "Look": {
        "show": ("views", "Show the versions of the chunk ID, and where it was shown."),
        "stats": ("data_dir", "Show what is stored, and how fast a running daemon finds it."),
        "digest": ("views", "Show what was said, by day or week."),
        "related": ("views", "Show what belongs to the chunk ID without being said beside it."),
        "entities": ("views", "Show the names in what is stored, or the chunks that have NAME."),
        "usage": ("views", "Show the tokens that requests took, by day, topic and model."),
    },
    "Keep safe": {
        "backup": ("data_dir", "Back up the log to DIR, or update the backup there."),
        "restore": ("data_dir", "Restore a data directory from its backup FROM into DIR."),
        "verify": ("data_dir", "Read every byte of the log and report any damage."),
        "export": ("data_dir", "Write the log as JSON Lines, one entry per line, oldest first."),
        "encrypt": ("data_dir", "Encrypt the data directory, change its key, or go back to plain text."),
        "erase": ("changes", "Erase a topic, or single chunks, for good."),
    },
    "Bring in": {
        "sources": ("sources", "List the documents that were added, or take some out."),
        "index": ("sources", "Look at the sources of the settings now."),
        "model": ("data_dir", "Add an embedding model, list or remove those that were added."),
        "reembed": ("data_dir", "Re-embed chunks that another model embedded."),
    },
    "Team": {
        "token": ("team", "Make, list and take back tokens for others, each with its topics and rights."),
        "audit": ("team", "Show who read, wrote, corrected, erased and exported what."),
        "move": ("data_dir", "Move topics between a folder and a cluster."),
    },
    "Service": {
        "config": ("serve", "Print all settings with their defaults and what they mean."),
        "mcp": ("serve", "Speak MCP on standard input and output, for agents."),
        "completion": ("main", "Print the script that completes commands of memd in SHELL."),
        "demo": ("serve", "Play a long conversation and show what is remembered."),
    },
}
"""The commands in the order of the help. By name: its module below `memd.cli`, and the first sentence of its help."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
FORMER = {"decrypt": "data_dir", "import": "sources", "key": "data_dir", "rekey": "data_dir"}
"""Former commands that still work and are now part of another one: modules by name. No help lists them."""

SHELLS = ("bash", "zsh", "fish")
OTHERS_CALL_IT = {
    "`memd check`": "doctor health status",
    "`memd config`": "settings",
    "`memd sources --remove` (a document) or `memd erase` (anything, for good)": "delete forget remove rm",
    "`memd log`": "history",
    "`memd remember`": "note",
    "`memd search`": "find query",
    "`memd serve`": "run start",
    "`memd stats`": "list ls",
    "Ctrl-C where `memd serve` runs, or SIGTERM,": "stop",
}
"""memd's command for names of commands in other programs, where the nearest spelling would be wrong (`forget`:
correct)."""


class AllCommands(CommandGroup):
    """Imports commands on first use; they return their exit code and may raise `MemdError`."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the named command, print an error as one line, and exit with its exit code."""
        show_what_it_can(sys.stdout)  # the help may also have characters that the terminal cannot show
        os.umask(0o077)  # files written by a command are private to its user
        try:
            code = super().main(*args, **extra | {"standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = WRONG_USAGE
        except (click.ClickException, click.Abort, MemdError) as error:
            said, code = _problem(error)
            say(said)
        return sys.exit(code) if extra.get("standalone_mode", True) else code

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`; `help COMMAND` is `COMMAND --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See CommandGroup; also knows other programs' names of commands."""
        own = next((own for own, names in OTHERS_CALL_IT.items() if args[0] in names.split()), "")
        if own and not ctx.resilient_parsing:
            raise BadQuestion(f"there is no command {args[0]!r}; {own} does that here")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context | None = None) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """Import and return the command of this name."""
        name = FORMER.get(cmd_name) or COMMANDS.get(cmd_name, ("", ""))[0]
        if not name:
            return None
        gc.disable()  # imported objects stay: scanning them takes 0.1 s
        module = importlib.import_module(f"memd.cli.{name}")
        gc.enable()
        command = getattr(module, "import_" if cmd_name == "import" else cmd_name)
        assert isinstance(command, click.Command), f"{command} is no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help, without importing them."""
        for title, group in GROUPS.items():
            with formatter.section(title):
                listed = [(name.ljust(max(map(len, COMMANDS))), summary) for name, (_, summary) in group.items()]
                formatter.write_dl(listed)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and flags that complete a word, without importing a command."""
        commands = [
            CompletionItem(name, help=summary) for name, (_, summary) in COMMANDS.items() if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)


def _problem(error: Exception) -> tuple[str, int]:
    """Return an error in words, with a remedy, and the exit code."""
    if isinstance(error, MemdError):
        is_missing = isinstance(error, NotFound) and not isinstance(error, UnknownTopic)
        wrong_usage = isinstance(error, ConfigError | BadTopicId | BadQuestion) and not is_missing
        return str(error), WRONG_USAGE if wrong_usage else FOUND_SOMETHING
    if isinstance(error, click.ClickException):
        return _usage_problem(error), error.exit_code
    if error.__cause__ is None:
        click.echo(err=True)  # ends the line of the prompt
    if isinstance(error.__context__, EOFError) and not sys.stdin.isatty():
        return "nobody is here to answer, so this was not done; --yes does it without asking", FOUND_SOMETHING
    told = str(error.__cause__ or "")
    return f"interrupted{told and f'; {told}'}", FOUND_SOMETHING


def _usage_problem(error: click.ClickException) -> str:
    """Return click's error about a command line in memd's words, with a remedy."""
    said = re.sub("^Option '(.*?)'", r"\1", error.message.rstrip("."))
    if isinstance(error, click.BadOptionUsage):
        flag, wants = error.option_name, "requires" in said
        return f"{flag} needs a value: {flag} VALUE" if wants else f"{flag} takes no value: write it alone"
    said, context = f"{said[:1].lower()}{said[1:]}", getattr(error, "ctx", None)
    if context is None:
        return said
    command, shows_how = context.command, f"`{context.command_path} --help` shows how"
    if isinstance(error, click.NoSuchOption):
        if other := _takes(context, error.option_name):
            return f"there is no option {error.option_name} here; `{other} {error.option_name}` takes it"
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        known = [flag.lstrip("-") for option in options for flag in option.opts]
        near = meant(error.option_name.lstrip("-"), known)  # the two dashes would make any two options similar
        return f"there is no option {error.option_name}; {near.replace('mean ', 'mean --') or shows_how}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        name = name_of(error.param)
        if not isinstance(error, click.MissingParameter):
            return f"{name}: {said}"
        example = re.search(r"^ *Example: (.+)$", command.help or "", re.MULTILINE)
        return f"{name} is missing; {f'for example: {example[1]}' if example else shows_how}"
    if surplus := re.search(r"unexpected extra argument.* \((.*)\)$", said):
        takes_one = any(isinstance(one, click.Argument) for one in command.params)
        in_quotes = "what belongs together stands in quotes" if takes_one else shows_how
        return f"{surplus[1]!r} is more than it takes; {in_quotes}"
    return f"{said}; {shows_how}"


def _takes(context: click.Context, flag: str) -> str:
    """Return another command of the same group below `memd` that takes a flag; empty if none does."""
    group = context.parent
    if group is None or group.parent is None or not isinstance(group.command, click.Group):
        return ""
    for name, command in group.command.commands.items():
        if any(flag in parameter.opts for parameter in command.params):
            return f"{group.command_path} {name}"
    return ""


@click.group(cls=AllCommands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="memd %(version)s")
@settings_flags
@click.pass_context
def main(ctx: click.Context, config_path: Path | None, data_dir: str | None) -> int:
    """A local daemon that gives any language model an unbounded memory without its client noticing.

    Without COMMAND: whether it runs, what is remembered and what to do next.
    Exit codes: 0 fine, 1 a finding or failure, 2 wrong usage or settings.
    """
    if ctx.invoked_subcommand is None:
        from memd.cli.data_dir import overview

        click.echo(overview(config_path, data_dir))
    elif config_path or data_dir:
        behind = f"memd {ctx.invoked_subcommand} --data-dir DIR"
        raise BadQuestion(f"--config and --data-dir stand behind the command: {behind}")
    return 0


@click.command()
@click.argument("shell", metavar="SHELL", type=OneOf(SHELLS))
def completion(shell: str) -> int:
    """Print the script that completes commands of memd in SHELL.

    SHELL is bash, zsh or fish.

    Example: memd completion fish > ~/.config/fish/completions/memd.fish
    """
    program = click.get_current_context().find_root()
    completer = get_completion_class(shell)
    assert completer is not None, "click knows these shells"
    click.echo(completer(program.command, {}, "memd", "_MEMD_COMPLETE").source())
    return 0


_LIKENESSES = str.maketrans(dict(zip("█░▸▪–—“”‘’", "#.>*--\"\"''", strict=True)) | {"…": "..."})


def show_what_it_can(stream: TextIO) -> None:
    """Replace characters that a stream's encoding lacks by similar ones, or by `?`."""
    codecs.register_error("likeness", _likeness)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="likeness")


def _likeness(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end].translate(_LIKENESSES)
    return "".join(one if one.isascii() else "?" for one in lacking), error.end
