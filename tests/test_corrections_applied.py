"""Applying corrections to a real log, without a daemon: which chunks can be reached, how it is appended, and undo."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from drafts import DIMENSION, unit_vector

from memd.entries import Correction, Draft, Entry, Status, Vector
from memd.errors import BadQuestion, EmbeddingError, NotFound, StoreError
from memd.messages import BlockChunk
from memd.recall import corrections
from memd.store.store import Snapshot, Store, TopicLog

MODEL = "the present model"


class Encoder:
    """Embeds every text as a vector of its own, and remembers in which threads."""

    def __init__(self, fingerprint: str = MODEL) -> None:
        self.fingerprint = fingerprint
        self.texts: list[str] = []
        self.threads: set[int] = set()
        self.broken = False

    def embed_text(self, text: str) -> Vector:
        if self.broken:
            raise EmbeddingError("it was asked")
        self.texts.append(text)
        self.threads.add(threading.get_ident())
        return unit_vector(text, DIMENSION)


class Log:
    """One topic, what was shown of it recently, and how many groups were appended."""

    def __init__(self, topic: TopicLog, encoder: Encoder) -> None:
        self.topic = topic
        self.encoder = encoder
        self.shown: dict[str, BlockChunk] = {}
        self.related: dict[str, TopicLog] = {}
        self.groups: list[int] = []
        self.is_full = False

    def tell(self, text: str, uuid: bytes = b"") -> Entry:
        vector = unit_vector(text, DIMENSION).astype("<f4").tobytes()
        uuid = uuid or text.encode().ljust(16)[:16]
        draft = Draft(uuid=uuid, content=text, vector=vector, created_at=1, roles=("user",))
        [told] = self.topic.append([draft])
        return told

    def show(self, entry: Entry) -> str:
        self.shown[entry.public_id] = BlockChunk(entry.public_id, entry.uuid, self.topic.topic_id, entry.origin_id)
        return entry.public_id

    async def append(self, drafts: Sequence[Draft]) -> Sequence[Entry]:
        if self.is_full:
            raise StoreError("no space left")
        self.groups.append(len(drafts))
        return self.topic.append(drafts)

    async def correct(self, *asked: Correction) -> corrections.Applied:
        """As a client does: only what it was shown."""

        async def snapshot_of(topic_id: str) -> Snapshot | None:
            return self.related[topic_id].snapshot() if topic_id in self.related else None

        return await corrections.correct_shown(
            asked,
            own=self.topic.snapshot(),
            resolve=self.shown.get,
            snapshot_of=snapshot_of,
            encoder=self.encoder,
            append=self.append,
            asked_by=bytes(16),
        )

    async def undo(self, canonical_id: int) -> corrections.Applied:
        return await corrections.undo(
            self.topic.snapshot(),
            canonical_id,
            "undone",
            encoder=self.encoder,
            append=self.append,
            asked_by=bytes(16),
        )

    def present(self, entry: Entry) -> Entry:
        found = self.topic.snapshot().find(entry.uuid)
        assert found is not None
        return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path, dimension=DIMENSION, fingerprint=MODEL, segment_entries_max=100)
    yield store
    store.close()


@pytest.fixture
def log(store: Store) -> Log:
    return Log(store.topic("work"), Encoder())


async def test_only_what_was_shown_can_be_corrected_and_all_is_one_group(log: Log) -> None:
    shown, hidden = log.tell("the lamp is green"), log.tell("the door is red")
    applied = await log.correct(
        Correction((log.show(shown), hidden.public_id), "Update", "painted", "the lamp is blue"),
        Correction((hidden.uuid.hex(),), "Helpful", "true"),
    )
    assert applied.failed == (hidden.public_id, hidden.uuid.hex())
    gone, made = applied.entries
    assert (gone.uuid, gone.status, made.content) == (shown.uuid, Status.DEPRECATED, "the lamp is blue")
    assert made.supersedes == (shown.uuid,) and log.groups == [2]
    assert log.present(hidden).utility_steps == 0


@pytest.mark.parametrize("broken", ["encoder", "disk"])
async def test_a_failure_leaves_the_log_as_it_was(log: Log, broken: str) -> None:
    first, second = log.tell("the lamp is green"), log.tell("the door is red")
    log.encoder.broken, log.is_full = broken == "encoder", broken == "disk"
    asked = [
        Correction((log.show(first),), "Helpful", "x"),
        Correction((log.show(second),), "Update", "x", "the door is blue"),
    ]
    with pytest.raises(EmbeddingError if broken == "encoder" else StoreError):
        await log.correct(*asked)
    assert log.groups == [] and log.present(first) == first and log.present(second) == second


async def test_a_chunk_of_a_related_topic_is_adopted_and_its_home_stays_as_it_is(store: Store, log: Log) -> None:
    home = Log(store.topic("home"), log.encoder)
    entry = home.tell("the lamp is green")
    home.show(entry)
    log.shown = home.shown
    helpful = Correction((entry.public_id,), "Helpful", "x")
    assert (await log.correct(helpful)).failed == (entry.public_id,), "its topic is gone"
    log.related["home"] = home.topic
    await log.correct(helpful)
    await log.correct(helpful)
    adopted = log.present(entry)
    assert (adopted.utility_steps, adopted.origin_id, home.present(entry)) == (2, entry.origin_id, entry)


async def test_the_undo_of_several_steps_by_which_a_chunk_was_adopted_takes_all_of_them_back(
    store: Store, log: Log
) -> None:
    home = Log(store.topic("home"), log.encoder)
    entry = home.tell("the lamp is green")
    home.show(entry)
    log.shown, log.related["home"] = home.shown, home.topic
    [pinned] = (await log.correct(Correction((entry.public_id,), "Helpful", "x", steps=7))).entries
    assert log.present(entry).utility_steps == 7
    await log.undo(pinned.canonical_id)
    assert log.present(entry).utility_steps == 0


async def test_what_another_model_embedded_is_embedded_anew_when_it_is_corrected(log: Log) -> None:
    entry = log.tell("the lamp is green")
    log.encoder.fingerprint = "a later model"
    await log.correct(Correction((log.show(entry),), "Helpful", "x"))
    assert log.encoder.texts == ["the lamp is green"]


async def test_undo_gives_back_what_an_update_took_and_takes_out_what_it_added(log: Log) -> None:
    entry = log.tell("the lamp is green")
    applied = await log.correct(Correction((log.show(entry),), "Update", "painted", "the lamp is blue"))
    gone, made = applied.entries
    undone = await log.undo(gone.canonical_id)
    assert [one.action for one in undone.entries] == ["Undo", "Undo"]
    assert log.present(made).status is Status.DEPRECATED
    back = log.present(entry)
    assert (back.status, back.content, back.vector) == (Status.ACTIVE, entry.content, entry.vector)
    with pytest.raises(BadQuestion, match=r"undone already, by entry .*; undo that one"):
        await log.undo(gone.canonical_id)
    with pytest.raises(NotFound, match="has no entry 5"):
        await log.undo(5)


async def test_an_update_takes_out_what_says_exactly_the_same_too_and_its_undo_gives_all_back(log: Log) -> None:
    first, other = log.tell("the lamp is green"), log.tell("the lamp is GREEN")
    again = log.tell("the lamp is green", uuid=b"said once more..")
    await log.correct(Correction((log.show(again),), "Helpful", "true"))
    assert log.present(first).utility_steps == 0, "praise is for the one that was shown"
    update = Correction((log.show(again),), "Update", "painted", "the lamp is blue")
    applied = await log.correct(update, Correction((log.show(first),), "Unhelpful", "x"))
    assert applied.failed == (first.public_id,) and set(applied.entries[-1].supersedes) == {again.uuid, first.uuid}
    assert live(log) == {other.content, "the lamp is blue"}
    await log.undo(applied.entries[0].canonical_id)
    assert live(log) == {other.content, "the lamp is green"}
    assert [log.present(one).status for one in (first, again)] == [Status.ACTIVE] * 2


# -- chains of Updates ------------------------------------------------------------------------------------------------


def live(log: Log) -> set[str]:
    snapshot = log.topic.snapshot()
    places = [place for place in snapshot.latest_places() if snapshot.is_live(place)]
    return {snapshot.read(place).content for place in places}


async def update(log: Log, entry: Entry, content: str) -> tuple[Entry, Entry]:
    """The entries that take the chunk out and that put another one in its place."""
    gone, made = (await log.correct(Correction((log.show(entry),), "Update", "painted", content))).entries
    return gone, made


async def test_of_two_updates_the_older_one_is_undone_after_the_newer_one(log: Log) -> None:
    green = log.tell("the lamp is green")
    gone, blue = await update(log, green, "the lamp is blue")
    newer, red = await update(log, blue, "the lamp is red")
    with pytest.raises(BadQuestion, match=f"entry {newer.canonical_id} .*; undo that one first"):
        await log.undo(gone.canonical_id)
    assert live(log) == {"the lamp is red"}
    await log.undo(red.canonical_id)
    assert live(log) == {"the lamp is blue"}
    await log.undo(gone.canonical_id)
    assert live(log) == {"the lamp is green"}


@pytest.mark.parametrize("which", [0, 1, 2], ids=["what was made", "the first", "the second"])
async def test_the_undoing_of_an_update_can_be_undone_by_each_of_its_entries(log: Log, which: int) -> None:
    old = [log.tell("the lamp is green"), log.tell("the shade is green")]
    asked = Correction(tuple(log.show(entry) for entry in old), "Update", "painted", "lamp and shade are blue")
    gone = (await log.correct(asked)).entries[0]
    for _ in range(2):
        undone = (await log.undo(gone.canonical_id)).entries
        assert live(log) == {"the lamp is green", "the shade is green"}
        again = (await log.undo(undone[which].canonical_id)).entries
        assert live(log) == {"lamp and shade are blue"}
        gone = again[which]


async def test_an_undo_of_an_update_stays_where_a_chunk_was_corrected_since(log: Log) -> None:
    green = log.tell("the lamp is green")
    gone, blue = await update(log, green, "the lamp is blue")
    out, _ = (await log.undo(gone.canonical_id)).entries
    assert out.uuid == blue.uuid
    newer, _ = await update(log, log.present(green), "the lamp is red")
    with pytest.raises(BadQuestion, match=f"entry {newer.canonical_id} "):
        await log.undo(out.canonical_id)
    assert live(log) == {"the lamp is red"}


async def test_in_a_chain_every_entry_is_undone_in_turn_and_one_state_is_live_at_a_time(log: Log) -> None:
    colours = ["green", "blue", "red", "white"]
    present, gone = log.tell("the lamp is green"), []
    for colour in colours[1:]:
        out, present = await update(log, present, f"the lamp is {colour}")
        gone.append(out)
    undone = []
    for entry, colour in zip(reversed(gone), reversed(colours[:-1]), strict=True):
        undone.append((await log.undo(entry.canonical_id)).entries[0])
        assert live(log) == {f"the lamp is {colour}"}
    for entry, colour in zip(reversed(undone), colours[1:], strict=True):
        await log.undo(entry.canonical_id)
        assert live(log) == {f"the lamp is {colour}"}


async def test_two_corrections_at_once_are_both_applied(log: Log) -> None:
    first, second = log.tell("the lamp is green"), log.tell("the door is red")
    asked = [Correction((log.show(one),), "Helpful", "x") for one in (first, second)]
    await asyncio.gather(*(log.correct(one) for one in asked))
    assert [log.present(one).utility_steps for one in (first, second)] == [1, 1]
