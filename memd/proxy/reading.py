"""From an HTTP request to `Asked`: what the client wants from memory and from the model.

Rule: memd refuses a request only if no upstream could answer it. Anything else that is odd passes unchanged, and the
upstream decides.

Requests that a program makes for itself (a title, tags, a summary), and those of sub-agents, are recognized only by the
wording of the program's own prompt. Most patterns begin with `\\A`. These are matched only at the beginning, because
`re.search` would try each of them at every character of a long message.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Literal

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from memd.access import Take, forwarding_header, is_from_foreign_page, principal_of
from memd.conversation.tokens import TokenCounter
from memd.entries import DEFAULT_TOPIC_ID, TOPIC_ID_PATTERN, checked_topic_id
from memd.errors import BadRequestBody, BadTopicId
from memd.ingest.redaction import Redactor
from memd.messages import Speech
from memd.principals import Principal, Principals
from memd.proxy.relay import forwarded_headers
from memd.proxy.upstream.pool import Hints, trail_of
from memd.receipts import Receipt
from memd.settings.loading import Programs, programs_of
from memd.settings.model import Config
from memd.telemetry.metrics import record_of
from memd.wire.api import Api, MessageCache, ModelRequest, read_request, renamed
from memd.wire.content_codings import unpacked_parts
from memd.wire.lenient_json import UNREADABLE
from memd.wire.sideband import MemoryIn, MemoryOut, Signal

log = logging.getLogger("memd")

SEARCHED_CHARACTERS_MAX = 100_000
"""Only this much of a text is searched."""
_INSTRUCTIONS_MAX = 32  # system prompts recur in every request of a program; a long one takes 0.3 ms to look through

SUB_AGENT = "sub-agent"
"""The speaker's name for user messages that an agent sends to another agent."""

Find = Callable[[str], re.Match[str] | None]


class SideRequests:
    """Recognizes requests that programs make for themselves, and those of sub-agents."""

    def __init__(self, programs: Programs) -> None:
        """`programs`: the patterns in force."""
        self._asks = [_finder(pattern) for pattern in programs.ignore]
        self._is_instructed = _cached_find(programs.ignore_system)
        self._is_called = _cached_find(programs.sub_agent)

    def includes(self, request: ModelRequest) -> bool:
        """Return whether a program makes the request for itself; then it is forwarded and not remembered."""
        last = next((message.said for message in reversed(request.messages) if message.role == "user"), "")
        said = last[:SEARCHED_CHARACTERS_MAX]
        return any(find for find in self._asks if find(said)) or self._is_instructed(_instructions(request))

    def by_its_speaker(self, request: ModelRequest) -> ModelRequest:
        """Return the request. For a sub-agent, its user messages get the name SUB_AGENT as speaker."""
        return renamed(request, SUB_AGENT) if self._is_called(_instructions(request)) else request


def _instructions(request: ModelRequest) -> str:
    return request.instructions[:SEARCHED_CHARACTERS_MAX]


def _cached_find(patterns: Iterable[str]) -> Callable[[str], bool]:
    finders = [_finder(pattern) for pattern in patterns]
    return lru_cache(_INSTRUCTIONS_MAX)(lambda text: bool(text) and any(find(text) for find in finders))


def _finder(pattern: str) -> Find:
    """Return the search for a pattern, or `match` if that is equivalent."""
    compiled = re.compile(pattern)
    return compiled.match if pattern.startswith(r"\A") and not _has_outer_choice(pattern) else compiled.search


def _has_outer_choice(pattern: str) -> bool:
    """Return whether a pattern may have a `|` outside all groups; then `\\A` applies only to the first branch."""
    depth = 0
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]|[()|]", pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth <= 0:
            return True
    return False


Mode = Literal["full", "readonly", "off"]
MODES: tuple[Mode, ...] = ("full", "readonly", "off")

MODE_HEADER = "X-Memory-Mode"
NO_MODE = f"{MODE_HEADER} is none of {', '.join(MODES)}"
TOPIC_HEADER = "X-Memory-Topic"
SESSION_HEADER = "X-Memory-Session"
HISTORY_HEADER = "X-Memory-History"
BAD_MEMORY_IN = "bad-memory-in"
BAD_MODE = "bad-mode"
BAD_TOPIC = "bad-topic"
"""The status of a request whose header or user names an illegal topic."""
NO_TOPIC_NOTE = "What it names is no topic; X-Memory-Problem of its response said why."
"""Note of a receipt without a topic. It quotes nothing of the request, because erasing a topic does not reach it."""
READ_AT_ONCE_BYTES = 32 * 1024
"""Bodies up to this size are parsed and counted on the event loop; 10 ms if they consist of small tool calls."""
UNREADABLE_BODY = "degraded:unreadable"
"""The status of a request whose body memd cannot read."""
SESSION_CHARACTERS_MAX = 256
THIN_SESSION = "history: daemon"
"""The session of a thin client (one that sends only new messages) without a session name: one per topic."""
CREDENTIALS = ("Authorization", "X-Api-Key")


