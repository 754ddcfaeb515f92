"""Reads one file after the other into sections: the face of this folder.

Rule: a file is refused for its kind or size before any of it is read. Long Markdown and what is no text is read in a
process of its own (child.py); whatever is in a file, the answer comes within its seconds. A process that hangs, grows
too large or dies is replaced at the next file, and the file is refused with the reason.

Linux limits the child's address space. macOS has `RLIMIT_AS` but does not keep it: there the resident size is looked at
every quarter of a second, and what is allocated faster than that can exceed the limit for that long.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.child import (
    MEMORY_BYTES_MAX,
    NEEDS_MEMORY,
    TEXT_BYTES_MAX,
    ReadAnswer,
    ReadRequest,
)
from memd.ingest.readers.text import FileFormat, format_of, sections_of, suffix_of
from memd.wording import counted, pip_install

MARKDOWN_HERE_BYTES_MAX = 32_000
"""Longer Markdown is read in the process: there is some that takes time by the square of its length (200 KB of quotes
forty seconds)."""
READ_SECONDS_MAX = 120
"""For one file: the largest that may be read takes half of that, on a slow machine."""
LOOK_SECONDS = 0.25
ANSWER_BYTES_MAX = 4 * TEXT_BYTES_MAX
"""Of many short sections the frame is longer than the text."""
KNOWN_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""A child that could be taken over is told no key and no token."""


class FileReader:
    """Reads files; starts the process at the first that needs it. Use it in one thread at a time, and close it."""

    def __init__(self, seconds_max: int = READ_SECONDS_MAX, *, watches_size: bool = sys.platform != "linux") -> None:
        self._seconds_max = seconds_max
        self._watches_size = watches_size
        self._process: tuple[subprocess.Popen[bytes], Connection] | None = None

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; it is started again when it is needed."""
        started, self._process = self._process, None
        if started is not None:
            process, child = started
            process.kill()
            process.wait()
            child.close()

    @property
    def pids(self) -> list[int]:
        """The process, while there is one."""
        return [] if self._process is None else [self._process[0].pid]

    def sections(self, path: Path, name: str = "") -> tuple[GivenSection, ...]:
        """Return the sections of a file, in order; none if it says nothing.

        `name`: the file's, if a link to it has another one.

        Raises:
            BadDocument: with the reason why it is not read.
            OSError: it cannot be opened.
        """
        name, size = name or path.name, path.stat().st_size
        way = checked(name, size)
        if not _is_apart(way, size):
            return sections_of(name, path.read_bytes())
        answer = self._answer(ReadRequest(os.fsencode(path.absolute()), way.reader, name, self._seconds_max))
        if answer.reason:
            raise BadDocument(answer.reason)
        return answer.sections

    def sections_of(self, name: str, content: bytes) -> tuple[GivenSection, ...]:
        """Return the sections of a file of this name that is in memory; see `sections`."""
        if not _is_apart(format_of(name), len(content)):
            return sections_of(name, content)
        with tempfile.NamedTemporaryFile(prefix="memd-", suffix=suffix_of(name)) as file:
            file.write(content)
            file.flush()
            return self.sections(Path(file.name))

    def _answer(self, request: ReadRequest) -> ReadAnswer:
        """Have the process read a file.

        Raises:
            BadDocument: it took too long or too much memory, or ended the process.
        """
        process, child = self._started()
        deadline, is_whole = time.monotonic() + self._seconds_max, False
        killing = threading.Timer(self._seconds_max, process.kill)
        killing.start()
        try:
            child.send_bytes(msgspec.msgpack.encode(request))
            while self._watches_size and not child.poll(LOOK_SECONDS):
                if _resident_bytes(process.pid) > MEMORY_BYTES_MAX:
                    raise BadDocument(NEEDS_MEMORY)
            answer = msgspec.msgpack.decode(child.recv_bytes(ANSWER_BYTES_MAX), type=ReadAnswer)
            is_whole = not answer.is_last
        except (EOFError, OSError):
            if time.monotonic() > deadline:
                raise BadDocument(f"reading it took more than {counted(self._seconds_max, 'second')}") from None
            raise BadDocument(_end_of(process)) from None
        finally:
            killing.cancel()
            if not is_whole:
                self.close()
        return answer

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._process is None:
            own, childs = multiprocessing.Pipe()
            with childs:
                # -P: no module is taken from the folder in which memd was started, whose files are what is read.
                command = [sys.executable, "-P", "-m", "memd.ingest.readers.child", str(childs.fileno())]
                process = subprocess.Popen(
                    command if self._watches_size else [*command, "--limited"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[childs.fileno()],
                    env={name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ},
                )
            self._process = process, own
        return self._process


def _is_apart(way: FileFormat, size: int) -> bool:
    return way.is_apart or (way.reader == "markdown" and size > MARKDOWN_HERE_BYTES_MAX)


def checked(name: str, size: int) -> FileFormat:
    """Return how a file of this name and this many bytes is read.

    Raises:
        BadDocument: with the reason why it is not.
    """
    way = format_of(name)
    if way.instead:
        raise BadDocument(f"files of this kind cannot be read: {way.instead}")
    if size > way.bytes_max:
        raise BadDocument(f"it has {size:,} bytes, and a file of this kind may have {way.bytes_max:,}")
    if size == 0 and way.is_apart:
        raise BadDocument("it is empty")
    if way.needs and importlib.util.find_spec(way.needs) is None:
        raise BadDocument(f"reading it needs more libraries: {pip_install('memd-proxy[documents]')}")
    return way


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
