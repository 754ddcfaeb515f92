"""Declaring a route beside its handler: `@get("/memd/turns/{id}")` on a method.

Rule: everything about a route is read from its handler's signature: `query` is the struct of its parameters, `body`
that of its JSON body, `request` the request itself, any other argument a part of the path. A handler returns what is
sent as JSON, or a whole response, or raises a `MemdError`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec

from memd.admin.queries import NoQuery

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
BODY_BYTES_MAX = 4 << 20
_DECLARED = "memd_route"
"""The attribute of a handler that has its method, its path and the most bytes of its body."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One route, as its handler declares it."""

    method: str
    path: str
    """With `{id}` for the part that varies."""
    name: str
    """The handler's."""
    summary: str
    """The first paragraph of the handler's docstring."""
    query: type[msgspec.Struct]
    body: type | None
    takes_request: bool
    answer: Any
    """The type that the handler returns."""
    body_bytes_max: int


def get(path: str) -> Callable[[Handler], Handler]:
    """Declare a route that reads. HEAD is answered too."""
    return _declare("GET", path)


def post(path: str, body_bytes_max: int = BODY_BYTES_MAX) -> Callable[[Handler], Handler]:
    """Declare a route that changes something; its body is JSON."""
    return _declare("POST", path, body_bytes_max)


def routes_of(group: type) -> Iterator[Route]:
    """Yield the routes that the methods of a class declare, in order."""
    for name, handler in vars(group).items():
        if _DECLARED not in getattr(handler, "__dict__", {}):
            continue
        method, path, body_bytes_max = vars(handler)[_DECLARED]
        types = typing.get_type_hints(handler)
        yield Route(
            method=method,
            path=path,
            name=name,
            summary=(inspect.getdoc(handler) or "").partition("\n\n")[0].replace("\n", " "),
            query=types.get("query", NoQuery),
            body=types.get("body"),
            takes_request="request" in types,
            answer=types["return"],
            body_bytes_max=body_bytes_max,
        )


def _declare(method: str, path: str, body_bytes_max: int = 0) -> Callable[[Handler], Handler]:
    def declare(handler: Handler) -> Handler:
        vars(handler)[_DECLARED] = (method, path, body_bytes_max)
        return handler

    return declare
