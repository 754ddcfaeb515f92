"""Can the backup's bucket be read, written and emptied, and does it keep what memd counts on?

Rule: one small object is written and removed again; nothing else is changed. A check that a running daemon has an
answer for is asked of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from memd.cli.check.result import CheckResult, failed, failed_with, ok, warning
from memd.cli.running import RunningDaemon
from memd.errors import MemdError
from memd.settings.model import Config
from memd.store.bucket.format import IDENTITY_KEY
from memd.store.bucket.objects import Bucket
from memd.store.bucket.writing import read_identity
from memd.store.disk import DiskFiles
from memd.store.layout import BUCKET_NAME

BACKUP = "backup"
LAG_ROUNDS_MAX = 6
"""A daemon whose backup is so many rounds behind has a reason."""
_PROBE = "memd-check/"


def backup(config: Config, env: Mapping[str, str], daemon: RunningDaemon | None) -> Iterator[CheckResult]:
    """Check the bucket of the settings, if they name one."""
    if not config.backup.is_on:
        return
    try:
        bucket = Bucket.of(config.backup, env)
        yield from _probed(bucket)
        yield from _whose(config, bucket)
    except MemdError as error:
        yield failed_with(BACKUP, error)
    if daemon is not None:
        yield from _lag(config, daemon)


def _probed(bucket: Bucket) -> Iterator[CheckResult]:
    key, data = f"{_PROBE}{secrets.token_hex(8)}", b"memd check"
    bucket.put(key, data, new=True)
    is_overwritten = bucket.put(key, data, new=True)
    is_read, is_listed = bucket.get(key) == data, key in [one.key for one in bucket.listed(_PROBE)]
    bucket.delete([key])
    is_gone = bucket.get(key) is None
    if not (is_read and is_listed):
        yield warning(BACKUP, f"{bucket.url} shows late what was written", "restore a minute after the last write")
    if not is_gone:
        yield failed(
            BACKUP,
            f"{bucket.url} keeps what is removed: what is erased stays there",
            "give the key the right to delete, and the bucket no object lock",
        )
    if is_overwritten:
        lacks = "takes conditions and overwrites all the same" if bucket.has_conditions else "knows no If-None-Match"
        yield warning(
            BACKUP,
            f"{bucket.url} {lacks}; each start writes under a name of its own, so nothing is overwritten",
            "see to it that no two daemons write to one prefix",
        )
    if bucket.keeps_versions:
        yield warning(
            BACKUP,
            f"{bucket.url} keeps versions: what is erased or too old stays in them",
            "let a lifecycle rule of the bucket remove noncurrent versions after some days",
        )
    if is_read and is_gone:
        yield ok(BACKUP, f"{bucket.url} can be read, written and emptied")


def _whose(config: Config, bucket: Bucket) -> Iterator[CheckResult]:
    stored, path, files = bucket.get(IDENTITY_KEY), config.data_dir / BUCKET_NAME, DiskFiles()
    if stored is None:
        return
    own = files.read(path).decode("ascii", "replace").strip() if files.size(path) is not None else ""
    if read_identity(stored, bucket).directory != own:
        yield failed(
            BACKUP,
            f"{bucket.url} has the backup of another data directory than {config.data_dir}",
            "choose another prefix; if a disk was lost, memd restore brings its folder back",
        )


def _lag(config: Config, daemon: RunningDaemon) -> Iterator[CheckResult]:
    try:
        told = msgspec.json.decode(daemon.get("/memd/stats"), type=dict[str, Any]).get("backup")
    except MemdError:
        return  # it wants another token: that was said
    if told is None:
        yield warning(BACKUP, f"the daemon at {daemon.url} makes none", "start it again: it has older settings")
    elif told["trouble"]:
        yield failed(
            BACKUP, f"{told['lag_seconds']:.0f} s behind: {told['trouble']}", "mend that; it goes on by itself"
        )
    elif told["lag_seconds"] > LAG_ROUNDS_MAX * config.backup.seconds:
        yield warning(BACKUP, f"{told['lag_seconds']:.0f} s behind", "wait, if it was begun just now; or see the log")
    else:
        yield ok(BACKUP, f"{told['lag_seconds']:.0f} s behind")
