"""`/memd/metrics`: what was counted is what happened, what is shown is what is, and the list never grows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, user, wait_until
from prometheus_client.parser import text_string_to_metric_families
from raw_wire import RawUpstream
from recording_upstream import RecordingUpstream, Response, chat_answer

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


# In which format


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