TopicFrom = Literal["memory_in", "header", "user", "path"]
"""The source of a request's topic; `path` includes the default topic."""


class Call(msgspec.Struct, frozen=True):
    """A request that arrived at the model's address and was let in."""

    client: web.Request
    api: Api | None
    """None if memory has no part in it."""
    target: str
    """Path and query to forward to."""
    path_topic: str | None = None
    """The topic in the path, if any."""
    mode: Mode = "off"


class Plain(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a model without memory."""

    api: Api
    turn_id: str
    """For `X-Memory-Turn`."""
    target: str
    headers: CIMultiDict[str]
    """To forward."""
    body: bytes
    """To forward: the client's bytes, without the sideband if there was one."""
    mode: Mode
    status: str
    """For `X-Memory-Status`."""
    hints: Callable[[], Hints] = partial(Hints, only_computes=True)
    problem: str = ""
    """Why memory had no part in a request that asked for it. Clients resend their MemoryIn if they get no MemoryOut."""
    streams: bool = False
    """A stream was asked for."""
    receipt: Receipt | None = None
    """The receipt of a request that memory should have had a part in, without texts: some may have been erased."""

    @property
    def is_refused(self) -> bool:
        """True if its MemoryIn is malformed; the answer's body says so."""
        return self.status == BAD_MEMORY_IN

    @property
    def memory_out(self) -> MemoryOut:
        """The MemoryOut of the response's body that reports a refused MemoryIn."""
        return MemoryOut((), signals=(Signal(type="memory_in_refused", reason=self.problem),))


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a model, before its conversation is known."""

    turn_id: str
    api: Api
    target: str
    headers: CIMultiDict[str]
    request: ModelRequest
    mode: Mode
    topic_id: str
    topic_from: TopicFrom
    session: str | None
    """The client's name for the conversation."""
    who: Principal
    is_held_back: bool
    """`who` may not write in the topic, so `full` became `readonly`."""
    is_thin: bool
    """The client sends only new messages and leaves the history to memd."""
    packed: bytes | None
    """The body as received, if it had a content coding."""

    @property
    def has_only_new(self) -> bool:
        """True if the history is kept by memd or the upstream, not by the client."""
        return self.is_thin or bool(self.request.goes_on_with)

    @property
    def credentials(self) -> CIMultiDict[str]:
        """The client's credentials, for memd's own requests to the upstream."""
        return CIMultiDict((name, self.headers[name]) for name in CREDENTIALS if name in self.headers)

    def sent(self, body: bytes) -> tuple[CIMultiDict[str], bytes]:
        """Return the headers and body to forward: as received if the body is unchanged, else without content coding."""
        if self.packed is None:
            return self.headers, body
        if body is self.request.original:
            return self.headers, self.packed
        headers = self.headers.copy()
        headers.popall("Content-Encoding", None)
        return headers, body

    def without_memory(self, status: str, problem: str = "") -> Plain:
        """Return the same request, to be forwarded without memory; `problem`: what is wrong with it."""
        if problem:
            log.warning("a request goes on without memory", extra={"turn": self.turn_id, "problem": problem})
        headers, body = self.sent(self.api.encode(self.request))
        memory_in, is_meant = self.request.memory_in, status == "none"
        if not problem and memory_in is not None and (memory_in.corrections or memory_in.notes):
            problem = f"the request went on without memory: {status}"
        receipt = None if is_meant else _receipt(self, self.who, self.topic_id, status, problem, self.request.model)
        return Plain(
            api=self.api,
            turn_id=self.turn_id,
            target=self.target,
            headers=headers,
            body=body,
            mode=self.mode,
            status=status,
            hints=partial(_hints, self.request, self.session),
            problem=problem,
            streams=self.request.stream,
            receipt=receipt,
        )


class RequestReader:
    """Reads requests. Caches parsed messages, because clients send their history again and again."""

    def __init__(
        self, config: Config, principals: Principals, redactor: Redactor, speech: Speech, counter: TokenCounter
    ) -> None:
        """`speech`: finds the words said in a message."""
        self._counter = counter
        self._principals = principals
        self._history = config.conversation.history
        self._topic_headers = [name for name in (TOPIC_HEADER, config.topics.header) if name]
        self._from_user = config.topics.from_user
        self._session_headers = [name for name in (SESSION_HEADER, config.conversation.header) if name]
        self._redactor = redactor
        self._cache = MessageCache(speech=speech)
        self._side_requests = SideRequests(programs_of(config.ingest))

    @property
    def cache_bytes(self) -> int:
        """Memory held by the parsed messages."""
        return self._cache.bytes_held

    def mode(self, request: web.Request) -> tuple[Mode, str]:
        """Return the memory mode of a request, and its status if memory has no part in it or the mode is illegal.

        Without tokens the mode is `off` for pages of other machines, and for requests forwarded by a proxy. It is also
        `off` for an illegal value: a mistyped `readonly` or `off` must not be stored.
        """
        turn_id = record_of(request).turn
        if self._principals.is_open and is_from_foreign_page(request):
            fields = {"turn": turn_id, "origin": request.headers["Origin"][:200]}
            log.warning("a web page gets no memory", extra=fields)
            return "off", "off"
        if self._principals.is_open and forwarding_header(request) is not None:
            log.warning("a request that a proxy passed on gets no memory: set auth.token", extra={"turn": turn_id})
            return "off", "token-required"
        named = ",".join(request.headers.getall(MODE_HEADER, [])).strip().lower() or "full"
        for mode in MODES:
            if named == mode:
                return mode, "off" if mode == "off" else "none"
        return "off", BAD_MODE

    def unread(self, call: Call, body: bytes, problem: object, status: str = UNREADABLE_BODY) -> Plain:
        """Return a request whose body memd cannot or must not read, to be forwarded unchanged; the log says why."""
        client, api = call.client, call.api
        assert api is not None
        turn_id = record_of(client).turn
        fields = {"turn": turn_id, "problem": problem, "api": api.name}
        why = ": memd cannot read its body" if status == UNREADABLE_BODY else ""
        log.warning(f"a request goes on without memory{why}", extra=fields)
        plain = Plain(
            api=api,
            turn_id=turn_id,
            target=call.target,
            headers=forwarded_headers(client, self._principals),
            body=body,
            mode=call.mode,
            status=status,
            problem=str(problem),
        )
        topic_id = _first_of(client, self._topic_headers) or call.path_topic or DEFAULT_TOPIC_ID
        receipt = _receipt(plain, principal_of(client), topic_id, status, plain.problem)
        return msgspec.structs.replace(plain, receipt=receipt)

    async def read(self, call: Call, body: bytes, packed: bytes | None = None) -> Asked | Plain:
        """Parse a request of an API with memory.

        Args:
            packed: see `Asked`; then `body` is the unpacked body.

        Raises:
            Forbidden: the principal may not read the topic.
        """
        client, api = call.client, call.api
        assert api is not None
        headers, turn_id = forwarded_headers(client, self._principals), record_of(client).turn
        try:
            if len(body) <= READ_AT_ONCE_BYTES:
                request, is_side_request = self._parsed(api, body)
            else:
                request, is_side_request = await asyncio.to_thread(self._parsed, api, body)
        except Exception as error:
            if not isinstance(error, BadRequestBody):  # a bug here must not cost the user the answer
                log.exception("a request cannot be read", extra={"turn": turn_id})
            return self.unread(call, body if packed is None else packed, error)
        history = client.headers.get(HISTORY_HEADER, self._history)
        is_thin = history.strip().lower() == "daemon" and not request.goes_on_with
        session = self._session(client)
        topic_id, topic_from = self._topic(client, request, call.path_topic)
        who = principal_of(client)
        is_held_back = call.mode == "full" and not who.may("write", topic_id)
        asked = Asked(
            turn_id=turn_id,
            api=api,
            target=call.target,
            headers=headers,
            request=request,
            mode="readonly" if is_held_back else call.mode,
            topic_id=topic_id,
            topic_from=topic_from,
            session=session or request.goes_on_with or (THIN_SESSION if is_thin else None),
            who=who,
            is_held_back=is_held_back,
            is_thin=is_thin,
            packed=packed,
        )
        if problem := request.memory_in_error or _exceeded_limit(request.memory_in):
            return asked.without_memory(BAD_MEMORY_IN, problem)
        if is_side_request:
            return asked.without_memory("none")
        if problem := _bad_topic(asked):
            return asked.without_memory(BAD_TOPIC, problem)
        who.check("read", topic_id)
        return asked

    def _parsed(self, api: Api, body: bytes) -> tuple[ModelRequest, bool]:
        """Parse a request and count its messages' tokens. Also return whether a program makes it for itself."""
        request = self._side_requests.by_its_speaker(read_request(api, body, self._cache))
        self._counter.messages(request.messages[request.read_before :], request.digests[request.read_before :])
        return request, self._side_requests.includes(request)

    def hints(self, call: Call, body: bytes | None) -> Hints:
        """Return the routing hints of a request that passes unread.

        Requests about the server itself, and those that change something in it, go to the first server.
        """
        client, api = call.client, call.api
        if client.method in ("GET", "HEAD"):
            return Hints(only_computes=True, is_spread=False)
        if api is not None and body is not None and client.headers.get("Content-Encoding", "identity") == "identity":
            try:
                return _hints(read_request(api, body), self._session(client))
            except BadRequestBody:
                pass
        model = _named_model(body)
        return Hints(model=model, only_computes=api is not None, is_spread=api is not None or bool(model))

    def _session(self, client: web.Request) -> str:
        return self._redactor.identifier(_first_of(client, self._session_headers)[:SESSION_CHARACTERS_MAX])

    def _topic(self, client: web.Request, request: ModelRequest, path_topic: str | None) -> tuple[str, TopicFrom]:
        """Return the topic that a request names, and its source; the most specific source wins."""
        memory_in = request.memory_in
        if memory_in is not None and memory_in.topic_id is not None:
            return memory_in.topic_id, "memory_in"
        named = _first_of(client, self._topic_headers)
        if named:
            return named, "header"
        user = request.user if self._from_user else ""
        if user is None or user.strip():  # an illegal `user` names no topic: otherwise all such users would share one
            return (user or "").strip(), "user"
        return path_topic or DEFAULT_TOPIC_ID, "path"


async def unpacked(packed: bytes, codings: tuple[str, ...], bytes_max: int, take: Take) -> bytes:
    """Unpack a body in a thread; `take` reserves the bytes of each piece before the next one is unpacked. Raises
    BadCoding, TooLarge: see `unpacked_parts`; TooManyBodies: there is no room for it."""
    parts, whole = unpacked_parts(packed, codings, bytes_max), []
    while part := await asyncio.to_thread(next, parts, b""):
        take(len(part))
        whole.append(part)
    return b"".join(whole)


class _Named(msgspec.Struct, frozen=True):
    """The field with the model's name, in OpenAI's APIs and in Ollama's."""

    model: str = ""
    name: str = ""


def _named_model(body: bytes | None) -> str:
    """Return the model named in any request body; empty if there is none."""
    try:
        named = msgspec.json.decode(body or b"{}", type=_Named)
    except UNREADABLE:
        return ""
    return named.model or named.name


def _hints(request: ModelRequest, session: str | None) -> Hints:
    trail = trail_of(request, (session,) if session else ())
    return Hints(model=request.model, trail=trail, only_computes=True)


def _first_of(client: web.Request, names: list[str]) -> str:
    """Return the value of the first of these headers that is not empty."""
    return next((value for name in names if (value := client.headers.get(name, "").strip())), "")


def _receipt(
    one: Plain | Asked, who: Principal, topic_id: str, status: str, problem: str, model: str = ""
) -> Receipt | None:
    """Return the receipt of a request that goes on without memory; None if `who` may not read the topic."""
    topic_id = topic_id if TOPIC_ID_PATTERN.fullmatch(topic_id) else ""
    if not who.may("read", topic_id):
        return None
    return Receipt(
        turn_id=one.turn_id,
        at=time.time_ns() // 1000,
        topic_id=topic_id,
        api=one.api.path,
        mode=one.mode,
        model=model,
        author=who.author,
        status=status,
        note=(problem or None) if topic_id else NO_TOPIC_NOTE,
    )


def _bad_topic(asked: Asked) -> str:
    """Return why a request's header or user names no topic. Using a default instead would mix users' memories."""
    try:
        checked_topic_id(asked.topic_id if asked.topic_from in ("header", "user") else DEFAULT_TOPIC_ID)
    except BadTopicId as error:
        return f"{error} ({asked.topic_from})"
    return ""


CORRECTIONS_MAX = 1_000
"""Limit on chunks corrected in one request."""
RELATED_TOPICS_MAX = 64
"""Limit per request; each is opened and searched."""


def _exceeded_limit(memory_in: MemoryIn | None) -> str | None:
    """Return the limit that a MemoryIn exceeds, in words."""
    if memory_in is None:
        return None
    named = sum(max(1, len(correction.chunk_ids)) for correction in memory_in.corrections)
    if named > CORRECTIONS_MAX:
        return f"memory_in corrects {named} chunks, more than {CORRECTIONS_MAX:,}"
    related = len(memory_in.related_topic_ids)
    if related > RELATED_TOPICS_MAX:
        return f"memory_in has {related} related topics, more than {RELATED_TOPICS_MAX}"
    return None
