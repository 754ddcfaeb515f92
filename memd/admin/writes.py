"""The routes under /memd/ that change something.

Rule: a body is decoded strictly, with unknown members refused: a correction with a misspelt member must not be taken
for another one.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from memd.admin import history
from memd.entries import Action, Correction, checked_topic_id
from memd.errors import BadQuestion, NotFound
from memd.ingest.topics import Topic
from memd.proxy.relay import read_body
from memd.proxy.service import Daemon
from memd.recall import corrections
from memd.store.disk import DiskFiles
from memd.store.tools.backup import BackupReport
from memd.store.tools.backup import backup as back_up

BODY_BYTES_MAX = 4 << 20
Asked = TypeVar("Asked")


class AskedCorrection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /memd/corrections`."""

    topic_id: str
    chunk_ids: list[str]
    """Public ids, or as many digits of a uuid as make it the only one."""
    action: Action
    content: str | None = None
    """Update only: what takes the place of the chunks; without it they are taken out."""
    reason: str = ""


class AskedUndo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /memd/undo`."""

    canonical_id: int
    topic_id: str
    reason: str = ""


class AskedBackup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /memd/backup`."""

    folder: str
    """An absolute path: new, empty or an earlier backup."""


class Corrected(msgspec.Struct, frozen=True):
    """The canonical_ids of what was appended, and the ids that could not be corrected."""

    applied: tuple[int, ...]
    failed: tuple[str, ...] = ()


async def correct(daemon: Daemon, request: web.Request, _: str) -> Corrected:
    """Apply one correction."""
    asked = await _decoded(request, daemon, AskedCorrection)
    if not asked.chunk_ids:
        raise BadQuestion("chunk_ids names no chunk")
    if asked.content is not None and asked.action != "Update":
        raise BadQuestion("content belongs to Update: Helpful and Unhelpful leave a chunk as it is")
    correction = Correction(tuple(asked.chunk_ids), asked.action, asked.reason, asked.content)
    topic = await _topic(daemon, asked.topic_id)
    with topic.held():
        applied = await corrections.correct(
            [correction],
            find=partial(history.find, topic.log.snapshot()),
            encoder=daemon.encoder,
            append=partial(daemon.archiver.append_corrections, topic),
        )
    return _corrected(applied)


async def undo(daemon: Daemon, request: web.Request, _: str) -> Corrected:
    """Append the state before an entry."""
    asked = await _decoded(request, daemon, AskedUndo)
    topic = await _topic(daemon, asked.topic_id)
    with topic.held():
        applied = await corrections.undo(
            topic.log.snapshot(),
            asked.canonical_id,
            asked.reason,
            encoder=daemon.encoder,
            append=partial(daemon.archiver.append_corrections, topic),
        )
    return _corrected(applied)


async def backup(daemon: Daemon, request: web.Request, _: str) -> BackupReport:
    """Back up into a folder of this machine."""
    folder = Path((await _decoded(request, daemon, AskedBackup)).folder)
    if not folder.is_absolute():
        raise BadQuestion(f"{folder}: give an absolute path; this daemon's working directory is not yours")
    return await asyncio.get_running_loop().run_in_executor(None, back_up, daemon.config.data_dir, folder, DiskFiles())


def _corrected(applied: corrections.Applied) -> Corrected:
    return Corrected(tuple(entry.canonical_id for entry in applied.entries), applied.failed)


async def _decoded(request: web.Request, daemon: Daemon, kind: type[Asked]) -> Asked:
    body = await read_body(request, BODY_BYTES_MAX, daemon.config.limits.idle_seconds)
    if body is None:
        raise BadQuestion(f"the body is larger than {BODY_BYTES_MAX:,} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadQuestion(f"the body is not what this route takes: {error}") from None


async def _topic(daemon: Daemon, topic_id: str) -> Topic:
    topic = await daemon.topics.existing(checked_topic_id(topic_id))
    if topic is None:
        raise NotFound(f"there is no topic {topic_id!r}; `memd stats` lists them")
    return topic
