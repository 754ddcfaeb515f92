"""The parameters and bodies of memd's operations: one struct each, decoded strictly; and the extent of an act.

Rule: a parameter that a route does not know, one that is given twice, and one of the wrong type or out of bounds are
each refused by name. A misspelt filter must not silently select everything. An extent has nothing that was said; of
what a client wrote only names of topics and ids of chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from multidict import MultiDict, MultiMapping

from memd.entries import CHUNK_ID_PATTERN, DEFAULT_TOPIC_ID, TOPIC_ID_PATTERN, Moment
from memd.errors import BadQuestion
from memd.principals import OWNER_NAME
from memd.selection import Selection, Since, Until, moment, since, until

IDS_MAX = 100
TOPICS_MAX = 64
"""Of one line; `count` says how many there were."""
ALL_TOPICS = "*"
"""The topics of an act that names none."""
FORBIDDEN = 403
BEFOREHAND = frozenset({"export", "backup", "erase", "token"})
"""Acts that are not done unless a line that they begin is on disk."""


class Extent(msgspec.Struct, frozen=True):
    """The extent of an act."""

    topics: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    count: int | None = None
    detail: str = ""

    def and_of(self, answer: Extent) -> Extent:
        """The extent of a request and its answer, as much of both as a line holds."""
        topics, ids = (*self.topics, *answer.topics), (*self.ids, *answer.ids)
        everything = (ALL_TOPICS,) if ALL_TOPICS in topics else ()
        written = tuple(dict.fromkeys(one for one in ids if CHUNK_ID_PATTERN.fullmatch(one)))[:IDS_MAX]
        return Extent(names_of(topics) or everything, written, answer.count, answer.detail or self.detail)


def chunks_in(chunks: Iterable[Any]) -> Extent:
    """The extent of an answer with chunks, each of which has its topic and its uuid."""
    listed = list(chunks)
    return Extent(tuple(one.topic_id for one in listed), tuple(one.uuid for one in listed), len(listed))


def names_of(named: Iterable[str]) -> tuple[str, ...]:
    """The names of topics among what a client gave as such, as many as a line holds."""
    return tuple(dict.fromkeys(one for one in named if TOPIC_ID_PATTERN.fullmatch(one)))[:TOPICS_MAX]


PAGE_MAX = 500
PAGE = 50
Query = TypeVar("Query", bound=msgspec.Struct)
_AT = re.compile(r"(?s)(.*) - at `\$\.(\w+).*`")


Limit = Annotated[int, Meta(ge=1, le=PAGE_MAX, description="How many.")]
Skip = Annotated[int, Meta(ge=0, le=1 << 40, description="Leave out so many at the beginning.")]
Before = Annotated[
    Moment | None, Meta(description="Only what was before this time (2026-11-20T14:30) or canonical_id.")
]


class _Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all queries and bodies."""

    @property
    def extent(self) -> Extent:
        """The topics in `topic` (none: all) or `topic_id`, and the chunks in `chunk_ids`, for the audit."""
        asked = msgspec.structs.asdict(self)
        topics = asked.get("topic_id", asked.get("topic"))
        if topics in (None, ()):
            topics = (ALL_TOPICS,) if "topic" in asked else ()
        return Extent((topics,) if isinstance(topics, str) else topics, tuple(asked.get("chunk_ids", ())))


class NoQuery(_Parameters, frozen=True, kw_only=True):
    """Routes without parameters, and the base of all queries."""


