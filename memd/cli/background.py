"""`memd background`: pauses and resumes what a running daemon does by itself.

Rule: the daemon pauses; without one there is nothing to pause.
"""

from __future__ import annotations

from pathlib import Path

import click

from memd.cli.flags import WholeSentences, config_of_existing, settings_flags
from memd.cli.running import RunningDaemon
from memd.errors import DaemonError


@click.group(cls=WholeSentences)
def background() -> None:
    """Pause or resume background work of the running daemon.

    For measurements; what is said meanwhile waits in the journal.

    Example: memd background pause
    """


@background.command()
@settings_flags
def pause(config_path: Path | None, data_dir: str | None) -> int:
    """Begin no background work until it is resumed, or the daemon ends."""
    _set(config_path, data_dir, paused=True)
    click.echo("background work is paused; what is under way goes on to its end (memd background resume)")
    return 0


@background.command()
@settings_flags
def resume(config_path: Path | None, data_dir: str | None) -> int:
    """Go on with background work."""
    _set(config_path, data_dir, paused=False)
    click.echo("background work goes on")
    return 0


def _set(config_path: Path | None, data_dir: str | None, *, paused: bool) -> None:
    config = config_of_existing(config_path, data_dir)
    daemon = RunningDaemon.find(config.data_dir, config.auth.token)
    if daemon is None:
        raise DaemonError(f"no daemon is running on {config.data_dir}; start it with memd serve")
    daemon.post("/memd/background", {"paused": paused})
