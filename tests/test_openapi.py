"""The description of memd's own routes says what they are, and what they answer fits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, ask, user
from facts import POSTGRES, QUESTION
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from memd.admin.routes import ROUTES
from memd.admin.routing import document

FILE = Path(__file__).parent.parent / "docs" / "openapi.json"
DOCUMENT = json.loads(FILE.read_text())


def test_it_is_a_valid_document_and_that_of_the_code() -> None:
    """`make openapi` brings the file up to date."""
    validate(DOCUMENT)
    assert json.loads(json.dumps(document(ROUTES))) == DOCUMENT
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}


def checked(method: str, path: str, status: int, value: Any) -> None:
    """Whether an answer is what the document promises."""
    answer = DOCUMENT["paths"][path][method]["responses"][str(status)]
    schema = answer["content"]["application/json"]["schema"]
    Draft202012Validator(schema | {"components": DOCUMENT["components"]}).validate(value)


def test_what_the_routes_answer_fits_it(served: DaemonProcess, tmp_path: Path) -> None:
    base = served.own_url
    served.tell(POSTGRES, topic="work")
    turn = served.chat([user(QUESTION)], memory_in={"topic_id": "work"}).headers["X-Memory-Turn"]
    served.receipt(turn)
    chunk = ask(f"{base}/memd/chunks").json["chunks"][0]["id"]
    for path, real in {
        "/memd/health": "health",
        "/memd/stats": "stats",
        "/memd/topics": "topics",
        "/memd/search": "search?q=booking&topic=work",
        "/memd/log": "log",
        "/memd/chunks": "chunks",
        "/memd/chunks/{id}": f"chunks/{chunk}",
        "/memd/buffer": "buffer?topic=work",
        "/memd/turns": "turns",
        "/memd/turns/{id}": f"turns/{turn}",
        "/memd/turns/{id}/replay": f"turns/{turn}/replay",
    }.items():
        answer = ask(f"{base}/memd/{real}")
        assert answer.status == 200, answer.body
        checked("get", path, 200, answer.json)
    body = {"topic_id": "work", "chunk_ids": [chunk], "action": "Helpful", "reason": "it was"}
    corrected = ask(f"{base}/memd/corrections", body)
    checked("post", "/memd/corrections", 200, corrected.json)
    undone = ask(f"{base}/memd/undo", {"topic_id": "work", "canonical_id": corrected.json["applied"][0]})
    checked("post", "/memd/undo", 200, undone.json)
    checked("post", "/memd/backup", 200, ask(f"{base}/memd/backup", {"folder": str(tmp_path / "copy")}).json)
    checked("post", "/memd/backup", 400, ask(f"{base}/memd/backup", {"folder": "/a\0b"}).json)
    checked("post", "/memd/undo", 404, ask(f"{base}/memd/undo", {"topic_id": "work", "canonical_id": 1}).json)
    checked("get", "/memd/log", 400, ask(f"{base}/memd/log?limit=0").json)
    assert ask(f"{base}/memd/openapi.json").json == DOCUMENT
