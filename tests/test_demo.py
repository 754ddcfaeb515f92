"""The demo shows what it claims, and its stand-in model is no better informed than its prompt."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from daemon_process import clean_environment, run_memd
from recording_upstream import RecordingUpstream, Response

from memd.demo import (
    CHANGED,
    QUESTION_IN_NEW_CHAT,
    QUESTIONS,
    UNKNOWN,
    WINDOW_TOKENS,
    ChatClient,
    FakeModel,
    NotShown,
    load_turns,
)


@pytest.mark.process
def test_the_demo_plays_to_its_end_and_shows_every_answer() -> None:
    done = run_memd("demo", "--fast")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shown = " ".join(done.stdout.split())
    for question in (*QUESTIONS, QUESTION_IN_NEW_CHAT, CHANGED):
        assert question.text in shown
    assert UNKNOWN in shown, "the same question without memory"
    assert "[mem:" in shown
    [box] = re.findall(r"─ what memd put before the question ─+╮\n(.*?)\n╰", done.stdout, re.DOTALL)
    assert re.search(rf"Today is.*-- \w+ [\d-]+ --.*\[mem:\w+\] user: .*{QUESTIONS[0].expects}", box, re.DOTALL), box
    [chunks] = re.findall(r"remembered on disk: (\d+) chunks?", shown)
    assert int(chunks) > 20, "all that was said, and not what had left the prompt by then"
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert done.stderr == ""


def test_the_stand_in_answers_from_its_prompt_and_from_nothing_else() -> None:
    standin = FakeModel(count=len, lines={})
    history = []
    for turn in load_turns():
        history += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    for question in (*QUESTIONS, QUESTION_IN_NEW_CHAT, CHANGED):
        asked = {"role": "user", "content": question.text}
        assert question.expects in standin.reply_to([*history, asked])
        assert standin.reply_to([*history[40:], asked]) == UNKNOWN


async def test_a_model_that_refuses_is_told_with_its_own_words(upstream: RecordingUpstream) -> None:
    upstream.answer = lambda _: Response((b'{"error": {"message": "this model has no chat template"}}',), 500)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(NotShown, match=r"\(500\).*this model has no chat template"):
            await ChatClient(session, upstream.url, "demo", "Answer briefly.").say("Which port is it?")


async def test_a_model_that_never_ends_is_asked_for_an_answer_of_some_length(upstream: RecordingUpstream) -> None:
    upstream.answer = lambda _: Response((b'{"choices": [{"message": {"content": "In Bergen."}}]}',))
    async with aiohttp.ClientSession() as session:
        answer = await ChatClient(session, upstream.url, "demo", "Answer briefly.").say("Where is it?")
    assert answer.text == "In Bergen."
    assert json.loads(upstream.requests[-1].body)["max_tokens"] == WINDOW_TOKENS // 8


@pytest.mark.process
@pytest.mark.linux
def test_at_a_terminal_the_demo_stays_and_answers_what_is_typed() -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "memd", "demo", "--fast"]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=clean_environment()) as demo:
        os.close(end)
        too_long = threading.Timer(300, demo.kill)  # reading fails then
        too_long.start()
        try:
            page = re.search(r"http://127\.0\.0\.1:\d+/memd/", _read_until(terminal, "Your turn", "you"))
            assert page is not None
            with urllib.request.urlopen(page[0]) as answer:
                assert answer.status == 200
            os.write(terminal, b"Which error code does the API answer when a stand is already taken?\n")
            assert "ERR_7421" in _read_until(terminal, "remembered in", "you")
            os.write(terminal, b"\n")
            assert demo.wait(60) == 0
        finally:
            too_long.cancel()
            demo.kill()
            os.close(terminal)


@pytest.mark.llama
def test_a_real_model_is_asked_with_memory_and_without(tmp_path: Path) -> None:
    from tiny_model import write_scripted_model  # here: `make quick` does not install what it imports

    model = tmp_path / "model.gguf"
    seen = ["It", " says", " PostgreSQL 16"]
    write_scripted_model(model, marker="PostgreSQL", reply=["No", " idea"], reply_seen=seen)
    done = run_memd("demo", "--fast", "--model", model)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Of 5 questions it answered 0 without memory and 1 with it." in " ".join(done.stdout.split())


def _read_until(terminal: int, *words: str) -> str:
    """Everything that appears on a terminal until these words have, one after the other."""
    shown, at = "", 0
    for word in words:
        while (found := shown.find(word, at)) < 0:
            shown += os.read(terminal, 65_536).decode(errors="replace")
        at = found + len(word)
    return shown
