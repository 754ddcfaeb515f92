"""Documents in a topic: the entries for a changed one, and taking it concurrently with other work.

Rule: the drafts of `drafts_of` are appended as one group, so that a file is in its old state or in its new one. Of a
known document only new text is appended. A file's newest live entry has the file's present hash, by which the log alone
tells unchanged files. Text replaced by a correction stays replaced as long as the file has it; a document that was
removed and comes back has its former chunks again, with their corrections. `DocumentTaker` cuts and embeds in steps of
a second at most, without holding the topic: turns and corrections are stored in between. Only the append holds the
topic, and compares the document once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from memd.conversation.matching import aligned
from memd.embedding.encoder import Encoder
from memd.entries import ChunkState, Draft, Entry, Section, Status
from memd.errors import BadDocument, StoreError
from memd.ingest.archiver import Archiver
from memd.ingest.indexer import background_thread
from memd.ingest.pipeline import Cutter
from memd.ingest.readers.text import GivenDocument
from memd.ingest.topics import Topic
from memd.store.snapshot import Place, newest_by_source, replacement_of
from memd.store.store import Snapshot, TopicLog

KIND = "document"
CHANGED, REMOVED, RENAMED = REASONS = "file changed", "file removed", "file renamed"


class KnownDocument(msgspec.Struct, frozen=True):
    """A document with live chunks in a topic."""

    topic_id: str
    source: str
    hash: str
    """SHA-256 of the file when it was last taken."""
    chunks: int
    at: int
    """Time of its last change here, in microseconds since the epoch."""
    root: str = ""
    """See `GivenDocument`; empty if unknown."""


class CutDocument(msgspec.Struct, frozen=True):
    """The present state of a document, cut into redacted chunks without vectors."""

    source: str
    hash: bytes
    drafts: list[Draft]
    renamed_from: str | None = None
    author: str = ""
    """The principal that sent it; empty for the owner."""
    of_author: str | None = None
    """If set, only this author's chunks count as the document's, not others' under the same name."""


def known_documents(snapshot: Snapshot, author: str | None = None) -> list[KnownDocument]:
    """Return the documents of a topic, sorted by source; only an author's chunks count unless None."""
    known = []
    for newest, every in newest_by_source(snapshot, KIND):
        entry, chunks = newest, every
        if author not in (None, newest.author or ""):
            if not (own := chunks_of(snapshot, newest.source or "", author)):
                continue
            entry, chunks = max(own, key=lambda one: one.canonical_id), len(own)
        if entry.source is not None and isinstance(entry.part, Section):
            hash_, root = entry.part.hash.hex(), entry.part.root.hex()
            known.append(KnownDocument(snapshot.topic_id, entry.source, hash_, chunks, entry.at, root))
    return sorted(known, key=lambda one: one.source)


def chunks_of(snapshot: Snapshot, source: str, author: str | None = None) -> list[Entry]:
    """Return the chunks of a document in order; only an author's unless None."""
    found = (entry for entry in snapshot.entries_from(source) if _is_of(entry, source, author))
    return sorted(found, key=lambda entry: (_number(entry), entry.origin_id))


