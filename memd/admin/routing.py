"""Declaring an operation at its handler: `@get("/memd/turns/{id}", "read", act="read")` on a function.

Rule: an operation is declared here alone, and every surface reads the declaration: route and right, audit act, OpenAPI
document, command options, MCP tool. The rest comes from the function's signature: `parts` are the daemon's, a keyword
argument is a query parameter, `query` a struct of parameters shared with other operations, `body` the struct of the
JSON body, `headers` the request's, `key` its idempotency key, `who` the asking principal, any other argument a part of
the path. A function with `who` checks the right for each topic; otherwise the principal needs it in every topic. The
function returns a value for JSON or a `WholeAnswer`, or yields pieces of a non-JSON answer, or raises a `MemdError`. It
does not depend on HTTP, and its module imports no server, because commands read it too. `docs/openapi.json` is the
`document` of all operations, as a test ensures.

Unknown, repeated, mistyped and out-of-bounds parameters are rejected by name, because a misspelt filter must not
silently select everything. An audit line's `Extent` has no stored text, and of the client's input only topic names and
chunk ids.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta
from multidict import MultiDict, MultiMapping

from memd import __version__
from memd.entries import CHUNK_ID_PATTERN, DEFAULT_TOPIC_ID, TOPIC_ID_PATTERN, Moment
from memd.errors import BadQuestion
from memd.principals import OWNER_NAME, Right
from memd.selection import Selection, Since, Until, moment, since, until
from memd.store.audit import ActKind

IDS_MAX = 100
TOPICS_MAX = 64
"""Limit of names in one line; `count` has the full number."""
ALL_TOPICS = "*"
"""Recorded as the topic of an act that names none."""
FORBIDDEN = 403
BEFOREHAND = frozenset({"export", "backup", "erase", "token"})
"""Acts that need their first line on disk before they run."""


class Extent(msgspec.Struct, frozen=True):
    """The topics and chunks that an act concerns."""

    topics: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    count: int | None = None
    detail: str = ""

    def and_of(self, answer: Extent) -> Extent:
        """Return the extent of a request and its answer, as much of both as a line holds."""
        topics, ids = (*self.topics, *answer.topics), (*self.ids, *answer.ids)
        everything = (ALL_TOPICS,) if ALL_TOPICS in topics else ()
        written = tuple(dict.fromkeys(one for one in ids if CHUNK_ID_PATTERN.fullmatch(one)))[:IDS_MAX]
        return Extent(names_of(topics) or everything, written, answer.count, answer.detail or self.detail)


def chunks_in(chunks: Iterable[Any]) -> Extent:
    """Return the extent of an answer whose chunks have a topic and a uuid each."""
    listed = list(chunks)
    return Extent(tuple(one.topic_id for one in listed), tuple(one.uuid for one in listed), len(listed))


def names_of(named: Iterable[str]) -> tuple[str, ...]:
    """Return the valid topic names in a client's input, as many as a line holds."""
    return tuple(dict.fromkeys(one for one in named if TOPIC_ID_PATTERN.fullmatch(one)))[:TOPICS_MAX]


PAGE_MAX = 500
PAGE = 50
Query = TypeVar("Query", bound=msgspec.Struct)
_AT = re.compile(r"(?s)\A(.*) - at `\$\.(\w+).*`")


Limit = Annotated[int, Meta(ge=1, le=PAGE_MAX, description="How many.")]
TheTopic = Annotated[str, Meta(description="The topic.")]
OnlyTopic = Annotated[str | None, Meta(description="Only this topic.")]
Skip = Annotated[int, Meta(ge=0, le=1 << 40, description="Leave out so many at the beginning.")]
Before = Annotated[
    Moment | None, Meta(description="Only what was before this time (2026-11-20T14:30) or canonical_id.")
]


class _Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all queries and bodies."""

    @property
    def extent(self) -> Extent:
        """Topics in `topic` (none: all) or `topic_id`, and chunks in `chunk_ids`, for the audit."""
        asked = msgspec.structs.asdict(self)
        topics = asked.get("topic_id", asked.get("topic"))
        if topics in (None, ()):
            topics = (ALL_TOPICS,) if "topic" in asked else ()
        return Extent((topics,) if isinstance(topics, str) else topics, tuple(asked.get("chunk_ids", ())))


class NoQuery(_Parameters, frozen=True, kw_only=True):
    """A route without parameters, and the base of all queries."""


class Body(_Parameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all JSON bodies: unknown members are rejected."""


