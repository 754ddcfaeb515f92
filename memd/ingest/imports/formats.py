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
from memd.ingest.imports import claude_code, codex
from memd.ingest.imports.exports import EXPORTS, OPENAI, Export, thread_in, thread_of_elements
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


class Session(msgspec.Struct, frozen=True):
    """A format whose values are parts of one conversation."""

    name: str
    title: str
    is_one: IsOne
    begin: Callable[[Dating], LineReader]


FORMATS: tuple[Export | Session, ...] = (
    *EXPORTS,
    Session("claude-code", "Claude Code", claude_code.is_one, claude_code.ClaudeCodeSession),
    Session("codex", "Codex", codex.is_one, codex.CodexSession),
    OPENAI,
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
                if isinstance(one, Export):
                    return [(item.place, thread_in(one, item.data, self._dating))]
                if one.name not in self._readers:
                    self._readers[one.name] = one.begin(self._dating)
                self._readers[one.name].add(item.data)
                return []
        if self._readers:  # an event of another kind, or an item of a session from before its lines had a frame
            next(reversed(self._readers.values())).add(item.data)
            return []
        if self._wanted in (None, OPENAI.name) and "role" in members and "payload" not in members:
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

    def _end_messages(self) -> Iterator[Found]:
        messages, self._messages = self._messages, []
        if messages:
            try:
                yield self._begun, thread_of_elements(OPENAI, [("", Raw(one)) for one in messages], self._dating)
            except BadImport as error:
                yield Bad(self._begun, str(error))
