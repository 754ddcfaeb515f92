"""Erasing a topic with its folder.

Rule: the folder is put aside in one step; from then on a topic of its name is another one, and what is aside belongs to
nobody. Then all files in it are overwritten and removed. Doing it again goes on where it ended.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from memd.errors import CorruptFile, ForeignFile, WrongKey
from memd.store.disk import LocalDisk
from memd.store.erasure.forbidden import ForbiddenText, encode_forbidden, read_forbidden
from memd.store.erasure.ledger import Erasure, Erasures
from memd.store.erasure.wiping import Wiper
from memd.store.files import replace_file
from memd.store.layout import TOPIC_KEY_NAME, TopicLayout, erasures_dir


def aside_of(layout: TopicLayout, erasure: Erasure) -> TopicLayout:
    """Where the folder of a topic is while it is being erased."""
    return TopicLayout(erasures_dir(layout.data_dir), f"{erasure.id}.topic")


def put_aside(
    files: LocalDisk, ledger: Erasures, layout: TopicLayout, erasure: Erasure, forbidden: ForbiddenText
) -> Erasure:
    """Put the folder of a topic aside, which nobody has open; return the erasure as it is now in the ledger.

    Args:
        erasure: its `highest_id` is in the ledger already, or what is begun under this name since might be erased too.
        forbidden: what the next topic of this name is never to store, beside what the folder says already. It goes
            aside with the folder, so that whoever is interrupted finds it there.

    Raises:
        StoreError: the topic is as it was, or aside.
    """
    aside = aside_of(layout, erasure)
    if not files.is_directory(aside.directory) and files.is_directory(layout.directory):
        if forbidden:
            replace_file(files, layout.forbidden, encode_forbidden(forbidden))
        files.rename(layout.directory, aside.directory)
        files.sync_directory(layout.data_dir)
        files.sync_directory(aside.data_dir)
    with suppress(CorruptFile, ForeignFile, WrongKey):  # of a topic that could not be read before either
        forbidden = read_forbidden(files, aside)
    if forbidden:
        files.make_directory(layout.directory)
        replace_file(files, layout.forbidden, encode_forbidden(forbidden))
        files.sync_directory(layout.data_dir)
    moved = msgspec.structs.replace(erasure, is_moved=True)
    ledger.write(moved)
    return moved


def wipe_aside(layout: TopicLayout, erasure: Erasure, wiper: Wiper) -> None:
    """Overwrite and remove what was put aside; of an encrypted topic first its key, without which the rest is noise.

    Raises:
        StoreError: a file could not be removed; done again it goes on.
    """
    aside = aside_of(layout, erasure)
    if wiper.files.size(aside.key) is not None and not destroy_topic_key(wiper.files, aside.directory):
        wiper.left.append(aside.key)
    wiper.wipe_folder(aside.directory)


def destroy_topic_key(disk: LocalDisk, directory: Path) -> bool:
    """Destroy the key of a topic in its folder: what it encrypts can never be read again, wherever its bytes still are.

    Copies of the `topic.key` itself (backups) have to be destroyed too. It may be called again, and without a key.

    Returns:
        False if the old bytes of the key may still be on the disk; see `LocalDisk.wipe`.
    """
    is_gone = disk.wipe(directory / TOPIC_KEY_NAME)
    disk.sync_directory(directory)
    return is_gone
