"""Erasing where the disk is encrypted or the command is killed, and the retention of a running daemon.

Rule: real files and real commands in this process; the witness is the bytes of every file, and what the key reads.
"""

import asyncio
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from daemon_in_process import Client, daemon_in_process
from daemon_process import run_memd, wait_until
from drafts import (
    DATA_DIR,
    adjusted,
    deprecated,
    digest_of,
    draft,
    live_contents,
    open_store,
    search,
    unit_vector,
    uuid_of,
)
from effort import steps
from encrypted_files import EncryptedCrashFiles

from memd.admin import parts
from memd.admin.reads import latest_entries
from memd.cli.flags import config_to_begin
from memd.cli.main import main
from memd.cli.running import daemon_for
from memd.daemon.app import Daemon, running
from memd.entries import Draft, Erased
from memd.errors import DaemonError, StoreError
from memd.ingest import erasing
from memd.ingest.erasing import DAY_US, PlannedErasure, Retention
from memd.principals import OWNER
from memd.settings.model import AuditSettings, EncryptionSettings
from memd.store.audit import Act, AuditBook, read_book
from memd.store.disk import LocalDisk, Wiper
from memd.store.encryption.frames import new_key_file
from memd.store.erasure import Erasure, ForbiddenText, read_forbidden, stub_payload
from memd.store.layout import TopicLayout
from memd.store.log.format import HEADER_BYTES, decode_entry, encode_entry
from memd.store.store import Store, TopicLog
from memd.store.tools.backup import backup
from memd.store.tools.verify import verify

SECRET = "The vermilion walrus keeps the foghorn's spare key."
OTHER = "The ferry to the quarry island leaves at seven in the morning."
NOBODY = "http://127.0.0.1:9"
TALK = TopicLayout(DATA_DIR, "talk")
BANNED = ForbiddenText().also(messages=[int.from_bytes(digest_of(1)[:8], "little")])


def erased(store: Store, erasure: Erasure, forbidden: ForbiddenText = BANNED) -> None:
    """All steps of the eraser."""
    if not erasure.is_moved:
        banned = ForbiddenText() if store.is_aside(erasure) else forbidden
        store.retire(erasure.topic_id)
        erasure = store.put_topic_aside(erasure, banned)
    store.wipe_aside(erasure, Wiper(store.files))
    store.ledger.write(msgspec.structs.replace(erasure, done_at=store.clock.now_us()))


@pytest.mark.parametrize("disk", [CrashFiles, EncryptedCrashFiles], ids=["plain", "encrypted"])
def test_whatever_interrupts_it_a_topic_goes_with_its_key_and_what_is_forbidden_stays(disk: Callable[[], Any]) -> None:
    def prepared() -> tuple[Any, Store, Erasure]:
        files = disk()
        store = open_store(files)
        [*_, last] = store.topic("talk").append([draft(number) for number in range(3)])
        told: dict[str, Any] = {"by": "ann", "chunks": 3, "forbid": True, "highest_id": last.canonical_id}
        erasure = Erasure(id=store.clock.next(), kind="topic", topic_id="talk", at=1, **told)
        store.ledger.write(erasure)
        return files, store, erasure

    probe, store, erasure = prepared()
    start = probe.operations
    erased(store, erasure)
    begun_anew = 0
    for cut in steps(start, probe.operations):
        files, store, erasure = prepared()
        key = files.contents().get(str(TALK.key), b"user: chunk 1")
        files.cut_after = cut
        with pytest.raises(PowerCutError):
            erased(store, erasure)
        again = open_store(after := files.after_power_cut("kept"))
        pending = again.ledger.pending
        is_anew = pending != [] and again.is_aside(pending[0])
        if is_anew:  # somebody uses the name before the erasure is finished
            again.topic("talk").append([draft("anew")])
            begun_anew += 1
        for one in pending:
            erased(again, one)
        said = live_contents(again.topic("talk"))
        assert said == (["user: chunk anew"] if is_anew else []), probe.log[cut]
        assert not any(map(again.repetition, again.ledger)), probe.log[cut]
        assert read_forbidden(after, TALK) == BANNED, probe.log[cut]
        assert not any(key in data for data in after.contents().values()), probe.log[cut]
        assert uuid_of(1).hex() not in str(after.contents())
        [new] = again.topic("talk").append([draft("later")])
        assert new.canonical_id > erasure.highest_id
        again.close()
        assert verify(DATA_DIR, after).ok, probe.log[cut]
    assert begun_anew


