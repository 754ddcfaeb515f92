"""The entries of the log: their fields, their identity, their status and their utility.

Rule: pure values; nothing here reads a clock, a random source or a file by itself. A *chunk* is a piece of remembered
text with one uuid; an *entry* is one record of the log about a chunk. A chunk has one entry when it is created
and one more for every correction; the entry with the highest `canonical_id` is the chunk's present state.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from memd.errors import BadTopicId

Vector = NDArray[np.float32]
"""A unit vector of the embedding model, shape `(dimension,)`, float32."""

TOPIC_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
TOPIC_ID_RULE = "use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit"
DEFAULT_TOPIC_ID = "default"

PUBLIC_ID_DIGITS_MIN = 4
CHUNK_ID_PATTERN = re.compile(rf"\[?(?:mem:)?((?:[0-9a-f]-?){{{PUBLIC_ID_DIGITS_MIN},32}})\]?", re.IGNORECASE)
"""All spellings of a chunk's id: `a3f9`, `mem:a3f9`, `[mem:a3f9]`, also with more digits of its uuid and dashes."""
NAME_CHARACTERS_MAX = 64
CALLER = "assistant"
"""The role that calls tools."""
SHOWN_MAX = 64
"""Limit on the chunks recorded as shown to one message; a full block has about thirty."""
AHEAD_US = 1_000_000
"""Tolerance, because entries of one append get ids a few microseconds ahead of the clock."""
CORRECTION_STEPS_MAX = 10
UTILITY_STEPS_LIMIT = 100
"""Bound of an entry's `utility_steps` in both directions: earlier settings allowed so many, and the log stores them in
a byte."""
STEPS = {"Helpful": 1, "Unhelpful": -1}
"""Change of a chunk's utility, per step, for the actions that do not replace it."""
UTILITY_RATIO = 1.5
"""Each Helpful step multiplies a chunk's score by this, each Unhelpful step divides it."""
HELPFUL_STEPS_MAX, UNHELPFUL_STEPS_MAX = 10, 4
"""Steps beyond these bounds have no effect: the factor is at most 1.5^10 = 57.7 and at least 1.5^-4 = 0.198, with which
not even a perfect match is shown."""

WRITTEN_ROLES = re.compile("^(?P<role>user|assistant|tool|function): ", re.MULTILINE)
"""Matches the roles in the content of an entry without `speakers`, and other lines that happen to begin like one."""


class Status(enum.IntEnum):
    """The state that an entry gives its chunk; stored as the integer."""

    ACTIVE = 0
    DEPRECATED = 1


def clamped_steps(steps: int) -> int:
    """Return the net Helpful steps (negative: Unhelpful), clamped to the bounds."""
    return max(-UNHELPFUL_STEPS_MAX, min(HELPFUL_STEPS_MAX, steps))


def multiplier_of(steps: int) -> float:
    """Return the factor on a chunk's score. Old entries may have more steps than today's bounds; these are clamped."""
    return UTILITY_RATIO ** clamped_steps(steps)


