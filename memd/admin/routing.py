"""Declaring a route beside its handler: `@get("/memd/turns/{id}")` on a method.

Rule: no route without a right. The rest about it is read from its handler's signature: `query` is the struct of its
parameters, `body` that of its JSON body, `request` the request itself, `who` the principal that asks, any other
argument a part of the path. A handler that takes `who` asks for the right topic by topic; for any other the principal
needs it in every topic. A handler returns what is sent as JSON, or a whole response, or raises a `MemdError`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec

from memd.admin.queries import NoQuery
from memd.principals import Right

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
RouteRight = Right | Literal["any", "open"]
"""`any`: whoever has a token; `open`: also who has none."""
BODY_BYTES_MAX = 4 << 20
_DECLARED = "memd_route"
"""The attribute of a handler that has its method, its path, its right and the most bytes of its body."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One route, as its handler declares it."""

    method: str
    path: str
    """With `{id}` for the part that varies."""
    right: RouteRight
    name: str
    """The handler's."""
    summary: str
    """The first paragraph of the handler's docstring."""
    query: type[msgspec.Struct]
    body: type | None
    takes_request: bool
    takes_who: bool
    answer: Any
    """The type that the handler returns."""
    body_bytes_max: int


def get(path: str, right: RouteRight) -> Callable[[Handler], Handler]:
    """Declare a route that reads. HEAD is answered too."""
    return _declare("GET", path, right)


def post(path: str, right: RouteRight, body_bytes_max: int = BODY_BYTES_MAX) -> Callable[[Handler], Handler]:
    """Declare a route that changes something; its body is JSON."""
    return _declare("POST", path, right, body_bytes_max)


def routes_of(group: type) -> Iterator[Route]:
    """Yield the routes that the methods of a class declare, in order."""
    for name, handler in vars(group).items():
        if _DECLARED not in getattr(handler, "__dict__", {}):
            continue
        method, path, right, body_bytes_max = vars(handler)[_DECLARED]
        types = typing.get_type_hints(handler)
        yield Route(
            method=method,
            path=path,
            right=right,
            name=name,
            summary=(inspect.getdoc(handler) or "").partition("\n\n")[0].replace("\n", " "),
            query=types.get("query", NoQuery),
            body=types.get("body"),
            takes_request="request" in types,
            takes_who="who" in types,
            answer=types["return"],
            body_bytes_max=body_bytes_max,
        )


def _declare(method: str, path: str, right: RouteRight, body_bytes_max: int = 0) -> Callable[[Handler], Handler]:
    def declare(handler: Handler) -> Handler:
        vars(handler)[_DECLARED] = (method, path, right, body_bytes_max)
        return handler

    return declare
