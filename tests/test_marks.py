"""Marks are not trusted over the log: a journal newer than the log is noticed, and what is missing is heard again."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from archiver_stage import Stage, live_entries
from conftest import Serving
from crash_files import CrashFiles
from histories import glance, new_buffer, receive, replayed, said, state, talk
from recording_upstream import RecordingUpstream, Request, Response, chat_answer

from memd.conversation.hot_buffer import HotBuffer
from memd.ingest.topics import Topic
from memd.settings.model import Config

SMALL_WINDOW = {"buffer": {"soft_tokens": 256, "hard_tokens": 512}, "injection": {"budget_tokens": 64}}
TURNS = 14
ACTIVE, HOT = Path("/memory/talk/active.bin"), Path("/memory/talk/hot.log")


def fact(number: int) -> str:
    return f"Fact {number}: the lighthouse number {number} stands on the {number * 7}th rock behind the harbour wall."


def answer(request: Request) -> Response:
    last = json.loads(request.body)["messages"][-1]["content"]
    return chat_answer(request, f"Understood, this is what I note of it: {last[-60:]}")


def test_a_journal_newer_than_the_log_costs_no_client_anything(serving: Serving, upstream: RecordingUpstream) -> None:
    upstream.answer = answer
    daemon = serving(SMALL_WINDOW)
    topic, aside = daemon.data_dir / "default", daemon.folder / "older.bin"
    history: list[dict[str, Any]] = []
    for number in range(TURNS):
        history.append({"role": "user", "content": fact(number)})
        history.append({"role": "assistant", "content": daemon.chat(history).reply})
        if number == 3:
            daemon.wait_stored("Fact 3:")
            assert daemon.terminate() == 0
            shutil.copyfile(topic / "active.bin", aside)
            daemon.start()
    daemon.wait_stored(f"Fact {TURNS - 1}:")
    assert daemon.terminate() == 0
    assert daemon.run("verify").returncode == 0
    shutil.copyfile(aside, topic / "active.bin")  # as a restored backup, or rsync beside a running daemon

    verified = daemon.run("verify")
    assert verified.returncode == 1
    assert f"{topic / 'hot.log'}: " in verified.stdout and "missing" in verified.stdout
    assert "all whole" not in verified.stdout

    daemon.configure({})  # so that all of the history fits
    daemon.start()
    history.append({"role": "user", "content": "On which rock behind the harbour wall does the last lighthouse stand?"})
    daemon.chat(history)
    heard = upstream.prompts[-1]
    assert [message["content"] for message in history if message["content"] not in heard] == []
    daemon.wait_stored(*(fact(number) for number in range(TURNS)))
    stored = daemon.said()
    assert [sum(fact(number) in one for one in stored) for number in range(TURNS)] == [1] * TURNS, "once each"
    assert "missing" in daemon.log.read_text()
    assert daemon.terminate() == 0
    assert daemon.run("verify").returncode == 0, "what could be had again is there"


def test_a_torn_tail_is_not_said_to_be_harmless_where_the_journal_knows_better(serving: Serving) -> None:
    daemon = serving()
    for number in range(2):
        daemon.chat([{"role": "user", "content": fact(number)}])
        daemon.wait_stored(f"Fact {number}:")
    assert daemon.terminate() == 0
    active = daemon.data_dir / "default" / "active.bin"
    active.write_bytes(active.read_bytes()[:-5])
    daemon.start()
    daemon.chat([{"role": "user", "content": "Anything?"}])
    told = daemon.log.read_text()
    assert "active.bin.torn" in told and "1 of them is missing" in told
    assert "nothing that was acknowledged" not in told


@pytest.fixture
def files() -> CrashFiles:
    return CrashFiles()


async def opened(files: CrashFiles) -> tuple[Stage, Topic]:
    stage = Stage(Config(), files)
    return stage, await stage.topics.get("talk")


LAMP = "u:Where is the spare lamp?", "a:On the second landing."
FERRY = "u:When does the last ferry leave?", "a:At ten past nine."
OIL = "u:Who brings the oil?", "a:The widow of the harbour master."


def lowered_buffer(is_in_log: set[str]) -> HotBuffer:
    buffer = new_buffer()
    one = talk(buffer, *LAMP, *FERRY, *OIL)
    buffer.mark(one, stored=6, left_out=4)
    known = {item.digest for item, text in zip(one.messages, (*LAMP, *FERRY, *OIL), strict=True) if text in is_in_log}
    buffer.lower_marks(known.__contains__)
    return buffer


def test_a_read_only_request_hears_what_was_lost_too() -> None:
    buffer = lowered_buffer({*LAMP, *OIL})
    before = state(buffer)
    arrival = glance(buffer, *LAMP, *FERRY, *OIL, "u:And the wick?")
    assert arrival.conversation.visible_positions() == [2, 3, 4, 5, 6]
    assert state(buffer) == before


async def in_the_log_then_lost(files: CrashFiles, kept: Sequence[str], more: Sequence[str]) -> tuple[Stage, Topic]:
    """A topic whose conversation was stored and has left the prompt, and whose log has lost all behind `kept`."""
    stage, topic = await opened(files)
    await stage.archiver.store(topic, talk(topic.buffer, *kept), len(kept))
    older = files.read(ACTIVE)
    one = talk(topic.buffer, *kept, *more)
    await stage.archiver.store(topic, one, len(one))
    topic.buffer.mark(one, left_out=len(one) - 2)
    await topic.rewrite_journal()
    await stage.close()
    files.put(ACTIVE, older)
    stage, topic = await opened(files)
    assert topic.log.findings != []
    return stage, topic


NOTHING = "u:", "a:"
REMINDER = "p:Remember the list of tasks."


@pytest.mark.parametrize("unstored", [NOTHING, LAMP, (REMINDER,)], ids=repr)
async def test_what_is_never_stored_is_not_taken_for_lost(files: CrashFiles, unstored: Sequence[str]) -> None:
    kept = [*LAMP, *unstored, *FERRY]
    stage, topic = await in_the_log_then_lost(files, kept, [*OIL, "u:And the wick?", "a:He cuts it himself."])
    (again,) = topic.buffer.conversations()
    assert again.left_out == len(kept), "only the oil is lost: the wick is in the journal"
    receive(topic.buffer, *kept, *OIL, "u:And the wick?", "a:He cuts it himself.", "u:When?")
    assert again.visible_positions() == [*range(len(kept), len(kept) + 5)]
    await stage.archiver.store(topic, again, len(kept) + 4)
    questions = sorted(entry.content.partition("\n")[0] for entry in live_entries(topic))
    assert questions == sorted(one[2:] for one in (LAMP[0], FERRY[0], OIL[0], "u:And the wick?"))
    await stage.close()


WICK = "u:And the wick?", "a:He cuts it himself."


def test_what_is_awaited_and_what_is_a_repeat_survives_the_journal_in_branches_too() -> None:
    buffer = lowered_buffer({*LAMP, *OIL})
    (one,) = buffer.conversations()
    talk(buffer, *LAMP, *FERRY[:1], "a:Nobody knows.")
    talk(buffer, *OIL, *WICK)
    buffer.mark(one, stored=8, left_out=6, repeats=[7])
    branch = receive(buffer, *OIL, WICK[0], "a:Nobody does.", "u:Why?").conversation
    assert branch.lost == {3} and one.lost == {3} and one.messages[7].message is not None
    buffer.mark(one, left_out=8)
    assert one.messages[7].message == said(WICK[1]) and one.messages[6].message is None
    assert state(replayed(buffer.take_unsaved())) == state(buffer)
    assert state(replayed(buffer.retelling()())) == state(buffer)
