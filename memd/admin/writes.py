"""The routes that change something: notes, corrections, undo, backup.

Rule: a body with an unknown member is refused: a correction with a misspelt member must not be taken for another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from memd.admin import history
from memd.admin.acts import Extent
from memd.admin.http import key_of
from memd.admin.queries import Body, TopicBody
from memd.admin.routing import post
from memd.admin.topics import NamedTopics
from memd.embedding.encoder import Encoder
from memd.entries import CORRECTION_STEPS_MAX, Action, Correction
from memd.errors import BadNote, BadQuestion, ErasedForGood, MadeAnew, StoreError
from memd.ingest.archiver import Archiver
from memd.ingest.notes import TakenNote, take_note
from memd.ingest.topics import Topic
from memd.ingest.unstored import waiting_in
from memd.notes import GivenNote, check_not_ahead, checked_notes
from memd.principals import Principal
from memd.recall import corrections
from memd.recall.corrections import Applied
from memd.store.disk import LocalDisk
from memd.store.order import asked_by
from memd.store.store import TopicLog
from memd.store.tools.backup import BackupReport, note_backup
from memd.store.tools.backup import backup as back_up
from memd.wording import erased_for_good

MODE_HEADER = "X-Memory-Mode"


class CorrectionBody(TopicBody, kw_only=True):
    """The body of `POST /memd/corrections`."""

    topic_id: str
    chunk_ids: Annotated[list[str], Meta(description="The ids of the chunks that are meant, or enough first digits.")]
    action: Annotated[
        Action,
        Meta(description="Update: they are wrong or outdated; Helpful, Unhelpful: recall them more or less often."),
    ]
    content: Annotated[
        str | None, Meta(description="Update only: the text that is right; without it they are taken out.")
    ] = None
    reason: Annotated[str, Meta(description="Why, in a few words; people read it.")] = ""
    steps: Annotated[
        int,
        Meta(ge=1, le=CORRECTION_STEPS_MAX, description="Helpful and Unhelpful only: counts as so many corrections."),
    ] = 1

    @property
    def extent(self) -> Extent:
        """See Body."""
        return Extent((self.topic_id,), tuple(self.chunk_ids))


class UndoBody(TopicBody, kw_only=True):
    """The body of `POST /memd/undo`."""

    canonical_id: int
    topic_id: str
    reason: Annotated[str, Meta(description="Why, in a few words; people read it.")] = ""


class NotesBody(TopicBody, kw_only=True):
    """The body of `POST /memd/notes`."""

    notes: tuple[GivenNote, ...]


class BackupBody(Body, kw_only=True):
    """The body of `POST /memd/backup`."""

    folder: str
    """An absolute path: new, empty or an earlier backup."""

    @property
    def extent(self) -> Extent:
        """See Body."""
        return Extent(detail=self.folder)


class Corrected(msgspec.Struct, frozen=True):
    """The canonical_ids of what was appended, and the ids that could not be corrected."""

    applied: tuple[int, ...]
    failed: tuple[str, ...] = ()


class NotesTaken(msgspec.Struct, frozen=True):
    """The outcome of notes, in their order."""

    topic_id: str
    notes: tuple[TakenNote, ...]


def _notes_in(done: NotesTaken) -> Extent:
    ids = tuple(chunk_id for note in done.notes for chunk_id in note.chunk_ids)
    return Extent((done.topic_id,), ids, len(done.notes))


class NoteRoutes:
    """Notes: what is remembered without a chat."""

    def __init__(self, topics: NamedTopics, archiver: Archiver) -> None:
        self._topics = topics
        self._archiver = archiver

    @post("/memd/notes", "write", act="write", touches=_notes_in, tool="remember")
    async def take_notes(self, body: NotesBody, request: web.Request, who: Principal) -> NotesTaken:
        """Remember notes from now on. What is remembered already is not stored again.

        They are durable when this is answered.
        """
        mode = request.headers.get(MODE_HEADER, "full")
        if mode != "full":
            raise BadQuestion(f"{MODE_HEADER} is {mode[:20]!r}, so nothing may be stored; leave it out to take notes")
        if not body.notes:
            raise BadQuestion("notes has no note")
        try:
            notes = checked_notes(body.notes)
            for position, note in enumerate(notes):
                check_not_ahead(note, time.time_ns() // 1000, f"notes[{position}].")
        except BadNote as error:
            raise BadQuestion(str(error)) from None
        async with self._topics.held_or_new(body.topic_id, who) as topic:
            taken = [await take_note(topic, note, self._archiver, who.author) for note in notes]
        if all(one.error and not one.chunk_ids for one in taken):
            raise ErasedForGood(f"nothing was stored: {erased_for_good(body.topic_id)}")
        return NotesTaken(body.topic_id, tuple(taken))


class CorrectionRoutes:
    """Corrections by people, and their undo."""

    def __init__(self, topics: NamedTopics, encoder: Encoder, archiver: Archiver) -> None:
        self._topics = topics
        self._encoder = encoder
        self._archiver = archiver

    async def _until_made(self, topic: Topic, work: Callable[[TopicLog, int], Awaitable[Applied]]) -> Corrected:
        """Do work on the topic's log, again where another daemon has stored something of the same meanwhile.

        Args:
            work: takes the log, and what its `head` was before.
        """
        while True:
            log_ = topic.log
            try:
                return _corrected(await work(log_, log_.head))
            except MadeAnew:
                continue

    @post(
        "/memd/corrections",
        "correct",
        act="correct",
        touches=lambda done: Extent(count=len(done.applied)),
        tool="correct_memory",
    )
    async def correct(self, body: CorrectionBody, request: web.Request, who: Principal) -> Corrected:
        """Correct what is remembered. Nothing is lost: each correction can be taken back by a person (memd undo).

        With an `Idempotency-Key` that was shown before it tells what became of it then.
        """
        if not body.chunk_ids:
            raise BadQuestion("chunk_ids names no chunk")
        if body.content is not None and body.action != "Update":
            raise BadQuestion("content belongs to Update: Helpful and Unhelpful leave a chunk as it is")
        if body.steps != 1 and body.action == "Update":
            raise BadQuestion("steps belong to Helpful and Unhelpful: an Update is done once")
        correction = Correction(tuple(body.chunk_ids), body.action, body.reason, body.content, body.steps)
        mark = mark_of(request, body, who)
        async with self._topics.held_one(body.topic_id, who, "correct") as topic:

            async def corrected(log_: TopicLog, made_at: int) -> Applied:
                meant = await asyncio.to_thread(history.uuids_of, [(log_, topic.unstored())], body.chunk_ids)
                await self._archiver.store_named(topic, meant.values())
                snapshot = log_.snapshot()
                named = {one: uuid for one, uuid in meant.items() if snapshot.knows(uuid)}
                if done := await asyncio.to_thread(asked_by, snapshot, named.values(), mark):
                    changed = {entry.uuid for entry in done}
                    return Applied(tuple(done), tuple(one for one in body.chunk_ids if named.get(one) not in changed))
                return await corrections.correct(
                    [correction],
                    find=lambda one: (snapshot, named[one]) if one in named else None,
                    encoder=self._encoder,
                    utility=snapshot.utility,
                    append=partial(self._archiver.append_corrections, topic, log_, made_at=made_at),
                    by=who.author,
                    asked_by=mark,
                )

            return await self._until_made(topic, corrected)

    @post("/memd/undo", "correct", act="correct", touches=lambda done: Extent(count=len(done.applied)))
    async def undo(self, body: UndoBody, request: web.Request, who: Principal) -> Corrected:
        """Append the state before an entry; for an `Idempotency-Key` see `/memd/corrections`."""
        mark = mark_of(request, body, who)
        async with self._topics.held_one(body.topic_id, who, "correct") as topic:

            async def undone(log_: TopicLog, made_at: int) -> Applied:
                snapshot = log_.snapshot()
                place = snapshot.place(body.canonical_id)
                named = [] if place is None else [(await asyncio.to_thread(snapshot.read, place)).uuid]
                if done := await asyncio.to_thread(asked_by, snapshot, named, mark):
                    return Applied(tuple(done))
                return await corrections.undo(
                    snapshot,
                    body.canonical_id,
                    body.reason,
                    encoder=self._encoder,
                    append=partial(self._archiver.append_corrections, topic, log_, made_at=made_at),
                    by=who.author,
                    asked_by=mark,
                )

            return await self._until_made(topic, undone)


class BackupRoutes:
    """Backups beside the running daemon."""

    def __init__(self, data_dir: Path, files: LocalDisk) -> None:
        self._data_dir = data_dir
        self._files = files

    @post(
        "/memd/backup",
        "admin",
        act="backup",
        touches=lambda done: Extent(count=done.linked + done.copied + done.kept + done.erased),
    )
    async def backup(self, body: BackupBody) -> BackupReport:
        """Back up into a folder of this machine."""
        folder = Path(body.folder)
        if not folder.is_absolute() or "\0" in body.folder:
            raise BadQuestion(f"{folder}: give an absolute path; this daemon's working directory is not yours")

        def backed_up() -> BackupReport:
            report = back_up(self._data_dir, folder, self._files, waiting_in)
            with suppress(StoreError):  # the backup is whole without the note
                note_backup(self._data_dir, folder, self._files)
            return report

        return await asyncio.to_thread(backed_up)


def mark_of(request: web.Request, body: msgspec.Struct, who: Principal) -> bytes:
    """The mark of the entries that a request appends, see `ChunkState.asked_by`: another one for each key."""
    told = "\0".join((key_of(request), who.name)).encode(errors="surrogateescape") + msgspec.json.encode(body)
    return hashlib.blake2b(told, digest_size=16).digest()


def _corrected(applied: Applied) -> Corrected:
    return Corrected(tuple(entry.canonical_id for entry in applied.entries), applied.failed)
