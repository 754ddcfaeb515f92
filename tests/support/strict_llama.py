"""A model server that is stricter than llama.cpp: the `answer` of a `RecordingUpstream`.

Rule: it refuses what the strictest real server refuses, and keeps every prompt that it was offered. Beyond its window
it says 400 as llama-server does (`exceed_context_size_error` with `n_ctx`); it wants user and assistant in turns, as
the templates of Mistral and Gemma do, a result for every call and a call for every result. What a client itself sends
so is let through: `allowed`. Its tokens are cl100k_base's times `TOKENS_PER_RAW`, so that memd has something to learn,
unless it has another `count`. How it tells its window, and in whose words it refuses, is what other servers do.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from recording_upstream import EVENT_STREAM, Request, Response, answered

from memd import assets
from memd.conversation.tokens import cl100k_base

TOKENS_PER_RAW = 1.12
MESSAGE_TOKENS = 4
REPLY_HEADER = "X-Strict-Reply"
"""The name of the scripted reply that a request is to get; memd passes it on."""
KEY = "sk-strict"

Json = dict[str, Any]
Count = Callable[[Sequence[str]], int]
Told = Literal["props", "key", "router", "ollama", "vllm", "lmstudio", "openrouter", "silent"]
"""How the server tells its window: as llama-server; with `--api-key`; as its router; as the others do; not at all."""
Words = Literal["llama.cpp", "openai", "vllm", "vllm images", "uncounted", "silent"]
"""Whose words refuse a prompt: `uncounted` does not say what the prompt takes, `silent` names no number."""


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
    words: Words | None = None
    """Of its refusals; None: those of the server that it plays."""
    refuses_with_200: bool = False
    """Whether a refusal is an error in the place of the reply, in a stream as its first event."""
    image_tokens: int = 0
    """What each image takes, whatever its size."""
    count: Count = field(default_factory=lambda: tokens_of)
    """The tokens of rendered parts."""
    replies: dict[str, Json] = field(default_factory=dict)
    """Scripted assistant messages by the name in `REPLY_HEADER`; everything else is answered with "Noted."."""
    allowed: dict[str, frozenset[str]] = field(default_factory=dict)
    """By the same name: the problems that the client's own messages have."""
    prompts: list[Prompt] = field(default_factory=list)

    @property
    def taken(self) -> list[Prompt]:
        """The prompts that it answered."""
        return [prompt for prompt in self.prompts if prompt.reply]

    @property
    def refused(self) -> list[Prompt]:
        """The others."""
        return [prompt for prompt in self.prompts if not prompt.reply]

    def __call__(self, request: Request) -> Response:
        """Any request."""
        path = request.target.partition("?")[0]
        if self.told == "key" and request.header("Authorization") != f"Bearer {KEY}":
            return _json({"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}, 401)
        if path.endswith(("/chat/completions", "/v1/messages", "/v1/responses")):
            return self._answer(request, path)
        if path.endswith(("/input_tokens", "/count_tokens")) and self.told in ("props", "key", "router"):
            return _json({"input_tokens": self._tokens_of(json.loads(request.body))})
        tellings = _tellings(self.tells or self.window)
        told = tellings.get((self.told, request.target)) or tellings.get((self.told, path))
        return _json({"error": {"code": 404, "message": "File Not Found"}}, 404) if told is None else _json(told)

    def _answer(self, request: Request, path: str) -> Response:
        body = json.loads(request.body)
        name = request.header(REPLY_HEADER)
        parts = rendered(body)
        tokens = self._tokens_of(body)
        found = problems(chat_messages(body))
        bad = tuple(one for one in found if one not in self.allowed.get(name or "", ()))
        is_beyond = tokens > self.window
        too_much = is_beyond or (self.counts_reply and tokens + int(body.get("max_tokens") or 0) > self.window)
        refused = too_much or (self.insists and bool(bad))
        reply = {} if refused else self.replies.get(name or "", {"role": "assistant", "content": "Noted."})
        self.prompts.append(Prompt(tuple(chat_messages(body)), parts, tokens, bad, is_beyond, reply, name))
        if too_much:
            error = self._too_long(tokens, int(body.get("max_tokens") or 0))
            if self.refuses_with_200 and body.get("stream"):
                return Response((b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n",), headers=EVENT_STREAM)
            return _json(error, 200 if self.refuses_with_200 else 400)
        if refused:
            error = {"code": 400, "message": f"Jinja Exception: {bad[0]}", "type": "invalid_request_error"}
            return _json({"error": error}, 400)
        replied = self.count((_rendered(reply),))
        usage = {"prompt_tokens": tokens, "completion_tokens": replied, "total_tokens": tokens + replied}
        if path.endswith("/v1/messages"):
            return _json(_anthropic_answer(reply, usage))
        if path.endswith("/v1/responses"):
            said = {"type": "output_text", "text": reply["content"], "annotations": []}
            return _json(
                {"object": "response", "output": [{"type": "message", "role": "assistant", "content": [said]}]}
            )
        return answered(reply, stream=bool(body.get("stream")), usage=usage)

    def _tokens_of(self, body: Json) -> int:
        contents = (message.get("content") for message in body.get("messages", ()))
        parts = [part for content in contents if isinstance(content, list) for part in content]
        images = sum(part.get("type") == "image_url" for part in parts)
        tokens: int = self.count(rendered(body)) + images * self.image_tokens
        return tokens

    def _too_long(self, tokens: int, reply: int) -> Json:
        """The refusal, in the words of the server that it plays."""
        words, window = (
            self.words or ("llama.cpp" if self.told in ("props", "key", "router") else "openai"),
            self.window,
        )
        if words == "silent":
            return {"error": "Your input exceeds the context window of this model."}
        if words == "uncounted":
            return {"error": f"tokens are greater than the context length (n_keep: 1 >= n_ctx: {window})."}
        if words == "llama.cpp":
            said = f"request ({tokens} tokens) exceeds the available context size ({window} tokens)"
            told = {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": window}
            return {"error": {"code": 400, "message": said, **told}}
        said = f"This model's maximum context length is {window} tokens"
        if words == "openai":
            said += f". However, you requested {tokens + reply} tokens "
            said += f"({tokens} in the messages, {reply} in the completion)."
            return {"error": {"message": said, "type": "invalid_request_error", "code": "context_length_exceeded"}}
        said += f" and your request has {tokens} input tokens"
        if words == "vllm images":
            said = f"The decoder prompt (length {tokens}) is longer than the maximum model length of {window}."
        elif tokens <= window:
            said = f"'max_tokens' or 'max_completion_tokens' is too large: {reply}. {said}"
        return {"error": {"message": said, "type": "BadRequestError", "param": None, "code": 400}}


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
    if standing := body.get("system") or body.get("instructions"):
        messages.append({"role": "system", "content": _text(standing)})
    for message in body.get("messages") or body.get("input") or []:
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
        ("router", "/props?model=recorded&autoload=false"): props,
        ("router", "/v1/models"): {"data": [{**one, "owned_by": "llamacpp", "context_length": 131_072}]},
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
