"""A fake llama-server: a window that it tells and enforces, streamed answers, and no language model.

Rule: it knows only its prompt. It has scripted replies to the messages of the demo's conversation; to anything else it
replies with the sentence of its prompt that shares the most significant words with the question, or says that it does
not know. It keeps every prompt, so that the demo and tests can look at them.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from memd.messages import without_memory_blocks

MODEL = "stand-in"
UNKNOWN = "I don't know. Nothing in what I was shown answers that."
SHARE_MIN = 0.4
"""The share of a question's significant words, by weight, that an answer must contain."""
_COMMON = """
a about again all an and any are as at be been but by can could did do does exactly for from get had has have he her his
how i if in is it its me my no not now of on or our out she should so that the their them then there they this to up us
was we were what when where which who why will with would you your
"""
COMMON_WORDS = frozenset(_COMMON.split())

_WORD = re.compile(r"[a-z0-9_]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n")
_DAY_LINE = re.compile(r"-- \w+ \d{4}-\d\d-\d\d --")
_MEMORY_LINE = re.compile(r"\[mem:(?P<id>[0-9a-f]+)\] ")


class ShownPrompt(msgspec.Struct, frozen=True):
    """A prompt that the model received."""

    messages: tuple[Mapping[str, str], ...]
    tokens: int

    @property
    def blocks(self) -> list[str]:
        """The memory blocks in the prompt, in order."""
        found = []
        for message in self.messages:
            start, end = message["content"].find("[memory]"), message["content"].find("[/memory]")
            if message["role"] != "assistant" and -1 < start < end:
                found.append(message["content"][start : end + len("[/memory]")])
        return found


class FakeModel:
    """The server's state; started by `running`.

    Args:
        window: Tokens that prompt and reply may take together; more is refused as llama-server refuses it.
        count: Tokens of a text.
        lines: The scripted replies: by last user message.
    """

    def __init__(self, *, window: int, count: Callable[[str], int], lines: Mapping[str, str]) -> None:
        self.window = window
        self.shown: list[ShownPrompt] = []
        self.base_url = ""
        self._count = count
        self._lines = lines

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeModel]:
        """Serve on a free loopback port until the block is left."""
        application = web.Application(client_max_size=100 * 1024 * 1024)
        application.router.add_get("/props", self._props)
        application.router.add_post("/v1/chat/completions/input_tokens", self._input_tokens)
        application.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    def reply_to(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the reply to a prompt."""
        position = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        if position < 0:
            return UNKNOWN
        question = without_memory_blocks(messages[position]["content"]).strip()
        if question in self._lines:
            return self._lines[question]
        # In a merged prompt the memory block stands in front of the question, in the same message.
        block = messages[position]["content"].removesuffix(question)
        return _best_answer(question, [*messages[:position], {"role": "developer", "content": block}])

    # -- routes -------------------------------------------------------------------------------------------------

    async def _props(self, _: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {"n_ctx": self.window}, "model_alias": MODEL})

    async def _input_tokens(self, request: web.Request) -> web.Response:
        tokens = self._count(_rendered(_messages_of(await request.json())))
        return web.json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        messages = _messages_of(await request.json())
        tokens = self._count(_rendered(messages))
        if tokens >= self.window:
            problem = f"request ({tokens} tokens) exceeds the available context size ({self.window} tokens)"
            facts = {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": self.window}
            return web.json_response({"error": {"code": 400, "message": problem, **facts}}, status=400)
        self.shown.append(ShownPrompt(tuple(messages), tokens))
        text = self.reply_to(messages)
        usage = {"prompt_tokens": tokens, "completion_tokens": self._count(text)}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas = [{"role": "assistant"}, *({"content": piece} for piece in re.findall(r"\S+\s*|\s+", text)), {}]
        for delta in deltas:
            choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}
            more = {} if delta else {"usage": usage}
            chunk = {"object": "chat.completion.chunk", "model": MODEL, "choices": [choice], **more}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0)  # a piece leaves before the next is made, as with a real model
        await response.write(b"data: [DONE]\n\n")
        return response


def _messages_of(body: Any) -> list[Mapping[str, str]]:
    """Role and text of each message; parts that are not text are left out."""
    messages: list[Mapping[str, str]] = []
    for message in body["messages"]:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content if part.get("type") == "text")
        messages.append({"role": str(message["role"]), "content": content})
    return messages


def _rendered(messages: Iterable[Mapping[str, str]]) -> str:
    """Render the messages as a chat template would."""
    turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return turns + "<|im_start|>assistant\n"


# -- answering from the prompt -------------------------------------------------------------------------------------


def _best_answer(question: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The user's sentence that shares the most telling words with the question; of equals the latest."""
    sentences = [sentence for message in messages for sentence in _said_by_user(message)]
    words = [_words(text) for text, _ in sentences]
    asked = _words(question)
    # A word is telling when few sentences have it.
    weights = {word: math.log(1 + len(words) / (1 + sum(word in other for other in words))) for word in asked}
    best, best_share = "", 0.0
    for (text, source), own in zip(sentences, words, strict=True):
        share = sum(weights[word] for word in asked & own) / (sum(weights.values()) or 1.0)
        if share >= max(best_share, SHARE_MIN) and not text.endswith("?"):
            best, best_share = f'You said{source}: "{text}"', share
    return best or UNKNOWN


def _said_by_user(message: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Sentences of a message, or of the chunks of a memory block, that the user said, each with where it stands."""
    role, source = message["role"], ""
    for line in message["content"].split("\n"):
        if found := _MEMORY_LINE.match(line):
            source, line = f" [{line[1 : found.end() - 2]}]", line[found.end() :]
        elif line == "[/memory]":
            source = ""
        elif source and _DAY_LINE.fullmatch(line):
            continue
        for spoken in ("user", "assistant", "system", "developer", "tool"):
            if source and line.startswith(f"{spoken}: "):
                role, line = spoken, line.removeprefix(f"{spoken}: ")
        if role == "user":
            yield from ((sentence.strip(), source) for sentence in _SENTENCE_END.split(line) if sentence.strip())


def _words(text: str) -> set[str]:
    """The telling words of a text, without the endings of the plural and of verbs."""
    return {_stem(word) for word in _WORD.findall(text.lower()) if word not in COMMON_WORDS}


def _stem(word: str) -> str:
    for ending in ("es", "ed", "s"):
        if word.endswith(ending) and len(word) > len(ending) + 3:
            return word.removesuffix(ending)
    return word
