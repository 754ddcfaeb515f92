"""Reads conversations that programs export as trees or lists of messages, by the table of formats in
`assets/exports.toml`, and sessions of coding agents, in which several lines make a conversation.

Rule: pure. A format names the members with messages, ids, parents, speakers and texts; only cases that no path can
describe are code. Thoughts and a program's own messages are left out. Unreadable parts are reported, and the rest is
kept. A session's messages are read in the form of the agent's API, so that those of a session through memd are
recognised. Every message of a file is in its conversation's tree, once.

Programs store a conversation as a tree, because users edit questions and regenerate answers. The parents in an export
are untrusted: they may be missing, repeated or circular. The branch that the program shows comes first and complete,
then the rest of the others, because memd keeps abandoned branches of live conversations, too.

    root - a - b - c        shown: a b c        order    a  b  c  d  e
             `- d - e                           parents -1  0  1  0  3

Programs name and write times in many ways. An unreadable time, or one at which nobody can have written, is ignored.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby, islice
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from memd.assets import words_of
from memd.errors import BadImport, BadRequestBody, EmptyImport
from memd.messages import Message, ToolCall, with_line_feeds
from memd.wire import anthropic, chat
from memd.wire.lenient_json import LIST, OBJECT, TEXT, UNREADABLE, is_list, is_object, is_string, text_or_empty
from memd.wire.responses import grouped, parse_items

_NAMES = ("said_at", "timestamp", "created_at", "createdAt", "create_time", "date", "time", "ts")
"""Members with a time, most reliable first."""
_EARLIEST_US, _LATEST_US = 315_532_800_000_000, 4_102_444_800_000_000
"""1980 and 2100, the limits of times; they also decide if a number is in seconds or fractions of them. An earlier one
is a counter, or from a machine without a clock."""
_SCALES_US = (1e6, 1e3, 1, 1e-3)
"""Microseconds to one second, millisecond, microsecond, nanosecond."""
_DATE_DIGITS = len("20251103")


class Dating:
    """Reads the times of an export, and counts invalid ones."""

    def __init__(self, latest_us: int = _LATEST_US) -> None:
        """`latest_us`: the latest valid time, in microseconds since the epoch."""
        self._latest_us = min(latest_us, _LATEST_US)
        self.refused = 0
        """Number of messages and conversations whose time was invalid, in the future or before 1980."""

    def time_of(self, members: Mapping[str, Any]) -> int | None:
        """Return the time of a JSON object, in microseconds since the epoch; None if it has none."""
        return self.first_time(_plain(members[name]) for name in _NAMES if name in members)

    def first_time(self, values: Iterable[Any]) -> int | None:
        """Return the first JSON value that is a time, in microseconds since the epoch; None if none is."""
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
    except (ValueError, OverflowError, OSError):  # no time; not a number; out of this machine's range
        return None


def _scaled(number: float) -> int:
    return round(number * next((scale for scale in _SCALES_US if number * scale < _LATEST_US), 1e6))


# Trees

NAME_CHARACTERS_MAX = 200
NO_PARENT = -1
ITEM_BYTES_MAX = 64 << 20
"""Limit of one value of a file. The longest conversations of years have some ten megabytes."""


class Node(msgspec.Struct):
    """A node of a conversation's tree, with its messages: none, one, or several of an answer."""

    id: str
    parent: str | None
    messages: Sequence[Message] = ()


class Thread(msgspec.Struct):
    """One conversation."""

    program: str
    """Name of its format."""
    id: str
    """The program's id; with `program` it is the source of the chunks."""
    messages: list[Message]
    parents: list[int]
    """Position of each message's predecessor, or `NO_PARENT`."""
    folder: str = ""
    """Working folder of a coding agent."""
    title: str = ""
    problems: tuple[str, ...] = ()
    """Defects that were worked around."""

    @property
    def branches(self) -> int:
        """Number of branches besides the first."""
        return sum(parent != place - 1 for place, parent in enumerate(self.parents))

    @property
    def source(self) -> str:
        """Source of its chunks."""
        return f"{self.program}:{self.id}"[:1_000]


