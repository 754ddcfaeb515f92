"""`memd encrypt on`, `off` and `rekey`: re-encrypt a whole data directory with other keys, topic by topic.

Rule: a new copy of a topic is written beside the old one, read back and compared, and only then put in its place. An
interrupted command resumes when it is run again, and until then memd serves nothing. The old files are overwritten as
far as the disk allows.

    memd.key      state encrypting, decrypting or renewing          until all is done
    .memd-encrypting/new-TOPIC   the new folder, until it is complete; it then becomes TOPIC
    .memd-encrypting/old-TOPIC   the old folder, from the completion of the new one until it is wiped
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from memd.errors import StoreError, WrongKey
from memd.store import layout
from memd.store.disk import TEMPORARY_SUFFIX, LocalDisk, Wiper, checksum_of, pieces_of, put_in_place, write_pieces
from memd.store.encryption.disk import UNFINISHED, EncryptedDisk, check_not_lost
from memd.store.encryption.frames import (
    DataKey,
    DirectoryKeyFile,
    MasterKey,
    State,
    TopicKeyFile,
    new_key,
    read_key_file,
    write_key_file,
)
from memd.store.log.format import FLAG_ENCRYPTED, HEADER_BYTES, decode_any_header

_NEW, _OLD = "new-", "old-"
Tell = Callable[[str], None]


class ConversionReport(msgspec.Struct):
    """The outcome of a conversion."""

    topics: int = 0
    """Topics rewritten in this run."""
    bytes_written: int = 0
    """Plain bytes."""
    kept_elsewhere: list[Path] = []
    """Old files that could not be overwritten: a backup shares them, or the disk does not allow it."""


def encrypt(data_dir: Path, master: MasterKey, disk: LocalDisk, tell: Tell) -> ConversionReport:
    """Encrypt a data directory, or resume that. Raises WrongKey: it is encrypted already, or with another key;
    StoreError: a daemon runs on it, or a file cannot be read or written. Resumable."""
    path = data_dir / layout.KEY_NAME
    with disk.lock(data_dir / layout.LOCK_NAME):
        if disk.size(path) is None:
            check_not_lost(disk, data_dir)
            directory = secrets.token_bytes(16).hex()
            write_key_file(disk, path, master.key_file(directory, new_key(), "encrypting"))
        directory, key, _ = _opened(disk, data_dir, [master], "encrypting", "is encrypted already")
        report = _Conversion(data_dir, disk, directory, None, key, tell).run()
        write_key_file(disk, path, master.key_file(directory, key))
    return report


def decrypt(data_dir: Path, master: MasterKey, disk: LocalDisk, tell: Tell) -> ConversionReport:
    """Rewrite a data directory in plain text, or resume that. Raises WrongKey: it is not encrypted, or with another
    key; StoreError: see `encrypt`."""
    with disk.lock(data_dir / layout.LOCK_NAME):
        directory, key, _ = _opened(disk, data_dir, [master], "decrypting")
        write_key_file(disk, data_dir / layout.KEY_NAME, master.key_file(directory, key, "decrypting"))
        report = _Conversion(data_dir, disk, directory, key, None, tell).run()
        disk.wipe(data_dir / layout.KEY_NAME)
    return report


def rekey(
    data_dir: Path, master: MasterKey, new: MasterKey, disk: LocalDisk, tell: Tell, *, data: bool
) -> ConversionReport:
    """Wrap the keys of a data directory with another master key; with `data`, also re-encrypt everything with new keys.
    Raises WrongKey: it is not encrypted, or with another key than `master` (or `new`, when resuming); StoreError: see
    `encrypt`."""
    path = data_dir / layout.KEY_NAME
    with disk.lock(data_dir / layout.LOCK_NAME):
        directory, key, former = _opened(disk, data_dir, [new, master], "renewing")
        if data and former is None:
            key, former = new_key(), key
        if former is None:
            write_key_file(disk, path, new.key_file(directory, key))
            return ConversionReport()
        write_key_file(disk, path, new.key_file(directory, key, "renewing", former))
        report = _Conversion(data_dir, disk, directory, former, key, tell).run()
        write_key_file(disk, path, new.key_file(directory, key))
    return report


class _Conversion:
    """Rewrites all that is encrypted with a key of the directory, or plain text (None), with another one."""

    def __init__(
        self, data_dir: Path, disk: LocalDisk, directory: str, former: DataKey | None, key: DataKey | None, tell: Tell
    ) -> None:
        """`directory`: its id, as in `memd.key`."""
        self._data_dir, self._plain_files, self._tell = data_dir, disk, tell
        self._key_id = None if key is None else key.id
        self._source, self._target = (
            disk if one is None else EncryptedDisk(disk, directory, one, data_dir) for one in (former, key)
        )
        self._aside = data_dir / layout.CONVERSION_NAME
        self._wiper = Wiper(disk)
        self._report = ConversionReport(kept_elsewhere=self._wiper.left)

    def run(self) -> ConversionReport:
        plain_files, data_dir, aside = self._plain_files, self._data_dir, self._aside
        plain_files.make_directory(aside)
        plain_files.sync_directory(data_dir)
        # Finish what an interrupted run has left: a folder that was moved aside has its new one, complete, beside it.
        for topic_id in (name.removeprefix(_OLD) for name in plain_files.names(aside) if name.startswith(_OLD)):
            if not plain_files.is_directory(data_dir / topic_id):
                self._put_in_place(topic_id)
        for name in plain_files.names(aside):
            self._wiper.wipe_folder(aside / name)
        # The files that the key of the directory encrypts.
        erasures = layout.erasures_dir(data_dir)
        digests = (erasures / name for name in plain_files.names(erasures) if name.endswith(layout.DIGESTS_SUFFIX))
        for path in (data_dir / layout.RECEIPTS_OLD_NAME, data_dir / layout.RECEIPTS_NAME, *digests):
            if plain_files.size(path) is None:
                continue
            header = decode_any_header(plain_files.read_at(path, 0, HEADER_BYTES))
            if self._key_id != (header.topic if header is not None and header.flags == FLAG_ENCRYPTED else None):
                temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
                self._copy(path, temporary)
                put_in_place(plain_files, temporary, path, self._wiper)
        for topic_id in layout.topic_folders_in(plain_files, data_dir):
            path = data_dir / topic_id / layout.TOPIC_KEY_NAME
            by = None if plain_files.size(path) is None else read_key_file(plain_files, path, TopicKeyFile).by
            if by != (self._key_id and self._key_id.hex()):
                self._topic(topic_id)
        plain_files.remove_directory(aside)
        plain_files.sync_directory(data_dir)
        return self._report

    def _topic(self, topic_id: str) -> None:
        self._tell(topic_id)
        plain_files, old, aside = self._plain_files, self._data_dir / topic_id, self._aside / f"{_OLD}{topic_id}"
        self._copy_folder(old, self._aside / f"{_NEW}{topic_id}")
        plain_files.sync_directory(self._aside)
        plain_files.rename(old, aside)
        plain_files.sync_directory(self._aside)
        plain_files.sync_directory(self._data_dir)
        self._put_in_place(topic_id)
        self._wiper.wipe_folder(aside)
        self._report.topics += 1

    def _put_in_place(self, topic_id: str) -> None:
        self._plain_files.rename(self._aside / f"{_NEW}{topic_id}", self._data_dir / topic_id)
        self._plain_files.sync_directory(self._data_dir)
        self._plain_files.sync_directory(self._aside)

    def _copy_folder(self, old: Path, new: Path) -> None:
        plain_files = self._plain_files
        plain_files.make_directory(new)
        lexical = layout.TopicLayout(self._data_dir, old.name).lexical if old.parent == self._data_dir else None
        for name in plain_files.names(old):
            one, other = old / name, new / name
            if name.endswith(TEMPORARY_SUFFIX) or name == layout.TOPIC_KEY_NAME or one == lexical:
                continue  # unfinished files, the old key, and what is rebuilt
            if plain_files.is_directory(one):
                self._copy_folder(one, other)
            else:
                self._copy(one, other)
        plain_files.sync_directory(new)

    def _copy(self, old: Path, new: Path) -> None:
        """Copy a file, and compare the readable part of the copy."""
        written = write_pieces(self._target, new, pieces_of(self._source, old))
        if self._target.size(new) != written.bytes or checksum_of(self._target, new, written.bytes) != written:
            raise StoreError(f"{new}: what was written is not what is read back; check the disk, then run this again")
        self._report.bytes_written += written.bytes


def _opened(
    disk: LocalDisk, data_dir: Path, masters: Sequence[MasterKey], state: State, if_whole: str = ""
) -> tuple[str, DataKey, DataKey | None]:
    """Return the id and the keys of a directory that is whole, or that the same command left unfinished. `masters`: one
    of them is its key. Raises WrongKey: none is, or it is not encrypted, or it is whole and `if_whole` says why that is
    wrong."""
    path = data_dir / layout.KEY_NAME
    if disk.size(path) is None:
        raise WrongKey(f"{data_dir}: is not encrypted")
    found = read_key_file(disk, path, DirectoryKeyFile)
    master = next((one for one in masters if one.id == found.master), masters[-1])
    key, former = master.opened(path, found)
    if found.state == "whole" and if_whole:
        raise WrongKey(f"{data_dir}: {if_whole}")
    if found.state not in ("whole", state):
        raise WrongKey(f"{data_dir}: {UNFINISHED[found.state]}")
    return found.directory, key, former
