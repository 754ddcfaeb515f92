"""The conversations that a reader makes of a file: trees of messages, in an order in which each follows its parent.

Rule: pure; every message of the file is in the tree, once. Programs keep a conversation as a tree, because a user edits
a question and has an answer made anew; what such an export says of parents is untrusted: it may miss, repeat or form a
circle. The branch that the program shows comes first and whole, then what the others add, as memd keeps abandoned
branches of live conversations too.

    root - a - b - c        shown: a b c        order    a  b  c  d  e
             `- d - e                           parents -1  0  1  0  3

Programs name and write times in many ways; what cannot be read, or cannot be a time at which somebody wrote to a
machine, is none.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from memd.errors import BadImport, EmptyImport
from memd.messages import Message, ToolCall
from memd.wire.lenient_json import OBJECT

_NAMES = ("said_at", "timestamp", "created_at", "createdAt", "create_time", "date", "time")
"""The members that are looked at, the best first."""
_EARLIEST_US, _LATEST_US = 315_532_800_000_000, 4_102_444_800_000_000
"""1980 and 2100: between them, and the scale of a number says whether it is seconds or a fraction of them. One before
them is a counter, or that of a machine without a clock."""
_SCALES_US = (1e6, 1e3, 1, 1e-3)
"""Microseconds to one second, millisecond, microsecond, nanosecond."""
_SECONDS_MAX = 1e11
_DATE_DIGITS = len("20251103")


class Dating:
    """Reads the times of an export, and counts those that cannot be."""

    def __init__(self, latest_us: int = _LATEST_US) -> None:
        """`latest_us`: no message is from later than this; microseconds since the epoch."""
        self._latest_us = min(latest_us, _LATEST_US)
        self.refused = 0
        """Messages and conversations whose time was no time, in the future or before 1980."""

    def told_time(self, value: msgspec.Raw | bytes) -> int | None:
        """The time in microseconds since the epoch that an object of JSON gives for itself; None if it gives none."""
        try:
            members = OBJECT.decode(value)
        except msgspec.MsgspecError:  # no object
            return None
        return self.first_time(msgspec.json.decode(members[name]) for name in _NAMES if name in members)

    def first_time(self, values: Iterable[Any]) -> int | None:
        """The first of some values of JSON that is a time, in microseconds since the epoch; None if none is."""
        named = [one for one in values if one not in (None, "")]
        times = map(_microseconds, named)
        found = next((at for at in times if at is not None and _EARLIEST_US < at <= self._latest_us), None)
        self.refused += found is None and bool(named)
        return found


def _microseconds(value: Any) -> int | None:
    try:
        if isinstance(value, str):
            is_number = len(value) > _DATE_DIGITS and value.replace(".", "", 1).isdecimal()
            if is_number:
                return _scaled(float(value))
            return round(datetime.fromisoformat(value.strip()).timestamp() * 1e6)  # without a zone: this machine's
        return _scaled(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except (ValueError, OverflowError, OSError):  # no time; not a number; beyond what this machine's clock can say
        return None


def _scaled(number: float) -> int:
    place = next((place for place in range(len(_SCALES_US)) if number < _SECONDS_MAX * 1000**place), 0)
    return round(number * _SCALES_US[place])


NAME_CHARACTERS_MAX = 200
NO_PARENT = -1
ITEM_BYTES_MAX = 64 << 20
"""Of one value of a file. The longest conversations of years have some ten megabytes."""


class Node(msgspec.Struct):
    """One place of a conversation's tree, with the messages that it stands for: none, one, or an answer's several."""

    id: str
    parent: str | None
    messages: Sequence[Message] = ()


class Thread(msgspec.Struct):
    """One conversation."""

    program: str
    """The name of its format."""
    id: str
    """The program's own; with `program` the source of its chunks."""
    messages: list[Message]
    parents: list[int]
    """For each message the position of the one before it, or `NO_PARENT`."""
    folder: str = ""
    """The folder that a coding agent worked in."""
    problems: tuple[str, ...] = ()
    """All that is not as it should be, and was made the best of."""

    @property
    def branches(self) -> int:
        """The number of branches besides the first."""
        return sum(parent != place - 1 for place, parent in enumerate(self.parents))

    @property
    def source(self) -> str:
        """The source of its chunks."""
        return f"{self.program}:{self.id}"[:1_000]


