"""Caches bounded by bytes, which report their size; a dictionary bounded by its length; lazily compiled patterns.

Rule: every cache that takes megabytes is one of these, so that `/memd/stats` can report memory use. Rarely needed
patterns are compiled on first use, because at import they took 5% of the start.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar, cast

ENGINE: Any = re if sys.version_info >= (3, 11, 5) else import_module("regex")
"""Compiles patterns with possessive groups: before 3.11.5 `re` loses its way in them, and what should be redacted would
be stored (CPython issue 106052). tiktoken brings `regex`."""
ENTRY_BYTES = 240
"""Overhead of an entry besides key and value: tuples and table slot (measured with tracemalloc)."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


class Latest(OrderedDict[Key, Value]):
    """A dictionary that keeps the most recently set values, newest last. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """`most`: maximum number of values."""
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class ByteCache(Generic[Key, Value]):
    """Values by key; the least recently used are dropped beyond `bytes_max`. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        self._held: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, without marking it as used."""
        held = self._held.get(key)
        return None if held is None else held[0]

    def get_many(self, keys: Iterable[Key]) -> dict[Key, Value]:
        """Return the values of the cached keys, without marking them as used."""
        get = self._held.get
        return {key: held[0] for key in keys if (held := get(key)) is not None}

    def use(self, keys: Iterable[Key]) -> list[Value | None]:
        """Return the values of keys, possibly thousands, and mark them as most recently used."""
        with self._lock:
            get, move = self._held.get, self._held.move_to_end
            return [None if (held := get(key)) is None else move(key) or held[0] for key in keys]

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._held.clear()
            self.bytes_held = 0

    def put(self, key: Key, value: Value, size: int) -> None:
        """Add a value for a new key; `size`: bytes of key and value, table entry included."""
        with self._lock:
            if size > self.bytes_max or key in self._held:
                return
            self._held[key] = value, size
            self.bytes_held += size
            while self.bytes_held > self.bytes_max:
                _, (_, dropped) = self._held.popitem(last=False)
                self.bytes_held -= dropped


class CachedFunction(ByteCache[tuple[object, ...], Value], Generic[Arguments, Value]):
    """A pure function of hashable positional arguments with cached values. Thread-safe."""

    def __init__(self, function: Callable[Arguments, Value], bytes_max: int, size_of: Callable[[Value], int]) -> None:
        """`size_of`: bytes of a value."""
        super().__init__(bytes_max)
        self._function = function
        self._size_of = size_of

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        """Return the function's value."""
        assert not kwargs, "positional arguments only"
        with self._lock:
            if (held := self._held.get(args)) is not None:
                self._held.move_to_end(args)
                return held[0]
        found = self._function(*args, **kwargs)
        self.put(args, found, ENTRY_BYTES + sum(map(sys.getsizeof, args)) + self._size_of(found))
        return found


def late_pattern(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Return a pattern like `re.compile`, but compile it on first use."""
    return cast("re.Pattern[str]", _LatePattern(pattern, flags))


class _LatePattern:
    """Looks up each method of the compiled pattern once, on first use."""

    def __init__(self, pattern: str, flags: int) -> None:
        self._written = pattern, flags

    def __getattr__(self, name: str) -> Any:
        found = getattr(ENGINE.compile(*self._written), name)
        setattr(self, name, found)
        return found
