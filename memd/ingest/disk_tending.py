"""Looking at the disk of the data directory, for as long as the daemon runs, and in a cluster standing aside.

Rule: a look costs one call of the system; only where something could not be written, or until it can be again, a few
bytes are written to find out. Nobody waits for a look: a disk that hangs holds up one thread.
"""

from __future__ import annotations

import asyncio

from memd.ingest.topics import Topics

LOOK_SECONDS = 5.0


async def tend_disk(topics: Topics) -> None:
    """Look again and again, until cancelled."""
    while True:
        await asyncio.to_thread(topics.disk.look, is_doubtful=topics.has_failed_to_write)
        await asyncio.sleep(LOOK_SECONDS)
