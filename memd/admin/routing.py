"""Declaring an operation beside its handler: `@get("/memd/turns/{id}", "read", act="read")` on a method.

Rule: everything that is said about an operation is said here, and every surface reads it: the route and the right that
it needs, the audit's act, the OpenAPI document, the command's options and the tool of MCP. The rest is read from the
handler's signature: `query` is the struct of its parameters, `body` that of its JSON body, `request` the request
itself, `who` the principal that asks, any other argument a part of the path. A handler that takes `who` asks for the
right topic by topic; for any other the principal needs it in every topic. A handler returns what is sent as JSON, or a
whole response, or raises a `MemdError`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec

from memd.admin.acts import Extent
from memd.admin.queries import Body, NoQuery
from memd.principals import Right
from memd.store.audit.chain import ActKind

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
RouteRight = Right | Literal["any", "open"]
"""`any`: whoever has a token; `open`: also who has none."""
BODY_BYTES_MAX = 4 << 20
_DECLARED = "memd_route"
"""The attribute of a handler that has its declaration."""


class _Declared(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    right: RouteRight
    act: ActKind | None
    touches: Callable[[Any], Extent] | None
    streams: str
    tool: str
    body_bytes_max: int


class Route(_Declared, frozen=True, kw_only=True):
    """One operation, as its handler declares it.

    `path` has `{id}` for the part that varies. `act` is its kind in the audit, None where its answer has nothing that
    was said, only names, numbers and states; `touches` says of an answer which topics and chunks it has. `streams` is
    the content type of an answer that is no JSON, `tool` its name over MCP; both are empty where there is none.
    """

    name: str
    """The handler's."""
    summary: str
    details: str
    """The first paragraph of the handler's docstring, and the rest."""
    query: type[NoQuery]
    body: type[Body] | None
    takes_request: bool
    takes_who: bool
    answer: Any
    """The type that the handler returns."""


def get(
    path: str,
    right: RouteRight,
    *,
    act: ActKind | None = None,
    touches: Callable[[Any], Extent] | None = None,
    streams: str = "",
    tool: str = "",
) -> Callable[[Handler], Handler]:
    """Declare an operation that reads; see `Route`. HEAD is answered too."""
    return _declare(
        method="GET",
        path=path,
        right=right,
        act=act,
        touches=touches,
        streams=streams,
        tool=tool,
        body_bytes_max=0,
    )


def post(
    path: str,
    right: RouteRight,
    *,
    act: ActKind,
    touches: Callable[[Any], Extent] | None = None,
    tool: str = "",
    body_bytes_max: int = BODY_BYTES_MAX,
) -> Callable[[Handler], Handler]:
    """Declare an operation that changes something, so it is always an act; its body is JSON."""
    return _declare(
        method="POST",
        path=path,
        right=right,
        act=act,
        touches=touches,
        streams="",
        tool=tool,
        body_bytes_max=body_bytes_max,
    )


def _declare(**columns: Any) -> Callable[[Handler], Handler]:
    def declare(handler: Handler) -> Handler:
        vars(handler)[_DECLARED] = columns
        return handler

    return declare


def routes_of(group: type) -> Iterator[Route]:
    """Yield the operations that the methods of a class declare, in order."""
    return (route_of(handler) for handler in vars(group).values() if _DECLARED in getattr(handler, "__dict__", {}))


def route_of(handler: Callable[..., Any]) -> Route:
    """The operation that a handler declares."""
    types = typing.get_type_hints(handler)
    summary, _, details = (inspect.getdoc(handler) or "").partition("\n\n")
    return Route(
        **vars(handler)[_DECLARED],
        name=handler.__name__,
        summary=summary.replace("\n", " "),
        details=details.replace("\n", " "),
        query=types.get("query", NoQuery),
        body=types.get("body"),
        takes_request="request" in types,
        takes_who="who" in types,
        answer=types["return"],
    )
