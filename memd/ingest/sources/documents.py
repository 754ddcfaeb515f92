"""Takes documents: of a file that was known only what changed is new.

Rule: synchronous; what it returns is appended as one group, so that a file is as it was or as it is now. The newest
live entry of a file has the file's present hash: that is how the log alone tells what is unchanged.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from memd.documents import GivenDocument
from memd.embedding.embedder import EmbedMany
from memd.entries import Draft, Entry, Section, Status
from memd.ingest.pipeline import Cutter
from memd.store.choice import newest_by_source
from memd.store.store import Snapshot, TopicLog

KIND = "document"
CHANGED, REMOVED, RENAMED = "file changed", "file removed", "file renamed"


class KnownDocument(msgspec.Struct, frozen=True):
    """A document of which a topic has live chunks."""

    topic_id: str
    source: str
    hash: str
    """SHA-256 of the file as it was taken last."""
    chunks: int
    at: int
    """When it changed here last, in microseconds since the epoch."""


def known_documents(snapshot: Snapshot) -> Iterator[KnownDocument]:
    """Yield the documents of a topic, by their sources."""
    for entry, chunks in sorted(newest_by_source(snapshot, KIND), key=lambda found: found[0].source or ""):
        if entry.source is not None and isinstance(entry.part, Section):
            digits = entry.part.hash.hex()
            yield KnownDocument(snapshot.topic_id, entry.source, digits, chunks, entry.at)


def drafts_of(
    topic: TopicLog, document: GivenDocument, cutter: Cutter, embed_many: EmbedMany, fingerprint: str
) -> list[Draft]:
    """Return the entries that make the topic's chunks those of the document as it is now; none if they are.

    Args:
        fingerprint: the present model's; vectors of another one are made anew.

    Raises:
        EmbeddingError: the model failed on a text.
        StoreError: an entry cannot be read.
    """
    snapshot = topic.snapshot()
    cut = cutter.cut_document(document)
    source = cutter.redactor.text(document.source)
    known = _documents_chunks(snapshot, source)
    is_renamed = document.renamed_from not in (None, source)
    former = _documents_chunks(snapshot, str(document.renamed_from)) if is_renamed else []
    kept, replaced = _compared(known, cut)
    new = [_in_place_of(draft, replaced[draft.uuid]) for draft in cut if draft.uuid in replaced]
    gone = [entry for entry in known if entry.uuid not in kept]
    newest = max((entry for entry in known if entry.uuid in kept), key=lambda one: one.canonical_id, default=None)
    file_hash = bytes.fromhex(document.hash)
    if not new and newest is not None and isinstance(newest.part, Section) and (gone or newest.part.hash != file_hash):
        part = msgspec.structs.replace(newest.part, hash=file_hash)
        new = [msgspec.structs.replace(newest.as_draft(), part=part)]
    reused = [entry for entry in (*known, *former) if snapshot.fingerprint_of(entry.uuid) == fingerprint]
    return [*_taken_out(gone, CHANGED), *_taken_out(former, RENAMED), *_embedded(new, reused, embed_many)]


def removal_of(topic: TopicLog, source: str) -> list[Draft]:
    """Return the entries that take out all chunks of a document."""
    return _taken_out(_documents_chunks(topic.snapshot(), source), REMOVED)


def _documents_chunks(snapshot: Snapshot, source: str) -> list[Entry]:
    return [entry for entry in snapshot.live_entries_from(source) if entry.kind == KIND]


def _compared(known: Sequence[Entry], cut: Sequence[Draft]) -> tuple[set[bytes], dict[bytes, tuple[bytes, ...]]]:
    """Return the uuids of known chunks that stay, and of each new one the uuids of those whose place it takes."""
    ordered = sorted(known, key=lambda entry: (_number(entry), entry.origin_id))
    before = [(entry.heading, entry.content) for entry in ordered]
    after = [(draft.heading, draft.content) for draft in cut]
    kept: set[bytes] = set()
    replaced: dict[bytes, tuple[bytes, ...]] = {}
    for what, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if what == "equal":
            kept.update(entry.uuid for entry in ordered[i1:i2])
            continue
        places = [draft.uuid for draft in cut[j1:j2]]
        replaced |= dict.fromkeys(places, ())
        if places:
            replaced[places[0]] = tuple(entry.uuid for entry in ordered[i1:i2])
    return kept, replaced


def _number(entry: Entry) -> int:
    return entry.part.number if isinstance(entry.part, Section) else 0


def _embedded(drafts: Sequence[Draft], known: Iterable[Entry], embed_many: EmbedMany) -> list[Draft]:
    """The drafts with their vectors: what stood elsewhere, in this file or under its former name, keeps its own."""
    vectors = {entry.embedded_text: entry.vector for entry in known}
    missing = list(dict.fromkeys(one.embedded_text for one in drafts if one.embedded_text not in vectors))
    if missing:
        found = zip(missing, embed_many(missing), strict=True)
        vectors |= {text: np.asarray(vector).astype("<f4").tobytes() for text, vector in found}
    return [msgspec.structs.replace(draft, vector=vectors[draft.embedded_text]) for draft in drafts]


def _in_place_of(draft: Draft, uuids: tuple[bytes, ...]) -> Draft:
    return msgspec.structs.replace(draft, supersedes=uuids, action="Update", reason=CHANGED) if uuids else draft


def _taken_out(entries: Iterable[Entry], reason: str) -> list[Draft]:
    gone = {"status": Status.DEPRECATED, "vector": b"", "content": "", "action": "Update", "reason": reason}
    return [msgspec.structs.replace(entry.as_draft(), **gone) for entry in entries]
