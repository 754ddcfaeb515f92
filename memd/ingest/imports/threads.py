"""The conversations that a reader makes of a file: trees of messages, in an order in which each follows its parent.

Rule: pure; every message of the file is in the tree, once. Programs keep a conversation as a tree, because a user edits
a question and has an answer made anew; what such an export says of parents is untrusted: it may miss, repeat or form a
circle. The branch that the program shows comes first and whole, then what the others add, as memd keeps abandoned
branches of live conversations too.

    root - a - b - c        shown: a b c        order    a  b  c  d  e
             `- d - e                           parents -1  0  1  0  3
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET

from memd.errors import BadImport, EmptyImport
from memd.messages import Message, ToolCall

NAME_CHARACTERS_MAX = 200
NO_PARENT = -1


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
    children, roots = _children(by_id)
    shown = _path(by_id, leaf if leaf in by_id else next(reversed(by_id), None))
    walk = _Walk(by_id, children, set(shown), begun)
    for root in [*shown[-1:], *roots]:
        walk.take(root)
    if circling := [name for name in by_id if name not in walk.seen]:
        found.append(f"{len(circling):,} messages follow each other in a circle, which is opened")
        for name in circling:
            walk.take(name)
    if not walk.messages:
        if problems or found:
            raise BadImport("; ".join([*problems, *found][:3]))
        raise EmptyImport("it has no message with text")
    thread_id = thread_id or hashlib.blake2b(walk.messages[0].content_digest, digest_size=8).hexdigest()
    return Thread(program, thread_id, walk.messages, walk.parents, folder, (*problems, *found))


def _by_id(nodes: Iterable[Node]) -> tuple[dict[str, Node], list[str]]:
    """The nodes by unique ids, in their order, and what was wrong with the ids."""
    by_id: dict[str, Node] = {}
    times: Counter[str] = Counter()
    for node in nodes:
        times[node.id] += 1
        name = node.id
        while name in by_id:
            name += "'"
        by_id[name] = node
    doubled = [name for name, count in times.items() if count > 1]
    return by_id, [f"{len(doubled):,} ids stand for several messages, such as {doubled[0][:60]!r}"] if doubled else []


def _children(by_id: dict[str, Node]) -> tuple[dict[str, list[str]], list[str]]:
    children: dict[str, list[str]] = {}
    roots = []
    for name, node in by_id.items():
        if node.parent is None or node.parent not in by_id:
            roots.append(name)
        else:
            children.setdefault(node.parent, []).append(name)
    return children, roots


def _path(by_id: dict[str, Node], leaf: str | None) -> list[str]:
    """From a leaf up to its root, or to where a circle closes."""
    path: dict[str, None] = {}
    while leaf is not None and leaf in by_id and leaf not in path:
        path[leaf] = None
        leaf = by_id[leaf].parent
    return list(path)


class _Walk:
    """Lists messages in order, each behind its parent."""

    def __init__(
        self, by_id: dict[str, Node], children: dict[str, list[str]], shown: set[str], begun: int | None
    ) -> None:
        self._by_id = by_id
        self._children = children
        self._shown = shown
        self._begun = begun
        self.seen: set[str] = set()
        self.messages: list[Message] = []
        self.parents: list[int] = []

    def take(self, root: str) -> None:
        """Add what hangs below a node, that included."""
        waiting = [(root, NO_PARENT)]
        while waiting:
            name, parent = waiting.pop()
            if name in self.seen:
                continue
            self.seen.add(name)
            for message in self._by_id[name].messages:
                self.parents.append(parent)
                parent = len(self.messages)
                self.messages.append(self._dated(message, self.parents[-1]))
            below = self._children.get(name, ())
            own = [one for one in below if one in self._shown]
            others = [one for one in reversed(below) if one not in self._shown]
            waiting += [(one, parent) for one in (*others, *own)]  # what comes last is taken next

    def _dated(self, message: Message, parent: int) -> Message:
        if message.said_at is not UNSET:
            return message
        before = self.messages[parent].said_at if parent != NO_PARENT else UNSET
        at = self._begun if before is UNSET and self._begun is not None else before
        return message if at is UNSET else msgspec.structs.replace(message, said_at=at)
