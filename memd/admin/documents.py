"""The routes of documents: files that a command has read, or that were dropped on the page.

Rule: the daemon reads no file that a request names: whoever may ask it need not be allowed to read what it may.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import partial

import msgspec

from memd.admin.acts import Extent
from memd.admin.queries import DocumentQuery, TopicBody, TopicsQuery
from memd.admin.routing import get, post
from memd.admin.topics import NamedTopics, check_changes
from memd.documents import GivenDocument, GivenFile
from memd.entries import Entry, Section
from memd.errors import BadQuestion, NotFound
from memd.ingest.readers.files import FileReader
from memd.ingest.sources.documents import KnownDocument, chunks_of, known_documents
from memd.ingest.sources.looking import REMOVED_AT_ONCE, is_below, root_digits
from memd.ingest.sources.taking import DocumentTaker, TakenDocument
from memd.ingest.sources.tending import SourceTender
from memd.ingest.topics import Topic
from memd.principals import Principal

DOCUMENT_BYTES_MAX = 32 << 20
"""Of a body with a document: JSON takes up to six bytes for one of a text, base64 four for three of a file."""
DROPPED = root_digits("dropped on the page")
"""In place of the root of files that were handed over by themselves."""


class DocumentBody(TopicBody, kw_only=True):
    """The body of `POST /memd/documents`: either of the two."""

    document: GivenDocument | None = None
    file: GivenFile | None = None


class RemovalBody(TopicBody, kw_only=True):
    """The body of `POST /memd/documents/remove`."""

    sources: tuple[str, ...]
    below: bool = False
    """Also all documents below these folders."""


class DocumentList(msgspec.Struct, frozen=True):
    """The documents of some topics."""

    documents: tuple[KnownDocument, ...]


class DocumentChunk(msgspec.Struct, frozen=True):
    """A chunk of a document."""

    id: str
    uuid: str
    content: str
    heading: tuple[str, ...]
    page: int | None
    sheet: str | None


class DocumentChunks(msgspec.Struct, frozen=True):
    """The chunks of a document, in its order."""

    topic_id: str
    source: str
    of: int
    """How many it has."""
    chunks: tuple[DocumentChunk, ...]


async def documents_in(topics: NamedTopics, named: Sequence[str], who: Principal) -> list[KnownDocument]:
    """Return the documents of the topics of these names, of all that `who` may read if there are none."""
    async with topics.held(named, who) as found:
        snapshots = [topic.log.snapshot() for topic in found]
        return await asyncio.to_thread(lambda: [one for each in snapshots for one in known_documents(each)])


def _written(done: TakenDocument) -> Extent:
    return Extent(count=done.written + done.taken_out)


class DocumentRoutes:
    """Documents: taken, listed, taken out."""

    def __init__(self, topics: NamedTopics, taker: DocumentTaker, tender: SourceTender) -> None:
        self._topics = topics
        self._taker = taker
        self._tender = tender

    @get("/memd/documents", "read")
    async def documents(self, query: TopicsQuery, who: Principal) -> DocumentList:
        """The documents that have live chunks."""
        return DocumentList(tuple(await documents_in(self._topics, query.topic, who)))

    @get(
        "/memd/documents/chunks",
        "read",
        act="read",
        touches=lambda found: Extent((found.topic_id,), tuple(one.uuid for one in found.chunks), len(found.chunks)),
    )
    async def document(self, query: DocumentQuery, who: Principal) -> DocumentChunks:
        """The chunks of a document, in its order."""
        async with self._topics.held_one(query.topic, who, "read") as topic:
            found = await asyncio.to_thread(chunks_of, topic.log.snapshot(), query.source)
        if not found:
            raise NotFound(_no_document(query.topic, query.source))
        some = found[query.skip : query.skip + query.limit]
        return DocumentChunks(query.topic, query.source, len(found), tuple(map(_shown, some)))

    @post("/memd/documents", "write", act="write", touches=_written, body_bytes_max=DOCUMENT_BYTES_MAX)
    async def take_document(self, body: DocumentBody, who: Principal) -> TakenDocument:
        """Remember a document as it is now; of one that was known only what changed is embedded and written. What
        changes or takes out somebody else's chunks needs the right to correct."""
        if (body.document is None) == (body.file is None):
            raise BadQuestion("give either a document (its text in sections) or a file (its name and bytes)")
        async with self._topics.held_or_new(body.topic_id, who) as topic:
            document, is_apart = body.document, not who.may("read", body.topic_id)
            if document is None:
                assert body.file is not None
                document = await asyncio.to_thread(_dropped, topic, body.file, who.author if is_apart else None)
            check = partial(check_changes, who)
            return await self._taker.take(topic, document, who.author, check, is_apart=is_apart)

    @post("/memd/documents/remove", "write", act="correct", touches=_written)
    async def remove_documents(self, body: RemovalBody, who: Principal) -> TakenDocument:
        """Take out all chunks of documents; the log keeps them. Those of others need the right to correct."""
        who.check("write", body.topic_id)
        wanted = {source.rstrip("/") for source in body.sources}
        is_apart = not who.may("read", body.topic_id)
        if not is_apart and (back := [source for source in wanted if self._tender.has(body.topic_id, source)]):
            raise BadQuestion(
                f"{back[0][:200]} would come back: `sources` of the settings has it; take it out there, or exclude it"
            )

        def chosen(topic: Topic) -> list[str]:
            known = [one.source for one in known_documents(topic.log.snapshot())]
            return [one for one in known if one in wanted or (body.below and any(is_below(one, of) for of in wanted))]

        async with self._topics.held_one(body.topic_id, who, "write") as topic:
            sources = await asyncio.to_thread(chosen, topic)
            gone = 0
            for start in range(0, len(sources), REMOVED_AT_ONCE):
                some = sources[start : start + REMOVED_AT_ONCE]
                check = partial(check_changes, who)
                gone += (await self._taker.remove(topic, some, who.author, check, is_apart=is_apart)).taken_out
        if not gone:
            raise NotFound(_no_document(body.topic_id, ", ".join(sorted(wanted))))
        return TakenDocument(0, gone, sources[0])


def _no_document(topic_id: str, named: str) -> str:
    return f"topic {topic_id} has no document {named[:200]!r}; `memd sources` lists them"


def _shown(entry: Entry) -> DocumentChunk:
    page, sheet = (entry.part.page, entry.part.sheet) if isinstance(entry.part, Section) else (None, None)
    return DocumentChunk(entry.public_id, entry.uuid.hex(), entry.content, entry.heading, page, sheet)


def _dropped(topic: Topic, file: GivenFile, author: str | None) -> GivenDocument:
    """A file that was handed over as it is, read; it takes the place of an earlier one (`author`: of his), never of a
    source's."""
    snapshot, name = topic.log.snapshot(), file.name
    known = chunks_of(snapshot, name, author)
    if any(isinstance(one.part, Section) and one.part.root.hex() != DROPPED for one in known):
        name = f"{name}@page"
    digest = hashlib.sha256(file.content).hexdigest()
    with FileReader() as reader:
        sections = reader.sections_of(file.name, file.content)
    return GivenDocument(source=name, hash=digest, sections=sections, root=DROPPED)
