"""Ids of chunks: how people and models write them, and what they name."""

from __future__ import annotations

import json
import re
import time
import uuid
from typing import Any

import msgspec
import pytest
from conftest import MakeDaemon
from crash_files import CrashFiles
from daemon_process import DaemonProcess, ask
from drafts import draft, open_store, seal_all, uuid_of
from effort import SECONDS_MAX
from recording_upstream import RecordingUpstream

from memd.admin import history
from memd.entries import digits_of_id
from memd.errors import NotFound
from memd.store.log.segment import NOTHING_UNSTORED
from memd.store.store import TopicLog

MEANT = "The spare key of the boathouse hangs behind the barometer."
UUIDS = [bytes.fromhex(digits.ljust(32, "0")) for digits in ("a3f91", "a3f92", "beef")]


@pytest.fixture(params=[False, True], ids=["growing", "sealed"])
def log(request: pytest.FixtureRequest) -> TopicLog:
    topic = open_store(CrashFiles()).topic("talk")
    for number, one in enumerate(UUIDS):
        topic.append([msgspec.structs.replace(draft(number), uuid=one)])
    if request.param:
        seal_all(topic)
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


def test_digits_name_the_chunk_whose_public_id_they_are_or_those_that_begin_so(log: TopicLog) -> None:
    shown, longer, other = UUIDS
    topics = [(log, NOTHING_UNSTORED)]
    for digits, uuid_ in (("a3f9", shown), ("a3f92", longer), ("a3f910", shown), (other.hex(), other)):
        found = history.named(topics, f"mem:{digits}")
        assert (found.snapshot.topic_id, found.uuid, found.waiting) == (log.topic_id, uuid_, None)
    with pytest.raises(NotFound):
        history.named(topics, "a3fa")


@pytest.fixture
def waiting(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    """A daemon with a chunk that waits in topic `home`, and in topic `work` a stored one with the same five digits."""
    never = {"buffer": {"store_after_seconds": 3600, "idle_seconds": 3600}}
    daemon = make_daemon(upstream.url, never).start()
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


def test_digits_that_a_waiting_chunk_has_and_a_stored_one_of_another_topic_too_are_refused(
    waiting: DaemonProcess,
) -> None:
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
    assert topic._order == sorted(topic._reserved) and len(topic._order) == len(drafts) - 100
