"""The act that each route is, for the audit, and what a line says about one.

Rule: every route has its line in `ACTS`, a test sees to that. A line says which topics and chunks and how many: nothing
that was said, and of what a client wrote only names of topics and ids of chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from memd.entries import CHUNK_ID_PATTERN, TOPIC_ID_PATTERN

IDS_MAX = 100
TOPICS_MAX = 64
"""Of one line; `count` says how many there were."""
ALL_TOPICS = "*"
"""The topics of an act that names none."""
FORBIDDEN = 403

ACTS: dict[str, str | None] = {
    "GET /memd/health": None,
    "GET /memd/me": None,
    "GET /memd/stats": None,
    "GET /memd/topics": None,
    "GET /memd/buffer": "read",
    "GET /memd/search": "search",
    "GET /memd/log": "read",
    "GET /memd/chunks": "read",
    "GET /memd/days": None,
    "GET /memd/chunks/{id}": "read",
    "GET /memd/export": "export",
    "GET /memd/digest": "read",
    "GET /memd/chunks/{id}/related": "read",
    "GET /memd/entities": "read",
    "GET /memd/turns": "read",
    "GET /memd/receipts": "read",
    "GET /memd/turns/{id}": "read",
    "GET /memd/turns/{id}/replay": "search",
    "GET /memd/conversations": "read",
    "GET /memd/conversations/{id}": "read",
    "GET /memd/transcript": "read",
    "GET /memd/usage": None,
    "GET /memd/figures": None,
    "GET /memd/events": "read",
    "GET /memd/metrics": None,
    "POST /memd/notes": "write",
    "GET /memd/documents": None,
    "GET /memd/documents/chunks": "read",
    "POST /memd/documents": "write",
    "POST /memd/documents/remove": "correct",
    "GET /memd/sources": None,
    "GET /memd/index": None,
    "POST /memd/index": "write",
    "POST /memd/import/messages": "import",
    "POST /memd/import/entries": "import",
    "POST /memd/corrections": "correct",
    "POST /memd/undo": "correct",
    "POST /memd/erase": "erase",
    "POST /memd/backup": "backup",
    "POST /memd/tokens/reload": "settings",
    "GET /memd/audit": "audit",
    "GET /memd/grants": None,
    "POST /memd/grants/end": "token",
    "GET /memd/proof": None,
    "GET /memd/openapi.json": None,
}
"""By method and path. None: its answer has nothing that was said, only names, numbers and states."""
BEFOREHAND = frozenset({"export", "backup", "erase", "token"})
"""Acts that are not done unless a line that they begin is on disk."""
ENDLESS = frozenset({"/memd/events"})
"""They are told of when they begin."""

COUNTED = web.RequestKey("counted", int)
"""Where the handler of a streamed answer says how many entries it sent."""
_COUNTS = ("applied", "appended", "written", "taken_out", "linked", "copied", "kept", "erased")
"""Members of answers that count what was done."""


class Extent(msgspec.Struct, frozen=True):
    """The extent of an act: which topics and chunks, and how many."""

    topics: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    count: int | None = None
    detail: str = ""


def extent_asked(query: object, body: object, parts: Iterable[str]) -> Extent:
    """Return what a request names: its topics and chunks.

    Args:
        parts: those of the path that vary.
    """
    named = getattr(query, "topic", None) or getattr(body, "topic_id", None) or ()
    everything = (ALL_TOPICS,) if hasattr(query, "topic") else ()
    topics = names_of([named] if isinstance(named, str) else named) or everything
    ids = _ids((*parts, *getattr(body, "chunk_ids", ())))
    dry_run = "dry run" if getattr(body, "dry_run", False) else ""
    return Extent(topics, ids, detail=getattr(body, "folder", "") or dry_run)


def extent_told(asked: Extent, answer: object) -> Extent:
    """Return what was asked for together with what the answer has."""
    listed = _items(answer)
    items = listed or ()
    chunks = [
        one
        for item in items
        for one in (_member(item, "chunk_ids") or (_member(item, "uuid") or _member(item, "id"),))
        if one
    ]
    topics = names_of((*asked.topics, *(_member(item, "topic_id") for item in (answer, *items)))) or asked.topics
    ids = _ids((*asked.ids, _member(answer, "uuid"), *chunks))
    counts = [_member(answer, name) for name in _COUNTS]
    known = [len(one) if isinstance(one, tuple) else one for one in counts if isinstance(one, tuple | int)]
    return Extent(topics, ids, sum(known) if known else None if listed is None else len(items), _detail(asked, answer))


def _detail(asked: Extent, answer: object) -> str:
    changes = _member(answer, "changes")  # of tokens that were read again
    return asked.detail if changes is None else f"tokens {changes}" if changes else "no token has changed"


def _items(answer: object) -> list[object] | None:
    """The first list of chunks, turns or the like that an answer has; None: it has none."""
    found: list[object] | None = None
    for name in getattr(answer, "__struct_fields__", ()):
        value = getattr(answer, name)
        if isinstance(value, list | tuple):
            if value and isinstance(value[0], dict | msgspec.Struct):
                return list(value)
            found = found or []
    return found


def _member(item: object, name: str) -> Any:
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def names_of(named: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of topics among what a client gave as such, as many as a line holds."""
    known = dict.fromkeys(one for one in named if isinstance(one, str) and TOPIC_ID_PATTERN.fullmatch(one))
    return tuple(known)[:TOPICS_MAX]


def _ids(given: Iterable[Any]) -> tuple[str, ...]:
    known = dict.fromkeys(one for one in given if isinstance(one, str) and CHUNK_ID_PATTERN.fullmatch(one))
    return tuple(known)[:IDS_MAX]
