"""The description of memd's own routes, as an OpenAPI document, made from the routes themselves.

Rule: what a route takes and answers is read from its handler's types and words; only query parameters are named here.
`docs/openapi.json` is this document; a test holds the two together.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from memd import __version__
from memd.admin import writes as changes

Route = tuple[str, str, Any]

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_TOPIC = ("topic", _TEXT, "Only this topic; may be given again. Default: all.")
_ONE_TOPIC = ("topic", _TEXT, "Only this topic.")
_BEFORE = ("before", _TEXT, "Only what was before this time (2026-11-20T14:30) or canonical_id.")
_LIMIT = ("limit", {"type": "integer", "minimum": 1, "maximum": 500, "default": 50}, "How many.")
_SWITCH = {"type": "string", "enum": ["1"]}
PARAMETERS: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "/memd/search": [
        ("q", _TEXT, "The question."),
        _TOPIC,
        ("as_of", _TEXT, "Search what was stored up to this time or canonical_id."),
    ],
    "/memd/log": [_TOPIC, _BEFORE, _LIMIT],
    "/memd/chunks": [
        _TOPIC,
        ("contains", _TEXT, "Only chunks whose text has this, in any case."),
        ("all", _SWITCH, "Also those that were taken out."),
        _BEFORE,
        _LIMIT,
    ],
    "/memd/chunks/{id}": [_TOPIC],
    "/memd/buffer": [("topic", _TEXT, "The topic.")],
    "/memd/turns": [_ONE_TOPIC, ("before", _TEXT, "Only turns older than this one."), _LIMIT],
    "/memd/export": [_ONE_TOPIC, ("live", _SWITCH, "Only chunks as they are now.")],
}
"""By path: the name of a query parameter, its schema and what it means."""
REQUIRED = {("/memd/search", "q"), ("/memd/buffer", "topic")}
BODIES: dict[str, type] = {
    "/memd/corrections": changes.AskedCorrection,
    "/memd/undo": changes.AskedUndo,
    "/memd/backup": changes.AskedBackup,
}
STREAMS = {
    "/memd/events": "text/event-stream",
    "/memd/export": "application/jsonl",
    "/memd/metrics": "text/plain",
}
"""Routes that do not answer with JSON."""


class Problem(msgspec.Struct, frozen=True):
    """What is wrong, and of which kind."""

    message: str
    type: str


class Refusal(msgspec.Struct, frozen=True):
    """The answer to what cannot be answered."""

    error: Problem


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document for these routes: (method, pattern of the path, handler)."""
    answers = {handler: typing.get_type_hints(handler)["return"] for _, _, handler in routes}
    structs = [kind for kind in answers.values() if inspect.isclass(kind) and issubclass(kind, msgspec.Struct)]
    schemas, components = msgspec.json.schema_components(
        [Refusal, *structs, *BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    by_type: dict[Any, dict[str, Any]] = dict(zip([Refusal, *structs, *BODIES.values()], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, pattern, handler in routes:
        path = path_of(pattern)
        paths.setdefault(path, {})[method.lower()] = _operation(path, handler, by_type.get(answers[handler]), by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "memd",
            "version": __version__,
            "description": "memd's own routes. They are for programs and pages of this machine, or with auth.token set "
            "for who shows it. Times are microseconds since the epoch. Only POST changes anything.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "http://127.0.0.1:8765"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "apiKey", "in": "header", "name": "X-Memory-Token"}},
        },
    }


def path_of(pattern: str) -> str:
    """`/memd/turns/([^/]+)` as the document writes it."""
    return pattern.replace("([^/]+)", "{id}").replace("\\", "")


def _operation(
    path: str, handler: Any, schema: dict[str, Any] | None, by_type: dict[Any, dict[str, Any]]
) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "query",
            "description": meaning,
            "schema": kind,
            "required": (path, name) in REQUIRED,
        }
        for name, kind, meaning in PARAMETERS.get(path, [])
    ]
    if "{id}" in path:
        parameters.insert(0, {"name": "id", "in": "path", "required": True, "schema": _TEXT})
    content = {"application/json": {"schema": schema}} if schema else {STREAMS.get(path, "application/json"): {}}
    refusal = {"content": {"application/json": {"schema": by_type[Refusal]}}}
    operation: dict[str, Any] = {
        "operationId": handler.__name__,
        "summary": re.split(r"\n\n", inspect.getdoc(handler) or "")[0].replace("\n", " "),
        "parameters": parameters,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                str(status): {"description": meaning, **refusal}
                for status, meaning in (
                    (400, "Asked wrongly; the message says how."),
                    (401, "auth.token is set and was not shown."),
                    (403, "From another machine, or a page from elsewhere."),
                    (404, "There is no such thing."),
                    (503, "Not possible now."),
                )
            },
        },
    }
    if path in BODIES:
        body = {"application/json": {"schema": by_type[BODIES[path]]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation
