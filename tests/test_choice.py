"""A choice of chunks is made before they are searched: a narrow one over a large topic finds the best of its own."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np
import pytest
from archiver_stage import DIMENSION, HashEmbedder
from drafts import open_store, search, unit_vector, uuid_of
from golden_files import GOLDEN, TOPIC, opened
from numpy.typing import NDArray

from memd.embedding.encoder import Encoder
from memd.entries import Draft, Entry, Moment, WallTime, multiplier_of
from memd.errors import DiskFull
from memd.recall.retrieve import Budget, Filters, Retriever
from memd.selection import Selection
from memd.settings.model import RetrievalSettings
from memd.store.disk import LocalDisk
from memd.store.index.sealed_index import read_segment_meta
from memd.store.layout import TopicLayout
from memd.store.log.format import decode_any_header
from memd.store.snapshot import chosen, live_ids
from memd.store.store import TopicLog
from memd.store.tools.verify import verify

pytestmark = pytest.mark.thorough  # 20,000 chunks are appended before the first

CHUNKS = 20_000
SEGMENT = 5_000
START = 1_700_000_000_000_000
MINUTE_US = 60_000_000
QUESTION = "Which bicycle did the mayor buy at the market?"
IN_WEEK = frozenset(range(7_000, 22_000, 500)) & frozenset(range(CHUNKS)) | {11, 4_999, 19_999, 5_000}
WEEK = Selection(since=1, until=100)


class OneVector(HashEmbedder):
    """An embedder for which every question is the same."""

    fingerprint = "f" * 32

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.repeat(unit_vector("question", DIMENSION)[np.newaxis], len(texts), axis=0)


def text_of(number: int) -> str:
    """Those outside of the week have more of the question's words."""
    bought = "bought at the market by the mayor" if number not in IN_WEEK else f"seen in the year {number}"
    return f"A bicycle was {bought}, it is number {number}{' of plum' if number % 400 == 3 else ''}."


def draft(number: int) -> Draft:
    """Those outside of the week are nearer to the question, too."""
    toward = 0.2 if number in IN_WEEK else 3.0
    vector = unit_vector(number, DIMENSION) + toward * unit_vector("question", DIMENSION)
    return Draft(
        uuid=uuid_of(number),
        content=text_of(number),
        vector=(vector / np.linalg.norm(vector)).astype("<f4").tobytes(),
        created_at=START,
        said_at=number % 97 + 1 if number in IN_WEEK else START + number * MINUTE_US,
        roles=("user",) if number % 3 else ("user", "assistant", "narrator"),
        kind=("turn", "note", "note", "document")[number % 4],
        source=f"folder/{number % 50}.md" if number % 4 else None,
        speakers=(),
    )


@pytest.fixture(scope="module")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TopicLog]:
    """Sealed segments, two of them merged, and some chunks beside them."""
    path = tmp_path_factory.mktemp("choice")
    store = open_store(None, path, segment_entries_max=SEGMENT, dimension=DIMENSION, fingerprint="f" * 32)
    topic = store.topic("default")
    for start in range(0, CHUNKS, SEGMENT):
        topic.append([draft(number) for number in range(start, start + SEGMENT)])
    topic.merge((1, 2))
    praised = [topic.snapshot().history(uuid_of(number))[0] for number in (4_999, 8_000)]
    topic.append([msgspec.structs.replace(one.as_draft(), utility_steps=3) for one in praised])
    topic.append([draft(CHUNKS + number) for number in range(10)])
    topic.complete_words()
    yield topic
    store.close()


CHOICES = {
    "the week": WEEK,
    "the week, by role": Selection(since=1, until=100, roles=("assistant",)),
    "a kind that half have": Selection(kinds=("note",)),
    "a kind of its own": Selection(kinds=("document",)),
    "a role of its own": Selection(roles=("narrator",)),
    "two sources": Selection(sources=("folder/3.md", "folder/7.md")),
    "words": Selection(contains="OF PLUM"),
    "words of a source": Selection(sources=("folder/3.md",), contains="plum"),
    "nearly all": Selection(since=START),
    "nothing": Selection(since=5 * START),
}


@pytest.fixture(scope="module")
def entries(topic: TopicLog) -> list[Entry]:
    """Of all live chunks."""
    snapshot = topic.snapshot()
    return list(snapshot.read_many(place for place in snapshot.latest_places() if snapshot.is_live(place)).values())


