"""`memd stats`: what is stored, and how fast a running daemon finds it.

Rule: the files are the source of what is stored; the daemon is asked only for what it alone knows, and may be absent.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import RenderableType
from rich.table import Table

from memd.config import Listen
from memd.store.survey import TopicSurvey, survey
from memd.wording import tallied

ANSWER_SECONDS_MAX = 5.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to show."""

    data_dir: str
    topics: list[TopicSurvey]
    daemon_url: str
    daemon: dict[str, Any] | None
    """What `/memd/stats` answers; None if no daemon that holds this folder listens there."""


def gathered(data_dir: Path, listen: Listen, token: str) -> Figures:
    """Read the directory and ask the daemon.

    Raises:
        StoreError: a file cannot be read.
    """
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    url = f"http://{host}:{listen.port}"
    return Figures(data_dir=str(data_dir), topics=survey(data_dir), daemon_url=url, daemon=_asked(url, data_dir, token))


def table(figures: Figures) -> list[RenderableType]:
    """The figures for a person: a table, and a line about the daemon."""
    shown = Table(box=box.SIMPLE_HEAD, title=figures.data_dir, title_justify="left", padding=(0, 1, 0, 0))
    shown.add_column("topic", overflow="fold", min_width=8)
    for name in ("chunks", "entries", "disk", "memory", "indexes", "fan-out", "scan"):
        shown.add_column(name, justify="right", no_wrap=True)
    in_memory = {} if figures.daemon is None else figures.daemon["topics"]
    for topic in figures.topics:
        shown.add_row(
            topic.topic_id,
            f"{topic.chunks:,}",
            f"{topic.entries:,}",
            _megabytes(topic.log_bytes + topic.derived_bytes),
            *_measured(in_memory.get(topic.topic_id)),
        )
    if figures.daemon is None:
        return [shown, f"No daemon with this folder answers at {figures.daemon_url}; it knows the last four columns."]
    used, allowed = figures.daemon["memory_bytes"], figures.daemon["memory_bytes_max"]
    told = [f"The daemon at {figures.daemon_url} has {_megabytes(used)} of at most {_megabytes(allowed)} loaded."]
    redacted = figures.daemon.get("redacted")
    if redacted is not None:
        told.append(f"Redacted in what it has stored since its start: {tallied(redacted) or 'nothing'}.")
    return [shown, *told]


def _measured(topic: dict[str, Any] | None) -> list[str]:
    if topic is None:
        return ["-"] * 4
    fan_out, rate = topic["fan_out_ms"], topic["scanned_per_second"]
    return [
        _megabytes(topic["memory_bytes"]),
        f"{topic['indexes_loaded']}/{topic['indexes']}",
        "-" if fan_out is None else f"{fan_out:.2f} ms",
        "-" if rate is None else f"{rate / 1e6:.1f} M/s",
    ]


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _asked(url: str, data_dir: Path, token: str) -> dict[str, Any] | None:
    headers = {"X-Memory-Token": token} if token else {}
    request = urllib.request.Request(f"{url}/memd/stats", headers=headers)  # noqa: S310  # http, built above
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as answer:  # noqa: S310  # the same
            decoded = msgspec.json.decode(answer.read(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None
    return decoded if decoded.get("data_dir") == str(data_dir.resolve()) else None
