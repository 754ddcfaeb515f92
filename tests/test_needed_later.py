"""What an early step of a long turn said is in the prompt when a late step needs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from candidates import candidate
from recording_upstream import COMMON, Request, Response
from test_turn import daemon_in_process

from memd.entries import Speaker
from memd.messages import Message
from memd.recall.echoes import telling, unseen
from memd.store.lexical.analyzer import analyze_query

CODE = "KINGFISHER9"
THING = "copper windmill 532"
SNIPPET = "\n".join(
    f"from harbour.{part} import {part.title()}Gauge\nprint({part.title()}Gauge(precision={number}).serialized())"
    for number, part in enumerate(("tide", "quay", "crane", "buoy", "lock", "dredge", "beacon", "pilot"))
)
RULES = "\n".join(
    f"{number}. Always open the {part} file before you edit it, and check {part} again when its test has run."
    for number, part in enumerate(("first", "second", "third", "longest", "oldest", "newest", "generated"), 1)
)
TASK = (
    f"Solve this issue in our repository.\nISSUE: gauges are rounded down.\n{SNIPPET}\nINSTRUCTIONS:\n{RULES}\n"
    f"(Current directory: /harbour)\nWhen all is done, report the release code of the {THING}."
)
STEPS = 18


def thought(number: int) -> str:
    """The words of a step: a late one says what it needs, as the others behind the fifth did."""
    part = SNIPPET.split("\n")[number % 16]
    need = f" For this I need the release code of the {THING} now." if number > 4 else ""
    return f"Step {number}: let us see whether `{part}` is rounded in the {number}th place of the file.{need}"


def result(number: int) -> str:
    """A result has some of the task's own lines, and others beside them; an early one the code."""
    told = f"The release code of the {THING} is {CODE}.\n" if number == 1 else ""
    lines = [f"{line}  # seen in run {number}" for line in SNIPPET.split("\n")[number % 8 :][:6]]
    return "\n".join([told + f"[File: gauge_{number}.py]", *lines, "(Current directory: /harbour)"])


def steps_with_calls() -> Iterator[list[dict[str, Any]]]:
    """The messages of each step of a tool loop."""
    for number in range(STEPS):
        function = {"name": "open", "arguments": json.dumps({"path": f"gauge_{number}.py"})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        yield [
            {"role": "assistant", "content": thought(number), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": result(number)},
        ]


def answered(message: dict[str, Any], _: Request) -> Response:
    """The model's message."""
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return Response((json.dumps({"choices": [choice], "object": "chat.completion", **COMMON}).encode(),))


async def test_what_a_long_task_asks_for_at_its_end_is_recalled_in_its_turn(tmp_path: Path) -> None:
    async with daemon_in_process(tmp_path, window=3072) as client:
        messages: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
        seen = []
        for step in steps_with_calls():
            client.upstream.answer = partial(answered, step[0])
            prompt = await client.chat(messages)
            if CODE in json.dumps(messages) and CODE not in json.dumps(json.loads(prompt)[1:]):
                seen.append(CODE in prompt)
            messages += step
            await client.stored()
        assert len(seen) >= 3 and all(seen), "it has left, and the block has it"


@pytest.mark.parametrize(
    ("text", "is_result"),
    [
        ("[read_file for 'src/a.py'] Result:\n1 | import os", True),
        ("[execute_command for 'ls [a-z]*'] Result:\nCommand executed.", True),
        ("[attempt_completion] Result:\nThe user has provided feedback.\n<feedback>\nNot yet.\n</feedback>", False),
        ("What does [read_file] Result: mean?", False),
        ("[memory] is a word", False),
    ],
)
def test_a_result_that_a_program_gives_as_text_is_told_from_what_a_user_says(text: str, is_result: bool) -> None:
    assert Message("user", text).answers_call is is_result
    assert not Message("assistant", text).answers_call


async def test_an_agent_whose_results_are_texts_is_asked_for_by_its_task_and_its_step(tmp_path: Path) -> None:
    async with daemon_in_process(tmp_path, window=3072) as client:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"<task>\n{TASK}\n</task>"}]
        for number in range(STEPS):
            action = f"<read_file>\n<path>gauge_{number}.py</path>\n</read_file>"
            said = {"role": "assistant", "content": f"{thought(number)}\n{action}"}
            client.upstream.answer = partial(answered, said)
            prompt = await client.chat(messages)
            text = f"[read_file for 'gauge_{number}.py'] Result:\n{result(number)}"
            messages += [said, {"role": "user", "content": text}]
            await client.stored()
        question = (await client.receipt())["question"]
        assert thought(STEPS - 2) in question and question.startswith("Solve this issue")
        assert "[File: " not in question
        assert CODE in prompt and "<task>" not in prompt, "the task and what told it have left"


def test_what_the_prompt_shows_already_of_a_chunk_adds_nothing_to_its_score() -> None:
    asked, answered = "What is the code of the gate?", "Let me look for it."
    speakers = (Speaker(0, "user"), Speaker(len(asked) + 1, "assistant"))
    one = candidate("one", 0.6, f"{asked}\n{answered}", speakers=speakers, digests=(b"a" * 16, b"b" * 16))
    assert unseen(one, {b"c" * 16}).score == pytest.approx(0.6)
    assert unseen(one, {b"a" * 16}).score == pytest.approx(0.6 * 20 / 50, abs=0.02)
    whole = msgspec.structs.replace(one, entry=msgspec.structs.replace(one.entry, digests=()))
    assert unseen(whole, {b"a" * 16}).score == pytest.approx(0.6), "where it is not known which part is whose"


def test_in_a_turn_under_way_what_answers_the_question_comes_before_what_repeats_it() -> None:
    question = "Rename the gauge.\nReport the release code of the copper windmill 532."
    mention = "For this I need the release code of the copper windmill 532 now.\n12: rename gauge"
    answer = "12: rename gauge\nThe release code of the copper windmill 532 is KINGFISHER9."
    found = [
        candidate(f"a{number}", 0.5, text, speakers=(Speaker(0, role),))
        for number, (text, role) in enumerate([(mention, "assistant"), (mention, "tool"), (answer, "tool")])
    ]
    asked = frozenset(analyze_query(question))
    own, repeated, told = (telling(one, asked).score for one in found)
    assert own == pytest.approx(0.15) and repeated == pytest.approx(0.25) and told > 0.4
