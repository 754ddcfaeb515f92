"""Ollama's own clients with nothing changed but the host, tool loops included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from conftest import ANSWERED_MARKER, REPLY, REPLY_AFTER_CALLS, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import DaemonProcess, ask
from ollama_server import ollama_answer
from recording_upstream import RecordingUpstream, recording_upstream
from typescript_client import TypeScriptClient

FACT = "The release word for the lighthouse lamp is cinnamon-42."
QUESTION = "What is the release word for the lighthouse lamp?"
RESULTS = ["Line 1.", "Line 2.", f"Line 3. {ANSWERED_MARKER}"]
WINDOW = 2048


@pytest.fixture
def server() -> Iterator[RecordingUpstream]:
    with recording_upstream(answer=ollama_answer) as running:
        yield running


@pytest.fixture
def daemon(make_daemon: MakeDaemon, server: RecordingUpstream) -> DaemonProcess:
    return make_daemon(server.url).start()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Any]:  # its types know no `stream` that is a variable
    with ollama.Client(host=f"{daemon.base_url}/t/lamp") as opened:
        yield opened


def read(path: str) -> str:
    """Read a file.

    Args:
        path: its path
    """
    raise AssertionError(path)


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_python_is_remembered(daemon: DaemonProcess, client: Any, stream: bool) -> None:
    def say(text: str) -> str:
        told = client.chat("tiny", [{"role": "user", "content": text}], stream=stream)
        parts = told if stream else [told]
        return "".join(part.message.content or "" for part in parts)

    assert say(FACT) == "".join(REPLY)
    daemon.wait_stored("cinnamon-42")
    assert say(QUESTION) == "".join(REPLY_WITH_MEMORY)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_loop_of_ollama_python_is_stored_once_and_stays_within_num_ctx(
    daemon: DaemonProcess, client: Any, stream: bool
) -> None:
    options = {"num_ctx": WINDOW}
    history: list[Any] = []
    for turn in range(4):
        history.append({"role": "user", "content": f"Question {turn}: {QUESTION}"})
        results = [f"Turn {turn}, line {line}. " + "The lamp is lit. " * 80 for line in range(2)] + [ANSWERED_MARKER]
        while True:
            told = client.chat("tiny", history, tools=[read], stream=stream, options=options)
            parts = list(told) if stream else [told]
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            text = "".join(part.message.content or "" for part in parts)
            history.append(ollama.Message(role="assistant", content=text, tool_calls=calls or None))
            if not calls:
                break
            history.append({"role": "tool", "content": results.pop(0), "tool_name": "read"})
        assert text in {"".join(REPLY_AFTER_CALLS), "".join(REPLY_WITH_MEMORY), "".join(REPLY)}
    [conversation] = ask(f"{daemon.base_url}/memd/buffer?topic=lamp").json["conversations"]
    assert conversation["left_out"] + conversation["replaced"] > 0, "more was said than num_ctx holds"
    stored = "\n".join(daemon.said())
    assert all(stored.count(f"Turn {turn}, line {line}.") <= 1 for turn in range(4) for line in range(2))


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_in_typescript_calls_its_tools_and_is_remembered(
    typescript: TypeScriptClient, daemon: DaemonProcess, stream: bool
) -> None:
    asked = {"question": QUESTION, "stream": stream, "results": RESULTS * 2, "next": FACT}
    steps = typescript.run("ollama.ts", daemon.base_url, asked)["steps"]
    assert [step["reply"] for step in steps][:4] == ["", "", "", "".join(REPLY_AFTER_CALLS)]
    assert [len(step["memory_out"]) for step in steps] == [1] * len(steps)
    daemon.wait_stored("cinnamon-42")
    again = {"question": "Which word releases the lighthouse lamp?", "stream": stream}
    [step] = typescript.run("ollama.ts", daemon.base_url, again)["steps"]
    assert step["reply"] == "".join(REPLY_WITH_MEMORY)
    assert len(step["memory_out"][0]["injected_chunks"]) > 0


def test_what_ollama_says_besides_passes_untouched_and_memd_speaks_as_it_does(
    daemon: DaemonProcess, client: Any
) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        client.show("tiny")
    assert missing.value.status_code == 404
    refused = ask(f"{daemon.base_url}/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": 7}]})
    assert refused.status == 400 and "cannot unmarshal" in refused.json["error"]
    client.chat("tiny", [{"role": "user", "content": FACT}])
    with ollama.Client(host=f"{daemon.base_url}/t/LAMP") as other, pytest.raises(ollama.ResponseError) as told:
        other.chat("tiny", [{"role": "user", "content": FACT}])
    assert told.value.status_code == 400 and "'lamp', which is there" in told.value.error
