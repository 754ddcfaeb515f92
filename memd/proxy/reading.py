"""From an HTTP request to `Asked`: what the client wants of memory and of the model.

Rule: a request is refused only for what no upstream could answer; whatever else is odd about it is the upstream's to
judge, and passes untouched.

The requests that a program makes for itself (a title, tags, a summary), and those of agents that another agent called,
are told from those of its user by the words of the program's own prompt alone. Most patterns begin with `\\A`; these
are tried at the beginning and nowhere else, because `re.search` would try each of them at every character of a long
message.
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
"""Of a longer text only its beginning is looked at."""
_INSTRUCTIONS_MAX = 32  # system prompts recur in every request of a program; a long one takes 0.3 ms to look through

SUB_AGENT = "sub-agent"
"""The name of who speaks as the user to an agent that another agent called."""

Find = Callable[[str], re.Match[str] | None]


class SideRequests:
    """Recognises them."""

    def __init__(self, programs: Programs) -> None:
        """`programs`: the patterns in force."""
        self._asks = [_finder(pattern) for pattern in programs.ignore]
        self._is_instructed = _cached_find(programs.ignore_system)
        self._is_called = _cached_find(programs.sub_agent)

    def includes(self, request: ModelRequest) -> bool:
        """Whether the request is one of them: it is passed on, and not remembered."""
        last = next((message.said for message in reversed(request.messages) if message.role == "user"), "")
        said = last[:SEARCHED_CHARACTERS_MAX]
        return any(find for find in self._asks if find(said)) or self._is_instructed(_instructions(request))

    def by_its_speaker(self, request: ModelRequest) -> ModelRequest:
        """The request; where an agent called another one, its user's messages are by name those of an agent."""
        return renamed(request, SUB_AGENT) if self._is_called(_instructions(request)) else request


def _instructions(request: ModelRequest) -> str:
    return request.instructions[:SEARCHED_CHARACTERS_MAX]


def _cached_find(patterns: Iterable[str]) -> Callable[[str], bool]:
    finders = [_finder(pattern) for pattern in patterns]
    return lru_cache(_INSTRUCTIONS_MAX)(lambda text: bool(text) and any(find(text) for find in finders))


def _finder(pattern: str) -> Find:
    """The search for a pattern; a match where that is the same."""
    compiled = re.compile(pattern)
    return compiled.match if pattern.startswith(r"\A") and not _has_outer_choice(pattern) else compiled.search


def _has_outer_choice(pattern: str) -> bool:
    """Whether a pattern may have a `|` outside all groups: then `\\A` holds for its first branch alone."""
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
"""The status of a request whose header names a topic that cannot be."""
NO_TOPIC_NOTE = "What it names is no topic; X-Memory-Problem of its response said why."
"""No erasure of a topic reaches such a receipt, so it repeats nothing of the request."""
READ_AT_ONCE_BYTES = 32 * 1024
"""A body that is read, and its tokens counted, on the event loop; one of nothing but small tool calls takes 10 ms."""
UNREADABLE_BODY = "degraded:unreadable"
"""The status of a request whose body memd cannot read."""
SESSION_CHARACTERS_MAX = 256
THIN_SESSION = "history: daemon"
"""The session of a thin client (one that sends only what is new) that names none: one conversation per topic."""
CREDENTIALS = ("Authorization", "X-Api-Key")


TopicFrom = Literal["memory_in", "header", "user", "path"]
"""Who named a request's topic; a path that names none is that of the default topic."""


class Call(msgspec.Struct, frozen=True):
    """A request that came at the model's address and was let in."""

    client: web.Request
    api: Api | None
    """None: memory has no part in it."""
    target: str
    """Path and query to forward to."""
    path_topic: str | None = None
    """The topic that the path names, if any."""
    mode: Mode = "off"


