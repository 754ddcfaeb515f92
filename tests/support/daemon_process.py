"""`memd serve` as a process of its own, as a user runs it: started, watched, ended, killed, started again.

Rule: nothing here waits for a length of time; it waits for something to be so, with a bound that only a failure
reaches. What the daemon said is in `log` and is shown when something does not come to pass.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import select
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

import forked_memd
import msgspec
import yaml

from memd.store.disk import LocalDisk
from memd.store.tools.export import export, shown_text

READY_SECONDS_MAX = 120.0
END_SECONDS_MAX = 60.0
ANSWER_SECONDS_MAX = 120.0
POLL_SECONDS, REST_SECONDS_MAX = 0.02, 0.5
STORED_POLL_SECONDS = 0.05
STORE_AFTER_SECONDS = 0.1
"""Unless a test says else: a second, as users have it, would be most of the time of the tests that wait for it."""
STORED_SECONDS_MAX = 20.0
"""For a reader of the log: an answer that was regenerated is never stored."""
RECALL_MILLISECONDS_MAX = 60_000  # on a busy machine too a recall is waited for, unless a test is about that

KEPT = ("MEMD_CONSTANTS",)
"""Constants of users that the processes of tests take from their settings; see plain_environment."""
LISTENING = re.compile(  # llama.cpp has a line that is like the first
    r"""^(?:memd .*listening on |\{.*"event":"listening",.*"url":")(https?://[^\s"]+)""", re.MULTILINE
)
OWN = re.compile(r"""(?:look into memory at +|"own_url":")(https?://[^\s"/]+)""")


class Answer(NamedTuple):
    """An HTTP answer, whatever its status."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        """The body as a JSON value."""
        return json.loads(self.body)

    @property
    def reply(self) -> str:
        """The assistant's text of a chat completion."""
        assert self.status == 200, f"{self.status}: {self.body[:2000]!r}"
        text = self.json["choices"][0]["message"]["content"]
        assert isinstance(text, str)
        return text


Headers = Mapping[str, str]


