"""Plans erasures for the person who decides, and carries them out one after the other, in every place.

Rule: an erasure is an explicit act of the owner, or retention configured by the owner; nothing else erases. A plan only
reads, and shows only the first words of a text. The order is: ledger, receipts, journal, log with its indexes, ledger
again. Slow work runs in threads, and no request waits for it longer than for a write. After a failed step the erasure
stays in the ledger. `resume`, which runs at the start and once a minute, repeats all steps: each finds the rest of its
work.

In a cluster the daemon that receives the request erases. If it dies, another daemon finishes its erasure from the
shared book. All daemons clear their copies; one that was away does so before it listens.

Retention erases text older than a configured age, unless there is doubt. A machine's clock can be wrong: a run that
would take more than half of a topic, some of it long overdue, needs one confirmation by a person. Each topic is checked
once a day, so that its files are rewritten once a day at most.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from itertools import groupby, islice
from typing import NamedTuple

import msgspec
import numpy as np

from memd.conversation.hot_buffer import HotBuffer
from memd.entries import CALLER, Entry
from memd.errors import StoreError
from memd.ingest.indexer import Indexer
from memd.ingest.topic import erased_in
from memd.ingest.topics import Topic, Topics
from memd.messages import RESULT_ROLES, Block, call_line
from memd.selection import Selection
from memd.store.disk import Wiper
from memd.store.erasure import Erasure, ForbiddenText, Kind, call_digest, named_in
from memd.store.log.columns import Bits, digest_word, role_bits, text_hash, uuid_bytes
from memd.store.shared.books import SharedErasures, SharedTimes
from memd.store.snapshot import Place, Snapshot
from memd.store.store import Store
from memd.telemetry.events import Events

log = logging.getLogger("memd")

WORDS_TOLD = 5
"""Number of chunks whose first words a plan shows."""
CHARACTERS_TOLD = 60
COMPARED_MAX = 1_000
"""Most chunks whose words are searched for in receipts; for more, all receipts of the topic lose their texts."""
SHORT_CONTENT = 20
"""Shorter messages ("yes, go on") are forbidden only in their place, not wherever the same text occurs."""
RUN = 4
"""Consecutive words that count as a repetition."""
LOOK_SECONDS = 1.0
RESUME_SECONDS = 60.0
"""Interval of retries; in a cluster, the age at which another daemon finishes an erasure."""
_DOCUMENT = 3
"""`columns.KINDS`"""
_WORDS = re.compile(r"\w+")
_CALL = re.compile(r"^(?=\[call )", re.MULTILINE)
_RESULTS = role_bits(RESULT_ROLES)


class PlannedErasure(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks to be erased in one topic."""

    topic_id: str
    kind: Kind
    chunks: int = 0
    entries: int = 0
    oldest: int | None = None
    newest: int | None = None
    """Times of the first and last of them, in microseconds since the epoch; None if nothing is to be erased."""
    first_words: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    """Ids of the chunks, unordered; empty for a whole topic."""
    kept_documents: int = 0
    """Number of older chunks of documents, which are kept because they mirror their files."""
    kept_live: int = 0
    """Number of older chunks kept because a live conversation still has their messages in its prompt."""
    unnamed: int = 0
    """Number of other chunks, of tool results, that lose the line of their call."""


def plan_of(
    snapshot: Snapshot, uuids: Collection[bytes] | None = None, calls: Collection[bytes] = ()
) -> PlannedErasure:
    """Plan the erasure of chunks of a topic, of the whole topic if `uuids` is None. `calls`: see `calls_of`."""
    places = snapshot.latest_places() if uuids is None else _places_of(snapshot, uuids)
    left = [(number, row) for number, row in places if not snapshot.views[number].rows[row]["is_erased"]]
    plan = _planned(snapshot, "topic" if uuids is None else "chunks", left)
    return msgspec.structs.replace(plan, unnamed=len(naming(snapshot, calls) - set(uuids or ())))


