"""`memd restore`: a data directory out of its backup, in a bucket or in a folder.

Rule: it writes into an empty folder alone, and names what a later `memd serve` needs.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from memd.cli.flags import config_of
from memd.errors import BadQuestion
from memd.store.bucket.objects import Bucket, at_url
from memd.store.bucket.restoring import restore as restore_from
from memd.store.bucket.restoring import restore_copy
from memd.store.disk import DiskFiles
from memd.store.layout import KEY_NAME
from memd.wanted import until as time_of
from memd.wording import counted, day_and_time, sized


@click.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings file with backup.endpoint.")
@click.option("--until", metavar="TIME", help="As it was then (2026-11-20T14:30), of a bucket.")
@click.option("--json", "as_json", is_flag=True, help="The outcome as one JSON object.")
@click.argument("source", metavar="FROM")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def restore(config_path: Path | None, until: str | None, as_json: bool, source: str, folder: Path) -> int:
    """Restore a data directory from its backup FROM into DIR.

    FROM is the folder of memd backup, or the backup.bucket of its settings. DIR is new or empty; interrupted, it goes
    on when it is run again.

    Example: memd restore s3://backups/memd ./memory
    """
    from rich.console import Console
    from rich.progress import Progress

    config = config_of(config_path, {})
    try:
        at = None if until is None else int(time_of(until))
    except ValueError:
        raise BadQuestion(f"{str(until)[:40]!r} is no time; write it like 2026-11-20T14:30") from None
    bucket = Bucket.of(at_url(config.backup, source), os.environ) if "://" in source else None
    if bucket is None and at is not None:
        raise BadQuestion(f"{source}: a folder has the state of its last `memd backup` alone; leave --until away")
    folder, console = folder.absolute(), Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("restoring", total=None)

        def tell(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        if bucket is None:
            report = restore_copy(Path(source).absolute(), folder, DiskFiles(), tell)
        else:
            report = restore_from(bucket, folder, DiskFiles(), at, tell)
    if as_json:
        click.echo(msgspec.json.encode(report))
        return 0
    for note in report.notes:
        click.echo(f"note: {note}")
    kept = f", {report.kept:,} of them there already" if report.kept else ""
    click.echo(
        f"{folder}: {counted(report.topics, 'topic')} as of {day_and_time(report.at)}: {counted(report.files, 'file')}"
        f"{kept}, {sized(report.bytes)}"
    )
    click.echo("Tokens are in no backup. Those of `memd token` have to be made again, before others can reach it.")
    key = ", with its master key" if (folder / KEY_NAME).exists() else ""
    click.echo(f"Look at it with: memd verify {folder}; then: memd serve --data-dir {folder}{key}")
    return 0
