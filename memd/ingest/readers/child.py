"""The process that reads files: `python -m memd.ingest.readers.child`, started by files.py, whose counterpart it is.

A `Connection` of multiprocessing, whose descriptor is its argument, has a `ReadRequest` and a `ReadAnswer` in
MessagePack, one after the other.

Rule: it writes no file and opens no connection. Whatever a library prints goes nowhere.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from memd.documents import GivenSection
from memd.errors import BadDocument
from memd.ingest.readers.text import sections_of

MEMORY_BYTES_MAX = 768 << 20
"""Of address space where the system limits it (Linux), else of what is resident (macOS, watched by the parent)."""
KEPT_BYTES_MAX = 110 << 20
"""A process that has been larger than this is replaced after the file: it would not become smaller."""
TEXT_BYTES_MAX = 15_000_000
"""Of the text of a file in UTF-8, with the headings above each section: some 5,000 pages."""
SIZE = Path("/proc/self/statm")
NEEDS_MEMORY = f"reading it needs more than {MEMORY_BYTES_MAX >> 20} MB of memory"


class ReadRequest(msgspec.Struct, frozen=True):
    """One file to read."""

    path: bytes
    reader: str
    """See `FileFormat.reader`."""
    name: str
    """The file's; that at the path may be another one."""
    seconds_max: int


class ReadAnswer(msgspec.Struct, frozen=True):
    """The sections of a file, or the reason why there are none."""

    sections: tuple[GivenSection, ...] = ()
    reason: str = ""
    is_last: bool = False
    """The process ends after it."""


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then closes the connection
    parent = Connection(int(sys.argv[1]) if sys.argv[1:] else 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if "--limited" in sys.argv:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    with suppress(EOFError):
        while True:
            request = msgspec.msgpack.decode(parent.recv_bytes(), type=ReadRequest)
            _limit_processor_time(request.seconds_max)
            answer = _answered(request)
            parent.send_bytes(msgspec.msgpack.encode(answer))
            if answer.is_last:
                break


def _limit_processor_time(seconds: int) -> None:
    """End the process if it works on one file for longer, though nobody is left who would."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


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
    except Exception as error:  # whatever a library makes of a broken file
        answer = ReadAnswer(reason=f"it cannot be read ({type(error).__name__}: {str(error)[:200]})")
    return msgspec.structs.replace(answer, is_last=True) if _resident_bytes() > KEPT_BYTES_MAX else answer


def _resident_bytes() -> int:
    """The size of the process. `ru_maxrss` begins on Linux with that of the parent, which forked it."""
    if SIZE.exists():
        return int(SIZE.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _sections(request: ReadRequest) -> tuple[GivenSection, ...]:
    path = Path(os.fsdecode(request.path))
    sections: Iterable[GivenSection]
    module, _, function = request.reader.partition(".")
    if not function:
        sections = sections_of(request.name, path.read_bytes())
    else:
        sections = getattr(importlib.import_module(f"memd.ingest.readers.{module}"), function)(path)
    found: list[GivenSection] = []
    size = 0
    for section in sections:
        if not section.text.strip():
            continue
        whole = _encodable(section)
        size += sum(len(one.encode()) for one in (*whole.heading, whole.text))
        if size > TEXT_BYTES_MAX:
            raise BadDocument(f"it has more than {TEXT_BYTES_MAX:,} bytes of text: add it in parts")
        found.append(whole)
    return tuple(found)


def _encodable(section: GivenSection) -> GivenSection:
    """The section without lone surrogates, which libraries let through."""

    def plain(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    sheet = section.sheet and plain(section.sheet)
    heading = tuple(map(plain, section.heading))
    return msgspec.structs.replace(section, heading=heading, text=plain(section.text), sheet=sheet)


if __name__ == "__main__":
    main()
