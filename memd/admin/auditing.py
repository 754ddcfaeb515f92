"""The audit: who did what, written in the background by a running daemon, and read by people.

Rule: noting an act decides nothing and never blocks. If the disk is full, requests go on and their acts are queued.
Only acts that remove memory or export it as a whole (`BEFOREHAND`) need their line on disk first, and fail without it.
Requests to a model are reported from their receipts and not written again. The line that begins an act is hidden once a
line ends it. Reading needs no daemon: the route and the command share `audit_of`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Meta

from memd import __version__
from memd.access import principal_of
from memd.admin import routing
from memd.admin.parts import DaemonParts
from memd.admin.routing import ALL_TOPICS, BEFOREHAND, FORBIDDEN, IDS_MAX, Extent, PeriodQuery, Route, get, names_of
from memd.admin.tokens import user_name
from memd.errors import BadQuestion, MemdError, StoreError
from memd.principals import OWNER, OWNER_NAME, Principal, Principals, is_among
from memd.recall.explained import INJECTED
from memd.receipts import Receipt, receipt_in
from memd.settings.model import Config
from memd.store.audit import Act, ActKind, AuditBook, Head, KnownHead, head_from, not_done, read_book
from memd.store.disk import LocalDisk
from memd.telemetry.metrics import CLIENT_GONE

log = logging.getLogger("memd")

BATCH_SECONDS = 0.5
"""Acts within this time are written together, with one fsync."""
RETRY_SECONDS = 5.0
ANCHOR_SECONDS = 3_600.0
WAITING_MAX = 10_000
"""Acts queued while the disk cannot be written, a few megabytes; beyond that only their number is kept."""
_GROUP_DIGITS = 12
ENDLESS = "text/event-stream"
"""An answer of this type never ends, so its act is noted when it begins."""


class Auditor:
    """Records acts. Used on the event loop, where a line costs some microseconds."""

    def __init__(self, book: AuditBook, principals: Principals, record: str, command: str = "") -> None:
        """`principals`: those who may use memd. `record`: the setting `audit.record`. `command`: the command in which
        this process runs; empty in a daemon for clients."""
        self._book = book
        self.principals = principals
        self._record = record
        self._is_begun = book.is_kept(record)
        self._command = command
        self._waiting: list[Act] = []
        self._lost = 0
        self._head: Head | None = None
        self._has_some = asyncio.Event()
        self._appending = asyncio.Lock()
        self._has_failed = False

    @property
    def is_on(self) -> bool:
        """True if acts are recorded; an audit that has begun continues even without any token."""
        if not self._is_begun and self._record == "auto":
            self._is_begun = bool(self.principals.names)
        return self._is_begun

    def note(self, act: Act) -> None:
        """Queue an act; it is on disk soon."""
        if not self.is_on:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._lost += 1
        else:
            self._waiting.append(act)
        self._has_some.set()

    def by(self, request: web.BaseRequest, kind: str, what: str, topics: tuple[str, ...], **more: Any) -> Act:
        """Return an act of the request's sender; on all topics is on those of the token."""
        who = principal_of(request)
        named = who.topics if ALL_TOPICS in topics and len(who.topics) <= routing.TOPICS_MAX else topics
        source = self._command or who.via or request.remote or ""
        return Act(at=_now(), act=kind, who=self.name_of(who), source=source, what=what, topics=named, **more)

    def name_of(self, who: Principal) -> str:
        """Return the name recorded for a principal; in a command that opens the memory itself, the name of its user."""
        return user_name() if self._command else who.name

    def note_wrong_tokens(self, address: str, attempts: int) -> None:
        """Record requests without a token, or with an unknown one."""
        detail = "no token, or a wrong one"
        self.note(Act(at=_now(), act="refused", who="", source=address, detail=detail, times=attempts))

    def note_refused(self, request: web.BaseRequest, what: str, topic_id: str = "") -> None:
        """Record that an authenticated principal lacked a right."""
        if self.is_on:
            self.note(self.by(request, "refused", what, topics=names_of([topic_id]), status=FORBIDDEN))

    def note_start(self, config: Config, names: Sequence[str]) -> None:
        """Record a daemon's start: its version, checksums of its settings, and the names of token holders."""
        if self._command or not self.is_on:
            return
        groups = msgspec.to_builtins(config, enc_hook=str)  # paths
        groups["auth"] = ""  # the checksum of a short token would reveal it
        encoded = {name: msgspec.json.encode(value, order="sorted") for name, value in groups.items()}
        settings = {name: hashlib.sha256(value).hexdigest()[:_GROUP_DIGITS] for name, value in encoded.items()}
        who, version = user_name(), f"memd {__version__}"
        self.note(Act(at=_now(), act="start", who=who, detail=version, settings=settings, tokens=tuple(names)))

    def note_tokens(self, files: str, changes: str) -> None:
        """Record that the running daemon loaded tokens changed in files, by an unknown user."""
        self.note(Act(at=_now(), act="settings", who="memd", source=files, detail=f"tokens {changes}"))

    async def record_token(self, request: web.BaseRequest, name: str, detail: str) -> None:
        """Write that a token was issued in somebody's name, or revoked. Raises StoreError: it was not written, so no
        token may be issued."""
        what = f"{request.method} {request.path}"
        given = Act(at=_now(), act="token", who=name, source=request.remote or "", what=what, detail=detail)
        await self._write_first(given)

    async def begin(self, act: Act) -> int:
        """Write the line that begins an act, and all queued ones; return its number, 0 if nothing is recorded. Raises
        StoreError: it was not written, so the act must not happen."""
        return await self._write_first(msgspec.structs.replace(act, begins=True))

    async def _write_first(self, act: Act) -> int:
        if not self.is_on:
            return 0
        try:
            return (await self._append([act])).n
        except StoreError as error:
            raise not_done(error) from error

    async def tend(self) -> None:
        """Write queued acts, and every hour the head into the log, until cancelled."""
        anchored = time.monotonic()
        while True:
            await self._has_some.wait()
            await asyncio.sleep(BATCH_SECONDS)
            if not await self.flush():
                await asyncio.sleep(RETRY_SECONDS)
                self._has_some.set()
            elif time.monotonic() - anchored >= ANCHOR_SECONDS:
                anchored = time.monotonic()
                await self.anchor()

    async def flush(self) -> bool:
        """Write queued acts; return whether that worked."""
        self._has_some.clear()
        try:
            await self._append([])  # waits for a concurrent append
        except StoreError as error:
            if not self._has_failed:
                log.error("the audit cannot be written and is tried again", extra={"error": error})
            self._has_failed = True
            return False
        if self._has_failed:
            log.info("the audit is written again")
        self._has_failed = False
        return True

    async def written(self) -> Head | None:
        """Write queued acts; return the head known to this process, None if nothing is recorded."""
        await self.flush()
        return self._head if self.is_on else None

    async def anchor(self) -> None:
        """Store the present head in a file and in the log, so that changes to earlier lines are detected."""
        if not self.is_on:
            return
        try:
            head = await asyncio.to_thread(self._book.keep_head)
        except StoreError as error:
            log.warning("the head of the audit is not kept for now", extra={"error": error})
            return
        log.info("the head of the audit", extra={"head": str(head)})

    async def end(self) -> None:
        """Write the remaining acts and the head when the daemon ends."""
        if not self._command:
            self.note(Act(at=_now(), act="stop", who=user_name()))
        if self._waiting and await self.flush():
            await self.anchor()

    async def _append(self, more: Sequence[Act]) -> Head:
        async with self._appending:
            waiting, self._waiting = self._waiting, []
            lost, self._lost = self._lost, 0
            merged: dict[object, Act] = {}  # equal refusals in quick succession are one line
            for number, act in enumerate(waiting):
                is_refused = act.act == "refused"
                key = (act.who, act.source, act.what, act.detail, *act.topics) if is_refused else number
                times = act.times + (merged[key].times if key in merged else 0)
                merged[key] = msgspec.structs.replace(merged.get(key, act), times=times)
            acts = [*merged.values(), *([Act(at=_now(), act="lost", who="memd", count=lost)] if lost else []), *more]
            if not acts:  # the previous append wrote them
                return self._head or Head()
            try:
                # A cancelled caller leaves the thread running: the acts are written once and not queued again.
                self._head = await asyncio.to_thread(self._book.append, acts)
            except StoreError:
                self._waiting, self._lost = waiting + self._waiting, lost + self._lost
                raise
            return self._head


