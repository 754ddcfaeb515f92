"""What says the same as something else of its batch: the same words, whatever the vectors are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from archiver_stage import COUNTER, DATA_DIR
from crash_files import CrashFiles
from numpy.typing import NDArray

from memd.embedding.loading import load_embedder
from memd.entries import Entry
from memd.ingest.chunking import Utterance
from memd.ingest.pipeline import Drafter, words_of
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


MONDAY, TUESDAY = "We deploy on Monday.", "No, we deploy on Tuesday."


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
