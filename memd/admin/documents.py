"""The operations on documents, sources and imports: files read by a command or dropped on the page, and folders of the
settings.

Rule: the daemon reads no file or folder named in a request, because a client may have fewer permissions than the
daemon. Data is durable when the answer is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from memd.admin.parts import DaemonParts, check_changes
from memd.admin.routing import PAGE, Body, Extent, Limit, Listed, TheTopic, TopicBody, TopicsQuery, get, post
from memd.entries import Draft, Section
from memd.errors import BadDocument, BadQuestion, NotFound
from memd.ingest.imports.exports import ITEM_BYTES_MAX
from memd.ingest.imports.parts import (
    GivenLine,
    GivenPart,
    LinesTaken,
    PartTaken,
    line_drafts,
    part_drafts,
    uuid_of_guest,
)
from memd.ingest.pipeline import Drafter
from memd.ingest.readers.files import NOTHING_READ, FileReader
from memd.ingest.readers.text import GivenDocument, GivenFile
from memd.ingest.sources.documents import KnownDocument, TakenDocument, chunks_of, known_documents
from memd.ingest.sources.look import REMOVED_AT_ONCE, is_below, root_digits
from memd.ingest.sources.watch import SourceState
from memd.ingest.topics import Topic
from memd.ingest.unstored import BufferedText
from memd.principals import OWNER, Principal
from memd.store.store import TopicLog
from memd.wire.lenient_json import decode_or_none

DOCUMENT_BYTES_MAX = 32 << 20
"""Limit for a body with a document: JSON needs up to six bytes for a byte of text, base64 four for three of a file."""
DROPPED = root_digits("dropped on the page")
"""Replaces the root's digest for files that were handed over individually."""


class DocumentBody(TopicBody, frozen=True, kw_only=True):
    """The body of `POST /memd/documents`: either of the two."""

    document: GivenDocument | None = None
    file: GivenFile | None = None


class RemovalBody(TopicBody, frozen=True, kw_only=True):
    """The body of `POST /memd/documents/remove`."""

    sources: tuple[str, ...]
    below: bool = False
    """Also remove all documents below these folders."""


class DocumentList(Listed, frozen=True):
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
    """Number of chunks of the document."""
    chunks: tuple[DocumentChunk, ...]


def _written(done: TakenDocument) -> Extent:
    return Extent(count=None if done.written is None else done.written + (done.taken_out or 0))


@get("/memd/documents", "read")
async def documents(parts: DaemonParts, query: TopicsQuery, who: Principal) -> DocumentList:
    """The documents that have live chunks."""
    return await parts.read(
        query.topic, who, lambda found: DocumentList(tuple(one for each in found for one in known_documents(each)))
    )


@get(
    "/memd/documents/chunks",
    "read",
    act="read",
    touches=lambda found: Extent((found.topic_id,), tuple(one.uuid for one in found.chunks), len(found.chunks)),
)
async def document(
    parts: DaemonParts,
    who: Principal,
    *,
    topic: TheTopic,
    source: Annotated[str, Meta(description="The document's.")],
    skip: Annotated[int, Meta(ge=0, description="Only what is behind so many chunks.")] = 0,
    limit: Limit = PAGE,
) -> DocumentChunks:
    """The chunks of a document, in its order."""
    async with parts.held_one(topic, who, "read") as held:
        found = await asyncio.to_thread(chunks_of, held.log.snapshot(), source)
    if not found:
        raise NotFound(_no_document(topic, source))
    chunks = []
    for one in found[skip : skip + limit]:
        page, sheet = (one.part.page, one.part.sheet) if isinstance(one.part, Section) else (None, None)
        chunks.append(DocumentChunk(one.public_id, one.uuid.hex(), one.content, one.heading, page, sheet))
    return DocumentChunks(topic, source, len(found), tuple(chunks))


@post("/memd/documents", "write", act="write", touches=_written, body_bytes_max=DOCUMENT_BYTES_MAX)
async def take_document(parts: DaemonParts, body: DocumentBody, who: Principal) -> TakenDocument:
    """Remember a document as it is now; of a known document only changes are embedded and written. To change or remove
    chunks of others needs the right to correct."""
    if (body.document is None) == (body.file is None):
        raise BadQuestion("give either a document (its text in sections) or a file (its name and bytes)")
    async with parts.held_one(body.topic_id, who, "write", creating=True) as topic:
        document, is_apart = body.document, not who.may("read", body.topic_id)
        if document is None:
            assert body.file is not None
            document = await asyncio.to_thread(_dropped, topic, body.file, who.author if is_apart else None)
        check = partial(check_changes, who)
        taken = await parts.taker.take(topic, document, who.author, check, is_apart=is_apart)
        return TakenDocument(None, None, taken.source) if is_apart else taken


