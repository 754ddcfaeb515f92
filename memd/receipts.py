"""Receipts: one record per turn, with its question to memory, the chunks recalled, and the cost.

Rule: receipts explain what memory did and are no part of it. One is written after the answer has gone to the client,
without fsync; an error loses only the receipt, and damaged ones are skipped. Reading and writing happen in threads,
because tens of megabytes would block all other requests.

They are in two files, one JSON object per line, newest last: when the newer file is full, it replaces the older one. If
several people's receipts fill them, the author with the most loses the oldest ones (`memd.principals`); the older file
gets the rest.
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
from memd.principals import Principal, surplus
from memd.recall.explained import INJECTED, ScoredChunk
from memd.selection import EVERYTHING, Selection
from memd.store.claim import AppendFile
from memd.store.disk import LocalDisk, Wiper, replace_file
from memd.store.layout import RECEIPTS_NAME, RECEIPTS_OLD_NAME

if TYPE_CHECKING:
    from memd.ingest.erasing import Concern
    from memd.ingest.redaction import Redactor
    from memd.telemetry.events import Events

log = logging.getLogger("memd")

ASKED_CHARACTERS = 400
"""Limit for a question in lists, and in the receipts of later steps of a tool loop, which repeat it."""
KEPT_CHARACTERS = 8_000
"""Limit for a question and for a reply; the log has the full text."""
FAILED_ID_DIGITS_MAX = 12
"""Longer ids that match no chunk are treated as secrets."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, filled in step by step. Token counts are the model's, estimated unless it reported them."""

    turn_id: str
    at: int
    """Microseconds since the epoch."""
    topic_id: str
    api: str
    mode: str
    model: str
    author: str = ""
    """The principal's name; empty for the owner."""
    related: tuple[str, ...] = ()
    status: str = "none"
    http_status: int | None = None
    """None if no answer came."""
    is_step: bool = False
    """True for later steps of a tool loop. They show the turn's block again, unless something of the turn has left."""
    is_retry: bool = False
    conversation: str = ""
    """The conversation's id; empty if memory keeps none."""
    position: int = 0
    """Position of the user's message in it, counted in messages from 0."""
    branched: tuple[str, int | None] | None = None
    """The conversation that this one was forked from, and the position; see `Conversation.origin`."""
    asked: str = ""
    """The user's last message; only its beginning once the turn is finished."""
    reply: str = ""
    """The beginning of the model's reply, without thinking, for people who read the conversation."""
    calls: tuple[str, ...] = ()
    """Names of the tools that the reply calls."""
    question: str | None = None
    """The question to memory; None if there was none."""
    step: str = ""
    """The model's latest step, used beside the question if the turn recalled anew."""
    filter: Selection = EVERYTHING
    note: str | None = None
    """Limits of the search, and why nothing was shown, in sentences for people."""
    candidates: tuple[ScoredChunk, ...] = ()
    """The candidates, best first."""
    budget_tokens: int = 0
    """Token limit for chunks in the prompt, including those of earlier blocks."""
    room_tokens: int | None = None
    """Token limit for this turn's block; None in receipts of older versions, which used the budget."""
    block: str | None = None
    """This turn's block exactly as the model saw it."""
    block_tokens: int = 0
    shown: tuple[str, ...] = ()
    """Ids of all chunks in the prompt, including those of earlier turns' blocks."""
    shown_from: tuple[str, ...] = ()
    """The other topics that some of these come from."""
    memory_tokens: int = 0
    """Tokens of all blocks in the prompt."""
    forwarded_tokens: int = 0
    placement: str | None = None
    """`merged`: each block in front of the user's text; None: no blocks were sent. Earlier versions also wrote
    `separate`, for a message of its own."""
    left_out: int = 0
    """Messages of the conversation that are not in the prompt."""
    replaced: int = 0
    """Results that are shortened to a line in the prompt."""
    freed_tokens: int = 0
    """Tokens that left the prompt before this turn was forwarded; background compaction is not counted."""
    corrections: tuple[Correction, ...] = ()
    signals: tuple[dict[str, Any], ...] = ()
    timings_ms: dict[str, float] = {}
    prompt_tokens: int | None = None
    """The upstream's count; `cached_tokens` of these were in its cache."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    interrupted: bool = False
    error: str | None = None


_TEXTS = ("asked", "reply", "question", "step", "note", "block", "error")
"""Fields with words of a conversation, or of the model server."""
_BLANKS = {one.name: one.default for one in msgspec.structs.fields(Receipt) if one.name in _TEXTS} | {
    "note": "Its texts were erased."
}


class _Losing(msgspec.Struct, frozen=True, eq=False):
    """An erasure that pending receipts must respect."""

    concern: Concern
    turns: frozenset[str] | None = None
    """Turns running when the erasure ended, which may have recalled before. None: in progress, concerns all turns."""


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
        """`ring`: None to keep nothing. `unkept`: called with each receipt that is not kept."""
        self._unkept = unkept
        self._ring = ring
        self._redactor = redactor
        self._writer = writer
        self._events = events
        self._has_failed = False
        self._under_way: set[str] = set()
        self._losing: tuple[_Losing, ...] = ()
        self._writing = threading.Lock()
        """Held while a receipt is written or rewritten."""

    @contextmanager
    def awaited(self, turn_id: str) -> Iterator[None]:
        """Mark a turn as running while the block runs; its receipt is written by then."""
        self._under_way.add(turn_id)
        try:
            yield
        finally:
            self._under_way.discard(turn_id)
            self._losing = tuple(one for one in self._losing if one.turns is None or one.turns & self._under_way)

    async def keep(self, receipt: Receipt) -> None:
        """Write a redacted receipt and announce it to listeners, both in call order."""
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
            self._events.publish("turn", summary(kept))  # after writing: a listener may ask for it at once

    @asynccontextmanager
    async def blanked(self, data_dir: Path, concern: Concern, wiper: Wiper) -> AsyncIterator[None]:
        """Remove the texts from receipts that an erasure concerns; their figures stay.

        The caller erases everything else inside the `with` block. Turns that recalled before its end get receipts
        without texts too, however long they run. Raises StoreError: a file cannot be read or written.
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
                return line if line.startswith(b'{"redaction":') else b""  # torn: nobody can read it
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
        # Redaction comes first: half a key would not be recognized.
        asked = kept.asked[: ASKED_CHARACTERS if kept.is_step else KEPT_CHARACTERS]
        short = msgspec.structs.replace(kept, asked=asked, reply=kept.reply[:KEPT_CHARACTERS])
        with self._writing:
            losing = (one.concern for one in self._losing if one.turns is None or receipt.turn_id in one.turns)
            is_concerned = any(_is_concerned(receipt, concern) for concern in losing)
            ring.append(msgspec.json.encode(without_texts(short) if is_concerned else short))

    def lines(self, who: Principal) -> Iterable[bytes]:
        """Yield the lines of all kept receipts, newest first; a line may be torn. Called in a thread.

        Topics that `who` may not read are left out: their turns, and their chunks in other turns.
        """
        lines = [] if self._ring is None else self._ring.lines()
        return lines if who.may_everywhere("read") else _readable(lines, who)

    def find(self, turn_id: str, who: Principal) -> Receipt | None:
        """Return the receipt of a turn; None if it is no longer kept or `who` may not read its topic. Called in a
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
    """Return a receipt with shortened texts, without its block, and with counts in place of the candidates: how many
    there were, and how many were injected."""
    told: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(receipt, candidates=(), block=None))
    del told["block"]
    return told | {
        "asked": receipt.asked[:ASKED_CHARACTERS],
        "reply": receipt.reply[:ASKED_CHARACTERS],
        "candidates": len(receipt.candidates),
        "injected": sum(one.verdict == INJECTED for one in receipt.candidates),
    }


def _readable(lines: Iterable[bytes], who: Principal) -> Iterator[bytes]:
    """Yield the receipts that a principal may read, without the parts it may not read."""
    for line in lines:
        receipt = receipt_in(line)
        if receipt is not None and who.may("read", receipt.topic_id):
            is_whole = all(who.may("read", one) for one in (*receipt.related, *receipt.shown_from))
            yield line if is_whole else msgspec.json.encode(_without_unreadable(receipt, who))


def _without_unreadable(receipt: Receipt, who: Principal) -> Receipt:
    """Return a receipt without candidates of unreadable topics and without its block."""
    return msgspec.structs.replace(
        receipt,
        related=tuple(one for one in receipt.related if who.may("read", one)),
        candidates=tuple(one for one in receipt.candidates if who.may("read", one.topic_id)),
        block=None,
        shown=(),
        shown_from=(),
    )


def _redacted(receipt: Receipt, redactor: Redactor) -> Receipt:
    """Return the receipt with secrets replaced in all texts from clients, models or the upstream."""
    failed = {signal["chunk_id"] for signal in receipt.signals if signal.get("chunk_id")}

    def kept_id(chunk_id: str) -> str:
        """Return a chunk's id unchanged. Replace other strings given as ids: a secret may look like anything."""
        digits = digits_of_id(chunk_id)
        is_id = digits is not None and (chunk_id not in failed or len(digits) <= FAILED_ID_DIGITS_MAX)
        return chunk_id if is_id else redactor.pseudonym(chunk_id)

    corrections = tuple(
        msgspec.structs.replace(
            one,
            chunk_ids=tuple(map(kept_id, one.chunk_ids)),
            reason=redactor.text(one.reason),
            content=one.content and redactor.text(one.content),
        )
        for one in receipt.corrections
    )
    signals = (
        signal | {"chunk_id": kept_id(signal["chunk_id"])} if signal.get("chunk_id") else signal
        for signal in receipt.signals
    )
    return msgspec.structs.replace(
        receipt,
        **{name: redactor.text(text) for name in _TEXTS if (text := getattr(receipt, name))},
        calls=tuple(map(redactor.identifier, receipt.calls)),
        filter=msgspec.structs.replace(receipt.filter, sources=tuple(map(redactor.text, receipt.filter.sources))),
        corrections=corrections,
        signals=tuple(signals),
        model=redactor.identifier(receipt.model),
    )


