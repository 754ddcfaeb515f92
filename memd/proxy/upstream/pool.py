"""The model servers behind memd: which of them a request goes to, and where it goes if that one does not answer.

Rule: a conversation stays with the server that has its prompt in its cache, until that one is away; then it stays with
the next. What has reached the client is never repeated, and what a server may have read is sent to another one only
where it merely computes, and once: it may be what killed the first. With one server nothing of this is done.

A conversation is known by its messages as its client sends them, so that it needs no name, is the same conversation
with and without memory, and its branches are found where their common beginning was read. What is forgotten (a restart,
or more conversations than `KNOWN_MAX`) is computed from its beginning, the same each time: the server is then the right
one unless the conversation was begun, or moved, while that one had more to do or was away.

How others fail here (their trackers): conversations are dealt out in turns and no cache is ever used again; clients'
mistakes (400) are counted against a server until none is left (SGLang's router, 25811); a host that refuses connections
is asked again and again (LiteLLM, 27362); with all left out, requests fail though one is back (LiteLLM, 3646).
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
"""Keys whose server is remembered: about 3 MB."""


class Trail(msgspec.Struct, frozen=True):
    """The ways in which a conversation can be recognised."""

    names: Sequence[bytes]
    """Of the conversation, the best first; none where nobody has given it one."""
    digests: Sequence[bytes]
    """Of its messages, each chained to those before it; in order."""
    opening: bytes
    """Its beginning up to the first answer, which stays as it goes on."""
    goes_on: bool
    """The model has answered in it before."""


def trail_of(
    request: ModelRequest, names: Sequence[str] = (), digests: Sequence[bytes] | None = None, *, goes_on: bool = False
) -> Trail:
    """Return the trail of a request, see `Trail`: `goes_on` if it does though the client sends only what is new."""
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
    """The servers, by their addresses, that have answered conversations last."""

    def __init__(self) -> None:
        self._known: Latest[bytes, str] = Latest(KNOWN_MAX)

    def __len__(self) -> int:
        return len(self._known)

    def home(self, trail: Trail) -> str | None:
        """The server that answered last in the conversation; None if it is not known. What was asked before the first
        answer binds nobody: many conversations may begin alike."""
        if not trail.goes_on:
            return None
        keys = chain(trail.names, reversed(trail.digests))
        return next((self._known[key] for key in keys if key in self._known), None)

    def answered(self, trail: Trail, url: str) -> bool:
        """A server answered a request of the conversation; whether that is another one than before."""
        has_moved = self.home(trail) not in (None, url)
        for key in (*trail.names[:1], *trail.digests[-1:]):
            self._known[key] = url
        return has_moved


def rank(opening: bytes, url: str) -> bytes:
    """The rank of a server for a conversation that begins so: the highest of all is its own (rendezvous hashing)."""
    return hashlib.blake2b(url.encode(), key=opening, digest_size=8).digest()


MODEL_LIST_PATHS = frozenset({"/v1/models", "/models", "/api/v0/models", "/api/tags", "/api/ps"})
"""Where servers list their models: OpenAI's API, llama-server's short form of it, LM Studio's, Ollama's two."""
_LIST_FIELDS = ("data", "models")


def merged_lists(answers: Iterable[Any]) -> dict[str, Any] | None:
    """Put the answers of the servers together, in order; None if none is a list."""
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
"""Statuses of a request that was not worked on, and that another server may take: it wants another key, does not have
the model, has too much to do or loads its model."""
ERROR = 500
STALL_SECONDS = 10.0
"""A request waits so long for the head of its answer before its server is asked whether it is there."""
SILENT_SECONDS = 20.0
"""It is not, if it says nothing so long, on any connection: a prompt may take minutes, `/health` does not."""
HEALTH_SECONDS = 5.0
"""A server that was left out has so long for an answer."""
PLACED_DECAY, PLACED_MORE = 0.95, 1.0
"""New conversations count less with each that follows; a server may have so many more than the one with the fewest."""


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """The signs of a request by which its server is chosen."""

    model: str = ""
    trail: Trail | None = None
    """None: it belongs to no conversation."""
    only_computes: bool = False
    """A server that has read it is in the same state as before, but for its cache."""
    is_spread: bool = True
    """Any server will do; else the first that is there, so that who asks twice asks the same one."""


class Unanswered(aiohttp.ClientError):
    """No server answered; the message names each with its reason."""


class Silent(aiohttp.ClientError):
    """A server that had taken a request says nothing any more, on any connection."""


class Assignment(AbstractContextManager["Assignment"]):
    """The server that one request goes to, and those that are left if it does not answer."""

    def __init__(self, pool: UpstreamPool, hints: Hints, servers: Sequence[Upstream]) -> None:
        """`servers`: the best first, at least one; the others do not have the model."""
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
        """The request has ended; may be called again."""
        if self._is_held:
            self._is_held = False
            self.server.in_flight -= 1

    @property
    def shown(self) -> str:
        """The address of the present server, where there are others."""
        return self.server.url if self._pool.has_several else ""

    @property
    def is_last(self) -> bool:
        """Whether there is no other server to go to."""
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
            # A connection that was used before may have been closed by what was sent over it.
            never_connected = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
            self._was_read = not never_connected or attempt_of_task.get().wants_new
            self.failed(told := silent if patience.expired() else error)
            raise told from None
        self._was_read = True
        pool.answered(server, answer.status, self._hints)
        return answer

    def failed(self, error: BaseException) -> None:
        """The present server did not answer, or broke off."""
        self._pool.metrics.upstream_failures.add(self.server.url)
        self._tried.append(f"{self.server.url} ({self.server.reason_of(error)})")
        self._pool.leave_out(self.server, self.server.reason_of(error))

    def _moves_on(self) -> bool:
        """Go to the next server after this one did not answer; False if that must not be, or there is none."""
        if self._was_read:
            if self._was_risked or not self._hints.only_computes:
                return False
            self._was_risked = True
        return self._moves()

    def _moves_from(self, status: int) -> bool:
        """Go to the next server after this one answered so; False if that is an answer for the client."""
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
        """The error for the client: of several servers it names each."""
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
        """Send the request to one server after another, see `taken`."""
        asking = partial(self.ask, method, target, headers, body, on_interim)
        return await self.taken(asking, may_repeat=not isinstance(body, AsyncIterable))

    async def taken(
        self,
        offer: Callable[[], Awaitable[aiohttp.ClientResponse]],
        on_moved: Callable[[], Awaitable[None]] | None = None,
        *,
        may_repeat: bool = True,
    ) -> aiohttp.ClientResponse:
        """Offer a request to one server after another until one takes it; if none does, the first answer counts.
        `on_moved` is awaited before it is offered to another one. Raises aiohttp.ClientError, TimeoutError: no answer
        came."""
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
        """The first server that is there; the first of all if none is."""
        here = (server for server in self.servers if server.is_up)
        return next(here, self.servers[0])

    @property
    def facts(self) -> UpstreamFacts:
        """The facts of the first server that is there."""
        return self.first.facts

    def shows_credentials(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers is sent with the user and password of a server's address."""
        return self._have_credentials and "Authorization" not in headers

    async def refresh(self, *, wait: bool) -> UpstreamFacts:
        """Ask all servers what they have to tell, see `Upstream.refresh`."""
        await asyncio.gather(*(server.refresh(wait=wait) for server in self.servers))
        return self.facts

    def assign(self, hints: Callable[[], Hints]) -> Assignment:
        """Choose a server for a request; `hints` is not asked where there is one. Release it in the end."""
        if not self.has_several:
            return Assignment(self, _NO_HINTS, self.servers)
        for server in self.servers:
            server.renew()
        return Assignment(self, told := hints(), self._ordered(told))

    async def listed_models(self, target: str, headers: CIMultiDict[str]) -> dict[str, Any] | None:
        """The models that the servers which are there list, as one list (`merged_lists`); None if none of them does."""
        here = [server for server in self.servers if not server.health.is_out]
        return merged_lists(
            told.json for told in await asyncio.gather(*(server.ask("GET", target, None, headers) for server in here))
        )

    def answered(self, server: Upstream, status: int, hints: Hints) -> None:
        """A server answered a request. What it tells about itself is no sign that it does its work."""
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
        """Send requests elsewhere until the server answers a question again."""
        if self.has_several and not server.health.is_out:
            server.health.failed(time.monotonic(), reason)
            self._note_left_out(server)

    # -- private ------------------------------------------------------------------------------------------------

    def _ordered(self, hints: Hints) -> list[Upstream]:
        """The servers that a request may go to, the best first."""
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
        """End `patience` if the server falls silent while the block waits for it, and there is another one."""
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
        """See whether a server is there that lets requests wait."""
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
        """Ask a server that was left out, ever more rarely, until it answers; requests may have brought it back too."""
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
        """Do this for a server in the background, unless it is being done."""
        key = f"{name}: {server.url}"
        if not self._is_stopped and key not in self._tending:
            task = self._tending[key] = self._tasks.spawn(work(server), name)
            task.add_done_callback(lambda _: self._tending.pop(key))

    def stop(self) -> None:
        """Ask no server any more that was left out."""
        self._is_stopped = True
        for task in self._tending.values():
            task.cancel()


_NO_HINTS = Hints()
