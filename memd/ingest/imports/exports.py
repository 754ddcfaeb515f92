"""The formats in which programs export conversations as trees or lists of messages, as a table, and one reader of them.

Rule: pure. A format says under which members its messages, their ids, parents, speakers and texts are; only what no
path can tell is code. Thoughts and what a program wrote by itself are left out. What cannot be read is named, and the
rest stays. Paths are members with dots between them; of several with | the first that has something counts.

- ChatGPT: `conversations.json` (a large account gets several), each conversation a tree in `mapping`. Not documented
  by OpenAI; as LibreChat's importer (api/server/utils/import/importers.js and the files in __data__) and Open WebUI's
  (`convertOpenAIMessages` in src/lib/utils/index.ts) read it, and as mitkury/chatgpt-export-parser describes it.
  Words for a tool are a call; the marks of citations are left out.
- Claude: `conversations.json`, an array or JSON Lines. Not documented by Anthropic; as
  portable-ai-memory.org/providers/anthropic and whychose.com/seo/claude-conversation-export-format describe it. An
  unused parent is 00000000-0000-4000-8000-000000000000.
- Open WebUI: an array of chats, as its source has it (`convertOpenAIChats` and `processDetails` in
  src/lib/utils/index.ts); a chat by itself is what stands in `chat`. Calls are in `output`, and else in `<details>`.
- LibreChat: a conversation, flat or nested, as its own importer reads it (`importLibreChatConvo`). An export does not
  say which branch was shown: it is taken for that of the last message.
- ShareGPT: the shape of data for training. The roles are those of FastChat and LLaMA-Factory (data/README.md). Who
  speaks under a name that nobody knows is named, not guessed.
- OpenAI: messages of the chat completions API (https://platform.openai.com/docs/api-reference/chat/create), as an
  array, below `messages`, or one on each line of a file. They are read as they are from a client, so that a
  conversation that went through memd is known again.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from memd.errors import BadImport, BadRequestBody
from memd.ingest.imports.threads import Answer, Dating, Node, Thread, named, said, thread_of, with_attachments
from memd.messages import Message, ToolCall
from memd.wire.chat import parse_message
from memd.wire.lenient_json import UNREADABLE, is_list, text_or_empty

Members = Mapping[str, Raw]
_members_decoder = msgspec.json.Decoder(dict[str, Raw])
_list_decoder = msgspec.json.Decoder(list[Raw])


class AnswerPart(msgspec.Struct, frozen=True):
    """One kind of part of an answer: under which of its members is text, a call and its result."""

    say: str = ""
    show: str = ""
    """The word for something that is no text: `image`."""
    call: str = ""
    """Its name."""
    arguments: str = ""
    id: str = ""
    result: str = ""
    name: str = ""
    """Of the result."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """One format."""

    name: str
    title: str
    """The program's, for people."""
    is_one: Callable[[Members], bool]
    """Whether an object with these members is a conversation of it."""
    messages: str
    """A list of messages, or an object of them by their ids."""
    id: str
    leaf: str = ""
    """The last message of the branch that the program shows."""
    frame: str = ""
    """A member that may have the time of the conversation, if that itself has none."""
    message: str = ""
    """Where a message stands in its element, if that has it as a member."""
    own_id: str = ""
    parent: str = ""
    """Of an element; one that names none follows the one before it, in a list."""
    children: str = ""
    role: str = "role"
    roles: Mapping[object, str] | None = None
    """memd's roles; None: as any other. Without them a role is taken as it is."""
    text: str = ""
    files: str = ""
    file_name: str = "name"
    blocks: str = ""
    kinds: Mapping[str, AnswerPart] = {}
    marked: Callable[[Answer, str], None] | None = None
    """Takes a text apart that has calls in it, where no block is a call."""
    read: Callable[[Raw, str], list[Message]] | None = None
    """Reads a message of this role that is not described by paths."""


