"""The folder of a daemon that is one of many: a copy of topics of one shared log, and of no other.

Rule: nothing that is here alone is ever taken for a copy, which may be removed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from memd.errors import StoreError, StoreWriteFailed
from memd.settings.model import Config
from memd.store.files import Files, replace_file
from memd.store.layout import CLUSTER_NAME, topic_ids_in
from memd.store.shared.postgres import PostgresLog
from memd.store.shared.seam import SharedLog


def shared_log(config: Config) -> SharedLog:
    """The log that the settings name; nothing is asked of it yet. Raises StoreError: it cannot be used."""
    assert config.cluster.is_on, "else there is none"
    url = config.cluster.database
    if not config.encryption.is_on:
        return PostgresLog(url)
    from memd.store.encryption.opening import master_key  # needs the extra `encryption`
    from memd.store.shared.sealing import SealedLog

    return SealedLog(url, master_key(config.encryption))


def join(files: Files, data_dir: Path, kept: SharedLog) -> None:
    """Make sure that a folder is a copy of this log, or empty; then it becomes one.

    Raises:
        StoreError: it is not; or it is empty, and nobody can be asked yet.
    """
    path = data_dir / CLUSTER_NAME
    before = files.read(path).decode(errors="replace").strip() if files.size(path) is not None else ""
    with suppress(*([StoreWriteFailed] if before else [])):  # it may pass, and until then the copy serves
        kept.connect()
    if not before:
        if topic_ids_in(files, data_dir):
            raise StoreError(
                f"{data_dir}: has topics of its own, which are not in {kept.place}; move them there (`memd move FROM "
                "TO`), or give the daemon an empty folder (data_dir)"
            )
        replace_file(files, path, kept.cluster.encode())
    elif kept.cluster and kept.cluster != before:
        raise StoreError(
            f"{data_dir}: is a copy of another cluster than {kept.place}; give the daemon an empty folder (data_dir), "
            "or correct cluster.database"
        )
