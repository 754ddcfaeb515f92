"""The topics in use, in process: opened once, journalled whatever fails, and let go only with nothing to lose."""

import asyncio
import gc
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from archiver_stage import DATA_DIR, Stage
from click.testing import CliRunner
from conftest import Serving
from daemon_in_process import daemon_in_process
from daemon_process import Answer, DaemonProcess, ask, user, wait_until
from drafts import draft, live_contents, open_journal, open_store
from histories import new_buffer, state, talk
from recording_upstream import RecordingUpstream

from memd.cli.main import main
from memd.conversation.events import decode_event
from memd.errors import BadTopicId
from memd.ingest.topics import Topic
from memd.settings.model import Config, StoreSettings

LAMP = "u:Where is the spare lamp?", "a:On the second landing."
FERRY = "u:When does the last ferry leave?", "a:At ten past nine."
JOURNAL = DATA_DIR / "talk" / "hot.log"


def is_in_trouble(topic: Topic) -> bool:
    return topic.write_trouble is not None


async def test_what_a_failed_write_has_cost_is_made_good_by_the_next_save(stage: Stage) -> None:
    topic = await stage.topics.get("talk")
    talk(topic.buffer, *LAMP)
    stage.files.bytes_left = 0
    await topic.save()
    assert is_in_trouble(topic) and not topic.is_on_disk
    stage.files.bytes_left = None
    talk(topic.buffer, *FERRY)
    await topic.save(sync=True)
    assert not is_in_trouble(topic)
    await stage.close()
    again = Stage(stage.config, stage.files)
    assert len((await again.topics.get("talk")).buffer.conversations()) == 2
    await again.close()


async def test_nothing_is_journalled_behind_a_gap(stage: Stage) -> None:
    """What is appended while a write fails is not taken for durable: replayed without that, it would be nonsense."""
    topic = await stage.topics.get("talk")
    talk(topic.buffer, *LAMP)
    stage.fail_next_write()
    first = asyncio.create_task(topic.save())
    await asyncio.sleep(0)  # its write is under way
    talk(topic.buffer, *FERRY)
    before = state(topic.buffer)
    await asyncio.gather(first, topic.save())
    _, payloads = open_journal(JOURNAL, stage.files)
    assert not is_in_trouble(topic)
    copy = new_buffer()
    copy.replay([decode_event(payload) for payload in payloads])
    assert state(copy) == before


def letting_go(**settings: int) -> Config:
    return Config(store=msgspec.structs.replace(StoreSettings(), **settings))


async def test_what_a_topic_took_is_free_when_it_is_let_go_and_not_when_the_garbage_collector_comes_by() -> None:
    stage = Stage(letting_go(topic_idle_seconds=0))
    taken = weakref.ref(await stage.topics.get("talk"))
    gc.disable()
    try:
        await stage.topics.let_idle_go()
        assert taken() is None
    finally:
        gc.enable()
    await stage.close()


async def test_a_search_over_many_topics_writes_nothing_keeps_little_and_lets_others_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"topic{number:02}" for number in range(60)]
    store = open_store(None, tmp_path / "memory", dimension=384, fingerprint="")
    for name in names:
        store.topic(name).append([draft(name, dimension=384)])
    store.close()
    async with daemon_in_process(tmp_path) as client:
        topics, waiting = client.daemon.topics, list[int]()
        before, opening_of = {path for path in (tmp_path / "memory").rglob("*") if path.is_file()}, topics._opening_of

        def counted(topic_id: str) -> asyncio.Future[Topic]:
            waiting.append(len(topics._opening))
            return opening_of(topic_id)

        monkeypatch.setattr(topics, "_opening_of", counted)
        async with client.session.get(f"{client.daemon.own_url}/memd/search?q=chunk") as answer:
            assert answer.status == 200
        assert {*names} <= {one.id for one in topics.opened()} and max(waiting) < 12
        after = {*(tmp_path / "memory").rglob("hot.log")}
        assert after <= before, "no journal is begun for a topic that is only read"
        assert all(one.log.stats().memory_bytes < 16_384 for one in topics.opened())


async def test_a_topic_with_something_unstored_is_not_let_go() -> None:
    stage = Stage(letting_go(topic_idle_seconds=0))
    topic = await stage.topics.get("talk")
    conversation = talk(topic.buffer, *LAMP)
    await stage.topics.let_idle_go()
    assert stage.topics.opened() == [topic]
    assert await stage.archiver.store(topic, conversation, len(conversation))
    await stage.tasks.finish(60)
    await stage.topics.let_idle_go()
    assert stage.topics.opened() == []
    await stage.close()


