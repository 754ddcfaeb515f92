"""The topics in use, in process: opened once, journalled whatever fails, and let go only with nothing to lose."""

from __future__ import annotations

import asyncio
import gc
import weakref

import msgspec
import pytest
from archiver_stage import DATA_DIR, Stage
from drafts import open_journal
from histories import new_buffer, state, talk

from memd.conversation.events import decode_event
from memd.errors import BadTopicId
from memd.ingest.topics import Topic
from memd.settings.model import Config, IngestSettings, StoreSettings

LAMP = "u:Where is the spare lamp?", "a:On the second landing."
FERRY = "u:When does the last ferry leave?", "a:At ten past nine."
JOURNAL = DATA_DIR / "talk" / "hot.log"


def is_in_trouble(topic: Topic) -> bool:
    return topic.write_trouble is not None


async def restarted(stage: Stage, config: Config | None = None) -> Stage:
    await stage.close()
    return Stage(config or stage.config, stage.files)


async def test_callers_at_the_same_time_get_the_same_topic(stage: Stage) -> None:
    first, second = await asyncio.gather(stage.topics.get("talk"), stage.topics.get("talk"))
    assert first is second is await stage.topics.get("talk")
    assert stage.topics.opened() == [first]


async def test_a_name_that_is_no_topic_creates_nothing(stage: Stage) -> None:
    before = stage.files.operations
    with pytest.raises(BadTopicId):
        await stage.topics.get("../elsewhere")
    assert await stage.topics.existing("nobody") is None
    assert stage.files.operations == before


async def test_a_journal_write_that_fails_is_made_good_at_once(stage: Stage) -> None:
    topic = await stage.topics.get("talk")
    talk(topic.buffer, *LAMP)
    stage.fail_next_write()
    await topic.save(sync=True)
    assert not is_in_trouble(topic)
    again = await restarted(stage)
    assert len((await again.topics.get("talk")).buffer.conversations()) == 1
    await again.close()


async def test_what_a_failed_write_has_cost_is_made_good_by_the_next_save(stage: Stage) -> None:
    topic = await stage.topics.get("talk")
    talk(topic.buffer, *LAMP)
    stage.files.bytes_left = 0
    await topic.save()
    assert is_in_trouble(topic) and not topic.is_on_disk
    stage.files.bytes_left = None
    talk(topic.buffer, *FERRY)
    await topic.save(sync=True)
    assert not is_in_trouble(topic)
    again = await restarted(stage)
    assert len((await again.topics.get("talk")).buffer.conversations()) == 2
    await again.close()


async def test_nothing_is_journalled_behind_a_gap(stage: Stage) -> None:
    """What is appended while a write fails is not taken for durable: replayed without that, it would be nonsense."""
    topic = await stage.topics.get("talk")
    talk(topic.buffer, *LAMP)
    stage.fail_next_write()
    first = asyncio.create_task(topic.save())
    await asyncio.sleep(0)  # its write is under way
    talk(topic.buffer, *FERRY)
    before = state(topic.buffer)
    await asyncio.gather(first, topic.save())
    _, payloads = open_journal(JOURNAL, stage.files)
    assert not is_in_trouble(topic)
    copy = new_buffer()
    copy.replay([decode_event(payload) for payload in payloads])
    assert state(copy) == before


def letting_go(**settings: int) -> Config:
    return Config(store=msgspec.structs.replace(StoreSettings(), **settings))


async def test_what_a_topic_took_is_free_when_it_is_let_go_and_not_when_the_garbage_collector_comes_by() -> None:
    stage = Stage(letting_go(topic_idle_seconds=0))
    taken = weakref.ref(await stage.topics.get("talk"))
    gc.disable()
    try:
        await stage.topics.let_idle_go()
        assert taken() is None
    finally:
        gc.enable()
    await stage.close()


async def test_a_topic_with_something_unstored_is_not_let_go() -> None:
    stage = Stage(letting_go(topic_idle_seconds=0))
    topic = await stage.topics.get("talk")
    conversation = talk(topic.buffer, *LAMP)
    await stage.topics.let_idle_go()
    assert stage.topics.opened() == [topic]
    assert await stage.archiver.store(topic, conversation, len(conversation))
    await stage.tasks.finish(60)
    await stage.topics.let_idle_go()
    assert stage.topics.opened() == []
    await stage.close()


async def test_at_a_start_the_topics_with_work_are_opened_and_the_one_used_last(stage: Stage) -> None:
    for number, name in enumerate(("quiet", "busy", "latest")):
        topic = await stage.topics.get(name)
        conversation = talk(topic.buffer, *LAMP, now=float(number))
        if name != "busy":
            assert await stage.archiver.store(topic, conversation, len(conversation))
        await topic.save(sync=True)
    again = await restarted(stage)
    used_last = await again.topics.wake()
    assert used_last is not None and used_last.id == "latest"
    assert {topic.id for topic in again.topics.opened()} == {"busy", "latest"}
    await again.close()


async def test_a_journal_from_before_redaction_is_redacted_when_its_topic_is_opened(stage: Stage) -> None:
    secret = "sk-0123456789abcdefABCDEF"
    topic = await stage.topics.get("talk")
    talk(topic.buffer, f"u:The key is {secret}.", "a:Noted.")
    await topic.save(sync=True)
    again = await restarted(stage, Config(ingest=IngestSettings(redact=True)))
    topic = await again.topics.get("talk")
    assert not topic.is_on_disk
    await topic.save(sync=True)
    assert secret.encode() not in again.files.contents()[str(JOURNAL)]
    await again.close()


async def test_a_record_of_another_version_is_left_out_and_the_rest_is_read(stage: Stage) -> None:
    topic = await stage.topics.get("talk")
    talk(topic.buffer, *LAMP)
    await topic.save(sync=True)
    await stage.close()
    journal, _ = open_journal(JOURNAL, stage.files)
    journal.append([b"\x93of another version"])
    again = Stage(stage.config, stage.files)
    assert len((await again.topics.get("talk")).buffer.conversations()) == 1
    await again.close()
