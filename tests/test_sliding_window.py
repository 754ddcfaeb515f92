"""Models that keep only the last tokens in some layers: llama.cpp cannot go back in their cache as it likes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MEMORY_MARKER, REPLY, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import ask
from llama_server import running_llama
from tiny_model import write_scripted_model

pytestmark = pytest.mark.llama

SLIDING_WINDOW = 512
TEMPLATE_TOKENS = 16
"""At most so many of the template's tokens are read again at the end of a prompt."""


@pytest.fixture
def sliding_llama(tmp_path: Path) -> Iterator[str]:
    model = tmp_path / "sliding.gguf"
    write_scripted_model(
        model, marker=MEMORY_MARKER, reply=REPLY, reply_seen=REPLY_WITH_MEMORY, sliding_window=SLIDING_WINDOW
    )
    with running_llama(model, context=16_384, log=tmp_path / "llama.log") as url:
        yield url


def test_memory_is_seen_from_farther_away_than_the_sliding_window(make_daemon: MakeDaemon, sliding_llama: str) -> None:
    daemon = make_daemon(sliding_llama).start()
    said = "The deploy key lives in the drawer of desk nine."
    assert daemon.chat([{"role": "user", "content": said}]).reply == "".join(REPLY)
    question = "Where does the deploy key live? " + "Think about it slowly and thoroughly. " * 40
    assert len(question) > 2 * SLIDING_WINDOW
    assert daemon.chat([{"role": "user", "content": question}]).reply == "".join(REPLY_WITH_MEMORY)


def test_the_later_steps_of_a_tool_loop_read_nothing_but_what_is_new(
    make_daemon: MakeDaemon, sliding_llama: str
) -> None:
    daemon = make_daemon(sliding_llama).start()
    daemon.chat([{"role": "user", "content": "The deploy key lives in the drawer of desk nine."}])
    history: list[dict[str, object]] = [{"role": "user", "content": "Look up where the deploy key lives."}]
    before = 0
    for step in range(4):
        tokens = ask(f"{sliding_llama}/v1/chat/completions/input_tokens", {"messages": history}).json["input_tokens"]
        answer = daemon.chat(history)
        if step:
            assert answer.json["timings"]["prompt_n"] <= tokens - before + TEMPLATE_TOKENS
        call = {"id": f"c{step}", "type": "function", "function": {"name": "read", "arguments": '{"path": "keys"}'}}
        history.append({"role": "assistant", "content": None, "tool_calls": [call]})
        history.append({"role": "tool", "tool_call_id": f"c{step}", "content": f"{step}: " + "nothing but rope, " * 40})
        before = tokens
