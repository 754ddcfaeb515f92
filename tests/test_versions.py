"""The newest version of what is shown is shown too, whatever the search found: of eighty versions of a file that an
agent read again and again, an older one may be the nearest to the question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from crash_files import CrashFiles
from drafts import FINGERPRINT, adjusted, deprecated, digest_of, draft, open_store, seal_all, uuid_of
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.embedding.loading import load_embedder
from memd.entries import Draft
from memd.recall.retrieve import Budget, Filters, Retrieved, Retriever
from memd.recall.topic_search import Searchable
from memd.settings.model import EmbeddingSettings, RetrievalSettings
from memd.store.lexical.analyzer import analyze
from memd.store.lexical.bm25 import LexicalQuery
from memd.store.lexical.terms import ChunkTerms, TermsTable
from memd.store.pending import PendingChunk, PendingRun, UnstoredText
from memd.store.store import Snapshot, TopicLog

VERSIONS, NEWEST = 80, 79
QUESTION = "Which port does the service listen on?"
TEXT = "The settings of the billing service, as they were read: it listens on port {}, behind the blue gateway."
OTHERS = ("Bread is baked on Fridays.", "The cellar floods in spring.", "Tom's train leaves at ten.", "Anna paints.")


def at(degrees: float, axis: int = 1) -> bytes:
    """A vector of which the question, the first axis, is so far."""
    vector = np.zeros(8, "<f4")
    vector[[0, axis]] = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return vector.tobytes()


class Towards:
    """An embedder for which every question is the first axis."""

    fingerprint = FINGERPRINT
    same_cosine, finds_across_languages = staticmethod(float), staticmethod(bool)
    prior = Embedder.prior

    def embed_query(self, text: str) -> NDArray[np.float32]:
        return np.frombuffer(at(0), "<f4")[None]

    def close(self) -> None:
        pass


def version(number: int, **members: Any) -> Draft:
    """The older, the nearer to the question; each is so near to the first that it is nearly the same."""
    plain = msgspec.structs.replace(draft(number), content=TEXT.format(8000 + number), vector=at(18 + number * 0.09))
    return msgspec.structs.replace(plain, **members)


def others() -> list[Draft]:
    """Chunks about all else; only the first two versions are nearer to the question."""
    return [
        msgspec.structs.replace(draft(text), content=text, vector=at(18.1 + axis / 100, axis + 2))
        for axis, text in enumerate(OTHERS)
    ]


def topic_of(*drafts: Draft, is_sealed: bool = False) -> TopicLog:
    topic = open_store(CrashFiles(), segment_entries_max=len(drafts)).topic("default")
    for start in range(0, len(drafts), 16):
        topic.append(drafts[start : start + 16])
    if is_sealed:
        seal_all(topic)
        assert topic.unsealed() == []
    return topic


async def recalled(
    topics: Sequence[Searchable], filters: Filters | None = None, tokens: int = 2000, **settings: float
) -> Retrieved:
    encoder = Encoder(Towards())  # type: ignore[arg-type]  # the part of it that recall uses
    given: Mapping[str, Any] = {"lexical_weight": 0, "neighbour_weight": 0, "top_k": 4} | settings
    retriever = Retriever(
        encoder, RetrievalSettings(**given), header="Excerpts.", dates=False, count=lambda text: len(text.split())
    )
    try:
        return await retriever.retrieve(QUESTION, topics, Budget(tokens), filters)
    finally:
        retriever.close()
        encoder.close()


def ports(retrieved: Retrieved) -> list[int]:
    """The versions that are shown, in the order in which they are read."""
    contents = [one.entry.content for one in retrieved.shown]
    return [number for content in contents for number in range(VERSIONS + 9) if content == TEXT.format(8000 + number)]


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("relevant_only", [True, False])
async def test_of_eighty_versions_the_newest_is_shown_behind_the_best(is_sealed: bool, relevant_only: bool) -> None:
    topic = topic_of(*map(version, range(VERSIONS)), *others(), is_sealed=is_sealed)
    found = await recalled([topic], Filters(relevant_only=relevant_only))
    assert ports(found) == [0, NEWEST]
    assert [one.entry.content for one in found.shown[2:]] == list(OTHERS[:2]), "`top_k` with it"


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_of_the_eleventh_chunk_the_newest_version_is_shown_too(is_sealed: bool) -> None:
    better = [
        msgspec.structs.replace(draft(text), content=text, vector=at(degrees, axis))
        for axis in range(2, 7)
        for degrees in (8, -8)
        if (text := f"A chunk of its own at {degrees} on {axis}.")
    ]
    topic = topic_of(*map(version, range(VERSIONS)), *better, *others(), is_sealed=is_sealed)
    found = await recalled([topic], tokens=4000, top_k=8)
    assert {one.content for one in better} < {one.entry.content for one in found.shown}
    assert ports(found) == [0, NEWEST]


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_what_is_gone_or_in_the_prompt_or_found_unhelpful_is_no_version(is_sealed: bool) -> None:
    topic = topic_of(*map(version, range(VERSIONS)), *others(), is_sealed=is_sealed)
    snapshot = topic.snapshot()
    gone, worse = (snapshot.find(uuid_of(number)) for number in (NEWEST, NEWEST - 2))
    assert gone is not None and worse is not None
    topic.append([deprecated(gone), adjusted(worse, -1)])
    found = await recalled([topic], Filters(visible_digests={digest_of(NEWEST - 1)}))
    assert ports(found) == [0, NEWEST - 3]


async def test_a_version_is_newer_by_when_it_was_said_and_one_in_a_related_topic_counts_too() -> None:
    own = topic_of(*map(version, range(3)), *others())
    imported = version(80, said_at=1_000_000), version(81, said_at=1_800_000_000_000_000)
    other = open_store(CrashFiles()).topic("other")
    other.append([imported[1], *others(), imported[0]])
    assert ports(await recalled([own, other])) == [0, 81]


class NotStored(UnstoredText):
    """Text that waits for its vectors."""

    def __init__(self, topic: TopicLog, drafts: Sequence[Draft]) -> None:
        self._chunks = PendingRun(
            PendingChunk(draft, entry, ChunkTerms.of(analyze(draft.content)))
            for draft, entry in zip(drafts, topic.reserve(drafts), strict=True)
        )

    def __bool__(self) -> bool:
        return True

    def has_others_than(self, digests: object) -> bool:
        return True

    def chunks(self, but: object = (), until: float | None = None) -> Sequence[PendingRun]:
        return [self._chunks]


class WithNotStored(Searchable):
    """A topic with what is said in it and not stored yet."""

    def __init__(self, log: TopicLog, drafts: Sequence[Draft]) -> None:
        self._log, self._drafts = log, drafts

    @property
    def topic_id(self) -> str:
        return self._log.topic_id

    def snapshot(self) -> Snapshot:
        return self._log.snapshot()

    def unstored(self) -> UnstoredText:
        return NotStored(self._log, self._drafts)

    def lexical_query(self, text: str, pending: Sequence[TermsTable] = ()) -> LexicalQuery:
        return self._log.lexical_query(text, pending)


@pytest.mark.parametrize("lexical_weight", [0, 0.6])
async def test_what_has_no_vector_yet_is_the_newest_by_its_words(lexical_weight: float) -> None:
    topic = topic_of(*map(version, range(VERSIONS)), *others())
    pending = [msgspec.structs.replace(version(number), vector=b"") for number in (80, 81)]
    unlike = msgspec.structs.replace(draft("unlike"), content="Bread is baked on Mondays, as was said.", vector=b"")
    found = await recalled([WithNotStored(topic, [*pending, unlike])], lexical_weight=lexical_weight)
    assert ports(found)[-1] == 81 and len(ports(found)) == 2


async def test_an_answer_that_only_repeats_an_old_version_is_no_newer_one() -> None:
    told = [version(number) for number in range(40)]
    echo = version(80, content=TEXT.format(8000), roles=("assistant",), shown=(told[0].uuid,))
    assert ports(await recalled([topic_of(*told, *others(), echo)])) == [0, 39]
    read_again = msgspec.structs.replace(echo, roles=("assistant", "tool"), content=TEXT.format(8000) + " Again.")
    found = await recalled([topic_of(*told, *others(), read_again)])
    assert found.shown[-1].entry.content.endswith("Again.")


async def test_of_equal_texts_that_find_no_place_beside_each_other_the_newer_is_shown() -> None:
    notes = [
        msgspec.structs.replace(
            draft(number), content="The key hangs on hook nine.", vector=at(30), kind=kind, source=kind
        )
        for number, kind in enumerate(("turn", "document", "note"))
    ]
    found = await recalled([topic_of(*notes)], top_k=1)
    assert [one.entry.kind for one in found.shown] == ["note"]


READ_TWICE = (
    "# config/service.yaml\nname: billing\nlisten: 0.0.0.0\nport: {}\nlog_level: info\ndatabase: postgres://db/billing\n"
    "retries: 3\ntimeout_seconds: 20\nfeature_flags: invoices, refunds, dunning"
)


async def test_a_file_that_is_read_again_after_a_number_was_changed_is_shown_as_it_is_now() -> None:
    embedder = load_embedder(EmbeddingSettings())
    contents = [READ_TWICE.format(port) for port in (8081, 8082)]
    store = open_store(CrashFiles(), dimension=embedder.dimension, fingerprint=embedder.fingerprint)
    topic = store.topic("default")
    for number, (content, vector) in enumerate(zip(contents, embedder.embed_many(contents), strict=True)):
        topic.append([msgspec.structs.replace(draft(number), content=content, vector=vector.astype("<f4").tobytes())])
    encoder = Encoder(embedder)
    retriever = Retriever(encoder, RetrievalSettings(), header="Excerpts.", dates=False, count=len)
    try:
        found = await retriever.retrieve("Is the billing service on port 8081?", [topic], Budget(2000))
    finally:
        retriever.close()
        encoder.close()
    assert [one.entry.content for one in found.shown] == contents
