"""Between memd and its database: a relay on a socket, which can be slow, frozen, cut, shut, or lose answers.

Rule: whoever uses a relay cannot tell it from the server behind it, until something is done to it. Where an answer is
lost, what was asked has arrived, and the connection ends.
"""

import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Relay:
    """Passes bytes between a Unix socket in a folder of its own and another."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = Path(tempfile.mkdtemp(prefix="memd-relay-"))
        self.delay_seconds = 0.0
        """Before each piece of what is asked is passed on."""
        self.has_lost_all = threading.Event()
        """As many answers as it was told to lose are lost."""
        self.counts: dict[bytes, int] = {}
        """How often some bytes were asked for: those that a test has put here, with 0."""
        self.has_passed_last = threading.Event()
        """What it was told to pass on before it froze has been."""
        self._marker, self._times = b"", 0
        self._last = b""
        self._flows = threading.Event()
        self._listener: socket.socket | None = None
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.open()

    @property
    def _path(self) -> str:
        return str(self.folder / self.target.name)

    def open(self) -> None:
        """Pass everything on, as at the beginning."""
        self.delay_seconds = 0.0
        self._flows.set()
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self._path)
            self._listener.listen()
            self._start(self._accept, self._listener)

    def lose_answer_to(self, marker: bytes, *, times: int = 1) -> None:
        """Of the next requests that have these bytes in them."""
        self._marker, self._times = marker, times
        self.has_lost_all.clear()

    def freeze(self) -> None:
        """Pass nothing on, in no connection, as a network that drops all packets does."""
        self._flows.clear()

    def freeze_after(self, marker: bytes) -> None:
        """Pass on the next request that has these bytes in it, and then nothing more."""
        self._last, self.has_passed_last = marker, threading.Event()

    def cut(self) -> None:
        """End all connections; new ones are served."""
        for one in list(self._ends):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def shut(self) -> None:
        """End all connections and refuse new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(self._path)  # so that it is seen that there is no listener any more
            Path(self._path).unlink()
        self.cut()

    def close(self) -> None:
        self.shut()
        self._flows.set()
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self.folder)

    def _start(self, work: Callable[[socket.socket], None], end: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=[end]))
        self._threads[-1].start()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                client, _ = listener.accept()
                if self._listener is not listener:
                    client.close()
                    return
                self._start(self._pass_on, client)

    def _pass_on(self, client: socket.socket) -> None:
        is_losing = False
        with client, socket.socket(socket.AF_UNIX) as server, suppress(OSError):
            server.connect(str(self.target))
            self._ends |= {client, server}
            while True:
                one = select.select([client, server], [], [])[0][0]
                data = one.recv(1 << 16)
                if one is client:
                    self.counts |= {known: count + data.count(known) for known, count in self.counts.items()}
                self._flows.wait()
                if data and one is client and self.delay_seconds:
                    time.sleep(self.delay_seconds)
                if data and one is server and is_losing and not self._times:
                    self.has_lost_all.set()
                if not data or (one is server and is_losing):
                    break
                if one is client and self._times and self._marker in data:
                    self._times, is_losing = self._times - 1, True
                (server if one is client else client).sendall(data)
                if one is client and self._last and self._last in data:
                    self._last = b""
                    self.freeze()
                    self.has_passed_last.set()
        self._ends -= {client, server}
