"""Where the block stands, on the real llama.cpp with chat templates that take it and that refuse it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_templates import TEMPLATES
from conftest import MEMORY_MARKER, REPLY, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import Answer, DaemonProcess, ask, user
from llama_server import running_llama
from recording_upstream import RecordingUpstream
from tiny_model import CHATML_TEMPLATE, write_scripted_model

from memd.messages import without_memory_blocks

pytestmark = pytest.mark.llama

SEEN, NOT_SEEN = "".join(REPLY_WITH_MEMORY), "".join(REPLY)

REFUSE = "{{- raise_exception('no such message') -}}"
STRICT_ROLES = "{%- for m in messages -%}{%- if not loop.first and m.role in ['system', 'developer'] -%}" + (
    REFUSE + "{%- endif -%}{%- endfor -%}"
)
"""Refuses an instruction in mid-conversation, as the templates of Gemma and Mistral do."""
NO_MEMORY = (
    "{%- for m in messages -%}{%- if '[memory]' in (m.content or '') -%}" + REFUSE + ("{%- endif -%}{%- endfor -%}")
)
"""Refuses memory wherever it stands: the worst template there could be."""


def _recalled(tmp_path: Path, make_daemon: MakeDaemon, template: str, system: str = "") -> Answer:
    """The answer to a question whose answer was said in an earlier chat."""
    model = tmp_path / "strict.gguf"
    write_scripted_model(model, marker=MEMORY_MARKER, reply=REPLY, reply_seen=REPLY_WITH_MEMORY, template=template)
    with running_llama(model, context=8192, log=tmp_path / "llama.log") as url:
        daemon = make_daemon(url).start()
        assert daemon.chat([user("The deploy key lives in the drawer of desk nine.")]).status == 200
        messages = [{"role": "system", "content": system}] if system else []
        return daemon.chat([*messages, user("Where does the deploy key live?")], memory_in={})


@pytest.mark.parametrize(
    ("template", "system"),
    [(CHATML_TEMPLATE, ""), (STRICT_ROLES + CHATML_TEMPLATE, "Be brief.")],
    ids=["any role", "strict roles"],
)
def test_memory_is_seen_whatever_roles_a_template_takes(
    tmp_path: Path, make_daemon: MakeDaemon, template: str, system: str
) -> None:
    answer = _recalled(tmp_path, make_daemon, template, system)
    assert (answer.reply, answer.headers["X-Memory-Status"]) == (SEEN, "injected")


def test_where_memory_is_refused_altogether_the_answer_comes_without_it_and_says_so(
    tmp_path: Path, make_daemon: MakeDaemon
) -> None:
    answer = _recalled(tmp_path, make_daemon, NO_MEMORY + CHATML_TEMPLATE)
    assert (answer.reply, answer.headers["X-Memory-Status"]) == (NOT_SEEN, "degraded:template")
    assert answer.json["memory_out"] == {"injected_chunks": []}


def test_a_mistake_of_the_client_is_answered_as_the_upstream_answers_it_and_costs_no_memory(
    make_daemon: MakeDaemon, llama: str
) -> None:
    daemon = make_daemon(llama).start()
    daemon.chat([user("The deploy key lives in the drawer of desk nine.")])
    question = user("Where does the deploy key live?")
    mistake = {"model": "tiny", "messages": [question], "tools": "not a list of tools"}
    direct = ask(f"{llama}/v1/chat/completions", mistake)
    answer = daemon.chat([question], tools="not a list of tools")
    assert (answer.status, answer.body) == (direct.status, direct.body)
    assert answer.headers["X-Memory-Status"] == "injected"
    assert daemon.chat([question]).reply == SEEN


@pytest.fixture(scope="module")
def two_turns(kept_daemon: DaemonProcess, kept_upstream: RecordingUpstream) -> list[list[dict[str, str]]]:
    """What memd forwards of two turns that each recall something, behind a system message."""
    daemon = kept_daemon
    daemon.chat([user("The deploy key lives in the drawer of desk nine.")])
    daemon.chat([user("The spare key hangs behind the barometer.")])
    daemon.chat([user("Something else.")])
    history = [{"role": "system", "content": "Be brief."}, user("Where does the deploy key live?")]
    answer = daemon.chat(history)
    daemon.chat([*history, {"role": "assistant", "content": answer.reply}, user("And where does the spare key hang?")])
    return [json.loads(request.body)["messages"] for request in kept_upstream.chats[-2:]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_model_reads_each_memory_once_and_before_its_question_whatever_the_template(
    tmp_path: Path, two_turns: list[list[dict[str, str]]], name: str
) -> None:
    model = tmp_path / "tiny.gguf"
    write_scripted_model(
        model, marker=MEMORY_MARKER, reply=REPLY, reply_seen=REPLY_WITH_MEMORY, template=TEMPLATES[name]
    )
    with running_llama(model, context=8192, log=tmp_path / "llama.log") as url:

        def prompt_of(messages: list[dict[str, str]]) -> str:
            answer = ask(f"{url}/apply-template", {"messages": messages})
            assert answer.status == 200, answer.body
            return str(answer.json["prompt"])

        first, second = two_turns
        assert ask(f"{url}/v1/chat/completions", {"messages": second, "max_tokens": 8}).reply == SEEN
        plain = [{**message, "content": without_memory_blocks(message["content"])} for message in second]
        prompt, without = prompt_of(second), prompt_of(plain)
        for key, question in (("desk nine", "Where does the deploy"), ("the barometer", "And where does the spare")):
            assert prompt.count(key) == 1 and prompt.count(question) == 1
            assert prompt.index(key) < prompt.index(question)
        assert prompt.count("[/memory]\n\nWhere does the deploy key") == 1
        begin = prompt.index("[memory]")
        assert prompt[:begin] == without[:begin]
        # The second turn's prompt goes on where the first one ended: nothing before has changed.
        asked = first[-1]["content"]
        assert (
            prompt[: prompt.index(asked) + len(asked)] == prompt_of(first)[: prompt_of(first).index(asked) + len(asked)]
        )
