"""A model server that is stricter than real ones: nothing beyond its window, nothing without its key.

Rule: it answers in the shapes of the server that it stands for; what a real one answers otherwise is a mistake here.
Tokens are four characters each, and four for every message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from recording_upstream import Request, Response, chat_answer

NOT_FOUND = Response((b'{"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}',), status=404)

EVENT_STREAM = (("Content-Type", "text/event-stream"),)


class StrictServer:
    """Its `answer` goes to `recording_upstream`."""

    def __init__(
        self,
        window: int,
        *,
        tells: Mapping[str, Any] | None = None,
        key: str = "",
        counts_reply: bool = False,
        refusal: str = "llama.cpp",
        image_tokens: int = 0,
        refuses_with_200: bool = False,
    ) -> None:
        """
        Args:
            window: tokens.
            tells: by path and query what `GET` answers; everything else is a 404.
            key: what `Authorization: Bearer` has to show.
            counts_reply: prompt and `max_tokens` together have to fit.
            refusal: whose words it refuses a prompt with: `llama.cpp`, `vllm`, `vllm images`, `uncounted`, which does
                not say what the prompt takes, or `silent`, which names no number.
            image_tokens: what each image takes, whatever its size.
            refuses_with_200: a refusal is an error in the place of the reply, in a stream as its first event.
        """
        self.window = window
        self.tells = dict(tells or {})
        self._key = key
        self._counts_reply = counts_reply
        self._refusal = refusal
        self._image_tokens = image_tokens
        self._refuses_with_200 = refuses_with_200
        self.accepted: list[dict[str, Any]] = []
        """The bodies of the prompts that it took."""
        self.refused: list[dict[str, Any]] = []

    def answer(self, request: Request) -> Response:
        """Answer any request."""
        if self._key and request.header("Authorization") != f"Bearer {self._key}":
            error = {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
            return Response((json.dumps({"error": error}).encode(),), status=401)
        if request.method == "GET":
            told = self.tells.get(request.target)
            return NOT_FOUND if told is None else Response((json.dumps(told).encode(),))
        path = request.target.partition("?")[0]
        if path.endswith("/input_tokens") and "/props" in self.tells:
            return Response((json.dumps({"input_tokens": self.tokens_of(json.loads(request.body))}).encode(),))
        if not path.endswith(("/chat/completions", "/messages", "/responses")):
            return NOT_FOUND
        body = json.loads(request.body)
        tokens, reply = self.tokens_of(body), body.get("max_tokens") or body.get("max_output_tokens") or 0
        if tokens >= self.window or (self._counts_reply and tokens + reply > self.window):
            self.refused.append(body)
            refusal = json.dumps(self._error(tokens, reply)).encode()
            if self._refuses_with_200 and body.get("stream"):
                return Response((b"event: error\ndata: " + refusal + b"\n\n",), headers=EVENT_STREAM)
            return Response((refusal,), status=200 if self._refuses_with_200 else 400)
        self.accepted.append(body)
        if body.get("stream"):
            return chat_answer(request)
        reply_to_chat = json.loads(chat_answer(request).parts[0])
        usage = {"prompt_tokens": tokens, "completion_tokens": 4, "total_tokens": tokens + 4}
        return Response((json.dumps({**reply_to_chat, "usage": usage}).encode(),))

    def tokens_of(self, body: Mapping[str, Any]) -> int:
        """The tokens of a request, its images included."""
        parts = [
            part
            for message in body.get("messages") or ()
            if isinstance(message["content"], list)
            for part in message["content"]
        ]
        images = [part for part in parts if part["type"] == "image_url"]
        return prompt_tokens(body) + len(images) * self._image_tokens - sum(len(json.dumps(one)) // 4 for one in images)

    def _error(self, tokens: int, reply: int) -> dict[str, Any]:
        if self._refusal == "silent":
            return {"error": "Your input exceeds the context window of this model."}
        if self._refusal == "llama.cpp":
            said = f"request ({tokens} tokens) exceeds the available context size ({self.window} tokens), try"
            told = {"n_prompt_tokens": tokens, "n_ctx": self.window, "type": "exceed_context_size_error"}
            return {"error": {"code": 400, "message": f"{said} increasing it", **told}}
        if self._refusal == "vllm images":
            said = f"The decoder prompt (length {tokens}) is longer than the maximum model length of {self.window}."
            return {"error": {"message": said, "type": "BadRequestError", "param": None, "code": 400}}
        if self._refusal == "uncounted":
            return {"error": f"tokens are greater than the context length (n_keep: 1 >= n_ctx: {self.window})."}
        said = f"This model's maximum context length is {self.window} tokens and your request has {tokens} input tokens"
        if tokens < self.window:
            said = f"'max_tokens' or 'max_completion_tokens' is too large: {reply}. {said}"
        return {"error": {"message": said, "type": "BadRequestError", "param": None, "code": 400}}


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """The tokens of a request's messages, system prompt and tools."""
    messages = [body.get("system"), body.get("instructions"), body.get("tools")]
    messages += [*(body.get("messages") or ()), *(body.get("input") or ())]
    return sum(4 + len(json.dumps(message, ensure_ascii=False)) // 4 for message in messages if message)
