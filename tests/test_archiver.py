"""The archiver in process: what is said is stored once, whatever fails, and leaves a prompt only when it is durable."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from archiver_stage import Stage, live_entries
from histories import history_of, said, talk
from numpy.typing import NDArray

from memd.conversation.conversation import Conversation
from memd.conversation.events import Placed
from memd.entries import Draft, Entry
from memd.errors import EmbeddingError, StoreWriteFailed
from memd.ingest.topics import Topic
from memd.messages import Block, stamped
from memd.settings.model import (
    CompactionSettings,
    Config,
    ConversationSettings,
    IngestSettings,
    RetrievalSettings,
    SegmentSettings,
)

LAMP = "u:Where is the spare lamp of the lighthouse?", "a:On the second landing, behind the rope."
FERRY = "u:When does the last ferry leave?", "a:At ten past nine."


@pytest.fixture
def stage_config() -> Config:
    return Config(compaction=CompactionSettings(retry_seconds=10), ingest=IngestSettings(redact=True))


def shown(topic: Topic) -> list[str]:
    return [entry.displayed for entry in live_entries(topic)]


def is_in_trouble(topic: Topic) -> bool:
    return topic.write_trouble is not None


async def stored(stage: Stage, topic: Topic, conversation: Conversation) -> bool:
    return await stage.archiver.store(topic, conversation, len(conversation))


async def test_every_failure_doubles_the_pause_up_to_half_a_minute(stage: Stage, topic: Topic) -> None:
    conversation = talk(topic.buffer, *LAMP)
    for pause in (10, 20, 30, 30):
        stage.fail_next_write()
        assert not await stored(stage, topic, conversation)
        assert (conversation.stored, shown(topic), is_in_trouble(topic)) == (0, [], True)
        stage.now += pause - 1
        attempts = len(stage.embedder.texts)
        assert not await stored(stage, topic, conversation)
        assert len(stage.embedder.texts) == attempts, "nothing is tried meanwhile"
        stage.now += 1
    assert await stored(stage, topic, conversation)
    assert (conversation.stored, len(shown(topic)), is_in_trouble(topic)) == (2, 1, False)


async def test_an_index_that_could_not_be_written_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memd.ingest.indexer.RETRY_SECONDS", 0.5)
    stage = Stage(Config(segment=SegmentSettings(max_entries=1), retrieval=RetrievalSettings(lexical_weight=0)))
    topic = await stage.topics.get("talk")
    merge, merges = topic.log.merge, []

    def merge_on_a_disk_that_fails_once(segment_ids: Sequence[int], give_way: Callable[[], None]) -> None:
        merges.append(segment_ids)
        if len(merges) == 1:
            raise StoreWriteFailed("the disk is full")
        merge(segment_ids, give_way)

    monkeypatch.setattr(topic.log, "merge", merge_on_a_disk_that_fails_once)
    await stored(stage, topic, talk(topic.buffer, *LAMP))
    await stored(stage, topic, talk(topic.buffer, *FERRY, session="second"))
    async with asyncio.timeout(60):
        while not stage.metrics.errors.counts["index",] or topic.idle_seconds == 0:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0)
        assert stage.archiver.indexer.under_way == 1, "it waits"
        while topic.log.due_merge():
            await asyncio.sleep(0.01)
            stage.archiver.indexer.look_after(topic)
    await stage.close()


async def test_a_result_that_leaves_before_it_was_cut_is_stored_under_the_id_in_its_line(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.ingest.archiver.NAMING_SECONDS", 60.0)
    results = [f"t:log {n} says that pump {n} is dry#{n}" for n in range(12)]
    steps = [step for n in range(0, 12, 3) for step in (f"c:read#{n},{n + 1},{n + 2}", *results[n : n + 3])]
    turn = topic.buffer.receive(history_of(map(said, ["u:Read the logs.", *steps]), tokens=200), 0).conversation
    assert await stage.archiver.compact(topic, turn, 100)
    named = [one for line in turn.lines.values() for one in line.chunk_ids]
    assert len(turn.lines) == len(named) == 9
    assert await stored(stage, topic, turn)
    texts = {entry.public_id: entry.displayed for entry in live_entries(topic)}
    assert all(f"pump {n} is dry" in texts[one] for n, one in enumerate(named))


async def test_the_same_words_are_stored_again_where_somebody_else_says_them(stage: Stage, topic: Topic) -> None:
    await stored(stage, topic, talk(topic.buffer, "u:The code is 4711."))
    await stored(stage, topic, talk(topic.buffer, "u:The code is 4711.", session="second"))
    await stored(stage, topic, talk(topic.buffer, "a:The code is 4711.", session="third"))
    assert shown(topic) == ["user: The code is 4711.", "assistant: The code is 4711."]


async def test_a_message_that_the_log_has_is_known_with_what_is_beside_it(stage: Stage, topic: Topic) -> None:
    await stored(stage, topic, talk(topic.buffer, *LAMP))
    again = talk(topic.buffer, *FERRY, *LAMP, session="second")
    assert await stored(stage, topic, again)
    assert all(topic.log.has_digest(item.digest) for item in again.messages)
    ferry = live_entries(topic)[-1]
    assert ferry.digests == tuple(item.digest for item in again.messages[:2]), "erased with it goes what is in it"
    assert len(live_entries(topic)) == 2


async def test_a_chunk_from_before_the_speakers_were_data_is_recognised(stage: Stage, topic: Topic) -> None:
    old = f"user: {LAMP[0][2:]}\nassistant: {LAMP[1][2:]}"
    vector = stage.embedder.embed_many([old])[0].tobytes()
    topic.log.append([Draft(uuid=bytes(16), content=old, vector=vector, created_at=1, roles=("user", "assistant"))])
    assert await stored(stage, topic, talk(topic.buffer, *LAMP))
    assert shown(topic) == [old]


async def test_forcing_to_disk_waits_for_others_and_tells_of_their_failure(stage: Stage, topic: Topic) -> None:
    talk(topic.buffer, *LAMP)
    stage.fail_next_write()
    saving = asyncio.ensure_future(topic.save())
    await asyncio.sleep(0)
    assert not await topic.make_durable(), "the messages were in the save that failed"
    await saving
    assert await topic.make_durable()
    talk(topic.buffer, *FERRY)
    syncing = asyncio.ensure_future(topic.save(sync=True))
    await asyncio.sleep(0)
    assert await topic.make_durable()
    cut = Stage(stage.config, stage.files.after_power_cut("lost"))
    assert len((await cut.topics.get("talk")).buffer.conversations()) == 2
    await syncing
    await cut.close()


async def test_one_too_many_stays_open_as_long_as_it_cannot_be_stored_and_is_not_journalled_again_and_again() -> None:
    stage = Stage(Config(conversation=ConversationSettings(max_open=1)))
    topic = await stage.topics.get("talk")
    first = talk(topic.buffer, *LAMP)
    topic.buffer.record(Placed(first.id, first.messages[0].digest, Block("[memory] …", 4)))
    talk(topic.buffer, *FERRY)
    stage.fail_next_write()
    await stage.archiver.tend_topic(topic)
    assert first in topic.buffer.conversations() and not first.blocks, "what was said is kept, and no more"
    stage.embedder.fails = True
    await stage.archiver.tend_topic(topic)
    written = stage.files.operations
    await stage.archiver.tend_topic(topic)
    assert stage.files.operations == written
    await stage.close()


async def test_the_store_of_a_branch_ends_when_it_is_left_meanwhile(stage: Stage, topic: Topic) -> None:
    said = [f"{'ua'[n % 2]}:{n} {'and so it went on. ' * 200}" for n in range(16)]
    left = talk(topic.buffer, *said)
    async with topic.storing:
        storing = asyncio.ensure_future(stage.archiver.store(topic, left, len(left)))
        await asyncio.sleep(0)  # its first batch waits for its turn, and behind it
        talk(topic.buffer, *said[:8], *LAMP)
        tending = asyncio.ensure_future(stage.archiver.tend_topic(topic))  # the end of the branch that was left
        await asyncio.sleep(0)
    await tending
    assert not topic.buffer.is_open(left)
    assert await storing
    stored_texts = [entry.content for entry in live_entries(topic)]
    assert all(sum(one[2:20] in text for text in stored_texts) == 1 for one in said[8:])


async def test_many_short_conversations_are_stored_in_few_appends(stage: Stage, topic: Topic) -> None:
    talks = [talk(topic.buffer, f"u:What is in crate {one}?", f"a:{one * 7} brass lamps.") for one in range(40)]
    for branch in (LAMP, FERRY):
        talk(topic.buffer, "u:I keep the lighthouse.", "a:Good.", *branch)
    groups: list[int] = []
    append = topic.append

    async def counted(drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        groups.append(len(drafts))
        return await append(drafts, made_at)

    topic.append = counted  # type: ignore[method-assign]
    await stage.archiver.tend_topic(topic)

    assert all(one.stored == 2 for one in talks)
    said = shown(topic)
    assert len(said) == len(set(said)) and sum(groups) == len(said)
    assert all(sum(f"crate {number}?" in one for one in said) == 1 for number in range(40))
    assert sum("I keep the lighthouse" in one for one in said) == 1 and len(groups) <= 4


@pytest.mark.parametrize("place", [0, 7])
async def test_a_text_that_the_model_cannot_read_keeps_back_its_own_conversation_alone(
    stage: Stage, topic: Topic, place: int
) -> None:
    embed_many = stage.embedder.embed_many

    def embed_most(texts: Sequence[str]) -> NDArray[np.float32]:
        if any("crate 7000" in text for text in texts):
            raise EmbeddingError("a text that cannot be read")
        return embed_many(texts)

    stage.embedder.embed_many = embed_most  # type: ignore[method-assign]
    numbers = [*range(place), 7000, *range(place, 12)]
    talks = [talk(topic.buffer, f"u:What is in crate {one}?", f"a:{one * 3} brass lamps.") for one in numbers]
    for _ in range(3):
        stage.now += 60
        await stage.archiver.tend_topic(topic)
    assert [one.stored for one in talks] == [0 if number == 7000 else 2 for number in numbers]


async def test_what_somebody_says_while_much_of_another_is_stored_takes_its_turn(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.ingest.archiver.LISTING_SECONDS", 0.0)
    flood = [talk(topic.buffer, f"u:{number} {'flood ' * 400}", "a:Noted.") for number in range(40)]
    told = list[Conversation]()
    append = topic.append

    async def interrupted(drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        if not told:
            arrival = topic.buffer.receive(history_of([said("u:Where is the spare lamp?")]), 0.0, 1, "ann")
            [answer] = stamped([said("a:Behind the rope.")], 1, "ann")
            told.append(topic.buffer.reply(arrival, answer, 10, 0.0))
        if told[0].stored:
            waited.append(sum(not one.stored for one in flood))
        return await append(drafts, made_at)

    waited = list[int]()
    topic.append = interrupted  # type: ignore[method-assign]
    await stage.archiver.tend_topic(topic)
    assert told[0].stored == 2 and all(one.stored == 2 for one in flood)
    assert waited[0] > 30, "most of the flood was still to come"


async def test_once_too_much_waits_storing_goes_beside_requests(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.ingest.archiver.WAITING_MAX", 6)
    monkeypatch.setattr("memd.ingest.archiver.TEND_SECONDS", 0.001)
    priority, pressed = stage.encoder.priority, list[bool]()
    append = topic.append

    async def noted(drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        pressed.append(priority.is_pressed)
        return await append(drafts, made_at)

    topic.append = noted  # type: ignore[method-assign]
    for number in range(12):
        talk(topic.buffer, f"u:{number} {'flood ' * 400}", "a:Noted.")
        stage.archiver.cut_later(topic)
    await stage.tasks.finish(60)
    tending = asyncio.ensure_future(stage.archiver.tend(stage.topics))
    while topic.buffer.has_unstored or priority.is_pressed:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    tending.cancel()
    assert pressed[0] and not priority.is_pressed
