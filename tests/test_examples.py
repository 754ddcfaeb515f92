"""The programs in examples/, as their users run them, against a real daemon."""

import json
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, clean_environment
from recording_upstream import RecordingUpstream, Request, Response, chat_answer

EXAMPLES = Path(__file__).parent.parent / "examples"
FACT = "The office moves to Bergen in May, and Marta keeps the keys."
QUESTION = "Who keeps the keys of the office?"
NIGHT = "Write down what will matter later"


def run(daemon: DaemonProcess, example: str, *arguments: str, token: str = "") -> subprocess.CompletedProcess[str]:
    addresses = {"MEMD_URL": daemon.own_url, "MEMD_BASE_URL": f"{daemon.base_url}/v1", "MEMD_AUTH_TOKEN": token}
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    return subprocess.run(
        command, env=clean_environment() | addresses, capture_output=True, text=True, check=False, timeout=120
    )


def as_night_model(request: Request) -> Response:
    """A model that writes two notes when it is asked for some, one of them from a record that there is not."""
    prompt = json.loads(request.body)["messages"][-1]["content"]
    if NIGHT not in prompt:
        return chat_answer(request)
    [record] = [found[1] for found in re.finditer(r"^\[([0-9a-f]+)\] .*Bergen", prompt, re.MULTILINE)]
    return chat_answer(
        request, f"Notes:\n- [{record}] The office is in Bergen from May on.\n[ffff] The moon is cheese."
    )


@pytest.fixture
def told(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    upstream.answer = as_night_model
    daemon = make_daemon(upstream.url).start()
    daemon.chat([{"role": "user", "content": FACT}], memory_in={"topic_id": "work"})
    daemon.wait_stored(FACT)
    return daemon


def day_of_the_fact(daemon: DaemonProcess) -> str:
    [entry] = daemon.export()
    return str(datetime.fromisoformat(entry["said_at"]).astimezone().date())


def test_memory_is_asked_without_a_chat(told: DaemonProcess, upstream: RecordingUpstream) -> None:
    chats = len(upstream.chats)
    done = run(told, "ask_memory.py", QUESTION, "--topic", "work")
    assert done.returncode == 0 and FACT in done.stdout and done.stdout.startswith("[mem:"), done
    assert len(upstream.chats) == chats, "no model was asked"
    nothing = run(told, "ask_memory.py", "How do I bake bread?")
    assert (nothing.returncode, nothing.stdout) == (0, "Nothing is remembered that has to do with it.\n")
    refused = run(told, "ask_memory.py", QUESTION, "--topic", "attic")
    assert refused.returncode == 1 and refused.stderr.startswith("memd: there is no topic 'attic'")


def test_the_model_writes_notes_at_night_with_their_sources_and_each_can_be_taken_out(
    told: DaemonProcess, upstream: RecordingUpstream
) -> None:
    [chunk] = told.export()
    day = day_of_the_fact(told)
    done = run(told, "night_notes.py", "--topic", "work", "--day", day)
    assert done.returncode == 0 and "The office is in Bergen from May on." in done.stdout, done
    assert "moon" not in done.stdout, "a note of no record is left out"
    assert FACT in upstream.prompts[-1] and upstream.chats[-1].header("X-Memory-Mode") is None
    told.wait_stored("in Bergen from May on")
    entries = told.export()
    [note] = [entry for entry in entries if entry["kind"] == "note"]
    assert note["source"] == f"mem:{chunk['id']}" and note["tags"] == ["night", f"night-{day}"]
    assert [entry["kind"] for entry in entries] == ["turn", "note"], "the call of the model is not remembered"

    again = run(told, "night_notes.py", "--topic", "work", "--day", day)
    assert again.returncode == 0 and f"{day} has notes already" in again.stdout and len(told.export()) == 2

    [undo] = re.findall(r"to take it out: memd (correct .*)$", done.stdout, re.MULTILINE)
    assert told.run(*shlex.split(undo)).returncode == 0
    shown = run(told, "ask_memory.py", QUESTION, "--topic", "work").stdout
    assert FACT in shown and "from May on" not in shown


def test_a_day_on_which_nothing_was_said_costs_no_call_of_the_model(
    told: DaemonProcess, upstream: RecordingUpstream
) -> None:
    chats = len(upstream.chats)
    done = run(told, "night_notes.py", "--topic", "work", "--day", "2020-01-01")
    assert done.returncode == 0 and "nothing to note of 2020-01-01" in done.stdout and len(upstream.chats) == chats
    unknown = run(told, "night_notes.py", "--day", "tomorrow")
    assert unknown.returncode == 2 and "yesterday, today or" in run(told, "night_notes.py", "--help").stdout


def test_both_show_the_token_where_memd_wants_one(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    upstream.answer, token = as_night_model, "a-token-that-is-long-enough"
    daemon = make_daemon(upstream.url, {"auth": {"token": token}}).start()
    daemon.chat([{"role": "user", "content": FACT}], headers={"Authorization": f"Bearer {token}"})
    daemon.wait_stored(FACT)
    assert "auth.token" in run(daemon, "ask_memory.py", QUESTION).stderr
    assert FACT in run(daemon, "ask_memory.py", QUESTION, token=token).stdout
    assert "from May on" in run(daemon, "night_notes.py", "--day", day_of_the_fact(daemon), token=token).stdout


@pytest.mark.parametrize("example", [("ask_memory.py", QUESTION), ("night_notes.py",)])
def test_without_a_daemon_an_example_says_where_it_looked(make_daemon: MakeDaemon, example: tuple[str, ...]) -> None:
    daemon = make_daemon("http://127.0.0.1:9").start()
    assert daemon.terminate() == 0
    result = run(daemon, *example)
    assert result.returncode == 1 and f"no memd answers at {daemon.own_url} " in result.stderr
    assert "memd serve" in result.stderr and result.stderr.count("\n") == 1
