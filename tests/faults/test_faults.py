"""A sample of the calls at which a disk can fail, under the real daemon; `make faults` tries all of them."""

import errno
import itertools
import shutil
import sys
from pathlib import Path

import forked_memd
import pytest
from conftest import MakeDaemon
from daemon_process import clean_environment, wait_until
from faulty_daemon import ENDS, SETTINGS, Fault, OldLog, compiled, environment, fact, live
from recording_upstream import recording_upstream

from memd.store.encryption.frames import new_key_file

pytestmark = [pytest.mark.process, pytest.mark.linux]
SAMPLE = [
    Fault("write", 12, errno.EIO),
    Fault("write", 33, ENDS),
    Fault("write", 25, errno.ENOSPC, lasts=True),
    Fault("sync", 21, ENDS),
    Fault("sync", 18, errno.EIO, lasts=True),
    Fault("rename", 4, errno.EIO),
    Fault("open", 45, errno.EIO),
    Fault("read", 1, errno.EIO),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("inject"))


@pytest.mark.parametrize("fault", SAMPLE, ids=str)
def test_what_was_acknowledged_is_kept_whatever_call_fails(
    make_daemon: MakeDaemon, library: Path, fault: Fault
) -> None:
    with recording_upstream(window=2048) as upstream:
        life = live(make_daemon(upstream.url, SETTINGS), library, fault)
    assert not life.complaints and not life.refused_start and life.counts[fault.kind] >= fault.nth
    assert life.acknowledged or fault.lasts


@pytest.mark.parametrize("nth", [2, 3])
def test_what_is_acknowledged_is_in_the_journal_and_what_was_never_written_is_named_at_the_end(
    make_daemon: MakeDaemon, library: Path, nth: int
) -> None:
    with recording_upstream(window=2048) as upstream:
        daemon = make_daemon(upstream.url, {"buffer": {"journal_fsync": "always", "store_after_seconds": 3600}})
        journal = daemon.data_dir / "default" / "hot.log"
        full = {"FAULT_CALL": "write", "FAULT_NTH": str(nth), "FAULT_TIMES": "0", "FAULT_ERRNO": str(errno.ENOSPC)}
        daemon.environment = environment(daemon, library) | full | {"FAULT_FOLDER": str(journal)}
        daemon.start()
        answers = [daemon.chat([{"role": "user", "content": fact(number)[0]}]) for number in range(nth)]
        assert daemon.terminate() == 1
    for number, answer in enumerate(answers):
        is_acknowledged = not answer.headers["X-Memory-Status"].startswith("degraded")
        assert is_acknowledged == (fact(number)[1].encode() in journal.read_bytes())
    assert not is_acknowledged
    assert "what was said last is lost with the end of memd" in daemon.log.read_text()


def test_receipts_that_cannot_be_read_stop_no_start(make_daemon: MakeDaemon, library: Path, tmp_path: Path) -> None:
    new_key_file(tmp_path / "key")
    with recording_upstream(window=2048) as upstream:
        for settings in ({"encryption": {"key_file": str(tmp_path / "key")}}, {"ingest": {"redact": True}}):
            daemon = make_daemon(upstream.url, settings)
            daemon.start()
            daemon.chat([{"role": "user", "content": fact(1)[0]}])
            assert daemon.terminate() == 0
            unreadable = {"FAULT_CALL": "read", "FAULT_NTH": "1", "FAULT_TIMES": "0", "FAULT_ERRNO": str(errno.EIO)}
            path = str(daemon.data_dir / "memd.receipts")
            daemon.environment = environment(daemon, library) | unreadable | {"FAULT_FOLDER": path}
            daemon.start()
            answer = daemon.chat([{"role": "user", "content": fact(2)[0]}])
            assert answer.headers["X-Memory-Status"] == "injected"
            assert daemon.terminate() == 0
            said = daemon.log.read_text()
            assert f'receipts cannot be read error="{path}' in said and "Traceback" not in said


