"""A stand-in for OpenAI's own responses API: the events complete, as its clients check them.

Rule: llama.cpp leaves `output_index` and `sequence_number` out of its events, on which the streaming helpers of the
official clients and the AI SDK stumble without memd as well; so those are tried on this.
"""

import json
from collections.abc import Iterator
from typing import Any

from conftest import MEMORY_MARKER, REPLY, REPLY_WITH_MEMORY
from recording_upstream import EVENT_STREAM, Request, Response

TOOL = {
    "type": "function",
    "name": "read",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    "strict": False,
}
TOOL_ARGUMENTS = '{"path": "log"}'
"""How the scripted model of `calling_llama` calls it, and this stand-in."""
CALLS = 3
"""How often the tool is called before there is an answer."""

HEAD = {"object": "response", "created_at": 1, "model": "tiny", "error": None, "incomplete_details": None}
ASKED = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}, "instructions": None}
USAGE = {
    "input_tokens": 22,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 27,
}


def answer(request: Request) -> Response:
    """A call of the tool if there is one, `CALLS` times; then a text that tells whether memory was in the input."""
    body = json.loads(request.body)
    given = body["input"] if isinstance(body["input"], list) else []
    done = sum(item.get("type") == "function_call_output" for item in given)
    if body.get("tools") and done < CALLS:
        item = _call(done)
    else:
        item = _message(REPLY_WITH_MEMORY if MEMORY_MARKER in request.body.decode() else REPLY)
    if not body.get("stream"):
        return Response((json.dumps(_response([item])).encode(),))
    events = [{**event, "sequence_number": number} for number, event in enumerate(_events(item))]
    parts = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]
    return Response(tuple(parts), headers=EVENT_STREAM)


def _response(output: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    return {"id": "resp_1", "status": status, "output": output, "usage": USAGE if output else None, **HEAD, **ASKED}


def _message(words: tuple[str, ...]) -> dict[str, Any]:
    part = {"type": "output_text", "text": "".join(words), "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}


def _call(number: int) -> dict[str, Any]:
    ids = {"id": f"fc_{number}", "call_id": f"call_{number}"}
    return {"type": "function_call", "status": "completed", "name": "read", "arguments": TOOL_ARGUMENTS, **ids}


def _events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in ("created", "in_progress"):
        yield {"type": f"response.{kind}", "response": _response([], "in_progress")}
    where = {"output_index": 0, "item_id": item["id"]}
    content: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    opened = {**item, **content, "status": "in_progress"}
    yield {"type": "response.output_item.added", "item": opened, "output_index": 0}
    if item["type"] == "function_call":
        for piece in (TOOL_ARGUMENTS[:4], TOOL_ARGUMENTS[4:]):
            yield {"type": "response.function_call_arguments.delta", "delta": piece, **where}
        yield {"type": "response.function_call_arguments.done", "arguments": TOOL_ARGUMENTS, "name": "read", **where}
    else:
        [part] = item["content"]
        where["content_index"] = 0
        yield {"type": "response.content_part.added", "part": {**part, "text": ""}, **where}
        for word in part["text"].split():
            yield {"type": "response.output_text.delta", "delta": word, "logprobs": [], **where}
        yield {"type": "response.output_text.done", "text": part["text"], "logprobs": [], **where}
        yield {"type": "response.content_part.done", "part": part, **where}
    yield {"type": "response.output_item.done", "item": item, "output_index": 0}
    yield {"type": "response.completed", "response": _response([item])}
