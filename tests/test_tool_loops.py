"""The window on the real llama.cpp: what memd forwards fits, step after step of a tool loop too."""

import base64
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import MEMORY_MARKER, REPLY, REPLY_WITH_MEMORY, WINDOW, MakeDaemon
from daemon_process import Answer, DaemonProcess, ask, wait_until
from llama_server import running_llama
from recording_upstream import RecordingUpstream, Request, Response, answered, chat_answer, recording_upstream
from tiny_model import write_scripted_model

STEPS = 38
"""Results of one turn: twice what the window holds."""
REPLY_TOKENS = 64
SECRET = "the upload goes to the bucket KINGFISHER9"
TASK = "Read every log in turn, then say to which bucket the upload goes."


def step(number: int, result: str, *, calls: int = 1) -> list[dict[str, Any]]:
    """A step of a tool loop: the assistant's calls, and the result of each."""
    ids = [f"call_{number}_{call}" for call in range(calls)]
    function = {"name": "read", "arguments": json.dumps({"path": f"log/{number}.txt"})}
    made = [{"id": one, "type": "function", "function": function} for one in ids]
    results = [{"role": "tool", "tool_call_id": one, "content": result} for one in ids]
    return [{"role": "assistant", "content": None, "tool_calls": made}, *results]


def log_of(number: int) -> str:
    """No size in it is the number of a log: a step that reads one asks for no other."""
    note = f"row 0: {SECRET}\n" if number == 2 else ""
    return note + "".join(f"row {row} of log {number} is fine, {1000 + number * row} bytes\n" for row in range(12))


class Played(NamedTuple):
    """A long open turn as it was played."""

    daemon: DaemonProcess
    history: list[dict[str, Any]]
    """The client's."""
    answers: list[Answer]
    upstream: RecordingUpstream


@contextmanager
def in_front_of(llama: str) -> Iterator[RecordingUpstream]:
    with recording_upstream() as recorded:
        recorded.behind = llama
        yield recorded


@pytest.fixture
def upstream(llama: str) -> Iterator[RecordingUpstream]:
    """The real llama.cpp, with every request to it written down."""
    with in_front_of(llama) as recorded:
        yield recorded


UNHURRIED = {"retrieval": {"recall_budget_ms": 5_000, "timeout_ms": 30_000}}
"""On a busy machine not all is cut, and not all parts of a question are read, in the usual time."""


