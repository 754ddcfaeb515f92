"""Merged indexes: found is what was found before, whatever happens while they are made, and few remain to be asked."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from drafts import DATA_DIR, adjusted, deprecated, draft, open_store, search, unit_vector
from effort import steps

from memd.entries import Entry
from memd.errors import StoreWriteFailed
from memd.store.log import format as log_format
from memd.store.snapshot import Snapshot
from memd.store.tools.verify import verify
from memd.store.topic import TopicLog

SEGMENTS = DATA_DIR / "talk" / "segments"
MERGED = SEGMENTS / "merged_0001_0008.ivf"


def merge_all(topic: TopicLog) -> int:
    """Merge until nothing is due; how often that was."""
    count = 0
    while due := topic.due_merge():
        topic.merge(due)
        count += 1
    return count


def merge_eights(topic: TopicLog) -> None:
    """Merge the first eight segments, and the next eight, as far as they are there."""
    for first in (1, 9):
        topic.merge(range(first, first + 8))


def grown(files: CrashFiles, segments: int, size: int = 2) -> tuple[TopicLog, list[Entry]]:
    """A topic of that many sealed segments, with corrections of earlier chunks all along."""
    topic = open_store(files, segment_entries_max=size).topic("talk")
    entries: list[Entry] = []
    for number in range(segments):
        group = [draft(f"{number}.{i}") for i in range(size)]
        if number % 3 == 2:
            group[0] = adjusted(entries[2 * number - 4], 3)
        if number % 4 == 3:
            group[1] = deprecated(entries[2 * number - 1])
        entries += topic.append(group)
    return topic, entries


def found(snapshot: Snapshot) -> dict[int, float]:
    """Ids and scores."""
    return {hit.canonical_id: hit.score for hit in search(snapshot, unit_vector("a question")[None], 1000)}


def scores_in(topic: TopicLog) -> object:
    """To compare with: a scan and an index add up a product in different order, so the last decimal is not told."""
    return pytest.approx(found(topic.snapshot()), abs=1.5e-6)


@pytest.mark.thorough
def test_the_words_of_a_merged_index_may_be_longer_than_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are of a million chunks: 137 MB, where a record ends at 128."""
    files = CrashFiles()
    store = open_store(files, segment_entries_max=10)
    topic = store.topic("talk")
    for number in range(8):
        topic.append([draft(f"{number}.{i}") for i in range(10)])
    monkeypatch.setattr(log_format, "PAYLOAD_BYTES_MAX", 2_500)
    topic.merge(range(1, 9))
    found = topic.snapshot().places_with("chunk 5.3")
    assert len(files.read(SEGMENTS / "merged_0001_0008.words")) > 2_500
    store.close()
    again = open_store(files, segment_entries_max=10).topic("talk")
    again.load()
    assert again.wordless == 0
    assert again.snapshot().places_with("chunk 5.3") == found != []


@pytest.mark.thorough
def test_merges_go_on_in_tiers_and_leave_few_indexes() -> None:
    files = CrashFiles()
    topic, _ = grown(files, 0)
    most = 0
    for number in range(70):
        topic.append([draft(f"{number}.{i}") for i in range(2)])
        merge_all(topic)
        most = max(most, len(topic.snapshot().indexes))
    assert [len(view.index.segment_ids) for view in topic.snapshot().indexes] == [59, 11]
    assert most == 3
    merged = sorted(name for name in files.names(SEGMENTS) if name.startswith("merged"))
    spans = "0001_0059", "0060_0070"
    assert merged == [f"merged_{span}.{kind}" for span in spans for kind in ("ivf", "meta", "words")]
    assert len(found(topic.snapshot())) == 140


@pytest.mark.parametrize("loss", LOSSES)
def test_a_power_cut_anywhere_in_a_merge_loses_nothing(loss: Loss) -> None:
    whole = CrashFiles()
    topic, _ = grown(whole, 17)
    expected, start = scores_in(topic), whole.operations
    merge_eights(topic)
    for cut in steps(start, whole.operations, loss):
        files = CrashFiles()
        files.cut_after = cut
        with pytest.raises(PowerCutError):
            merge_eights(grown(files, 17)[0])
        again = files.after_power_cut(loss)
        topic = open_store(again, segment_entries_max=2).topic("talk")
        assert found(topic.snapshot()) == expected, f"cut at {cut}: {files.log[cut]}"
        topic.load()
        assert topic.findings == [] and topic.unsealed() == []
        assert verify(DATA_DIR, again).ok
        stable = again.contents()
        open_store(again.after_power_cut("lost"), segment_entries_max=2).topic("talk")
        assert again.contents() == stable
        merge_eights(topic)
        assert found(topic.snapshot()) == expected
        assert len(topic.snapshot().indexes) == 3