class Body(_Parameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all JSON bodies: an unknown member is refused."""


class TopicBody(Body, frozen=True, kw_only=True):
    """The base of bodies that are about one topic."""

    topic_id: str = DEFAULT_TOPIC_ID


class TopicsQuery(NoQuery, frozen=True, kw_only=True):
    """Routes that read from several topics."""

    topic: Annotated[tuple[str, ...], Meta(description="Only this topic; may be given again. Default: all.")] = ()


class TopicQuery(NoQuery, frozen=True, kw_only=True):
    """`GET /memd/buffer`, and other routes that read from one topic."""

    topic: Annotated[str, Meta(description="The topic.")]


class AnyTopicQuery(NoQuery, frozen=True, kw_only=True):
    """Routes that read from one topic or all."""

    topic: Annotated[str | None, Meta(description="Only this topic.")] = None


class FilterQuery(TopicsQuery, frozen=True, kw_only=True):
    """Routes that choose among chunks."""

    since: Annotated[
        Since | None,
        Meta(description="Only what was said from this time (2026-11-20, 2026-11-20T14:30) or canonical_id on."),
    ] = msgspec.field(default=None, name="from")
    to: Annotated[
        Until | None, Meta(description="Only what was said before this time (of a date: its end) or canonical_id.")
    ] = None
    role: Annotated[tuple[str, ...], Meta(description="Only where this role speaks; may be given again.")] = ()
    kind: Annotated[
        tuple[str, ...], Meta(description="Only this kind (turn, note, document); may be given again.")
    ] = ()
    source: Annotated[tuple[str, ...], Meta(description="Only from this source; may be given again.")] = ()
    tag: Annotated[tuple[str, ...], Meta(description="Only notes with this tag; may be given again.")] = ()
    author: Annotated[
        tuple[str, ...], Meta(description="Only what this principal said or wrote (owner); may be given again.")
    ] = ()
    contains: Annotated[str, Meta(description="Only chunks whose text has this, in any case.")] = ""

    @property
    def wanted(self) -> Selection:
        """The choice.

        Raises:
            BadQuestion: it can admit nothing.
        """
        try:
            authors = tuple("" if name == OWNER_NAME else name for name in self.author)
            chosen = self.role, self.kind, self.source, self.tag, self.contains, authors
            return Selection(self.since, self.to, *chosen)
        except ValueError as error:
            raise BadQuestion(str(error)) from None


class PeriodQuery(TopicsQuery, frozen=True, kw_only=True):
    """`GET /memd/usage`, and other routes that tell of a stretch of time."""

    since: Annotated[Since | None, Meta(description="Only what happened from this time (2026-11-20) on.")] = (
        msgspec.field(default=None, name="from")
    )
    to: Annotated[Until | None, Meta(description="Only what happened before this time (of a date: its end).")] = None

    def has(self, at: int) -> bool:
        """Whether a moment, in microseconds since the epoch, is in the stretch."""
        return (self.since or 0) <= at < (self.to or 1 << 63)


def as_given(asked: Mapping[str, Any]) -> MultiMapping[str]:
    """Parameters as a request has them: text, several by the same name, and none that is None."""
    given = MultiDict[str]()
    for name, value in asked.items():
        several = value if isinstance(value, list | tuple) else [] if value is None else [value]
        given.extend((name, str(one).lower() if isinstance(one, bool) else str(one)) for one in several)
    return given


def decode_query(given: MultiMapping[str], kind: type[Query]) -> Query:
    """Return the parameters of a request as the struct of its route.

    Raises:
        BadQuestion: a parameter is unknown, repeated, missing, of the wrong type or out of bounds.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name in dict.fromkeys(given):
        if name not in fields:
            known = f"it has {', '.join(fields)}" if fields else "it has none at all"
            raise BadQuestion(f"this route has no parameter {name[:60]!r}; {known}")
        several, info = given.getall(name), msgspec.inspect.type_info(fields[name].type)
        info = info.type if isinstance(info, msgspec.inspect.Metadata) else info
        if isinstance(info, msgspec.inspect.VarTupleType):
            values[name] = several
        elif len(several) > 1:
            raise BadQuestion(f"the parameter {name} is given {len(several)} times; give it once")
        else:
            values[name] = several[0]
    missing = [name for name, field in fields.items() if field.required and name not in values]
    if missing:
        raise BadQuestion(f"the parameter {missing[0]} is missing")
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=lambda moment, text: _READ[moment](text))
    except msgspec.ValidationError as error:
        raise BadQuestion(_AT.sub(r"the parameter \2: \1", str(error))) from None


_READ: dict[type, Callable[[str], Moment]] = {Moment: moment, Since: since, Until: until}
