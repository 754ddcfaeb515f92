"""Ollama's `/api/chat` as its server reads and answers it, with a scripted model: there is no Ollama in the registries.

Rule: it is stricter than Ollama. A request is decoded into the types of its api/types.go, so a value of another type is
refused as Go's decoder does; and where Ollama drops the beginning of a prompt that is too long, this one says 400.
"""

import json
from itertools import takewhile
from typing import Any, Literal

import msgspec
from conftest import ANSWERED_MARKER, MEMORY_MARKER, REPLY, REPLY_AFTER_CALLS, REPLY_WITH_MEMORY
from recording_upstream import Request, Response

CHARACTERS_PER_TOKEN = 4
COMMON = {"model": "tiny", "created_at": "2026-11-20T09:00:00.123456Z"}


class Function(msgspec.Struct):
    name: str
    arguments: dict[str, Any]
    index: int = 0


class Call(msgspec.Struct):
    function: Function
    id: str = ""


class Message(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = ""
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str = ""
    tool_call_id: str = ""


class Options(msgspec.Struct):
    num_ctx: int = 4096
    num_predict: int = -1


class Chat(msgspec.Struct):
    model: str
    messages: list[Message]
    stream: bool | None = None
    tools: list[Any] | None = None
    options: Options = msgspec.field(default_factory=Options)


def ollama_answer(request: Request) -> Response:
    """Answer: where there are tools a call of `read`, until a result of the turn has `[done]`; else a reply."""
    if request.target != "/api/chat":
        return Response((b"404 page not found",), 404, (("Content-Type", "text/plain"),))
    try:
        asked = msgspec.json.decode(request.body, type=Chat)
    except msgspec.ValidationError as error:
        return _refused(f"json: cannot unmarshal: {error}")
    said = "\n".join(one.content for one in asked.messages)
    tokens = len(said) // CHARACTERS_PER_TOKEN
    if tokens > asked.options.num_ctx:
        return _refused(f"the prompt has {tokens} tokens, num_ctx is {asked.options.num_ctx}")
    last = asked.messages[-1]
    turn = takewhile(lambda one: one.role != "user", reversed(asked.messages))
    if asked.tools and not any(ANSWERED_MARKER in one.content for one in turn):
        calls = [{"id": "call_1", "function": {"index": 0, "name": "read", "arguments": {"path": "log", "lines": 3}}}]
        pieces: list[dict[str, Any]] = [
            {"content": "", "thinking": "The log has it."},
            {"content": "", "tool_calls": calls},
        ]
    elif last.role == "tool":
        pieces = [{"content": piece} for piece in REPLY_AFTER_CALLS]
    else:
        pieces = [{"content": piece} for piece in (REPLY_WITH_MEMORY if MEMORY_MARKER in said else REPLY)]
    end = {"done": True, "done_reason": "stop", "prompt_eval_count": tokens, "eval_count": len(pieces)}
    if asked.stream is False:
        whole: dict[str, Any] = {"role": "assistant"}
        for piece in pieces:
            whole |= piece | {"content": whole.get("content", "") + piece["content"]}
        return Response((_line({"message": whole} | end),))
    lines = [_line({"message": {"role": "assistant"} | piece, "done": False}) for piece in pieces]
    lines.append(_line({"message": {"role": "assistant", "content": ""}} | end))
    return Response(tuple(lines), headers=(("Content-Type", "application/x-ndjson"),))


def _refused(why: str) -> Response:
    return Response((json.dumps({"error": why}).encode(),), 400)


def _line(members: dict[str, Any]) -> bytes:
    return json.dumps(COMMON | members, separators=(",", ":")).encode() + b"\n"
