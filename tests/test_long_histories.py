"""A history of thousands of turns: it is stored in steps of one batch each, and the event loop does not retell it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from archiver_stage import Stage, live_entries
from histories import talk

from memd.entries import Draft, Entry
from memd.ingest import unstored
from memd.ingest.topics import Topic

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
    said = [f"u:{chr(0x4E00 + number)}" for number in range(5 * TURNS)]
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
