"""Stands where llama.cpp's server tests expect `llama-server`: the real one behind a real `memd serve`.

Rule: whoever starts this program cannot tell it from llama-server. It takes the same options, listens on the port that
they name, ends with the server's exit code if that ends, and ends both on SIGTERM.

memd runs with its defaults on a data directory of its own, so memory is on.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence

READY_SECONDS_MAX = 60
END_SECONDS_MAX = 4  # the tests kill what has not ended after 5
POLL_SECONDS = 0.01
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def main(arguments: Sequence[str]) -> int:
    """`arguments`: the real server's program, then what it would be called with."""
    server, *options = arguments
    asked = _value(options, "--port")
    hidden = str(_free_port())
    environment = {**os.environ, "AIP_HTTP_PORT": hidden} if "AIP_HTTP_PORT" in os.environ else None
    options[options.index("--port") + 1] = hidden
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory() as data_dir:
        processes = [subprocess.Popen([server, *options], env=environment, preexec_fn=_die_with_parent)]
        try:
            if _answers(f"http://127.0.0.1:{hidden}/health", processes[0]):
                command = [sys.executable, "-m", "memd", "serve", "--data-dir", data_dir, "--port", asked]
                command += ["--host", _value(options, "--host").split(",")[0]]
                command += ["--upstream", f"http://127.0.0.1:{hidden}"]
                own = {name: value for name, value in os.environ.items() if not name.startswith("MEMD_")}
                processes.append(subprocess.Popen(command, env=own, preexec_fn=_die_with_parent))
            while all(process.poll() is None for process in processes):
                time.sleep(POLL_SECONDS * 5)
            return next(code for process in processes if (code := process.poll()) is not None)
        except _Ended:
            return 0
        finally:
            _end_all(processes)


class _Ended(Exception):
    """SIGTERM has come."""


def _end(*_: object) -> None:
    raise _Ended


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + END_SECONDS_MAX
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _die_with_parent() -> None:
    """In the new process: it ends with this one, even if that is killed. Only Linux has this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the server is ready; False if it ends or never is."""
    deadline = time.monotonic() + READY_SECONDS_MAX
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return True
        except OSError:
            time.sleep(POLL_SECONDS)
    return False


def _value(options: Sequence[str], name: str) -> str:
    return options[options.index(name) + 1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