@pytest.fixture(scope="module")
def played(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Played with single calls; for tests that only look at it."""
    with in_front_of(llama) as recorded:
        daemon = DaemonProcess(tmp_path_factory.mktemp("played"), recorded.url, UNHURRIED).start()
        yield Played(daemon, *play(daemon), recorded)
        daemon.discard()


def play(daemon: DaemonProcess, *, calls: int = 1, **members: Any) -> tuple[list[dict[str, Any]], list[Answer]]:
    """Play a long open turn; returns the client's history and the answers."""
    history: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    answers = []
    for number in range(STEPS // calls):
        answers.append(daemon.chat(history, max_tokens=REPLY_TOKENS, **members))
        history += step(number, log_of(number), calls=calls)
    return history, answers


def test_a_turn_longer_than_the_window_is_never_refused(played: Played, llama: str) -> None:
    never_refused(played, llama, calls=1)


def test_nor_is_one_with_parallel_calls(make_daemon: MakeDaemon, upstream: RecordingUpstream, llama: str) -> None:
    daemon = make_daemon(upstream.url, UNHURRIED).start()
    never_refused(Played(daemon, *play(daemon, calls=2), upstream), llama, calls=2)


def never_refused(played: Played, llama: str, *, calls: int) -> None:
    _, history, answers, upstream = played
    assert {answer.status for answer in answers} == {200}
    assert max(answer.json["usage"]["prompt_tokens"] for answer in answers) + REPLY_TOKENS <= WINDOW
    everything = ask(f"{llama}/v1/chat/completions/input_tokens", {"messages": history}).json["input_tokens"]
    assert everything > 2 * WINDOW, "or this test shows nothing"
    counted = [request for request in upstream.requests if request.target.endswith("/input_tokens")]
    assert len(counted) <= STEPS // 4, "the count of the prompt before is enough, but where much changed"
    for prompt in map(json.loads, upstream.prompts):
        asked = [call["id"] for message in prompt for call in message.get("tool_calls", ())]
        assert asked == [message["tool_call_id"] for message in prompt if message["role"] == "tool"]
        assert [message["role"] for message in prompt][:2] in (["user"], ["user", "assistant"])
        assert TASK in prompt[0]["content"]
    results = [message["content"] for message in json.loads(upstream.prompts[-1]) if message["role"] == "tool"]
    assert results[-calls:] == [log_of(STEPS // calls - 2)] * calls


def test_results_that_left_are_told_in_a_line_and_recalled_in_the_same_turn(played: Played) -> None:
    last = json.loads(played.upstream.prompts[-1])
    assert SECRET not in json.dumps(last[1:])
    assert SECRET in last[0]["content"], "the block in front of the question has it"
    lines = [message["content"] for message in last if message["content"] and "[memd: " in message["content"]]
    assert all(line.startswith("[memd: ") and "tokens of this result are in memory" in line for line in lines) and lines


def test_what_left_the_prompt_is_told_everywhere_as_the_model_saw_it(played: Played) -> None:
    daemon, history, answers, upstream = played
    sent, last = len(history) - 2, json.loads(upstream.prompts[-1])
    lines = sum((message["content"] or "").startswith("[memd: ") for message in last)
    assert lines and len(last) < sent, "or this test shows nothing"

    talks = ask(f"{daemon.base_url}/memd/buffer?topic=default").json["conversations"]
    talk = max(talks, key=lambda talk: talk["messages"])  # the others are branches that end with an answer of the model
    answered = talk["messages"] - sent
    assert (talk["in_prompt"], talk["replaced"]) == (len(last) + answered, lines)
    assert talk["left_out"] == sent - len(last)
    shown = {message["line"] for message in talk["latest"] if message["line"]}
    assert shown and shown <= {message["content"] for message in last}
    assert all(len(ids) == len(set(ids)) for ids in (re.findall(r"mem:(\w+)", line) for line in shown))

    turn_id = answers[-1].headers["X-Memory-Turn"]
    wait_until(lambda: ask(f"{daemon.base_url}/memd/turns/{turn_id}").status == 200, lambda: "no receipt")
    receipt = ask(f"{daemon.base_url}/memd/turns/{turn_id}").json
    assert (receipt["left_out"], receipt["replaced"]) == (sent - len(last), lines)
    turns = ask(f"{daemon.base_url}/memd/turns?limit=500").json["turns"]
    made = [line for line in left_lines(daemon) if "turn" in line]
    assert sum(turn["freed_tokens"] > 0 for turn in turns) == len(made) > 0
    told_in_log = [line for line in daemon.log.read_text().splitlines() if f" answered turn={turn_id} " in line]
    assert [f"left_out={sent - len(last)} replaced={lines}" in line for line in told_in_log] == [True]
    assert {line["turn"] for line in made} <= {answer.headers["X-Memory-Turn"] for answer in answers}
    in_background = [line for line in left_lines(daemon) if "turn" not in line]
    assert sum(int(line["replaced"]) for line in made + in_background) >= lines
    told = daemon.run("turn", turn_id).stdout
    assert f"{sent - len(last)} messages not in the prompt, a line in place of {lines} results" in told


def left_lines(daemon: DaemonProcess) -> list[dict[str, str]]:
    """The fields of the log's lines about what left the prompt: for a request (has a turn) or in the background."""
    lines = [line for line in daemon.log.read_text().splitlines() if " left the prompt " in line]
    return [dict(field.split("=", 1) for field in line.split() if "=" in field) for line in lines]


def test_nothing_of_a_turn_that_outgrew_the_window_is_lost_when_the_daemon_is_killed(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, UNHURRIED).start()
    history, _ = play(daemon)
    before = json.loads(upstream.prompts[-1])
    daemon.kill()
    daemon.start()
    assert daemon.chat(history[:-2], max_tokens=REPLY_TOKENS).status == 200
    assert json.loads(upstream.prompts[-1])[1:] == before[1:], "the same messages and lines as before"


def written_step(number: int, result: str) -> list[dict[str, Any]]:
    """The same of a program that has calls and results as text, as Cline does."""
    call = f"<read_file>\n<path>log/{number}.txt</path>\n</read_file>"
    told = f"[read_file for 'log/{number}.txt'] Result:\n{result}"
    return [{"role": "assistant", "content": call}, {"role": "user", "content": told}]


@pytest.mark.parametrize("made", [step, written_step])
def test_a_result_longer_than_the_window_is_recalled_from_in_the_same_step(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, made: Callable[[int, str], list[dict[str, Any]]]
) -> None:
    daemon = make_daemon(upstream.url, UNHURRIED).start()
    result = "\n".join(map(log_of, range(STEPS)))
    answer = daemon.chat([{"role": "user", "content": TASK}, *made(0, result)], max_tokens=REPLY_TOKENS)
    asked, _, line = (message["content"] for message in json.loads(upstream.prompts[-1]))
    assert answer.status == 200 and line.startswith("[memd: ")
    assert SECRET in asked


def test_the_ids_in_the_lines_are_those_under_which_it_is_stored(played: Played) -> None:
    """The logs are nearly the same: each is stored."""
    daemon = played.daemon
    lines = [message["content"] for prompt in map(json.loads, played.upstream.prompts) for message in prompt]
    named = [re.findall(r"mem:(\w+)", line) for line in lines if line and line.startswith("[memd: ")]
    assert any(named) and all(len(ids) == len(set(ids)) for ids in named)
    wanted = {one for ids in named for one in ids}
    wait_until(
        lambda: wanted <= {entry["id"] for entry in daemon.export()},
        lambda: f"not in the log: {wanted - {entry['id'] for entry in daemon.export()}}",
    )


def test_a_block_that_had_little_room_beside_a_long_result_is_made_anew_when_that_is_a_line(
    make_daemon: MakeDaemon,
) -> None:
    with recording_upstream(window=4096) as recorded:
        daemon = make_daemon(recorded.url, UNHURRIED).start()
        history = [{"role": "user", "content": TASK}]
        for number in range(6):
            history += step(number, log_of(number))
        history += step(6, "\n".join(f"row {row}: {row * row} bytes" for row in range(335)))
        blocks = []
        for number in range(7, 9):
            called = step(number, log_of(number))
            answer = answered(called[0])  # another answer than the history goes on with would be remembered, too
            recorded.answer = partial(lambda told, _: told, answer)
            assert daemon.chat(history).status == 200
            blocks.append(json.loads(recorded.prompts[-1])[0]["content"])
            history += called
        assert 0 < len(blocks[0]) - len(TASK) < 0.6 * (len(blocks[1]) - len(TASK)), blocks


# The model's window: what memd forwards fits, whatever the text is made of


TURNS = 14

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