class Answer:
    """Builds the messages of an element that has a whole answer: text, calls, their results, and text again."""

    def __init__(self, said_at: int | None) -> None:
        self._said_at = UNSET if said_at is None else said_at
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._messages: list[Message] = []

    def say(self, text: str) -> None:
        """Add text."""
        if text.strip():
            if self._messages and self._messages[-1].role == "tool" and self._calls:
                self._flush()
            self._texts.append(text)

    def call(self, name: str, arguments: str, call_id: str = "") -> None:
        """Add a call."""
        self._calls.append(ToolCall(call_id, name, arguments))

    def result(self, text: str, call_id: str = "", name: str = "") -> None:
        """Add the result of a call."""
        self._flush()
        if text.strip():
            self._messages.append(Message("tool", text, tool_call_id=call_id, name=name, said_at=self._said_at))

    def messages(self) -> list[Message]:
        """All of it."""
        self._flush()
        return self._messages

    def _flush(self) -> None:
        text, calls = "\n".join(self._texts).strip(), tuple(self._calls)
        if text or calls:
            self._messages.append(Message("assistant", text, calls, said_at=self._said_at))
        self._texts, self._calls = [], []


def said(role: str, text: str, at: int | None = None) -> list[Message]:
    """The message of a text; none where nothing is said."""
    return [Message(role, text, said_at=UNSET if at is None else at)] if text.strip() else []


def named(kind: str, name: object = "") -> str:
    """The words in place of an attachment, whose content is not imported: `[file: report.pdf]`."""
    words = " ".join(name.split())[:NAME_CHARACTERS_MAX] if isinstance(name, str) else ""
    printable = "".join(one for one in words if one.isprintable() and one not in "[]")
    return f"[{kind}: {printable}]" if printable else f"[{kind}]"


def with_attachments(text: str, attachments: Iterable[str]) -> str:
    """A message's text with what is attached to it, a line each."""
    return "\n".join(part for part in (text, *attachments) if part.strip())


def straight(messages: Iterable[Message]) -> list[Node]:
    """The tree of a conversation without branches."""
    listed = list(messages)
    return [Node(str(place), str(place - 1) if place else None, (message,)) for place, message in enumerate(listed)]


def thread_of(
    program: str,
    thread_id: str,
    nodes: Iterable[Node],
    leaf: str | None = None,
    *,
    begun: int | None = None,
    folder: str = "",
    problems: Sequence[str] = (),
) -> Thread:
    """Order the tree.

    Args:
        thread_id: the program's own; empty: one that the same first message gives.
        leaf: the last message of the branch that the program shows; None: that of the last node.
        begun: the time of messages in front of the first that has one, in microseconds since the epoch.

    Raises:
        BadImport: no message of it can be read.
        EmptyImport: it has none.
    """
    by_id, found = _by_id(nodes)
    followed = {node.parent for node in by_id.values()}
    leaves = [name for name in by_id if name not in followed]
    shown = leaf if leaf in by_id else next(reversed(by_id), "")
    messages: list[Message] = []
    parents: list[int] = []
    ends: dict[str, int] = {}  # by node: the place of the last message up to it
    for name in (shown, *leaves, *by_id):
        path: dict[str, Node] = {}  # up to the root, to what is listed, or to where a circle closes
        above: str | None = name
        while above in by_id and above not in ends and above not in path:
            path[above] = by_id[above]
            above = by_id[above].parent
        if above in path:
            size = len(path) - list(path).index(above)
            found.append(f"{size:,} messages follow each other in a circle, which is opened")
        end = ends.get(above or "", NO_PARENT)
        for below, node in reversed(path.items()):
            for message in node.messages:
                before = messages[end].said_at if end != NO_PARENT else UNSET
                parents.append(end)
                end = len(messages)
                messages.append(_dated(message, before, begun))
            ends[below] = end
    if not messages:
        if problems or found:
            raise BadImport("; ".join([*problems, *found][:3]))
        raise EmptyImport("it has no message with text")
    thread_id = thread_id or hashlib.blake2b(messages[0].content_digest, digest_size=8).hexdigest()
    return Thread(program, thread_id, messages, parents, folder, (*problems, *found))


def _by_id(nodes: Iterable[Node]) -> tuple[dict[str, Node], list[str]]:
    """The nodes by unique ids, in their order, and what was wrong with the ids."""
    by_id: dict[str, Node] = {}
    doubled: Counter[str] = Counter()
    for node in nodes:
        name = node.id
        while name in by_id:
            doubled[node.id] += 1
            name = f"{node.id}'{doubled[node.id]}"
        by_id[name] = node
    if doubled:
        return by_id, [f"{len(doubled):,} ids stand for several messages, such as {next(iter(doubled))[:60]!r}"]
    return by_id, []


def _dated(message: Message, before: int | UnsetType, begun: int | None) -> Message:
    """A message without a time is of that of the one before it, or of the conversation's."""
    at = begun if before is UNSET and begun is not None else before
    return message if message.said_at is not UNSET or at is UNSET else msgspec.structs.replace(message, said_at=at)
