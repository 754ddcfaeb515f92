"""The claims of a daemon to its topics, in process: nobody answers from a topic that another daemon may have by now."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from archiver_stage import COUNTER, DATA_DIR, DIMENSION
from crash_files import CrashFiles

from memd.errors import Fenced, StoreError, TopicHeld, TopicLost
from memd.ingest.claims import ROUNDS_ASKED, ClaimTender
from memd.ingest.redaction.redactor import Redactor
from memd.ingest.topics import Topics
from memd.proxy.memory import SettledPrompt
from memd.proxy.receive import Received
from memd.proxy.remember import Rememberer
from memd.settings.model import Config
from memd.store.disk import LocalDisk
from memd.store.local_shelf import LocalClaim, LocalShelf
from memd.store.shelf import Claim
from memd.store.store import Store
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks

LEASE_SECONDS = 3_000.0
"""So long that nothing is renewed by itself while a test runs."""
OTHER = "http://other"


class SharedShelf(LocalShelf):
    """A shelf with other daemons that may take what is here, and a database that may fail."""

    now = 0.0

    def __init__(self, files: LocalDisk, data_dir: Path) -> None:
        super().__init__(files, data_dir)
        self.taken: set[str] = set()
        """Topics that another daemon has."""
        self.failures = 0
        """So many renewals fail from now on."""
        self.asked = 0
        self.under_way = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.after_claim: Callable[[], None] = lambda: None

    def claim(self, topic_id: str, *, gone: str = "") -> LocalClaim:
        if topic_id in self.taken:
            raise TopicHeld(topic_id, OTHER)
        claim = super().claim(topic_id, gone=gone)
        claim.renewed_at = self.now
        self.after_claim()
        return claim

    def renew(self, claims: Collection[Claim]) -> list[Claim]:
        self.asked += 1
        self.under_way.set()
        self.go_on.wait()
        if self.failures:
            self.failures -= 1
            raise StoreError("it does not answer")
        lost = [one for one in claims if one.is_over or one.layout.topic_id in self.taken]
        for one in claims:
            if one not in lost and isinstance(one, LocalClaim):
                one.renewed_at = self.now
        return lost


class Cluster:
    """One daemon's topics."""

    def __init__(self) -> None:
        self._shelves: list[SharedShelf] = []
        self.store = Store.open(
            DATA_DIR,
            dimension=DIMENSION,
            fingerprint="a" * 32,
            segment_entries_max=100,
            files=CrashFiles(),
            shelf=self._shelf,
        )
        [self.shelf] = self._shelves
        self.claims = ClaimTender(self.store.renew, LEASE_SECONDS, 600, clock=lambda: self.shelf.now)
        config = Config()
        self._writer = ThreadPoolExecutor(1)
        self.topics = Topics(self.store, config, self._writer, Redactor.of(config.ingest), COUNTER.count, self.claims)
        self.tasks = Tasks(Metrics())
        self.topics.start(self.tasks)

    def _shelf(self, files: LocalDisk, data_dir: Path) -> SharedShelf:
        self._shelves.append(SharedShelf(files, data_dir))
        return self._shelves[-1]

    def stand_still(self, taken: Sequence[str] = ()) -> None:
        """For longer than a lease; meanwhile another daemon takes these."""
        self.shelf.now += LEASE_SECONDS + 1
        self.shelf.taken |= set(taken)

    async def close(self) -> None:
        self.shelf.go_on.set()
        await asyncio.to_thread(self.claims.stop, 60)
        await self.tasks.finish(60)
        self._writer.shutdown()
        self.store.close()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.close()


async def test_a_topic_whose_lease_has_passed_is_asked_for_before_it_is_given_out(cluster: Cluster) -> None:
    topic = await cluster.topics.get("talk")
    assert await cluster.topics.get("talk") is topic and cluster.shelf.asked == 0
    cluster.stand_still()
    assert await cluster.topics.get("talk") is topic and cluster.shelf.asked == 1
    cluster.stand_still(["talk"])
    with pytest.raises(TopicHeld):
        await cluster.topics.get("talk")


