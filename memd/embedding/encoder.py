"""The embedding model shared by several threads; requests have priority.

Rule: a request waits for at most one batch of ingested texts (`Embedder.batch_texts`). Ingestion gives way to requests
before each batch, and topics take turns, so that one huge message does not delay other topics. Both use the same model
at the same time, from different threads, and no question waits for a lock that ingestion holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from memd.caching import Latest
from memd.embedding.embedder import Embedder
from memd.embedding.local import QuestionTable, table_of
from memd.embedding.priority import Priority
from memd.errors import EmbeddingError, ModelLoading

log = logging.getLogger("memd")

INGESTING_MAX = 16
"""Topics that are embedded in turns, batch by batch; further topics wait until one is done."""
ASKED_MAX = 16
"""Limit on questions that wait for a server, or for a model that is loading."""
QUESTIONS_MAX = 256
"""Latest questions with cached vectors: the same task in many sessions, a search that is refined."""
QUESTION_CHARACTERS_MAX = 2_000
"""Limit for a question with cached vectors."""


class Encoder:
    """Embeds questions in any thread, and texts in the ingestion threads."""

    def __init__(self, embedder: Embedder, *, is_awaited: bool = False) -> None:
        """`is_awaited`: see `Priority`."""
        self.embedder = embedder
        self.ingestion = ThreadPoolExecutor(INGESTING_MAX, "memd-ingest")
        """Threads that chunk and embed texts to store, one per topic; they take turns at the model."""
        self._batches = ThreadPoolExecutor(1, "memd-texts")  # embeds batches in the order of submission
        self._waiting = 0
        self.priority = Priority(is_awaited=is_awaited)
        """Held by each request while its prompt is prepared; ingestion and indexing give way to it."""
        ended = "memd ends; what is not stored yet is in the journal, and stored after the next start"
        self._background = self.priority.for_background(lambda: EmbeddingError(ended))
        self._trouble: EmbeddingError | None = None
        self._questions: Latest[str, NDArray[np.float32]] = Latest(QUESTIONS_MAX)
        self._questions_lock = threading.Lock()
        self._asking = ThreadPoolExecutor(4, "memd-embed")
        self._asked: dict[str, Future[NDArray[np.float32]]] = {}
        """Pending answers of a slow model, by question."""

    @property
    def backlog(self) -> int:
        """Number of chunks being stored that wait for the model."""
        return self._waiting

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint; see `Embedder.fingerprint`."""
        return self.embedder.fingerprint

    @property
    def table(self) -> QuestionTable | None:
        """The model's question table; None if it has none."""
        return table_of(self.fingerprint)

    def embed_parts(self, parts: Sequence[str], seconds: float) -> NDArray[np.float32]:
        """Return the vectors of a question's parts, (n, dimension): as many of the first ones as time allows, at least
        one. A server may have none in time; its late answer is cached for the next time. Raises EmbeddingError: the
        model failed, or did not answer in time."""
        until = time.monotonic() + seconds
        found: list[NDArray[np.float32]] = []
        for part in parts:
            vectors = self._known(part)
            if vectors is None and (not found or time.monotonic() < until):
                vectors = self._asked_for(part, until) if self.embedder.waits else self._embedded(part)
            if vectors is None:
                break
            found.append(vectors[0])
        if not found:
            raise EmbeddingError(f"the embedding model has not answered within {seconds * 1000:.0f} ms")
        return np.stack(found)

    @property
    def works(self) -> bool:
        """True if the model's latest call succeeded."""
        return self._trouble is None

    def _known(self, text: str) -> NDArray[np.float32] | None:
        with self._questions_lock:
            if (known := self._questions.get(text)) is not None:
                self._questions.move_to_end(text)
            return known

    def _asked_for(self, text: str, until: float) -> NDArray[np.float32] | None:
        """Ask in another thread, once for all callers with the same question; None if the answer is late."""
        with self._questions_lock:
            if (asked := self._asked.get(text)) is None:
                if len(self._asked) >= ASKED_MAX:
                    return None
                asked = self._asked[text] = self._asking.submit(self._embedded, text)
        asked.add_done_callback(lambda _: self._asked.pop(text, None))  # outside the lock: it may be done already
        try:
            return asked.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            return None

    def _embedded(self, text: str) -> NDArray[np.float32]:
        with self._noting():
            vectors = self.embedder.embed_query(text)
        vectors.flags.writeable = False
        if len(text) <= QUESTION_CHARACTERS_MAX:
            with self._questions_lock:
                self._questions[text] = vectors
        return vectors

    def embed_texts(self, texts: Sequence[str], others: int = 0) -> NDArray[np.float32]:
        """See `Embedder.embed_many`; gives way to requests and other texts between batches. Called in an ingestion
        thread. `others`: number of texts that the caller embeds after these."""
        size = max(1, self.embedder.batch_texts)
        batches = [texts[start : start + size] for start in range(0, len(texts), size)] or [[]]
        found: list[NDArray[np.float32]] = []
        self._count_waiting(len(texts) + others)
        try:
            for batch in batches:
                found.append(self._batches.submit(self._embed_batch, batch).result())
                self._count_waiting(-len(batch))
        finally:
            self._count_waiting(-sum(map(len, batches[len(found) :])) - others)
        return np.concatenate(found)

    def _count_waiting(self, more: int) -> None:
        with self._questions_lock:
            self._waiting += more

    def embed_text(self, text: str) -> bytes:
        """Embed one text that a caller waits for, such as a correction's, in the caller's thread: little-endian
        float32."""
        with self._noting():
            return self.embedder.embed(text).astype("<f4").tobytes()

    def close(self) -> None:
        """End the threads. Work that has not begun is dropped, and background storing is aborted."""
        self._background.end()
        self.embedder.close()
        for threads in (self._asking, self.ingestion, self._batches):
            threads.shutdown(wait=True, cancel_futures=True)

    def give_way(self) -> None:
        """Wait while requests are being answered; called between steps of ingestion. Raises EmbeddingError: the daemon
        ends, even in the middle of storing a book."""
        self._background.give_way()

    def _embed_batch(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.give_way()
        with self._noting():
            return self.embedder.embed_many(texts)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Wrap a call of the model: log once when it fails, and once when it works again."""
        try:
            yield
        except ModelLoading:
            raise  # no failure
        except EmbeddingError as error:
            if self._trouble is None:
                log.error("the embedding model fails: words alone find until it works again", extra={"error": error})
            self._trouble = error
            raise
        if self._trouble is not None:
            log.info("the embedding model works again")
            self._trouble = None
