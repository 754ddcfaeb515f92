"""`memd check` of a cluster: each thing that must be right is said."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from postgres_server import PostgresServer
from recording_upstream import RecordingUpstream, chat_answer

from memd.cli.check import CheckResult
from memd.cli.check.machine import told_of
from memd.cli.check.report import outcomes
from memd.store.shared.postgres import SCHEMA_VERSION, SharedLog

pytestmark = pytest.mark.process
GOOD: dict[str, Any] = {
    "number": 17,
    "version": "17.2",
    "is_standby": False,
    "is_read_only": False,
    "fsync": True,
    "full_page_writes": True,
    "synchronous_commit": "on",
    "standby_names": "ANY 1 (a, b)",
    "clock_ahead": 0.1,
    "may_write": True,
    "schema": SCHEMA_VERSION,
    "standbys": 2,
    "encoding": "UTF8",
    "round_trip_ms": 0.3,
    "is_pooled": False,
}


@pytest.fixture
def settings(postgres: PostgresServer) -> dict[str, Any]:
    return {"cluster": {"database": postgres.database()}}


def of_cluster(found: Iterator[CheckResult]) -> list[tuple[str, str, str]]:
    return [(one.check, one.mark, f"{one.said}: {one.remedy}") for one in found if one.check == "database"]


def checked(settings: dict[str, Any], folder: Path) -> list[tuple[str, str, str]]:
    path = folder / "check.yaml"
    path.write_text(json.dumps(settings))
    return of_cluster(outcomes(path, os.environ, {"data_dir": str(folder / "copy")}, live=False))


@pytest.mark.parametrize(
    ("change", "mark", "said"),
    [
        ({}, "ok", "PostgreSQL 17.2, schema 1"),
        ({}, "ok", "commits wait for a synchronous standby (ANY 1 (a, b))"),
        ({"is_pooled": True}, "ok", "through a pooler of connections"),
        ({"number": 12, "version": "12.1"}, "failed", "memd needs PostgreSQL 14 or later"),
        ({"is_standby": True}, "failed", "is a standby, and nothing can be written there"),
        ({"is_read_only": True}, "failed", "is read-only"),
        ({"schema": None}, "ok", "has no tables yet"),
        ({"schema": None, "may_write": False}, "failed", "grant it CREATE"),
        ({"may_write": False}, "failed", "grant it SELECT, INSERT, UPDATE and DELETE"),
        ({"schema": SCHEMA_VERSION + 1}, "failed", "run the same version of memd everywhere"),
        ({"encoding": "LATIN1"}, "warning", "its encoding is LATIN1"),
        ({"round_trip_ms": 30.0}, "warning", "in the same zone"),
        ({"fsync": False}, "failed", "set fsync = on"),
        ({"full_page_writes": False}, "failed", "set full_page_writes = on"),
        ({"synchronous_commit": "off"}, "failed", "a crash of the server loses what was acknowledged"),
        ({"synchronous_commit": "local"}, "warning", "a failover may lose what was acknowledged"),
        ({"standby_names": ""}, "warning", "a failover may lose what was acknowledged"),
        ({"standbys": 0}, "warning", "start a standby"),
        ({"clock_ahead": -4.2}, "warning", "its clock is 4.2 s behind this machine's"),
    ],
)
def test_each_trouble_of_a_server_is_said(change: dict[str, Any], mark: str, said: str) -> None:
    found = of_cluster(told_of(SimpleNamespace(**GOOD | change)))
    assert any(one == mark and said in words for _, one, words in found), found


def test_a_cluster_is_checked_before_there_is_anything_in_it(settings: dict[str, Any], tmp_path: Path) -> None:
    found = checked(settings, tmp_path)
    slow = "and every chat waits for one answer"  # the machine may be busy
    assert [(name, mark) for name, mark, words in found if slow not in words] == [
        ("database", "ok"),
        ("database", "failed"),  # the tests' own server does not sync
        ("database", "warning"),
    ]
    assert "has no tables yet, memd serve makes them" in found[0][2]
    with psycopg.connect(settings["cluster"]["database"]) as connection:
        assert connection.execute("SELECT to_regclass('memd_topic')").fetchone() == (None,), "nobody has made it"


def test_a_conversation_with_the_model_is_none_of_the_cluster_and_no_source_is_read(
    settings: dict[str, Any], upstream: RecordingUpstream, tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    upstream.answer = lambda request: chat_answer(request, "It is heron-4519.")
    settings |= {"upstream": {"url": upstream.url}, "sources": [str(tmp_path / "docs")]}
    path = tmp_path / "check.yaml"
    path.write_text(json.dumps(settings))
    found = list(outcomes(path, os.environ, {"data_dir": str(tmp_path / "copy")}, live=True))
    assert next(one.mark for one in found if one.check == "live") == "ok", found
    with psycopg.connect(settings["cluster"]["database"]) as connection:
        assert connection.execute("SELECT to_regclass('memd_topic')").fetchone() == (None,), "nobody has made it"


def test_a_user_who_may_only_read_is_told(settings: dict[str, Any], tmp_path: Path) -> None:
    url = settings["cluster"]["database"]
    with closing(SharedLog(url)) as kept:
        kept.connect()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
    settings["cluster"]["database"] = url.replace("memd@", "reader@")
    assert "this user may not write memd's tables" in checked(settings, tmp_path)[0][2]
    settings["cluster"]["database"] = url
    assert checked(settings, tmp_path)[0][1] == "ok"


def test_a_database_of_a_server_in_the_c_locale_serves(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.database(encoding="SQL_ASCII")
    for _ in range(2):
        with closing(SharedLog(url)) as kept:
            kept.connect()
    found = checked({"cluster": {"database": url}}, tmp_path)
    assert any(mark == "warning" and "its encoding is SQL_ASCII" in words for _, mark, words in found), found


def test_nothing_stays_set_on_a_connection_that_a_pooler_gives_to_others(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(psycopg.connect(settings["cluster"]["database"])) as connection, monkeypatch.context() as pooled:
        pooled.setattr(connection, "close", lambda: None)
        pooled.setattr(psycopg, "connect", lambda *_, **__: connection)
        assert checked(settings, tmp_path)[0][:2] == ("database", "ok")
        assert connection.execute("SHOW statement_timeout").fetchone() == ("0",)


def test_what_cannot_be_reached_is_named_with_the_remedy(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["cluster"]["database"] = "postgresql://memd@127.0.0.1:9/memd"
    [database] = checked(settings, tmp_path)
    assert database[:2] == ("database", "failed")
    assert "start the server, or correct host and port (cluster.database)" in database[2]
