"""The daemon's part in an import: the entries to append for a part of a conversation, or for lines of an export.

Rule: synchronous, and appends nothing; what the topic has already is left out, so that an import that was interrupted
is resumed by doing it again. A chunk that an export speaks of keeps its uuid, its history and its place in time
(`origin_id`); only its canonical ids are new.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw
from numpy.typing import NDArray

from memd.embedding.embedder import EmbedMany
from memd.entries import Draft, Status, Vector
from memd.ingest.pipeline import Drafter, unstored_runs
from memd.messages import DIGEST_BYTES, ROOT_DIGEST, Message, ToolCall, chain_all, leading_count
from memd.speech import Speech
from memd.store.erasure.rewriting import was_erased
from memd.store.log.columns import uuid_bytes
from memd.store.store import TopicLog
from memd.store.tools.export_line import decode_line, state_of

BEYOND = -1
"""The place of a chunk of which the file has told more than the log had."""
_VECTORS_MAX = 4096  # the corrections of a chunk repeat its text
Hex = Annotated[str, Meta(pattern="^(?:[0-9a-f]{32})$")]


class GivenMessage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message of an imported conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=200)]
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    attachments: tuple[Hex, ...] = ()
    """Digests of the parts that are not text."""
    said_at: Annotated[int, Meta(ge=0, lt=4_102_444_800_000_000)] | None = None
    """Microseconds since 1970."""

    @classmethod
    def of(cls, message: Message) -> GivenMessage:
        """A message as it is sent."""
        return cls(
            message.role,
            message.text,
            message.tool_calls,
            message.tool_call_id,
            message.name,
            tuple(digest.hex() for digest in message.attachments),
            None if message.said_at is UNSET else message.said_at,
        )

    def message(self, author: str) -> Message:
        """The message that is meant, as one of the principal that imports it."""
        return Message(
            self.role,
            self.text,
            self.tool_calls,
            self.tool_call_id,
            self.name,
            tuple(bytes.fromhex(digest) for digest in self.attachments),
            said_at=UNSET if self.said_at is None else self.said_at,
            author=author or UNSET,
        )


class GivenPart(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Messages of a conversation that follow each other."""

    source: Annotated[str, Meta(min_length=1, max_length=1_000)]
    """The conversation: only chunks of one source can be neighbours."""
    messages: Annotated[tuple[GivenMessage, ...], Meta(min_length=1)]
    after: Hex | None = None
    """The digest of the message before the first, as it was told when that was taken; None: there is none."""
    question: GivenMessage | None = None
    """That message, where the first answers it."""


class GivenLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of an export."""

    line: Raw
    place: Annotated[int, Meta(ge=BEYOND)] = 0
    """As the answer told it for the line before it of the same chunk."""


class Drafts(msgspec.Struct, frozen=True):
    """The entries to append, and what was found out."""

    drafts: list[Draft]
    known: int
    """Messages or entries that are there already, and messages that are not remembered at all."""
    redacted: Counter[str]
    digests: tuple[bytes, ...] = ()
    """Of a part: one for each message."""
    places: tuple[int, ...] = ()
    """Of lines: see `GivenLine.place`."""


def part_drafts(
    topic: TopicLog, part: GivenPart, drafter: Drafter, speech: Speech, author: str = "", *, is_apart: bool = False
) -> Drafts:
    """The chunks of a part that the topic does not have, as those of the principal that imports it.

    Args:
        is_apart: he may not know what others have said: only what he himself has imported is known, and the digests
            are his own.

    Raises:
        EmbeddingError: the model failed on a text.
    """
    messages = [speech.heard(one.message(author)) for one in part.messages]
    previous = ROOT_DIGEST if part.after is None else bytes.fromhex(part.after)
    leading = leading_count(messages) if part.after is None else 0
    contents = [message.content_digest for message in messages[leading:]]
    if is_apart:
        contents = [blake2b(one, key=author.encode()[:64], digest_size=DIGEST_BYTES).digest() for one in contents]
    digests = chain_all(contents, previous)
    stretch: list[tuple[bytes, Message | None]] = list(zip(digests, messages[leading:], strict=True))
    if part.question is not None and part.after is not None:
        stretch.insert(0, (previous, speech.heard(part.question.message(author))))
    redactor = drafter.cutter.redactor
    runs = unstored_runs(topic, stretch, redactor)
    drafts = drafter.drafts(topic, runs, source=part.source, is_apart=is_apart)
    known = len(messages) - len({one.digest for run in runs for one in run} - {previous})
    redacted = redactor.marks([draft.content for draft in drafts])
    return Drafts(drafts, known, redacted, (*[previous] * leading, *digests))


def line_drafts(topic: TopicLog, lines: Sequence[GivenLine], drafter: Drafter, signed_by: str | None = None) -> Drafts:
    """The entries of an export that the topic does not have. What they were called before is not looked at. Those of
    a chunk that was erased are left out.

    Args:
        signed_by: the principal that imports them, in place of those whom they name; None: those are believed.

    Raises:
        EmbeddingError: the model failed on a text.
        ValueError, BadTopicId: a line is none.
    """
    redactor = drafter.cutter.redactor
    histories: dict[bytes, tuple[list[bytes], int]] = {}
    embed = _RecentVectors(drafter.embed_many)
    drafts: list[Draft] = []
    places, redacted = [], Counter[str]()
    for given in lines:
        _, read = decode_line(bytes(given.line))
        if signed_by is not None:
            acted = UNSET if read.action is None else signed_by or UNSET
            read = msgspec.structs.replace(read, author=signed_by or UNSET, action_by=acted)
        draft = redactor.draft(read)  # before it is looked up: the log has it redacted
        states, place = histories.get(draft.uuid) or (
            [state_of(entry) for entry in topic.snapshot().history(draft.uuid)],
            given.place,
        )
        place = _place_of(states, place, draft)
        is_known = place != BEYOND or was_erased(topic.snapshot(), draft.uuid)
        if is_known and place == len(states) and _belongs_to_the_last(topic, drafts, draft):
            is_known, place = False, BEYOND
        histories[draft.uuid] = states, place
        places.append(place)
        if is_known:
            continue
        redacted += redactor.replaced(read, draft)
        if draft.status is Status.ACTIVE:
            vector = embed([draft.embedded_text])[0].astype("<f4").tobytes()
            draft = msgspec.structs.replace(draft, vector=vector)
        drafts.append(draft)
    return Drafts(drafts, len(lines) - len(drafts), redacted, places=tuple(places))


def _place_of(states: Sequence[bytes], place: int, draft: Draft) -> int:
    """The place in a chunk's history behind this state of it; `BEYOND` if the log has no such state behind `place`.

    A chunk may be in one state several times (praised, blamed, praised): states are compared in order.
    """
    if place == BEYOND or (state := state_of(draft)) not in states[place:]:
        return BEYOND
    return states.index(state, place) + 1


def _belongs_to_the_last(topic: TopicLog, pending: Sequence[Draft], draft: Draft) -> bool:
    """Whether this is a chunk that the log has, and the last entry there takes out what the chunk replaced.

    So it is where live chunks were imported before the whole history. It is appended once more, to be found behind that
    entry: else who undoes the Update would bring back the old chunk and leave the new one.
    """
    if draft.action != "Update":
        return False
    if pending:
        last, status = pending[-1].uuid, pending[-1].status
    else:
        views = list(topic.snapshot().views.values())
        row = next(view.rows[-1] for view in reversed(views) if len(view.rows))
        last, status = uuid_bytes(row["uuid_high"], row["uuid_low"]), Status(row["status"])
    return status is not Status.ACTIVE and last in draft.supersedes


class _RecentVectors:
    """`embed_many` that keeps the vectors of the last `_VECTORS_MAX` different texts."""

    def __init__(self, embed_many: EmbedMany) -> None:
        self._embed_many = embed_many
        self._vectors: OrderedDict[str, Vector] = OrderedDict()

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if missing:
            self._vectors.update(zip(missing, self._embed_many(missing), strict=True))
        found = np.stack([self._vectors[text] for text in texts])
        while len(self._vectors) > _VECTORS_MAX:
            self._vectors.popitem(last=False)
        return found
