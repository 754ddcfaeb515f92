"""One line of `memd export`: an entry as JSON, and what `memd import` makes of it again.

Rule: pure. The fields are those of `memd.entries`; only what JSON has in another form stands here. Read back, a line
gives the draft of the same state; its vector and the digests of its messages are not in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import NODEFAULT, UNSET, Meta

from memd.entries import (
    PUBLIC_ID_DIGITS_MIN,
    ChunkState,
    Draft,
    Entry,
    Speaker,
    Status,
    checked_topic_id,
    text_with_roles,
)
from memd.settings.model import UTILITY_STEPS_LIMIT

_ID_MAX = (1 << 53) - (1 << 40)
"""The ids after an imported one are larger, and must be exact in JavaScript too, up to 2^53."""
_EPOCH = datetime.fromtimestamp(0, UTC)
_LEFT_OUT = {"vector", "digests", "completes", "group_left", "asked_by", "line_tokens", "terms", "erased", "unknown"}
EXPORTED_RATIO = 1.5
"""Of `utility_multiplier` in a line, whatever `utility.step_ratio` is: an import makes steps of it again."""
_FIRST = ("id", "uuid", "topic_id", "canonical_id", "origin_id", "status", "live", "utility_multiplier", "created_at")
"""The members that every line begins with; the others follow as their fields are defined."""

State = TypeVar("State", bound=ChunkState)
Hex = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Identity = Annotated[int, Meta(gt=0, le=_ID_MAX)]


class _Form(msgspec.Struct, frozen=True):
    """A field whose JSON form differs: its name and type in a line, and the way there and back."""

    name: str
    type: Any
    encode: Callable[[Any], Any] = lambda value: value
    decode: Callable[[Any], Any] = lambda value: value


def _time(microseconds: int) -> str:
    return (_EPOCH + timedelta(microseconds=microseconds)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _microseconds(time: datetime) -> int:
    if time.tzinfo is None:
        raise ValueError("a time is without its time zone")
    if time < _EPOCH:
        raise ValueError("a time is before 1970")
    return (time - _EPOCH) // timedelta(microseconds=1)


def _steps(multiplier: float) -> int:
    steps = round(math.log(multiplier, EXPORTED_RATIO))
    if abs(steps) > UTILITY_STEPS_LIMIT or not math.isclose(_multiplier(steps), multiplier, rel_tol=1e-6):
        raise ValueError(f"utility_multiplier {multiplier} is no power of {EXPORTED_RATIO}, or out of range")
    return steps


def _multiplier(steps: int) -> float:
    return float(EXPORTED_RATIO**steps)


_FORMS = {
    "public_id": _Form("id", str),
    "uuid": _Form("uuid", Hex, bytes.hex, bytes.fromhex),
    "canonical_id": _Form("canonical_id", Identity),
    "appended_at": _Form("appended_at", datetime, _time, _microseconds),
    "origin_id": _Form("origin_id", Identity),
    "status": _Form(
        "status", Literal["Active", "Deprecated"], lambda status: status.name.title(), lambda name: Status[name.upper()]
    ),
    "utility_steps": _Form("utility_multiplier", Annotated[float, Meta(gt=0)], _multiplier, _steps),
    "created_at": _Form("created_at", datetime, _time, _microseconds),
    "said_at": _Form("said_at", datetime, _time, _microseconds),
    "shown": _Form(
        "shown",
        tuple[Hex, ...],
        lambda uuids: [uuid.hex() for uuid in uuids],
        lambda names: tuple(map(bytes.fromhex, names)),
    ),
    "supersedes": _Form(
        "supersedes",
        tuple[Hex, ...],
        lambda uuids: [uuid.hex() for uuid in uuids],
        lambda names: tuple(map(bytes.fromhex, names)),
    ),
}
_FIELDS = {field.name: field for field in msgspec.structs.fields(Entry) if field.name not in _LEFT_OUT}
_ALL_FORMS = {name: _FORMS.get(name) or _Form(name, field.type) for name, field in _FIELDS.items()}
_ORDER = dict.fromkeys([*_FIRST, *(form.name for form in _ALL_FORMS.values())])
_IDENTITY = ("public_id", "uuid", "canonical_id", "appended_at")
_LATER = ("speakers", "shown", "said_at", "author", "action_by")
_STATE = tuple(name for name in _FIELDS if name not in (*_IDENTITY, *_LATER))
"""Without those in `_LATER`: a line of a version without them tells of the same state, and so does one that names other
authors, whom an import need not believe."""

_Line = msgspec.defstruct(
    "_Line",
    [
        ("topic_id", str),
        *(
            (form.name, form.type, UNSET if _FIELDS[name].default is UNSET else NODEFAULT)
            for name, form in _ALL_FORMS.items()
        ),
    ],
    frozen=True,
    kw_only=True,
)
"""The members of a line that an import reads; `live` follows from the log, and what a later version adds is ignored."""
_decoder = msgspec.json.Decoder(_Line)


def as_line(entry: Entry, topic_id: str, *, live: bool) -> dict[str, Any]:
    """The entry as JSON values, for `memd export`.

    The members are id, uuid (hex), topic_id, canonical_id, origin_id, status ("Active" or "Deprecated"), live,
    utility_multiplier, created_at (ISO 8601, UTC), and the fields of `ChunkState` from `content` on.
    """
    members: dict[str, Any] = {"topic_id": topic_id, "live": live}
    entry = _without_text_if_deprecated(entry)
    for name, form in _ALL_FORMS.items():
        value = getattr(entry, name)
        if value is not UNSET:
            plain = msgspec.to_builtins(form.encode(value))
            members[form.name] = list(plain) if isinstance(plain, tuple) else plain
    return {name: members[name] for name in _ORDER if name in members}


def shown_text(line: Mapping[str, Any]) -> str:
    """The content of a line as people read it: every message opened by its role."""
    speakers = msgspec.convert(line.get("speakers", ()), tuple[Speaker, ...])
    return text_with_roles(line["content"], speakers)


def decode_line(line: bytes) -> tuple[str, Draft]:
    """The topic of a line of `memd export` and the draft of its entry, without a vector.

    Raises:
        ValueError: it is no such line, or contradicts itself.
        BadTopicId: its topic_id is no topic name.
    """
    members: Any = _decoder.decode(line)
    values = {name: getattr(members, form.name) for name, form in _ALL_FORMS.items()}
    fields = {name: form.decode(values[name]) for name, form in _ALL_FORMS.items() if values[name] is not UNSET}
    canonical_id = fields.pop("canonical_id")
    fields.pop("appended_at", None)  # of the log that it came from
    draft = _without_text_if_deprecated(Draft(vector=b"", **fields))
    if not (members.uuid.startswith(members.id) and len(members.id) >= PUBLIC_ID_DIGITS_MIN):
        raise ValueError(f"id {members.id!r} is not the beginning of uuid {members.uuid}")
    if fields["origin_id"] > canonical_id:
        raise ValueError("origin_id is above canonical_id")
    if not draft.speakers_fit:
        raise ValueError("an offset of speakers is not within content, or not above the one before it")
    return checked_topic_id(members.topic_id), draft


def state_of(state: ChunkState) -> bytes:
    """16 bytes over what a line has of an entry, its identity aside: equal for an entry and the draft of its line."""
    shown = _without_text_if_deprecated(state)
    values = {name: value for name in _STATE if (value := getattr(shown, name)) is not UNSET}
    return hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=16).digest()


def _without_text_if_deprecated(state: State) -> State:
    if state.status is Status.ACTIVE:
        return state
    return msgspec.structs.replace(state, content="", speakers=UNSET)
