"""The model server behind memd: a pooled client, and the facts that probes learn (health, window, model, template).

Rule: memd works even if the upstream tells nothing. A probe delays a request by at most `ASK_SECONDS`, and never fails
one. memd's own requests carry the credentials of the client's request that caused them, else `upstream.api_key`;
neither is stored.

A bad request says nothing about a server. Only a server that does not answer is left out at once; one that answers
every request with an error is left out after a few. Such servers come last in order, but are not excluded: if all are
out, all are tried.
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
from memd.wire.lenient_json import ANYTHING, decode_or_none
from memd.wording import counted

log = logging.getLogger("memd")

OUT_SECONDS, OUT_SECONDS_MAX = 1.0, 10.0
"""First and longest pause before a failed server is asked again; doubled with each failure."""
ERRORS_MAX = 3
"""After errors (500) in so many conversations, without a good answer in between, the server is at fault. On trial one
error is enough, or else a server that only fails would get as many requests after each successful health check."""


class Health(msgspec.Struct):
    """The health of a server, judged by the outcome of requests to it."""

    reason: str = ""
    """Why it is left out; empty if it is not."""
    retry_at: float = 0.0
    """Monotonic time of the next attempt."""
    failures: int = 0
    erred_by: set[bytes] = set()
    """Conversations that got errors since the last good answer."""

    @property
    def is_out(self) -> bool:
        """True if requests go elsewhere."""
        return bool(self.reason)

    @property
    def is_on_trial(self) -> bool:
        """True if a health check succeeded after a failure, and no request has yet; it gets one request at a time."""
        return self.failures > 0 and not self.reason

    def answered(self) -> None:
        """Note that a request was answered."""
        self.reason, self.failures = "", 0
        self.erred_by.clear()

    def erred(self, now: float, conversation: bytes) -> None:
        """Note an error of the server as answer; repeats by one conversation count once."""
        self.erred_by.add(conversation)
        if len(self.erred_by) >= (1 if self.is_on_trial else ERRORS_MAX) and not self.is_out:
            self.failed(now, f"it answered {counted(len(self.erred_by), 'conversation')} running with errors")
            self.erred_by.clear()

    def failed(self, now: float, reason: str) -> None:
        """Note that it did not answer, or reported that it cannot now."""
        self.reason = reason
        self.retry_at = now + min(OUT_SECONDS * 2**self.failures, OUT_SECONDS_MAX)
        self.failures = min(self.failures + 1, 16)

    def answers_again(self) -> None:
        """Note that a health check succeeded."""
        self.reason = ""


_STAND_IN = "73c374cad16f317212d596b51d344012"
"""Digest of the plain ChatML template that llama-server reports for a model without one."""
NO_TEMPLATE = (
    "this model has no chat template: a base model goes on with a text and does not chat; take its version for chats "
    "(Instruct, it), or give llama-server the right template (--chat-template)"
)
ASK_SECONDS = 2.0
"""Limit on a request's wait for a probe."""


class UpstreamFacts(msgspec.Struct, frozen=True):
    """Facts reported by the upstream; the defaults describe an upstream that reports nothing."""

    reachable: bool = False
    window: int | None = None
    """The window in tokens of `model`, or of all models; None if unknown or different from model to model."""
    wants_key: bool = False
    """It reports nothing without a key."""
    key_refused: bool = False
    """It refused the key of the latest probe."""
    is_slow: bool = False
    """It did not answer the latest probe within `ASK_SECONDS`, or has not yet."""
    model: str = ""
    template: str = ""
    """Hex digest of the chat template."""

    @property
    def lacks_template(self) -> bool:
        """True if the model has no chat template of its own; False if the server does not report it."""
        return self.template == _STAND_IN


def window_unknown(facts: UpstreamFacts) -> str:
    """Return why no window is known, what that means, and what to do."""
    reason = "without a key the server tells nothing" if facts.wants_key else "the server tells no window"
    if facts.key_refused:
        reason = "the server refuses the key that it was shown"
    elif facts.is_slow:
        reason = f"the server has not told its window within {ASK_SECONDS:g} s and is asked again in the background"
    remedy = "set upstream.api_key, or upstream.window" if facts.wants_key else "set upstream.window"
    return f"{reason}: nothing leaves the prompt until it is known; {remedy}"


