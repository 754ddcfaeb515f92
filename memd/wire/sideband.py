"""The sideband between client and memd: MemoryIn, MemoryOut and the response headers.

Rule: MemoryIn is untrusted: decoding raises only `BadMemoryIn`, whose message names the field and quotes nothing,
because it is logged. MemoryOut is spliced into bytes, which are never re-encoded. No header value can end its line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Raw

from memd.entries import CORRECTION_STEPS_MAX, TOPIC_ID_RULE, Action, Correction, Moment, checked_topic_id
from memd.errors import BadMemoryIn, BadNote, BadTopicId
from memd.notes import GivenNote, Note, checked_notes
from memd.selection import Selection, since, until
from memd.wire.lenient_json import OBJECT, TEXT, decode_or_none, without_surrogates

PROBLEM_HEADER_CHARACTERS_MAX = 1_000
INJECTED_HEADER_BYTES_MAX = 4096  # proxies and servers refuse header lines from 8 KB on
_WHITE_SPACE = b" \t\n\r"
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_UNKNOWN = re.compile(
    r"Object contains unknown field `(.*?)`((?: - at `\$(?:\.(?:corrections|notes)\[\d+\]|\.filter)?`)?)", re.DOTALL
)
"""Matches msgspec's message with the name of an unknown member, which may be any text."""
_MEMBERS = (
    *("topic_id", "related_topic_ids", "corrections", "chunk_ids", "action", "reason", "content", "steps"),
    *("filter", "from", "to", "kinds", "sources", "notes", "title", "tags", "said_at", "source"),
)
_ACTIONS: dict[str, Action] = {action.lower(): action for action in get_args(Action)}
_ACTION = " or ".join(_ACTIONS.values())
_SHAPE = (
    f"expected {{topic_id?, related_topic_ids?, corrections?: [{{chunk_ids, action: {_ACTION}, reason, content?, "
    "steps?}], notes?: [{content, title?, tags?, said_at?, source?}], filter?: {from?, to?, kinds?, sources?, tags?}}"
)


class MemoryIn(msgspec.Struct, frozen=True):
    """The sideband of a request."""

    topic_id: str | None = None
    """None: the topic of the path, or the default topic."""
    related_topic_ids: tuple[str, ...] = ()
    corrections: tuple[Correction, ...] = ()
    notes: tuple[Note, ...] = ()
    filter: Selection | None = None
    """The chunks that may be recalled; None: all."""


class InjectedChunk(msgspec.Struct, frozen=True):
    """A chunk in a memory block of the prompt."""

    id: str
    topic_id: str
    canonical_id: int
    """The `origin_id` of its entry, by which chunks are ordered."""


class Signal(msgspec.Struct, frozen=True, omit_defaults=True):
    """A notice to the caller; fields that are None are not sent."""

    type: Literal["context_pressure", "context_overflow", "correction_failed", "taken_out", "memory_in_refused"]
    fill_ratio: float | None = None
    chunk_id: str | None = None
    reason: str | None = None
    """For `memory_in_refused`, why the MemoryIn had no effect."""


class NoteOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of a note."""

    chunk_ids: tuple[str, ...] = ()
    """Ids of its chunks, or of those that already had the same text."""
    duplicate: bool = False
    """All of it was live in the topic already."""
    error: str = ""
    """Why it was not taken: `readonly`, `said_at` (more than a day ahead), `forbidden` (parts without an id were erased
    for good), or the part of `X-Memory-Status` after `degraded:`."""


class MemoryOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sideband of a response; `signals` and `notes` are omitted if empty."""

    injected_chunks: tuple[InjectedChunk, ...]
    signals: tuple[Signal, ...] = ()
    notes: tuple[NoteOut, ...] = ()
    """One for each note of the request, in order."""


class _WireCorrection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A correction as clients write it. A misspelt `content` is refused, because the Update would only remove."""

    chunk_ids: Annotated[tuple[str, ...], Meta(min_length=1)]
    action: str
    """In any case: models vary it."""
    reason: str
    content: str | None = None
    steps: Annotated[int, Meta(ge=1, le=CORRECTION_STEPS_MAX)] = 1


class _WireFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A filter as clients write it. Unknown members are refused: a misspelt one must not let everything through."""

    since: str | int | None = msgspec.field(default=None, name="from")
    to: str | int | None = None
    kinds: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None


class _WireMemoryIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """MemoryIn as clients write it; null means absent."""

    topic_id: str | None = None
    related_topic_ids: tuple[str, ...] | None = None
    corrections: tuple[_WireCorrection, ...] | None = None
    notes: tuple[GivenNote, ...] | None = None
    filter: _WireFilter | None = None


_memory_in_decoder = msgspec.json.Decoder(_WireMemoryIn)