class Memory:
    """A data directory and the commands on it, without a daemon."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.base = folder / "memory", folder
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("MEMD_UPSTREAM_URL", NOBODY)
        monkeypatch.setenv("MEMD_LISTEN_PORT", "0")
        monkeypatch.setenv("MEMD_AUDIT_RECORD", "always")

    def give(self, name: str | None) -> None:
        """Use this key from now on."""
        if name is None:
            self._monkeypatch.delenv("MEMD_ENCRYPTION_KEY_FILE")
        else:
            self._monkeypatch.setenv("MEMD_ENCRYPTION_KEY_FILE", str(self.base / name))

    def run(self, *arguments: str | Path, code: int = 0) -> Result:
        words = [str(one) for one in (*arguments, "--data-dir", self.folder)]
        done = CliRunner().invoke(main, words, prog_name="memd")
        assert done.exit_code == code, done.output
        return done

    def note(self, topic: str, *texts: str) -> list[str]:
        """Store notes; their ids."""
        with daemon_for(config_to_begin(None, {"data_dir": str(self.folder)})) as daemon:
            body = {"topic_id": topic, "notes": [{"content": text} for text in texts]}
            told = msgspec.json.decode(daemon.answer("/memd/notes", body))
            ids = [one for note in told["notes"] for one in note["chunk_ids"]]
            judged = {"topic_id": topic, "chunk_ids": ids, "action": "Helpful", "reason": "so that they are in the log"}
            daemon.answer("/memd/corrections", judged)
            return ids

    def exported(self) -> str:
        return self.run("export").output


@pytest.mark.process
def test_erasing_an_encrypted_directory_and_what_comes_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, backup = Memory(tmp_path, monkeypatch), tmp_path / "backup"
    for name in ("old", "new"):
        new_key_file(tmp_path / name)
    memory.give("old")
    memory.folder.mkdir()
    [chunk] = memory.note("team", SECRET)
    for topic in ("gone", "default"):
        memory.note(topic, SECRET.replace("walrus", "otter"))
    memory.run("backup", backup)
    memory.run("erase", "--chunk", chunk, "--forbid", "--yes")
    assert "walrus" not in memory.exported()
    keys = {name: (memory.folder / name / "topic.key").read_bytes() for name in ("team", "gone")}
    memory.run("erase", "team", "--yes")
    memory.run("erase", "gone", "--forbid", "--yes")
    for topic in ("team", "gone"):  # what was forbidden before stays so, under another key
        assert sorted(path.name for path in (memory.folder / topic).iterdir()) == ["forbidden", "topic.key"]
        assert (memory.folder / topic / "topic.key").read_bytes() != keys[topic]
    with pytest.raises(DaemonError, match="was erased from topic 'team' for good"):  # with its chunk
        memory.note("team", SECRET)
    assert "walrus" not in memory.exported()
    memory.run("verify")

    memory.note("team", "The barometer was repaired by old Bartholomew.")
    memory.run("backup", backup)
    memory.run("verify", backup)
    told = CliRunner().invoke(main, ["export", "--data-dir", str(backup)]).output
    assert "Bartholomew" in told and "walrus" not in told and '"topic_id":"gone"' not in told

    forbidden = TopicLayout(memory.folder, "gone").forbidden
    for number, (key, arguments) in enumerate(
        [
            ("new", ["rekey", "--data", "--new-key-file", str(tmp_path / "new")]),
            (None, ["decrypt"]),
            ("old", ["encrypt", "on"]),
        ]
    ):
        if arguments == ["encrypt", "on"]:
            memory.give("old")
        memory.run(*arguments)
        memory.give(key)
        assert (forbidden.read_bytes()[:8] == b"memd.enc") == (key is not None)
        memory.run("verify")
        text = f"The name is used again after step {number}."
        memory.note("team", text)
        assert text in memory.exported()
    memory.note("gone", "The name can be used again.")
    assert "can be used again" in memory.exported() and memory.run("verify").exit_code == 0
    told = memory.run("audit", "--act", "settings", "--act", "erase").output
    for command in ("memd erase", "memd rekey", "memd decrypt", "memd encrypt"):
        assert command in told


@pytest.mark.process
def test_an_encrypted_topic_out_of_a_backup_is_erased_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, backup = Memory(tmp_path, monkeypatch), tmp_path / "backup"
    new_key_file(tmp_path / "key")
    memory.give("key")
    memory.folder.mkdir()
    memory.note("team", SECRET)
    memory.note("default", OTHER)
    memory.run("backup", backup)
    for how in (["--before", "2100-01-01"], []):
        memory.run("erase", "team", *how, "--yes")
        assert SECRET not in memory.exported() and OTHER in memory.exported()
        shutil.rmtree(memory.folder / "team", ignore_errors=True)
        shutil.copytree(backup / "team", memory.folder / "team")
        assert "is there again" in memory.run("verify", code=1).output
        memory.run("erase", "--resume", "--yes")
        memory.run("verify")
        assert SECRET not in memory.exported() and OTHER in memory.exported()
    told = " ".join(memory.run("erase", "default", "--dry-run").output.split())
    assert f"the backup in {backup}, until the next" in told
    memory.run("decrypt")
    memory.give(None)
    told = " ".join(memory.run("erase", "default", "--dry-run").output.split())
    assert f"the backup in {backup}, until you remove it, as it is from before encryption changed" in told


KILLED = """
import os, signal, sys