@asynccontextmanager
async def own_erasure(auditor: Auditor, who: str, topic_id: str, chunks: int) -> AsyncIterator[None]:
    """Write audit lines around an erasure by memd itself. Raises StoreError: the first line cannot be written; the
    block did not run."""
    act = Act(at=_now(), act="erase", who=who, source="memd", topics=names_of([topic_id]), count=chunks)
    began = await auditor.begin(act)
    detail = "failed"
    try:
        yield
        detail = ""
    finally:
        auditor.note(msgspec.structs.replace(act, at=_now(), ends=began, detail=detail))


class Streamed(NamedTuple):
    """An answer that was sent in pieces."""

    response: web.StreamResponse
    lines: int


async def audited(
    auditor: Auditor, request: web.Request, route: Route, asked: Extent, answer: Callable[[], Awaitable[Any]]
) -> Any:
    """Answer a request to one of memd's own routes and record it. `asked`: the extent of the request."""
    kind: str | None = route.act
    if kind is None or not auditor.is_on:
        return await answer()
    what = f"{route.method} {route.path}"
    facts = msgspec.structs.asdict(asked)
    if route.streams == ENDLESS:
        facts["detail"] = "all that happens, from then on"
        auditor.note(auditor.by(request, kind, what, **facts))
        return await answer()
    began = await auditor.begin(auditor.by(request, kind, what, **facts)) if kind in BEFOREHAND else 0
    status, told = 500, asked
    try:
        answered = await answer()
        if isinstance(answered, Streamed):
            status, told = answered.response.status, msgspec.structs.replace(asked, count=answered.lines)
        else:
            status, told = 200, asked.and_of(Extent() if route.touches is None else route.touches(answered))
        return answered
    except MemdError as error:
        status = error.status
        raise
    except asyncio.CancelledError:
        status = CLIENT_GONE
        raise
    finally:
        kind = "refused" if status == FORBIDDEN else kind
        facts = msgspec.structs.asdict(told)
        auditor.note(auditor.by(request, kind, what, status=status, ends=began, **facts))


