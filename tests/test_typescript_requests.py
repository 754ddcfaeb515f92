"""memd-client: what programs hand to its `fetch`, its options, and what it asks without a model.

Rule: what reaches a server is read there, byte by byte; what memd stored is read from its log.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, token_setting
from ollama_server import ollama_answer
from recording_upstream import RecordingUpstream, Request, Response
from typescript_package import TypeScriptPackage

from memd.admin.history import LogEvent, LogPage
from memd.recall.explained import FoundChunk, SearchAnswer

CORRECTION = {"chunk_ids": ["ffffffff"], "action": "Helpful", "reason": "it answered the question"}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Grüße"}], "metadata": {"user": "marta"}}
WAYS = ["request", "request and init", "bytes", "blob", "length", "ky", "openapi-fetch"]
"""In which a request can carry a MemoryIn; see the package's test/handed.ts."""
NOTE = "The spare lamp is behind the rope."
QUESTION = "Where is the spare lamp?"

Json = dict[str, Any]


def handed(package: TypeScriptPackage, url: str, way: str, memory: Json | None = None, **more: Any) -> Json:
    told = json.loads(package.run("handed.ts", {"url": url, "way": way, "memory": memory or {}, **more}))
    assert isinstance(told, dict)
    return told


def sent(request: Request) -> tuple[Json, Json | None]:
    """The body that a server got, without its MemoryIn, and that."""
    body = json.loads(request.body)
    memory_in = body.get("metadata", {}).pop("memory_in", None)
    return body, None if memory_in is None else json.loads(memory_in)


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


# -- what is handed over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_request_carries_a_memory_in_however_it_is_handed_over(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, way: str
) -> None:
    options = {"topic": "lamp", "mode": "full", "session": "evening"}
    told = handed(memd_client, upstream.url, way, options, corrections=[CORRECTION])
    [request] = upstream.requests
    assert (request.method, request.target) == ("POST", "/v1/chat/completions")
    assert sent(request) == (BODY, {"topic_id": "lamp", "corrections": [CORRECTION]})
    names = ("x-own", "x-memory-mode", "x-memory-session", "content-length")
    assert [request.header(name) for name in names] == ["kept", "full", "evening", str(len(request.body))]
    assert (request.header("content-type") or "").startswith("application/json")
    assert json.loads(told["body"])["choices"][0]["message"]["content"] == "Noted."
    assert told["pending"] == [CORRECTION], "no memd took it"


def test_a_body_that_can_be_read_only_once_passes_and_the_queue_waits(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream
) -> None:
    told = handed(memd_client, upstream.url, "stream", {"session": "evening"}, corrections=[CORRECTION])
    [request] = upstream.requests
    assert sent(request) == (BODY, None)
    assert (request.header("x-memory-session"), told["pending"]) == ("evening", [CORRECTION])


