"""The operations that change something: notes, corrections, undo, backup, erasure.

Rule: a body with an unknown member is rejected, because a misspelt member would change the meaning of a correction.
Only an admin of the topic erases, and only what the request names. With `dry_run` nothing changes; without it the
answer is sent when the erasure is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from memd.admin.parts import DaemonParts, Named, uuids_of
from memd.admin.routing import Body, Extent, TopicBody, post
from memd.entries import CORRECTION_STEPS_MAX, Action, Correction, Entry
from memd.errors import BadNote, BadQuestion, ErasedForGood, StoreError, UnknownTopic, WrongKey
from memd.ingest import erasing
from memd.ingest.archiver import TakenNote, take_note
from memd.ingest.erasing import ErasureDone, PlannedErasure
from memd.ingest.topic import waiting_in
from memd.ingest.topics import Topic
from memd.notes import GivenNote, check_not_ahead, checked_notes
from memd.principals import OWNER_NAME, Principal
from memd.recall import corrections
from memd.recall.corrections import Applied
from memd.selection import Selection, since
from memd.store.encryption.disk import key_id_of
from memd.store.layout import has_files
from memd.store.log.segment import UnstoredText
from memd.store.store import Snapshot, Store
from memd.store.tools.backup import BackupReport, known_backups, known_buckets, note_backup
from memd.store.tools.backup import backup as back_up
from memd.wording import counted, erased_for_good

MODE_HEADER = "X-Memory-Mode"


class CorrectionBody(TopicBody, frozen=True, kw_only=True):
    """The body of `POST /memd/corrections`."""

    topic_id: str
    chunk_ids: Annotated[
        list[str], Meta(min_length=1, description="The ids of the chunks that are meant, or enough first digits.")
    ]
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


class UndoBody(TopicBody, frozen=True, kw_only=True):
    """The body of `POST /memd/undo`."""

    canonical_id: int
    topic_id: str
    reason: Annotated[str, Meta(description="Why, in a few words; people read it.")] = ""


class NotesBody(TopicBody, frozen=True, kw_only=True):
    """The body of `POST /memd/notes`."""

    notes: tuple[GivenNote, ...]


class BackupBody(Body, frozen=True, kw_only=True):
    """The body of `POST /memd/backup`."""

    folder: str
    """An absolute path: a new or empty folder, or an earlier backup."""

    @property
    def extent(self) -> Extent:
        """See Body."""
        return Extent(detail=self.folder)


class Corrected(msgspec.Struct, frozen=True):
    """The canonical_ids of the appended entries, and the ids that could not be corrected. Who may not read there is
    told only the entries of the chunks that the request names."""

    applied: tuple[int, ...]
    failed: tuple[str, ...] = ()


class NotesTaken(msgspec.Struct, frozen=True):
    """The outcome of notes, in their order."""

    topic_id: str
    notes: tuple[TakenNote, ...]


def _notes_in(done: NotesTaken) -> Extent:
    ids = tuple(chunk_id for note in done.notes for chunk_id in note.chunk_ids)
    return Extent((done.topic_id,), ids, len(done.notes))


@post("/memd/notes", "write", act="write", touches=_notes_in, tool="remember")
async def take_notes(
    parts: DaemonParts, body: NotesBody, key: str, headers: Mapping[str, str], who: Principal
) -> NotesTaken:
    """Remember notes from now on. What is remembered already is not stored again.

    They are durable when this is answered. With an `Idempotency-Key` that was used before they are not stored again,
    whatever happened to them since.
    """
    mode = headers.get(MODE_HEADER, "full")
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
    mark, is_apart = mark_of(key, body, who), not who.may("read", body.topic_id)
    async with parts.held_one(body.topic_id, who, "write", creating=True) as topic:
        take = partial(take_note, topic, archiver=parts.archiver, author=who.author, is_apart=is_apart)
        taken = [await take(note, mark=b"%s%d" % (mark, position)) for position, note in enumerate(notes)]
    if all(one.error and not one.chunk_ids for one in taken):
        raise ErasedForGood(f"nothing was stored: {erased_for_good(body.topic_id)}")
    return NotesTaken(body.topic_id, tuple(taken))


def _corrected(applied: Applied, named: Collection[bytes], *, is_apart: bool) -> Corrected:
    told = (one for one in applied.entries if one.uuid in named or not is_apart)
    return Corrected(tuple(entry.canonical_id for entry in told), applied.failed)


@post(
    "/memd/corrections",
    "correct",
    act="correct",
    touches=lambda done: Extent(count=len(done.applied)),
    tool="correct_memory",
)
async def correct(parts: DaemonParts, body: CorrectionBody, key: str, who: Principal) -> Corrected:
    """Correct what is remembered. Nothing is lost: each correction can be taken back by a person (memd undo).

    With an `Idempotency-Key` that was used before, it returns that request's outcome.
    """
    if body.content is not None and body.action != "Update":
        raise BadQuestion("content belongs to Update: Helpful and Unhelpful leave a chunk as it is")
    if body.steps != 1 and body.action == "Update":
        raise BadQuestion("steps belong to Helpful and Unhelpful: an Update is done once")
    correction = Correction(tuple(body.chunk_ids), body.action, body.reason, body.content, body.steps)
    mark, is_apart = mark_of(key, body, who), not who.may("read", body.topic_id)
    async with parts.held_one(body.topic_id, who, "correct") as topic:
        if is_apart and body.content and topic.log.forbidden.has_text(parts.redactor.text(body.content)):
            await asyncio.to_thread(parts.encoder.embed_text, body.content)  # as long as if it were stored
            correction = msgspec.structs.replace(correction, content=None)
        meant = await asyncio.to_thread(uuids_of, [(topic.log, topic.unstored())], body.chunk_ids)
        await parts.archiver.store_named(topic, meant.values())

        async def work(snapshot: Snapshot, append: corrections.Append) -> Applied:
            named = {one: (snapshot, uuid) for one, uuid in meant.items() if snapshot.knows(uuid)}
            return await corrections.correct([correction], find=named.get, encoder=parts.encoder, append=append)

        def was_done(done: Sequence[Entry]) -> Applied:
            changed = {entry.uuid for entry in done}
            return Applied(tuple(done), tuple(one for one in body.chunk_ids if meant.get(one) not in changed))

        done = await parts.archiver.change_once(topic, mark, meant.values(), work, was_done, by=who.author)
        return _corrected(done, meant.values(), is_apart=is_apart)


@post("/memd/undo", "correct", act="correct", touches=lambda done: Extent(count=len(done.applied)))
async def undo(parts: DaemonParts, body: UndoBody, key: str, who: Principal) -> Corrected:
    """Append the state before an entry; for an `Idempotency-Key` see `/memd/corrections`."""
    mark, is_apart = mark_of(key, body, who), not who.may("read", body.topic_id)
    async with parts.held_one(body.topic_id, who, "correct") as topic:
        snapshot = topic.log.snapshot()
        place = snapshot.place(body.canonical_id)
        named = [] if place is None else [(await asyncio.to_thread(snapshot.read, place)).uuid]

        async def work(snapshot: Snapshot, append: corrections.Append) -> Applied:
            undone = partial(corrections.undo, encoder=parts.encoder, append=append)
            return await undone(snapshot, body.canonical_id, body.reason)

        done = await parts.archiver.change_once(
            topic, mark, named, work, lambda done: Applied(tuple(done)), by=who.author
        )
        return _corrected(done, named, is_apart=is_apart)


@post(
    "/memd/backup",
    "admin",
    act="backup",
    touches=lambda done: Extent(count=done.linked + done.copied + done.kept + done.erased),
)
async def backup(parts: DaemonParts, body: BackupBody) -> BackupReport:
    """Back up into a folder of this machine."""
    folder = Path(body.folder)
    if not folder.is_absolute() or "\0" in body.folder:
        raise BadQuestion(f"{folder}: give an absolute path; this daemon's working directory is not yours")

    def backed_up() -> BackupReport:
        report = back_up(parts.config.data_dir, folder, parts.store.files, waiting_in)
        note_backup(parts.config.data_dir, folder, parts.store.files)
        return report

    return await asyncio.to_thread(backed_up)


def mark_of(key: str, body: msgspec.Struct, who: Principal) -> bytes:
    """Return the mark of the entries that a request appends, different for each key; see `ChunkState.asked_by`."""
    told = "\0".join((key, who.name)).encode(errors="surrogateescape") + msgspec.json.encode(body)
    return hashlib.blake2b(told, digest_size=16).digest()


CHUNKS_MAX = 1_000
NAMED_MAX = 10
"""Limit of chunks listed individually in a plan."""
CHOICES = (
    "name what to erase: `topic_id`, `chunk_ids`, `author`, `source`, `retention` or `resume`, one of them alone; "
    "`before` belongs to `topic_id`"
)


class ErasureBody(Body, frozen=True, kw_only=True):
    """The body of `POST /memd/erase`."""

    topic_id: Annotated[
        str | None, Meta(description="Alone: the whole topic. With chunks: the topic that has them.")
    ] = None
    chunk_ids: Annotated[
        tuple[str, ...],
        Meta(description="Only this chunk: its id, or enough first digits of its uuid; may be given again."),
    ] = ()
    author: Annotated[
        str | None, Meta(description="All that this principal said or wrote (owner); with a topic only there.")
    ] = None
    source: Annotated[
        str | None,
        Meta(description="All that was added or imported from there or below it (chatgpt, a folder); else as author."),
    ] = None
    before: Annotated[
        str | None,
        Meta(description="Only what was said in the topic before this date or time (2026-11-20). Documents stay."),
    ] = None
    retention: Annotated[bool, Meta(description="All that is older than the settings' retention keeps.")] = False
    resume: Annotated[
        bool, Meta(description="Finish an erasure that was interrupted, or that a restored backup has undone.")
    ] = False
    forbid: Annotated[bool, Meta(description="Keep digests: what a client sends again is not stored again.")] = False
    dry_run: Annotated[bool, Meta(description="Only show what would go.")] = False

    @property
    def extent(self) -> Extent:
        """See Body."""
        return msgspec.structs.replace(super().extent, detail="dry run" if self.dry_run else "")


class ErasureAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The erasure, planned or done."""

    plans: tuple[PlannedErasure, ...] = ()
    done: tuple[ErasureDone, ...] = ()
    """Empty with `dry_run`."""
    remains: tuple[str, ...] = ()
    """Other places where the words may remain, in sentences."""

    @property
    def extent(self) -> Extent:
        """The topics and the number of chunks."""
        parts = self.done or self.plans
        return Extent(tuple(one.topic_id for one in parts), count=sum(one.chunks for one in parts))


