"""The other daemons of a cluster, for one whose disk is in trouble: who answers, and has room.

Rule: what they tell of themselves in the database may be a minute old, so each is asked whether it is there.
"""

from __future__ import annotations

import asyncio

from memd.errors import StoreError
from memd.proxy.owners.daemon_client import ASK_SECONDS, DaemonClient
from memd.store.cluster.daemons import DaemonNotices
from memd.store.cluster.joining import Cluster
from memd.store.cluster.postgres_shelf import PostgresShelf
from memd.store.shelf import Shelf


class RoomElsewhere:
    """See `memd.ingest.standing_aside.Neighbours`."""

    def __init__(self, cluster: Cluster, notices: DaemonNotices, client: DaemonClient, shelf: Shelf) -> None:
        assert isinstance(shelf, PostgresShelf), "of a cluster"
        self._cluster = cluster
        self._client = client
        self.tell = notices.tell_of_disk
        self.holder = shelf.holder

    async def with_room(self) -> list[str]:
        """See Neighbours."""
        try:
            urls = await asyncio.to_thread(self._cluster.others_with_room)
        except StoreError:
            return []
        there = await asyncio.gather(*(self._client.is_there(url, ASK_SECONDS) for url in urls))
        return [url for url, is_there in zip(urls, there, strict=True) if is_there]