def _is_concerned(receipt: Receipt, concern: Concern) -> bool:
    if any(one.uuid in concern.uuids for one in receipt.candidates):
        return True
    # Later steps and retries show the turn's block again and have no candidates.
    topics = {receipt.topic_id, *receipt.shown_from, *(one.topic_id for one in receipt.candidates)}
    if concern.topic_id not in topics or concern.overlap is None:
        return concern.topic_id in topics
    corrections = (text for one in receipt.corrections for text in (one.content, one.reason))
    own = (getattr(receipt, name) for name in _TEXTS)
    return any(concern.overlap.shared(text) for text in (*own, *corrections) if text)


def without_texts(receipt: Receipt) -> Receipt:
    """Return a receipt without its texts; figures stay."""
    corrections = tuple(msgspec.structs.replace(one, reason="", content=None) for one in receipt.corrections)
    return msgspec.structs.replace(receipt, corrections=corrections, **_BLANKS)


def receipt_in(line: bytes) -> Receipt | None:
    """Parse a line; None if it is torn, or the first line of a file."""
    try:
        return msgspec.json.decode(line, type=Receipt)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class _Authored(msgspec.Struct):
    """A receipt's author."""

    author: str = ""


_authored_decoder = msgspec.json.Decoder(_Authored)


def rewrite_receipts(data_dir: Path, change: Callable[[bytes], bytes], wiper: Wiper) -> None:
    """See `ReceiptRing.rewrite`; also for receipts kept under earlier settings. Unchanged files are left alone."""
    for path in (data_dir / RECEIPTS_NAME, data_dir / RECEIPTS_OLD_NAME):
        if wiper.files.size(path) is not None:
            data = wiper.files.read(path)
            changed = b"\n".join(change(line) if line else line for line in data.split(b"\n"))  # empty ones are skipped
            if changed != data:
                wiper.replace(path, changed)


