"""Official clients with nothing changed but the base URL: remembered, told of memory, their tool loops stored once.

Rule: what a client cannot do on llama.cpp without memd (see `openai_responses.py`) is tried on the stand-in alone.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import ollama
import openai_responses
import pytest
from conftest import ANSWERED_MARKER, REPLY, REPLY_AFTER_CALLS, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from ollama_server import ollama_answer
from python_clients import ask_python
from recording_upstream import RecordingUpstream, recording_upstream
from typescript_client import TypeScriptClient

FACT = "The release word for the lighthouse lamp is cinnamon-42."
QUESTION = "What is the release word for the lighthouse lamp?"
RESULTS = ["Line 1.", "Line 2.", f"Line 3. {ANSWERED_MARKER}"]
OTHER_RESULTS = [result.replace("Line", "Row") for result in RESULTS]  # the same ones, said again, are stored again
STORED = ("tool: Line 1.", "tool: Line 2.", "tool: Line 3.", "".join(REPLY_AFTER_CALLS))

ON_LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-node": ("chat_tools.ts", {"how": "create"}),
    "openai-node .stream()": ("chat_tools.ts", {"how": "stream"}),
    "AI SDK generateText": ("ai_sdk.ts", {"how": "create", "provider": "compatible"}),
    "AI SDK streamText": ("ai_sdk.ts", {"how": "stream", "provider": "compatible"}),
    "LangChain.js invoke": ("langchain.ts", {"how": "create"}),
    "LangChain.js stream": ("langchain.ts", {"how": "stream"}),
    "openai-node of docs/clients.md": ("chat.ts", {"stream": False}),
    "openai-node of docs/clients.md, stream": ("chat.ts", {"stream": True}),
    "openai-python": ("chat", {"how": "create"}),
    "openai-python, stream": ("chat", {"how": "stream"}),
    "openai-python .stream()": ("chat", {"how": "helper"}),
    "openai-node responses": ("responses.ts", {"how": "create"}),
    "openai-node responses, stream": ("responses.ts", {"how": "stream"}),
    "AI SDK responses": ("ai_sdk.ts", {"how": "create"}),
    "openai-python responses": ("responses", {"how": "create"}),
    "openai-python responses, stream": ("responses", {"how": "stream"}),
    "anthropic-python": ("anthropic", {"how": "create"}),
    "anthropic-python .stream()": ("anthropic", {"how": "helper"}),
    "anthropic-node, stream": ("anthropic.ts", {"how": "stream"}),
    "anthropic-node .stream()": ("anthropic.ts", {"how": "helper"}),
}
ON_OPENAI = {
    **{name: way for name, way in ON_LLAMA.items() if "responses" in name},
    "openai-node responses.stream()": ("responses.ts", {"how": "helper"}),
    "AI SDK responses, stream": ("ai_sdk.ts", {"how": "stream"}),
    "openai-python responses.stream()": ("responses", {"how": "helper"}),
}
LOOPS = {
    **{name: way for name, way in ON_LLAMA.items() if way[0] != "chat.ts"},
    "openai-node runTools": ("chat_tools.ts", {"how": "helper"}),
}
HIDE_HEADERS = {
    *("openai-node .stream()", "LangChain.js invoke", "LangChain.js stream", "openai-node responses.stream()"),
    *(name for name in (*ON_LLAMA, *ON_OPENAI) if name.startswith("openai-python")),
}
TELL_NOTHING_AT_THE_END = {"openai-python responses.stream()"}
"""Makes an event of its own out of the last one, without what it does not know."""

Ask = Callable[..., list[dict[str, Any]]]
"""Asks through a client by its name; what it told of each step."""


@pytest.fixture
def ask_client(request: pytest.FixtureRequest) -> Ask:
    def ask_it(daemon: DaemonProcess, name: str, question: str, **members: Any) -> list[dict[str, Any]]:
        kind, how = (LOOPS | ON_LLAMA | ON_OPENAI)[name]
        if not kind.endswith(".ts"):
            return ask_python(kind, daemon.base_url, question=question, **how, **members)
        asked = {"question": question, **how, **members}
        if "results" in members and kind in TOOLS_OF:
            asked["tools"] = [TOOLS_OF[kind]]
        typescript: TypeScriptClient = request.getfixturevalue("typescript")
        told = typescript.run(kind, daemon.base_url + ("" if kind == "anthropic.ts" else "/v1"), asked)
        steps: list[dict[str, Any]] = told.get("steps", [told])
        return steps

    return ask_it


TOOLS_OF: dict[str, Any] = {
    "responses.ts": openai_responses.TOOL,
    "anthropic.ts": {"name": "read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
"""By script, of those that are told which tools there are."""


def stored_once(daemon: DaemonProcess, *texts: str) -> None:
    """Every one of these texts is in the log, and each exactly once."""

    def counts() -> list[int]:
        contents = "\n".join(daemon.said())
        return [contents.count(text) for text in texts]

    wait_until(lambda: min(counts()) > 0, lambda: f"stored so often: {counts()}")
    assert counts() == [1] * len(texts)


@pytest.fixture
def conforming(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    """A daemon in front of the stand-in for OpenAI."""
    upstream.answer = openai_responses.answer
    return make_daemon(upstream.url).start()


def remembered(ask_client: Ask, daemon: DaemonProcess, name: str) -> None:
    """A fact is told and recalled, first by a client that knows nothing of memd, then with MemoryIn and MemoryOut."""

    def say(text: str, status: str, reply: tuple[str, ...], **members: Any) -> list[Any]:
        [told] = ask_client(daemon, name, text, **members)
        assert told["reply"].replace(" ", "") == "".join(reply).replace(" ", "")
        assert told["memory_status"] == (None if name in HIDE_HEADERS else status)
        out = told["memory_out"]
        assert isinstance(out, list)
        return out

    assert say(FACT, "none", REPLY) == say(QUESTION, "injected", REPLY_WITH_MEMORY) == []
    memory: dict[str, Any] = {"topic_id": "lighthouse"}
    told = say(FACT, "none", REPLY, memory_in=memory)
    if name in TELL_NOTHING_AT_THE_END:
        assert told == say(QUESTION, "injected", REPLY_WITH_MEMORY, memory_in=memory) == []
        return
    assert told == [{"injected_chunks": []}]
    wait_until(lambda: sum("cinnamon-42" in one for one in daemon.said()) == 2, lambda: "both topics")
    [memory_out] = say(QUESTION, "injected", REPLY_WITH_MEMORY, memory_in=memory)  # once, also in a stream
    [chunk] = memory_out["injected_chunks"]
    [stored] = [entry for entry in daemon.export() if entry["id"] == chunk["id"]]
    assert "cinnamon-42" in stored["content"]
    assert chunk == {"id": stored["id"], "topic_id": "lighthouse", "canonical_id": stored["origin_id"]}
    forget = {"chunk_ids": [chunk["id"], "ffffffff"], "action": "Update", "reason": "no longer true"}
    asked = {"topic_id": "lighthouse", "corrections": [forget]}
    [step] = ask_client(daemon, name, "Forget the release word.", memory_in=asked)
    [memory_out] = step["memory_out"]
    assert {"type": "correction_failed", "chunk_id": "ffffffff"} in memory_out["signals"]
    assert chunk["id"] not in {entry["id"] for entry in daemon.export() if entry["live"]}


@pytest.mark.llama
@pytest.mark.node
@pytest.mark.parametrize("name", ON_LLAMA)
def test_a_client_is_remembered_and_told_of_memory(ask_client: Ask, daemon: DaemonProcess, name: str) -> None:
    remembered(ask_client, daemon, name)


@pytest.mark.node
@pytest.mark.parametrize("name", ON_OPENAI)
def test_a_client_on_openai_s_events_is_remembered_and_told_of_memory(
    ask_client: Ask, conforming: DaemonProcess, name: str
) -> None:
    remembered(ask_client, conforming, name)


@pytest.mark.llama
@pytest.mark.node
@pytest.mark.parametrize("name", LOOPS)
def test_a_tool_loop_is_stored_once_however_the_client_echoes_it(
    ask_client: Ask, make_daemon: MakeDaemon, calling_llama: str, name: str
) -> None:
    daemon = make_daemon(calling_llama).start()
    steps = ask_client(daemon, name, QUESTION, results=list(RESULTS), memory_in={})
    assert [step["reply"] for step in steps] == ["", "", "", "".join(REPLY_AFTER_CALLS)]
    assert [len(step["memory_out"]) for step in steps] == [1] * 4
    daemon.chat([{"role": "user", "content": "Good morning."}])
    stored_once(daemon, QUESTION, *STORED)


@pytest.mark.node
@pytest.mark.parametrize("name", ON_OPENAI)
def test_a_tool_loop_on_openai_s_events_keeps_its_memory(ask_client: Ask, conforming: DaemonProcess, name: str) -> None:
    ask_client(conforming, name, FACT, results=list(RESULTS), memory_in={})
    steps = ask_client(conforming, name, QUESTION, results=list(OTHER_RESULTS), memory_in={})
    assert [step["reply"].replace(" ", "") for step in steps] == [
        "",
        "",
        "",
        "".join(REPLY_WITH_MEMORY).replace(" ", ""),
    ]
    if name not in TELL_NOTHING_AT_THE_END:
        assert [len(step["memory_out"]) for step in steps] == [1] * 4
        assert len({json.dumps(step["memory_out"]) for step in steps}) == 1
        assert steps[0]["memory_out"][0]["injected_chunks"] != []
    ask_client(conforming, name, "Good morning.")  # opens another conversation: this one is stored
    contents = conforming.said()
    assert len(contents) == len(set(contents))
    assert sum(content.startswith(f"user: {QUESTION}") for content in contents) == 1


def test_the_scripts_of_typescript_clients_type_check_strictly(typescript: TypeScriptClient) -> None:
    typescript.check_types()


def test_the_tool_loop_of_anthropic_s_own_runner_is_stored_once(make_daemon: MakeDaemon, calling_llama: str) -> None:
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
    stored_once(daemon, "Read the logs.", *STORED)


# Ollama's own API


NUM_CTX = 2048


@pytest.fixture
def by_ollama(make_daemon: MakeDaemon) -> Iterator[DaemonProcess]:
    with recording_upstream(answer=ollama_answer) as running:
        yield make_daemon(running.url).start()


@pytest.fixture
def client(by_ollama: DaemonProcess) -> Iterator[Any]:  # its types know no `stream` that is a variable
    with ollama.Client(host=f"{by_ollama.base_url}/t/lamp") as opened:
        yield opened


def read(path: str) -> str:
    """Read a file.

    Args:
        path: its path
    """
    raise AssertionError(path)


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_python_is_remembered(by_ollama: DaemonProcess, client: Any, stream: bool) -> None:
    def say(text: str) -> str:
        told = client.chat("tiny", [{"role": "user", "content": text}], stream=stream)
        parts = told if stream else [told]
        return "".join(part.message.content or "" for part in parts)

    assert say(FACT) == "".join(REPLY)
    by_ollama.wait_stored("cinnamon-42")
    assert say(QUESTION) == "".join(REPLY_WITH_MEMORY)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_loop_of_ollama_python_is_stored_once_and_stays_within_num_ctx(
    by_ollama: DaemonProcess, client: Any, stream: bool
) -> None:
    options = {"num_ctx": NUM_CTX}
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
    [conversation] = ask(f"{by_ollama.base_url}/memd/buffer?topic=lamp").json["conversations"]
    assert conversation["left_out"] + conversation["replaced"] > 0, "more was said than num_ctx holds"
    stored = "\n".join(by_ollama.said())
    assert all(stored.count(f"Turn {turn}, line {line}.") <= 1 for turn in range(4) for line in range(2))


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_in_typescript_calls_its_tools_and_is_remembered(
    typescript: TypeScriptClient, by_ollama: DaemonProcess, stream: bool
) -> None:
    asked = {"question": QUESTION, "stream": stream, "results": RESULTS * 2, "next": FACT}
    steps = typescript.run("ollama.ts", by_ollama.base_url, asked)["steps"]
    assert [step["reply"] for step in steps][:4] == ["", "", "", "".join(REPLY_AFTER_CALLS)]
    assert [len(step["memory_out"]) for step in steps] == [1] * len(steps)
    by_ollama.wait_stored("cinnamon-42")
    again = {"question": "Which word releases the lighthouse lamp?", "stream": stream}
    [step] = typescript.run("ollama.ts", by_ollama.base_url, again)["steps"]
    assert step["reply"] == "".join(REPLY_WITH_MEMORY)
    assert len(step["memory_out"][0]["injected_chunks"]) > 0


def test_what_ollama_says_besides_passes_untouched_and_memd_speaks_as_it_does(
    by_ollama: DaemonProcess, client: Any
) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        client.show("tiny")
    assert missing.value.status_code == 404
    refused = ask(f"{by_ollama.base_url}/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": 7}]})
    assert refused.status == 400 and "cannot unmarshal" in refused.json["error"]
    client.chat("tiny", [{"role": "user", "content": FACT}])
    with ollama.Client(host=f"{by_ollama.base_url}/t/LAMP") as other, pytest.raises(ollama.ResponseError) as told:
        other.chat("tiny", [{"role": "user", "content": FACT}])
    assert told.value.status_code == 400 and "'lamp', which is there" in told.value.error