left = {}

def look(event, arguments):
    global left
    if event == {!r} and any({!r} in str(one) for one in arguments):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(look)
"""
"""What kills a command just before a step: the event of the interpreter, a part of the path and its number of those
tell which."""


async def killed(event: str, path: str, number: int, *words: str | Path) -> None:
    """Run a command that is killed so."""
    first = KILLED.format(number, event, path)
    done = await asyncio.to_thread(run_memd, *words, first=first, **os.environ)
    assert done.returncode == -signal.SIGKILL, done


@pytest.mark.process
@pytest.mark.parametrize(
    ("what", "event", "path"),
    [
        (["--chunk"], "os.rename", "seg_0001.bin.tmp"),  # the new file is whole, beside the old one
        (["team"], "os.remove", "topic.key"),  # put aside, and overwritten is the key alone
    ],
)
async def test_a_command_that_was_killed_is_finished_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: list[str], event: str, path: str
) -> None:
    memory, is_encrypted = Memory(tmp_path, monkeypatch), path == "topic.key"
    if is_encrypted:
        new_key_file(tmp_path / "key")
        memory.give("key")
    memory.folder.mkdir()
    chunk, _ = await asyncio.to_thread(memory.note, "team", SECRET), await asyncio.to_thread(memory.note, "a", OTHER)
    key = (memory.folder / "team" / "topic.key").read_bytes() if is_encrypted else SECRET.encode()
    words: list[str | Path] = [*what, *(chunk if what == ["--chunk"] else []), "--yes", "--data-dir", memory.folder]
    await killed(event, path, 1, "erase", *words)
    assert memory.run("verify", code=1).output.count("is being erased on") == 1
    async with running(config_to_begin(None, {"data_dir": str(memory.folder)})) as daemon:
        await daemon.retention.eraser.resume()
        assert daemon.store.ledger.pending == [] and await chunks_in(daemon, "a") == 1
    memory.run("verify")
    files = [one for one in memory.folder.rglob("*") if one.is_file()]
    assert [one for one in files if key in one.read_bytes()] == []
    assert (memory.folder / "team").exists() == (what == ["--chunk"])


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "written", "left"),
    [
        (1, 0, 3),
        (3, 2, 3),  # the last of its topics is not written down yet
        (4, 3, 0),  # all are, and the first is about to be noted as done
    ],
)
async def test_an_erasure_of_several_topics_that_was_killed_is_finished_or_was_never_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, written: int, left: int
) -> None:
    memory, topics = Memory(tmp_path, monkeypatch), ("a", "b", "c")
    memory.folder.mkdir()
    for topic in topics:
        await asyncio.to_thread(memory.note, topic, SECRET)
    erase: list[str | Path] = ["erase", "--author", "owner", "--yes", "--data-dir", memory.folder]
    await killed("os.rename", ".json.tmp", number, *erase)
    ledger = memory.folder / "memd.erasures"
    assert len(list(ledger.glob("*.json"))) == written
    assert memory.run("verify", code=int(not left)).output.count("is being erased on") == 3 - left
    async with running(config_to_begin(None, {"data_dir": str(memory.folder)})) as daemon:
        await daemon.retention.eraser.resume()
        assert [await chunks_in(daemon, topic) for topic in topics] == [int(left > 0)] * 3
    assert len(list(ledger.glob("*"))) == 3 - left, "nothing waits there for a later start"
    memory.run("verify")
    if left:
        memory.run("erase", "--author", "owner", "--yes")
    assert [one for one in memory.folder.rglob("*") if one.is_file() and SECRET.encode() in one.read_bytes()] == []


def keeping(
    folder: Path, kept: Mapping[str, int] = MappingProxyType({}), *, key: str = ""
) -> AbstractAsyncContextManager[Client]:
    """A daemon in this process with `retention`, and with an audit."""
    encryption = EncryptionSettings(key_file=key)
    return daemon_in_process(folder, audit=AuditSettings(record="always"), encryption=encryption, retention={**kept})


def having(daemon: Daemon, word: str) -> set[str]:
    """The files in which the key reads a word."""
    found = set()
    for path in [one for one in daemon.config.data_dir.rglob("*") if one.is_file()]:
        try:
            found |= {path.name} if word.encode() in daemon.store.files.read(path) else set()
        except StoreError:
            assert not path.exists(), path  # replaced or removed in between
    return found


def has_all(daemon: Daemon, word: str) -> bool:
    return {"memd.receipts", "hot.log", "active.bin"} <= having(daemon, word)


async def test_under_an_encrypted_daemon_a_chunk_and_a_topic_go_with_their_receipts(tmp_path: Path) -> None:
    new_key_file(tmp_path / "key")
    async with keeping(tmp_path, key=str(tmp_path / "key")) as client:
        daemon = client.daemon
        for topic_id, word in (("team", "walrus"), ("other", "otter")):
            text = SECRET.replace("walrus", word)
            await note(client, topic_id, text)
            assert (await client.ask("Who keeps the spare key of the foghorn?", topic=topic_id))[0] == 200
            assert text in client.upstream.prompts[-1]
            await asyncio.to_thread(wait_until, partial(has_all, daemon, word), partial(str, word))
        [chunk] = (await asked(client, "/memd/search?q=walrus&topic=team", None))["chunks"][:1]
        await asked(client, "/memd/erase", {"chunk_ids": [chunk["uuid"]], "topic_id": "team"})
        assert having(daemon, "walrus") == set() and having(daemon, "otter")
        key = (tmp_path / "memory" / "other" / "topic.key").read_bytes()
        await asked(client, "/memd/erase", {"topic_id": "other"})
        assert having(daemon, "otter") == set()
        files = [*(tmp_path / "memory").rglob("topic.key*")]
        assert not (tmp_path / "memory" / "other").exists() and not [one for one in files if key in one.read_bytes()]
        assert (await client.ask("The slates come on Monday.", topic="other"))[0] == 200
        await note(client, "other", OTHER)
        assert await chunks_in(daemon, "other") >= 1 and "active.bin" in having(daemon, "ferry")


async def test_a_user_without_a_name_in_the_system_erases_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    async with keeping(tmp_path) as client:
        daemon = client.daemon
        await note(client, "team", SECRET)
        monkeypatch.setattr("getpass.getuser", nobody)
        await asked(client, "/memd/erase", {"topic_id": "team"})
        assert having(daemon, "walrus") == set()


async def test_it_looks_at_the_topics_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasing, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(erasing, "EVERY_SECONDS", 0.0)
    looked, twice = [0], asyncio.Event()

    async def look(of: Retention) -> None:
        looked[0] += 1
        if looked[0] > 1:
            twice.set()

    monkeypatch.setattr(Retention, "look", look)
    async with keeping(tmp_path, {"team": 30}):
        await twice.wait()


async def asked(client: Client, path: str, body: dict[str, Any] | None, status: int = 200) -> Any:
    method, url = "GET" if body is None else "POST", f"{client.daemon.own_url}{path}"
    async with client.session.request(method, url, json=body) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def note(client: Client, topic_id: str, text: str) -> None:
    """Store a note; it is in the log."""
    told, daemon = (
        await asked(client, "/memd/notes", {"topic_id": topic_id, "notes": [{"content": text}]}),
        client.daemon,
    )
    topic = await daemon.topics.get(topic_id)
    logs = [(topic.log, topic.unstored())]
    uuids = await asyncio.to_thread(parts.uuids_of, logs, told["notes"][0]["chunk_ids"])
    await daemon.archiver.store_named(topic, uuids.values())


async def chunks_in(daemon: Daemon, topic_id: str) -> int:
    return (await daemon.topics.get(topic_id)).log.snapshot().live_count


def later(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """The clock jumps."""
    now = daemon.store.clock.now_us() + days * DAY_US
    monkeypatch.setattr(daemon.store.clock, "now_us", lambda: now)


async def erasures_in(daemon: Daemon) -> list[Act]:
    """What the audit has of erasures that were begun and ended."""
    await daemon.auditor.flush()
    kept = read_book(LocalDisk(), daemon.config.data_dir, lambda act: act.act == "erase")
    assert kept is not None and not kept.findings
    return [act for _, act in kept.acts]


async def test_what_is_too_old_is_erased_and_the_audit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(tmp_path, {"team": 30}) as client:
        daemon = client.daemon
        for topic_id in ("team", "other"):
            await note(client, topic_id, SECRET)
        await daemon.retention.look()
        assert await erasures_in(daemon) == [] and await chunks_in(daemon, "team") == 1
        later(daemon, monkeypatch, 31)
        await daemon.retention.look()
        assert (await chunks_in(daemon, "team"), await chunks_in(daemon, "other")) == (0, 1)
        begun, ended = await erasures_in(daemon)
        assert (begun.who, begun.topics, begun.count, begun.begins) == ("memd/retention", ("team",), 1, True)
        assert ended.ends and ended.detail == ""
        assert [one.by for one in daemon.store.ledger] == ["memd/retention"]


async def test_after_a_jump_of_the_clock_nothing_goes_before_a_person_has_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with keeping(tmp_path, {"team": 30}) as client:
        daemon = client.daemon
        for text in (SECRET, OTHER):
            await note(client, "team", text)
        later(daemon, monkeypatch, 400)
        with caplog.at_level(logging.INFO, "memd"):
            for _ in range(2):
                await daemon.retention.look()
        warnings = [one for one in caplog.messages if "look at the clock" in one]
        assert len(warnings) == 1, "a topic is looked at once a day"
        planned = await asked(client, "/memd/erase", {"retention": True, "dry_run": True})
        assert [(one["topic_id"], one["chunks"]) for one in planned["plans"]] == [("team", 2)] and not planned["done"]
        assert await chunks_in(daemon, "team") == 2
        done = await asked(client, "/memd/erase", {"retention": True})
        assert [one["chunks"] for one in done["done"]] == [2] and await chunks_in(daemon, "team") == 0
        assert {one.who for one in await erasures_in(daemon)} == {"owner"}


@pytest.mark.parametrize(
    ("stuck", "said"),
    [
        (["baker"], "memd: erased in able, carl; the erasure in topic baker is not finished, and goes on "),
        (["able", "baker", "carl"], "memd: the erasure in topic able is not finished, and goes on "),
    ],
    ids=["in one", "in all"],
)
async def test_an_erasure_that_stops_in_some_topics_names_what_is_erased_and_what_is_not_and_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: list[str], said: str
) -> None:
    async with keeping(tmp_path) as client:
        daemon = client.daemon
        for topic_id in ("able", "baker", "carl"):
            await note(client, topic_id, SECRET)
        write = daemon.store.ledger.write

        def failing(erasure: Erasure) -> None:
            if erasure.topic_id in stuck and erasure.done_at is not None:
                raise StoreError("the disk fails")
            write(erasure)

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(daemon.store.ledger, "write", failing)
            answer = await asked(client, "/memd/erase", {"author": "owner"}, status=503)
        told = answer["error"]["message"]
        assert told.startswith(said) and told.endswith("the disk fails; `memd erase --resume` tries it again"), told
        assert await chunks_in(daemon, "baker") == 0, "what fails in one topic stops no other"
        done = await asked(client, "/memd/erase", {"resume": True})
        assert [one["topic_id"] for one in done["done"]] == stuck
        assert await chunks_in(daemon, "baker") == 0


async def test_what_retention_cannot_do_is_tried_again_and_stops_no_other_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with keeping(tmp_path, {"*": 30}) as client:
        daemon = client.daemon
        for topic_id in ("able", "baker"):
            await note(client, topic_id, SECRET)
        later(daemon, monkeypatch, 31)
        erase = daemon.retention.eraser.erase

        async def failing(plans: list[PlannedErasure], *given: Any, **named: Any) -> Any:
            if plans[0].topic_id == "able":
                raise StoreError("the disk fails")
            return await erase(plans, *given, **named)

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(daemon.retention.eraser, "erase", failing)
            await daemon.retention.look()
        assert "retention is tried again in an hour" in caplog.text
        assert (await chunks_in(daemon, "able"), await chunks_in(daemon, "baker")) == (1, 0)
        assert "failed" in [one.detail for one in await erasures_in(daemon)]
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(AuditBook, "append", _full)
            await daemon.retention.look()
        assert await chunks_in(daemon, "able") == 1, "it is not done where the audit cannot have its line"
        await daemon.retention.look()
        assert await chunks_in(daemon, "able") == 0


def _full(book: AuditBook, acts: Any) -> Any:
    raise StoreError("the disk is full")


# Erasing in the store: no byte stays, ids and places do, and whatever interrupts it, it is finished


DISK = LocalDisk()
MARK = Erased(at=1_700_000_900_000_000, by="ann")


def word(name: int | str) -> str:
    """What stands in the text of a chunk and nowhere else."""
    return f"kestrel{name}quartz"


def told(name: int) -> Draft:
    """A chunk with a word of its own."""
    return msgspec.structs.replace(draft(name), content=f"user: {word(name)}")


def filled(store: Store, count: int) -> TopicLog:
    """A topic with `count` chunks, five a segment, all full ones sealed."""
    topic = store.topic("talk")
    for number in range(count):
        topic.append([told(number)])
    return topic


def traces(contents: dict[str, bytes], name: int) -> list[str]:
    """The files that have the words of a chunk, or bytes of its vector."""
    vector = unit_vector(name).tobytes()
    return [path for path, data in contents.items() if word(name).encode() in data or vector[:16] in data]


def on_disk(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ids(topic: TopicLog) -> set[tuple[bytes, str, int, int]]:
    """What stays of each entry, erased or not."""
    snapshot = topic.snapshot()
    entries = [snapshot.read(place) for place in snapshot.latest_places()]
    return {(one.uuid, one.public_id, one.origin_id, one.created_at) for one in entries}


def test_who_has_an_earlier_snapshot_gets_no_empty_text_and_stores_nothing_of_it() -> None:
    topic = filled(open_store(CrashFiles(), segment_entries_max=5), 12)
    before = topic.snapshot()
    hits = {hit.uuid: hit for hit in search(before, unit_vector(3)[None], 100)}
    known = before.find(uuid_of(3))
    topic.erase({uuid_of(3), uuid_of(11)}, MARK, Wiper(topic._files))
    assert known is not None
    with pytest.raises(StoreError, match="was erased"):
        topic.append([adjusted(known, 1)])
    assert before.read(hits[uuid_of(4)].place).content == f"user: {word(4)}"
    for number in (3, 11):
        hit = hits[uuid_of(number)]
        with pytest.raises(StoreError, match="erased a moment ago"):
            before.read(hit.place)
        assert before.read_many([hit.place]) == {}
    events = {one.uuid: one.event for one in latest_entries([before], OWNER, None, 100).events}
    assert [events[uuid_of(number).hex()] for number in (3, 4, 11)] == ["erased", "told", "erased"], (
        "nothing is damaged"
    )


class AppendingDisk(LocalDisk):
    """Does something just before a file of the log is written anew without a text."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], object]] = []

    def create(self, path: Path) -> None:
        super().create(path)
        if path.name.endswith(".bin.tmp") and path.name != "active.bin.tmp" and self.meanwhile:
            self.meanwhile.pop()()