def facts_from(props: dict[str, Any]) -> UpstreamFacts:
    """Return the facts in `/props`, which is the server's untrusted data."""
    template = str(props.get("chat_template") or "")
    return UpstreamFacts(
        reachable=True,
        model="" if is_router(props) else str(props.get("model_alias") or props.get("model_path") or ""),
        template=hashlib.blake2b(template.encode(), digest_size=16).hexdigest(),
    )


PROBE_SECONDS = 30.0
"""Limit on a background probe: a server may be busy with a prompt."""
REFRESH_SECONDS = 30.0
"""Age at which window and template are probed again, because the model behind an address may change."""
RETRY_SECONDS = 3.0
"""Pause before another probe of an upstream that did not answer, is loading its model, or reported no window."""
TOLD_BYTES_MAX = 16 << 20
"""Limit on an answer to memd's own requests; a list of all models of a large gateway has a megabyte."""
LOADING = 503
"""llama-server's answer to everything until its model is loaded."""
GATEWAYS = frozenset({502, 504})
"""A gateway's statuses for a server that does not answer it."""
WANTS_KEY = frozenset({401, 403})
REFUSALS = frozenset({400, 422, 500})
"""Statuses with which an upstream may refuse a prompt because of the memory in it (an error of its chat template)."""

# Never forwarded (RFC 9110 section 7.6.1), or set by the client library.
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
NOT_FORWARDED = HOP_BY_HOP | {"host", "expect", "content-length"}


class ServerAnswer(msgspec.Struct, frozen=True):
    """The answer to one of memd's own requests."""

    status: int = 0
    """0 if no answer came."""
    value: Any = None
    """The JSON value of its body; None if it has none."""
    problem: str = ""
    """Why no answer came, in words for people."""
    is_late: bool = False
    """No answer came in time."""

    @property
    def json(self) -> Any:
        """The JSON value of a successful answer, else None."""
        return self.value if self.status == 200 else None


