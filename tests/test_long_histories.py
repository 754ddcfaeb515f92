"""A history of thousands of turns: it is stored in steps of one batch each, and the event loop does not retell it."""

from __future__ import annotations

from typing import Any

import pytest
from archiver_stage import Stage, live_entries
from histories import talk

from memd.ingest import unstored
from memd.ingest.archiver import BATCH_CHARACTERS
from memd.ingest.topics import Topic

TURNS = 200


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
    batches = 1
    while await stage.archiver._store_batch(topic, conversation, len(conversation), closing=True) is None:
        assert topic.unstored()
        batches += 1
    assert batches > TURNS / 4 and not topic.unstored()
    assert len(listed) < 3 * TURNS, "once for the searches, and once with the batch that it is stored in"
    assert len({digest for entry in live_entries(topic) for digest in entry.digests}) == len(conversation)


async def test_thousands_of_short_messages_are_stored_in_steps_and_each_part_knows_of_its_own_chunks(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [f"u:{chr(0x4E00 + number)}" for number in range(5 * TURNS)]
    conversation = talk(topic.buffer, *said, "a:So be it.")
    noted: list[unstored.Batch] = []
    real = unstored.Batch.done

    def done(batch: unstored.Batch) -> None:
        real(batch)
        noted.append(batch)

    monkeypatch.setattr(unstored.Batch, "done", done)
    while await stage.archiver._store_batch(topic, conversation, len(conversation), closing=True) is None:
        pass
    assert len(live_entries(topic)) == len(said)
    assert max(len(batch.drafts) for batch in noted) <= BATCH_CHARACTERS / 40, "a second's work of the model"
    cut = [part for batch in noted for part in batch.cut]
    assert all(part.done == {draft.uuid for draft in part.drafts} for part in cut)
