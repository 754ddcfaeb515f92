"""An import in parts: the command sends conversations and entries (`Sending`), the daemon makes drafts of them
(`part_drafts`, `line_drafts`).

Rule: no file is opened here. Each part is durable when it is answered. A conversation is sent in order, so that the
daemon can give each message the same digest as in live traffic. The daemon's side is synchronous and appends nothing.
It leaves out what the topic already has, so that an interrupted import is resumed by repeating it. A chunk from an
export keeps its uuid, its history and its place in time (`origin_id`); only its canonical ids are new.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw

from memd.entries import DEFAULT_TOPIC_ID, Draft, Status, Vector, topic_called
from memd.errors import BadImport, BadQuestion, BadTopicId
from memd.ingest.imports.exports import NO_PARENT, Thread
from memd.ingest.imports.files import Found
from memd.ingest.pipeline import Drafter, unstored_runs
from memd.messages import DIGEST_BYTES, ROOT_DIGEST, Message, Speech, ToolCall, chain_all, leading_count
from memd.settings.model import AUTO_TOPIC
from memd.store.log.columns import uuid_bytes
from memd.store.store import Snapshot, TopicLog
from memd.store.tools.export import decode_line, state_of

BEYOND = -1
"""The place of a chunk of which the file has more states than the log had."""
_VECTORS_MAX = 4096  # the corrections of a chunk repeat its text
_SAME = ("role", "text", "tool_calls", "tool_call_id", "name")
"""Fields that `GivenMessage` shares with `Message`."""
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
        """Return the form in which a message is sent."""
        fields = {name: getattr(message, name) for name in _SAME}
        said_at = None if message.said_at is UNSET else message.said_at
        return cls(**fields, attachments=tuple(digest.hex() for digest in message.attachments), said_at=said_at)

    def message(self, author: str) -> Message:
        """Return the message, with the principal that imports it as its author."""
        fields = {name: getattr(self, name) for name in _SAME}
        attachments = tuple(map(bytes.fromhex, self.attachments))
        said_at = UNSET if self.said_at is None else self.said_at
        return Message(**fields, attachments=attachments, said_at=said_at, author=author or UNSET)


class GivenPart(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Consecutive messages of a conversation."""

    source: Annotated[str, Meta(min_length=1, max_length=1_000)]
    """The conversation: only chunks of one source can be neighbours."""
    messages: Annotated[tuple[GivenMessage, ...], Meta(min_length=1)]
    title: Annotated[str, Meta(max_length=1_000)] = ""
    """Title of the conversation; searches find its chunks by it."""
    after: Hex | None = None
    """Digest of the message before the first, from the answer to an earlier part; None if there is none."""
    question: GivenMessage | None = None
    """That message, if the first answers it."""


class GivenLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of an export."""

    line: Raw
    place: Annotated[int, Meta(ge=BEYOND)] = 0
    """The place from the answer to the previous line of the same chunk."""


class PartTaken(msgspec.Struct, frozen=True):
    """The answer to a part of a conversation. The numbers are None for a principal who may not read there."""

    digests: tuple[str, ...]
    """One for each message."""
    chunks: int | None
    known: int | None
    """Number of messages already stored, or never stored."""
    redacted: dict[str, int]


class LinesTaken(msgspec.Struct, frozen=True):
    """The answer to lines of an export. The numbers are None for a principal who may not read there."""

    appended: int | None
    known: int | None
    places: tuple[int, ...]
    """See `GivenLine.place`; 0 for such a principal."""
    redacted: dict[str, int]


def part_drafts(
    topic: TopicLog, part: GivenPart, drafter: Drafter, speech: Speech, author: str = "", *, is_apart: bool = False
) -> tuple[list[Draft], PartTaken]:
    """Return the new chunks of a part, authored by the principal that imports it, and the answer. `is_apart`: the
    principal must not learn of others' messages or erasures: only their own imports count as known, and digests are
    keyed by author. Raises EmbeddingError: the model failed on a text."""
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
    drafts = drafter.drafts(topic, runs, source=part.source, title=part.title, is_apart=is_apart)
    if is_apart:  # so that the time does not tell what is forbidden
        drafter.embed_many([said.text for one, said in stretch if said and topic.forbidden.has_message(one, said)])
    known = len(messages) - len({one.digest for run in runs for one in run} - {previous})
    redacted = redactor.marks([draft.content for draft in drafts])
    answered = tuple(digest.hex() for digest in (*[previous] * leading, *digests))
    return drafts, PartTaken(answered, len(drafts), known, dict(redacted))


def line_drafts(
    topic: TopicLog,
    lines: Sequence[GivenLine],
    drafter: Drafter,
    signed_by: str | None = None,
    uuid_of: Callable[[bytes], bytes] = lambda uuid: uuid,
) -> tuple[list[Draft], LinesTaken]:
    """Return the new entries of an export, and the answer. Their former topic is ignored. Entries of erased chunks are
    left out.

    Args:
        signed_by: the importing principal, who replaces the authors in the lines; None keeps those.
        uuid_of: returns the uuid to store a chunk under, given that of its line; see `uuid_of_guest`.

    Raises:
        EmbeddingError: the model failed on a text.
        ValueError, BadTopicId: a line is invalid.
    """
    redactor, snapshot = drafter.cutter.redactor, topic.snapshot()
    histories: dict[bytes, tuple[list[bytes], int]] = {}

    @lru_cache(_VECTORS_MAX)
    def vector_of(text: str) -> bytes:
        vector: Vector = drafter.embed_many([text])[0]
        return vector.astype("<f4").tobytes()

    drafts: list[Draft] = []
    places, redacted = [], Counter[str]()
    for given in lines:
        _, read = decode_line(bytes(given.line))
        if signed_by is not None:
            acted = UNSET if read.action is None else signed_by or UNSET
            read = msgspec.structs.replace(read, author=signed_by or UNSET, action_by=acted)
        if (uuid := uuid_of(read.uuid)) != read.uuid:
            replaced = tuple(map(uuid_of, read.supersedes))
            read = msgspec.structs.replace(read, uuid=uuid, supersedes=replaced, public_id=None)
        draft = redactor.draft(read)  # before it is looked up: the log has it redacted
        known = histories.get(draft.uuid)
        states, place = known or ([state_of(entry) for entry in snapshot.history(draft.uuid)], given.place)
        # A chunk may be in one state several times (praised, blamed, praised): states are compared in order.
        is_behind = place != BEYOND and state_of(draft) in states[place:]
        place = states.index(state_of(draft), place) + 1 if is_behind else BEYOND
        is_known = is_behind or snapshot.was_erased(draft.uuid)
        if is_known and place == len(states) and _belongs_to_the_last(topic, drafts, draft):
            is_known, place = False, BEYOND
        histories[draft.uuid] = states, place
        places.append(place)
        if is_known:
            continue
        redacted += redactor.replaced(read, draft)
        if draft.status is Status.ACTIVE:
            draft = msgspec.structs.replace(draft, vector=vector_of(draft.embedded_text))
        drafts.append(draft)
    return drafts, LinesTaken(len(drafts), len(lines) - len(drafts), tuple(places), dict(redacted))


def uuid_of_guest(snapshot: Snapshot, uuid: bytes, author: str, *, is_apart: bool) -> bytes:
    """Return the uuid of a chunk imported by a principal who may not correct. It is the line's only if the log has it
    (`is_apart`: as this author's, who may not read others'). Otherwise it is a new one: uuids are predictable, and an
    import must not take that of a later message. `author`: the principal's name in the log."""
    known = snapshot.history(uuid)
    if known and (not is_apart or known[0].author == author):
        return uuid
    return blake2b(uuid, key=author.encode()[:64], digest_size=len(uuid)).digest()


