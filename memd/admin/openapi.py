"""The description of memd's own routes, as an OpenAPI document, made from the routes themselves.

Rule: parameters, bodies, answers and words are those of the handlers; nothing is named here twice. `docs/openapi.json`
is this document; a test holds the two together.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from memd import __version__
from memd.admin.routing import Route
from memd.entries import Moment

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
    answer = schema_of.get(route.answer)
    content = {"application/json": {"schema": answer}} if answer else {route.streams or "application/json": {}}
    refusal = {"content": {"application/json": {"schema": schema_of[Refusal]}}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"{route.details} {_right(route)}".lstrip(),
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


def _right(route: Route) -> str:
    if route.right == "open":
        return "Needs no token."
    if route.right == "any":
        return "Any token."
    return f"Needs the right `{route.right}` in {'the topics' if route.takes_who else 'every topic'}."


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    if "{id}" in route.path:
        yield {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    _, components = msgspec.json.schema_components([route.query], schema_hook=_schema_of_moment)
    [query] = components.values()
    for name, schema in query["properties"].items():
        description, default = schema.pop("description"), schema.pop("default", None)
        [kind] = (one for one in schema.pop("anyOf", [schema]) if one != {"type": "null"})
        required = name in query["required"]
        if default not in (None, "", ()):
            kind["default"] = default
        yield {"name": name, "in": "query", "description": description, "schema": kind, "required": required}


def _schema_of_moment(kind: type) -> dict[str, str]:
    assert issubclass(kind, Moment), f"{kind} is no type of a parameter"
    return {"type": "string"}
