"""Caches: bounded by bytes, and honest about how many they hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memd.caching import ByteCache


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
