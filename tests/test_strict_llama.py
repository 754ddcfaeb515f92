"""The strict model server, by which others are judged: it sees what strict templates refuse, and nothing else."""

from __future__ import annotations

import json

import pytest
from recording_upstream import Request
from strict_llama import Json, StrictLlama, chat_messages, problems

CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "read"}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "done"}
USER, ASSISTANT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([SYSTEM, USER, ASSISTANT, USER], []),
        ([SYSTEM, USER, CALLS, RESULT, CALLS, RESULT, ASSISTANT, USER], []),
        ([USER, CALLS, RESULT], []),
        ([USER, USER], ["roles must alternate: user after user"]),
        ([USER, CALLS, RESULT, USER], ["roles must alternate: user after tool"]),
        ([ASSISTANT, USER], ["the conversation begins with assistant"]),
        ([USER, SYSTEM, ASSISTANT], ["a system message that is not the first"]),
        ([USER, CALLS, ASSISTANT], ["a call without its result", "roles must alternate: assistant after assistant"]),
        ([USER, CALLS], ["a call without its result"]),
        ([USER, CALLS, RESULT, RESULT], ["a result without its call"]),
        ([USER, RESULT, ASSISTANT], ["a result without its call"]),
    ],
)
def test_it_finds_what_a_strict_template_refuses(messages: list[Json], found: list[str]) -> None:
    assert problems(messages) == found


def test_anthropics_blocks_become_calls_and_results() -> None:
    use = {"type": "tool_use", "id": "1", "name": "read", "input": {"path": "log"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "done"}]}
    said = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    messages = chat_messages({"system": "be brief", "messages": said})
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert problems(messages) == []


def test_beyond_its_window_it_refuses_with_n_ctx() -> None:
    model = StrictLlama(100)
    body = json.dumps({"messages": [{"role": "user", "content": "far too long " * 100}]}).encode()
    answer = model(Request("POST", "/v1/chat/completions", [], body))
    assert (answer.status, json.loads(answer.parts[0])["error"]["n_ctx"]) == (400, 100)
    assert [prompt.is_beyond for prompt in model.prompts] == [True]
