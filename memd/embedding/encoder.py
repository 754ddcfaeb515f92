"""The embedding model for several threads, requests first.

Rule: a request never waits for more than one batch of what is stored (`Embedder.batch_texts`): ingestion gives way to
requests before each, and topics take turns, so that a message of megabytes keeps nobody else's out of the log. Both use
the same model at the same time, from different threads, and no question waits for a lock that they hold.
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
from memd.entries import Vector
from memd.errors import EmbeddingError, ModelLoading

log = logging.getLogger("memd")

INGESTING_MAX = 16
"""Topics whose texts are embedded by turns, a batch each; others wait for one of them to be done."""
ASKED_MAX = 16
"""Questions that wait for a model behind an address, or for one that is being loaded."""
QUESTIONS_MAX = 256
"""The questions asked last, whose vectors are kept: the same task in many sessions, a search that is refined."""
QUESTION_CHARACTERS_MAX = 2_000
"""Of a question whose vectors are kept."""


class Encoder:
    """Embeds queries in any thread, and texts in the ingesting threads."""

    def __init__(self, embedder: Embedder, *, is_awaited: bool = False) -> None:
        """`is_awaited`: see `Priority`."""
        self.embedder = embedder
        self.ingestion = ThreadPoolExecutor(INGESTING_MAX, "memd-ingest")
        """The threads in which what is stored is chunked and embedded, one a topic: they take turns at the model."""
        self._batches = ThreadPoolExecutor(1, "memd-texts")  # which are embedded in the order in which they come
        self._waiting = 0
        self.priority = Priority(is_awaited=is_awaited)
        """Held by every request that is being prepared; ingestion and indexing give way to it."""
        ended = "memd ends; what is not stored yet is in the journal, and stored after the next start"
        self._background = self.priority.for_background(lambda: EmbeddingError(ended))
        self._trouble: EmbeddingError | None = None
        self._questions: Latest[str, NDArray[np.float32]] = Latest(QUESTIONS_MAX)
        self._questions_lock = threading.Lock()
        self._asking = ThreadPoolExecutor(4, "memd-embed")
        self._asked: dict[str, Future[NDArray[np.float32]]] = {}
        """By question: the answers that a slow model owes."""

    @property
    def backlog(self) -> int:
        """The chunks that wait for the model, of those that are being stored."""
        return self._waiting

    @property
    def fingerprint(self) -> str:
        """The model's; see `Embedder.fingerprint`."""
        return self.embedder.fingerprint

    @property
    def table(self) -> QuestionTable | None:
        """The question table of the model; None if it has none."""
        return table_of(self.fingerprint)

    def embed_parts(self, parts: Sequence[str], seconds: float) -> NDArray[np.float32]:
        """The vectors of the parts of a question, (n, dimension): of the first ones, as many as there is time for, at
        least one. A model that keeps somebody waiting (a server) may have none in time; what it answers later is known
        when it is asked again. Raises EmbeddingError: the model failed, or has not answered in time."""
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
        """Whether the model gave the vectors that it was last asked for."""
        return self._trouble is None

    def _known(self, text: str) -> NDArray[np.float32] | None:
        with self._questions_lock:
            if (known := self._questions.get(text)) is not None:
                self._questions.move_to_end(text)
            return known

    def _asked_for(self, text: str, until: float) -> NDArray[np.float32] | None:
        """In another thread, once for all who ask it meanwhile; None: not in time."""
        with self._questions_lock:
            if (asked := self._asked.get(text)) is None:
                if len(self._asked) >= ASKED_MAX:
                    return None
                asked = self._asked[text] = self._asking.submit(self._embedded, text)
        asked.add_done_callback(lambda _: self._asked.pop(text, None))  # not in the lock: it may be done already
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

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`; gives way to requests, and to other texts, between batches. Called in an ingesting
        thread."""
        size = max(1, self.embedder.batch_texts)
        batches = [texts[start : start + size] for start in range(0, len(texts), size)] or [[]]
        found: list[NDArray[np.float32]] = []
        self._count_waiting(len(texts))
        try:
            for batch in batches:
                found.append(self._batches.submit(self._embed_batch, batch).result())
                self._count_waiting(-len(batch))
        finally:
            self._count_waiting(-sum(map(len, batches[len(found) :])))
        return np.concatenate(found)

    def _count_waiting(self, more: int) -> None:
        with self._questions_lock:
            self._waiting += more

    def embed_text(self, text: str) -> Vector:
        """Embed one text that somebody waits for, such as a correction's; in the caller's thread."""
        with self._noting():
            return self.embedder.embed(text)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped, and what is stored in the background given up."""
        self._background.end()
        self.embedder.close()
        for threads in (self._asking, self.ingestion, self._batches):
            threads.shutdown(wait=True, cancel_futures=True)

    def give_way(self) -> None:
        """Wait while requests are being answered; called between two steps of what is done in the ingesting thread.
        Raises EmbeddingError: the daemon ends, which does not wait for the book that is being stored."""
        self._background.give_way()

    def _embed_batch(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.give_way()
        with self._noting():
            return self.embedder.embed_many(texts)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Call the model in here: it is said once that it fails, and once that it works again."""
        try:
            yield
        except ModelLoading:
            raise  # it does not fail
        except EmbeddingError as error:
            if self._trouble is None:
                log.error("the embedding model fails: words alone find until it works again", extra={"error": error})
            self._trouble = error
            raise
        if self._trouble is not None:
            log.info("the embedding model works again")
            self._trouble = None
