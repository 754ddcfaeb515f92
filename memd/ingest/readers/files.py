"""Reads files into sections: the interface of this folder, and the child process that reads them.

Rule: a file is refused for its kind or size before any of it is read. Long Markdown and files that are not text are
read in a child process. Whatever a file contains, the answer comes within the time limit. If the process hangs, grows
too large or dies, the file is refused with the reason, and the next file gets a new process. It writes no file and
opens no connection; output of libraries is discarded.

The process is `python -m memd.ingest.readers.files`. Its argument is the descriptor of a multiprocessing `Connection`,
on which a `ReadRequest` and a `ReadAnswer` in MessagePack alternate.

Linux limits the child's address space. macOS has `RLIMIT_AS` but does not enforce it: there the resident size is
checked every quarter of a second, and can exceed the limit for that long.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from memd.errors import BadDocument
from memd.ingest.readers.text import (
    OF_TEXT,
    FileFormat,
    GivenSection,
    format_of,
    other_kind,
    sections_of,
    suffix_of,
    with_text,
)
from memd.wording import counted, pip_install

MARKDOWN_HERE_BYTES_MAX = 32_000
"""Longer Markdown is read in the process, because some takes quadratic time (forty seconds for 200 KB of quotes)."""
READ_SECONDS_MAX = 120
"""Limit for one file: the largest readable one takes half of it on a slow machine."""
LOOK_SECONDS = 0.25
MEMORY_BYTES_MAX = 768 << 20
"""Limit of address space if the system enforces it (Linux), else of resident size (macOS, checked by the parent)."""
KEPT_BYTES_MAX = 110 << 20
"""A process that has been larger than this is replaced after the file, because it would not shrink."""
TEXT_BYTES_MAX = 15_000_000
"""Limit of a file's text in UTF-8, with the headings above each section: some 5,000 pages."""
SIZE = Path("/proc/self/statm")
NEEDS_MEMORY = f"reading it needs more than {MEMORY_BYTES_MAX >> 20} MB of memory"
NOTHING_READ = "nothing in it is text that memd reads (pictures, menus, controls and what scripts show are none)"
ANSWER_BYTES_MAX = 4 * TEXT_BYTES_MAX
"""With many short sections the frame is longer than the text."""
KNOWN_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""Environment of the child, without keys and tokens: a malicious file might take it over."""


class ReadRequest(msgspec.Struct, frozen=True):
    """A file to read."""

    path: bytes
    reader: str
    name: str
    """The file's name; its path may have another one."""
    seconds_max: int


class ReadAnswer(msgspec.Struct, frozen=True):
    """The sections of a file, or the reason why there are none."""

    sections: tuple[GivenSection, ...] = ()
    reason: str = ""
    is_last: bool = False
    """True if the process ends after this answer."""


class FileReader:
    """Reads files; starts the process for the first that needs it. Use it in one thread at a time, and close it."""

    def __init__(self, seconds_max: int = READ_SECONDS_MAX, *, watches_size: bool = sys.platform != "linux") -> None:
        self._seconds_max = seconds_max
        self._watches_size = watches_size
        self._process: tuple[subprocess.Popen[bytes], Connection] | None = None

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; it is started again if needed."""
        started, self._process = self._process, None
        if started is not None:
            process, child = started
            process.kill()
            process.wait()
            child.close()

    @property
    def pids(self) -> list[int]:
        """Id of the process, if it runs."""
        return [] if self._process is None else [self._process[0].pid]

    def sections(self, path: Path, name: str = "") -> tuple[GivenSection, ...]:
        """Return the sections of a file, in order; none if it has no text. `name`: the file's name, if the path has
        another. Raises BadDocument: it is refused, with the reason; OSError: it cannot be opened."""
        name, size = name or path.name, path.stat().st_size
        way = checked(name, size)
        if not _is_apart(way, size):
            return sections_of(name, path.read_bytes())
        answer = self._answer(ReadRequest(os.fsencode(path.absolute()), way.reader, name, self._seconds_max))
        if answer.reason:
            raise BadDocument(answer.reason)
        return answer.sections

    def sections_of(self, name: str, content: bytes) -> tuple[GivenSection, ...]:
        """Return the sections of a file in memory; see `sections`."""
        if not _is_apart(format_of(name), len(content)):
            return sections_of(name, content)
        with tempfile.NamedTemporaryFile(prefix="memd-", suffix=suffix_of(name)) as file:
            file.write(content)
            file.flush()
            return self.sections(Path(file.name))

    def _answer(self, request: ReadRequest) -> ReadAnswer:
        """Have the process read a file. Raises BadDocument: it took too long or too much memory, or ended the
        process."""
        process, child = self._started()
        deadline, is_whole = time.monotonic() + self._seconds_max, False
        killing = threading.Timer(self._seconds_max, process.kill)
        killing.start()
        try:
            child.send_bytes(msgspec.msgpack.encode(request))
            while self._watches_size and not child.poll(LOOK_SECONDS):
                command = ["ps", "-o", "rss=", "-p", str(process.pid)]
                kilobytes = subprocess.run(command, capture_output=True, check=False).stdout.strip()
                if kilobytes.isdigit() and int(kilobytes) * 1024 > MEMORY_BYTES_MAX:
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
                # -P: import no module from the current folder, whose files may be the documents.
                command = [sys.executable, "-P", "-m", "memd.ingest.readers.files", str(childs.fileno())]
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
    """Return the format of a file of this name and size. Raises BadDocument: it is refused, with the reason."""
    way = format_of(name)
    if way.instead:
        raise BadDocument(f"files of this kind cannot be read: {way.instead}")
    if size > way.bytes_max:
        too_large = f"it has {size:,} bytes, and a file of this kind may have {way.bytes_max:,}"
        raise BadDocument(other_kind(name) or too_large)
    if size == 0 and way.is_apart:
        raise BadDocument("it is empty")
    if way.needs and importlib.util.find_spec(way.needs) is None:
        raise BadDocument(f"reading it needs more libraries: {pip_install('memd-proxy[documents]')}")
    return way


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Return the reason why a process ended."""
    code = process.wait()
    if code >= 0:
        return (
            f"the program that read it ended (exit code {code}): {sys.executable} -m memd.ingest.readers.files says why"
        )
    if -code == signal.SIGXCPU:
        return "reading it took too much processor time"
    name = signal.Signals(-code).name
    return f"the program that read it was ended ({name}), or needed more than {MEMORY_BYTES_MAX >> 20} MB of memory"


