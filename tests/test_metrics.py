"""`/memd/metrics`: what was counted is what happened, what is shown is what is, and the list never grows."""

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
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import recording_upstream
from conftest import Connect, MakeDaemon, Serving
from daemon_process import Answer, DaemonProcess, ask, clean_environment, user, wait_until
from prometheus_client.parser import text_string_to_metric_families
from raw_wire import Peer, RawUpstream, answer, chunked, request
from recording_upstream import RecordingUpstream, Response, chat_answer

from memd.errors import StoreError
from memd.telemetry.logging import ConsoleLines, Content, JsonLines, TerminalLines

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "docs" / "grafana" / "memd.json"
SMALL_BUFFER = {"soft_tokens": 256, "hard_tokens": 300}
FACT = "The spare key hangs behind the barometer."

Figures = dict[str, float]
"""By series, as it is written: `memd_requests_total{api="chat",…}`."""


def figures_of(text: str) -> Figures:
    return {
        sample.name + labelled(sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labelled(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def scraped(daemon: DaemonProcess) -> Figures:
    answer = ask(f"{daemon.own_url}/memd/metrics")
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain; version=")
    return figures_of(answer.body.decode())


def become(daemon: DaemonProcess, holds: Callable[[Figures], bool]) -> Figures:
    """The figures as soon as they are so: an answer may be there before it is counted."""
    figures: Figures = {}

    def hold_now() -> bool:
        figures.update(scraped(daemon))
        return holds(figures)

    wait_until(hold_now, lambda: ask(f"{daemon.own_url}/memd/metrics").body.decode())
    return figures


def total(figures: Figures, name: str, **labels: str) -> float:
    """The sum over the series of a name that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for series, value in figures.items()
        if series.partition("{")[0] == name and all(pair in series for pair in wanted)
    )


def talk(daemon: DaemonProcess, turns: int) -> tuple[list[str], int]:
    """A conversation that overflows its buffer: the status of each turn, and how many chunks were shown altogether."""
    history: list[dict[str, str]] = []
    statuses, shown = [], 0
    for number in range(turns):
        history.append(user(f"Fact {number}: locker {number} belongs to crew {number * 7}, code {number * 1319}. " * 8))
        answer = daemon.chat(history)
        history.append({"role": "assistant", "content": answer.reply})
        statuses.append(answer.headers["X-Memory-Status"])
        shown += len([one for one in answer.headers["X-Memory-Injected"].split(",") if one])
    return statuses, shown


@pytest.fixture
def memd(serving: Serving) -> DaemonProcess:
    return serving({"buffer": SMALL_BUFFER})


# What was counted is what happened


def test_a_conversation_and_its_corrections_are_counted_as_its_answers_told_them(memd: DaemonProcess) -> None:
    statuses, shown = talk(memd, 8)
    memd.chat([user("Hello")], {"X-Memory-Mode": "off"})
    memd.chat([user("Hello")], {"X-Memory-Mode": "readonly"})
    memd.chat([user("Hello")], memory_in=3)
    ask(f"{memd.base_url}/v1/models")
    after = become(memd, lambda figures: total(figures, "memd_requests_total") == 11)
    counted = {
        status: total(after, "memd_requests_total", api="chat", mode="full", status=status)
        for status in ("injected", "none", "bad-memory-in", "degraded")
    }
    expected = {status: statuses.count(status) for status in ("injected", "none")}
    assert counted == {**expected, "bad-memory-in": 1, "degraded": 0} and expected["injected"] > 0
    assert total(after, "memd_requests_total", mode="off", status="off") == 1
    assert total(after, "memd_requests_total", mode="readonly") == 1
    assert after["memd_passed_requests_total"] == 1
    assert after["memd_injected_chunks_total"] >= shown > 0
    assert after["memd_injected_tokens_total"] > after["memd_injected_chunks_total"]
    assert after["memd_recall_candidates_count"] == 9  # all but off and the malformed one
    assert after['memd_responses_total{code="2xx"}'] >= 12
    for phase in ("read", "receive", "correct", "room", "recall", "embed", "search", "inject", "upstream", "relay"):
        count = after[f'memd_phase_duration_seconds_count{{phase="{phase}"}}']
        assert count == {"upstream": 11, "relay": 11, "read": 10}.get(phase, 9), phase

    asked = memd.chat([user("Which crew has locker 1?")], memory_in={})
    known = [one["id"] for one in asked.json["memory_out"]["injected_chunks"]]
    correction = {"chunk_ids": [*known, "none-such"], "action": "Helpful", "reason": ""}
    memd.chat([user("Thanks")], memory_in={"corrections": [correction]})
    after = become(memd, lambda figures: figures['memd_corrections_total{outcome="failed"}'] == 1)
    assert after['memd_corrections_total{outcome="applied"}'] == len(known) > 0

    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    answer = ask(f"{memd.own_url}/memd/metrics", headers=accept)
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")

    existing = set(re.findall(r'(\w+)="', " ".join(scraped(memd)))) | {"instance"}
    used = set()
    for expression in expressions():
        used |= set(re.findall(r"(\w+)[=!]~?\"", expression))
        for labels in re.findall(r"\b(?:by|ignoring) \(([^)]*)\)|ignoring\((\w+)\)", expression):
            used |= set(re.findall(r"\w+", " ".join(labels)))
    assert used <= existing


def test_what_moves_into_the_log_is_counted_and_shown(serving: Serving) -> None:
    buffer = {**SMALL_BUFFER, "store_after_seconds": 3600}  # only what overflows is stored
    memd = serving({"buffer": buffer})
    talk(memd, 8)
    become(memd, lambda figures: figures["memd_ingested_chunks_total"] >= 4)
    stats: dict[str, Any] = {}

    def as_stats_tell(figures: Figures) -> bool:
        """Not so while something is on its way into the log between the two questions."""
        stats.update(ask(f"{memd.own_url}/memd/stats").json)
        topic = stats["topics"]["default"]
        names = ("chunks", "entries", "segments", "indexes", "memory_bytes")
        is_counted = figures["memd_ingested_chunks_total"] == topic["chunks"]
        return is_counted and all(figures[f"memd_{name}"] == topic[name] for name in names)

    after = become(memd, as_stats_tell)
    assert after["memd_ingested_chunks_total"] == stats["topics"]["default"]["chunks"] > 0
    assert after["memd_ingested_tokens_total"] > 100
    assert total(after, "memd_compaction_duration_seconds_count") > 0
    assert after["memd_ingestion_duration_seconds_count"] > 0
    assert after["memd_topics_open"] == after["memd_conversations"] == 1
    assert after["memd_buffer_tokens"] > 0 and after["memd_buffer_unstored_tokens"] > 0
    assert after["memd_memory_bytes_max"] == stats["memory_bytes_max"]
    assert after["process_resident_memory_bytes"] > 1e7
    assert after["memd_requests_in_flight"] == 0
    assert {series for series in after if series.startswith("memd_queue_depth")} == {
        f'memd_queue_depth{{queue="{queue}"}}' for queue in ("ingestion", "writer", "indexer")
    }


def test_tokens_are_counted_as_the_upstream_tells_them(memd: DaemonProcess, upstream: RecordingUpstream) -> None:
    usage = {"prompt_tokens": 321, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 300}}
    upstream.answer = lambda request: chat_answer(request, usage=usage)
    memd.chat([user("Hello")])
    with memd.stream([user("Hello")]) as answer:
        list(answer)
    after = become(memd, lambda figures: figures["memd_upstream_prompt_tokens_total"] == 2 * 321)
    assert after["memd_upstream_cached_tokens_total"] == 2 * 300
    assert after["memd_upstream_completion_tokens_total"] == 2 * 7


# What goes wrong


def test_a_recall_that_takes_too_long_is_counted_with_its_reason(serving: Serving) -> None:
    memd = serving({"retrieval": {"timeout_ms": 1}})
    memd.chat([user("The spare key hangs behind the blue bicycle.")])
    wait_until(lambda: memd.export() != [], lambda: "nothing was stored")  # of nothing, nothing is recalled in no time
    before = become(memd, lambda figures: total(figures, "memd_requests_total") == 1)
    answer = memd.chat([user("Once upon a time " * 100)])
    assert answer.headers["X-Memory-Status"] == "degraded:timeout"
    after = become(memd, lambda figures: total(figures, "memd_requests_total") == 2)
    late = 'memd_degraded_total{reason="timeout"}'
    assert after[late] == total(after, "memd_degraded_total") == before.get(late, 0) + 1
    assert total(after, "memd_requests_total", status="degraded") == after[late]


def test_an_upstream_that_breaks_off_or_goes_away_is_counted_and_seen(
    make_daemon: MakeDaemon, raw: RawUpstream
) -> None:
    memd = make_daemon(raw.url).start()
    assert scraped(memd)["memd_upstream_reachable"] == 1
    assert scraped(memd)["memd_upstream_window_tokens"] == 4096
    raw.script = lambda peer: peer.abort()
    assert memd.chat([user("Hello")]).status == 502
    after = become(memd, lambda figures: figures['memd_errors_total{kind="unreachable"}'] == 1)
    assert after['memd_responses_total{code="5xx"}'] == 1


def test_a_model_server_that_is_not_there_is_seen(make_daemon: MakeDaemon) -> None:
    memd = make_daemon("http://127.0.0.1:9").start()  # the port of the discard service, which nobody runs
    figures = scraped(memd)
    assert (figures["memd_upstream_reachable"], figures["memd_upstream_window_tokens"]) == (0, 0)


# The list never grows


def test_nothing_that_a_client_sends_becomes_a_label(memd: DaemonProcess, upstream: RecordingUpstream) -> None:
    memd.chat([user(FACT)])
    before = become(memd, lambda figures: total(figures, "memd_requests_total") == 1)
    upstream.answer = lambda request: Response((b"{}",), status=799)
    for number in range(5):
        odd = {"X-Memory-Mode": f"odd-{number}", "X-Memory-Session": f"odd-{number}", "Origin": f"http://odd-{number}"}
        memd.chat([user(FACT)], odd, memory_in={"topic_id": f"odd-{number}"})
        memd.chat([user(FACT)], memory_in={"topic_id": f"odd-{number}"}, model=f"odd-{number}")
        ask(f"{memd.base_url}/t/odd-{number}/v1/odd-{number}?odd-{number}", {"model": f"odd-{number}"})
        ask(f"{memd.own_url}/memd/odd-{number}")
    after = become(memd, lambda figures: total(figures, "memd_requests_total") == 11)
    assert after['memd_responses_total{code="other"}'] == 15
    assert after.keys() - before.keys() == {'memd_responses_total{code="other"}'}


# What is said of them


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The kinds of a daemon's metrics by their names."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("memd"), "http://127.0.0.1:9").start()
    try:
        text = ask(f"{daemon.own_url}/memd/metrics").body.decode()
    finally:
        daemon.discard()
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def series_names(families: dict[str, str]) -> set[str]:
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + ending for name, kind in families.items() for ending in endings.get(kind, ("",))}


ENDING = re.compile(r"_(?:bucket|sum|count)$")


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


@pytest.mark.process
def test_every_metric_of_the_dashboard_exists_and_every_metric_of_memd_is_on_it(families: dict[str, str]) -> None:
    used = {name for expression in expressions() for name in re.findall(r"\b(?:memd|process)_[a-z_]+", expression)}
    assert used <= series_names(families)
    on_it = used | {ENDING.sub("", name) for name in used}
    assert {name for name in families if name.startswith("memd_")} - on_it == {"memd_upstream_window_tokens"}


def test_the_dashboard_asks_the_data_source_and_the_instances_that_its_reader_chose() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert [one["name"] for one in dashboard["templating"]["list"]] == ["datasource", "instance"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) and dashboard["id"] is None
    for panel in dashboard["panels"]:
        for asked in (panel, *panel.get("targets", [])):
            if panel["type"] != "row":
                assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for expression in expressions():
        assert len(re.findall(r"\{", expression)) == expression.count('{instance=~"$instance"'), expression


@pytest.mark.process
def test_every_metric_is_on_the_page_about_running_memd_with_its_kind(families: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert dict(rows) == {name: kind for name, kind in families.items() if name.startswith("memd_")}


# Lines of the log: one per turn, in two shapes, and no word of a conversation unless it is asked for


SECRET = "xylophonist"


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
    *("answered", "recalled", "passed through", "a request goes on without memory", "memd cannot read its body"),
    *("a web page gets no memory", "a request cannot be read", "a client stopped sending its request body"),
    *("the upstream did not answer", "the upstream broke off in mid-answer"),
    *("the upstream refused a prompt with memory", "the request goes on without memory", "writing failed"),
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