def drafts_of(snapshot: Snapshot, document: CutDocument, fingerprint: str) -> list[Draft]:
    """Return the entries that bring the topic's chunks to the document's present state; none if nothing changed.

    Text that moved within the file, or is from its former name, keeps its vector; new text has none yet. `fingerprint`:
    the present model's; vectors of other models are not kept. Raises StoreError: an entry cannot be read.
    """
    by, of_author, renamed_from = document.author, document.of_author, document.renamed_from
    live = chunks_of(snapshot, document.source, of_author)
    back = [] if live else _removed(snapshot, document.source, of_author)
    known = live or back
    former = chunks_of(snapshot, renamed_from, of_author) if renamed_from is not None else []
    said = {draft.content for draft in document.drafts}
    away, replacing = _corrected(snapshot, document.source, said, of_author, {entry.uuid for entry in back})
    moved: list[Entry] = []
    if renamed_from is not None:
        away_before, replacing_before = _corrected(snapshot, renamed_from, said, of_author)
        moved += {one.uuid: one for chain in away_before.values() for one in chain}.values()
        away, replacing = away | away_before, replacing | replacing_before
    standing = {entry.uuid for entry in (*known, *former) if _stands(snapshot, entry, replacing, said)}
    moved += (entry for entry in former if entry.uuid in standing)
    cut = [draft for draft in document.drafts if draft.content not in away]
    kept, new = _arranged([entry for entry in known if entry.uuid not in standing], cut, by)
    kept |= standing
    gone = [entry for entry in known if entry.uuid not in kept]
    former = [entry for entry in former if entry.uuid not in kept]
    again = [*moved, *(entry for entry in back if entry.uuid in kept)]
    new = [*(_moved(entry, document) for entry in again), *new]
    newest = max((entry for entry in known if entry.uuid in kept), key=lambda one: one.canonical_id, default=None)
    if not new and newest is not None and isinstance(newest.part, Section):
        if not gone and newest.part.hash == document.hash:
            return _removals(former, RENAMED, by)
        part = msgspec.structs.replace(newest.part, hash=document.hash)
        new = [msgspec.structs.replace(newest.as_draft(), part=part, vector=b"")]
    reused = [entry for entry in (*live, *moved, *former) if snapshot.fingerprint_of(entry.uuid) == fingerprint]
    vectors = {entry.embedded_text: entry.vector for entry in reused}
    return [*_removals(gone, CHANGED, by), *_removals(former, RENAMED, by), *with_vectors(new, vectors)]


def _removed(snapshot: Snapshot, source: str, author: str | None) -> list[Entry]:
    """Return the chunks of a removed document in order, as they were before."""
    histories = [snapshot.history(uuid) for uuid in snapshot.taken_out_of(source)]
    gone = [one for one in histories if one[-1].reason == REMOVED and _is_of(one[-1], source, author)]
    return sorted((one[-2] for one in gone if len(one) > 1), key=lambda entry: (_number(entry), entry.origin_id))


def _is_of(entry: Entry, source: str, author: str | None) -> bool:
    return (entry.kind, entry.source) == (KIND, source) and author in (None, entry.author or "")


def _corrected(
    snapshot: Snapshot, source: str, texts: Collection[str], author: str | None, back: Collection[bytes] = ()
) -> tuple[dict[str, list[Entry]], set[bytes]]:
    """Return those of a document's texts that a correction took out, each with the present entries of its chunk and of
    corrections that were corrected in turn, and the chunks that replace them, live or in `back`. A text whose
    replacement was removed with the file or by a change of it is left out."""
    found, replacing, gone = dict[str, list[Entry]](), set[bytes](), snapshot.taken_out_of(source)
    for text in texts if gone else ():
        uuids = dict.fromkeys(map(snapshot.uuid_at, snapshot.places_of_text(text)))
        states = (snapshot.find(uuid) for uuid in uuids if uuid in gone)
        for chunk in [one for one in states if one is not None and _is_of(one, source, author)][:1]:
            replacement: Entry | None = chunk
            while replacement is not None and (updates := _updates(snapshot, replacement)):
                found.setdefault(text, []).append(replacement)
                replaced = [replacement_of(snapshot, place, replacement.uuid) for place in updates]
                replacement = next((snapshot.find(one) for one in replaced if one is not None), None)
            if replacement is not None and replacement.reason in REASONS and replacement.uuid not in back:
                found.pop(text, None)
            elif replacement is not None:
                replacing.add(replacement.uuid)
    return found, replacing


def _updates(snapshot: Snapshot, newest: Entry) -> list[Place]:
    """Return the places of the Updates that took out a chunk, latest first; none if it is live, or if a change of its
    file took it out."""
    is_gone = newest.status is not Status.ACTIVE and newest.reason not in REASONS
    history = reversed(snapshot.history(newest.uuid)) if is_gone else ()
    acts = (one for one in history if (one.status, one.action) == (Status.DEPRECATED, "Update"))
    places = (snapshot.place(one.canonical_id) for one in acts if one.reason not in REASONS)
    return [place for place in places if place is not None]


