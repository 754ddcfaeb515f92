"""The description of memd's own routes says what they are, and what they answer fits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from recording_upstream import RecordingUpstream

from memd.admin.routes import ROUTES
from memd.admin.routing import document

FILE = Path(__file__).parent.parent / "docs" / "openapi.json"
DOCUMENT = json.loads(FILE.read_text())


def test_it_is_a_valid_document_and_that_of_the_code() -> None:
    """`make openapi` brings the file up to date."""
    validate(DOCUMENT)
    assert json.loads(json.dumps(document(ROUTES))) == DOCUMENT


def test_it_has_every_route_and_no_other() -> None:
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}


@pytest.fixture
def told(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    daemon = make_daemon(upstream.url).start()
    fact = {"role": "user", "content": "The release word for the lighthouse lamp is cinnamon-42, on the brass plate."}
    daemon.chat([fact], memory_in={"topic_id": "work"})
    wait_until(lambda: daemon.export() != [], lambda: "not stored")
    return daemon


def checked(method: str, path: str, status: int, value: Any) -> None:
    """Whether an answer is what the document promises."""
    answer = DOCUMENT["paths"][path][method]["responses"][str(status)]
    schema = answer["content"]["application/json"]["schema"]
    Draft202012Validator(schema | {"components": DOCUMENT["components"]}).validate(value)


def test_what_the_routes_answer_fits_it(told: DaemonProcess, tmp_path: Path) -> None:
    base = told.own_url
    question = {"role": "user", "content": "What is the release word for the lamp?"}
    turn = told.chat([question], memory_in={"topic_id": "work"}).headers["X-Memory-Turn"]
    wait_until(lambda: ask(f"{base}/memd/turns/{turn}").status == 200, lambda: "no receipt")
    chunk = ask(f"{base}/memd/chunks").json["chunks"][0]["id"]
    for path, real in {
        "/memd/health": "health",
        "/memd/stats": "stats",
        "/memd/topics": "topics",
        "/memd/search": "search?q=lamp&topic=work",
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
