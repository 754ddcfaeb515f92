"""The tokens of requests are added up by day, topic and model, from what receipts say."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import msgspec
from daemon_process import DaemonProcess, ask, wait_until

from memd.admin.queries import PeriodQuery
from memd.admin.usage import usage_of
from memd.receipts import Receipt
from memd.selection import Since, Until

NOON = int(datetime(2026, 11, 20, 12).timestamp() * 1e6)
DAY = 86_400_000_000


def line(at: int, topic_id: str = "work", model: str = "tiny", **more: Any) -> bytes:
    base = {"turn_id": "0", "api": "chat", "mode": "full", "http_status": 200, "forwarded_tokens": 70}
    return msgspec.json.encode(Receipt(at=at, topic_id=topic_id, model=model, **{**base, **more}))


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
