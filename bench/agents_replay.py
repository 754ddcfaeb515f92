"""Plays a session of an agent through a daemon process in front of the strict model server, and judges what came of it.

Rule: the judge knows only what was said and what the model was shown. A fact is not lost if the log or the last prompt
has it. Tokens are the model server's. What a prompt makes the model read is what lies behind the longest beginning that
it shares with the prompt before and its answer, as llama.cpp's cache does it; *new* is the same of what the client
sent, as if there were no memd and an endless window.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents_runs import Event, Script
from agents_shapes import Shape
from daemon_process import Answer, DaemonProcess, ask
from recording_upstream import RecordingUpstream, recording_upstream
from strict_llama import REPLY_HEADER, Prompt, StrictLlama, chat_messages, problems, rendered, tokens_of

Json = dict[str, Any]

SETTLED_SECONDS_MAX = 300.0
UNCHANGED_SECONDS = 60.0
"""With nothing new in the log for so long, what is missing is lost."""
SHINGLE_WORDS = 12
KEPT_UNITS = 2
IDLE_SECONDS = 4
SETTINGS: dict[str, Json] = {"buffer": {"idle_seconds": IDLE_SECONDS}, "log": {"level": "warning"}}
BLOCK = re.compile(r"\[memory\] .*?\n\[/memory\]", re.DOTALL)
_LINE = re.compile(r"\[memd: [^\]\n]*\]")
_WORDS = re.compile(r"\w+")


class House:
    """A daemon and the model server behind it."""

    def __init__(self, upstream: RecordingUpstream, model: StrictLlama, daemon: DaemonProcess) -> None:
        self.upstream, self.model, self.daemon = upstream, model, daemon
        self._names = 0

    def send(
        self, body: Json, reply: Json | None = None, *, api: str = "/v1/chat/completions", **headers: str
    ) -> tuple[Answer, list[Prompt]]:
        """One request with its scripted answer; what came back, and the prompts that the model server was offered.

        Args:
            headers: further ones, with `_` for `-`.
        """
        self._names += 1
        name = f"r{self._names}"
        if reply is not None:
            self.model.replies[name] = reply
        self.model.allowed[name] = frozenset(problems(chat_messages(body)))
        sent = {REPLY_HEADER: name} | {key.replace("_", "-"): value for key, value in headers.items()}
        answer = ask(self.daemon.base_url + api, body, headers=sent)
        self.upstream.requests.clear()  # whole bodies: the model server has what counts
        return answer, [prompt for prompt in self.model.prompts[-8:] if prompt.name == name]

    def say(self, messages: Sequence[Json], reply: str = "Noted.", **more: Any) -> tuple[Answer, list[Prompt]]:
        """A chat request; `more`: further members of the body, or headers that begin with `X_` or `Authorization`."""
        headers = {key: more.pop(key) for key in list(more) if key.startswith(("X_", "Authorization"))}
        body = {"model": "recorded", "messages": list(messages), **more}
        return self.send(body, {"role": "assistant", "content": reply}, **headers)

    def logged(self, topic: str = "default") -> list[str]:
        """What is stored of what was said, each chunk once."""
        entries = self.daemon.export()
        chunks = {one["uuid"]: one for one in entries if one["topic_id"] == topic and one["content"]}
        return [str(one["content"]) for one in chunks.values()]

    def settled(self, wanted: Sequence[str], prompt: str = "") -> set[str]:
        """Wait until the log has every word that the prompt has not; the words that are in neither."""
        missing = {word for word in wanted if word not in prompt}
        started = changed = time.monotonic()
        before = -1
        while missing and time.monotonic() - started < SETTLED_SECONDS_MAX:
            text = "\n".join(self.logged())
            missing = {word for word in missing if word not in text}
            if len(text) != before:
                before, changed = len(text), time.monotonic()
            if time.monotonic() - changed > UNCHANGED_SECONDS:
                break
            time.sleep(0.3)
        return missing

    def turns(self) -> list[Json]:
        """The receipts of all turns, newest first."""
        found: list[Json] = []
        while True:
            before = f"&before={found[-1]['turn_id']}" if found else ""
            page = ask(f"{self.daemon.own_url}/memd/turns?limit=100{before}").json["turns"]
            found += page
            if len(page) < 100:
                return found

    @property
    def journal_bytes(self) -> int:
        """The size of the default topic's journal."""
        path = self.daemon.data_dir / "default" / "hot.log"
        return path.stat().st_size if path.exists() else 0


