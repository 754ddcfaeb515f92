"""A full or slow disk under a running daemon: requests keep flowing, nothing is lost, and the answers say so."""

import asyncio
import errno
import json
import logging
import resource
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Connect, MakeDaemon
from daemon_in_process import Client, daemon_in_process
from daemon_process import RECALL_MILLISECONDS_MAX, DaemonProcess, ask, wait_until
from drafts import open_store
from full_disk import FullDisk
from recording_upstream import RecordingUpstream

from memd.cli.check.machine import directory
from memd.cli.main import main
from memd.errors import StoreError, StoreWriteFailed
from memd.ingest.topics import OPEN_MAX
from memd.proxy.remember import JOURNAL_SECONDS_MAX
from memd.settings.model import BufferSettings, CompactionSettings, LogSettings, RetrievalSettings
from memd.store.disk import RESERVE_BYTES, RESERVE_FILES, DiskTrouble, DiskWatch, LocalDisk, Room, disk_trouble
from memd.store.layout import ADDRESS_NAME, ERASURES_NAME, RECEIPTS_NAME
from memd.store.tools.export import export
from memd.store.tools.verify import verify

RETRIED_WITHIN_SECONDS = 60.0


@pytest.fixture
def disk() -> FullDisk:
    return FullDisk()


def daemon_on(files: LocalDisk, folder: Path, **more: Any) -> AbstractAsyncContextManager[Client]:
    settings = {
        "buffer": BufferSettings(soft_tokens=256, hard_tokens=400),
        "compaction": CompactionSettings(retry_seconds=0.01),
        "log": LogSettings(level="error"),
        "retrieval": RetrievalSettings(timeout_ms=RECALL_MILLISECONDS_MAX),
    }
    return daemon_in_process(folder, files=files, **(settings | more))


@pytest.fixture
async def client(tmp_path: Path, disk: FullDisk, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setattr("memd.ingest.topics.LOOK_SECONDS", 0.05)
    async with daemon_on(disk, tmp_path) as client:
        yield client


async def _said(client: Client, history: list[dict[str, str]], text: str) -> tuple[int, str]:
    """Status and `X-Memory-Status` of the next turn of a chat."""
    history.append({"role": "user", "content": text})
    status, memory, answer = await client.send(history)
    history.append(answer["choices"][0]["message"])
    return status, memory


async def _got(client: Client, name: str) -> str:
    async with client.session.get(f"{client.daemon.own_url}/memd/{name}") as answer:
        return await answer.text()


async def _told(client: Client, *, is_full: bool) -> Any:
    """Its health, once its metrics say how the disk is: that is looked at a moment later."""
    line = f'memd_disk_trouble{{kind="full"}} {float(is_full)}'
    async with asyncio.timeout(RETRIED_WITHIN_SECONDS):
        while line not in (await _got(client, "metrics")).splitlines():  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.02)
    return json.loads(await _got(client, "health"))


def _facts(count: int, start: int = 0) -> list[str]:
    return [f"Fact {n}: locker {n} belongs to crew {n * 7}, its code is {n * 1319}." for n in range(start, count)]


