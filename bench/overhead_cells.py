"""Growing conversations of one size, so many clients at a time, each target in turn: the cells of bench/overhead.py.

Rule: all targets take their turn within each round, in order and then the other way around, with the embedding alone
between them, so that what else the machine does meets all of them alike.
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from overhead_clients import Alone, Client, Figures, Samples, Talk, clients_of, quiet, stored_chunks
from overhead_goals import cell_name
from overhead_targets import Target

ROUNDS = 4
REQUESTS, REQUESTS_MIN, REQUESTS_MAX = 100, 3, 40
"""Of all clients together in a round; of each at least and at most so many."""
SECONDS_MAX = 2.0
"""For the requests of a round: a slow target makes fewer of them."""
WARM_UP = 10
EMBEDDINGS = 12
"""In each round."""
NOTHING = "nothing-"
"""How the topics begin in which nothing is stored."""
LOAD_REQUESTS, LOAD_SECONDS_MAX = 2, 4.0


class Cell(NamedTuple):
    """A size of history, in bytes, and a number of clients."""

    size: int
    clients: int

    @property
    def name(self) -> str:
        """As people read it."""
        return cell_name(self.size, self.clients)


class Lane:
    """One target's clients in a cell, and what their requests took."""

    def __init__(self, target: Target, clients: Sequence[Client], size: int) -> None:
        self.target = target
        self.samples = Samples()
        self._clients = clients
        self._size = size
        self._talks: list[Talk] = []
        self.chunks = 0
        """Where nothing should be stored: what was, all the same."""

    async def begin(self) -> None:
        """Conversations that have begun."""
        self._talks = []
        for number, client in enumerate(self._clients):
            client.begin()
            self._talks.append(Talk.of_history(self._size, f"client {number}"))
        await self._all(1 if self.target.is_stored_apart else WARM_UP)

    async def take_turn(self) -> None:
        """The requests of one round."""
        await quiet(self.target)
        if self.target.is_stored_apart:
            await self.begin()
        else:
            await self._all(1)  # connections that were closed meanwhile are opened
        count = max(REQUESTS_MIN, min(REQUESTS_MAX, REQUESTS // len(self._clients)))
        with self.samples.counting(self.target.pid):
            self.samples.first_bytes += await self._all(count)
        self.samples.first_chunks += await self._all(max(1, count // 2), stream=True)
        if self.target.is_stored_apart:
            self.chunks = max(self.chunks, await stored_chunks(self.target, NOTHING))

    async def _all(self, count: int, *, stream: bool = False) -> list[float]:
        pairs = zip(self._clients, self._talks, strict=True)
        runs = await asyncio.gather(
            *(client.ask_often(talk, count, SECONDS_MAX, stream=stream) for client, talk in pairs)
        )
        return [seconds for run in runs for seconds in run]


async def measure(cell: Cell, targets: Sequence[Target], alone: Alone) -> dict[str, Figures]:
    """Target → figures, with `e_ms`, the embedding alone in this cell."""
    embeddings: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        lanes = [
            Lane(target, await stack.enter_async_context(clients_of(target, cell.clients)), cell.size)
            for target in targets
        ]
        for lane in lanes:
            if not lane.target.is_stored_apart:
                await lane.begin()
        for lane in lanes:
            await quiet(lane.target)
        for number in range(ROUNDS):
            for lane in lanes if number % 2 == 0 else reversed(lanes):
                await lane.take_turn()
            for lane in lanes:
                await quiet(lane.target)
            embeddings += alone.seconds(EMBEDDINGS)
    e_ms = 1000 * float(np.median(embeddings))
    return {
        lane.target.name: lane.samples.figures()
        | {"e_ms": e_ms}
        | ({"chunks": lane.chunks} if lane.target.is_stored_apart else {})
        for lane in lanes
    }


async def load(cell: Cell, target: Target) -> Figures:
    """The requests of a cell without a pause for what memd stores of its histories, which takes minutes."""
    samples = Samples()
    async with clients_of(target, cell.clients) as clients:
        talks = [Talk.of_history(cell.size, f"load {cell.name} {number}") for number in range(cell.clients)]
        pairs = list(zip(clients, talks, strict=True))
        with samples.counting(target.pid):
            runs = await asyncio.gather(
                *(client.ask_often(talk, LOAD_REQUESTS, LOAD_SECONDS_MAX) for client, talk in pairs)
            )
            samples.first_bytes += [seconds for run in runs for seconds in run]
    return samples.figures()
