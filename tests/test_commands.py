"""`memd turn`, `log`, `show`, `correct` and `undo`: as a user runs them, with a daemon and without."""

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, user, wait_until
from facts import INODES, NO_NEIGHBOURS, POSTGRES, QUESTION
from recording_upstream import RecordingUpstream, Response, chat_answer

from memd.admin.reads import log_page
from memd.cli import operations, sources
from memd.cli.flags import say
from memd.cli.main import main
from memd.cli.running import daemon_for
from memd.ingest.imports.parts import Sending
from memd.ingest.sources.look import look
from memd.settings.model import Config
from memd.store.store import TopicLog

FACTS = (POSTGRES, INODES)


@pytest.fixture(params=["with a daemon", "without"])
def told(serving: Serving, request: pytest.FixtureRequest) -> DaemonProcess:
    """A log with two facts and a turn in which one of them was shown; its daemon runs, or has ended."""
    daemon = serving(NO_NEIGHBOURS)
    daemon.tell(*FACTS, topic="work")
    daemon.chat([user(QUESTION)], headers={"X-Memory-Mode": "readonly"}, memory_in={"topic_id": "work"})
    turns = f"{daemon.own_url}/memd/turns?limit=1"
    wait_until(lambda: bool(ask(turns).json["turns"][0]["injected"]), lambda: ask(turns).body.decode())
    if request.param == "without":
        assert daemon.terminate() == 0
    return daemon


with_a_daemon = pytest.mark.parametrize("told", ["with a daemon"], indirect=True)
"""What does not depend on it."""


def out(daemon: DaemonProcess, *arguments: str) -> str:
    done = daemon.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def events(daemon: DaemonProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out(daemon, "log", "--json"))["events"]
    return found


def latest_turn(daemon: DaemonProcess) -> str:
    turn_id: str = json.loads(out(daemon, "turn", "--json", "--limit", "1"))["turns"][0]["turn_id"]
    return turn_id