async def test_a_renewal_that_failed_as_the_process_stood_still_says_nothing_of_the_database(cluster: Cluster) -> None:
    await cluster.topics.get("talk")
    cluster.shelf.go_on.clear()
    cluster.shelf.failures = 1
    ended = cluster.claims.hurry()
    await asyncio.to_thread(cluster.shelf.under_way.wait)
    cluster.stand_still(["talk"])
    cluster.shelf.go_on.set()
    await ended
    with pytest.raises(TopicHeld):
        await cluster.topics.get("talk")


async def test_a_database_that_does_not_answer_is_asked_once_and_topics_are_given_out_as_they_are(
    cluster: Cluster,
) -> None:
    topic = await cluster.topics.get("talk")
    cluster.stand_still(["talk"])
    cluster.shelf.failures = 100
    assert await cluster.topics.get("talk") is topic and cluster.shelf.asked == ROUNDS_ASKED
    await cluster.topics.check(topic)
    assert await cluster.topics.get("talk") is topic and cluster.shelf.asked == ROUNDS_ASKED
    cluster.shelf.failures = 0
    cluster.stand_still()
    with pytest.raises(TopicHeld):
        await cluster.topics.get("talk")


async def test_whoever_has_read_from_a_topic_is_told_if_another_daemon_may_have_written_meanwhile(
    cluster: Cluster,
) -> None:
    topic = await cluster.topics.get("talk")
    await cluster.topics.check(topic)
    cluster.stand_still()
    await cluster.topics.check(topic)
    cluster.stand_still(["talk"])
    with pytest.raises(TopicLost):
        await cluster.topics.check(topic)
    with pytest.raises(TopicHeld):
        await cluster.topics.get("talk")


async def test_a_renewal_behind_the_back_of_a_request_does_not_hide_that_its_topic_was_lost(cluster: Cluster) -> None:
    topic = await cluster.topics.get("talk")
    cluster.stand_still(["talk"])
    await cluster.claims.hurry()
    with pytest.raises(TopicLost):
        await cluster.topics.check(topic)


async def test_a_topic_that_was_taken_while_it_was_opened_is_not_given_out(cluster: Cluster) -> None:
    cluster.shelf.after_claim = lambda: cluster.stand_still(["talk"])
    with pytest.raises(TopicLost):
        await cluster.topics.get("talk")
    with pytest.raises(TopicHeld):
        await cluster.topics.get("talk")


async def test_a_topic_whose_claim_has_ended_is_given_out_when_it_is_claimed_again(cluster: Cluster) -> None:
    topic = await cluster.topics.get("talk")
    topic.log.claim.release()
    assert await cluster.topics.get("talk") is topic and not topic.log.claim.is_over
    topic.log.claim.release()
    cluster.shelf.taken.add("talk")
    with pytest.raises(TopicHeld):
        await cluster.topics.get("talk")


async def test_a_turn_whose_question_is_kept_is_not_asked_again_for_a_write_to_the_log_that_met_a_takeover() -> None:
    rememberer = Rememberer(*[cast("Any", None)] * 5, is_synced=True, is_shared=True)
    received = cast("Received", SimpleNamespace(is_traced=True, topic=SimpleNamespace(trouble=Fenced("taken"))))
    shown = SettledPrompt(
        status="none", chunks=(), signals=(), notes=(), block_tokens=0, prompt_tokens=0, attachments=0
    )
    for is_saved in (True, False):
        saving = asyncio.ensure_future(asyncio.sleep(0, is_saved))
        if is_saved:
            assert (await rememberer.as_saved(received, shown, saving)).status == "degraded:store"
        else:
            with pytest.raises(TopicLost):
                await rememberer.as_saved(received, shown, saving)
