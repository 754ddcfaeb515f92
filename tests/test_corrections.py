"""What corrections append to the log, and which ids they cannot reach."""

import json
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from archiver_stage import HashEmbedder
from conftest import Serving
from crash_files import CrashFiles
from daemon_process import DaemonProcess, ask, user, wait_until
from drafts import DIMENSION, draft, open_store, unit_vector, uuid_of
from effort import SECONDS_MAX
from recording_upstream import RecordingUpstream, Request, Response, chat_answer, recording_upstream

from memd.admin import parts
from memd.entries import HELPFUL_STEPS_MAX, UNHELPFUL_STEPS_MAX, Action, Correction, Draft, Entry, Status, digits_of_id
from memd.errors import BadQuestion, EmbeddingError, NotFound, StoreError
from memd.messages import BlockChunk
from memd.recall import corrections
from memd.store.log.segment import NOTHING_UNSTORED
from memd.store.store import ModelId, Snapshot, Store, StoreShared, TopicLog

FACT = "The spare key hangs behind the blue bicycle."
MOVED = "The spare key hangs in the shed."


@pytest.mark.parametrize(
    ("correction", "held_up", "after_the_kill", "at_last"),
    [
        ({"action": "Update", "content": MOVED}, MOVED, (FACT, 1.0), (MOVED, 1.0)),
        ({"action": "Helpful"}, "that will do", (FACT, 1.5), (FACT, 1.5)),
    ],
    ids=["while its text is embedded", "while the model answers"],
)
def test_a_correction_that_is_sent_again_after_a_kill_is_applied_once(
    serving: Serving,
    upstream: RecordingUpstream,
    correction: dict[str, str],
    held_up: str,
    after_the_kill: tuple[str, float],
    at_last: tuple[str, float],
) -> None:
    gate, embedder = threading.Event(), HashEmbedder()

    def held(request: Request, answer: Response) -> Response:
        return answer._replace(gate=gate) if held_up.encode() in request.body else answer

    def embedded(request: Request) -> Response:
        vectors = embedder.embed_many(json.loads(request.body)["input"]).tolist()
        data = [{"index": number, "embedding": vector} for number, vector in enumerate(vectors)]
        return held(request, Response((json.dumps({"data": data}).encode(),)))

    def known() -> list[tuple[str, float]]:
        live = (one for one in daemon.export() if one["live"])
        found = ((one["content"].split("\n")[0], one["utility_multiplier"]) for one in live)
        return [one for one in found if "spare key hangs" in one[0]]

    upstream.answer = lambda request: held(request, chat_answer(request))
    with recording_upstream() as server:
        server.answers_all, server.answer = True, embedded
        embedding = {"model": "http", "url": f"{server.url}/v1", "name": "hash"}
        daemon = serving({"buffer": {"store_after_seconds": 0}, "embedding": embedding})
        daemon.tell(FACT)
        history = [user("Where does the spare key hang?")]
        answer = daemon.chat(history, memory_in={})
        [shown] = [chunk["id"] for chunk in answer.json["memory_out"]["injected_chunks"]]
        history += [{"role": "assistant", "content": answer.reply}, user("Thanks, that will do.")]
        asked = {"corrections": [{"chunk_ids": [shown], "reason": "checked", **correction}]}
        journal = daemon.data_dir / "default" / "hot.log"
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(daemon.chat, history, memory_in=asked)
            seen = (upstream.requests, server.requests)
            wait_until(lambda: any(held_up.encode() in one.body for each in seen for one in each), lambda: repr(daemon))
            wait_until(lambda: b"that will do" in journal.read_bytes(), lambda: "not in the journal")
            daemon.kill()
            gate.set()
            assert isinstance(sending.exception(), OSError)
        daemon.start()
        assert known() == [after_the_kill]
        assert daemon.chat(history, memory_in=asked).json["memory_out"].get("signals", []) == []
        assert known() == [at_last]
        daemon.kill()


# Applying corrections to a real log, without a daemon: which chunks can be reached, how it is appended, and undo


MODEL = "the present model"


class Encoder:
    """Embeds every text as a vector of its own, and remembers in which threads."""

    def __init__(self, fingerprint: str = MODEL) -> None:
        self.fingerprint = fingerprint
        self.texts: list[str] = []
        self.threads: set[int] = set()
        self.broken = False

    def embed_text(self, text: str) -> bytes:
        if self.broken:
            raise EmbeddingError("it was asked")
        self.texts.append(text)
        self.threads.add(threading.get_ident())
        return unit_vector(text, DIMENSION).astype("<f4").tobytes()