# The process, its counterpart


def main() -> None:
    """Answer requests until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and closes the connection
    parent = Connection(int(sys.argv[1]) if sys.argv[1:] else 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if "--limited" in sys.argv:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    with suppress(EOFError):
        while True:
            request = msgspec.msgpack.decode(parent.recv_bytes(), type=ReadRequest)
            # The system ends the process after this time on one file, even if the parent is gone.
            used = resource.getrusage(resource.RUSAGE_SELF)
            soft = int(used.ru_utime + used.ru_stime) + request.seconds_max + 1
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
            answer = _answered(request)
            parent.send_bytes(msgspec.msgpack.encode(answer))
            if answer.is_last:
                break


def _answered(request: ReadRequest) -> ReadAnswer:
    try:
        answer = ReadAnswer(_sections(request))
    except BadDocument as error:
        answer = ReadAnswer(reason=str(error))
    except MemoryError:
        answer = ReadAnswer(reason=NEEDS_MEMORY, is_last=True)
    except OSError as error:
        answer = ReadAnswer(reason=f"it cannot be read ({error.strerror or error})")
    except RecursionError:
        answer = ReadAnswer(reason="it cannot be read: what is in it is nested too deeply")
    except Exception as error:  # any error of a library with a broken file
        answer = ReadAnswer(reason=f"it cannot be read ({type(error).__name__}: {str(error)[:200]})")
    return msgspec.structs.replace(answer, is_last=True) if _resident_bytes() > KEPT_BYTES_MAX else answer


def _resident_bytes() -> int:
    """Return the size of the process. On Linux `ru_maxrss` starts with the size of the forking parent, so is no use."""
    if SIZE.exists():
        return int(SIZE.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _sections(request: ReadRequest) -> tuple[GivenSection, ...]:
    path = Path(os.fsdecode(request.path))
    sections: Iterable[GivenSection]
    if request.reader in OF_TEXT:
        sections = sections_of(request.name, path.read_bytes())
    else:
        sections = getattr(importlib.import_module("memd.ingest.readers.formats"), request.reader)(path)
    found: list[GivenSection] = []
    size = 0
    for section in with_text(sections):
        whole = _encodable(section)
        size += sum(len(one.encode()) for one in (*whole.heading, whole.text))
        if size > TEXT_BYTES_MAX:
            raise BadDocument(f"it has more than {TEXT_BYTES_MAX:,} bytes of text: add it in parts")
        found.append(whole)
    return tuple(found)


def _encodable(section: GivenSection) -> GivenSection:
    """Return the section without lone surrogates, which libraries may return."""

    def plain(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    sheet = section.sheet and plain(section.sheet)
    heading = tuple(map(plain, section.heading))
    return msgspec.structs.replace(section, heading=heading, text=plain(section.text), sheet=sheet)


if __name__ == "__main__":
    main()
