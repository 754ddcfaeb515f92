"""A shared log in a folder, for tests: stricter than PostgreSQL, and it can be told to fail at any call.

Rule: a row is a file; one lock for all, so that calls of several threads and processes are carried out one by one.
What the seam forbids is an error here, also where PostgreSQL would let it pass.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memd.errors import BadTopicId, InDoubt, StoreWriteFailed
from memd.store.shared.seam import PAGE_ROWS, STREAMS, News, Row, Stream


class FolderLog:
    """See SharedLog."""

    def __init__(self, folder: Path) -> None:
        self.place, self.cluster = str(folder), "folder"
        self.trouble, self.trouble_seconds = "", 0.0
        self.calls = 0
        self.fails: Callable[[str], str] = lambda call: ""
        """Asked at each call: "away" (nothing is done), "doubt" (it is done, and the answer is lost), or ""."""
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def connect(self) -> None:
        """There is nothing to be made."""

    def ends(self, topic_ids: Collection[str]) -> dict[str, News]:
        with self._call("ends"):
            told = {name: self._told(name) for name in topic_ids}
            heads = {name: {stream: head for stream, (head, _) in one["heads"].items()} for name, one in told.items()}
            return {name: News(generation=told[name]["generation"], heads=heads[name]) for name in told}

    def since(self, topic_id: str, after: Mapping[Stream, int], limit: int = PAGE_ROWS) -> News:
        with self._call("since"):
            assert after and set(after) <= set(STREAMS), "streams that there are"
            told = self._told(topic_id)
            if not told["generation"]:
                return News()
            rows = []
            for stream in sorted(after):
                assert after[stream] >= 0
                rows += self._rows(topic_id, stream, after[stream])[:limit]
            heads = {stream: told["heads"][stream][0] for stream in after}
            return News(generation=told["generation"], heads=heads, rows=tuple(rows))

    def append(
        self, topic_id: str, stream: Stream, after: int, last: int, data: bytes, *, generation: int, base: bool = False
    ) -> bool:
        with self._call("append"):
            assert stream in STREAMS, stream
            assert last > after >= 0, "ids ascend"
            assert isinstance(data, bytes), "bytes, and nothing that may change"
            assert data, "a row says something"
            assert base or stream != "kept", "kept is replaced as a whole"
            told = self._told(topic_id)
            if not told["generation"] and not generation:
                for one in self._folder.iterdir():
                    if one.name.casefold() == f"{topic_id}.json".casefold():
                        raise BadTopicId(f"{topic_id}: differs only in case from {one.name}")
                told = {"generation": 1, "heads": {one: [0, 0] for one in STREAMS}}
            if told["generation"] != (generation or 1) or told["heads"][stream][0] != after:
                return False
            path = self._path(topic_id, stream, last)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            if base:
                for row in self._rows(topic_id, stream, 0):
                    if row.last < last:
                        self._path(topic_id, stream, row.last).unlink()
            told["heads"][stream] = [last, last if base else told["heads"][stream][1]]
            self._tell(topic_id, told)
            return True

    def rewrite(self, topic_id: str, generation: int, rows: Mapping[tuple[Stream, int], bytes] | None) -> int:
        with self._call("rewrite"):
            told = self._told(topic_id)
            if not told["generation"] or told["generation"] != generation:
                return 0
            if rows is None:
                for stream in STREAMS:
                    for row in self._rows(topic_id, stream, 0):
                        self._path(topic_id, stream, row.last).unlink()
            for (stream, last), data in (rows or {}).items():
                path = self._path(topic_id, stream, last)
                assert path.exists(), "only what is there can be rewritten"
                assert len(data) == path.stat().st_size, "in place"
                path.write_bytes(data)
            told["generation"] += 1
            self._tell(topic_id, told)
            return int(told["generation"])

    def topics(self, after: str, limit: int) -> list[str]:
        with self._call("topics"):
            names = sorted(one.name.removesuffix(".json") for one in self._folder.glob("*.json"))
            return [name for name in names if name > after and any((self._folder / name).glob("*/*"))][:limit]

    def close(self) -> None:
        """Nothing is open."""

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise AssertionError(f"{name} was called on the event loop")
        self.calls += 1
        fault = self.fails(name)
        if fault == "away":
            raise StoreWriteFailed(f"{self.place}: is away")
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        if fault == "doubt":
            raise InDoubt(f"{self.place}: the answer was lost")

    def _told(self, topic_id: str) -> dict[str, Any]:
        path = self._folder / f"{topic_id}.json"
        told: dict[str, Any] = {"generation": 0, "heads": {}}
        return json.loads(path.read_text()) if path.exists() else told

    def _tell(self, topic_id: str, told: dict[str, Any]) -> None:
        (self._folder / f"{topic_id}.json").write_text(json.dumps(told))

    def _path(self, topic_id: str, stream: Stream, last: int) -> Path:
        return self._folder / topic_id / stream / f"{last:020d}"

    def _rows(self, topic_id: str, stream: Stream, after: int) -> list[Row]:
        paths = sorted((self._folder / topic_id / stream).glob("*"))
        base = self._told(topic_id)["heads"].get(stream, [0, 0])[1]
        numbers = [(int(one.name), one) for one in paths]
        return [Row(stream, last, one.read_bytes(), is_base=last == base) for last, one in numbers if last > after]