def plan_by_age(snapshot: Snapshot, before: int, visible: Collection[bytes]) -> tuple[PlannedErasure, set[bytes]]:
    """Plan the erasure of chunks said before a time; return the plan and their uuids. `before`: microseconds since the
    epoch. `visible`: see `visible_digests`."""
    found: dict[bytes, list[Place]] = {}
    documents = set()
    for number, view in snapshot.views.items():
        bits: Bits = (view.rows["said_at"] < max(0, before)) & (view.rows["is_erased"] == 0)
        for row in np.flatnonzero(bits).tolist():
            record = view.rows[row]
            uuid = uuid_bytes(record["uuid_high"], record["uuid_low"])
            if record["kind"] == _DOCUMENT:
                documents.add(uuid)
            else:
                found.setdefault(uuid, []).append((number, row))
    live = {uuid for uuid in found if visible and not digests_of(snapshot, [uuid]).isdisjoint(visible)}
    plan = _planned(snapshot, "age", [place for uuid, own in found.items() if uuid not in live for place in own])
    kept = msgspec.structs.replace(plan, kept_documents=len(documents), kept_live=len(live))
    return kept, found.keys() - live


def visible_digests(buffer: HotBuffer) -> frozenset[bytes]:
    """Return the digests of all messages in the prompts of live conversations."""
    return frozenset(
        one.messages[position].identity for one in buffer.conversations() for position in one.visible_positions()
    )


def digests_of(snapshot: Snapshot, uuids: Iterable[bytes]) -> set[bytes]:
    """Return the digests of the messages that chunks came from, without those of damaged entries."""
    return {digest for entry in _entries_of(snapshot, uuids) for digest in entry.digests}


def texts_of(snapshot: Snapshot, uuids: Iterable[bytes]) -> Iterator[str]:
    """Yield all texts that these chunks ever had, and the reasons of their corrections."""
    for entry in _entries_of(snapshot, uuids):
        yield from (text for text in (entry.content, *entry.calls, entry.reason) if text)


def call_lines_of(snapshot: Snapshot, uuids: Collection[bytes]) -> set[tuple[str, str]]:
    """Return the calls in all texts that these chunks ever had, each as its author and the line by which other chunks
    of that author name it (`Speaker.call`)."""
    return {
        (entry.author or "", call_line(call))
        for entry in _entries_of(snapshot, uuids)
        for speaker, text in entry.stretches
        if speaker.role == CALLER
        for call in _CALL.split(text)[1:]
    }


def calls_of(snapshots: Iterable[Snapshot], uuids: Collection[bytes]) -> set[bytes]:
    """Return the `call_digest`s of the calls in chunks; several topics, because results may have been copied."""
    return {call_digest(*call) for snapshot in snapshots for call in call_lines_of(snapshot, uuids)}


def naming(snapshot: Snapshot, calls: Collection[bytes]) -> set[bytes]:
    """Return the chunks that name one of these calls (`call_digest`)."""
    found = set[bytes]()
    for number, view in snapshot.views.items() if calls else ():
        bits: Bits = ((view.rows["role_bits"] & np.uint8(_RESULTS)) != 0) & (view.rows["is_erased"] == 0)
        rows = ((number, row) for row in np.flatnonzero(bits).tolist())
        found.update(entry.uuid for entry in _entries(snapshot, rows) if named_in(entry, calls))
    return found


class Repeating(NamedTuple):
    """A remaining chunk that repeats words of erased ones."""

    uuid: bytes
    topic_id: str
    words: list[str]


def repeating(snapshots: Iterable[Snapshot], texts: Iterable[str], but: Collection[bytes]) -> list[Repeating]:
    """Return the other chunks that repeat words of these texts, longest repetition first."""
    overlap, found, snapshots = Overlap(texts), dict[bytes, Repeating](), list(snapshots)
    gone = calls_of(snapshots, but)
    for snapshot in snapshots:
        for entry in _entries_with(snapshot, status=0):
            left = set(entry.calls).difference(named_in(entry, gone))
            if entry.uuid not in but and (words := overlap.shared("\n".join([*left, *entry.above, entry.content]))):
                found[entry.uuid] = Repeating(entry.uuid, snapshot.topic_id, words)
    return sorted(found.values(), key=lambda one: sum(map(len, one.words)), reverse=True)


def ever_of(snapshot: Snapshot, wanted: Selection) -> set[bytes]:
    """Return the chunks that match a selection now or did so once."""
    return {entry.uuid for entry in _entries_with(snapshot) if wanted.admits_entry(entry)}


def versions_of(snapshot: Snapshot, uuids: Collection[bytes]) -> set[bytes]:
    """Return the uuids of the chunks that these replaced, without erased ones."""
    replaced = {one for entry in _entries_of(snapshot, uuids) for one in entry.supersedes} - set(uuids)
    return {one for one in replaced if not snapshot.was_erased(one)}


