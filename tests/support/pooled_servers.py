"""Several model servers behind one daemon, real ones too, and a client whose conversations tell who answered them.

Rule: a server's address stays its own while it is away, so that a daemon finds it again.
"""

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from daemon_process import Answer, DaemonProcess, ask
from llama_server import Llama, replaceable_llama
from recording_upstream import RecordingUpstream
from reserved_port import reserved_port

CONTEXT = 32_768
SLOTS = 4
LONG = "Let us talk about the harbour, its cranes and its ferries, and about what the tide does to them. "


class Server:
    """A real llama.cpp at an address that stays its own while it is away."""

    def __init__(self, model: Path, port: int, log: Path) -> None:
        self._model, self._port, self._log = model, port, log
        self._running = ExitStack()
        self.url = f"http://127.0.0.1:{port}"
        self.llama: Llama | None = None

    def start(self, *, context: int = CONTEXT) -> None:
        """Start it and wait until it has its model."""
        started: AbstractContextManager[Llama] = replaceable_llama(
            self._model, context=context, log=self._log, parallel=SLOTS, port=self._port
        )
        self.llama = self._running.enter_context(started)

    def send_signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        assert self.llama is not None
        self.llama.send_signal(number)

    def kill(self) -> None:
        """`kill -9`."""
        self.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """End it, if it runs."""
        self._running.close()


def pooled(make: Callable[..., DaemonProcess], *servers: Server | RecordingUpstream, **settings: Any) -> DaemonProcess:
    """A daemon in front of these."""
    upstream = {"urls": [server.url for server in servers]}
    return make(None, {"upstream": upstream, "log": {"level": "debug"}, **settings}).start()


def figures(daemon: DaemonProcess, name: str) -> dict[str, float]:
    """A metric of each server."""
    text = ask(f"{daemon.own_url}/memd/metrics").body.decode()
    return {
        url: float(number) for url, number in re.findall(rf'^{name}{{server="([^"]+)"}} (\S+)$', text, re.MULTILINE)
    }


class Talk:
    """A client's conversation, and the servers that answered it."""

    def __init__(self, daemon: DaemonProcess, opening: str, headers: Mapping[str, str] | None = None) -> None:
        self._daemon = daemon
        self._opening = opening
        self._headers = headers
        self.messages: list[dict[str, str]] = []
        self.homes: list[str] = []
        self.cached: list[int] = []

    def turn(self) -> Answer:
        """Say something and take the reply."""
        said = f"{self._opening} {LONG}" if not self.messages else f"And then, at turn {len(self.messages)}? {LONG}"
        self.messages.append({"role": "user", "content": said})
        before = figures(self._daemon, "memd_upstream_requests_total")
        answer = self._daemon.chat(self.messages, headers=self._headers)
        after = figures(self._daemon, "memd_upstream_requests_total")
        self.messages.append({"role": "assistant", "content": answer.reply})
        self.homes += [url for url in after if after[url] > before[url]]
        usage = answer.json.get("usage", {})
        self.cached.append(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
        return answer


def is_up(daemon: DaemonProcess, url: str) -> bool:
    """Whether requests go to a server."""
    told = ask(f"{daemon.own_url}/memd/health").json["upstreams"]
    return any(one["url"] == url and one["reachable"] and not one["reason"] for one in told)


@contextmanager
def two_servers(model: Path, folder: Path) -> Iterator[tuple[Server, Server]]:
    """Two real servers that run."""
    with ExitStack() as stack:
        one, other = (made(stack, model, folder / f"{name}.log") for name in ("one", "other"))
        one.start()
        other.start()
        yield one, other


def made(stack: ExitStack, model: Path, log: Path) -> Server:
    """A server that is not started yet; `stack` ends it."""
    server = Server(model, stack.enter_context(reserved_port()), log)
    stack.callback(server.end)
    return server
