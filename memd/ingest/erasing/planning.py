"""Plans of erasures: all that one would take, and what it would leave, for the person who decides.

Rule: only reads, and tells no more of a text than its first words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
import numpy as np

from memd.conversation.hot_buffer import HotBuffer
from memd.entries import Entry
from memd.errors import StoreError
from memd.store.erasure.ledger import Erasure, Kind
from memd.store.erasure.rewriting import was_erased
from memd.store.log.columns import Bits, text_hash, uuid_bytes
from memd.store.snapshot import Place, Snapshot

WORDS_TOLD = 5
"""Chunks of which a plan tells the first words."""
CHARACTERS_TOLD = 60
_DOCUMENT = 3
"""`columns.KINDS`"""


class PlannedErasure(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks that go in one topic."""

    topic_id: str
    kind: Kind
    chunks: int
    entries: int
    oldest: int | None
    newest: int | None
    """When the first and the last of them were said, in microseconds since the epoch; None: nothing goes."""
    first_words: tuple[str, ...] = ()
    kept_documents: int = 0
    """Older chunks of documents that stay, because their files are what they are read from."""
    kept_live: int = 0
    """Older chunks that stay, because a live conversation still has their messages in its prompt."""


def all_of(snapshot: Snapshot, topic_id: str) -> PlannedErasure:
    """Plan the erasure of a whole topic."""
    places = list(_newest_first(snapshot))
    return _planned(snapshot, topic_id, "topic", places)


def those(snapshot: Snapshot, uuids: Collection[bytes]) -> PlannedErasure:
    """Plan the erasure of some chunks, in this topic."""
    places = [place for uuid in uuids for place in snapshot.places(uuid) if not _is_erased(snapshot, place)]
    return _planned(snapshot, snapshot.topic_id, "chunks", places)


def older(snapshot: Snapshot, before: int, visible: Collection[bytes]) -> tuple[PlannedErasure, set[bytes]]:
    """Plan the erasure of what was said before a time, and return the uuids of the chunks that it takes.

    Args:
        before: microseconds since the epoch.
        visible: see `visible_digests`.
    """
    found: dict[bytes, list[Place]] = {}
    documents, live = set(), set()
    for number, view in snapshot.views.items():
        bits: Bits = (view.rows["said_at"] < max(0, before)) & (view.rows["is_erased"] == 0)
        for row in np.flatnonzero(bits).tolist():
            record = view.rows[row]
            uuid = uuid_bytes(record["uuid_high"], record["uuid_low"])
            if record["kind"] == _DOCUMENT:
                documents.add(uuid)
            else:
                found.setdefault(uuid, []).append((number, row))
    if visible:
        live = {uuid for uuid, places in found.items() if not _digests(snapshot, places).isdisjoint(visible)}
    places = [place for uuid, own in found.items() if uuid not in live for place in own]
    plan = _planned(snapshot, snapshot.topic_id, "age", places)
    kept = msgspec.structs.replace(plan, kept_documents=len(documents), kept_live=len(live))
    return kept, found.keys() - live


def visible_digests(buffer: HotBuffer) -> frozenset[bytes]:
    """Return the digests of all messages that are in the prompt of a live conversation."""
    return frozenset(
        one.messages[position].identity for one in buffer.conversations() for position in one.visible_positions()
    )


def digests_of(snapshot: Snapshot, uuids: Iterable[bytes]) -> set[bytes]:
    """Return the digests of the messages that chunks came from; those of damaged entries are not known."""
    return _digests(snapshot, [place for uuid in uuids for place in snapshot.places(uuid)])


def texts_of(snapshot: Snapshot, uuids: Iterable[bytes]) -> Iterator[str]:
    """Yield all texts that these chunks ever had, and the reasons that were given for their corrections."""
    for entry in _entries(snapshot, [place for uuid in uuids for place in snapshot.places(uuid)]):
        yield from (text for text in (entry.content, entry.reason) if text)


def same_text(snapshots: Iterable[Snapshot], texts: Iterable[str], but: Collection[bytes]) -> Mapping[bytes, Snapshot]:
    """Return the other chunks that have exactly one of these texts in one of their entries, and where."""
    keys = np.array(sorted({text_hash(text) for text in texts}), dtype=np.uint64)
    found: dict[bytes, Snapshot] = {}
    for snapshot in snapshots:
        for view in snapshot.views.values():
            bits: Bits = np.isin(view.rows["text_hash"], keys) & (view.rows["status"] == 0)
            for row in view.rows[bits]:
                uuid = uuid_bytes(row["uuid_high"], row["uuid_low"])
                if uuid not in but:
                    found.setdefault(uuid, snapshot)
    return found


def versions_of(snapshot: Snapshot, uuids: Collection[bytes]) -> set[bytes]:
    """Return the chunks that these replaced; they are chunks of their own."""
    entries = _entries(snapshot, [place for uuid in uuids for place in snapshot.places(uuid)])
    return {one for entry in entries for one in entry.supersedes if not was_erased(snapshot, one)} - set(uuids)


def _planned(snapshot: Snapshot, topic_id: str, kind: Kind, places: list[Place]) -> PlannedErasure:
    records = [snapshot.views[number].rows[row] for number, row in places]
    said = [int(record["said_at"]) for record in records]
    told = {uuid_bytes(one["uuid_high"], one["uuid_low"]): place for one, place in zip(records, places, strict=True)}
    return PlannedErasure(
        topic_id=topic_id,
        kind=kind,
        chunks=len(told),
        entries=len(places),
        oldest=min(said, default=None),
        newest=max(said, default=None),
        first_words=tuple(_beginnings(snapshot, told.values())),
    )


def _beginnings(snapshot: Snapshot, places: Iterable[Place]) -> Iterator[str]:
    told = 0
    for entry in _entries(snapshot, places):
        words = " ".join(entry.displayed.split())
        if words and told < WORDS_TOLD:
            told += 1
            yield words if len(words) <= CHARACTERS_TOLD else words[:CHARACTERS_TOLD].rstrip() + " …"
        if told == WORDS_TOLD:
            return


def _newest_first(snapshot: Snapshot) -> Iterator[Place]:
    return (place for place in snapshot.latest_places() if not _is_erased(snapshot, place))


def _is_erased(snapshot: Snapshot, place: Place) -> bool:
    return bool(snapshot.views[place[0]].rows[place[1]]["is_erased"])


def _digests(snapshot: Snapshot, places: Iterable[Place]) -> set[bytes]:
    return {digest for entry in _entries(snapshot, places) for digest in entry.digests}


def _entries(snapshot: Snapshot, places: Iterable[Place]) -> Iterator[Entry]:
    """The entries at these places that can be read."""
    for place in places:
        try:
            yield snapshot.read(place)
        except StoreError:
            continue


def erased_in(buffer: HotBuffer, erasures: Iterable[Erasure]) -> frozenset[bytes]:
    """Return the uuids of the chunks in a topic's memory blocks that were erased where they came from."""
    blocks = (block for conversation in buffer.conversations() for block in conversation.blocks.values())
    shown = {chunk for block in blocks for chunk in block.chunks}
    if not shown:
        return frozenset()
    return frozenset(
        chunk.uuid
        for one in erasures
        for chunk in shown
        if chunk.topic_id == one.topic_id
        # A topic of the same name that was begun later has higher ids.
        and (chunk.origin_id <= max(one.id, one.highest_id) if one.kind == "topic" else chunk.uuid in one.chunk_uuids)
    )