def _planned(snapshot: Snapshot, kind: Kind, places: list[Place]) -> PlannedErasure:
    records = [snapshot.views[number].rows[row] for number, row in places]
    said = [int(record["said_at"]) for record in records]
    told = {uuid_bytes(one["uuid_high"], one["uuid_low"]): place for one, place in zip(records, places, strict=True)}
    texts = (" ".join(entry.displayed.split()) for entry in _entries(snapshot, told.values()))
    return PlannedErasure(
        topic_id=snapshot.topic_id,
        kind=kind,
        chunks=len(told),
        entries=len(places),
        oldest=min(said, default=None),
        newest=max(said, default=None),
        first_words=tuple(
            text if len(text) <= CHARACTERS_TOLD else text[:CHARACTERS_TOLD].rstrip() + " …"
            for text in islice(filter(None, texts), WORDS_TOLD)
        ),
        ids=() if kind == "topic" else tuple(uuid.hex()[: snapshot.public_digits(uuid)] for uuid in told),
    )


def _places_of(snapshot: Snapshot, uuids: Iterable[bytes]) -> Iterator[Place]:
    return (place for uuid in uuids for place in snapshot.places(uuid))


def _entries_of(snapshot: Snapshot, uuids: Iterable[bytes]) -> Iterator[Entry]:
    return _entries(snapshot, _places_of(snapshot, uuids))


def _entries_with(snapshot: Snapshot, **columns: int) -> Iterator[Entry]:
    """Yield the entries that are not erased and have these values in their columns."""
    for number, view in snapshot.views.items():
        bits: Bits = np.logical_and.reduce(
            [view.rows[name] == one for name, one in {"is_erased": 0, **columns}.items()]
        )
        yield from _entries(snapshot, ((number, row) for row in np.flatnonzero(bits).tolist()))


def _entries(snapshot: Snapshot, places: Iterable[Place]) -> Iterator[Entry]:
    """Yield the readable entries at these places."""
    for place in places:
        try:
            yield snapshot.read(place)
        except StoreError:
            continue


class Overlap:
    """Finds repetitions of some texts: RUN consecutive words of one, or a whole shorter text."""

    def __init__(self, texts: Iterable[str]) -> None:
        lists = [_WORDS.findall(text.lower()) for text in texts]
        self._runs = {run for words in lists for run in _runs(words, min(RUN, len(words)))}
        self._sizes = {len(run) for run in self._runs}

    def shared(self, text: str) -> list[str]:
        """Return the passages of `text` that repeat the texts, longest first."""
        words, theirs = _WORDS.findall(text.lower()), set[int]()
        for size in self._sizes:
            for at, run in enumerate(_runs(words, size)):
                theirs |= {*range(at, at + size)} if run in self._runs else set()
        passages = groupby(range(len(words)), lambda at: at in theirs)
        return sorted((" ".join(words[at] for at in some) for has, some in passages if has), key=len, reverse=True)


def _runs(words: list[str], size: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[at:] for at in range(size)), strict=False)


class Concern(msgspec.Struct, frozen=True):
    """Selects the receipts that lose their texts."""

    topic_id: str
    uuids: frozenset[str] = frozenset()
    """Selects receipts of any topic that show one of these chunks."""
    overlap: Overlap | None = None
    """Selects the topic's receipts that repeat words of these texts; None selects all of the topic."""


class ErasureDone(msgspec.Struct, frozen=True, kw_only=True):
    """A finished erasure."""

    topic_id: str
    kind: Kind
    chunks: int
    entries: int
    seconds: float
    not_overwritten: tuple[str, ...] = ()
    """Files that were removed from the data directory but could not be overwritten."""


def _finished(done: list[ErasureDone], problems: Sequence[StoreError]) -> list[ErasureDone]:
    """Return these erasures. Raises StoreError: others are not finished; the message names both."""
    if problems:
        erased = ", ".join(dict.fromkeys(one.topic_id for one in done))
        raise StoreError("; ".join(dict.fromkeys([f"erased in {erased}"] * bool(done) + [*map(str, problems)])))
    return done


