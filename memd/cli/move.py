"""`memd move`: topics between a folder and a cluster.

Rule: one side is a data directory, the other a cluster: its settings file, or its database with --bucket. The command
reads the sides, shows how far it came, and says what stayed behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click
import msgspec

from memd.cli.flags import FOUND_SOMETHING, config_of, key_flag, key_of
from memd.cli.moving_rights import CopiedRights, copy_rights
from memd.errors import BadQuestion, ConfigError
from memd.settings.encryption import EncryptionSettings
from memd.settings.model import Config
from memd.store.bucket.objects import Bucket
from memd.store.cluster.database import Database
from memd.store.cluster.moving import ClusterPlace, Folder, MovedOne, Progress, Wish
from memd.store.cluster.moving import move as move_topics
from memd.wording import counted, for_terminal, sized

_SCHEMES = ("postgresql://", "postgres://")
_TWO_SIDES = (
    "name a folder and a cluster: of the two places one is a data directory, and one the settings file of a daemon of "
    "the cluster, or postgresql://USER@HOST/DATABASE with --bucket"
)
_STAYS = (
    "Receipts, the audit and the list of erasures are not moved: keep them as long as you want to look things up. "
    "Tokens that were copied hold on both sides: take those back that are to hold on one alone."
)
_OUTCOMES = {
    "moved": "moved",
    "same": "the same on both sides already",
    "before": "moved by an earlier run, and not changed since",
    "refused": "not moved",
    "new": "to be moved",
    "there": "on the other side already, to be compared",
}


@click.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Settings, where a URL stands for the cluster."
)
@click.option("--bucket", metavar="URL", help="The bucket that belongs to a database: s3://BUCKET/PREFIX.")
@click.option("--topic", "topics", metavar="TOPIC", multiple=True, help="Only this topic; may be given again.")
@click.option("--remove", "removes", is_flag=True, help="Remove a topic from FROM when both sides were compared.")
@click.option("--dry-run", is_flag=True, help="Only show what would be moved.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each topic.")
@key_flag
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
def move(
    config_path: Path | None,
    bucket: str | None,
    topics: tuple[str, ...],
    removes: bool,
    dry_run: bool,
    as_json: bool,
    key_stdin: bool,
    source: str,
    target: str,
) -> int:
    """Move topics between a folder and a cluster.

    FROM and TO: a data directory, and a cluster: the settings file of one of its daemons, or
    postgresql://USER@HOST/DATABASE with --bucket. Interrupted, it goes on when it is run again.
    """
    is_into = _is_cluster(target)
    if is_into == _is_cluster(source):
        raise BadQuestion(_TWO_SIDES)
    path, place = (Path(source), target) if is_into else (Path(target), source)
    config = _settings_of(place, bucket, config_path)
    encryption = EncryptionSettings(key=key_of(key_stdin) or "") if key_stdin else config.encryption
    wish = Wish(is_into_cluster=is_into, topics=topics, removes=removes, is_dry=dry_run)
    with closing(Database(config.store.url)) as database:
        kept = Bucket.of(config.store.bucket_settings, os.environ)
        done = _run(Folder(path.absolute(), encryption), ClusterPlace(database, kept, config.encryption), wish, as_json)
        rights = None
        if done and not (dry_run or topics):
            rights = copy_rights(path, database, is_into_cluster=is_into)
    if not as_json:
        _summarise(done, wish, source, target)
        if rights is not None:
            _tell_rights(rights)
    return FOUND_SOMETHING if any(one.outcome == "refused" for one in done) else 0


def _tell_rights(rights: CopiedRights) -> None:
    if rights.tokens:
        grants = f", with {counted(rights.grants, 'grant')}" if rights.grants else ""
        click.echo(f"Tokens that hold there now: {', '.join(rights.tokens)}{grants}.")
    if rights.left:
        click.echo(f"Not copied, as another token there has the name or the secret: {', '.join(rights.left)}.")


def _is_cluster(place: str) -> bool:
    return place.startswith(_SCHEMES) or Path(place).is_file()


def _settings_of(place: str, bucket: str | None, config_path: Path | None) -> Config:
    if not place.startswith(_SCHEMES):
        if bucket is not None:
            raise BadQuestion("--bucket belongs to a database; a settings file names its own bucket in store.bucket")
        config = config_of(Path(place), {})
        if not config.store.is_shared:
            raise ConfigError(f"{place}: names no cluster; set store.url and store.bucket in it")
        return config
    if bucket is None:
        raise BadQuestion("the bucket is missing: give it with --bucket s3://BUCKET/PREFIX, or a settings file instead")
    return config_of(config_path, {"store.url": place, "store.bucket": bucket})


def _run(folder: Folder, cluster: ClusterPlace, wish: Wish, as_json: bool) -> list[MovedOne]:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), TimeElapsedColumn()
    done = []
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("moving")
        tell: Callable[[Progress], None] = lambda now: bar.update(task, description=_progress(now))  # noqa: E731
        for one in move_topics(folder, cluster, wish, tell):
            done.append(one)
            if as_json:
                click.echo(msgspec.json.encode(one))
            elif one.note or wish.is_dry or not console.is_terminal:
                removed = ", and removed there" if one.is_removed else ""
                told = f": {for_terminal(one.note)}" if one.note else ""
                click.echo(f"{one.topic}: {_OUTCOMES[one.outcome]}{removed}{told}")
    return done


def _progress(now: Progress) -> str:
    return f"{now.topics:,} of {counted(now.of_topics, 'topic')}, {sized(now.bytes)} copied: {now.topic}"


def _summarise(done: list[MovedOne], wish: Wish, source: str, target: str) -> None:
    where = target if not target.startswith(_SCHEMES) else "the cluster"
    if wish.is_dry:
        size = f", {sized(sum(one.bytes for one in done))}" if wish.is_into_cluster else ""
        click.echo(f"{counted(len(done), 'topic')} to move{size}; nothing was changed.")
        return
    of = {outcome: [one for one in done if one.outcome == outcome] for outcome in _OUTCOMES}
    copied = [*of["moved"], *of["same"]]
    compared = f"{counted(sum(one.records for one in copied), 'entry')}, {sized(sum(one.bytes for one in copied))}"
    click.echo(
        f"{where}: {counted(len(of['moved']), 'topic')} moved, {len(of['same']):,} there already, "
        f"{len(of['before']):,} moved before, {len(of['refused']):,} refused; {compared} read again there and compared "
        "byte by byte."
    )
    if of["moved"] and not wish.removes:
        remaining = source if not source.startswith(_SCHEMES) else "the cluster"
        click.echo(f"Nothing was removed from {remaining}: --remove does that.")
    if of["moved"]:
        click.echo(_STAYS)
