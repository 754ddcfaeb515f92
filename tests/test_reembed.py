"""`memd reembed`: after a change of the embedding model everything is found again, once, with nothing else changed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archiver_stage import DIMENSION, HashEmbedder
from conftest import MakeDaemon
from daemon_process import DaemonProcess, wait_until
from drafts import adjusted, deprecated, search
from msgspec.structs import replace
from numpy.typing import NDArray
from recording_upstream import RecordingUpstream

from memd.admin.reads import story_of
from memd.embedding.embedder import Embedder
from memd.embedding.local import FINGERPRINT
from memd.entries import Draft
from memd.ingest import offline
from memd.ingest.offline import reembed_topics
from memd.store.disk import LocalDisk
from memd.store.store import ModelId, Store, StoreShared, TopicLog
from memd.store.tools.export import export
from memd.store.tools.verify import verify


class Halved(HashEmbedder):
    """Another model, of half the components."""

    dimension, fingerprint = DIMENSION // 2, "e" * 32

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        halves = super().embed_many(texts)[:, : self.dimension]
        return np.asarray(halves / np.linalg.norm(halves, axis=1, keepdims=True), dtype=np.float32)


class Turned(HashEmbedder):
    """Another model of the same dimension, whose vectors look comparable and are not."""

    fingerprint = "f" * 32

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.ascontiguousarray(super().embed_many(texts)[:, ::-1])


class StopError(Exception):
    """The process ends here."""


@pytest.fixture
def embedder() -> HashEmbedder:
    return HashEmbedder()


@pytest.fixture(params=[Halved, Turned])
def former(request: pytest.FixtureRequest) -> Embedder:
    made: Embedder = request.param()
    return made


def opened(folder: Path, embedder: Embedder) -> Store:
    return Store(folder, StoreShared(model=ModelId(embedder.dimension, embedder.fingerprint), segment_entries_max=10))


def text_of(number: int) -> str:
    return f"user: harbour {number} has {number + 3} cranes"


def chunk(embedder: Embedder, number: int) -> Draft:
    return Draft(
        uuid=(number + 1).to_bytes(2, "big") * 8,
        content=text_of(number),
        vector=embedder.embed(text_of(number)).tobytes(),
        created_at=1_600_000_000_000_000 + number,
        roles=("user",),
        digests=((number + 1).to_bytes(16, "big"),),
    )


@pytest.fixture
def folder(tmp_path: Path, former: Embedder) -> Path:
    """A log of the former model: two topics, sealed and active segments, corrections."""
    store = opened(tmp_path, former)
    talk = store.topic("talk")
    entries = talk.append([chunk(former, number) for number in range(25)])
    talk.append([adjusted(entries[3], 2)])
    talk.append([deprecated(entries[4])])
    talk.append([chunk(former, number) for number in range(25, 33)])
    store.topic("other").append([chunk(former, 7)])
    store.close()
    return tmp_path


LIVE = [text_of(number) for number in range(33) if number != 4]


def found(topic: TopicLog, embedder: Embedder) -> list[str]:
    snapshot = topic.snapshot()
    hits = search(snapshot, embedder.embed_query("how many cranes are in the harbour?"), 1000)
    entries = [snapshot.read(hit.place) for hit in hits]
    return [entry.content for entry in sorted(entries, key=lambda entry: entry.origin_id)]


def live(folder: Path) -> list[dict[str, Any]]:
    """The live entries without what a new entry has to itself."""
    entries = export(folder, LocalDisk(), topic_id=None, live_only=True)
    told = [{name: value for name, value in entry.items() if name != "canonical_id"} for entry in entries]
    return sorted(told, key=lambda entry: (entry["topic_id"], entry["origin_id"]))


def test_what_another_model_wrote_is_found_again_and_is_otherwise_the_same(folder: Path, embedder: Embedder) -> None:
    before, count_before = live(folder), len(list(export(folder, LocalDisk(), topic_id=None, live_only=False)))
    store = opened(folder, embedder)
    assert found(store.topic("talk"), embedder) == []
    assert reembed_topics(store, embedder.embed_many) == (33, [])
    assert found(store.topic("talk"), embedder) == LIVE
    assert found(store.topic("other"), embedder) == [text_of(7)]
    store.close()
    assert live(folder) == before
    assert len(list(export(folder, LocalDisk(), topic_id=None, live_only=False))) == count_before + 33
    assert verify(folder, LocalDisk()).ok
    store = opened(folder, embedder)
    assert found(store.topic("talk"), embedder) == LIVE
    assert [one for name in ("talk", "other") for one in store.topic(name).findings if one.kind == "foreign"] == []
    assert store.topic("talk").has_digest((12).to_bytes(16, "big"))


def test_the_history_says_which_entries_are_only_embedded_anew(folder: Path, embedder: Embedder) -> None:
    store = opened(folder, embedder)
    reembed_topics(store, embedder.embed_many)
    snapshot = store.topic("talk").snapshot()

    def events(number: int) -> list[str]:
        found = story_of(snapshot, (number + 1).to_bytes(2, "big") * 8, None, bool)
        return [version.event for version in found.versions]

    assert [events(number) for number in (2, 3, 4)] == [
        ["told", "re-embedded"],
        ["told", "Helpful", "re-embedded"],
        ["told", "Update"],
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("texts", [1, 5, 12, 30])
def test_an_interrupted_run_goes_on_where_it_was(
    folder: Path, embedder: Embedder, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "GROUP_CHUNKS", 4)
    left = texts

    def failing(asked: Sequence[str]) -> NDArray[np.float32]:
        nonlocal left
        left -= len(asked)
        if left < 0:
            raise StopError
        return embedder.embed_many(asked)

    before = live(folder)
    store = opened(folder, embedder)
    with pytest.raises(StopError):
        reembed_topics(store, failing)
    store.close()
    assert live(folder) == before
    store = opened(folder, embedder)
    count, problems = reembed_topics(store, embedder.embed_many)
    assert (33 - texts <= count <= 33 - texts + 3) and problems == []
    assert found(store.topic("talk"), embedder) == LIVE
    store.close()
    assert live(folder) == before


def test_a_chunk_that_cannot_be_read_is_said_and_costs_no_other(folder: Path, embedder: Embedder) -> None:
    store = opened(folder, embedder)
    store.topic("talk")
    segment = folder / "talk" / "segments" / "seg_0001.bin"
    data = bytearray(segment.read_bytes())
    data[data.index(text_of(5).encode()) + 2] ^= 1
    segment.write_bytes(data)
    count, problems = reembed_topics(store, embedder.embed_many)
    assert count == 32 and len(problems) == 1
    assert "seg_0001.bin: entry" in str(problems[0])
    assert found(store.topic("talk"), embedder) == [text for text in LIVE if text != text_of(5)]


def test_a_daemon_says_how_much_is_not_searched_and_what_to_do(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, embedder: HashEmbedder
) -> None:
    daemon = make_daemon(upstream.url)
    store = opened(daemon.data_dir, embedder)
    store.topic("talk").append([chunk(embedder, number) for number in range(5)])
    store.close()
    daemon.start()
    said = "5 chunks were embedded with another model"
    wait_until(lambda: said in daemon.log.read_text(), lambda: repr(daemon))
    assert "run `memd reembed`" in daemon.log.read_text()
    unsearched = f"{said} and are not searched by meaning; stop the daemon and run `memd reembed`"
    searched = daemon.run("search", "Where is it?")
    assert searched.returncode == 1 and unsearched in searched.stdout and "Nothing is stored" not in searched.stdout
    assert unsearched in daemon.run("stats").stdout
    running = daemon.run("reembed")
    assert running.returncode == 1 and "is in use by another memd" in running.stderr
    daemon.terminate()
    done = daemon.run("reembed")
    assert done.returncode == 0 and "5 chunks embedded again" in done.stdout
    assert all("another model" not in daemon.run(*after).stdout for after in (("search", "Where is it?"), ("stats",)))


def test_a_chunk_of_a_former_model_is_embedded_with_its_correction(daemon: DaemonProcess, embedder: Embedder) -> None:
    key, where = "The deploy key lives in the drawer of desk nine.", "Where does the deploy key live?"
    daemon.chat([{"role": "user", "content": key}])
    shown = daemon.chat([{"role": "user", "content": where}], memory_in={}).json["memory_out"]["injected_chunks"]
    daemon.wait_stored(key)
    daemon.terminate()
    store = Store(daemon.data_dir, StoreShared(model=ModelId(384, FINGERPRINT), segment_entries_max=10))
    views = store.topic("default").snapshot().views.values()
    entries = [view.segment.read(row) for view in views for row in view.rows]
    store.close()
    (daemon.data_dir / "default" / "active.bin").unlink()  # as if the former model had written it; the journal stays
    store = opened(daemon.data_dir, embedder)
    store.topic("default").append(
        [replace(entry.as_draft(), vector=embedder.embed(entry.content).tobytes()) for entry in entries]
    )
    store.close()
    daemon.start()

    [named] = [chunk["id"] for chunk in shown]
    helpful = {"chunk_ids": [named], "action": "Helpful", "reason": "it was"}
    out = daemon.chat([{"role": "user", "content": "Thanks."}], memory_in={"corrections": [helpful]}).json["memory_out"]
    assert "signals" not in out
    [live] = [entry for entry in daemon.export() if entry["id"] == named and entry["live"]]
    assert live["utility_multiplier"] == 1.5
    again = daemon.chat([{"role": "user", "content": where + " Once more."}], memory_in={}).json["memory_out"]
    assert named in [chunk["id"] for chunk in again["injected_chunks"]]
