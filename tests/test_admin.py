"""memd's own routes: what it knows and did, corrections by people, undo, receipts, events, and their description."""

import json
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conftest import Connect, Serving
from daemon_process import Answer, DaemonProcess, ask, user, wait_until
from facts import FACTS, NO_NEIGHBOURS, POSTGRES, QUESTION
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from raw_wire import request
from recording_upstream import RecordingUpstream

from memd.admin.routes import ROUTES
from memd.admin.routing import document


class Admin:
    """A client of a daemon's own routes."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon

    def answer(self, path: str, body: Any = None, **query: object) -> Answer:
        return ask(f"{self.daemon.own_url}/memd/{path}?{urllib.parse.urlencode(query)}", body)

    def get(self, path: str, **query: object) -> Any:
        answer = self.answer(path, **query)
        assert answer.status == 200, answer.body
        return answer.json

    def post(self, path: str, **body: Any) -> Any:
        answer = self.answer(path, body)
        assert answer.status == 200, answer.body
        return answer.json

    def log(self, **query: object) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.get("log", **query)["events"]
        return events


@pytest.fixture
def told(serving: Serving) -> DaemonProcess:
    daemon = serving(NO_NEIGHBOURS)
    daemon.tell(*FACTS, topic="work")
    return daemon


@pytest.fixture
def admin(told: DaemonProcess) -> Admin:
    return Admin(told)


def chunk_of(admin: Admin, word: str) -> dict[str, Any]:
    [found] = admin.get("chunks", contains=word)["chunks"]
    assert isinstance(found, dict)
    return found


# -- receipts ---------------------------------------------------------------------------------------------------------


def test_a_turn_has_a_receipt_a_place_in_the_story_of_its_chunks_and_a_replay(
    told: DaemonProcess, admin: Admin, upstream: RecordingUpstream
) -> None:
    answer = told.chat([user(QUESTION)], memory_in={"topic_id": "work"})
    turn_id = answer.headers["X-Memory-Turn"]
    receipt = told.receipt(turn_id)
    assert receipt["question"] == QUESTION and receipt["topic_id"] == "work" and receipt["status"] == "injected"
    [prompt] = json.loads(upstream.prompts[-1])
    assert prompt["content"] == f"{receipt['block']}\n\n{QUESTION}"
    assert receipt["http_status"] == 200 and receipt["api"] == "/chat/completions" and receipt["filter"] == {}
    injected = {one["id"] for one in receipt["candidates"] if one["verdict"] == "injected"}
    assert injected == set(receipt["shown"]) == set(answer.headers["X-Memory-Injected"].split(","))
    assert 0 < receipt["block_tokens"] <= receipt["memory_tokens"] <= receipt["forwarded_tokens"]
    assert receipt["timings_ms"].keys() >= {"receive", "room", "recall", "embed", "search", "memory", "upstream"}
    assert receipt["prompt_tokens"] is None, "this upstream does not say"
    for one in receipt["candidates"]:
        parts = one["meaning"] + one["words"] + one["feedback"] + one["neighbours"]
        assert one["score"] == pytest.approx(parts * one["multiplier"], abs=1e-5)

    chunk = chunk_of(admin, "exclusion constraints")
    story = admin.get(f"chunks/{chunk['id']}")
    assert turn_id in story["turns"] and story["before"] is None and "ERR_7421" in story["after"]["content"]

    narrow = {"topic_id": "work", "filter": {"to": "2000-01-01", "sources": ["a.md"]}}
    narrowed = told.chat([user(QUESTION)], memory_in=narrow).headers["X-Memory-Turn"]
    assert told.receipt(narrowed)["filter"]["sources"] == ["a.md"]
    assert admin.get(f"turns/{narrowed}/replay")["now"]["chunks"] == [], "it asks with the filter of its turn"
    assert admin.get(f"turns/{turn_id}/replay")["now"]["chunks"]
    admin.post(
        "corrections", topic_id="work", chunk_ids=[chunk["id"]], action="Update", content="SQLite now.", reason="x"
    )
    assert admin.get(f"turns/{turn_id}/replay")["lost"] == [chunk["id"]]
    then = admin.get(f"turns/{turn_id}/replay", then="true")
    assert chunk["id"] in then["kept"] and then["now"]["as_of"] == then["turn"]["at"]
    shown = told.run("turn", turn_id, "--then").stdout
    assert "The same question out of what was stored then" in shown and f"- {chunk['id']}" not in shown
    assert admin.answer(f"turns/{turn_id}/replay", then="perhaps").status == 400
    assert admin.answer(f"turns/{turn_id}/replay", as_of="1").status == 400


def test_a_replay_knows_what_earlier_blocks_of_its_prompt_show(told: DaemonProcess, admin: Admin) -> None:
    asked = [user(QUESTION)]
    answer = told.chat(asked, memory_in={"topic_id": "work"})
    asked += [{"role": "assistant", "content": answer.reply}, user("zxqv blorp")]
    turn = told.receipt(told.chat(asked, memory_in={"topic_id": "work"}).headers["X-Memory-Turn"])
    assert turn["shown"] and "earlier blocks stay" in turn["note"]
    assert admin.get(f"turns/{turn['turn_id']}/replay")["now"]["note"] == turn["note"]


def test_a_step_of_a_tool_loop_has_its_turn_s_block_and_asked_nothing(told: DaemonProcess, admin: Admin) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history: list[dict[str, Any]] = [user(QUESTION)]
    told.chat(history, memory_in={"topic_id": "work"})
    history += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
    ]
    told.chat(history, memory_in={"topic_id": "work"})
    wait_until(lambda: len(admin.get("turns")["turns"]) == len(FACTS) + 2, lambda: "no receipt")
    step, turn = admin.get("turns", limit=2)["turns"]
    assert step["is_step"] and not turn["is_step"]
    assert step["question"] is None and step["shown"] == turn["shown"] != []
    alone = admin.get("turns", steps=0)["turns"]
    assert [one["turn_id"] for one in alone[:1]] == [turn["turn_id"]] and len(alone) == len(FACTS) + 1
    assert [one["steps"] for one in alone] == [1, *[0] * len(FACTS)]
    assert admin.get("turns", steps=0, before=turn["turn_id"])["turns"] == alone[1:]
    listed = told.run("turn").stdout
    assert turn["turn_id"] in listed and step["turn_id"] not in listed
    assert step["turn_id"] in told.run("turn", "--steps").stdout


def test_the_ring_of_receipts_is_bounded_and_a_torn_end_costs_one_receipt(serving: Serving) -> None:
    daemon = serving({"receipts": {"bytes_max": 200_000}})
    admin = Admin(daemon)
    files = [daemon.data_dir / name for name in ("memd.receipts", "memd.receipts.old")]
    turns: list[str] = []
    while not turns or admin.answer(f"turns/{turns[0]}").status == 200:  # the first goes when they turn over
        assert len(turns) < 500 and sum(file.stat().st_size for file in files if file.exists()) <= 200_000
        turns.append(daemon.chat([user(f"{len(turns)} " + "and so on " * 100)]).headers["X-Memory-Turn"])
        daemon.receipt(turns[-1])
    latest = admin.get("turns", limit=500)["turns"]
    assert 5 < len(latest) < len(turns)
    daemon.kill()
    with files[0].open("ab") as file:
        file.truncate(files[0].stat().st_size - 20)
    daemon.start()
    new = daemon.chat([user("One more.")]).headers["X-Memory-Turn"]
    daemon.receipt(new)
    ids = [turn["turn_id"] for turn in admin.get("turns", limit=500)["turns"]]
    assert ids[0] == new and ids[1:] == [turn["turn_id"] for turn in latest][1 : len(ids)]


def test_without_receipts_nothing_is_kept(serving: Serving) -> None:
    daemon = serving({"receipts": {"enabled": False}})
    turn_id = daemon.chat([user(FACTS[0])]).headers["X-Memory-Turn"]
    answer = Admin(daemon).answer(f"turns/{turn_id}")
    assert answer.status == 404 and "receipts.enabled" in answer.json["error"]["message"]
    assert not (daemon.data_dir / "memd.receipts").exists()


def test_turns_are_told_as_they_happen(told: DaemonProcess, admin: Admin) -> None:
    lines: list[str] = []

    def listen() -> None:
        with urllib.request.urlopen(f"{told.own_url}/memd/events", timeout=120) as stream:
            lines.extend(line.decode().strip() for line in stream)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    wait_until(lambda: lines != [], lambda: "nothing came")
    turn_id = told.chat([user(QUESTION)], memory_in={"topic_id": "work"}).headers["X-Memory-Turn"]
    wait_until(lambda: any(turn_id in line for line in lines), lambda: f"{lines}")
    data = json.loads(next(line for line in lines if turn_id in line).removeprefix("data: "))
    assert lines[lines.index("event: turn") + 1].startswith("data: ")
    assert data["question"] == QUESTION and data["candidates"] >= 1 and "block" not in data
    assert told.terminate() == 0, "a listener does not hold the daemon up"
    thread.join(60)
    assert not thread.is_alive()


# -- the log, its correction and undo ---------------------------------------------------------------------------------


def test_an_undo_goes_back_one_step_can_be_undone_and_takes_out_what_was_told(
    told: DaemonProcess, admin: Admin, tmp_path: Path
) -> None:
    chunk = chunk_of(admin, "PostgreSQL")
    for _ in range(2):
        last = admin.post("corrections", topic_id="work", chunk_ids=[chunk["id"]], action="Unhelpful")["applied"][0]
    assert chunk_of(admin, "PostgreSQL")["multiplier"] == pytest.approx(1.5**-2)
    undone = admin.post("undo", topic_id="work", canonical_id=last)["applied"]
    assert chunk_of(admin, "PostgreSQL")["multiplier"] == pytest.approx(1.5**-1)
    late = admin.answer("undo", {"topic_id": "work", "canonical_id": last})
    assert late.status == 400 and str(undone[0]) in late.json["error"]["message"], "it says what to undo first"
    admin.post("undo", topic_id="work", canonical_id=undone[0])
    assert chunk_of(admin, "PostgreSQL")["multiplier"] == pytest.approx(1.5**-2)

    chunk = chunk_of(admin, "hazelnuts")
    out = admin.post("undo", topic_id="work", canonical_id=chunk["canonical_id"])["applied"][0]
    assert admin.get("chunks", contains="hazelnuts")["chunks"] == []
    [gone] = admin.get("chunks", contains="hazelnuts", all=1)["chunks"]
    assert gone["id"] == chunk["id"] and not gone["live"]
    admin.post("undo", topic_id="work", canonical_id=out)
    assert chunk_of(admin, "hazelnuts")["live"]

    [topic] = admin.get("topics")["topics"]
    assert topic["topic_id"] == "work" and topic["chunks"] == 3 and topic["is_open"]
    told.chat([user("A live talk about nothing.")], memory_in={"topic_id": "work"})
    latest = admin.get("buffer", topic="work")["conversations"][0]["latest"]
    assert latest[0]["text"] == "A live talk about nothing." and not latest[0]["left_out"]
    exported = admin.answer("export", topic="work").body
    assert [json.loads(line) for line in exported.splitlines()][:3] == told.export()[:3]
    report = admin.post("backup", folder=str(tmp_path / "copy"))
    assert report["topics"] == 1 and told.run("verify", str(tmp_path / "copy")).returncode == 0


# -- what is refused --------------------------------------------------------------------------------------------------


WRONG_TIME = "is no time; write it like 2026-11-20 or 2026-11-20T14:30"
REFUSED: tuple[tuple[str, Any, int, str], ...] = (
    ("nowhere", None, 404, ""),
    ("turns/0000000000000000", None, 404, ""),
    ("turns/..%2f..%2fetc", None, 404, ""),
    ("chunks/zzzz", None, 400, ""),
    ("chunks/b", None, 400, "'b' is no chunk's id: those are four or more hex digits"),
    ("chunks/ffffffffffff", None, 404, ""),
    ("log?limit=0", None, 400, ""),
    ("log?limit=501", None, 400, "the parameter limit: Expected `int` <= 500"),
    ("log?limit=99999999999999999999", None, 400, "the parameter limit: Expected `int` <= 500"),
    ("log?limit=", None, 400, "the parameter limit: Expected `int`, got `str`"),
    ("log?limit=1&limit=2", None, 400, "the parameter limit is given 2 times; give it once"),
    ("log?before=soon", None, 400, f"the parameter before: 'soon' {WRONG_TIME}"),
    ("log?before=9999-12-31", None, 400, ""),
    ("log?topic=nowhere", None, 400, ""),
    ("log?topics=work", None, 400, "this route has no parameter 'topics'; it has topic, before, limit"),
    ("chunks?all=perhaps", None, 400, "the parameter all: Expected `bool`, got `str`"),
    ("search", None, 400, "the parameter q is missing"),
    ("search?q=%20", None, 400, "the parameter q: Expected `str` matching regex '\\\\S'"),
    ("search?q=x&as_of=", None, 400, f"the parameter as_of: '' {WRONG_TIME}"),
    ("search?q=x&kind=turn&kind=nope", None, 400, "there is no kind 'nope'; give turn, note, document"),
    ("search?q=x&topic=..%2Fetc", None, 400, ""),
    ("turns?topic=work&topic=work", None, 400, ""),
    ("health?verbose=", None, 400, "this route has no parameter 'verbose'; it has none at all"),
    ("undo?topic_id=work", {"topic_id": "work", "canonical_id": 12}, 400, ""),
    ("corrections", None, 405, ""),
    ("corrections", {}, 400, ""),
    ("corrections", {"topic_id": "work", "chunk_ids": [], "action": "Helpful"}, 400, ""),
    ("corrections", {"topic_id": "work", "chunk_ids": ["a3f9"], "action": "Praise"}, 400, ""),
    ("corrections", {"topic_id": "work", "chunk_ids": ["a3f9"], "action": "Helpful", "content": "x"}, 400, ""),
    ("corrections", {"topic_id": "work", "chunk_ids": ["a3f9"], "action": "Helpful", "resaon": "x"}, 400, ""),
    ("corrections", {"topic_id": "nowhere", "chunk_ids": ["a3f9"], "action": "Helpful"}, 404, ""),
    ("undo", {"topic_id": "work", "canonical_id": 12}, 404, ""),
    ("undo", {"topic_id": "../etc", "canonical_id": 12}, 400, ""),
    ("backup", {"folder": "relative"}, 400, ""),
    ("search", {"q": "x"}, 405, ""),
)


def test_what_is_asked_wrongly_is_refused_by_name_and_changes_nothing(told: DaemonProcess, connect: Connect) -> None:
    before = told.export()
    for path, body, status, message in REFUSED:
        answer = ask(f"{told.own_url}/memd/{path}", body)
        assert answer.status == status, (path, body, answer.body)
        assert answer.json["error"]["message"].startswith(f"memd: {message}"), (path, answer.body)
    refused = ask(f"{told.own_url}/memd/log", method="DELETE")
    assert refused.status == 405 and refused.headers["Allow"] == "GET, HEAD"
    assert ask(f"{told.own_url}/memd/log", method="HEAD").status == 200
    assert ask(f"{told.own_url}/memd/undo").headers["Allow"] == "POST"
    for streamed in (b"/memd/export", b"/memd/events"):
        both = request(b"HEAD", streamed) + request(b"GET", b"/memd/health")
        client = connect(told.own_url, both.replace(b"Host: memd", b"Host: localhost"))
        assert client.read_head().split(b" ")[1] == b"200" and client.header(b"Content-Type")
        assert client.read(8) == b"HTTP/1.1", "of the next answer: the head alone came"
        assert client.read_head().startswith(b" 200") and b'"status"' in client.read_body()
    assert told.export() == before


# The description of the routes

FILE = Path(__file__).parent.parent / "docs" / "openapi.json"
DOCUMENT = json.loads(FILE.read_text())


def checked(method: str, path: str, status: int, value: Any) -> None:
    """Whether an answer is what the document promises."""
    answer = DOCUMENT["paths"][path][method]["responses"][str(status)]
    schema = answer["content"]["application/json"]["schema"]
    Draft202012Validator(schema | {"components": DOCUMENT["components"]}).validate(value)


def test_the_description_is_valid_that_of_the_code_and_what_the_routes_answer_fits_it(
    served: DaemonProcess, tmp_path: Path
) -> None:
    validate(DOCUMENT)
    assert json.loads(json.dumps(document(ROUTES))) == DOCUMENT
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}

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
