"""Takes notes: each is durable before anybody is told so, and found from then on, by its words until it is embedded.

Rule: what is live in the topic, from the same author and source, is not taken again; its ids are told. A note that
cannot be made durable was not taken.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid

import msgspec
from msgspec import UNSET

from memd.conversation.events import Noted, NoteStored
from memd.errors import StoreError
from memd.ingest.archiver import Archiver
from memd.ingest.topics import Topic
from memd.ingest.unstored import Part, note_parts
from memd.notes import Note, check_not_ahead
from memd.store.snapshot import live_copy

FORBIDDEN = "forbidden"
"""The error of a note, or of a part of it, that was erased for good (`memd erase --forbid`)."""


class TakenNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a note."""

    chunk_ids: tuple[str, ...]
    """Of the chunks that it was cut into, in order."""
    duplicate: bool = False
    """All of it was live in the topic already, and nothing was stored."""
    error: str = ""
    """`forbidden`: what has no id in `chunk_ids` was erased for good, and was not stored."""


async def take_note(
    topic: Topic, note: Note, archiver: Archiver, author: str = "", *, mark: bytes | None = None
) -> TakenNote:
    """Take one note of a principal's (`Principal.author`), durably; it is stored in the background.

    Args:
        mark: one that was taken with the same mark before is not taken again, also where it was corrected since.

    Raises:
        BadNote: it is said to be from the future.
        StoreError: it cannot be made durable, and was not taken.
    """
    now_us = time.time_ns() // 1000
    check_not_ahead(note, now_us)
    note = msgspec.structs.replace(note, author=author, said_at=now_us if note.said_at is UNSET else note.said_at)
    note_id = uuid.uuid4().bytes if mark is None else hashlib.blake2b(mark, digest_size=16).digest()
    part = Part((), 0, note=(note_id, note))
    with topic.used():
        async with topic.noting:
            taken, is_new = await asyncio.to_thread(_as_told, topic, note_parts(topic.buffer), part)
            if is_new:
                topic.buffer.record(Noted(note_id, note))
            if not await topic.make_durable():  # of a copy too: it may be in the journal alone
                if is_new:
                    topic.buffer.record(NoteStored(note_id))
                raise topic.write_trouble or StoreError("the journal cannot be written; see the log of memd")
        archiver.store_notes_later(topic)
    return taken


def _as_told(topic: Topic, waiting: list[Part], part: Part) -> tuple[TakenNote, bool]:
    """The answer to a note: the ids of chunks that say the same, live or waiting, else those that it gets. And whether
    it has something to store."""
    assert part.note is not None, "a note's part"
    pending = [chunk for cut in topic.cutter.cut(waiting) for chunk in cut.chunks]
    drafts, snapshot = topic.cutter.drafts_of(*part.note), topic.log.snapshot()
    if topic.log.has_digest(part.note[0]) or any(one.key == part.key for one in waiting):
        taken = {one.draft.uuid: one.entry for one in pending}
        entries = [taken.get(one.uuid) or snapshot.find(one.uuid) for one in drafts]
        return TakenNote(tuple(one.public_id for one in entries if one is not None)), False
    said = {(one.draft.source, one.draft.content, one.draft.author): one.entry for one in pending}
    found = {one.uuid: live_copy(snapshot, one) or said.get((one.source, one.content, one.author)) for one in drafts}
    lacking = [draft for draft in drafts if found[draft.uuid] is None]
    is_new = not all(topic.log.forbidden.has_text(draft.content) for draft in lacking)
    if is_new:
        found |= {chunk.draft.uuid: chunk.entry for cut in topic.cutter.cut([part]) for chunk in cut.chunks}
    told = tuple(dict.fromkeys(one.public_id for one in found.values() if one is not None))
    is_forbidden = any(topic.log.forbidden.has_text(draft.content) for draft in lacking)
    return TakenNote(told, not lacking, FORBIDDEN if is_forbidden else ""), is_new
