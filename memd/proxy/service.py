"""What the routes work with: the parts of a running daemon, in one place.

Rule: holds and closes, decides nothing. `app.running` makes it.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor

import msgspec

from memd.admin.receipts import Receipts
from memd.conversation.tokens import TokenCounter
from memd.embedding.encoder import Encoder
from memd.embedding.priority import RightOfWay
from memd.ingest.archiver import Archiver
from memd.ingest.indexer import Indexer
from memd.ingest.redaction.redactor import Redactor
from memd.ingest.topics import Topics
from memd.proxy.idempotency import Outcomes
from memd.proxy.upstream.client import Upstream
from memd.recall.retrieve import Retriever
from memd.settings.model import Config
from memd.store.receipts import ReceiptRing
from memd.store.store import Store
from memd.telemetry.events import Events
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks
from memd.wire.request import MessageCache


class Daemon:
    """A running daemon. `base_url` is set once it listens."""

    def __init__(
        self,
        config: Config,
        store: Store,
        encoder: Encoder,
        counter: TokenCounter,
        upstream: Upstream,
        tasks: Tasks,
        redactor: Redactor,
        metrics: Metrics,
    ) -> None:
        self.config = config
        self.redactor = redactor
        self.store = store
        self.encoder = encoder
        self.counter = counter
        self.upstream = upstream
        self.tasks = tasks
        self.metrics = metrics
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memd-write")
        self.topics = Topics(store, config, self.writer, redactor)
        right_of_way = RightOfWay()
        self.indexer = Indexer(tasks, right_of_way, config.retrieval, metrics)
        self.events = Events()
        self.outcomes = Outcomes(tasks)
        self.archiver = Archiver(config, encoder, counter, tasks, self.indexer, redactor, metrics, self.events)
        self.retriever = Retriever(
            encoder, config.retrieval, right_of_way, header=config.injection.header, count=counter.count_again
        )
        redaction = hashlib.blake2b(msgspec.json.encode(config.ingest)).hexdigest() if redactor else ""
        ring = ReceiptRing(store.files, config.data_dir, config.receipts.bytes_max, redaction)
        self.receipts = Receipts(ring if config.receipts.enabled else None, self.writer, redactor, self.events)
        self.message_cache = MessageCache()
        self.ignored = [re.compile(pattern) for pattern in config.ingest.ignore]
        self.base_url = ""
        metrics.watch(self)

    @property
    def cache_bytes(self) -> int:
        """What is kept of parsed messages and of the words of chunks because it is asked for again; each bounded."""
        return self.message_cache.bytes_held + self.store.terms_cache.bytes_held

    async def close(self) -> None:
        """Journal the buffers and end the threads. The upstream and the store are closed by who made them."""
        for topic in self.topics.opened():
            await topic.rewrite_journal()
            self.writer.submit(topic.close)
        self.retriever.close()
        self.indexer.close()
        self.encoder.close()
        self.writer.shutdown(wait=True)
        self.receipts.close()
