"""What says the same as something else of its batch: the same words, whatever the vectors are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from archiver_stage import COUNTER, DATA_DIR
from crash_files import CrashFiles

from memd.embedding.loading import load_embedder
from memd.entries import Draft
from memd.ingest.chunking import Utterance
from memd.ingest.copies import firsts_of, words_of
from memd.ingest.pipeline import Drafter
from memd.settings.model import Config, EmbeddingSettings
from memd.store.store import Store, TopicLog


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


def test_the_same_words_are_the_same_text_where_the_vectors_agree_and_the_very_same_text_always_is() -> None:
    texts = ["One lamp.", "one lamp", "Two lamps.", "ONE lamp", "one  lamp", "One lamp."]
    drafts = [Draft(uuid=bytes(16), content=text, vector=b"", created_at=1) for text in texts]
    angles = [0, 0.01, 0.01, 0.01, 1, 2]
    vectors = np.array([[np.cos(angle), np.sin(angle)] for angle in angles], dtype=np.float32)
    assert firsts_of(drafts, vectors, 0.99) == [0, 0, 2, 3, 4, 0]
    assert firsts_of([], vectors[:0], 0.99) == []


@pytest.fixture
def drafter() -> Drafter:
    return Drafter(Config(), COUNTER, load_embedder(EmbeddingSettings(threads=1)).embed_many)


@pytest.fixture
def topic() -> Iterator[TopicLog]:
    store = Store.open(DATA_DIR, dimension=384, fingerprint="a" * 32, segment_entries_max=1000, files=CrashFiles())
    yield store.topic("talk")
    store.close()


TABLE = "".join(f"| berth {number} | boat {number * 7} | paid |\n" for number in range(12))
SETTINGS = "[server]\nhost = harbour.example\nport = 8081\n\n[store]\npath = /var/lib/harbour\nsync = true\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [(TABLE, TABLE.replace("boat 21", "boat 22")), (SETTINGS, SETTINGS.replace("8081", "8082"))],
    ids=["table", "settings"],
)
def test_a_text_in_which_one_number_has_changed_is_stored_beside_the_former(
    drafter: Drafter, topic: TopicLog, one: str, other: str
) -> None:
    first, second = drafter.embed_many([one, other])
    assert first @ second >= Config().dedupe.cosine, "or this test shows nothing"
    runs = [[Utterance(text, "tool", bytes([number]) * 16)] for number, text in enumerate([one, other])]
    assert [draft.content for draft in drafter.drafts(topic, runs)] == [one, other]