class Eraser:
    """Erases chunks and topics in every place of a daemon."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        indexer: Indexer,
        events: Events,
        blanked: Callable[[Concern, Wiper], AbstractAsyncContextManager[None]],
    ) -> None:
        """`blanked` removes the texts from receipts, and keeps them out of new ones while its block runs."""
        self.store = store
        self.topics = topics
        self._indexer = indexer
        self._events = events
        self._blanked = blanked
        self._turn = asyncio.Lock()
        self._is_behind = False

    async def tend(self) -> None:
        """Finish interrupted erasures, now and each minute, until cancelled; repeated errors are logged once."""
        told = ""
        while True:
            try:
                abandoned = self.store.clock.now_us() - int(RESUME_SECONDS * 1e6)
                await self.resume(before=None if self.store.kept is None else abandoned)
                told = ""
            except StoreError as error:
                if str(error) != told:
                    fields = {"left": len(self.store.ledger.pending), "error": error}
                    log.error("erasures are not finished, and tried again each minute", extra=fields)
                told = str(error)
            await asyncio.sleep(RESUME_SECONDS)

    async def resume(self, before: int | None = None) -> None:
        """Finish interrupted erasures, all that can be. `before`: only those begun before this time. Raises StoreError:
        one is still not finished."""
        async with self._turn:
            pending = self.store.ledger.pending
            _, problems = await self._each([one for one in pending if before is None or one.at < before])
            _finished([], problems[:1])  # the same while that one is left: it is logged once

    async def tend_others(self) -> None:
        """In a cluster, call `follow` once a second, until cancelled."""
        while True:
            await self.follow()
            await asyncio.sleep(LOOK_SECONDS)

    async def follow(self) -> None:
        """Clear this daemon's copies of chunks that others have erased; a failure is logged once and retried."""
        erasures = self.store.ledger
        assert isinstance(erasures, SharedErasures), "of a cluster"
        try:
            if done := await asyncio.to_thread(erasures.catch_up):
                for erasure in done:
                    await self._clear(erasure)
                await asyncio.to_thread(erasures.note_followed)
            self._is_behind = False
        except StoreError as error:
            if not self._is_behind:  # not by its text, which changes each second
                log.warning("erasures of other daemons are followed later", extra={"error": error})
            self._is_behind = True

    async def _clear(self, erasure: Erasure) -> None:
        """Clear this daemon's copies. Receipts can no longer be compared with the text: the topic's all lose theirs."""
        wiper = Wiper(self.store.files)
        async with self._blanked(_concern(erasure), wiper):
            await self._forget_shown(erasure, wiper)
            self.store.clock.observe(erasure.highest_id)
            if self.topics.is_open(erasure.topic_id) or self.store.has_copy(erasure.topic_id):
                await self.topics.get(erasure.topic_id)  # drops an outdated copy
        self._tell(erasure, "erased here too, as another daemon did")

    async def erase_again(self, *, dry_run: bool) -> tuple[list[PlannedErasure], list[ErasureDone]]:
        """Finish interrupted erasures (`resume`), and repeat those that a restored backup has reverted. Also return
        their plans; with `dry_run` only these."""
        async with self._turn:
            pending = self.store.ledger.pending
            plans = [*pending]
            done, problems = await self._each([] if dry_run else pending)
            for erasure in [one for one in self.store.ledger if one.done_at is not None]:
                try:
                    async with self.topics.held([erasure.topic_id]) as found:
                        again = await asyncio.to_thread(self.store.repetition, erasure) if found else None
                    plans += [] if again is None else [again]
                    if again is not None and not dry_run:
                        ready = await self._with_digests([again], again.chunk_uuids)
                        [begun] = await asyncio.to_thread(self.store.ledger.begin, ready)
                        done.append(await self._carry_out(begun))
                except StoreError as error:
                    problems.append(error)
            return msgspec.convert(plans, list[PlannedErasure], from_attributes=True), _finished(done, problems)

    async def erase(
        self, plans: Iterable[PlannedErasure], by: str, uuids: Collection[bytes] = (), *, forbid: bool = False
    ) -> list[ErasureDone]:
        """Erase these chunks of the topics; for a plan of a whole topic, erase it with its folder, even if it cannot be
        opened. All are in the ledger before the first is carried out. Raises StoreError: none was begun, or one is not
        finished; the message tells which.
        """
        async with self._turn:
            erasures = [
                Erasure(
                    id=self.store.clock.next(),
                    kind=plan.kind,
                    topic_id=plan.topic_id,
                    at=self.store.clock.now_us(),
                    by=by,
                    chunks=plan.chunks,
                    entries=plan.entries,
                    uuids=b"".join(sorted(uuids)),
                    forbid=forbid,
                )
                for plan in plans
            ]
            ready = await self._with_digests(erasures, uuids)
            begun = await asyncio.to_thread(self.store.ledger.begin, ready)
            return _finished(*await self._each(begun))

    async def _each(self, erasures: Sequence[Erasure]) -> tuple[list[ErasureDone], list[StoreError]]:
        """Carry out erasures, all that can be, and return why the others cannot."""
        done, problems = list[ErasureDone](), list[StoreError]()
        for erasure in erasures:
            try:
                done.append(await self._carry_out(erasure))
            except StoreError as error:
                problems.append(error)
        return done, problems

    async def _with_digests(self, erasures: Sequence[Erasure], uuids: Collection[bytes]) -> list[Erasure]:
        """Return erasures of these chunks ready to begin, each with the digests of the messages that its log still has,
        and of the calls that any of the logs has."""

        def ready(snapshots: Mapping[str, Snapshot]) -> Iterator[Erasure]:
            calls = calls_of(snapshots.values(), uuids)
            for one in erasures:
                said = digests_of(snapshots[one.topic_id], uuids) if one.topic_id in snapshots else set[bytes]()
                joined = b"".join(sorted(said | calls))
                yield msgspec.structs.replace(one, digests=joined, is_moved=False, request_end=0, done_at=None)

        async with self.topics.held([one.topic_id for one in erasures if one.kind != "topic"]) as found:
            snapshots = {topic.id: topic.log.snapshot() for topic in found}
            return await asyncio.to_thread(lambda: [*ready(snapshots)])

    async def _carry_out(self, erasure: Erasure) -> ErasureDone:
        started, wiper = time.perf_counter(), Wiper(self.store.files)
        try:
            erasure = await (self._topic if erasure.kind == "topic" else self._chunks)(erasure, wiper)
            done = msgspec.structs.replace(erasure, digests=b"", is_moved=False, done_at=self.store.clock.now_us())
            await asyncio.to_thread(self.store.ledger.write, done)
        except StoreError as error:
            told = f"the erasure in topic {erasure.topic_id} is not finished, and goes on when that can be done"
            raise StoreError(f"{told}: {error}; `memd erase --resume` tries it again") from error
        seconds = round(time.perf_counter() - started, 3)
        self._tell(erasure, "erased", seconds=seconds)
        return ErasureDone(
            topic_id=erasure.topic_id,
            kind=erasure.kind,
            chunks=erasure.chunks,
            entries=erasure.entries,
            seconds=seconds,
            not_overwritten=tuple(map(str, wiper.left)),
        )

    def _tell(self, erasure: Erasure, words: str, **more: float) -> None:
        told = {"kind": erasure.kind, "chunks": erasure.chunks, "by": erasure.by}
        log.info(words, extra={"topic": erasure.topic_id, **told, **more})
        self._events.publish("erased", {"topic_id": erasure.topic_id, **told})

    # -- chunks ---------------------------------------------------------------------------------------------------

    async def _chunks(self, erasure: Erasure, wiper: Wiper) -> Erasure:
        async with self.topics.held([erasure.topic_id]) as found:
            if not found:
                await self._forget_shown(erasure, wiper)
                return erasure
            [topic], uuids, digests = found, erasure.chunk_uuids, erasure.text_digests
            concern = await asyncio.to_thread(_concern, erasure, topic.log.snapshot())
            async with self._blanked(concern, wiper):
                async with topic.storing:  # a batch being stored may have the same messages
                    if erasure.forbid:
                        await asyncio.to_thread(self._forbid, topic, erasure)
                    await asyncio.to_thread(topic.cutter.drop, digests)
                    blocks = await _showing(topic.buffer, concern)
                    await topic.forget(digests, uuids, wiper, blocks)
                others = await asyncio.to_thread(naming, topic.log.snapshot(), digests) - uuids
                entries = await asyncio.to_thread(topic.log.erase, uuids, erasure.mark, wiper, others, digests)
                await topic.follow()
                if blocks := await _showing(topic.buffer, concern):  # from turns that recalled it before
                    await topic.forget((), uuids, wiper, blocks)
                await self._forget_shown(erasure, wiper, concern)
            self._indexer.look_after(topic)
            return msgspec.structs.replace(erasure, entries=max(entries, erasure.entries))

    def _forbid(self, topic: Topic, erasure: Erasure) -> None:
        digests = erasure.text_digests
        contents = {
            item.content_digest
            for conversation in topic.buffer.conversations()
            for item in list(conversation.messages)
            if item.identity in digests and item.message is not None
            if len(item.message.said.strip()) >= SHORT_CONTENT
        }
        snapshot, uuids = topic.log.snapshot(), erasure.chunk_uuids
        calls = {line for _, line in call_lines_of(snapshot, uuids)}
        with topic.log.forbidding:
            forbidden = topic.log.forbidden.also(
                messages=map(digest_word, digests_of(snapshot, uuids)),
                contents=contents,
                texts=map(text_hash, {*texts_of(snapshot, uuids), *calls}),
            )
            topic.log.forbid(forbidden)

    async def _forget_shown(self, erasure: Erasure, wiper: Wiper, concern: Concern | None = None) -> None:
        """Remove the erased chunks from memory blocks of all topics; `concern` adds blocks that repeat their words."""
        opened = [topic.id for topic in self.topics.opened()]
        for topic_id in await asyncio.to_thread(self.topics.naming, erasure.topic_id, opened):
            async with self.topics.held([topic_id]) as found:
                for topic in found:
                    blocks = () if concern is None else await _showing(topic.buffer, concern)
                    await topic.forget((), erased_in(topic.buffer, [erasure]), wiper, blocks)

    # -- topics ---------------------------------------------------------------------------------------------------

    async def _topic(self, erasure: Erasure, wiper: Wiper) -> Erasure:
        async with self._blanked(_concern(erasure), wiper):
            if not erasure.is_moved:
                forbidden = ForbiddenText()
                if erasure.forbid and not await asyncio.to_thread(self.store.is_aside, erasure):
                    async with self.topics.held([erasure.topic_id]) as found:
                        for topic in found:
                            views = topic.log.snapshot().views.values()
                            words = (one for view in views for one in view.segment.digests.tolist())
                            forbidden = await asyncio.to_thread(topic.log.forbidden.also, messages=words)
                # A merge may have to end first: do not wait for it in the thread that writes for all topics.
                await asyncio.to_thread(self.store.retire, erasure.topic_id)
                put_aside = partial(self.store.put_topic_aside, erasure, forbidden)
                erasure = await self.topics.end(erasure.topic_id, put_aside)
            await asyncio.to_thread(self.store.wipe_aside, erasure, wiper)
            await self._forget_shown(erasure, wiper)
        return erasure