@post("/memd/erase", "admin", act="erase", touches=lambda answer: answer.extent)
async def erase(parts: DaemonParts, body: ErasureBody, who: Principal) -> ErasureAnswer:
    """Erase chunks or topics for good, or with `dry_run` say what would be erased."""
    is_chosen = bool(body.author or body.source)
    is_of_chunks = bool(body.chunk_ids) or is_chosen
    asked = [body.resume, body.retention, is_of_chunks or bool(body.topic_id)]
    if sum(asked) != 1 or (body.chunk_ids and is_chosen) or (body.before and (is_of_chunks or not body.topic_id)):
        raise BadQuestion(CHOICES)
    if body.resume or body.retention:
        who.check_everywhere("admin")
    if body.resume:
        plans, again = await parts.retention.eraser.erase_again(dry_run=body.dry_run)
        return ErasureAnswer(plans=tuple(plans), done=tuple(again), remains=_backups(parts) if plans else ())
    if body.retention:
        plans = await parts.retention.plans()
        done = () if body.dry_run else tuple(await parts.retention.run(parts.auditor.name_of(who), confirmed=True))
        return ErasureAnswer(plans=tuple(plans), done=done, remains=_backups(parts))
    if is_of_chunks:
        asked_for = await _chunks(parts, body, who)
    else:
        assert body.topic_id is not None, "asked for above"
        asked_for = await (_older if body.before else _topic)(parts, body, body.topic_id, who)
    name, eraser = parts.auditor.name_of(who), parts.retention.eraser
    erased = await eraser.erase(() if body.dry_run else asked_for.erased, name, asked_for.uuids, forbid=body.forbid)
    replace = msgspec.structs.replace
    told = (one if who.may("read", one.topic_id) else replace(one, first_words=()) for one in asked_for.plans)
    return ErasureAnswer(plans=tuple(told), done=tuple(erased), remains=(*asked_for.remains, *_backups(parts)))


