"""Hands what was read to the daemon, a part at a time.

Rule: no file is opened here and nothing is decided about what is stored. Each part is durable when it is answered; a
conversation is sent in order, so that the daemon can give each message the digest that it has in live traffic.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from memd.entries import DEFAULT_TOPIC_ID, topic_called
from memd.errors import BadImport, BadQuestion, BadTopicId
from memd.ingest.imports.formats import Bad, Empty, ExportedEntry, Found
from memd.ingest.imports.taking import GivenLine, GivenMessage, GivenPart
from memd.ingest.imports.threads import NO_PARENT, Thread
from memd.settings.model import AUTO_TOPIC
from memd.store.tools.export_line import decode_line

GROUP_ENTRIES = 256
"""Entries of an export that are appended with one fsync: about three seconds of embedding."""
STRETCH_MESSAGES = 64
"""Messages of a conversation after which the next user message begins a new append."""
STRETCH_CHARACTERS = 1_000_000
"""Text after which the next message of the user or assistant does."""
Post = Callable[[str, object], bytes]
"""Sends a body to a route of the daemon; returns the answer, or raises `BadQuestion` where the body is wrong."""


class PartTaken(msgspec.Struct, frozen=True):
    """The answer to a part of a conversation."""

    digests: tuple[str, ...]
    chunks: int
    known: int
    redacted: dict[str, int]


class LinesTaken(msgspec.Struct, frozen=True):
    """The answer to lines of an export."""

    appended: int
    known: int
    places: tuple[int, ...]
    redacted: dict[str, int]


class ImportCounts(msgspec.Struct):
    """Figures of one import."""

    entries: int = 0
    """Of exports: appended."""
    entries_known: int = 0
    conversations: Counter[str] = msgspec.field(default_factory=Counter)
    """By the name of their format."""
    empty: int = 0
    """Conversations in which nothing was said."""
    branches: int = 0
    """Of conversations, besides the one that is shown."""
    chunks: int = 0
    """Of conversations: appended."""
    messages_known: int = 0
    """Of conversations: messages whose text is in the log already, and those that are not remembered at all."""
    redacted: Counter[str] = msgspec.field(default_factory=Counter)
    """The number of secrets that were replaced in the appended entries, by the name of the pattern."""


class Sending:
    """One import. `counts` and `problems` may be read at any time."""

    def __init__(self, post: Post, topic_id: str | None = None) -> None:
        """`topic_id`: where everything goes, or `AUTO_TOPIC`, that of a folder that a coding agent worked in; None:
        entries to the topics they came from, conversations to `default`."""
        self.counts = ImportCounts()
        self.problems: list[tuple[str, Bad]] = []
        """All that could not be imported, or not as it stands, by the name of its file."""
        self._post = post
        self._topic_id = topic_id
        self._lines: list[GivenLine] = []
        self._uuids: list[bytes] = []
        self._lines_topic = ""
        self._lines_from = ("", "")
        """The file and the place of the first of them."""
        self._size = 0
        self._places: dict[tuple[str, bytes], int] = {}

    def take(self, name: str, found: Found) -> None:
        """Send what was found in a file, or note why not.

        Raises:
            DaemonError, StoreError, EmbeddingError: nothing more can be imported now.
        """
        try:
            if isinstance(found, Bad):
                self.problems.append((name, found))
            elif isinstance(found, Empty):
                self.counts.empty += 1
            elif isinstance(found, ExportedEntry):
                self._entry(name, found)
            else:
                place, thread = found
                self.problems += [(name, Bad(place, problem)) for problem in thread.problems]
                self._thread(thread)
        except (BadQuestion, BadImport, BadTopicId, ValueError, RecursionError) as error:
            place = found[0] if isinstance(found, tuple) else found.place
            self.problems.append((name, Bad(place, str(error))))

    def end(self) -> None:
        """Send what is left; may be called at any time."""
        lines, self._lines, self._size = self._lines, [], 0
        uuids, self._uuids = self._uuids, []
        if not lines:
            return
        topic = self._lines_topic
        try:
            told = self._post("/memd/import/entries", {"topic_id": topic, "lines": lines})
        except BadQuestion as error:
            name, place = self._lines_from
            self.problems.append((name, Bad(place, f"{error}; --topic NAME puts everything into one topic")))
            return
        taken = msgspec.json.decode(told, type=LinesTaken)
        self._places.update(zip(((topic, uuid) for uuid in uuids), taken.places, strict=True))
        self.counts.entries += taken.appended
        self.counts.entries_known += taken.known
        self.counts.redacted.update(taken.redacted)

    def _entry(self, name: str, entry: ExportedEntry) -> None:
        topic, draft = decode_line(entry.line)
        if self._topic_id not in (None, AUTO_TOPIC):
            topic = self._topic_id or topic
        # Entries of different topics keep the order that they have in the file.
        if topic != self._lines_topic or len(self._lines) >= GROUP_ENTRIES or self._size >= STRETCH_CHARACTERS:
            self.end()
            self._lines_topic, self._lines_from = topic, (name, entry.place)
        self._lines.append(GivenLine(msgspec.Raw(entry.line), self._places.get((topic, draft.uuid), 0)))
        self._uuids.append(draft.uuid)
        self._size += len(entry.line)

    def _thread(self, thread: Thread) -> None:
        self.end()
        topic = self._topic_of(thread)
        digests: list[str] = []
        for part in stretches(thread):
            before = thread.parents[part.start]
            given = GivenPart(
                thread.source,
                tuple(map(GivenMessage.of, thread.messages[part.start : part.stop])),
                None if before == NO_PARENT else digests[before],
                _question(thread, part.start),
            )
            told = self._post("/memd/import/messages", {"topic_id": topic, "part": given})
            taken = msgspec.json.decode(told, type=PartTaken)
            digests += taken.digests
            self.counts.chunks += taken.chunks
            self.counts.messages_known += taken.known
            self.counts.redacted.update(taken.redacted)
        self.counts.conversations[thread.program] += 1
        self.counts.branches += thread.branches

    def _topic_of(self, thread: Thread) -> str:
        if self._topic_id != AUTO_TOPIC:
            return self._topic_id or DEFAULT_TOPIC_ID
        return topic_of_folder(thread.folder)


def stretches(thread: Thread) -> Iterator[range]:
    """Cut a conversation into parts that are appended one by one: no part crosses branches, and each begins with a
    turn, as no chunk crosses two, unless one is very long."""
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
    """The topic of a project, whose folder may be of another machine; `default` for none."""
    return topic_called(re.split(r"[/\\]", folder.rstrip("/\\"))[-1])


def _question(thread: Thread, start: int) -> GivenMessage | None:
    before = thread.parents[start]
    if before == NO_PARENT or thread.messages[start].role == "user" or thread.messages[before].role != "user":
        return None
    return GivenMessage.of(thread.messages[before])
