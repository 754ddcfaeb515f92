"""Requests go first, and what is stored in the background is stored all the same."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from memd.embedding import priority
from memd.embedding.encoder import QUESTION_CHARACTERS_MAX, QUESTIONS_MAX, Encoder
from memd.embedding.priority import Priority
from memd.errors import EmbeddingError


class Embedding:
    """An embedder that writes down what it embeds."""

    batch_texts = 1
    waits = False

    def __init__(self) -> None:
        self.order: list[str] = []

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.order.extend(texts)
        return np.zeros((len(texts), 4), np.float32)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        return self.embed_many([text])

    def close(self) -> None:
        pass


def test_it_begins_nothing_in_the_gap_between_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "WAIT_SECONDS_MAX", 60.0)
    monkeypatch.setattr(priority, "WAITS_MAX", float("inf"))
    monkeypatch.setattr(priority, "QUIET_SECONDS", 0.2)
    requests = priority.Priority()
    work = requests.for_background()
    with requests.held():
        pass
    released = time.monotonic()
    work.give_way()
    assert time.monotonic() - released >= 0.15


def test_a_question_asked_again_is_not_embedded_again_unless_it_failed_or_is_very_long() -> None:
    class Failing(Embedding):
        fails = True

        def embed_query(self, text: str) -> NDArray[np.float32]:
            found = super().embed_query(text)
            if self.fails:
                raise EmbeddingError("not now")
            return found

    model = Failing()
    encoder = Encoder(model)  # type: ignore[arg-type]  # the part of it that is used here
    long = "Why? " * QUESTION_CHARACTERS_MAX
    try:
        with pytest.raises(EmbeddingError):
            encoder.embed_parts(["Where?"], 60)
        model.fails = False
        found = [encoder.embed_parts([text], 60) for text in ("Where?", "Where?", long, long)]
        assert model.order == ["Where?", "Where?", long, long]
        assert np.array_equal(found[0], found[1])
        for number in range(QUESTIONS_MAX):
            encoder.embed_parts([str(number)], 60)
        encoder.embed_parts(["Where?"], 60)
        assert model.order[-1] == "Where?", "the oldest ones are forgotten"
    finally:
        encoder.close()


def test_where_requests_leave_no_gap_it_goes_on_after_a_while() -> None:
    first = Priority()
    work = first.for_background()
    with first.held():
        for _ in range(3):
            work.give_way()  # would never return if it waited for the request
