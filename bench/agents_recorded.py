"""Recorded traffic of real agents, played through a daemon in front of a server that refuses what llama.cpp refuses.

Backs these claims: no request of a real agent is refused, and every prompt is valid; what was said is stored once; what
a later chat asks for is in its prompt; the model reads at most 1.2 times what it would with an unlimited window.

A recording is a file of JSON lines: `{"def": name, "v": value}` names a value that later lines have as
`{"$ref": name}`; the others are requests in their order, `{"phase", "path", "body", "reply", "stream"}`. The daemon is
restarted before the phase `newchat`. A token is four characters. What a prompt makes the model read is what lies behind
the longest beginning that it shares with one of the last prompts, as llama.cpp's slots do it; with `--llama` the real
one is offered each prompt, too, and its `timings.prompt_n` counts.

    python bench/agents_recorded.py FOLDER [--expected FILE] [--only pi] [--llama] [--json FILE]

`--expected`: `{"facts": [texts that the last phases ask for], "aside": [texts that no user said]}`. Exit code 1 if
something is not as promised.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import re
import sys
import tempfile
import time
import urllib.parse
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]  # the daemon's process and the model servers are shared with the tests

from agents_replay import stored  # noqa: E402  # needs the path above
from daemon_process import DaemonProcess  # noqa: E402
from llama_server import running_llama  # noqa: E402
from recording_upstream import Request, Response, recording_upstream  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from tiny_model import write_scripted_model  # noqa: E402

Json = dict[str, Any]

WINDOWS = {"pi": 8_192, "aider": 8_192, "codex": 16_384, "opencode": 16_384, "claude": 40_000}
"""Windows in which these agents fail directly."""
READ_MAX = 1.2
"""The most that the model reads, of what it would with an unlimited window."""
SETTLED_SECONDS, RESTING_SECONDS = 5.0, 0.1
"""A daemon that takes so little of the processor in so long has stored what was said. To ask it all the while, as
`export` does, took 25 ms a step of what is measured."""
SLOTS = 2
"""Prompts that the server keeps: an agent's own, and that of a side request."""
CHARACTERS_PER_TOKEN, PART_TOKENS = 4, 4
_COUNT = re.compile(rb'"(prompt_tokens|input_tokens)": \d+')


class Recorded(NamedTuple):
    """One request of a recording."""

    phase: str
    path: str
    body: Json
    reply: bytes
    is_stream: bool


class Offered(NamedTuple):
    """A prompt that the model server was offered."""

    number: int
    body: Json
    tokens: int
    is_refused: bool


@dataclass
class Outcome:
    """What came of a recording."""

    agent: str
    window: int
    requests: int
    failed: int
    """Requests that their agent got an error for."""
    refused: int
    """Prompts beyond the window, which the agent may not have noticed."""
    invalid: list[str]
    read: float
    """Of what an unlimited window reads, by prefixes."""
    read_by_llama: float | None
    first_byte_ms: list[float]
    """That memd adds to each request."""
    processor_ms: float
    """A request, storing included, the daemon's start not."""
    facts: dict[str, str]
    """By phase: facts in the prompt, of those asked for."""
    unstored: list[str]
    twice: float
    """The share of what is stored that was not said so often."""
    aside: list[str]
    seconds: float
    complaints: list[str] = field(default_factory=list)


class Judged(NamedTuple):
    """A column of the table."""

    title: str
    shown: Callable[[Outcome], str]
    is_good: Callable[[Outcome], bool] = lambda _: True


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else 0.0


