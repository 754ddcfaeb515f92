"""Real clients of the responses API with nothing changed but the base URL: on llama.cpp, and on OpenAI's events.

Rule: what a client cannot do on llama.cpp without memd (see `openai_responses.py`) is tried on the stand-in alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import openai_responses
import pytest
from conftest import REPLY, REPLY_AFTER_CALLS, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import DaemonProcess
from recording_upstream import RecordingUpstream
from test_chat_clients import FACT, QUESTION, RESULTS, Python
from typescript_client import TypeScriptClient

if TYPE_CHECKING:
    from openai.types.responses import Response

TOOLS: list[Any] = [openai_responses.TOOL]
OTHER_RESULTS = [result.replace("Line", "Row") for result in RESULTS]  # the same ones, said again, are stored again
ON_LLAMA = [("responses.ts", "create"), ("responses.ts", "stream"), ("ai_sdk.ts", "create")]
ON_OPENAI = [*ON_LLAMA, ("responses.ts", "helper"), ("ai_sdk.ts", "stream")]


@pytest.fixture
def conforming(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    """A daemon in front of the stand-in for OpenAI."""
    upstream.answer = openai_responses.answer
    return make_daemon(upstream.url).start()


def asked(script: str, question: str, how: str, **more: Any) -> dict[str, Any]:
    if "results" in more and script == "responses.ts":
        more["tools"] = TOOLS
    return {"question": question, "how": how, **more}


def check_recall(typescript: TypeScriptClient, daemon: DaemonProcess, script: str, how: str) -> None:
    """A fact is told and recalled, first by a client that knows nothing of memd, then with MemoryIn and MemoryOut."""
    url = f"{daemon.base_url}/v1"
    memories: list[dict[str, Any]] = [{}, {"memory_in": {"topic_id": "lighthouse"}}]
    for memory in memories:
        [told] = typescript.run(script, url, asked(script, FACT, how, **memory))["steps"]
        assert told["reply"].replace(" ", "") == "".join(REPLY).replace(" ", "")
        [told] = typescript.run(script, url, asked(script, QUESTION, how, **memory))["steps"]
        assert told["reply"].replace(" ", "") == "".join(REPLY_WITH_MEMORY).replace(" ", "")
        if how != "helper":  # which gives no access to the headers
            assert told["memory_status"] == "injected"
        if not memory:
            assert told["memory_out"] == []
            continue
        [memory_out] = told["memory_out"]  # once, also in a stream
        [chunk] = memory_out["injected_chunks"]
        [stored] = [entry for entry in daemon.export() if entry["id"] == chunk["id"]]
        assert "cinnamon-42" in stored["content"]


def check_tool_loop(typescript: TypeScriptClient, daemon: DaemonProcess, script: str, how: str) -> list[Any]:
    """A loop of three calls, with memory: each step shows the same. Returns the steps."""
    url = f"{daemon.base_url}/v1"
    memory: dict[str, Any] = {"memory_in": {}}
    typescript.run(script, url, asked(script, FACT, how, results=list(RESULTS), **memory))
    told = typescript.run(script, url, asked(script, QUESTION, how, results=list(OTHER_RESULTS), **memory))
    steps = told["steps"]
    assert isinstance(steps, list) and len(steps) == 4
    assert [len(one["memory_out"]) for one in steps] == [1] * 4
    assert len({json.dumps(one["memory_out"]) for one in steps}) == 1
    typescript.run(script, url, asked(script, "Good morning.", how))  # opens another conversation: this one is stored
    contents = daemon.said()
    assert len(contents) == len(set(contents))
    assert sum(content.startswith(f"user: {QUESTION}") for content in contents) == 1
    return steps


@pytest.mark.parametrize(("script", "how"), ON_LLAMA)
def test_a_typescript_client_on_llama_is_remembered(
    typescript: TypeScriptClient, daemon: DaemonProcess, script: str, how: str
) -> None:
    check_recall(typescript, daemon, script, how)


@pytest.mark.parametrize(("script", "how"), ON_OPENAI)
def test_a_typescript_client_on_openai_s_events_is_remembered(
    typescript: TypeScriptClient, conforming: DaemonProcess, script: str, how: str
) -> None:
    check_recall(typescript, conforming, script, how)


@pytest.mark.parametrize(("script", "how"), ON_OPENAI)
def test_a_typescript_client_s_tool_loop_keeps_its_memory(
    typescript: TypeScriptClient, conforming: DaemonProcess, script: str, how: str
) -> None:
    steps = check_tool_loop(typescript, conforming, script, how)
    assert steps[0]["memory_out"][0]["injected_chunks"] != []


@pytest.mark.parametrize(("script", "how"), ON_LLAMA)
def test_a_typescript_client_s_tool_loop_comes_to_its_end_on_llama(
    typescript: TypeScriptClient, make_daemon: MakeDaemon, calling_llama: str, script: str, how: str
) -> None:
    url = f"{make_daemon(calling_llama).start().base_url}/v1"
    steps = typescript.run(script, url, asked(script, QUESTION, how, results=list(RESULTS)))["steps"]
    assert [step["reply"] for step in steps] == ["", "", "", "".join(REPLY_AFTER_CALLS)]


class Responses(Python):
    """The official client's responses."""

    def respond(self, given: Any, **more: Any) -> Response:
        params: dict[str, Any] = {"model": "tiny", "input": given, **more}
        if self.how == "create":
            response: Response = self.client.responses.create(**params)
            self.note(response)
            return response
        if self.how == "stream":
            for event in self.client.responses.create(**params, stream=True):
                self.note(event)
            assert event.type == "response.completed"
            return event.response  # type: ignore[no-any-return]  # the parameters are not typed, so neither is this
        with self.client.responses.stream(**params) as stream:
            for event in stream:
                self.note(event)
            return stream.get_final_response()

    def loop(self, question: str, told: Sequence[str] = RESULTS, **more: Any) -> Iterator[Response]:
        """The steps of a tool loop with these results."""
        given: list[Any] = [{"role": "user", "content": question}]
        results = iter(told)
        calls: list[Any] = [None]
        while calls:
            response = self.respond(given, tools=TOOLS, **more)
            yield response
            given += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                output = {"type": "function_call_output", "call_id": call.call_id, "output": next(results)}
                given.append(output)