@post("/memd/documents/remove", "write", act="correct", touches=_written)
async def remove_documents(parts: DaemonParts, body: RemovalBody, who: Principal) -> TakenDocument:
    """Remove all chunks of documents; the log keeps them. Chunks of others need the right to correct."""
    who.check("write", body.topic_id)
    wanted = {source.rstrip("/") for source in body.sources}
    is_apart = not who.may("read", body.topic_id)
    if not is_apart and (back := [source for source in wanted if parts.sources.has(body.topic_id, source)]):
        raise BadQuestion(
            f"{back[0][:200]} would come back: `sources` of the settings has it; take it out there, or exclude it"
        )

    def chosen(topic: Topic) -> list[str]:
        author = parts.redactor.identifier(who.author) if is_apart else None
        known = [one.source for one in known_documents(topic.log.snapshot(), author)]
        return [one for one in known if one in wanted or (body.below and any(is_below(one, of) for of in wanted))]

    async with parts.held_one(body.topic_id, who, "write") as topic:
        sources = await asyncio.to_thread(chosen, topic)
        gone = 0
        for start in range(0, len(sources), REMOVED_AT_ONCE):
            some = sources[start : start + REMOVED_AT_ONCE]
            check = partial(check_changes, who)
            gone += (await parts.taker.remove(topic, some, who.author, check, is_apart=is_apart)).taken_out or 0
    if is_apart:
        return TakenDocument(None, None)
    if not gone:
        raise NotFound(_no_document(body.topic_id, ", ".join(sorted(wanted))))
    return TakenDocument(0, gone, sources[0])


def _no_document(topic_id: str, named: str) -> str:
    return f"topic {topic_id} has no document {named[:200]!r}; `memd sources` lists them"


def _dropped(topic: Topic, file: GivenFile, author: str | None) -> GivenDocument:
    """Read a dropped file. It replaces an earlier dropped one of this name (`author`: only his), never a source's
    file."""
    snapshot, name = topic.log.snapshot(), file.name
    known = chunks_of(snapshot, name, author)
    if any(isinstance(one.part, Section) and one.part.root.hex() != DROPPED for one in known):
        name = f"{name}@page"
    digest = hashlib.sha256(file.content).hexdigest()
    with FileReader() as reader:
        sections = reader.sections_of(file.name, file.content)
    if not sections and not known and author is None:
        raise BadDocument(NOTHING_READ)
    return GivenDocument(source=name, hash=digest, sections=sections, root=DROPPED)


class IndexBody(Body, frozen=True, kw_only=True):
    """The body of `POST /memd/index`."""

    force: Annotated[bool, Meta(description="Read every file again, also those that have not changed.")] = False


class SourceStates(Listed, frozen=True):
    """The sources of the settings."""

    sources: tuple[SourceState, ...]


class KnownSource(msgspec.Struct, frozen=True, kw_only=True):
    """Documents of one folder, or a file by itself."""

    topic_id: str
    name: str
    documents: int
    chunks: int
    at: int
    """Time of its last change in memory, in microseconds since the epoch."""


class SourceList(SourceStates, frozen=True):
    """The sources of the settings, and all that documents are kept of."""

    known: tuple[KnownSource, ...] = ()


@get("/memd/sources", "read")
async def sources(parts: DaemonParts, query: TopicsQuery, who: Principal) -> SourceList:
    """The sources of the settings with their state, and all folders and files that documents are kept of."""
    found = await documents(parts, query, who)
    states = tuple(one for one in _states(parts, who) if not query.topic or one.topic_id in query.topic)
    grouped: dict[tuple[str, str], list[KnownDocument]] = {}
    for one in found.documents:
        grouped.setdefault((one.topic_id, one.source.partition("/")[0]), []).append(one)
    known = []
    for (topic_id, name), group in grouped.items():
        chunks, at = sum(one.chunks for one in group), max(one.at for one in group)
        known.append(KnownSource(topic_id=topic_id, name=name, documents=len(group), chunks=chunks, at=at))
    return SourceList(states, tuple(known), note=found.note)


@get("/memd/index", "read")
async def looks(parts: DaemonParts, who: Principal) -> SourceStates:
    """The sources of the settings with their state alone."""
    return SourceStates(_states(parts, who))


@post(
    "/memd/index",
    "admin",
    act="write",
    touches=lambda told: Extent(tuple(one.topic_id for one in told.sources), count=len(told.sources)),
    tool="index_memory",
)
async def index(parts: DaemonParts, body: IndexBody) -> SourceStates:
    """Have the folders that the user's settings name read again now, and say how they stand.

    They are read in the background; `GET /memd/index` tells how far that is.
    """
    parts.sources.ask(force=body.force)
    return SourceStates(_states(parts, OWNER))


def _states(parts: DaemonParts, who: Principal) -> tuple[SourceState, ...]:
    found = (one for one in parts.sources.states() if who.may("read", one.topic_id))
    return tuple(msgspec.structs.replace(one, daemon=parts.name) for one in found)


