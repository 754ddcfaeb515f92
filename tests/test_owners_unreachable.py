"""Daemons that others cannot reach: who waits for one, for how long, and who is asked in its place."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

import pytest

from memd.errors import StoreError, TopicHeld
from memd.ingest.topics import Topics
from memd.proxy.owners.silence import LOOKS_MAX, LOOKS_UNGRANTED_MAX, SilenceWatch, Waiting
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks

URL = "http://silent"
HELD = TopicHeld("talk", URL)


class Silent:
    """A daemon that says nothing, its topic, and who watches over the requests to it."""

    def __init__(self, refusal: StoreError) -> None:
        """`refusal`: why the topic cannot be had."""
        self._refusal = refusal
        self.looks = 0
        self.answers = asyncio.Event()
        """From now on it does."""
        self.tasks = Tasks(Metrics())
        self.watch = SilenceWatch(cast("Topics", self), 0.02, self._is_there, self.tasks)

    async def get(self, topic_id: str) -> Any:
        """In the place of `Topics`."""
        raise self._refusal

    async def _is_there(self, url: str, seconds: float) -> bool:
        self.looks += 1
        return self.answers.is_set()

    async def wait(self) -> Waiting:
        """As a request does that it was given, until nobody waits any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as patience:
                waiting = Waiting(HELD, patience)
                with self.watch.over(waiting):
                    await asyncio.Event().wait()
        return waiting


@pytest.mark.parametrize(
    ("refusal", "looks"),
    [(HELD, LOOKS_MAX), (StoreError("the database does not answer"), LOOKS_UNGRANTED_MAX)],
    ids=["held", "unknown"],
)
async def test_a_silent_daemon_is_given_up_after_some_looks_and_sooner_if_nobody_says_whose_its_topic_is(
    refusal: StoreError, looks: int
) -> None:
    silent = Silent(refusal)
    assert not silent.watch.is_given_up(URL)
    assert (await silent.wait()).is_hopeless and silent.looks == looks


async def test_who_was_given_up_is_looked_for_in_the_background_when_it_is_asked_for() -> None:
    silent = Silent(HELD)
    await silent.wait()
    looks = silent.looks
    assert silent.watch.is_given_up(URL) and silent.watch.is_given_up(URL)
    await silent.tasks.finish(60)
    assert silent.looks == looks + 1, "one at a time"
    silent.answers.set()
    assert silent.watch.is_given_up(URL), "until it has answered"
    await silent.tasks.finish(60)
    assert not silent.watch.is_given_up(URL)
