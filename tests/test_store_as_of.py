"""Any earlier moment of a topic can be searched, and is what it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from drafts import DIMENSION, FINGERPRINT, adjusted, deprecated, draft, unit_vector

from memd.entries import Entry, Status
from memd.store.as_of import TopicAsOf, snapshot_as_of
from memd.store.store import Store, TopicLog

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
    store = Store.open(tmp_path, dimension=DIMENSION, fingerprint=FINGERPRINT, segment_entries_max=sizes)
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
        for segment_id in log.unsealed() if request.param != "growing" else []:
            log.seal(segment_id)
    if request.param == "merged":
        log.load()
        log.merge(log.snapshot().indexes[0].index.segment_ids + log.snapshot().indexes[1].index.segment_ids)
    if request.param == "reopened":
        store.close()
        store = Store.open(tmp_path, dimension=DIMENSION, fingerprint=FINGERPRINT, segment_entries_max=sizes)
        log = store.topic("one")
    yield Told(log, states)
    store.close()


def test_every_earlier_moment_is_found_as_it_was(told: Told) -> None:
    for canonical_id, state in told.states.items():
        past = snapshot_as_of(told.log.snapshot(), canonical_id)
        live = {uuid: entry for uuid, entry in state.items() if entry.status is Status.ACTIVE}
        expected = {
            uuid: max(0.0, float(entry.embedding @ QUERIES[0])) * entry.multiplier for uuid, entry in live.items()
        }
        hits = past.search(QUERIES, 100)
        assert {hit.uuid: hit.score for hit in hits} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert past.live_count == len(live)
        for uuid in told.states[max(told.states)]:
            known = past.find(uuid)
            assert known == state.get(uuid)
            assert past.knows(uuid) == (uuid in state)


def test_what_was_said_before_and_after_is_found_in_any_segment(told: Told) -> None:
    snapshot = told.log.snapshot()
    live = [(entry.origin_id, entry.uuid) for entry in told.states[max(told.states)].values()]
    live = sorted((origin, uuid) for origin, uuid in live if snapshot.live_place(_newest(told, uuid)) is not None)
    places = [snapshot.live_place(_newest(told, uuid)) for _, uuid in live]
    assert None not in places and len(places) > 15
    expected = list(zip([None, *places[:-1]], [*places[1:], None], strict=True))
    assert snapshot.neighbours([place for place in places if place is not None]) == expected
    assert snapshot.neighbours([]) == []


def _newest(told: Told, uuid: bytes) -> int:
    return told.states[max(told.states)][uuid].canonical_id


def test_the_words_of_then_are_searched(told: Told) -> None:
    moments = sorted(told.states)
    past = TopicAsOf(told.log, moments[10], words=True)
    assert [hit.canonical_id for hit in past.lexical_query("chunk").best(100)] == sorted(
        entry.canonical_id for entry in told.states[moments[10]].values() if entry.status is Status.ACTIVE
    )
    assert not TopicAsOf(told.log, moments[10], words=False).has_lexical


def test_a_look_at_the_past_leaves_no_trace(told: Told, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    now = told.log.snapshot().search(QUERIES, 100)
    TopicAsOf(told.log, sorted(told.states)[5], words=True).snapshot().search(QUERIES, 5)
    assert told.log.snapshot().search(QUERIES, 100) == now
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
