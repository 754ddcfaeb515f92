"""Turns corrections by clients, people and undo into entries, and appends them.

Rule: memd never judges: it corrects the chunks that may be corrected, and reports the ids of the others. Corrections
are applied in order, each to the result of the earlier ones, and appended as one group: a failure leaves the log
unchanged. The caller decides which chunks may be corrected and how entries are appended.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise

import msgspec
from msgspec import UNSET, UnsetType

from memd.embedding.encoder import Encoder
from memd.entries import STEPS, Correction, Draft, Entry, Status, clamped_steps
from memd.errors import BadQuestion, NotFound
from memd.messages import BlockChunk
from memd.store.snapshot import Place, answered_anew, beside, is_made_at, live_copies, replacement_of
from memd.store.store import Snapshot

UNDO = "Undo"
"""Action of an entry that restores an earlier state of a chunk."""

Find = Callable[[str], tuple[Snapshot, bytes] | Entry | None]
"""Returns the chunk with an id as its uuid and the topic that has its present state. A chunk that another daemon has
yet to store is returned as its future entry, without a vector; None: it may not be corrected."""
Append = Callable[[Sequence[Draft]], Awaitable[Sequence[Entry]]]
"""Signs the drafts and appends them as one group, durably. Raises StoreError: nothing was written."""


class Plan(msgspec.Struct, frozen=True):
    """The entries to append as one group, and the ids for which `correction_failed` is signalled."""

    drafts: tuple[Draft, ...]
    failed: tuple[str, ...]


class Applied(msgspec.Struct, frozen=True):
    """The entries that were appended, and the ids that could not be corrected."""

    entries: tuple[Entry, ...]
    failed: tuple[str, ...] = ()


async def correct(asked: Sequence[Correction], *, find: Find, encoder: Encoder, append: Append) -> Applied:
    """Apply corrections: plan the entries in a thread, where `find` is called, then append them. Raises EmbeddingError,
    StoreError: nothing was applied."""

    sources: dict[bytes, Snapshot] = {}

    def present(chunk_id: str) -> Entry | None:
        found = find(chunk_id)
        if isinstance(found, Entry):
            return msgspec.structs.replace(found, vector=encoder.embed_text(found.embedded_text))
        if found is None:
            return None
        sources[found[1]] = found[0]
        return _present(*found, encoder)

    def copies(entry: Entry) -> Iterable[Entry]:
        snapshot = sources.get(entry.uuid)
        return () if snapshot is None else (*live_copies(snapshot, entry), *answered_anew(snapshot, entry))

    def planned() -> Plan:
        return plan(
            asked,
            find=present,
            copies=copies,
            embed=encoder.embed_text,
            new_uuid=lambda: uuid.uuid4().bytes,
            now_us=time.time_ns() // 1000,
        )

    outcome = await asyncio.get_running_loop().run_in_executor(None, planned)
    return Applied(await _appended(outcome.drafts, append), outcome.failed)


async def correct_shown(
    asked: Sequence[Correction],
    *,
    own: Snapshot,
    resolve: Callable[[str], BlockChunk | None],
    snapshot_of: Callable[[str], Awaitable[Snapshot | None]],
    encoder: Encoder,
    append: Append,
) -> Applied:
    """Apply a client's corrections of chunks that it was recently shown; see `correct`.

    Args:
        own: the request's topic; its state of a chunk takes precedence over that of the chunk's own topic.
        resolve: returns the recently shown chunk with an id, if any; called on the event loop.
        snapshot_of: returns a topic, if it still exists.
    """
    ids = dict.fromkeys(chunk_id for correction in asked for chunk_id in correction.chunk_ids)
    shown = {chunk_id: chunk for chunk_id in ids if (chunk := resolve(chunk_id)) is not None}
    snapshots: dict[str, Snapshot | None] = {own.topic_id: own}
    for topic_id in {chunk.topic_id for chunk in shown.values()} - {own.topic_id}:
        snapshots[topic_id] = await snapshot_of(topic_id)

    def find(chunk_id: str) -> tuple[Snapshot, bytes] | None:
        chunk = shown.get(chunk_id)
        if chunk is None:
            return None
        known = (one for one in (own, snapshots[chunk.topic_id]) if one is not None and one.knows(chunk.uuid))
        return next(((one, chunk.uuid) for one in known), None)

    return await correct(asked, find=find, encoder=encoder, append=append)


async def undo(snapshot: Snapshot, canonical_id: int, reason: str, *, encoder: Encoder, append: Append) -> Applied:
    """Append the chunk's state before an entry of the topic; for an Update, the states of all chunks that it changed.

    Raises:
        NotFound: the topic has no such entry.
        BadQuestion: a later entry has changed the chunk, or another chunk of the same Update.
        EmbeddingError, StoreError: nothing was appended.
    """
    drafts = await asyncio.get_running_loop().run_in_executor(None, plan_undo, snapshot, canonical_id, reason, encoder)
    return Applied(await _appended(drafts, append))


def plan(
    corrections: Sequence[Correction],
    *,
    find: Callable[[str], Entry | None],
    embed: Callable[[str], bytes],
    new_uuid: Callable[[], bytes],
    now_us: int,
    copies: Callable[[Entry], Iterable[Entry]],
) -> Plan:
    """Turn corrections into entries; a pure function.

    Args:
        find: returns the present entry of a chunk by its shown id or full uuid. It is live in this topic or, for a
            chunk of a related topic that was never corrected here, live there. None if it may not be corrected.
        embed: returns the vector of a text, little-endian float32.
        now_us: microseconds since the epoch.
        copies: returns the live chunks with the same text as a chunk, itself included, and those with its question and
            another answer: an error in the shown chunk is in all of them, so an Update replaces them together.
    """
    present: dict[bytes, Draft] = {}  # chunks after the corrections so far
    drafts: list[Draft] = []
    failed: list[str] = []
    for correction in corrections:
        named: dict[bytes, Draft] = {}
        for chunk_id in dict.fromkeys(correction.chunk_ids):
            entry = find(chunk_id)
            state = None if entry is None else present.get(entry.uuid, entry.as_draft())
            if entry is None or state is None or state.status is not Status.ACTIVE:
                failed.append(chunk_id)
                continue
            named[state.uuid] = state
            if correction.action == "Update":
                others = (present.get(one.uuid, one.as_draft()) for one in copies(entry))
                named |= {one.uuid: one for one in others if one.status is Status.ACTIVE and one.uuid not in named}
        for state in named.values():
            changed = _corrected(state, correction)
            present[changed.uuid] = changed
            drafts.append(changed)
        content = correction.content or ""
        if correction.action == "Update" and content.strip() and named:
            drafts.append(_replacement(correction, content, list(named.values()), embed, new_uuid(), now_us))
    return Plan(tuple(drafts), tuple(failed))


def plan_undo(snapshot: Snapshot, canonical_id: int, reason: str, encoder: Encoder) -> list[Draft]:
    """Return the drafts that restore the state of chunks before an entry; see `undo` for the errors. Reads the disk."""
    place = snapshot.place(canonical_id)
    if place is None:
        raise NotFound(f"topic {snapshot.topic_id} has no entry {canonical_id}; `memd log` lists them")
    acts = _acts(snapshot, snapshot.read(place).uuid)
    entry = next(one for one in reversed(acts) if one.canonical_id <= canonical_id)
    place = snapshot.place(entry.canonical_id) or place
    *_, before, newest = None, *acts
    if newest.action == UNDO and before is entry:
        raise BadQuestion(f"it is undone already, by entry {newest.canonical_id}; undo that one to have it back")
    if newest is not entry:
        raise BadQuestion(f"entry {newest.canonical_id} has changed the chunk since; undo that one first")
    if entry.action == "Update":
        is_made = entry.status is Status.ACTIVE and is_made_at(snapshot, place, entry)
        made = entry.uuid if is_made else replacement_of(snapshot, place, entry.uuid)
        if made is not None and (last := _acts(snapshot, made)[-1]).status is not Status.ACTIVE:
            raise _changed_since(last)
    else:
        made = _replacement_of_undone(snapshot, place, entry) if entry.action == UNDO else None
    if made is None:
        return [_state_before(snapshot, entry.uuid, reason, encoder)]
    return _update_turned(snapshot, made, reason, encoder)


def _acts(snapshot: Snapshot, chunk_uuid: bytes) -> list[Entry]:
    """Read a chunk's entries, oldest first, each where the chunk is now; without those that only took it along when it
    was embedded anew, or when its file was renamed, changed elsewhere, or was removed and came back."""
    history = snapshot.history(chunk_uuid)
    acts = history[:1]
    for before, one in pairwise(history):
        if _is_same(before, one):
            continue
        if before.status is not Status.ACTIVE and len(acts) > 1 and _is_same(acts[-2], one):
            acts.pop()
        else:
            acts.append(one)
    return [msgspec.structs.replace(one, source=history[-1].source, part=history[-1].part) for one in acts]


def _is_same(before: Entry, entry: Entry) -> bool:
    """Return True if an entry has the chunk as an earlier one had it, perhaps at another place."""
    there = msgspec.structs.replace(before.as_draft(), source=entry.source, part=entry.part, vector=entry.vector)
    return there == entry.as_draft()


def _replacement_of_undone(snapshot: Snapshot, place: Place, entry: Entry) -> bytes | None:
    """Return the chunk created by an Update, if this entry belongs to the undoing or redoing of that Update.

    The created chunk's entry comes first in such a group, and the entries of the replaced chunks follow.
    """
    replaced = snapshot.history(entry.uuid)[0].supersedes
    behind = beside(snapshot, place, 1)
    if replaced and behind is not None and (other := snapshot.read(behind)).action == UNDO and other.uuid in replaced:
        return entry.uuid
    before = beside(snapshot, place, -1)
    while before is not None and (other := snapshot.read(before)).action == UNDO:
        if entry.uuid in snapshot.history(other.uuid)[0].supersedes:
            return other.uuid
        before = beside(snapshot, before, -1)
    return None


def _update_turned(snapshot: Snapshot, made: bytes, reason: str, encoder: Encoder) -> list[Draft]:
    """Return the drafts that undo an Update, or redo it if it is undone: either the replacement is live or the replaced
    chunks, never both."""
    history = _acts(snapshot, made)
    replacement, replaced = history[-1], history[0].supersedes
    others = [other[-1] for one in replaced if (other := _acts(snapshot, one))]
    if replacement.status is Status.ACTIVE:
        back = [one for one in others if one.status is not Status.ACTIVE]
        for one in back:
            place = snapshot.place(one.canonical_id)
            if one.action != UNDO and place is not None and replacement_of(snapshot, place, one.uuid) != made:
                raise _changed_since(one)
        restored = (_state_before(snapshot, one.uuid, reason, encoder) for one in back)
        return [_taken_out(replacement, reason), *restored]
    for one in (replacement, *others):
        if one.status is not Status.ACTIVE and one.action != UNDO:
            raise _changed_since(one)
    taken_out = (_taken_out(one, reason) for one in others if one.status is Status.ACTIVE)
    return [_state_before(snapshot, made, reason, encoder), *taken_out]


def _changed_since(entry: Entry) -> BadQuestion:
    return BadQuestion(
        f"entry {entry.canonical_id} has changed chunk {entry.public_id} of the same Update since; undo that one first"
    )


def _present(snapshot: Snapshot, chunk_uuid: bytes, encoder: Encoder) -> Entry | None:
    """Return the chunk's present entry with a vector of the present model, so that its next entry is searchable."""
    entry = snapshot.find(chunk_uuid)
    if entry is None or entry.status is not Status.ACTIVE:
        return entry
    if snapshot.fingerprint_of(chunk_uuid) != encoder.fingerprint:
        return msgspec.structs.replace(entry, vector=encoder.embed_text(entry.embedded_text))
    return entry


