"""The copies of a topic that several daemons have: as the next start finds them, and as they are moved."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from archiver_stage import COUNTER, DIMENSION, Stage, live_entries
from crash_files import CrashFiles, Loss, PowerCutError
from drafts import draft
from faulty_log import FaultyLog
from histories import history_of
from postgres_server import PostgresServer

from memd.conversation.events import BufferEvent, Placed, encode_event
from memd.conversation.hot_buffer import HotBuffer, rebased
from memd.entries import Erased
from memd.errors import StoreError
from memd.ingest import topic as topic_module
from memd.ingest.archiver import TakenNote, take_note
from memd.ingest.erasing import Eraser, plan_of
from memd.ingest.pipeline import Cutter
from memd.ingest.redaction import Redactor
from memd.ingest.topics import Topics
from memd.messages import Message
from memd.notes import Note
from memd.recall.block import render
from memd.settings.model import BufferSettings, Config
from memd.store.disk import LocalDisk, Wiper
from memd.store.layout import CLUSTER_NAME, TopicLayout
from memd.store.log.format import encode_record
from memd.store.log.journal import read_journal, records_of
from memd.store.shared.moving import Step, into_folder, into_log
from memd.store.shared.postgres import Row, SharedLog
from memd.store.store import ModelId, Store, StoreShared
from memd.store.tools.verify import verify

pytestmark = pytest.mark.process


@pytest.fixture
def kept(postgres: PostgresServer) -> Iterator[FaultyLog]:
    with closing(FaultyLog(postgres.database())) as made:
        yield made


@asynccontextmanager
async def topics_of(folder: Path, kept: FaultyLog) -> AsyncIterator[tuple[Topics, ThreadPoolExecutor]]:
    """What a daemon has of the topics while it runs; and the thread in which it writes."""
    config = Config()
    store = Store(folder, StoreShared(model=ModelId(DIMENSION, "a" * 32), segment_entries_max=100), kept=kept)
    with ThreadPoolExecutor(1) as writer:
        yield Topics(store, config, writer, Cutter(config.chunking, COUNTER, Redactor.of(config.ingest))), writer
        store.close()


def told(buffer: HotBuffer, *texts: str) -> None:
    """A client's whole history: user and assistant in turns."""
    messages = [Message(role="user" if i % 2 == 0 else "assistant", text=text) for i, text in enumerate(texts)]
    buffer.receive(history_of(messages, 1), 1.0)


async def payloads_of(kept: FaultyLog) -> bytes:
    """All that the rows of the buffer say."""
    rows = (await asyncio.to_thread(kept.since, "team", {"hot": 0})).of("hot")
    return b"".join(payload for row in rows for payload in records_of(row.data, 0).payloads)


def meanwhile(say: Callable[[], None], at: int = 1) -> Callable[[str], str]:
    """Says something while the row of this number is appended."""
    loop, appends = asyncio.get_running_loop(), itertools.count(1)

    def fails(call: str) -> str:
        if call == "append" and next(appends) == at:
            loop.call_soon_threadsafe(say)
        return ""

    return fails


_names = itertools.count(1)


def made(events: Sequence[BufferEvent] = ()) -> HotBuffer:
    buffer = HotBuffer(lambda: f"c{next(_names)}", 64)
    buffer.replay(events)
    return buffer


def said(buffer: HotBuffer) -> list[list[str]]:
    return sorted(
        [item.message.text for item in one.messages if item.message is not None] for one in buffer.conversations()
    )


async def test_a_copy_has_what_others_said_while_its_daemon_was_off(tmp_path: Path, kept: FaultyLog) -> None:
    async with topics_of(tmp_path / "a", kept) as (ours, _):
        told((topic := await ours.get("team")).buffer, "What is the code of the gate?")
        await topic.save()
    async with topics_of(tmp_path / "b", kept) as (theirs, _):
        told((topic := await theirs.get("team")).buffer, "When does the harbour close?")
        await topic.save()
    async with topics_of(tmp_path / "a", kept) as (ours, _):
        told((topic := await ours.get("team")).buffer, "Who built the mill?")
        await topic.save()
        all_said = said(topic.buffer)

    async with topics_of(tmp_path / "a", kept) as (ours, _):
        assert said((await ours.get("team")).buffer) == all_said
    assert len(all_said) == 3


