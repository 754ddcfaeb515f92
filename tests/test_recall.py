"""Recall: what its weights do to a real log, and what is still recalled where something cannot be read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from drafts import draft
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.embedding.loading import load_embedder
from memd.entries import Draft
from memd.errors import EmbeddingError
from memd.recall.block import line_of, render
from memd.recall.fusion import Evidence
from memd.recall.ranking import Verdict
from memd.recall.retrieve import Budget, Filters, Retrieved, Retriever
from memd.recall.topic_search import TopicSearch
from memd.settings.model import DEFAULT_UTILITY, EmbeddingSettings, RetrievalSettings
from memd.store.store import Store, TopicLog

FACTS = ("The spare key hangs behind the blue bicycle.", "The spare key is copied at the shop in Mill Lane.")


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return load_embedder(EmbeddingSettings())


BUDGET = Budget(2000)


def retriever_of(encoder: Encoder, settings: RetrievalSettings) -> Retriever:
    """A retriever for which a token is a word."""
    return Retriever(encoder, settings, header="Excerpts.", dates=False, count=lambda text: len(text.split()))


def contents(retrieved: Retrieved) -> list[str]:
    return [one.candidate.entry.content for one in retrieved.candidates]


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
    retriever = retriever_of(encoder, RetrievalSettings())
    try:
        retrieved = await retriever.retrieve("Where is the spare key?", [topic], BUDGET)
    finally:
        retriever.close()
        encoder.close()
        store.close()
    assert contents(retrieved) == [FACTS[1]]


async def test_the_line_of_a_stored_chunk_is_counted_when_it_is_appended_and_not_again(
    tmp_path: Path, embedder: Embedder
) -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    store = Store.open(
        tmp_path,
        dimension=embedder.dimension,
        fingerprint=embedder.fingerprint,
        segment_entries_max=100,
        line_tokens=lambda entry: count(line_of(entry)),
    )
    topic = store.topic("default")
    topic.append([_draft(embedder, number, text) for number, text in enumerate(FACTS)])
    encoder = Encoder(embedder)
    retriever = Retriever(encoder, RetrievalSettings(), header="Excerpts.", dates=False, count=count)
    try:
        retrieved = await retriever.retrieve("Where is the spare key?", [topic], BUDGET)
        placed = render(retrieved.shown, own_topic_id="default", header="Excerpts.", taken=(), tokens=0)
        assert retrieved.shown and retrieved.raw_tokens == len(placed.text)
        lines = [text for text in counted if "[mem:" in text]
        assert len(lines) == len(FACTS), "each once"
        assert [one.tokens for one in retrieved.candidates] == [
            len(line_of(one.candidate.entry)) for one in retrieved.candidates
        ]
    finally:
        retriever.close()
        encoder.close()
        store.close()


class Broken:
    """An embedder that fails whenever it is asked."""

    fingerprint = "f" * 32

    same_cosine, finds_across_languages = staticmethod(float), staticmethod(bool)
    prior = Embedder.prior

    def embed_query(self, text: str) -> NDArray[np.float32]:
        raise EmbeddingError("it was asked")

    def close(self) -> None:
        pass


async def test_a_topic_without_entries_needs_no_embedding_and_any_other_does(
    tmp_path: Path, embedder: Embedder
) -> None:
    store = Store.open(
        tmp_path, dimension=embedder.dimension, fingerprint=embedder.fingerprint, segment_entries_max=100
    )
    empty, other = store.topic("empty"), store.topic("other")
    other.append([_draft(embedder, 1, FACTS[0])])
    encoder = Encoder(Broken())  # type: ignore[arg-type]  # the part of it that recall uses
    retriever = retriever_of(encoder, RetrievalSettings())
    try:
        assert (await retriever.retrieve("Where is the spare key?", [empty], BUDGET)).trouble is None
        assert (await retriever.retrieve("Where is the spare key?", [empty, other], BUDGET)).trouble is not None
    finally:
        retriever.close()
        encoder.close()
        store.close()


TALK = (
    "The boat house needs a new lock before winter.",
    "Bread is baked on Tuesdays and Fridays.",
    "Anna wants to paint the boat house green.",
    "The cellar floods every spring when the river rises.",
    "Ticket QX_7741 was closed; the mill wheel turns again.",
    "Tom's train leaves at ten past six.",
)
UTILITY_STEPS = (0, 0, 3, -2, 0, 1)


async def asked(topic: TopicLog, question: str, filters: Filters | None = None, /, **settings: float) -> Retrieved:
    encoder = Encoder(load_embedder(EmbeddingSettings()))
    retriever = retriever_of(encoder, RetrievalSettings(**settings))  # type: ignore[arg-type]  # numbers of both kinds
    try:
        return await retriever.retrieve(question, [topic], BUDGET, filters)
    finally:
        retriever.close()
        encoder.close()


@pytest.fixture
def topic(tmp_path: Path, embedder: Embedder) -> Iterator[TopicLog]:
    store = Store.open(tmp_path, dimension=embedder.dimension, fingerprint=embedder.fingerprint, segment_entries_max=4)
    talk = store.topic("default")
    plain = [_draft(embedder, number, text) for number, text in enumerate(TALK)]
    drafts = [
        msgspec.structs.replace(one, utility_steps=steps) for one, steps in zip(plain, UTILITY_STEPS, strict=True)
    ]
    talk.append(drafts[:4])
    talk.seal(1)
    talk.append(drafts[4:])
    yield talk
    store.close()


@pytest.mark.parametrize("question", ["Who paints the boat house?", "QX_7741", "When is bread baked?", "zebra"])
async def test_without_words_and_neighbours_recall_is_the_plain_formula(
    topic: TopicLog, embedder: Embedder, question: str
) -> None:
    query = embedder.embed(question)
    plain = []
    for text, steps in zip(TALK, UTILITY_STEPS, strict=True):
        cosine = round(float(np.dot(embedder.embed(text), query)), 6)
        plain.append((max(0.0, cosine) * DEFAULT_UTILITY.multiplier(steps), text))
    expected = sorted((one for one in plain if one[0] >= 0.2), reverse=True)
    found = await asked(topic, question, lexical_weight=0, neighbour_weight=0)
    assert contents(found) == [text for _, text in expected]
    assert [one.candidate.score for one in found.candidates] == pytest.approx(
        [score for score, _ in expected], abs=2e-6
    )
    assert not (topic.hot_path.parent / "lexical").exists()


async def test_a_rare_identifier_wins_over_every_cosine(topic: TopicLog) -> None:
    question = "Does QX_7741 have to do with the boat house, the lock or painting it green before winter?"
    assert contents(await asked(topic, question, lexical_weight=0))[0] != TALK[4]
    plain = {"lexical_weight": 0.5, "neighbour_weight": 0.2}
    found = await asked(topic, question, **plain)
    relevance = {
        one.candidate.entry.content: one.candidate.score / one.candidate.parts.multiplier for one in found.candidates
    }
    assert max(relevance, key=lambda text: relevance[text]) == TALK[4]


def _beside(texts: list[str], evidence: Evidence) -> set[tuple[str, str]]:
    """Each text with each that was said beside it."""
    return {(texts[one], texts[other]) for one, other in evidence.beside.tolist()}


def test_only_the_strongest_bring_in_their_neighbours_and_each_speaks_for_the_other(
    topic: TopicLog, embedder: Embedder
) -> None:
    question = "Who paints the boat house?"
    search = TopicSearch(topic.snapshot(), embedder.embed_query(question), topic.lexical_query(question))
    hits, evidence = search.evidence(2, RetrievalSettings())  # both sides find it, twice; one of two counts
    texts = [topic.snapshot().entry(hit).content for hit in hits]
    assert sorted(texts) == sorted([TALK[2], TALK[0], TALK[1], TALK[3]])
    beside = {text: {other for one, other in _beside(texts, evidence) if one == text} for text in texts}
    assert beside == {TALK[2]: {TALK[1], TALK[3]}, TALK[1]: {TALK[2]}, TALK[3]: {TALK[2]}, TALK[0]: set()}
    hits, _ = search.evidence(2, RetrievalSettings(neighbour_weight=0))
    assert {topic.snapshot().entry(hit).content for hit in hits} == {TALK[2], TALK[0]}


@pytest.mark.parametrize("question", ["What is the capital of Mongolia?", "How do I sort a list in Haskell?"])
async def test_a_question_about_nothing_that_is_stored_recalls_nothing(topic: TopicLog, question: str) -> None:
    assert contents(await asked(topic, question)) == []


async def test_without_its_lexical_index_a_topic_is_searched_by_meaning(topic: TopicLog) -> None:
    (topic.hot_path.parent / "lexical").write_text("a file where the folder belongs")
    assert TALK[2] in contents(await asked(topic, "Who paints the boat house?"))


# -- several topics, streams of text, and everything that was looked at -----------------------------------------------


async def answered(topics: Sequence[TopicLog], question: str, filters: Filters, budget: Budget = BUDGET) -> Retrieved:
    encoder = Encoder(load_embedder(EmbeddingSettings()))
    retriever = retriever_of(encoder, RetrievalSettings())
    try:
        return await retriever.retrieve(question, topics, budget, filters)
    finally:
        retriever.close()
        encoder.close()


def verdicts(retrieved: Retrieved) -> dict[str, Verdict]:
    return {one.candidate.entry.content: one.verdict for one in retrieved.candidates}


async def test_what_is_relevant_is_the_same_whether_the_rest_is_wanted_too_or_not(topic: TopicLog) -> None:
    question = "Who paints the boat house?"
    plain = await answered([topic], question, Filters())
    explained = await answered([topic], question, Filters(relevant_only=False))
    assert plain.shown == explained.shown and plain.fill_ratio == explained.fill_ratio
    assert plain.candidates == tuple(one for one in explained.candidates if one.verdict is Verdict.INJECTED)
    assert len(explained.candidates) > len(plain.candidates) > 0
    assert Verdict.WEAK in verdicts(explained).values()


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks were searched for, search after search."""
    numbers: list[int] = []
    evidence = TopicSearch.evidence

    def counted(search: TopicSearch, k: int, settings: RetrievalSettings) -> object:
        numbers.append(k)
        return evidence(search, k, settings)

    monkeypatch.setattr(TopicSearch, "evidence", counted)
    return numbers


