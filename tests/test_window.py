"""The model's window, on the real llama.cpp: what memd forwards fits, whatever the text is made of."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable

import pytest
from conftest import WINDOW, MakeDaemon
from daemon_process import DaemonProcess, ask
from recording_upstream import Request, Response, chat_answer, recording_upstream

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
