"""An embedding model that fails: words alone find, what is said is kept, and embedded when the model works again."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from archiver_stage import HashEmbedder
from daemon_in_process import Client, daemon_in_process

from memd.daemon import app
from memd.errors import EmbeddingError
from memd.recall.retrieve import Budget
from memd.settings.model import RetrievalSettings
from memd.store.store import TopicLog

KEY, ROOF = "The spare key hangs behind the blue bicycle.", "The boat house got a copper roof in March."
PASTRY, BAKER = "The baker in Mill Lane sells cinnamon pastry on Fridays.", "What does the baker sell on Fridays?"
WHERE = "Where does the spare key hang?"
UNHURRIED: dict[str, Any] = {"timeout_ms": 20_000}


@pytest.fixture
def embedder(monkeypatch: pytest.MonkeyPatch) -> HashEmbedder:
    made = HashEmbedder()
    monkeypatch.setattr(app, "load_embedder", lambda *_, **__: made)
    return made


@pytest.fixture
async def client(tmp_path: Path, embedder: HashEmbedder) -> AsyncIterator[Client]:
    async with daemon_in_process(tmp_path, retrieval=RetrievalSettings(**UNHURRIED)) as client:
        yield client


async def tell(client: Client, *texts: str) -> None:
    for text in texts:
        await client.ask(text)


async def logs(client: Client) -> list[TopicLog]:
    return [(await client.daemon.topics.get("default")).log]


async def test_what_is_said_meanwhile_is_found_by_its_words_and_embedded_later(
    client: Client, embedder: HashEmbedder
) -> None:
    embedder.fails = True
    await tell(client, PASTRY, ROOF)
    _, status, _ = await client.ask(BAKER)
    assert status == "degraded:embedding" and PASTRY in client.upstream.prompts[-1]
    found = await client.daemon.retriever.retrieve(BAKER, await logs(client), Budget(2000))
    assert found.note is not None and found.note.startswith("Searched by words alone: the model is not there")
    topic = await client.daemon.topics.get("default")
    for conversation in topic.buffer.conversations():
        assert not await client.daemon.archiver.store(topic, conversation, len(conversation))
    assert topic.log.snapshot().live_count == 0
    embedder.fails = False
    _, status, _ = await client.ask(f"{BAKER} Tell me.")  # a question that is embedded ends the pause between attempts
    assert status == "injected"
    await client.stored()
    retrieved = await client.daemon.retriever.retrieve(PASTRY, [topic.log], Budget(2000))
    assert retrieved.trouble is None and retrieved.note is None


async def test_a_word_that_nobody_used_finds_what_means_nearly_the_same(client: Client, embedder: HashEmbedder) -> None:
    embedder.fails = True
    for told in ("The children adopted a hedgehog.", "Three kids were at the fair."):
        await tell(client, ROOF, told)
        found = await client.daemon.retriever.retrieve("Where are the kids?", await logs(client), Budget(2000))
        assert [one.entry.content.splitlines()[0] for one in found.candidates if one.parts.words] == [told]


async def test_it_is_said_once_that_the_model_fails_and_once_that_it_works_again(
    client: Client, embedder: HashEmbedder, caplog: pytest.LogCaptureFixture
) -> None:
    await tell(client, KEY)
    await client.stored()
    caplog.set_level("INFO", "memd")
    embedder.fails = True
    await client.ask(WHERE)
    await client.ask(f"{WHERE} Please.")
    embedder.fails = False
    await client.ask("Who has the spare key?")
    said = [record.message for record in caplog.records if "embedding model" in record.message]
    assert said == [
        "the embedding model fails: words alone find until it works again",
        "the embedding model works again",
    ]


async def test_corrections_that_need_no_vector_are_applied_meanwhile(client: Client, embedder: HashEmbedder) -> None:
    await tell(client, KEY)
    await client.stored()
    embedder.fails = True
    _, _, told = await client.ask(WHERE, memory_in={})
    [shown] = [one["id"] for one in told["memory_out"]["injected_chunks"]]
    helpful = {"chunk_ids": [shown], "action": "Helpful", "reason": "right"}
    _, _, told = await client.ask("Thank you.", memory_in={"corrections": [helpful]})
    assert [one for one in told["memory_out"].get("signals", ()) if one["type"] == "correction_failed"] == []
    update = {"chunk_ids": [shown], "action": "Update", "reason": "moved", "content": "It hangs in the shed."}
    _, status, told = await client.ask("Noted?", memory_in={"corrections": [update]})
    assert status == "degraded:embedding"
    assert {"type": "correction_failed", "chunk_id": shown} in [
        {"type": one["type"], "chunk_id": one.get("chunk_id")} for one in told["memory_out"]["signals"]
    ]
    url, asked = f"{client.daemon.own_url}/memd/corrections", {"topic_id": "default", **update}
    async with client.session.post(url, json=asked) as refused:
        assert refused.status == 503 and "the model is not there" in await refused.text()
    await client.ask(f"{WHERE} Tell me.")
    assert KEY in client.upstream.prompts[-1], "it is as it was"


async def test_where_words_are_not_searched_nothing_is_recalled(tmp_path: Path, embedder: HashEmbedder) -> None:
    async with daemon_in_process(tmp_path, retrieval=RetrievalSettings(lexical_weight=0.0, **UNHURRIED)) as client:
        await tell(client, KEY)
        await client.stored()
        embedder.fails = True
        assert (await client.ask(WHERE))[1] == "degraded:embedding"
        assert KEY not in client.upstream.prompts[-1]
        with pytest.raises(EmbeddingError):
            await client.daemon.retriever.retrieve(WHERE, await logs(client), Budget(2000))