async def test_a_topic_that_was_only_read_is_not_read_anew_by_the_next_start(
    tmp_path: Path, kept: FaultyLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with topics_of(tmp_path / "b", kept) as (theirs, _):
        await (await theirs.get("team")).append([draft("The harbour closes at nine.", dimension=DIMENSION)])
    async with topics_of(tmp_path / "a", kept) as (ours, _):
        await ours.get("team")
        await ours.close()
    monkeypatch.setattr(Store, "drop_copy", lambda *_: pytest.fail("its copy is as good as it was"))

    async with topics_of(tmp_path / "a", kept) as (ours, _):
        assert (await ours.get("team")).log.stats().chunks == 1


async def test_turns_moved_into_a_log_before_they_were_stored_are_there(tmp_path: Path, kept: FaultyLog) -> None:
    """A move writes the buffer as one base, before which there is no row."""
    told(buffer := made(), "What is the code of the gate?")
    base = b"".join(encode_record(encode_event(event)) for event in buffer.take_unsaved())
    await asyncio.to_thread(kept.append, "team", 0, Row("hot", 1, base, is_base=True), generation=0)

    async with topics_of(tmp_path / "a", kept) as (ours, _):
        assert said((await ours.get("team")).buffer) == [["What is the code of the gate?"]]


async def test_what_a_client_that_left_was_about_to_keep_is_kept_by_the_next(tmp_path: Path, kept: FaultyLog) -> None:
    goes_on = threading.Event()
    async with topics_of(tmp_path / "a", kept) as (ours, writer):
        told((topic := await ours.get("team")).buffer, "What is the code of the gate?")
        writer.submit(goes_on.wait)
        left = asyncio.create_task(topic.make_durable())
        await asyncio.sleep(0)
        assert not topic.buffer.unsaved, "they are on their way"
        left.cancel()
        await asyncio.wait([left])
        goes_on.set()

        assert await topic.make_durable()

    assert b"the gate" in await payloads_of(kept)


async def test_what_waits_in_a_shared_conversation_outlasts_an_erasure(tmp_path: Path, kept: FaultyLog) -> None:
    async with topics_of(tmp_path / "a", kept) as (ours, _):
        told((topic := await ours.get("team")).buffer, "one")
        await topic.save()
        kept.fails = lambda name: "away"
        told(topic.buffer, "one", "two", "three")
        await topic.save(sync=True)
    kept.fails = lambda name: ""
    await asyncio.to_thread(kept.rewrite, "team", 1, {})

    async with topics_of(tmp_path / "a", kept) as (ours, _):
        assert said((await ours.get("team")).buffer) == [["one", "two", "three"]]


async def test_what_is_said_during_an_append_leaves_no_gap_in_the_copy(tmp_path: Path, kept: FaultyLog) -> None:
    async with topics_of(tmp_path / "a", kept) as (ours, _):
        told((topic := await ours.get("team")).buffer, "What is the code of the gate?")
        kept.fails = lambda call: "away"
        await topic.save(sync=True)
        told(topic.buffer, "When does the harbour close?")
        kept.fails = meanwhile(lambda: told(topic.buffer, "Who built the mill?"))
        await topic.save()
        await topic.save()

    async with topics_of(tmp_path / "a", kept) as (ours, _):
        assert len(said((await ours.get("team")).buffer)) == 3


async def test_what_is_said_during_an_erasure_keeps_nothing_of_it_in_the_copy(tmp_path: Path, kept: FaultyLog) -> None:
    async with topics_of(tmp_path / "a", kept) as (ours, _):
        told((topic := await ours.get("team")).buffer, "The code of the gate is 4711.")
        await topic.save()
        [digest] = [item.digest for one in topic.buffer.conversations() for item in one.messages]
        kept.fails = meanwhile(lambda: told(topic.buffer, "Who built the mill?"), at=2)  # that of the whole buffer

        await topic.forget([digest], [], Wiper(LocalDisk()))

        assert b"4711" not in (tmp_path / "a" / "team" / "hot.log").read_bytes()


async def test_what_is_said_at_an_erasure_is_kept_before_it_is_acknowledged(tmp_path: Path, kept: FaultyLog) -> None:
    async with topics_of(tmp_path / "a", kept) as (ours, _):
        told((topic := await ours.get("team")).buffer, "What is the code of the gate?")
        await topic.save()
        await asyncio.to_thread(kept.rewrite, "team", 1, {})
        told(topic.buffer, "When does the harbour close?")

        assert await topic.make_durable()

    assert b"harbour" in await payloads_of(kept)


async def test_a_note_that_cannot_be_made_durable_is_not_stored_meanwhile(kept: FaultyLog) -> None:
    """Its client says it again, and it would be there twice."""
    stage, loop, calls = Stage(Config(), kept=kept), asyncio.get_running_loop(), itertools.count(1)
    topic, has_looked = await stage.topics.get("team"), threading.Event()
    embed, rewrite = stage.embedder.embed_many, topic.rewrite_journal

    def embed_it(texts: Sequence[str]) -> Any:
        has_looked.set()
        return embed(texts)

    def rewrite_it() -> Any:  # when all is stored that may be
        has_looked.set()
        return rewrite()

    def fails(call: str) -> str:
        if call != "append" or (number := next(calls)) > 2:
            return ""
        if number == 1:
            loop.call_soon_threadsafe(stage.archiver.store_notes_later, topic)
            assert has_looked.wait(60)
            stage.fail_next_write()
        return "away"

    stage.embedder.embed_many = embed_it  # type: ignore[method-assign]
    topic.rewrite_journal = rewrite_it  # type: ignore[method-assign]
    kept.fails = fails
    try:
        say = partial(take_note, topic, Note("The gate is opened with the code 4711."), stage.archiver)
        with pytest.raises(StoreError):
            await say()
        assert not live_entries(topic)
        assert len((await say()).chunk_ids) == 1
        while topic.buffer.notes:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.01)
        assert len(live_entries(topic)) == 1
    finally:
        await stage.close()


