"""The routes of documents: files that a command has read.

Rule: the daemon reads no file that a request names: whoever may ask it need not be allowed to read what it may.
"""

from __future__ import annotations

import asyncio

import msgspec

from memd.admin.queries import TopicsQuery
from memd.admin.routing import get, post
from memd.admin.topics import NamedTopics
from memd.documents import GivenDocument
from memd.embedding.encoder import Encoder
from memd.entries import DEFAULT_TOPIC_ID, Draft, Status
from memd.errors import NotFound
from memd.ingest.archiver import Archiver
from memd.ingest.pipeline import Drafter
from memd.ingest.sources.documents import KnownDocument, drafts_of, known_documents, removal_of


class DocumentBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /memd/documents`."""

    document: GivenDocument
    topic_id: str = DEFAULT_TOPIC_ID


class RemovalBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /memd/documents/remove`."""

    source: str
    topic_id: str = DEFAULT_TOPIC_ID


class DocumentTaken(msgspec.Struct, frozen=True):
    """The entries that were appended for a document."""

    written: int
    """Chunks that are new, or were written again."""
    taken_out: int
    source: str = ""
    """As what the document is kept: its source, redacted where that is on."""


class DocumentList(msgspec.Struct, frozen=True):
    """The documents of some topics."""

    documents: tuple[KnownDocument, ...]


class DocumentRoutes:
    """Documents: taken, listed, taken out."""

    def __init__(self, topics: NamedTopics, archiver: Archiver, encoder: Encoder) -> None:
        self._topics = topics
        self._archiver = archiver
        self._encoder = encoder

    @get("/memd/documents")
    async def documents(self, query: TopicsQuery) -> DocumentList:
        """The documents that have live chunks."""
        async with self._topics.held(query.topic) as found:
            snapshots = [topic.log.snapshot() for topic in found]
            listed = await asyncio.to_thread(lambda: [one for each in snapshots for one in known_documents(each)])
        return DocumentList(tuple(listed))

    @post("/memd/documents")
    async def take_document(self, body: DocumentBody) -> DocumentTaken:
        """Remember a document as it is now; of one that was known only what changed is embedded and written."""
        source = body.document.source
        async with self._topics.held_or_new(body.topic_id) as topic:

            def make(drafter: Drafter) -> list[Draft]:
                nonlocal source
                source = drafter.cutter.redactor.text(source)
                fingerprint = self._encoder.fingerprint
                return drafts_of(topic.log, body.document, drafter.cutter, drafter.embed_many, fingerprint)

            entries = await self._archiver.append_drafts(topic, make)
        gone = sum(entry.status is Status.DEPRECATED for entry in entries)
        return DocumentTaken(len(entries) - gone, gone, source)

    @post("/memd/documents/remove")
    async def remove_document(self, body: RemovalBody) -> DocumentTaken:
        """Take out all chunks of a document; the log keeps them."""
        async with self._topics.held_one(body.topic_id) as topic:
            entries = await self._archiver.append_drafts(topic, lambda _: removal_of(topic.log, body.source))
        if not entries:
            raise NotFound(f"topic {body.topic_id} has no document {body.source[:200]!r}; `memd sources` lists them")
        return DocumentTaken(0, len(entries), body.source)
