"""The log as conversations, in the forms that other programs read.

Rule: pure. The log has chunks: messages are put together again from their speakers, word for word; calls of tools stay
spelled out as text. An imported conversation is one by its source. Which live conversation a turn was said in is not in
the log: turns of a topic with less than `PAUSE_US` between them count as one. Notes and documents are no conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from memd.entries import Entry

PAUSE_US = 3_600_000_000
"""An hour."""
TITLE_CHARACTERS_MAX = 60


class ToldMessage(msgspec.Struct):
    """One message."""

    role: str
    text: str
    at: int
    """Microseconds since the epoch; that of its chunk."""


class Told(msgspec.Struct, frozen=True):
    """One conversation."""

    id: str
    topic_id: str
    messages: list[ToldMessage]

    @property
    def title(self) -> str:
        """The first words of it."""
        first = next((one.text for one in self.messages if one.role == "user"), self.messages[0].text)
        words = " ".join(first.split())
        return words if len(words) <= TITLE_CHARACTERS_MAX else words[:TITLE_CHARACTERS_MAX].rstrip() + " …"

    @property
    def seconds(self) -> float:
        """The time of its first message, in seconds since the epoch."""
        return self.messages[0].at / 1e6


def conversations(entries: Iterable[Entry], topic_id: str) -> Iterator[Told]:
    """Put the live entries of one topic together, in the order in which conversations began."""
    ordered = sorted((entry for entry in entries if entry.kind == "turn"), key=lambda entry: entry.origin_id)
    groups: dict[str, list[Entry]] = {}
    last, number = 0, 0
    for entry in ordered:
        key = entry.source
        if key is None:
            number += _said_at(entry) - last > PAUSE_US
            last = _said_at(entry)
            key = f"{topic_id}-{number}"
        groups.setdefault(key, []).append(entry)
    for key, chunks in groups.items():
        if messages := _messages(chunks):
            name = hashlib.blake2b(f"{topic_id}\0{key}".encode(), digest_size=16).hexdigest()
            yield Told(name, topic_id, messages)


def _said_at(entry: Entry) -> int:
    return entry.created_at if entry.said_at is msgspec.UNSET else entry.said_at


def _messages(chunks: Sequence[Entry]) -> list[ToldMessage]:
    messages: list[ToldMessage] = []
    for entry in chunks:
        at, roles = _said_at(entry), entry.roles or ("user",)
        speakers = entry.speakers or ()
        ends = [*(speaker.offset for speaker in speakers), len(entry.content)]
        if ends[0]:  # before the first speaker, or without any: the text of a correction
            messages.append(ToldMessage(roles[0], entry.content[: ends[0]], at))
        for speaker, (start, end) in zip(speakers, pairwise(ends), strict=True):
            text = entry.content[start:end]
            if end < len(entry.content):
                text = text.removesuffix("\n")  # the joint between two messages
            if speaker.continues and messages and messages[-1].role == speaker.role:
                messages[-1].text += text
            else:
                messages.append(ToldMessage(speaker.role, text, at))
    return [one for one in messages if one.text.strip()]


# -- forms ----------------------------------------------------------------------------------------------------------


def _openai(told: Told) -> dict[str, Any]:
    return {
        "id": told.id,
        "topic_id": told.topic_id,
        "title": told.title,
        "messages": [
            {"role": one.role, "content": one.text, "timestamp": one.at / 1e6}
            | ({"tool_call_id": ""} if one.role == "tool" else {})
            for one in told.messages
        ],
    }


def _sharegpt(told: Told) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    said = [{"from": names.get(one.role, one.role), "value": one.text} for one in told.messages]
    return {"id": told.id, "conversations": said}


def _chatgpt(told: Told) -> dict[str, Any]:
    """As Open WebUI and LibreChat import it: a root without a message, and a chain below it."""
    names = ["root", *(f"{told.id}-{place}" for place in range(len(told.messages)))]
    mapping: dict[str, Any] = {"root": {"id": "root", "message": None, "parent": None, "children": names[1:2]}}
    for place, (name, one) in enumerate(zip(names[1:], told.messages, strict=True), 1):
        message = {
            "id": name,
            "author": {"role": one.role, "name": None, "metadata": {}},
            "create_time": one.at / 1e6,
            "content": {"content_type": "text", "parts": [one.text]},
            "metadata": {},
            "recipient": "all",
        }
        mapping[name] = {"id": name, "message": message, "parent": names[place - 1], "children": names[place + 1 :][:1]}
    return {
        "id": told.id,
        "conversation_id": told.id,
        "title": told.title,
        "create_time": told.seconds,
        "mapping": mapping,
        "current_node": names[-1],
    }


def _open_webui(told: Told) -> dict[str, Any]:
    names = [f"{told.id}-{place}" for place in range(len(told.messages))]
    messages = [
        {
            "id": name,
            "parentId": names[place - 1] if place else None,
            "childrenIds": names[place + 1 :][:1],
            "role": "user" if one.role == "user" else "assistant",
            "content": one.text,
            "timestamp": one.at // 1_000_000,
            "done": True,
        }
        for place, (name, one) in enumerate(zip(names, told.messages, strict=True))
    ]
    history = {"currentId": names[-1], "messages": {one["id"]: one for one in messages}}
    chat = {"title": told.title, "models": [""], "history": history, "messages": messages, "tags": []}
    times = {"created_at": int(told.seconds), "updated_at": told.messages[-1].at // 1_000_000}
    return {"id": told.id, "title": told.title, "chat": chat, **times}


Form = Callable[[Told], dict[str, Any]]
FORMS: dict[str, tuple[Form, bool]] = {
    "openai": (_openai, True),
    "sharegpt": (_sharegpt, False),
    "chatgpt": (_chatgpt, False),
    "open-webui": (_open_webui, False),
}
"""By name: how a conversation is written, and whether each is a line; else all are one array."""


def written(told: Iterable[Told], form: str) -> Iterator[bytes]:
    """Encode conversations, piece by piece."""
    encode, is_lines = FORMS[form]
    before = b"" if is_lines else b"["
    for one in told:
        yield before + msgspec.json.encode(encode(one)) + (b"\n" if is_lines else b"")
        before = b"" if is_lines else b",\n"
    if not is_lines:
        yield (before if before == b"[" else b"") + b"]\n"
