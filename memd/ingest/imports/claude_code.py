"""Claude Code's sessions: `~/.claude/projects/*/SESSION.jsonl`, a line for each event.

    {"type": "user" or "assistant", "uuid", "parentUuid", "sessionId", "cwd", "timestamp", "isSidechain", "isMeta",
     "message": {"role", "id", "content": as in Anthropic's API}}

Not documented by Anthropic beyond docs.claude.com/en/docs/claude-code/sdk/sdk-sessions; the lines are as
alicoding/claude-parser (JSONL-STRUCTURE.md) and yongkangc/claude-ui (knowledge/example-cc-config-folder.md) found
them. An answer is written block by block, each on a line with the id of the answer, and each result of its calls names
the line of its call as its parent: lines of one answer become one message again, and its results follow each other.

Rule: pure. Left out is all that was not said: what Claude Code writes by itself (`isMeta`, summaries of what is there
in full, errors, the output of its own commands). Messages are read as Anthropic's API has them: those of a session that
went through memd are known again. A subagent's session (`agent-*.jsonl`) is a conversation of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from memd.errors import BadImport, BadRequestBody
from memd.ingest.dates import Dating
from memd.ingest.imports.threads import Node, Thread, thread_of
from memd.messages import Message
from memd.wire.anthropic.message import parse_message, pieces_of
from memd.wire.lenient_json import UNREADABLE, is_list, is_string, text_or_empty

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


class _ApiElement(msgspec.Struct):
    """A message of the API, put together."""

    node: Node
    blocks: list[Raw] = []
    """Of an answer, whose lines are put together at the end."""
    said_at: int | None = None
    answers: str | None = None
    """Of results: the key of the answer with the calls."""


_decoder = msgspec.json.Decoder(_SessionLine)
_sent_decoder = msgspec.json.Decoder(_SentMessage)
_string_decoder = msgspec.json.Decoder(str)
_list_decoder = msgspec.json.Decoder(list[Raw])


def is_one(members: Mapping[str, Raw]) -> bool:
    """Whether an object with these members is a line of a session."""
    if "sessionId" in members and "type" in members:
        return True
    kind = bytes(members.get("type", b""))
    return (kind == b'"summary"' and "leafUuid" in members) or kind == b'"file-history-snapshot"'


class ClaudeCodeSession:
    """Reads the lines of one file."""

    def __init__(self, dating: Dating) -> None:
        self._dating = dating
        self._elements: dict[str, _ApiElement] = {}
        self._keys: dict[str, str | None] = {}
        """For each line's uuid the element that it belongs to, or that the lines before it belong to."""
        self._id = self._folder = ""
        self._leaf: str | None = None

    def add(self, line: bytes) -> None:
        """Take a line.

        Raises:
            BadImport, BadRequestBody, UNREADABLE: it is none.
        """
        event = _decoder.decode(line)
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

    def threads(self) -> Iterator[Thread]:
        """Yield the conversation, if anything was said.

        Raises:
            BadImport: a message cannot be read.
        """
        problems: list[str] = []
        for element in self._elements.values():
            try:
                if element.blocks:
                    element.node.messages = _messages("assistant", element.blocks, element.said_at)
            except (*UNREADABLE, BadRequestBody) as error:
                problems.append(f"answer {element.node.id[:60]!r} cannot be read: {error}")
        nodes = [element.node for element in self._elements.values()]
        if any(node.messages for node in nodes) or problems:
            yield thread_of("claude-code", self._id, nodes, self._leaf, folder=self._folder, problems=problems)

    def _is_own(self, event: _SessionLine, sent: _SentMessage) -> bool:
        """Whether Claude Code wrote a message by itself."""
        if event.is_meta or event.is_compact_summary or event.is_api_error_message or sent.model == "<synthetic>":
            return True
        return is_string(sent.content) and _string_decoder.decode(sent.content).lstrip().startswith(_OWN_WORDS)

    def _placed(self, event: _SessionLine, sent: _SentMessage, parent: str | None) -> str:
        """Put a line's blocks where they belong; return the element's key."""
        at = self._dating.first_time([event.timestamp])
        if is_list(sent.content):
            blocks = [Raw(bytes(block)) for block in _list_decoder.decode(sent.content)]
        else:
            blocks = [Raw(msgspec.json.encode({"type": "text", "text": sent.content}))]
        own_id = text_or_empty(event.uuid) or f"line {len(self._elements)}"
        if event.type == "assistant":
            answer = self._elements.setdefault(sent.id or own_id, _ApiElement(Node(sent.id or own_id, parent), [], at))
            answer.blocks += blocks
            return answer.node.id
        messages = _messages("user", blocks, at)
        before = self._elements.get(parent or "")
        if before is not None and messages and all(message.role == "tool" for message in messages):
            answers = before.answers or before.node.id
            key = f"results of {answers}"
            results = self._elements.setdefault(key, _ApiElement(Node(key, answers), answers=answers))
            results.node.messages = [*results.node.messages, *messages]
            return key
        if own_id in self._elements:
            raise BadImport(f"the id {own_id[:60]!r} is there twice")
        self._elements[own_id] = _ApiElement(Node(own_id, parent, messages))
        return own_id


def _messages(role: str, blocks: list[Raw], at: int | None) -> list[Message]:
    """The messages of an element of the API: the results in it, one by one, and the rest."""
    whole = Raw(msgspec.json.encode({"role": role, "content": blocks}))
    messages = [parse_message(piece) for piece in pieces_of(whole)]
    said_at = UNSET if at is None else at
    return [msgspec.structs.replace(one, said_at=said_at) for one in messages if one.text.strip() or one.tool_calls]
