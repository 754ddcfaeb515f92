"""The sessions of coding agents, whose lines are conversations together; `assets/exports.toml` says what the lines are.

Rule: pure. Left out is all that was not said: what a program writes by itself, its commands, events that repeat items.
Messages are read as the API has them that the agent speaks: those of a session that went through memd are known again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from memd.errors import BadImport, BadRequestBody
from memd.ingest.imports.items import ITEM_BYTES_MAX
from memd.ingest.imports.threads import Dating, Node, Thread, said, straight, thread_of
from memd.messages import Message
from memd.wire.anthropic import parse_message, pieces_of
from memd.wire.lenient_json import LIST, TEXT, UNREADABLE, is_list, is_string, text_or_empty
from memd.wire.responses import grouped, parse_items

_OWN_WORDS = ("<command-name>", "<command-message>", "<local-command-", "<bash-input>", "<bash-stdout>")


class _SentMessage(msgspec.Struct):
    role: str = ""
    content: Raw = Raw(b'""')
    id: str | None = None
    model: Any = None


class _SessionLine(msgspec.Struct, rename="camel"):
    """The members that memd reads, of any type: other kinds of lines have what they like."""

    type: Any = None
    uuid: Any = None
    parent_uuid: Any = None
    logical_parent_uuid: Any = None
    session_id: Any = None
    agent_id: Any = None
    cwd: Any = None
    timestamp: Any = None
    message: Raw = Raw(b"{}")
    is_sidechain: Any = None
    is_meta: Any = None
    is_compact_summary: Any = None
    is_api_error_message: Any = None


class _Element(Node):
    """A message of the API, put together."""

    blocks: list[Raw] = msgspec.field(default_factory=list)
    """Of an answer, whose lines are put together at the end."""
    said_at: int | None = None
    answers: str = ""
    """Of results: the id of the answer with the calls."""


_session_decoder = msgspec.json.Decoder(_SessionLine)
_sent_decoder = msgspec.json.Decoder(_SentMessage)


class ClaudeCodeSession:
    """Reads the lines of one file."""

    def __init__(self, dating: Dating) -> None:
        self._dating = dating
        self._elements: dict[str, _Element] = {}
        self._keys: dict[str, str | None] = {}
        """For each line's uuid the element that it belongs to, or that the lines before it belong to."""
        self._id = self._folder = ""
        self._leaf: str | None = None

    def add(self, line: bytes) -> None:
        """Take a line.

        Raises:
            BadImport, BadRequestBody, UNREADABLE: it is none.
        """
        event = _session_decoder.decode(line)
        self._id = self._id or "/".join(filter(None, map(text_or_empty, (event.session_id, event.agent_id))))
        self._folder = self._folder or text_or_empty(event.cwd)
        parent = self._keys.get(text_or_empty(event.parent_uuid) or text_or_empty(event.logical_parent_uuid))
        key = None
        try:
            if event.type in ("user", "assistant"):
                sent = _sent_decoder.decode(event.message)
                if not self._is_own(event, sent):
                    key = self._placed(event, sent, parent)
        finally:
            if uuid := text_or_empty(event.uuid):
                self._keys[uuid] = key or parent
        if key is not None and not event.is_sidechain:
            self._leaf = key

    def thread(self) -> Thread:
        """The conversation.

        Raises:
            BadImport: nothing of it can be read.
            EmptyImport: nothing was said.
        """
        problems: list[str] = []
        for element in self._elements.values():
            try:
                if element.blocks:
                    element.messages = _messages("assistant", element.blocks, element.said_at)
            except (*UNREADABLE, BadRequestBody) as error:
                problems.append(f"answer {element.id[:60]!r} cannot be read: {error}")
        elements = self._elements.values()
        return thread_of("claude-code", self._id, elements, self._leaf, folder=self._folder, problems=problems)

    def _is_own(self, event: _SessionLine, sent: _SentMessage) -> bool:
        """Whether Claude Code wrote a message by itself."""
        if event.is_meta or event.is_compact_summary or event.is_api_error_message or sent.model == "<synthetic>":
            return True
        return is_string(sent.content) and TEXT.decode(sent.content).lstrip().startswith(_OWN_WORDS)

    def _placed(self, event: _SessionLine, sent: _SentMessage, parent: str | None) -> str:
        """Put a line's blocks where they belong; return the element's key."""
        at = self._dating.first_time([event.timestamp])
        if is_list(sent.content):
            blocks = [Raw(bytes(block)) for block in LIST.decode(sent.content)]
        else:
            blocks = [Raw(msgspec.json.encode({"type": "text", "text": sent.content}))]
        own_id = text_or_empty(event.uuid) or f"line {len(self._elements)}"
        if event.type == "assistant":
            key = sent.id or own_id
            self._elements.setdefault(key, _Element(key, parent, said_at=at)).blocks += blocks
            return key
        messages = _messages("user", blocks, at)
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


