"""The model's window, on the real llama.cpp: what memd forwards fits, whatever the text is made of."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import MEMORY_MARKER, REPLY, REPLY_WITH_MEMORY, WINDOW, MakeDaemon
from daemon_process import DaemonProcess, ask
from llama_server import running_llama
from recording_upstream import Request, Response, chat_answer, recording_upstream
from tiny_model import write_scripted_model

TURNS = 14
REPLY_TOKENS = 64

_chosen = random.Random(5)


def english(turn: int) -> str:
    words = ("harbour", "lantern", "because", "the", "quietly", "seventeen", "of", "boats", "was", "painted")
    return f"Turn {turn}: " + " ".join(_chosen.choice(words) for _ in range(120))


def chinese(turn: int) -> str:
    return f"第{turn}轮：" + "".join(_chosen.choice("港口的灯在夜里静静地亮着船员们回来了") for _ in range(220))


def encoded(turn: int) -> str:
    return f"{turn} " + base64.b64encode(_chosen.randbytes(500)).decode()


@pytest.mark.parametrize("text_of_turn", [english, chinese, encoded])
def test_no_prompt_of_a_long_conversation_exceeds_the_window(
    make_daemon: MakeDaemon, llama: str, text_of_turn: Callable[[int], str]
) -> None:
    daemon = make_daemon(llama).start()
    history: list[dict[str, object]] = []
    said = 0
    for turn in range(TURNS):
        history.append({"role": "user", "content": text_of_turn(turn)})
        answer = daemon.chat(history, max_tokens=REPLY_TOKENS)
        assert answer.status == 200, answer.body
        prompt_tokens = answer.json["usage"]["prompt_tokens"]
        assert prompt_tokens + REPLY_TOKENS <= WINDOW
        said += prompt_tokens
        history.append(answer.json["choices"][0]["message"])
    everything = ask(f"{llama}/v1/chat/completions/input_tokens", {"messages": history}).json["input_tokens"]
    assert everything > WINDOW, "or this test shows nothing"


def test_tool_results_of_earlier_turns_leave_with_their_calls(make_daemon: MakeDaemon, llama: str) -> None:
    daemon = make_daemon(llama).start()
    history: list[dict[str, object]] = []
    for turn in range(4):
        call = {"id": f"call{turn}", "type": "function", "function": {"name": "read", "arguments": '{"path": "log"}'}}
        history.append({"role": "user", "content": f"Read log {turn}."})
        history.append({"role": "assistant", "content": None, "tool_calls": [call]})
        history.append({"role": "tool", "tool_call_id": f"call{turn}", "content": f"row {turn} is fine\n" * 180})
        answer = daemon.chat(history, max_tokens=REPLY_TOKENS)
        assert answer.status == 200, answer.body
        history.append(answer.json["choices"][0]["message"])


def test_what_does_not_fit_at_all_goes_through_and_the_upstream_s_error_comes_back(
    make_daemon: MakeDaemon, llama: str
) -> None:
    daemon: DaemonProcess = make_daemon(llama).start()
    messages = [{"role": "user", "content": "far too long " * 2_000}]
    direct = ask(f"{llama}/v1/chat/completions", {"model": "tiny", "messages": messages})
    answer = daemon.chat(messages)
    assert direct.status == answer.status == 400
    assert answer.json == direct.json
    assert daemon.chat([{"role": "user", "content": "And now something short."}]).status == 200


def broken_off(_: Request) -> Response:
    raise ConnectionError


def test_the_window_stays_known_while_the_model_server_is_restarted_and_loads(make_daemon: MakeDaemon) -> None:
    roles = ("user", "assistant") * 8
    history: list[dict[str, object]] = [{"role": roles[n], "content": english(n)} for n in range(15)]
    with recording_upstream(window=1024) as upstream:
        daemon = make_daemon(upstream.url).start()
        upstream.answer = broken_off
        assert daemon.chat(history[:1]).status == 502
        upstream.answer, upstream.is_loading = chat_answer, True
        assert daemon.chat(history[:1]).status == 503
        upstream.is_loading = False
        assert daemon.chat(history).status == 200
        forwarded = json.loads(upstream.chats[-1].body)["messages"]
    assert len(forwarded) < len(history)


# Models that keep only the last tokens in some layers: llama.cpp cannot go back in their cache as it likes


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


@pytest.mark.llama
def test_memory_is_seen_from_farther_away_than_the_sliding_window(make_daemon: MakeDaemon, sliding_llama: str) -> None:
    daemon = make_daemon(sliding_llama).start()
    said = "The deploy key lives in the drawer of desk nine."
    assert daemon.chat([{"role": "user", "content": said}]).reply == "".join(REPLY)
    question = "Where does the deploy key live? " + "Think about it slowly and thoroughly. " * 40
    assert len(question) > 2 * SLIDING_WINDOW
    assert daemon.chat([{"role": "user", "content": question}]).reply == "".join(REPLY_WITH_MEMORY)


@pytest.mark.llama
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
