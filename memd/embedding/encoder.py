"""The embedding model for several threads, requests first.

Rule: a request never waits for more than one batch of what is stored (`Embedder.batch_texts`): ingestion gives way to
requests before each, and topics take turns, so that a message of megabytes keeps nobody else's out of the log. Both use
the same model at the same time, from different threads, and no question waits for a lock that they hold.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memd.embedding.embedder import Embedder, Prior
from memd.embedding.priority import Priority, Turns
from memd.embedding.table import PART_PIECES_MAX, QuestionTable, table_of
from memd.entries import Vector
from memd.errors import EmbeddingError

log = logging.getLogger("memd")

INGESTING_MAX = 16
"""Topics whose texts are embedded by turns, a batch each; others wait for one of them to be done."""
QUESTIONS_MAX = 256
"""The questions asked last, whose vectors are kept: the same task in many sessions, a search that is refined."""
ASKED_MAX = 16
"""Parts of questions that wait for a model behind an address, or for one that is being loaded."""
QUESTION_CHARACTERS_MAX = 2_000
"""Of a question whose vectors are kept."""


class Encoder:
    """Embeds queries in any thread, and texts in the ingesting threads."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._ingestion = ThreadPoolExecutor(INGESTING_MAX, "memd-ingest")
        self._turns = Turns()
        self._waiting = 0
        self.priority = Priority()
        """Held by every request that is being prepared; ingestion and indexing give way to it."""
        self._background = self.priority.for_background()
        self._is_closing = False
        self._trouble: EmbeddingError | None = None
        self._questions: OrderedDict[str, NDArray[np.float32]] = OrderedDict()
        self._parts: OrderedDict[str, Vector] = OrderedDict()
        self._asked: dict[str, Future[Vector]] = {}
        self._questions_lock = threading.Lock()
        self._early = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memd-embed")
        self._begun: dict[str, Future[NDArray[np.float32]]] = {}
        """By question: what `begin` was told of and nobody asked for yet."""

    @cached_property
    def table(self) -> QuestionTable | None:
        """Gives vectors in the model's space without the model; None: there is no table for this model."""
        return table_of(self._embedder.fingerprint)

    @property
    def ingestion(self) -> ThreadPoolExecutor:
        """The threads in which what is stored is chunked and embedded, one a topic: they take turns at the model."""
        return self._ingestion

    @property
    def backlog(self) -> int:
        """The chunks that wait for the model, of those that are being stored."""
        return self._waiting

    @property
    def fingerprint(self) -> str:
        """The model's; see `Embedder.fingerprint`."""
        return self._embedder.fingerprint

    def same_cosine(self, cosine: float) -> float:
        """See `Embedder.same_cosine`."""
        return self._embedder.same_cosine(cosine)

    def finds_across_languages(self) -> bool:
        """See `Embedder.finds_across_languages`."""
        return self._embedder.finds_across_languages()

    def prior(self, queries: NDArray[np.float32]) -> Prior | None:
        """See `Embedder.prior`; None without vectors."""
        return self._embedder.prior(queries) if len(queries) else None

    @property
    def works(self) -> bool:
        """Whether the model gave the vectors that it was last asked for."""
        return self._trouble is None

    def begin(self, text: str) -> Future[NDArray[np.float32]] | None:
        """Embed a question in another thread, once for all who ask it meanwhile; None: its vectors are known already.

        Called on the event loop, before `embed_query`, which a long question's vectors are to be given to.
        """
        begun = self._begun.get(text)
        if begun is None and text not in self._questions:
            begun = self._begun[text] = self._early.submit(self._embedded, text)
            begun.add_done_callback(lambda _: self._begun.pop(text, None))
        return begun

    def embed_query(self, text: str, begun: Future[NDArray[np.float32]] | None = None) -> NDArray[np.float32]:
        """See `Embedder.embed_query`; read-only. In the caller's thread, which holds the priority.

        `begun`: as `begin` gave it; without it what is being embedded is looked for.
        """
        begun = begun or self._begun.get(text)
        if begun is not None and not begun.cancel():  # else it has not begun: nobody waits for another's question
            return begun.result()
        return self._embedded(text)

    def _embedded(self, text: str) -> NDArray[np.float32]:
        with self._questions_lock:
            if (known := self._questions.get(text)) is not None:
                self._questions.move_to_end(text)
                return known
        with self._noting():
            vectors = self._embedder.embed_query(text)
        vectors.flags.writeable = False
        if len(text) <= QUESTION_CHARACTERS_MAX:
            with self._questions_lock:
                self._questions[text] = vectors
                if len(self._questions) > QUESTIONS_MAX:
                    self._questions.popitem(last=False)
        return vectors

    def embed_parts(self, parts: Sequence[str], seconds: float) -> NDArray[np.float32] | None:
        """The model's unit vectors of parts of a question, `(n, dimension)`, each part cut to `PART_PIECES_MAX` word
        pieces; None: they cannot be had within so many seconds. In the caller's thread, which holds the priority.

        Raises:
            EmbeddingError: the model fails.
        """
        deadline = time.monotonic() + seconds
        found = []
        for part in parts:
            text = self._embedder.cut(part, PART_PIECES_MAX)
            if (vector := self._known_part(text)) is None:
                if time.monotonic() >= deadline:
                    return None
                vector = self._asked_part(text, deadline) if self._embedder.waits else self._embedded_part(text)
            if vector is None:
                return None
            found.append(vector)
        return np.array(found, np.float32).reshape(len(found), self._embedder.dimension)

    def scale(self, cosine: float) -> float:
        """See `Embedder.scale`."""
        return self._embedder.scale(cosine)

    def _known_part(self, text: str) -> Vector | None:
        with self._questions_lock:
            known = self._parts.get(text)
            if known is not None:
                self._parts.move_to_end(text)
            return known

    def _embedded_part(self, text: str) -> Vector:
        with self._noting():
            vector = self._embedder.embed_part(text)
        with self._questions_lock:
            self._parts[text] = vector
            if len(self._parts) > QUESTIONS_MAX:
                self._parts.popitem(last=False)
        return vector

    def _asked_part(self, text: str, deadline: float) -> Vector | None:
        """From a model that may keep somebody waiting: what comes too late is known when it is asked for again."""
        with self._questions_lock:
            asked = self._asked.get(text)
            if asked is None:
                if len(self._asked) >= ASKED_MAX:
                    return None
                asked = self._asked[text] = self._early.submit(self._embedded_part, text)
        asked.add_done_callback(lambda _: self._asked.pop(text, None))  # not in the lock: it may be done already
        try:
            return asked.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return None

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`; gives way to requests, and to other texts, between batches. Called in an ingesting
        thread."""
        size = max(1, self._embedder.batch_texts)
        batches = [texts[start : start + size] for start in range(0, len(texts), size)] or [[]]
        found: list[NDArray[np.float32]] = []
        self._count_waiting(len(texts))
        try:
            for batch in batches:
                found.append(self._embed_batch(batch))
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
            return self._embedder.embed(text)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped, and what is stored in the background given up."""
        self._is_closing = True
        self._early.shutdown(wait=True, cancel_futures=True)
        self._embedder.close()
        self._ingestion.shutdown(wait=True, cancel_futures=True)

    def give_way(self) -> None:
        """Wait while requests are being answered; called between two steps of what is done in the ingesting thread.

        Raises:
            EmbeddingError: the daemon ends, which does not wait for the book that is being stored.
        """
        if self._is_closing:
            raise EmbeddingError("memd ends; what is not stored yet is in the journal, and stored after the next start")
        self._background.give_way()

    def _embed_batch(self, texts: Sequence[str]) -> NDArray[np.float32]:
        with self._turns.taken():
            self.give_way()
            with self._noting():
                return self._embedder.embed_many(texts)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Call the model in here: it is said once that it fails, and once that it works again."""
        try:
            yield
        except EmbeddingError as error:
            if self._trouble is None:
                log.error("the embedding model fails: words alone find until it works again", extra={"error": error})
            self._trouble = error
            raise
        if self._trouble is not None:
            log.info("the embedding model works again")
            self._trouble = None
