"""Redaction: replaces every secret that a pattern finds in a text by `[redacted:NAME]`.

Rule: pure. Nothing reaches the journal but through `Redactor.event`, and nothing the log but through `Redactor.draft`:
who makes drafts redacts them before they are embedded, and the store looks once more at every append (`last_look`).
Whoever cuts text redacts it before, as a secret may lie across a cut, and after, as a pattern may fit only a part. Text
without secrets comes back unchanged, the very same object. What identifies a message (its digests) never changes, so a
history that is sent again is recognised.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import UNSET

from memd.entries import Draft, Vector
from memd.errors import StoreError
from memd.ingest.redaction.persons import personal
from memd.ingest.redaction.shapes import BUILT_IN, Find, Span, matches
from memd.messages import LEADING_ROLES, rebuilt
from memd.settings.model import IngestSettings

MARK_OPENING = "[redacted:"
PSEUDONYM_OPENING = "redacted-"
_PSEUDONYM = re.compile(PSEUDONYM_OPENING + r"[0-9a-f]{16}")
_USUAL_ROLES = LEADING_ROLES | {"user", "assistant", "tool", "function"}
_PASSES_MAX = 4
"""After so many passes, a text in which a user's pattern still finds something is replaced as a whole."""

_Kept = TypeVar("_Kept", bound=msgspec.Struct)
_AS_NAME = {"author", "action", "action_by", "id", "kind", "name", "session", "tool_call_id"}
_AS_IT_IS = {"conversation", "parent", "public_id", "shown_id", "topic_id"}
"""Fields of messages, notes, events and drafts: a name has a pseudonym in place of a secret, equal ones stay equal;
memd's own ids have none. Every other field is text, one that is added later too."""