def test_a_merge_that_fails_leaves_the_old_indexes_and_is_tried_again() -> None:
    whole = CrashFiles()
    topic, _ = grown(whole, 8)
    expected, start = scores_in(topic), whole.operations
    merge_all(topic)
    for number in steps(start, whole.operations):
        files = CrashFiles()
        topic, _ = grown(files, 8)
        files.fail_at = {number}
        with pytest.raises(StoreWriteFailed):
            merge_all(topic)
        assert found(topic.snapshot()) == expected
        assert merge_all(topic) == 1
        assert found(topic.snapshot()) == expected
        assert verify(DATA_DIR, files).ok


def flip(offset: int) -> Callable[[CrashFiles], None]:
    return lambda files: files.flip(MERGED, offset)


DAMAGE: dict[str, Callable[[CrashFiles], None]] = {
    "bit in the index": flip(50),
    "index cut short": lambda files: files.put(MERGED, files.read(MERGED)[:-9]),
    "index missing": lambda files: files.remove(MERGED),
    "index of other segments": lambda files: files.put(MERGED, files.read(SEGMENTS / "merged_0009_0016.ivf")),
    "bit in .meta": lambda files: files.flip(MERGED.with_suffix(".meta"), 120),
    ".meta missing": lambda files: files.remove(MERGED.with_suffix(".meta")),
    ".meta of others": lambda f: f.put(MERGED.with_suffix(".meta"), f.read(SEGMENTS / "merged_0009_0016.meta")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_merged_index_is_given_up_for_those_of_its_segments(name: str) -> None:
    files = CrashFiles()
    topic, _ = grown(files, 17)
    expected = scores_in(topic)
    merge_eights(topic)
    files = files.after_power_cut("lost")
    DAMAGE[name](files)
    report = verify(DATA_DIR, files)
    assert not report.ok
    assert {finding.kind for finding in report.damaged} == {"derived"}
    topic = open_store(files, segment_entries_max=2).topic("talk")
    assert found(topic.snapshot()) == expected
    topic.load()
    assert found(topic.snapshot()) == expected
    assert len(topic.snapshot().indexes) == 10
    merge_eights(topic)
    assert found(topic.snapshot()) == expected
    assert len(topic.snapshot().indexes) == 3
    assert verify(DATA_DIR, files).ok


def test_an_append_and_a_seal_during_a_merge_count_afterwards() -> None:
    topic, entries = grown(CrashFiles(), 8)
    live = {*found(topic.snapshot())}
    chosen = next(entry for entry in entries if entry.canonical_id in live)
    done: list[list[Entry]] = []

    def meanwhile() -> None:
        if not done:
            done.append(topic.append([deprecated(chosen), draft("new")]))

    topic.merge(range(1, 9), give_way=meanwhile)
    after = {*found(topic.snapshot())}
    assert after == (live - {chosen.canonical_id}) | {done[0][1].canonical_id}
    assert len(topic.snapshot().indexes) == 2


@pytest.mark.thorough
def test_a_merged_search_agrees_with_an_exact_one_on_clustered_vectors(tmp_path: Path) -> None:
    dimension, size, segments = 48, 250, 16
    chosen = np.random.default_rng(3)
    centres = chosen.normal(size=(40, dimension))
    noise = 0.7 * chosen.normal(size=(size * segments, dimension))
    vectors = (centres[chosen.integers(0, 40, len(noise))] + noise).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    topic = open_store(data_dir=tmp_path, segment_entries_max=size, dimension=dimension).topic("talk")
    ids = []
    for number in range(0, len(vectors), size):
        numbers = range(number, number + size)
        group = [msgspec.structs.replace(draft(i), vector=vectors[i].tobytes()) for i in numbers]
        ids += [entry.canonical_id for entry in topic.append(group)]
    assert merge_all(topic) == 1
    right = total = 0
    for query in chosen.permutation(vectors)[:100] + 0.05 * chosen.normal(size=(100, dimension)).astype(np.float32):
        best = {ids[i] for i in np.argsort(-(vectors @ query))[:32]}
        hits = search(topic.snapshot(), (query / np.linalg.norm(query))[None], 32)
        right += len(best & {hit.canonical_id for hit in hits})
        total += len(best)
    assert right / total > 0.99