COLUMNS = (
    Judged("window", lambda one: f"{one.window:,}"),
    Judged("requests", lambda one: str(one.requests)),
    Judged("failed", lambda one: str(one.failed), lambda one: not one.failed),
    Judged("refused", lambda one: str(one.refused), lambda one: not one.refused),
    Judged("invalid", lambda one: str(len(one.invalid)), lambda one: not one.invalid),
    Judged("read ÷ unlimited", lambda one: f"{one.read:.2f}", lambda one: one.read <= READ_MAX),
    Judged(
        "by llama.cpp",
        lambda one: "-" if one.read_by_llama is None else f"{one.read_by_llama:.2f}",
        lambda one: one.read_by_llama is None or one.read_by_llama <= READ_MAX,
    ),
    Judged(
        "first byte p50 / p95 ms",
        lambda one: f"{_quantile(one.first_byte_ms, 0.5):.1f} / {_quantile(one.first_byte_ms, 0.95):.1f}",
    ),
    Judged("processor ms", lambda one: f"{one.processor_ms:.0f}"),
    Judged("facts, same chat", lambda one: one.facts.get("recall", "-"), lambda one: _is_all(one, "recall")),
    Judged("facts, new chat", lambda one: one.facts.get("newchat", "-"), lambda one: _is_all(one, "newchat")),
    Judged("facts not stored", lambda one: str(len(one.unstored)), lambda one: not one.unstored),
    Judged("twice %", lambda one: f"{100 * one.twice:.2f}", lambda one: not one.twice),
    Judged("aside", lambda one: str(len(one.aside)), lambda one: not one.aside),
)


def _is_all(one: Outcome, phase: str) -> bool:
    found, _, asked = one.facts.get(phase, "0/0").partition("/")
    return found == asked


# -- recordings -----------------------------------------------------------------------------------------------------


def load_recording(path: Path) -> list[Recorded]:
    """The requests of a recording."""
    named: dict[str, Any] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(one) for one in value]
        if isinstance(value, dict):
            return named[value["$ref"]] if set(value) == {"$ref"} else {key: whole(one) for key, one in value.items()}
        return value

    requests = []
    with path.open() as lines:
        for line in map(json.loads, lines):
            if "def" in line:
                named[line["def"]] = line["v"]
            else:
                body = whole(line["body"])
                requests.append(Recorded(line["phase"], line["path"], body, line["reply"].encode(), line["stream"]))
    return requests


class Part(NamedTuple):
    """A message of a prompt, or its tools."""

    role: str
    text: str
    calls: tuple[str, ...] = ()
    """Ids."""
    answers: tuple[str, ...] = ()
    """Ids of the calls whose results it has."""


def parts_of(body: Json) -> list[Part]:
    """A prompt's parts in the order in which a template writes them, whatever the API."""
    parts = [Part("tools", json.dumps(body["tools"]))] if body.get("tools") else []
    standing = body.get("system") or body.get("instructions")
    if standing:
        parts.append(Part("system", _text(standing)))
    listed: Any = body.get("messages", body.get("input"))
    items = [{"role": "user", "content": listed}] if isinstance(listed, str) else listed
    return [*parts, *(_message(one) if one.get("type", "message") == "message" else _item(one) for one in items)]


def _message(message: Json) -> Part:
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    used = [one for one in blocks if one.get("type") == "tool_use"]
    answered = [one["tool_use_id"] for one in blocks if one.get("type") == "tool_result"]
    called = message.get("tool_calls") or []
    said = [
        _text(content),
        *(json.dumps(one["input"]) for one in used),
        *(json.dumps(one["function"]) for one in called),
    ]
    answered += [message["tool_call_id"]] if message.get("role") == "tool" else []
    return Part(message["role"], "\n".join(said), tuple(one["id"] for one in (*used, *called)), tuple(answered))


def _item(item: Json) -> Part:
    """An item of the responses API that is no message."""
    kind = item["type"]
    if kind.endswith("_call_output"):
        return Part("tool", _text(item.get("output")), (), (item["call_id"],))
    if kind.endswith("_call"):
        return Part("assistant", str(item.get("arguments") or item.get("input") or ""), (item["call_id"],))
    return Part("reasoning", _text(item.get("summary")))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(map(_text, content))
    if isinstance(content, dict):
        return content.get("text") or _text(content.get("output") or content.get("content"))
    return content or ""


