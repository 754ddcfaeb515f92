"""What agents say in bench/agents.py: real runs stretched, with facts of which it is known where they were said.

The runs are given by path (SWE-agent's demonstrations, MIT): one with function calls, one whose actions are text. They
are stretched by repeating them with other words: a repetition word for word would be stored once, as it should be, and
tell nothing. In every message one fact is planted, a code word that stands nowhere else; in every long turn three of
them are *needed*: the user asks for them by name when the turn begins, an early result tells them, and late in the turn
the agent says that it needs one now.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prose import vocabulary

LAYOUTS: dict[int, tuple[int, ...]] = {12: (2, 9, 1), 40: (4, 28, 1, 7), 200: (8, 120, 2, 50, 20)}
"""Steps of a run, and of its turns one after the other."""
NEEDS, NEEDED_IN = 3, 9
"""How many facts a turn needs, and from how many steps on."""
TWO_CALLS_SHARE = 0.25
"""Steps that call two tools at once."""
_THINGS, _MANNERS = (
    words.split()
    for words in (
        """lighthouse boathouse crane windmill ferry drawbridge observatory greenhouse foundry tannery brewery
sawmill aqueduct quarry granary bakery printworks ropewalk smithy reservoir telescope carillon planetarium
funicular""",
        """copper marble wooden painted northern southern floating buried narrow crooked silent ancient royal
brick granite iron""",
    )
)
_CARRIERS = (" See {}.", " ({})", " This is {}.", " Noted as {}.", " Compare {}!", " {} was there before.")
_SYLLABLES = [one + other for one in "bdfgklmnprtvz" for other in "aeiou"]
_WORD = re.compile(r"\b[a-z]{5,}\b")

Json = dict[str, Any]
Kind = Literal["user", "act", "results", "answer"]


@dataclass(frozen=True)
class Event:
    """Something that was said. An `act` calls tools, `results` are theirs, an `answer` ends the turn."""

    kind: Kind
    text: str = ""
    calls: tuple[tuple[str, str, Json], ...] = ()
    """Id, name and arguments."""
    results: tuple[tuple[str, str], ...] = ()
    """Call id and text."""
    think: str = ""
    """Reasoning that stands before the text of an answer and is not sent back."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All that was said in it."""
        return (self.text, *(text for _, text in self.results))


@dataclass
class Script:
    """A whole session of an agent."""

    events: list[Event] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    """Code words, each said once."""
    needs: dict[int, str] = field(default_factory=dict)
    """The position of an `act` → the code word that has to be in the prompt of the request after it."""

    @property
    def said(self) -> list[str]:
        """Every text, once; what a call is given was said, too."""
        given = [json.dumps(told) for event in self.events for _, _, told in event.calls]
        return [*(text for event in self.events for text in event.texts if text), *given]


