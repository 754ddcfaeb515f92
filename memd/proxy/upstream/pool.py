"""The model servers behind memd: the choice of a server for each request, and of another one if it does not answer.

Rule: a conversation stays with the server that has its prompt in the cache. If that server fails, it moves to the next
and stays there. Nothing is repeated once part of it has reached the client. A request that a server may have read goes
to another one only if it merely computes, and only once: it may have killed the first. One server needs none of this.

A conversation is recognized by its messages as the client sends them. So it needs no name, is the same with and without
memory, and a branch goes where the common beginning was read. For forgotten conversations (a restart, or more than
`KNOWN_MAX`) the server is computed from their beginning, always with the same result. That is the right one unless the
conversation began or moved while that server was busier or away.

Failures of others (their trackers): round-robin that never reuses a cache; clients' mistakes (400) counted against
servers until none is left (SGLang's router, 25811); a host that refuses connections asked again and again (LiteLLM,
27362); requests failing because all servers are left out, though one is back (LiteLLM, 3646).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict

from memd.caching import Latest
from memd.messages import DIGEST_BYTES, ROOT_DIGEST, chain_all, leading_count
from memd.proxy.upstream.client import GATEWAYS, LOADING, Upstream, UpstreamFacts
from memd.proxy.upstream.connection import Interim, attempt_of_task
from memd.proxy.upstream.windows import model_name
from memd.settings.model import Config
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks
from memd.wire.api import ModelRequest

log = logging.getLogger("memd")

KNOWN_MAX = 20_000
"""Limit on keys with a known server, about 3 MB."""


class Trail(msgspec.Struct, frozen=True):
    """Keys by which a conversation can be recognized."""

    names: Sequence[bytes]
    """Names of the conversation, best first; may be empty."""
    digests: Sequence[bytes]
    """Digests of its messages in order, each chained to those before it."""
    opening: bytes
    """Digest of its beginning up to the first answer, which never changes later."""
    goes_on: bool
    """The model has answered in it before."""


def trail_of(
    request: ModelRequest, names: Sequence[str] = (), digests: Sequence[bytes] | None = None, *, goes_on: bool = False
) -> Trail:
    """Return a request's trail. `goes_on`: the model has answered before, though the client sends only new messages."""
    lead = leading_count(request.messages)
    if digests is None:
        digests = chain_all(request.digests[lead:])
    roles = [message.role for message in request.messages[lead:]]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    known = [_key(name) for name in names]
    beginning = digests[:first]
    opening = beginning[-1] if beginning else known[0] if known else ROOT_DIGEST
    return Trail(known, digests, opening, goes_on or first < len(roles))


