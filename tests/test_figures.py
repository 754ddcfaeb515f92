"""Figures over time and the tokens of requests are added up, from what receipts and the log say."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import msgspec
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from recording_upstream import RecordingUpstream

from memd.admin.history import QUARTER_US
from memd.admin.routing import PeriodQuery
from memd.admin.turns import PERIODS_MAX, FiguresQuery, figures_of, usage_of
from memd.receipts import Receipt
from memd.selection import Since, Until

HOUR, DAY = 3_600_000_000, 86_400_000_000
NOON = int(datetime(2026, 11, 20, 12).timestamp() * 1e6)
QUARTER = NOON // QUARTER_US


def line(at: int, memory_ms: float = 10.0, **more: Any) -> bytes:
    base: dict[str, Any] = {"turn_id": "0", "api": "chat", "mode": "full", "http_status": 200, "forwarded_tokens": 70}
    timings = {"memory": memory_ms, "upstream": memory_ms * 2}
    return msgspec.json.encode(
        Receipt(at=at, **{"topic_id": "work", "model": "tiny", "timings_ms": timings, **base, **more})
    )


def test_requests_are_added_up_by_hour_and_hours_without_any_are_there() -> None:
    lines = [
        line(NOON + 2 * HOUR, memory_ms=30, prompt_tokens=100, cached_tokens=60, completion_tokens=9, memory_tokens=7),
        line(NOON, memory_ms=10, question="Where?"),
        line(NOON + 1, memory_ms=20, http_status=500, prompt_tokens=1_000),
        line(NOON, topic_id="home"),
        b"{",
    ]
    told = figures_of(lines, {}, FiguresQuery(topic=("work",)))
    assert (told.by, told.since) == ("hour", NOON)
    assert [one.at for one in told.periods] == [NOON, NOON + HOUR, NOON + 2 * HOUR]
    first, second, third = told.periods
    assert (first.requests, first.prompt_tokens, first.questions, first.found) == (2, 70, 1, 0)
    assert (first.memory_ms, first.memory_ms_high, first.first_byte_ms) == (15, 19.5, 20)
    assert (second.requests, second.memory_ms, second.first_byte_ms) == (0, None, None)
    assert (third.prompt_tokens, third.cached_tokens, third.completion_tokens, third.memory_tokens) == (100, 60, 9, 7)


def test_the_size_of_the_log_goes_on_where_nothing_was_written_and_counts_what_was_before() -> None:
    grown = {QUARTER - 400: (5, 500), QUARTER: (1, 10), QUARTER + 1: (2, 20), QUARTER + 8: (1, 5)}
    told = figures_of([], grown, FiguresQuery(by="hour", since=NOON))  # type: ignore[arg-type]  # decoded from text
    assert [(one.stored, one.log_bytes) for one in told.periods] == [(3, 530), (0, 530), (1, 535)]
    days = figures_of([], grown, FiguresQuery(by="day"))
    assert [(one.stored, one.log_bytes) for one in days.periods][-1] == (4, 535)
    assert sum(one.stored for one in days.periods) == 9


def test_nothing_known_is_no_period_and_the_latest_of_too_many_are_told() -> None:
    assert figures_of([], {}, FiguresQuery()).periods == ()
    told = figures_of([line(NOON)], {QUARTER - 40 * PERIODS_MAX: (1, 100)}, FiguresQuery(by="hour"))
    assert len(told.periods) == PERIODS_MAX
    assert (told.periods[-1].at, told.periods[-1].requests, told.periods[-1].log_bytes) == (NOON, 1, 100)
    assert figures_of([], {QUARTER: (1, 1), QUARTER - 4 * 24 * 300: (1, 1)}, FiguresQuery()).by == "week"


def test_a_daemon_tells_what_it_did(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"idle_seconds": 0.1}}).start()
    url = f"{daemon.own_url}/memd/figures"
    assert ask(url).json["periods"] == []
    for text in ("The lamp of the lighthouse is on the brass plate.", "Where is the lamp of the lighthouse?"):
        daemon.chat([{"role": "user", "content": text}], memory_in={"topic_id": "work"})
        wait_until(lambda: daemon.export() != [], lambda: "not stored")
    wait_until(lambda: sum(one["requests"] for one in ask(url).json["periods"]) == 2, lambda: str(ask(url).body))
    periods = ask(f"{url}?topic=work&by=day").json["periods"]
    assert sum(one["found"] for one in periods) == 1 and sum(one["injected"] for one in periods) == 1
    assert periods[-1]["log_bytes"] > 100 and periods[-1]["memory_ms"] > 0


# The tokens of requests, by day, topic and model


def test_counts_of_the_model_server_come_before_estimates_and_refused_requests_cost_nothing() -> None:
    told: dict[str, Any] = {"prompt_tokens": 100, "cached_tokens": 60, "completion_tokens": 9, "memory_tokens": 30}
    lines = [
        b'{"redaction":"x"}',
        line(NOON, **told),
        line(NOON + 1, **told),
        line(NOON + 2),
        line(NOON, model="big", prompt_tokens=5),
        line(NOON + DAY, topic_id="home", prompt_tokens=1),
        line(NOON, topic_id="bad", model="", forwarded_tokens=0),  # it went on without memory: nothing was estimated
        line(NOON, http_status=500, prompt_tokens=1_000),
        line(NOON, http_status=None, prompt_tokens=1_000),
        line(NOON, **told)[:-9],  # torn by a crash
    ]
    usage = usage_of(lines, PeriodQuery())
    figures = [(row.day, row.topic_id, row.model, row.requests, row.prompt_tokens) for row in usage.rows]
    assert figures == [
        ("2026-11-21", "home", "tiny", 1, 1),
        ("2026-11-20", "bad", "", 1, 0),
        ("2026-11-20", "work", "big", 1, 5),
        ("2026-11-20", "work", "tiny", 3, 270),
    ]
    assert usage.rows[1].estimated == 0
    row = usage.rows[3]
    assert (row.cached_tokens, row.completion_tokens, row.memory_tokens, row.estimated) == (120, 18, 60, 1)
    assert usage.since == NOON
    assert [row.topic_id for row in usage_of(lines, PeriodQuery(topic=("home",))).rows] == ["home"]
    that_day = PeriodQuery(since=Since(NOON + 1), to=Until(NOON + DAY))
    assert [row.day for row in usage_of(lines, that_day).rows] == ["2026-11-20"]


def test_the_command_shows_what_requests_took(served: DaemonProcess) -> None:
    empty = served.run("usage")
    assert empty.returncode == 1 and "No request has a receipt" in empty.stdout
    for text in ("Where is the oil for the lamp?", "And the wick?"):
        served.chat([{"role": "user", "content": text}], memory_in={"topic_id": "work"})

    turns = f"{served.own_url}/memd/turns?topic=work"
    wait_until(lambda: len(ask(turns).json["turns"]) == 2, lambda: repr(served))
    rows = json.loads(served.run("usage", "--json").stdout)["rows"]
    assert sum(row["requests"] for row in rows if row["topic_id"] == "work") == 2
    shown = served.run("usage", "--topic", "work").stdout
    at = ask(f"{served.own_url}/memd/turns").json["turns"][0]["at"]
    assert f"{datetime.fromtimestamp(at / 1e6):%Y-%m-%d}" in shown and "work" in shown and "The oldest receipt" in shown
    assert served.run("usage", "--topic", "nowhere").returncode == 2