def _now() -> int:
    return time.time_ns() // 1000


class AuditQuery(PeriodQuery, frozen=True, kw_only=True):
    """`GET /memd/audit`."""

    who: Annotated[tuple[str, ...], Meta(description="Only what this principal did; may be given again.")] = ()
    act: Annotated[tuple[ActKind, ...], Meta(description="Only this kind of act; may be given again.")] = ()
    expect: Annotated[str | None, Meta(description="A head that was kept, which the record must still have.")] = None


class AuditedAct(Act, frozen=True, kw_only=True):
    """An act with its origin."""

    n: int = 0
    """Number of its line; 0 if it comes from a receipt or from comparing two starts."""
    daemon: str = ""
    """In a cluster, the daemon whose record it is in."""


class ChainState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the chain is whole."""

    is_whole: bool
    lines: int
    head: str
    """The last line's `NUMBER:HASH`, to be stored elsewhere."""
    findings: tuple[str, ...]
    """Missing or changed lines, with their places."""
    notices: tuple[str, ...]


class AuditAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Acts, oldest first, and whether any may be missing."""

    chain: ChainState | None
    """None if no chain was ever begun here. In a cluster, the chain of the daemon that was asked."""
    receipts_since: int | None
    """Time of the oldest receipt, in microseconds since the epoch; earlier requests to a model are unknown."""
    acts: tuple[AuditedAct, ...]


@get("/memd/audit", "admin", act="audit", touches=lambda answer: Extent(count=len(answer.acts)))
async def audit(parts: DaemonParts, query: AuditQuery) -> AuditAnswer:
    """Who read, wrote, corrected, erased and exported what, and whether the record of it is whole."""
    head = await parts.auditor.written()
    known = [KnownHead(head, "the running daemon")] if head is not None else []
    files, data_dir = parts.store.files, parts.config.data_dir
    answer = await asyncio.to_thread(lambda: audit_of(files, data_dir, parts.receipts.lines(OWNER), query, known))
    acts = tuple(msgspec.structs.replace(act, daemon=parts.name) for act in answer.acts)
    return msgspec.structs.replace(answer, acts=acts) if parts.name else answer


def audit_of(
    files: LocalDisk, data_dir: Path, receipts: Iterable[bytes], query: AuditQuery, known: Sequence[KnownHead] = ()
) -> AuditAnswer:
    """Read the audit of a data directory. `receipts`: raw lines of the files. `known`: heads that the chain must
    contain. Raises StoreError: a file cannot be read; BadQuestion: `expect` is not a head."""
    if query.expect is not None:
        try:
            known = [*known, KnownHead(head_from(query.expect), "the head that was expected")]
        except ValueError as error:
            raise BadQuestion(str(error)) from None

    def wanted(act: Act) -> bool:
        return (
            query.has(act.at)
            and (not query.who or act.who in query.who)
            and (not query.topic or any(is_among(topic, act.topics) for topic in query.topic))
            and (not query.act or act.act in query.act)
        )

    kept = read_book(files, data_dir, lambda act: act.act in ("start", "restore") or wanted(act), known)
    oldest, told = 1 << 63, list[AuditedAct]()
    for receipt in map(receipt_in, receipts):
        if receipt is not None:  # None: torn, or the first line of a file
            oldest = min(oldest, receipt.at)
            told += [_numbered(act) for act in _acts_of(receipt) if wanted(act)]
    chain = None
    if kept is not None:
        told += [one for one in _without_beginnings(kept.acts) if wanted(one)]
        head, findings = kept.head, kept.findings
        chain = ChainState(is_whole=not findings, lines=head.n, head=str(head), findings=findings, notices=kept.notices)
    since = None if oldest == 1 << 63 else oldest
    return AuditAnswer(chain=chain, receipts_since=since, acts=tuple(sorted(told, key=lambda one: (one.at, one.n))))


def note_turn(auditor: Auditor, receipt: Receipt) -> None:
    """Record the acts of a turn whose receipt is not kept."""
    if auditor.is_on:
        for act in _acts_of(receipt):
            auditor.note(msgspec.structs.replace(act, turn=""))


def _without_beginnings(acts: Sequence[tuple[int, Act]]) -> Iterator[AuditedAct]:
    """Yield the acts of a chain and, between two starts of a daemon, the settings that changed. A restored backup's
    chain has only the beginning of the backup's act; the line of the restoration shows that it ended."""
    ended = {act.ends for _, act in acts if act.ends and act.act != "restore"}
    restored = {act.ends for _, act in acts if act.act == "restore"}
    before: Act | None = None
    for number, act in acts:
        if number not in ended:
            yield _numbered(msgspec.structs.replace(act, begins=act.begins and number not in restored), number)
        if act.act == "start":
            if before is not None:
                yield from _changes(before, act)
            before = act


