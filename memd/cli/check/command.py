"""`memd check` and `memd completion`: commands about memd itself.

Rule: the checks are imported when they are needed, as `memd completion` runs at the start of every shell.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from click.shell_completion import get_completion_class

from memd.cli.flags import FOUND_SOMETHING, servers_of, settings_flags, upstream_flag

if TYPE_CHECKING:
    from memd.cli.check.result import CheckResult

SHELLS = ("bash", "zsh", "fish")


@click.command()
@settings_flags
@upstream_flag("The model server, or several. Default: the running daemon's, else upstream.url.")
@click.option("--live", is_flag=True, help="Also hold a short conversation with the model, in a temporary folder.")
@click.option("--json", "as_json", is_flag=True, help="All outcomes as one JSON object.")
def check(config_path: Path | None, data_dir: str | None, upstream: tuple[str, ...], live: bool, as_json: bool) -> int:
    """Say whether everything is ready, and if not, what to do.

    Exit code 1 if anything failed.

    Example: memd check --live
    """
    from memd.cli.check.report import line, outcomes, summary
    from memd.cli.ingest import progress

    logging.getLogger("memd").addHandler(logging.NullHandler())  # the results say it
    flags = {"data_dir": data_dir, **servers_of(upstream)}
    given = {name: value for name, value in flags.items() if value is not None}
    with progress("checking") as advanced:  # to the end: its first line is whether all is well
        found: list[CheckResult] = []
        for outcome in outcomes(config_path, os.environ, given, live=live):
            found.append(outcome)
            advanced(len(found), len(found) + 1)
    is_ready = all(outcome.mark != "failed" for outcome in found)
    if as_json:
        click.echo(msgspec.json.encode({"ok": is_ready, "checks": found}))
    else:
        click.echo("\n".join([summary(found), "", *map(line, found)]))
    return 0 if is_ready else FOUND_SOMETHING


@click.command()
@click.argument("shell", metavar="SHELL", type=click.Choice(SHELLS))
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
