"""Takes documents into a topic, beside everything else that a daemon does.

Rule: of the event loop. Cutting and embedding are done in steps of a second at most, without holding the topic: turns
and corrections are stored in between. Only the append holds it, and there the document is compared once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from memd.documents import GivenDocument
from memd.embedding.encoder import Encoder
from memd.entries import Draft, Entry, Status
from memd.errors import BadDocument, StoreError
from memd.ingest.archiver import Archiver
from memd.ingest.indexer import background_thread
from memd.ingest.pipeline import Cutter
from memd.ingest.sources.documents import CutDocument, drafts_of, removal_of, with_vectors, without_vectors
from memd.ingest.topics import Topic
from memd.store.store import TopicLog

Result = TypeVar("Result")
Check = Callable[[TopicLog, Sequence[Draft], str], None]
"""Raises an error where these entries may not be appended for whom the log knows by this name."""

EMBEDDED_AT_ONCE = 8
"""Texts of one step: a fifth of a second with the bundled model, for which turns that are to be stored wait."""
CHUNKS_MAX = 20_000
"""Of one document: some 5,000 pages. It is appended as one group, which is in memory as a whole (80 MB)."""


class TakenDocument(msgspec.Struct, frozen=True):
    """The entries that were appended for a document."""

    written: int
    """Chunks that are new, or were written again."""
    taken_out: int
    source: str = ""
    """As what the document is kept: its source, redacted where that is on."""


class DocumentTaker:
    """Takes documents. Those of several callers wait for each other, step by step."""

    def __init__(self, archiver: Archiver, encoder: Encoder, cutter: Cutter) -> None:
        self._archiver = archiver
        self._encoder = encoder
        self._cutter = cutter
        self._cutting = background_thread("memd-documents")
        self._turn = encoder.priority.for_background()
        self._is_stopping = False

    async def take(
        self,
        topic: Topic,
        document: GivenDocument,
        author: str = "",
        check: Check = lambda log, drafts, author: None,
        *,
        is_apart: bool = False,
    ) -> TakenDocument:
        """Remember a document as it is now; of one that was known only what changed is embedded and written.

        Args:
            author: the principal that handed it over (`Principal.author`).
            check: is asked about the entries before they are appended, and may refuse them.
            is_apart: he may not know what others have, and what he hands over takes no place of theirs.

        Raises:
            BadDocument: it is too large.
            EmbeddingError, StoreError: nothing was written.
        """
        own = self._cutter.redactor.identifier(author) if is_apart else None
        cut = await _in(self._cutting, lambda: CutDocument.of(document, self._cutter, self._step, author, own))
        if len(cut.drafts) > CHUNKS_MAX:
            raise BadDocument(f"it makes {len(cut.drafts):,} chunks, and a document may have {CHUNKS_MAX:,}")
        fingerprint, forbidden = self._encoder.fingerprint, topic.log.forbidden
        allowed = [draft for draft in cut.drafts if not forbidden.has_text(draft.content)]
        cut = msgspec.structs.replace(cut, drafts=allowed)

        def allowed_drafts() -> list[Draft]:
            drafts = drafts_of(topic.log.snapshot(), cut, fingerprint)
            check(topic.log, drafts, self._cutter.redactor.identifier(author))
            return drafts

        drafts = await _in(self._cutting, allowed_drafts)
        if not drafts:
            return TakenDocument(0, 0, cut.source)
        vectors: dict[str, bytes] = {}
        texts = without_vectors(drafts)
        for start in range(0, len(texts), EMBEDDED_AT_ONCE):
            self._go_on()
            some = texts[start : start + EMBEDDED_AT_ONCE]
            vectors |= await _in(self._encoder.ingestion, partial(self._embedded, some))

        def made() -> list[Draft]:
            drafts = with_vectors(allowed_drafts(), vectors)
            return with_vectors(drafts, self._embedded(without_vectors(drafts)))  # what has changed here meanwhile

        return _told(await self._archiver.append_drafts(topic, lambda _: made()), cut.source)

    async def remove(
        self,
        topic: Topic,
        sources: Sequence[str],
        by: str = "",
        check: Check = lambda log, drafts, author: None,
        *,
        is_apart: bool = False,
    ) -> TakenDocument:
        """Take out all chunks of documents, as a principal asks; the log keeps them. For `check` and `is_apart` see
        `take`.

        Raises:
            StoreError: nothing was written.
        """

        def made() -> list[Draft]:
            own = self._cutter.redactor.identifier(by)
            drafts = removal_of(topic.log.snapshot(), sources, by, own if is_apart else None)
            check(topic.log, drafts, own)
            return drafts

        entries = await self._archiver.append_drafts(topic, lambda _: made())
        return _told(entries, sources[0] if sources else "")

    def stop(self) -> None:
        """Take nothing more: a document that is being embedded is given up."""
        self._is_stopping = True

    def close(self) -> None:
        """End the thread."""
        self._cutting.shutdown(wait=True, cancel_futures=True)

    def _step(self) -> None:
        self._go_on()
        self._turn.give_way()

    def _go_on(self) -> None:
        if self._is_stopping:
            raise StoreError("memd ends; nothing of this document is stored yet, hand it over again")

    def _embedded(self, texts: Sequence[str]) -> dict[str, bytes]:
        vectors = self._encoder.embed_texts(texts) if texts else ()
        return {text: vector.astype("<f4").tobytes() for text, vector in zip(texts, vectors, strict=True)}


def _told(entries: Sequence[Entry], source: str) -> TakenDocument:
    gone = sum(entry.status is Status.DEPRECATED for entry in entries)
    return TakenDocument(len(entries) - gone, gone, source)


async def _in(thread: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(thread, work)
