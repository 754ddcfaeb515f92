"""An ordinary chat client: it keeps a history, sends all of it every time and reads the streamed reply.

Rule: it knows nothing of how memd works, only `metadata.memory_in`, `memory_out` and the headers, as any client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec


class ChatAnswer(msgspec.Struct, frozen=True):
    """The answer to one request."""

    text: str
    status: str
    """`X-Memory-Status`."""
    injected: tuple[dict[str, Any], ...] = ()
    failed_corrections: tuple[str, ...] = ()
    recall_ms: float | None = None
    """The time of finding and inserting the memories, by `Server-Timing`; None if there was no recall."""


class ChatClient:
    """One conversation; `messages` is its history as the client keeps it."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, topic_id: str, system_prompt: str) -> None:
        self.messages = [{"role": "system", "content": system_prompt}]
        self._session = session
        self._url = f"{base_url}/v1/chat/completions"
        self._topic_id = topic_id

    async def say(
        self,
        text: str,
        *,
        corrections: list[dict[str, Any]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ChatAnswer:
        """Send the history with one more message, and append the streamed reply to it.

        Raises:
            aiohttp.ClientResponseError: the answer is an error.
        """
        self.messages.append({"role": "user", "content": text})
        memory_in: dict[str, Any] = {"topic_id": self._topic_id}
        if corrections:
            memory_in["corrections"] = corrections
        body = {"model": "any", "messages": self.messages, "stream": True, "metadata": {"memory_in": memory_in}}
        async with self._session.post(self._url, json=body, headers=headers, raise_for_status=True) as response:
            pieces, memory_out = await _read(response)
            answer = ChatAnswer(
                text="".join(pieces),
                status=response.headers.get("X-Memory-Status", ""),
                injected=tuple(memory_out.get("injected_chunks", ())),
                failed_corrections=tuple(
                    signal["chunk_id"]
                    for signal in memory_out.get("signals", ())
                    if signal["type"] == "correction_failed"
                ),
                recall_ms=_recall_ms(response.headers.get("Server-Timing", "")),
            )
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer


async def _read(response: aiohttp.ClientResponse) -> tuple[list[str], dict[str, Any]]:
    """The pieces of the reply, and `memory_out`."""
    pieces: list[str] = []
    memory_out: dict[str, Any] = {}
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[len(b"data: ") :])
        memory_out = chunk.get("memory_out", memory_out)
        pieces += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    return pieces, memory_out


def _recall_ms(server_timing: str) -> float | None:
    spans = dict(re.findall(r"(\w+);dur=([0-9.]+)", server_timing))
    parts = [float(spans[name]) for name in ("embed", "search", "inject") if name in spans]
    return sum(parts) if parts else None
