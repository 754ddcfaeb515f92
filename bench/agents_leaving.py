"""Issue 17's numbers 1 to 5, 7, 14 and 16 in bench/agents.py: windows, and what leaves a prompt.

Rule: each scenario is small, has a daemon of its own, and returns findings: what was seen beside what is promised.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from agents_replay import BLOCK, Played, house, play, unshared
from agents_runs import Event, Words, load_run, scripted
from agents_shapes import SHAPES, Shape
from daemon_process import Answer
from strict_llama import KEY, Prompt, tokens_of

Json = dict[str, Any]


class Finding(NamedTuple):
    """One line of the second table."""

    number: int
    what: str
    seen: str
    goal: str
    is_good: bool


class Stage(NamedTuple):
    """What every scenario is given."""

    run: list[Json]
    is_quick: bool


Scenario = Callable[[Stage], list[Finding]]


def stage(runs: Path, *, is_quick: bool) -> Stage:
    """For the folder of the real runs."""
    return Stage(load_run(runs / "tool_calls.json"), is_quick)


def at_most(number: int, what: str, seen: float, most: float, of: str = "") -> Finding:
    """A figure that must not exceed a bound."""
    return Finding(number, what, f"{seen:,.4g}{of}", "0" if most == 0 else f"≤ {most:,.4g}", seen <= most)


def at_least(number: int, what: str, seen: float, least: float, of: str = "") -> Finding:
    """A figure that must reach a bound."""
    return Finding(number, what, f"{seen:,.4g}{of}", f"≥ {least:,.4g}", seen >= least)


def shape(name: str) -> Shape:
    """By its name."""
    return next(one for one in SHAPES if one.name == name)


def user(text: str) -> Json:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Json:
    """A model's message."""
    return {"role": "assistant", "content": text}


# -- 1 and 5: one turn longer than the window ------------------------------------------------------------------------


@cache
def _long_turn(run_key: int, steps: int) -> tuple[Played, int]:
    script = scripted(_RUNS[run_key], steps, 5)
    with house(8192) as home:
        played = play(shape("LangGraph"), script, 8192, steps, home, 0)
        return played, max((prompt.tokens for prompt in home.model.prompts), default=0)


_RUNS: dict[int, list[Json]] = {}


def _played(staged: Stage) -> tuple[Played, int]:
    _RUNS[id(staged.run)] = staged.run
    return _long_turn(id(staged.run), 20 if staged.is_quick else 41)


def open_turn(staged: Stage) -> list[Finding]:
    """One user message and 40 steps against a window of 8,192."""
    played, most = _played(staged)
    of = f" of {played.requests}"
    return [
        at_most(1, f"steps refused in an open turn of {played.steps}, window 8,192", played.refused, 0, of),
        at_most(1, "its longest prompt", most, 8192, " tokens"),
        at_most(1, "its prompts that a strict template refuses", played.invalid, 0, of),
        at_most(1, "its facts in neither log nor prompt", played.lost, 0, f" of {played.facts}"),
    ]


def mid_turn_recall(staged: Stage) -> list[Finding]:
    """What an early step said is needed by a late one."""
    played, _ = _played(staged)
    share = 100 * played.needed_shown / max(1, played.needed)
    return [at_least(5, "needed late in that turn and in the prompt", share, 90, f" % of {played.needed}")]


# -- 2: little room beside the system prompt --------------------------------------------------------------------------


