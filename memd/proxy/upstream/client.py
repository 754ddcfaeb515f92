"""The model server behind memd: one pooled client, and what memd learns from it (health, window, model, chat template).

Rule: memd works without anything that the upstream does not tell. A probe never delays a request by more than
`ASK_SECONDS`, and never fails one. A question of memd's own carries the credentials of the client's request that gave
rise to it, else `upstream.api_key`; neither is kept.

What is wrong with a request says nothing about a server: only a server that does not answer is left out at once, one
that answers every request with an error after a few. To be left out is to come last, never to be refused: where no
server is well, all are tried.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict

from memd.caching import Latest
from memd.proxy.upstream.connection import UpstreamSession, time_of_others
from memd.proxy.upstream.windows import MODELS_MAX, KnownWindows, ModelWindow, ask_windows, is_router, models_of
from memd.settings.model import Config, base_of
from memd.telemetry.tasks import Tasks
from memd.wire.lenient_json import UNREADABLE
from memd.wording import counted

log = logging.getLogger("memd")

OUT_SECONDS, OUT_SECONDS_MAX = 1.0, 10.0
"""The first pause before a server that failed is asked again, doubled with each failure, and the longest."""
ERRORS_MAX = 3
"""So many conversations that got errors (500), and no answer between them: it is the server, hardly the requests. On
trial one is enough: else a server that does nothing but fail gets as many each time it says that it is well."""


class Health(msgspec.Struct):
    """The health of a server, by what came of the requests to it."""

    reason: str = ""
    """Why it is left out; empty if it is not."""
    retry_at: float = 0.0
    """When it is asked again."""
    failures: int = 0
    erred_by: set[bytes] = set()
    """The conversations that it answered with errors since it answered one."""

    @property
    def is_out(self) -> bool:
        """Whether requests go elsewhere."""
        return bool(self.reason)

    @property
    def is_on_trial(self) -> bool:
        """Whether it has answered a question of memd's own since it failed, and no request yet: it gets one at once."""
        return self.failures > 0 and not self.reason

    def answered(self) -> None:
        """A request was answered."""
        self.reason, self.failures = "", 0
        self.erred_by.clear()

    def erred(self, now: float, conversation: bytes) -> None:
        """A request was answered with an error of the server; a client that repeats one counts once."""
        self.erred_by.add(conversation)
        if len(self.erred_by) >= (1 if self.is_on_trial else ERRORS_MAX) and not self.is_out:
            self.failed(now, f"it answered {counted(len(self.erred_by), 'conversation')} running with errors")
            self.erred_by.clear()

    def failed(self, now: float, reason: str) -> None:
        """It did not answer, or said that it cannot now."""
        self.reason = reason
        self.retry_at = now + min(OUT_SECONDS * 2**self.failures, OUT_SECONDS_MAX)
        self.failures = min(self.failures + 1, 16)

    def answers_again(self) -> None:
        """A question of memd's own was answered."""
        self.reason = ""


_STAND_IN = "73c374cad16f317212d596b51d344012"
"""The digest of the plain ChatML template that llama-server takes, and tells as the model's, where that has none."""
NO_TEMPLATE = (
    "this model has no chat template: a base model goes on with a text and does not chat; take its version for chats "
    "(Instruct, it), or give llama-server the right template (--chat-template)"
)
ASK_SECONDS = 2.0
"""The longest that a request waits for what a server tells."""


class UpstreamFacts(msgspec.Struct, frozen=True):
    """Facts that the upstream told; the defaults stand for an upstream that tells nothing."""

    reachable: bool = False
    window: int | None = None
    """The window in tokens of `model`, or of all models; None if it is not known or differs from model to model."""
    wants_key: bool = False
    """It tells nothing without a key."""
    key_refused: bool = False
    """It tells nothing for the key that the latest probe carried."""
    is_slow: bool = False
    """It has not answered the latest probe within `ASK_SECONDS`, or not yet."""
    model: str = ""
    template: str = ""
    """The digest of the chat template."""

    @property
    def lacks_template(self) -> bool:
        """Whether the model has no chat template of its own; False if the server does not tell."""
        return self.template == _STAND_IN


