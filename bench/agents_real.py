"""A tool loop in front of the real llama.cpp in bench/agents.py: its own template, its own tokens, its own refusals.

The model is the tests' tiny one: it calls `read` until it sees `[done]`, and a character is a token. So a window of
16,384 is small, and memd's estimate is four times too low until it has learned.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from agents_leaving import Finding, Stage, at_least, at_most
from agents_replay import SETTINGS, House
from agents_runs import Words
from daemon_process import DaemonProcess
from llama_server import running_llama
from recording_upstream import RecordingUpstream, recording_upstream
from strict_llama import StrictLlama, problems
from tiny_model import write_scripted_model

Json = dict[str, Any]

WINDOW, STEPS = 16_384, 40
CALL = ("<tool_call>", '\n{"name": ', '"read", ', '"arguments": {"path"', ': "log"}}', "\n</tool_call>")
TOOL = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


def real_loop(staged: Stage) -> list[Finding]:
    """One user message and 40 calls, each with a result of about 1,200 tokens."""
    steps = 16 if staged.is_quick else STEPS
    with tempfile.TemporaryDirectory(prefix="memd-agents-") as name, recording_upstream() as upstream:
        folder = Path(name)
        model = folder / "tiny.gguf"
        write_scripted_model(model, marker="[done]", reply=CALL, reply_seen=("All", " read", "!"))
        with running_llama(model, context=WINDOW, log=folder / "llama.log") as url:
            upstream.behind = url
            daemon = DaemonProcess(folder, upstream.url, SETTINGS)
            try:
                return _played(House(upstream, StrictLlama(WINDOW), daemon.start()), upstream, steps)
            finally:
                daemon.discard()


def _played(home: House, upstream: RecordingUpstream, steps: int) -> list[Finding]:
    words, codes, refused, invalid, last = Words(77), list[str](), 0, 0, ""
    thing, needed = words.thing(), words.code()
    opening = f"Read all logs, then report the release code of the {thing}. {words.prose(100)}"
    messages: list[Json] = [{"role": "user", "content": opening}]
    started = time.monotonic()
    for step in range(steps):
        answer = home.daemon.chat(messages, tools=[TOOL], max_tokens=64)
        refused += answer.status != 200
        if answer.status != 200:
            break
        chats = upstream.chats
        last = json.dumps(json.loads(chats[-1].body)["messages"], ensure_ascii=False)
        invalid += bool(problems(json.loads(chats[-1].body)["messages"]))
        upstream.requests.clear()
        message = answer.json["choices"][0]["message"]
        messages.append(message)
        codes.append(words.code())
        text = f"{words.prose(180)}\nThe code of log {step} is {codes[-1]}."
        text += f"\nThe release code of the {thing} is {needed}." if step == 1 else ""
        text += " [done]" if step == steps - 2 else ""
        calls = message.get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
    lost = home.settled([*codes[:-1], needed], last)
    seconds = time.monotonic() - started
    return [
        at_most(1, f"real llama.cpp, {steps} calls, window {WINDOW:,}: steps refused ({seconds:.0f} s)", refused, 0),
        at_most(1, "real llama.cpp: prompts that a strict template refuses", invalid, 0),
        at_most(1, "real llama.cpp: facts in neither log nor prompt", len(lost), 0, f" of {len(codes)}"),
        at_least(5, "real llama.cpp: the needed fact is in the last prompt", int(needed in last), 1),
    ]


SCENARIOS = {1: real_loop}
