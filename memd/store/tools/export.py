"""The whole log as plain values, for people and other programs: a line of `memd export`, which is an entry as JSON and
can be imported again; and conversations in the formats of other programs.

Rule: writes nothing, needs no lock and works beside a running daemon: it exports what was acknowledged when it began.
The places of all entries are gathered first, then the entries are read one by one in order, so that memory does not
grow with the contents.

The fields of a line are those of `memd.entries`; this module defines only fields whose JSON form differs. A line is
read back as a draft of the same state, but without vector and message digests.

The log has chunks: messages are rebuilt from their speakers, word for word; tool calls stay spelled out as text. An
imported conversation is identified by its source. The log does not record the live conversation of a turn: turns of a
topic less than `PAUSE_US` apart count as one. Notes and documents belong to no conversation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import NODEFAULT, UNSET, Meta

from memd.entries import (
    PUBLIC_ID_DIGITS_MIN,
    UTILITY_RATIO,
    UTILITY_STEPS_LIMIT,
    ChunkState,
    Draft,
    Entry,
    Speaker,
    Status,
    checked_topic_id,
    text_with_roles,
)
from memd.errors import CorruptFile, StoreError, UnknownTopic
from memd.store.disk import LocalDisk
from memd.store.index.sealed_index import read_segment_meta
from memd.store.layout import TopicLayout, check_topic, segments_before, topic_ids_in
from memd.store.log.columns import ROW, Records, UInts, rows_from, superseded, uuid_halves
from memd.store.log.format import Header
from memd.store.log.recovery import read_log_file
from memd.store.log.segment import read_entry
from memd.wording import no_topic

Wants = Callable[[str], bool]

_ID_MAX = (1 << 53) - (1 << 40)
"""Ids after an imported one are larger, and must be exact in JavaScript too, up to 2^53."""
_EPOCH = datetime.fromtimestamp(0, UTC)
_LEFT_OUT = frozenset(
    ("vector", "digests", "completes", "group_left", "asked_by", "line_tokens", "terms", "erased", "pad", "unknown")
)
_FIRST = ("id", "uuid", "topic_id", "canonical_id", "origin_id", "status", "live", "utility_multiplier", "created_at")
"""The first members of every line; the others follow as their fields are defined."""

State = TypeVar("State", bound=ChunkState)
Hex = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Identity = Annotated[int, Meta(gt=0, le=_ID_MAX)]


def export(
    data_dir: Path,
    files: LocalDisk,
    *,
    topic_id: str | None,
    live_only: bool,
    is_wanted: Wants = lambda topic_id: True,
    tells_others: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield every readable entry of one topic or of all, by canonical_id, as `as_line` has it. `live_only` leaves out
    dead entries; `is_wanted` selects the topics if none is named; `tells_others` also exports ids, in `shown`, of
    chunks that no exported topic has. Raises BadTopicId: not a topic name; UnknownTopic: there is no such topic;
    StoreError: a file cannot be read."""
    names = exported_topics(data_dir, files, topic_id, is_wanted)
    for name, entry, live in exported_entries(data_dir, files, names, live_only=live_only, tells_others=tells_others):
        yield as_line(entry, name, live=live)


def exported_topics(
    data_dir: Path, files: LocalDisk, topic_id: str | None, is_wanted: Wants = lambda topic_id: True
) -> list[str]:
    """Return the topics to export: this one, or all wanted. Raises BadTopicId: not a topic name; UnknownTopic: there is
    no such topic."""
    topic_ids = topic_ids_in(files, data_dir)
    if topic_id is None:
        return [one for one in topic_ids if is_wanted(one)]
    if topic_id not in topic_ids:
        TopicLayout(data_dir, topic_id)  # raises BadTopicId if it is not a topic name
        raise UnknownTopic(no_topic(topic_id))
    return [topic_id]


def exported_entries(
    data_dir: Path, files: LocalDisk, names: Sequence[str], *, live_only: bool, tells_others: bool = True
) -> Iterator[tuple[str, Entry, bool]]:
    """Yield every readable entry of some topics, with its topic and whether it is live; see `export`."""
    logs, parts, dead = list[tuple[str, list[Path]]](), [np.empty(0, ROW)], [np.empty(0, np.bool_)]
    for layout in (TopicLayout(data_dir, name) for name in names):
        first = len(parts)
        for paths, header, found in log_columns(files, layout):
            check_topic(files, layout.directory, header, paths[0])
            logs.append((layout.topic_id, paths))
            parts.append(found)
        dead.append(superseded(np.concatenate([parts[0], *parts[first:]])))
    rows, is_dead = np.concatenate(parts), np.concatenate(dead)
    owners = np.repeat(np.arange(len(logs)), [len(one) for one in parts[1:]])
    known = None if tells_others else np.unique(rows["uuid_high"])
    parts.clear()
    for position in np.argsort(rows["canonical_id"], kind="stable").tolist():
        if not (live_only and is_dead[position]):
            with suppress(CorruptFile):  # `memd verify` reports it
                topic_id, paths = logs[owners[position]]
                entry = read_entry(files, paths, rows[position], dimension=None)
                yield topic_id, _without_others(entry, known), not is_dead[position]