def answered(parts: Iterable[str | ToolCall | Message]) -> list[Message]:
    """Return the messages of an element with a whole answer: texts, calls, their results, and further texts."""
    messages: list[Message] = []
    texts: list[str] = []
    calls: list[ToolCall] = []

    def end() -> None:
        text = "\n".join(texts).strip()
        if text or calls:
            messages.append(Message("assistant", text, tuple(calls)))
        texts.clear()
        calls.clear()

    for part in parts:
        if isinstance(part, ToolCall):
            calls.append(part)
        elif isinstance(part, Message):
            end()
            messages += [part] if part.text.strip() else []
        elif part.strip():
            if calls and messages and messages[-1].role == "tool":
                end()
            texts.append(part)
    end()
    return messages


def said(role: str, text: str) -> list[Message]:
    """Return the message of a text; none if it is blank."""
    return [Message(role, text)] if text.strip() else []


def dated(messages: Iterable[Message], at: int | None) -> list[Message]:
    """Return the messages with this time; None if unknown."""
    return [msgspec.structs.replace(one, said_at=UNSET if at is None else at) for one in messages]


def named(kind: str, name: object = "") -> str:
    """Return the text that replaces an attachment: `[file: report.pdf]`."""
    words = " ".join(name.split())[:NAME_CHARACTERS_MAX] if isinstance(name, str) else ""
    printable = "".join(one for one in words if one.isprintable() and one not in "[]")
    return f"[{kind}: {printable}]" if printable else f"[{kind}]"


def with_attachments(text: str, attachments: Iterable[str]) -> str:
    """Return a message's text with its attachments, one per line."""
    return "\n".join(part for part in (text, *attachments) if part.strip())


def straight(messages: Iterable[Message]) -> list[Node]:
    """Return the tree of a conversation without branches."""
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
    title: str = "",
    problems: Sequence[str] = (),
) -> Thread:
    """Order the tree. `thread_id`: the program's id; if empty, it is derived from the first message. `leaf`: the last
    message of the branch that the program shows; None for that of the last node. `begun`: time of the messages before
    the first one with a time, in microseconds since the epoch. Raises BadImport: no message can be read; EmptyImport:
    it has none."""
    by_id, found = _by_id(nodes)
    followed = {node.parent for node in by_id.values()}
    leaves = [name for name in by_id if name not in followed]
    shown = leaf if leaf in by_id else next(reversed(by_id), "")
    messages: list[Message] = []
    parents: list[int] = []
    ends: dict[str, int] = {}  # by node: position of the last message up to it
    for name in (shown, *leaves, *by_id):
        path: dict[str, Node] = {}  # up to the root, to a listed node, or until a circle closes
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
    title = " ".join(title.split())[:NAME_CHARACTERS_MAX]
    return Thread(program, thread_id, messages, parents, folder, title, (*problems, *found))


def _by_id(nodes: Iterable[Node]) -> tuple[dict[str, Node], list[str]]:
    """Return the nodes in order by unique ids, and problems with the ids."""
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
    """Return the message; one without a time gets that of its predecessor, or the conversation's."""
    at = begun if before is UNSET and begun is not None else before
    return message if message.said_at is not UNSET or at is UNSET else msgspec.structs.replace(message, said_at=at)


# Formats

Members = Mapping[str, Any]
"""Members of a JSON object, decoded or `Raw`."""
_MEMBERS = re.compile(rb'"(\w+)"\s*:\s*(?=(.{0,40}))', re.DOTALL)


class AnswerPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of part of an answer; the fields name the members with text, call and result."""

    say: str = ""
    show: str = ""
    call: str = ""
    arguments: str = ""
    id: str = ""
    result: str = ""
    name: str = ""


class Export(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A format; the table describes the fields."""

    name: str
    title: str
    has: tuple[tuple[str, ...], ...]
    beside: tuple[str, ...] = ()
    messages: str = ""
    id: str = ""
    called: str = ""
    leaf: str = ""
    frame: str = ""
    message: str = ""
    own_id: str = ""
    parent: str = ""
    children: str = ""
    role: str = "role"
    roles: Mapping[str, str] | None = None
    text: str = ""
    files: str = ""
    file_name: str = "name"
    file_text: str = ""
    blocks: str = ""
    kinds: Mapping[str, AnswerPart] = {}

    def fits(self, members: Members) -> bool:
        """Return True if an object with these members is a conversation of this format, or part of a session."""
        return any(all(_is_there(members, one) for one in alternative) for alternative in self.has)

    def may_begin(self, data: bytes) -> bool:
        """Return True if these first bytes of a truncated value have the names of this format, at any depth."""
        return self.fits({found[1].decode(): Raw(found[2]) for found in _MEMBERS.finditer(data)})


FORMATS = msgspec.convert(words_of("exports")["formats"], tuple[Export, ...])
"""The formats; the first that fits is used."""


def _is_there(members: Members, member: str) -> bool:
    name, _, begin = member.partition(":")
    if name.startswith("!"):
        return name[1:] not in members
    return name in members and bytes(members[name]).startswith(begin.encode())


def thread_in(export: Export, item: bytes, dating: Dating) -> Thread:
    """Read a conversation. Raises BadImport, UNREADABLE: it is none or unreadable; EmptyImport: it has no text."""
    members = OBJECT.decode(item)
    listed = next(_at(members, export.messages), None)
    if listed is None:
        raise BadImport(f"it has no messages: there is no {export.messages.replace('|', ', nor ')} in it")
    begun = dating.time_of(members)
    if begun is None and isinstance(framed := _value(members, export.frame), dict):
        begun = dating.time_of(framed)
    elements: Iterable[tuple[str, Raw]]
    elements = (("", raw) for raw in LIST.decode(listed)) if is_list(listed) else OBJECT.decode(listed).items()
    own_id, leaf, title = (_text_at(members, path) for path in (export.id, export.leaf, export.called))
    return thread_of_elements(export, elements, dating, own_id, leaf or None, begun, title)


def thread_of_elements(
    export: Export,
    elements: Iterable[tuple[str, Raw]],
    dating: Dating,
    own_id: str = "",
    leaf: str | None = None,
    begun: int | None = None,
    title: str = "",
) -> Thread:
    """Read the messages of a conversation, given with their ids, which are empty for a list. Raises BadImport,
    EmptyImport: see `thread_in`."""
    nodes: list[Node] = []
    problems: list[str] = []
    waiting: list[tuple[str, Raw, Node | None]] = [(name, raw, None) for name, raw in reversed(list(elements))]
    is_by_id = any(name for name, _, _ in waiting)
    place, before = 0, None
    while waiting:
        name, element, above = waiting.pop()
        place += 1
        node = Node(name or str(place), None)
        try:
            members = OBJECT.decode(element)  # undecoded: members that are not used may be anything
            if is_list(children := next(_at(members, export.children), Raw())):
                waiting += [("", child, node) for child in reversed(LIST.decode(children))]
            node.parent = above.id if above else _id(members, export.parent) or (None if name else before)
            node.id = name or _id(members, export.own_id) or node.id
            if (message := next(_at(members, export.message), None) if export.message else element) is not None:
                node.messages = _messages(export, OBJECT.decode(message), element, dating)
        except (*UNREADABLE, BadImport, BadRequestBody) as error:
            problems.append(f"message {repr(name[:60]) if name else f'{place:,}'} cannot be read: {error}")
            if not name:
                continue
        nodes.append(node)
        before = node.id
    # A single chat of Open WebUI has no id: that of its first message is as unique.
    own_id = own_id or next((node.id for node in nodes if node.messages and is_by_id), "")
    return thread_of(export.name, own_id, nodes, leaf, begun=begun, title=title, problems=problems)