def admitted(entries: list[Entry], wanted: Selection) -> dict[bytes, float]:
    """The chunks that a choice admits, with their scores, by looking at all."""
    question = unit_vector("question", DIMENSION)
    found = [entry for entry in entries if wanted.admits_entry(entry)]
    return {
        entry.uuid: max(0.0, float(entry.embedding @ question)) * multiplier_of(entry.utility_steps) for entry in found
    }


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_finds_the_best_of_what_it_admits(topic: TopicLog, entries: list[Entry], name: str) -> None:
    snapshot, wanted = topic.snapshot(), CHOICES[name]
    expected = admitted(entries, wanted)
    choice = chosen(snapshot, wanted)
    assert choice.live_count == len(live_ids(choice)) == len(expected)
    hits = search(choice, unit_vector("question", DIMENSION)[np.newaxis], 10)
    best = sorted(expected.values(), reverse=True)[:10]
    np.testing.assert_allclose([hit.score for hit in hits], best, atol=2e-6)
    queries = np.stack([unit_vector("question", DIMENSION), unit_vector("other", DIMENSION)])
    both = {choice.read(hit.place).uuid for hit in search(choice, queries, 10)}
    assert len(both) == min(10, len(expected))


@contextmanager
def retrieving(settings: RetrievalSettings) -> Iterator[Retriever]:
    with closing(Encoder(OneVector())) as encoder:
        made = Retriever(encoder, settings, count=lambda text: len(text.split()), now_us=lambda: 2**52)
        with closing(made) as retriever:
            yield retriever


@pytest.mark.parametrize(("lexical_weight", "past"), [(0.0, False), (0.5, False), (1.0, False), (0.5, True)])
async def test_a_question_about_a_week_of_a_large_topic_finds_the_best_of_that_week(
    topic: TopicLog, entries: list[Entry], lexical_weight: float, past: bool
) -> None:
    settings = RetrievalSettings(
        lexical_weight=lexical_weight, min_score=0.01, neighbour_weight=0.0, feedback_weight=0.0
    )
    with retrieving(settings) as retriever:
        topics = await retriever.as_of([topic], WallTime(2**52), {}) if past else [topic]
        asked = Filters(wanted=WEEK, everything=True)
        found = await retriever.retrieve(QUESTION, topics, Budget(10_000), asked)
    uuids = [one.entry.uuid for one in found.candidates]
    expected = admitted(entries, WEEK)
    weakest = sum(score < 0.01 for score in expected.values()) if lexical_weight == 0 else 0
    assert set(uuids) <= {uuid_of(number) for number in IN_WEEK} and len(uuids) >= len(IN_WEEK) - weakest
    if lexical_weight == 0:
        assert uuids[0] == max(expected, key=lambda uuid: expected[uuid])


@pytest.mark.parametrize("question", ["What did we talk about on 3 May?", "Worüber haben wir am 3. Mai gesprochen?"])
async def test_a_question_about_a_day_brings_that_day_out_of_a_large_topic(topic: TopicLog, question: str) -> None:
    noon = START + 5_000 * MINUTE_US + 12 * 3600 * 1_000_000
    day = datetime.fromtimestamp(noon / 1e6)
    asked = question.replace("3 May", f"{day:%Y-%m-%d}").replace("am 3. Mai", f"{day:%Y-%m-%d}")
    with retrieving(RetrievalSettings()) as retriever:
        found = await retriever.retrieve(asked, [topic], Budget(10_000))
    assert len(found.shown) > 5
    assert {datetime.fromtimestamp(one.entry.said / 1e6).date() for one in found.shown} == {day.date()}


def test_an_old_log_gets_its_columns_once_and_is_whole_before_and_after(tmp_path: Path) -> None:
    new = tmp_path / "new"
    shutil.copytree(GOLDEN / "v1", tmp_path / "old")
    shutil.copytree(GOLDEN / "v2", new)
    layout = TopicLayout(tmp_path / "old", TOPIC)
    before = decode_any_header(layout.meta(1).read_bytes())
    assert before is not None and before.version == 1 and verify(tmp_path / "old", LocalDisk()).ok
    store = opened(tmp_path / "old")
    assert chosen(store.topic(TOPIC).snapshot(), Selection(kinds=("note",))).live_count == 1
    store.close()
    for number in (1, 2):
        _, after = read_segment_meta(LocalDisk(), layout, number)
        as_new = read_segment_meta(LocalDisk(), TopicLayout(new, TOPIC), number)[1]
        assert msgspec.structs.replace(after, sealed_at=as_new.sealed_at) == as_new
    assert verify(tmp_path / "old", LocalDisk()).ok


def test_an_old_log_is_read_on_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOLDEN / "v1", tmp_path / "old")
    layout = TopicLayout(tmp_path / "old", TOPIC)
    old = layout.meta(1).read_bytes()
    monkeypatch.setattr("memd.store.claim.replace_file", _refuse)
    store = opened(tmp_path / "old")
    topic = store.topic(TOPIC)
    assert topic.findings == [] and topic.unsealed() == [1, 2, 3]
    assert chosen(topic.snapshot(), Selection(until=Moment(2**60))).live_count == topic.snapshot().live_count
    store.close()
    assert layout.meta(1).read_bytes() == old


def _refuse(*_: object) -> None:
    raise DiskFull("the disk is full")
