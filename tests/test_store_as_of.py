"""Any earlier moment of a topic can be searched, and is what it was."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from drafts import DIMENSION, adjusted, deprecated, draft, open_store, search, unit_vector

from memd.entries import Entry, Status, WallTime, multiplier_of
from memd.recall.columns import TopicColumns
from memd.selection import EVERYTHING
from memd.store.disk import LocalDisk
from memd.store.log.segment import NOTHING_PENDING
from memd.store.snapshot import TopicAsOf, id_before, id_upto, snapshot_as_of
from memd.store.store import Store, TopicLog
from memd.store.tools.export import decode_line, export

QUERIES = np.stack([unit_vector("a question")])


@dataclasses.dataclass
class Told:
    """A topic, and what its chunks were after each entry."""

    log: TopicLog
    states: dict[int, dict[bytes, Entry]]


@pytest.fixture(params=["growing", "sealed", "merged", "reopened"])
def told(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Told]:
    """Forty chunks, praised, blamed and taken out in between, in segments of eight entries."""
    chance = np.random.default_rng(7)
    sizes = 1000 if request.param == "growing" else 8
    store = open_store(None, tmp_path, segment_entries_max=sizes)
    log = store.topic("one")
    state: dict[bytes, Entry] = {}
    states = {0: dict(state)}
    for number in range(40):
        drafts = [draft(number)]
        live = [entry for entry in state.values() if entry.status is Status.ACTIVE]
        if live and chance.random() < 0.6:
            entry = live[int(chance.integers(len(live)))]
            drafts.append(deprecated(entry) if chance.random() < 0.4 else adjusted(entry, int(chance.integers(-4, 11))))
        for entry in log.append(drafts):
            state[entry.uuid] = entry
        states[max(entry.canonical_id for entry in state.values())] = dict(state)
    if request.param == "merged":
        log.load()
        log.merge(log.snapshot().indexes[0].index.segment_ids + log.snapshot().indexes[1].index.segment_ids)
    if request.param == "reopened":
        store.close()
        store = open_store(None, tmp_path, segment_entries_max=sizes)
        log = store.topic("one")
    yield Told(log, states)
    store.close()


def test_every_earlier_moment_is_found_as_it_was(told: Told) -> None:
    for canonical_id, state in told.states.items():
        past = snapshot_as_of(told.log.snapshot(), canonical_id)
        live = {uuid: entry for uuid, entry in state.items() if entry.status is Status.ACTIVE}
        expected = {
            uuid: max(0.0, float(entry.embedding @ QUERIES[0])) * multiplier_of(entry.utility_steps)
            for uuid, entry in live.items()
        }
        hits = search(past, QUERIES, 100)
        assert {hit.uuid: hit.score for hit in hits} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert past.live_count == len(live)
        for uuid in told.states[max(told.states)]:
            known = past.find(uuid)
            assert known == state.get(uuid)
            assert past.knows(uuid) == (uuid in state)


def test_what_was_said_before_and_after_is_found_in_any_segment(told: Told) -> None:
    snapshot = told.log.snapshot()
    live = [(entry.origin_id, entry.uuid) for entry in told.states[max(told.states)].values()]
    live = sorted((origin, uuid) for origin, uuid in live if snapshot.live_places([_newest(told, uuid)]))
    places = [snapshot.live_places([one])[one] for one in (_newest(told, uuid) for _, uuid in live)]
    assert None not in places and len(places) > 15
    expected = list(zip([None, *places[:-1]], [*places[1:], None], strict=True))
    assert [snapshot.neighbours(place) for place in places if place is not None] == expected


def _newest(told: Told, uuid: bytes) -> int:
    return told.states[max(told.states)][uuid].canonical_id


def test_the_words_of_then_are_searched(told: Told) -> None:
    moments = sorted(told.states)
    told.log.load()
    past = TopicAsOf(told.log, moments[10])
    columns = TopicColumns(past, ["chunk"], NOTHING_PENDING, EVERYTHING, (), ())
    found: list[int] = []
    for one in columns.sources:
        labels = one.found(columns.terms, np.zeros((0, DIMENSION), np.float32))
        has = one.counts[labels] & (one.words(columns.terms, labels)[:, 0] > 0)
        found += one.column("canonical_id", labels[has]).tolist()
    assert sorted(found) == sorted(
        entry.canonical_id for entry in told.states[moments[10]].values() if entry.status is Status.ACTIVE
    )


HOUR_US = 3_600_000_000


@pytest.mark.parametrize("is_sealed", [False, True], ids=["growing", "sealed and reopened"])
def test_a_time_means_the_last_moment_at_which_the_clock_showed_it(tmp_path: Path, is_sealed: bool) -> None:
    now_us = [1_700_000_000_000_000]

    def opened() -> Store:
        return open_store(None, tmp_path, segment_entries_max=2 if is_sealed else 1000, now_us=lambda: now_us[0])

    store = opened()
    times = []
    for number, step in enumerate([0, HOUR_US // 2, -HOUR_US // 4, HOUR_US // 8, HOUR_US, HOUR_US]):
        now_us[0] += step  # the third and fourth are stored after the clock was set back
        times.append(now_us[0])
        store.topic("one").append([draft(number)])
    log = store.topic("one")
    if is_sealed:
        store.close()
        store = opened()
        log = store.topic("one")
    snapshot = log.snapshot()

    def known_at(time_us: int) -> int:
        past = snapshot_as_of(snapshot, id_upto(snapshot, WallTime(time_us)))
        return sum(past.knows(draft(number).uuid) for number in range(len(times)))

    assert [known_at(time_us) for time_us in times] == [1, 4, 3, 4, 5, 6]
    assert known_at(times[0] - 1) == 0 and known_at(times[2] - 1) == 1
    places = list(snapshot.latest_places())
    assert [snapshot.read(place).at for place in reversed(places)] == times
    assert list(snapshot.latest_places(id_before(snapshot, WallTime(times[3])))) == places[3:], "those before it"
    store.close()
    lines = [json.dumps(line).encode() for line in export(tmp_path, LocalDisk(), topic_id=None, live_only=False)]
    assert sum(b"appended_at" in line for line in lines) == 2
    assert [decode_line(line)[1].content for line in lines] == [draft(number).content for number in range(len(times))]
