"""The parent's side of the process that reads files; see child.py.

Rule: whatever is in a file, `ask` answers within its seconds. A process that hangs, grows too large or dies is replaced
at the next file, and the file is refused with the reason.

Linux limits the child's address space. macOS has `RLIMIT_AS` but does not keep it: there the resident size is looked at
every quarter of a second, and what is allocated faster than that can exceed the limit for that long.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import msgspec

from memd.errors import BadDocument
from memd.ingest.readers.child import (
    LENGTH_BYTES,
    MEMORY_BYTES_MAX,
    NEEDS_MEMORY,
    TEXT_BYTES_MAX,
    ReadAnswer,
    ReadRequest,
    framed,
)
from memd.wording import counted

LOOK_MILLISECONDS = 250
PIECE_BYTES = 1 << 20
ANSWER_BYTES_MAX = 4 * TEXT_BYTES_MAX
"""Of many short sections the frame is longer than the text."""
KNOWN_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""A child that could be taken over is told no key and no token."""


class ReadingProcess:
    """Starts the process at the first file. Use it in one thread at a time, and close it."""

    def __init__(self, *, watches_size: bool = sys.platform != "linux") -> None:
        self._watches_size = watches_size
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: ReadRequest) -> ReadAnswer:
        """Have a file read.

        Raises:
            BadDocument: it took too long or too much memory, or ended the process.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        is_whole = False
        try:
            process.stdin.write(framed(request))
            process.stdin.flush()
            received = self._received(process, time.monotonic() + request.seconds_max, request.seconds_max)
            answer = msgspec.msgpack.decode(received, type=ReadAnswer)
            is_whole = not answer.is_last
        except BrokenPipeError:
            raise BadDocument(_end_of(process)) from None
        finally:
            if not is_whole:
                self.close()
        return answer

    @property
    def pids(self) -> list[int]:
        """The process, while there is one."""
        return [] if self._process is None else [self._process.pid]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes the pipes and waits
                pass

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # -P: no module is taken from the folder in which memd was started, whose files are what is read.
            command = [sys.executable, "-P", "-m", "memd.ingest.readers.child"]
            self._process = subprocess.Popen(
                command if self._watches_size else [*command, "--limited"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ},
            )
        return self._process

    def _received(self, process: subprocess.Popen[bytes], deadline: float, seconds: int) -> bytes:
        """One message, without its length."""
        assert process.stdout is not None
        received = bytearray()
        waiting = select.poll()  # not select(): a daemon with many connections has descriptors above 1,024
        waiting.register(process.stdout, select.POLLIN)
        while len(received) < LENGTH_BYTES + _length(received):
            if time.monotonic() > deadline:
                raise BadDocument(f"reading it took more than {counted(seconds, 'second')}")
            if waiting.poll(LOOK_MILLISECONDS):
                piece = os.read(process.stdout.fileno(), PIECE_BYTES)
                if not piece or _length(received) > ANSWER_BYTES_MAX:
                    raise BadDocument(_end_of(process))
                received += piece
            elif self._watches_size and _resident_bytes(process.pid) > MEMORY_BYTES_MAX:
                raise BadDocument(NEEDS_MEMORY)
        return bytes(received[LENGTH_BYTES:])


def _length(received: bytearray) -> int:
    return int.from_bytes(received[:LENGTH_BYTES], "big") if len(received) >= LENGTH_BYTES else 0


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """The reason for which a process is no more."""
    code = process.wait()
    if code >= 0:
        return (
            f"the program that read it ended (exit code {code}): {sys.executable} -m memd.ingest.readers.child says why"
        )
    if -code == signal.SIGXCPU:
        return "reading it took too much processor time"
    name = signal.Signals(-code).name
    return f"the program that read it was ended ({name}), or needed more than {MEMORY_BYTES_MAX >> 20} MB of memory"


def _resident_bytes(pid: int) -> int:
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False).stdout
    return int(shown) * 1024 if shown.strip().isdigit() else 0