def little_room(staged: Stage) -> list[Finding]:
    """Standing text and `max_tokens` that leave nothing, if the reply is not the first to give way."""
    found = []
    for window, standing, reply in ((32_768, 18_000, 32_000), (16_384, 6_000, 8_192)):
        words, messages = Words(window), list[Json]()
        system = {"role": "system", "content": words.prose(standing)}
        least = max(512, window // 16)
        gone, alone, empty = 0, 0, list[int]()
        with house(window) as home:
            for turn in range(8 if staged.is_quick else 14):
                messages.append(user(words.prose(450)))
                _, prompts = home.say([system, *messages], "So be it.", max_tokens=reply, stream=True)
                history = tokens_of([f"{one['role']}\n{one['content']}" for one in messages])
                room = window - tokens_of((system["content"],)) - least - window // 16
                kept = len(prompts[-1].messages) - 1 if prompts else 0
                if history <= room * 0.8:
                    gone += len(messages) - kept
                alone += turn > 1 and kept <= 1
                empty.append(window - prompts[-1].tokens if prompts else window)
                messages.append(assistant(words.prose(200)))
        what = f"window {window:,}, standing {standing:,}, max_tokens {reply:,}: "
        found.append(at_most(2, what + "turns with the last message alone", alone, 0))
        found.append(at_most(2, what + "messages left out that would fit", gone, 0))
        found.append(at_most(2, what + "of the window empty at the end", empty[-1], window * 0.45))
    return found


# -- 3: windows that are told elsewhere, or not at all ----------------------------------------------------------------

TOLD = ("key", "router", "ollama", "vllm", "lmstudio", "openrouter", "silent")


def windows_from_everywhere(staged: Stage) -> list[Finding]:
    """A conversation of 100 messages that fits, and one that does not."""
    found = []
    for told in TOLD[:: 3 if staged.is_quick else 1]:
        words = Words(3)
        short = [(user, assistant)[at % 2](words.prose(130)) for at in range(99)]
        longer = [*short, *((assistant, user)[at % 2](words.prose(600)) for at in range(50)), user("And now?")][:150]
        longer[-1] = user("And now?")
        more: Json = {"Authorization": f"Bearer {KEY}"} if told == "key" else {}
        with house(32_768, told=told, counts_reply=told == "vllm") as home:
            first, prompts = home.say(short, max_tokens=2000, **more)
            heard = len(prompts[-1].messages) if prompts else 0
            second, offered = home.say(_alternating(longer), max_tokens=2000, **more)
        errors = sum(answer.status != 200 for answer in (first, second))
        tries = len(offered)
        found.append(at_least(3, f"{told}: of 99 messages that fit were heard", heard, 99))
        found.append(at_most(3, f"{told}: errors to a client whose history is longer ({tries} tries)", errors, 0))
    return found


def _alternating(messages: Sequence[Json]) -> list[Json]:
    """The same texts, user first and last."""
    texts = [one["content"] for one in messages]
    texts = texts if len(texts) % 2 else texts[1:]
    return [(user, assistant)[at % 2](text) for at, text in enumerate(texts)]


# -- 4: after a long turn ---------------------------------------------------------------------------------------------


def after_a_long_turn(staged: Stage) -> list[Finding]:
    """A turn that fitted, and the next message, with which it no longer fits."""
    script = scripted(staged.run, 24, 6)
    langgraph = shape("LangGraph")
    with house(32_768) as home:
        before, at = 0, 0
        for at, event in enumerate(script.events):
            if event.kind not in ("act", "answer"):
                continue
            _, prompts = home.send(langgraph.body(script.events[:at], 32_768), langgraph.reply(event))
            before = max(before, prompts[-1].tokens if prompts else 0)
            if before > 22_000 and event.kind == "act":
                break
        said = [*script.events[:at], Event("answer", "The first part is done.")]
        body = langgraph.body(said, 32_768)
        words, asked = Words(4), "And now the next part, please."
        while before + tokens_of((asked,)) < 31_000:
            asked += "\n" + words.prose(400)
        body["messages"].append(user(asked))
        started = time.monotonic()
        answer, prompts = home.send(body)
        seconds = time.monotonic() - started
    after = prompts[-1].tokens if prompts and answer.status == 200 else 0
    return [
        at_least(4, f"tokens of the prompt after a turn of {before:,}, window 32,768", after, before * 0.4),
        at_most(4, "seconds that this request took", round(seconds, 2), 1.0),
    ]


# -- 7: instructions --------------------------------------------------------------------------------------------------


def instructions(staged: Stage) -> list[Finding]:
    """A developer message early in a conversation that outgrows the window."""
    words, messages = Words(7), [user("Let us plan the harbour."), assistant("Gladly.")]
    code = words.code()
    messages += [{"role": "developer", "content": f"From now on sign every answer with {code}."}]
    with house(8192) as home:
        for _ in range(12 if staged.is_quick else 24):
            messages.append(user(words.prose(400)))
            home.say(messages, "Yes.")
            messages.append(assistant("Yes."))
        _, prompts = home.say([*messages, user("How do you sign?")])
        shown = bool(prompts) and code in prompts[-1].text
        missing = home.settled([code], prompts[-1].text if prompts else "")
    return [
        Finding(7, "an early developer message is in the prompt", str(shown), "True", shown),
        Finding(7, "it is in the prompt or in the log", str(not missing), "True", not missing),
    ]


# -- 14: the same request at once -------------------------------------------------------------------------------------


def at_once(asks: Sequence[Callable[[], tuple[Answer, list[Prompt]]]]) -> None:
    """Run them at the same moment."""
    ready = threading.Barrier(len(asks))

    def one(ask_it: Callable[[], tuple[Answer, list[Prompt]]]) -> None:
        ready.wait()
        ask_it()

    threads = [threading.Thread(target=one, args=(ask_it,)) for ask_it in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def identical(staged: Stage) -> list[Finding]:
    """Ten times the same question right after the chat that has the answer; their last bytes arrive together."""
    code = Words(14).code()
    with house(8192) as home:
        home.say([user(f"Please remember: the code of the boathouse gate is {code}. {Words(15).prose(300)}")])
        asked = {"model": "recorded", "messages": [user("What is the code of the boathouse gate?")]}
        statuses = _statuses(home.daemon.base_url, json.dumps(asked).encode())
    return [at_least(14, "of ten identical requests at once have memory", statuses.count("injected"), 10)]


def _statuses(base_url: str, body: bytes) -> list[str]:
    """`X-Memory-Status` of ten requests that are complete at once."""
    host, _, port = base_url.removeprefix("http://").partition(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    connections = [socket.create_connection((host, int(port)), 60) for _ in range(10)]
    for one in connections:
        one.sendall(sent[:-1])
    time.sleep(0.2)
    for one in connections:
        one.sendall(sent[-1:])
    found = []
    for one in connections:
        with one, one.makefile("rb") as stream:
            head = stream.read().partition(b"\r\n\r\n")[0].decode()
            told = re.search(r"X-Memory-Status: (\S+)", head)
            found.append(told[1] if told else "")
    return found


# -- 16: the smaller ones ---------------------------------------------------------------------------------------------


def smaller(staged: Stage) -> list[Finding]:
    """A refusal for length, and a prefix that stays while blocks come."""
    words = Words(16)
    with house(8192, tells=32_768) as home:
        messages = [(user, assistant)[at % 2](words.prose(300)) for at in range(41)]
        answer, prompts = home.say(messages)
    errors = int(answer.status != 200)
    found = [at_most(16, f"errors where the server refuses what it said would fit ({len(prompts)} tries)", errors, 0)]
    return [*found, *_steady_prefix(10 if staged.is_quick else 40)]


def _steady_prefix(turns: int) -> list[Finding]:
    words, things = Words(17), list[str]()
    with house(8192) as home:
        for _ in range(12):
            things.append(words.thing())
            home.say([user("\n".join(f"The {things[-1]} {words.prose(60)}" for _ in range(8)))], "Noted.")
        home.settled([things[-1]])
        messages, changed, read, new, before = list[Json](), 0, 0, 0, tuple[str, ...]()
        for turn in range(turns):
            messages.append(user(f"What do you know of the {things[turn % 12]}?"))
            _, prompts = home.say(messages, "Little.")
            parts = prompts[-1].parts if prompts else before
            changed += not "\n".join(parts).startswith("\n".join(before))
            read += unshared(before, parts)
            new += tokens_of((*(_apart(parts) - _apart(before)).elements(),))
            before = parts
            messages.append(assistant("Little."))
    return [
        at_most(16, f"turns of {turns} whose prefix changed, window 8,192", changed, turns // 10),
        at_most(16, "their tokens read ÷ those of messages and blocks that are new in them", round(read / new, 2), 1.2),
    ]


def _apart(parts: Sequence[str]) -> Counter[str]:
    """A prompt's blocks, and its messages without them."""
    return Counter([*BLOCK.findall("\n".join(parts)), *(BLOCK.sub("", part) for part in parts)])


SCENARIOS: dict[int, Scenario] = {
    1: open_turn,
    2: little_room,
    3: windows_from_everywhere,
    4: after_a_long_turn,
    5: mid_turn_recall,
    7: instructions,
    14: identical,
    16: smaller,
}