async def test_where_all_that_is_strong_is_in_the_prompt_nothing_further_is_searched(
    tmp_path: Path, embedder: Embedder, asked_for: list[int]
) -> None:
    store = Store.open(
        tmp_path, dimension=embedder.dimension, fingerprint=embedder.fingerprint, segment_entries_max=1000
    )
    topic = store.topic("default")
    seen = msgspec.structs.replace(_draft(embedder, 0, FACTS[0]), digests=(b"d" * 16,))
    weak = [
        msgspec.structs.replace(
            draft(number, dimension=embedder.dimension), content=f"The weather report number {number} hangs there."
        )
        for number in range(400)
    ]
    topic.append([seen, *weak])
    topic.index_terms()
    try:
        found = await answered([topic], "Where hangs the spare key?", Filters(visible_digests={b"d" * 16}))
    finally:
        store.close()
    assert found.shown == () and asked_for == [RetrievalSettings().top_k]


@pytest.mark.parametrize(("is_sealed", "expected"), [(False, [2]), (True, [2, 4, 8, 16])])
async def test_what_is_in_the_prompt_takes_no_places_or_a_search_goes_further_by_as_many(
    tmp_path: Path, embedder: Embedder, asked_for: list[int], is_sealed: bool, expected: list[int]
) -> None:
    store = Store.open(tmp_path, dimension=embedder.dimension, fingerprint=embedder.fingerprint, segment_entries_max=14)
    topic = store.topic("default")
    drafts = [_draft(embedder, number, f"The spare key number {number} hangs there.") for number in range(14)]
    seen = [msgspec.structs.replace(one, digests=(b"d" * 16,)) for one in drafts[:12]]
    topic.append([*seen, *drafts[12:]])
    for segment_id in topic.unsealed() if is_sealed else ():
        topic.seal(segment_id)
    filters = Filters(visible_digests={b"d" * 16})
    plain = {"min_score": 0.0, "lexical_weight": 0.0, "neighbour_weight": 0.0}
    try:
        found = await asked(topic, "Where hangs spare key number 3?", filters, top_k=2, **plain)
    finally:
        store.close()
    assert {one.entry.content for one in found.shown} == {one.content for one in drafts[12:]} and asked_for == expected


