"""The official `anthropic` Python package: one question, and tools called until the model asks for no more.

Rule: as `clients/anthropic.ts` does it, so that one test says what both have to see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anthropic import Anthropic
    from anthropic.types import Message, MessageParam, ToolParam, ToolResultBlockParam

TOKENS_MAX = 100


def ask_anthropic(
    base_url: str,
    question: str,
    *,
    how: str,
    memory_in: object = None,
    tools: list[ToolParam] | None = None,
    results: list[str] | None = None,
) -> dict[str, Any]:
    """What came back at each step, and the messages that were sent.

    Args:
        how: `create` (one answer) or `helper` (a stream that the client puts together).
    """
    from anthropic import Anthropic  # here, for it takes seconds

    messages: list[MessageParam] = [{"role": "user", "content": question}]
    said = iter(results or [])
    steps: list[dict[str, Any]] = []
    with Anthropic(base_url=base_url, api_key="not needed", max_retries=0) as client:
        while True:
            step: dict[str, Any] = {"events": [], "memory_out": []}
            extra = {} if memory_in is None else {"memory_in": memory_in}
            asking = _create if how == "create" else _helper
            answer = asking(client, step, messages, tools or [], extra)
            step["reply"] = "".join(block.text for block in answer.content if block.type == "text")
            step["stop_reason"] = answer.stop_reason
            steps.append(step)
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return {"steps": steps, "messages": messages}
            blocks: list[ToolResultBlockParam] = [
                {"type": "tool_result", "tool_use_id": call.id, "content": next(said)} for call in calls
            ]
            messages.append({"role": "user", "content": blocks})


def _create(
    client: Anthropic, step: dict[str, Any], messages: list[MessageParam], tools: list[ToolParam], extra: Any
) -> Message:
    raw = client.messages.with_raw_response.create(
        model="tiny", max_tokens=TOKENS_MAX, messages=messages, tools=tools, extra_body=extra
    )
    step["memory_status"] = raw.headers["X-Memory-Status"]
    answer = raw.parse()
    _note_memory_out(step, answer)
    return answer


def _helper(
    client: Anthropic, step: dict[str, Any], messages: list[MessageParam], tools: list[ToolParam], extra: Any
) -> Message:
    with client.messages.stream(
        model="tiny", max_tokens=TOKENS_MAX, messages=messages, tools=tools, extra_body=extra
    ) as stream:
        step["memory_status"] = stream.response.headers["X-Memory-Status"]
        for event in stream:
            step["events"].append(event.type)
            _note_memory_out(step, event)
        return stream.get_final_message()


def _note_memory_out(step: dict[str, Any], answer: Any) -> None:
    memory_out = (answer.model_extra or {}).get("memory_out")
    if memory_out is not None:
        step["memory_out"].append(memory_out)
