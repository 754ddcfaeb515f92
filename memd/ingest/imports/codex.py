"""Codex's session files: `~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl`, a line for each item.

    {"timestamp", "type": "session_meta", "payload": {"id", "cwd"}}
    {"timestamp", "type": "response_item", "payload": an item of the responses API}

As `RolloutLine` and `RolloutItem` in codex-rs/protocol/src/protocol.rs of openai/codex have it; kvsankar/agent-history
describes it. Files of before September 2025 have the items themselves as lines, behind one with
`id`, `timestamp` and `instructions`.

Rule: pure. Events repeat items, and are left out. Items are read as the responses API has
them, so that a session that went through memd is known again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.ingest.dates import Dating
from memd.ingest.imports.threads import Thread, straight, thread_of
from memd.messages import Message
from memd.wire.lenient_json import UNREADABLE, text_or_empty
from memd.wire.responses.items import grouped, parse_items

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


_decoder = msgspec.json.Decoder(_RolloutLine)
_meta_decoder = msgspec.json.Decoder(_RolloutMeta)
_kind_decoder = msgspec.json.Decoder(_RolloutKind)


def is_one(members: Mapping[str, Raw]) -> bool:
    """Whether an object with these members is a line of a session."""
    if {"timestamp", "type", "payload"} <= members.keys():
        return True
    return {"id", "timestamp", "instructions"} <= members.keys() and "messages" not in members


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
        event = _decoder.decode(line)
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

    def threads(self) -> Iterator[Thread]:
        """Yield the conversation, if anything was said.

        Raises:
            BadImport: nothing of it can be read.
        """
        messages: list[Message] = []
        problems: list[str] = []
        times = iter(self._times)
        for group in grouped(self._items):
            try:
                message = parse_items(group)
                at = next(times)
                for _ in range(len(msgspec.json.decode(b"[%b]" % bytes(group), type=list[Raw])) - 1):
                    next(times)
                messages.append(message if at is None else msgspec.structs.replace(message, said_at=at))
            except (*UNREADABLE, BadRequestBody) as error:
                problems.append(f"an item cannot be read: {error}")
        if messages or problems:
            yield thread_of("codex", self._id, straight(messages), folder=self._folder, problems=problems)
