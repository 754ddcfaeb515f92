"""Idempotency: a client that sends a request with corrections or notes again gets the first outcome.

Rule: the corrections of one request are applied once and to their end, even when the client leaves in between. Keys are
kept in memory, for the latest requests; of those from before a restart, and of those that failed, the log tells what
was applied.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

import msgspec

from memd.clock import steady_now
from memd.conversation.conversation import TurnKey
from memd.errors import MemdError
from memd.telemetry.tasks import Tasks

KEYS_MAX = 1024


class RequestKey(msgspec.Struct, frozen=True):
    """Requests with equal keys are one request, sent more than once."""

    topic_id: str
    author: str
    session: str | None
    """Not memd's conversation: a request that was answered, and is sent again, goes on in a branch of its own."""
    turn: TurnKey

    @property
    def digest(self) -> bytes:
        """The mark of the entries that its corrections append; see `ChunkState.asked_by`."""
        return hashlib.blake2b(self.turn.last_digest + self.turn.memory_in, digest_size=16).digest()


Outcome = TypeVar("Outcome")
FailedIds = tuple[str, ...]
"""The ids that could not be corrected."""


class _Work:
    """The corrections or notes of one request."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.ended_at = math.inf
        """By `steady_now`; infinite until it has ended."""
        self.has_failed = False
        """An earlier attempt did; it may have been done all the same."""


class IdempotencyKeys:
    """Outcomes by idempotency key. Use it on the event loop only."""

    def __init__(self, tasks: Tasks, retry_seconds: float) -> None:
        """`retry_seconds`: how long the same request again counts as a retry."""
        self._tasks = tasks
        self._retry_seconds = retry_seconds
        self._works: OrderedDict[Hashable, _Work] = OrderedDict()

    def register(self, key: Hashable) -> None:
        """Note a request that arrived for the first time. Its corrections are not applied yet.

        One that arrives so late that it counts as new joins the former, where that is still under way or ended a moment
        ago: its client gave up on an answer that storing had kept waiting, and asks again.
        """
        former = self._works.get(key)
        if former is None or (not former.has_failed and steady_now() - former.ended_at >= self._retry_seconds):
            self.forget(key)

    def forget(self, key: Hashable) -> None:
        """Have the next request with this key applied, whatever came before."""
        self._works[key] = _Work()
        self._works.move_to_end(key)
        if len(self._works) > KEYS_MAX:
            self._works.popitem(last=False)

    def knows(self, key: Hashable) -> bool:
        """Whether the key is one of the latest `KEYS_MAX`, and its request did not fail."""
        return key in self._works and not self._works[key].has_failed

    async def run_once(self, key: Hashable, apply: Callable[[], Coroutine[None, None, Outcome]]) -> Outcome:
        """Return the outcome of `apply`, which is called at the first request with this key only.

        Raises:
            MemdError: the key is not known any more, and the next request with it tries again. Of what was InDoubt the
                log tells whether it was applied.
        """
        work = self._works.setdefault(key, _Work())
        if work.task is None:
            work.has_failed = False
            work.task = self._tasks.spawn(_error_as_value(apply(), work), "correct")
        outcome: Outcome | MemdError = await asyncio.shield(work.task)
        if isinstance(outcome, MemdError):
            self.forget(key)
            self._works[key].has_failed = True
            raise outcome
        return outcome


async def _error_as_value(applying: Coroutine[None, None, Outcome], work: _Work) -> Outcome | MemdError:
    try:
        return await applying
    except MemdError as error:
        return error  # raised again in `run_once`, by whoever waits for it
    finally:
        work.ended_at = steady_now()
