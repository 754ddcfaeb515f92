"""What memd leaves alone: other routes, other modes, bodies it cannot read, and names that lead elsewhere."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from daemon_process import DaemonProcess, ask, user, wait_until
from recording_upstream import RecordingUpstream, Response

FACT = "The spare key hangs behind the barometer."
QUESTION = "Where does the spare key hang?"
ODD_JSON = b'{ "messages" : [ {"content":"h\\u00e9llo \xc3\xa9", "role":"user"} ],\n\t"n":1.0, "x":{"b":1,"a":[]} }'
HOSTILE_TOPICS = [
    *("../../outside", "..", "/etc/memd", "a/b", "a\\b", ".hidden", "x" * 129, "nul\x00byte", "", "ü", "a b"),
]
HOSTILE_PATH_TOPICS = ["..", "..%2f..%2foutside", "%2e%2e", ".hidden", "a%00b", "a%20b", "x" * 129]
BAD_MEMORY_IN: list[object] = [
    3,
    [],
    "{",
    {"topic_id": 7},
    {"corrections": [{"chunk_ids": ["a3f9"], "action": "Praise", "reason": ""}]},
    {"corrections": [{"chunk_ids": "a3f9", "action": "Helpful", "reason": ""}]},
    {"related_topic_ids": ["../other"]},
    {"topik": "house"},
]
UNREADABLE = [
    *(b"", b"{", b"[]", b'"text"', b'{"messages": 3}', b'{"messages": [1]}', b"\xff\xfe", b'{"messages"' + b"[" * 5000),
]


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("GET", "/v1/models?limit=2&a=%2F%20b", None),
        ("POST", "/v1/embeddings", ODD_JSON),
        ("POST", "/completion", b"\x00\xff not json at all"),
        ("PUT", "/slots/0?action=save", os.urandom(100_000)),
        ("DELETE", "/some//odd/%2e%2e/path", None),
        ("OPTIONS", "/v1/chat/completions", None),
        ("HEAD", "/v1/models", None),
    ],
)
def test_other_routes_pass_byte_for_byte_both_ways(
    kept_daemon: DaemonProcess, kept_upstream: RecordingUpstream, method: str, target: str, body: bytes | None
) -> None:
    said_back = b"\x89 odd \xff bytes \r\n\r\n" * 1000
    headers = (("Content-Type", "x/y; z=1"), ("X-Twice", "a"), ("X-Twice", "b"))
    kept_upstream.answer = lambda _: Response((said_back,), 418, headers)
    connection = http.client.HTTPConnection(urlsplit(kept_daemon.base_url).netloc, timeout=120)
    connection.request(method, target, body, {"Authorization": "Bearer k", "X-Own": "Ünï".encode()})
    answer = connection.getresponse()
    received = answer.read()
    connection.close()
    seen = kept_upstream.requests[-1]
    assert (seen.method, seen.target, seen.body) == (method, target, body or b"")
    assert seen.header("Authorization") == "Bearer k"
    assert (seen.header("X-Own") or "").encode("latin-1") == "Ünï".encode()
    assert answer.status == 418
    assert received == (b"" if method == "HEAD" else said_back)
    assert answer.getheader("Content-Type") == "x/y; z=1"
    assert answer.headers.get_all("X-Twice") == ["a", "b"]
    assert int(answer.getheader("Content-Length") or 0) == len(said_back)


def test_a_client_that_adds_v1_to_a_base_url_that_has_it_is_answered_as_if_once(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    for base in ("/v1", "/v1/v1", "/t/house/v1"):
        answer = ask(f"{served.base_url}{base}/v1/chat/completions?a=/v1/v1", {"messages": [user(FACT)]})
        assert (answer.status, answer.headers["X-Memory-Mode"]) == (200, "full"), base
        ask(f"{served.base_url}{base}/v1")
    targets = [request.target for request in upstream.requests]
    assert targets.count("/v1/chat/completions?a=/v1/v1") == targets.count("/v1") == 3
    assert not any(target.startswith("/v1/v1") for target in targets)


def test_a_body_that_is_no_chat_request_reaches_the_upstream_untouched(
    in_topic: DaemonProcess, kept_upstream: RecordingUpstream
) -> None:
    kept_upstream.answer = lambda _: Response((b'{"error": "mine"}',), 400)
    for body in UNREADABLE:
        answer = ask(f"{in_topic.base_url}/v1/chat/completions", body)
        assert kept_upstream.chats[-1].body == body
        assert (answer.status, answer.body) == (400, b'{"error": "mine"}')


def test_a_client_that_knows_nothing_of_memd_gets_the_upstream_s_bytes(
    in_topic: DaemonProcess, kept_upstream: RecordingUpstream
) -> None:
    in_topic.chat([user(FACT)])
    odd = b'{ "choices":[{"message":{"role":"assistant","content":"ok"},"index":0 ,"finish_reason":"stop"}] }\n'
    kept_upstream.answer = lambda _: Response((odd,))
    answer = in_topic.chat([user(QUESTION)])
    assert answer.headers["X-Memory-Status"] == "injected"
    assert answer.body == odd


def test_mode_off_is_pure_pass_through(in_topic: DaemonProcess, kept_upstream: RecordingUpstream) -> None:
    in_topic.chat([user(FACT)])
    answer = ask(f"{in_topic.base_url}/v1/chat/completions", ODD_JSON, headers={"X-Memory-Mode": "off"})
    assert kept_upstream.chats[-1].body == ODD_JSON
    assert answer.headers["X-Memory-Mode"] == "off"
    assert answer.headers["X-Memory-Status"] == "off"
    in_topic.chat([user(QUESTION)])
    assert "h\u00e9llo" not in json.dumps(in_topic.export(), ensure_ascii=False)


def test_a_mistyped_mode_stores_nothing_and_says_so(in_topic: DaemonProcess, kept_upstream: RecordingUpstream) -> None:
    for mode in ("of", "read-only", "none", "full, off", "0"):
        answer = ask(f"{in_topic.base_url}/v1/chat/completions", ODD_JSON, headers={"X-Memory-Mode": mode})
        assert kept_upstream.chats[-1].body == ODD_JSON
        assert (answer.headers["X-Memory-Mode"], answer.headers["X-Memory-Status"]) == ("off", "bad-mode"), mode
        assert f"turn={answer.headers['X-Memory-Turn']} problem=" in in_topic.log.read_text()
    assert in_topic.chat([user(FACT)], {"X-Memory-Mode": ""}).headers["X-Memory-Mode"] == "full"
    assert "h\u00e9llo" not in json.dumps(in_topic.export(), ensure_ascii=False)


def test_mode_readonly_shows_memories_and_leaves_no_trace(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    served.chat([user(FACT)])
    served.chat([user("Something else.")])
    served.wait_stored(FACT, "Something else.")
    before = served.export()
    readonly = {"X-Memory-Mode": "readonly"}
    praise = {"chunk_ids": [before[0]["id"]], "action": "Helpful", "reason": "it was"}
    answer = served.chat([user(QUESTION)], readonly, memory_in={"corrections": [praise]})
    assert answer.headers["X-Memory-Mode"] == "readonly"
    assert answer.headers["X-Memory-Status"] == "injected"
    assert "behind the barometer" in upstream.prompts[-1]
    served.restart()
    assert served.export() == before
    refused = served.chat([user("Thanks.")], memory_in={"corrections": [praise]})
    assert {"type": "correction_failed", "chunk_id": before[0]["id"]} in refused.json["memory_out"]["signals"]


def test_a_bad_memory_in_never_fails_the_request(in_topic: DaemonProcess, kept_upstream: RecordingUpstream) -> None:
    in_topic.chat([user(FACT)])
    for memory_in in BAD_MEMORY_IN:
        answer = in_topic.chat([user(QUESTION)], metadata={"memory_in": memory_in, "mine": "kept"})
        assert answer.reply == "Noted."
        assert answer.headers["X-Memory-Status"] == "bad-memory-in", memory_in
        forwarded = json.loads(kept_upstream.chats[-1].body)
        assert forwarded["metadata"] == {"mine": "kept"}
        assert "[mem:" not in kept_upstream.prompts[-1]
    assert "memory_in" in in_topic.log.read_text()


def test_a_hostile_topic_id_never_leaves_the_data_directory(served: DaemonProcess) -> None:
    wait_until(lambda: not any(served.folder.rglob("*.tmp")), lambda: "the list of topics is still being written")
    receipts = {"memory/memd.receipts"}
    before = everything_in(served.folder) | receipts
    for topic_id in HOSTILE_TOPICS:
        answer = served.chat([user(FACT)], memory_in={"topic_id": topic_id})
        assert answer.reply == "Noted."
        assert answer.headers["X-Memory-Status"] == "bad-memory-in", topic_id
        assert everything_in(served.folder) | receipts == before


def test_a_hostile_topic_in_the_path_is_answered_400(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    before = everything_in(served.folder)
    for written in HOSTILE_PATH_TOPICS:
        connection = http.client.HTTPConnection(urlsplit(served.base_url).netloc, timeout=120)
        connection.request("POST", f"/t/{written}/v1/chat/completions", json.dumps({"messages": [user(FACT)]}))
        answer = connection.getresponse()
        assert answer.status == 400, written
        assert "topic" in json.loads(answer.read())["error"]["message"]
        connection.close()
    assert everything_in(served.folder) == before
    assert upstream.chats == []


def test_a_topic_in_the_path_is_the_default_and_memory_in_outranks_it(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    url = f"{served.base_url}/t/garden/v1/chat/completions"
    ask(url, {"messages": [user(FACT)]})
    assert upstream.chats[-1].target == "/v1/chat/completions"
    assert ask(url, {"messages": [user(QUESTION)], "memory_in": {}}).headers["X-Memory-Status"] == "injected"
    other = ask(url, {"messages": [user(QUESTION)], "memory_in": {"topic_id": "kitchen"}})
    assert other.headers["X-Memory-Status"] == "none"
    served.wait_stored(FACT)
    assert {entry["topic_id"] for entry in served.export() if FACT in entry["content"]} == {"garden"}
    models = ask(f"{served.base_url}/t/garden/v1/models?x=1")
    assert models.status == 200
    assert upstream.requests[-1].target == "/v1/models?x=1"


def everything_in(folder: Path) -> set[str]:
    """All files and folders below."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