def test_words_that_cannot_be_read_hide_no_topic_that_is_encrypted(
    make_daemon: MakeDaemon, library: Path, tmp_path: Path
) -> None:
    new_key_file(tmp_path / "key")
    with recording_upstream(window=2048) as upstream:
        daemon = make_daemon(upstream.url, {**SETTINGS, "encryption": {"key_file": str(tmp_path / "key")}})
        daemon.start()
        for number in range(5):
            daemon.chat([{"role": "user", "content": fact(number)[0]}])
        words = daemon.data_dir / "default" / "segments" / "seg_0001.words"
        wait_until(words.exists, lambda: repr(daemon))
        assert daemon.terminate() == 0
        unreadable = {"FAULT_CALL": "read", "FAULT_NTH": "1", "FAULT_TIMES": "0", "FAULT_ERRNO": str(errno.EIO)}
        daemon.environment = environment(daemon, library) | unreadable | {"FAULT_FOLDER": str(words)}
        daemon.start()
        answer = daemon.chat([{"role": "user", "content": "Which code has the crane?"}])
        assert answer.headers["X-Memory-Status"] == "injected"


def test_an_old_log_is_filled_whatever_step_of_that_a_kill_ends(make_daemon: MakeDaemon, library: Path) -> None:
    with recording_upstream(window=2048) as upstream:
        together = SETTINGS | {
            "buffer": SETTINGS["buffer"] | {"store_after_seconds": 1}
        }  # questions with their answers
        written = make_daemon(upstream.url, together)
        old = OldLog(written.data_dir, tuple(live(written, library, Fault()).acknowledged))
        under = "default/segments"
        counts = live(make_daemon(upstream.url, SETTINGS), library, Fault(under=under), old).counts
        steps = [(kind, nth) for kind in ("write", "sync", "rename") for nth in range(1, counts[kind] + 1)]
        assert len(steps) >= 6, "it writes, syncs and names two files at least"
        for kind, nth in steps:
            fault = Fault(kind, nth, ENDS, under=under)
            life = live(daemon := make_daemon(upstream.url, SETTINGS), library, fault, old)
            assert life.counts[kind] == nth and not life.complaints, fault
            assert _words_in(daemon.data_dir).items() <= _words_in(old.folder).items(), fault


def test_a_kill_at_any_step_on_its_key_costs_no_memory_that_is_being_decrypted(
    make_daemon: MakeDaemon, library: Path
) -> None:
    with recording_upstream(window=2048) as upstream:
        daemon = make_daemon(upstream.url, {})
        new_key_file(daemon.folder / "key")
        daemon.environment = {"MEMD_ENCRYPTION_KEY_FILE": str(daemon.folder / "key")}
        daemon.start()
        daemon.chat([{"role": "user", "content": fact(1)[0]}])
        assert daemon.terminate() == 0
    off = [sys.executable, "-m", "memd", "encrypt", "off", "--data-dir", str(daemon.data_dir)]
    given = clean_environment() | daemon.environment
    encrypted = daemon.data_dir.rename(daemon.folder / "encrypted")
    for kind in ("sync", "unlink"):
        for nth in itertools.count(1):
            shutil.copytree(encrypted, daemon.data_dir, dirs_exist_ok=True)
            fails = environment(daemon, library) | {"FAULT_FOLDER": str(daemon.data_dir / "memd.key")}
            fails |= {"FAULT_CALL": kind, "FAULT_NTH": str(nth), "FAULT_ERRNO": str(ENDS)}
            ended = forked_memd.run(off, given | fails)
            if ended.returncode == 0:
                break
            again = forked_memd.run(off, given)
            assert again.returncode == 0 or "is not encrypted" in again.stderr, (kind, nth, again.stderr)
            assert daemon.run("verify").returncode == 0, (kind, nth)
            shutil.rmtree(daemon.data_dir)


def _words_in(data_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data_dir.rglob("*.words")}