class Words:
    """Code words and names that come once."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._taken: set[str] = set()

    def code(self) -> str:
        """A code word."""
        return self._new(
            lambda: "".join(self.chance.choices(_SYLLABLES, k=4)).upper() + str(self.chance.randrange(100))
        )

    def thing(self) -> str:
        """A thing that has a code."""
        return self._new(
            lambda: f"{self.chance.choice(_MANNERS)} {self.chance.choice(_THINGS)} {self.chance.randrange(1000)}"
        )

    def _new(self, make: Any) -> str:
        while (made := make()) in self._taken:
            pass
        self._taken.add(made)
        return str(made)

    def prose(self, tokens: int) -> str:
        """Filler of about that many tokens."""
        words = vocabulary()
        chosen = [str(words[int(len(words) ** self.chance.random()) - 1]) for _ in range(int(tokens / 2.6))]
        lines = [" ".join(chosen[start : start + 14]).capitalize() + "." for start in range(0, len(chosen), 14)]
        return "\n".join(lines)

    def varied(self, text: str) -> str:
        """The same text about other things: a third of its longer words are others, everywhere the same."""
        others: dict[str, str] = {}
        words = vocabulary()

        def other(found: re.Match[str]) -> str:
            if found[0] not in others:
                keep = self.chance.random() < 2 / 3
                others[found[0]] = found[0] if keep else str(words[self.chance.randrange(300, len(words))])
            return others[found[0]]

        return _WORD.sub(other, text)


def scripted(run: list[Json], steps: int, seed: int, *, longer: float = 1.0) -> Script:
    """A session of so many steps out of a real run; `longer`: how much longer its results are."""
    words, script = Words(seed), Script()
    source = _endless(run)
    for turn, count in enumerate(LAYOUTS.get(steps, (steps,))):
        needed = {words.thing(): words.code() for _ in range(NEEDS if count >= NEEDED_IN else 0)}
        opening = run[1]["content"] if turn == 0 else words.varied("Go on with the next part of it, as before. " * 3)
        if needed:
            opening += f"\nWhen all is done, report the release codes of {_listed(needed)}."
        script.events.append(Event("user", _with_fact(words, script, opening)))
        for step in range(count):
            _add_step(script, words, next(source), turn, step, count, needed, longer)
        think = f"Let me see. {words.prose(40)}"
        answer = _with_fact(words, script, f"Done with part {turn + 1}. {words.prose(60)}")
        script.events.append(Event("answer", answer, think=think))
    return script


def chatted(run: list[Json], turns: int, seed: int) -> Script:
    """A session without tools: each step of the run is a question and its answer."""
    words, script = Words(seed), Script()
    source = _endless(run)
    things = [words.thing() for _ in range(NEEDS)]
    for turn in range(turns):
        thought, _, result = next(source)
        text = words.varied(run[1]["content"] if turn == 0 else result[:1500])
        if turn == 2:
            text += "".join(f"\nThe release code of the {thing} is {_planted(words, script)}." for thing in things)
        script.events.append(Event("user", _with_fact(words, script, text)))
        answer = _with_fact(words, script, f"{words.varied(thought)} {words.prose(80)}")
        script.events.append(Event("answer", answer, think=f"Let me see. {words.prose(40)}"))
        if turn > turns * 2 // 3 and turn % 3 == 0:
            at = len(script.events) - 1
            thing = things[turn // 3 % NEEDS]
            script.needs[at] = script.facts[_needed_at(script, thing)]
            following = f"Which release code does the {thing} have? {words.prose(12)}"
            script.events.append(Event("user", _with_fact(words, script, following)))
            script.events.append(Event("answer", _with_fact(words, script, words.prose(30))))
    return script


def _needed_at(script: Script, thing: str) -> int:
    said = next(text for text in script.said if f"of the {thing} is " in text)
    word = said.split(f"of the {thing} is ")[1].split(".")[0]
    return script.facts.index(word)


def _add_step(
    script: Script,
    words: Words,
    step: tuple[str, tuple[str, Json] | None, str],
    turn: int,
    number: int,
    count: int,
    needed: dict[str, str],
    longer: float,
) -> None:
    """One call, or two, and what came back."""
    thought, called, result = step
    name, arguments = called or ("bash", {"command": "true"})
    thought = words.varied(thought)
    late = number >= count * 2 // 3 and bool(needed)
    if late:
        thing = list(needed)[number % len(needed)]
        thought += f" For this I need the release code of the {thing} now."
        script.needs[len(script.events)] = needed[thing]
    calls, results = [], []
    for at in range(2 if words.chance.random() < TWO_CALLS_SHARE else 1):
        call_id = f"call_{turn}_{number}_{at}_{words.chance.randrange(16**8):08x}"
        told = {key: words.varied(value) if isinstance(value, str) else value for key, value in arguments.items()}
        calls.append((call_id, name, told))
        text = words.varied(result)
        while len(text) < longer * len(result):
            text += "\n" + words.varied(result)
        if needed and at == 0 and number < len(needed):
            thing = list(needed)[number]
            text += f"\nThe release code of the {thing} is {needed[thing]}.\n"
            script.facts.append(needed[thing])
        results.append((call_id, _with_fact(words, script, text)))
    script.events.append(Event("act", _with_fact(words, script, thought), calls=tuple(calls)))
    script.events.append(Event("results", results=tuple(results)))


def _with_fact(words: Words, script: Script, text: str) -> str:
    """The text with a fact at one of its line ends."""
    lines = text.split("\n")
    at = words.chance.randrange(len(lines))
    lines[at] += words.chance.choice(_CARRIERS).format(_planted(words, script))
    return "\n".join(lines)


def _planted(words: Words, script: Script) -> str:
    script.facts.append(words.code())
    return script.facts[-1]


def _listed(needed: dict[str, str]) -> str:
    return ", ".join(f"the {thing}" for thing in needed)


def _endless(run: list[Json]) -> Iterator[tuple[str, tuple[str, Json] | None, str]]:
    """The steps of a run again and again: what was thought, the call if there is one, and the result."""
    steps = []
    for one, after in itertools.pairwise(run):
        if one["role"] != "assistant" or after["role"] == "assistant":
            continue
        call = (one.get("tool_calls") or [None])[0]
        called = None if call is None else (call["function"]["name"], _arguments(call["function"]["arguments"]))
        steps.append((one["content"] or "", called, after["content"] or ""))
    while True:
        yield from steps


def _arguments(told: str | Json) -> Json:
    return json.loads(told) if isinstance(told, str) else told


def load_run(path: Path) -> list[Json]:
    """A run: a list of messages, the system prompt first."""
    run: list[Json] = json.loads(path.read_text())
    return run