def test_what_is_in_the_prompt_still_speaks_for_what_was_said_beside_it(topic: TopicLog, embedder: Embedder) -> None:
    digest = b"d" * 16
    lines = ("Where did Tom hide the spare key?", "Below the third flower pot.", "Bread is baked on Fridays.")
    drafts = [_draft(embedder, 20 + number, text) for number, text in enumerate(lines)]
    topic.append([msgspec.structs.replace(drafts[0], digests=(digest,)), *drafts[1:]])
    search = TopicSearch(
        topic.snapshot(),
        embedder.embed_query(lines[0]),
        topic.lexical_query(lines[0]),
        visible_digests={digest},
    )
    hits, evidence = search.evidence(2, RetrievalSettings())
    texts = [topic.snapshot().entry(hit).content for hit in hits]
    assert (lines[1], lines[0]) in _beside(texts, evidence)


class Waiting:
    """An embedder whose vectors come only after words were looked up."""

    fingerprint = "f" * 32

    same_cosine, finds_across_languages = staticmethod(float), staticmethod(bool)
    prior = Embedder.prior

    def __init__(self, embedder: Embedder) -> None:
        self.fingerprint = embedder.fingerprint
        self.looked_up = threading.Event()
        self._embedder = embedder

    def embed_query(self, text: str) -> NDArray[np.float32]:
        assert self.looked_up.wait(60), "words wait for the vectors"
        return self._embedder.embed_query(text)

    def close(self) -> None:
        pass


