"""Declaring an operation beside its handler: `@get("/memd/turns/{id}", "read", act="read")` on a function.

Rule: everything that is said about an operation is said here, and every surface reads it: the route and the right that
it needs, the audit's act, the OpenAPI document, the command's options and the tool of MCP. The rest is read from the
function's signature: `parts` are those of the daemon, `query` is the struct of its parameters, `body` that of its JSON
body, `headers` those of the request, `key` what it is known by when it is sent again, `who` the principal that asks,
any other argument a part of the path. A function that takes `who` asks for the right topic by topic; for any other the
principal needs it in every topic. It returns what is sent as JSON, or `WholeAnswer`, or yields pieces of an answer that
is no JSON, or raises a `MemdError`. It knows nothing of HTTP, and its module imports no server: a command reads it,
too.
`docs/openapi.json` is the `document` of all; a test holds the two together.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from memd import __version__
from memd.admin.queries import Body, Extent, NoQuery
from memd.principals import Right
from memd.store.audit import ActKind

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
    """The handler's."""
    summary: str
    details: str
    """The first paragraph of the handler's docstring, and the rest."""
    query: type[NoQuery]
    body: type[Body] | None
    takes: frozenset[str]
    """The names of the handler's arguments."""
    answer: Any
    """The type that the handler returns."""

    @property
    def takes_who(self) -> bool:
        """Whether the handler asks for the right itself, topic by topic."""
        return "who" in self.takes


def routes_of(module: ModuleType) -> Iterator[Route]:
    """Yield the operations that the functions of a module declare, in order."""
    own = (one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__)
    return (route_of(handler) for handler in own if _DECLARED in getattr(handler, "__dict__", {}))


def route_of(handler: Callable[..., Any]) -> Route:
    """The operation that a handler declares."""
    types = typing.get_type_hints(handler)
    summary, _, details = (inspect.getdoc(handler) or "").partition("\n\n")
    return Route(
        **msgspec.structs.asdict(vars(handler)[_DECLARED]),
        handler=handler,
        name=handler.__name__,
        summary=summary.replace("\n", " "),
        details=details.replace("\n", " "),
        query=types.get("query", NoQuery),
        body=types.get("body"),
        takes=frozenset(types),
        answer=types["return"],
    )


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
