"""Declaring an operation beside its handler: `@get("/memd/turns/{id}", "read", act="read")` on a function.

Rule: everything that is said about an operation is said here, and every surface reads it: the route and the right that
it needs, the audit's act, the OpenAPI document, the command's options and the tool of MCP. The rest is read from the
function's signature: `parts` are those of the daemon, each keyword is a parameter of the query, `query` the struct of
those that it shares with other operations, `body` that of its JSON body, `headers` those of the request, `key` what it
is known by when it is sent again, `who` the principal that asks, any other argument a part of the path. A function that
takes `who` asks for the right topic by topic; for any other the principal needs it in every topic. It returns what is
sent as JSON, or `WholeAnswer`, or yields pieces of an answer that is no JSON, or raises a `MemdError`. It knows nothing
of HTTP, and its module imports no server: a command reads it, too. `docs/openapi.json` is the `document` of all; a test
holds the two together.

A parameter that a route does not know, one that is given twice, and one of the wrong type or out of bounds are each
refused by name: a misspelt filter must not silently select everything. An `Extent`, of the audit's line, has nothing
that was said; of what a client wrote only names of topics and ids of chunks.
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
_AT = re.compile(r"(?s)\A(.*) - at `\$\.(\w+).*`")


Limit = Annotated[int, Meta(ge=1, le=PAGE_MAX, description="How many.")]
TheTopic = Annotated[str, Meta(description="The topic.")]
OnlyTopic = Annotated[str | None, Meta(description="Only this topic.")]
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
        """The choice. Raises BadQuestion: it can admit nothing."""
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
    """Return the parameters of a request as the struct of its route. Raises BadQuestion: a parameter is unknown,
    repeated, missing, of the wrong type or out of bounds."""
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
"""`any`: whoever has a token; `open`: also who has none."""
_DECLARED = "memd_route"
"""The attribute of a handler that has its declaration."""


class WholeAnswer(NamedTuple):
    """A whole answer that is no JSON."""

    content: bytes
    content_type: str


class Operation(msgspec.Struct, frozen=True):
    """The declaration of an operation, put on the function that does it. What changes something is always an act."""

    method: str
    path: str
    """With `{id}` for the part that varies."""
    right: RouteRight
    act: ActKind | None = None
    """Its kind in the audit; None where its answer has nothing that was said, only names, numbers and states."""
    touches: Callable[[Any], Extent] | None = None
    """Says of an answer which topics and chunks it has."""
    streams: str = ""
    """The content type of an answer that is no JSON."""
    tool: str = ""
    """Its name over MCP; empty: it is no tool."""
    body_bytes_max: int = 4 << 20

    def __post_init__(self) -> None:
        assert self.method == "GET" or self.act, f"{self.path} changes something: name its act"

    def __call__(self, handler: Handler) -> Handler:
        """Declare that this function does it."""
        vars(handler)[_DECLARED] = self
        return handler


get, post = partial(Operation, "GET"), partial(Operation, "POST")
"""Declare an operation that reads (HEAD is answered too), or one that changes something: its body is JSON."""


class Route(Operation, frozen=True, kw_only=True):
    """One operation, with what its handler's signature and docstring say."""

    handler: Callable[..., Any]
    name: str
    summary: str
    details: str
    """The first paragraph of the handler's docstring, and the rest."""
    query: type[NoQuery]
    own: tuple[str, ...]
    """Its parameters that the handler takes one by one."""
    body: type[Body] | None
    takes: frozenset[str]
    answer: Any

    @property
    def takes_who(self) -> bool:
        """Whether the handler asks for the right itself, topic by topic."""
        return "who" in self.takes


def routes_of(module: ModuleType) -> Iterator[Route]:
    """Yield the operations that the functions of a module declare, in order."""
    own = (one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__)
    return (route_of(handler) for handler in own if _DECLARED in getattr(handler, "__dict__", {}))


@cache
def route_of(handler: Callable[..., Any]) -> Route:
    """The operation that a handler declares."""
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
    """A daemon that is asked to do operations: the one that a command has found, or that of this process."""

    def ask(
        self, operation: Callable[..., Awaitable[Answer]], id_: str = "", body: object = None, **query: Any
    ) -> Answer:
        """Return the answer of an operation. `operation`: the function that declares it. `id_`: the part of its path
        that varies. Raises BadQuestion: the request is wrong; DaemonError: it refused, or does not answer."""
        raise NotImplementedError


def encoded(body: object) -> bytes:
    """A body as JSON; raises BadQuestion where a text in it cannot be."""
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
    """An error: its message and its type."""

    message: str
    type: str


class Refusal(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: Problem


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the document for these routes."""
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
