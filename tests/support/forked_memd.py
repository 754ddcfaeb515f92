"""memd in a process of its own that is forked from one which has imported all of memd before, and loaded its model.

Rule: from `main()` on it is what `python -m memd` is: its own arguments, environment, folder, open files and end. Left
out are the interpreter's start, the imports and the reading of the bundled model and the tokenizer's ranks: nearly all
of the processor time of a short command or of a daemon's start (0.04 s of 1 s are left), and the tests start a
thousand; a few, as one of test_serve.py, start in the usual way. What changes the interpreter or the C library (their
variables, limits) does not reach a fork: such a process is started in the usual way. For a library that is preloaded
there is a first process of its own.

Run as a script it is that first process. It ends when its socket closes, so with the tests, however they end.
"""

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import plain_environment  # noqa: F401  # before `_imported_in` below
from loaded_once import load_once
from without_rests import go_on_at_once, sync_again

import memd.embedding  # this package and memd itself set variables of libraries when they are imported

WHERE = ("-m", "memd")
"""What stands between the interpreter and the arguments of a command line that can be forked."""
FAULTS = "FAULT_"
"""Begins the variables of `tests/faults/inject.c`; with them `LD_PRELOAD` has the library made of it."""
FIRST = "TESTS_FIRST"
"""Variable with Python that a forked process runs before `main()`."""
_REQUEST_BYTES_MAX = 1 << 20
_PID_BYTES = 4


class Forked:
    """A process that was forked; what `subprocess.Popen` has for one that was not, as far as it is needed."""

    def __init__(self, pid: int, told: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = told

    def poll(self) -> int | None:
        """The exit code, negative for the number of a signal; None as long as it runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it was just waited for, and its end is told in a moment
                os.kill(self.pid, number)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            self.returncode = int(os.read(self._told, 16))
            os.close(self._told)
        return self.returncode


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether an environment is the one in which memd was imported: a library may have read a variable then."""
    return _as_imported(environment) == _imported_in


def start(command: Sequence[str], environment: Mapping[str, str], output: int, errors: int) -> Forked:
    """Fork `python -m memd ...`, its outputs into the files that have these descriptors; its input is empty."""
    sys.audit("memd.fork", list(command))
    assert tuple(command[1:3]) == WHERE, command
    request = json.dumps({"arguments": command[3:], "environment": dict(environment), "folder": str(Path.cwd())})
    told, tells = os.pipe()
    with open(os.devnull) as nothing:  # noqa: PTH123  # only its descriptor is wanted
        forker = _forker(environment["LD_PRELOAD"] if "FAULT_FOLDER" in environment else "")
        socket.send_fds(forker, [request.encode()], [nothing.fileno(), output, errors, tells])
    os.close(tells)
    number = os.read(told, _PID_BYTES)
    assert len(number) == _PID_BYTES, "the process that forks has ended; what it said is above"
    return Forked(int.from_bytes(number), told)


def run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` does that catches the outputs."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        code = start(command, environment, output.fileno(), errors.fileno()).wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(list(command), code, output.read(), errors.read())


def _as_imported(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a fork is told."""
    told = ("PYTEST_", "MEMD_", FIRST, FAULTS, *(["LD_PRELOAD"] if "FAULT_FOLDER" in environment else []))
    asked = "_proxy"  # of a proxy a library asks when it connects
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(told) and not name.lower().endswith(asked)
    }


_imported_in = _as_imported(os.environ)
_forkers: dict[str, socket.socket] = {}
"""By what is preloaded: the connection to the process that forks, once there is one."""


def _forker(preload: str) -> socket.socket:
    if preload not in _forkers:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command, environment = [sys.executable, __file__, str(its.fileno())], _imported_in
        if preload:
            environment = environment | {"LD_PRELOAD": preload}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], env=environment)
        its.close()
        _forkers[preload] = ours
        atexit.register(_end, ours, process)
    return _forkers[preload]


def _end(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    process.wait()


def _fork_as_asked(asked: socket.socket) -> None:
    """Fork for each request, say the number of the new process and, when it has ended, its exit code.

    Returns in the new processes only.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end what they started
    running: dict[int, tuple[int, int]] = {}  # by its descriptor: the number of a process, and where its end is told
    while True:
        ready, _, _ = select.select([asked.fileno(), *running], [], [])
        for ended in set(running).intersection(ready):
            pid, tells = running.pop(ended)
            _, status = os.waitpid(pid, 0)
            os.write(tells, b"%d" % os.waitstatus_to_exitcode(status))
            _close(ended, tells)
        if asked.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(asked, _REQUEST_BYTES_MAX, 4)
            if not request:
                os._exit(0)
            *files, tells = descriptors
            pid = os.fork()
            if pid == 0:
                asked.close()
                _close(tells, *(one for ended, (_, told) in running.items() for one in (ended, told)))
                _become(json.loads(request), files)
                return
            os.write(tells, pid.to_bytes(_PID_BYTES))
            running[os.pidfd_open(pid)] = pid, tells
            _close(*files)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _become(request: dict[str, object], files: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, descriptor in enumerate(files):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    environment, arguments = request["environment"], request["arguments"]
    assert isinstance(environment, dict) and isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    if "FAULT_FOLDER" in os.environ:
        sync_again()
        ctypes.CDLL(None).begin_faults()  # which reads the variables
    os.chdir(str(request["folder"]))
    sys.argv[1:] = arguments
    exec(os.environ.pop(FIRST, ""), {})


def _end_at_once(code: int) -> NoReturn:
    """End as the interpreter does, but for its objects: to take them apart one by one would copy the memory of all."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _load() -> None:
    from memd.assets import ranks_bytes
    from memd.conversation import tokens
    from memd.embedding.loading import load_embedder
    from memd.messages import Speech
    from memd.proxy.reading import SideRequests
    from memd.settings.loading import programs_of
    from memd.settings.model import EmbeddingSettings, IngestSettings

    tokens.cl100k_base(ranks_bytes())
    load_embedder(EmbeddingSettings())
    programs = programs_of(IngestSettings())
    SideRequests(programs)  # its patterns and those of speech are half of a start; `re` keeps them
    Speech(programs.strip, programs.message, programs.reply, programs.result)


def _import_all() -> None:
    root = Path(memd.__path__[0])
    for path in sorted(root.rglob("*.py")):  # a folder is a package without an `__init__.py`, which pkgutil passes over
        if path.name not in ("__init__.py", "__main__.py"):
            import_module(".".join(("memd", *path.relative_to(root).with_suffix("").parts)))


if __name__ == "__main__":
    load_once()
    go_on_at_once()
    _import_all()
    _load()  # last, for `re` keeps the patterns that were compiled last
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all objects
    _fork_as_asked(socket.socket(fileno=int(sys.argv[1])))
    from memd.cli.main import main

    code = 1
    try:
        main(prog_name="memd")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
    _end_at_once(code)
