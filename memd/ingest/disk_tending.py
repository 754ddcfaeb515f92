"""Looking at the disk of the data directory, for as long as the daemon runs.

Rule: a look costs one call of the system; only where something could not be written, or until it can be again, a few
bytes are written to find out. Nobody waits for a look: a disk that hangs holds up one thread.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from memd.ingest.topics import Topics
from memd.store.disk import LocalDisk
from memd.store.disk_trouble import DiskWatch

LOOK_SECONDS = 5.0
EFFECT = "what is said waits in memory until it can be written"


class DiskTender:
    """See the module."""

    def __init__(self, files: LocalDisk, data_dir: Path, topics: Topics) -> None:
        self.watch = DiskWatch(files, data_dir, EFFECT)
        self._topics = topics

    async def tend(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.to_thread(self.watch.look, is_doubtful=self._topics.has_failed_to_write)
            await asyncio.sleep(LOOK_SECONDS)