def test_a_file_that_is_begun_while_the_one_before_is_rewritten_is_another_one(tmp_path: Path) -> None:
    disk = AppendingDisk()
    store = open_store(disk, tmp_path, segment_entries_max=50)
    topic = filled(store, 30)
    disk.meanwhile.append(lambda: [topic.append([told(number)]) for number in range(30, 60)])
    topic.erase({uuid_of(7)}, MARK, Wiper(disk))
    assert disk.meanwhile == [] and topic.snapshot().live_count == 59
    store.close()
    assert verify(tmp_path, DISK).damaged == []
    kept = [f"user: {word(number)}" for number in range(60) if number != 7]
    assert live_contents(open_store(None, tmp_path, segment_entries_max=50).topic("talk")) == kept
    assert traces(on_disk(tmp_path), 7) == []


def test_an_append_that_fills_a_segment_does_not_wait_for_an_erasure(tmp_path: Path) -> None:
    disk, waited = AppendingDisk(), list[bool]()
    topic = filled(open_store(disk, tmp_path, segment_entries_max=5), 12)

    def append() -> None:
        drafts = [told(number) for number in range(12, 17)]
        appending = threading.Thread(target=topic.append, args=[drafts], daemon=True)
        appending.start()
        appending.join(60)
        waited.append(appending.is_alive())

    disk.meanwhile.append(append)
    assert topic.erase({uuid_of(3)}, MARK, Wiper(disk)) == 1
    assert waited == [False]
    assert topic.unsealed() == [], "it is sealed behind the erasure"
    assert len(live_contents(topic)) == 16