class _Asked(NamedTuple):
    """The requested erasure."""

    plans: Sequence[PlannedErasure]
    """As reported to the caller."""
    erased: Sequence[PlannedErasure]
    """As carried out."""
    uuids: Collection[bytes]
    """The chunks to erase; empty: the planned topic as a whole."""
    remains: Sequence[str]


async def _topic(parts: DaemonParts, body: ErasureBody, topic_id: str, who: Principal) -> _Asked:
    try:
        async with parts.held_one(topic_id, who, "admin") as topic:
            plan = await asyncio.to_thread(erasing.plan_of, topic.log.snapshot())
            return _Asked([plan], [plan], (), _live_prompts(topic, None, forbid=body.forbid))
    except UnknownTopic as error:
        raise UnknownTopic(f"{error}{await asyncio.to_thread(_in_backups, parts, topic_id)}") from None
    except StoreError as error:
        told = {"topic": topic_id, "error": error}
        logging.getLogger("memd").warning("a topic that cannot be read is erased", extra=told)
        whole = PlannedErasure(topic_id=topic_id, kind="topic")
        return _Asked([], [whole], (), [f"the topic cannot be read: {error}"])


async def _older(parts: DaemonParts, body: ErasureBody, topic_id: str, who: Principal) -> _Asked:
    try:
        before = int(since(body.before or ""))
    except ValueError:
        raise BadQuestion(f"{str(body.before)[:40]!r} is no time; write it like 2026-11-20") from None
    async with parts.held_one(topic_id, who, "admin") as topic:
        visible = erasing.visible_digests(topic.buffer)
        plan, uuids = await asyncio.to_thread(erasing.plan_by_age, topic.log.snapshot(), before, visible)
    return _Asked([plan], [plan] if uuids else [], uuids, [])