def _messages(export: Export, members: Members, raw: Raw, dating: Dating) -> list[Message]:
    at, role = dating.time_of(members), _role(export, _value(members, export.role))
    text, listed = _text_at(members, export.text), _value(members, export.blocks)
    blocks = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if (read := _READ.get(export.name)) is not None:
        messages = read(members, raw, role)
    elif role != "assistant":
        kinds = ((one, _kind(export, one)) for one in blocks)
        text = "\n".join(filter(None, (_text(one.get(kind.say)) for one, kind in kinds if kind.say))) or text
        files = _attached(members, export.files, export.file_name, export.file_text)
        messages = said(role, with_attachments(text, files)) if role else []
    else:
        is_detailed = export.name == "open-webui" and not any(_kind(export, one).call for one in blocks)
        parts = _details(text) if is_detailed else (part for one in blocks for part in _parts(one, _kind(export, one)))
        messages = answered(parts) or said(role, text)
    return dated(messages, at)


def _role(export: Export, value: Any) -> str:
    known = None
    if isinstance(value, str | bool | None):
        name = "true" if value is True else text_or_empty(value)
        known = name if export.roles is None else export.roles.get(name, export.roles.get("*"))
    if known is None:
        raise BadImport(f"nobody knows who {str(value)[:60]!r} is")
    return known


def _kind(export: Export, block: dict[str, Any]) -> AnswerPart:
    return export.kinds.get(text_or_empty(block.get("type")), AnswerPart())


def _parts(block: dict[str, Any], kind: AnswerPart) -> Iterator[str | ToolCall | Message]:
    call_id, holder = _text_at(block, kind.id), kind.call.rpartition(".")[0]
    if kind.say:
        yield _text(block.get(kind.say))
    if kind.show:
        yield named(kind.show)
    if kind.call and (not holder or isinstance(block.get(holder), dict)):
        arguments = next(_at(block, kind.arguments), None)
        written = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        yield ToolCall(call_id, _text_at(block, kind.call), written)
    if kind.result:
        result = _text(next(_at(block, kind.result), None))
        yield Message("tool", result, tool_call_id=call_id, name=_text_at(block, kind.name))


def _text(value: Any) -> str:
    """Return the text of a string, an object, or the parts of a list; a part without text is a file."""
    if isinstance(value, list):
        return "\n".join(_text(part) or named("file") for part in value if isinstance(part, dict))
    if isinstance(value, dict):
        return text_or_empty(value.get("text")) or text_or_empty(value.get("value"))
    return text_or_empty(value)


def _attached(members: Members, paths: str, name: str, text: str = "") -> list[str]:
    """Return the text that replaces each file, followed by the file's own text if the export has it; a file listed
    twice is returned once."""
    found: dict[tuple[str, str], None] = {}
    for files in map(_plain, _at(members, paths)):
        for one in files if isinstance(files, list) else ():
            if isinstance(one, dict):
                words = named("image" if one.get("type") == "image" else "file", one.get(name))
                found[words, with_line_feeds(_text_at(one, text)).strip()] = None
    with_text = {words for words, content in found if content}
    return [f"{words}\n{content}".strip() for words, content in found if content or words not in with_text]


def _at(members: Members, paths: str) -> Iterator[Any]:
    """Yield the values at each of the paths, except null; as raw as they are within `members`."""
    for path in filter(None, paths.split("|")):
        value: Any = members
        for name in path.split("."):
            if isinstance(value, Raw):
                value = OBJECT.decode(value) if is_object(value) else None
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None and value != Raw(b"null"):
            yield value


_ANYTHING = msgspec.json.Decoder(float_hook=float)  # without the hook it rejects numbers such as 1e999


def _plain(value: Any) -> Any:
    return _ANYTHING.decode(value) if isinstance(value, Raw) else value


def _value(members: Members, paths: str) -> Any:
    return next((one for one in map(_plain, _at(members, paths)) if one != ""), None)


def _text_at(members: Members, paths: str) -> str:
    return text_or_empty(_value(members, paths))


def _id(members: Members, path: str) -> str:
    value = _value(members, path)
    if not isinstance(value, str | None):
        raise BadImport(f"its {path} is no text")
    return value or ""


# Formats that paths cannot describe

