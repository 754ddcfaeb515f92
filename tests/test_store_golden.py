"""Every version of the format that memd ever wrote can be read, searched and appended to by this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from drafts import DIMENSION, search
from golden_files import EXPECTED, GOLDEN, TOPIC, chunk, found, opened, vector, write

from memd.store.disk import LocalDisk
from memd.store.layout import is_derived
from memd.store.log.format import FORMAT_VERSION
from memd.store.tools.verify import verify

NOW = f"v{FORMAT_VERSION}-terms"
"""As it is written now: with a field of records that has come since the version began (`Entry.terms`)."""
VERSIONS = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a golden folder."""
    copy = tmp_path / "memory"
    shutil.copytree(GOLDEN / request.param, copy)
    return copy


def test_there_is_a_folder_for_every_version_up_to_this_one() -> None:
    assert [f"v{number}" for number in range(1, FORMAT_VERSION + 1)] + [NOW] == VERSIONS


def test_an_old_log_is_whole_and_reads_as_it_did(golden: Path) -> None:
    report = verify(golden, LocalDisk())
    assert report.ok, report.lines
    assert found(golden) == json.loads((golden / EXPECTED).read_text())


@pytest.mark.parametrize("merges", [False, True])
def test_an_old_log_is_searched_with_its_old_indexes_and_merged_anew(golden: Path, merges: bool) -> None:
    store = opened(golden)
    topic = store.topic(TOPIC)
    topic.load()
    assert topic.findings == [] and topic.unsealed() == []
    is_merged = any(golden.rglob("merged_*.ivf"))
    assert is_merged or not list(golden.rglob("merged_*")), "an older memd's is removed"
    assert topic.due_merge(1e9) == (None if is_merged else (1, 2))
    if merges and not is_merged:
        topic.merge((1, 2))
        is_merged = True
    assert [view.index.segment_ids for view in topic.snapshot().indexes] == ([(1, 2)] if is_merged else [(1,), (2,)])
    expected = {entry["canonical_id"]: entry for entry in json.loads((golden / EXPECTED).read_text())["export"]}
    for number in range(8):
        query = np.frombuffer(vector(number), dtype=np.float32)
        hits = search(topic.snapshot(), query.reshape(1, DIMENSION), 100)
        live = {canonical_id for canonical_id, entry in expected.items() if entry["live"]}
        assert {hit.canonical_id for hit in hits} == live
        entry = topic.snapshot().read(max(hits, key=lambda hit: hit.cosine).place)
        assert entry.content == expected[entry.canonical_id]["content"]
        assert float(query @ entry.embedding) == 1.0 or number == 1, "number 1 was replaced"
    store.close()


def test_an_old_log_is_appended_to_and_sealed(golden: Path) -> None:
    before = found(golden)["export"]
    store = opened(golden)
    topic = store.topic(TOPIC)
    topic.append([chunk(8, "user: new"), chunk(9, "user: newer")])
    for segment_id in topic.unsealed():
        topic.seal(segment_id)
    store.close()
    assert verify(golden, LocalDisk()).ok
    after = found(golden)["export"]
    assert after[: len(before)] == before
    assert [entry["content"] for entry in after[len(before) :]] == ["user: new", "user: newer"]


def test_this_version_writes_the_same_log_byte_for_byte(tmp_path: Path) -> None:
    """If this fails, the format has changed: that needs a new version number and a new golden folder."""
    write(tmp_path)
    golden = GOLDEN / NOW
    names = _logs_in(golden)
    assert _logs_in(tmp_path) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (golden / name).read_bytes(), name


def _logs_in(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not is_derived(path.name))
    return {str(path.relative_to(folder)) for path in files}
