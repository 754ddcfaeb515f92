"""The demo shows what it claims, and its stand-in model is no better informed than its prompt."""

from __future__ import annotations

import subprocess
import sys

import aiohttp
import pytest
from daemon_process import clean_environment

from memd.demo.fake_model import UNKNOWN, FakeModel
from memd.demo.play import CHANGED, QUESTION_IN_NEW_CHAT, QUESTIONS, load_turns


@pytest.mark.process
def test_the_demo_plays_to_its_end_and_shows_every_answer() -> None:
    command = [sys.executable, "-m", "memd", "demo", "--fast"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=clean_environment())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shown = " ".join(done.stdout.split())
    for question in (*QUESTIONS, QUESTION_IN_NEW_CHAT, CHANGED):
        assert question.text in shown
    assert UNKNOWN in shown, "the same question without memory"
    assert "[mem:" in shown
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert done.stderr == ""


def test_the_stand_in_answers_from_its_prompt_and_from_nothing_else() -> None:
    standin = FakeModel(window=100_000, count=len, lines={})
    history = []
    for turn in load_turns():
        history += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    for question in (*QUESTIONS, QUESTION_IN_NEW_CHAT, CHANGED):
        asked = {"role": "user", "content": question.text}
        assert question.expects in standin.reply_to([*history, asked])
        assert standin.reply_to([*history[40:], asked]) == UNKNOWN


@pytest.mark.parametrize("merged", [False, True], ids=["separate", "merged"])
def test_the_stand_in_reads_memory_blocks_and_cites_the_chunk(merged: bool) -> None:
    standin = FakeModel(window=100_000, count=len, lines={})
    block = "[memory] Records.\n[mem:a3f9] user: The port is 7340.\nassistant: Noted.\n[/memory]"
    question = "Which port is it?"
    if merged:
        messages = [{"role": "user", "content": f"{block}\n\n{question}"}]
    else:
        messages = [{"role": "developer", "content": block}, {"role": "user", "content": question}]
    assert standin.reply_to(messages) == 'You said [mem:a3f9]: "The port is 7340."'


async def test_the_stand_in_answers_in_the_shapes_of_llama_server() -> None:
    async with (
        FakeModel(window=400, count=len, lines={"Hi.": "Hello there."}).running() as standin,
        aiohttp.ClientSession(standin.base_url) as session,
    ):
        body = {"messages": [{"role": "user", "content": "Hi."}]}
        async with session.get("/props") as answer:
            assert (await answer.json())["default_generation_settings"]["n_ctx"] == 400
        async with session.post("/apply-template", json=body) as answer:
            prompt = (await answer.json())["prompt"]
        async with session.post("/v1/chat/completions/input_tokens", json=body) as answer:
            assert (await answer.json())["input_tokens"] == len(prompt)
        async with session.post("/v1/chat/completions", json=body) as answer:
            completion = await answer.json()
            assert completion["choices"][0]["message"] == {"role": "assistant", "content": "Hello there."}
            assert completion["usage"]["prompt_tokens"] == completion["timings"]["prompt_n"] == len(prompt)
        async with session.post("/v1/chat/completions", json={**body, "stream": True}) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        long = {"messages": [{"role": "user", "content": "x" * 400}]}
        async with session.post("/v1/chat/completions", json=long) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "exceed_context_size_error"
        assert len(standin.shown) == 2