async def _chunks(parts: DaemonParts, body: ErasureBody, who: Principal) -> _Asked:
    if len(body.chunk_ids) > CHUNKS_MAX:
        raise BadQuestion(f"chunk_ids has {len(body.chunk_ids):,} ids; give {CHUNKS_MAX:,} at most at once")
    names = [body.topic_id] if body.topic_id else []
    async with parts.held(names, who, ["admin"]) as own:
        is_chosen = body.author or body.source
        named = await (_written(parts, own, body) if is_chosen else parts.named(own, body.chunk_ids, names, who))
        for topic in own:
            waiting = (one.uuid for one in named if one.waiting and one.snapshot.topic_id == topic.id)
            await parts.archiver.store_named(topic, waiting)
        uuids = {one.uuid for one in named}
    async with parts.held([], who, ["read", "admin"]) as topics:  # corrections may have copied the chunks
        having = [topic for topic in topics if any(topic.log.snapshot().knows(uuid) for uuid in uuids)]
        mine = [one for one in having if who.may("admin", one.id)]
        remains = [f"a copy in topic {topic.id}" for topic in having if topic not in mine]
        administered = [topic for topic in topics if who.may("admin", topic.id)]
        plans = await asyncio.to_thread(_plans, [topic.log.snapshot() for topic in administered], uuids)
        for topic in mine:
            await parts.archiver.store_named(topic, uuids, whole=True)  # erasing a chunk also erases its message
            digests = await asyncio.to_thread(erasing.digests_of, topic.log.snapshot(), uuids)
            remains += _live_prompts(topic, digests, forbid=body.forbid)
        remains += await asyncio.to_thread(_elsewhere, topics, mine, uuids, who)
        if is_chosen and not names and not who.may_everywhere("admin"):
            others = [*(topic.id for topic in topics if topic not in administered), "others that you may not read"]
            remains.append(f"what topics have where you may not erase; not looked at: {', '.join(others)}")
    return _Asked(plans, plans, uuids, remains)


def _plans(snapshots: list[Snapshot], uuids: set[bytes]) -> list[PlannedErasure]:
    """Plan the erasure in each topic with one of these chunks, or with a copy of a chunk that mentions their calls."""
    having = [one for one in snapshots if any(map(one.knows, uuids))]
    calls = erasing.calls_of(having, uuids)
    concerned = uuids.union(*(erasing.naming(one, calls) for one in having))
    plans = [erasing.plan_of(one, uuids, calls) for one in snapshots if any(map(one.knows, concerned))]
    return [plan for plan in plans if plan.entries or plan.unnamed]


async def _written(parts: DaemonParts, topics: Sequence[Topic], body: ErasureBody) -> list[Named]:
    """Return all chunks of an author or a source, including pending ones. Open turns are stored first, because they
    would be stored after the erasure otherwise. Raises StoreError: one cannot be stored."""
    authors = ("" if body.author == OWNER_NAME else body.author,) if body.author else ()
    for topic in topics:
        for one in topic.buffer.conversations():
            waiting = (item.message for item in one.messages[one.stored :] if item.message is not None)
            is_theirs = any((message.author or "") in authors for message in waiting)
            if is_theirs and not await parts.archiver.store(topic, one, len(one)):
                raise StoreError(
                    f"nothing was erased: what was said last in topic {topic.id} cannot be stored now, and would be "
                    "stored after the erasure; see the log of memd, and erase again when that works"
                )
    wanted = Selection(authors=authors, sources=(body.source,) if body.source else ())

    def found(topic: Topic, unstored: UnstoredText) -> list[Named]:
        snapshot, waiting = topic.log.snapshot(), unstored.chunks()
        own = (one.entry.uuid for one in waiting if wanted.admits_entry(one.entry))
        stored = [Named(snapshot, uuid) for uuid in erasing.ever_of(snapshot, wanted)]
        return [*stored, *(Named(snapshot, uuid, waiting) for uuid in own)]

    return [one for topic in topics for one in await asyncio.to_thread(found, topic, topic.unstored())]