def _belongs_to_the_last(topic: TopicLog, pending: Sequence[Draft], draft: Draft) -> bool:
    """Return True if the last entry of the log removes a chunk that this known one replaced.

    This happens if live chunks were imported before the whole history. The chunk is then appended again, to follow that
    entry: otherwise undoing the Update would restore the old chunk and keep the new one.
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


GROUP_ENTRIES = 256
"""Entries of an export appended with one fsync: about three seconds of embedding."""
STRETCH_MESSAGES = 64
"""After so many messages of a conversation the next user message begins a new part."""
STRETCH_CHARACTERS = 1_000_000
"""After so much text the next message of user or assistant does."""
Post = Callable[[str, object], bytes]
"""Sends a body to a route of the daemon and returns the answer. Raises `BadQuestion`: the body is invalid."""


class ImportCounts(msgspec.Struct):
    """Figures of one import."""

    entries: int = 0
    """Entries of exports appended."""
    entries_known: int = 0
    conversations: Counter[str] = msgspec.field(default_factory=Counter)
    """Conversations by the name of their format."""
    topics: Counter[str] = msgspec.field(default_factory=Counter)
    """Conversations by their topic."""
    empty: int = 0
    """Conversations without text."""
    branches: int = 0
    """Branches of conversations besides those shown by the programs."""
    chunks: int = 0
    """Chunks of conversations appended."""
    messages_known: int = 0
    """Messages of conversations already stored, or never stored."""
    is_told: bool = True
    """Whether the daemon told these two numbers, as it does to principals who may read."""
    redacted: Counter[str] = msgspec.field(default_factory=Counter)
    """Secrets replaced in the appended entries, by the name of the pattern."""

    @property
    def has_any(self) -> bool:
        """Whether anything was found, perhaps only what was there already or empty."""
        return bool(self.conversations or self.entries or self.entries_known or self.empty)


class Sending:
    """One import. `counts` and `problems` may be read at any time."""

    def __init__(self, post: Post, topic_id: str | None = None) -> None:
        """`topic_id`: the topic for everything. With `AUTO_TOPIC` it is named after a coding agent's folder, else after
        the name given with a conversation. None: entries go to their former topics, conversations to `default`."""
        self.counts = ImportCounts()
        self.problems: list[tuple[str, Found]] = []
        """Values that were not imported, or only in part, with the name of the file."""
        self._post = post
        self._topic_id = topic_id
        self._lines: list[tuple[GivenLine, bytes]] = []
        """Unsent lines of one topic, each with the uuid of its chunk."""
        self._lines_from = ("", "", "")
        """Their topic, and file and place of the first line."""
        self._places: dict[tuple[str, bytes], int] = {}

    def take(self, name: str, found: Found, called: str = "") -> None:
        """Send a value of a file, or record its problem. `called`: see `ImportedFile`. Raises DaemonError, StoreError,
        EmbeddingError: nothing more can be imported now."""
        if found.problem:
            self.problems.append((name, found))
            return
        try:
            if found.thread is not None:
                self.problems += [(name, Found(found.place, problem=one)) for one in found.thread.problems]
                self._thread(found.thread, self._topic_of(found.thread.folder or called))
            elif found.entry:
                self._entry(name, found)
            else:
                self.counts.empty += 1
        except (BadQuestion, BadImport, BadTopicId, ValueError, RecursionError) as error:
            self.problems.append((name, Found(found.place, problem=str(error))))

    def end(self) -> None:
        """Send the unsent lines; may be called at any time."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        topic, name, place = self._lines_from
        try:
            body = {"topic_id": topic, "lines": [line for line, _ in lines]}
            taken = msgspec.json.decode(self._post("/memd/import/entries", body), type=LinesTaken)
        except BadQuestion as error:
            problem = f"{error}; --topic NAME puts everything into one topic"
            self.problems.append((name, Found(place, problem=problem)))
            return
        self._places.update(zip(((topic, uuid) for _, uuid in lines), taken.places, strict=True))
        self.counts.entries += len(lines) if taken.appended is None else taken.appended
        self.counts.entries_known += taken.known or 0
        self.counts.redacted.update(taken.redacted)

    def _entry(self, name: str, found: Found) -> None:
        topic, draft = decode_line(found.entry)
        if self._topic_id not in (None, AUTO_TOPIC):
            topic = self._topic_id or topic
        size = sum(len(bytes(line.line)) for line, _ in self._lines)
        # Entries of different topics keep their order in the file.
        if topic != self._lines_from[0] or len(self._lines) >= GROUP_ENTRIES or size >= STRETCH_CHARACTERS:
            self.end()
        if not self._lines:
            self._lines_from = topic, name, found.place
        self._lines.append((GivenLine(Raw(found.entry), self._places.get((topic, draft.uuid), 0)), draft.uuid))

    def _thread(self, thread: Thread, topic: str) -> None:
        self.end()
        digests: list[str] = []
        for part in stretches(thread):
            before = thread.parents[part.start]
            given = GivenPart(
                thread.source,
                tuple(map(GivenMessage.of, thread.messages[part.start : part.stop])),
                thread.title,
                None if before == NO_PARENT else digests[before],
                _question(thread, part.start),
            )
            answer = self._post("/memd/import/messages", {"topic_id": topic, "part": given})
            taken = msgspec.json.decode(answer, type=PartTaken)
            digests += taken.digests
            self.counts.is_told = taken.chunks is not None
            self.counts.chunks += taken.chunks or 0
            self.counts.messages_known += taken.known or 0
            self.counts.redacted.update(taken.redacted)
        self.counts.conversations[thread.program] += 1
        self.counts.topics[topic] += 1
        self.counts.branches += thread.branches

    def _topic_of(self, folder: str) -> str:
        return topic_of_folder(folder) if self._topic_id == AUTO_TOPIC else self._topic_id or DEFAULT_TOPIC_ID


def stretches(thread: Thread) -> Iterator[range]:
    """Cut a conversation into parts that are appended separately. No part crosses branches. Each begins with a turn,
    because no chunk crosses turns, unless a turn is very long."""
    start = size = 0
    for place, message in enumerate(thread.messages):
        is_full = place - start >= STRETCH_MESSAGES and message.role == "user"
        is_huge = size >= STRETCH_CHARACTERS and message.role in ("user", "assistant")
        if place > start and (thread.parents[place] != place - 1 or is_full or is_huge):
            yield range(start, place)
            start, size = place, 0
        size += len(message.text) + sum(len(call.arguments) for call in message.tool_calls)
    if thread.messages:
        yield range(start, len(thread.messages))


def topic_of_folder(folder: str) -> str:
    """Return the topic of a project's folder, which may be from another machine; `default` for none."""
    return topic_called(re.split(r"[/\\]", folder.rstrip("/\\"))[-1])


def _question(thread: Thread, start: int) -> GivenMessage | None:
    before = thread.parents[start]
    if before == NO_PARENT or thread.messages[start].role == "user" or thread.messages[before].role != "user":
        return None
    return GivenMessage.of(thread.messages[before])