async def test_a_note_whose_row_is_there_all_the_same_is_not_withdrawn_from_those_who_rely_on_it(
    kept: FaultyLog,
) -> None:
    stage, other, calls = Stage(Config(), kept=kept), Stage(Config(), kept=kept), itertools.count(1)
    topic, known = await stage.topics.get("team"), await other.topics.get("team")
    note = Note("The gate is opened with the code 4711.")
    kept.fails = lambda call: ("doubt" if next(calls) == 1 else "away") if call == "append" else ""
    stage.files.fail_at = set(range(stage.files.operations, stage.files.operations + 100))
    try:
        with pytest.raises(StoreError):
            await take_note(topic, note, stage.archiver)
        stage.files.fail_at, kept.fails = set(), lambda call: ""

        await known.follow()
        again = await take_note(known, note, other.archiver)
        await topic.follow()
        await topic.save()
        await known.follow()
        assert again.duplicate and len(known.buffer.notes) == 1
        assert topic.buffer.notes == known.buffer.notes, "the one that was there first stores it, or the other"
    finally:
        await stage.close()
        await other.close()


async def test_a_note_that_is_said_again_elsewhere_while_it_is_taken_is_there_once(kept: FaultyLog) -> None:
    """Its client has given up, or the two do not know of each other; what the first makes of it is decided anew."""
    ours, theirs = Stage(Config(), kept=kept), Stage(Config(), kept=kept)
    topic, other = await ours.topics.get("team"), await theirs.topics.get("team")
    note, loop, calls = Note("The gate is opened with the code 4711."), asyncio.get_running_loop(), itertools.count(1)
    answers = list[TakenNote]()

    def fails(call: str) -> str:
        if call == "append" and next(calls) == 1:  # that of our row
            elsewhere = asyncio.run_coroutine_threadsafe(take_note(other, note, theirs.archiver), loop)
            answers.append(elsewhere.result(60))
        return ""

    kept.fails = fails
    answers.append(await take_note(topic, note, ours.archiver))
    assert [one.duplicate for one in answers] == [False, True]
    assert answers[0].chunk_ids == answers[1].chunk_ids
    while topic.buffer.notes or other.buffer.notes:
        await asyncio.gather(topic.follow(), other.follow())
    assert len(live_entries(topic)) == 1
    await ours.close()
    await theirs.close()


async def test_an_open_question_in_a_base_is_not_stored_by_who_reads_it_there(
    kept: FaultyLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_module, "BASE_BYTES_MIN", 0)
    config = Config(buffer=BufferSettings(idle_seconds=5))
    ours, theirs = Stage(config, kept=kept), Stage(config, kept=kept)
    topic, other = await ours.topics.get("team"), await theirs.topics.get("team")
    told(topic.buffer, "Where was the bell of the old mill cast?")
    await topic.save()
    await topic.rewrite_journal()
    assert (await asyncio.to_thread(kept.since, "team", {"hot": 0})).rows[0].last > 1, "a base alone is there"

    await other.follow()
    theirs.now = time.time() + 10
    await theirs.archiver.tend_topic(other)

    assert len(said(other.buffer)) == 1 and not live_entries(other)
    await ours.close()
    await theirs.close()