def _stands(snapshot: Snapshot, entry: Entry, replacing: Collection[bytes], said: Collection[str]) -> bool:
    """Return True if this chunk is a correction of text that the file has, or of text that was erased since."""
    if entry.content in said:
        return False
    if any(map(snapshot.was_erased, entry.supersedes)) and snapshot.history(entry.uuid)[0].reason not in REASONS:
        return True
    return entry.uuid in replacing


def _moved(entry: Entry, document: CutDocument) -> Draft:
    """Return the draft of a correction under the document's new name."""
    part = entry.part and msgspec.structs.replace(entry.part, hash=document.hash)
    return msgspec.structs.replace(entry.as_draft(), source=document.source, part=part, vector=b"")


def without_vectors(drafts: Iterable[Draft]) -> list[str]:
    """Return the distinct texts yet to be embedded."""
    missing = (draft for draft in drafts if not draft.vector and draft.status is Status.ACTIVE)
    return list(dict.fromkeys(draft.embedded_text for draft in missing))


def with_vectors(drafts: Iterable[Draft], vectors: Mapping[str, bytes]) -> list[Draft]:
    """Return the drafts with the known vectors of their texts."""
    return [
        msgspec.structs.replace(draft, vector=vectors[draft.embedded_text])
        if draft.status is Status.ACTIVE and draft.embedded_text in vectors
        else draft
        for draft in drafts
    ]


def _arranged(known: Sequence[Entry], cut: Sequence[Draft], by: str) -> tuple[set[bytes], list[Draft]]:
    """Return the uuids of known chunks that stay, and the new chunks, numbered between those.

    The first new chunk of a stretch supersedes all former ones there. If no number is left between two that would stay,
    the second is made new.
    """
    runs = aligned([_shown(draft) for draft in cut], [_shown(entry) for entry in known])
    matched = {start + i: place + i for start, place, length in runs for i in range(length)}
    kept: set[bytes] = set()
    new: list[Draft] = []
    stretch: list[Draft] = []
    done, last = 0, None  # number of known ones handled; `number` of the last one that stays
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
    """Return consecutive new chunks, numbered between two that stay; the first supersedes the former ones there."""
    if last is None:
        numbers = range(len(stretch)) if following is None else range(following - len(stretch), following)
    elif following is None or following - last > len(stretch):
        numbers = range(last + 1, last + 1 + len(stretch))
    else:
        numbers = range(last, last + 1)  # sorted after it by their origin_id, which is higher
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
    """Return the visible parts of a chunk: if only its page differs, it is another chunk with the same vector."""
    place = (chunk.part.page, chunk.part.sheet) if isinstance(chunk.part, Section) else ()
    return chunk.heading, chunk.content, *place


def _number(entry: Entry) -> int:
    return entry.part.number if isinstance(entry.part, Section) else 0


def _change(reason: str, by: str) -> dict[str, Any]:
    """Return the fields of an entry that records a change of a document by a principal."""
    return {"action": "Update", "reason": reason, "action_by": by or UNSET}


def _removals(entries: Iterable[Entry], reason: str, by: str) -> list[Draft]:
    gone = {"status": Status.DEPRECATED, "vector": b"", "content": "", **_change(reason, by)}
    return [msgspec.structs.replace(entry.as_draft(), **gone) for entry in entries]


Result = TypeVar("Result")
Check = Callable[[TopicLog, Sequence[Draft], str], None]
"""Raises an error if these entries may not be appended for the author with this name in the log."""

EMBEDDED_AT_ONCE = 8
"""Texts embedded in one step: a fifth of a second with the bundled model. Turns to be stored wait for one step."""
CHUNKS_MAX = 20_000
"""Limit of one document: some 5,000 pages. It is appended as one group, held in memory (195 MB)."""


class TakenDocument(msgspec.Struct, frozen=True):
    """The entries that were appended for a document; None for a principal who may not read there."""

    written: int | None
    """Number of chunks that are new or were rewritten."""
    taken_out: int | None
    source: str = ""
    """The document's source as stored, redacted if that is enabled."""


