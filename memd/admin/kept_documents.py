"""The documents of a topic, as a daemon's routes keep them: for whoever reads the files, a command or a daemon beside.

Rule: what the daemon does not take is told by its error; nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memd.admin.asking import OwnRoutesClient
from memd.admin.documents import DocumentList
from memd.documents import GivenDocument
from memd.errors import BadQuestion
from memd.ingest.sources.documents import KnownDocument
from memd.ingest.sources.taking import TakenDocument

DOCUMENT_SECONDS_MAX = 600.0


class RoutesKeeper:
    """See Keeper. Its daemon is asked over HTTP."""

    def __init__(self, daemon: OwnRoutesClient, topic_id: str) -> None:
        self._daemon = daemon
        self._topic_id = topic_id

    def known(self) -> Sequence[KnownDocument]:
        """See Keeper."""
        try:
            return known_by(self._daemon, [self._topic_id])
        except BadQuestion:  # there is no such topic yet
            return ()

    def take(self, document: GivenDocument) -> TakenDocument:
        """See Keeper."""
        return self._post("/memd/documents", {"document": document})

    def remove(self, sources: Sequence[str], *, below: bool = False) -> TakenDocument:
        """See Keeper; `below`: also all documents below them."""
        return self._post("/memd/documents/remove", {"sources": sources, "below": below})

    def _post(self, path: str, body: dict[str, object]) -> TakenDocument:
        told = self._daemon.post(path, {"topic_id": self._topic_id, **body}, DOCUMENT_SECONDS_MAX)
        return msgspec.json.decode(told, type=TakenDocument)


def known_by(daemon: OwnRoutesClient, topics: Sequence[str]) -> tuple[KnownDocument, ...]:
    """Return the documents of these topics; of all if there are none."""
    return msgspec.json.decode(daemon.get("/memd/documents", topic=list(topics)), type=DocumentList).documents
