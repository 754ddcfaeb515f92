"""A model server that is stricter than llama.cpp: the `answer` of a `RecordingUpstream`.

Rule: it refuses what the strictest real server refuses, and keeps every prompt that it was offered. Beyond its window
it says 400 as llama-server does (`exceed_context_size_error` with `n_ctx`); it wants user and assistant in turns, as
the templates of Mistral and Gemma do, a result for every call and a call for every result. What a client itself sends
so is let through: `allowed`. Its tokens are cl100k_base's times `TOKENS_PER_RAW`, so that memd has something to learn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from recording_upstream import COMMON, Request, Response

from memd import assets
from memd.conversation.tokens import cl100k_base

TOKENS_PER_RAW = 1.12
MESSAGE_TOKENS = 4
REPLY_HEADER = "X-Strict-Reply"
"""The name of the scripted reply that a request is to get; memd passes it on."""
KEY = "sk-strict"

Json = dict[str, Any]
Told = Literal["props", "key", "router", "ollama", "vllm", "lmstudio", "openrouter", "silent"]
"""How the server tells its window: as llama-server; with `--api-key`; as its router; as the others do; not at all."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as it came, in the chat API's form whatever the API was."""

    messages: tuple[Json, ...]
    parts: tuple[str, ...]
    """The tools and each message, rendered; equal parts at the beginning of two prompts are read once."""
    tokens: int
    problems: tuple[str, ...]
    is_beyond: bool
    reply: Json
    """What was answered, in the chat API's form; empty if it was refused."""
    name: str | None
    """The request's `REPLY_HEADER`."""

    @property
    def text(self) -> str:
        """Everything that the model reads."""
        return "\n".join(self.parts)


