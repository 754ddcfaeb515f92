"""Text that is not stored yet: found by its words at once, under the id that it keeps, and lost at no moment."""

import asyncio
import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import without_rests
from archiver_stage import DIMENSION, ENCODING, HashEmbedder, Stage, live_entries
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from daemon_in_process import daemon_in_process, until
from effort import scaled, steps
from histories import digest_at, receive, said, talk
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import memd.recall.retrieve
from memd.admin import parts
from memd.conversation.conversation import Conversation, History
from memd.conversation.events import Departed, Forgotten, Injected
from memd.conversation.hot_buffer import HotBuffer
from memd.conversation.tokens import TokenCounter
from memd.embedding import priority
from memd.entries import Draft, Entry
from memd.errors import EmbeddingError
from memd.ingest import unstored
from memd.ingest.archiver import take_note
from memd.ingest.pipeline import Cutter
from memd.ingest.topics import Topic
from memd.ingest.unstored import Part, each_part
from memd.messages import BlockChunk
from memd.notes import Note
from memd.recall.retrieve import Budget, Candidate, Filters, Retriever
from memd.settings.model import BufferSettings, ChunkingSettings, Config
from memd.store.log.journal import Journal
from memd.store.log.segment import ROWS_AT_ONCE, PendingChunk, PendingSegment
from memd.store.store import TopicLog

LAMP = "u:Where is the spare lamp of the lighthouse?", "a:On the second landing, behind the rope."
FERRY = "u:When does the last ferry leave?", "a:At ten past nine."
MAIL = "u:And the mail?", "a:On Mondays, with the baker's boat."
LOOP = ("u:Look.", "c:read#1", "t:the key is KINGFISHER9#1", "c:read#2", "t:nothing#2", "c:read#3", "t:nothing#3")


async def recalled(
    stage: Stage, question: str, *logs: TopicLog, filters: Filters | None = None, seconds: float | None = None
) -> list[Candidate]:
    settings = stage.config.retrieval
    retriever = Retriever(stage.encoder, settings, count=lambda text: len(text.split()))
    try:
        return list((await retriever.retrieve(question, logs, Budget(2000, seconds=seconds), filters)).shown)
    finally:
        retriever.close()


async def test_what_is_not_cut_in_time_is_left_out_and_all_else_is_found(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memd.recall.retrieve, "CUTTING_SHARE", 0.0)
    talk(topic.buffer, *LAMP)
    topic.unstored().chunks()
    talk(topic.buffer, *FERRY)
    (found,) = await recalled(stage, "Where is the spare lamp of the lighthouse?", topic.log, seconds=60.0)
    assert LAMP[1][2:] in found.entry.displayed
    with pytest.raises(TimeoutError):  # nothing found is not nothing said
        await recalled(stage, "When does the last ferry leave?", topic.log, seconds=60.0)
    shown = await recalled(stage, "When does the last ferry leave?", topic.log)
    assert any(FERRY[1][2:] in one.entry.displayed for one in shown)


