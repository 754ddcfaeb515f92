"""What is said again is stored again where something else was said in its place meanwhile, and nothing else is."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from archiver_stage import COUNTER, DATA_DIR, DIMENSION, HashEmbedder, Stage, live_entries
from crash_files import CrashFiles
from daemon_process import DaemonProcess, ask, user
from histories import history_of, said
from numpy.typing import NDArray
from recording_upstream import RecordingUpstream, chat_answer

from memd.conversation.conversation import Conversation
from memd.conversation.events import Closed
from memd.embedding.loading import load_embedder
from memd.entries import Entry
from memd.ingest.chunking import Utterance
from memd.ingest.pipeline import Cutter, Drafter, words_of
from memd.ingest.topics import Topic
from memd.settings.model import ChunkingSettings, Config, EmbeddingSettings
from memd.store.store import ModelId, Store, StoreShared, TopicLog

MONDAY = "u:The server is started anew on Monday.", "a:Noted."
HELLO = "u:Good morning, it rains.", "a:It does."
TUESDAY = "u:No, the server is started on Tuesday.", "a:Noted."
ROUNDS = tuple(("c:read#1", f"t:The port of the server is {port}.#1") for port in (8081, 8082, 8081))


@pytest.fixture(autouse=True)
def one_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that finds all texts alike that speak of a server: words alone tell them apart."""
    embed_hash = HashEmbedder.embed_many

    def embed_many(self: HashEmbedder, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = embed_hash(self, texts)
        vectors[["server" in text for text in texts]] = DIMENSION**-0.5
        return vectors

    monkeypatch.setattr(HashEmbedder, "embed_many", embed_many)


def shown(topic: Topic) -> list[str]:
    return [entry.content.partition("\n")[0] for entry in live_entries(topic)]


clock = itertools.count(1_700_000_000_000_000, 1_000_000)


def hear(topic: Topic, *turns: Sequence[str], session: str | None = None) -> Conversation:
    """A client sends this now."""
    history = history_of((said(one) for turn in turns for one in turn), session=session)
    return topic.buffer.receive(history, 0.0, next(clock)).conversation


async def store(stage: Stage, topic: Topic, *turns: Sequence[str], session: str | None = None) -> Conversation:
    """And it is stored."""
    sent = hear(topic, *turns, session=session)
    assert await stage.archiver.store(topic, sent, len(sent))
    return sent


def told(*turns: Sequence[str]) -> list[str]:
    """What is shown of these turns."""
    return [turn[0].partition(":")[2] for turn in turns]


async def test_what_was_taken_back_and_holds_again_is_the_newest(stage: Stage, topic: Topic) -> None:
    turns = [MONDAY, TUESDAY, MONDAY, MONDAY]
    for end in (1, 2, 3):
        await store(stage, topic, *turns[:end])
    assert shown(topic) == told(MONDAY, TUESDAY, MONDAY)
    assert len(stage.embedder.texts) == 2, "its vector is known"
    await store(stage, topic, *turns)
    assert shown(topic) == told(MONDAY, TUESDAY, MONDAY), "nothing else was said meanwhile"


async def test_what_is_too_short_to_tell_anything_is_stored_once(stage: Stage, topic: Topic) -> None:
    turns = [("u:server?", "a:y"), ("u:server!", "a:n"), ("u:server?", "a:y")]
    for end in (1, 2, 3):
        await store(stage, topic, *turns[:end])
    assert shown(topic) == told(*turns[:2])


async def test_it_is_so_whatever_is_stored_together_and_for_results_of_calls(stage: Stage, topic: Topic) -> None:
    await store(stage, topic, MONDAY)
    rest = hear(topic, MONDAY, TUESDAY, MONDAY)
    topic.cutter.cut(topic.listed_parts.of(rest))  # while what came in its place is not in the log
    assert await stage.archiver.store(topic, rest, len(rest))
    assert shown(topic) == told(MONDAY, TUESDAY, MONDAY)

    other = await stage.topics.get("other")
    await store(stage, other, ("u:Which port has the server?",), *ROUNDS, ("a:It is 8081.",))
    ports = [entry.content.count("8081") - entry.content.count("8082") for entry in live_entries(other)]
    assert ports == [0, 1, -1, 1, 1], "the question, each result, the answer"


async def test_a_history_that_is_sent_again_is_stored_once(stage: Stage, topic: Topic) -> None:
    await store(stage, topic, MONDAY, session="first")
    for turns in ((HELLO,), (HELLO, MONDAY), (HELLO, MONDAY, TUESDAY)):
        sent = await store(stage, topic, *turns, session="second")
    topic.buffer.record(Closed(sent.id))
    assert shown(topic) == told(MONDAY, HELLO, TUESDAY)
    again = Stage(stage.config, stage.files.after_power_cut("lost"))
    for place in (stage, again):
        known = await place.topics.get("talk")
        await store(place, known, HELLO, MONDAY, TUESDAY, HELLO, session="second")
        assert shown(known) == told(MONDAY, HELLO, TUESDAY)
    await again.close()


async def test_a_history_that_comes_with_a_question_is_not_said_anew(stage: Stage, topic: Topic) -> None:
    for day in range(4):
        history = [MONDAY, TUESDAY] if day % 2 == 0 else [TUESDAY, MONDAY]
        beginning, question = (f"u:It is day {day} of the month.", "a:Yes."), (f"u:What is to do on day {day}?",)
        await store(stage, topic, beginning, *history, question, session=f"run {day}")
    servers = [text for text in shown(topic) if "server" in text]
    assert servers == told(MONDAY, TUESDAY)
    await store(stage, topic, ("u:It is day 9 of the month.", "a:Yes."), MONDAY, session="another run")
    assert [text for text in shown(topic) if "server" in text] == told(MONDAY, TUESDAY, MONDAY), "it is the last turn"


async def test_a_long_history_that_nobody_knew_is_new_in_all_its_length_and_once(stage: Stage, topic: Topic) -> None:
    book = f"u:{'The letter was long. ' * 500}", "a:Noted."
    for day in range(3):
        beginning = f"u:It is day {day} of the month.", "a:Yes."
        await store(stage, topic, beginning, MONDAY, TUESDAY, book, MONDAY, ("u:And now?",), session=f"run {day}")
        assert [text for text in shown(topic) if "server" in text] == told(MONDAY, TUESDAY, MONDAY)


def test_an_answer_made_anew_brings_no_corrected_question(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    asked = [user("The gate code of the boatyard is 7714, is that easy to remember?")]
    served.chat(asked)
    served.wait_stored("7714")
    [chunk] = [one["id"] for one in served.export() if "7714" in one["content"]]
    assert served.run("correct", chunk, "--update", "The gate code of the boatyard is 2250.").returncode == 0
    upstream.answer = lambda request: chat_answer(request, "It is as easy as any other number of four digits.")
    served.chat(asked, memory_in={})
    served.wait_stored("as easy as any other")
    upstream.answer = chat_answer
    served.chat([user("What is the gate code of the boatyard?")])
    assert "2250" in upstream.prompts[-1] and "7714" not in upstream.prompts[-1]


WAYS = {
    "with the id and the speaker": "[mem:{id}] user: The gate code of the boatyard is 7714.",
    "in its own words": "The gate code of the boatyard is 7714.",
    "with a mark of its own": "According to your notes (mem:{id}), the gate code of the boatyard is **7714**.",
}
"""Three models' ways of answering out of what they were shown."""


@pytest.mark.parametrize("way", WAYS)
def test_a_corrected_value_stands_behind(served: DaemonProcess, upstream: RecordingUpstream, way: str) -> None:
    served.chat([user("The gate code of the boatyard is 7714.")])
    served.wait_stored("7714")
    [chunk] = [one["id"] for one in served.export() if "7714" in one["content"]]
    upstream.answer = lambda request: chat_answer(request, WAYS[way].format(id=chunk))
    assert served.chat([user("What is the gate code of the boatyard?")]).headers["X-Memory-Injected"] == chunk
    served.wait_stored("What is the gate code")
    upstream.answer = chat_answer
    correction = {
        "chunk_ids": [chunk],
        "action": "Update",
        "reason": "",
        "content": "The gate code of the boatyard is 2250.",
    }
    served.chat([user("It was changed.")], memory_in={"corrections": [correction]})
    served.wait_stored("2250")
    served.chat([user("Tell me the gate code of the boatyard, please.")], memory_in={})
    url = f"{served.own_url}/memd/search?q=What+is+the+gate+code+of+the+boatyard%3F"
    found = ask(url).json["chunks"]
    places = {
        code: next((at for at, one in enumerate(found) if code in one["content"]), 99) for code in ("2250", "7714")
    }
    assert places["2250"] < places["7714"], found
    assert "2250" in upstream.prompts[-1]


# What says the same as something else of its batch: the same words, whatever the vectors are


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("The port is 8081.", "the  port\nis 8081", True),
        ("Deploy on Monday, please!", "deploy on monday please", True),
        ('He said "no".', 'He said "no"', True),
        ("The port is 8081.", "The port is 8082.", False),
        ("It is -5 degrees.", "It is 5 degrees.", False),
        ("The margin is 3.5", "The margin is 35", False),
        ("The deploy is on Monday.", "The deploy is on Monday?", False),
        ("The deploy is on Monday.", "The deploy is not on Monday.", False),
        ("Do it, don't wait.", "Don't do it, wait.", False),
        ("cd ../..", "cd ../.", False),
        ("rm /var/log", "rm /Var/log", False),
        ("set MAX_rows", "set max_rows", False),
        ("call getItem", "call getitem", False),
        ("a, b", "b, a", False),
    ],
)
def test_which_texts_have_the_same_words(one: str, other: str, is_same: bool) -> None:
    """White space, marks behind words and capitals that open them change none; numbers, signs and the order do."""
    assert (words_of(one) == words_of(other)) is is_same


