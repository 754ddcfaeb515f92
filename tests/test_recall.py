"""Recall over a log of which something cannot be read: everything else is still recalled."""

from __future__ import annotations

from pathlib import Path

import pytest

from memd.chunks import Draft
from memd.config import Retrieval
from memd.daemon.encoder import Encoder
from memd.daemon.recall import Recall
from memd.daemon.right_of_way import RightOfWay
from memd.embedding import Embedder, load_embedder
from memd.store.log import Store

FACTS = ("The spare key hangs behind the blue bicycle.", "The spare key is copied at the shop in Mill Lane.")


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return load_embedder("bundled", 1)


def _draft(embedder: Embedder, number: int, text: str) -> Draft:
    vector = embedder.embed(text).astype("<f4").tobytes()
    return Draft(uuid=bytes([number]) * 16, content=text, vector=vector, created_at=1, roles=("user",))


async def test_a_damaged_entry_costs_its_own_chunk_and_no_other(tmp_path: Path, embedder: Embedder) -> None:
    store = Store.open(
        tmp_path, dimension=embedder.dimension, fingerprint=embedder.fingerprint, segment_entries_max=100
    )
    topic = store.topic("default")
    topic.append([_draft(embedder, number, text) for number, text in enumerate(FACTS)])
    active = tmp_path / "default" / "active.bin"
    active.write_bytes(active.read_bytes().replace(b"blue bicycle", b"bl\0e bicycle"))

    encoder = Encoder(embedder)
    recall = Recall(encoder, Retrieval(), RightOfWay())
    try:
        found = await recall.query(
            "Where is the spare key?", topic, [], visible_digests=()
        )
    finally:
        recall.close()
        encoder.close()
        store.close()
    assert [candidate.entry.content for candidate in found.candidates] == [FACTS[1]]
