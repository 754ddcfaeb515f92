"""What says the same as something else of its batch: the same words, whatever the vectors are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from archiver_stage import COUNTER, DATA_DIR
from crash_files import CrashFiles
from numpy.typing import NDArray

from memd.embedding.loading import load_embedder
from memd.entries import Draft, Entry
from memd.ingest.chunking import Utterance
from memd.ingest.pipeline import ALIKE_COSINE, BatchDraft, Drafter, may_return, standing_for, words_of
from memd.settings.model import Config, EmbeddingSettings
from memd.store.store import ModelId, Store, StoreShared, TopicLog


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The port is 8081.", "the  port\nis 8081"),
        ("Deploy on Monday, please!", "deploy on monday please"),
        ('He said "no".', 'He said "no"'),
    ],
)
def test_white_space_marks_behind_words_and_capitals_that_open_them_change_no_words(one: str, other: str) -> None:
    assert words_of(one) == words_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The port is 8081.", "The port is 8082."),
        ("It is -5 degrees.", "It is 5 degrees."),
        ("The margin is 3.5", "The margin is 35"),
        ("The deploy is on Monday.", "The deploy is on Monday?"),
        ("The deploy is on Monday.", "The deploy is not on Monday."),
        ("Do it, don't wait.", "Don't do it, wait."),
        ("cd ../..", "cd ../."),
        ("rm /var/log", "rm /Var/log"),
        ("set MAX_rows", "set max_rows"),
        ("call getItem", "call getitem"),
        ("a, b", "b, a"),
    ],
)
def test_numbers_signs_questions_negations_paths_identifiers_and_the_order_do(one: str, other: str) -> None:
    assert words_of(one) != words_of(other)


def standing(*texts: str, angles: Sequence[float] = (), chunks: int = 1) -> list[int | None]:
    """What stands for each of these texts where the topic has nothing yet; all are alike without `angles`."""
    batch = [
        BatchDraft(Draft(uuid=bytes(16), content=text, vector=b"", created_at=1, digests=(bytes([number // chunks]),)))
        for number, text in enumerate(texts)
    ]
    may = may_return([one.draft for one in batch])
    batch = [msgspec.structs.replace(one, may_return=that) for one, that in zip(batch, may, strict=True)]
    turned = angles or [0.0] * len(texts)
    vectors = np.array([[np.cos(angle), np.sin(angle)] for angle in turned], dtype=np.float32).reshape(-1, 2)
    return standing_for(batch, vectors, 0.99, ALIKE_COSINE)


def test_the_same_words_are_the_same_text_where_the_vectors_agree_and_the_very_same_text_always_is() -> None:
    texts = ["One lamp.", "one lamp", "Two lamps.", "ONE lamp", "one  lamp", "One lamp."]
    assert standing(*texts, angles=[0, 0.01, 2, 4, 6, 3]) == [0, 0, 2, 3, 4, 0]
    assert standing() == []


MONDAY, TUESDAY = "We deploy on Monday.", "No, we deploy on Tuesday."


@pytest.mark.parametrize(
    ("said", "stored"),
    [
        ([MONDAY, TUESDAY, MONDAY], [0, 1, 2]),
        ([MONDAY, TUESDAY, MONDAY, TUESDAY, MONDAY], [0, 1, 0, 1, 4]),
        ([MONDAY, MONDAY, TUESDAY], [0, 0, 2]),
        ([MONDAY, "we  deploy on Monday", MONDAY], [0, 0, 0]),
        (["Yes.", "No.", "Yes."], [0, 1, 0]),
    ],
)
def test_what_is_said_again_after_something_else_came_in_its_place_is_stored_again_unless_that_is_said_again_too(
    said: list[str], stored: list[int]
) -> None:
    assert standing(*said) == stored


def test_what_is_unlike_takes_no_text_s_place_and_neither_does_the_rest_of_its_message() -> None:
    assert standing(MONDAY, TUESDAY, MONDAY, angles=[0, 1, 0]) == [0, 1, 0]
    rows = [f"| berth {number} | boat {number * 7} | paid |" for number in range(4)]
    assert standing(*rows, "Is that all?", *rows[:3], chunks=4) == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.fixture
def drafter() -> Drafter:
    return Drafter(Config(), COUNTER, load_embedder(EmbeddingSettings(threads=1)).embed_many)


@pytest.fixture
def topic() -> Iterator[TopicLog]:
    store = Store(DATA_DIR, StoreShared(model=ModelId(384, "a" * 32), segment_entries_max=2, files=CrashFiles()))
    yield store.topic("talk")
    store.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_what_came_since_a_copy_is_found_under_an_index_too_and_no_vector_is_made_twice(
    drafter: Drafter, topic: TopicLog, sealed: bool
) -> None:
    places = itertools.count()

    def said(text: str) -> list[Entry]:
        return topic.append(drafter.drafts(topic, [[Utterance(text, "user", bytes([next(places)]) * 16)]]))

    (first,) = said(MONDAY)
    said("The cat sleeps on the warm window sill.")
    assert said(MONDAY) == [], "nothing like it was said since"
    said(TUESDAY)
    said("The ferry does not run in January.")
    for segment_id in topic.unsealed() if sealed else ():
        topic.seal(segment_id)
    assert len(topic.snapshot().indexes) == 2 * sealed
    drafter.embed_many = no_model
    (again,) = said(MONDAY)
    assert (again.content, again.vector) == (MONDAY, first.vector) and again.uuid != first.uuid
    assert said(MONDAY) == []


def no_model(texts: Sequence[str]) -> NDArray[np.float32]:
    raise AssertionError(f"{texts} have vectors")