MARCH = 1_773_000_000_000_000
"""On 8 March 2026, in microseconds since the epoch."""


class Log:
    """One topic, what was shown of it recently, and how many groups were appended."""

    def __init__(self, topic: TopicLog, encoder: Any) -> None:
        self.topic = topic
        self.encoder = encoder
        self.shown: dict[str, BlockChunk] = {}
        self.related: dict[str, TopicLog] = {}
        self.groups: list[int] = []
        self.is_full = False

    def tell(self, text: str, uuid: bytes = b"", **members: Any) -> Entry:
        vector = unit_vector(text, DIMENSION).astype("<f4").tobytes()
        uuid = uuid or text.encode().ljust(16)[:16]
        draft = Draft(uuid=uuid, content=text, vector=vector, created_at=1, roles=("user",), **members)
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
        )

    async def undo(self, canonical_id: int) -> corrections.Applied:
        return await corrections.undo(
            self.topic.snapshot(), canonical_id, "undone", encoder=self.encoder, append=self.append
        )

    def present(self, entry: Entry) -> Entry:
        found = self.topic.snapshot().find(entry.uuid)
        assert found is not None
        return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path, StoreShared(model=ModelId(DIMENSION, MODEL), segment_entries_max=100))
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
        Correction(("dddd",), "Update", "x", "of nothing nothing is made"),
    )
    assert applied.failed == (hidden.public_id, hidden.uuid.hex(), "dddd")
    gone, made = applied.entries
    assert (gone.uuid, gone.status, made.content) == (shown.uuid, Status.DEPRECATED, "the lamp is blue")
    assert made.supersedes == (shown.uuid,) and log.groups == [2]
    assert log.present(hidden).utility_steps == 0


@pytest.mark.parametrize(("action", "steps"), [("Helpful", HELPFUL_STEPS_MAX), ("Unhelpful", -UNHELPFUL_STEPS_MAX)])
async def test_beyond_the_bound_a_correction_is_recorded_alone(log: Log, action: Action, steps: int) -> None:
    told = log.tell("the lamp is green", digests=(b"d" * 16,), kind="document", source="x.md")
    chunk_id = log.show(told)
    await log.correct(*[Correction((chunk_id,), action, "x")] * abs(steps))
    [further] = (await log.correct(Correction((chunk_id,), action, "once more"))).entries
    assert (further.utility_steps, further.action, further.reason) == (steps, action, "once more")
    for name in set(Draft.__struct_fields__) - {"utility_steps", "action", "action_steps", "reason", "asked_by"}:
        assert getattr(further, name) == getattr(told, name), name
    await log.correct(Correction((chunk_id,), "Unhelpful" if action == "Helpful" else "Helpful", "x"))
    assert abs(log.present(told).utility_steps) == abs(steps) - 1


@pytest.mark.parametrize("requests", [1, 6])
async def test_each_correction_sees_the_effect_of_those_before_it(log: Log, requests: int) -> None:
    lamp, door, step = (log.tell(text) for text in ("the lamp is green", "the door is red", "the step is wet"))
    lamp_id, door_id, step_id = map(log.show, (lamp, door, step))
    asked = [
        Correction((lamp_id, lamp_id), "Helpful", "x"),
        Correction((lamp_id,), "Update", "x", "  two\nlines "),
        Correction((lamp_id, door_id), "Unhelpful", "it is gone"),
        Correction((door_id,), "Helpful", "x"),
        Correction((door_id,), "Helpful", "x"),
        Correction((step_id,), "Update", "dry", " \n"),
    ]
    applied = [await log.correct(*asked[at::requests]) for at in range(requests)]
    assert [one for each in applied for one in each.failed] == [lamp_id]
    made = [(one.content, one.status, one.utility_steps) for each in applied for one in each.entries]
    assert made == [
        ("the lamp is green", Status.ACTIVE, 1),
        ("", Status.DEPRECATED, 1),
        ("  two\nlines ", Status.ACTIVE, 1),
        ("the door is red", Status.ACTIVE, -1),
        ("the door is red", Status.ACTIVE, 0),
        ("the door is red", Status.ACTIVE, 1),
        ("", Status.DEPRECATED, 0),
    ]


