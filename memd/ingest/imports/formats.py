"""The table of the formats that `memd import` reads, and how a file of each becomes conversations.

Rule: pure. A format is known by the members of its objects, value by value, so that files of several programs may be
mixed; `--format` says which one is meant, and then nothing else is read. A value that is of none is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import msgspec
from msgspec import Raw

from memd.errors import BadImport, BadRequestBody, BadTopicId, EmptyImport
from memd.ingest.dates import Dating
from memd.ingest.imports import chatgpt, claude, claude_code, codex, librechat, open_webui, openai, sharegpt
from memd.ingest.imports.items import Item
from memd.ingest.imports.threads import Thread
from memd.wire.lenient_json import UNREADABLE

BAD_LINES_MAX = 20
"""Of a file without a good one: then it is a file of something else."""
AIDER, MEMD = "aider", "memd"
_IN_PYTHON_ONLY = re.compile(rb'("(?:[^"\\]|\\.)*+")|-?(?:NaN|Infinity)', re.DOTALL)
"""Strings, which stay, and numbers that are none in JSON."""
_members_decoder = msgspec.json.Decoder(dict[str, Raw])
IsOne = Callable[[Mapping[str, Raw]], bool]


class LineReader(Protocol):
    """Reads a file whose lines are a conversation together."""

    def add(self, line: bytes) -> None:
        """Take a line."""

    def threads(self) -> Iterator[Thread]:
        """Yield what was read."""


class Format(msgspec.Struct, frozen=True):
    """One format; exactly one of `thread` and `lines` reads it."""

    name: str
    title: str
    """The program's, for people."""
    is_one: IsOne
    thread: Callable[[bytes, Dating], Thread] | None = None
    """Reads a value that is a conversation."""
    lines: Callable[[Dating], LineReader] | None = None
    """Begins a file whose values are parts of one."""


FORMATS = (
    Format("chatgpt", "ChatGPT", chatgpt.is_one, chatgpt.thread),
    Format("claude", "Claude", claude.is_one, claude.thread),
    Format("open-webui", "Open WebUI", open_webui.is_one, open_webui.thread),
    Format("librechat", "LibreChat", librechat.is_one, librechat.thread),
    Format("sharegpt", "ShareGPT", sharegpt.is_one, sharegpt.thread),
    Format("claude-code", "Claude Code", claude_code.is_one, lines=claude_code.ClaudeCodeSession),
    Format("codex", "Codex", codex.is_one, lines=codex.CodexSession),
    Format("openai", "OpenAI messages", openai.is_one, openai.thread),
)
"""The first that fits is taken."""
NAMES = (*(one.name for one in FORMATS), AIDER, MEMD)
TITLES = {**{one.name: one.title for one in FORMATS}, AIDER: "Aider", MEMD: "memd"}


class ExportedEntry(msgspec.Struct, frozen=True):
    """A line of `memd export`."""

    place: str
    line: bytes


class Bad(msgspec.Struct, frozen=True):
    """A value that cannot be imported, and why."""

    place: str
    reason: str
    is_broken: bool = False
    """The file itself is damaged, whatever stood in it."""


class Empty(msgspec.Struct, frozen=True):
    """A conversation in which nothing was said."""

    place: str


Found = ExportedEntry | Bad | Empty | tuple[str, Thread]
"""A conversation stands behind its place."""


def found_in(values: Iterable[Item], dating: Dating, wanted: str | None = None) -> Iterator[Found]:
    """Read the values of one file.

    Args:
        wanted: the name of the only format that is read.
    """
    file = _FileReading(dating, wanted)
    for item in values:
        yield from file.take(item)
        if file.is_foreign:
            break
    yield from file.end()


