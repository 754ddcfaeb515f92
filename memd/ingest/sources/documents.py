"""The entries that a changed document makes: of one that was known only what is new in it.

Rule: synchronous; what `drafts_of` returns is appended as one group, so that a file is as it was or as it is now. The
newest live entry of a file has the file's present hash: that is how the log alone tells what is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from memd.documents import GivenDocument
from memd.entries import ChunkState, Draft, Entry, Section, Status
from memd.ingest.pipeline import Cutter
from memd.ingest.sources.alignment import aligned
from memd.store.choice import newest_by_source
from memd.store.store import Snapshot

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
    root: str = ""
    """See `GivenDocument`; empty where nobody said."""


class CutDocument(msgspec.Struct, frozen=True):
    """A document as it is now, in chunks without vectors, redacted."""

    source: str
    hash: bytes
    drafts: list[Draft]
    renamed_from: str | None = None
    author: str = ""
    """The principal that handed it over; empty: the owner."""
    of_author: str | None = None
    """The document is that of this author alone, whatever others have under its name; None: that of all."""

    @classmethod
    def of(
        cls,
        document: GivenDocument,
        cutter: Cutter,
        step: Callable[[], None] = lambda: None,
        author: str = "",
        of_author: str | None = None,
    ) -> CutDocument:
        """Cut a document; `step` is called before each section, and may end it."""
        source = cutter.redactor.text(document.source)
        renamed_from = None if document.renamed_from == source else document.renamed_from
        drafts = cutter.cut_document(document, step, author)
        return cls(source, bytes.fromhex(document.hash), drafts, renamed_from, author, of_author)


def known_documents(snapshot: Snapshot) -> list[KnownDocument]:
    """Return the documents of a topic, by their sources."""
    return sorted(_known(snapshot), key=lambda one: one.source)


def chunks_of(snapshot: Snapshot, source: str, author: str | None = None) -> list[Entry]:
    """Return the chunks of a document, in their order; those of an author, or of all (None)."""
    live = snapshot.live_entries_from(source)
    found = [entry for entry in live if entry.kind == KIND and author in (None, entry.author or "")]
    return sorted(found, key=lambda entry: (_number(entry), entry.origin_id))


def drafts_of(snapshot: Snapshot, document: CutDocument, fingerprint: str) -> list[Draft]:
    """Return the entries that make the topic's chunks those of the document as it is now; none if they are.

    Text that stood elsewhere, in this file or under its former name, keeps its vector; others have none yet.

    Args:
        fingerprint: the present model's; vectors of another one are not kept.

    Raises:
        StoreError: an entry cannot be read.
    """
    by, of_author, renamed_from = document.author, document.of_author, document.renamed_from
    known = chunks_of(snapshot, document.source, of_author)
    former = chunks_of(snapshot, renamed_from, of_author) if renamed_from is not None else []
    kept, new = _arranged(known, document)
    gone = [entry for entry in known if entry.uuid not in kept]
    newest = max((entry for entry in known if entry.uuid in kept), key=lambda one: one.canonical_id, default=None)
    if not new and newest is not None and isinstance(newest.part, Section):
        if not gone and newest.part.hash == document.hash:
            return _taken_out(former, RENAMED, by)
        part = msgspec.structs.replace(newest.part, hash=document.hash)
        new = [msgspec.structs.replace(newest.as_draft(), part=part, vector=b"")]
    reused = [entry for entry in (*known, *former) if snapshot.fingerprint_of(entry.uuid) == fingerprint]
    vectors = {entry.embedded_text: entry.vector for entry in reused}
    return [*_taken_out(gone, CHANGED, by), *_taken_out(former, RENAMED, by), *with_vectors(new, vectors)]


def without_vectors(drafts: Iterable[Draft]) -> list[str]:
    """Return the texts that are still to be embedded, each once."""
    missing = (draft for draft in drafts if not draft.vector and draft.status is Status.ACTIVE)
    return list(dict.fromkeys(draft.embedded_text for draft in missing))


def with_vectors(drafts: Iterable[Draft], vectors: Mapping[str, bytes]) -> list[Draft]:
    """Return the drafts with the vectors of their texts, as far as these are known."""
    return [
        draft if draft.status is not Status.ACTIVE else _with_vector(draft, vectors.get(draft.embedded_text))
        for draft in drafts
    ]


def removal_of(snapshot: Snapshot, sources: Iterable[str], by: str = "", of_author: str | None = None) -> list[Draft]:
    """Return the entries by which a principal takes out all chunks of documents, or an author's."""
    return [draft for source in sources for draft in _taken_out(chunks_of(snapshot, source, of_author), REMOVED, by)]


