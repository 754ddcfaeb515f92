"""`memd import` and `memd reembed`: the commands that write to the log without a daemon.

Rule: they take the lock of the data directory, so no daemon runs meanwhile; interrupted, they are simply run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from memd.cli.flags import FOUND_SOMETHING, config_of, config_of_existing, settings_flags
from memd.ingest.importing import import_file
from memd.ingest.reembedding import reembed as embed_again
from memd.wording import counted, tallied


@click.command(name="import")
@settings_flags
@click.option("--topic", help="Put everything into this topic.")
@click.argument("file", metavar="FILE.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def import_(config_path: Path | None, data_dir: str | None, topic: str | None, file: Path) -> int:
    """Add the entries or conversations in FILE.jsonl to the log.

    A line is an entry of `memd export`, or a conversation: a JSON array of messages in OpenAI's format, or an object
    with such an array as `messages`. What the log has already is left out, so an interrupted import can simply be
    repeated. Stop the daemon first.
    """
    config = config_of(config_path, {"data_dir": data_dir})
    with progress("importing") as advanced:
        counts = import_file(config, file, topic_id=topic, advanced=advanced)
    said = [f"{file}: {counted(counts.lines, 'line')} read"]
    if counts.entries or counts.entries_known:
        said.append(f"{counted(counts.entries, 'entry')} imported, {counts.entries_known:,} there already")
    if counts.conversations:
        said.append(
            f"{counted(counts.conversations, 'conversation')} imported as {counted(counts.chunks, 'chunk')}, "
            f"{counted(counts.messages_known, 'message')} there already or empty"
        )
    if counts.times_refused:
        said.append(
            f"{counted(counts.times_refused, 'time')} in the future, before 1980 or unreadable: dated by the message "
            "before, or as said now"
        )
    if counts.redacted:
        said.append(f"redacted: {tallied(counts.redacted)}")
    click.echo("; ".join(said))
    return 0


@click.command()
@settings_flags
def reembed(config_path: Path | None, data_dir: str | None) -> int:
    """Re-embed chunks that another model embedded.

    Until then, memd does not find them after a change of embedding.model. An interrupted run loses nothing: the next
    one continues where it stopped. Stop the daemon first.
    """
    config = config_of_existing(config_path, data_dir)
    with progress("embedding") as advanced:
        count, problems = embed_again(config, advanced)
    for problem in problems:
        click.echo(problem)
    click.echo(f"{config.data_dir}: {counted(count, 'chunk')} embedded again")
    return FOUND_SOMETHING if problems else 0


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, nothing elsewhere; what is yielded takes how much is done and how much there is."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