def text_of(body: Json) -> str:
    """All that the model reads."""
    return "".join(f"<|im_start|>{part.role}\n{part.text}<|im_end|>\n" for part in parts_of(body))


def tokens_of(body: Json) -> int:
    """The tokens of a prompt."""
    return sum(PART_TOKENS + len(part.text) // CHARACTERS_PER_TOKEN for part in parts_of(body))


def problems(body: Json) -> list[str]:
    """Results without their calls, and calls without their results."""
    found, waiting = [], list[str]()
    is_open = False  # the calls of one answer may be several items
    for part in parts_of(body):
        if part.role in ("tools", "system", "developer", "reasoning"):
            continue
        found += [f"a result without its call: {one}" for one in part.answers if one not in waiting]
        waiting = [one for one in waiting if one not in part.answers]
        if waiting and not part.answers and not (is_open and part.calls):
            found.append(f"a call without its result: {waiting[0]}")
            waiting = []
        waiting += part.calls
        is_open = bool(part.calls)
    return found + [f"a call without its result: {one}" for one in waiting]


# -- reading --------------------------------------------------------------------------------------------------------


def read_by_prefix(prompts: Sequence[str]) -> float:
    """The tokens that a model server with `SLOTS` slots reads of these prompts one after the other."""
    slots: list[str] = []
    read = 0.0
    for prompt in prompts:
        shared = [_shared(prompt, one) for one in slots]
        best = max(range(len(slots)), key=shared.__getitem__, default=None)
        read += (len(prompt) - (0 if best is None else shared[best])) / CHARACTERS_PER_TOKEN
        # A slot is taken by a prompt that shares a tenth of it, as with llama.cpp; else the one used least recently is.
        if best is not None and shared[best] * 10 >= len(prompt):
            slots.pop(best)
        elif len(slots) == SLOTS:
            slots.pop(0)
        slots.append(prompt)
    return read


def _shared(one: str, other: str) -> int:
    """The length of the longest beginning that both have."""
    same, differs = 0, min(len(one), len(other)) + 1
    while same + 1 < differs:
        middle = (same + differs) // 2
        same, differs = (middle, differs) if one[same:middle] == other[same:middle] else (same, middle)
    return same


FIRST_BYTE_TOKEN = 3
"""Of the tiny model's vocabulary: 256 tokens from there on."""


def tokenized(prompt: str) -> list[int]:
    """A prompt in the tiny model's tokens, one for every four characters.

    By itself it would read each byte as a token, and a prompt of 120,000 of them takes it minutes.
    """
    pieces = (prompt[at : at + CHARACTERS_PER_TOKEN] for at in range(0, len(prompt), CHARACTERS_PER_TOKEN))
    return [FIRST_BYTE_TOKEN + zlib.crc32(piece.encode(errors="surrogatepass")) % 256 for piece in pieces]


def read_by_llama(prompts: Sequence[str], folder: Path) -> int:
    """The same as the real llama.cpp says, by its `timings.prompt_n`."""
    model, tokens = folder / "tiny.gguf", list(map(tokenized, prompts))
    context = SLOTS * (max(map(len, tokens)) + 64)
    write_scripted_model(model, marker="[none]", reply=("No",), reply_seen=("Yes",), trained_context=context)
    read = 0
    with running_llama(model, context=context, parallel=SLOTS, log=folder / "llama.log") as url:
        for prompt in tokens:
            asked = {"prompt": prompt, "n_predict": 1, "cache_prompt": True}
            connection = http.client.HTTPConnection(urllib.parse.urlparse(url).netloc, timeout=3600)
            connection.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
            read += json.loads(connection.getresponse().read())["timings"]["prompt_n"]
            connection.close()
    return read


# -- playing --------------------------------------------------------------------------------------------------------


class Player:
    """The model server that answers as it did when the requests were recorded, and who sends them again."""

    def __init__(self, requests: Sequence[Recorded], window: int) -> None:
        self.requests, self.window = requests, window
        self.offered: list[Offered] = []
        self.statuses: list[int] = []
        self.first_byte_ms: list[float] = []
        self._at = 0
        self._own_seconds = 0.0

    def answer(self, request: Request) -> Response:
        """The `answer` of a `RecordingUpstream`."""
        started = time.perf_counter()
        try:
            return self._answered(request)
        finally:
            self._own_seconds += time.perf_counter() - started

    def send(self, base_url: str, number: int) -> None:
        """Send one request, and read its answer."""
        one = self.requests[number]
        self._at, self._own_seconds = number, 0.0
        address = urllib.parse.urlparse(base_url)
        body = json.dumps(one.body)
        connection = http.client.HTTPConnection(address.netloc, timeout=120)
        connection.connect()
        started = time.perf_counter()
        connection.request("POST", one.path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read(1)
        self.first_byte_ms.append((time.perf_counter() - started - self._own_seconds) * 1000)
        answer.read()
        self.statuses.append(answer.status)
        connection.close()

    def _answered(self, request: Request) -> Response:
        path = request.target.partition("?")[0]
        if path == "/props":
            return _json({"default_generation_settings": {"n_ctx": self.window}, "total_slots": SLOTS})
        if path.endswith("/models"):
            return _json({"object": "list", "data": [{"id": "local", "object": "model"}]})
        if request.method != "POST" or not path.endswith(
            ("/chat/completions", "/responses", "/messages", "/input_tokens", "/count_tokens")
        ):
            return _json({"error": {"code": 404, "message": "File Not Found"}}, 404)
        body = json.loads(request.body)
        tokens = tokens_of(body)
        if path.endswith(("/input_tokens", "/count_tokens")):
            return _json({"input_tokens": tokens})
        self.offered.append(Offered(self._at, body, tokens, tokens >= self.window))
        if tokens >= self.window:
            said = f"request ({tokens} tokens) exceeds the available context size ({self.window} tokens)"
            error = {"code": 400, "message": said, "type": "exceed_context_size_error"}
            return _json({"error": {**error, "n_prompt_tokens": tokens, "n_ctx": self.window}}, 400)
        recorded = self.requests[self._at]
        reply = _COUNT.sub(lambda found: b'"%b": %d' % (found[1], tokens), recorded.reply)
        kind = "text/event-stream" if recorded.is_stream else "application/json"
        return Response((reply,), headers=(("Content-Type", kind),))


def play(path: Path, window: int, expected: Json, *, with_llama: bool) -> Outcome:
    """Play a recording and judge it."""
    requests = load_recording(path)
    player = Player(requests, window)
    started = time.monotonic()
    with _daemon(player) as daemon:
        spent = -processor_seconds(daemon)
        for number, one in enumerate(requests):
            if number and one.phase != requests[number - 1].phase:
                settled(daemon)
                if one.phase == "newchat":
                    spent += processor_seconds(daemon)
                    daemon.restart()
                    spent -= processor_seconds(daemon)
            player.send(daemon.base_url, number)
        settled(daemon)
        spent += processor_seconds(daemon)
        chunks = {one["uuid"]: one for one in daemon.export() if one["content"]}
    logged = [str(one["content"]) for one in chunks.values()]
    taken = [one for one in player.offered if not one.is_refused]
    directly, through = [text_of(one.body) for one in requests], [text_of(one.body) for one in taken]
    by_llama = None
    if with_llama:
        with tempfile.TemporaryDirectory(prefix="memd-recorded-") as name:
            by_llama = read_by_llama(through, Path(name)) / read_by_llama(directly, Path(name))
    return Outcome(
        agent=path.stem,
        window=window,
        requests=len(requests),
        failed=sum(status != 200 for status in player.statuses),
        refused=sum(one.is_refused for one in player.offered),
        invalid=[bad for one in player.offered for bad in problems(one.body)],
        read=read_by_prefix(through) / read_by_prefix(directly),
        read_by_llama=by_llama,
        first_byte_ms=player.first_byte_ms,
        processor_ms=1000 * spent / len(requests),
        facts={phase: _found(requests, taken, phase, expected["facts"]) for phase in ("recall", "newchat")},
        unstored=[fact for fact in expected["facts"] if not any(fact in text for text in logged)],
        twice=_twice(requests, logged),
        aside=[text for text in expected["aside"] if any(text in one for one in logged)],
        seconds=time.monotonic() - started,
    )


@contextmanager
def _daemon(player: Player) -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="memd-recorded-") as folder, recording_upstream() as upstream:
        upstream.answer, upstream.answers_all = player.answer, True
        daemon = DaemonProcess(Path(folder), upstream.url, {"log": {"level": "warning"}})
        try:
            yield daemon.start()
        finally:
            daemon.discard()


def settled(daemon: DaemonProcess) -> None:
    """Wait until all that was said is stored, however busy the machine is."""
    spent = -math.inf
    while (now := processor_seconds(daemon)) - spent > RESTING_SECONDS:
        spent = now
        time.sleep(SETTLED_SECONDS)
    daemon.export()


def processor_seconds(daemon: DaemonProcess) -> float:
    """The processor time that a daemon has taken since it started."""
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _found(requests: Sequence[Recorded], taken: Sequence[Offered], phase: str, facts: Sequence[str]) -> str:
    """Facts in the prompt of the phase's first own request (a side request has no tools), of all."""
    prompts = [one for one in taken if requests[one.number].phase == phase]
    own = [one for one in prompts if one.body.get("tools")] or prompts[-1:]
    text = text_of(own[0].body) if own else ""
    return f"{sum(fact in text for fact in facts)}/{len(facts)}"


def _twice(requests: Sequence[Recorded], logged: Sequence[str]) -> float:
    """The share of what is stored that is stored more often than it was said."""
    said = Counter[str]()
    for one in requests:
        said |= Counter(part.text for part in parts_of(one.body))  # as often as it stands in one history
    return stored(logged, [*said.elements(), *(one.reply.decode() for one in requests)], [])[1]


def _json(value: object, status: int = 200) -> Response:
    return Response((json.dumps(value).encode(),), status)


def report(console: Console, outcomes: Sequence[Outcome]) -> int:
    """The table; how many figures are not as promised."""
    table = Table(title="recorded agents through memd, strict model server")
    table.add_column("agent")
    for column in COLUMNS:
        table.add_column(column.title, justify="right")
    bad = 0
    for one in outcomes:
        good = [column.is_good(one) for column in COLUMNS]
        shown = [column.shown(one) for column in COLUMNS]
        table.add_row(
            one.agent, *(text if fine else f"[red]{text} ✗[/]" for text, fine in zip(shown, good, strict=True))
        )
        bad += good.count(False)
    console.print(table)
    for one in outcomes:
        for line in (*one.invalid[:3], *one.unstored, *one.aside):
            console.print(f"{one.agent}: {line}", markup=False, highlight=False)
    return bad


def played(folder: Path, expected: Json, only: Sequence[str], *, with_llama: bool) -> Iterator[Outcome]:
    """Each recording of the folder, or only some."""
    for path in sorted(folder.glob("*.jsonl")):
        if not only or path.stem in only:
            yield play(path, WINDOWS.get(path.stem, 16_384), expected, with_llama=with_llama)


def main() -> None:
    """Play, judge, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--expected", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--llama", action="store_true", help="have the real llama.cpp count what it reads, too")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    expected = {"facts": [], "aside": [], **(json.loads(asked.expected.read_text()) if asked.expected else {})}
    outcomes = []
    for one in played(asked.folder, expected, asked.only, with_llama=asked.llama):
        print(f"{one.agent}: {one.seconds:.0f} s", file=sys.stderr, flush=True)
        outcomes.append(one)
    console = Console(width=200)
    bad = report(console, outcomes)
    if asked.json is not None:
        asked.json.write_text(json.dumps([vars(one) for one in outcomes], indent=1))
    console.print(f"{bad} figures are not as promised" if bad else "everything is as promised")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