def _without_others(entry: Entry, known: UInts | None) -> Entry:
    """Return the entry with only known chunks in `shown`, by the first halves of their uuids; None keeps all."""
    if known is None or entry.shown is UNSET:
        return entry
    is_known = np.isin(np.array([uuid_halves(one)[0] for one in entry.shown], dtype=np.uint64), known)
    shown = tuple(uuid for uuid, stays in zip(entry.shown, is_known.tolist(), strict=True) if stays)
    return msgspec.structs.replace(entry, shown=shown)


def log_columns(files: LocalDisk, layout: TopicLayout) -> Iterator[tuple[list[Path], Header | None, Records]]:
    """Yield the log files of a topic, oldest first: the file's name and the one it may get, its header (None if
    damaged) and the columns of its entries; for a sealed one those in its `.meta`."""
    data = active_bytes(files, layout)
    active = read_log_file(data, name=str(layout.active), dimension=None) if data is not None else None
    number = active.header.segment_id if active is not None and active.header is not None else None
    for segment_id in segments_before(files, layout, data, number):
        path = layout.bin(segment_id)
        try:
            header, meta = read_segment_meta(files, layout, segment_id)
            yield [path], header, meta.columns
        except StoreError:
            log_file = read_log_file(files.read(path), name=str(path), dimension=None)
            yield [path], log_file.header, rows_from(log_file.entries, log_file.spans)
    if active is not None:
        paths, count = [layout.active, *([] if number is None else [layout.bin(number)])], active.whole_count
        yield paths, active.header, rows_from(active.entries[:count], active.spans[:count])


def active_bytes(files: LocalDisk, layout: TopicLayout) -> bytes | None:
    """Read the `active.bin` of a topic; None if there is none at the moment. Raises StoreError: it cannot be read."""
    try:
        return files.read(layout.active)
    except StoreError:
        if files.size(layout.active) is None:  # just rotated, or nothing was ever appended
            return None
        return files.read(layout.active)  # created between the two reads, or damaged


class _Form(msgspec.Struct, frozen=True):
    """A field whose JSON form differs: its name and type in a line, and the conversions both ways."""

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
    steps = round(math.log(multiplier, UTILITY_RATIO))
    if abs(steps) > UTILITY_STEPS_LIMIT or not math.isclose(_multiplier(steps), multiplier, rel_tol=1e-6):
        raise ValueError(f"utility_multiplier {multiplier} is no power of {UTILITY_RATIO}, or out of range")
    return steps


def _multiplier(steps: int) -> float:
    return float(UTILITY_RATIO**steps)


_FORMS = {
    "public_id": _Form("id", str),
    "uuid": _Form("uuid", Hex, bytes.hex, bytes.fromhex),
    "canonical_id": _Form("canonical_id", Identity),
    "origin_id": _Form("origin_id", Identity),
    "status": _Form(
        "status", Literal["Active", "Deprecated"], lambda status: status.name.title(), lambda name: Status[name.upper()]
    ),
    "utility_steps": _Form("utility_multiplier", Annotated[float, Meta(gt=0)], _multiplier, _steps),
    **{name: _Form(name, datetime, _time, _microseconds) for name in ("appended_at", "created_at", "said_at")},
    **{
        name: _Form(
            name, tuple[Hex, ...], lambda uuids: [*map(bytes.hex, uuids)], lambda hex_: (*map(bytes.fromhex, hex_),)
        )
        for name in ("shown", "supersedes")
    },
}
_FIELDS = {field.name: field for field in msgspec.structs.fields(Entry) if field.name not in _LEFT_OUT}
_ALL_FORMS = {name: _FORMS.get(name) or _Form(name, field.type) for name, field in _FIELDS.items()}
_ORDER = dict.fromkeys([*_FIRST, *(form.name for form in _ALL_FORMS.values())])
_IDENTITY = ("public_id", "uuid", "canonical_id", "appended_at")
_LATER = ("speakers", "shown", "said_at", "author", "action_by")
_STATE = tuple(name for name in _FIELDS if name not in (*_IDENTITY, *_LATER))
"""Without the fields in `_LATER`: lines of a version without them have the same state, and so do lines with other
authors, which an import need not believe."""

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
"""The members of a line that an import reads. `live` follows from the log; members of later versions are ignored."""
_decoder = msgspec.json.Decoder(_Line)


