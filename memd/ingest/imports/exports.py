"""Reads conversations that programs export as trees or lists of messages, by the table of formats in
`assets/exports.toml`.

Rule: pure. A format says under which members its messages, their ids, parents, speakers and texts are; only what no
path can tell is code. Thoughts and what a program wrote by itself are left out. What cannot be read is named, and the
rest stays.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from memd.assets import words_of
from memd.errors import BadImport, BadRequestBody
from memd.ingest.imports.threads import Answer, Dating, Node, Thread, named, said, thread_of, with_attachments
from memd.messages import Message, ToolCall
from memd.wire.chat import parse_message
from memd.wire.lenient_json import LIST, OBJECT, UNREADABLE, is_list, text_or_empty

Members = Mapping[str, Raw]


class AnswerPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of part of an answer: under which of its members is text, a call and its result."""

    say: str = ""
    show: str = ""
    call: str = ""
    arguments: str = ""
    id: str = ""
    result: str = ""
    name: str = ""


class Export(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One format; the table says what its fields mean."""

    name: str
    title: str
    has: tuple[tuple[str, ...], ...]
    beside: tuple[str, ...] = ()
    messages: str = ""
    id: str = ""
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
    blocks: str = ""
    kinds: Mapping[str, AnswerPart] = {}

    def fits(self, members: Members) -> bool:
        """Whether an object with these members is a conversation of it, or of a session a part of one."""
        return any(all(_is_there(members, one) for one in alternative) for alternative in self.has)


FORMATS = msgspec.convert(words_of("exports")["formats"], tuple[Export, ...])
"""The first that fits is taken."""
OPENAI = FORMATS[-1]


def _is_there(members: Members, told: str) -> bool:
    name, _, begin = told.partition(":")
    if name.startswith("!"):
        return name[1:] not in members
    return name in members and bytes(members[name]).startswith(begin.encode())


def thread_in(export: Export, item: bytes, dating: Dating) -> Thread:
    """Read a conversation.

    Raises:
        BadImport, UNREADABLE: it is none, or cannot be read.
        EmptyImport: it has no text.
    """
    members = OBJECT.decode(item)
    listed = next(_raws(members, export.messages), None)
    if listed is None:
        raise BadImport(f"it has no messages: there is no {export.messages.replace('|', ', nor ')} in it")
    begun = dating.told_time(item)
    if begun is None and export.frame in members:
        begun = dating.told_time(members[export.frame])
    elements: Iterable[tuple[str, Raw]]
    elements = (("", raw) for raw in LIST.decode(listed)) if is_list(listed) else OBJECT.decode(listed).items()
    own_id, leaf = text_or_empty(_value(members, export.id)), text_or_empty(_value(members, export.leaf))
    return thread_of_elements(export, elements, dating, own_id, leaf or None, begun)


def thread_of_elements(
    export: Export,
    elements: Iterable[tuple[str, Raw]],
    dating: Dating,
    own_id: str = "",
    leaf: str | None = None,
    begun: int | None = None,
) -> Thread:
    """Read the messages of a conversation, each behind its id, which is empty where they are a list.

    Raises:
        BadImport, EmptyImport: as `thread_in` does.
    """
    nodes: list[Node] = []
    problems: list[str] = []
    waiting: list[tuple[str, Raw, str | None]] = [(name, raw, None) for name, raw in reversed(list(elements))]
    is_by_id = any(name for name, _, _ in waiting)
    place, before = 0, None
    while waiting:
        name, raw, above = waiting.pop()
        place += 1
        node = Node(name or str(place), None)
        try:
            members = OBJECT.decode(raw)
            node.parent = above or _id(members, export.parent) or (None if name else before)
            node.id = name or _id(members, export.own_id) or node.id
            for children in _raws(members, export.children):
                waiting += [("", child, node.id) for child in reversed(LIST.decode(children))]
            message = members.get(export.message, Raw(b"null")) if export.message else raw
            if bytes(message) != b"null":
                node.messages = _messages(export, message, dating)
        except (*UNREADABLE, BadImport, BadRequestBody) as error:
            problems.append(f"message {repr(name[:60]) if name else f'{place:,}'} cannot be read: {error}")
            if not name:
                continue
        nodes.append(node)
        before = node.id
    # A chat of Open WebUI by itself has no id: that of its first message is as unique.
    own_id = own_id or next((node.id for node in nodes if node.messages and is_by_id), "")
    return thread_of(export.name, own_id, nodes, leaf, begun=begun, problems=problems)


def _messages(export: Export, raw: Raw, dating: Dating) -> list[Message]:
    members = OBJECT.decode(raw)
    at = dating.told_time(raw)
    role = _role(export, _value(members, export.role))
    if (read := _READ.get(export.name)) is not None:
        said_at = UNSET if at is None else at
        return [msgspec.structs.replace(one, said_at=said_at) for one in read(raw, role)]
    text, told = text_or_empty(_value(members, export.text)), _value(members, export.blocks)
    blocks = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    if role != "assistant":
        texts = [_text(one.get(kind.say)) for one in blocks if (kind := _kind(export, one)) and kind.say]
        text = "\n".join(filter(None, texts)) or text
        files = dict.fromkeys(_attached(members, export.files, export.file_name))
        return said(role, with_attachments(text, files), at) if role else []
    answer = Answer(at)
    if export.name == "open-webui" and not any((kind := _kind(export, one)) and kind.call for one in blocks):
        _take_details(answer, text)
    else:
        for one in blocks:
            _add(answer, one, _kind(export, one))
    return answer.messages() or said(role, text, at)


def _role(export: Export, told: Any) -> str:
    known = None
    if isinstance(told, str | bool | None):
        name = "true" if told is True else text_or_empty(told)
        known = name if export.roles is None else export.roles.get(name, export.roles.get("*"))
    if known is None:
        raise BadImport(f"nobody knows who {str(told)[:60]!r} is")
    return known


def _kind(export: Export, block: dict[str, Any]) -> AnswerPart | None:
    return export.kinds.get(text_or_empty(block.get("type")))


def _add(answer: Answer, block: dict[str, Any], kind: AnswerPart | None) -> None:
    if kind is None:
        return
    call_id = text_or_empty(_within(block, kind.id))
    if kind.say:
        answer.say(_text(block.get(kind.say)))
    if kind.show:
        answer.say(named(kind.show))
    holder = kind.call.rpartition(".")[0]
    if kind.call and (not holder or isinstance(block.get(holder), dict)):
        arguments = _within(block, kind.arguments)
        written = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        answer.call(text_or_empty(_within(block, kind.call)), written, call_id)
    if kind.result:
        answer.result(_text(_within(block, kind.result)), call_id, text_or_empty(_within(block, kind.name)))


def _text(value: Any) -> str:
    """The text of a text, of an object that has one, or of the parts of a list; a part without text is a file."""
    if isinstance(value, list):
        return "\n".join(_text(part) or named("file") for part in value if isinstance(part, dict))
    if isinstance(value, dict):
        return text_or_empty(value.get("text")) or text_or_empty(value.get("value"))
    return text_or_empty(value)


def _attached(members: Members, paths: str, name: str) -> Iterator[str]:
    for raw in _raws(members, paths):
        files = msgspec.json.decode(raw)
        for one in files if isinstance(files, list) else ():
            if isinstance(one, dict):
                yield named("image" if one.get("type") == "image" else "file", one.get(name))


def _raws(members: Members, paths: str) -> Iterator[Raw]:
    """The members at each of the paths, but null."""
    for path in filter(None, paths.split("|")):
        *outer, last = path.split(".")
        inner: Members = members
        for name in outer:
            is_object = bytes(inner.get(name, b"")).lstrip()[:1] == b"{"
            inner = OBJECT.decode(inner[name]) if is_object else {}
        if bytes(inner.get(last, b"null")) != b"null":
            yield inner[last]


def _value(members: Members, paths: str) -> Any:
    values = map(msgspec.json.decode, _raws(members, paths))
    return next((one for one in values if one != ""), None)


def _id(members: Members, path: str) -> str:
    value = _value(members, path)
    if not isinstance(value, str | None):
        raise BadImport(f"its {path} is no text")
    return value or ""


def _within(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


# What no path tells

_THOUGHTS = frozenset({"thoughts", "reasoning_recap", "user_editable_context", "model_editable_context"})
_CITATIONS = re.compile("\ue200[^\ue201]{0,400}\ue201|【\\d+[†:][^】]{0,200}】")
_POINTERS = {"image_asset_pointer": "image", "audio_asset_pointer": "audio"}
_DETAILS = re.compile(r'<details type="(\w{1,40})"([^>]{0,200000})>(?:(?!<details).)*?</details>', re.DOTALL)
_ATTRIBUTE = re.compile(r'(\w{1,40})="([^"]*)"')


def _of_chatgpt(raw: Raw, role: str) -> list[Message]:
    members = OBJECT.decode(raw)
    content, hidden = _value(members, "content"), _value(members, "metadata.is_visually_hidden_from_conversation")
    if not role or not isinstance(content, dict):
        raise BadImport("it has no author, or no content")
    if role == "system" or text_or_empty(content.get("content_type")) in _THOUGHTS or hidden:
        return []
    parts = content.get("parts")
    if isinstance(parts, list):
        text = _CITATIONS.sub("", "\n".join(filter(None, map(_part_of_chatgpt, parts))))
    else:
        text = text_or_empty(content.get("text")) or text_or_empty(content.get("result"))
    text = with_attachments(text, _attached(members, "metadata.attachments", "name")).strip()
    recipient = text_or_empty(_value(members, "recipient"))
    if text and role == "assistant" and recipient not in ("", "all"):
        return [Message(role, "", (ToolCall("", recipient, text),))]
    name = text_or_empty(_value(members, "author.name")) if role == "tool" else ""
    return [Message(role, text, name=name)] if text else []


def _part_of_chatgpt(part: Any) -> str:
    if not isinstance(part, dict):
        return text_or_empty(part)
    spoken = text_or_empty(part.get("text"))  # written down
    return spoken or named(_POINTERS.get(text_or_empty(part.get("content_type")), "file"))


def _of_sharegpt(raw: Raw, role: str) -> list[Message]:
    members = OBJECT.decode(raw)
    value = text_or_empty(_value(members, "value"))
    if role == "call" and value.strip():
        call = OBJECT.decode(value)
        arguments = bytes(call.get("arguments", b"{}")).decode()
        return [Message("assistant", "", (ToolCall("", _id(call, "name"), arguments),))]
    return said(role, value) if role else []


def _of_openai(raw: Raw, role: str) -> list[Message]:
    if not role:
        raise BadImport("it has no role")
    return [parse_message(raw)]


def _take_details(answer: Answer, text: str) -> None:
    done = 0
    for found in _DETAILS.finditer(text):
        answer.say(text[done : found.start()].strip())
        done = found.end()
        if found[1] == "tool_calls":
            told = {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(found[2])}
            if "name" in told:
                answer.call(told["name"], _unquoted(told.get("arguments", "")), told.get("id", ""))
                answer.result(_unquoted(told.get("result", "")), told.get("id", ""))
    answer.say(text[done:].strip())


def _unquoted(text: str) -> str:
    """The string in a JSON text, as these attributes have it; any other text as it is."""
    try:
        value = msgspec.json.decode(text)
    except UNREADABLE:
        return text
    return value if isinstance(value, str) else text


_READ: Mapping[str, Callable[[Raw, str], list[Message]]] = {
    "chatgpt": _of_chatgpt,
    "sharegpt": _of_sharegpt,
    "openai": _of_openai,
}
"""By format: reads a message of a role that no paths describe."""