def _messages(role: str, blocks: list[Raw], at: int | None) -> list[Message]:
    """The messages of an element of the API: the results in it, one by one, and the rest."""
    whole = Raw(msgspec.json.encode({"role": role, "content": blocks}))
    messages = [parse_message(piece) for piece in pieces_of(whole)]
    said_at = UNSET if at is None else at
    return [msgspec.structs.replace(one, said_at=said_at) for one in messages if one.text.strip() or one.tool_calls]


_ITEMS = frozenset(
    {b'"message"', b'"function_call"', b'"function_call_output"', b'"custom_tool_call"', b'"custom_tool_call_output"'}
)
"""The items that have words in them: the others are reasoning, and calls of tools that the model's maker runs."""


class _RolloutLine(msgspec.Struct):
    type: str = ""
    timestamp: Any = None
    payload: Raw = Raw()
    id: Any = None


class _RolloutMeta(msgspec.Struct):
    id: Any = None
    cwd: Any = None


class _RolloutKind(msgspec.Struct):
    type: Raw = Raw()


_rollout_decoder = msgspec.json.Decoder(_RolloutLine)
_meta_decoder = msgspec.json.Decoder(_RolloutMeta)
_kind_decoder = msgspec.json.Decoder(_RolloutKind)


class CodexSession:
    """Reads the lines of one file."""

    def __init__(self, dating: Dating) -> None:
        self._dating = dating
        self._id = self._folder = ""
        self._items: list[Raw] = []
        self._times: list[int | None] = []

    def add(self, line: bytes) -> None:
        """Take a line.

        Raises:
            UNREADABLE: it is none.
        """
        event = _rollout_decoder.decode(line)
        if event.type == "session_meta" and bytes(event.payload):
            meta = _meta_decoder.decode(event.payload)
            self._id, self._folder = self._id or text_or_empty(meta.id), self._folder or text_or_empty(meta.cwd)
            return
        has_frame = bool(bytes(event.payload))
        item = event.payload if has_frame else Raw(line)
        if not event.type:
            self._id = self._id or text_or_empty(event.id)
        elif has_frame and event.type != "response_item":
            return
        if bytes(_kind_decoder.decode(item).type) in _ITEMS:
            self._items.append(Raw(bytes(item)))
            self._times.append(self._dating.first_time([event.timestamp]))

    def thread(self) -> Thread:
        """The conversation; raises as that of Claude Code."""
        messages: list[Message] = []
        problems: list[str] = []
        times = iter(self._times)
        for group in grouped(self._items):
            at, *_ = islice(times, len(LIST.decode(b"[%b]" % bytes(group))))
            try:
                messages.append(msgspec.structs.replace(parse_items(group), said_at=UNSET if at is None else at))
            except (*UNREADABLE, BadRequestBody) as error:
                problems.append(f"an item cannot be read: {error}")
        return thread_of("codex", self._id, straight(messages), folder=self._folder, problems=problems)


AIDER_STARTED = "# aider chat started at "
_USER, _OWN = "#### ", ">"
_COMMAND = re.compile(r"\s*(?:/(?:ask|code|architect|context)\s+(?P<said>.*)|[/!].*)", re.DOTALL)
_BLANK = "<blank>"


def aider_threads(lines: Iterable[bytes], folder: str, dating: Dating) -> Iterator[Thread]:
    """Read a history, chat by chat; one in which nothing was said gives none.

    Args:
        folder: the name of the folder that it lies in.
    """
    started, chat = "", _AiderChat()
    for raw in chain(lines, [AIDER_STARTED.encode()]):
        line = raw.decode(errors="replace").removeprefix("\ufeff")
        if not line.startswith(AIDER_STARTED):
            chat.add(line, len(raw))
            continue
        if messages := chat.messages():
            name = "/".join(part for part in (folder.rstrip("/").rpartition("/")[2], started) if part)
            yield thread_of("aider", name, straight(messages), begun=dating.first_time([started]), folder=folder)
        started, chat = line.removeprefix(AIDER_STARTED).strip(), _AiderChat()


class _AiderChat:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._role = ""
        self._lines: list[str] = []
        self._size = 0

    def add(self, line: str, size: int) -> None:
        ends = line.endswith("  ")
        role = "user" if line.startswith(_USER) and ends else "" if line.startswith(_OWN) and ends else "assistant"
        if role != self._role and (line.strip() or self._role != "assistant"):
            self._flush()
            self._role = role
        text = line.rstrip() if role == "assistant" else line.removeprefix(_USER).rstrip()
        self._size += size
        if self._size > ITEM_BYTES_MAX:
            raise BadImport(f"a message of it has more than {ITEM_BYTES_MAX:,} bytes")
        self._lines.append(text)

    def messages(self) -> list[Message]:
        self._flush()
        return self._messages

    def _flush(self) -> None:
        text = "\n".join(self._lines).strip()
        if self._role == "user":
            command = _COMMAND.fullmatch(text)
            text = (command["said"] or "") if command else "" if text == _BLANK else text
        if self._role:
            self._messages += said(self._role, text)
        self._lines, self._size = [], 0