def window_unknown(facts: UpstreamFacts) -> str:
    """Say why no window is known, what that means, and what to do."""
    reason = "without a key the server tells nothing" if facts.wants_key else "the server tells no window"
    if facts.key_refused:
        reason = "the server refuses the key that it was shown"
    elif facts.is_slow:
        reason = f"the server has not told its window within {ASK_SECONDS:g} s and is asked again in the background"
    remedy = "set upstream.api_key, or upstream.window" if facts.wants_key else "set upstream.window"
    return f"{reason}: nothing leaves the prompt until it is known; {remedy}"


def facts_from(props: dict[str, Any]) -> UpstreamFacts:
    """Return what `/props` tells; everything in it is the server's."""
    template = str(props.get("chat_template") or "")
    return UpstreamFacts(
        reachable=True,
        model="" if is_router(props) else str(props.get("model_alias") or props.get("model_path") or ""),
        template=hashlib.blake2b(template.encode(), digest_size=16).hexdigest(),
    )


PROBE_SECONDS = 30.0
"""The longest that a probe in the background waits for an answer: a server may be busy with a prompt."""
REFRESH_SECONDS = 30.0
"""Age at which the window and the template are probed again: the model behind an address may change."""
RETRY_SECONDS = 3.0
"""Pause before an upstream that did not answer, is still loading its model, or told no window is probed again."""
TOLD_BYTES_MAX = 16 << 20
"""Of an answer to a question of memd's own; a list of all the models of a large gateway has a megabyte."""
LOADING = 503
"""llama-server's answer to everything until its model is loaded."""
GATEWAYS = frozenset({502, 504})
"""The words of a gateway for a server that does not answer it."""
WANTS_KEY = frozenset({401, 403})
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


class ServerAnswer(msgspec.Struct, frozen=True):
    """The answer to a question of memd's own."""

    status: int = 0
    """0: none came."""
    value: Any = None
    """The JSON value of its body; None if it is none."""
    problem: str = ""
    """Why none came, in words for people."""
    is_late: bool = False
    """None came in time."""

    @property
    def json(self) -> Any:
        """Its JSON value; None of one that says that something is wrong."""
        return self.value if self.status == 200 else None