_THOUGHTS = frozenset({"thoughts", "reasoning_recap", "user_editable_context", "model_editable_context"})
_CITATIONS = re.compile("\ue200[^\ue201]{0,400}\ue201|【\\d+[†:][^】]{0,200}】")
_POINTERS = {"image_asset_pointer": "image", "audio_asset_pointer": "audio"}
_DETAILS = re.compile(
    r'<details type="(\w{1,40})"((?:(?!<details)[^>]){0,200000})>(?:(?!<details).)*?</details>', re.DOTALL
)
_ATTRIBUTE = re.compile(r'(\w{1,40})="([^"]*)"')


def _of_chatgpt(members: Members, _: Raw, role: str) -> list[Message]:
    content = _value(members, "content")
    if not role or not isinstance(content, dict):
        raise BadImport("it has no author, or no content")
    is_hidden = _value(members, "metadata.is_visually_hidden_from_conversation")
    if role == "system" or _text_at(content, "content_type") in _THOUGHTS or is_hidden:
        return []
    parts = content.get("parts")
    if isinstance(parts, list):
        text = _CITATIONS.sub("", "\n".join(filter(None, map(_part_of_chatgpt, parts))))
    else:
        text = _text_at(content, "text|result")
    text = with_attachments(text, _attached(members, "metadata.attachments", "name")).strip()
    recipient = _text_at(members, "recipient")
    if text and role == "assistant" and recipient not in ("", "all"):
        return [Message(role, "", (ToolCall("", recipient, text),))]
    name = _text_at(members, "author.name") if role == "tool" else ""
    return [Message(role, text, name=name)] if text else []


def _part_of_chatgpt(part: Any) -> str:
    if not isinstance(part, dict):
        return text_or_empty(part)
    spoken = text_or_empty(part.get("text"))  # a transcript
    return spoken or named(_POINTERS.get(text_or_empty(part.get("content_type")), "file"))


def _of_sharegpt(members: Members, _: Raw, role: str) -> list[Message]:
    value = _text_at(members, "value")
    if role == "call" and value.strip():
        call = OBJECT.decode(value)
        arguments = bytes(call.get("arguments", b"{}")).decode()
        return [Message("assistant", "", (ToolCall("", _id(call, "name"), arguments),))]
    return said(role, value) if role else []


_SAID_IN_SLACK = frozenset({"", "bot_message", "file_share", "me_message", "thread_broadcast"})
"""Subtypes of messages that people wrote; others report who joined a channel, and the like."""
_MENTION = re.compile(r"<@(\w{1,40})(?:\|[^<>]{0,200})?>")


def _of_slack(members: Members, _: Raw, role: str) -> list[Message]:
    if _text_at(members, "subtype") not in _SAID_IN_SLACK:
        return []
    text = with_attachments(_text_at(members, "text"), _attached(members, "files", "name"))
    return [msgspec.structs.replace(one, name=_text_at(members, "user|username")) for one in said("user", text)]


def with_names(thread: Thread, names: Mapping[str, str]) -> Thread:
    """Return a conversation of Slack with people's names instead of their ids."""

    def named_in(text: str) -> str:
        return html.unescape(_MENTION.sub(lambda found: f"@{names.get(found[1], found[1])}", text))

    messages = [
        msgspec.structs.replace(one, name=names.get(one.name, one.name), text=named_in(one.text))
        for one in thread.messages
    ]
    return msgspec.structs.replace(thread, messages=messages)


def _of_openai(_: Members, raw: Raw, role: str) -> list[Message]:
    if not role:
        raise BadImport("it has no role")
    return [chat.parse_message(raw)]


def _details(text: str) -> Iterator[str | ToolCall | Message]:
    done = 0
    for found in _DETAILS.finditer(text):
        yield text[done : found.start()].strip()
        done = found.end()
        attributes = {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(found[2])}
        if found[1] == "tool_calls" and "name" in attributes:
            call_id = attributes.get("id", "")
            yield ToolCall(call_id, attributes["name"], _unquoted(attributes.get("arguments", "")))
            yield Message("tool", _unquoted(attributes.get("result", "")), tool_call_id=call_id)
    yield text[done:].strip()


def _unquoted(text: str) -> str:
    """Return the string in a JSON text, the format of these attributes; other text unchanged."""
    try:
        value = msgspec.json.decode(text)
    except UNREADABLE:
        return text
    return value if isinstance(value, str) else text