class Upstream(UpstreamSession):
    """Requests to the model server. Create it inside a running event loop and close it there."""

    def __init__(self, config: Config, tasks: Tasks) -> None:
        self.url = base_of(config.upstream.address)
        self.health = Health()
        self.in_flight = 0
        """Requests given to it that have not ended."""
        self.placed = 0.0
        """New conversations given to it, decaying, so that the latest counts most."""
        self.waiting: set[asyncio.Timeout] = set()
        """Timeouts of the requests that wait for it unusually long."""
        self.models: frozenset[str] = frozenset()
        """The models it lists, as clients name them; empty if unknown."""
        self._on_away: Callable[[str], None] | None = None
        self._facts = UpstreamFacts()
        self._latest_model = ""  # named by the latest request
        self._warned: set[str] = set()  # models whose unknown window is logged already
        self.windows = KnownWindows(config.upstream.window)
        self._api_key = config.upstream.api_key
        self._tasks = tasks
        self._uncounted_until: dict[str, float] = {}  # by path
        self._asked_at: Latest[str, float] = Latest(MODELS_MAX)
        """Time of the latest probe by model name; the empty name if one window holds for all models."""
        self._asked_with = 0  # hash of the credentials in the last probe
        self._is_settled = False  # the last probe was answered
        self._asking: asyncio.Task[None] | None = None
        super().__init__(self.url, config.upstream.authorization, self._asked_at.clear)  # it may return changed

    @property
    def facts(self) -> UpstreamFacts:
        """All present facts; the window is that of the latest model used."""
        return msgspec.structs.replace(self._facts, window=self.windows.of(self._latest_model).tokens)

    @property
    def is_up(self) -> bool:
        """True if it answered the latest probe."""
        return self._facts.reachable and not self.health.is_out

    @property
    def is_usable(self) -> bool:
        """True if a request may go to it: it is healthy, or on trial and free."""
        return not self.health.is_out and not (self.health.is_on_trial and self.in_flight)

    def watch(self, on_away: Callable[[str], None]) -> None:
        """List its models with each probe, and call `on_away` with the reason if a probe fails."""
        self._on_away = on_away

    async def ask_anew(self) -> None:
        """Probe now, regardless of earlier probes: it may be another server."""
        self._asked_at.clear()
        await self.refresh(wait=True)

    def renew(self) -> None:
        """Start a probe in the background if the facts are old."""
        if self._asking is None and not self.health.is_out:
            self._probe_if_due("", self._asked_at.get(""), False, None)

    async def refresh(self, *, wait: bool, model: str = "", credentials: CIMultiDict[str] | None = None) -> None:
        """Start a probe if the facts are old; wait for it if `wait`, or if nothing is known. If windows differ by
        model, the probe is about the request's `model`, with its credentials."""
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
                return  # otherwise the running probe was for another model

    async def window(self, model: str, credentials: CIMultiDict[str]) -> ModelWindow:
        """Return the window of a request's model; see `refresh`."""
        self._latest_model = model
        await self.refresh(wait=False, model=model, credentials=credentials)
        window = self.windows.of(model)
        if window.tokens is None and model not in self._warned and len(self._warned) < MODELS_MAX:
            self._warned.add(model)
            log.warning(window_unknown(self._facts), extra={"model": model})
        return window

    async def count_tokens(self, path: str, body: Callable[[], bytes], credentials: CIMultiDict[str]) -> int | None:
        """Let llama-server count the prompt tokens of a request body; None if it cannot, or failed a moment ago."""
        if time.monotonic() < self._uncounted_until.get(path, 0.0):
            return None
        told = await self.ask("POST", path, body(), self.with_key(credentials))
        count = told.json.get("input_tokens") if isinstance(told.json, dict) else None
        if isinstance(count, int):
            return count
        self._uncounted_until[path] = time.monotonic() + RETRY_SECONDS  # most never can, and the body may be large
        return None

    async def rendered(self, body: bytes, headers: CIMultiDict[str]) -> str | None:
        """Return a chat request's prompt by the chat template; empty if it refuses it, None without an answer."""
        told = await self.ask("POST", "/apply-template", body, headers)
        if told.status in REFUSALS:
            return ""
        prompt = told.json.get("prompt") if isinstance(told.json, dict) else None
        return prompt if isinstance(prompt, str) else None

    async def ask(
        self, method: str, path: str, body: bytes | None, headers: CIMultiDict[str], seconds: float = ASK_SECONDS
    ) -> ServerAnswer:
        """Send one of memd's own requests and wait up to `seconds`. Any answer to `/health` shows that a server is
        there, because model servers answer it while they work."""
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
        """Return the headers of memd's own request: a client's credentials, else the configured key."""
        if credentials:
            return credentials
        return CIMultiDict({"Authorization": f"Bearer {self._api_key}"} if self._api_key else {})

    # -- private ------------------------------------------------------------------------------------------------

    def _probe_if_due(
        self, model: str, asked_at: float | None, is_unknown: bool, credentials: CIMultiDict[str] | None
    ) -> asyncio.Task[None] | None:
        pause = RETRY_SECONDS if is_unknown or not self._is_settled else REFRESH_SECONDS
        due = asked_at is None or time.monotonic() - asked_at > pause
        if self._facts.wants_key and credentials:  # this client may have a key where another had none
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
        """Request `/props`. The second value is its content: empty if not llama-server's, None without an answer. An
        upstream that is away, busy or loading most likely returns unchanged, so its window stays known; without one,
        prompts could outgrow it."""
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
    """Return the JSON value of a body; None if it is not JSON or too large."""
    body = bytearray()
    while part := await answer.content.readany():
        body += part
        if len(body) > TOLD_BYTES_MAX:
            return None
    return decode_or_none(ANYTHING, bytes(body))
