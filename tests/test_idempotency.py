"""Idempotency keys: the corrections of a request are applied once, whoever asks again and whoever leaves."""

from __future__ import annotations

import asyncio

import pytest

from memd.errors import StoreError
from memd.proxy.receive import KEYS_MAX, IdempotencyKeys
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks


class Applying:
    """Counts its calls; goes on when it is let, and fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.calls = 0
        self.failures = failures
        self.may_go_on = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self) -> tuple[str, ...]:
        self.calls += 1
        await self.may_go_on.wait()
        self.ended.set()
        if self.calls <= self.failures:
            raise StoreError("the disk is full")
        return ("a3f9",)


def _keys(retry_seconds: float = 0) -> IdempotencyKeys:
    return IdempotencyKeys(Tasks(Metrics()), retry_seconds)


async def test_who_leaves_does_not_stop_what_was_begun() -> None:
    keys, apply = _keys(), Applying()
    keys.register("key")
    asked = asyncio.ensure_future(keys.run_once("key", apply))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    apply.may_go_on.set()
    await apply.ended.wait()
    assert await keys.run_once("key", apply) == ("a3f9",)
    assert apply.calls == 1


async def test_what_failed_is_raised_and_tried_again_by_the_next_request() -> None:
    keys, apply = _keys(), Applying(failures=1)
    apply.may_go_on.set()
    keys.register("key")
    with pytest.raises(StoreError, match="the disk is full"):
        await keys.run_once("key", apply)
    assert not keys.knows("key"), "whether it was applied all the same, the log tells"
    keys.register("key")
    assert not keys.knows("key"), "also when it comes so late that it counts as new"
    assert await keys.run_once("key", apply) == ("a3f9",)
    assert apply.calls == 2


async def test_the_oldest_keys_are_forgotten() -> None:
    keys = _keys()
    for number in range(KEYS_MAX + 1):
        keys.register(number)
    assert not keys.knows(0)
    assert keys.knows(1) and keys.knows(KEYS_MAX)