_READ: Mapping[str, Callable[[Members, Raw, str], list[Message]]] = {
    "chatgpt": _of_chatgpt,
    "sharegpt": _of_sharegpt,
    "slack": _of_slack,
    "openai": _of_openai,
}
"""Readers of messages that paths cannot describe, by format."""


# Sessions

_OWN = "isMeta", "isCompactSummary", "isApiErrorMessage"
_OWN_WORDS = ("<command-name>", "<command-message>", "<local-command-", "<bash-input>", "<bash-stdout>")


class _Element(Node):
    blocks: list[Raw] = msgspec.field(default_factory=list)
    """Blocks of an answer, whose lines are joined at the end."""
    said_at: int | None = None
    answers: str = ""
    """For results, the id of the answer with the calls."""


class ClaudeCodeSession:
    """Reads the lines of one file."""

    def __init__(self, dating: Dating) -> None:
        self._dating = dating
        self._elements: dict[str, _Element] = {}
        self._keys: dict[str, str | None] = {}
        """By uuid of each line, the element that it or an earlier line belongs to."""
        self._id = self._folder = ""
        self._leaf: str | None = None

    def add(self, line: bytes) -> None:
        """Add a line. Raises BadImport, BadRequestBody, UNREADABLE: it is invalid."""
        event = OBJECT.decode(line)
        self._id = self._id or "/".join(filter(None, (_text_at(event, "sessionId"), _text_at(event, "agentId"))))
        self._folder = self._folder or _text_at(event, "cwd")
        parent = self._keys.get(_text_at(event, "parentUuid|logicalParentUuid"))
        key = None
        try:
            if _text_at(event, "type") in ("user", "assistant") and not _is_own(event):
                key = self._placed(event, parent)
        finally:
            if uuid := _text_at(event, "uuid"):
                self._keys[uuid] = key or parent
        if key is not None and not _value(event, "isSidechain"):
            self._leaf = key

    def thread(self) -> Thread:
        """Return the conversation. Raises BadImport: none of it can be read; EmptyImport: it has no text."""
        problems: list[str] = []
        for element in self._elements.values():
            try:
                if element.blocks:
                    element.messages = _of_blocks("assistant", element.blocks, element.said_at)
            except (*UNREADABLE, BadRequestBody) as error:
                problems.append(f"answer {element.id[:60]!r} cannot be read: {error}")
        elements = self._elements.values()
        return thread_of("claude-code", self._id, elements, self._leaf, folder=self._folder, problems=problems)

    def _placed(self, event: Members, parent: str | None) -> str:
        """Add a line's blocks to their element; return its key."""
        at = self._dating.first_time([_value(event, "timestamp")])
        content = next(_at(event, "message.content"), Raw(b'""'))
        if is_list(content):
            blocks = [Raw(bytes(block)) for block in LIST.decode(content)]
        else:
            blocks = [Raw(msgspec.json.encode({"type": "text", "text": content}))]
        own_id = _text_at(event, "uuid") or f"line {len(self._elements)}"
        if _text_at(event, "type") == "assistant":
            key = _id(event, "message.id") or own_id
            self._elements.setdefault(key, _Element(key, parent, said_at=at)).blocks += blocks
            return key
        messages = _of_blocks("user", blocks, at)
        before = self._elements.get(parent or "")
        if before is not None and messages and all(message.role == "tool" for message in messages):
            answers = before.answers or before.id
            key = f"results of {answers}"
            results = self._elements.setdefault(key, _Element(key, answers, answers=answers))
            results.messages = [*results.messages, *messages]
            return key
        if own_id in self._elements:
            raise BadImport(f"the id {own_id[:60]!r} is there twice")
        self._elements[own_id] = _Element(own_id, parent, messages)
        return own_id


def _is_own(event: Members) -> bool:
    """Return True if Claude Code generated a message itself."""
    if any(_value(event, name) for name in _OWN) or _text_at(event, "message.model") == "<synthetic>":
        return True
    content = next(_at(event, "message.content"), Raw())
    return is_string(content) and TEXT.decode(content).lstrip().startswith(_OWN_WORDS)