def decode_memory_in(raw: Raw | bytes) -> MemoryIn:
    """Decode a MemoryIn from a JSON object, or from a JSON string that contains one. Raises BadMemoryIn: malformed, or
    an unknown member; the message names the field and may be logged."""
    try:
        text = TEXT.decode(raw) if bytes(raw).lstrip(_WHITE_SPACE).startswith(b'"') else bytes(raw)
        wire = _memory_in_decoder.decode(without_surrogates(text.encode() if isinstance(text, str) else text))
    except RecursionError as error:
        raise BadMemoryIn(f"memory_in is nested too deeply: {_SHAPE}") from error
    except ValueError as error:
        problem = _without_unknown(str(error)).replace("`$", "`memory_in")
        raise BadMemoryIn(f"memory_in: {problem}; {_SHAPE}") from error
    if wire.topic_id is not None:
        _check_topic(wire.topic_id, "topic_id")
    related = wire.related_topic_ids or ()
    for position, topic_id in enumerate(related):
        _check_topic(topic_id, f"related_topic_ids[{position}]")
    corrections = tuple(_checked_correction(one, position) for position, one in enumerate(wire.corrections or ()))
    chosen = None if wire.filter is None else _checked_filter(wire.filter)
    try:
        notes = checked_notes(wire.notes or (), "memory_in.notes")
    except BadNote as error:
        raise BadMemoryIn(str(error)) from None
    return MemoryIn(wire.topic_id, related, corrections, notes, chosen)


def memory_out_member(out: MemoryOut) -> bytes:
    """Return `out` as a member of a JSON object."""
    return b'"memory_out":' + msgspec.json.encode(out)


def splice_memory_out_json(body: bytes, out: MemoryOut) -> bytes:
    """Add `memory_out` to `body` as its last member and change no other byte; other JSON stays unchanged."""
    members = decode_or_none(OBJECT, body)
    if members is None:
        return body
    end = body.rindex(b"}")
    comma = b"," if members else b""
    return b"".join((body[:end], comma, memory_out_member(out), body[end:]))


def memory_headers(
    *,
    status: str,
    turn_id: str,
    mode: str,
    injected_ids: Iterable[str] = (),
    timings_ms: Mapping[str, float] | None = None,
    problem: str = "",
) -> list[tuple[str, str]]:
    """Return the response headers of a memory request. `timings_ms` (`embed`, `search`, `inject`) become
    `Server-Timing`; `X-Memory-Injected` is cut after a whole id to `INJECTED_HEADER_BYTES_MAX`."""
    headers = [
        ("X-Memory-Status", status),
        ("X-Memory-Injected", _injected_value(injected_ids)),
        ("X-Memory-Turn", turn_id),
        ("X-Memory-Mode", mode),
    ]
    if problem:
        headers.append(("X-Memory-Problem", problem[:PROBLEM_HEADER_CHARACTERS_MAX]))
    if timings_ms:
        timings = ", ".join(f"{name};dur={milliseconds:.1f}" for name, milliseconds in timings_ms.items())
        headers.append(("Server-Timing", timings))
    return [(name, _UNPRINTABLE.sub("?", value)) for name, value in headers]  # so that no value begins another header


def _injected_value(injected_ids: Iterable[str]) -> str:
    value = ""
    for chunk_id in injected_ids:
        longer = f"{value},{chunk_id}" if value else chunk_id
        if len(longer) > INJECTED_HEADER_BYTES_MAX:
            break
        value = longer
    return value


def _checked_correction(correction: _WireCorrection, position: int) -> Correction:
    action = _ACTIONS.get(correction.action.strip().lower())
    if action is None:
        raise BadMemoryIn(
            f"memory_in: no action that memd knows - at `memory_in.corrections[{position}].action`; it is {_ACTION}"
        )
    if correction.content and action != "Update":
        field = f"memory_in.corrections[{position}].content"
        raise BadMemoryIn(f"{field} belongs to the action Update, not to {action}; leave it out")
    if correction.steps != 1 and action == "Update":
        field = f"memory_in.corrections[{position}].steps"
        raise BadMemoryIn(f"{field} belongs to the actions Helpful and Unhelpful, not to Update; leave it out")
    return Correction(correction.chunk_ids, action, correction.reason, correction.content or None, correction.steps)


def _checked_filter(given: _WireFilter) -> Selection:
    begin = None if given.since is None else _time(given.since, since, "from")
    end = None if given.to is None else _time(given.to, until, "to")
    try:
        return Selection(begin, end, kinds=given.kinds or (), sources=given.sources or (), tags=given.tags or ())
    except ValueError as error:
        raise BadMemoryIn(f"memory_in.filter: {error}") from None


def _time(given: str | int, read: Callable[[str], Moment], field: str) -> int:
    try:
        return int(read(str(given)))
    except ValueError:
        raise BadMemoryIn(
            f"memory_in.filter.{field} is no time; write it like 2026-11-20 or 2026-11-20T14:30"
        ) from None


def _without_unknown(problem: str) -> str:
    """Return the problem with the most similar known member, if any, instead of the unknown one's name."""
    found = _UNKNOWN.fullmatch(problem)
    if found is None:
        return problem
    near = difflib.get_close_matches(found[1].lower(), _MEMBERS, n=1)
    return f"it has a member that memd does not know{f'; did you mean {near[0]}?' if near else ''}{found[2]}"


def _check_topic(topic_id: str, field: str) -> None:
    try:
        checked_topic_id(topic_id)
    except BadTopicId as error:
        raise BadMemoryIn(f"memory_in.{field} is not a topic name: {TOPIC_ID_RULE}") from error