async def test_an_update_keeps_the_kind_and_the_source_of_what_it_replaces_where_they_agree(log: Log) -> None:
    pages = [log.tell(name, kind="document", source=f"{name}.md") for name in "abcd"]
    for replaced, kept in (
        (pages[:1], ("document", "a.md")),
        (pages[1:3], ("document", None)),
        ([pages[3], log.tell("said")], ("turn", None)),
    ):
        asked = Correction(tuple(log.show(one) for one in replaced), "Update", "x", f"new {kept}")
        [*_, made] = (await log.correct(asked)).entries
        assert (made.kind, made.source) == kept


async def test_an_update_keeps_a_pin_and_the_date_that_a_note_was_given_but_no_blame(log: Log) -> None:
    run = log.tell("ran 5 km", kind="note", said_at=MARCH, dated=True)
    said, blamed = log.tell("the office is in Oslo", said_at=MARCH), log.tell("the gate is shut")
    noted = log.tell("the key is with Bo", kind="note", said_at=MARCH)  # stored on another day than it was taken
    await log.correct(Correction((log.show(run),), "Helpful", "pin", steps=10))
    await log.correct(Correction((log.show(blamed),), "Unhelpful", "wrong", steps=3))
    kept = []
    for one in (run, said, blamed, noted):
        [*_, made] = (
            await log.correct(Correction((log.show(one),), "Update", "x", f"no longer {one.content}"))
        ).entries
        kept.append((made.utility_steps, made.said == MARCH))
        assert made.said == MARCH or made.said > time.time_ns() // 1000 - 60_000_000
    assert kept == [(10, True), (0, False), (0, False), (0, False)]


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


async def test_the_undo_of_the_steps_by_which_a_chunk_was_adopted_takes_all_back(store: Store, log: Log) -> None:
    home = Log(store.topic("home"), log.encoder)
    entry = home.tell("the lamp is green")
    home.show(entry)
    log.shown, log.related["home"] = home.shown, home.topic
    [pinned] = (await log.correct(Correction((entry.public_id,), "Helpful", "x", steps=7))).entries
    assert log.present(entry).utility_steps == 7
    await log.undo(pinned.canonical_id)
    assert log.present(entry).utility_steps == 0


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


@pytest.mark.parametrize("corrected", [0, 1])
def test_an_update_takes_out_the_question_with_each_of_its_answers_and_its_undo_gives_all_back(
    serving: Serving, upstream: RecordingUpstream, corrected: int
) -> None:
    daemon = serving({"segment": {"max_entries": 4}})
    said = [user("The boat of Theodora lies at berth 17, where the stairs are broken.")]
    for answer in ("Noted as number 0.", "Noted as number 1."):
        upstream.answer = partial(chat_answer, text=answer)
        daemon.chat(said)
        daemon.wait_stored(answer)
    daemon.chat([user("The ferry leaves at nine.")])
    search = f"{daemon.own_url}/memd/search?topic=default&q=Where+lies+the+boat+of+Theodora"

    def found() -> list[dict[str, Any]]:
        return [one for one in ask(search).json["chunks"] if "berth 17" in one["content"]]

    [named] = [one for one in found() if f"number {corrected}" in one["content"]]
    update = {"action": "Update", "content": "The boat of Theodora lies at berth 18.", "reason": "moved"}
    body = {"topic_id": "default", "chunk_ids": [named["id"]], **update}
    assert ask(f"{daemon.own_url}/memd/corrections", body).status == 200
    assert found() == []
    daemon.wait_stored("The ferry leaves at nine.")
    assert found() == []
    assert daemon.run("undo", named["id"]).returncode == 0
    assert len(found()) == 2


def test_an_update_leaves_other_answers_to_the_same_question(serving: Serving, upstream: RecordingUpstream) -> None:
    """ "Run the tests" is said every day; what is wrong in one answer is not wrong in the others."""
    daemon = serving()
    asked, answers = "What does the harbour office say about the ferry?", [f"It leaves pier {n}." for n in (3, 5, 8)]
    for number, text in enumerate(answers):
        upstream.answer = partial(chat_answer, text=text)
        daemon.chat([user(asked)], headers={"X-Memory-Session": f"day {number}"})
        daemon.wait_stored(text)
    search = f"{daemon.own_url}/memd/search?topic=default&q=What+does+the+harbour+office+say+about+the+ferry"

    def found() -> dict[str, str]:
        chunks = ask(search).json["chunks"]
        return {text: one["id"] for one in chunks for text in answers if text in one["content"]}

    assert found().keys() == set(answers)
    assert daemon.run("correct", found()[answers[1]], "--update", "It leaves pier 6.").returncode == 0
    assert found().keys() == {answers[0], answers[2]}


# -- chains of Updates ------------------------------------------------------------------------------------------------