class Upstream(UpstreamSession):
    """Requests to the model server. Create it inside a running event loop and close it there."""

    def __init__(self, config: Config, tasks: Tasks) -> None:
        self.url = base_of(config.upstream.address)
        self.health = Health()
        self.in_flight = 0
        """Requests that it has been given and that have not ended."""
        self.placed = 0.0
        """New conversations that it got, the latest counting most."""
        self.waiting: set[asyncio.Timeout] = set()
        """The patience of the requests that it keeps waiting."""
        self.models: frozenset[str] = frozenset()
        """The models that it lists, as clients call them; empty if that is not known."""
        self._on_away: Callable[[str], None] | None = None
        self._facts = UpstreamFacts()
        self._latest_model = ""  # the one that a request named last
        self._warned: set[str] = set()  # the models of which the log has said that their window is not known
        self.windows = KnownWindows(config.upstream.window)
        self._api_key = config.upstream.api_key
        self._tasks = tasks
        self._uncounted_until: dict[str, float] = {}  # by path
        self._asked_at: Latest[str, float] = Latest(MODELS_MAX)
        """By the model that was asked for; the empty name stands for all where one window holds for all."""
        self._asked_with = 0  # the hash of the credentials that the last probe carried
        self._is_settled = False  # whether the last probe was answered
        self._asking: asyncio.Task[None] | None = None
        authorization, header_bytes_max = config.upstream.authorization, config.limits.header_bytes_max
        super().__init__(self.url, authorization, header_bytes_max, self._asked_at.clear)  # it may come back as another

    @property
    def facts(self) -> UpstreamFacts:
        """All that is known now; the window is that of the model that was used last."""
        return msgspec.structs.replace(self._facts, window=self.windows.of(self._latest_model).tokens)

    @property
    def is_up(self) -> bool:
        """Whether it answered when it was last asked."""
        return self._facts.reachable and not self.health.is_out

    @property
    def is_usable(self) -> bool:
        """Whether a request may go to it: it is well, or on trial and free."""
        return not self.health.is_out and not (self.health.is_on_trial and self.in_flight)

    def watch(self, on_away: Callable[[str], None]) -> None:
        """Learn which models it has with each probe, and tell why where it does not answer one."""
        self._on_away = on_away

    async def ask_anew(self) -> None:
        """Ask now, whenever it was asked last: it may have come back as another one."""
        self._asked_at.clear()
        await self.refresh(wait=True)

    def renew(self) -> None:
        """Start a probe if what is known is old; nobody waits for it."""
        if self._asking is None and not self.health.is_out:
            self._probe_if_due("", self._asked_at.get(""), False, None)

    async def refresh(self, *, wait: bool, model: str = "", credentials: CIMultiDict[str] | None = None) -> None:
        """Start a new probe where what is known is old; it is waited for if `wait`, or if nothing is known. Where
        models differ, the one that a request names is asked for, with its credentials."""
        deadline = time.monotonic() + ASK_SECONDS
        while True:
            asked_for = "" if self.windows.is_told_for_all() else model
            asked_at, is_unknown = self._asked_at.get(asked_for), self.windows.of(model).tokens is None
            running = self._asking or self._probe_if_due(asked_for, asked_at, is_unknown, credentials)
            must_know = is_unknown and (asked_at is None or not self._is_settled) and not self._facts.is_slow
            if running is None or not (wait or must_know):
                return
            try:
                async with time_of_others(max(0.0, deadline - time.monotonic())):
                    await asyncio.wait({running})
            except TimeoutError:
                self._facts = msgspec.structs.replace(self._facts, is_slow=True)
                return
            if asked_at is not None or asked_for in self._asked_at:
                return  # else the probe under way was for another model

    async def window(self, model: str, credentials: CIMultiDict[str]) -> ModelWindow:
        """The window of a request's model; see `refresh`."""
        self._latest_model = model
        await self.refresh(wait=False, model=model, credentials=credentials)
        window = self.windows.of(model)
        if window.tokens is None and model not in self._warned and len(self._warned) < MODELS_MAX:
            self._warned.add(model)
            log.warning(window_unknown(self._facts), extra={"model": model})
        return window

    async def count_tokens(self, path: str, body: Callable[[], bytes], credentials: CIMultiDict[str]) -> int | None:
        """Have llama-server count the prompt tokens of a request body; None if it does not, now or a moment ago."""
        if time.monotonic() < self._uncounted_until.get(path, 0.0):
            return None
        told = await self.ask("POST", path, body(), self.with_key(credentials))
        count = told.json.get("input_tokens") if isinstance(told.json, dict) else None
        if isinstance(count, int):
            return count
        self._uncounted_until[path] = time.monotonic() + RETRY_SECONDS  # most never do, and the body may be large
        return None

    async def rendered(self, body: bytes, headers: CIMultiDict[str]) -> str | None:
        """The prompt that the chat template makes of a chat request: empty if it refuses it, None without an answer."""
        told = await self.ask("POST", "/apply-template", body, headers)
        if told.status in REFUSALS:
            return ""
        prompt = told.json.get("prompt") if isinstance(told.json, dict) else None
        return prompt if isinstance(prompt, str) else None

    async def ask(
        self, method: str, path: str, body: bytes | None, headers: CIMultiDict[str], seconds: float = ASK_SECONDS
    ) -> ServerAnswer:
        """Ask a question of memd's own; the answer is waited for so long. Whether a server is there is told by any
        answer to `/health`, which model servers give while they work."""
        sent = CIMultiDict(headers)
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            async with time_of_others(seconds):
                answer = await self.send(method, path, sent, body)
                async with answer:
                    return ServerAnswer(answer.status, await _json_of(answer))
        except TimeoutError:
            return ServerAnswer(problem=f"nothing came within {seconds:g} s", is_late=True)
        except aiohttp.ClientError as error:
            return ServerAnswer(problem=self.reason_of(error))

    def with_key(self, credentials: CIMultiDict[str] | None) -> CIMultiDict[str]:
        """The headers of a question of memd's own: the credentials of a client's request, else the configured key."""
        if credentials:
            return credentials
        return CIMultiDict({"Authorization": f"Bearer {self._api_key}"} if self._api_key else {})

    # -- private ------------------------------------------------------------------------------------------------

    def _probe_if_due(
        self, model: str, asked_at: float | None, is_unknown: bool, credentials: CIMultiDict[str] | None
    ) -> asyncio.Task[None] | None:
        pause = RETRY_SECONDS if is_unknown or not self._is_settled else REFRESH_SECONDS
        due = asked_at is None or time.monotonic() - asked_at > pause
        if self._facts.wants_key and credentials:  # this client may have the key that another one had not
            due = due or hash(tuple(credentials.items())) != self._asked_with
        if due:
            headers = self.with_key(credentials)
            self._asked_with = hash(tuple(headers.items()))
            self._asking = self._tasks.spawn(self._probe(model, headers), "ask-upstream")
        return self._asking

    async def _probe(self, model: str, headers: CIMultiDict[str]) -> None:
        try:
            facts, props = await self._read_props(headers)
            self._is_settled = props is not None
            if props is not None:

                async def ask(method: str, path: str, body: bytes | None) -> Any:
                    return (await self.ask(method, path, body, headers, PROBE_SECONDS)).json

                if self._on_away is not None:
                    self.models = models_of(await ask("GET", "/v1/models", None)) or self.models
                windows = await ask_windows(ask, props, model)
                if windows or not facts.wants_key:
                    self.windows.told(windows)
                self._is_settled = bool(windows) or not facts.wants_key
            self._facts = facts
        finally:
            self._asked_at[model] = time.monotonic()
            self._asking = None

    async def _read_props(self, headers: CIMultiDict[str]) -> tuple[UpstreamFacts, dict[str, Any] | None]:
        """Ask `/props`; the second value is what it says, empty if it is not llama-server's, None without an answer. An
        upstream that is away, busy or still loading its model most likely comes back unchanged, so its window stays
        known: without a window, prompts could outgrow it."""
        told = await self.ask("GET", "/props", None, headers, PROBE_SECONDS)
        if told.is_late:
            return msgspec.structs.replace(self._facts, is_slow=True), None
        known = msgspec.structs.replace(self._facts, reachable=not told.problem, is_slow=False)
        if told.problem or told.status == LOADING:
            if told.problem:
                self.windows.forget_refusals()
            if self._on_away is not None:
                self._on_away(told.problem or "it is loading its model")
            return known, None
        if told.status in WANTS_KEY:
            refused = any(name in headers for name in ("Authorization", "X-Api-Key"))
            return msgspec.structs.replace(known, wants_key=True, key_refused=refused), {}
        props = told.json if isinstance(told.json, dict) else {}
        return facts_from(props), props


async def _json_of(answer: aiohttp.ClientResponse) -> Any:
    """The JSON value of a body; None if it is none, or without an end."""
    body = bytearray()
    while part := await answer.content.readany():
        body += part
        if len(body) > TOLD_BYTES_MAX:
            return None
    try:
        return msgspec.json.decode(body)
    except UNREADABLE:
        return None