def thread_in(export: Export, item: bytes, dating: Dating) -> Thread:
    """Read a conversation.

    Raises:
        BadImport, UNREADABLE: it is none, or cannot be read.
        EmptyImport: it has no text.
    """
    members = _members_decoder.decode(item)
    listed = next(_raws(members, export.messages), None)
    if listed is None:
        raise BadImport(f"it has no messages: there is no {export.messages.replace('|', ', nor ')} in it")
    begun = dating.told_time(item)
    if begun is None and export.frame in members:
        begun = dating.told_time(members[export.frame])
    elements: Iterable[tuple[str, Raw]]
    if is_list(listed):
        elements = (("", raw) for raw in _list_decoder.decode(listed))
    else:
        elements = _members_decoder.decode(listed).items()
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
            members = _members_decoder.decode(raw)
            node.parent = above or _id(members, export.parent) or (None if name else before)
            node.id = name or _id(members, export.own_id) or node.id
            for children in _raws(members, export.children):
                waiting += [("", child, node.id) for child in reversed(_list_decoder.decode(children))]
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
    members = _members_decoder.decode(raw)
    at = dating.told_time(raw)
    role = _role(export, _value(members, export.role))
    if export.read is not None:
        said_at = UNSET if at is None else at
        return [msgspec.structs.replace(one, said_at=said_at) for one in export.read(raw, role)]
    text, told = text_or_empty(_value(members, export.text)), _value(members, export.blocks)
    blocks = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    if role != "assistant":
        texts = [_text(one.get(kind.say)) for one in blocks if (kind := _kind(export, one)) and kind.say]
        text = "\n".join(filter(None, texts)) or text
        files = dict.fromkeys(_attached(members, export.files, export.file_name))
        return said(role, with_attachments(text, files), at) if role else []
    answer = Answer(at)
    if export.marked is not None and not any((kind := _kind(export, one)) and kind.call for one in blocks):
        export.marked(answer, text)
    else:
        for one in blocks:
            _add(answer, one, _kind(export, one))
    return answer.messages() or said(role, text, at)


def _role(export: Export, told: Any) -> str:
    roles, known = export.roles, None
    if isinstance(told, str | bool | None):
        known = text_or_empty(told) if roles is None else roles.get(told, roles.get(None))
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
            inner = _members_decoder.decode(inner[name]) if is_object else {}
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
    members = _members_decoder.decode(raw)
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
    members = _members_decoder.decode(raw)
    value = text_or_empty(_value(members, "value"))
    if role == "call" and value.strip():
        call = _members_decoder.decode(value)
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


# The table


def _is_webui(members: Members) -> bool:
    return bytes(members.get("chat", b"") or members.get("history", b""))[:1] == b"{"


OPENAI = Export(
    name="openai", title="OpenAI messages", is_one=lambda has: "messages" in has,
    messages="messages", id="id|conversation_id", read=_of_openai,
)  # fmt: skip
EXPORTS = (
    Export(
        name="chatgpt", title="ChatGPT",
        is_one=lambda has: "mapping" in has or {"title", "create_time", "default_model_slug"} <= has.keys(),
        messages="mapping", id="conversation_id|id", leaf="current_node", message="message", parent="parent",
        role="author.role", read=_of_chatgpt,
    ),
    Export(
        name="claude", title="Claude", is_one=lambda has: "chat_messages" in has,
        messages="chat_messages", id="uuid", leaf="current_leaf_message_uuid", own_id="uuid",
        parent="parent_message_uuid", role="sender", roles={"assistant": "assistant", None: "user"}, text="text",
        files="attachments|files", file_name="file_name", blocks="content",
        kinds={
            "text": AnswerPart(say="text"),
            "tool_use": AnswerPart(call="name", arguments="input", id="id"),
            "tool_result": AnswerPart(result="content", id="tool_use_id", name="name"),
        },
    ),
    Export(
        name="open-webui", title="Open WebUI", is_one=_is_webui, frame="chat",
        messages="chat.history.messages|history.messages|chat.messages|messages", id="id",
        leaf="chat.history.currentId|history.currentId", parent="parentId", text="content", files="files",
        blocks="output", marked=_take_details,
        kinds={
            "message": AnswerPart(say="content"),
            "function_call": AnswerPart(call="name", arguments="arguments", id="call_id"),
            "function_call_output": AnswerPart(result="output", id="call_id"),
        },
    ),
    Export(
        name="librechat", title="LibreChat",
        is_one=lambda has: "conversationId" in has and not has.keys().isdisjoint({"messages", "messagesTree"}),
        messages="messagesTree|messages", id="conversationId", own_id="messageId", parent="parentMessageId",
        children="children", role="isCreatedByUser", roles={True: "user", False: "assistant", None: "assistant"},
        text="text", files="files", file_name="filename", blocks="content",
        kinds={
            "text": AnswerPart(say="text"),
            "tool_call": AnswerPart(
                call="tool_call.name", arguments="tool_call.args", id="tool_call.id", result="tool_call.output"
            ),
            "image_file": AnswerPart(show="image"),
        },
    ),
    Export(
        name="sharegpt", title="ShareGPT",
        is_one=lambda has: b'"from"' in bytes(has.get("conversations", b""))[:100_000],
        messages="conversations", id="id", role="from", read=_of_sharegpt,
        roles={
            **dict.fromkeys(("human", "user"), "user"),
            **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model"), "assistant"),
            **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
            "function_call": "call", "system": "",
        },
    ),
)  # fmt: skip
"""The first that fits is taken; `OPENAI` after those of agents, whose lines have members in common with it."""
