"""`memd reembed`, the command that writes to the log without a daemon, and the bar that long commands show.

Rule: it takes the lock of the data directory, so no daemon runs meanwhile; interrupted, it is simply run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from memd.cli.flags import FOUND_SOMETHING, config_of_existing, refuse_cluster, settings_flags
from memd.ingest.offline import reembed as embed_again
from memd.wording import counted

SHOWN_AFTER_SECONDS = 1.0


@click.command()
@settings_flags
def reembed(config_path: Path | None, data_dir: str | None) -> int:
    """Re-embed chunks that another model embedded.

    The daemon must not run. Interrupted, it goes on when it is run again.

    Example: memd reembed
    """
    config = config_of_existing(config_path, data_dir)
    refuse_cluster(
        config, "memd move the topics into a folder, run memd reembed --data-dir there, and memd move them back"
    )
    with progress("embedding") as advanced:
        count, problems = embed_again(config, advanced)
    for problem in problems:
        click.echo(problem)
    click.echo(f"{config.data_dir}: {counted(count, 'chunk')} embedded again")
    return FOUND_SOMETHING if problems else 0


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal after a second, nothing elsewhere; yields what takes how much is done and there is."""
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