@contextmanager
def house(window: int, settings: Json | None = None, **model: Any) -> Iterator[House]:
    """A started daemon in front of a strict model server; `model`: as `StrictLlama`."""
    merged = {key: {**SETTINGS.get(key, {}), **(settings or {}).get(key, {})} for key in {*SETTINGS, *(settings or {})}}
    with tempfile.TemporaryDirectory(prefix="memd-agents-") as folder, recording_upstream() as upstream:
        strict = StrictLlama(window, **model)
        upstream.answer, upstream.answers_all = strict, True
        daemon = DaemonProcess(Path(folder), upstream.url, merged)
        try:
            yield House(upstream, strict, daemon.start())
        finally:
            daemon.discard()


@dataclass
class Played:
    """What came of a session."""

    shape: str
    window: int
    steps: int
    requests: int = 0
    refused: int = 0
    """Requests whose client got an error, of those that could fit."""
    too_long: int = 0
    """Requests that cannot fit: system prompt, tools, the turn's user message and its last two units."""
    beyond: int = 0
    invalid: int = 0
    facts: int = 0
    lost: int = 0
    needed: int = 0
    needed_shown: int = 0
    stored_words: int = 0
    stored_twice: float = 0.0
    """Share of what is stored."""
    boilerplate: float = 0.0
    """Share of what is stored that the client wrote around what was said."""
    room_ms: list[float] = field(default_factory=list)
    memory_ms: list[float] = field(default_factory=list)
    read: int = 0
    fair: int = 0
    """What is new, and the blocks and lines of memd."""
    journal_bytes: int = 0
    said_bytes: int = 0
    """Of every message but the system prompt, once, however often and in what place it was sent."""
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)

    def complain(self, request: int, what: str) -> None:
        """Note what was wrong with a request, the first few times."""
        if len(self.complaints) < 5:
            self.complaints.append(f"{self.shape}, {self.window:,}, request {request}: {what}")


def play(shape: Shape, script: Script, window: int, steps: int, house: House, pause: float) -> Played:
    """Replay a session and judge it; `pause`: seconds before each request, as the agent's tools take."""
    played = Played(shape.name, window, steps, facts=len(script.facts))
    sent: set[str] = set()
    started = time.monotonic()
    reader = _Reader(played)
    needed: str | None = None
    context: list[str] = []
    for at, event in enumerate(script.events):
        if event.kind not in ("act", "answer"):
            continue
        before = script.events[:at]
        body = shape.body(before, window)
        context = context or _context(body, before)
        sent.update(rendered(body)[1:], rendered({"messages": [shape.reply(event)]})[1:])
        reply = shape.reply(event)
        time.sleep(pause)
        answer, prompts = house.send(body, reply, api=shape.api)
        played.requests += 1
        _judge(played, answer, prompts, least_tokens(body) <= window)
        accepted = answer.status == 200 and bool(prompts)
        if accepted:
            reader.read(rendered(body), reply, prompts[-1])
        if needed is not None:
            played.needed += 1
            played.needed_shown += accepted and needed in prompts[-1].text
        needed = script.needs.get(at)
        played.journal_bytes = max(played.journal_bytes, house.journal_bytes)
        for aside in shape.asides(before):
            house.send({"model": "recorded", "messages": aside, "stream": True}, {"role": "assistant", "content": "x"})
    played.said_bytes = sum(len(text.encode()) for text in sent if not text.startswith("<|im_start|>system"))
    played.room_ms = [turn["timings_ms"]["room"] for turn in house.turns() if "room" in turn["timings_ms"]]
    played.memory_ms = [turn["timings_ms"]["memory"] for turn in house.turns()]
    last = reader.last.text if reader.last else ""
    lost = house.settled(script.facts, last + (script.events[-1].text))
    played.lost = len(lost)
    for word in sorted(lost)[:2]:
        played.complain(played.requests, f"lost {word}, said {_where(script, word)}")
    played.stored_words, played.stored_twice, played.boilerplate = stored(house.logged(), script.said, context)
    played.seconds = time.monotonic() - started
    return played


