"""Receipts: the record of each turn: the question to memory, the chunks that it got, and the cost.

Rule: a receipt is written after the answer has gone to the client; an error costs only the receipt. They are written
and read in threads: tens of megabytes would hold up everyone else's requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memd.entries import Correction, digits_of_id
from memd.errors import StoreError
from memd.principals import Principal
from memd.recall.explained import INJECTED, ScoredChunk
from memd.selection import EVERYTHING, Selection
from memd.store.disk import Wiper
from memd.store.receipts import ReceiptRing, rewrite_receipts

if TYPE_CHECKING:
    from memd.ingest.erasing import Concern
    from memd.ingest.redaction import Redactor
    from memd.telemetry.events import Events

log = logging.getLogger("memd")

ASKED_CHARACTERS = 400
"""Of a question in lists, and of one that a later step of a tool loop repeats."""
KEPT_CHARACTERS = 8_000
"""Of a question and of a reply: receipts are bounded, and the log has the whole."""
ERASED_NOTE = "Its texts were erased."
FAILED_ID_DIGITS_MAX = 12
"""An id that means no chunk and has more is taken for a secret."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, filled in step by step while it runs. Tokens are the model's, estimated unless told by it."""

    turn_id: str
    at: int
    """Microseconds since the epoch."""
    topic_id: str
    api: str
    mode: str
    model: str
    author: str = ""
    """The name of whoever asked, by their token; empty: the owner."""
    related: tuple[str, ...] = ()
    status: str = "none"
    http_status: int | None = None
    """None: there was no answer."""
    is_step: bool = False
    """A later step of a tool loop. It shows the block of its turn again, unless something of the turn has left."""
    is_retry: bool = False
    conversation: str = ""
    """The conversation's id; empty where memory keeps none."""
    position: int = 0
    """The place of the user's message in it, counted in messages from 0."""
    branched: tuple[str, int | None] | None = None
    """The conversation that this one was forked from, and where; see `Conversation.origin`."""
    asked: str = ""
    """The last message of the user; of a finished turn only its beginning."""
    reply: str = ""
    """The words of the model, without its thinking: their beginning, for people who read the conversation."""
    calls: tuple[str, ...] = ()
    """The names of the tools that the reply calls."""
    question: str | None = None
    """The question to memory; None if there was none."""
    step: str = ""
    """The model's latest step, where a turn recalled anew: it asks beside the question."""
    filter: Selection = EVERYTHING
    note: str | None = None
    """The limits of the search, and why nothing was shown, in sentences for people."""
    candidates: tuple[ScoredChunk, ...] = ()
    """The candidates, best first."""
    budget_tokens: int = 0
    """The most that chunks for this question could take, those of earlier blocks included."""
    room_tokens: int | None = None
    """The most that the block of this turn could take; None in receipts of an older memd, where it was the budget."""
    block: str | None = None
    """This turn's block exactly as the model saw it."""
    block_tokens: int = 0
    shown: tuple[str, ...] = ()
    """The ids of all chunks in the prompt, those of earlier turns' blocks included."""
    shown_from: tuple[str, ...] = ()
    """The other topics that these come from."""
    memory_tokens: int = 0
    """Of all blocks in the prompt."""
    forwarded_tokens: int = 0
    placement: str | None = None
    """`merged`: the blocks stood in front of what the user said; None: the model server was given none. Earlier
    versions know `separate` too, a message of their own."""
    left_out: int = 0
    """Messages of the conversation that are not in the prompt."""
    replaced: int = 0
    """Results that a line in the prompt stands for."""
    freed_tokens: int = 0
    """Of what left the prompt before this turn was forwarded, not in the background after an answer."""
    corrections: tuple[Correction, ...] = ()
    signals: tuple[dict[str, Any], ...] = ()
    timings_ms: dict[str, float] = {}
    prompt_tokens: int | None = None
    """The upstream's own count, and the part of it that was in its cache."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    interrupted: bool = False
    error: str | None = None


class _Losing(msgspec.Struct, frozen=True, eq=False):
    """An erasure of which a receipt may still have texts."""

    concern: Concern
    turns: frozenset[str] | None = None
    """Those that were under way when it was done, and may have recalled before; None: it goes on, and concerns all."""


class Receipts:
    """Keeps receipts and announces them to listeners."""

    def __init__(
        self,
        ring: ReceiptRing | None,
        writer: ThreadPoolExecutor,
        redactor: Redactor,
        events: Events,
        unkept: Callable[[Receipt], None] = lambda receipt: None,
    ) -> None:
        """`ring`: None: nothing is kept. `unkept`: is told of each receipt that is not kept."""
        self._unkept = unkept
        self._ring = ring
        self._redactor = redactor
        self._writer = writer
        self._events = events
        self._has_failed = False
        self._under_way: set[str] = set()
        self._losing: tuple[_Losing, ...] = ()
        self._writing = threading.Lock()
        """Held while a receipt is written, and while texts are taken out of those that are."""

    @contextmanager
    def awaited(self, turn_id: str) -> Iterator[None]:
        """While the block runs a turn is under way, the receipt of which comes at its end."""
        self._under_way.add(turn_id)
        try:
            yield
        finally:
            self._under_way.discard(turn_id)
            self._losing = tuple(one for one in self._losing if one.turns is None or one.turns & self._under_way)

    async def keep(self, receipt: Receipt) -> None:
        """Write a receipt and announce it to listeners, redacted, both in the order of the calls."""
        in_writer = partial(asyncio.get_running_loop().run_in_executor, self._writer)
        kept = await in_writer(_redacted, receipt, self._redactor) if self._redactor else receipt
        if self._ring is None:
            self._unkept(receipt)
        else:
            try:
                await in_writer(self._write, self._ring, receipt, kept)
                self._has_failed = False
            except StoreError as error:
                self._unkept(receipt)
                if not self._has_failed:
                    log.warning("receipts are not kept for now", extra={"error": error})
                self._has_failed = True
        if self._events.has_listeners:
            self._events.publish("turn", summary(kept))  # only now: a listener may ask for it at once

    @asynccontextmanager
    async def blanked(self, data_dir: Path, concern: Concern, wiper: Wiper) -> AsyncIterator[None]:
        """Take the texts out of the receipts that an erasure concerns; their figures stay. While the block runs, the
        rest of it is erased: what a turn has recalled until then is not in its receipt either, however long it takes.

        Raises:
            StoreError: a file cannot be read or written.
        """
        losing = _Losing(concern)
        self._losing += (losing,)
        try:
            await asyncio.to_thread(self._blank, data_dir, concern, wiper)
            yield
        finally:
            left = [_Losing(concern, frozenset(self._under_way))] if self._under_way else []
            self._losing = (*(one for one in self._losing if one is not losing), *left)

    def _blank(self, data_dir: Path, concern: Concern, wiper: Wiper) -> None:
        def changed(line: bytes) -> bytes:
            receipt = receipt_in(line)
            if receipt is None:
                return line if line.startswith(b'{"redaction":') else b""  # torn: nobody reads it
            return msgspec.json.encode(without_texts(receipt)) if _is_concerned(receipt, concern) else line

        with self._writing:
            if self._ring is not None:
                self._ring.rewrite(changed, wiper)
            else:
                rewrite_receipts(data_dir, changed, wiper)

    def close(self) -> None:
        """Close the file."""
        if self._ring is not None:
            self._ring.close()

    def _write(self, ring: ReceiptRing, receipt: Receipt, kept: Receipt) -> None:
        # Shortened only after redaction: half a key would not be recognized as one.
        asked = kept.asked[: ASKED_CHARACTERS if kept.is_step else KEPT_CHARACTERS]
        short = msgspec.structs.replace(kept, asked=asked, reply=kept.reply[:KEPT_CHARACTERS])
        with self._writing:
            losing = (one.concern for one in self._losing if one.turns is None or receipt.turn_id in one.turns)
            is_concerned = any(_is_concerned(receipt, concern) for concern in losing)
            ring.append(msgspec.json.encode(without_texts(short) if is_concerned else short))

    def lines(self, who: Principal) -> Iterable[bytes]:
        """Yield all that is kept as it stands in the files, newest first; a line may be torn. Called in a thread.

        Of topics that `who` may not read there is nothing in it, neither turns nor what other turns were shown of them.
        """
        lines = [] if self._ring is None else self._ring.lines()
        return lines if who.may_everywhere("read") else _readable(lines, who)

    def find(self, turn_id: str, who: Principal) -> Receipt | None:
        """Return the receipt of a turn, or None if it is not kept any more or `who` may not read its topic; called in a
        thread."""
        mark = f'"turn_id":"{turn_id}"'.encode()
        return next(
            (found for line in self.lines(who) if mark in line and (found := receipt_in(line)) is not None), None
        )

    def latest(
        self,
        count: int,
        who: Principal,
        *,
        topic_id: str | None = None,
        before: str | None = None,
        uuid: str | None = None,
        with_steps: bool = True,
    ) -> list[tuple[Receipt, list[int]]]:
        """Return the latest requests that `who` may read, newest first; called in a thread.

        Args:
            before: only those older than this turn.
            uuid: only those that put this chunk into the prompt.
            with_steps: also the later steps of turns; else each turn comes with the times of its steps, latest first.
        """
        found: list[tuple[Receipt, list[int]]] = []
        steps: dict[tuple[str, str], list[int]] = defaultdict(list)
        is_reached = before is None
        for line in self.lines(who):
            receipt = receipt_in(line) if uuid is None or uuid.encode() in line else None
            if receipt is None:
                continue
            turn = receipt.topic_id, receipt.asked[:ASKED_CHARACTERS]
            of_chunk = (one.verdict == INJECTED for one in receipt.candidates if one.uuid == uuid)
            is_wanted = topic_id in (None, receipt.topic_id) and (uuid is None or any(of_chunk))
            if is_wanted and receipt.is_step and not with_steps:
                steps[turn].append(receipt.at)
            elif is_wanted and is_reached:
                found.append((receipt, steps.pop(turn, [])))
            is_reached = is_reached or receipt.turn_id == before
            if len(found) == count:
                break
        return found


def summary(receipt: Receipt) -> dict[str, Any]:
    """Return a receipt without its block, with the beginnings of texts, and with the number of candidates, and of those
    that were injected, in place of the candidates."""
    told: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(receipt, candidates=(), block=None))
    del told["block"]
    return told | {
        "asked": receipt.asked[:ASKED_CHARACTERS],
        "reply": receipt.reply[:ASKED_CHARACTERS],
        "candidates": len(receipt.candidates),
        "injected": sum(one.verdict == INJECTED for one in receipt.candidates),
    }


def _readable(lines: Iterable[bytes], who: Principal) -> Iterator[bytes]:
    """The receipts that a principal may read, without what it may not read in them."""
    for line in lines:
        receipt = receipt_in(line)
        if receipt is not None and who.may("read", receipt.topic_id):
            is_whole = all(who.may("read", one) for one in (*receipt.related, *receipt.shown_from))
            yield line if is_whole else msgspec.json.encode(_without_unreadable(receipt, who))


def _without_unreadable(receipt: Receipt, who: Principal) -> Receipt:
    """A receipt without the chunks of related topics that a principal may not read, and without a block of them."""
    return msgspec.structs.replace(
        receipt,
        related=tuple(one for one in receipt.related if who.may("read", one)),
        candidates=tuple(one for one in receipt.candidates if who.may("read", one.topic_id)),
        block=None,
        shown=(),
        shown_from=(),
    )


def _redacted(receipt: Receipt, redactor: Redactor) -> Receipt:
    """Return the receipt with secrets replaced in everything that quotes clients, models or the upstream."""

    def kept(text: str | None) -> str | None:
        return None if text is None else redactor.text(text)

    failed = {signal["chunk_id"] for signal in receipt.signals if signal.get("chunk_id")}

    def kept_id(chunk_id: str) -> str:
        """An id of a chunk; whatever else a client gave as one, as a secret need not look like any."""
        digits = digits_of_id(chunk_id)
        is_id = digits is not None and (chunk_id not in failed or len(digits) <= FAILED_ID_DIGITS_MAX)
        return chunk_id if is_id else redactor.pseudonym(chunk_id)

    corrections = tuple(
        msgspec.structs.replace(
            one,
            chunk_ids=tuple(map(kept_id, one.chunk_ids)),
            reason=redactor.text(one.reason),
            content=kept(one.content),
        )
        for one in receipt.corrections
    )
    signals = (
        signal | {"chunk_id": kept_id(signal["chunk_id"])} if signal.get("chunk_id") else signal
        for signal in receipt.signals
    )
    return msgspec.structs.replace(
        receipt,
        asked=redactor.text(receipt.asked),
        reply=redactor.text(receipt.reply),
        calls=tuple(map(redactor.identifier, receipt.calls)),
        question=kept(receipt.question),
        note=kept(receipt.note),
        step=redactor.text(receipt.step),
        filter=msgspec.structs.replace(receipt.filter, sources=tuple(map(redactor.text, receipt.filter.sources))),
        block=kept(receipt.block),
        corrections=corrections,
        signals=tuple(signals),
        error=kept(receipt.error),
        model=redactor.identifier(receipt.model),
    )


def _is_concerned(receipt: Receipt, concern: Concern) -> bool:
    if any(one.uuid in concern.uuids for one in receipt.candidates):
        return True
    # A step and a retry show the block of their turn again, and have no candidates.
    topics = {receipt.topic_id, *receipt.shown_from, *(one.topic_id for one in receipt.candidates)}
    if concern.topic_id not in topics or concern.overlap is None:
        return concern.topic_id in topics
    corrections = (text for one in receipt.corrections for text in (one.content, one.reason))
    own = (receipt.asked, receipt.reply, receipt.question, receipt.step, receipt.block, receipt.note)
    return any(concern.overlap.shared(text) for text in (*own, *corrections) if text)


def without_texts(receipt: Receipt) -> Receipt:
    """Return a receipt of which the figures stay."""
    corrections = tuple(msgspec.structs.replace(one, reason="", content=None) for one in receipt.corrections)
    told = {"asked": "", "reply": "", "question": None, "step": "", "block": None, "error": None, "note": ERASED_NOTE}
    return msgspec.structs.replace(receipt, corrections=corrections, **told)


def receipt_in(line: bytes) -> Receipt | None:
    """The receipt that a line is; None: it is torn, or the first line of a file."""
    try:
        return msgspec.json.decode(line, type=Receipt)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
