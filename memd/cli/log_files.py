"""`memd verify`, `export`, `backup` and `restore`: the commands that read and write the files of the log.

Rule: they change nothing in the data directory, but for a note of where a backup is, and work beside a running daemon;
`restore` writes into an empty folder alone. Of a cluster a copy of all it has is read: that of one daemon is never read
as if it were all there is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path

import click
import msgspec

from memd.cli.flags import FOUND_SOMETHING, config_of, config_of_existing, settings_flags, with_settings
from memd.cli.ingest import progress
from memd.cli.running import command_act
from memd.errors import BadQuestion, StoreError
from memd.ingest.topic import waiting_in
from memd.selection import until as time_of
from memd.settings.model import Config, EncryptionSettings
from memd.store.bucket.objects import Bucket, at_url
from memd.store.bucket.restoring import restore as restore_from
from memd.store.bucket.restoring import restore_copy
from memd.store.disk import LocalDisk
from memd.store.encryption.opening import check_not_lost, disk_of
from memd.store.layout import KEY_NAME, LOCK_NAME, TopicLayout, check_no_cluster, topic_ids_in
from memd.store.shared.postgres import shared_log
from memd.store.tools.backup import backup as back_up
from memd.store.tools.backup import note_backup
from memd.store.tools.conversations import FORMS, conversations, written
from memd.store.tools.export import export as export_log
from memd.store.tools.export import exported_entries, exported_topics
from memd.store.tools.verify import verify as verify_log
from memd.store.tools.verify import with_audit
from memd.wording import counted, day_and_time, sized


@click.command()
@settings_flags
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
@click.argument("folder", metavar="[DIR]", required=False)
def verify(config_path: Path | None, data_dir: str | None, as_json: bool, folder: str | None) -> int:
    """Read every byte of the log and report any damage.

    With DIR, of the backup in it.

    Example: memd verify
    """
    config = config_of_existing(config_path, {"data_dir": folder or data_dir})
    if folder is None:
        with topics_folder(config) as (checked, files):
            is_served = files.is_locked(checked / LOCK_NAME)
            report = with_audit(verify_log(checked, files, is_served=is_served), config.data_dir, disk_of(config))
    else:
        if config.encryption.is_on and LocalDisk().size(config.data_dir / KEY_NAME) is None:
            check_not_lost(LocalDisk(), config.data_dir)
            click.echo("This backup is in plain text: it is read without the key.", err=True)
            config = msgspec.structs.replace(config, encryption=EncryptionSettings())
        check_no_cluster(files := disk_of(config), config.data_dir)
        is_served = files.is_locked(config.data_dir / LOCK_NAME)
        report = with_audit(verify_log(config.data_dir, files, is_served=is_served), config.data_dir, files)
    if as_json:
        click.echo(msgspec.json.encode(report, enc_hook=str))  # str: paths
    else:
        for line in report.lines:
            click.echo(line)
    return 0 if report.ok else FOUND_SOMETHING


@click.command()
@with_settings()
@click.option("--topic", help="Only this topic.")
@click.option("--live", is_flag=True, help="Only the present state of chunks: no superseded and no deprecated entries.")
@click.option("--as", "form", type=click.Choice(list(FORMS)), help="Write conversations, as other programs read them.")
@click.option("--output", metavar="FILE", default="-", help="Write to this file instead of stdout.")
def export(config: Config, topic: str | None, live: bool, form: str | None, output: str) -> int:
    """Write the log as JSON Lines, one entry per line, oldest first.

    Example: memd export --topic work --output work.jsonl
    """
    # A new or regular file is replaced only when it is complete; /dev/null or a pipe is written as it is.
    atomic = output != "-" and (not Path(output).exists() or Path(output).is_file())
    try:
        with (
            topics_folder(config, topic) as (folder, files),
            command_act(config, "export", topic, "" if output == "-" else output) as done,
            click.open_file(output, "wb", atomic=atomic) as file,
        ):
            if form is not None:  # no more is held than one topic
                entries = partial(exported_entries, folder, files, live_only=True)
                names = exported_topics(folder, files, topic)
                said = (conversations((entry for _, entry, _ in entries(topic_id=name)), name) for name in names)
                file.writelines(written(chain.from_iterable(said), form))
            else:
                for entry in export_log(folder, files, topic_id=topic, live_only=live):
                    file.write(msgspec.json.encode(entry) + b"\n")
                    done.count += 1
            file.flush()
            note = waiting_note(waiting_messages(folder, files, topic))
        if note:
            click.echo(f"memd: {note}", err=True)
    except BrokenPipeError:
        # The reader has seen enough (`memd export | head`). Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        name = "stdout" if output == "-" else output
        raise StoreError(f"the export to {name} failed: {error.strerror or error}; try another --output") from None
    return 0


@click.command()
@with_settings()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def backup(config: Config, folder: Path) -> int:
    """Back up the log to DIR, or update the backup there.

    DIR is new, empty or an earlier backup. To restore, serve from it: memd serve --data-dir DIR.

    Example: memd backup /mnt/disk/memd
    """
    with command_act(config, "backup", None, str(folder)) as done, topics_folder(config) as (source, files):
        report = back_up(source, folder, files, waiting_in)
        done.count = report.linked + report.copied + report.kept
    with suppress(StoreError):  # the backup is whole without the note
        note_backup(config.data_dir, folder, files)
    for finding in report.findings:
        click.echo(finding)
    click.echo(
        f"{folder}: {counted(report.topics, 'topic')}: {counted(report.linked, 'file')} linked, {report.copied:,} "
        f"copied ({counted(report.bytes_copied, 'byte')}), {report.kept:,} there already"
        + (f"; what was erased since is erased in {counted(report.erased, 'place')} there too" if report.erased else "")
    )
    return FOUND_SOMETHING if report.findings else 0


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
    config = config_of(config_path, {})
    try:
        at = None if until is None else int(time_of(until))
    except ValueError:
        raise BadQuestion(f"{str(until)[:40]!r} is no time; write it like 2026-11-20 or 2026-11-20T14:30") from None
    bucket = Bucket.of(at_url(config.backup, source), os.environ) if "://" in source else None
    if bucket is None and at is not None:
        raise BadQuestion(f"{source}: a folder has the state of its last `memd backup` alone; leave --until away")
    folder = folder.absolute()
    with progress("restoring") as tell:
        if bucket is None:
            report = restore_copy(Path(source).absolute(), folder, LocalDisk(), tell)
        else:
            report = restore_from(bucket, folder, LocalDisk(), at, tell)
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


@contextmanager
def topics_folder(config: Config, topic_id: str | None = None) -> Iterator[tuple[Path, LocalDisk]]:
    """Yield a folder with the files of all topics, or at least of one, and its disk.

    Raises:
        StoreError: it is the copy of a cluster that the settings do not name, or the cluster cannot be read.
    """
    if not config.cluster.is_on:
        check_no_cluster(files := disk_of(config), config.data_dir)
        yield config.data_dir, files
        return
    from memd.store.shared.moving import into_folder  # it takes a moment

    with closing(shared_log(config)) as kept, tempfile.TemporaryDirectory(prefix="memd-") as folder:
        kept.connect()
        files = disk_of(msgspec.structs.replace(config, data_dir=Path(folder)), creating=True)
        with progress("reading the cluster") as advanced:
            names = None if topic_id is None else [topic_id]
            for done, of, _ in into_folder(kept, Path(folder), files, names):
                advanced(done, of)
        yield Path(folder), files


def waiting_messages(data_dir: Path, files: LocalDisk, topic_id: str | None = None) -> int:
    """How many messages of all topics, or of one, are in a journal and not in the log.

    Raises:
        StoreError: a journal cannot be read.
    """
    named = topic_ids_in(files, data_dir) if topic_id is None else [topic_id]
    return sum(waiting_in(TopicLayout(data_dir, name).hot, files) for name in named)


def waiting_note(messages: int) -> str | None:
    """Say that so many messages are not in the log yet; None if all are."""
    if not messages:
        return None
    are, wait = ("is", "waits") if messages == 1 else ("are", "wait")
    told = f"{counted(messages, 'message')} {are} not in the log yet and {wait} in the journal (hot.log)"
    return (
        f"{told}: memd stores them while it runs. `memd search` and `memd show` find what is answered already, and the "
        "rest once it is stored, when its conversation has rested (buffer.idle_seconds)"
    )
