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
from memd.recall.echoes import telling, unseen

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
STEPS = 14


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
    own, repeated, told = (one.score for one in telling(found, question))
    assert own == pytest.approx(0.15) and repeated == pytest.approx(0.25) and told > 0.4
