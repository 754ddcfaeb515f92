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
"""A chunk's id, however it is written: `a3f9`, `mem:a3f9`, `[mem:a3f9]`; more digits of its uuid, dashes between."""
NAME_CHARACTERS_MAX = 64
CALLER = "assistant"
"""The role that calls tools."""
SHOWN_MAX = 64
"""Chunks that are noted as shown to one message; a full block has about thirty."""
AHEAD_US = 1_000_000
"""Entries of one append are some microseconds ahead of the clock."""
CORRECTION_STEPS_MAX = 10
UTILITY_STEPS_LIMIT = 100
"""No entry is more steps above or below none: earlier settings allowed as many, and the log has a byte for them."""
UTILITY_RATIO = 1.5
"""Each step of Helpful multiplies a chunk's score by this, each of Unhelpful divides it."""
HELPFUL_STEPS_MAX, UNHELPFUL_STEPS_MAX = 10, 4
"""Further corrections change nothing: at most 1.5^10 = 57.7 times the score, and at least 1.5^-4 = 0.198, with which
not even a perfect match is shown."""

WRITTEN_ROLES = re.compile("^(?P<role>user|assistant|tool|function): ", re.MULTILINE)
"""The roles in the content of an entry without `speakers`, and whatever else begins a line like that."""


class Status(enum.IntEnum):
    """The state that an entry gives its chunk; stored as the integer."""

    ACTIVE = 0
    DEPRECATED = 1


def clamped_steps(steps: int) -> int:
    """The net Helpful corrections that count of so many (negative: Unhelpful)."""
    return max(-UNHELPFUL_STEPS_MAX, min(HELPFUL_STEPS_MAX, steps))


def multiplier_of(steps: int) -> float:
    """The factor on a chunk's score after so many; steps beyond the bounds, from when those were wider, count as the
    bounds."""
    return UTILITY_RATIO ** clamped_steps(steps)


