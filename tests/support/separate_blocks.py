"""memd's own client of a model server, asked to put blocks into messages of their own.

Rule: it is what the daemon uses, without a daemon around it, so that a test sees what it learns from a server and when.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from memd.proxy.upstream.client import Upstream
from memd.settings import model
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks

END_SECONDS_MAX = 10.0


@asynccontextmanager
async def separating(url: str) -> AsyncIterator[Upstream]:
    """The client for the server at `url` with `injection.role: separate`; it has asked nothing yet."""
    tasks = Tasks(Metrics())
    wanted = model.Config(upstream=model.UpstreamSettings(url=url), injection=model.InjectionSettings(role="separate"))
    upstream = Upstream(wanted, tasks)
    try:
        yield upstream
    finally:
        await upstream.close()
        await tasks.finish(timeout_seconds=END_SECONDS_MAX)
