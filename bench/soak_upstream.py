"""The model server of bench/soak.py: answers like llama-server, and tells what it was shown.

A process of its own that ends when its standard input does. It counts tokens its own way (four characters each),
refuses a prompt beyond its window as llama-server does, says 503 for a while after its start, calls tools when the user
asks for it, and answers the same question with the same words. In the header X-Soak of every answer it says what was in
the block before the user's last message: which chunks have something on the key that is asked for. With `--behind URL`
a real llama-server answers, and this one only looks at the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web

SEEN_HEADER = "X-Soak"
SLOWLY_HEADER = "X-Soak-Slowly"
"""A request that its client is going to cancel: the first token takes a while, and so does every other."""
RECORDED_HEADER = "X-Soak-Recorded"
"""A request of a recording: its agent and number; its answer is the recorded one (`--recordings`)."""
PROBE_HEADER = "X-Soak-Probe"
"""A question of the final check, which no model has to answer."""
KEY = re.compile(r"\bA\d\d-F\d{5}\b")
STEPS = re.compile(r"look it up in (\d) steps?")
CALLS_AT_ONCE = 2
CHARACTERS_PER_TOKEN = 4
FIRST_TOKEN_SECONDS = 0.02
SLOW_SECONDS = 0.3
SEEN_CHARACTERS_MAX = 2_000
"""A header line has 8 KB, and every character may need three."""

_BLOCK = re.compile(r"\[memory\] .*?\n\[/memory\]\n*", re.DOTALL)
_LINE = re.compile(r"\[mem:([0-9a-f]+)\] (.*?)(?=\n\[mem:|\n\[/memory\])", re.DOTALL)
_REPLIES = """I have written it down. That sounds sensible to me. Let us look at the numbers again tomorrow. The second
option is cheaper, the first one is safer. I would ask the harbour master first. Nobody has tried that before. There is
a note about it in the blue folder. We can decide it when the parts are here. It depends on the weather on Friday. The
old pump is still under warranty. I would not change two things at once. Better to measure it than to guess."""
_SENTENCES = " ".join(_REPLIES.split()).split(". ")


class Upstream:
    """What was asked so far, and the answers."""

    def __init__(self, window: int, behind: str | None, loading_seconds: float, recordings: Path | None) -> None:
        self._window = window
        self._behind = behind
        self._recorded = {} if recordings is None else {one.stem: _answers(one) for one in recordings.glob("*.jsonl")}
        self._ready_at = time.monotonic() + loading_seconds
        self._session: aiohttp.ClientSession | None = None
        self.counts = {"chats": 0, "refused, too long": 0, "streams left": 0}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        if request.path == "/soak/counts":
            return web.json_response(self.counts)
        if time.monotonic() < self._ready_at:
            return _error(503, "Loading model", "unavailable_error")
        body = await request.read()
        if RECORDED_HEADER in request.headers:
            agent, number = request.headers[RECORDED_HEADER].split()
            reply, kind = self._recorded[agent][int(number)]
            return web.Response(body=reply, headers={"Content-Type": kind})
        is_chat = request.path.endswith("/chat/completions")
        asked: dict[str, Any] = json.loads(body) if is_chat or request.path.endswith("/input_tokens") else {}
        if is_chat:
            return await self._chat(request, asked, body)
        if self._behind is not None:
            return await self._real(request, body, {})
        if request.path == "/props":
            return web.json_response({"default_generation_settings": {"n_ctx": self._window}, "model_alias": "soak"})
        if request.path.endswith("/input_tokens"):
            return web.json_response({"input_tokens": tokens(asked)})
        return web.json_response({"status": "ok"})

    async def _chat(self, request: web.Request, asked: dict[str, Any], body: bytes) -> web.StreamResponse:
        self.counts["chats"] += 1
        if self._behind is None and tokens(asked) > self._window:
            self.counts["refused, too long"] += 1
            return _error(400, "the request exceeds the available context size", "exceed_context_size_error")
        headers = {SEEN_HEADER: quote(json.dumps(seen(asked, briefly=PROBE_HEADER in request.headers)))}
        message = _reply(asked)
        if self._behind is not None and "tool_calls" not in message and PROBE_HEADER not in request.headers:
            return await self._real(request, body, headers)
        slowly = SLOWLY_HEADER in request.headers
        await asyncio.sleep(SLOW_SECONDS if slowly else FIRST_TOKEN_SECONDS * random.random())
        usage = {"prompt_tokens": tokens(asked), "completion_tokens": 20, "total_tokens": tokens(asked) + 20}
        if asked.get("stream"):
            return await self._stream(request, message, headers, usage, slowly)
        finish = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        whole = {"id": "chatcmpl-s", "object": "chat.completion", "created": 1, "model": "soak", "choices": [choice]}
        return web.json_response({**whole, "usage": usage}, headers=headers)

    async def _stream(
        self, request: web.Request, message: dict[str, Any], headers: dict[str, str], usage: object, slowly: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        calls = message.get("tool_calls", [])
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
        deltas += [{"content": word} for word in re.findall(r"\S+\s*", message["content"] or "")]
        for index, call in enumerate(calls):
            deltas.append({"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]})
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
                for part in re.findall(".{1,8}", call["function"]["arguments"])
            ]
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"})
        try:
            await response.prepare(request)
            for number, choice in enumerate(choices):
                await response.write(_event({"choices": [choice]}))
                if slowly or number % 8 == 0:
                    await asyncio.sleep(SLOW_SECONDS / 10 if slowly else 0.001)
            await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self.counts["streams left"] += 1
            raise
        return response

    async def _real(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """What the llama-server behind says, with our header."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        sent = {"Content-Type": "application/json"}
        url = f"{self._behind}{request.path_qs}"
        async with self._session.request(request.method, url, data=body or None, headers=sent) as answer:
            if answer.status == 400:
                self.counts["refused, too long"] += 1
            response = web.StreamResponse(status=answer.status, headers=headers)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response


