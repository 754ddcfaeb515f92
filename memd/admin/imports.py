"""The routes of imports: what a command has read from other programs' files.

Rule: the daemon reads no file that a request names. What is answered is durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from memd.admin.routing import post
from memd.admin.topics import NamedTopics
from memd.entries import DEFAULT_TOPIC_ID, Draft
from memd.errors import BadQuestion
from memd.ingest.archiver import Archiver
from memd.ingest.imports.items import ITEM_BYTES_MAX
from memd.ingest.imports.sending import LinesTaken, PartTaken
from memd.ingest.imports.taking import Drafts, GivenLine, GivenPart, line_drafts, part_drafts
from memd.ingest.pipeline import Drafter
from memd.principals import Principal
from memd.speech import Speech
from memd.store.store import TopicLog

IMPORT_BYTES_MAX = 2 * ITEM_BYTES_MAX
AHEAD_MAX_US = 86_400_000_000
"""Clocks differ, but not by more than a day."""
AHEAD = (
    "a line has an origin_id of more than a day from now, which later ids of all topics would have to follow; have it"
    " imported by whoever may write in all of them"
)


class MessagesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /memd/import/messages`."""

    part: GivenPart
    topic_id: str = DEFAULT_TOPIC_ID


class EntriesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /memd/import/entries`."""

    lines: tuple[GivenLine, ...]
    topic_id: str


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

    @post("/memd/import/messages", "write", body_bytes_max=IMPORT_BYTES_MAX)
    async def take_messages(self, body: MessagesBody, who: Principal) -> PartTaken:
        """Remember messages of a conversation that was held elsewhere; those that are known are left out."""
        made = await self._appended(
            body.topic_id, who, lambda log, drafter: part_drafts(log, body.part, drafter, self._speech, who.author)
        )
        digests = tuple(digest.hex() for digest in made.digests)
        return PartTaken(digests, len(made.drafts), made.known, dict(made.redacted))

    @post("/memd/import/entries", "write", body_bytes_max=IMPORT_BYTES_MAX)
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
            if not who.may("correct", body.topic_id) and _has_of_others(log, made.drafts, own):
                who.check("correct", body.topic_id)
            for origin_id in ids:
                self._observe_canonical_id(origin_id)
            return made

        made = await self._appended(body.topic_id, who, drafts)
        return LinesTaken(len(made.drafts), made.known, made.places, dict(made.redacted))

    async def _appended(self, topic_id: str, who: Principal, make: Callable[[TopicLog, Drafter], Drafts]) -> Drafts:
        made: list[Drafts] = []

        async with self._topics.held_or_new(topic_id, who) as topic:

            def drafts(drafter: Drafter) -> list[Draft]:
                made.append(make(topic.log, drafter))
                return made[-1].drafts

            await self._archiver.append_drafts(topic, drafts)
        return made[-1]


def _has_of_others(log: TopicLog, drafts: Sequence[Draft], author: str) -> bool:
    """Whether the topic has a chunk of these entries that is not this author's."""
    snapshot = log.snapshot()
    known = (snapshot.find(uuid) for uuid in {draft.uuid for draft in drafts})
    return any(one is not None and one.author != author for one in known)
