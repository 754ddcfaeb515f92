"""The embedding model in threads, queries first.

Rule: a query never waits for more than one text of a compaction: ingestion embeds one text at a time and stands back
while a query is waiting. Both use the same model session, which ONNX Runtime allows from several threads.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from memd.embedding.fastembed import Embedder
from memd.embedding.priority import RightOfWay
from memd.entries import Vector


class Encoder:
    """Gives vectors to the event loop (`query`) and to the ingesting thread (`for_ingestion`)."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._queries = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memd-query")
        self._ingestion = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memd-ingest")
        self._right_of_way = RightOfWay()

    @property
    def ingestion(self) -> ThreadPoolExecutor:
        """The one thread in which compactions are chunked and embedded."""
        return self._ingestion

    @property
    def fingerprint(self) -> str:
        """Of the model; see `Embedder.fingerprint`."""
        return self._embedder.fingerprint

    def query_vectors(self, text: str) -> NDArray[np.float32]:
        """The vectors of a query's pieces, shape `(pieces, dimension)`, in the caller's thread.

        Ingestion stands back meanwhile.
        """
        with self._right_of_way.taken():
            return self._embedder.embed_pieces(text)

    async def query(self, text: str) -> NDArray[np.float32]:
        """The vectors of a query's pieces, shape `(pieces, dimension)`."""
        with self._right_of_way.taken():
            return await asyncio.get_running_loop().run_in_executor(self._queries, self._embedder.embed_pieces, text)

    def for_ingestion(self, text: str) -> Vector:
        """The vector of one text, once no query is waiting. Called in the ingesting thread."""
        self._right_of_way.give()
        return self._embedder.embed(text)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._queries.shutdown(wait=False, cancel_futures=True)
        self._ingestion.shutdown(wait=True, cancel_futures=True)