class TopicBody(Body, frozen=True, kw_only=True):
    """Base of bodies about one topic."""

    topic_id: str = DEFAULT_TOPIC_ID


class TopicsQuery(NoQuery, frozen=True, kw_only=True):
    """Routes that read from several topics."""

    topic: Annotated[tuple[str, ...], Meta(description="Only this topic; may be given again. Default: all.")] = ()


class FilterQuery(TopicsQuery, frozen=True, kw_only=True):
    """Routes that filter chunks."""

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
        """The selection. Raises BadQuestion: it admits no chunk."""
        try:
            authors = tuple("" if name == OWNER_NAME else name for name in self.author)
            chosen = self.role, self.kind, self.source, self.tag, self.contains, authors
            return Selection(self.since, self.to, *chosen)
        except ValueError as error:
            raise BadQuestion(str(error)) from None


class PeriodQuery(TopicsQuery, frozen=True, kw_only=True):
    """`GET /memd/usage`, and other routes about a period."""

    since: Annotated[Since | None, Meta(description="Only what happened from this time (2026-11-20) on.")] = (
        msgspec.field(default=None, name="from")
    )
    to: Annotated[Until | None, Meta(description="Only what happened before this time (of a date: its end).")] = None

    def has(self, at: int) -> bool:
        """Return whether a time, in microseconds since the epoch, is in the period."""
        return (self.since or 0) <= at < (self.to or 1 << 63)


def as_given(asked: Mapping[str, Any]) -> MultiMapping[str]:
    """Return parameters as in a request: as text, lists as repeated names, without those that are None."""
    given = MultiDict[str]()
    for name, value in asked.items():
        several = value if isinstance(value, list | tuple) else [] if value is None else [value]
        given.extend((name, str(one).lower() if isinstance(one, bool) else str(one)) for one in several)
    return given


def decode_query(given: MultiMapping[str], kind: type[Query]) -> Query:
    """Decode the parameters of a request into its route's struct. Raises BadQuestion: a parameter is unknown, repeated,
    missing, of the wrong type or out of bounds."""
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


Answer = TypeVar("Answer")
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any] | AsyncIterator[bytes]])
RouteRight = Right | Literal["any", "open"]
"""`any`: anyone with a token; `open`: also without a token."""
_DECLARED = "memd_route"
"""Attribute of a handler that holds its declaration."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """Base of answers out of several topics."""

    note: str | None = None
    """The topics that cannot be read and so are left out, with a reason, in a sentence for people."""


class WholeAnswer(NamedTuple):
    """A complete answer that is not JSON."""

    content: bytes
    content_type: str


class Operation(msgspec.Struct, frozen=True):
    """An operation's declaration, attached to its function. An operation that changes something always has an act."""

    method: str
    path: str
    """`{id}` marks the variable part."""
    right: RouteRight
    act: ActKind | None = None
    """Kind of its audit act; None if its answer has no stored text, only names, numbers and states."""
    touches: Callable[[Any], Extent] | None = None
    """Returns the extent of an answer."""
    streams: str = ""
    """Content type of an answer that is not JSON."""
    tool: str = ""
    """Name of its MCP tool; empty: none."""
    body_bytes_max: int = 4 << 20

    def __post_init__(self) -> None:
        assert self.method == "GET" or self.act, f"{self.path} changes something: name its act"

    def __call__(self, handler: Handler) -> Handler:
        """Attach the declaration to its function."""
        vars(handler)[_DECLARED] = self
        return handler


get, post = partial(Operation, "GET"), partial(Operation, "POST")
"""Declare an operation that only reads (also answers HEAD), or one that changes something and has a JSON body."""


class Route(Operation, frozen=True, kw_only=True):
    """An operation with the data from its handler's signature and docstring."""

    handler: Callable[..., Any]
    name: str
    summary: str
    details: str
    """Rest of the handler's docstring, after the first paragraph."""
    query: type[NoQuery]
    own: tuple[str, ...]
    """Parameters that the handler takes individually."""
    body: type[Body] | None
    takes: frozenset[str]
    answer: Any

    @property
    def takes_who(self) -> bool:
        """True if the handler checks the right for each topic."""
        return "who" in self.takes