async def test_a_record_of_another_version_is_left_out_and_the_rest_is_read(stage: Stage) -> None:
    topic = await stage.topics.get("talk")
    talk(topic.buffer, *LAMP)
    await topic.save(sync=True)
    await stage.close()
    journal, _ = open_journal(JOURNAL, stage.files)
    journal.append([b"\x93of another version"])
    again = Stage(stage.config, stage.files)
    assert len((await again.topics.get("talk")).buffer.conversations()) == 1
    await again.close()


# Topics come into memory when they are asked for and leave it when nobody does; nobody notices but by the figures


FACT = "Please note: the release word for the lighthouse lamp is cinnamon-42, written on the brass plate."
QUESTION = "What is the release word for the lighthouse lamp?"
CHUNKS = range(250)


def loaded(daemon: DaemonProcess) -> set[str]:
    """The topics that the daemon has in memory."""
    return set(ask(f"{daemon.own_url}/memd/stats").json["topics"])


@pytest.fixture
def told(serving: Serving) -> DaemonProcess:
    """A daemon that lets topics go at once, and has been told something in the topic "lamp"."""
    store, buffer = {"topic_idle_seconds": 0.05}, {"store_after_seconds": 0.2}
    settings = {"store": store, "buffer": buffer, "segment": {"max_entries": 4}}
    daemon = serving(settings)
    daemon.chat([user(FACT)], memory_in={"topic_id": "lamp"})
    for number in range(9):
        daemon.chat(
            [user(f"Number {number}: the ferry to island {number} is due at {number} o'clock.")],
            memory_in={"topic_id": "lamp"},
        )
    return daemon


def test_an_idle_topic_is_let_go_and_its_conversation_goes_on_and_stats_show_its_files(
    told: DaemonProcess, upstream: RecordingUpstream
) -> None:
    wait_until(lambda: loaded(told) == set(), lambda: f"still in memory: {loaded(told)}")
    answer = told.chat([user(QUESTION)], memory_in={"topic_id": "lamp"})
    assert answer.headers["X-Memory-Status"] == "injected"
    assert "cinnamon-42" in upstream.prompts[-1]
    assert loaded(told) <= {"lamp"}
    wait_until(lambda: loaded(told) == set(), lambda: f"still in memory: {loaded(told)}")
    contents = [entry["content"] for entry in told.export()]
    assert len(contents) == len(set(contents))
    assert told.run("verify").returncode == 0

    history = [user("We begin a long talk about the weather on the island of Sark.")]
    history.append({"role": "assistant", "content": told.chat(history, memory_in={"topic_id": "lamp"}).reply})
    first = told.chat([*history, user(QUESTION)], memory_in={"topic_id": "lamp"})
    wait_until(lambda: loaded(told) == set(), lambda: f"still in memory: {loaded(told)}")
    again = [*history, user(QUESTION), {"role": "assistant", "content": first.reply}, user("And the ferry?")]
    told.chat(again, memory_in={"topic_id": "lamp"})
    before, after = (json.loads(prompt) for prompt in upstream.prompts[-2:])
    assert after[: len(before)] == before, "the block of the turn before is where it was"

    wait_until(lambda: loaded(told) == set(), lambda: "still in memory")
    figures = json.loads(told.run("stats", "--json").stdout)
    [lamp] = figures["topics"]
    assert lamp["topic_id"] == "lamp" and lamp["chunks"] == lamp["entries"] == len(told.export())
    assert figures["daemon"]["memory_bytes_max"] == 4 << 30
    told.chat([user(QUESTION)], memory_in={"topic_id": "lamp"})
    told.kill()
    shown = told.run("stats")
    assert shown.returncode == 0
    assert "lamp" in shown.stdout and "No daemon holds this folder" in shown.stdout
    assert json.loads(told.run("stats", "--json").stdout)["daemon"] is None


def test_a_start_opens_what_has_work_left_and_what_was_used_last(told: DaemonProcess) -> None:
    told.chat([user("A remark in the cellar.")], memory_in={"topic_id": "cellar"})
    wait_until(lambda: loaded(told) == set(), lambda: f"still in memory: {loaded(told)}")
    told.configure({"buffer": {"store_after_seconds": 3600}})  # from now on nothing is stored or let go soon
    told.restart()
    wait_until(lambda: loaded(told) == {"cellar"}, lambda: f"in memory: {loaded(told)}")
    told.chat([user("A remark that stays in the buffer.")], memory_in={"topic_id": "attic"})
    told.chat([user("Later, something else.")], memory_in={"topic_id": "lamp"})
    told.restart()
    wait_until(lambda: loaded(told) == {"attic", "lamp"}, lambda: f"in memory: {loaded(told)}")

    def indexes() -> tuple[int, int]:
        lamp = ask(f"{told.own_url}/memd/stats").json["topics"]["lamp"]
        return lamp["indexes_loaded"], lamp["indexes"]  # of two segments, in one index where they are merged

    wait_until(lambda: indexes()[0] == indexes()[1] > 0, lambda: f"{indexes()} indexes are loaded")