class Redactor:
    """Replaces the matches of its patterns, which are compiled once; without patterns nothing. Thread-safe."""

    def __init__(self, patterns: Mapping[str, Find]) -> None:
        self.names = tuple(patterns)
        self._patterns = patterns
        self._mark = re.compile(r"\[redacted:(" + "|".join(map(re.escape, patterns)) + r")\]")
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, settings: IngestSettings) -> Redactor:
        """The redactor that the settings ask for: secrets, then persons, then the user's own patterns. Raises
        ConfigError: a package that the settings need is not installed."""
        if not settings.redact:
            return cls({})
        secrets = {name: find for name, find in BUILT_IN.items() if name in settings.redact_builtin}
        own = {name: matches(re.compile(pattern)) for name, pattern in settings.redact_patterns.items()}
        return cls(secrets | personal(settings) | own)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def text(self, text: str) -> str:
        """`text` with its secrets replaced. Done twice, it changes nothing more."""
        return self._replaced(text, ())[0]

    def arguments(self, arguments: str) -> str:
        """A tool call's arguments; JSON stays JSON, as chat templates read it."""
        redacted = self.text(arguments)
        if redacted == arguments or not _is_json(arguments) or _is_json(redacted):
            return redacted
        return json.dumps({"redacted": redacted}, ensure_ascii=False)

    def identifier(self, name: str) -> str:
        """A redacted identifier (of a session, a call); different ones stay different."""
        return name if self.text(name) == name else self.pseudonym(name)

    def pseudonym(self, name: str) -> str:
        """A hash in place of a name, the same for equal ones."""
        if _PSEUDONYM.fullmatch(name):
            return name
        return PSEUDONYM_OPENING + hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def message(self, value: _Kept) -> _Kept:
        """A message as it may be kept, a note, or a change of the hot buffer as it may be journalled."""
        return cast("_Kept", self._within(value))

    note = event = message

    def _within(self, value: Any) -> Any:
        """A value without the secrets in it; where there is none, the very same object."""
        return rebuilt(value, self._kept) if self._patterns else value

    def _kept(self, value: Any, field: str) -> Any:
        """A text as a field of this name has it."""
        if field in _AS_IT_IS:
            return value
        if not isinstance(value, str):
            return None
        if field in ("role", "roles"):
            return value if value in _USUAL_ROLES else self.identifier(value)
        treat = {"arguments": self.arguments}.get(field, self.identifier if field in _AS_NAME else self.text)
        return treat(value)

    def draft(self, draft: Draft) -> Draft:
        """An entry as it may be stored, but with the vector of the content that it had."""
        if not self._patterns:
            return draft
        speakers = () if draft.speakers is UNSET else draft.speakers
        content, offsets = self._replaced(draft.content, [speaker.offset for speaker in speakers])
        moved = {  # of messages that begin within one secret the last one remains: its text follows
            offset: msgspec.structs.replace(speaker, offset=offset)
            for offset, speaker in zip(offsets, speakers, strict=True)
            if offset < len(content) or content == draft.content
        }
        fields = {"content": "", "speakers": UNSET if draft.speakers is UNSET else tuple(moved.values())}
        kept = self._within(msgspec.structs.replace(draft, **fields))  # the content is not looked at twice
        kept = msgspec.structs.replace(kept, content=content)
        return draft if kept == draft else kept

    def marks(self, texts: Sequence[str]) -> Counter[str]:
        """The number of marks of each name in these texts."""
        if not self._patterns:
            return Counter()
        return Counter(found[1] for text in texts if MARK_OPENING in text for found in self._mark.finditer(text))

    def replaced(self, draft: Draft, kept: Draft) -> Counter[str]:
        """The number of secrets of each name that were replaced on the way from `draft` to `kept`."""
        return self.marks(_texts(kept)) - self.marks(_texts(draft))

    def count(self, replaced: Mapping[str, int]) -> None:
        """Add to `counts` what was stored redacted."""
        with self._lock:
            self._counts.update(replaced)

    @property
    def counts(self) -> dict[str, int]:
        """The number of secrets that were replaced in stored text, by name."""
        with self._lock:
            return {name: self._counts[name] for name in self.names if self._counts[name]}

    def _replaced(self, text: str, offsets: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Return `text` with its secrets replaced, and the new positions of the characters at `offsets`."""
        for _ in range(_PASSES_MAX):
            before = text
            for name, find in self._patterns.items():
                spans = self._secrets(text, find)
                if spans:
                    mark = f"{MARK_OPENING}{name}]"
                    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
                    text = mark.join(text[start:end] for start, end in zip(starts, ends, strict=True))
                    offsets = [_moved(offset, spans, len(mark)) for offset in offsets]
            if text == before:
                return text, offsets
        return mark, [0 for _ in offsets]

    def _secrets(self, text: str, find: Find) -> list[Span]:
        """Return the spans that a pattern finds, without those within an earlier mark."""
        marks = [mark.span() for mark in self._mark.finditer(text)] if MARK_OPENING in text else []
        spans = []
        for start, end in find(text):
            while marks and marks[0][1] <= start:
                marks.pop(0)
            if not (marks and marks[0][0] <= start and end <= marks[0][1]):
                spans.append((start, end))
        return spans


NO_REDACTION = Redactor({})


def redacted_drafts(drafts: Iterable[Draft], redactor: Redactor, embed: Callable[[str], Vector]) -> list[Draft]:
    """The drafts as they may be appended: redacted and counted, with the vectors of what is left of their contents.

    A correction copies a chunk that may have been stored before redaction was on.
    """
    redacted = []
    for draft in drafts:
        kept = redactor.draft(draft)
        redactor.count(redactor.replaced(draft, kept))
        if draft.vector and kept.content != draft.content:
            kept = msgspec.structs.replace(kept, vector=embed(kept.embedded_text).astype("<f4").tobytes())
        redacted.append(kept)
    return redacted


def last_look(redactor: Redactor) -> Callable[[Draft], Draft]:
    """The filter through which the store lets every draft go: it redacts, and never embeds.

    Text without a vector (a correction's reason) is redacted here at the latest. The content of an active draft has its
    vector already, so it must come redacted: the filter raises StoreError where it does not, and nothing is stored.
    """

    def filtered(draft: Draft) -> Draft:
        kept = redactor.draft(draft)
        if draft.vector and kept.content != draft.content:
            raise StoreError(
                f"a draft of chunk {draft.uuid.hex()} has text in it that ingest.redact replaces, and was not stored: "
                "please report this, it should have been redacted before"
            )
        return kept

    return filtered


def _texts(draft: Draft) -> list[str]:
    return [text for text in (draft.content, draft.source, draft.reason) if text is not None]


def _moved(offset: int, spans: Sequence[Span], mark_length: int) -> int:
    """The new offset of a character after marks replaced the spans: behind the mark if it was within a span."""
    shift = 0
    for start, end in spans:
        if offset <= start:
            break
        shift += mark_length - (end - start)
        offset = max(offset, end)
    return offset + shift


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
