"""An embedding model that fails: words alone find, what is said is kept, and embedded when the model works again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from archiver_stage import HashEmbedder
from recording_upstream import RecordingUpstream

from memd.daemon import app
from memd.daemon.app import Daemon, running
from memd.embedding.embedder import Embedder
from memd.errors import EmbeddingError
from memd.recall.retrieve import Budget
from memd.settings.model import (
    BufferSettings,
    Config,
    ListenSettings,
    LogSettings,
    RetrievalSettings,
    UpstreamSettings,
)

KEY, ROOF = "The spare key hangs behind the blue bicycle.", "The boat house got a copper roof in March."
PASTRY, BAKER = "The baker in Mill Lane sells cinnamon pastry on Fridays.", "What does the baker sell on Fridays?"
WHERE = "Where does the spare key hang?"
WAITS_SECONDS_MAX = 120.0


@pytest.fixture
def embedder(monkeypatch: pytest.MonkeyPatch) -> HashEmbedder:
    made = HashEmbedder()

    def load(*_: object, **__: object) -> Embedder:
        return made

    monkeypatch.setattr(app, "load_embedder", load)
    return made


def config_of(folder: Path, upstream: RecordingUpstream, **retrieval: float) -> Config:
    return Config(
        listen=ListenSettings(port=0),
        upstream=UpstreamSettings(url=upstream.url),
        data_dir=folder / "memory",
        buffer=BufferSettings(store_after_seconds=0),
        retrieval=RetrievalSettings(timeout_ms=20_000, **retrieval),  # type: ignore[arg-type]  # floats
        log=LogSettings(level="error"),
    )


@pytest.fixture
async def daemon(tmp_path: Path, upstream: RecordingUpstream, embedder: HashEmbedder) -> AsyncIterator[Daemon]:
    async with running(config_of(tmp_path, upstream)) as daemon:
        yield daemon


async def ask(daemon: Daemon, text: str, **more: Any) -> tuple[str, Any]:
    """The status, and what the client got."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{daemon.base_url}/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status == 200
        return answer.headers["X-Memory-Status"], await answer.json()


async def tell(daemon: Daemon, texts: Sequence[str]) -> None:
    for text in texts:
        await ask(daemon, text)


async def stored(daemon: Daemon, *texts: str) -> None:
    """Wait until the log has them."""
    topic = await daemon.topics.get("default")
    async with asyncio.timeout(WAITS_SECONDS_MAX):
        while True:
            snapshot = topic.log.snapshot()
            said = "\n".join(snapshot.read(place).content for place in snapshot.latest_places())
            if all(text in said for text in texts):
                return
            await asyncio.sleep(0.02)


async def test_words_alone_find_what_is_stored_and_the_status_says_so(
    daemon: Daemon, embedder: HashEmbedder, upstream: RecordingUpstream
) -> None:
    await tell(daemon, [KEY, ROOF])
    await stored(daemon, KEY, ROOF)
    embedder.fails = True
    status, _ = await ask(daemon, WHERE)
    assert status == "degraded:embedding"
    assert KEY in upstream.prompts[-1]
    retrieved = await daemon.retriever.retrieve(WHERE, [(await daemon.topics.get("default")).log], Budget(2000))
    assert retrieved.note is not None and retrieved.note.startswith("Searched by words alone: the model is not there")


async def test_what_is_said_meanwhile_is_found_by_its_words_and_embedded_when_the_model_works_again(
    daemon: Daemon, embedder: HashEmbedder, upstream: RecordingUpstream
) -> None:
    embedder.fails = True
    await tell(daemon, [PASTRY, ROOF])
    status, _ = await ask(daemon, BAKER)
    assert status == "degraded:embedding" and PASTRY in upstream.prompts[-1]
    topic = await daemon.topics.get("default")
    for conversation in topic.buffer.conversations():
        assert not await daemon.archiver.store(topic, conversation, len(conversation))
    assert topic.log.snapshot().live_count == 0
    embedder.fails = False
    status, _ = await ask(daemon, f"{BAKER} Tell me.")  # a question that is embedded ends the pause between attempts
    assert status == "injected"
    await stored(daemon, PASTRY, ROOF)
    retrieved = await daemon.retriever.retrieve(PASTRY, [topic.log], Budget(2000))
    assert retrieved.trouble is None and retrieved.note is None


async def test_it_is_said_once_that_the_model_fails_and_once_that_it_works_again(
    daemon: Daemon, embedder: HashEmbedder, caplog: pytest.LogCaptureFixture
) -> None:
    await tell(daemon, [KEY])
    await stored(daemon, KEY)
    caplog.set_level("INFO", "memd")
    embedder.fails = True
    await ask(daemon, WHERE)
    await ask(daemon, f"{WHERE} Please.")
    embedder.fails = False
    await ask(daemon, "Who has the spare key?")
    said = [record.message for record in caplog.records if "embedding model" in record.message]
    assert said == [
        "the embedding model fails: words alone find until it works again",
        "the embedding model works again",
    ]


async def test_corrections_that_need_no_vector_are_applied_meanwhile_and_others_are_said_to_have_failed(
    daemon: Daemon, embedder: HashEmbedder
) -> None:
    await tell(daemon, [KEY])
    await stored(daemon, KEY)
    embedder.fails = True
    _, told = await ask(daemon, WHERE, memory_in={})
    [shown] = [one["id"] for one in told["memory_out"]["injected_chunks"]]
    helpful = {"chunk_ids": [shown], "action": "Helpful", "reason": "right"}
    _, told = await ask(daemon, "Thank you.", memory_in={"corrections": [helpful]})
    assert [one for one in told["memory_out"].get("signals", ()) if one["type"] == "correction_failed"] == []
    update = {"chunk_ids": [shown], "action": "Update", "reason": "moved", "content": "It hangs in the shed."}
    status, told = await ask(daemon, "Noted?", memory_in={"corrections": [update]})
    assert status == "degraded:embedding"
    assert {"type": "correction_failed", "chunk_id": shown} in [
        {"type": one["type"], "chunk_id": one.get("chunk_id")} for one in told["memory_out"]["signals"]
    ]


async def test_where_words_are_not_searched_nothing_is_recalled(
    tmp_path: Path, upstream: RecordingUpstream, embedder: HashEmbedder
) -> None:
    async with running(config_of(tmp_path, upstream, lexical_weight=0.0)) as daemon:
        await tell(daemon, [KEY])
        await stored(daemon, KEY)
        embedder.fails = True
        assert (await ask(daemon, WHERE))[0] == "degraded:embedding"
        assert KEY not in upstream.prompts[-1]
        with pytest.raises(EmbeddingError):
            await daemon.retriever.retrieve(WHERE, [(await daemon.topics.get("default")).log], Budget(2000))
