"""A start looks at the topics that were used, not at all that there are; where it cannot know them, at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from drafts import DATA_DIR, draft, open_store

from memd.errors import BadTopicId
from memd.store.store import Store

RECENT = DATA_DIR / "memd.recent"
NAMES = [f"topic-{number}" for number in range(10)]
STATE = "rules"


def told(store: Store, *names: str) -> int:
    """Append an entry to each of these topics, as the daemon does; the highest id."""
    ids = []
    for name in names:
        log = store.topic(name)
        store.before_write()
        ids += [entry.canonical_id for entry in log.append([draft(1)])]
    return max(ids)


def at_rest(files: CrashFiles) -> int:
    """Ten topics with nothing to do; the highest id."""
    store = open_store(files)
    highest = told(store, *NAMES)
    store.close()
    store = open_store(files)
    assert store.to_look_at(STATE) == sorted(NAMES), "there was no list"
    store.note_at_rest(NAMES, STATE)
    store.close()
    files.bytes_read.clear()
    return highest


def reopened(files: CrashFiles) -> Store:
    """With a clock that was set back to the beginning of time."""
    return open_store(files, now_us=lambda: 1)


def test_a_start_reads_no_file_of_a_topic_at_rest() -> None:
    files = CrashFiles()
    highest = at_rest(files)
    store = reopened(files)
    assert set(files.bytes_read) == {RECENT.name}
    assert store.to_look_at(STATE) == [] and store.topic_count == len(NAMES) and store.topic_ids() == sorted(NAMES)
    assert told(store, "new") > highest


def test_a_topic_that_could_not_be_looked_at_is_looked_at_by_the_next_start() -> None:
    files = CrashFiles()
    at_rest(files)
    files.remove(RECENT)
    store = reopened(files)
    assert store.to_look_at(STATE) == sorted(NAMES)
    store.note_at_rest([name for name in NAMES if name != "topic-3"], STATE)
    store.close()
    assert reopened(files).to_look_at(STATE) == ["topic-3"]


@pytest.mark.parametrize("loss", LOSSES)
def test_after_a_power_cut_at_any_step_what_was_used_is_looked_at_and_no_id_is_given_twice(loss: Loss) -> None:
    base = CrashFiles()
    at_rest(base)
    steps = 0
    while True:
        files = base.after_power_cut("kept")
        store = reopened(files)
        files.cut_after = files.operations + steps
        acknowledged: dict[str, int] = {}
        try:
            for name in ("topic-3", "new", "topic-7"):
                acknowledged[name] = told(store, name)
        except PowerCutError:
            steps += 1
        else:
            break
        after = files.after_power_cut(loss)
        store = reopened(after)
        assert acknowledged.keys() <= set(store.to_look_at(STATE)), after.contents()[str(RECENT)]
        assert told(store, "topic-1") > max([0, *acknowledged.values()])
    assert steps > 5


def test_a_list_that_grew_long_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memd.store.store._SPARE_BYTES", 80)
    files = CrashFiles()
    store = open_store(files)
    store.note_at_rest([], STATE)
    for name in NAMES:
        store.topic(name)
        store.close_topic(name)
    assert len(files.contents()[str(RECENT)].splitlines()) < len(NAMES)
    assert open_store(files.after_power_cut("kept")).to_look_at(STATE) == []


def put_there(files: CrashFiles) -> None:
    """Somebody copied a topic from elsewhere."""
    files.make_directory(DATA_DIR / "brought")
    files.put(DATA_DIR / "brought" / "hot.log", b"")


HARMS: dict[str, Callable[[CrashFiles], None]] = {
    "torn": lambda files: files.put(RECENT, files.read(RECENT) + b"topic-1"),
    "zeros": lambda files: files.put(RECENT, bytes(300)),
    "of another version": lambda files: files.put(RECENT, files.read(RECENT).replace(b"recent 1", b"recent 2")),
    "not a name": lambda files: files.put(RECENT, files.read(RECENT) + b"../../etc\n"),
    "gone": lambda files: files.remove(RECENT),
    "a topic from elsewhere": put_there,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_where_the_list_cannot_be_trusted_all_topics_are_looked_at(harm: Callable[[CrashFiles], None]) -> None:
    files = CrashFiles()
    highest = at_rest(files)
    harm(files)
    store = reopened(files)
    assert set(NAMES) <= set(store.to_look_at(STATE))
    assert told(store, "topic-0") > highest


def test_with_other_rules_or_another_model_all_topics_are_looked_at() -> None:
    files = CrashFiles()
    at_rest(files)
    store = open_store(files)
    assert store.to_look_at(STATE) == [] and store.to_look_at("others") == sorted(NAMES)
    store.close()
    assert open_store(files, fingerprint="a" * 32).to_look_at(STATE) == sorted(NAMES)


def test_on_a_full_disk_there_is_rather_no_list() -> None:
    files = CrashFiles()
    at_rest(files)
    store = open_store(files)
    files.bytes_left = 4
    store.topic("topic-4")
    assert files.size(RECENT) is None
    files.bytes_left = None
    store.note_at_rest([], STATE)
    assert open_store(files.after_power_cut("kept")).to_look_at(STATE) == ["topic-4"]


def test_a_topic_that_somebody_puts_there_is_found_and_one_that_differs_in_case_refused(tmp_path: Path) -> None:
    store = open_store(data_dir=tmp_path)
    told(store, "garden")
    assert store.has_topic("garden") and not store.has_topic("Garden") and not store.has_topic("memd.recent")
    (tmp_path / "brought").mkdir()
    assert not store.has_topic("brought"), "there is nothing in it"
    (tmp_path / "brought" / "hot.log").write_bytes(b"")
    assert store.has_topic("brought")
    for name, there in (("Garden", "garden"), ("BROUGHT", "brought"), ("Memd.Recent", "memd.recent")):
        with pytest.raises(BadTopicId, match=f"differs only in case from '{there}'"):
            store.topic(name)
    store.close()
