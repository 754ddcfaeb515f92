"""Short conversations with the real model server, for `memd check --live`.

Rule: nothing of it is kept. It is held with a daemon of its own, in a temporary folder that is removed; a running
daemon only forwards a request (`X-Memory-Mode: off`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from memd.admin.access import TOKEN_HEADER
from memd.admin.asking import unchecked_tls
from memd.errors import MemdError
from memd.proxy.app import running
from memd.settings.model import AdminSettings, Config, ConversationSettings, ListenSettings
from memd.settings.tokens import AuthSettings

TOLD = "Please remember: the code of the boathouse gate is heron-4519."
ASKED = "What is the code of the boathouse gate?"
EXPECTED = "4519"
REPLY_TOKENS = 48
ANSWER_SECONDS_MAX = 180.0
"""A large model that reads its first prompt on a CPU takes this long."""


class LiveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request."""

    problem: str = ""
    """Why there is no answer; empty if there is one."""
    status: int = 0
    memory_status: str = ""
    """`X-Memory-Status`."""
    text: str = ""
    """The reply, or the text of the error."""
    message: dict[str, Any] = {}
    """The model's message as it came; empty if there is none."""
    prompt_tokens: int = 0
    """By the server's count; 0: not told."""


def recall_a_fact(config: Config, model: str) -> LiveAnswer:
    """Tell a daemon of its own a fact and ask for it in a new conversation; return the last answer, or the failed one.

    Args:
        config: the settings to use; their data directory and address are not touched.
        model: what the requests call the model.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="memd-check-") as folder:
            return asyncio.run(_recall_a_fact(scratch_config(config, Path(folder)), model))
    except (MemdError, OSError) as error:
        return LiveAnswer(problem=str(error))


def scratch_config(config: Config, folder: Path) -> Config:
    """The settings of a daemon that nobody else finds and whose memory is in `folder`."""
    return msgspec.structs.replace(
        config,
        listen=ListenSettings(port=0),
        admin=AdminSettings(),
        auth=AuthSettings(),
        data_dir=folder / "memory",
        conversation=ConversationSettings(),
    )


def key_headers(config: Config) -> dict[str, str]:
    """The key that the model server wants, as a client shows it; none unless it is in the settings."""
    key = config.upstream.api_key
    return {"Authorization": f"Bearer {key}"} if key else {}


def ask_without_memory(config: Config, base_url: str, model: str) -> LiveAnswer:
    """Let a running daemon forward a question to the model without memory."""
    token = {TOKEN_HEADER: config.auth.token} if config.auth.token else {}
    return asyncio.run(_ask_without_memory(base_url, {"X-Memory-Mode": "off", **token, **key_headers(config)}, model))


async def _recall_a_fact(config: Config, model: str) -> LiveAnswer:
    async with running(config) as daemon, aiohttp.ClientSession(headers=key_headers(config)) as session:
        told = await _send(session, daemon.base_url, model, TOLD, {})
        if told.problem or told.status != 200:
            return told
        return await _send(session, daemon.base_url, model, ASKED, {})


async def _ask_without_memory(base_url: str, headers: Mapping[str, str], model: str) -> LiveAnswer:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=unchecked_tls())) as session:
        return await _send(session, base_url, model, ASKED, headers)


async def _send(
    session: aiohttp.ClientSession, base_url: str, model: str, text: str, headers: Mapping[str, str]
) -> LiveAnswer:
    """Send a request that opens a conversation."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": REPLY_TOKENS}
    return await send(session, base_url, body, headers, ANSWER_SECONDS_MAX)


async def send(
    session: aiohttp.ClientSession, base_url: str, body: object, headers: Mapping[str, str], seconds: float
) -> LiveAnswer:
    """Send a chat request and wait so many seconds for the whole answer."""
    try:
        async with asyncio.timeout(seconds):
            async with session.post(f"{base_url}/v1/chat/completions", json=body, headers=headers) as answer:
                told = await answer.read()
    except TimeoutError:
        return LiveAnswer(problem=f"no answer came within {seconds:.0f} s")
    except aiohttp.ClientError as error:
        return LiveAnswer(problem=str(error) or type(error).__name__)
    memory_status = answer.headers.get("X-Memory-Status", "")
    if answer.status != 200:
        return LiveAnswer(status=answer.status, memory_status=memory_status, text=_refusal(told))
    message, prompt_tokens = _reply(told)
    return LiveAnswer(
        status=answer.status,
        memory_status=memory_status,
        text=str(message.get("content") or ""),
        message=message,
        prompt_tokens=prompt_tokens,
    )


def _reply(body: bytes) -> tuple[dict[str, Any], int]:
    """Return the message of a reply, empty if there is none, and the tokens of its prompt."""
    try:
        whole: Any = msgspec.json.decode(body)
        usage = whole.get("usage") or {}
        return dict(whole["choices"][0]["message"]), int(usage.get("prompt_tokens") or 0)
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError):
        return {}, 0


def _refusal(body: bytes) -> str:
    """Return the text of an error."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