IMPORT_BYTES_MAX = 2 * ITEM_BYTES_MAX
AHEAD_MAX_US = 86_400_000_000
"""Tolerance for clocks that are ahead."""
AHEAD = (
    "a line has an origin_id of more than a day from now, which later ids of all topics would have to follow; have it"
    " imported by whoever may write in all of them"
)


class MessagesBody(TopicBody, frozen=True, kw_only=True):
    """The body of `POST /memd/import/messages`."""

    part: GivenPart


class EntriesBody(TopicBody, frozen=True, kw_only=True):
    """The body of `POST /memd/import/entries`."""

    lines: tuple[GivenLine, ...]
    topic_id: str


class _MetChunk(msgspec.Struct, frozen=True):
    """Members of a line that identify a pending chunk."""

    uuid: str
    content: str = ""


_met_decoder = msgspec.json.Decoder(_MetChunk)


@post(
    "/memd/import/messages",
    "write",
    act="import",
    touches=lambda done: Extent(count=done.chunks),
    body_bytes_max=IMPORT_BYTES_MAX,
)
async def take_messages(parts: DaemonParts, body: MessagesBody, who: Principal) -> PartTaken:
    """Remember messages of a conversation that was held elsewhere; those that are known are left out."""
    is_apart = not who.may("read", body.topic_id)

    def drafts(log: TopicLog, drafter: Drafter) -> tuple[list[Draft], PartTaken]:
        made, taken = part_drafts(log, body.part, drafter, parts.speech, who.author, is_apart=is_apart)
        return made, PartTaken(taken.digests, None, None, {}) if is_apart else taken

    return await _appended(parts, body.topic_id, who, drafts)


@post(
    "/memd/import/entries",
    "write",
    act="import",
    touches=lambda done: Extent(count=done.appended),
    body_bytes_max=IMPORT_BYTES_MAX,
)
async def take_entries(parts: DaemonParts, body: EntriesBody, who: Principal) -> LinesTaken:
    """Append the lines of an export that the topic lacks. Authors in the lines are kept if the importer has the right
    to admin there; otherwise the importer becomes the author. A line that changes a chunk of others corrects it."""
    signed_by = None if who.may("admin", body.topic_id) else who.author
    is_apart = not who.may("read", body.topic_id)

    def drafts(log: TopicLog, drafter: Drafter) -> tuple[list[Draft], LinesTaken]:
        own = drafter.cutter.redactor.identifier(who.author)  # the name as the log has it
        guest = partial(uuid_of_guest, log.snapshot(), author=own, is_apart=is_apart)
        renamed = () if who.may("correct", body.topic_id) else (guest,)
        try:
            made, taken = line_drafts(log, body.lines, drafter, signed_by, *renamed)
        except ValueError as error:
            raise BadQuestion(f"a line is no entry of `memd export`: {error}") from None
        ids = [draft.origin_id for draft in made if draft.origin_id is not None]
        if not who.may_everywhere("write") and max(ids, default=0) > time.time_ns() // 1000 + AHEAD_MAX_US:
            raise BadQuestion(AHEAD)
        check_changes(who, log, made, own)
        for origin_id in ids:
            parts.store.clock.observe(origin_id)
        made = [draft for draft in made if not log.forbidden.has_text(draft.content)]
        if is_apart:
            return made, LinesTaken(None, None, (0,) * len(body.lines), {})
        return made, msgspec.structs.replace(taken, appended=len(made), known=len(body.lines) - len(made))

    return await _appended(parts, body.topic_id, who, drafts, body.lines)


Taken = TypeVar("Taken", PartTaken, LinesTaken)


async def _appended(
    parts: DaemonParts,
    topic_id: str,
    who: Principal,
    make: Callable[[TopicLog, Drafter], tuple[list[Draft], Taken]],
    lines: Sequence[GivenLine] = (),
) -> Taken:
    """Store the pending chunks that these lines name or repeat, append the drafts that `make` returns, and return its
    answer."""
    taken: list[Taken] = []

    async with parts.held_one(topic_id, who, "write", creating=True) as topic:
        if lines and (unstored := topic.unstored()):  # so that their author is known
            met = await asyncio.to_thread(_met, unstored, lines)
            await parts.archiver.store_named(topic, met)

        def drafts(drafter: Drafter) -> list[Draft]:
            made, told = make(topic.log, drafter)
            taken.append(told)
            return made

        await parts.archiver.append_drafts(topic, drafts)
    return taken[-1]


def _met(unstored: BufferedText, lines: Sequence[GivenLine]) -> list[bytes]:
    """Return the uuids of pending chunks whose uuid or text a line has. Called in a thread."""
    read = [one for line in lines if (one := decode_or_none(_met_decoder, bytes(line.line))) is not None]
    uuids, texts = {one.uuid for one in read}, {one.content for one in read}
    waiting = (chunk.entry for chunk in unstored.chunks())
    return [one.uuid for one in waiting if one.uuid.hex() in uuids or one.content in texts]
