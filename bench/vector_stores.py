"""What memd's store is compared with: plain numpy, hnswlib alone, and embedded vector stores where installed.

Rule: each is used as its documentation recommends for a local store, with the same vectors, one process, inner product
of unit vectors, and recall near memd's where it can be set. None of them keeps an append-only log.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memd.store.log.columns import Floats

BATCH = 5000


class VectorStore(Protocol):
    """A store that numbers vectors in the order in which they come."""

    def add(self, vectors: Floats) -> None:
        """Append and make durable, as far as the store knows durability."""

    def search(self, query: Floats, k: int) -> Sequence[int]:
        """The numbers of the best `k`."""


class NumpyExact:
    """One matrix and one product: the truth about recall, and the bar for small logs."""

    def __init__(self, folder: Path, dimension: int) -> None:
        self._matrix = np.empty((0, dimension), dtype=np.float32)

    def add(self, vectors: Floats) -> None:
        """In memory only."""
        self._matrix = np.concatenate([self._matrix, vectors])

    def search(self, query: Floats, k: int) -> Sequence[int]:
        """Exact."""
        scores = self._matrix @ query
        best = np.argpartition(-scores, min(k, len(scores) - 1))[:k]
        return [int(number) for number in best]


class HnswlibAlone:
    """One index over everything, in memory: no log, no durability, no deletion."""

    def __init__(self, folder: Path, dimension: int) -> None:
        import hnswlib

        self._index: Any = hnswlib.Index(space="ip", dim=dimension)
        self._index.init_index(BATCH, M=16, ef_construction=200, random_seed=100)
        self._index.set_ef(200)

    def add(self, vectors: Floats) -> None:
        """In memory only."""
        count = self._index.get_current_count()
        self._index.resize_index(count + len(vectors))
        self._index.add_items(vectors, np.arange(count, count + len(vectors)), num_threads=1)

    def search(self, query: Floats, k: int) -> Sequence[int]:
        """With ef 200."""
        return [int(number) for number in self._index.knn_query(query[None], k=k, num_threads=1)[0][0]]


class Chroma:
    """chromadb, persistent client, HNSW with ef 200."""

    def __init__(self, folder: Path, dimension: int) -> None:
        import chromadb

        space = {"hnsw": {"space": "ip", "ef_search": 200, "ef_construction": 200, "max_neighbors": 16}}
        client = chromadb.PersistentClient(path=str(folder), settings=chromadb.Settings(anonymized_telemetry=False))
        self._collection: Any = client.create_collection("bench", configuration=space)
        self._count = 0

    def add(self, vectors: Floats) -> None:
        """Durable in its SQLite."""
        for start in range(0, len(vectors), BATCH):
            batch = vectors[start : start + BATCH]
            ids = [str(number) for number in range(self._count, self._count + len(batch))]
            self._collection.add(ids=ids, embeddings=batch)
            self._count += len(batch)

    def search(self, query: Floats, k: int) -> Sequence[int]:
        """Ids only."""
        found = self._collection.query(query_embeddings=query[None], n_results=k, include=[])
        return [int(name) for name in found["ids"][0]]


class LanceDb:
    """lancedb, IVF-HNSW index made after the last addition."""

    def __init__(self, folder: Path, dimension: int) -> None:
        import lancedb

        self._database: Any = lancedb.connect(str(folder))
        self._table: Any = None
        self._count = 0
        self._indexed = False

    def add(self, vectors: Floats) -> None:
        """Durable as a new fragment."""
        rows = [{"id": self._count + number, "vector": vector} for number, vector in enumerate(vectors)]
        self._count += len(vectors)
        if self._table is None:
            self._table = self._database.create_table("bench", data=rows)
        else:
            self._table.add(rows)
        self._indexed = False

    def search(self, query: Floats, k: int) -> Sequence[int]:
        """Through the index, refined with the full vectors."""
        if not self._indexed:
            self._table.create_index(metric="dot", vector_column_name="vector", index_type="IVF_HNSW_SQ")
            self._indexed = True
        asked = self._table.search(query).metric("dot").ef(200).refine_factor(2).limit(k)
        return [row["id"] for row in asked.select(["id", "_distance"]).to_list()]


class SqliteVec:
    """sqlite-vec: exact scan inside SQLite."""

    def __init__(self, folder: Path, dimension: int) -> None:
        import pysqlite3  # Python's own sqlite3 is often built without extensions
        import sqlite_vec

        folder.mkdir(parents=True, exist_ok=True)
        self._database: Any = pysqlite3.connect(folder / "vectors.db")
        self._database.enable_load_extension(True)
        sqlite_vec.load(self._database)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute(f"CREATE VIRTUAL TABLE vectors USING vec0(embedding float[{dimension}])")
        self._count = 0

    def add(self, vectors: Floats) -> None:
        """One transaction."""
        rows = ((self._count + number, vector.tobytes()) for number, vector in enumerate(vectors))
        with self._database:
            self._database.executemany("INSERT INTO vectors(rowid, embedding) VALUES (?, ?)", rows)
        self._count += len(vectors)

    def search(self, query: Floats, k: int) -> Sequence[int]:
        """Exact; of unit vectors the nearest by distance is the best by inner product."""
        sql = "SELECT rowid FROM vectors WHERE embedding MATCH ? AND k = ? ORDER BY distance"
        return [row[0] for row in self._database.execute(sql, (query.tobytes(), k))]


class QdrantLocal:
    """qdrant-client's local mode: its own Python implementation, an exact scan."""

    def __init__(self, folder: Path, dimension: int) -> None:
        from qdrant_client import QdrantClient, models

        self._models: Any = models
        self._client: Any = QdrantClient(path=str(folder))
        space = models.VectorParams(size=dimension, distance=models.Distance.DOT)
        self._client.create_collection("bench", vectors_config=space)
        self._count = 0

    def add(self, vectors: Floats) -> None:
        """Durable in its SQLite."""
        points = [
            self._models.PointStruct(id=self._count + number, vector=vector.tolist())
            for number, vector in enumerate(vectors)
        ]
        self._client.upsert("bench", points=points)
        self._count += len(vectors)

    def search(self, query: Floats, k: int) -> Sequence[int]:
        """Ids only."""
        found = self._client.query_points("bench", query=query.tolist(), limit=k, with_payload=False)
        return [point.id for point in found.points]


_PEERS: dict[str, tuple[str, Any, int]] = {
    "numpy exact": ("numpy", NumpyExact, 10_000_000),
    "hnswlib alone": ("hnswlib", HnswlibAlone, 10_000_000),
    "chromadb": ("chromadb", Chroma, 2_000_000),
    "lancedb": ("lancedb", LanceDb, 2_000_000),
    "sqlite-vec": ("sqlite_vec", SqliteVec, 2_000_000),
    "qdrant local": ("qdrant_client", QdrantLocal, 200_000),
}
"""Name → (module it needs, class, the largest size that it is filled with in reasonable time).

qdrant's local mode takes 1.7 ms a point, so half an hour for a million, and warns from 20,000 points on that it is not
meant for so many; its search is an exact scan in numpy, as the first row is.
"""


def installed(size: int) -> Iterator[tuple[str, Any]]:
    """(name, class) of those that can be compared at this size."""
    for name, (module, store, size_max) in _PEERS.items():
        if importlib.util.find_spec(module) is not None and size <= size_max:
            yield name, store