def as_line(entry: Entry, topic_id: str, *, live: bool) -> dict[str, Any]:
    """Return the entry as JSON values, for `memd export`.

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
    """Return the content of a line for people, with each message after its role."""
    speakers = msgspec.convert(line.get("speakers", ()), tuple[Speaker, ...])
    return text_with_roles(line["content"], speakers)


def decode_line(line: bytes) -> tuple[str, Draft]:
    """Return the topic of a line of `memd export` and the draft of its entry, without a vector. Raises ValueError: it
    is no such line, or contradicts itself; BadTopicId: its topic_id is no topic name."""
    members: Any = _decoder.decode(line)
    values = {name: getattr(members, form.name) for name, form in _ALL_FORMS.items()}
    fields = {name: form.decode(values[name]) for name, form in _ALL_FORMS.items() if values[name] is not UNSET}
    canonical_id = fields.pop("canonical_id")
    fields.pop("appended_at", None)  # of the source's log
    draft = _without_text_if_deprecated(Draft(vector=b"", **fields))
    if not (members.uuid.startswith(members.id) and len(members.id) >= PUBLIC_ID_DIGITS_MIN):
        raise ValueError(f"id {members.id!r} is not the beginning of uuid {members.uuid}")
    if fields["origin_id"] > canonical_id:
        raise ValueError("origin_id is above canonical_id")
    if not draft.speakers_fit:
        raise ValueError("an offset of speakers is not within content, or not above the one before it")
    return checked_topic_id(members.topic_id), draft


def state_of(state: ChunkState) -> bytes:
    """Return a 16-byte hash of a line's fields, except its identity: equal for an entry and the draft of its line."""
    shown = _without_text_if_deprecated(state)
    values = {name: value for name in _STATE if (value := getattr(shown, name)) is not UNSET}
    return hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=16).digest()


def _without_text_if_deprecated(state: State) -> State:
    if state.status is Status.ACTIVE:
        return state
    return msgspec.structs.replace(state, content="", speakers=UNSET)


# Conversations

PAUSE_US = 3_600_000_000
"""An hour."""
TITLE_CHARACTERS_MAX = 60


class ToldMessage(msgspec.Struct):
    """One message."""

    role: str
    text: str
    at: int
    """Microseconds since the epoch, from its chunk."""


class Told(msgspec.Struct, frozen=True):
    """One conversation."""

    id: str
    topic_id: str
    messages: list[ToldMessage]
    called: str = ""

    @property
    def title(self) -> str:
        """Its given title, else its first words."""
        if self.called:
            return self.called
        first = next((one.text for one in self.messages if one.role == "user"), self.messages[0].text)
        words = " ".join(first.split())
        return words if len(words) <= TITLE_CHARACTERS_MAX else words[:TITLE_CHARACTERS_MAX].rstrip() + " …"

    @property
    def seconds(self) -> float:
        """The time of its first message, in seconds since the epoch."""
        return self.messages[0].at / 1e6


def conversations(entries: Iterable[Entry], topic_id: str) -> Iterator[Told]:
    """Rebuild the conversations in one topic's live entries, in the order of their beginnings."""
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
            yield Told(name, topic_id, messages, next((one for chunk in chunks for one in chunk.heading), ""))


def _said_at(entry: Entry) -> int:
    return entry.created_at if entry.said_at is msgspec.UNSET else entry.said_at


def _messages(chunks: Sequence[Entry]) -> list[ToldMessage]:
    messages: list[ToldMessage] = []
    for entry in chunks:
        at, roles = _said_at(entry), entry.roles or ("user",)
        first = entry.speakers[0].offset if entry.speakers else len(entry.content)
        if first:  # before the first speaker, or without any: the text of a correction
            messages.append(ToldMessage(roles[0], entry.content[:first], at))
        stretches = entry.stretches
        for speaker, text in stretches:
            if speaker is not stretches[-1][0]:
                text = text.removesuffix("\n")  # the joint between two messages
            if speaker.continues and messages and messages[-1].role == speaker.role:
                messages[-1].text += text
            else:
                messages.append(ToldMessage(speaker.role, text, at))
    return [one for one in messages if one.text.strip()]


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
    """Return the form that Open WebUI and LibreChat import: a root without a message, and a chain below it."""
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
"""By name: the encoder of a conversation, and whether each is a line; otherwise all form one array."""


def written(told: Iterable[Told], form: str) -> Iterator[bytes]:
    """Encode conversations, piece by piece."""
    encode, is_lines = FORMS[form]
    before = b"" if is_lines else b"["
    for one in told:
        yield before + msgspec.json.encode(encode(one)) + (b"\n" if is_lines else b"")
        before = b"" if is_lines else b",\n"
    if not is_lines:
        yield (before if before == b"[" else b"") + b"]\n"