@dataclass
class StrictLlama:
    """The server's state; set `upstream.answer` to it and `upstream.answers_all` to True."""

    window: int
    told: Told = "props"
    tells: int | None = None
    """The window that it tells, where that is not its own."""
    counts_reply: bool = False
    """Whether `max_tokens` counts against the window, as with vLLM."""
    insists: bool = True
    """Whether a prompt with problems is refused."""
    replies: dict[str, Json] = field(default_factory=dict)
    """Scripted assistant messages by the name in `REPLY_HEADER`; everything else is answered with "Noted."."""
    allowed: dict[str, frozenset[str]] = field(default_factory=dict)
    """By the same name: the problems that the client's own messages have."""
    prompts: list[Prompt] = field(default_factory=list)

    def __call__(self, request: Request) -> Response:
        """Any request."""
        path = request.target.partition("?")[0]
        if self.told == "key" and request.header("Authorization") != f"Bearer {KEY}":
            return _json({"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}, 401)
        if path.endswith(("/chat/completions", "/v1/messages")):
            return self._answer(request, path)
        if path.endswith(("/input_tokens", "/count_tokens")) and self.told in ("props", "key", "router"):
            return _json({"input_tokens": tokens_of(rendered(json.loads(request.body)))})
        tellings = _tellings(self.tells or self.window)
        told = tellings.get((self.told, request.target)) or tellings.get((self.told, path))
        return _json({"error": {"code": 404, "message": "File Not Found"}}, 404) if told is None else _json(told)

    def _answer(self, request: Request, path: str) -> Response:
        body = json.loads(request.body)
        name = request.header(REPLY_HEADER)
        parts = rendered(body)
        tokens = tokens_of(parts)
        found = problems(chat_messages(body))
        bad = tuple(one for one in found if one not in self.allowed.get(name or "", ()))
        is_beyond = tokens > self.window
        too_much = is_beyond or (self.counts_reply and tokens + int(body.get("max_tokens") or 0) > self.window)
        refused = too_much or (self.insists and bool(bad))
        reply = {} if refused else self.replies.get(name or "", {"role": "assistant", "content": "Noted."})
        self.prompts.append(Prompt(tuple(chat_messages(body)), parts, tokens, bad, is_beyond, reply, name))
        if too_much:
            return self._too_long(tokens, int(body.get("max_tokens") or 0))
        if refused:
            error = {"code": 400, "message": f"Jinja Exception: {bad[0]}", "type": "invalid_request_error"}
            return _json({"error": error}, 400)
        replied = tokens_of((_rendered(reply),))
        usage = {"prompt_tokens": tokens, "completion_tokens": replied, "total_tokens": tokens + replied}
        if path.endswith("/v1/messages"):
            return _json(_anthropic_answer(reply, usage))
        return _streamed(reply, usage) if body.get("stream") else _json(_completion(reply, usage))

    def _too_long(self, tokens: int, reply_tokens: int) -> Response:
        """The refusal, in the words of the server that it plays."""
        if self.told in ("props", "key", "router"):
            said = f"request ({tokens} tokens) exceeds the available context size ({self.window} tokens)"
            error: Json = {"code": 400, "message": said, "type": "exceed_context_size_error"}
            return _json({"error": {**error, "n_prompt_tokens": tokens, "n_ctx": self.window}}, 400)
        said = f"This model's maximum context length is {self.window} tokens. However, you requested "
        said += f"{tokens + reply_tokens} tokens ({tokens} in the messages, {reply_tokens} in the completion)."
        return _json(
            {"error": {"message": said, "type": "invalid_request_error", "code": "context_length_exceeded"}}, 400
        )


def problems(messages: Sequence[Json]) -> list[str]:
    """Whatever a strict chat template raises at, in order of appearance; empty for a valid prompt."""
    found: list[str] = []
    waiting: list[str] = []
    before = ""
    turns = [message for message in messages if message["role"] not in ("system", "developer")]
    leading = next((n for n, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    if len(turns) != len(messages) - leading:
        found.append("a system message that is not the first")
    for message in turns:
        role = message["role"]
        if role == "tool":
            if message.get("tool_call_id") not in waiting:
                found.append("a result without its call")
            else:
                waiting.remove(message["tool_call_id"])
        else:
            if waiting:
                found.append("a call without its result")
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
            if role == before or (role == "user" and before == "tool"):
                found.append(f"roles must alternate: {role} after {before}")
            if not before and role != "user":
                found.append(f"the conversation begins with {role}")
        before = role
    if waiting:
        found.append("a call without its result")
    return found


# -- rendering ------------------------------------------------------------------------------------------------------


def chat_messages(body: Json) -> list[Json]:
    """A request's messages in the chat API's form; Anthropic's content blocks as llama.cpp converts them."""
    messages: list[Json] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"])})
    for message in body.get("messages", []):
        content = message.get("content")
        blocks = content if isinstance(content, list) else []
        results = [block for block in blocks if block.get("type") == "tool_result"]
        calls = [block for block in blocks if block.get("type") == "tool_use"]
        messages += [
            {"role": "tool", "tool_call_id": one["tool_use_id"], "content": _text(one["content"])} for one in results
        ]
        said = {key: value for key, value in message.items() if key != "content"} | {"content": _text(content)}
        if calls:
            said["tool_calls"] = [_call(one["id"], one["name"], json.dumps(one["input"])) for one in calls]
        if not results or said["content"]:
            messages.append(said)
    return messages


def rendered(body: Json) -> tuple[str, ...]:
    """The tools and each message as a template writes them."""
    tools = json.dumps(body["tools"], ensure_ascii=False) if body.get("tools") else ""
    return (tools, *map(_rendered, chat_messages(body)))


def _rendered(message: Json) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    wanted = "".join(f"\n<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls)
    named = f" {message['name']}" if message.get("name") else ""
    return f"<|im_start|>{message['role']}{named}\n{_text(message.get('content'))}{wanted}<|im_end|>\n"


def tokens_of(parts: Sequence[str]) -> int:
    """The tokens of rendered parts."""
    return sum(int(_counted(part) * TOKENS_PER_RAW) + MESSAGE_TOKENS for part in parts if part)


@lru_cache(maxsize=1)
def _encoder() -> Callable[[str], list[int]]:
    return cl100k_base(assets.ranks_bytes()).encode_ordinary


@lru_cache(maxsize=50_000)
def _counted(text: str) -> int:
    return len(_encoder()(text))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(block["text"] for block in content if block.get("type") == "text")
    return content or ""


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# -- answers --------------------------------------------------------------------------------------------------------


def _json(value: object, status: int = 200) -> Response:
    return Response((json.dumps(value).encode(),), status)


def _completion(reply: Json, usage: Json) -> Json:
    finish = "tool_calls" if reply.get("tool_calls") else "stop"
    choice = {"index": 0, "message": reply, "finish_reason": finish}
    return {**COMMON, "object": "chat.completion", "choices": [choice], "usage": usage}


def _streamed(reply: Json, usage: Json) -> Response:
    deltas: list[Json] = [{"role": "assistant", "content": None}]
    deltas += [{"content": reply["content"]}] if reply.get("content") else []
    deltas += [{"tool_calls": [{**call, "index": at}]} for at, call in enumerate(reply.get("tool_calls") or ())]
    choices: list[Json] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls" if reply.get("tool_calls") else "stop"})
    events: list[Json] = [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}]
    lines = [{**COMMON, "object": "chat.completion.chunk", **event} for event in events]
    sent = b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines)
    return Response((sent, b"data: [DONE]\n\n"), headers=(("Content-Type", "text/event-stream"),))


def _anthropic_answer(reply: Json, usage: Json) -> Json:
    content: list[Json] = [{"type": "text", "text": reply["content"]}] if reply.get("content") else []
    for call in reply.get("tool_calls") or ():
        wanted = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": wanted})
    spent = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    stop = "tool_use" if reply.get("tool_calls") else "end_turn"
    head: Json = {"id": "msg_1", "type": "message", "role": "assistant", "model": "recorded"}
    return {**head, "content": content, "stop_reason": stop, "stop_sequence": None, "usage": spent}


@lru_cache(maxsize=16)
def _tellings(window: int) -> dict[tuple[Told, str], Json]:
    """What each kind of server says of its window, by the address that it says it at."""
    props: Json = {"default_generation_settings": {"n_ctx": window}, "model_alias": "recorded"}
    bare: Json = {"object": "list", "data": [{"id": "recorded", "object": "model", "owned_by": "library"}]}
    one = bare["data"][0]
    router = {"role": "router", "default_generation_settings": {"params": None, "n_ctx": 0}}
    tuned: Json = {"model_info": {"llama.context_length": 131_072}, "parameters": f"num_ctx {window}"}
    return {
        ("props", "/props"): props,
        ("key", "/props"): props,
        ("router", "/props"): router,
        ("router", "/props?model=recorded"): props,
        ("router", "/v1/models"): bare,
        ("ollama", "/v1/models"): bare,
        ("ollama", "/api/version"): {"version": "0.12.6"},
        ("ollama", "/api/ps"): {"models": [{"name": "recorded", "model": "recorded", "context_length": window}]},
        ("ollama", "/api/show"): tuned,
        ("vllm", "/v1/models"): {"object": "list", "data": [{**one, "owned_by": "vllm", "max_model_len": window}]},
        ("lmstudio", "/v1/models"): bare,
        ("lmstudio", "/api/v0/models"): {
            "object": "list",
            "data": [{**one, "state": "loaded", "max_context_length": 131_072, "loaded_context_length": window}],
        },
        ("openrouter", "/v1/models"): {"data": [{"id": "recorded", "context_length": window}]},
        ("silent", "/v1/models"): bare,
    }
