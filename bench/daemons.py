"""memd as a process before a model server that keeps the prompts: what the benches of quality ask, of any version.

Rule: only what clients use, HTTP and commands; so the same script asks two source trees, before a change and after it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).resolve().parent.parent
OWNER = "the-owner-of-the-bench"
CONSTANTS = "MEMD_CONSTANTS"
"""See memd/settings/loading.py."""
_PORTS = re.compile(r"http://127\.0\.0\.1:(\d+)")
WINDOW_TOKENS = 1_000_000
SECONDS_MAX = 1800.0
Message = dict[str, str]


class StandIn(ThreadingHTTPServer):
    """An upstream that says what it is told to say and keeps the last prompt."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = "Noted."
        self.last: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        told = {"default_generation_settings": {"n_ctx": WINDOW_TOKENS}, "model_alias": "stub"}
        self._answer(told if self.path == "/props" else None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.endswith("/chat/completions"):
            return self._answer(None)
        self.server.last = json.loads(body)["messages"]
        message = {"role": "assistant", "content": self.server.reply}
        return self._answer({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def _answer(self, told: dict[str, Any] | None) -> None:
        body = json.dumps(told or {}).encode()
        self.send_response(404 if told is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:  # it would print each request
        pass


class Shown(NamedTuple):
    """What one request brought up."""

    block: str
    ms: Mapping[str, float]
    """`Server-Timing`."""

    @property
    def asked_model(self) -> bool:
        """Whether the embedding model read the question."""
        return self.ms.get("embed", 0) > 0


class Daemon:
    """A client of one daemon, and of the stand-in behind it."""

    def __init__(self, port: int, admin_port: int, stand_in: StandIn) -> None:
        self._chats = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS_MAX)
        self._own = http.client.HTTPConnection("127.0.0.1", admin_port, timeout=SECONDS_MAX)
        self.stand_in = stand_in

    def chat(
        self, topic: str, messages: list[Message], mode: str = "readonly", token: str = OWNER, **members: Any
    ) -> Shown:
        """One chat request."""
        headers = {"Content-Type": "application/json", "X-Memory-Mode": mode, "X-Memory-Token": token}
        body = json.dumps({"model": "stub", "messages": messages, **members})
        self._chats.request("POST", f"/t/{topic}/v1/chat/completions", body, headers)
        answer = self._chats.getresponse()
        told = answer.read()
        assert answer.status == 200, told
        asked = next(one for one in reversed(self.stand_in.last) if one["role"] == "user")["content"]
        before, opening, after = asked.partition("[memory]")
        timings = (one.partition(";dur=") for one in (answer.getheader("Server-Timing") or "").split(", "))
        block = after.partition("[/memory]")[0] if opening and not before else ""
        return Shown(block, {name: float(ms) for name, _, ms in timings if ms})

    def ask(self, topic: str, question: str) -> Shown:
        """A question in a fresh chat that is not remembered."""
        return self.chat(topic, [{"role": "user", "content": question}])

    def own(self, path: str, body: Any = None, token: str = OWNER) -> Any:
        """One of memd's own routes; a POST if there is a body."""
        headers = {"Content-Type": "application/json", "X-Memory-Token": token}
        given = None if body is None else json.dumps(body)
        self._own.request("GET" if body is None else "POST", path, given, headers)
        answer = self._own.getresponse()
        told = answer.read()
        assert answer.status == 200, told
        return json.loads(told) if "json" in (answer.getheader("Content-Type") or "") else told.decode()

    def settled(self) -> None:
        """Wait until nothing that was stored waits for the embedding model."""
        until = time.monotonic() + SECONDS_MAX
        while time.monotonic() < until:
            lines = [
                line for line in self.own("/memd/metrics").splitlines() if line.startswith("memd_embedding_backlog")
            ]
            if not any(float(line.rsplit(" ", 1)[1]) for line in lines):
                return
            time.sleep(0.2)
        raise SystemExit("the embedding model did not catch up")


def settings_of(data_dir: Path, **changed: dict[str, Any]) -> dict[str, Any]:
    """The settings of a daemon over a data directory: the defaults, and sections of others."""
    base: dict[str, Any] = {"data_dir": str(data_dir), "log": {"level": "error"}, "listen": {"port": 0}}
    return base | {"admin": {"port": 0}, "auth": {"token": OWNER}} | changed


def command(tree: Path, data_dir: Path, *arguments: str) -> str:
    """The output of a command of memd in a source tree."""
    asked = [sys.executable, "-m", "memd", *arguments, "--data-dir", str(data_dir)]
    done = subprocess.run(asked, env=environment(tree), cwd=tree, text=True, capture_output=True, check=True)
    return done.stdout


def environment(tree: Path) -> dict[str, str]:
    """The variables of memd's processes of a source tree; what users find as constants, benches set where it can be."""
    is_known = CONSTANTS in (tree / "memd/settings/loading.py").read_text()
    return {**os.environ, "PYTHONPATH": str(tree), **({CONSTANTS: "1"} if is_known else {})}


@contextlib.contextmanager
def serving(tree: Path, settings: dict[str, Any]) -> Iterator[Daemon]:
    """The daemon of a source tree before a stand-in."""
    stand_in = StandIn()
    config = Path(settings["data_dir"]).parent / f"{os.getpid()}-{time.monotonic_ns()}.yaml"
    config.write_text(yaml.safe_dump(settings))
    asked = [sys.executable, "-m", "memd", "serve", "--config", str(config), "--upstream", stand_in.url]
    process = subprocess.Popen(asked, env=environment(tree), cwd=tree, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it was asked for"
        told = ""
        while not (ports := _PORTS.findall(told))[2:]:  # its own, the base URL's and the page's
            line = process.stdout.readline()
            assert line, "memd ended"
            told += line
        yield Daemon(int(ports[0]), int(ports[2]), stand_in)
    finally:
        process.terminate()
        process.wait()
        stand_in.shutdown()
        config.unlink()
