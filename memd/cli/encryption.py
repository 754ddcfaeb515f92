"""`memd encrypt`: encryption at rest.

Rule: no flag takes a key, which others could read off the list of processes: it comes from a file, the environment or
standard input.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from memd.cli.flags import WholeSentences, key_of, refuse_cluster, tell_not_overwritten, with_settings
from memd.cli.running import command_act
from memd.errors import BadQuestion, ConfigError
from memd.settings.model import Config, EncryptionSettings
from memd.store.disk import LocalDisk
from memd.store.encryption.opening import check_installed, master_key
from memd.store.layout import CONVERSION_NAME
from memd.wording import counted

if TYPE_CHECKING:
    from memd.store.encryption.converting import ConversionReport

_KEEP = "Keep a copy of the key in another place: nothing that is encrypted with it can be read without it."
_OLD_BLOCKS = (
    "The old files were overwritten and removed. Flash disks, file systems that copy on write, snapshots and backups "
    "may keep what they held."
)
_NOT_A_CACHE = "a cluster is encrypted from its first start on, or never: `memd move` its topics to a new one"


class OnByDefault(WholeSentences):
    """A group that is `on` where no command of it is named, as `memd encrypt` was before it had others."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        is_named = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_named else ["on", *args])


@click.group(cls=OnByDefault)
def encrypt() -> None:
    """Encrypt the data directory, change its key, or go back to plain text.

    The key is encryption.key_file, MEMD_ENCRYPTION_KEY or --key-stdin. No daemon may run meanwhile; interrupted, each
    goes on when it is run again.

    Example: memd encrypt key ~/memd.key
    """


@encrypt.command("key")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def new(file: Path) -> int:
    """Write a new key to FILE, which must not exist yet."""
    check_installed()
    from memd.store.encryption.key_files import new_key_file

    if file.exists():
        raise BadQuestion(f"{file}: is there already, and a key that is written over is lost; name another file")
    click.echo(f"{file}: the new key {new_key_file(file).id}. {_KEEP}")
    return 0


@encrypt.command()
@with_settings(takes_key=True)
def on(config: Config) -> int:
    """Encrypt the data directory with the key of the settings."""
    refuse_cluster(config, _NOT_A_CACHE)
    master = master_key(config.encryption)
    from memd.store.encryption.converting import encrypt as convert

    with command_act(config, "settings", None, f"encryption with the key {master.id}"):
        report = convert(config.data_dir, master, LocalDisk(), _tell)
    _say(config.data_dir, f"{config.data_dir}: is encrypted with the key {master.id}", report)
    click.echo(f"{_OLD_BLOCKS} {_KEEP}")
    return 0


@encrypt.command("off")
@with_settings(takes_key=True)
def decrypt(config: Config) -> int:
    """Write the data directory in plain text again."""
    refuse_cluster(config, _NOT_A_CACHE)
    master = master_key(config.encryption)
    from memd.store.encryption.converting import decrypt as convert

    with command_act(config, "settings", None, "no encryption any more"):
        report = convert(config.data_dir, master, LocalDisk(), _tell)
    _say(config.data_dir, f"{config.data_dir}: is in plain text; take the key out of the settings", report)
    return 0


@encrypt.command()
@with_settings(takes_key=True)
@click.option(
    "--new-key-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The file with the new key (`memd encrypt key FILE` makes one).",
)
@click.option("--new-key-stdin", is_flag=True, help="Read the new key from standard input: one line, the last one.")
@click.option("--data", is_flag=True, help="Encrypt everything anew, for when the old key was seen by others.")
def rekey(
    config: Config,
    new_key_file: Path | None,
    new_key_stdin: bool,
    data: bool,
) -> int:
    """Give the encrypted data directory another master key, which the settings have to name afterwards."""
    if (new_key_file is not None) == new_key_stdin:
        raise ConfigError("the new key is missing: give either --new-key-file or --new-key-stdin")
    refuse_cluster(config, "`memd move` its topics to a folder, and from there to a new cluster with the new key")
    master = master_key(config.encryption)
    given = EncryptionSettings(key_file=str(new_key_file or ""), key=key_of(new_key_stdin) or "")
    other = master_key(given)
    from memd.store.encryption.converting import rekey as convert

    with command_act(config, "settings", None, f"encryption with the key {other.id}"):
        report = convert(config.data_dir, master, other, LocalDisk(), _tell, data=data)
    _say(config.data_dir, f"{config.data_dir}: has the key {other.id} now; name it in the settings", report)
    if data:
        click.echo(_OLD_BLOCKS)
    else:
        click.echo("Who has the old key and an old memd.key can still read: --data encrypts everything anew.")
    return 0


key = click.Group("key", {"new": new}, help="Make master keys for encryption: `memd encrypt key`.")


def _tell(topic_id: str) -> None:
    click.echo(f"{topic_id} …", err=True)


def _say(folder: Path, outcome: str, report: ConversionReport) -> None:
    written = f" ({counted(report.topics, 'topic')}, {counted(report.bytes_written, 'byte')})"
    click.echo(outcome + (written if report.bytes_written else ""))
    former = (str(path.relative_to(folder)).removeprefix(f"{CONVERSION_NAME}/old-") for path in report.kept_elsewhere)
    tell_not_overwritten(list(former), "a backup shares them or the disk does not let one")
