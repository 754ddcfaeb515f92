"""Daemons of a cluster: real processes on one PostgreSQL and one bucket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from bucket_server import S3Server, s3_server
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from postgres_server import PostgresServer, running_postgres
from recording_upstream import RecordingUpstream

pytestmark = pytest.mark.process
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def settings(postgres: PostgresServer, s3: S3Server) -> dict[str, Any]:
    """Of a daemon in a new cluster."""
    made = s3.settings()
    bucket = {name: getattr(made, name) for name in ("bucket", "endpoint", "region", "access_key", "secret_key")}
    store = {"url": postgres.database(f"core_{next(_numbers)}"), "lease_seconds": 1, **bucket}
    return {"store": store, "buffer": {"store_after_seconds": 0.0}, "retrieval": {"timeout_ms": 5_000}}


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def chat(daemon: DaemonProcess, *texts: str, topic: str = "talk") -> str:
    """The status of memory in the answer."""
    answer = daemon.chat(said(*texts), headers={"X-Memory-Topic": topic})
    assert answer.status == 200, answer.body
    return answer.headers["X-Memory-Status"]


def found(daemon: DaemonProcess, words: str, topic: str = "talk") -> str:
    return ask(f"{daemon.own_url}/memd/search?q={words.replace(' ', '+')}&topic={topic}").body.decode()


def test_a_topic_is_had_by_one_daemon_and_goes_to_another_when_that_ends(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    first, second = (make_daemon(upstream.url, settings).start() for _ in range(2))
    assert "PostgreSQL" in first.log.read_text() and "s3://" in first.log.read_text()
    assert chat(first, "The lamp of the lighthouse was made in Paris.") == "none"
    wait_until(lambda: "made in Paris" in found(first, "lamp Paris"), lambda: repr(first))
    assert chat(second, "Where was the lamp of the lighthouse made?") == "degraded:store"
    assert first.terminate() == 0
    assert chat(second, "Where was the lamp of the lighthouse made?") == "injected"
    assert "made in Paris" in found(second, "lamp Paris")