def _concern(erasure: Erasure, snapshot: Snapshot | None = None) -> Concern:
    """Return the receipts concerned; words are compared only with the topic's `snapshot`. Called in a thread."""
    uuids = erasure.chunk_uuids
    is_few = snapshot is not None and len(uuids) <= COMPARED_MAX
    overlap = Overlap(texts_of(snapshot, uuids)) if snapshot is not None and is_few else None
    return Concern(erasure.topic_id, frozenset(uuid.hex() for uuid in uuids), overlap)


async def _showing(buffer: HotBuffer, concern: Concern) -> frozenset[bytes]:
    """Return the digests before the memory blocks that show the chunks, by id or by words. A chunk shown while pending
    may have been stored under another id since, for example after its answer was regenerated."""
    blocks = [one for conversation in buffer.conversations() for one in conversation.blocks.items()]
    shared = None if concern.overlap is None else concern.overlap.shared

    def shows(block: Block) -> bool:
        own = [chunk.uuid.hex() for chunk in block.chunks if chunk.topic_id == concern.topic_id]
        return not concern.uuids.isdisjoint(own) or bool(own and shared is not None and shared(block.text))

    return await asyncio.to_thread(lambda: frozenset(digest for digest, block in blocks if shows(block)))


# Retention

FIRST_SECONDS, EVERY_SECONDS = 300.0, 3_600.0
"""Delay of the first check after the start, and interval of the further ones."""
DAY_US = 86_400_000_000
LATE_US = 2 * DAY_US
"""A chunk is overdue by more than this only if retention is new here, memd did not run, or the clock is wrong."""
SHARE_MAX = 0.5
BY = "memd/retention"
"""The author of automatic erasures in ledger and audit."""
Noted = Callable[[str, int], AbstractAsyncContextManager[None]]
"""Takes a topic and a number of chunks; writes the audit lines before and after their erasure."""