ON_MONDAY, ON_TUESDAY = "We deploy on Monday.", "No, we deploy on Tuesday."


@pytest.fixture
def drafter() -> Drafter:
    return Drafter(
        Cutter(ChunkingSettings(), COUNTER),
        Config().dedupe.cosine,
        load_embedder(EmbeddingSettings(threads=1)).embed_many,
    )


@pytest.fixture(params=[2])
def log(request: pytest.FixtureRequest) -> Iterator[TopicLog]:
    """A topic whose segments have so many entries."""
    model = ModelId(384, "a" * 32)
    store = Store(DATA_DIR, StoreShared(model=model, segment_entries_max=request.param, files=CrashFiles()))
    yield store.topic("talk")
    store.close()


@pytest.mark.parametrize(("log", "sealed"), [(1000, False), (2, True)], indirect=["log"])
def test_what_came_since_a_copy_is_found_under_an_index_too(drafter: Drafter, log: TopicLog, sealed: bool) -> None:
    places = itertools.count()

    def said(text: str) -> list[Entry]:
        return log.append(drafter.drafts(log, [[Utterance(text, "user", bytes([next(places)]) * 16)]]))

    (first,) = said(ON_MONDAY)
    said("The cat sleeps on the warm window sill.")
    assert said(ON_MONDAY) == [], "nothing like it was said since"
    said(ON_TUESDAY)
    said("The ferry does not run in January.")
    assert len(log.snapshot().indexes) == 2 * sealed
    drafter.embed_many = no_model
    (again,) = said(ON_MONDAY)
    assert (again.content, again.vector) == (ON_MONDAY, first.vector) and again.uuid != first.uuid
    assert said(ON_MONDAY) == []


def no_model(texts: Sequence[str]) -> NDArray[np.float32]:
    raise AssertionError(f"{texts} have vectors")