def test_while_a_merged_index_is_overwritten_all_else_that_it_had_is_found(tmp_path: Path) -> None:
    disk, found = AppendingDisk(), list[str]()
    topic = filled(open_store(disk, tmp_path, segment_entries_max=5), 42)
    topic.merge([1, 2, 3, 4, 5, 6, 7, 8])
    disk.meanwhile.append(lambda: found.extend(live_contents(topic)))
    topic.erase({uuid_of(7)}, MARK, Wiper(disk))
    assert not list(tmp_path.rglob("merged_*")), "it was of the erased one, too"
    assert {f"user: {word(number)}" for number in range(42) if number != 7} <= set(found)


def test_what_an_append_is_creating_is_no_leftover(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    topic = filled(store, 3)
    layout = TopicLayout(tmp_path, "talk")
    (begun := layout.active.with_name("active.bin.tmp")).write_bytes(b"a header")
    (left := layout.active.with_name("active.bin.erased.tmp")).write_bytes(b"half of it")
    topic.erase({uuid_of(1)}, MARK, Wiper(DISK))
    assert begun.read_bytes() == b"a header" and not left.exists()


@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_interrupts_it_doing_it_again_finishes_it(loss: Loss) -> None:
    def prepared() -> tuple[CrashFiles, TopicLog]:
        files = CrashFiles()
        topic = filled(open_store(files, segment_entries_max=5), 17)
        praised = topic.snapshot().find(uuid_of(8))
        assert praised is not None
        topic.append([adjusted(praised, 2)])
        topic.merge([1, 2])
        return files, topic

    gone = {uuid_of(1), uuid_of(8), uuid_of(16)}
    kept = [f"user: {word(number)}" for number in range(17) if number not in (1, 8, 16)]
    probe, topic = prepared()
    start, known = probe.operations, ids(topic)
    assert all(traces(probe.contents(), number) for number in (1, 8, 16))
    assert topic.erase(gone, MARK, Wiper(probe)) == 4
    for cut in steps(start, probe.operations, loss):
        files, topic = prepared()
        files.cut_after = cut
        with pytest.raises(PowerCutError):
            topic.erase(gone, MARK, Wiper(files))
        after = files.after_power_cut(loss)
        again = open_store(after, segment_entries_max=5).topic("talk")
        assert set(live_contents(again)) >= set(kept), probe.log[cut]
        again.erase(gone, MARK, wiper := Wiper(after))
        assert wiper.left == []
        assert live_contents(again) == kept and ids(again) == known, probe.log[cut]
        for number in (1, 8, 16):
            assert traces(after.contents(), number) == [], probe.log[cut]
        assert verify(DATA_DIR, after).damaged == []


def test_ids_do_not_come_back_after_a_clock_was_set_back(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    topic = store.topic("talk")
    store.clock.observe(1_900_000_000_000_000)
    [last] = topic.append([told(1)])
    erasure = Erasure(
        id=store.clock.next(), kind="topic", topic_id="talk", at=1, by="ann", chunks=1, highest_id=last.canonical_id
    )
    store.ledger.write(erasure)
    erased(store, erasure, ForbiddenText())
    store.close()
    [new] = open_store(None, tmp_path).topic("talk").append([told(1)])
    assert new.canonical_id > last.canonical_id


@pytest.mark.parametrize("by", ["ann", "a" * 300, ""])
@pytest.mark.parametrize("size", [0, 1, 5, 9, 20, 40, 60, 255, 256, 300, 65_535, 65_536, 70_000])
def test_a_stub_is_as_long_as_the_record_was_and_says_nothing_of_it(by: str, size: int) -> None:
    entry = draft(1).as_entry(public_id=uuid_of(1).hex()[:4], canonical_id=5, group_left=0)
    for one in (
        msgspec.structs.replace(entry, content="x" * size),
        msgspec.structs.replace(
            deprecated(entry).as_entry(public_id=uuid_of(1).hex()[:4], canonical_id=5, group_left=0),
            reason="x" * size,
            digests=(),
        ),
    ):
        payload = encode_entry(one)
        stub = stub_payload(one, Erased(at=MARK.at, by=by), len(payload))
        assert len(stub) == len(payload) and (size == 0 or b"xx" not in stub)
        read = decode_entry(stub, dimension=8)
        assert (read.uuid, read.canonical_id, read.content, read.vector) == (one.uuid, 5, "", b"")


def test_the_next_backup_loses_what_was_erased_and_keeps_the_rest(tmp_path: Path) -> None:
    source, target = tmp_path / "memory", tmp_path / "backup"
    store = open_store(None, source, segment_entries_max=5)
    topic = filled(store, 13)
    store.topic("other").append([told(50)])
    backup(source, target, DISK)
    assert traces(on_disk(target), 2) and traces(on_disk(target), 12) and traces(on_disk(target), 50)
    topic.erase({uuid_of(2), uuid_of(12)}, MARK, Wiper(DISK))
    erasure = Erasure(id=store.clock.next(), kind="topic", topic_id="other", at=MARK.at, by="ann", chunks=1)
    store.ledger.write(erasure)
    erased(store, erasure, ForbiddenText())
    store.topic("other").append([told(51)])
    report = backup(source, target, DISK)
    assert report.findings == [] and report.erased >= 3
    assert [number for number in (2, 12, 50) if traces(on_disk(target), number)] == []
    assert traces(on_disk(target), 51) and traces(on_disk(target), 3)
    assert verify(target, DISK).damaged == [] and verify(source, DISK).damaged == []
    assert backup(source, target, DISK).erased == 0
    assert live_contents(open_store(None, target, segment_entries_max=5).topic("talk")) == live_contents(topic)


def test_a_topic_that_is_being_erased_is_left_out_of_a_backup_until_that_is_done(tmp_path: Path) -> None:
    source, target = tmp_path / "memory", tmp_path / "backup"
    store = open_store(None, source)
    store.topic("other").append([told(50)])
    store.topic("talk").append([told(1)])
    backup(source, target, DISK)
    erasure = Erasure(id=store.clock.next(), kind="topic", topic_id="other", at=MARK.at, by="ann", chunks=1)
    store.ledger.write(erasure)
    store.retire("other")
    moved = store.put_topic_aside(erasure, ForbiddenText())
    store.topic("other").append([told(51)])
    store.topic("talk").append([told(2)])
    [finding] = backup(source, target, DISK).findings
    assert finding.path == str(source / "other") and "is being erased" in finding.message
    assert traces(on_disk(target), 2) and not traces(on_disk(target), 51)
    erased(store, moved)
    assert backup(source, target, DISK).findings == []
    assert traces(on_disk(target), 51) and not traces(on_disk(target), 50)


@pytest.mark.parametrize("is_in_one_file", [False, True])
def test_a_folder_of_a_backup_that_has_later_text_beside_what_was_erased_loses_only_that_or_is_named(
    tmp_path: Path, is_in_one_file: bool
) -> None:
    source, target = tmp_path / "memory", tmp_path / "backup"
    store = open_store(None, source)
    store.topic("other").append([told(50)])
    backup(source, target, DISK)
    erasure = Erasure(id=store.clock.next(), kind="topic", topic_id="other", at=MARK.at, by="ann", chunks=1)
    store.ledger.write(erasure)
    erased(store, erasure, ForbiddenText())
    store.topic("other").append([told(51)])
    active = target / "other" / "active.bin"
    torn = active.rename(active.with_suffix(".bin.torn"))  # as if this backup had run while the topic was erased
    shutil.copy(source / "other" / "active.bin", active)
    if is_in_one_file:
        torn.write_bytes(torn.read_bytes() + active.read_bytes()[HEADER_BYTES:])
        for _ in range(2):
            report = backup(source, target, DISK)
            assert report.erased == 0
            [finding] = report.findings
            assert finding.path == str(target / "other") and "has other text beside" in finding.message
            assert traces(on_disk(target), 50) and traces(on_disk(target), 51)
        shutil.rmtree(target / "other")
    assert backup(source, target, DISK).findings == []
    assert traces(on_disk(target), 51) and not traces(on_disk(target), 50)


def test_what_waited_in_a_restored_journal_is_erased_again_without_later_text(tmp_path: Path) -> None:
    source, target = tmp_path / "memory", tmp_path / "backup"
    store = open_store(None, source)
    store.topic("other").append([told(50)])
    backup(source, target, DISK)
    at = store.clock.now_us()
    erasure = Erasure(id=store.clock.next(), kind="topic", topic_id="other", at=at, by="ann", chunks=1)
    store.ledger.write(erasure)
    erased(store, erasure, ForbiddenText())
    store.close()
    shutil.copytree(target / "other", source / "other")
    store, times = open_store(None, source), {51: at - 1, 52: at + 1}
    store.topic("other").append([msgspec.structs.replace(told(n), said_at=at, kind="turn") for n, at in times.items()])
    [again] = map(store.repetition, store.ledger)
    assert again is not None and again.kind == "chunks"
    assert again.chunk_uuids == {uuid_of(50), uuid_of(51)}


def test_a_chunk_is_erased_beside_a_record_that_became_unreadable_after_its_index_was_made(tmp_path: Path) -> None:
    store = open_store(None, tmp_path, segment_entries_max=5)
    topic = filled(store, 12)
    topic.seal_full()
    [path] = tmp_path.glob("talk/segments/seg_0001.bin")
    data = path.read_bytes()
    at = data.index(word(2).encode())
    path.write_bytes(data[:at] + b"\0" + data[at + 1 :])
    assert topic.erase([uuid_of(1)], MARK, Wiper(DISK)) == 1
    assert traces(on_disk(tmp_path), 1) == [] and f"user: {word(3)}" in live_contents(topic)