def _corrected(state: Draft, correction: Correction) -> Draft:
    why = {"action": correction.action, "reason": correction.reason, "action_steps": UNSET}
    if correction.action == "Update":
        return msgspec.structs.replace(state, status=Status.DEPRECATED, vector=b"", content="", **why)
    before = clamped_steps(state.utility_steps)
    steps = clamped_steps(before + STEPS[correction.action] * correction.steps)
    if (changed := abs(steps - before)) != 1:
        why["action_steps"] = changed
    return msgspec.structs.replace(state, utility_steps=steps, **why)


def _replacement(
    correction: Correction,
    content: str,
    replaced: Sequence[Draft],
    embed: Callable[[str], bytes],
    uuid: bytes,
    now_us: int,
) -> Draft:
    # No digests: the text comes from no message, so no message in a prompt makes it redundant.
    draft = Draft(
        uuid=uuid,
        content=content,
        speakers=(),
        vector=embed(content),
        created_at=now_us,
        utility_steps=max(0, *(clamped_steps(state.utility_steps) for state in replaced)),
        said_at=(given := _date_given(replaced)),
        dated=given is not UNSET or UNSET,
        roles=tuple(dict.fromkeys(role for state in replaced for role in state.roles)),
        supersedes=tuple(state.uuid for state in replaced),
        action=correction.action,
        reason=correction.reason,
    )
    shared = {name: {getattr(state, name) for state in replaced} for name in ("kind", "source", "part", "tags")}
    if (shared["kind"], len(shared["source"])) == ({"document"}, 1):
        shared["part"] = {replaced[0].part}  # a document's newest chunk names the known state of its file
    return msgspec.structs.replace(draft, **{name: values.pop() for name, values in shared.items() if len(values) == 1})