def _numbered(act: Act, number: int = 0) -> AuditedAct:
    return AuditedAct(**{name: getattr(act, name) for name in Act.__struct_fields__}, n=number)


def _changes(before: Act, now: Act) -> Iterator[AuditedAct]:
    by: dict[str, Any] = {"at": now.at, "who": now.who, "source": "seen when the daemon started"}
    groups = sorted(name for name, digest in now.settings.items() if before.settings.get(name, digest) != digest)
    if groups:
        yield AuditedAct(act="settings", detail=f"changed: {', '.join(groups)}", **by)
    for word, names in (
        ("added", set(now.tokens) - set(before.tokens)),
        ("gone", set(before.tokens) - set(now.tokens)),
    ):
        if names:
            yield AuditedAct(act="token", detail=f"{word}: {', '.join(sorted(names))}", **by)


def _acts_of(receipt: Receipt) -> Iterator[Act]:
    facts: dict[str, Any] = {
        "at": receipt.at,
        "who": receipt.author or OWNER_NAME,
        "what": receipt.api,
        "turn": receipt.turn_id,
        "status": receipt.http_status,
    }
    topic = (receipt.topic_id,)
    injected = [one.uuid for one in receipt.candidates if one.verdict == INJECTED]
    if receipt.shown or injected:
        ids = tuple(injected or receipt.shown)[:IDS_MAX]
        yield Act(act="read", topics=(*topic, *receipt.related), ids=ids, count=len(receipt.shown or injected), **facts)
    if receipt.conversation and receipt.mode == "full" and not receipt.is_retry:
        yield Act(act="write", topics=topic, **facts)
    failed = {one.get("chunk_id") for one in receipt.signals if one.get("type") == "correction_failed"}
    asked = [one for correction in receipt.corrections for one in correction.chunk_ids]
    for detail, named in (
        ("", [one for one in asked if one not in failed]),
        ("not corrected", [one for one in asked if one in failed]),
    ):
        if named:
            some = tuple(named[:IDS_MAX])
            yield Act(act="correct", topics=topic, ids=some, count=len(named), detail=detail, **facts)
