"""The parts of a running daemon that operations work with.

Rule: an operation is a function of these and of what is asked; it keeps nothing. Nothing here is changed while the
daemon runs, though most of it has a state of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # a command reads the declarations of operations, and needs none of these
    from memd.admin.auditing import Auditor
    from memd.admin.oauth.ledger import Ledger
    from memd.admin.status import UpstreamHealth
    from memd.admin.token_watch import TokenWatch
    from memd.admin.topics import NamedTopics
    from memd.conversation.tokens import TokenCounter
    from memd.embedding.encoder import Encoder
    from memd.ingest.archiver import Archiver
    from memd.ingest.erasing import Retention
    from memd.ingest.redaction.redactor import Redactor
    from memd.ingest.sources.documents import DocumentTaker
    from memd.ingest.sources.watch import SourceWatch
    from memd.ingest.topics import Topics
    from memd.principals import Principals
    from memd.recall.retrieve import Budget, Retriever
    from memd.receipts import Receipts
    from memd.settings.model import Config
    from memd.speech import Speech
    from memd.store.bucket.writing import BucketTender
    from memd.store.store import Store
    from memd.telemetry.events import Events
    from memd.telemetry.tasks import Tasks


class DaemonParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts; a daemon has more of them."""

    config: Config
    base_url: str
    """Where clients find the model."""
    own_url: str
    """Where memd's own page and routes are."""
    local_url: str
    """The same, by an IP address of this machine."""
    store: Store
    topics: Topics
    named: NamedTopics
    """The same, by their names."""
    redactor: Redactor
    encoder: Encoder
    counter: TokenCounter
    retriever: Retriever
    archiver: Archiver
    taker: DocumentTaker
    sources: SourceWatch
    retention: Retention
    receipts: Receipts
    auditor: Auditor
    token_watch: TokenWatch
    ledger: Ledger
    speech: Speech
    events: Events
    tasks: Tasks
    backup: BucketTender | None
    cache_bytes: Callable[[], int]
    """Bytes in the caches of parsed messages, their token counts, and entries that were read."""
    upstreams: Callable[[], list[UpstreamHealth]]
    """The model servers as they are seen now, in the order of the settings."""
    budget: Callable[[], Awaitable[Budget]]
    """The budget that a prompt to the present upstream model would get."""
    exposition: Callable[[str], Awaitable[tuple[bytes, str]]]
    """The metrics in the format that an `Accept` header asks for, and the content type."""

    @property
    def principals(self) -> Principals:
        """Who may use it."""
        return self.token_watch.principals

    @property
    def name(self) -> str:
        """This daemon's in a cluster; empty: it is alone."""
        return "" if self.store.kept is None else self.own_url