def _key(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


class Affinity:
    """Which server, by its address, answered each conversation last."""

    def __init__(self) -> None:
        self._known: Latest[bytes, str] = Latest(KNOWN_MAX)

    def __len__(self) -> int:
        return len(self._known)

    def home(self, trail: Trail) -> str | None:
        """Return the server that answered the conversation last, or None. Before the first answer there is none,
        because many conversations may begin alike."""
        if not trail.goes_on:
            return None
        keys = chain(trail.names, reversed(trail.digests))
        return next((self._known[key] for key in keys if key in self._known), None)

    def answered(self, trail: Trail, url: str) -> bool:
        """Note that a server answered a request of the conversation; returns whether it is another one than before."""
        has_moved = self.home(trail) not in (None, url)
        for key in (*trail.names[:1], *trail.digests[-1:]):
            self._known[key] = url
        return has_moved


def rank(opening: bytes, url: str) -> bytes:
    """Return a server's rank for conversations with this beginning; the highest wins (rendezvous hashing)."""
    return hashlib.blake2b(url.encode(), key=opening, digest_size=8).digest()


MODEL_LIST_PATHS = frozenset({"/v1/models", "/models", "/api/v0/models", "/api/tags", "/api/ps"})
"""Paths at which servers list their models: OpenAI's API, llama-server's short form, LM Studio's, Ollama's two."""
_LIST_FIELDS = ("data", "models")


def merged_lists(answers: Iterable[Any]) -> dict[str, Any] | None:
    """Merge the servers' lists in order; None if no answer is a list."""
    whole: dict[str, Any] | None = None
    for answer in answers:
        if not isinstance(answer, dict) or not any(isinstance(answer.get(field), list) for field in _LIST_FIELDS):
            continue
        if whole is None:
            whole = dict(answer)
            continue
        for field in _LIST_FIELDS:
            listed, more = whole.get(field), answer.get(field)
            if isinstance(listed, list) and isinstance(more, list):
                known = set(map(model_name, listed))
                whole[field] = [*listed, *(card for card in more if model_name(card) not in known)]
    return whole


NO_ANSWER = (aiohttp.ClientError, TimeoutError)
ELSEWHERE = frozenset({401, 403, 404, 429, LOADING})
"""Statuses of a request that was not worked on and that another server may accept: wrong key, unknown model, overload,
or model loading."""
ERROR = 500
STALL_SECONDS = 10.0
"""Wait for the head of an answer before memd checks whether the server is alive."""
SILENT_SECONDS = 20.0
"""A server counts as dead if no connection gets bytes for so long: a prompt may take minutes, `/health` does not."""
HEALTH_SECONDS = 5.0
"""Time limit for the health check of a server that is left out."""
PLACED_DECAY, PLACED_MORE = 0.95, 1.0
"""Factor on earlier new conversations at each further one, and the allowed lead over the least used server."""


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a request by which its server is chosen."""

    model: str = ""
    trail: Trail | None = None
    """None if it belongs to no conversation."""
    only_computes: bool = False
    """It changes nothing in a server but its cache."""
    is_spread: bool = True
    """Any server may take it; otherwise the first available one, so that repeated questions reach the same server."""


class Unanswered(aiohttp.ClientError):
    """No server answered; the message names each with its reason."""


class Silent(aiohttp.ClientError):
    """A server accepted a request and then sent nothing on any connection."""


class Assignment(AbstractContextManager["Assignment"]):
    """The server assigned to one request, and the remaining ones if it does not answer."""

    def __init__(self, pool: UpstreamPool, hints: Hints, servers: Sequence[Upstream]) -> None:
        """`servers`: best first, at least one; others do not have the model."""
        self._pool = pool
        self._hints = hints
        self._servers = servers
        self._number = 0
        self._tried: list[str] = []
        self._was_read = True
        self._was_risked = False
        self._is_held = True
        self.server = servers[0]
        self.server.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Note that the request has ended; may be called again."""
        if self._is_held:
            self._is_held = False
            self.server.in_flight -= 1

    @property
    def shown(self) -> str:
        """The address of the present server; empty if there is only one."""
        return self.server.url if self._pool.has_several else ""

    @property
    def is_last(self) -> bool:
        """True if no server is left to move to."""
        return self._number == len(self._servers) - 1

    async def ask(
        self,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes | AsyncIterable[bytes] | None,
        on_interim: Interim | None = None,
    ) -> aiohttp.ClientResponse:
        """Send the request to the present server; see `Upstream.send`."""
        server, pool = self.server, self._pool
        pool.metrics.upstream_requests.add(server.url)
        if not pool.has_several:
            return await server.send(method, target, headers, body, on_interim)
        try:
            async with asyncio.timeout(None) as patience:
                with pool.watched(server, patience, can_move=not self.is_last):
                    answer = await server.send(method, target, headers, body, on_interim)
        except NO_ANSWER as error:
            seconds = STALL_SECONDS + SILENT_SECONDS
            silent = Silent(f"it took the request and has said nothing for {seconds:g} s")
            # A reused connection may have been closed because of the bytes sent over it.
            never_connected = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
            self._was_read = not never_connected or attempt_of_task.get().wants_new
            self.failed(told := silent if patience.expired() else error)
            raise told from None
        self._was_read = True
        pool.answered(server, answer.status, self._hints)
        return answer

    def failed(self, error: BaseException) -> None:
        """Note that the present server did not answer, or broke off."""
        self._pool.metrics.upstream_failures.add(self.server.url)
        self._tried.append(f"{self.server.url} ({self.server.reason_of(error)})")
        self._pool.leave_out(self.server, self.server.reason_of(error))

    def _moves_on(self) -> bool:
        """Move to the next server after this one did not answer; False if that is not allowed or none is left."""
        if self._was_read:
            if self._was_risked or not self._hints.only_computes:
                return False
            self._was_risked = True
        return self._moves()

    def _moves_from(self, status: int) -> bool:
        """Move to the next server after this status; False if the client should get this answer, or none is left."""
        is_elsewhere = status in ELSEWHERE or (status in GATEWAYS and self._hints.only_computes)
        self._tried += [f"{self.server.url} (it answered {status})"] if is_elsewhere else []
        return is_elsewhere and self._moves()

    def _moves(self) -> bool:
        if self.is_last:
            return False
        self.server.in_flight -= self._is_held
        self._number += 1
        self.server = self._servers[self._number]
        self.server.in_flight += self._is_held
        return True

    def _unanswered(self, error: BaseException) -> BaseException:
        """Return the error for the client; with several servers it names each."""
        if not self._pool.has_several:
            return error
        others = (server.url for server in self._pool.servers if server not in self._servers)
        unasked = [f"{url} was not asked: it does not list {self._hints.model!r:.80}" for url in others]
        return Unanswered("; ".join([*self._tried, *unasked]))

    async def send(
        self,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes | AsyncIterable[bytes] | None,
        on_interim: Interim | None = None,
    ) -> aiohttp.ClientResponse:
        """Send the request to one server after another; see `taken`."""
        asking = partial(self.ask, method, target, headers, body, on_interim)
        return await self.taken(asking, may_repeat=not isinstance(body, AsyncIterable))

    async def taken(
        self,
        offer: Callable[[], Awaitable[aiohttp.ClientResponse]],
        on_moved: Callable[[], Awaitable[None]] | None = None,
        *,
        may_repeat: bool = True,
    ) -> aiohttp.ClientResponse:
        """Offer a request to one server after another until one accepts it; if none does, the first answer counts.
        `on_moved` is awaited before each further offer. Raises aiohttp.ClientError, TimeoutError: no answer came."""
        first: aiohttp.ClientResponse | None = None
        try:
            while True:
                try:
                    answer = await offer()
                except NO_ANSWER as error:
                    if not ((may_repeat or not self._was_read) and self._moves_on()):
                        if first is None:
                            raise self._unanswered(error) from None
                        answer, first = first, None
                        return answer
                else:
                    moves = may_repeat and self._moves_from(answer.status)
                    if first is not None and (moves or answer.status in ELSEWHERE):
                        answer.close()
                        answer, first = first, None
                    if not moves:
                        return answer
                    first = answer
                if on_moved is not None:
                    await on_moved()
        finally:
            if first is not None:
                first.close()


class UpstreamPool:
    """All model servers. Create it inside a running event loop and close it there."""

    def __init__(self, config: Config, tasks: Tasks, metrics: Metrics) -> None:
        each = (msgspec.structs.replace(config, upstream=one) for one in config.upstream.each())
        self.servers = tuple(Upstream(one, tasks) for one in each)
        self.has_several = len(self.servers) > 1
        self._have_credentials = any(server.authorization is not None for server in self.servers)
        self.metrics = metrics
        self.affinity = Affinity()
        self._tasks = tasks
        self._tending: dict[str, asyncio.Task[Any]] = {}
        self._is_stopped = False
        self._dealt = 0
        metrics.count_upstreams([server.url for server in self.servers])
        if self.has_several:
            for server in self.servers:
                server.watch(partial(self.leave_out, server))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(server.close() for server in self.servers))

    @property
    def first(self) -> Upstream:
        """The first available server; the first of all if none is."""
        here = (server for server in self.servers if server.is_up)
        return next(here, self.servers[0])

    @property
    def facts(self) -> UpstreamFacts:
        """The facts of the first available server."""
        return self.first.facts

    def shows_credentials(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request with these headers gets the user and password from a server's address."""
        return self._have_credentials and "Authorization" not in headers

    async def refresh(self, *, wait: bool) -> UpstreamFacts:
        """Probe all servers; see `Upstream.refresh`."""
        await asyncio.gather(*(server.refresh(wait=wait) for server in self.servers))
        return self.facts

    def assign(self, hints: Callable[[], Hints]) -> Assignment:
        """Choose a server for a request; it must be released. `hints` is called only if there are several servers."""
        if not self.has_several:
            return Assignment(self, _NO_HINTS, self.servers)
        for server in self.servers:
            server.renew()
        return Assignment(self, told := hints(), self._ordered(told))

    async def listed_models(self, target: str, headers: CIMultiDict[str]) -> dict[str, Any] | None:
        """Return the models of all available servers as one list (`merged_lists`), or None if there is none."""
        here = [server for server in self.servers if not server.health.is_out]
        return merged_lists(
            told.json for told in await asyncio.gather(*(server.ask("GET", target, None, headers) for server in here))
        )

    def answered(self, server: Upstream, status: int, hints: Hints) -> None:
        """Note a server's answer. Answers about the server itself do not prove that it works."""
        if status in GATEWAYS or status == LOADING:
            self.metrics.upstream_failures.add(server.url)
            self.leave_out(server, f"it answered {status}")
        elif not hints.is_spread:
            return
        elif status == ERROR:
            was_out = server.health.is_out
            server.health.erred(time.monotonic(), b"" if hints.trail is None else hints.trail.opening)
            if server.health.is_out and not was_out:
                self._note_left_out(server)
        elif status not in ELSEWHERE:
            server.health.answered()
            if hints.trail is not None and self.affinity.answered(hints.trail, server.url):
                self.metrics.upstream_moves.add()

    def leave_out(self, server: Upstream, reason: str) -> None:
        """Send requests elsewhere until a health check of the server succeeds."""
        if self.has_several and not server.health.is_out:
            server.health.failed(time.monotonic(), reason)
            self._note_left_out(server)

    # -- private ------------------------------------------------------------------------------------------------

    def _ordered(self, hints: Hints) -> list[Upstream]:
        """Return the servers that a request may go to, best first."""
        servers = list(self.servers)
        unknown: list[Upstream] = []
        if hints.model and any(hints.model in server.models for server in servers):
            unknown = [server for server in servers if not server.models]
            servers = [server for server in servers if hints.model in server.models]
        here = [server for server in servers if server.is_usable]
        away = sorted((server for server in servers if not server.is_usable), key=lambda one: one.health.retry_at)
        if not hints.is_spread:
            return [*here, *away, *unknown]
        trail = hints.trail
        self._dealt += 1
        dealt = self._dealt.to_bytes(8) if trail is None else trail.opening
        here.sort(key=lambda one: rank(dealt, one.url), reverse=True)
        home = None if trail is None else self.affinity.home(trail)
        if trail is None or not trail.goes_on or home is not None:
            fewest = min((server.placed for server in here), default=0.0) + PLACED_MORE
            here.sort(key=lambda one: (one.url != home, one.in_flight, one.placed > fewest))
        if here and trail is not None and not trail.goes_on:
            for server in self.servers:
                server.placed = server.placed * PLACED_DECAY + (server is here[0])
        return [*here, *away, *unknown]

    @contextmanager
    def watched(self, server: Upstream, patience: asyncio.Timeout, *, can_move: bool) -> Iterator[None]:
        """Let `patience` expire if the server falls silent during the block and another server is left."""
        if not can_move:
            yield
            return
        stalled = asyncio.get_running_loop().call_later(STALL_SECONDS, self._stalled, server, patience)
        try:
            yield
        finally:
            stalled.cancel()
            server.waiting.discard(patience)

    def _stalled(self, server: Upstream, patience: asyncio.Timeout) -> None:
        server.waiting.add(patience)
        self._tend(self._watch, server, "watch a model server")

    async def _watch(self, server: Upstream) -> None:
        """Check a server while requests wait for it unusually long."""
        while server.waiting:
            heard = server.received_bytes()
            told = await server.ask("GET", "/health", None, server.with_key(None), SILENT_SECONDS)
            if told.status or server.received_bytes() != heard:
                await asyncio.sleep(STALL_SECONDS)
                continue
            self.leave_out(server, told.problem)
            for patience in server.waiting:
                patience.reschedule(asyncio.get_running_loop().time())
            server.waiting.clear()

    def _note_left_out(self, server: Upstream) -> None:
        fields = {"url": server.url, "reason": server.health.reason}
        log.warning("a model server is left out until it answers again", extra=fields)
        self._tend(self._bring_back, server, "bring a model server back")

    async def _bring_back(self, server: Upstream) -> None:
        """Check a server that is left out, with growing pauses, until it answers; a request may also bring it back."""
        while server.health.is_out:
            await asyncio.sleep(max(0.0, server.health.retry_at - time.monotonic()))
            told = await server.ask("GET", "/health", None, server.with_key(None), HEALTH_SECONDS)
            if told.status and told.status not in GATEWAYS and told.status != LOADING:
                await server.ask_anew()
                server.health.answers_again()
                log.info("a model server answers again", extra={"url": server.url})
            elif server.health.is_out:
                server.health.failed(time.monotonic(), told.problem or f"it answers {told.status}")

    def _tend(self, work: Callable[[Upstream], Coroutine[Any, Any, None]], server: Upstream, name: str) -> None:
        """Run this for a server in the background, unless it is running already."""
        key = f"{name}: {server.url}"
        if not self._is_stopped and key not in self._tending:
            task = self._tending[key] = self._tasks.spawn(work(server), name)
            task.add_done_callback(lambda _: self._tending.pop(key))

    def stop(self) -> None:
        """Stop all health checks."""
        self._is_stopped = True
        for task in self._tending.values():
            task.cancel()


_NO_HINTS = Hints()