def live(log: Log) -> set[str]:
    snapshot = log.topic.snapshot()
    places = [place for place in snapshot.latest_places() if snapshot.is_live(place)]
    return {snapshot.read(place).content for place in places}


async def update(log: Log, entry: Entry, content: str) -> tuple[Entry, Entry]:
    """The entries that take the chunk out and that put another one in its place."""
    gone, made = (await log.correct(Correction((log.show(entry),), "Update", "painted", content))).entries
    return gone, made


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


async def test_a_mark_on_what_took_its_place_does_not_hold_up_the_undo_of_an_update_and_comes_back_with_it(
    log: Log,
) -> None:
    gone, blue = await update(log, log.tell("the lamp is green"), "the lamp is blue")
    await log.correct(Correction((log.show(log.present(blue)),), "Helpful", "right"))
    back = (await log.undo(gone.canonical_id)).entries[-1]
    assert live(log) == {"the lamp is green"}
    await log.undo(back.canonical_id)
    assert live(log) == {"the lamp is blue"} and log.present(blue).utility_steps == 1


async def test_in_a_chain_every_entry_is_undone_in_turn_and_one_state_is_live_at_a_time(log: Log) -> None:
    colours = ["green", "blue", "red", "white"]
    present, gone = log.tell("the lamp is green"), []
    for colour in colours[1:]:
        out, present = await update(log, present, f"the lamp is {colour}")
        gone.append(out)
    with pytest.raises(BadQuestion, match=f"entry {gone[1].canonical_id} .*; undo that one first"):
        await log.undo(gone[0].canonical_id)
    with pytest.raises(NotFound, match="has no entry 5"):
        await log.undo(5)
    undone = []
    for one, colour in zip(reversed(gone), reversed(colours[:-1]), strict=True):
        undone.append((await log.undo(one.canonical_id)).entries[0])
        with pytest.raises(BadQuestion, match=r"undone already, by entry .*; undo that one"):
            await log.undo(one.canonical_id)
        assert live(log) == {f"the lamp is {colour}"}
    for one, colour in zip(reversed(undone), colours[1:], strict=True):
        await log.undo(one.canonical_id)
        assert live(log) == {f"the lamp is {colour}"}


# Ids of chunks: how people and models write them, and what they name


MEANT = "The spare key of the boathouse hangs behind the barometer."
UUIDS = [bytes.fromhex(digits.ljust(32, "0")) for digits in ("a3f91", "a3f92", "beef")]


@pytest.fixture(params=[False, True], ids=["growing", "sealed"])
def three_chunks(request: pytest.FixtureRequest) -> TopicLog:
    topic = open_store(CrashFiles(), segment_entries_max=len(UUIDS) if request.param else 1000).topic("talk")
    for number, one in enumerate(UUIDS):
        topic.append([msgspec.structs.replace(draft(number), uuid=one)])
    return topic


@pytest.mark.parametrize(
    ("written", "digits"),
    [
        ("a3f9", "a3f9"),
        (" mem:A3F9 ", "a3f9"),
        ("[mem:a3f9]", "a3f9"),
        (str(uuid.UUID(bytes=UUIDS[0])), UUIDS[0].hex()),
        *((one, None) for one in ("", "a", "a3f", "mem:", "zzzz", "[mem:a3f9] and", UUIDS[0].hex() + "0", "../a3f9")),
    ],
)
def test_an_id_has_four_digits_at_least_and_is_read_however_it_is_written(written: str, digits: str | None) -> None:
    assert digits_of_id(written) == digits


def test_digits_name_the_chunk_whose_public_id_they_are_or_those_that_begin_so(three_chunks: TopicLog) -> None:
    shown, longer, other = UUIDS
    topics = [(three_chunks, NOTHING_UNSTORED)]
    for digits, uuid_ in (("a3f9", shown), ("a3f92", longer), ("a3f910", shown), (other.hex(), other)):
        found = parts.named(topics, f"mem:{digits}")
        assert (found.snapshot.topic_id, found.uuid, found.waiting) == (three_chunks.topic_id, uuid_, None)
    with pytest.raises(NotFound):
        parts.named(topics, "a3fa")