def _members(item: Item) -> tuple[Item, dict[str, Raw]]:
    """The members of a value, and the value in JSON proper, without the NaN that Python's `json` may write."""
    try:
        try:
            return item, _members_decoder.decode(item.data)
        except msgspec.MsgspecError:
            item = msgspec.structs.replace(item, data=_IN_PYTHON_ONLY.sub(lambda found: found[1] or b"null", item.data))
            return item, _members_decoder.decode(item.data)
    except RecursionError:
        raise BadImport("it is nested too deep to be read; export it flat (LibreChat: not recursive)") from None
    except UNREADABLE as error:
        raise BadImport(f"it is no JSON object: {error}") from None


class _FileReading:
    def __init__(self, dating: Dating, wanted: str | None) -> None:
        self._dating = dating
        self._wanted = wanted
        self._readers: dict[str, LineReader] = {}
        self._messages: list[bytes] = []
        self._array: int | None = None
        """The array that `_messages` are of; None: they are lines."""
        self._begun = ""
        self._is_known = False
        """Something in it was a conversation, or a part of one."""
        self._strange: list[Bad] = []
        """The values in front of the first that is known."""

    @property
    def is_foreign(self) -> bool:
        """Whether it is no file of conversations."""
        return len(self._strange) >= BAD_LINES_MAX

    def take(self, item: Item) -> Iterator[Found]:
        if item.array != self._array:
            yield from self._end_messages()
        try:
            if item.problem:
                raise BadImport(item.problem)
            found = self._read(item)
        except EmptyImport:
            found = [Empty(item.place)]
        except (*UNREADABLE, BadImport, BadRequestBody, BadTopicId) as error:
            found = [Bad(item.place, str(error), is_broken=bool(item.problem))]
        if self._is_known:
            yield from (*self._strange, *found)
            self._strange = []
        else:
            self._strange += (one for one in found if isinstance(one, Bad))

    def end(self) -> Iterator[Found]:
        if self.is_foreign:
            first = self._strange[0]
            reason = f"{first.place}: {first.reason}"
            yield Bad("the file", f"there is no conversation in its beginning, and it is not read on; {reason}")
        else:
            yield from self._strange
        yield from self._end_messages()
        for reader in self._readers.values():
            try:
                yield from (("session", thread) for thread in reader.threads())
            except (*UNREADABLE, BadImport, BadRequestBody) as error:
                yield Bad("session", str(error))

    def _read(self, item: Item) -> list[Found]:
        item, members = _members(item)
        self._is_known, was_known = True, self._is_known
        if self._wanted in (None, MEMD) and "uuid" in members and "canonical_id" in members:
            return [ExportedEntry(item.place, item.data)]
        for one in FORMATS:
            if self._wanted in (None, one.name) and one.is_one(members):
                if one.thread is not None:
                    return [(item.place, one.thread(item.data, self._dating))]
                assert one.lines is not None, "one of the two"
                self._reader(one.name, one.lines).add(item.data)
                return []
        if self._readers:  # an event of another kind, or an item of a session from before its lines had a frame
            next(reversed(self._readers.values())).add(item.data)
            return []
        if self._wanted in (None, "openai") and openai.is_message(members):
            if not self._messages:
                self._array, self._begun = item.array, item.place
            self._messages.append(item.data)
            return []
        self._is_known = was_known
        raise BadImport(self._no_conversation(members))

    def _no_conversation(self, members: Mapping[str, Raw]) -> str:
        has = ", ".join(name[:40] for name in list(members)[:6]) or "none at all"
        what = "a conversation" if self._wanted is None else f"of {TITLES[self._wanted]}"
        return f"it is not {what}; its members are {has}"

    def _reader(self, name: str, lines: Callable[[Dating], LineReader]) -> LineReader:
        if name not in self._readers:
            self._readers[name] = lines(self._dating)
        return self._readers[name]

    def _end_messages(self) -> Iterator[Found]:
        messages, self._messages = self._messages, []
        if messages:
            try:
                yield self._begun, openai.thread_of_messages(messages, self._dating)
            except BadImport as error:
                yield Bad(self._begun, str(error))