def _live_prompts(topic: Topic, digests: Collection[bytes] | None, *, forbid: bool) -> list[str]:
    """`digests`: of the erased messages; None: all."""
    live = [
        one
        for one in topic.buffer.conversations()
        if any(digests is None or one.messages[p].identity in digests for p in one.visible_positions())
    ]
    if not live:
        return []
    has = counted(len(live), "live conversation")
    then = "but it is not stored again" if forbid else "and it is stored again in a new chat without --forbid"
    return [f"the prompts of {has} of topic {topic.id}: a client may send again what it has, {then}"]


def _backups(parts: DaemonParts) -> tuple[str, ...]:
    until = "until one of its next rounds, and where the bucket keeps versions, until those are removed"
    url, files = parts.config.backup.bucket, parts.store.files
    bucket = (f"the backup in {url}, {until}",) if url else ()
    others = [one for one in known_buckets(parts.store.data_dir, files) if one != url]
    was = "which this was restored from, until you remove it or memd backs up there again (backup.bucket)"
    folders = known_backups(parts.store.data_dir, files)
    said = (f"the backup in {one}, {_until(parts.store, Path(one))}" for one in folders)
    return (*bucket, *(f"the backup in {one}, {was}" for one in others), *said)


def _in_backups(parts: DaemonParts, topic_id: str) -> str:
    """Say which backups may have a topic whose folder is gone, and how it is erased there; empty if none, or if it was
    erased here, which backups follow."""
    data_dir, files, bucket = parts.store.data_dir, parts.store.files, parts.config.backup.bucket
    folders = [one for one in known_backups(data_dir, files) if has_files(files, Path(one, topic_id))]
    having = ", ".join([*folders, *dict.fromkeys([*([bucket] if bucket else []), *known_buckets(data_dir, files)])])
    how = f"to erase it there, stop memd, put {topic_id} back into {data_dir} out of it, and erase it then"
    was_erased = any(one.kind == "topic" and one.topic_id == topic_id for one in parts.store.ledger)
    return f". A backup may have it ({having}): {how}" if having and not was_erased and not parts.store.kept else ""


def _until(store: Store, backup: Path) -> str:
    with suppress(WrongKey):
        if key_id_of(store.files, backup) == key_id_of(store.files, store.data_dir):
            return "until the next `memd backup` into it"
    return (
        "until you remove it, as it is from before encryption changed: `memd backup` takes nothing out of it any more"
    )


def _elsewhere(topics: list[Topic], having: list[Topic], uuids: Collection[bytes], who: Principal) -> tuple[str, ...]:
    """Describe other places with the words of some chunks, as far as `who` may read them."""
    topics = [topic for topic in topics if who.may("read", topic.id)]
    told: list[str] = []
    texts: list[str] = []
    files: set[str] = set()
    for topic in having:
        snapshot = topic.log.snapshot()
        if versions := erasing.versions_of(snapshot, uuids):
            told.append(f"what they replaced: {_short_ids(snapshot, sorted(versions))} in topic {topic.id}")
        if topic not in topics:
            continue
        texts += erasing.texts_of(snapshot, uuids)
        entries = (snapshot.find(uuid) for uuid in uuids)
        files |= {one.source for one in entries if one is not None and one.kind == "document" and one.source}
    is_few = len(uuids) <= erasing.COMPARED_MAX
    snapshots = {topic.id: topic.log.snapshot() for topic in topics}
    others = erasing.repeating([*snapshots.values()], texts, uuids) if is_few else []
    if not is_few:
        most = f"over {erasing.COMPARED_MAX:,} are not compared"
        told.append(f"other chunks with words of it, if there are any: {most}")
    for one in others[:NAMED_MAX]:
        more = f" and {counted(len(one.words) - 1, 'passage')} more" if len(one.words) > 1 else ""
        id_ = _short_ids(snapshots[one.topic_id], [one.uuid])
        told.append(f"chunk {id_} in topic {one.topic_id} stays: it has {one.words[0]!r} too{more}")
    if len(others) > NAMED_MAX:
        told.append(f"{counted(len(others) - NAMED_MAX, 'chunk')} more that have words of it stay")
    told += (f"the file {name}, which is read again when it changes" for name in sorted(files))
    return tuple(told)


def _short_ids(snapshot: Snapshot, uuids: Collection[bytes]) -> str:
    shown = [uuid.hex()[: snapshot.public_digits(uuid)] for uuid in uuids]
    return ", ".join(shown[:NAMED_MAX]) + (f" and {len(shown) - NAMED_MAX} more" if len(shown) > NAMED_MAX else "")
