"""A book said in one message, and who does not wait for it: searches, what is said beside it, the end of the daemon."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from archiver_stage import ENCODING, HashEmbedder, Stage, live_entries
from crash_files import LOSSES
from histories import digest_at, talk
from numpy.typing import NDArray

from memd.conversation.tokens import TokenCounter
from memd.entries import Draft, Entry
from memd.errors import EmbeddingError
from memd.ingest import unstored
from memd.ingest.pipeline import Cutter
from memd.ingest.topics import Topic
from memd.settings.model import ChunkingSettings, Config

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
    stage.archiver.cut_later(topic, talk(topic.buffer, f"u:{BOOK}", "a:A long one."))
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
async def test_a_search_neither_cuts_a_book_nor_waits_for_it_and_finds_what_is_said_beside_it(
    stage: Stage, topic: Topic, held: Held
) -> None:
    book = talk(topic.buffer, f"u:{BOOK}", "a:A long one.", session="book")
    talk(topic.buffer, "u:Where is the rope?", "a:Behind the barometer.", session="other")
    unstored, late = topic.unstored(), time.monotonic() + 3600
    (one,) = unstored.chunks(until=late)
    assert "barometer" in one.draft.content
    assert unstored.is_partial and not held.counted
    stage.archiver.cut_later(topic, book)
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
async def test_a_long_message_of_which_a_part_was_stored_when_memd_was_killed_is_stored_once_and_whole(
    batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