def least_tokens(body: Json) -> int:
    """The tokens of a request of which everything has left that may: what stays even where a turn is too long.

    Words behind a result, as Claude Code's reminders, open no turn.
    """
    tools, *parts = rendered(body)
    messages = chat_messages(body)
    roles = [one["role"] for one in messages]
    users = [at for at, role in enumerate(roles) if role == "user" and "tool" not in roles[max(0, at - 1) : at]]
    calls = [at for at, role in enumerate(roles) if at > users[-1] and role == "assistant"]
    last = range(calls[-KEPT_UNITS] if len(calls) >= KEPT_UNITS else users[-1] + 1, len(messages))
    leading = range(next((at for at, one in enumerate(messages) if one["role"] != "system"), 0))
    return tokens_of((tools, *(parts[at] for at in (*leading, users[-1], *last))))


def _judge(played: Played, answer: Answer, prompts: Sequence[Prompt], could_fit: bool) -> None:
    if not could_fit:
        played.too_long += 1
        return
    played.beyond += sum(prompt.is_beyond for prompt in prompts)
    played.invalid += sum(bool(prompt.problems) for prompt in prompts)
    for prompt in prompts:
        if prompt.problems or prompt.is_beyond:
            why = prompt.problems[0] if prompt.problems else f"{prompt.tokens:,} tokens"
            played.complain(played.requests, why)
    if answer.status != 200:
        played.refused += 1
        played.complain(played.requests, f"{answer.status} {answer.body[:160]!r}")


class _Reader:
    """Adds up what the model had to read."""

    def __init__(self, played: Played) -> None:
        self._played = played
        self.last: Prompt | None = None
        self._sent: tuple[str, ...] = ()
        self._cached: tuple[str, ...] = ()
        self._shown: set[str] = set()

    def read(self, sent: tuple[str, ...], reply: Json, prompt: Prompt) -> None:
        """A client's request, the answer to it, and the prompt made of it."""
        shown = {*BLOCK.findall(prompt.text), *_LINE.findall(prompt.text)}
        if self.last is not None:
            new = unshared(self._sent, sent)
            injected = tokens_of(tuple(shown - self._shown))
            self._played.read += unshared(self._cached, prompt.parts)
            self._played.fair += new + injected
        answered = rendered({"messages": [reply]})[1:]
        self.last, self._shown, self._sent = prompt, shown, (*sent, *answered)
        self._cached = (*prompt.parts, *(answered if prompt.reply else ()))


def unshared(before: Sequence[str], now: Sequence[str]) -> int:
    """The tokens of `now` behind the longest beginning that it shares with `before`."""
    same = next((at for at, (one, other) in enumerate(zip(before, now, strict=False)) if one != other), None)
    if same is None:
        return tokens_of(now[len(before) :])
    one, other = before[same], now[same]
    common = next((at for at in range(min(len(one), len(other))) if one[at] != other[at]), min(len(one), len(other)))
    return tokens_of((other[common:],)) + tokens_of(now[same + 1 :])


def stored(logged: Sequence[str], said: Sequence[str], context: Sequence[str]) -> tuple[int, float, float]:
    """How many words are stored, the share of them stored more often than they were said, and of those in `context`.

    Args:
        context: what the client put around what was said; it may be stored once.
    """
    spoken, around, kept = (_shingles(texts) for texts in (said, context, logged))
    total = kept.total()
    allowed = spoken + around
    twice = sum(max(0, count - allowed[one]) for one, count in kept.items() if one in allowed)
    wrapped = sum(count for one, count in kept.items() if one in around and one not in spoken)
    return total, twice / max(1, total), wrapped / max(1, total)


def _shingles(texts: Sequence[str]) -> Counter[int]:
    found: Counter[int] = Counter()
    for text in texts:
        words = _WORDS.findall(text)
        found.update(hash(tuple(words[at : at + SHINGLE_WORDS])) for at in range(len(words) - SHINGLE_WORDS + 1))
    return found


def _context(body: Json, before: Sequence[Event]) -> list[str]:
    """Of a session's first request, what the client wrote around the user's words."""
    found = []
    for message in chat_messages(body):
        if message["role"] not in ("system", "developer"):
            text = message["content"] or ""
            for event in before:
                text = text.replace(event.text, "\n") if event.text else text
            found.append(text)
    return found


def _where(script: Script, word: str) -> str:
    at = next(at for at, event in enumerate(script.events) if any(word in text for text in event.texts))
    event = script.events[at]
    return f"in event {at} of {len(script.events)} ({event.kind}, {sum(map(len, event.texts)):,} characters)"


def dumped(played: Played) -> Json:
    """For a file of figures."""
    told: Json = json.loads(json.dumps(vars(played)))
    return told
