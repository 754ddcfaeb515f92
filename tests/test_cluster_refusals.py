"""A wrong `store.url`: what cannot pass by itself ends the start, what may pass is tried again, and said once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from bucket_server import S3Server
from conftest import MakeDaemon
from daemon_process import ask, wait_until
from postgres_server import PostgresServer
from recording_upstream import RecordingUpstream
from reserved_port import reserved_port

from memd.errors import StoreError
from memd.store.cluster.database import Database
from memd.store.cluster.refusals import remedy_of

pytestmark = pytest.mark.process

AT = 'connection to server at "10.0.0.1", port 5432 failed: '
SEVERAL = "\nMultiple connection attempts failed. All failures were:\n- host: 'a', port: 5432, hostaddr: '10.0.0.1': "


@pytest.mark.parametrize(
    ("words", "remedy", "is_lasting"),
    [
        (f'connection failed: {AT}FATAL:  database "memd" does not exist', "make it", True),
        (f"connection failed: {AT}FATAL:  no such database: memd", "make it", True),  # PgBouncer
        (f'connection failed: {AT}FATAL:  password authentication failed for user "memd"', "correct user", True),
        (f"connection failed: {AT}fe_sendauth: no password supplied", "correct user and password", True),
        (f'connection failed: {AT}FATAL:  role "memd" does not exist', "make that user", True),
        (f'connection failed: {AT}FATAL:  no pg_hba.conf entry for host "10.0.0.9"', "let this user in", True),
        (f"connection failed: {AT}server does not support SSL, but SSL was required", "correct sslmode", True),
        (f"connection failed: {AT}received invalid response to SSL negotiation: S", "correct the port", True),
        ('connection is bad: invalid sslmode value: "sometimes"', "correct it in store.url", True),
        (
            'connection is bad: connection to server on socket "/s" failed: No such file or directory',
            "the server",
            False,
        ),
        (f"connection failed: {AT}FATAL:  the database system is starting up", "the server runs", False),
        (f"connection failed: {AT}FATAL:  sorry, too many clients already", "the server runs", False),
        (f"connection failed: {AT}Connection refused", "start the server", False),
        ("failed to resolve host 'db': [Errno -2] Name or service not known", "correct the host", False),
        ("connection timeout expired", "nothing answers there as PostgreSQL does", False),
        (
            f'connection failed: {AT}FATAL:  database "memd" does not exist{SEVERAL}connection failed: {AT}Connection '
            "refused",
            "make it",
            False,  # the other one may have it
        ),
    ],
)
def test_what_cannot_pass_by_itself_is_told_from_what_may(words: str, remedy: str, is_lasting: bool) -> None:
    told, found = remedy_of(psycopg.OperationalError(words))
    assert remedy in told and found is is_lasting


@contextmanager
def greeting(words: bytes) -> Iterator[int]:
    """A port where something greets everybody, as a mail server does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                client.sendall(words)
                client.recv(1)
                client.close()

        thread = threading.Thread(target=greet)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_port_of_something_else_is_told() -> None:
    with (
        greeting(b"220 mail\r\n") as port,
        pytest.raises(StoreError, match=r"something else listens there: correct the port in store\.url"),
    ):
        Database(f"postgresql://memd@127.0.0.1:{port}/memd").connect()


def test_a_user_who_may_make_no_tables_is_told_so(postgres: PostgresServer) -> None:
    url = postgres.database("narrow")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE narrow LOGIN")
        connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    database = Database(url.replace("memd@", "narrow@"))
    with pytest.raises(StoreError, match=r"permission denied.*grant this user CREATE"):
        database.connect()
    assert not database.is_away


def test_a_daemon_whose_database_is_not_there_does_not_start(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, postgres: PostgresServer, s3: S3Server, tmp_path: Path
) -> None:
    daemon = make_daemon(upstream.url, {"store": {"url": postgres.url("nowhere"), **s3.told()}})
    done = daemon.run("serve", "--config", str(daemon.config), "--data-dir", str(tmp_path / "cache"), "--port", "0")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert 'database "nowhere" does not exist' in line and "make it (CREATE DATABASE), or correct its name" in line


def test_a_database_that_may_come_is_said_to_be_away_once(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, s3: S3Server
) -> None:
    with reserved_port() as port:
        store = {"url": f"postgresql://memd@127.0.0.1:{port}/memd", "lease_seconds": 1, **s3.told()}
        daemon = make_daemon(upstream.url, {"store": store}).start()
        told = ask(f"{daemon.own_url}/memd/health").json
        assert told["memory"] == "degraded" and "start the server, or correct host and port" in told["trouble"]

        def renewals() -> float:
            return float(ask(f"{daemon.own_url}/memd/stats").json["cluster"]["renewed_seconds"])

        wait_until(lambda: renewals() > 1.0, lambda: repr(daemon))  # several were tried
        said = daemon.log.read_text()
        assert "NOT REACHABLE yet: requests go on without memory" in said
        assert said.count("Connection refused") == 1, said