class DocumentTaker:
    """Takes documents. Concurrent callers take turns step by step."""

    def __init__(self, archiver: Archiver, encoder: Encoder, cutter: Cutter) -> None:
        self._archiver = archiver
        self._encoder = encoder
        self._cutter = cutter
        self._cutting = background_thread("memd-documents")
        ended = "memd ends; nothing of this document is stored yet, hand it over again"
        self._turn = encoder.priority.for_background(lambda: StoreError(ended))

    async def take(
        self,
        topic: Topic,
        document: GivenDocument,
        author: str = "",
        check: Check = lambda log, drafts, author: None,
        *,
        is_apart: bool = False,
    ) -> TakenDocument:
        """Store the present state of a document; only changes of a known one are embedded and written. Raises
        BadDocument: it is too large; EmbeddingError, StoreError: nothing was written.

        Args:
            author: the principal that sent it (`Principal.author`).
            check: called with the entries before they are appended; may refuse them.
            is_apart: the author must not learn of others' documents or erasures, and replaces none of them.
        """
        redactor, forbidden = self._cutter.redactor, topic.log.forbidden
        own, source = redactor.identifier(author), redactor.text(document.source)
        cut = await _in(self._cutting, lambda: self._cutter.cut_document(document, self._turn.give_way, author))
        if len(cut) > CHUNKS_MAX:
            raise BadDocument(f"it makes {len(cut):,} chunks, and a document may have {CHUNKS_MAX:,}: add it in parts")
        now = CutDocument(
            source,
            bytes.fromhex(document.hash),
            [draft for draft in cut if not forbidden.has_text(draft.content)],
            None if document.renamed_from == source else document.renamed_from,
            author,
            own if is_apart else None,
        )

        def allowed_drafts() -> list[Draft]:
            drafts = drafts_of(topic.log.snapshot(), now, self._encoder.fingerprint)
            check(topic.log, drafts, own)
            return drafts

        drafts = await _in(self._cutting, allowed_drafts)
        kept_out = [one for one in cut if forbidden.has_text(one.content)] if is_apart else []
        if not (drafts or kept_out):
            return TakenDocument(0, 0, source)
        vectors: dict[str, bytes] = {}
        texts = without_vectors([*drafts, *kept_out])  # the time does not tell either that a text is forbidden
        for start in range(0, len(texts), EMBEDDED_AT_ONCE):
            self._turn.go_on()
            some, others = texts[start : start + EMBEDDED_AT_ONCE], len(texts[start + EMBEDDED_AT_ONCE :])
            vectors |= await _in(self._encoder.ingestion, partial(self._embedded, some, others))

        def made() -> list[Draft]:
            drafts = with_vectors(allowed_drafts(), vectors)
            return with_vectors(drafts, self._embedded(without_vectors(drafts)))  # texts that changed here meanwhile

        return _outcome(await self._archiver.append_drafts(topic, lambda _: made()), source)

    async def remove(
        self,
        topic: Topic,
        sources: Sequence[str],
        by: str = "",
        check: Check = lambda log, drafts, author: None,
        *,
        is_apart: bool = False,
    ) -> TakenDocument:
        """Remove all chunks of documents for a principal; the log keeps their history. For `check` and `is_apart` see
        `take`. Raises StoreError: nothing was written."""

        def made() -> list[Draft]:
            own = self._cutter.redactor.identifier(by)
            snapshot, of_author = topic.log.snapshot(), own if is_apart else None
            gone = (entry for source in sources for entry in chunks_of(snapshot, source, of_author))
            drafts = _removals(gone, REMOVED, by)
            check(topic.log, drafts, own)
            return drafts

        entries = await self._archiver.append_drafts(topic, lambda _: made())
        return _outcome(entries, sources[0] if sources else "")

    def stop(self) -> None:
        """Take no more documents, and abandon one that is being embedded."""
        self._turn.end()

    def close(self) -> None:
        """End the thread."""
        self._cutting.shutdown(wait=True, cancel_futures=True)

    def _embedded(self, texts: Sequence[str], others: int = 0) -> dict[str, bytes]:
        vectors = self._encoder.embed_texts(texts, others) if texts else ()
        return {text: vector.astype("<f4").tobytes() for text, vector in zip(texts, vectors, strict=True)}


def _outcome(entries: Sequence[Entry], source: str) -> TakenDocument:
    gone = sum(entry.status is Status.DEPRECATED for entry in entries)
    return TakenDocument(len(entries) - gone, gone, source)


async def _in(thread: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(thread, work)
