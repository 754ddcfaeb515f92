"""Real clients of chat completions with nothing changed but the base URL, tool loops included, on llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

import pytest
from conftest import ANSWERED_MARKER, REPLY, REPLY_AFTER_CALLS, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import DaemonProcess, wait_until
from typescript_client import TypeScriptClient

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessage

FACT = "The release word for the lighthouse lamp is cinnamon-42."
QUESTION = "What is the release word for the lighthouse lamp?"
RESULTS = ["Line 1.", "Line 2.", f"Line 3. {ANSWERED_MARKER}"]
READ: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
CLIENTS = {
    "openai-node": ("chat_tools.ts", {"how": "create"}),
    "openai-node .stream()": ("chat_tools.ts", {"how": "stream"}),
    "AI SDK generateText": ("ai_sdk.ts", {"how": "create", "provider": "compatible"}),
    "AI SDK streamText": ("ai_sdk.ts", {"how": "stream", "provider": "compatible"}),
    "LangChain.js invoke": ("langchain.ts", {"how": "create"}),
    "LangChain.js stream": ("langchain.ts", {"how": "stream"}),
}
LOOPS = {**CLIENTS, "openai-node runTools": ("chat_tools.ts", {"how": "helper"})}


def stored_once(daemon: DaemonProcess, *texts: str) -> None:
    """Every one of these texts is in the log, and each exactly once."""

    def counts() -> list[int]:
        contents = "\n".join(daemon.said())
        return [contents.count(text) for text in texts]

    wait_until(lambda: min(counts()) > 0, lambda: f"stored so often: {counts()}")
    assert counts() == [1] * len(texts)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_typescript_client_is_remembered(typescript: TypeScriptClient, daemon: DaemonProcess, name: str) -> None:
    script, how = CLIENTS[name]
    url = f"{daemon.base_url}/v1"
    memories: list[dict[str, Any]] = [{}, {"memory_in": {"topic_id": "lighthouse"}}]
    for memory in memories:
        [told] = typescript.run(script, url, {"question": FACT, **how, **memory})["steps"]
        assert told["reply"] == "".join(REPLY) and told["memory_status"] in (None, "none")
        [told] = typescript.run(script, url, {"question": QUESTION, **how, **memory})["steps"]
        assert told["reply"] == "".join(REPLY_WITH_MEMORY)
        assert told["memory_status"] in (None, "injected")  # some helpers hide the headers
        if not memory:
            assert told["memory_out"] == []
            continue
        [memory_out] = told["memory_out"]  # once, also in a stream
        [chunk] = memory_out["injected_chunks"]
        wait_until(lambda: sum("cinnamon-42" in one for one in daemon.said()) == len(memories), lambda: "both topics")
        [stored] = [entry for entry in daemon.export() if entry["id"] == chunk["id"]]
        assert "cinnamon-42" in stored["content"]


@pytest.mark.parametrize("name", LOOPS)
def test_a_typescript_client_s_tool_loop_is_stored_once(
    typescript: TypeScriptClient, make_daemon: MakeDaemon, calling_llama: str, name: str
) -> None:
    script, how = LOOPS[name]
    daemon = make_daemon(calling_llama).start()
    url = f"{daemon.base_url}/v1"
    asked = {"question": QUESTION, **how, "results": list(RESULTS), "memory_in": {}}
    steps = typescript.run(script, url, asked)["steps"]
    assert [step["reply"] for step in steps] == ["", "", "", "".join(REPLY_AFTER_CALLS)]
    assert [len(step["memory_out"]) for step in steps] == [1] * 4
    daemon.chat([{"role": "user", "content": "Good morning."}])
    stored_once(daemon, QUESTION, "tool: Line 1.", "tool: Line 2.", "tool: Line 3.", "".join(REPLY_AFTER_CALLS))


class Python:
    """The official client in Python, asked in one of two or three ways; what it heard of memory."""

    def __init__(self, daemon: DaemonProcess, how: str) -> None:
        from openai import OpenAI  # here, for it takes seconds

        self.client = OpenAI(base_url=f"{daemon.base_url}/v1", api_key="not needed", max_retries=0)
        self.how = how
        self.memory_out: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def note(self, answered: Any) -> None:
        """Keep the `memory_out` of an answer or event."""
        out = (answered.model_extra or {}).get("memory_out")
        if out is not None:
            self.memory_out.append(out)


class Completions(Python):
    """Its chat completions."""

    def complete(self, messages: list[Any], **more: Any) -> ChatCompletionMessage:
        params: dict[str, Any] = {"model": "tiny", "messages": messages, "extra_body": {"memory_in": {}}, **more}
        if self.how == "create":
            completion = self.client.chat.completions.create(**params)
            self.note(completion)
            message: ChatCompletionMessage = completion.choices[0].message
            return message
        with self.client.chat.completions.stream(**params) as stream:
            for event in stream:
                if event.type == "chunk":
                    self.note(event.chunk)
            return stream.get_final_completion().choices[0].message

    def loop(self, question: str) -> Iterator[str]:
        """What the model says at each step of a tool loop."""
        messages: list[Any] = [{"role": "user", "content": question}]
        results = iter(RESULTS)
        calls: list[Any] | None = [None]
        while calls:
            message = self.complete(messages, tools=[READ])
            yield message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            calls = message.tool_calls
            called = [call.id for call in calls or ()]
            messages += [{"role": "tool", "tool_call_id": name, "content": next(results)} for name in called]


@pytest.mark.parametrize("how", ["create", "stream"])
def test_the_python_client_is_remembered(daemon: DaemonProcess, how: str) -> None:
    with Completions(daemon, how) as client:
        assert client.complete([{"role": "user", "content": FACT}]).content == "".join(REPLY)
        assert client.complete([{"role": "user", "content": QUESTION}]).content == "".join(REPLY_WITH_MEMORY)
    assert [len(out["injected_chunks"]) for out in client.memory_out] == [0, 1]


@pytest.mark.parametrize("how", ["create", "stream"])
def test_the_python_client_s_tool_loop_is_stored_once(make_daemon: MakeDaemon, calling_llama: str, how: str) -> None:
    daemon = make_daemon(calling_llama).start()
    with Completions(daemon, how) as client:
        assert list(client.loop(QUESTION)) == ["", "", "", "".join(REPLY_AFTER_CALLS)]
        assert len(client.memory_out) == 4
        client.complete([{"role": "user", "content": "Good morning."}])
    stored_once(daemon, QUESTION, "tool: Line 1.", "tool: Line 2.", "tool: Line 3.", "".join(REPLY_AFTER_CALLS))


# The official openai package in TypeScript: the base URL is changed, and nothing else has to be


def test_the_typescript_client_type_checks_strictly(typescript: TypeScriptClient) -> None:
    typescript.check_types()


@pytest.mark.parametrize("stream", [False, True], ids=["create", "stream"])
def test_openai_in_typescript_sends_memory_in_and_reads_memory_out(
    typescript: TypeScriptClient, daemon: DaemonProcess, stream: bool
) -> None:
    def ask(question: str, **memory_in: Any) -> dict[str, Any]:
        memory_in["topic_id"] = "lighthouse"
        return typescript.chat(f"{daemon.base_url}/v1", question, stream=stream, memory_in=memory_in)

    assert ask(FACT)["memory_out"] == [{"injected_chunks": []}]
    daemon.wait_stored("cinnamon-42")
    told = ask(QUESTION)
    assert told["reply"] == "".join(REPLY_WITH_MEMORY)
    [memory_out] = told["memory_out"]  # once, also in a stream
    [chunk] = memory_out["injected_chunks"]
    [stored] = [entry for entry in daemon.export() if entry["id"] == chunk["id"]]
    assert "cinnamon-42" in stored["content"]
    assert chunk == {"id": stored["id"], "topic_id": "lighthouse", "canonical_id": stored["origin_id"]}
    forget = {"chunk_ids": [chunk["id"], "ffffffff"], "action": "Update", "reason": "no longer true"}
    [memory_out] = ask("Forget the release word.", corrections=[forget])["memory_out"]
    assert {"type": "correction_failed", "chunk_id": "ffffffff"} in memory_out["signals"]
    assert chunk["id"] not in {entry["id"] for entry in daemon.export() if entry["live"]}
