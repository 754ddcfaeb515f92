"""Disks that fill up under daemons of a cluster: others have their topics meanwhile, and nothing goes to and fro."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
from daemon_process import RECALL_MILLISECONDS_MAX
from full_disk import FullDisk
from owner_daemons import Ground, ground
from recording_upstream import RecordingUpstream

from memd.errors import TopicHeld
from memd.ingest.standing_aside import AGAIN_SECONDS, StandingAside
from memd.proxy.app import running
from memd.proxy.parts import Daemon
from memd.settings.model import BufferSettings, Config, ListenSettings, RetrievalSettings, UpstreamSettings
from memd.settings.store import StoreSettings
from memd.store.disk_trouble import DiskTrouble

HAPPENS_WITHIN_SECONDS = 120.0
FACT = "The lamp of the lighthouse was made in Paris."
QUESTION = "Where was the lamp of the lighthouse made?"
FULL = DiskTrouble(what="/cache: the disk is full", since=1, remedy="free some space", kind="full")


class Others:
    """Neighbours as a test says."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.roomy = ["http://two", "http://three"]
        self.held: dict[str, str] = {}

    def tell(self, trouble: str) -> None:
        self.told.append(trouble)

    async def with_room(self) -> list[str]:
        return self.roomy

    def holder(self, topic_id: str) -> str | None:
        return self.held.get(topic_id)


def taker(aside: StandingAside, topic_id: str) -> str | None:
    """The daemon that is to have a topic; None: this one."""
    try:
        aside.check(topic_id)
    except TopicHeld as error:
        return error.url
    return None


async def test_topics_go_to_whoever_has_them_or_has_room_and_none_is_let_go_twice_in_some_minutes() -> None:
    others, now = Others(), [0.0]
    others.held["busy"] = "http://four"
    aside = StandingAside(others, lambda: now[0])
    await aside.look(None)
    assert (taker(aside, "talk"), aside.may_let_go("talk"), others.told) == (None, False, [])
    await aside.look(FULL)
    await aside.look(FULL)
    assert others.told == ["/cache: the disk is full; free some space"]
    assert {taker(aside, f"topic {number}") for number in range(20)} == set(others.roomy), "not all to the same"
    assert taker(aside, "busy") == "http://four"
    assert aside.may_let_go("talk")
    aside.note_let_go("talk")
    assert not aside.may_let_go("talk")
    await aside.look(None)
    assert (others.told[-1], taker(aside, "talk")) == ("", None)
    now[0] += AGAIN_SECONDS - 1
    await aside.look(FULL)
    assert not aside.may_let_go("talk") and aside.may_let_go("another")
    others.roomy = []
    await aside.look(FULL)
    assert (taker(aside, "talk"), aside.may_let_go("third")) == (None, False), "no other daemon has room"
    others.roomy, now[0] = ["http://two"], now[0] + 1
    await aside.look(FULL)
    assert aside.may_let_go("talk")


class Place(NamedTuple):
    daemon: Daemon
    disk: FullDisk

    async def chat(self, topic: str, text: str) -> tuple[str | None, str]:
        """Who answered, if it was another daemon; and the status of memory."""
        body = {"model": "any", "messages": [{"role": "user", "content": text}]}
        headers = {"X-Memory-Topic": topic}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.daemon.base_url}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()
            return answer.headers.get("X-Memory-Owner"), answer.headers["X-Memory-Status"]

    async def note(self, topic: str, text: str) -> tuple[int, str | None]:
        """The status of the answer, and who gave it, if it was another daemon."""
        body = {"topic_id": topic, "notes": [{"content": text}]}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.daemon.own_url}/memd/notes", json=body) as answer,
        ):
            return answer.status, answer.headers.get("X-Memory-Owner")

    async def health(self) -> Any:
        async with aiohttp.ClientSession() as session, session.get(f"{self.daemon.own_url}/memd/health") as answer:
            return await answer.json()

    async def fill(self, topic: str) -> None:
        """Fill the disk, and wait until the daemon has noticed that, by this topic at the latest."""
        self.disk.full = True
        await self.note(topic, "The lens was ground in Brest.")
        await until(self.is_in_trouble)

    async def is_in_trouble(self) -> bool:
        return any("the disk is full" in one["what"] for one in (await self.health())["troubles"])

    async def is_well(self) -> bool:
        return not (await self.health())["troubles"]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HAPPENS_WITHIN_SECONDS):
        while not await holds():  # noqa: ASYNC110  # another process tells nobody
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def shared() -> Iterator[Ground]:
    with ground() as both:
        yield both


