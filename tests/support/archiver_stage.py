"""What an archiver works with, in one process: a real store on a disk in memory, a model that is a hash, no daemon.

Rule: nothing waits for time: the archiver's clocks stand until a test moves them.
"""

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from crash_files import CrashFiles
from numpy.typing import NDArray

from memd.assets import ranks_bytes
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.entries import Entry
from memd.errors import EmbeddingError
from memd.ingest.archiver import Archiver
from memd.ingest.pipeline import Cutter
from memd.ingest.redaction import Redactor, last_look
from memd.ingest.sources.documents import DocumentTaker
from memd.ingest.topics import Topic, Topics
from memd.settings.model import Config
from memd.store.shared.postgres import SharedLog
from memd.store.store import ModelId, Store, StoreShared
from memd.telemetry.events import Events
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks

DATA_DIR = Path("/memory")
DIMENSION = 16
ENCODING = cl100k_base(ranks_bytes())
COUNTER = TokenCounter(ENCODING)


class HashEmbedder(Embedder):
    """A model whose vectors say nothing but which text they are of."""

    name = "hash"
    dimension = DIMENSION
    fingerprint = "a" * 32
    batch_texts = 1
    tells_apart = False

    def __init__(self) -> None:
        self.texts: list[str] = []
        """All that it was asked to embed."""
        self.fails = False

    def embed_query(self, text: str) -> NDArray[np.float32]:
        return self.embed_many([text])

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if self.fails:
            raise EmbeddingError("the model is not there")
        self.texts += texts
        seeds = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
        rows = [np.random.default_rng(int.from_bytes(seed, "big")).normal(size=DIMENSION) for seed in seeds]
        matrix = np.array(rows, dtype=np.float32).reshape(len(texts), DIMENSION)
        return np.asarray(matrix / np.linalg.norm(matrix, axis=1, keepdims=True), dtype=np.float32)


class Stage:
    """The parts around an archiver; make it within an event loop, and `close` it."""

    def __init__(self, config: Config, files: CrashFiles | None = None, kept: SharedLog | None = None) -> None:
        self.files = files or CrashFiles()
        self.config = config
        self.embedder = HashEmbedder()
        self.encoder = Encoder(self.embedder)
        self.redactor = Redactor.of(config.ingest)
        self.metrics = Metrics()
        self.tasks = Tasks(self.metrics)
        self.events = Events()
        self.now = time.time()
        self.store = Store(
            DATA_DIR,
            StoreShared(
                model=ModelId(DIMENSION, self.embedder.fingerprint),
                segment_entries_max=config.segment.max_entries,
                draft_filter=last_look(self.redactor),
                files=self.files,
            ),
            kept=kept,
        )
        self.writer = ThreadPoolExecutor(max_workers=1)
        cutter = Cutter(config.chunking, COUNTER, self.redactor)
        self.topics = Topics(self.store, config, self.writer, cutter)
        self.archiver = Archiver(config, self.encoder, cutter, self.tasks, self.events, now=lambda: self.now)
        self.taker = DocumentTaker(self.archiver, self.encoder, cutter)

    async def close(self) -> None:
        """End the threads; what was written stays in `files`."""
        await self.tasks.finish(60)
        self.taker.close()
        self.archiver.close()
        self.encoder.close()
        self.writer.shutdown(wait=True)
        self.store.close()

    def fail_next_write(self) -> None:
        """Let the disk fail once."""
        self.files.fail_at = {self.files.operations}


def live_entries(topic: Topic) -> list[Entry]:
    """The live chunks of a topic, oldest first."""
    snapshot = topic.log.snapshot()
    return sorted(
        (snapshot.read(place) for place in snapshot.latest_places() if snapshot.is_live(place)),
        key=lambda entry: entry.canonical_id,
    )
