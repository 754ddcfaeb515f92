"""The disk of a data directory: as it is, or encrypted.

Rule: a directory is encrypted if it has a `memd.key`. Without its key nothing is read and nothing written; with a key,
one that has topics in plain text is refused: `memd encrypt` is asked for, never done by the way.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from memd.errors import StoreError, WrongKey
from memd.settings.model import Config, EncryptionSettings
from memd.store.disk import LocalDisk, make_folder
from memd.store.layout import (
    KEY_NAME,
    LOCK_NAME,
    RECEIPTS_NAME,
    TOPIC_KEY_NAME,
    TopicLayout,
    check_restored,
    topic_folders_in,
)
from memd.store.log.format import FLAG_ENCRYPTED, HEADER_BYTES, decode_any_header
from memd.wording import counted, pip_install

if TYPE_CHECKING:
    from memd.store.encryption.encrypted_disk import EncryptedDisk
    from memd.store.encryption.key_files import MasterKey

_INSTALL = f"encryption needs the cryptography package: {pip_install('memd-proxy[encryption]')}"
_PLACES = "encryption.key_file, MEMD_ENCRYPTION_KEY or, where the command takes it, --key-stdin"
_GIVE = f"give its key with {_PLACES}"
_UNFINISHED = {
    "encrypting": "`memd encrypt on`",
    "decrypting": "`memd encrypt off`",
    "renewing": "`memd encrypt rekey --data`",
}


def disk_of(config: Config, plain: LocalDisk | None = None, *, creating: bool = False) -> LocalDisk:
    """Return the disk of the data directory of the settings; see `disk_for`."""
    return disk_for(config.data_dir, config.encryption, plain, creating=creating)


def disk_for(
    data_dir: Path, settings: EncryptionSettings, plain: LocalDisk | None = None, *, creating: bool = False
) -> LocalDisk:
    """Return a disk that reads and writes a data directory, with the key of the settings.

    Args:
        plain: the disk below.
        creating: a directory without topics becomes an encrypted one if there is a key.

    Raises:
        WrongKey: the key is missing, or not the one of this directory; or it is not encrypted yet.
        StoreError: encryption is asked for, and its package is not installed; or it is a restoration that is not whole.
    """
    disk = plain or LocalDisk()
    check_restored(disk, data_dir)
    is_encrypted = disk.size(data_dir / KEY_NAME) is not None
    if not is_encrypted and not settings.is_on:
        return disk
    if not settings.is_on:
        raise WrongKey(f"{data_dir}: is encrypted; {_GIVE}")
    if not is_encrypted and (names := topic_folders_in(disk, data_dir)):
        check_not_lost(disk, data_dir)
        raise WrongKey(
            f"{data_dir}: a key is given, but there is plain text ({counted(len(names), 'topic')}); run `memd encrypt` "
            "first, while no daemon runs, or take the key out of the settings"
        )
    master = master_key(settings)
    if not is_encrypted and creating:
        _make_keys(data_dir, master, disk)
    return encrypted_disk(data_dir, master, disk) if is_encrypted or creating else disk


def with_copy(files: LocalDisk, data_dir: Path, copy: Path) -> LocalDisk:
    """Return a disk that reads and writes a copy of a data directory, too, with the keys of the directory."""
    if not files.encrypts(data_dir / RECEIPTS_NAME):
        return files
    from memd.store.encryption.encrypted_disk import EncryptedDisk

    assert isinstance(files, EncryptedDisk), "what encrypts"
    ring = next(ring for ring in files.rings if ring.data_dir == data_dir)
    return EncryptedDisk(files.plain_files, [*files.rings, ring.of_copy(copy)], master=files.master)


def key_id_of(disk: LocalDisk, data_dir: Path) -> str | None:
    """Return the id of the key that wraps those of the topics; None: the directory is not encrypted. Raises WrongKey:
    its `memd.key` is damaged."""
    path = data_dir / KEY_NAME
    if disk.size(path) is None:
        return None
    check_installed()
    from memd.store.encryption.key_files import DirectoryKeyFile, read_key_file

    return read_key_file(disk, path, DirectoryKeyFile).key_id


def check_not_lost(disk: LocalDisk, data_dir: Path) -> None:
    """Make sure that a directory without `memd.key` has not merely lost it. Raises WrongKey: it has."""
    for topic_id in topic_folders_in(disk, data_dir):
        layout = TopicLayout(data_dir, topic_id)
        has_key = disk.size(layout.key) is not None
        if has_key or _is_encrypted(disk, layout):
            missing = "it" if has_key else f"it, and the {TOPIC_KEY_NAME} of each topic,"
            raise WrongKey(
                f"{data_dir / KEY_NAME}: is missing, but {topic_id} is encrypted; put {missing} back, out of a backup: "
                "nothing can be read without that (where there is none, remove the folders of the topics)"
            )


def _is_encrypted(disk: LocalDisk, layout: TopicLayout) -> bool:
    """Whether a file of a topic that has no key says that it is encrypted."""
    paths = (layout.active, layout.hot, layout.forbidden, *map(layout.bin, layout.segment_ids(disk)))
    headers = (decode_any_header(disk.read_at(one, 0, HEADER_BYTES)) for one in paths if disk.size(one))
    return any(one is not None and one.flags == FLAG_ENCRYPTED for one in headers)


def check_disk(files: LocalDisk, data_dir: Path) -> None:
    """Make sure that a disk writes to an encrypted directory with its key. Raises WrongKey: it would write plain text
    there."""
    if files.size(data_dir / KEY_NAME) is not None and not files.encrypts(data_dir / RECEIPTS_NAME):
        raise WrongKey(f"{data_dir}: is encrypted; {_GIVE}")


def master_key(settings: EncryptionSettings) -> MasterKey:
    """Return the master key of the settings. Raises WrongKey: there is none, or the file cannot be one."""
    check_installed()
    from memd.store.encryption.key_files import MasterKey

    if settings.key:
        return MasterKey.parsed(settings.key.encode(), "the key in MEMD_ENCRYPTION_KEY, or on standard input,")
    if settings.key_file:
        try:
            return MasterKey.in_file(Path(settings.key_file))
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            remedy = "put the key, or your copy of it, where encryption.key_file says"
            raise WrongKey(f"{settings.key_file}: there is no such file; {remedy}") from None
    raise WrongKey(f"there is no key; give one with {_PLACES}")


def encrypted_disk(data_dir: Path, master: MasterKey, disk: LocalDisk) -> EncryptedDisk:
    """Return the encrypted disk of a directory that has a `memd.key`. Raises WrongKey: the key is not its own, or a
    command over it was not finished."""
    from memd.store.encryption.encrypted_disk import EncryptedDisk, KeyRing
    from memd.store.encryption.key_files import DirectoryKeyFile, KeyMaker, read_key_file

    path = data_dir / KEY_NAME
    found = read_key_file(disk, path, DirectoryKeyFile)
    key, _ = KeyMaker(master, found.directory).opened(path, found)
    if found.state != "whole":
        raise WrongKey(f"{data_dir}: {_UNFINISHED[found.state]} was begun and not finished; run it again")
    return EncryptedDisk(disk, [KeyRing(disk, data_dir, found.directory, key)], master=master)


def _make_keys(data_dir: Path, master: MasterKey, disk: LocalDisk) -> None:
    """Make a new directory an encrypted one, unless another process has just done so."""
    from memd.store.encryption.key_files import KeyMaker, new_key, write_key_file

    make_folder(disk, data_dir)
    with disk.lock(data_dir / LOCK_NAME):
        if disk.size(data_dir / KEY_NAME) is None:
            maker = KeyMaker(master, secrets.token_bytes(16).hex())
            write_key_file(disk, data_dir / KEY_NAME, maker.key_file(new_key()))


def check_installed() -> None:
    """Raise StoreError unless the package that encrypts is installed."""
    try:
        import cryptography  # noqa: F401  # whether it is there
    except ImportError:
        raise StoreError(_INSTALL) from None