def ask(
    url: str,
    body: object = None,
    *,
    method: str | None = None,
    headers: Headers | None = None,
    seconds: float = ANSWER_SECONDS_MAX,
) -> Answer:
    """One HTTP request with the standard library's client, which knows nothing of memd.

    Args:
        url: The full address.
        body: Bytes are sent as they are, None sends none, anything else is sent as JSON.
        method: GET without a body and POST with one, unless given.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, sent, method=method)
    try:
        context = ssl._create_unverified_context() if url.startswith("https:") else None  # on this machine
        with urllib.request.urlopen(request, timeout=seconds, context=context) as answer:
            return Answer(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, error.read())


def wait_until(holds: Callable[[], bool], what: Callable[[], str], seconds: float = READY_SECONDS_MAX) -> None:
    """Return as soon as `holds()`; fail with `what()` if that takes longer than `seconds`."""
    deadline = (asked := time.monotonic()) + seconds
    while not holds():
        assert time.monotonic() < deadline, what()
        _rest_after(asked)
        asked = time.monotonic()


def _rest_after(asked: float) -> None:
    """Wait until it is time to ask again: what takes long to ask is asked less often, or it takes the core that the
    daemon needs to get there."""
    select.select([], [], [], min(max(POLL_SECONDS, 3 * (time.monotonic() - asked)), REST_SECONDS_MAX))


class DaemonProcess:
    """One data directory and the `memd serve` processes that work on it, one after the other."""

    forks = False
    """Whether processes are forked from one that has imported memd; `forked_memd` says what that leaves out."""

    def __init__(self, folder: Path, upstream: str | None, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.data_dir = folder / "memory"
        self.config = folder / "config.yaml"
        self.configure(settings or {})
        self.log = folder / "daemon.log"
        self.log.touch()
        self.upstream = upstream
        self.base_url = ""
        self.descriptors_max: int | None = None
        """The hard limit of descriptors of the processes that are started from now on; None: that of this process."""
        self.own_url = ""
        """Where memd's own routes are."""
        self.environment: dict[str, str] = {}
        """Further variables for the processes that are started from now on."""
        self.first = ""
        """Python that the processes run before memd."""
        self.topic_id: str | None = None
        """The one topic that `in_topic` shows; None: all."""
        self._process: subprocess.Popen[bytes] | forked_memd.Forked | None = None

    def __repr__(self) -> str:
        return f"memd at {self.base_url or 'no address yet'}, it said:\n{self.log.read_text(errors='replace')[-6000:]}"

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Write its settings, for the processes that are started from now on."""
        retrieval = {"timeout_ms": RECALL_MILLISECONDS_MAX, **settings.get("retrieval", {})}
        buffer = {"store_after_seconds": STORE_AFTER_SECONDS, **settings.get("buffer", {})}
        self.config.write_text(yaml.safe_dump({**settings, "retrieval": retrieval, "buffer": buffer}))

    @property
    def pid(self) -> int:
        """The running process."""
        assert self._process is not None, "not started"
        return self._process.pid

    def command(self, *flags: str) -> list[str]:
        """What `start` runs."""
        upstream = [] if self.upstream is None else ["--upstream", self.upstream]
        where = ["--config", str(self.config), "--data-dir", str(self.data_dir), "--port", "0"]
        limited = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(self.descriptors_max)]
        serve = [*_memd(self.first if not self.forks else ""), "serve", *where, *upstream, *flags]
        return serve if self.descriptors_max is None else [*limited, *serve]

    def start(self, *flags: str) -> DaemonProcess:
        """Start the daemon and wait until `/memd/health` says that it is ready."""
        assert self._process is None, "already started"
        said_before = self.log.stat().st_size
        with self.log.open("ab") as log:
            command, environment = self.command(*flags), clean_environment() | self.environment
            if self.forks and self.descriptors_max is None and forked_memd.can_fork(environment):
                told = environment | {forked_memd.FIRST: self.first}
                self._process = forked_memd.start(command, told, log.fileno(), log.fileno())
            else:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
        wait_until(lambda: self._found_address(said_before), lambda: f"the daemon did not start: {self!r}")
        ready = (200, 401)  # the latter where it wants a token
        wait_until(lambda: ask(f"{self.own_url}/memd/health").status in ready, lambda: f"not ready: {self!r}")
        return self

    def _found_address(self, said_before: int) -> bool:
        assert self._process is not None
        said = self.log.read_bytes()[said_before:].decode(errors="replace")
        found = LISTENING.search(said)
        if found is None:
            assert self._process.poll() is None, f"the daemon ended with {self._process.returncode}: {self!r}"
            return False
        own = OWN.search(said, found.start())
        if own is None:
            return False
        self.base_url, self.own_url = found[1], own[1]
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal and do not wait."""
        assert self._process is not None, "not started"
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once the process has ended by itself or by a signal that was sent."""
        assert self._process is not None, "not started"
        try:
            code = self._process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon did not end: {self!r}") from None
        self._process = None
        return code

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """`kill -9`."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def restart(self) -> DaemonProcess:
        """End cleanly and start again on the same directory."""
        assert self.terminate() == 0, repr(self)
        return self.start()

    @property
    def has_ended(self) -> bool:
        """Whether the process that was started has ended by itself."""
        return self._process is None or self._process.poll() is not None

    def discard(self) -> None:
        """End it if it still runs, however."""
        if self._process is not None:
            self.kill()

    # -- what tests ask of it ------------------------------------------------------------------------------------

    def in_topic(self, topic_id: str) -> DaemonProcess:
        """This running daemon for a test that shares it: requests go to that topic, and no entry of another is seen."""
        shown = copy.copy(self)
        shown.topic_id, shown.base_url = topic_id, f"{self.base_url}/t/{topic_id}"
        return shown

    def chat(self, messages: Sequence[Mapping[str, Any]], headers: Headers | None = None, **more: Any) -> Answer:
        """A chat completion, not streaming; `more` are further members of the body."""
        body = {"model": "tiny", "messages": list(messages), **more}
        return ask(f"{self.base_url}/v1/chat/completions", body, headers=headers)

    def stream(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> Stream:
        """A streamed chat completion, open: iterate over it, or leave it."""
        body = json.dumps({"model": "tiny", "messages": list(messages), "stream": True, **more}).encode()
        request = urllib.request.Request(
            f"{self.base_url}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        return Stream(urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another memd command on the same data directory, beside the daemon or without it."""
        return run_memd(*arguments, "--data-dir", self.data_dir)

    def export(self, *, settled: bool = True) -> list[dict[str, Any]]:
        """All entries of the log, as `memd export` writes them; read in this process, because tests wait by it.

        Finished turns are stored a moment after their reply; that is waited for, unless a log in motion is wanted
        (`settled=False`).
        """
        deadline = time.monotonic() + STORED_SECONDS_MAX
        while settled and self._is_storing() and time.monotonic() < deadline:
            select.select([], [], [], STORED_POLL_SECONDS)
        entries = export(self.data_dir, LocalDisk(), topic_id=None, live_only=False, is_wanted=self._shows)
        return [json.loads(msgspec.json.encode(entry)) for entry in entries]

    def _is_storing(self) -> bool:
        """Whether a running daemon, which can be asked, has a finished turn that is not in the log yet."""
        if self._process is None or self._process.poll() is not None:
            return False
        topics = ask(f"{self.own_url}/memd/topics")
        known = topics.json["topics"] if topics.status == 200 else []
        shown = [one["topic_id"] for one in known if one["is_open"] and self._shows(one["topic_id"])]
        return any(self._has_unstored(topic_id) for topic_id in shown)

    def _shows(self, topic_id: str) -> bool:
        return self.topic_id in (None, topic_id)

    def _has_unstored(self, topic_id: str) -> bool:
        told = ask(f"{self.own_url}/memd/buffer?topic={topic_id}")
        talks = told.json["conversations"] if told.status == 200 else []
        ends = [talk["latest"][-1] for talk in talks if talk["latest"]]
        return any(end["role"] == "assistant" and end["text"] and not end["stored"] for end in ends)

    def said(self) -> list[str]:
        """The text of every entry of the log, each message opened by its role."""
        return [shown_text(line) for line in self.export()]

    def tell(self, *facts: str, topic: str = "default") -> None:
        """Say each of these in a chat of its own; return when they are in the log."""
        for fact in facts:
            self.chat([user(fact)], memory_in={"topic_id": topic})
        self.wait_stored(*facts)

    def receipt(self, turn_id: str | None) -> Any:
        """The receipt of a turn, once it is written: a moment after the answer."""
        url = f"{self.own_url}/memd/turns/{turn_id}"
        wait_until(lambda: ask(url).status == 200, lambda: f"no receipt: {self!r}")
        return ask(url).json

    def wait_stored(self, *texts: str) -> None:
        """Return when all of these texts are in the log."""
        wait_until(
            lambda: all(any(text in one for one in self.said()) for text in texts), lambda: f"stored: {self.said()}"
        )


class Stream:
    """A server-sent event stream that is being read."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self.headers: Message = response.headers
        self.lines: list[bytes] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The JSON chunks, without the closing `[DONE]`."""
        for line in self._response:
            self.lines.append(line)
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    @property
    def ended_properly(self) -> bool:
        """Whether `[DONE]` has come."""
        return b"data: [DONE]\n" in self.lines


def run_memd(*arguments: str | Path, first: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """A memd command. `first`: Python that its process runs before; `more`: variables."""
    environment = clean_environment() | more
    if DaemonProcess.forks and forked_memd.can_fork(environment):
        return forked_memd.run([*_memd(), *map(str, arguments)], environment | {forked_memd.FIRST: first})
    command = [*_memd(first), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _memd(first: str = "") -> list[str]:
    how = ("-c", f"{first}\nfrom memd.cli.main import main\nmain()") if first else forked_memd.WHERE
    return [sys.executable, *how]


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had at once since `clear_refs`, or since its start."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])


def wait_until_stalled(sent: Callable[[], int]) -> None:
    """Return when nothing more has been taken for a second."""
    seen: list[int] = []

    def is_stalled() -> bool:
        seen.append(sent())
        return len(seen) > 50 and seen[-1] == seen[-50]

    wait_until(is_stalled, lambda: f"{sent()} bytes were taken")


def text_of(chunks: Sequence[Mapping[str, Any]]) -> str:
    """The reply that a stream's chunks make up."""
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def user(text: str) -> dict[str, Any]:
    """A message of a user's."""
    return {"role": "user", "content": text}


def token_setting(name: str, secret: str, *rights: str, topics: Sequence[str] = ("*",)) -> dict[str, Any]:
    """An item of `auth.tokens`."""
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return {"name": name, "token_sha256": digest, "topics": list(topics), "rights": list(rights)}


def tool_call(tool: str, **arguments: Any) -> dict[str, Any]:
    """A call of one of memd's tools over MCP."""
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}


def clean_environment() -> dict[str, str]:
    """The environment without the settings of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MEMD_") or name in KEPT}