async def test_words_are_looked_up_while_the_question_is_embedded(
    topic: TopicLog, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(embedder)
    look_up = TopicSearch.look_up_words

    def looked_up(search: TopicSearch, k: int) -> None:
        look_up(search, k)
        waiting.looked_up.set()

    monkeypatch.setattr(TopicSearch, "look_up_words", looked_up)
    encoder = Encoder(waiting)  # type: ignore[arg-type]  # the part of it that recall uses
    retriever = retriever_of(encoder, RetrievalSettings())
    try:
        found = await retriever.retrieve("Who paints the boat house?", [topic], BUDGET)
    finally:
        retriever.close()
        encoder.close()
    assert found.trouble is None and found.shown


async def test_a_budget_is_in_the_model_s_tokens(topic: TopicLog) -> None:
    question = "Who paints the boat house?"
    whole = await answered([topic], question, Filters())
    needed = whole.raw_tokens
    assert (await answered([topic], question, Filters(), Budget(needed, 1.0))).shown == whole.shown
    drifted = await answered([topic], question, Filters(), Budget(needed, 2.0))
    assert len(drifted.shown) < len(whole.shown) and drifted.fill_ratio > 1
    assert drifted.budget.drifted(drifted.raw_tokens) <= needed
    assert drifted.candidates[0].tokens == 2 * whole.candidates[0].tokens


async def test_of_a_chunk_that_two_topics_have_the_own_topic_s_entry_counts(tmp_path: Path, embedder: Embedder) -> None:
    store = Store.open(
        tmp_path, dimension=embedder.dimension, fingerprint=embedder.fingerprint, segment_entries_max=100
    )
    own, home, other = store.topic("own"), store.topic("home"), store.topic("other")
    for at, (topic, steps) in enumerate(((home, 0), (own, 1), (other, 2)), 1):
        draft = msgspec.structs.replace(_draft(embedder, 7, FACTS[0]), utility_steps=steps, origin_id=at)
        topic.append([draft])
    question = "Where is the spare key?"
    [known] = (await answered([own, home, other], question, Filters())).candidates
    [newest] = (await answered([home, other], question, Filters())).candidates
    store.close()
    assert (known.candidate.topic_id, known.candidate.entry.utility_steps) == ("own", 1)
    assert newest.candidate.topic_id == "home", "the own topic has the last word, also against a newer entry"


def _page(embedder: Embedder, number: int, text: str, source: str) -> Draft:
    return msgspec.structs.replace(_draft(embedder, number, text), kind="document", source=source)


async def test_what_was_said_beside_a_document_is_no_neighbour_of_it_and_repeats_nothing_of_it(
    tmp_path: Path, embedder: Embedder
) -> None:
    store = Store.open(
        tmp_path, dimension=embedder.dimension, fingerprint=embedder.fingerprint, segment_entries_max=100
    )
    topic = store.topic("default")
    topic.append(
        [
            _draft(embedder, 0, "Thank you, that is all."),
            _page(embedder, 1, FACTS[0], "keys.md"),
            _page(embedder, 2, "Bread is baked on Tuesdays.", "bread.md"),
            _draft(embedder, 3, FACTS[0]),
        ]
    )
    topic.append([_draft(embedder, 4, "Yes.")])
    search = TopicSearch(
        topic.snapshot(),
        embedder.embed_query("Where is the spare key?"),
        topic.lexical_query("Where is the spare key?"),
    )
    hits, evidence = search.evidence(3, RetrievalSettings())
    texts = [topic.snapshot().entry(hit).content for hit in hits]
    pairs = _beside(texts, evidence)
    retrieved = await answered([topic], "Where is the spare key?", Filters())
    store.close()
    assert pairs == {(FACTS[0], "Yes."), ("Yes.", FACTS[0])}, "turns are neighbours across appends, nothing else is"
    kinds = {one.candidate.entry.kind for one in retrieved.candidates if one.candidate.entry.content == FACTS[0]}
    assert kinds == {"document", "turn"}, "each is a witness of its own"


async def test_the_last_paragraph_of_a_question_is_asked_alone_too(topic: TopicLog) -> None:
    task = (
        "Go through the repository file by file and tidy up what the linter says about imports, names and unused"
        " variables. Run the checks after each change. Do not touch the deployment, and leave the changelog as it is."
    )
    alone = await answered([topic], "When is bread baked?", Filters())
    behind = await answered([topic], f"{task}\n\nWhen is bread baked?", Filters())
    assert [one.candidate.entry.uuid for one in behind.candidates[:1]] == [
        one.candidate.entry.uuid for one in alone.candidates[:1]
    ]
    cosine = alone.candidates[0].candidate.parts.similarity
    assert behind.candidates[0].candidate.parts.similarity == pytest.approx(cosine, abs=1e-4)
    assert (await answered([topic], f"{task}\n\nGo on!", Filters())).shown == (
        await answered([topic], f"{task} Go on!", Filters())
    ).shown, "what says nothing by itself is not asked alone"