def test_a_request_that_was_retried_after_a_failure_is_told_as_stored(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    failures = iter([Response((b"bad gateway",), status=502)])
    upstream.answer = lambda request: next(failures, None) or chat_answer(request)
    daemon = make_daemon(upstream.url).start()
    assert [daemon.chat([user(FACTS[0])]).status for _ in "12"] == [502, 200]
    wait_until(lambda: len(daemon.export()) == 1, lambda: f"stored: {daemon.export()}")
    wait_until(lambda: len(json.loads(out(daemon, "turn", "--json"))["turns"]) == 2, daemon.__repr__)
    retried, first = [line for line in out(daemon, "turn").splitlines() if FACTS[0][:20] in line]
    assert "HTTP 502" in first and "kept" in retried and "no memory" not in retried


def test_a_turn_is_explained(told: DaemonProcess) -> None:
    listed = out(told, "turn", "--topic", "work")
    assert latest_turn(told) in listed and QUESTION in listed
    explained = out(told, "turn", latest_turn(told))
    assert "[memory] Excerpts" in explained and FACTS[0] in explained and QUESTION in explained
    assert re.search(r"memory took \d+ tokens", explained)
    assert " shown to the model\n" in explained and "injected" not in explained
    budget = json.loads(out(told, "turn", latest_turn(told), "--json"))["budget_tokens"]
    assert f"Candidates for a budget of {budget:,} tokens" in explained
    assert re.search(r"[0-9a-f]{4}\s.*\sshown to the model", explained)
    refused = told.run("turn", "0123456789abcdef")
    assert refused.returncode == 1 and "no receipt" in refused.stderr


def test_a_correction_its_effect_and_its_undo(told: DaemonProcess) -> None:
    [chunk] = [event for event in events(told) if "PostgreSQL" in event["content"]]
    done = out(
        told, "correct", chunk["id"], "--update", "We moved the bookings to SQLite in May.", "--reason", "simpler"
    )
    [replacement] = re.findall(r"^([0-9a-f]+) is shown in its place in topic work\n  We moved", done, re.MULTILINE)
    back = f"memd undo {chunk['id']} takes it back"
    assert f"{chunk['id']} is no longer shown in topic work; {back}\n  user: For the booking" in done
    assert "We moved the bookings to SQLite in May." in out(told, "show", replacement)
    refused = told.run("undo", replacement).stderr
    assert f"took the place of {chunk['uuid'][:8]}: `memd undo {chunk['uuid'][:8]}` takes that back" in refused
    shown = out(told, "log", "--limit", "2")
    assert "because: simpler" in shown and "bookings to SQLite" in shown
    heads = [line for line in shown.splitlines() if "  entry " in line]
    assert ["taken out" in head for head in heads] == [False, True]  # the replacement, and what it replaced
    story = out(told, "show", chunk["id"])
    assert "is taken out" in story and "Its place was taken by" in story and FACTS[0] in story
    replayed = out(told, "turn", latest_turn(told), "--replay")
    assert f"- {chunk['id']}" in replayed and "SQLite" in replayed.partition("The same question now")[2]
    entry = next(event for event in events(told) if event["event"] == "Update")["canonical_id"]
    undone = out(told, "undo", str(entry), "--reason", "no, we did not")
    assert f"{replacement} is no longer shown" in undone and f"{chunk['id']} is shown again" in undone
    story = out(told, "show", chunk["id"])
    assert "is live" in story.splitlines()[0] and "Its place was taken by" not in story
    assert "nothing is different" in out(told, "turn", latest_turn(told), "--replay")
    assert told.run("verify").returncode == 0


@with_a_daemon
def test_wrong_usage_says_what_to_do_and_what_was_praised_blamed_or_taken_out_is_told_as_it_is(
    told: DaemonProcess,
) -> None:
    before = told.export()
    for arguments, says in (
        (["correct", "a3f9"], "--deprecate"),
        (["correct", "a3f9", "--helpful", "--deprecate"], "not --helpful and --deprecate"),
        (["correct", "a3f9", "--unhelpful", "--helpful"], "give one of --helpful, --unhelpful"),
        (["correct", "a3f9", "--update", "  "], "needs a text"),
        (["correct", "../etc", "--helpful"], "no chunk's id"),
        (["show", "?"], "no chunk's id"),
        (["log", "--before", "soon"], "memd: --before: 'soon' is no time"),
        (["search", "key", "--as-of", "soon"], "memd: --as-of: 'soon' is no time"),
        (["turn", "../x"], "no turn's id"),
        (["turn", "zzzz"], "no turn's id"),
        (["show", "zzzz"], "no chunk's id"),
        (["undo", "zzzz"], "no chunk's id"),
    ):
        refused = told.run(*arguments)
        assert refused.returncode == 2 and says in refused.stderr and refused.stderr.count("\n") == 1, arguments
    for arguments, says in (
        (["show", "ffffffffffff"], "no chunk has the id"),
        (["correct", "ffffffffffff", "--helpful"], "no chunk has the id"),
        (["undo", "12"], "no entry 12"),
        (["undo", "12", "--topic", "work"], "no entry 12"),
        (["turn", "ffffffffffffffff"], "the id is wrong"),
    ):
        refused = told.run(*arguments)
        assert refused.returncode == 1 and says in refused.stderr and refused.stderr.count("\n") == 1, arguments
    assert told.export() == before

    chunk = events(told)[0]
    for flag, multiplier in (("--helpful", 1.5), ("--unhelpful", 1), ("--unhelpful", 1 / 1.5)):
        out(told, "correct", f"[mem:{chunk['id']}]", flag)
        assert events(told)[0]["multiplier"] == pytest.approx(multiplier)
    for name, counts in (("id", "once"), ("canonical_id", "0.667 times")):  # the second takes back what the first did
        undone = out(told, "undo", str(events(told)[0][name]))
        assert f"{chunk['id']} counts {counts} now" in undone and "shown again" not in undone

    chunk = events(told)[0]
    out(told, "correct", chunk["uuid"], "--deprecate", "--topic", "work", "--reason", "wrong")
    assert "is taken out" in out(told, "show", chunk["id"])
    assert f"{chunk['id']} is shown again" in out(told, "undo", chunk["id"])
    assert "is live" in out(told, "show", chunk["id"])
    other = events(told)[-1]["id"]
    assert f"chunk {other} was not corrected" in told.run("undo", other).stderr
    assert told.run("undo", "--topic", "work", "3").stderr == (
        "memd: there is no entry 3; undo takes a chunk's id (9ada), or the number behind `entry` in `memd log`\n"
    )

    earlier = out(told, "log", "--topic", "work", "--before", "2020-01-01")
    assert "Nothing before 2020-01-01" in earlier and "stored" not in earlier

    out(told, "remember", "The cellar was dry.", "--topic", "work", "--said-at", "2020-05-03")
    note, *others = [line for line in out(told, "log").splitlines() if "  entry " in line]
    assert "  said 2020-05-03 " in note and re.match(time.strftime("%Y-"), note)
    assert others and not any("  said " in line for line in others)


def test_what_waits_in_the_journal_after_a_kill_is_told_shown_and_corrected(serving: Serving) -> None:
    never = {"buffer": {"store_after_seconds": 3600, "idle_seconds": 3600, "journal_fsync": "always"}}
    daemon = serving(never)
    daemon.chat([user(FACTS[0])], memory_in={"topic_id": "work"})
    daemon.kill()
    config = ("--config", str(daemon.config))  # without it a command's own daemon would store it after a second
    waits = "2 messages are not in the log yet and wait in the journal"
    where = {"MEMD_CONFIG": str(daemon.config), "MEMD_DATA_DIR": str(daemon.data_dir)}
    told = CliRunner().invoke(main, [], env=where).output
    assert waits in told and "memd stores them while it runs" in told  # and not "in a moment": none runs
    assert waits in out(daemon, "stats")
    assert json.loads(out(daemon, "stats", "--json"))["waiting_messages"] == 2
    assert waits in daemon.run("check", *config).stdout
    exported = daemon.run("export")
    assert (exported.returncode, exported.stdout) == (0, "") and waits in exported.stderr
    assert "find what is answered already" in exported.stderr  # what has no answer is not found yet
    assert waits in out(daemon, "log", *config)

    found = json.loads(out(daemon, "search", FACTS[0], "--json", *config))["chunks"][0]
    shown = out(daemon, "show", found["id"], *config)
    assert FACTS[0] in shown and "is not in the log yet" in shown
    assert json.loads(out(daemon, "show", found["uuid"], "--json", *config))["versions"][0]["event"] == "pending"
    assert "no chunk has the id" in daemon.run("show", "ffffffffffff", *config).stderr
    assert "counts for more" in out(daemon, "correct", found["id"], "--helpful", *config)
    assert "is live" in out(daemon, "show", found["id"], *config)


def test_a_backup_that_was_looked_into_takes_the_next_one(served: DaemonProcess, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for fact in FACTS:
        served.chat([user(fact)], memory_in={"topic_id": "work"})
        served.wait_stored(fact)
        served.export()
        out(served, "backup", str(kept))
        for command in (["log"], ["search", fact], ["stats"]):
            assert CliRunner().invoke(main, [*command, "--data-dir", str(kept)]).exit_code == 0
    out(served, "backup", str(kept))
    held = CliRunner().invoke(main, ["export", "--data-dir", str(kept)]).stdout.splitlines()
    assert [json.loads(line)["content"] for line in held] == [entry["content"] for entry in served.export()]


def test_what_fails_beside_a_command_is_told_with_its_reason(serving: Serving) -> None:
    daemon = serving({"segment": {"max_entries": 2}})
    for fact in FACTS:
        daemon.chat([user(fact)], memory_in={"topic_id": "work"})
        daemon.wait_stored(fact)
    segment = daemon.data_dir / "work" / "segments" / "seg_0001.bin"
    wait_until(segment.with_suffix(".meta").exists, lambda: repr(daemon))
    assert daemon.terminate() == 0
    segment.write_bytes(segment.read_bytes().replace(FACTS[1].encode(), FACTS[1].swapcase().encode()))
    found = daemon.run("search", QUESTION)
    assert found.returncode == 0 and FACTS[0] in found.stdout
    told = r" ERROR chunks of a file cannot be recalled; run `memd verify` topic=work .*error=.*seg_0001"
    assert re.search(told, found.stderr), found.stderr
    daemon.start()
    for fact in (QUESTION, *FACTS):
        daemon.run("search", fact)
    assert len(re.findall(told, daemon.log.read_text())) == 1, "once a file"


def test_a_command_waits_for_a_daemon_that_is_being_started(
    served: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = served.data_dir / "memd.url"
    waited: list[float] = []
    known = address.read_text()

    def has_started(seconds: float) -> None:
        waited.append(seconds)
        address.write_text(known)

    monkeypatch.setattr("memd.cli.running.time.sleep", has_started)
    for before in (None, "http://127.0.0.1:1"):  # the one that a killed daemon has left
        waited.clear()
        address.unlink() if before is None else address.write_text(before)
        with daemon_for(Config(data_dir=served.data_dir)) as daemon:
            assert daemon.url == served.own_url and len(waited) == 1


def test_a_replacement_that_an_undo_took_away_is_told_so(tmp_path: Path) -> None:
    def memd(*arguments: str) -> str:
        return CliRunner().invoke(main, [*arguments, "--data-dir", str(tmp_path)]).stdout

    [wrong] = re.findall(r"mem:(\w+)", memd("remember", "The key is red.\r\nIt is new."))
    memd("correct", wrong, "--update", "The key is blue.")
    memd("undo", wrong)
    heads = [line.split("  ") for line in memd("log").splitlines() if "entry" in line]
    told = {f"{head[1]} " + ("old" if head[2] == wrong else "new"): head[-1] == "taken out" for head in heads}
    assert told == {
        "told old": False,
        "Update old": True,
        "replacement new": False,
        "Undo new": True,
        "Undo old": False,
    }
    assert "\\x0d" not in memd("log")


def test_in_another_folder_a_command_says_where_the_memory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    monkeypatch.chdir(home)
    told = CliRunner().invoke(main, ["remember", "The spare key is with Ann."])
    assert told.exit_code == 0 and not told.stderr, "there is no other memory"

    monkeypatch.chdir(other)
    meant = f"If you meant another one ({home / 'memory'}), name it: --data-dir {home / 'memory'}, "
    where = f"nothing is remembered yet in {other / 'memory'}, the memory of this folder. {meant}"
    for command in (["search", "Where is the key?"], ["add", str(home / "memory"), "--format", "md"]):
        assert where in CliRunner().invoke(main, command).stderr
    assert where[1:] in CliRunner().invoke(main, []).output
    named = CliRunner().invoke(main, ["search", "Where is the key?", "--data-dir", "memory"])
    assert (
        "remembered" not in named.stderr
        and not CliRunner().invoke(main, ["log"], env={"MEMD_DATA_DIR": "memory"}).stderr
    )
    there = CliRunner().invoke(main, ["search", "Where is the spare key?", "--data-dir", str(home / "memory")])
    assert "Ann" in there.stdout and not there.stderr, "that one was named"
    noted = CliRunner().invoke(main, ["remember", "The office is in Bergen."])
    assert where in noted.stderr
    again = CliRunner().invoke(main, ["search", "Where is the office?"])
    assert "Bergen" in again.stdout and not again.stderr, "by now it has something"


@pytest.mark.process
def test_where_a_memd_runs_on_the_empty_memory_of_the_folder_no_other_one_is_offered(
    served: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    kept = CliRunner().invoke(main, ["remember", "The spare key is with Ann.", "--data-dir", str(tmp_path / "home")])
    assert kept.exit_code == 0
    monkeypatch.chdir(served.data_dir.parent)
    Path("notes.md").write_text("The office is in Bergen.")
    added = CliRunner().invoke(main, ["add", "notes.md"])
    assert added.exit_code == 0 and not added.stderr and "1 chunk written" in added.stdout


@pytest.mark.process
def test_without_a_terminal_a_long_command_says_now_and_then_how_far_it_is(
    served: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_told = threading.Event()

    def tell(text: str) -> None:
        say(text)
        is_told.set()

    def slow(*given: Any, **more: Any) -> None:
        assert is_told.wait(60)
        look(*given, **more)

    monkeypatch.setattr(operations, "TOLD_SECONDS", 0.01)
    monkeypatch.setattr(operations, "say", tell)
    monkeypatch.setattr(sources, "look", slow)
    (tmp_path / "notes.md").write_text("The office is in Bergen.")
    added = CliRunner().invoke(main, ["add", str(tmp_path / "notes.md"), "--data-dir", str(served.data_dir)])
    assert added.exit_code == 0 and "1 chunk written" in added.stdout
    assert "memd: adding: 0 % done after 0 s\n" in added.stderr and "done" not in added.stdout


@pytest.mark.process
def test_a_long_command_that_is_asked_to_end_says_how_to_go_on(
    served: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "look", lambda *given, **more: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(Sending, "take", lambda *given: signal.raise_signal(signal.SIGTERM))
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"messages": [{"role": "user", "content": "The office is in Bergen."}]}\n')
    former = signal.signal(signal.SIGTERM, lambda *_: None)  # what there was before ends this process
    commands = ("add", str(tmp_path), "--as", "talks"), ("import", str(talk))
    try:
        told = [CliRunner().invoke(main, [*one, "--data-dir", str(served.data_dir)]) for one in commands]
    finally:
        signal.signal(signal.SIGTERM, former)
    assert [one.exit_code for one in told] == [1, 1]
    goes_on = "the same command goes on with the rest\n"
    assert f"memd: interrupted; {goes_on}" in told[0].stderr
    assert f"memd: interrupted; 0 files read; {goes_on}" in told[1].stderr, "what it had no time to find is not missing"


@pytest.mark.process
def test_beside_a_daemon_of_another_folder_nothing_is_put_in_until_one_of_them_is_named(
    served: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    CliRunner().invoke(main, ["log", "--data-dir", str(served.data_dir)])  # notes it, as the daemon did at its start
    (other := tmp_path / "other").mkdir()
    monkeypatch.chdir(other)
    Path("notes.md").write_text("The spare key is with Ann.")
    assert f"If you meant another one ({served.data_dir})" in CliRunner().invoke(main, []).output
    for command in (["add", "notes.md"], ["import", "notes.md"], ["remember", "The spare key is with Ann."]):
        refused = CliRunner().invoke(main, command)
        assert refused.exit_code == 2 and refused.stderr == (
            f"memd: memd runs on {served.data_dir}, and this folder has no memory of its own: for that one give "
            f"--data-dir {served.data_dir} (or set MEMD_DATA_DIR), for a new one here --data-dir memory\n"
        )
        assert not Path("memory").exists()
    for given in (["--data-dir", str(served.data_dir)], ["--data-dir", "memory"], []):
        kept = CliRunner().invoke(main, ["remember", "The spare key is with Ann.", *given])
        assert kept.exit_code == 0 and not kept.stderr, "it was named, or has something by now"
        assert kept.stdout.startswith("remembered" if given else "is remembered already"), "the last is in ./memory"
    (third := tmp_path / "third").mkdir()
    monkeypatch.chdir(third)
    Path("config.yaml").write_text("")
    assert CliRunner().invoke(main, ["add", "../other/notes.md"]).exit_code == 0, "its settings say where"


def test_a_backup_that_was_looked_into_is_not_offered_as_a_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for folder in ("home", "other"):
        (tmp_path / folder).mkdir()
    memory, backup = tmp_path / "home" / "memory", tmp_path / "backup"
    for command in (["remember", "The spare key is with Ann."], ["backup", str(backup)]):
        assert CliRunner().invoke(main, [*command, "--data-dir", str(memory)]).exit_code == 0
    assert "Ann" in CliRunner().invoke(main, ["log", "--data-dir", str(backup)]).stdout
    monkeypatch.chdir(tmp_path / "other")
    told = CliRunner().invoke(main, []).output
    assert f"({memory}), name it: --data-dir {memory}, " in told and str(backup) not in told


def test_a_home_that_cannot_be_written_takes_no_command_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(main, ["remember", "The spare key is with Ann."])
    assert told.exit_code == 0 and not told.stderr


def test_no_command_waits_for_indexes_that_are_being_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, given_up = threading.Event(), threading.Event()

    def merge(_: TopicLog, segment_ids: Sequence[int], give_way: Callable[[], None]) -> None:
        begun.set()
        try:
            while True:
                give_way()
        finally:
            given_up.set()

    stored = CliRunner().invoke(main, ["remember", "The spare key is with Ann.", "--data-dir", str(tmp_path)])
    assert stored.exit_code == 0
    monkeypatch.setattr(TopicLog, "due_merge", lambda *_: [1, 2])
    monkeypatch.setattr(TopicLog, "merge", merge)
    config = Config(data_dir=tmp_path)
    with daemon_for(config) as daemon:
        daemon.ask(log_page, limit=1)
        assert begun.wait(60)
        ending = time.monotonic()
    assert given_up.is_set() and time.monotonic() - ending < config.shutdown.grace_seconds, "that is for replies"