def test_ollama_js_carries_a_memory_in_and_is_told_what_became_of_corrections(
    memd_client: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    upstream.answer = ollama_answer
    daemon = make_daemon(upstream.url).start()
    told = handed(memd_client, daemon.base_url, "ollama", {"topic": "lamp"}, corrections=[CORRECTION])
    outs = [part["memory_out"] for part in json.loads(told["body"]) if "memory_out" in part]
    assert [out["signals"] for out in outs] == [[{"type": "correction_failed", "chunk_id": "ffffffff"}]]
    assert told["pending"] == []


@pytest.mark.parametrize("way", ["request", "length"])
@pytest.mark.parametrize(
    ("options", "headers", "memory_in"),
    [
        ({"mode": "readonly"}, {}, {"topic_id": "lamp"}),
        ({"mode": "off"}, {}, None),  # memd would pass it on to the model server
        ({}, {"X-Memory-Mode": "Off"}, None),
        ({"mode": "off"}, {"X-Memory-Mode": "full"}, {"topic_id": "lamp", "corrections": [CORRECTION]}),
    ],
)
def test_a_mode_that_stores_nothing_sends_nothing_to_be_stored(
    memd_client: TypeScriptPackage,
    upstream: RecordingUpstream,
    way: str,
    options: Json,
    headers: dict[str, str],
    memory_in: Json | None,
) -> None:
    told = handed(
        memd_client, upstream.url, way, {"topic": "lamp", **options}, headers=headers, corrections=[CORRECTION]
    )
    [request] = upstream.requests
    assert sent(request) == (BODY, memory_in)
    assert request.header("x-memory-mode") == (headers.get("X-Memory-Mode") or options["mode"])
    assert told["pending"] == [CORRECTION]


# -- options -----------------------------------------------------------------------------------------------------

TOPIC_RULE = 'use 1 to 128 letters, digits, ".", "_" or "-", beginning with a letter or digit'
WRONG: list[tuple[Json, str]] = [
    ({"topic": ""}, f'topic cannot be "": {TOPIC_RULE}'),
    ({"topic": "the office"}, f'topic cannot be "the office": {TOPIC_RULE}'),
    ({"topic": ".hidden"}, f'topic cannot be ".hidden": {TOPIC_RULE}'),
    ({"topic": "büro"}, f'topic cannot be "büro": {TOPIC_RULE}'),
    ({"topic": "a" * 129}, f'topic cannot be "{"a" * 129}": {TOPIC_RULE}'),
    ({"topic": 7}, f"topic cannot be 7: {TOPIC_RULE}"),
    ({"relatedTopics": ["fine", "a/b"]}, f'relatedTopics[1] cannot be "a/b": {TOPIC_RULE}'),
    ({"mode": "read-only"}, 'mode cannot be "read-only": use one of full, readonly, off'),
    ({"session": "böse"}, 'session cannot be "böse": use letters, digits and signs of ASCII'),
    ({"session": "a\nb"}, 'session cannot be "a\\nb": use letters, digits and signs of ASCII'),
    ({"session": ""}, 'session cannot be "": use letters, digits and signs of ASCII'),
    ({"url": "localhost"}, 'url cannot be "localhost": give memd\'s own address, like http://127.0.0.1:8766'),
]
RIGHT: list[Json] = [
    {},
    {"topic": "a" * 128, "relatedTopics": [], "mode": "off", "session": "chat 1/2 (Marta)"},
    {"topic": "0._-", "url": "https://memd.example/", "token": "secret"},
]


def test_a_wrong_option_throws_at_once_and_says_what_to_write(memd_client: TypeScriptPackage) -> None:
    told = json.loads(memd_client.run("options.ts", [*[options for options, _ in WRONG], *RIGHT]))
    assert told == [*[f"memd-client: {problem}" for _, problem in WRONG], *[None] * len(RIGHT)]


# -- without a model ---------------------------------------------------------------------------------------------


def test_the_types_of_answers_are_those_of_memd(memd_client: TypeScriptPackage) -> None:
    shared: Json = dict.fromkeys(("id", "uuid", "topic_id", "kind", "content"), "a")
    shared |= {"canonical_id": 1, "said_at": 1, "roles": ("user",), "source": "wiki", "tags": ("ops",)}
    shared |= {"heading": ("Lamps",), "page": 1, "sheet": "one", "multiplier": 1.0}
    numbers = ("score", "cosine", "meaning", "words", "feedback", "neighbours", "echo", "time")
    scores: Json = dict.fromkeys(numbers, 0.5)
    found = FoundChunk(**shared, **scores, tokens=1, created_at=1, verdict="injected")
    counted: Json = {"budget_tokens": 1, "tokens": 1, "is_model_asked": True}
    answer = SearchAnswer(question="a", topics=("b",), as_of=1, note="c", chunks=(found,), **counted)
    event = LogEvent(**shared, at=1, event="told", reason="d", live=True, supersedes=("e",))
    pages = [LogPage(events=(event,), next=1), LogPage(events=(), next=None)]
    answers = [answer, SearchAnswer(question="a", topics=(), chunks=(), **counted)]
    values = [("SearchAnswer", one) for one in answers] + [("LogPage", one) for one in pages]
    lines = [
        f"export const value{place}: {name} = {msgspec.json.encode(one).decode()};"
        for place, (name, one) in enumerate(values)
    ]
    memd_client.write(
        "answers.ts", "import type { LogPage, SearchAnswer } from 'memd-client';\n" + "\n".join(lines) + "\n"
    )
    memd_client.check_types()


def test_what_is_flushed_is_found_corrected_and_in_the_log(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    options = {"topic": "lamp", "url": f"{daemon.own_url}/"}
    notes = [{"content": NOTE, "title": "Lamp", "tags": ["house"]}, {"content": "The rope is wet."}]
    flushes: list[Json] = [{"call": "flush", "notes": notes}, {"call": "flush", "notes": notes[:1]}]
    first, again = [one["told"] for one in memd_client.steps("routes.ts", flushes, **options)]
    daemon.wait_stored(NOTE, "wet")  # until then only words find it
    filters: list[Json] = [
        {"tags": ["house"], "kinds": ["note"], "limit": 1},
        {"contains": "WET", "from": "2020-01-01"},
        {"to": "2020-01-01"},
        {"topics": []},
    ]
    asked: list[Json] = [{"call": "search", "question": QUESTION, "filter": one} for one in filters]
    searches = [one["told"] for one in memd_client.steps("routes.ts", asked, **options)]
    assert [len(note["chunk_ids"]) for note in first["notes"]] == [1, 1]
    assert again["notes"] == [{**first["notes"][0], "duplicate": True}]
    assert [[chunk["content"] for chunk in one["chunks"]] for one in searches[:3]] == [[NOTE], ["The rope is wet."], []]
    assert {chunk["content"] for chunk in searches[3]["chunks"]} == {NOTE, "The rope is wet."}
    [chunk_id] = first["notes"][0]["chunk_ids"]
    # It was never shown to a model, which a correction in a request would have needed.
    update = {
        "chunk_ids": [chunk_id],
        "action": "Update",
        "reason": "moved",
        "content": "The spare lamp is in the boat.",
    }
    steps: list[Json] = [
        {"call": "flush", "corrections": [update, CORRECTION]},
        {"call": "log", "part": {"limit": 2}},
    ]
    flushed, page = memd_client.steps("routes.ts", steps, **options)
    assert flushed["told"] == {"failed": ["ffffffff"], "notes": []}
    assert [flushed["pending"], flushed["refused"]] == [[], []]
    assert [event["event"] for event in page["told"]["events"]] == ["replacement", "Update"]
    assert page["told"]["events"][0]["content"] == update["content"]
    older = {"call": "log", "part": {"before": page["told"]["next"]}}
    [rest] = memd_client.steps("routes.ts", [older], **options)
    assert [event["event"] for event in rest["told"]["events"]] == ["told", "told"]


def test_more_notes_than_memd_takes_at_once_are_sent_in_turns(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    notes = [{"content": f"Shelf {number} is full."} for number in range(150)]
    [told] = memd_client.steps("routes.ts", [{"call": "flush", "notes": notes}], url=daemon.own_url)
    assert len({note["chunk_ids"][0] for note in told["told"]["notes"]}) == 150


def test_what_could_not_be_flushed_waits_and_what_memd_cannot_read_is_kept_apart(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, nowhere: str
) -> None:
    note = {"content": NOTE}
    flush = {"call": "flush", "notes": [note], "corrections": [CORRECTION]}
    [told] = memd_client.steps("routes.ts", [flush], url=nowhere)
    remedy = "start it (memd serve), or give its own address (admin.port) as url"
    assert told["told"] == {
        "error": f"memd-client: no memd answers at {nowhere} (ECONNREFUSED): {remedy}",
        "status": None,
    }
    assert (told["pending"], told["notes"]) == ([CORRECTION], [note])
    wrong = {**CORRECTION, "action": "Delete"}
    steps = [
        {"call": "flush", "notes": [{"content": ""}]},
        {"call": "flush", "corrections": [wrong, CORRECTION]},
        {"call": "flush", "notes": [note]},
    ]
    bad_note, bad_correction, rest = memd_client.steps("routes.ts", steps, topic="lamp", url=daemon.own_url)
    assert [one["told"]["status"] for one in (bad_note, bad_correction)] == [400, 400]
    assert bad_note["refused_notes"] == [{"content": ""}]
    assert (bad_correction["refused"], bad_correction["pending"]) == ([wrong], [CORRECTION])
    assert rest["told"]["failed"] == ["ffffffff"]
    assert (rest["pending"], rest["notes"]) == ([], [])


def test_a_note_that_was_erased_for_good_is_not_sent_for_ever(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    flush: list[Json] = [{"call": "flush", "notes": [{"content": NOTE}]}]
    [taken] = memd_client.steps("routes.ts", flush, url=daemon.own_url)
    daemon.wait_stored(NOTE)
    [chunk_id] = taken["told"]["notes"][0]["chunk_ids"]
    assert daemon.run("erase", "--chunk", chunk_id, "--forbid", "--yes").returncode == 0
    [refused] = memd_client.steps("routes.ts", flush, url=daemon.own_url)
    assert refused["told"]["status"] == 409 and "memd erase --forbid" in refused["told"]["error"]
    told = handed(memd_client, daemon.base_url, "request", notes=[{"content": NOTE}])
    for one in (refused, told):
        assert (one["notes"], one["refused_notes"]) == ([], [{"content": NOTE}])


@pytest.mark.parametrize("mode", ["readonly", "off"])
def test_a_mode_that_stores_nothing_flushes_nothing(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, mode: str
) -> None:
    [told] = memd_client.steps(
        "routes.ts", [{"call": "flush", "notes": [{"content": NOTE}]}], mode=mode, url=upstream.url
    )
    assert told["told"]["error"] == f"memd-client: mode is {mode}, so nothing is stored: flush a Memory of mode full"
    assert (told["notes"], upstream.requests) == ([{"content": NOTE}], [])


def test_a_token_opens_memd_s_own_address_also_where_the_model_s_leads_there(
    memd_client: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, {"auth": {"token": "a-token-of-this-test"}}).start()
    steps: list[Json] = [{"call": "flush", "notes": [{"content": NOTE}]}, {"call": "search", "question": QUESTION}]
    for url in (daemon.own_url, daemon.base_url):
        _, found = memd_client.steps("routes.ts", steps, url=url, token="a-token-of-this-test")
        assert found["told"]["chunks"][0]["content"] == NOTE
    [refused] = memd_client.steps("routes.ts", [{"call": "log"}], url=daemon.own_url)
    assert refused["told"]["status"] == 401
    assert refused["told"]["error"].endswith(": give memd's auth.token as token, or that of `memd token add`")
    assert refused["told"]["name"] == "UnknownToken"


def test_a_token_that_may_only_read_is_told_so_and_the_chat_goes_on(
    memd_client: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    secret = "reader-has-a-token-of-this-length"
    auth: Json = {"token": "a-token-of-this-test", "tokens": [token_setting("reader", secret, "read")]}
    daemon = make_daemon(upstream.url, {"auth": auth}).start()
    note, owner = {"notes": [{"content": NOTE}]}, {"X-Memory-Token": auth["token"]}
    assert ask(f"{daemon.own_url}/memd/notes", note, headers=owner).status == 200
    steps: list[Json] = [{"call": "flush", **note}, {"call": "search", "question": QUESTION}]
    refused, found = memd_client.steps("routes.ts", steps, url=daemon.own_url, token=secret)
    assert (refused["told"]["name"], refused["told"]["status"]) == ("RightMissing", 403)
    assert refused["told"]["error"].startswith("memd-client: the token 'reader' has no right to write")
    assert refused["notes"] == note["notes"] and found["told"]["chunks"][0]["content"] == NOTE
    headers = {"authorization": f"Bearer {secret}"}
    told = handed(memd_client, daemon.base_url, "request", headers=headers, corrections=[CORRECTION])
    assert told["body"] and told["mode"] == "readonly" and told["pending"] == [CORRECTION]
    log = [{"call": "log"}]
    for number in range(60):
        ask(f"{daemon.own_url}/memd/me", headers={"X-Memory-Token": f"guess {number}"})
    [many] = memd_client.steps("routes.ts", log, url=daemon.own_url, token="a wrong one")
    assert (many["told"]["name"], many["told"]["status"]) == ("TooManyAttempts", 429)
    assert many["told"]["retry_after"] >= 1 and "try again in" in many["told"]["error"]


ODD = [b"", b"<html>", b"[]", b'{"chunks": {}}', b'{"chunks": [{"id": 1}]}', b'{"events": 1}', b'{"notes": [1]}']


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_server_that_is_no_memd_is_an_error_that_says_so(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, status: int
) -> None:
    upstream.answer = lambda request: Response((ODD[(len(upstream.requests) - 1) // 3],), status=status)
    upstream.answers_all = True
    calls: list[Json] = [
        {"call": "search", "question": QUESTION},
        {"call": "log"},
        {"call": "flush", "notes": [{"content": NOTE}]},
    ]
    for one in memd_client.steps("routes.ts", calls * len(ODD), url=upstream.url):
        assert one["told"]["error"].startswith(f"memd-client: {upstream.url} does not answer like memd")
        assert one["told"]["error"].endswith(": give its own address (admin.port) as url")
    assert len(upstream.requests) == 3 * len(ODD)
