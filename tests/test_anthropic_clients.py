"""Anthropic's official clients, in Python and TypeScript: the base URL is changed, and nothing else has to be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from anthropic_client import ask_anthropic
from conftest import ANSWERED_MARKER, REPLY, REPLY_AFTER_CALLS, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import DaemonProcess
from typescript_client import TypeScriptClient

FACT = "The release word for the lighthouse lamp is cinnamon-42."
QUESTION = "What is the release word for the lighthouse lamp?"
TOOL = {
    "name": "read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
RESULTS = ["row one is fine", f"row two is fine {ANSWERED_MARKER}"]

Ask = Callable[..., dict[str, Any]]
"""One question through one of the clients; what it told of each step."""


@pytest.fixture(params=[("python", "create"), ("python", "helper"), ("typescript", "stream"), ("typescript", "helper")])
def ask_client(request: pytest.FixtureRequest) -> Ask:
    client, how = request.param
    if client == "python":
        return partial(ask_anthropic, how=how)
    typescript: TypeScriptClient = request.getfixturevalue("typescript")

    def ask_typescript(base_url: str, question: str, **asked: Any) -> dict[str, Any]:
        return typescript.run("anthropic.ts", base_url, {"question": question, "how": how, **asked})

    return ask_typescript


def test_the_client_works_with_only_the_base_url_changed(ask_client: Ask, daemon: DaemonProcess) -> None:
    [step] = ask_client(daemon.base_url, FACT)["steps"]
    assert (step["reply"], step["stop_reason"], step["memory_status"]) == ("".join(REPLY), "end_turn", "none")
    [step] = ask_client(daemon.base_url, QUESTION)["steps"]
    assert (step["reply"], step["memory_status"]) == ("".join(REPLY_WITH_MEMORY), "injected")
    assert step["memory_out"] == []


def test_the_client_sends_memory_in_and_reads_memory_out_once(ask_client: Ask, daemon: DaemonProcess) -> None:
    def memory_out(question: str, **memory_in: Any) -> Any:
        memory_in["topic_id"] = "lighthouse"
        [step] = ask_client(daemon.base_url, question, memory_in=memory_in)["steps"]
        [out] = step["memory_out"]
        return out

    assert memory_out(FACT) == {"injected_chunks": []}
    daemon.wait_stored("cinnamon-42")
    [chunk] = memory_out(QUESTION)["injected_chunks"]
    [stored] = [entry for entry in daemon.export() if entry["id"] == chunk["id"]]
    assert "cinnamon-42" in stored["content"]
    assert chunk == {"id": stored["id"], "topic_id": "lighthouse", "canonical_id": stored["origin_id"]}
    forget = {"chunk_ids": [chunk["id"], "ffffffff"], "action": "Update", "reason": "no longer true"}
    signals = memory_out("Forget the release word.", corrections=[forget])["signals"]
    assert {"type": "correction_failed", "chunk_id": "ffffffff"} in signals


def test_a_tool_loop_of_three_steps_is_stored_once_however_the_client_echoes_it(
    ask_client: Ask, make_daemon: MakeDaemon, calling_llama: str
) -> None:
    daemon = make_daemon(calling_llama).start()
    told = ask_client(daemon.base_url, "Read the logs.", tools=[TOOL], results=RESULTS)
    assert [step["stop_reason"] for step in told["steps"]] == ["tool_use", "tool_use", "end_turn"]
    assert told["steps"][-1]["reply"] == "".join(REPLY_AFTER_CALLS)
    assert_stored_once(daemon)


def test_the_client_s_own_tool_loop_works(make_daemon: MakeDaemon, calling_llama: str) -> None:
    from anthropic import Anthropic, beta_tool  # here, for it takes seconds

    daemon = make_daemon(calling_llama).start()
    said = iter(RESULTS)

    @beta_tool
    def read(path: str) -> str:
        """Reads a file.

        Args:
            path: Which.
        """
        assert path == "log"
        return next(said)

    with Anthropic(base_url=daemon.base_url, api_key="not needed", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=100,
            tools=[read],
            messages=[{"role": "user", "content": "Read the logs."}],
            thread=False,  # else it would send only what is new, to a server that keeps the rest; llama.cpp does not
        )
        answer = runner.until_done()
    [block] = answer.content
    assert block.type == "text" and block.text == "".join(REPLY_AFTER_CALLS)
    assert_stored_once(daemon)


def assert_stored_once(daemon: DaemonProcess) -> None:
    """Every message of the tool loop, once: each reply was recognised in its echo."""
    daemon.wait_stored("tool: row two is fine", "assistant: " + "".join(REPLY_AFTER_CALLS))
    stored = "\n".join(daemon.said())
    assert stored.count("user: Read the logs.") == 1
    assert stored.count("[call read ") == 2
    assert [stored.count(f"tool: row {number} is fine") for number in ("one", "two")] == [1, 1]
    assert stored.count("assistant: " + "".join(REPLY_AFTER_CALLS)) == 1
