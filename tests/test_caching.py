"""Caches: bounded by bytes, and honest about how many they hold."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.caching import ByteCache
from memd.conversation.tokens import TokenCounter
from memd.messages import Message


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60))))
def test_what_is_held_is_what_was_kept_last_and_never_more_than_the_bound(kept: list[tuple[int, int]]) -> None:
    cache: ByteCache[int, int] = ByteCache(100)
    sizes: dict[int, int] = {}
    for key, size in kept:
        if cache.get(key) is None:
            sizes[key] = size
        cache.put(key, key, size)
        assert cache.use([key, -1]) == [cache.get(key), None]
        assert cache.get(key) == key
        assert cache.bytes_held == sum(size for one, size in sizes.items() if cache.get(one) is not None) <= 100


def _text(number: int) -> str:
    words = (f"word{(number * 31 + place * place) % 997}" for place in range(120))
    return " ".join(f"{word}." if place % 8 == 7 else word for place, word in enumerate(words))


class _Words:
    """In place of tiktoken's encoding: here only what is kept of it counts."""

    def encode_ordinary(self, text: str) -> list[str]:
        return text.split()


_COUNTER = TokenCounter(_Words())  # type: ignore[arg-type]  # it needs no more of an encoding


def _counted(number: int) -> None:
    message = Message(role="user", text=f"message {number}")
    _COUNTER.message(message, message.content_digest)


@pytest.mark.parametrize(
    ("fill", "held"),
    [
        (_counted, lambda: _COUNTER.cache_bytes),
        (lambda number: _COUNTER.count_again(_text(number)) and None, lambda: _COUNTER.cache_bytes),
    ],
    ids=["tokens of messages", "tokens of texts"],
)
def test_what_a_cache_says_it_holds_is_what_it_takes(fill: Callable[[int], None], held: Callable[[], int]) -> None:
    for number in range(-500, 0):  # so that Python's table of interned words does not grow while it is measured
        fill(number)
    said = held()
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(500):
            fill(number)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * taken < held() - said < 1.3 * taken
