"""The model server behind memd: one pooled client, and what memd learns from it (window, model, chat template).

Rule: memd works without anything that the upstream does not tell. A probe never delays a request by more than
`ASK_SECONDS`, and never fails one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from memd.proxy.upstream.template_probe import Messages, shows_in_place
from memd.settings.model import Config
from memd.telemetry.tasks import Tasks
from memd.wire.api import Placement

log = logging.getLogger("memd")

ASK_SECONDS = 2.0
REFRESH_SECONDS = 30.0
"""Age at which the window and the template are probed again: the model behind an address may change."""
RETRY_SECONDS = 3.0
"""Pause before an upstream that did not answer, or is still loading its model, is probed again."""
LOADING = 503
"""llama-server's answer to everything until its model is loaded."""
REFUSALS = frozenset({400, 422, 500})
"""Statuses with which an upstream may refuse a prompt because of the memory in it (an error of its chat template)."""

# Never passed on (RFC 9110 section 7.6.1), or made anew by the client library.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
NOT_FORWARDED = HOP_BY_HOP | {"host", "expect", "content-length"}


class UpstreamFacts(msgspec.Struct, frozen=True):
    """Facts that the upstream told; the defaults stand for an upstream that tells nothing."""

    reachable: bool = False
    window: int | None = None
    """Context tokens per slot."""
    model: str = ""
    template: bytes = b""
    """The 16-byte digest of the chat template; empty if unknown."""
    shows_separate: bool | None = None
    """Whether this model's template renders a separate memory message in its place; None if not probed."""


class Upstream:
    """Requests to the model server. Create it inside a running event loop and close it there."""

    def __init__(self, config: Config, tasks: Tasks) -> None:
        parts = urlsplit(config.upstream.url)
        path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{path}"
        self.facts = UpstreamFacts()
        self._wants_separate = config.injection.role == "separate"
        self._tasks = tasks
        self._asked_at = float("-inf")
        self._is_settled = False  # whether the last probe was answered
        self._asking: asyncio.Task[None] | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=config.upstream.keepalive_seconds),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.upstream.connect_timeout_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=1 << 18,
        )

    @property
    def placement(self) -> Placement:
        """How a block is placed before the user's message: merged, unless the settings want it separate and that works.

        Measured (bench/NOTES.md): with full attention both cost the same; with a sliding window llama.cpp reads the
        whole prompt again when a block that is a message of its own leaves, and only what is necessary when a merged
        one does. Every chat template takes a merged block, but many drop, move or refuse a separate one.
        """
        return "separate" if self._wants_separate and self.facts.shows_separate is not False else "merged"

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def send(
        self,
        method: str,
        path_and_query: str,
        headers: CIMultiDict[str],
        body: bytes | AsyncIterable[bytes] | None,
    ) -> aiohttp.ClientResponse:
        """Forward one request. The caller reads the answer's body and closes it.

        The server may have closed a pooled connection in the meantime. So a request whose connection breaks before any
        byte of an answer is sent once more, on a new connection, if its body can be sent again.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer came.
        """
        target = URL(self.url + path_and_query, encoded=True)
        attempts = 1 if isinstance(body, AsyncIterable) else 2
        while True:
            attempts -= 1
            try:
                return await self._session.request(method, target, headers=headers, data=body, allow_redirects=False)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                self._asked_at = float("-inf")  # it may come back as another model
                if attempts <= 0 or isinstance(error, aiohttp.ClientConnectorError):
                    raise

    async def refresh(self, *, wait: bool) -> UpstreamFacts:
        """Return the known facts. Old ones start a new probe; it is waited for if `wait`, or if nothing is known."""
        age = time.monotonic() - self._asked_at
        due = age > (REFRESH_SECONDS if self._is_settled else RETRY_SECONDS)
        if due and self._asking is None:
            self._asking = self._tasks.spawn(self._probe(), "ask-upstream")
        unknown = not self._is_settled and self.facts.window is None
        if self._asking is not None and (wait or unknown):
            await asyncio.wait({self._asking}, timeout=ASK_SECONDS)
        return self.facts

    async def count_tokens(self, path: str, body: bytes, headers: CIMultiDict[str]) -> int | None:
        """Have llama-server count the prompt tokens of a request body; None if it does not answer."""
        answer = await self._ask_json("POST", path, body, headers)
        count = answer.get("input_tokens") if isinstance(answer, dict) else None
        return count if isinstance(count, int) else None

    # -- private ------------------------------------------------------------------------------------------------

    async def _probe(self) -> None:
        try:
            facts, self._is_settled = await self._read_props()
            self.facts = facts
            if self._wants_separate and self._is_settled and facts.shows_separate is None:
                self.facts = msgspec.structs.replace(facts, shows_separate=await shows_in_place(self._rendered))
        finally:
            self._asked_at = time.monotonic()
            self._asking = None

    async def _read_props(self) -> tuple[UpstreamFacts, bool]:
        """Ask `/props`; the second value is whether that was answered.

        An upstream that is away, busy or still loading its model most likely comes back unchanged, so its window stays
        known: without a window, prompts could outgrow it.
        """
        try:
            async with asyncio.timeout(ASK_SECONDS):
                answer = await self.send("GET", "/props", CIMultiDict(), None)
                async with answer:
                    body = await answer.read()
        except TimeoutError:
            return self.facts, False
        except aiohttp.ClientError:
            return msgspec.structs.replace(self.facts, reachable=False), False
        if answer.status == LOADING:
            return msgspec.structs.replace(self.facts, reachable=True), False
        return self._with_known_placement(_facts_from(body if answer.status == 200 else b"")), True

    def _with_known_placement(self, facts: UpstreamFacts) -> UpstreamFacts:
        """Keep the result of the placement probe as long as the same model has the same template."""
        same = (facts.model, facts.template) == (self.facts.model, self.facts.template)
        return msgspec.structs.replace(facts, shows_separate=self.facts.shows_separate) if same else facts

    async def _rendered(self, messages: Messages) -> str | None:
        """Have the server render a conversation: empty if its template refuses it, None without an answer."""
        sent = CIMultiDict({"Content-Type": "application/json"})
        try:
            async with asyncio.timeout(ASK_SECONDS):
                body = msgspec.json.encode({"messages": list(messages)})
                answer = await self.send("POST", "/apply-template", sent, body)
                async with answer:
                    told = msgspec.json.decode(await answer.read())
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None
        if answer.status in REFUSALS:
            return ""
        prompt = told.get("prompt") if isinstance(told, dict) and answer.status == 200 else None
        return prompt if isinstance(prompt, str) else None

    async def _ask_json(
        self, method: str, path: str, body: bytes | None = None, headers: CIMultiDict[str] | None = None
    ) -> Any:
        sent = CIMultiDict(headers or {})
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            async with asyncio.timeout(ASK_SECONDS):
                answer = await self.send(method, path, sent, body)
                async with answer:
                    return msgspec.json.decode(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None


def _facts_from(body: bytes) -> UpstreamFacts:
    """Decode an answer to `/props`; one that is not llama-server's gives only that the server is reachable."""
    try:
        props = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return UpstreamFacts(reachable=True)
    settings = props.get("default_generation_settings")
    window = settings.get("n_ctx") if isinstance(settings, dict) else None
    template = str(props.get("chat_template") or "")
    return UpstreamFacts(
        reachable=True,
        window=window if isinstance(window, int) and window > 0 else None,
        model=str(props.get("model_alias") or props.get("model_path") or ""),
        template=hashlib.blake2b(template.encode(), digest_size=16).digest() if template else b"",
    )