async def _all_stored(client: Client) -> None:
    """Store what is in the buffer; a failure of just now makes the archiver wait before it tries again."""
    topic = await client.daemon.topics.get("default")
    async with asyncio.timeout(RETRIED_WITHIN_SECONDS):
        for conversation in topic.buffer.conversations():
            while not await client.daemon.archiver.store(topic, conversation, len(conversation)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_on_a_full_disk_requests_flow_and_nothing_is_lost(client: Client, disk: FullDisk, tmp_path: Path) -> None:
    history: list[dict[str, str]] = []
    for fact in _facts(6):
        assert (await _said(client, history, fact))[0] == 200

    disk.full = True
    statuses = [await _said(client, history, fact) for fact in _facts(14, start=6)]
    assert {status for status, _ in statuses} == {200}
    assert statuses[-1][1] == "degraded:disk-full"
    health = await _told(client, is_full=True)
    [trouble] = health["troubles"]
    assert trouble["what"].endswith("memory: the disk is full") and trouble["remedy"] == "free some space"
    assert trouble["since"] > 0 and health["trouble"] == f"{trouble['what']}; {trouble['remedy']}"
    assert (health["status"], health["memory"]) == ("ok", "degraded")

    disk.full = False
    for fact in _facts(18, start=14):
        await _said(client, history, fact)
    await _all_stored(client)
    assert (await _said(client, history, "Thanks."))[1] != "degraded:disk-full"
    health = await _told(client, is_full=False)
    assert (health["memory"], health["trouble"]) == ("ok", None)

    data_dir = tmp_path / "memory"
    stored = "\n".join(entry["content"] for entry in export(data_dir, LocalDisk(), topic_id="default", live_only=True))
    assert [fact for fact in _facts(18) if fact not in stored] == []
    report = verify(data_dir, LocalDisk())
    assert report.ok, report.lines


async def test_corrections_on_a_full_disk_fail_as_such_and_change_nothing(client: Client, disk: FullDisk) -> None:
    await client.ask("The spare key hangs behind the blue bicycle.")
    _, _, said = await client.ask("Where does the spare key hang?", memory_in={})
    shown = [chunk["id"] for chunk in said["memory_out"]["injected_chunks"]]
    assert shown

    disk.full = True
    correction = {"chunk_ids": shown, "action": "Update", "reason": "moved", "content": "It hangs in the shed."}
    status, memory_status, said = await client.ask("Noted?", memory_in={"corrections": [correction]})
    assert (status, memory_status) == (200, "degraded:disk-full")
    failed = [signal["chunk_id"] for signal in said["memory_out"]["signals"] if signal["type"] == "correction_failed"]
    assert failed == shown

    disk.full = False
    _, _, said = await client.ask("So where does the spare key hang?", memory_in={})
    assert shown[0] in [chunk["id"] for chunk in said["memory_out"]["injected_chunks"]]


async def test_a_daemon_that_started_on_a_full_disk_is_found_by_its_folder_once_there_is_room(
    tmp_path: Path, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.daemon.app.SAY_WHERE_SECONDS", 0.02)
    address = tmp_path / "memory" / ADDRESS_NAME
    disk.full = True
    async with daemon_on(disk, tmp_path) as client:
        assert not address.exists()
        disk.full = False
        async with asyncio.timeout(60):
            while not address.exists():  # noqa: ASYNC110  # a file tells nobody
                await asyncio.sleep(0.01)
        assert address.read_text() == client.daemon.local_url
    assert not address.exists()


class FullAtErasure(FullDisk):
    """Full from when a file of the ledger of erasures is to be written."""

    number = 0
    """Which one of them; 0: none."""

    def create(self, path: Path) -> None:
        if path.parent.name == ERASURES_NAME and path.name.endswith(".json.tmp"):
            self.number -= 1
            self.full |= self.number == 0
        super().create(path)


async def _noted_and_erased(client: Client, disk: FullAtErasure, number: int) -> Any:
    """Three topics have a note, all of them are to be erased at once: the answer's error."""
    for topic in ("a", "b", "c"):
        note = {"topic_id": topic, "notes": [{"content": f"The gate of {topic} is locked at nine in the evening."}]}
        async with client.session.post(f"{client.daemon.own_url}/memd/notes", json=note) as answer:
            assert answer.status == 200, await answer.text()
        await client.stored(topic)
    disk.number = number
    async with client.session.post(f"{client.daemon.own_url}/memd/erase", json={"author": "owner"}) as answer:
        assert answer.status == 503, await answer.text()
        return (await answer.json())["error"]["message"]


def _exported(folder: Path) -> list[str]:
    return [one["content"] for one in export(folder / "memory", LocalDisk(), topic_id=None, live_only=True)]


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_an_erasure_that_cannot_be_written_down_whole_is_never_done(tmp_path: Path, number: int) -> None:
    disk = FullAtErasure()
    async with daemon_on(disk, tmp_path) as client:
        said = await _noted_and_erased(client, disk, number)
        assert "the erasure was not begun: " in said and said.endswith("the disk is full; free some space")
        assert list((tmp_path / "memory" / ERASURES_NAME).iterdir()) == []
        disk.full = False
        async with client.session.post(f"{client.daemon.own_url}/memd/erase", json={"resume": True}) as answer:
            assert (await answer.json())["done"] == []
    async with daemon_on(LocalDisk(), tmp_path) as client:
        await client.daemon.retention.eraser.resume()
    assert len(_exported(tmp_path)) == 3


async def test_an_erasure_that_a_full_disk_interrupts_is_told_in_one_line_and_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullAtErasure()
    async with daemon_on(disk, tmp_path) as client:
        said = await _noted_and_erased(client, disk, 4)
        assert "the erasure in topic a is not finished, and goes on when that can be done: " in said
    monkeypatch.setattr("memd.ingest.erasing.RESUME_SECONDS", 0.02)
    caplog.clear()
    async with daemon_on(disk, tmp_path) as client:
        ledger = client.daemon.store.ledger
        async with asyncio.timeout(60):
            while not any("erasures" in one.getMessage() for one in caplog.records):  # noqa: ASYNC110  # a line of the log tells nobody
                await asyncio.sleep(0.01)
            assert len(ledger.pending) == 3
            disk.full = False
            while ledger.pending:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert _exported(tmp_path) == []
    [told] = [vars(one) for one in caplog.records if "erasures" in one.getMessage()]
    assert (told["msg"], told["left"]) == ("erasures are not finished, and tried again each minute", 3)
    assert "the disk is full" in str(told["error"]) and not any(one.exc_info for one in caplog.records)


# The trouble with a disk: when there is one, when it is over, and where it is told


PLENTY = 1 << 40
ON_TMPFS = """
import json, sys
from pathlib import Path
from memd.cli.check.machine import directory
from memd.store.disk import LocalDisk
from memd.store.disk import DiskWatch

folder, files = Path(sys.argv[1]), LocalDisk()
watch = DiskWatch(files, folder, lambda: 7)
watch.look(is_doubtful=False)
[said] = directory(folder, files)
trouble = watch.trouble
told = None if trouble is None else [trouble.kind, trouble.what, trouble.remedy]
print(json.dumps([told, [said.mark, said.said, said.remedy]]))
"""


@pytest.mark.parametrize(
    ("room", "was", "kind"),
    [
        (Room(PLENTY, PLENTY, is_read_only=False), False, None),
        (Room(None, None, is_read_only=False), True, None),
        (Room(RESERVE_BYTES - 1, PLENTY, is_read_only=False), False, "full"),
        (Room(RESERVE_BYTES, PLENTY, is_read_only=False), False, None),
        (Room(RESERVE_BYTES, PLENTY, is_read_only=False), True, "full"),
        (Room(PLENTY, RESERVE_FILES - 1, is_read_only=False), False, "inodes"),
        (Room(PLENTY, 0, is_read_only=False), False, "inodes"),
        (Room(PLENTY, RESERVE_FILES, is_read_only=False), True, "inodes"),
        (Room(PLENTY, PLENTY, is_read_only=True), False, "read-only"),
    ],
)
def test_a_disk_is_in_trouble_until_there_is_some_more_room(room: Room, was: bool, kind: str | None) -> None:
    found = disk_trouble(Path("/memory"), room, was=was)
    assert (None if found is None else found.kind) == kind
    assert found is None or found.remedy


class ProbedDisk(FullDisk):
    probes = 0

    def try_writing(self, directory: Path, data: bytes) -> None:
        self.probes += 1
        super().try_writing(directory, data)


def test_a_disk_is_tried_only_in_doubt_and_its_trouble_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memd")
    disk, now = ProbedDisk(), iter(range(1, 99))
    watch = DiskWatch(disk, tmp_path, lambda: next(now))

    def looked(*, is_doubtful: bool) -> DiskTrouble | None:
        watch.look(is_doubtful=is_doubtful)
        return watch.trouble

    disk.full = True
    assert (looked(is_doubtful=False), disk.probes) == (None, 0)
    for is_doubtful in (True, True, False):  # it is tried again until there is room
        found = looked(is_doubtful=is_doubtful)
        assert found is not None and (found.kind, found.since) == ("full", 1)
        [said] = directory(tmp_path, disk)
        assert (said.mark, said.said, said.remedy) == ("failed", found.what, found.remedy)
    [record] = caplog.records
    assert record.getMessage().startswith("the disk is in trouble; what is said waits in memory")
    disk.full = False
    assert looked(is_doubtful=False) is None
    assert caplog.records[-1].getMessage() == "the disk can be written again"


def test_a_directory_that_is_gone_is_a_trouble(tmp_path: Path) -> None:
    watch = DiskWatch(LocalDisk(), tmp_path / "gone")
    watch.look(is_doubtful=False)
    assert watch.trouble is not None and watch.trouble.kind == "errors"


def test_stats_tell_of_a_disk_as_the_check_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(None, tmp_path).close()
    monkeypatch.setattr(LocalDisk, "room", lambda self, directory: Room(PLENTY, 7, is_read_only=False))
    [found] = directory(tmp_path, LocalDisk())
    told = CliRunner().invoke(main, ["stats", "--data-dir", str(tmp_path)]).output
    assert f"In trouble: {found.said}; {found.remedy}." in " ".join(told.split())


@pytest.mark.process
@pytest.mark.linux
@pytest.mark.parametrize(
    ("prepared", "kind", "words"),
    [
        ("true", None, "free"),
        ('head -c 25m /dev/zero > "$0/ballast"', "full", "the disk is full"),
        ('i=0; while [ $i -lt 90 ]; do : > "$0/$i"; i=$((i+1)); done', "inodes", "inodes are used up"),
        ('mount -o remount,ro "$0"', "read-only", "the disk is read-only"),
    ],
)
def test_a_daemon_and_the_check_tell_a_disk_alike(prepared: str, kind: str | None, words: str, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this machine gives no mount namespace to its users")
    mounted = f'mount -t tmpfs -o size=40m,nr_inodes=120 tmpfs "$0" && {prepared} && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mounted, str(tmp_path), sys.executable, "-c", ON_TMPFS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, (mark, said, remedy) = json.loads(done.stdout)
    assert words in said
    assert mark == ("warning" if kind is None else "failed")
    assert told == (None if kind is None else [kind, said, remedy])


# A slow disk: nobody waits for it, and what is told of the turns keeps their order

SYNC_SECONDS = 0.2


class SlowDisk(LocalDisk):
    """The real disk, but before it syncs, or writes into a journal, it waits."""

    def __init__(
        self, sync_waits: Callable[[], object] = lambda: None, journal_waits: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__()
        self.sync_waits, self.journal_waits = sync_waits, journal_waits

    def append(self, path: Path, data: bytes, identity: Hashable | None = None) -> None:
        if path.name == "hot.log":
            self.journal_waits()
        super().append(path, data, identity)

    def sync(self, path: Path) -> None:
        self.sync_waits()
        super().sync(path)


async def test_turns_are_kept_and_told_in_the_order_in_which_they_were_answered(tmp_path: Path) -> None:
    """One that waits for the disk is not overtaken by the next, which has nothing to remember."""
    slow = SlowDisk(sync_waits=lambda: time.sleep(SYNC_SECONDS))
    answered: list[str] = []
    async with (
        daemon_on(slow, tmp_path, buffer=BufferSettings(journal_fsync="always")) as client,
        client.session.get(f"{client.daemon.own_url}/memd/events") as events,
    ):
        for turn in range(6):
            async with client.post(f"Is locker {turn} taken?", mode=("full", "readonly")[turn % 2]) as answer:
                assert answer.status == 200
                answered.append(answer.headers["X-Memory-Turn"])
        told: list[str] = []
        async with asyncio.timeout(60):
            async for line in events.content:
                if line.startswith(b"data: ") and "turn_id" in (data := json.loads(line.removeprefix(b"data: "))):
                    told.append(data["turn_id"])
                    assert "topic_id" in await _got(client, f"turns/{told[-1]}"), "who hears of a turn can ask for it"
                if len(told) == len(answered):
                    break
    assert told == answered
    kept = [json.loads(line) for line in (tmp_path / "memory" / RECEIPTS_NAME).read_text().splitlines() if line]
    assert [receipt["turn_id"] for receipt in kept] == answered


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_answer_ends_when_the_upstream_ends_it_and_waits_for_no_journal(tmp_path: Path, stream: bool) -> None:
    gate = threading.Event()
    disk = SlowDisk(journal_waits=lambda: gate.wait(60))
    try:
        async with daemon_on(disk, tmp_path, buffer=BufferSettings(store_after_seconds=0)) as client:
            async with asyncio.timeout(60):
                async with client.post("Is the locker taken?", stream=stream) as answer:
                    assert answer.headers["X-Memory-Status"] == "none"
                    first = await answer.content.readany()
                    began = time.monotonic()
                    rest = await answer.content.read()
            assert time.monotonic() - began < JOURNAL_SECONDS_MAX / 2
            assert b"[DONE]" in first + rest or not stream
            assert not gate.is_set()
            gate.set()
    finally:
        gate.set()


# Descriptors: many topics and many connections need few of them


DESCRIPTORS_MAX = 256
"""What macOS gives a process by default."""
TOPICS = 280


def fact(number: int) -> str:
    return f"The locker number {number} is opened with the key {number * 37 % 1009}."


def tell(daemon: DaemonProcess, number: int) -> None:
    answer = daemon.chat([{"role": "user", "content": fact(number)}], memory_in={"topic_id": f"topic{number}"})
    assert answer.status == 200 and answer.headers["X-Memory-Status"] == "none"


def test_more_topics_than_256_descriptors_are_stored_and_all_connections_taken(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, connect: Connect
) -> None:
    daemon = make_daemon(upstream.url)
    daemon.descriptors_max = DESCRIPTORS_MAX
    daemon.start()
    for number in range(TOPICS - 1):
        tell(daemon, number)
        assert number % 20 or is_healthy(daemon)
    held = [connect(daemon.base_url) for _ in range(DESCRIPTORS_MAX)]
    wait_until(lambda: "made room for another" in daemon.log.read_text(), lambda: f"there was room: {daemon!r}")
    assert is_healthy(daemon), "silent connections keep nobody out"
    for client in held:
        client.close()
    wait_until(lambda: is_healthy(daemon), lambda: f"it does not heal: {daemon!r}")
    tell(daemon, TOPICS - 1)

    def missing() -> set[int]:
        lines = export(daemon.data_dir, LocalDisk(), topic_id=None, live_only=True)
        stored = "\n".join(line["content"] for line in lines)
        return {number for number in range(TOPICS) if fact(number) not in stored}

    wait_until(lambda: not missing(), lambda: f"not stored: {missing()}")
    wait_until(lambda: count_open(daemon) <= OPEN_MAX, lambda: f"{count_open(daemon)} topics are open")
    said = daemon.log.read_text()
    assert "Too many open files" not in said and "Traceback" not in said
    assert f"this process may have {DESCRIPTORS_MAX} descriptors" in said and "ulimit -n" in said


def count_open(daemon: DaemonProcess) -> int:
    return sum(topic["is_open"] for topic in ask(f"{daemon.own_url}/memd/topics").json["topics"])


def is_healthy(daemon: DaemonProcess) -> bool:
    try:
        return ask(f"{daemon.base_url}/memd/health").status == 200
    except OSError:
        return False


@pytest.mark.process
def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = "from memd.store.disk import descriptors_limit as now, raise_descriptors_limit as raised; "
    code += "print(now(), raised(), now(), raised())"
    limits = 'ulimit -Sn 128 && ulimit -Hn 700 && exec "$@"'
    told = subprocess.run(["sh", "-c", limits, "sh", sys.executable, "-c", code], capture_output=True, check=True)
    assert told.stdout.split() == [b"128", b"700", b"700", b"700"]


def count_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def logs(files: LocalDisk, folder: Path, count: int) -> list[Path]:
    paths = [folder / f"log{number}" for number in range(count)]
    for path in paths:
        files.create(path)
    for path in paths:
        files.sync(path)
    return paths


def test_files_beyond_the_limit_are_synced_at_once_and_lose_nothing(tmp_path: Path) -> None:
    files, before = LocalDisk(unsynced_max=3), count_descriptors()
    paths = logs(files, tmp_path, 20)
    for text in (b"one ", b"two ", b"three"):
        for path in paths:
            files.append(path, text)
            assert count_descriptors() <= before + 3
    for path in paths:
        files.sync(path)
    assert count_descriptors() == before, "what is synced has no descriptor"
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [b"one two three"] * 20


def test_a_write_that_cannot_be_synced_for_want_of_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalDisk(unsynced_max=1)
    first, second = logs(files, tmp_path, 2)

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    files.append(first, b"not synced")
    with monkeypatch.context() as patched:
        patched.setattr("memd.store.disk.sync_descriptor", broken)
        with pytest.raises(StoreWriteFailed, match=r"log1: cannot be written \(Input/output error\)"):
            files.append(second, b"one too many")
    files.sync(first)


def test_an_error_for_want_of_descriptors_names_the_limit_and_the_remedy(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = LocalDisk()
    (tmp_path / "log").write_bytes(b"")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StoreError, match=r"the limit of this process is 3\); allow more: `ulimit -n"):
            files.read(tmp_path / "log")
        with pytest.raises(StoreWriteFailed, match=r"the limit of this process is 3\); allow more: `ulimit -n"):
            files.append(tmp_path / "log", b"one")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