class Speaker(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One stretch of a content: from `offset` up to the next speaker's, or to the end, `role` speaks."""

    offset: int
    """In characters (Unicode code points)."""
    role: str
    continues: bool = False
    """The stretch goes on with a message that an earlier chunk begins, so that no role is written in front of it."""
    name: str = ""
    """The client's own name for who speaks, such as one of several users; see `speaker_name`."""
    call: str = ""
    """Of a tool's result whose call is in an earlier chunk: the beginning of that call, on one line."""


class Section(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The place of a chunk in the note or document that it was cut from, or the title of its conversation."""

    hash: bytes
    """Of a document: SHA-256 of the file when the chunk was written. Of a note: 16 bytes that no other one has. Of a
    conversation: nothing."""
    number: int = 0
    """Its place: chunks of one document are in the order of their numbers, those of one number in that of their
    `origin_id`. Counted from 0 when it is new; what is put in later is numbered between its neighbours."""
    of: int = 1
    heading: tuple[str, ...] = ()
    """The headings above it, the outermost first; of a note or conversation its title."""
    page: int | None = None
    sheet: str | None = None
    root: bytes = b""
    """Of a document: 8 bytes that tell its source's root from others of the same name."""


class ChunkState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields that a draft and an entry share: this is their one definition.

    The log, `memd export`, `memd import` and redaction take their fields from here. A field that is added later has the
    type `… | UnsetType` and the default `UNSET`: it is written where it is set, and records and lines from before it
    read on. Text in a field is redacted unless `redaction.py` names the field.
    """

    uuid: bytes
    """16 random bytes; the same for every entry of one chunk."""
    vector: bytes
    """Little-endian float32, 4 × dimension bytes; empty for a Deprecated entry."""
    content: str
    """The bare text, empty for a Deprecated entry. In entries without `speakers` each message in it is opened by its
    role (`user: …`)."""
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
    """The uuids that the Update which created this chunk replaced."""
    action: str | None = None
    reason: str | None = None
    speakers: tuple[Speaker, ...] | UnsetType = UNSET
    """The speakers of the stretches of `content`, by ascending offset; empty for a text that is no message's (a
    correction's, a note)."""
    shown: tuple[bytes, ...] | UnsetType = UNSET
    """The uuids of the chunks that memory showed to the assistant that speaks in `content`."""
    said_at: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    """Microseconds since the epoch at which the first message of the chunk arrived, or the time that its import names;
    see `said`."""
    action_steps: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    """The steps that a Helpful or Unhelpful changed `utility_steps` by, where that is not one."""
    asked_by: bytes | UnsetType = UNSET
    """The 16-byte digest of the request whose correction wrote this entry: it is not applied again when the request is
    sent again after a restart."""
    author: str | UnsetType = UNSET
    """The principal who said or wrote the chunk's text; its later entries keep it. UNSET: the owner, or nobody is told
    apart."""
    action_by: str | UnsetType = UNSET
    """The principal whose correction wrote this entry."""
    part: Section | UnsetType = UNSET
    """Of a note or document, or of a conversation that has a title."""
    tags: tuple[str, ...] | UnsetType = UNSET
    """Of a note."""
    completes: tuple[bytes, ...] | UnsetType = UNSET
    """The digests of the messages of which the log has all with this entry, where those are not `digests`: none while a
    long message is appended bit by bit; in the last entry of a group also those whose text the log has already."""
    unknown: dict[str, Any] = {}
    """Fields that a newer version wrote and this one does not know: carried along unchanged."""

    @property
    def completed(self) -> tuple[bytes, ...]:
        """The digests of the messages of which the log has all, once it has this."""
        return self.digests if self.completes is UNSET else self.completes

    @property
    def said(self) -> int:
        """Microseconds since the epoch that people read as the time of the chunk: it orders and dates what is shown."""
        return self.created_at if self.said_at is UNSET else self.said_at

    @property
    def written_by(self) -> str:
        """The principal who wrote this very entry; empty for the owner."""
        return (self.author if self.action is None else self.action_by) or ""

    @property
    def speakers_fit(self) -> bool:
        """Whether the offsets of `speakers` ascend within `content`."""
        offsets = [] if self.speakers is UNSET else [speaker.offset for speaker in self.speakers]
        return all(0 <= at < then for at, then in itertools.pairwise([*offsets, len(self.content) + 1]))

    @property
    def stretches(self) -> list[tuple[Speaker, str]]:
        """Each of `speakers` with the text from there to the next; what stands before the first is a correction's."""
        speakers = self.speakers or ()
        bounds = itertools.pairwise([*(one.offset for one in speakers), len(self.content)])
        return [(one, self.content[start:end]) for one, (start, end) in zip(speakers, bounds, strict=True)]

    @property
    def displayed(self) -> str:
        """The content as people and models read it: every message opened by its role, a result behind its call."""
        return self.content if self.speakers is UNSET else text_with_roles(self.content, self.speakers)

    @property
    def calls(self) -> tuple[str, ...]:
        """The calls that its results answer and that are in earlier chunks."""
        return tuple(one.call for one in self.speakers or () if one.call)

    def without_calls(self, gone: Collection[str] | None = None) -> Self:
        """The same without these calls; None: without any."""
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
        """The headings above it, the outermost first."""
        return () if self.part is UNSET else self.part.heading

    @property
    def above(self) -> tuple[str, ...]:
        """The headings and the sheet that are embedded and indexed with the content."""
        return self.heading if self.part is UNSET or self.part.sheet is None else (*self.heading, self.part.sheet)

    @property
    def embedded_text(self) -> str:
        """The text that is embedded: the content without roles, below its headings."""
        return "\n".join([*self.above, self.spoken])

    @property
    def indexed_text(self) -> str:
        """The text whose words are indexed: with the calls, which say what its results are of, and the name of its
        document's file."""
        named = self.source.rsplit("/", 1)[-1:] if self.kind == "document" and self.source else []
        return "\n".join([*named, *self.calls, *self.above, self.content])

    @property
    def named_text(self) -> str:
        """The text whose names are indexed: its first word, and that of each heading, opens a sentence."""
        return ".\n".join([*self.above, self.content])


class Draft(ChunkState, frozen=True, kw_only=True):
    """An entry that is not in the log yet: the store gives it its `canonical_id` and, for a new chunk, a public id."""

    status: Status = Status.ACTIVE
    utility_steps: int = 0
    public_id: str | None = None
    """None for a new chunk; for another entry of a known chunk the id that it already has."""
    origin_id: int | None = None
    """None for a new chunk (its own canonical_id); else the canonical_id of the chunk's first entry."""

    def as_entry(self, *, public_id: str, canonical_id: int, group_left: int, now_us: int = 0) -> Entry:
        """The record that is written for this draft at `now_us`."""
        fields = {name: getattr(self, name) for name in ChunkState.__struct_fields__}
        if self.status is Status.DEPRECATED:
            fields["speakers"] = UNSET  # there is no text in which somebody could speak
        return Entry(
            **fields,
            public_id=public_id,
            canonical_id=canonical_id,
            origin_id=canonical_id if self.origin_id is None else self.origin_id,
            group_left=group_left,
            appended_at=now_us if now_us and canonical_id - now_us > AHEAD_US else UNSET,
        )


class Erased(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The fact that the text of an entry was erased."""

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
    """The number of records of the same append after this one: recovery drops a group that is not whole."""
    appended_at: int | UnsetType = UNSET
    """Microseconds since the epoch at which it was appended, where `canonical_id` is ahead of that by more than
    `AHEAD_US`: ids ascend also after a clock was set back, or after an import from a machine whose clock is ahead."""
    line_tokens: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    """The raw tokens of its line in a memory block, counted when it was appended: filling a budget counts none then."""
    terms: bytes | UnsetType = UNSET
    """The words of its text as recall counts them (`lexical.postings.ChunkTerms`), analyzed when it was appended."""
    erased: Erased | UnsetType = UNSET
    """Of an entry without text and vector, because both were erased: nobody took it out."""
    pad: bytes | UnsetType = UNSET
    """Zeros where some of it was erased: the record keeps its length, so that whatever lies behind it keeps its place.
    Earlier stubs have them in `erased`."""

    def as_draft(self) -> Draft:
        """The next entry of the same chunk, unchanged so far."""
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
    """A client's name for a speaker as it is kept and shown: on one line, bounded, without what could end it early."""
    plain = "".join(character if character.isprintable() and character not in "()[]<>|:" else " " for character in name)
    return " ".join(plain.split())[:NAME_CHARACTERS_MAX].rstrip()


def role_opening(role: str, name: str = "") -> str:
    """The role, and the speaker's name if there is one, as they are written in front of a message's text."""
    called = speaker_name(name)
    return f"{role} ({called}): " if called else f"{role}: "


def text_with_roles(content: str, speakers: Sequence[Speaker]) -> str:
    """`content` with the role in front of every message that begins in it, and of every result behind its call."""
    parts = []
    done = 0
    for speaker in speakers:
        if speaker.call or not speaker.continues:
            call = f"{role_opening(CALLER)}{speaker.call}\n" if speaker.call else ""
            parts += [content[done : speaker.offset], call, role_opening(speaker.role, speaker.name)]
            done = speaker.offset
    return "".join([*parts, content[done:]])


def without_written_roles(content: str) -> str:
    """The text of an entry from before `speakers`, guessed: a line that begins like a role loses its beginning.

    This also takes the first word of a line such as `user: alice` in a YAML file, which is why roles are data now. Only
    entries that have no `speakers` may be read by it.
    """
    return WRITTEN_ROLES.sub("", content) or content


Action = Literal["Update", "Helpful", "Unhelpful"]
KINDS = ("turn", "note", "document")
"""Of entries."""


class Correction(msgspec.Struct, frozen=True):
    """A caller's judgement of chunks that it was shown."""

    chunk_ids: tuple[str, ...]
    action: Action
    reason: str
    """Kept for audit, never interpreted."""
    content: str | None = None
    """Update only: becomes one new chunk that takes the place of those named."""
    steps: Annotated[int, Meta(ge=1, le=CORRECTION_STEPS_MAX)] = 1
    """Helpful and Unhelpful only: counts as so many corrections, so that one pins a chunk, or hides it."""


def checked_topic_id(topic_id: str) -> str:
    """`topic_id` itself if it is a legal topic name. Raises BadTopicId: anything else; the pattern leaves no way to
    name a path outside the data directory."""
    if TOPIC_ID_PATTERN.fullmatch(topic_id) is None:
        raise BadTopicId(f"topic_id {topic_id[:140]!r} is not a topic name: {TOPIC_ID_RULE}")
    return topic_id


def digits_of_id(chunk_id: str) -> str | None:
    """The hexadecimal digits of a chunk's id; None: it is none."""
    found = CHUNK_ID_PATTERN.fullmatch(chunk_id.strip())
    return None if found is None else found[1].replace("-", "").lower()


def topic_called(name: str) -> str:
    """The topic of a folder: its name, with `-` for what no topic's name has; `default` where nothing is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("-._")[:128].rstrip("-") or DEFAULT_TOPIC_ID


class Moment(int):
    """A canonical_id of some topic's: everything up to it, or everything before it."""


class WallTime(Moment):
    """A time in microseconds since the epoch, as people know it. Where a clock was set back, a larger id stands for it
    in some topics: see `store.order.id_upto`."""