@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_open_question_is_stored_elsewhere_only_if_nobody_awaits_its_answer(
    kept: FaultyLog, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    ours, theirs, began = Stage(Config(), kept=kept), Stage(Config(), kept=kept), time.monotonic()
    passed = itertools.count(0, 5)
    told((topic := await ours.topics.get("team")).buffer, "Where was the bell of the old mill cast?")
    [conversation] = topic.buffer.conversations()
    with topic.buffer.awaited(conversation):
        await topic.save(sync=True)
        other = await theirs.topics.get("team")
        while (seconds := next(passed)) < 400:
            monkeypatch.setattr(topic_module, "time", SimpleNamespace(monotonic=lambda: began + seconds))
            theirs.now = time.time() + seconds
            for one in (other,) if is_killed else (topic, other):
                await one.exchange_news()
                await one.save(sync=True)
            await theirs.archiver.tend_topic(other)
        assert len(live_entries(other)) == is_killed
    if not is_killed:
        told(topic.buffer, "Where was the bell of the old mill cast?", "It was cast in Ghent.")
        await topic.save(sync=True)
        assert await ours.archiver.store(topic, conversation, 2)
        await other.follow()
        await theirs.archiver.tend_topic(other)
        assert [one.content for one in live_entries(topic)] == [
            "Where was the bell of the old mill cast?\nIt was cast in Ghent."
        ]
    await ours.close()
    await theirs.close()


async def test_what_another_daemon_erased_while_it_was_being_stored_is_not_stored_again(kept: FaultyLog) -> None:
    ours, theirs = Stage(Config(), kept=kept), Stage(Config(), kept=kept)
    told(
        (topic := await ours.topics.get("team")).buffer,
        "Where is the key?",
        "The key is in the safe behind the stove, 4711.",
    )
    await topic.save()
    [conversation] = topic.buffer.conversations()
    answers = itertools.chain(["doubt"], itertools.repeat(""))
    kept.fails = lambda call: next(answers) if call == "append" else ""
    assert not await ours.archiver.store(topic, conversation, 2), "nobody knows whether it is stored"
    other = await theirs.topics.get("team")
    [erased] = live_entries(other)
    wiper = Wiper(theirs.files)
    await other.forget(erased.digests, [erased.uuid], wiper)
    await asyncio.to_thread(other.log.erase, {erased.uuid}, Erased(at=1), wiper)

    while not await ours.archiver.store(topic, conversation, 2):
        ours.now += 60

    rows = (await asyncio.to_thread(kept.since, "team", {"log": 0, "hot": 0})).rows
    assert rows and b"4711" not in b"".join(row.data for row in rows)
    await ours.close()
    await theirs.close()


async def test_a_block_placed_during_an_erasure_is_gone_too(kept: FaultyLog, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Stage(Config(), kept=kept), Stage(Config(), kept=kept)
    told((topic := await ours.topics.get("team")).buffer, "The key is in the safe behind the stove, 4711.", "Noted.")
    await topic.save()
    assert await ours.archiver.store(topic, topic.buffer.conversations()[0], 2)
    [entry] = live_entries(topic)
    other = await theirs.topics.get("team")
    told(other.buffer, "Where is the key?")
    placed = render([(entry, "team")], own_topic_id="team", header="", taken=(), tokens=9, reader="")

    async def place() -> None:
        conversation = other.buffer.conversations()[-1]
        other.buffer.record(Placed(conversation.id, conversation.messages[0].digest, placed))
        await other.save()

    erase, loop = topic.log.erase, asyncio.get_running_loop()

    def erased_behind_a_block(*of: Any) -> int:
        asyncio.run_coroutine_threadsafe(place(), loop).result()
        assert b"4711" in asyncio.run_coroutine_threadsafe(payloads_of(kept), loop).result()
        return erase(*of)

    monkeypatch.setattr(topic.log, "erase", erased_behind_a_block)
    eraser = Eraser(ours.store, ours.topics, ours.archiver.indexer, ours.events, lambda *_: nullcontext())
    plan = plan_of(topic.log.snapshot(), [entry.uuid])
    assert await eraser.erase([plan], "owner", [entry.uuid])

    rows = (await asyncio.to_thread(kept.since, "team", {"log": 0, "hot": 0})).rows
    assert rows and b"4711" not in b"".join(row.data for row in rows)
    await ours.close()
    await theirs.close()


# Two daemons that write into the buffer of one topic at the same time end with the same conversations


def who_know(*texts: str) -> tuple[list[BufferEvent], HotBuffer, HotBuffer]:
    """Two who were told these, and the events that both have."""
    told(common := made(), *texts)
    begun = common.take_unsaved()
    return begun, made(begun), made(begun)


def test_where_both_went_on_differently_both_are_kept() -> None:
    begun, ours, theirs = who_know("one", "two", "three")
    told(ours, "one", "two", "three", "four", "this way")
    told(theirs, "one", "two", "three", "four", "that way")
    their_events, own = theirs.take_unsaved(), ours.take_unsaved()

    rebased(ours, made([*begun, *their_events]), their_events, own)

    assert {texts[-1] for texts in said(ours)} == {"this way", "that way"}
    assert said(made([*begun, *their_events, *ours.take_unsaved()])) == said(ours)


def test_where_nobody_knows_what_came_in_between_nothing_is_lost_or_there_twice() -> None:
    _, ours, theirs = who_know("one", "two", "three")
    told(ours, "one", "two", "three", "four", "five")
    told(ours, "alone", "here", "only")
    told(theirs, "one", "two", "three", "four", "five", "six", "seven")
    told(theirs, "elsewhere", "and", "there")
    own = ours.take_unsaved()
    kept = made(theirs.retelling()())

    rebased(ours, kept, None, own)

    assert said(ours) == sorted(
        [
            ["one", "two", "three", "four", "five", "six", "seven"],
            ["alone", "here", "only"],
            ["elsewhere", "and", "there"],
        ]
    )


# Topics between a folder and a shared log, where power or process ends at any operation: run again it goes on


FOLDER = Path("/memory")
TOPICS = {"harbour": 3, "lighthouse": 2}
"""How many groups each has."""
SAID = b"\x93said\x01\x02"


def filled(kept: SharedLog) -> SharedLog:
    """With the topics, and something in the buffer of each."""
    files = CrashFiles.with_directory(Path("/daemon"))
    shared = StoreShared(model=ModelId(DIMENSION, "f"), segment_entries_max=100, files=files)
    with closing(Store(Path("/daemon"), shared, kept=kept)) as store:
        for name, groups in TOPICS.items():
            for group in range(groups):
                store.topic(name).append(
                    [draft(f"{name} {group} {number}", dimension=DIMENSION) for number in range(2)]
                )
            assert kept.append(name, 0, Row("hot", 1, encode_record(SAID)), generation=1)
    return kept


def entries(steps: Iterable[Step]) -> dict[str, tuple[str, int]]:
    """What became of each topic."""
    return {one.topic: (one.outcome, one.entries) for _, _, one in steps}


WHOLE = {name: ("moved", 2 * groups) for name, groups in TOPICS.items()}


@pytest.mark.parametrize("loss", ["kept", "lost", "reordered"])
def test_a_move_into_a_folder_that_ended_at_any_operation_goes_on(kept: FaultyLog, loss: Loss) -> None:
    filled(kept)
    for cut_after in itertools.count():
        files = CrashFiles.with_directory(FOLDER)
        files.cut_after = files.operations + cut_after
        try:
            entries(into_folder(kept, FOLDER, files))
            break
        except PowerCutError:
            files = files.after_power_cut(loss)
        assert entries(into_folder(kept, FOLDER, files)) == WHOLE, cut_after
        assert files.size(FOLDER / CLUSTER_NAME) is None
        assert verify(FOLDER, files, is_served=False).ok
        assert [read_journal(TopicLayout(FOLDER, name).hot, files) for name in TOPICS] == [[SAID], [SAID]]
    assert cut_after > 20


def test_a_topic_counts_as_moved_when_all_of_it_is_durable(
    kept: FaultyLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, int] = {}

    def noted(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_size
        os.fsync(descriptor)

    monkeypatch.setattr("memd.store.disk.sync_descriptor", noted)
    for _, _, moved in into_folder(filled(kept), tmp_path / "memory", LocalDisk()):
        found = TopicLayout(tmp_path / "memory", moved.topic).active.stat()
        assert synced[found.st_ino] == found.st_size


@pytest.mark.parametrize("fault", ["away", "doubt"])
def test_a_move_into_a_log_that_ended_at_any_call_goes_on(postgres: PostgresServer, fault: str) -> None:
    files = CrashFiles.with_directory(FOLDER)
    with closing(FaultyLog(postgres.database())) as first:
        entries(into_folder(filled(first), FOLDER, files))

    def fails_at(number: int) -> Callable[[str], str]:
        calls = itertools.count()
        return lambda _: fault if next(calls) == number else ""

    for number in itertools.count():
        with closing(FaultyLog(postgres.database())) as kept:
            kept.fails = fails_at(number)
            try:
                entries(into_log(FOLDER, files, kept))
                break
            except StoreError:
                kept.fails = lambda _: ""
            assert entries(into_log(FOLDER, files, kept)) == WHOLE, number
            for name, groups in TOPICS.items():
                assert len(kept.since(name, {"log": 0}).rows) == groups
                assert [row.data for row in kept.since(name, {"hot": 0}).rows] == [encode_record(SAID)]
    assert number > 8