def test_above_the_ceiling_the_topic_used_least_recently_goes_first(serving: Serving) -> None:
    settings = {
        "store": {"memory_bytes_max": 3 << 19},  # one topic of 250 chunks fits, two do not
        "buffer": {"store_after_seconds": 0.05},
        "chunking": {"min_tokens": 1, "max_tokens": 20},
    }
    daemon = serving(settings)
    for topic_id in ("one", "two"):
        items = (f"Item {number} of {topic_id} is on shelf {number % 17}, box {number * 7 % 31}." for number in CHUNKS)
        daemon.chat([user(" ".join(items))], memory_in={"topic_id": topic_id})
        wait_until(lambda topic_id=topic_id: topic_id in loaded(daemon), lambda: "not loaded")  # type: ignore[misc]
    wait_until(lambda: loaded(daemon) == {"two"}, lambda: f"{ask(daemon.own_url + '/memd/stats').json}")


def test_what_waits_in_a_topic_that_cannot_be_opened_is_told(serving: Serving) -> None:
    daemon = serving({"buffer": {"store_after_seconds": 3600}})
    daemon.chat([user(LAMP[0])])

    def told() -> tuple[bool, int]:
        [topic] = ask(f"{daemon.own_url}/memd/topics").json["topics"]
        return topic["is_open"], topic["unstored"]

    wait_until(lambda: told() == (True, 2), lambda: repr(daemon))
    journal = daemon.data_dir / "default" / "hot.log"
    wait_until(lambda: b"Noted." in journal.read_bytes(), lambda: repr(daemon))  # it is written beside the answer
    daemon.kill()
    (daemon.data_dir / "default" / "forbidden").write_text("damaged")
    daemon.start()
    wait_until(lambda: told() == (False, 2), lambda: repr(daemon))


# Names that differ only in case, and topics that headers name


CODE = {"role": "user", "content": "The code of the boathouse is 5511."}


