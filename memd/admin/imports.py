"""The routes of imports: what a command has read from other programs' files.

Rule: the daemon reads no file that a request names. What is answered is durable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from memd.admin.acts import Extent
from memd.admin.queries import TopicBody
from memd.admin.routing import post
from memd.admin.topics import NamedTopics, check_changes
from memd.entries import Draft
from memd.errors import BadQuestion
from memd.ingest.archiver import Archiver
from memd.ingest.imports.items import ITEM_BYTES_MAX
from memd.ingest.imports.sending import LinesTaken, PartTaken
from memd.ingest.imports.taking import Drafts, GivenLine, GivenPart, line_drafts, part_drafts
from memd.ingest.pipeline import Drafter
from memd.ingest.unstored import BufferedText
from memd.principals import Principal
from memd.speech import Speech
from memd.store.store import TopicLog
from memd.wire.lenient_json import decode_or_none

IMPORT_BYTES_MAX = 2 * ITEM_BYTES_MAX
AHEAD_MAX_US = 86_400_000_000
"""Clocks differ, but not by more than a day."""
AHEAD = (
    "a line has an origin_id of more than a day from now, which later ids of all topics would have to follow; have it"
    " imported by whoever may write in all of them"
)


class MessagesBody(TopicBody, kw_only=True):
    """The body of `POST /memd/import/messages`."""

    part: GivenPart


class EntriesBody(TopicBody, kw_only=True):
    """The body of `POST /memd/import/entries`."""

    lines: tuple[GivenLine, ...]
    topic_id: str


class _MetChunk(msgspec.Struct):
    """The members of a line by which it meets a chunk that is still to be stored."""

    uuid: str
    content: str = ""


_met_decoder = msgspec.json.Decoder(_MetChunk)


class ImportRoutes:
    """Imports: parts of conversations, lines of an export."""

    def __init__(
        self, topics: NamedTopics, archiver: Archiver, speech: Speech, observe_canonical_id: Callable[[int], None]
    ) -> None:
        """`observe_canonical_id`: see `Store.observe_canonical_id`."""
        self._topics = topics
        self._archiver = archiver
        self._speech = speech
        self._observe_canonical_id = observe_canonical_id

    @post(
        "/memd/import/messages",
        "write",
        act="import",
        touches=lambda done: Extent(count=done.chunks),
        body_bytes_max=IMPORT_BYTES_MAX,
    )
    async def take_messages(self, body: MessagesBody, who: Principal) -> PartTaken:
        """Remember messages of a conversation that was held elsewhere; those that are known are left out."""
        is_apart = not who.may("read", body.topic_id)

        def drafts(log: TopicLog, drafter: Drafter) -> Drafts:
            return part_drafts(log, body.part, drafter, self._speech, who.author, is_apart=is_apart)

        made = await self._appended(body.topic_id, who, drafts)
        digests = tuple(digest.hex() for digest in made.digests)
        return PartTaken(digests, len(made.drafts), made.known, dict(made.redacted))

    @post(
        "/memd/import/entries",
        "write",
        act="import",
        touches=lambda done: Extent(count=done.appended),
        body_bytes_max=IMPORT_BYTES_MAX,
    )
    async def take_entries(self, body: EntriesBody, who: Principal) -> LinesTaken:
        """Append the lines of an export that the topic does not have. Whom they name as authors is believed of whoever
        has the right to admin in it; else they are the importer's. What changes somebody else's chunk corrects it."""
        signed_by = None if who.may("admin", body.topic_id) else who.author

        def drafts(log: TopicLog, drafter: Drafter) -> Drafts:
            try:
                made = line_drafts(log, body.lines, drafter, signed_by)
            except ValueError as error:
                raise BadQuestion(f"a line is no entry of `memd export`: {error}") from None
            ids = [draft.origin_id for draft in made.drafts if draft.origin_id is not None]
            if not who.may_everywhere("write") and max(ids, default=0) > time.time_ns() // 1000 + AHEAD_MAX_US:
                raise BadQuestion(AHEAD)
            own = drafter.cutter.redactor.identifier(who.author)  # as the log has the name
            check_changes(who, log, made.drafts, own)
            for origin_id in ids:
                self._observe_canonical_id(origin_id)
            return made

        made = await self._appended(body.topic_id, who, drafts, body.lines)
        return LinesTaken(len(made.drafts), made.known, made.places, dict(made.redacted))

    async def _appended(
        self,
        topic_id: str,
        who: Principal,
        make: Callable[[TopicLog, Drafter], Drafts],
        lines: Sequence[GivenLine] = (),
    ) -> Drafts:
        """Append what `make` returns, behind all that is still to be stored and that these lines name or repeat."""
        made: list[Drafts] = []

        async with self._topics.held_or_new(topic_id, who) as topic:
            named = await asyncio.to_thread(_named_pending, topic.unstored(), lines)
            await self._archiver.store_named(topic, named)  # so that it is known whose it is

            def drafts(drafter: Drafter) -> list[Draft]:
                made.append(make(topic.log, drafter))
                return made[-1].drafts

            await self._archiver.append_drafts(topic, drafts)
        return made[-1]


def _named_pending(unstored: BufferedText, lines: Sequence[GivenLine]) -> list[bytes]:
    """The uuids of the chunks that are still to be stored and whose uuid or text a line has. Called in a thread."""
    if not lines or not unstored:
        return []
    read = [one for line in lines if (one := decode_or_none(_met_decoder, bytes(line.line))) is not None]
    uuids, texts = {one.uuid for one in read}, {one.content for one in read}
    waiting = (chunk.entry for run in unstored.chunks() for chunk in run)
    return [one.uuid for one in waiting if one.uuid.hex() in uuids or one.content in texts]
