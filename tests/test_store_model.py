"""Random appends, corrections, seals, failures, power cuts and restarts against a plain dict."""

import pytest
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from drafts import DATA_DIR, Hit, adjusted, deprecated, digest_of, draft, open_store, search, unit_vector
from effort import scaled
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memd.entries import Draft, Entry, Status, multiplier_of
from memd.errors import StoreError, StoreWriteFailed
from memd.store.snapshot import Snapshot
from memd.store.tools.export import export
from memd.store.tools.verify import verify

SEGMENT_ENTRIES = 4
TOPICS = ("one", "two")
topics = st.sampled_from(TOPICS)
picks = st.integers(0, 10_000)


class StoreMachine(RuleBasedStateMachine):
    """`state[topic][uuid]` is the newest entry of each chunk, `history` all entries of all topics."""

    @initialize()
    def start(self) -> None:
        self.files = CrashFiles()
        self.state: dict[str, dict[bytes, Entry]] = {topic: {} for topic in TOPICS}
        self.history: list[Entry] = []
        self.made = 0
        self.kept: list[tuple[Snapshot, list[Hit], int, dict[bytes, Entry]]] = []
        self.open()

    def open(self) -> None:
        self.store = open_store(self.files, segment_entries_max=SEGMENT_ENTRIES)
        self.logs = {topic: self.store.topic(topic) for topic in TOPICS}

    def note(self, topic: str, entries: list[Entry]) -> None:
        for entry in entries:
            assert not self.history or entry.canonical_id > self.history[-1].canonical_id
            self.history.append(entry)
            self.state[topic][entry.uuid] = entry

    def new_drafts(self, count: int) -> list[Draft]:
        self.made += count
        return [draft(number) for number in range(self.made - count, self.made)]

    def corrections(self, topic: str, pick: int, steps: int) -> list[Draft]:
        """One of some chunk of either topic, so that adoption happens too."""
        known = [entry for name in TOPICS for entry in self.state[name].values() if entry.status is Status.ACTIVE]
        if not known:
            return []
        entry = known[pick % len(known)]
        own = self.state[topic].get(entry.uuid, entry)
        if own.status is Status.DEPRECATED:
            own = entry
        return [deprecated(own) if steps == 99 else adjusted(own, steps)]

    @rule(topic=topics, count=st.integers(1, 6))
    def append(self, topic: str, count: int) -> None:
        self.note(topic, self.logs[topic].append(self.new_drafts(count)))

    @rule(topic=topics, pick=picks, steps=st.sampled_from([-4, -1, 0, 1, 3, 10, 99]), more=st.integers(0, 2))
    def correct(self, topic: str, pick: int, steps: int, more: int) -> None:
        drafts = self.corrections(topic, pick, steps) + self.new_drafts(more)
        self.note(topic, self.logs[topic].append(drafts))

    @rule(topic=topics)
    def merge(self, topic: str) -> None:
        log = self.logs[topic]
        log.load()
        log.merge([number for view in log.snapshot().indexes[:3] for number in view.index.segment_ids])

    @rule(topic=topics)
    def let_go(self, topic: str) -> None:
        self.store.close_topic(topic)
        with pytest.raises(StoreError, match="closed"):
            self.logs[topic].append(self.new_drafts(1))
        self.logs[topic] = self.store.topic(topic)

    @rule(topic=topics)
    def keep_a_snapshot(self, topic: str) -> None:
        snapshot = self.logs[topic].snapshot()
        hits = search(snapshot, unit_vector("kept")[None], 100)
        self.kept.append((snapshot, hits, snapshot.live_count, dict(self.state[topic])))

    @rule(topic=topics, after=st.integers(0, 6), count=st.integers(1, 3))
    def fail_an_operation(self, topic: str, after: int, count: int) -> None:
        self.files.fail_at = {self.files.operations + after}
        try:
            self.note(topic, self.logs[topic].append(self.new_drafts(count)))
        except StoreWriteFailed:
            pass
        self.files.fail_at = set()

    @rule(topic=topics, room=st.integers(0, 900), count=st.integers(1, 3))
    def fill_the_disk(self, topic: str, room: int, count: int) -> None:
        self.files.bytes_left = room
        try:
            self.note(topic, self.logs[topic].append(self.new_drafts(count)))
        except StoreWriteFailed:
            pass
        self.files.bytes_left = None

    @rule(topic=topics, after=st.integers(0, 12), count=st.integers(1, 3), loss=st.sampled_from(LOSSES))
    def cut_the_power(self, topic: str, after: int, count: int, loss: Loss) -> None:
        attempted: list[str] = []
        self.files.cut_after = self.files.operations + after
        try:
            while True:
                drafts = self.new_drafts(count)
                attempted = [made.content for made in drafts]
                self.note(topic, self.logs[topic].append(drafts))
                attempted = []
        except PowerCutError:
            pass
        self.files = self.files.after_power_cut(loss)
        self.kept.clear()
        self.open()
        found = [str(entry["content"]) for entry in self.exported()][len(self.history) :]
        assert found in ([], attempted)
        self.adopt_what_was_in_doubt(topic, found)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.kept.clear()
        self.open()

    def adopt_what_was_in_doubt(self, topic: str, contents: list[str]) -> None:
        snapshot = self.logs[topic].snapshot()
        found = [snapshot.read(hit.place) for hit in search(snapshot, unit_vector("any")[None], 10_000)]
        fresh = sorted((entry for entry in found if entry.content in contents), key=lambda entry: entry.canonical_id)
        self.note(topic, fresh)

    def exported(self) -> list[dict[str, object]]:
        return list(export(DATA_DIR, self.files, topic_id=None, live_only=False))

    @invariant()
    def every_live_chunk_is_found_with_its_score_and_no_other(self) -> None:
        query = unit_vector("query")
        for topic, log in self.logs.items():
            snapshot = log.snapshot()
            live = {e.canonical_id: e for e in self.state[topic].values() if e.status is Status.ACTIVE}
            hits = search(snapshot, query[None], 10_000)
            assert {hit.canonical_id for hit in hits} == set(live)
            assert snapshot.live_count == len(live)
            for hit in hits:
                entry = live[hit.canonical_id]
                assert hit.score == pytest.approx(
                    max(0.0, float(query @ entry.embedding)) * multiplier_of(entry.utility_steps), abs=1e-4
                )
            best = [hit.canonical_id for hit in search(snapshot, query[None], 3) if hit.score > 0]
            assert best == [hit.canonical_id for hit in hits[:3] if hit.score > 0]

    @invariant()
    def every_chunk_is_known_and_read_back(self) -> None:
        for topic, log in self.logs.items():
            snapshot = log.snapshot()
            for uuid, entry in self.state[topic].items():
                assert snapshot.knows(uuid) and snapshot.known([bytes(16), uuid]) == {uuid}
                assert snapshot.find(uuid) == entry
                assert all(log.has_digest(digest) for digest in entry.digests)
                assert log.has_live_copy(entry.as_draft()) == (entry.status is Status.ACTIVE)
            assert not log.has_digest(digest_of("never")) and not log.has_live_copy(draft("never"))

    @invariant()
    def public_ids_name_one_chunk_per_topic(self) -> None:
        for chunks in self.state.values():
            names = [entry.public_id for entry in chunks.values()]
            assert len(names) == len(set(names))

    @invariant()
    def kept_snapshots_answer_as_before(self) -> None:
        known = {uuid for chunks in self.state.values() for uuid in chunks}
        for snapshot, hits, live_count, state in self.kept:
            assert {uuid: snapshot.find(uuid) for uuid in state} == state
            assert snapshot.known(list(known)) == state.keys()
            assert search(snapshot, unit_vector("kept")[None], 100) == hits
            assert snapshot.live_count == live_count
            assert [snapshot.read(hit.place).canonical_id for hit in hits] == [hit.canonical_id for hit in hits]

    def teardown(self) -> None:
        assert [entry["canonical_id"] for entry in self.exported()] == [entry.canonical_id for entry in self.history]
        assert verify(DATA_DIR, self.files).ok


StoreMachine.TestCase.settings = settings(
    max_examples=scaled(40), stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
TestStoreAgainstAPlainDict = StoreMachine.TestCase
