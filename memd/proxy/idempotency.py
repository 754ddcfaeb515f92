"""Idempotency: a client that sends a request with corrections or notes again gets the first outcome.

Rule: the corrections of one request are applied once and to their end, even when the client leaves in between. Keys are
kept in memory, for the latest requests; of those from before a restart the log tells what was applied.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

import msgspec

from memd.conversation.conversation import TurnKey
from memd.errors import MemdError
from memd.telemetry.tasks import Tasks

KEYS_MAX = 1024


class RequestKey(msgspec.Struct, frozen=True):
    """Requests with equal keys are one request, sent more than once."""

    topic_id: str
    conversation_id: str
    turn: TurnKey

    @property
    def digest(self) -> bytes:
        """The mark of the entries that its corrections append; see `ChunkState.asked_by`.

        Without the conversation: one that was answered, and is asked again, goes on in a branch of its own.
        """
        return hashlib.blake2b(self.turn.last_digest + self.turn.memory_in, digest_size=16).digest()


Outcome = TypeVar("Outcome")
FailedIds = tuple[str, ...]
"""The ids that could not be corrected."""


class IdempotencyKeys:
    """Outcomes by idempotency key. Use it on the event loop only."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._outcomes: OrderedDict[Hashable, asyncio.Task[Any] | None] = OrderedDict()

    def register(self, key: Hashable) -> None:
        """Note a request that arrived for the first time. Its corrections are not applied yet.

        One that arrives so late that it counts as new joins the former, where that is still under way.
        """
        former = self._outcomes.get(key)
        self._outcomes[key] = None if former is None or former.done() else former
        self._outcomes.move_to_end(key)
        if len(self._outcomes) > KEYS_MAX:
            self._outcomes.popitem(last=False)

    def knows(self, key: Hashable) -> bool:
        """Whether the key is one of the latest `KEYS_MAX`."""
        return key in self._outcomes

    async def run_once(self, key: Hashable, apply: Callable[[], Coroutine[None, None, Outcome]]) -> Outcome:
        """Return the outcome of `apply`, which is called at the first request with this key only.

        Raises:
            MemdError: nothing was applied; the next request with this key tries again.
        """
        task = self._outcomes.get(key)
        if task is None:
            task = self._outcomes[key] = self._tasks.spawn(_error_as_value(apply()), "correct")
        outcome: Outcome | MemdError = await asyncio.shield(task)
        if isinstance(outcome, MemdError):
            self.register(key)
            raise outcome
        return outcome


async def _error_as_value(applying: Coroutine[None, None, Outcome]) -> Outcome | MemdError:
    try:
        return await applying
    except MemdError as error:
        return error  # raised again in `run_once`, by whoever waits for it