@pytest.fixture
async def pair(
    shared: Ground, upstream: RecordingUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Place, Place]]:
    monkeypatch.setattr("memd.ingest.disk_tending.LOOK_SECONDS", 0.05)
    store = msgspec.convert(shared.settings(store={"lease_seconds": 60.0})["store"], StoreSettings)

    def config(name: str) -> Config:
        return Config(
            listen=ListenSettings(port=0),
            upstream=UpstreamSettings(url=upstream.url),
            data_dir=tmp_path / name,
            store=store,
            buffer=BufferSettings(store_after_seconds=0.0),
            retrieval=RetrievalSettings(timeout_ms=RECALL_MILLISECONDS_MAX),
        )

    disks = FullDisk(), FullDisk()
    async with (
        running(config("one"), files=disks[0]) as one,
        running(config("two"), files=disks[1]) as two,
    ):
        places = Place(one, disks[0]), Place(two, disks[1])
        for place, name in zip(places, ("own-one", "own-two"), strict=True):
            # Each knows another daemon by the cluster's name, which it has in its folder once it has had a topic.
            assert await place.note(name, FACT) == (200, None)
        await until(lambda: knows(one, two))
        yield places


async def knows(one: Daemon, two: Daemon) -> bool:
    """Whether both have told of themselves."""
    assert one.cluster is not None and two.cluster is not None
    return bool(await asyncio.to_thread(one.cluster.others) and await asyncio.to_thread(two.cluster.others))


@pytest.mark.process
async def test_a_daemon_with_a_full_disk_leaves_its_topics_to_one_that_has_room_until_it_has_some_too(
    pair: tuple[Place, Place],
) -> None:
    one, two = pair
    assert await one.note("talk", FACT) == (200, None)
    await one.fill("talk")

    async def is_passed_on() -> bool:
        return await one.note("talk", "The keeper is called Jeanne.") == (200, two.daemon.base_url)

    await until(is_passed_on)
    assert await one.chat("talk", QUESTION) == (two.daemon.base_url, "injected"), "nothing is lost"
    assert await one.note("new", FACT) == (200, two.daemon.base_url)
    assert await two.note("talk", "It is large.") == (200, None)
    assert [one.daemon.topics.is_open(name) for name in ("talk", "new")] == [False, False]
    assert await two.is_well()
    one.disk.full = False
    await until(one.is_well)

    numbers = itertools.count()

    async def is_taken() -> bool:
        return await one.note(f"new-{next(numbers)}", FACT) == (200, None)

    await until(is_taken)
    assert await one.chat("talk", QUESTION) == (two.daemon.base_url, "injected")


@pytest.mark.process
async def test_where_all_disks_are_full_topics_stay_where_they_are(pair: tuple[Place, Place]) -> None:
    one, two = pair
    assert await two.note("talk", FACT) == (200, None)
    await two.fill("talk")

    async def is_passed_on() -> bool:
        return await two.note("talk", "The keeper is called Jeanne.") == (200, one.daemon.base_url)

    async def is_known_to_be_full() -> bool:
        assert one.daemon.cluster is not None
        return not await asyncio.to_thread(one.daemon.cluster.others_with_room)

    await until(is_passed_on)
    await until(is_known_to_be_full)
    await one.fill("talk")

    async def has_nobody_room() -> bool:
        asides = one.daemon.topics.aside, two.daemon.topics.aside
        return not any(aside is None or aside.is_aside for aside in asides)

    await until(has_nobody_room)
    topic = await one.daemon.topics.get("talk")
    for _ in range(20):
        assert (await one.chat("talk", QUESTION))[0] is None
        assert (await two.chat("talk", QUESTION))[0] == one.daemon.base_url
    assert await one.daemon.topics.get("talk") is topic
