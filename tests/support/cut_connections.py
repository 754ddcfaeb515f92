"""Between memd and its database: a relay on a socket that loses answers.

Rule: what is asked arrives; the answer to the statement that is being waited for does not, and the connection ends. Or
nothing arrives any more, and nobody says so.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path


class LosingRelay:
    """Passes bytes between a Unix socket of its own and another, until it is told to lose an answer."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._target = str(target)
        self.folder = folder
        self._marker, self._times, self._freezes = b"", 0, False
        self.delay_seconds = 0.0
        """Before each piece of what is asked is passed on."""
        self.has_lost_all = threading.Event()
        """As many answers as it was told to lose are lost."""
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / target.name))
        self._listener.listen()
        self._ended, self._end = socket.socketpair()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def lose_answer_to(self, marker: bytes, *, times: int = 1, freezes: bool = False) -> None:
        """Of the next requests that have these bytes in them.

        Args:
            freezes: with the last of these answers all else freezes.
        """
        self._marker, self._times, self._freezes = marker, times, freezes
        self.has_lost_all.clear()

    def freeze(self) -> None:
        """Pass nothing on, in no connection, until `thaw`."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._end.send(b"end")
        self._flows.set()
        for thread in self._threads:
            thread.join()
        for one in (self._listener, self._ended, self._end):
            one.close()

    def _accept(self) -> None:
        while self._ended not in select.select([self._listener, self._ended], [], [])[0]:
            client, _ = self._listener.accept()
            self._threads.append(threading.Thread(target=self._pass_on, args=[client]))
            self._threads[-1].start()

    def _pass_on(self, client: socket.socket) -> None:
        is_losing = False
        with client, socket.socket(socket.AF_UNIX) as server, suppress(OSError):
            server.connect(self._target)
            while True:
                ready = select.select([client, server, self._ended], [], [])[0]
                one = ready[0]
                data = b"" if one is self._ended else one.recv(1 << 16)
                self._flows.wait()
                if data and one is client and self.delay_seconds:
                    time.sleep(self.delay_seconds)
                if data and one is server and is_losing and not self._times:
                    if self._freezes:
                        self.freeze()
                    self.has_lost_all.set()
                if not data or (one is server and is_losing):
                    return
                if one is client and self._times and self._marker in data:
                    self._times, is_losing = self._times - 1, True
                (server if one is client else client).sendall(data)
