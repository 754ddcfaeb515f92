"""The audit's lines of commands that read or change the files themselves, beside a running daemon or without one.

Rule: as for a daemon's routes, such a command does nothing unless the line that begins it is on disk. Reading a backup
leaves no line: the lines would be in the backup.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from memd.admin.acts import ALL_TOPICS
from memd.admin.auditing import not_done, user_name
from memd.errors import StoreError
from memd.settings.model import Config
from memd.store.audit.book import AuditBook
from memd.store.audit.chain import Act, ActKind
from memd.store.disk import DiskFiles
from memd.store.layout import LOCK_NAME
from memd.store.tools.backup import MARKER_NAME


class CommandAct:
    """The extent of what a command does, filled in while it does it."""

    count = 0


def command_name() -> str:
    """The command that runs in this thread, as `memd export`."""
    context = click.get_current_context(silent=True)
    names = []
    while context is not None and context.parent is not None:
        names.append(context.info_name or "")
        context = context.parent
    return " ".join(("memd", *reversed(names)))


@contextmanager
def command_act(config: Config, kind: ActKind, topic: str | None, detail: str = "") -> Iterator[CommandAct]:
    """Let the audit have the lines of an act: one before the block runs and one after it.

    Args:
        topic: None: all of them; empty: it is about none.
        detail: the folder or file that it writes.

    Raises:
        StoreError: the first line cannot be written; the block did not run.
    """
    done, book = CommandAct(), _book(config, kind == "token")
    if book is None:
        yield done
        return

    def act(**more: Any) -> Act:
        topics = () if topic == "" else (topic or ALL_TOPICS,)
        facts = {"who": user_name(), "source": command_name(), "topics": topics, "detail": detail}
        return Act(at=time.time_ns() // 1000, act=kind, **{**facts, **more})

    try:
        began = book.append([act(begins=True)]).n
    except StoreError as error:
        raise not_done(error) from error
    try:
        yield done
    except BaseException as error:
        with suppress(StoreError):
            book.append([act(ends=began, detail=f"{detail} failed: {type(error).__name__}".strip())])
        raise
    book.append([act(ends=began, count=None if topic == "" else done.count)])


def _book(config: Config, is_first_token: bool) -> AuditBook | None:
    """The audit of the settings' data directory; None if none is kept."""
    files, folder, record = DiskFiles(), config.data_dir, config.audit.record
    is_backup = (folder / MARKER_NAME).exists() and not (folder / LOCK_NAME).exists()
    book = AuditBook(files, folder, config.audit.keep_months)
    is_begun = is_first_token or bool(config.auth.tokens) or book.is_begun()
    is_on = record == "always" or (record == "auto" and is_begun)
    return book if is_on and not is_backup else None
