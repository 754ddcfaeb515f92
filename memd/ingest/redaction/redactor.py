"""Redaction: what of a text may be kept, with `[redacted:NAME]` in place of every secret that a pattern finds.

Rule: pure values in, pure values out; whoever writes to the disk (the journal, the log) asks a `Redactor` first. Text
without secrets comes back unchanged, the very same object. What identifies a message (its digests) is never changed, so
a history that is sent again is recognised.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from memd.conversation.events import Appended, Event, Opened, Placed
from memd.entries import Draft
from memd.ingest.redaction.shapes import BUILT_IN, Find, matches
from memd.messages import LEADING_ROLES, Message, ToolCall
from memd.settings.model import Ingest

MARK_OPENING = "[redacted:"
PSEUDONYM_OPENING = "redacted-"
_PSEUDONYM = re.compile(PSEUDONYM_OPENING + r"[0-9a-f]{16}")
_ROLES = LEADING_ROLES | {"user", "assistant", "tool", "function"}


class Redactor:
    """Patterns that are compiled once. Without any, everything comes back as it is. Thread-safe."""

    def __init__(self, patterns: Mapping[str, Find]) -> None:
        self.names = tuple(patterns)
        self._patterns = patterns
        self._mark = re.compile(r"\[redacted:(" + "|".join(map(re.escape, patterns)) + r")\]")
        self._told: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, settings: Ingest) -> Redactor:
        """What the settings ask for; own patterns come after the built-in ones."""
        if not settings.redact:
            return cls({})
        own = {name: matches(re.compile(pattern)) for name, pattern in settings.redact_patterns.items()}
        return cls({name: find for name, find in BUILT_IN.items() if name in settings.redact_builtin} | own)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def text(self, text: str) -> str:
        """`text` with its secrets replaced. Done twice, the built-in patterns change nothing more."""
        for name, find in self._patterns.items():
            marks = [mark.span() for mark in self._mark.finditer(text)] if MARK_OPENING in text else []
            parts: list[str] = []
            done = 0
            for start, end in find(text):
                while marks and marks[0][1] <= start:
                    marks.pop(0)
                if marks and marks[0][0] <= start and end <= marks[0][1]:
                    continue  # a pattern that fits our own mark
                parts += [text[done:start], f"{MARK_OPENING}{name}]"]
                done = end
            if parts:
                text = "".join([*parts, text[done:]])
        return text

    def arguments(self, arguments: str) -> str:
        """A tool call's arguments; JSON stays JSON, as chat templates read it."""
        redacted = self.text(arguments)
        if redacted == arguments or not _is_json(arguments) or _is_json(redacted):
            return redacted
        return json.dumps({"redacted": redacted}, ensure_ascii=False)

    def identifier(self, name: str) -> str:
        """A name by which something is found again (a session, a call): equal ones stay equal, and only they."""
        if self.text(name) == name or _PSEUDONYM.fullmatch(name):
            return name
        return PSEUDONYM_OPENING + hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def message(self, message: Message) -> Message:
        """A message as it may be kept."""
        if not self._patterns:
            return message
        calls = tuple(
            ToolCall(self.identifier(call.id), self.identifier(call.name), self.arguments(call.arguments))
            for call in message.tool_calls
        )
        kept = msgspec.structs.replace(
            message,
            role=self._role(message.role),
            text=self.text(message.text),
            tool_calls=calls,
            tool_call_id=self.identifier(message.tool_call_id),
            name=self.identifier(message.name),
        )
        return message if kept == message else kept

    def event(self, event: Event) -> Event:
        """A change of the hot buffer as it may be journalled."""
        if not self._patterns:
            return event
        if isinstance(event, Appended):
            items = [
                item if item.message is None else msgspec.structs.replace(item, message=self.message(item.message))
                for item in event.messages
            ]
            return msgspec.structs.replace(event, messages=items)
        if isinstance(event, Placed):
            block = msgspec.structs.replace(event.block, text=self.text(event.block.text))
            return msgspec.structs.replace(event, block=block)
        if isinstance(event, Opened) and event.session is not None:
            return msgspec.structs.replace(event, session=self.identifier(event.session))
        return event

    def draft(self, draft: Draft) -> Draft:
        """An entry as it may be stored, but with the vector of the content that it had."""
        if not self._patterns:
            return draft
        kept = msgspec.structs.replace(
            draft,
            content=self.text(draft.content),
            roles=tuple(map(self._role, draft.roles)),
            kind=self.identifier(draft.kind),
            source=None if draft.source is None else self.text(draft.source),
            action=None if draft.action is None else self.identifier(draft.action),
            reason=None if draft.reason is None else self.text(draft.reason),
        )
        return draft if kept == draft else kept

    def marks(self, texts: Sequence[str]) -> Counter[str]:
        """How many secrets of each name were replaced in these texts, now or earlier."""
        if not self._patterns:
            return Counter()
        return Counter(found[1] for text in texts if MARK_OPENING in text for found in self._mark.finditer(text))

    def replaced(self, draft: Draft, kept: Draft) -> Counter[str]:
        """What `draft` replaced on the way to `kept`."""
        return self.marks(_texts(kept)) - self.marks(_texts(draft))

    def tell(self, replaced: Mapping[str, int]) -> None:
        """Count what was stored redacted."""
        with self._lock:
            self._told.update(replaced)

    @property
    def told(self) -> dict[str, int]:
        """What was counted, by name."""
        with self._lock:
            return {name: self._told[name] for name in self.names if self._told[name]}

    def _role(self, role: str) -> str:
        return role if role in _ROLES else self.identifier(role)


NO_REDACTION = Redactor({})


def _texts(draft: Draft) -> list[str]:
    return [draft.content, draft.reason or "", draft.source or ""]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