def test_a_store_that_has_both_keeps_opening(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    store.topic("garden").append([draft(1)])
    store.topic("other").append([draft(2)])
    store.close()
    (tmp_path / "other").rename(tmp_path / "Garden")  # an older memd let both be made
    (tmp_path / "Garden" / "former_names").write_text("other\n")
    store = open_store(None, tmp_path)
    assert [live_contents(store.topic(name)) for name in ("Garden", "garden")]
    with pytest.raises(BadTopicId):
        store.topic("GARDEN")
    store.close()
    done = CliRunner().invoke(
        main, ["check", "--json", "--data-dir", str(tmp_path), "--upstream", "http://127.0.0.1:9"]
    )
    found = json.loads(done.stdout)["checks"]
    assert [one["mark"] for one in found if "'Garden' and 'garden' differ only in case" in one["said"]] == ["warning"]


def test_a_request_for_one_is_refused_or_gets_no_memory(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    assert ask(f"{served.base_url}/t/garden/v1/chat/completions", {"messages": [CODE]}).status == 200
    seen = len(upstream.requests)
    refused = ask(f"{served.base_url}/t/Garden/v1/chat/completions", {"messages": [CODE]})
    assert refused.status == 400 and "'garden', which is there" in refused.json["error"]["message"]
    assert len(upstream.requests) == seen
    answered = served.chat([CODE], memory_in={"topic_id": "Garden"})
    assert answered.reply and answered.headers["X-Memory-Status"] == "bad-memory-in"
    assert "'garden', which is there" in served.log.read_text()
    assert (
        served.chat([CODE], memory_in={"related_topic_ids": ["Garden"]}).headers["X-Memory-Status"] != "bad-memory-in"
    )
    assert sorted(path.name for path in served.data_dir.iterdir() if path.is_dir()) == ["default", "garden"]


def test_an_import_stops_at_the_line_that_names_one(tmp_path: Path) -> None:
    data_dir, file = tmp_path / "memory", tmp_path / "told.jsonl"
    store = open_store(None, tmp_path / "other")
    store.topic("garden").append([draft(1)])
    store.close()
    exported = CliRunner().invoke(main, ["export", "--data-dir", str(tmp_path / "other")]).stdout.strip()
    file.write_text(f"{exported}\n{exported.replace('garden', 'Garden')}\n")
    done = CliRunner().invoke(main, ["import", "--data-dir", str(data_dir), str(file)])
    assert done.exit_code == 1
    assert "line 2: topic_id 'Garden' differs only in case from 'garden'" in done.stderr and "--topic" in done.stderr
    assert [path.name for path in data_dir.iterdir() if path.is_dir()] == ["garden"]


# Topics and conversations that headers name, as programs send them that many people share


USER, CHAT = "X-OpenWebUI-User-Id", "X-OpenWebUI-Chat-Id"
ADA, BEN = "5f0f1d52-6a9c-4f6e-8f60-0d3b1c9e7a11", "9b1d3c7e-2f54-4d0e-9d0a-7c1e6b2f4a22"
ASKED = {"role": "user", "content": "What is the code of the boathouse?"}


@pytest.fixture
def daemon(serving: Serving) -> DaemonProcess:
    settings = {"topics": {"header": USER.lower()}, "conversation": {"header": CHAT}, "buffer": {"idle_seconds": 0}}
    return serving(settings)


def topic_of(daemon: DaemonProcess, answer: Answer) -> str:
    return str(daemon.receipt(answer.headers["X-Memory-Turn"])["topic_id"])


def said(daemon: DaemonProcess, headers: Mapping[str, str], path: str = "/v1", **more: Any) -> Answer:
    return ask(f"{daemon.base_url}{path}/chat/completions", {"model": "m", "messages": [CODE], **more}, headers=headers)


def test_each_user_has_a_memory_of_their_own(daemon: DaemonProcess, upstream: RecordingUpstream) -> None:
    daemon.chat([CODE], {USER: ADA, CHAT: "1"})
    for person, chat, is_shown in ((ADA, "2", True), (BEN, "3", False), (BEN, "2", False)):
        answer = daemon.chat([ASKED], {USER: person, CHAT: chat})
        assert topic_of(daemon, answer) == person
        assert ("5511" in upstream.requests[-1].body.decode()) is is_shown
    sent = upstream.requests[-1]
    assert sent.header(USER) == BEN, "what is the client's own is forwarded"


def test_a_name_that_cannot_be_a_topic_costs_the_memory_and_of_others_the_most_particular_counts(
    daemon: DaemonProcess, upstream: RecordingUpstream
) -> None:
    said(daemon, {"X-Memory-Topic": "named"})
    for name in ("ada@example.org", "../etc", "a" * 129, "user ada", "NAMED"):
        answer = said(daemon, {"X-Memory-Topic": name})
        assert (answer.status, answer.headers["X-Memory-Status"]) == (200, "bad-topic")
        assert repr(name)[1:40] in daemon.log.read_text()
    [topic] = ask(f"{daemon.base_url}/memd/topics").json["topics"]
    assert topic["topic_id"] == "named"
    both = {"X-Memory-Topic": "named", USER: ADA}
    assert topic_of(daemon, said(daemon, {**both}, memory_in={"topic_id": "asked"})) == "asked"
    assert topic_of(daemon, said(daemon, both, path="/t/path/v1")) == "named"
    assert upstream.requests[-1].header("X-Memory-Topic") is None
    assert topic_of(daemon, said(daemon, {"X-Memory-Topic": " ", USER: ADA}, path="/t/path/v1")) == ADA
    assert topic_of(daemon, said(daemon, {USER: ""}, path="/t/path/v1")) == "path"
    assert topic_of(daemon, said(daemon, {})) == "default"


def test_chats_that_a_header_tells_apart_are_no_branches_of_each_other(daemon: DaemonProcess) -> None:
    for chat in ("1", "2", "1"):
        daemon.chat([CODE], {USER: ADA, CHAT: chat})
    [topic] = ask(f"{daemon.base_url}/memd/topics").json["topics"]
    assert topic["conversations"] == 2


def test_openai_s_user_separates_where_it_is_asked_for(serving: Serving, upstream: RecordingUpstream) -> None:
    plain = serving()
    assert topic_of(plain, said(plain, {}, user=ADA)) == "default"
    daemon = serving({"topics": {"from_user": True}, "buffer": {"idle_seconds": 0}})
    daemon.chat([CODE], user=ADA)
    for person, is_shown in ((ADA, True), (BEN, False)):
        answer = daemon.chat([ASKED], user=person)
        assert topic_of(daemon, answer) == person
        assert ("5511" in upstream.requests[-1].body.decode()) is is_shown
    assert topic_of(daemon, said(daemon, {"X-Memory-Topic": "named"}, user=ADA)) == "named"
    assert topic_of(daemon, said(daemon, {}, path="/t/path/v1", user=BEN)) == BEN
    assert topic_of(daemon, said(daemon, {}, path="/t/path/v1", user=" ")) == "path"
    assert topic_of(daemon, said(daemon, {}, user=None)) == "default"
    others: tuple[object, ...] = {"id": 5}, 7, [], False, "ada@example.org"
    for other in others:
        assert said(daemon, {}, user=other).headers["X-Memory-Status"] == "bad-topic"