class Plain(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a model that memory has no part in."""

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
    """Why memory had no part in what asked for it. A client that sees no MemoryOut sends its MemoryIn again."""
    streams: bool = False
    """A stream was asked for."""
    receipt: Receipt | None = None
    """Of one that memory should have had a part in, without its texts: some may have been erased for good."""

    @property
    def is_refused(self) -> bool:
        """Whether its MemoryIn is malformed: the answer's body says so."""
        return self.status == BAD_MEMORY_IN

    @property
    def memory_out(self) -> MemoryOut:
        """The MemoryOut of the response's body, where the MemoryIn was refused."""
        return MemoryOut((), signals=(Signal(type="memory_in_refused", reason=self.problem),))


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a model, before it is known which conversation it belongs to."""

    turn_id: str
    api: Api
    target: str
    headers: CIMultiDict[str]
    request: ModelRequest
    mode: Mode
    topic_id: str
    topic_from: TopicFrom
    session: str | None
    """The client's name of the conversation."""
    who: Principal
    is_held_back: bool
    """`who` may not write in the topic, so that `full` became `readonly`."""
    is_thin: bool
    """The client sends only what is new and leaves its history to memd."""
    packed: bytes | None
    """The body as it came, where it came in a content coding."""

    @property
    def has_only_new(self) -> bool:
        """Whether somebody else than the client, memd or the upstream, has what was said before."""
        return self.is_thin or bool(self.request.goes_on_with)

    @property
    def credentials(self) -> CIMultiDict[str]:
        """The client's credentials, for questions of memd's own to the upstream."""
        return CIMultiDict((name, self.headers[name]) for name in CREDENTIALS if name in self.headers)

    def sent(self, body: bytes) -> tuple[CIMultiDict[str], bytes]:
        """The headers and the body to forward: as they came where nothing of it changes, else in no content coding."""
        if self.packed is None:
            return self.headers, body
        if body is self.request.original:
            return self.headers, self.packed
        headers = self.headers.copy()
        headers.popall("Content-Encoding", None)
        return headers, body

    def without_memory(self, status: str, problem: str = "") -> Plain:
        """The same request, to be forwarded without memory; `problem`: what is wrong with it."""
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
    """Reads requests; keeps parsed messages, because clients send their history again and again."""

    def __init__(
        self, config: Config, principals: Principals, redactor: Redactor, speech: Speech, counter: TokenCounter
    ) -> None:
        """`speech`: finds what was said in a message."""
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
        """The memory mode that a request asks for, and its status if memory has no part in it or it cannot be read.

        It is `off` where no token protects for a web page from elsewhere and for what a proxy passed on, from anywhere;
        and for a value that is no mode: who mistypes the one that stores nothing must not be stored.
        """
        turn_id = record_of(request).id
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
        """A request whose body, as it came, memd cannot read or must not; the log says why."""
        client, api = call.client, call.api
        assert api is not None
        turn_id = record_of(client).id
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
        """Understand a request that came through an API.

        Args:
            packed: see `Asked`; then `body` is what it unpacks to.

        Raises:
            Forbidden: the principal may not read the topic.
        """
        client, api = call.client, call.api
        assert api is not None
        headers, turn_id = forwarded_headers(client, self._principals), record_of(client).id
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
        """A request, of whose messages the tokens are counted, and whether a program makes it for itself."""
        request = self._side_requests.by_its_speaker(read_request(api, body, self._cache))
        self._counter.messages(request.messages[request.read_before :], request.digests[request.read_before :])
        return request, self._side_requests.includes(request)

    def hints(self, call: Call, body: bytes | None) -> Hints:
        """Return the hints of a request that passes through unread.

        What is asked of a server about itself goes to the first one, and so does what changes something in it.
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
        """The topic that a request names, the most particular first, and where."""
        memory_in = request.memory_in
        if memory_in is not None and memory_in.topic_id is not None:
            return memory_in.topic_id, "memory_in"
        named = _first_of(client, self._topic_headers)
        if named:
            return named, "header"
        user = request.user if self._from_user else ""
        if user is None or user.strip():  # what is no text names no topic: else all such users would share one
            return (user or "").strip(), "user"
        return path_topic or DEFAULT_TOPIC_ID, "path"


async def unpacked(packed: bytes, codings: tuple[str, ...], bytes_max: int, take: Take) -> bytes:
    """Unpack a body in a thread; `take` takes the room for each piece before there is a next one.

    Raises:
        BadCoding, TooLarge: see `unpacked_parts`.
        TooManyBodies: there is no room for it.
    """
    parts, whole = unpacked_parts(packed, codings, bytes_max), []
    while part := await asyncio.to_thread(next, parts, b""):
        take(len(part))
        whole.append(part)
    return b"".join(whole)


class _Named(msgspec.Struct, frozen=True):
    """The member in which a request names its model, in OpenAI's APIs and in Ollama's."""

    model: str = ""
    name: str = ""


def _named_model(body: bytes | None) -> str:
    """The model that the body of any request names; empty if there is none."""
    try:
        named = msgspec.json.decode(body or b"{}", type=_Named)
    except UNREADABLE:
        return ""
    return named.model or named.name


def _hints(request: ModelRequest, session: str | None) -> Hints:
    trail = trail_of(request, (session,) if session else ())
    return Hints(model=request.model, trail=trail, only_computes=True)


def _first_of(client: web.Request, names: list[str]) -> str:
    """The value of the first of these headers that has one."""
    return next((value for name in names if (value := client.headers.get(name, "").strip())), "")


def _receipt(
    one: Plain | Asked, who: Principal, topic_id: str, status: str, problem: str, model: str = ""
) -> Receipt | None:
    """The receipt of a request that goes on without memory; None where `who` has no right to be seen in the topic."""
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
    """Why the header or the user of a request names no topic: stored elsewhere, one user's words would be another's."""
    try:
        checked_topic_id(asked.topic_id if asked.topic_from in ("header", "user") else DEFAULT_TOPIC_ID)
    except BadTopicId as error:
        return f"{error} ({asked.topic_from})"
    return ""


CORRECTIONS_MAX = 1_000
"""Chunks that are corrected in one request."""
RELATED_TOPICS_MAX = 64
"""Of one request: each is opened and searched."""


def _exceeded_limit(memory_in: MemoryIn | None) -> str | None:
    """The limit that a MemoryIn exceeds, in words."""
    if memory_in is None:
        return None
    named = sum(max(1, len(correction.chunk_ids)) for correction in memory_in.corrections)
    if named > CORRECTIONS_MAX:
        return f"memory_in corrects {named} chunks, more than {CORRECTIONS_MAX:,}"
    related = len(memory_in.related_topic_ids)
    if related > RELATED_TOPICS_MAX:
        return f"memory_in has {related} related topics, more than {RELATED_TOPICS_MAX}"
    return None