def days_kept(retention: Mapping[str, int], topic_id: str) -> int:
    """Return the number of days for which the topic's text is kept; 0: for ever.

    A topic's name takes precedence over patterns (`team-*`), and longer patterns over shorter ones.
    """
    fitting = [
        name for name in retention if name == topic_id or (name.endswith("*") and topic_id.startswith(name[:-1]))
    ]
    best = max(fitting, key=lambda name: (name == topic_id, len(name)), default=None)
    return 0 if best is None else retention[best]


class Retention:
    """Finds expired chunks, and has the eraser erase them."""

    def __init__(self, retention: Mapping[str, int], eraser: Eraser, noted: Noted) -> None:
        """`noted`: writes the audit lines of automatic erasures; the route writes those of requests."""
        self.eraser = eraser
        self._noted = noted
        self._retention = retention
        self._store, self._topics = eraser.store, eraser.topics
        self.looked_at: dict[str, int] | SharedTimes = {}
        """By topic, the limit of its last check: the rest of the work up to there needs a person. Shared in a cluster,
        so that only one daemon a day opens an idle topic."""

    async def plans(self) -> list[PlannedErasure]:
        """Return the plans for the topics that have expired chunks now."""
        due = [await self._due(*one) for one in await self._limits()]
        return [plan for plan, uuids, _ in due if uuids]

    async def run(self, by: str, *, confirmed: bool) -> list[ErasureDone]:
        """Erase expired chunks; a failure in a topic does not stop the others. `by`: the requester. `confirmed`:
        include doubtful topics. Raises StoreError: at least one topic is not finished."""
        done, problems = [], list[StoreError]()
        for topic_id, before in await self._limits():
            try:
                if not confirmed and await asyncio.to_thread(self.looked_at.get, topic_id, 0) >= before:
                    continue
                plan, uuids, is_doubtful = await self._due(topic_id, before)
                if is_doubtful and not confirmed:
                    log.warning(
                        "retention would erase more than half of a topic, long overdue: look at the clock and at "
                        "`memd erase --retention --dry-run`, then run `memd erase --retention`",
                        extra={"topic": topic_id, "chunks": plan.chunks, "oldest": plan.oldest},
                    )
                elif uuids:
                    async with self._noted(topic_id, plan.chunks) if by == BY else nullcontext():
                        done += await self.eraser.erase([plan], by, uuids)
                await asyncio.to_thread(self.looked_at.__setitem__, topic_id, before)
            except StoreError as error:
                problems.append(error)
        return _finished(done, problems)

    async def tend(self) -> None:
        """Call `look` once an hour, until cancelled."""
        pause = FIRST_SECONDS
        while self._retention:
            await asyncio.sleep(pause)
            pause = EVERY_SECONDS
            await self.look()

    async def look(self) -> None:
        """Erase expired chunks of topics that are not doubtful; a failure is logged, and retried in the next hour."""
        try:
            done = await self.run(BY, confirmed=False)
            chunks = sum(one.chunks for one in done)
            log.info("retention looked at the topics", extra={"topics": len(done), "chunks": chunks})
        except StoreError as error:
            log.error("retention is tried again in an hour", extra={"error": error})

    async def _limits(self) -> list[tuple[str, int]]:
        """Return the topics with a limited age, each with the midnight in UTC before which chunks are expired."""
        today = self._store.clock.now_us() // DAY_US
        names = await asyncio.to_thread(self._store.topic_ids) if self._retention else ()
        kept = ((one, days_kept(self._retention, one)) for one in names)
        return [(one, (today - days) * DAY_US) for one, days in kept if days]

    async def _due(self, topic_id: str, before: int) -> tuple[PlannedErasure, set[bytes], bool]:
        """Return the plan for a topic's expired chunks, their uuids, and True if a person has to confirm it."""
        async with self._topics.held([topic_id]) as found:
            if not found:
                return PlannedErasure(topic_id=topic_id, kind="age"), set(), False
            snapshot, visible = found[0].log.snapshot(), visible_digests(found[0].buffer)
            plan, uuids = await asyncio.to_thread(plan_by_age, snapshot, before, visible)
            live = sum(any(snapshot.is_live(place) for place in snapshot.places(uuid)) for uuid in uuids)
        is_late = plan.oldest is not None and plan.oldest < before - LATE_US
        return plan, uuids, is_late and live > SHARE_MAX * snapshot.live_count