def _known(snapshot: Snapshot) -> Iterator[KnownDocument]:
    for entry, chunks in newest_by_source(snapshot, KIND):
        if entry.source is not None and isinstance(entry.part, Section):
            hash_, root = entry.part.hash.hex(), entry.part.root.hex()
            yield KnownDocument(snapshot.topic_id, entry.source, hash_, chunks, entry.at, root)


def _arranged(known: Sequence[Entry], document: CutDocument) -> tuple[set[bytes], list[Draft]]:
    """Return the uuids of known chunks that stay, and the new chunks, numbered between those.

    The first new one of a stretch takes the place of all that stood there. Where there is no number left between two
    that would stay, the second is new.
    """
    cut, by = document.drafts, document.author
    matched = aligned([_shown(entry) for entry in known], [_shown(draft) for draft in cut])
    kept: set[bytes] = set()
    new: list[Draft] = []
    stretch: list[Draft] = []
    done, last = 0, None  # of the known ones, how many are seen to; the number of the last one that stays
    for position, draft in enumerate(cut):
        entry = known[matched[position]] if position in matched else None
        if entry is None or (stretch and _number(entry) == last):
            stretch.append(draft)
            continue
        new += _numbered(stretch, known[done : matched[position]], last, _number(entry), by)
        stretch, done, last = [], matched[position] + 1, _number(entry)
        kept.add(entry.uuid)
    return kept, [*new, *_numbered(stretch, known[done:], last, None, by)]


def _numbered(
    stretch: list[Draft], gone: Sequence[Entry], last: int | None, following: int | None, by: str
) -> list[Draft]:
    """New chunks in a row, numbered between two that stay, in place of those that stood there."""
    if last is None:
        numbers = range(len(stretch)) if following is None else range(following - len(stretch), following)
    elif following is None or following - last > len(stretch):
        numbers = range(last + 1, last + 1 + len(stretch))
    else:
        numbers = range(last, last + 1)  # behind it by their origin_id, which is higher
    numbered = []
    for place, draft in enumerate(stretch):
        assert isinstance(draft.part, Section)
        part = msgspec.structs.replace(draft.part, number=numbers[min(place, len(numbers) - 1)])
        numbered.append(msgspec.structs.replace(draft, part=part))
    if numbered and gone:
        uuids = tuple(entry.uuid for entry in gone)
        numbered[0] = msgspec.structs.replace(numbered[0], supersedes=uuids, **_change(CHANGED, by))
    return numbered


def _shown(chunk: ChunkState) -> tuple[object, ...]:
    """All of a chunk that people see: where only its page is another, it is another chunk, with the same vector."""
    place = (chunk.part.page, chunk.part.sheet) if isinstance(chunk.part, Section) else ()
    return chunk.heading, chunk.content, *place


def _number(entry: Entry) -> int:
    return entry.part.number if isinstance(entry.part, Section) else 0


def _with_vector(draft: Draft, vector: bytes | None) -> Draft:
    return draft if vector is None else msgspec.structs.replace(draft, vector=vector)


def _change(reason: str, by: str) -> dict[str, Any]:
    """The fields of an entry that a change of a document wrote, and whose that was."""
    return {"action": "Update", "reason": reason, "action_by": by or UNSET}


def _taken_out(entries: Iterable[Entry], reason: str, by: str) -> list[Draft]:
    gone = {"status": Status.DEPRECATED, "vector": b"", "content": "", **_change(reason, by)}
    return [msgspec.structs.replace(entry.as_draft(), **gone) for entry in entries]