def routes_of(module: ModuleType) -> Iterator[Route]:
    """Yield the operations declared in a module, in order."""
    own = (one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__)
    return (route_of(handler) for handler in own if _DECLARED in getattr(handler, "__dict__", {}))


@cache
def route_of(handler: Callable[..., Any]) -> Route:
    """Return the operation that a handler declares."""
    types = typing.get_type_hints(handler, include_extras=True)
    summary, _, details = (inspect.getdoc(handler) or "").partition("\n\n")
    own = [one for one in inspect.signature(handler).parameters.values() if one.kind is one.KEYWORD_ONLY]
    fields = [(one.name, types[one.name], *(() if one.default is one.empty else (one.default,))) for one in own]
    shared = types.get("query", NoQuery)
    query = msgspec.defstruct("Query", fields, bases=(shared,), frozen=True, kw_only=True)
    return Route(
        **msgspec.structs.asdict(vars(handler)[_DECLARED]),
        handler=handler,
        name=handler.__name__,
        summary=summary.replace("\n", " "),
        details=details.replace("\n", " "),
        query=typing.cast(type[NoQuery], query),
        own=tuple(one.name for one in own),
        body=types.get("body"),
        takes=frozenset(types),
        answer=types["return"],
    )


class AskedDaemon(Protocol):
    """A daemon that runs operations: the one found by a command, or that of this process."""

    def ask(
        self, operation: Callable[..., Awaitable[Answer]], id_: str = "", body: object = None, **query: Any
    ) -> Answer:
        """Return the answer of an operation. `operation`: its function. `id_`: the variable part of its path. Raises
        BadQuestion: the request is wrong; DaemonError: it refused, or does not answer."""
        raise NotImplementedError


def encoded(body: object) -> bytes:
    """Encode a body as JSON; raises BadQuestion for a text that JSON cannot hold."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        raise BadQuestion(NO_TEXT) from None


NO_TEXT = "a text that was given has bytes that are no UTF-8; set PYTHONUTF8=1 (or LC_ALL=C.UTF-8) and give it again"
REFUSALS = (
    (400, "A parameter or the body is wrong; the message says how."),
    (401, "A token is needed and the request carries none that is known."),
    (403, "The token lacks the right, or the request is from another machine, or a page of another origin."),
    (404, "Not found."),
    (503, "Not possible at the moment; the message says why."),
)


class Problem(msgspec.Struct, frozen=True):
    """An error with its message and type."""

    message: str
    type: str


class Refusal(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: Problem


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    structs = [route.answer for route in routes if inspect.isclass(route.answer)]
    described = [Refusal, *(one for one in structs if issubclass(one, msgspec.Struct))]
    described += [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(described, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(described, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "memd",
            "version": __version__,
            "description": "memd's own routes. They are for programs and pages of this machine, or where there are "
            "tokens for whoever carries one with the right. Times are microseconds since the epoch. Only POST changes "
            "anything.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "http://127.0.0.1:8766"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "apiKey", "in": "header", "name": "X-Memory-Token"}},
        },
    }


def _operation(route: Route, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    rights = {"open": "Needs no token.", "any": "Any token."}
    needs = f"Needs the right `{route.right}` in {'the topics' if route.takes_who else 'every topic'}."
    answer = schema_of.get(route.answer)
    content = {"application/json": {"schema": answer}} if answer else {route.streams or "application/json": {}}
    refusal = {"content": {"application/json": {"schema": schema_of[Refusal]}}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"{route.details} {rights.get(route.right, needs)}".lstrip(),
        "parameters": list(_parameters(route)),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{str(status): {"description": meaning, **refusal} for status, meaning in REFUSALS},
        },
    }
    if route.body is not None:
        body = {"application/json": {"schema": schema_of[route.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    if "{id}" in route.path:
        yield {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    _, components = msgspec.json.schema_components([route.query], schema_hook=lambda moment: {"type": "string"})
    [query] = components.values()
    for name, schema in query["properties"].items():
        description, default = schema.pop("description"), schema.pop("default", None)
        [kind] = (one for one in schema.pop("anyOf", [schema]) if one != {"type": "null"})
        required = name in query["required"]
        if default not in (None, "", ()):
            kind["default"] = default
        yield {"name": name, "in": "query", "description": description, "schema": kind, "required": required}
