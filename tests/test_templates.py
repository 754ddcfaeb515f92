"""Where the block stands, on the real llama.cpp with chat templates that take it and that refuse it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import MEMORY_MARKER, REPLY, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import Answer, ask
from llama_server import running_llama
from tiny_model import CHATML_TEMPLATE, write_scripted_model

SEEN, NOT_SEEN = "".join(REPLY_WITH_MEMORY), "".join(REPLY)

REFUSE = "{{- raise_exception('no such message') -}}"
STRICT_ROLES = "{%- for m in messages -%}{%- if not loop.first and m.role in ['system', 'developer'] -%}" + (
    REFUSE + "{%- endif -%}{%- endfor -%}"
)
"""Refuses an instruction in mid-conversation, as the templates of Gemma and Mistral do."""
NO_MEMORY = "{%- for m in messages -%}{%- if '[memory]' in (m.content or '') -%}" + REFUSE + (
    "{%- endif -%}{%- endfor -%}"
)
"""Refuses memory wherever it stands: the worst template there could be."""


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _recalled(
    tmp_path: Path, make_daemon: MakeDaemon, refusal: str, role: str, system: str = ""
) -> Answer:
    """The answer to a question whose answer was said in an earlier chat."""
    model = tmp_path / "strict.gguf"
    write_scripted_model(
        model, marker=MEMORY_MARKER, reply=REPLY, reply_seen=REPLY_WITH_MEMORY, template=refusal + CHATML_TEMPLATE
    )
    with running_llama(model, context=8192, log=tmp_path / "llama.log") as url:
        daemon = make_daemon(url, {"injection": {"role": role}}).start()
        assert daemon.chat([said("The deploy key lives in the drawer of desk nine.")]).status == 200
        messages = [{"role": "system", "content": system}] if system else []
        return daemon.chat([*messages, said("Where does the deploy key live?")], memory_in={})


@pytest.mark.parametrize("role", ["auto", "separate", "merged"])
def test_a_template_that_takes_everything_shows_the_memory(tmp_path: Path, make_daemon: MakeDaemon, role: str) -> None:
    answer = _recalled(tmp_path, make_daemon, "", role)
    assert (answer.reply, answer.headers["X-Memory-Status"]) == (SEEN, "injected")


@pytest.mark.parametrize("role", ["auto", "separate"])
def test_where_a_message_of_its_own_is_refused_the_memory_is_merged_into_the_question(
    tmp_path: Path, make_daemon: MakeDaemon, role: str
) -> None:
    answer = _recalled(tmp_path, make_daemon, STRICT_ROLES, role, system="Be brief.")
    assert (answer.reply, answer.headers["X-Memory-Status"]) == (SEEN, "injected")


def test_where_memory_is_refused_altogether_the_answer_comes_without_it_and_says_so(
    tmp_path: Path, make_daemon: MakeDaemon
) -> None:
    answer = _recalled(tmp_path, make_daemon, NO_MEMORY, "auto")
    assert (answer.reply, answer.headers["X-Memory-Status"]) == (NOT_SEEN, "degraded:template")
    assert answer.json["memory_out"] == {"injected_chunks": []}


def test_a_mistake_of_the_client_is_answered_as_the_upstream_answers_it_and_costs_no_memory(
    make_daemon: MakeDaemon, llama: str
) -> None:
    daemon = make_daemon(llama).start()
    daemon.chat([said("The deploy key lives in the drawer of desk nine.")])
    question = said("Where does the deploy key live?")
    mistake = {"model": "tiny", "messages": [question], "tools": "not a list of tools"}
    direct = ask(f"{llama}/v1/chat/completions", mistake)
    answer = daemon.chat([question], tools="not a list of tools")
    assert (answer.status, answer.body) == (direct.status, direct.body)
    assert answer.headers["X-Memory-Status"] == "injected"
    assert daemon.chat([question]).reply == SEEN
