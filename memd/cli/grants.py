"""Grants of programs over OAuth, as `memd token` lists and ends them.

Rule: a running daemon ends a grant itself; without one the file is changed while nobody else can start on it. In a
cluster the database is changed, and all daemons follow.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime

import msgspec

from memd.admin.oauth.endpoint import GivenGrants
from memd.admin.oauth.grants import GivenGrant, Grant
from memd.admin.oauth.ledger import end_kept, kept_file
from memd.admin.oauth.shared_ledger import rows_of, state_in
from memd.cli.acting import command_act
from memd.cli.running import RunningDaemon
from memd.cli.sharing import shared_book
from memd.errors import DaemonError
from memd.settings.model import Config
from memd.store.disk import DiskFiles
from memd.store.layout import GRANTS_NAME, LOCK_NAME


def live_grants(config: Config) -> tuple[GivenGrant, ...]:
    """Return the grants that are not over, oldest first; where no daemon tells, those of tokens that are gone too.

    Raises:
        StoreError: the list cannot be read.
    """
    if config.cluster.is_on:
        with shared_book(config, "grants") as book:
            return tuple(one.given for one in state_in(book.read().rows).grants if time.time() < one.refresh_until)
    daemon = RunningDaemon.find(config.data_dir, config.auth.token)
    with contextlib.suppress(DaemonError):  # it does not let this token ask; the file is there all the same
        if daemon is not None:
            return msgspec.json.decode(daemon.get("/memd/grants"), type=GivenGrants).grants
    kept = kept_file(DiskFiles(), config.data_dir / GRANTS_NAME)
    return tuple(one.given for one in (kept.grants if kept else ()) if time.time() < one.refresh_until)


def end_grant(config: Config, grant_id: str) -> None:
    """End a grant.

    Raises:
        DaemonError: the running daemon refuses.
        StoreError: it cannot be written.
    """
    if config.cluster.is_on:
        with command_act(config, "token", "", f"ended the grant {grant_id}"):
            _end_shared(config, lambda one: one.id == grant_id)
        return
    daemon = RunningDaemon.find(config.data_dir, config.auth.token)
    if daemon is not None:
        daemon.post("/memd/grants/end", {"id": grant_id})
        return
    files = DiskFiles()
    lock = files.lock(config.data_dir / LOCK_NAME)
    try:
        end_kept(files, config.data_dir / GRANTS_NAME, grant_id)
    finally:
        lock.release()


def end_grants_of(config: Config, tokens_sha256: Collection[str]) -> None:
    """End in a cluster what was allowed with tokens that are gone. (Elsewhere the daemon does it by itself.)

    Raises:
        StoreError: it cannot be written. Nobody is let in by these grants all the same.
    """
    if config.cluster.is_on and tokens_sha256:
        _end_shared(config, lambda one: one.principal_sha256 in tokens_sha256)


def _end_shared(config: Config, is_over: Callable[[Grant], bool]) -> None:
    def left(rows: Mapping[str, str]) -> Mapping[str, str]:
        state = state_in(rows)
        return rows_of(msgspec.structs.replace(state, grants=tuple(one for one in state.grants if not is_over(one))))

    with shared_book(config, "grants") as book:
        book.change(left)


def grant_line(grant: GivenGrant) -> str:
    """Return a grant as a line for people."""
    until = datetime.fromtimestamp(grant.until, UTC).astimezone()
    where = ", ".join(grant.topics) or f"the topics of {grant.principal}"
    return (
        f"{grant.id}: {grant.program}, as {grant.principal}: {', '.join(grant.rights)} in {where} "
        f"(OAuth; if not used, until {until:%Y-%m-%d})"
    )