def _of_blocks(role: str, blocks: list[Raw], at: int | None) -> list[Message]:
    """Return the messages of an element of the API: each result in it, and the rest."""
    whole = Raw(msgspec.json.encode({"role": role, "content": blocks}))
    messages = [anthropic.parse_message(piece) for piece in anthropic.pieces_of(whole)]
    return dated((one for one in messages if one.text.strip() or one.tool_calls), at)


_ITEMS = "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"
"""Items with text; others are reasoning, and calls of tools run by the model's provider."""


class CodexSession:
    """Reads the lines of one file."""

    def __init__(self, dating: Dating) -> None:
        self._dating = dating
        self._id = self._folder = ""
        self._items: list[tuple[Raw, int | None]] = []
        """Items with their times."""

    def add(self, line: bytes) -> None:
        """Add a line. Raises UNREADABLE: it is invalid."""
        event = OBJECT.decode(line)
        kind, item = _text_at(event, "type"), event.get("payload")
        if kind == "session_meta" and item is not None:
            self._id = self._id or _text_at(event, "payload.id")
            self._folder = self._folder or _text_at(event, "payload.cwd")
            return
        if not kind:
            self._id = self._id or _text_at(event, "id")
        elif item is not None and kind != "response_item":
            return
        item = Raw(line) if item is None else item
        if _text_at(OBJECT.decode(item), "type") in _ITEMS:
            self._items.append((Raw(bytes(item)), self._dating.first_time([_value(event, "timestamp")])))

    def thread(self) -> Thread:
        """Return the conversation; for the errors see `ClaudeCodeSession.thread`."""
        messages: list[Message] = []
        problems: list[str] = []
        times = (at for _, at in self._items)
        for group in grouped(item for item, _ in self._items):
            at, *_ = islice(times, len(LIST.decode(b"[%b]" % bytes(group))))
            try:
                messages += dated([parse_items(group)], at)
            except (*UNREADABLE, BadRequestBody) as error:
                problems.append(f"an item cannot be read: {error}")
        return thread_of("codex", self._id, straight(messages), folder=self._folder, problems=problems)


AIDER_STARTED = "# aider chat started at "
_USER, _TOLD = "#### ", ">"
_COMMAND = re.compile(r"\s*(?:/(?:ask|code|architect|context)\s+(?P<said>.*)|[/!].*)", re.DOTALL)
_BLANK = "<blank>"


def aider_threads(lines: Iterable[bytes], folder: str, dating: Dating) -> Iterator[Thread]:
    """Read a history; yield its chats, without empty ones. `folder`: the name of its folder."""
    started = ""
    texts = (raw.decode(errors="replace").removeprefix("\ufeff") for raw in lines)
    for begins, some in groupby(texts, lambda line: line.startswith(AIDER_STARTED)):
        if begins:
            *_, last = some
            started = last.removeprefix(AIDER_STARTED).strip()
        elif messages := [message for role, own in groupby(some, _aider_role) for message in _of_aider(role, own)]:
            name = "/".join(part for part in (folder.rstrip("/").rpartition("/")[2], started) if part)
            yield thread_of("aider", name, straight(messages), begun=dating.first_time([started]), folder=folder)


def _aider_role(line: str) -> str:
    if not line.endswith("  "):
        return "assistant"
    return "user" if line.startswith(_USER) else "" if line.startswith(_TOLD) else "assistant"


def _of_aider(role: str, lines: Iterable[str]) -> list[Message]:
    kept: list[str] = []
    size = 0
    for line in lines if role else ():
        size += len(line.encode())
        if size > ITEM_BYTES_MAX:
            raise BadImport(f"a message of it has more than {ITEM_BYTES_MAX:,} bytes")
        kept.append(line.removeprefix(_USER if role == "user" else "").rstrip())
    text = "\n".join(kept).strip()
    if role == "user":
        command = _COMMAND.fullmatch(text)
        text = (command["said"] or "") if command else "" if text == _BLANK else text
    return said(role, text)