@pytest.fixture
def waiting(serving: Serving) -> DaemonProcess:
    """A daemon with a chunk that waits in topic `home`, and in topic `work` a stored one with the same five digits."""
    never = {"buffer": {"store_after_seconds": 3600, "idle_seconds": 3600}}
    daemon = serving(never)
    for topic, text in (("work", "The keeper of the archive is Ada."), ("home", MEANT)):
        daemon.chat([{"role": "user", "content": text}], memory_in={"topic_id": topic})
    assert commanded(daemon, "correct", found(daemon, "Ada", "work")["id"], "--helpful", "--topic", "work")
    line = next(one for one in daemon.export(settled=False) if "Ada" in one["content"])
    digits = found(daemon, MEANT, "home")["uuid"]
    uuid_ = digits[:5] + f"{int(digits[5], 16) ^ 1:x}" + digits[6:]
    line |= {"uuid": uuid_, "id": uuid_[:4], "content": line["content"].replace("Ada", "Grace")}
    done = ask(f"{daemon.own_url}/memd/import/entries", {"topic_id": "work", "lines": [{"line": line}]})
    assert done.json["appended"] == 1, done.body
    return daemon


def found(daemon: DaemonProcess, question: str, topic: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(commanded(daemon, "search", question, "--topic", topic, "--json"))["chunks"][0]
    return told


def commanded(daemon: DaemonProcess, *arguments: str, code: int = 0) -> str:
    done = daemon.run(*arguments, "--config", str(daemon.config))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_digits_of_a_waiting_chunk_and_a_stored_one_of_another_topic_are_refused(waiting: DaemonProcess) -> None:
    meant = found(waiting, MEANT, "home")
    before = waiting.export(settled=False)
    for command in (
        ("correct", meant["uuid"][:4], "--deprecate"),
        ("show", meant["uuid"][:4]),
        ("related", meant["uuid"][:4]),
        ("erase", "--yes", "--chunk", meant["uuid"][:4]),
    ):
        refused = commanded(waiting, *command, code=2)
        assert "means 2 chunks" in refused and "(home)" in refused and "(work)" in refused
    assert waiting.export(settled=False) == before, "nothing was changed or stored"
    assert "is not in the log yet" in commanded(waiting, "show", meant["id"], "--topic", "home")
    assert "is not in the log yet" in commanded(waiting, "related", meant["uuid"][:12], code=2)
    done = commanded(waiting, "correct", meant["uuid"][:12], "--deprecate")
    assert re.fullmatch(
        rf"{meant['id']} is no longer shown in topic home; memd undo {meant['id']} takes it back\n  user: {MEANT} .*\n",
        done,
    )
    assert [one for one in waiting.export(settled=False) if one["topic_id"] == "work"] == before
    assert "is taken out" in commanded(waiting, "show", meant["uuid"])


def test_a_chunk_that_waits_is_erased_by_digits_that_name_it_alone(waiting: DaemonProcess) -> None:
    meant = found(waiting, MEANT, "home")
    commanded(waiting, "erase", "--yes", "--chunk", meant["uuid"][:12])
    assert "was erased" in commanded(waiting, "show", meant["uuid"])
    assert sum(one["content"] != "" for one in waiting.export(settled=False)) == 3


def test_in_one_topic_digits_of_a_waiting_chunk_and_a_stored_one_change_neither(waiting: DaemonProcess) -> None:
    digits = found(waiting, MEANT, "home")["uuid"]
    line = next(one for one in waiting.export(settled=False) if "Grace" in one["content"])
    body = {"topic_id": "home", "lines": [{"line": line}]}
    assert ask(f"{waiting.own_url}/memd/import/entries", body).json["appended"] == 1
    before = waiting.export(settled=False)
    body = {"topic_id": "home", "chunk_ids": [digits[:5]], "action": "Update"}
    refused = ask(f"{waiting.own_url}/memd/corrections", body)
    assert refused.status == 400 and "means 2 chunks" in refused.body.decode()
    assert waiting.export(settled=False) == before
    assert ask(f"{waiting.own_url}/memd/corrections", body | {"chunk_ids": [digits[:6]]}).json["failed"] == []


@pytest.mark.thorough
def test_ids_of_ten_thousand_chunks_that_wait_take_no_more_time_each_than_those_of_a_few() -> None:
    topic = open_store(CrashFiles()).topic("talk")
    one = draft(0)
    drafts = [msgspec.structs.replace(one, uuid=uuid_of(number)) for number in range(12_000)]
    started = time.thread_time()
    ids = [entry.public_id for each in drafts for entry in topic.reserve([each])]
    assert time.thread_time() - started < SECONDS_MAX
    assert [entry.public_id for entry in topic.append(drafts[:100])] == ids[:100]
    assert [entry.public_id for entry in topic.reserve(drafts)] == ids and len(set(ids)) == len(ids)
