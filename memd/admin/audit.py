"""The audit as people read it: the chained file and the receipts in one order of time.

Rule: requests to a model are told from their receipts and written nowhere else; a line that begins an act is not told
where its end is. Reading needs no daemon: `audit_of` is what the route and the command share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from memd.admin.acts import ALL_TOPICS, IDS_MAX, Extent
from memd.admin.auditing import Auditor
from memd.admin.queries import AuditQuery
from memd.admin.receipts import Receipt, Receipts
from memd.admin.routing import get
from memd.errors import BadQuestion
from memd.principals import OWNER, OWNER_NAME
from memd.recall.explained import INJECTED
from memd.store.audit.book import read_book
from memd.store.audit.chain import Act, Checked, Head, KnownHead, head_from
from memd.store.files import Files
from memd.wire.lenient_json import decode_or_none


class AuditedAct(Act, frozen=True, kw_only=True):
    """One act and where it is from."""

    n: int = 0
    """Its line's number; 0: it is told by a receipt, or by the difference of two starts."""
    daemon: str = ""
    """In a cluster, whose record it is in."""


class ChainState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the chain is whole."""

    is_whole: bool
    lines: int
    head: str
    """Of the last line: `NUMBER:HASH`, to be kept elsewhere."""
    findings: tuple[str, ...]
    """Lines that are missing or were changed, and where."""
    notices: tuple[str, ...]


class AuditAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Acts, the oldest first, and whether any may be missing."""

    chain: ChainState | None
    """None: no chain was ever begun here. In a cluster that of the daemon that was asked."""
    receipts_since: int | None
    """When the oldest receipt is of, in microseconds since the epoch; what was asked of a model before is not known."""
    acts: tuple[AuditedAct, ...]


class _ReceiptCandidate(msgspec.Struct):
    uuid: str = ""
    verdict: str = ""


class _ReceiptCorrection(msgspec.Struct):
    chunk_ids: tuple[str, ...] = ()


class _ReceiptSignal(msgspec.Struct):
    type: str = ""
    chunk_id: str | None = None


class _ToldReceipt(msgspec.Struct):
    """The members of a receipt that are of interest."""

    turn_id: str
    at: int
    topic_id: str
    author: str = ""
    api: str = ""
    mode: str = ""
    http_status: int | None = None
    related: tuple[str, ...] = ()
    conversation: str = ""
    is_retry: bool = False
    candidates: tuple[_ReceiptCandidate, ...] = ()
    shown: tuple[str, ...] = ()
    corrections: tuple[_ReceiptCorrection, ...] = ()
    signals: tuple[_ReceiptSignal, ...] = ()


_receipts = msgspec.json.Decoder(_ToldReceipt)


class AuditRoutes:
    """Who did what."""

    def __init__(self, auditor: Auditor, receipts: Receipts, data_dir: Path, files: Files, daemon: str) -> None:
        """`daemon`: this one's name in a cluster; empty: it is alone."""
        self._daemon = daemon
        self._auditor = auditor
        self._receipts = receipts
        self._data_dir = data_dir
        self._files = files

    @get("/memd/audit", "admin", act="audit", touches=lambda answer: Extent(count=len(answer.acts)))
    async def audit(self, query: AuditQuery) -> AuditAnswer:
        """Who read, wrote, corrected, erased and exported what, and whether the record of it is whole."""
        head = await self._auditor.written()
        lines = await self._receipts.lines(OWNER)
        known = [KnownHead(head, "the running daemon")] if head is not None else []
        answer = await asyncio.to_thread(audit_of, self._files, self._data_dir, lines, query, known)
        acts = tuple(msgspec.structs.replace(act, daemon=self._daemon) for act in answer.acts)
        return msgspec.structs.replace(answer, acts=acts) if self._daemon else answer


def audit_of(
    files: Files, data_dir: Path, receipts: Iterable[bytes], query: AuditQuery, known: Sequence[KnownHead] = ()
) -> AuditAnswer:
    """Read the audit of a data directory.

    Args:
        receipts: as they stand in the files.
        known: heads that the chain must have.

    Raises:
        StoreError: a file cannot be read.
        BadQuestion: `expect` is no head.
    """
    if query.expect is not None:
        known = [*known, KnownHead(_head(query.expect), "the head that was expected")]
    wanted = partial(_is_wanted, query)
    kept = read_book(files, data_dir, lambda act: act.act == "start" or wanted(act), known)
    oldest, told = _told_by(receipts, wanted)
    if kept is not None:
        told += [one for one in _without_beginnings(kept.acts) if wanted(one)]
    chain = None if kept is None else state_of(kept)
    return AuditAnswer(chain=chain, receipts_since=oldest, acts=tuple(sorted(told, key=lambda one: (one.at, one.n))))


def _head(text: str) -> Head:
    try:
        return head_from(text)
    except ValueError as error:
        raise BadQuestion(str(error)) from None


def _is_wanted(query: AuditQuery, act: Act) -> bool:
    """Whether an act is asked for. One that was about all topics was about each."""
    return (
        (query.since or 0) <= act.at < (query.to or 1 << 63)
        and (not query.who or act.who in query.who)
        and (not query.topic or any(topic in act.topics for topic in (*query.topic, ALL_TOPICS)))
        and (not query.act or act.act in query.act)
    )


def note_turn(auditor: Auditor, receipt: Receipt) -> None:
    """Have the acts of a turn whose receipt is not kept among the lines of the chain."""
    if auditor.is_on:
        for act in _acts_of(msgspec.convert(receipt, _ToldReceipt, from_attributes=True)):
            auditor.note(msgspec.structs.replace(act, turn=""))


def state_of(kept: Checked) -> ChainState:
    """The state of a chain that was read."""
    head = kept.head
    return ChainState(
        is_whole=not kept.findings, lines=head.n, head=str(head), findings=kept.findings, notices=kept.notices
    )


def _without_beginnings(acts: Sequence[tuple[int, Act]]) -> Iterator[AuditedAct]:
    """The acts of a chain; between two starts of a daemon, what of its settings is another."""
    ended = {act.ends for _, act in acts if act.ends}
    before: Act | None = None
    for number, act in acts:
        if number not in ended:
            yield _numbered(act, number)
        if act.act == "start":
            if before is not None:
                yield from _changes(before, act)
            before = act


def _numbered(act: Act, number: int = 0) -> AuditedAct:
    facts: dict[str, Any] = {name: getattr(act, name) for name in Act.__struct_fields__}
    return AuditedAct(**facts, n=number)


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


def _told_by(lines: Iterable[bytes], wanted: Callable[[Act], bool]) -> tuple[int | None, list[AuditedAct]]:
    """When the oldest receipt is of, and the acts that receipts tell of."""
    oldest: int | None = None
    told: list[AuditedAct] = []
    for line in lines:
        receipt = decode_or_none(_receipts, line)
        if receipt is None:  # torn, or the first line of a file
            continue
        oldest = receipt.at if oldest is None else min(oldest, receipt.at)
        told += [_numbered(act) for act in _acts_of(receipt) if wanted(act)]
    return oldest, told


def _acts_of(receipt: _ToldReceipt) -> Iterator[Act]:
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
    failed = {one.chunk_id for one in receipt.signals if one.type == "correction_failed"}
    asked = [one for correction in receipt.corrections for one in correction.chunk_ids]
    for detail, named in (
        ("", [one for one in asked if one not in failed]),
        ("not corrected", [one for one in asked if one in failed]),
    ):
        if named:
            some = tuple(named[:IDS_MAX])
            yield Act(act="correct", topics=topic, ids=some, count=len(named), detail=detail, **facts)