def _answers(recording: Path) -> list[tuple[bytes, str]]:
    """The answers of a recording with their types."""
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    kinds = {True: "text/event-stream", False: "application/json"}
    return [(one["reply"].encode(), kinds[one["stream"]]) for one in lines if "reply" in one]


def tokens(asked: dict[str, Any]) -> int:
    """Of a request's messages and tools."""
    parts = [json.dumps(message, ensure_ascii=False) for message in asked.get("messages", [])]
    return sum(len(part) // CHARACTERS_PER_TOKEN for part in [*parts, json.dumps(asked.get("tools", []))])


def seen(asked: dict[str, Any], *, briefly: bool) -> dict[str, Any]:
    """The block before the user's last message: its digest, empty without one, and the chunks that have the key that is
    asked for.

    `briefly`: only the statements, not the whole chunks.
    """
    text = _last_user_text(asked)
    block = "".join(_BLOCK.findall(text))
    key = KEY.search(_BLOCK.sub("", text))
    found: list[tuple[str, str]] = []
    for chunk_id, said in _LINE.findall(block) if key is not None else []:
        stated = re.search(rf"{key[0]} is \w+", said) if key is not None else None
        told = "" if stated is None else stated[0] if briefly else said
        if told and sum(len(one) for _, one in found) + len(told) <= SEEN_CHARACTERS_MAX:
            found.append((chunk_id, told))
    digest = hashlib.blake2b(block.encode(), digest_size=8).hexdigest() if block else ""
    return {"block": digest, "found": found}


def _last_user_text(asked: dict[str, Any]) -> str:
    users = [message["content"] for message in asked["messages"] if message["role"] == "user"]
    return str(users[-1]) if users else ""


def _reply(asked: dict[str, Any]) -> dict[str, Any]:
    """A short text, or calls while the user's wish for tools is not fulfilled; the same for the same question."""
    said = _BLOCK.sub("", _last_user_text(asked))
    roles = [message["role"] for message in asked["messages"]]
    last_user = max((position for position, role in enumerate(roles) if role == "user"), default=0)
    done = roles[last_user:].count("assistant")
    chance = random.Random(f"{said} {done}")
    wanted = STEPS.search(said)
    if asked.get("tools") and wanted is not None and done < int(wanted[1]):
        calls = [
            {
                "id": f"call_{chance.randrange(1 << 40):x}",
                "type": "function",
                "function": {"name": "read_log", "arguments": json.dumps({"service": f"s{chance.randrange(10**6)}"})},
            }
            for _ in range(CALLS_AT_ONCE)
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}
    text = ". ".join(chance.sample(_SENTENCES, 3))
    return {"role": "assistant", "content": f"{text}. See note {chance.randrange(10**6)}."}


def _event(members: dict[str, Any]) -> bytes:
    whole = {"id": "chatcmpl-s", "object": "chat.completion.chunk", "created": 1, "model": "soak", **members}
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


def _error(status: int, message: str, kind: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message, "type": kind}}, status=status)


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--loading", type=float, default=0)
    parser.add_argument("--behind")
    parser.add_argument("--recordings", type=Path)
    asked = parser.parse_args()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    upstream = Upstream(asked.window, asked.behind, asked.loading, asked.recordings)
    application = web.Application(client_max_size=1 << 28)
    application.router.add_route("*", "/{path:.*}", upstream.handle)
    web.run_app(
        application,
        host="127.0.0.1",
        port=asked.port,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=5,  # as llama-server
        print=lambda *_: None,
    )


if __name__ == "__main__":
    main()
