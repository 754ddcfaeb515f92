"""What is in the log: a line per turn, in two shapes, and no word of a conversation unless it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import logging
import os
import pty
import re
import subprocess
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import recording_upstream
from conftest import Connect, MakeDaemon
from daemon_process import Answer, DaemonProcess, ask, clean_environment, user, wait_until
from raw_wire import Peer, RawUpstream, answer, chunked, request
from recording_upstream import RecordingUpstream, chat_answer

from memd.errors import StoreError
from memd.telemetry.logging import ConsoleLines, Content, JsonLines, TerminalLines

SECRET = "xylophonist"
SMALL_BUFFER = {"soft_tokens": 256, "hard_tokens": 300}


LOST = (OSError, http.client.HTTPException)
"""What Python's client calls an answer that breaks off."""
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def ends_after(peer: Peer, data: bytes) -> None:
    peer.read_body()
    peer.send(data)
    peer.close()


def lines_of(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """The lines of a JSON log."""
    return [json.loads(line) for line in daemon.log.read_text().splitlines()]


def answered(daemon: DaemonProcess, count: int) -> list[dict[str, Any]]:
    """The lines of the first `count` turns, as soon as they are there."""
    wait_until(lambda: daemon.log.read_text().count('"event":"answered"') >= count, lambda: repr(daemon))
    return [line for line in lines_of(daemon) if line["event"] == "answered"]


# A line per turn


def test_a_turn_is_one_line_that_says_what_its_headers_said(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    usage = {"prompt_tokens": 321, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 300}}
    upstream.answer = lambda request: chat_answer(request, usage=usage)
    daemon = make_daemon(upstream.url, {"log": {"format": "json"}, "conversation": {"history": "daemon"}}).start()
    daemon.chat([user("The spare key hangs behind the barometer.")], metadata={"memory_in": {"topic_id": "house"}})
    session = {"X-Memory-Session": "another"}
    reply = daemon.chat([user("Where does the spare key hang?")], session, memory_in={"topic_id": "house"})
    ask(f"{daemon.base_url}/v1/models")
    off = daemon.chat([user("Hello")], {"X-Memory-Mode": "off"})
    first, second, third = answered(daemon, 3)
    shown = reply.json["memory_out"]["injected_chunks"]
    assert first["status"] == "none" and len(shown) == 1
    assert second["turn"] == reply.headers["X-Memory-Turn"]
    assert second["level"] == "info" and second["injected"] == second["candidates"] == 1
    what = ("api", "topic", "mode", "status", "http_status", "outcome")
    assert [second[name] for name in what] == ["chat", "house", "full", "injected", 200, "complete"]
    assert [second[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion")] == [321, 300, 7]
    assert second["injected_tokens"] > 10
    steps = [second[f"{step}_ms"] for step in ("read", "receive", "correct", "room", "recall", "upstream", "relay")]
    assert sum(steps) == pytest.approx(second["total_ms"], rel=0.05, abs=1.0)
    assert {"embed_ms", "search_ms", "inject_ms"} <= second.keys()
    assert (third["turn"], third["mode"], third["status"]) == (off.headers["X-Memory-Turn"], "off", "off")
    assert "recall_ms" not in third and "topic" not in third


def test_a_turn_whose_upstream_is_gone_or_breaks_off_is_a_line_too(make_daemon: MakeDaemon, raw: RawUpstream) -> None:
    daemon = make_daemon(raw.url, {"log": {"format": "json"}}).start()
    raw.script = lambda peer: peer.abort()
    unanswered = daemon.chat([user("Hello")])
    assert unanswered.status == 502
    raw.script = lambda peer: ends_after(peer, CHUNKED + chunked(b"{")[:-5])
    with pytest.raises(LOST):
        daemon.chat([user("Hello again")])
    gone, broken = answered(daemon, 2)
    assert (gone["outcome"], gone["http_status"], gone["status"]) == ("unreachable", 502, "none")
    turn = unanswered.headers["X-Memory-Turn"]
    assert (unanswered.headers["X-Memory-Status"], unanswered.headers["X-Memory-Mode"]) == ("none", "full")
    assert [line["turn"] for line in lines_of(daemon) if line["event"] == "the upstream did not answer"] == [turn]
    assert gone["turn"] == turn
    assert "upstream_ms" not in gone and gone["recall_ms"] >= 0
    assert (broken["outcome"], broken["http_status"]) == ("broken_answer", 200)


def answered_on_a_terminal(**fields: object) -> str:
    console = written(TerminalLines(content=False))
    stream = next(console)
    given = {"topic": "shop", "status": "injected", "http_status": 200, "injected": 2, "stored": True, **fields}
    log.error("answered", extra={**given, "recall_ms": 16.2, "receive_ms": 0.9, "upstream_ms": 900.0})
    console.close()
    return stream.getvalue().removesuffix("\n")


def test_on_a_terminal_a_request_is_a_short_line_with_what_its_owner_asked() -> None:
    told = answered_on_a_terminal(asked=Content("On which port\ndoes the shop listen?"))
    assert re.fullmatch(r'\d\d:\d\d:\d\d  shop  2 memories \(17 ms\)  "On which port does the shop listen\?"', told)
    assert re.fullmatch(r"\S+  shop  kept \(17 ms\)", answered_on_a_terminal(status="none", injected=0))
    assert "  shop  degraded: store (" in answered_on_a_terminal(status="degraded:store", injected=0)
    assert "  -  HTTP 502 (" in answered_on_a_terminal(topic=None, http_status=502, status="none", injected=0)
    long = answered_on_a_terminal(asked=Content("Where? " * 99))
    assert len(long) <= 80 and long.endswith('…"')


def test_a_terminal_gets_the_short_lines_unless_the_settings_say_otherwise(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url)
    parent, child = pty.openpty()
    shown, command = b"", daemon.command("--admin-port", "0")
    with subprocess.Popen(command, stderr=child, stdout=subprocess.PIPE, env=clean_environment(), text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split(" on ")[1].split()[0]
        ask(f"{url}/v1/chat/completions", {"model": "tiny", "messages": [user("Where is the spare key?")]})
        while b"key?" not in shown:
            shown += os.read(parent, 4096)
        process.terminate()
    os.close(parent)
    os.close(child)
    assert re.search(r'\d\d:\d\d:\d\d  default  kept \(\d+ ms\)  "Where is the spare key\?"', shown.decode())


# No word of a conversation


class Talk:
    """A conversation full of the secret, and everything that can go wrong with it."""

    def __init__(self, daemon: DaemonProcess, raw: RawUpstream, connect: Connect) -> None:
        self.daemon, self.raw, self.connect = daemon, raw, connect

    def hold(self) -> None:
        self.raw.script = self.answers
        self.converse()
        self.be_wrong()
        self.lose_the_upstream()
        self.lose_the_store()

    def answers(self, peer: Peer) -> None:
        peer.read_body()
        said = recording_upstream.answered({"role": "assistant", "content": f"The {SECRET} plays on."})
        peer.send(answer(said.parts[0]))

    def converse(self) -> None:
        history = [{"role": "system", "content": f"You are a {SECRET}."}]
        statuses = []
        for number in range(8):
            history.append(user(f"Fact {number}: the {SECRET} of platform {number} has {number * 31} mallets. " * 8))
            reply = self.daemon.chat(history, {"X-Memory-Session": SECRET})
            statuses.append(reply.headers["X-Memory-Status"])
            history.append({"role": "assistant", "content": reply.reply})
        assert "injected" in statuses
        ids = reply.headers["X-Memory-Injected"].split(",")
        update = {"chunk_ids": ids[:1], "action": "Update", "reason": SECRET, "content": f"A {SECRET} has none."}
        missing = {"chunk_ids": [SECRET], "action": "Helpful", "reason": SECRET}
        corrected = self.daemon.chat(
            [user(f"Who is the {SECRET}?")], metadata={"memory_in": {"corrections": [update, missing]}}
        )
        assert {"type": "correction_failed", "chunk_id": SECRET} in corrected.json["memory_out"]["signals"]
        with self.daemon.stream([user(f"And the other {SECRET}?")]) as stream:
            stream.headers["X-Memory-Status"]

    def be_wrong(self) -> None:
        bad: list[object] = [
            *(SECRET, [SECRET], {"topic_id": f"{SECRET} !"}, {"related_topic_ids": [f"../{SECRET}"]}),
            *({"topic_id": {SECRET: 1}}, {SECRET: 1}, {f"{SECRET}` - at `{SECRET}": 1}),
            *({"corrections": [{"chunk_ids": ["a"], "action": action, "reason": ""}]} for action in ODD_ACTIONS),
            {"corrections": [{"chunk_ids": [SECRET], "action": "Helpful", "reason": "", "content": SECRET}]},
        ]
        for memory_in in bad:
            reply = self.daemon.chat([user(f"The {SECRET}?")], memory_in=memory_in)
            assert reply.headers["X-Memory-Status"] == "bad-memory-in", memory_in
        url = self.daemon.base_url
        for body in (SECRET, f'{{"messages": "{SECRET}"}}', f'{{"messages": [{{"role": {SECRET}}}]}}', f'"{SECRET}'):
            ask(f"{url}/v1/chat/completions", body.encode())
        ask(f"{url}/v1/{SECRET}?prompt={SECRET}", b"{}")
        ask(f"{url}/t/{SECRET}%20!/v1/chat/completions", b"{}")
        ask(f"{url}/memd/search?q={SECRET}")
        self.daemon.chat([user(SECRET)], {"Origin": "http://elsewhere.example"})
        for data in (
            SECRET.encode() + b"\r\n\r\n",
            request(b"POST", b"/v1/chat/completions", b"Content-Length: 2") + b"{}" + SECRET.encode() + b"\r\n\r\n",
            request(b"POST", b"/v1/chat/completions", b"Bad Header " + SECRET.encode() + b": 1"),
            request(b"POST", b"/v1/chat/completions", b"Transfer-Encoding: chunked") + SECRET.encode() + b"\r\n",
            request(b"POST", b"/v1/" + SECRET.encode(), b"Content-Length: 100") + SECRET.encode(),
        ):
            peer = self.connect(self.daemon.base_url)
            peer.send(data)
            peer.wait_until_closed()

    def lose_the_upstream(self) -> None:
        secret = SECRET.encode()
        answers = {
            "broken off": CHUNKED + chunked(secret)[:-5],
            "no chunk": CHUNKED + secret + b"\r\n",
            "no status line": secret + b" 1\r\n\r\n",
            "bad header": b"HTTP/1.1 200 OK\r\n" + secret + b"\r\n\r\n",
            "refusal": answer(b"no template for " + secret, status=b"400 Bad Request"),
            "gone": b"",
        }
        for name, data in answers.items():
            self.raw.script = lambda peer, data=data: ends_after(peer, data)  # type: ignore[misc]  # the default's type
            with contextlib.suppress(*LOST):
                self.daemon.chat([user(f"Is the {SECRET} there ({name})?")])

    def lose_the_store(self) -> None:
        self.raw.script = self.answers
        (self.daemon.data_dir / "blocked").write_text("a file where a topic's folder belongs")
        reply = self.daemon.chat([user(f"The {SECRET}?")], memory_in={"topic_id": "blocked"})
        assert reply.headers["X-Memory-Status"] == "degraded:store"
        assert self.daemon.chat([user(SECRET)], memory_in={"topic_id": "room"}).status == 200
        journal = self.daemon.data_dir / "room" / "hot.log"
        wait_until(journal.exists, lambda: "no journal")
        journal.unlink()
        journal.mkdir()  # it cannot be replaced any more
        history: list[dict[str, str]] = []
        statuses: list[Answer] = []
        for number in range(6):
            history.append(user(f"Room {number}: the {SECRET} has {number * 17} sheets of music. " * 10))
            statuses.append(self.daemon.chat(history, memory_in={"topic_id": "room"}))
            history.append({"role": "assistant", "content": statuses[-1].reply})
        assert statuses[-1].headers["X-Memory-Status"] == "degraded:store"


ODD_ACTIONS = [SECRET, f"{SECRET}' - at `$`", f"a '{SECRET}'", f"\n{SECRET}\n"]


@pytest.mark.parametrize(("shape", "content"), [("json", False), ("console", True), ("console", False)])
def test_no_word_of_a_conversation_is_in_the_log_unless_it_is_asked_for(
    make_daemon: MakeDaemon, raw: RawUpstream, connect: Connect, shape: str, content: bool
) -> None:
    log = {"format": shape, "content": content, "level": "debug"}
    settings = {"log": log, "buffer": SMALL_BUFFER, "limits": {"idle_seconds": 3.0}}
    daemon = make_daemon(raw.url, settings).start()
    Talk(daemon, raw, connect).hold()
    assert daemon.terminate() == 1, "its journal could not be written"
    text = daemon.log.read_text()
    assert (SECRET in text) is content
    for event in HAPPENED:
        assert event in text, event
    if shape == "json":
        for line in lines_of(daemon):
            assert list(line)[:3] == ["time", "level", "event"] and re.fullmatch(UTC, line["time"])
    else:
        begun = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) \S")
        lines = [line for line in text.splitlines() if not re.match(r"memd |  |Traceback |\w+: |$", line)]
        assert all(begun.match(line) for line in lines)


UTC = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
HAPPENED = [
    "answered",
    "recalled",
    "passed through",
    "a request goes on without memory",
    "memd cannot read its body",
    "a web page gets no memory",
    "a request cannot be read",
    "a client stopped sending its request body",
    "the upstream did not answer",
    "the upstream broke off in mid-answer",
    "the upstream refused a prompt with memory",
    "the request goes on without memory",
    "writing failed",
]


# How a message becomes a line


@pytest.fixture
def console() -> Iterator[io.StringIO]:
    yield from written(ConsoleLines(content=False))


@pytest.fixture
def as_json() -> Iterator[io.StringIO]:
    yield from written(JsonLines(content=False))


def written(formatter: logging.Formatter) -> Generator[io.StringIO]:
    """What loggers that begin with `memd` or `asyncio` say in this shape."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    loggers = [logging.getLogger("memd"), logging.getLogger("asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield stream
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


log = logging.getLogger("memd")


def fail_with(cause: Exception, error: Exception) -> None:
    try:
        raise error from cause
    except Exception:
        log.exception("something failed", extra={"topic": "talk"})


def test_of_an_unexpected_error_there_is_where_and_what_kind_but_not_what_it_quotes(console: io.StringIO) -> None:
    fail_with(KeyError(SECRET), ValueError(f"cannot read {SECRET}"))
    text = console.getvalue()
    assert SECRET not in text
    kinds = [line.partition(":")[0] for line in text.splitlines() if re.match(r"\w+Error: ", line)]
    assert kinds == ["KeyError", "ValueError"]
    assert "something failed topic=talk\nTraceback (most recent call last):\n" in text
    assert "raise error from cause" in text


def test_an_error_of_memd_or_of_the_system_says_what_it_is(console: io.StringIO) -> None:
    log.error("writing failed", extra={"topic": "talk", "error": StoreError("hot.log: cannot be written")})
    log.error("writing failed", extra={"error": OSError(28, "No space left on device")})
    first, second = console.getvalue().splitlines()
    assert first.endswith('ERROR writing failed topic=talk error="hot.log: cannot be written"')
    assert second.endswith('error="OSError: [Errno 28] No space left on device"')


def test_what_a_client_sends_cannot_begin_a_line_of_its_own(console: io.StringIO, as_json: io.StringIO) -> None:
    log.error("odd", extra={"origin": 'a\n2026-01-01 ERROR "all is lost"\x1b[2J\u2028\ud800', "none": None})
    assert console.getvalue().count("\n") == 1
    assert r'origin="a\n2026-01-01 ERROR \"all is lost\"\x1b[2J' in console.getvalue()
    assert json.loads(as_json.getvalue())["origin"].startswith('a\n2026-01-01 ERROR "all')
    assert as_json.getvalue().count("\n") == 1 and as_json.getvalue().isascii()


@pytest.mark.parametrize("shape", [ConsoleLines, JsonLines])
def test_every_text_of_a_line_goes_through_what_redacts_it(shape: type[ConsoleLines | JsonLines]) -> None:
    lines = written(shape(content=True, redact=lambda text: text.replace(SECRET, "[redacted]")))
    stream = next(lines)
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        fields = {"error": error, "question": Content(SECRET), "other": SECRET, "number": 3}
        log.exception("heard %s", SECRET, extra=fields)
    assert SECRET not in stream.getvalue()
    assert stream.getvalue().count("[redacted]") == 5
    lines.close()


async def test_what_asyncio_quotes_of_a_lost_error_is_left_out(console: io.StringIO) -> None:
    loop = asyncio.get_running_loop()
    lost = loop.create_future()
    lost.set_exception(ValueError(SECRET))
    context = {"message": "Future exception was never retrieved", "exception": lost.exception(), "future": lost}
    loop.default_exception_handler(context)
    text = console.getvalue()
    assert "ERROR asyncio: Future exception was never retrieved" in text and "ValueError: (left out" in text
    assert SECRET not in text