async def test_requests_wait_for_no_cutting_of_other_topics(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    cut = Cutter.cut

    def cut_slowly(self: Cutter, *args: Any, **kwargs: Any) -> list[Draft]:
        assert may_go_on.wait(60)
        return cut(self, *args, **kwargs)

    monkeypatch.setattr(Cutter, "cut", cut_slowly)
    for number in range(64):
        topic = await stage.topics.get(f"talk{number}")
        talk(topic.buffer, *LAMP)
        stage.archiver.cut_later(topic)
    try:
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(lambda: "counted") == "counted"
    finally:
        may_go_on.set()


async def test_what_is_said_while_a_topic_opens_is_searched_whenever_other_requests_come(stage: Stage) -> None:
    for number in range(12):  # every other step of the loop; one between opening and its being told, by chance
        opening = asyncio.create_task(stage.topics.get(f"new{number}"))
        others: list[asyncio.Task[Topic]] = []
        while not opening.done():
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            others.append(asyncio.create_task(stage.topics.get(f"new{number}")))
        talk(opening.result().buffer, *LAMP)
        await asyncio.gather(*others)
        (found,) = await recalled(stage, "Where is the spare lamp of the lighthouse?", opening.result().log)
        assert LAMP[1][2:] in found.entry.displayed


@pytest.mark.thorough
async def test_searches_do_not_wait_for_all_of_a_long_message_that_comes_into_their_columns(topic: Topic) -> None:
    sentences = " ".join(f"The berth {n} at the northern pier belongs to boat {n * 7}." for n in range(4_000))
    conversation = talk(topic.buffer, f"u:{sentences}", "a:Noted.")
    topic.unstored()
    cutting = threading.Thread(target=topic.cutter.cut, args=(list(each_part(conversation)),))
    cutting.start()
    seen, unstored = 0, topic.unstored()
    while not seen:
        seen = len(unstored.chunks(until=0.0))
    cutting.join()
    assert seen < len(unstored.chunks(until=0.0))


@pytest.mark.thorough
async def test_the_garbage_collector_has_no_more_to_look_through_for_what_waits(topic: Topic) -> None:
    found = []
    for pier in ("northern", "southern", "eastern", "western"):  # the first time modules are loaded
        sentences = " ".join(f"The berth {n} at the {pier} pier is for boat {n * 7:x}." for n in range(1_000))
        conversation = talk(topic.buffer, f"u:{sentences}", "a:Noted.")
        topic.unstored()
        gc.collect()
        before = len(gc.get_objects())
        topic.cutter.cut(list(each_part(conversation)))
        chunks = len(topic.unstored().chunks())
        gc.collect()  # which is done with tuples of numbers
        found.append(len(gc.get_objects()) - before)
    assert chunks > 1_000 and min(found[1:]) < chunks / 20  # other threads of the process make some at times


async def test_in_short_time_a_question_has_what_was_said_last(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"The berth {n} belongs to boat {n * 7}." for n in range(20))
    for number in range(100):
        talk(topic.buffer, f"u:Conversation {number}. {text}", "a:Noted.", session=str(number))
    cut, left, now = Cutter.cut, 3, time.monotonic()

    def cut_some(self: Cutter, *args: Any, **kwargs: Any) -> list[Draft]:
        nonlocal left, now
        if (left := left - 1) == 0:
            now += 3600
        return cut(self, *args, **kwargs)

    with monkeypatch.context() as slow:
        slow.setattr(Cutter, "cut", cut_some)
        slow.setattr("memd.ingest.unstored.time.monotonic", lambda: now)
        unstored = topic.unstored()
        found = [one.entry.content for one in unstored.chunks(until=now + 1)]
    assert any("Conversation 99." in one for one in found)
    assert not any("Conversation 0." in one for one in found) and unstored.is_partial
    found = [one.entry.content for one in topic.unstored().chunks(until=time.monotonic() + 3600)]
    assert sum("Conversation" in one for one in found) == 100


async def test_a_search_waits_for_no_thread_without_a_core(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    cut = Cutter.cut

    def cut_slowly(self: Cutter, *args: Any, **kwargs: Any) -> list[Draft]:
        if threading.current_thread() is cutting:
            begun.set()
            assert may_go_on.wait(60)
        return cut(self, *args, **kwargs)

    monkeypatch.setattr(Cutter, "cut", cut_slowly)
    parts = list(each_part(talk(topic.buffer, *LAMP)))
    cutting = threading.Thread(target=topic.cutter.cut, args=(parts,))
    cutting.start()
    assert begun.wait(60)
    [found] = topic.unstored().chunks(until=time.monotonic() + 3600)
    may_go_on.set()
    cutting.join()
    assert [found.entry.public_id] == [one.entry.public_id for one in topic.unstored().chunks()]
    assert LAMP[1][2:] in found.entry.displayed


async def test_ids_of_what_is_never_stored_are_let_go(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.ingest.unstored._IDS_LEFT_MAX", 4)
    monkeypatch.setattr("memd.ingest.unstored._SPARE_PARTS", 2)
    for number in range(20):
        talk(topic.buffer, *FERRY, MAIL[0], f"a:Version {number} of an answer that is made anew again and again.")
        topic.unstored().chunks()
    assert topic.log.reserved_count > 20
    for conversation in topic.buffer.conversations():
        conversation.used_at = -10_000.0
    await stage.archiver.tend_topic(topic)
    talk(topic.buffer, *LAMP)
    [found] = topic.unstored().chunks()
    await stage.archiver.store(topic, topic.buffer.conversations()[-1], 2)
    assert topic.log.reserved_count <= 4 + 3
    assert found.entry.public_id in {one.public_id for one in live_entries(topic)}


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_segment_made_anew_holds_what_the_former_one_holds_whatever_changes_meanwhile(data: st.DataObject) -> None:
    chunks = [pending(number) for number in range(4 * ROWS_AT_ONCE)]
    held = [*chunks]
    segment = PendingSegment()
    segment.hold(chunks)

    def change(most: int) -> None:
        nonlocal segment
        leave = data.draw(st.integers(0, min(most, len(held) - 1)))
        for _ in range(leave):
            segment = segment.release([held.pop(data.draw(st.integers(0, len(held) - 1)))])
        more = data.draw(st.lists(st.sampled_from(chunks), max_size=3, unique_by=id))
        segment.hold(more)
        held.extend(more)

    change(3 * ROWS_AT_ONCE)
    made = []
    for one in segment.renewals():
        made.append(one)
        change(5)
    new = made[-1]
    assert {one.entry.uuid for one in new.view()} == {one.entry.uuid for one in held}
    for chunk in held[:-1]:
        assert new.release([chunk]) is new, "somebody has it still"
    assert not new.release(held[-1:]).count


def pending(number: int) -> PendingChunk:
    draft = Draft(uuid=number.to_bytes(16), content=f"Chunk {number}.", vector=b"", created_at=1, roles=("user",))
    entry = draft.as_entry(public_id=f"{number:04x}", canonical_id=number + 1, group_left=0)
    return PendingChunk(draft, entry)


async def test_a_question_shown_alone_and_again_with_its_answer_is_stored_once(stage: Stage, topic: Topic) -> None:
    async def shown() -> Candidate:
        [found] = await recalled(stage, "Where is the spare lamp?", topic.log)
        entry = found.entry
        topic.buffer.record(Injected([BlockChunk(entry.public_id, entry.uuid, "talk", entry.origin_id)]))
        return found

    arrival = receive(topic.buffer, LAMP[0])
    alone = await shown()
    topic.buffer.reply(arrival, said(LAMP[1]), 10, 0.0)
    whole = await shown()
    assert await stage.archiver.store(topic, arrival.conversation, 2)
    assert whole.entry.uuid != alone.entry.uuid
    assert [one.uuid for one in live_entries(topic)] == [whole.entry.uuid]


async def test_a_finished_turn_is_found_before_it_is_stored_and_keeps_its_id(stage: Stage, topic: Topic) -> None:
    conversation = talk(topic.buffer, *LAMP)
    (pending,) = await recalled(stage, "Where is the spare lamp?", topic.log)
    assert pending.entry.displayed == "user: " + LAMP[0][2:] + "\nassistant: " + LAMP[1][2:]
    assert live_entries(topic) == [] and stage.embedder.texts == ["Where is the spare lamp?"]
    talk(topic.buffer, *FERRY)
    assert await stage.archiver.store(topic, conversation, 2)
    stored = max(await recalled(stage, "Where is the spare lamp?", topic.log), key=lambda one: one.parts.score)
    assert (stored.entry.uuid, stored.entry.public_id) == (pending.entry.uuid, pending.entry.public_id)
    assert [one.uuid for one in live_entries(topic)] == [stored.entry.uuid]


async def test_after_a_power_cut_it_is_found_under_the_same_id(stage: Stage, topic: Topic) -> None:
    talk(topic.buffer, *LAMP)
    assert await topic.make_durable()
    (before,) = await recalled(stage, "Where is the spare lamp?", topic.log)
    again = Stage(stage.config, stage.files.after_power_cut("lost"))
    reopened = await again.topics.get("talk")
    (after,) = await recalled(again, "Where is the spare lamp?", reopened.log)
    assert (after.entry.uuid, after.entry.public_id) == (before.entry.uuid, before.entry.public_id)
    await again.close()


async def test_what_questions_look_into_is_let_go_when_all_is_stored(stage: Stage, topic: Topic) -> None:
    said = [talk(topic.buffer, *LAMP), talk(topic.buffer, *FERRY)]
    assert await recalled(stage, "Where is the spare lamp?", topic.log)
    assert topic.cutter.memory_bytes > 0
    for conversation in said:
        assert await stage.archiver.store(topic, conversation, 2)
    assert not topic.unstored() and not topic.unstored().chunks()
    assert topic.cutter.memory_bytes == 0


async def test_a_finished_round_of_calls_in_an_open_turn_is_found_with_its_id_known(stage: Stage, topic: Topic) -> None:
    conversation = receive(topic.buffer, *LOOP).conversation
    found = max(await recalled(stage, "KINGFISHER9", topic.log), key=lambda one: one.parts.score)
    result = conversation.messages[2].digest
    assert result in found.entry.digests and topic.ids_of(result) == (found.entry.public_id,)
    assert await stage.archiver.store(topic, conversation, 3)
    assert [one.uuid for one in live_entries(topic)] == [found.entry.uuid]
    assert topic.ids_of(result) == (found.entry.public_id,)


@pytest.mark.parametrize("first", ["the client's", "the model's", "what the client left alone"])
async def test_a_round_that_its_client_left_is_stored_as_it_was_shown(stage: Stage, topic: Topic, first: str) -> None:
    answered = talk(topic.buffer, *LOOP[:3], "a:I have looked.")
    found = max(await recalled(stage, "KINGFISHER9", topic.log), key=lambda one: one.parts.score)
    topic.buffer.record(Injected([BlockChunk(found.entry.public_id, found.entry.uuid, "talk", found.entry.origin_id)]))
    conversation = receive(topic.buffer, *LOOP).conversation
    topic.unstored().chunks()
    assert conversation is not answered and answered.abandoned
    if first == "what the client left alone":
        stage.now += 2
        await stage.archiver.tend_topic(topic)
        assert live_entries(topic)
    for one in (conversation, answered) if first == "the client's" else (answered, conversation):
        assert await stage.archiver.store(topic, one, len(one))
    said = [one for one in live_entries(topic) if "KINGFISHER9" in one.content]
    assert [(one.uuid, one.public_id) for one in said] == [(found.entry.uuid, found.entry.public_id)]
    assert sum("I have looked." in one.content for one in live_entries(topic)) == 1


async def test_a_turn_that_was_shown_whole_is_stored_once_though_its_round_has_left(stage: Stage, topic: Topic) -> None:
    one = talk(topic.buffer, "u:Look.", "c:read#1", "t:Berth 3 has the number KINGFISHER9.#1", "a:I have looked.")
    found = await recalled(stage, "Which berth has KINGFISHER9?", topic.log)
    shown = [BlockChunk(one.entry.public_id, one.entry.uuid, "talk", one.entry.origin_id) for one in found]
    topic.buffer.record(Injected(shown))
    topic.buffer.record(Departed(one.id, [1, 2], {}))
    assert await stage.archiver.store(topic, one, len(one))
    assert "KINGFISHER9" in found[0].entry.content and len(found) == 2
    assert [one.uuid for one in live_entries(topic)] == [one.entry.uuid for one in found]


async def test_what_a_line_named_is_stored_under_its_id_though_the_line_left(stage: Stage, topic: Topic) -> None:
    is_at_work, may_go_on = threading.Event(), threading.Event()

    def alike(texts: Sequence[str]) -> NDArray[np.float32]:
        is_at_work.set()
        assert may_go_on.wait(60)
        return np.eye(1, DIMENSION, dtype=np.float32).repeat(len(texts), axis=0)

    stage.embedder.embed_many = alike  # type: ignore[method-assign]
    other = talk(topic.buffer, *LAMP)
    rounds = [one for n in range(8) for one in (f"c:read#{n}", f"t:berth {n} has the number {n * 7}#{n}")]
    messages = [said(one) for one in ("u:Look.", *rounds)]
    digests = [message.content_digest for message in messages]
    conversation = topic.buffer.receive(
        History(messages, digests, lambda some, _: [500 if one.role == "tool" else 20 for one in some]), 0.0
    ).conversation
    topic.unstored().chunks()
    storing = asyncio.ensure_future(stage.archiver.store(topic, other, 2))
    try:
        assert await asyncio.to_thread(is_at_work.wait, 60)
        assert await stage.archiver.compact(topic, conversation, 1)
        named = {one for line in conversation.lines.values() for one in line.chunk_ids}
        assert await stage.archiver.compact(topic, conversation, 3000)
        assert len(named) > 1 and not named & {one for line in conversation.lines.values() for one in line.chunk_ids}
        again = HotBuffer(lambda: "2", 4)
        again.replay(topic.buffer.retelling()())
        [_, told] = again.conversations()
        assert (told.lines, told.former_lines) == (conversation.lines, conversation.former_lines), "a restart knows it"
        assert told.gone == conversation.gone
    finally:
        may_go_on.set()
    assert await storing
    assert await stage.archiver.store(topic, conversation, len(conversation))
    assert named <= {one.public_id for one in live_entries(topic)} and not conversation.former_lines


async def test_a_correction_of_a_pending_chunk_goes_before_what_waits_to_be_stored(stage: Stage, topic: Topic) -> None:
    conversation = talk(topic.buffer, *LAMP)
    others = [
        talk(topic.buffer, f"u:Which number is on berth {n}?", f"a:It is {n * 7}.", session=str(n)) for n in range(20)
    ]
    (found, *_) = await recalled(stage, "Where is the spare lamp?", topic.log)
    stores = [asyncio.create_task(stage.archiver.store(topic, one, len(one))) for one in others]
    while topic.log.snapshot().live_count == 0:  # noqa: ASYNC110  # the first is at work, the others wait
        await asyncio.sleep(0)
    await stage.archiver.store_named(topic, [found.entry.uuid])
    assert sum(one.done() for one in stores) <= 2, "it has waited for one or two of them, not for all"
    await asyncio.gather(*stores)
    assert await stage.archiver.store(topic, conversation, len(conversation))
    assert sum("lamp" in one.content for one in live_entries(topic)) == 1


async def test_what_a_correction_waits_for_is_stored_beside_programs_that_take_all_cores(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(topic.buffer, *LAMP)
    other = talk(topic.buffer, *FERRY, session="other")
    candidates = await recalled(stage, "Where is the spare lamp?", topic.log)
    found = next(one for one in candidates if "lamp" in one.entry.content)
    delayed, rested = itertools.count(), list[float]()
    monkeypatch.setattr(priority, "DELAYS", without_rests.DELAYS)
    monkeypatch.setattr(priority, "_delayed_seconds", lambda: float(next(delayed)))
    monkeypatch.setattr(time, "sleep", rested.append)
    assert await stage.archiver.store(topic, other, len(other))
    rested.clear()
    await stage.archiver.store_named(topic, [found.entry.uuid])
    assert topic.log.snapshot().knows(found.entry.uuid) and not rested


async def test_a_correction_of_a_stored_chunk_waits_for_no_storing(stage: Stage, topic: Topic) -> None:
    conversation = talk(topic.buffer, *LAMP)
    assert await stage.archiver.store(topic, conversation, len(conversation))
    talk(topic.buffer, *FERRY)
    (entry,) = live_entries(topic)
    async with topic.storing, asyncio.timeout(60):
        ids, logs = [entry.public_id, entry.uuid.hex(), entry.uuid.hex()[:9], "no id"], [(topic.log, topic.unstored())]
        named = await asyncio.to_thread(parts.uuids_of, logs, ids)
        assert list(named.items()) == [(one, entry.uuid) for one in ids[:3]]
        await stage.archiver.store_named(topic, named.values())
    assert live_entries(topic) == [entry]


async def test_a_correction_of_a_pending_chunk_that_cannot_be_stored_loses_nothing(stage: Stage, topic: Topic) -> None:
    conversation = talk(topic.buffer, *LAMP)
    (found,) = await recalled(stage, "Where is the spare lamp?", topic.log)
    stage.embedder.fails = True
    with pytest.raises(Exception, match="the model is not there"):
        await stage.archiver.store_named(topic, [found.entry.uuid])
    stage.embedder.fails = False
    assert await stage.archiver.store(topic, conversation, 2)
    assert [one.uuid for one in live_entries(topic)] == [found.entry.uuid]


async def played(files: CrashFiles) -> tuple[Stage, Topic, Conversation]:
    """Three turns, of which the first leaves before it is embedded; then all is stored."""
    stage = Stage(Config(buffer=BufferSettings(store_after_seconds=0, idle_seconds=0)), files)
    try:
        topic = await stage.topics.get("talk")
        conversation = talk(topic.buffer, *LAMP, *FERRY, *MAIL, now=stage.now - 5)
        await stage.archiver.compact(topic, conversation)
        await stage.tasks.finish(60)
        stage.now += 10
        await stage.archiver.tend_topic(topic)
    except PowerCutError:
        await stage.close()
        raise
    return stage, topic, conversation


async def assert_whole(files: CrashFiles, *, left: bool) -> None:
    """After a start on these files all that had left is stored once, or visible and to be stored."""
    stage = Stage(Config(buffer=BufferSettings(store_after_seconds=0, idle_seconds=0)), files)
    topic = await stage.topics.get("talk")
    for conversation in topic.buffer.conversations():
        for position, item in enumerate(conversation.messages):
            assert conversation.is_visible(position) or topic.log.has_digest(item.digest) or item.message is not None
    await stage.archiver.tend_topic(topic)
    contents = "\n".join(one.content for one in live_entries(topic))
    for text in ("second landing", "ten past nine", "Mondays"):
        assert contents.count(text) <= 1
        assert contents.count(text) == 1 or not left
    await stage.close()


@pytest.mark.parametrize("loss", LOSSES)
async def test_wherever_the_power_fails_what_left_is_neither_lost_nor_doubled(loss: Loss) -> None:
    files = CrashFiles()
    stage, _, _ = await played(files)
    await stage.close()
    operations, synced = files.operations, files.log.index("syncdir talk")  # with the first records it is durable
    assert operations > 8
    for cut in steps(0, operations + 1, loss):
        files = CrashFiles()
        files.cut_after = cut
        try:
            stage, _, _ = await played(files)
            await stage.close()
        except PowerCutError:
            pass
        await assert_whole(files.after_power_cut(loss), left=cut > synced)


async def test_wherever_the_disk_fails_or_is_full_what_left_is_neither_lost_nor_doubled() -> None:
    files = CrashFiles()
    stage, _, _ = await played(files)
    await stage.close()
    operations, size = files.operations, sum(map(len, files.contents().values()))
    empty = Stage(Config())
    await empty.topics.get("talk")
    await empty.close()
    for number in steps(empty.files.operations, operations):
        files = CrashFiles()
        files.fail_at = {number}
        stage, _, _ = await played(files)
        await stage.close()
        await assert_whole(files, left=True)
    for bytes_left in range(200, size, 30_000 // scaled(100)):
        files = CrashFiles()
        files.bytes_left = bytes_left
        stage, topic, conversation = await played(files)
        assert topic.log.has_digest(conversation.messages[0].digest) or conversation.messages[0].message is not None
        files.bytes_left = None
        stage.now += 1000
        await stage.archiver.tend_topic(topic)
        await topic.save(sync=True)
        await stage.close()
        await assert_whole(files, left=True)


async def test_cutting_while_others_look_through_what_is_pending_is_no_error(stage: Stage, topic: Topic) -> None:
    conversation = talk(topic.buffer, *(f"{role}:{number}" for number in range(40) for role in ("u", "a")))
    known = topic.cutter
    cut, *_ = topic.cutter.cut(each_part(conversation))

    def keep(digest: bytes) -> None:
        part = Part(((digest, conversation.messages[0].message),), 1)
        known.note_waiting((), [part])
        known._keep(part, cut)

    for number in range(500):
        keep(number.to_bytes(16))

    def cut_one_more(phase: str, info: dict[str, int]) -> None:  # as a thread may that the collector lets run
        if not known._table_lock.locked():
            keep(os.urandom(16))

    threshold = gc.get_threshold()
    gc.callbacks.append(cut_one_more)
    gc.set_threshold(1, 1_000, 1_000)  # the youngest at each step, which costs little
    try:
        topic.cutter.drop({bytes(16)})
        assert topic.cutter.ids_of(bytes(16)) == ()
        topic.cutter.note_stored([])
        assert topic.cutter.memory_bytes
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(cut_one_more)
    assert len(known) > 500 + len([*each_part(conversation)])


async def test_what_is_erased_while_it_is_cut_is_not_found(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that was begun before the erasure cuts the text, and is done behind it."""
    is_cutting, may_go_on, cut = threading.Event(), threading.Event(), Cutter.cut

    def cut_slowly(self: Cutter, *args: Any, **kwargs: Any) -> list[Draft]:
        is_cutting.set()
        assert may_go_on.wait(60)
        return cut(self, *args, **kwargs)

    conversation = talk(topic.buffer, *LAMP)
    monkeypatch.setattr(Cutter, "cut", cut_slowly)
    search = asyncio.create_task(asyncio.to_thread(topic.unstored().chunks))
    await asyncio.to_thread(is_cutting.wait, 60)
    topic.buffer.record(Forgotten([item.identity for item in conversation.messages], []))
    assert list(topic.unstored().chunks(until=0)) == []
    may_go_on.set()
    await search
    assert list(topic.unstored().chunks()) == []


# A book said in one message, and who does not wait for it


BOOK = "".join(f"In night {night} the keeper lit the lamp and wrote down the hour. " for night in range(5_000))
PIECES_BEGUN = 10


class Held(TokenCounter):
    """Counts tokens, and holds up whoever counts those of the book's tenth piece until it is let go."""

    def __init__(self) -> None:
        super().__init__(ENCODING)
        self.counted = 0
        self.is_reached, self.go_on = threading.Event(), threading.Event()

    def ends(self, text: str) -> list[int]:
        self.counted += text in BOOK
        if self.counted == PIECES_BEGUN and text in BOOK:
            self.is_reached.set()
            assert self.go_on.wait(60)
        return super().ends(text)


@pytest.fixture
def held(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    monkeypatch.setattr(topic.cutter, "_cutter", Cutter(ChunkingSettings(), held))
    return held


async def test_a_daemon_that_ends_does_not_cut_the_book_to_its_end(
    stage: Stage, topic: Topic, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(topic.buffer, f"u:{BOOK}", "a:A long one.")
    stage.archiver.cut_later(topic)
    await asyncio.to_thread(held.is_reached.wait, 60)
    shutdown = stage.archiver._cutting.shutdown

    def shut_down(*, wait: bool, cancel_futures: bool) -> None:
        held.go_on.set()
        shutdown(wait=wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(stage.archiver._cutting, "shutdown", shut_down)
    await asyncio.to_thread(stage.archiver.close)
    assert held.counted == PIECES_BEGUN


async def test_what_is_cut_for_the_log_can_be_ended_too_and_is_stored_when_it_is_tried_again(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = talk(topic.buffer, f"u:{BOOK[:20_000]}", "a:A long one.")

    def end() -> None:
        raise EmbeddingError("memd ends")

    monkeypatch.setattr(stage.encoder, "give_way", end)
    assert not await stage.archiver.store(topic, conversation, 2)
    assert (stage.embedder.texts, live_entries(topic)) == ([], [])
    monkeypatch.undo()
    stage.now += 60
    assert await stage.archiver.store(topic, conversation, 2)
    assert "".join(entry.content for entry in live_entries(topic)).startswith(BOOK[:20_000])


@pytest.mark.thorough
async def test_a_search_waits_for_no_book_and_finds_what_is_beside(stage: Stage, topic: Topic, held: Held) -> None:
    talk(topic.buffer, f"u:{BOOK}", "a:A long one.", session="book")
    talk(topic.buffer, "u:Where is the rope?", "a:Behind the barometer.", session="other")
    unstored, late = topic.unstored(), time.monotonic() + 3600
    (one,) = unstored.chunks(until=late)
    assert "barometer" in one.draft.content
    assert unstored.is_partial and not held.counted
    stage.archiver.cut_later(topic)
    await asyncio.to_thread(held.is_reached.wait, 60)
    talk(topic.buffer, "u:And the ladder?", "a:In the cellar.", session="third")
    found = await asyncio.to_thread(topic.unstored().chunks, until=late)
    assert len(found) == 2, "while the book is being cut"
    held.go_on.set()
    await stage.tasks.finish(600)
    whole = topic.unstored()
    assert len(whole.chunks(until=late)) > 500 and not whole.is_partial


LONG = BOOK[:60_000]


def held_embedding(stage: Stage, monkeypatch: pytest.MonkeyPatch, *, batches: int) -> list[int]:
    """Let the model fail behind so many batches of a long text until the list is cleared; what was embedded."""
    seen: list[int] = []
    embed = stage.embedder.embed_many

    def embed_many(texts: Sequence[str]) -> NDArray[np.float32]:
        if len(seen) >= batches and any(text in LONG for text in texts):
            raise EmbeddingError("the model is not there")
        seen.append(len(texts))
        return embed(texts)

    monkeypatch.setattr(stage.embedder, "embed_many", embed_many)
    monkeypatch.setattr(stage.embedder, "batch_texts", 1_000)
    return seen


async def test_turns_behind_a_long_message_and_corrections_of_its_chunks_do_not_wait_for_all_of_it(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_embedding(stage, monkeypatch, batches=2)
    book = talk(topic.buffer, f"u:{LONG}", "a:A long one.")
    talk(topic.buffer, f"u:{LONG}", "a:A long one.", "u:Where is the spare lamp?", "a:On the second landing.")
    talk(topic.buffer, "u:When does the last ferry leave?", "a:At ten past nine.", session="other")
    assert not await stage.archiver.store(topic, book, len(book))
    contents = [one.content for one in live_entries(topic)]
    assert any("second landing" in one for one in contents)
    assert any(one in LONG for one in contents) and book.stored == 0
    monkeypatch.setattr(stage.embedder, "embed_many", HashEmbedder().embed_many)
    waiting = [chunk for chunk in topic.unstored().chunks() if "night 700 " in chunk.draft.content]
    await stage.archiver.store_named(topic, [waiting[0].draft.uuid])
    assert waiting[0].draft.uuid in {one.uuid for one in live_entries(topic)}
    assert len(live_entries(topic)) == len(contents) + 1, "that one, and no others"


@pytest.mark.parametrize("batches", [1, 2, 4])
async def test_a_half_stored_long_message_is_stored_once(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Config())
    topic = await stage.topics.get("talk")
    history = f"u:{LONG}", "a:A long one."
    conversation = talk(topic.buffer, *history)
    held_embedding(stage, monkeypatch, batches=batches)
    assert not await stage.archiver.store(topic, conversation, 2)
    await topic.save(sync=True)
    stored = len(live_entries(topic))
    files = stage.files.after_power_cut(next(iter(LOSSES)))
    await stage.close()

    stage = Stage(Config(), files)
    topic = await stage.topics.get("talk")
    [conversation] = topic.buffer.conversations()
    assert 0 < len(live_entries(topic)) == stored
    assert not topic.log.has_digest(digest_at(history[:1])), "only whole messages are known"
    assert await stage.archiver.store(topic, conversation, 2)
    texts = [one.content for one in live_entries(topic)]
    assert "".join(texts) == f"{LONG}\nA long one."
    assert topic.log.has_digest(digest_at(history[:1])) and topic.log.has_digest(digest_at(history))
    await stage.close()


# A history of thousands of turns: it is stored in steps of one batch each, and the event loop does not retell it


TURNS = 200
STEP_CHARACTERS = 8_000


def long_history() -> list[str]:
    said = (f"In night {night} the lamp was lit. " * 60 for night in range(TURNS))
    return [one for text in said for one in (f"u:{text}", f"a:So be it. {text}")]


@pytest.mark.thorough
async def test_each_part_of_a_long_history_is_listed_once_and_not_with_each_batch_and_search(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = talk(topic.buffer, *long_history())
    listed: list[int] = []
    real = unstored.Part

    def counted(*args: Any, **more: Any) -> unstored.Part:
        listed.append(args[1])
        return real(*args, **more)

    monkeypatch.setattr(unstored, "Part", counted)
    storing = asyncio.ensure_future(stage.archiver.store(topic, conversation, len(conversation)))
    while not storing.done():
        topic.unstored()
        await asyncio.wait([storing], timeout=0.01)
    assert await storing and not topic.unstored()
    assert len(listed) < 2 * TURNS, "once, for searches and for the log"
    assert len({digest for entry in live_entries(topic) for digest in entry.digests}) == len(conversation)


async def test_thousands_of_short_messages_are_stored_in_steps(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [f"u:{chr(0x4E00 + number)}" for number in range(2 * TURNS)]
    conversation = talk(topic.buffer, *said, "a:So be it.")
    steps: list[int] = []
    real = topic.log.append

    def append(drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        steps.append(len(drafts))
        return real(drafts, made_at)

    monkeypatch.setattr(topic.log, "append", append)
    assert await stage.archiver.store(topic, conversation, len(conversation))
    assert len(live_entries(topic)) == len(said)
    assert max(steps) <= STEP_CHARACTERS / 40, "a second's work of the model"


# However much waits


def flood(topic: Topic, first: int, last: int) -> list[Conversation]:
    """Short conversations, all with the same answer."""
    told = (
        f"u:Berth {number} is for the boat {number * 7:x}, which is painted in colour {number}."
        for number in range(first, last)
    )
    return [talk(topic.buffer, said, "a:Noted.", session=said) for said in told]


async def calls_of(work: Callable[[], Awaitable[object]]) -> int:
    """The Python functions that are called in it, in this thread and in those that begin meanwhile."""
    called = itertools.count()

    def count(frame: FrameType, event: str, value: object) -> None:
        if event == "call":
            next(called)

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        await work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return next(called)


@pytest.mark.thorough
async def test_a_request_a_stored_batch_and_a_note_cost_no_more_the_more_waits(stage: Stage, topic: Topic) -> None:
    said, calls = flood(topic, 0, 1), list[list[int]]()
    for waiting in (60, 600):
        said += flood(topic, len(said), waiting)
        topic.unstored().chunks()
        said.append(talk(topic.buffer, *LAMP, session=f"lamp {waiting}"))
        note = Note(f"The barometer {waiting} hangs in the hall.")
        works: list[Callable[[], Awaitable[object]]] = [
            partial(recalled, stage, "Where is the spare lamp of the lighthouse?", topic.log),
            partial(stage.archiver.store, topic, said.pop(0), 2),
            partial(stage.archiver.store, topic, said[-1], 2),
            partial(take_note, topic, note, stage.archiver),
        ]
        calls.append([await calls_of(work) for work in works])
        await stage.tasks.finish(60)
    few, many = calls
    assert all(more < 1.2 * less for less, more in zip(few, many, strict=True)), calls


async def test_a_long_journal_is_not_written_anew_with_each_batch(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.store.log.journal.SHORT_BYTES", 0)
    flood(topic, 0, 400)
    await topic.make_durable()
    long = talk(
        topic.buffer, *(f"{'ua'[number % 2]}:Night {number}. {'The lamp was lit. ' * 30}" for number in range(40))
    )
    await topic.save()
    rewritten = list[int]()
    rewrite = Journal.rewrite

    def counted(self: Journal, payloads: Sequence[bytes], *args: Any) -> None:
        rewritten.append(len(payloads))
        rewrite(self, payloads, *args)

    monkeypatch.setattr(Journal, "rewrite", counted)
    for end in range(2, 40, 2):
        topic.buffer.mark(long, left_out=end)
        assert await stage.archiver.store(topic, long, end)
    assert long.settled == 38 and len(rewritten) <= 1


async def test_who_says_more_than_can_be_stored_waits_until_some_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("memd.ingest.archiver.TEXT_CHARACTERS_MAX", 1_000)
    monkeypatch.setattr("memd.ingest.archiver.ROOM_SECONDS_MAX", 3_600.0)
    async with daemon_in_process(tmp_path, window=16_384) as client:
        topic = await client.daemon.topics.get("default")
        async with topic.storing:
            await client.ask(" ".join(f"The berth {number} belongs to the boat {number * 7}." for number in range(40)))
            await until(lambda: "requests wait until more is stored" in caplog.text)
            asking = asyncio.create_task(client.ask("Whose is the berth 7?"))
            status, memory, _ = await client.ask("Whose is the berth 8?", mode="readonly")
            assert (status, memory) == (200, "injected") and not asking.done()
        status, memory, _ = await asking
    assert (status, memory) == (200, "injected")
    assert "requests do not wait for storing any more" in caplog.text
