"""The agent in examples/typescript-agent, as its user runs it, against a real daemon."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ANSWERED_MARKER, REPLY_AFTER_CALLS, MakeDaemon
from daemon_process import DaemonProcess
from recording_upstream import COMMON, RecordingUpstream, Request, Response
from typescript_client import node
from typescript_package import TypeScriptPackage

AGENT = Path(__file__).parent.parent / "examples" / "typescript-agent" / "agent.ts"
TOLD = "The spare lamp is behind the rope."
MOVED = "The spare lamp is in the boat."
OWN = "The spare lamp is at Marta's."


@pytest.fixture(scope="module")
def agent(memd_client: TypeScriptPackage) -> TypeScriptPackage:
    """A project with the agent in it."""
    memd_client.write("agent.ts", AGENT.read_text())
    return memd_client


def typed(agent: TypeScriptPackage, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[str]:
    """Type these lines; what the agent said to each."""
    monkeypatch.setenv("MEMD_BASE_URL", f"{daemon.base_url}/v1")
    monkeypatch.setenv("MEMD_URL", daemon.own_url)
    monkeypatch.setenv("MEMD_TOPIC", "boat")
    said = node("agent.ts", stdin="".join(f"{line}\n" for line in lines), folder=agent.folder)
    assert said.startswith("> ") and said.endswith("> \n"), said
    return said.removesuffix("\n").split("> ")[1:-1]


def streamed(delta: dict[str, Any], reason: str) -> Response:
    """A reply of one piece, as server-sent events."""
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": reason},
    ]
    events = [{"choices": [choice], "object": "chat.completion.chunk", **COMMON} for choice in choices]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return Response((body + b"data: [DONE]\n\n",), headers=(("Content-Type", "text/event-stream"),))


def says(text: str) -> Response:
    return streamed({"content": text}, "stop")


def calls(name: str, **given: str) -> Response:
    function = {"name": name, "arguments": json.dumps(given)}
    return streamed(
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}, "tool_calls"
    )


def scripted(request: Request) -> Response:
    """A model that puts down, looks up and corrects when it is asked to, and repeats what the tool said."""
    messages = json.loads(request.body)["messages"]
    text = [one["content"] for one in messages if one["role"] == "user"][-1].rpartition("[/memory]")[2]
    if messages[-1]["role"] == "tool":
        result = messages[-1]["content"]
        if (found := re.search(r"\[mem:(\w+)\] The spare", result)) and "Correct it" in text:
            return calls("correct_memory", id=found[1], reason="it was moved", content=MOVED)
        return says(f"I got: {result}")
    if "Remember" in text:
        return calls("remember", content=TOLD, title="Lamp")
    if "Correct it" in text or "Look" in text:
        return calls("search_memory", question="Where is the spare lamp?")
    if "Break" in text:
        return calls("correct_memory", id="ffffffff", reason="it was moved")
    if "Leave" in text:
        return calls("read", path="../package.json")
    return says("Noted.")


def test_the_agent_takes_notes_looks_up_and_corrects_across_runs(
    agent: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.check_types()
    upstream.answer = scripted
    # All that is stored by then fits into a quarter of this window: which chunks it is differs from run to run.
    daemon = make_daemon(upstream.url, {"upstream": {"window": 65_536}}).start()
    first, again = typed(agent, daemon, monkeypatch, "Remember where the lamp is.", "Remember it well.")
    assert re.fullmatch(r"\(remember\) I got: Noted: mem:\w+\n.*\n", first), first
    assert "I got: Known already: mem:" in again
    [corrected] = typed(agent, daemon, monkeypatch, "Correct it: the lamp was moved.")
    assert "(search_memory) (correct_memory) I got: Corrected." in corrected
    texts = {entry["content"] for entry in daemon.export() if entry["live"]}
    assert MOVED in texts and TOLD not in texts
    [looked] = typed(agent, daemon, monkeypatch, "Look where it is.")
    [chunk_id] = {found[1] for found in re.finditer(rf"\[mem:(\w+)\] {re.escape(MOVED)}", looked)}
    wrong, left = typed(agent, daemon, monkeypatch, "Break it.", "Leave this folder.")
    assert "I got: error: there is nothing live with the id ffffffff" in wrong
    assert "I got: error: only files below this folder can be read" in left
    # The user's own correction goes out with the next message, of a chunk that a prompt had.
    asked = "Where is the spare lamp?", f"/wrong mem:{chunk_id} {OWN}", "Thanks."
    shown, _, thanked = typed(agent, daemon, monkeypatch, *asked)
    assert f"[mem:{chunk_id}]" in shown
    assert thanked.startswith("Noted.\n")
    assert OWN in {entry["content"] for entry in daemon.export() if entry["live"]}


def test_the_agent_works_its_way_through_the_tools_of_a_real_llama_cpp(
    agent: TypeScriptPackage, make_daemon: MakeDaemon, calling_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.write("log", f"The pump was oiled. {ANSWERED_MARKER}\n")
    daemon = make_daemon(calling_llama).start()
    [said] = typed(agent, daemon, monkeypatch, "Read the log.")
    assert said.startswith("(read) " + "".join(REPLY_AFTER_CALLS)), said
    daemon.wait_stored("The pump was oiled.")