def _date_given(replaced: Sequence[Draft]) -> int | UnsetType:
    """Return the one date that notes or documents were given; UNSET for what was said, or noted, as it came: the
    correction says it anew, and is newer than all that was said meanwhile."""
    [date, *others] = {state.said_at if state.dated or state.kind == "document" else UNSET for state in replaced}
    return UNSET if others else date


def _state_before(snapshot: Snapshot, chunk_uuid: bytes, reason: str, encoder: Encoder) -> Draft:
    """Return the draft that restores a chunk's state before its newest entry."""
    history = _acts(snapshot, chunk_uuid)
    newest = history[-1]
    if len(history) == 1:
        is_adopted = newest.action in STEPS or newest.status is not Status.ACTIVE
        return _as_found_elsewhere(newest, reason) if is_adopted else _taken_out(newest, reason)
    before = history[-2]
    if before.status is not Status.ACTIVE:
        return _taken_out(newest, reason)
    place = snapshot.place(before.canonical_id)
    draft = msgspec.structs.replace(before.as_draft(), action=UNDO, action_steps=UNSET, reason=reason)
    if place is None or snapshot.views[place[0]].segment.header.fingerprint != encoder.fingerprint:
        draft = msgspec.structs.replace(draft, vector=encoder.embed_text(draft.embedded_text))
    return draft


def _taken_out(newest: Entry, reason: str) -> Draft:
    return msgspec.structs.replace(
        newest.as_draft(),
        status=Status.DEPRECATED,
        vector=b"",
        content="",
        action=UNDO,
        action_steps=UNSET,
        reason=reason,
    )


def _as_found_elsewhere(adopted: Entry, reason: str) -> Draft:
    """Undo the only correction by which the topic adopted a chunk of another topic."""
    if adopted.action not in STEPS:
        raise BadQuestion("this chunk is another topic's and was taken out here; tell memd again what it said")
    changed = 1 if adopted.action_steps is UNSET else adopted.action_steps
    steps = adopted.utility_steps - STEPS[adopted.action] * changed
    return msgspec.structs.replace(
        adopted.as_draft(), utility_steps=steps, action=UNDO, action_steps=UNSET, reason=reason
    )


async def _appended(drafts: Sequence[Draft], append: Append) -> tuple[Entry, ...]:
    return tuple(await append(drafts)) if drafts else ()
