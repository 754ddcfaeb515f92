"""`memd check` of a cluster: each thing that must be right is said, and the daemons are compared."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from bucket_server import S3Server
from click.testing import CliRunner
from conftest import MakeDaemon
from daemon_process import DaemonProcess, wait_until
from postgres_server import PostgresServer
from recording_upstream import RecordingUpstream
from tls_files import make_tls_files

from memd.cli.check.cluster import Server, told_of
from memd.cli.check.report import outcomes
from memd.cli.check.result import CheckResult
from memd.cli.main import main
from memd.settings.model import Config
from memd.store.cluster.daemons import BUCKET, DISK, MODEL, DaemonNotices, DaemonRow, announce, marks_of, seen
from memd.store.cluster.database import SCHEMA_VERSION, Database

pytestmark = pytest.mark.process
_numbers = itertools.count(1)
GOOD = Server(
    number=17,
    version="17.2",
    is_standby=False,
    is_read_only=False,
    has_fsync=True,
    has_full_pages=True,
    synchronous_commit="on",
    standby_names="ANY 1 (a, b)",
    clock_ahead=0.1,
    may_create=True,
    schema=SCHEMA_VERSION,
    standbys=2,
    is_pooled=False,
)


@pytest.fixture
def settings(postgres: PostgresServer, s3: S3Server) -> dict[str, Any]:
    return {"store": {"url": postgres.database(f"checked_{next(_numbers)}"), **s3.told()}}


def of_cluster(found: Iterator[CheckResult]) -> list[tuple[str, str, str]]:
    names = ("database", "bucket", "daemons", "own address")
    return [(one.check, one.mark, f"{one.said}: {one.remedy}") for one in found if one.check in names]


def checked(settings: dict[str, Any], folder: Path) -> list[tuple[str, str, str]]:
    path = folder / "check.yaml"
    path.write_text(json.dumps(settings))
    return of_cluster(outcomes(path, os.environ, {"data_dir": str(folder / "cache")}, live=False))


def checked_beside(daemon: DaemonProcess) -> list[tuple[str, str, str]]:
    return of_cluster(outcomes(daemon.config, os.environ, {"data_dir": str(daemon.data_dir)}, live=False))


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
        ({"schema": None, "may_create": False}, "failed", "grant it CREATE"),
        ({"schema": SCHEMA_VERSION + 1}, "failed", "update this memd"),
        ({"has_fsync": False}, "failed", "set fsync = on"),
        ({"has_full_pages": False}, "failed", "set full_page_writes = on"),
        ({"synchronous_commit": "off"}, "failed", "a crash of the server loses what was acknowledged"),
        ({"synchronous_commit": "local"}, "warning", "a failover may lose what was acknowledged"),
        ({"standby_names": ""}, "warning", "a failover may lose what was acknowledged"),
        ({"standbys": 0}, "warning", "start a standby"),
        ({"clock_ahead": -4.2}, "warning", "its clock is 4.2 s behind this machine's"),
    ],
)
def test_each_trouble_of_a_server_is_said(change: dict[str, Any], mark: str, said: str) -> None:
    found = of_cluster(told_of(msgspec.structs.replace(GOOD, **change)))
    assert any(one == mark and said in words for _, one, words in found), found


def test_a_cluster_is_checked_before_there_is_anything_in_it(settings: dict[str, Any], tmp_path: Path) -> None:
    found = checked(settings, tmp_path)
    assert [(name, mark) for name, mark, _ in found] == [
        ("database", "ok"),
        ("database", "failed"),  # the tests' own server does not sync
        ("database", "warning"),
        ("bucket", "ok"),
        ("own address", "ok"),
    ]
    assert "has no tables yet, memd serve makes them" in found[0][2]
    with psycopg.connect(settings["store"]["url"]) as connection:
        assert connection.execute("SELECT to_regclass('memd_topic')").fetchone() == (None,), "nobody has made it"


def test_nothing_stays_set_on_a_connection_that_a_pooler_gives_to_others(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(psycopg.connect(settings["store"]["url"])) as connection, monkeypatch.context() as pooled:
        pooled.setattr(connection, "close", lambda: None)
        pooled.setattr(psycopg, "connect", lambda *_, **__: connection)
        assert checked(settings, tmp_path)[0][:2] == ("database", "ok")
        assert connection.execute("SHOW statement_timeout").fetchone() == ("0",)


def test_what_cannot_be_reached_is_named_with_the_remedy(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["store"] |= {"url": "postgresql://memd@127.0.0.1:9/memd", "bucket": "s3://no-such-bucket"}
    database, bucket, _ = checked(settings, tmp_path)
    assert (database[:2], bucket[:2]) == (("database", "failed"), ("bucket", "failed"))
    assert "start the server, or correct host and port in store.url" in database[2]
    assert "create it, or correct store.bucket" in bucket[2]


def test_the_daemon_that_a_command_starts_for_itself_is_set_alike() -> None:
    rarely = msgspec.structs.replace(Config().ingest, reindex_seconds=0)
    assert marks_of(Config(), None) == marks_of(Config(ingest=rarely), None)
    assert marks_of(Config(), None) != marks_of(Config(ingest=msgspec.structs.replace(rarely, redact=True)), None)


def test_daemons_that_are_not_set_alike_are_named(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = make_daemon(upstream.url, settings).start()
    with closing(Database(settings["store"]["url"])) as database:
        wait_until(lambda: bool(seen(database)), lambda: repr(daemon))
        [own] = seen(database)
        assert own.url == daemon.base_url
        found = checked_beside(daemon)
        assert ("daemons", "ok", f"1 daemon at work: {own.url}; set alike: ") in found
        assert ("own address", "ok", f"{own.url} answers as this daemon: ") in found
        place = ["--config", str(daemon.config), "--data-dir", str(daemon.data_dir)]
        assert CliRunner().invoke(main, ["token", "add", "ann", "--topics=*", "--rights=read", *place]).exit_code == 0
        assert ("own address", "ok", f"{own.url} answers as this daemon: ") in checked_beside(daemon), "without a token"
        marks = dict(own.marks) | {MODEL: "another (0123, 8)", BUCKET: "s3://elsewhere", DISK: "/c: is full; free some"}
        other = DaemonRow(url="http://other", boot="1", version="0.0.1", marks=marks)
        assert announce(database, other) == [own]
        found = checked_beside(daemon)
        assert any(name == "daemons" and mark == "failed" and "reembed" in words for name, mark, words in found), found
        assert any(mark == "failed" and "s3://elsewhere" in words for _, mark, words in found), found
        assert any("http://other is memd 0.0.1" in words for _, _, words in found)
        told = "http://other leaves its topics to others: /c: is full: free some"
        assert ("daemons", "warning", told) in found
        notices = DaemonNotices(database, "http://third", "0.0.1", marks)
        notices.start()
        wait_until(lambda: "do not fit together" in caplog.text, lambda: caplog.text)
        notices.leave()
        assert [one.url for one in seen(database)] == sorted([own.url, "http://other"])
        assert daemon.terminate() == 0
        assert [one.url for one in seen(database)] == ["http://other"]


def test_the_certificate_at_the_own_address_is_checked_as_the_others_do(
    make_daemon: MakeDaemon,
    upstream: RecordingUpstream,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tls = make_tls_files(tmp_path)
    daemon = make_daemon(upstream.url, {**settings, "listen": {"tls_cert": str(tls.cert), "tls_key": str(tls.key)}})
    daemon.start()

    def own_address(**store: str) -> tuple[str, str]:
        path = tmp_path / "own.yaml"
        path.write_text(json.dumps({**settings, "store": {**settings["store"], **store}}))
        found = of_cluster(outcomes(path, os.environ, {"data_dir": str(daemon.data_dir)}, live=False))
        return next((mark, words) for name, mark, words in found if name == "own address")

    mark, words = own_address()
    assert mark == "failed" and "is not trusted here (self-signed certificate)" in words and "SSL_CERT_FILE" in words
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.cert))
    assert own_address() == ("ok", f"{daemon.base_url} answers as this daemon: ")
    mark, words = own_address(own_url=daemon.base_url.replace("127.0.0.1", "localhost"))
    assert mark == "failed" and "not valid for 'localhost'" in words and "name the host in store.own_url" in words
    mark, words = own_address(own_url=daemon.base_url.replace("https:", "http:"))
    assert mark == "failed" and words.endswith("speaks TLS: let store.own_url begin with https:")


def test_plain_http_behind_an_address_with_https_is_told(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, settings: dict[str, Any]
) -> None:
    daemon = make_daemon(upstream.url, settings).start()
    settings["store"]["own_url"] = daemon.base_url.replace("http:", "https:")
    daemon.configure(settings)
    mark, words = next((mark, words) for name, mark, words in checked_beside(daemon) if name == "own address")
    assert mark == "failed" and "does not speak TLS" in words and "let store.own_url begin with http:" in words
