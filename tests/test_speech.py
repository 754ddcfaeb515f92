"""Which words of a message were said, for the text that well-known programs wrap around it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from memd.errors import ConfigError
from memd.messages import Message, stored_text
from memd.settings.loading import load_config
from memd.settings.model import Config
from memd.settings.programs import programs_of
from memd.speech import SEARCHED_CHARACTERS_MAX, Speech
from memd.wire.api import MessageCache
from memd.wire.registry import APIS

PROGRAMS = programs_of(Config().ingest)
SPEECH = Speech(PROGRAMS.strip, PROGRAMS.message, PROGRAMS.reply)
DETAILS = "<environment_details>\n# VSCode Open Tabs\na<b.ts\n\n# Current Time\n10:{minute}\n</environment_details>"
REMINDER = "<system-reminder>\nThe TodoWrite tool hasn't been used recently.\n</system-reminder>"
AIDER = (
    "\n\n# *SEARCH/REPLACE block* Rules:\n\nEvery *SEARCH/REPLACE block* must use this format:\n1. The *FULL*\n"
    "\nONLY EVER RETURN CODE IN A *SEARCH/REPLACE BLOCK*!\n"
)

WRAPPED = {
    "cline": (f"<task>\nUse port 8765.\n</task>\n\n{DETAILS}", "Use port 8765."),
    "cline feedback": (f"<feedback>\nno, 8765\n</feedback>\n{DETAILS}", "no, 8765"),
    "roo": (f"<user_message>\nUse <b>8765</b>.\n</user_message>\n{DETAILS}", "Use <b>8765</b>."),
    "roo answer": (f"<answer>\nyes\n</answer>\n\n{DETAILS}", "yes"),
    "claude code": (f"{REMINDER}\nUse port 8765.\n{REMINDER}", "Use port 8765."),
    "an environment": ("Hello\n<env>\nWorking directory: /src\n</env>\nthere", "Hello\nthere"),
    "codex": ("<environment_context>\n  <cwd>/src</cwd>\n</environment_context>", ""),
    "codex instructions": ("# AGENTS.md instructions for /src\n\n<INSTRUCTIONS>\nBe brief.\n</INSTRUCTIONS>", ""),
    "a hook": ('<hook_context source="x" tool_name="y">\nnoted\n</hook_context>\nGo on.', "Go on."),
    "aider": (f"Use port 8765.{AIDER}", "Use port 8765."),
    "aider, whole": (
        "Go.\n\nTo suggest changes to a file you MUST return the entire content of the updated file.\nYou MUST use",
        "Go.",
    ),
    "opened twice": (f"<environment_details>Why? {DETAILS}", "<environment_details>Why?"),
}


@pytest.mark.parametrize(("text", "said"), WRAPPED.values(), ids=WRAPPED)
def test_what_programs_wrap_around_the_words_is_not_said(text: str, said: str) -> None:
    message = SPEECH.heard(Message("user", text))
    assert message.said == said and message.text == text
    assert message.content_digest == Message("user", said).content_digest
    assert stored_text(message) == said


@pytest.mark.parametrize(
    "text",
    [
        "Use port 8765.",
        "  outer white space stays \n",
        "<environment_details> is what Cline writes, and I never close it",
        "The file has <env>PORT=1</env> in it.",
        "Our launch file:\n<env>\nDATABASE_PASSWORD=OSPREY77\n</env>\nkeep it in mind",
        "and mine: <environment_context> region FALCON8 </environment_context> and what follows",
        "<task>one</task> is how Ant writes it:\n<target>\n<task>\n  <javac/>\n</target>",
        "# *SEARCH/REPLACE block* Rules: explain them to me",
        "</system-reminder> then words <system-reminder>",
        "x" * (SEARCHED_CHARACTERS_MAX + 1) + REMINDER,
    ],
    ids=lambda text: text[:20],
)
def test_words_that_only_look_like_it_are_said_as_they_stand(text: str) -> None:
    message = Message("user", text)
    assert SPEECH.heard(message) is message and message.said is text


def test_thinking_before_an_answer_is_not_said() -> None:
    thinking = SPEECH.heard(Message("assistant", "<think>\nHm, 8765?\n</think>\n\nPort 8765."))
    assert thinking.content_digest == Message("assistant", "Port 8765.").content_digest
    assert SPEECH.said("user", "<think>mine</think> words") is None
    assert SPEECH.said("assistant", "<think>interrupted") is None
    assert SPEECH.said("assistant", "It writes <think>so</think>.") is None


RESULT = "1\timport os\n\n    return"
FILE = "<env>\nWorking directory: OSPREY77\n</env>"


@pytest.mark.parametrize("role", ["tool", "function"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{RESULT}\n\n{REMINDER}\n", RESULT),
        (f"{REMINDER}{RESULT}", RESULT),
        (f"{REMINDER}\n{REMINDER}\n{RESULT}\n{REMINDER} {REMINDER}", RESULT),
        (f"{FILE}\n{REMINDER}", FILE),
        (FILE, FILE),
        (REMINDER, REMINDER),
        (f"one\n{REMINDER}\n{DETAILS}\ntwo", f"one\n{REMINDER}\n{DETAILS}\ntwo"),
        ("<task>\nbuild\n</task>", "<task>\nbuild\n</task>"),
        (f"prompt = 1{AIDER}", f"prompt = 1{AIDER}"),
    ],
)
def test_a_result_loses_only_what_a_program_put_at_its_ends_and_never_all_of_it(
    role: str, text: str, said: str
) -> None:
    assert SPEECH.heard(Message(role, text)).said == said


def test_a_rewritten_wrapping_is_the_same_message_through_every_api() -> None:
    cache = MessageCache(speech=SPEECH)
    for api in APIS:
        name = "input" if api.name == "responses" else "messages"
        for minute in ("05", "06"):
            content = f"Go on.\n{DETAILS.replace('{minute}', minute)}"
            [digest] = api.parse(json.dumps({name: [{"role": "user", "content": content}]}).encode(), cache).digests
            assert digest == Message("user", "Go on.").content_digest


@pytest.mark.parametrize("piece", ["<environment_details>", "<", "<env>\n", "<task>\n", "<hook_context ", "\n", AIDER])
def test_a_hostile_text_takes_no_longer_than_a_long_one(piece: str) -> None:
    text = piece * (SEARCHED_CHARACTERS_MAX // len(piece))
    started = time.process_time()
    SPEECH.said("user", text)
    SPEECH.said("tool", text)
    assert time.process_time() - started < 2, "a megabyte takes 25 to 100 ms; one that is not linear takes minutes"


def test_a_pattern_that_is_none_is_named_with_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("ingest:\n  strip: ['<a>(']\n")
    with pytest.raises(ConfigError, match=r"ingest.strip has '<a>\(', which is no regular expression"):
        load_config(path, {}, {})


def test_the_default_patterns_fit_into_a_line_of_the_settings() -> None:
    assert all("\n" not in pattern and len(pattern) <= 4096 for pattern in PROGRAMS.strip)