class Speaker(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One stretch of `content`, said by `role`: from `offset` to the next speaker's offset, or to the end."""

    offset: int
    """In characters (Unicode code points)."""
    role: str
    continues: bool = False
    """The stretch continues a message that begins in an earlier chunk, so no role is written in front of it."""
    name: str = ""
    """The client's name for the speaker, such as one of several users; see `speaker_name`."""
    call: str = ""
    """For a tool's result whose call is in an earlier chunk: the beginning of that call, on one line."""


class Section(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The place of a chunk in the note or document that it was cut from, or the title of its conversation."""

    hash: bytes
    """For a document, SHA-256 of the file when the chunk was written; for a note, 16 bytes unique to it; for a
    conversation, empty."""
    number: int = 0
    """Sort key of a document's chunks; equal numbers sort by `origin_id`. A new document counts from 0; chunks inserted
    later take numbers between their neighbours'."""
    of: int = 1
    heading: tuple[str, ...] = ()
    """The headings above it, outermost first; for a note or conversation its title."""
    page: int | None = None
    sheet: str | None = None
    root: bytes = b""
    """For a document, 8 bytes that distinguish its source's root from others of the same name."""


class ChunkState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields that a draft and an entry share.

    The log, `memd export`, `memd import` and redaction all use this definition. A field added later has the type
    `… | UnsetType` and the default `UNSET`: it is written only if set, so older records and lines stay readable. Text
    in a field is redacted unless `redaction.py` names the field.
    """

    uuid: bytes
    """16 random bytes; the same for every entry of one chunk."""
    vector: bytes
    """Little-endian float32, 4 × dimension bytes; empty for a Deprecated entry."""
    content: str
    """The bare text; empty for a Deprecated entry. In entries without `speakers` each message begins with its role
    (`user: …`)."""
    status: Status
    utility_steps: int
    created_at: int
    """Microseconds since the epoch at which the *chunk* was first written; copied by corrections."""
    roles: tuple[str, ...] = ()
    """The distinct roles that speak in `content`, in the order of their first words."""
    digests: tuple[bytes, ...] = ()
    """The 16-byte digests of the messages whose text is (partly) in `content`, in order."""
    kind: str = "turn"
    source: str | None = None
    supersedes: tuple[bytes, ...] = ()
    """The uuids of the chunks replaced by the Update that created this one."""
    action: str | None = None
    reason: str | None = None
    speakers: tuple[Speaker, ...] | UnsetType = UNSET
    """The speakers of the stretches of `content`, by ascending offset; empty for text that is not from messages (a
    correction or a note)."""
    shown: tuple[bytes, ...] | UnsetType = UNSET
    """The uuids of the chunks that memory showed to the assistant whose text is in `content`."""
    said_at: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    """Microseconds since the epoch at which the chunk's first message arrived, or the time given by the import; see
    `said`."""
    action_steps: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    """Steps by which a Helpful or Unhelpful changed `utility_steps`, if not one."""
    asked_by: bytes | UnsetType = UNSET
    """The 16-byte digest of the request whose correction wrote this entry, so that a retry after a restart does not
    apply it again."""
    author: str | UnsetType = UNSET
    """The principal who said or wrote the chunk's text, copied to its later entries. UNSET: the owner, or there is only
    one user."""
    action_by: str | UnsetType = UNSET
    """The principal whose correction wrote this entry."""
    part: Section | UnsetType = UNSET
    """Set for notes, documents, and conversations with a title."""
    tags: tuple[str, ...] | UnsetType = UNSET
    """A note's tags."""
    dated: bool | UnsetType = UNSET
    """True for a note whose `said_at` was given, and for a correction that keeps it."""
    columns: str | UnsetType = UNSET
    """If `content` begins within a Markdown table, the table's header row, which is in an earlier chunk."""
    completes: tuple[bytes, ...] | UnsetType = UNSET
    """Digests of the messages that are complete in the log with this entry, if they differ from `digests`: none while a
    long message is appended in pieces; the last entry of a group also has those whose text was in the log before."""
    unknown: dict[str, Any] = {}
    """Fields written by a newer version, carried along unchanged."""

    @property
    def completed(self) -> tuple[bytes, ...]:
        """Digests of the messages that are complete in the log with this entry."""
        return self.digests if self.completes is UNSET else self.completes

    @property
    def said(self) -> int:
        """The chunk's time as shown to people, in microseconds since the epoch; blocks are ordered and dated by it."""
        return self.created_at if self.said_at is UNSET else self.said_at

    @property
    def written_by(self) -> str:
        """The principal who wrote this entry; empty for the owner."""
        return (self.author if self.action is None else self.action_by) or ""

    @property
    def speakers_fit(self) -> bool:
        """True if the offsets of `speakers` ascend and lie within `content`."""
        offsets = [] if self.speakers is UNSET else [speaker.offset for speaker in self.speakers]
        return all(0 <= at < then for at, then in itertools.pairwise([*offsets, len(self.content) + 1]))

    @property
    def stretches(self) -> list[tuple[Speaker, str]]:
        """Each of `speakers` with its text. Text before the first speaker comes from a correction and is left out."""
        speakers = self.speakers or ()
        bounds = itertools.pairwise([*(one.offset for one in speakers), len(self.content)])
        return [(one, self.content[start:end]) for one, (start, end) in zip(speakers, bounds, strict=True)]

    @property
    def opening(self) -> str:
        """The header row of the table within which the content begins, with a line end; otherwise empty."""
        return f"{self.columns}\n" if self.columns else ""

    @property
    def displayed(self) -> str:
        """The content as people and models read it: each message begins with its role, each result follows its call,
        and the rows of a table its header row."""
        text, further = self.opening + self.content, len(self.opening)
        if self.speakers is UNSET:
            return text
        moved = (msgspec.structs.replace(one, offset=one.offset and one.offset + further) for one in self.speakers)
        return text_with_roles(text, tuple(moved) if further else self.speakers)

    @property
    def calls(self) -> tuple[str, ...]:
        """Calls from earlier chunks that results in this one answer."""
        return tuple(one.call for one in self.speakers or () if one.call)

    def without_calls(self, gone: Collection[str] | None = None) -> Self:
        """Return a copy without these calls, by default without any."""
        if not self.calls:
            return self
        speakers = tuple(
            msgspec.structs.replace(one, call="") if gone is None or one.call in gone else one
            for one in self.speakers or ()
        )
        return msgspec.structs.replace(self, speakers=speakers)

    @property
    def spoken(self) -> str:
        """The content without roles."""
        return without_written_roles(self.content) if self.speakers is UNSET else self.content

    @property
    def heading(self) -> tuple[str, ...]:
        """The headings above it, outermost first."""
        return () if self.part is UNSET else self.part.heading

    @property
    def above(self) -> tuple[str, ...]:
        """The headings, the sheet and the header row of a table that are embedded and indexed with the content."""
        sheet = None if self.part is UNSET else self.part.sheet
        return (*self.heading, *filter(None, (sheet, self.columns or "")))

    @property
    def embedded_text(self) -> str:
        """The text to embed: headings, then the content without roles."""
        return "\n".join([*self.above, self.spoken])

    @property
    def indexed_text(self) -> str:
        """The text whose words are indexed: with the file name of a document, and with the calls, because they name
        the subject of the results."""
        named = self.source.rsplit("/", 1)[-1:] if self.kind == "document" and self.source else []
        return "\n".join([*named, *self.calls, *self.above, self.content])

    @property
    def named_text(self) -> str:
        """The text whose names are indexed; the content and each heading begin a sentence of their own."""
        return ".\n".join([*self.above, self.content])


class Draft(ChunkState, frozen=True, kw_only=True):
    """An entry that is not in the log yet. The store assigns `canonical_id` and, for a new chunk, a public id."""

    status: Status = Status.ACTIVE
    utility_steps: int = 0
    public_id: str | None = None
    """The chunk's public id; None for a new chunk."""
    origin_id: int | None = None
    """The canonical_id of the chunk's first entry; None for a new chunk."""

    def as_entry(self, *, public_id: str, canonical_id: int, group_left: int, now_us: int = 0) -> Entry:
        """Return the record to write for this draft at `now_us`."""
        fields = {name: getattr(self, name) for name in ChunkState.__struct_fields__}
        if self.status is Status.DEPRECATED:
            fields["speakers"] = fields["columns"] = UNSET  # there is no text
        return Entry(
            **fields,
            public_id=public_id,
            canonical_id=canonical_id,
            origin_id=canonical_id if self.origin_id is None else self.origin_id,
            group_left=group_left,
            appended_at=now_us if now_us and canonical_id - now_us > AHEAD_US else UNSET,
        )


class Erased(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """When and by whom the text of an entry was erased."""

    at: int
    """Microseconds since the epoch."""
    by: str = ""


class Entry(ChunkState, frozen=True, kw_only=True):
    """One record of the log."""

    public_id: str
    canonical_id: int
    origin_id: int
    """The canonical_id of the chunk's first entry."""
    group_left: int = 0
    """Number of records of the same append after this one; recovery drops an incomplete group."""
    appended_at: int | UnsetType = UNSET
    """Microseconds since the epoch at which it was appended; set if `canonical_id` is ahead by more than `AHEAD_US`.
    Ids keep ascending after the clock was set back, or after an import from a machine whose clock is ahead."""
    line_tokens: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    """Raw tokens of its line in a memory block, counted once at append so that filling a budget need not count."""
    terms: bytes | UnsetType = UNSET
    """The words of its text as recall counts them (`lexical.postings.ChunkTerms`), analyzed at append."""
    erased: Erased | UnsetType = UNSET
    """Set if text and vector were erased; no correction deprecated the chunk."""
    pad: bytes | UnsetType = UNSET
    """Zeros in place of erased bytes: the record keeps its length, so that later records keep their offsets. Earlier
    stubs have them in `erased`."""

    def as_draft(self) -> Draft:
        """Return a draft of the chunk's next entry, unchanged."""
        return Draft(**{name: getattr(self, name) for name in Draft.__struct_fields__})

    @property
    def at(self) -> int:
        """Microseconds since the epoch at which it was appended."""
        return self.canonical_id if self.appended_at is UNSET else self.appended_at

    @property
    def embedding(self) -> Vector:
        """The vector as a read-only array of shape `(dimension,)`; `(0,)` for a Deprecated entry."""
        return np.frombuffer(self.vector, dtype="<f4")


@lru_cache(maxsize=256)
def speaker_name(name: str) -> str:
    """Return a client's name for a speaker on one line, shortened, without brackets, `|` and `:`."""
    plain = "".join(character if character.isprintable() and character not in "()[]<>|:" else " " for character in name)
    return " ".join(plain.split())[:NAME_CHARACTERS_MAX].rstrip()


def role_opening(role: str, name: str = "") -> str:
    """Return the role and the speaker's name, if any, as written in front of a message's text."""
    called = speaker_name(name)
    return f"{role} ({called}): " if called else f"{role}: "


def text_with_roles(content: str, speakers: Sequence[Speaker]) -> str:
    """Return `content` with the role in front of each message that begins in it, and results with their calls."""
    parts = []
    done = 0
    for speaker in speakers:
        if speaker.call or not speaker.continues:
            call = f"{role_opening(CALLER)}{speaker.call}\n" if speaker.call else ""
            parts += [content[done : speaker.offset], call, role_opening(speaker.role, speaker.name)]
            done = speaker.offset
    return "".join([*parts, content[done:]])


def without_written_roles(content: str) -> str:
    """Return the text of an old entry without `speakers`, guessed: a role at the beginning of a line is removed.

    That also removes the first word of a line such as `user: alice` in a YAML file, which is why roles are data now.
    Use it only for entries without `speakers`.
    """
    return WRITTEN_ROLES.sub("", content) or content


Action = Literal["Update", "Helpful", "Unhelpful"]
KINDS = ("turn", "note", "document")
"""Values of `ChunkState.kind`."""


class Correction(msgspec.Struct, frozen=True):
    """A caller's judgement of chunks it was shown."""

    chunk_ids: tuple[str, ...]
    action: Action
    reason: str
    """Kept for audit, never interpreted."""
    content: str | None = None
    """Update only: the text of one new chunk that replaces those named."""
    steps: Annotated[int, Meta(ge=1, le=CORRECTION_STEPS_MAX)] = 1
    """Helpful and Unhelpful only: counts as so many corrections, so that a single one can pin or hide a chunk."""


def checked_topic_id(topic_id: str) -> str:
    """Return `topic_id` if it is a legal topic name, else raise BadTopicId. No legal name is a path outside the data
    directory."""
    if TOPIC_ID_PATTERN.fullmatch(topic_id) is None:
        raise BadTopicId(f"topic_id {topic_id[:140]!r} is not a topic name: {TOPIC_ID_RULE}")
    return topic_id


def digits_of_id(chunk_id: str) -> str | None:
    """Return the hexadecimal digits of a chunk's id, or None if it is not one."""
    found = CHUNK_ID_PATTERN.fullmatch(chunk_id.strip())
    return None if found is None else found[1].replace("-", "").lower()


def topic_called(name: str) -> str:
    """Return the topic for a folder: its name with `-` for illegal characters, or `default` if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("-._")[:128].rstrip("-") or DEFAULT_TOPIC_ID


class Moment(int):
    """A point in a topic's log, given as a canonical_id."""


class WallTime(Moment):
    """A time in microseconds since the epoch. If a clock was set back, it corresponds to a larger id in some topics;
    see `store.order.id_upto`."""