class ReceiptRing:
    """The two files of receipts. Any thread may read; one writes."""

    def __init__(self, files: LocalDisk, data_dir: Path, bytes_max: int, redaction: str = "") -> None:
        """Open the ring. `bytes_max`: of both files together; `redaction`: identifies the redaction settings, empty if
        redaction is off. Files written under other ones are removed; an unreadable one stays, without an error. Raises
        StoreError: a file cannot be removed."""
        self._files = files
        self._newer, self._older = data_dir / RECEIPTS_NAME, data_dir / RECEIPTS_OLD_NAME
        self._bytes_max = bytes_max
        self._first_line = f'{{"redaction":"{redaction}"}}\n'.encode() if redaction else b""
        for path in (self._newer, self._older):
            if self._is_of_other_settings(path):
                files.remove(path)
        self._file: AppendFile | None = None
        """The newer file."""
        self._lock = threading.Lock()

    def _is_of_other_settings(self, path: Path) -> bool:
        try:
            has_file = self._files.size(path) is not None
            return has_file and self._files.read_at(path, 0, len(self._first_line)) != self._first_line
        except StoreError as error:
            log.error("receipts cannot be read", extra={"error": error})
            return False

    def append(self, line: bytes) -> None:
        """Store a receipt: one line of JSON, without the line break. Raises StoreError: it was not written; later ones
        may be."""
        with self._lock:
            try:
                self._file_for(len(line) + 1).append(line + b"\n", sync=False)
            except StoreError:
                self._close()
                raise

    def lines(self) -> list[bytes]:
        """Return all receipts, newest first; a crash may have torn the last line of a file."""
        with self._lock:
            return receipt_lines(self._files, self._newer.parent)

    def rewrite(self, change: Callable[[bytes], bytes], wiper: Wiper) -> None:
        """Replace every line by the result of `change`, and overwrite the old files. Raises StoreError: a file could
        not be read or written, and is unchanged."""
        with self._lock:
            self._close()
            rewrite_receipts(self._newer.parent, change, wiper)

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        with self._lock:
            self._close()

    def _file_for(self, more: int) -> AppendFile:
        if self._file is None and (size := self._files.size(self._newer)) is not None:
            self._file = AppendFile(self._files, self._newer, size)
            # Ends half a line that a crash may have left; readers skip empty lines.
            self._file.append(b"\n", sync=False)
        end = 0 if self._file is None else self._file.end
        if end > len(self._first_line) and end + more > self._bytes_max // 2:
            self._close()
            self._make_room()
        if self._file is None:
            self._files.create(self._newer)
            self._file = AppendFile(self._files, self._newer, 0)
            self._file.append(self._first_line, sync=False)
        return self._file

    def _make_room(self) -> None:
        """Replace the older file by the newer one and the receipts of the older one that are kept."""
        lines = list(dict.fromkeys(reversed(receipt_lines(self._files, self._newer.parent))))  # oldest first
        kept = [line for line in lines if line and line + b"\n" != self._first_line]
        held = [(_author_of(line), len(line) + 1) for line in kept]
        if len({author for author, _ in held}) <= 1:
            self._files.rename(self._newer, self._older)
            return
        leaving = {one.place: one for one in surplus(held, self._bytes_max // 2)}
        left = b"\n".join(line for place, line in enumerate(kept) if place not in leaving)
        replace_file(self._files, self._older, self._first_line + left + b"\n")
        self._files.remove(self._newer)
        most = max(leaving.values(), key=lambda one: one.had, default=None)
        if most is not None:
            why = most.why(self._bytes_max // 2, "bytes of older receipts")
            log.info("receipts are dropped", extra={"receipts": len(leaving), "reason": why})

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def receipt_lines(files: LocalDisk, data_dir: Path) -> list[bytes]:
    """Return the receipts of a data directory, newest first; a crash may have torn the last line of a file. Raises
    StoreError: a file cannot be read."""
    paths = (data_dir / RECEIPTS_NAME, data_dir / RECEIPTS_OLD_NAME)
    data = [files.read(path) for path in paths if files.size(path) is not None]
    return [line for part in data for line in reversed(part.splitlines())]


def _author_of(line: bytes) -> str:
    try:
        return _authored_decoder.decode(line).author
    except msgspec.DecodeError:  # torn
        return ""