MEMORY: dict[str, Any] = {"extra_body": {"memory_in": {"topic_id": "lighthouse"}}}


@pytest.mark.parametrize("how", ["create", "stream"])
def test_the_python_client_on_llama_is_remembered(daemon: DaemonProcess, how: str) -> None:
    with Responses(daemon, how) as client:
        assert client.respond(FACT, **MEMORY).output_text == "".join(REPLY)
        assert client.respond(QUESTION, **MEMORY).output_text == "".join(REPLY_WITH_MEMORY)
    assert [len(out["injected_chunks"]) for out in client.memory_out] == [0, 1]


@pytest.mark.parametrize("how", ["create", "stream", "helper"])
def test_the_python_client_s_tool_loop_keeps_its_memory(conforming: DaemonProcess, how: str) -> None:
    with Responses(conforming, how) as client:
        list(client.loop(FACT, **MEMORY))
        client.memory_out.clear()
        steps = list(client.loop(QUESTION, OTHER_RESULTS, **MEMORY))
        shown = list(client.memory_out)
        client.respond("Good morning.", **MEMORY)  # opens another conversation: the loop is stored
    assert [step.output_text for step in steps] == ["", "", "", "".join(REPLY_WITH_MEMORY)]
    if how != "helper":  # which makes an event of its own out of the last one, without what it does not know
        assert len(shown) == 4 and len({json.dumps(out) for out in shown}) == 1
        assert shown[0]["injected_chunks"] != []
    contents = conforming.said()
    assert len(contents) == len(set(contents))
    assert sum(content.startswith(f"user: {QUESTION}") for content in contents) == 1


@pytest.mark.parametrize("how", ["create", "stream"])
def test_the_python_client_s_tool_loop_comes_to_its_end_on_llama(
    make_daemon: MakeDaemon, calling_llama: str, how: str
) -> None:
    with Responses(make_daemon(calling_llama).start(), how) as client:
        steps = list(client.loop(QUESTION))
    assert [step.output_text for step in steps] == ["", "", "", "".join(REPLY_AFTER_CALLS)]
