"""Clients of a cluster: agents that state facts in chats and notes, and correct them, through whichever daemon.

Rule: what was not acknowledged is said again, word for word, as clients do, and a correction with the same key.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from daemon_process import Answer, ask
from ledger import Fact, Ledger

PATIENCE_SECONDS = 12.0
"""Then a client gives up."""
THINK_SECONDS = 0.15
"""Between two deeds of an agent, on average."""
NEVER = float("inf")
TRIES = 30
TURNS = 8
"""Of a conversation."""
PARTS = 5
UNPROMISED = ("degraded:store", "degraded:disk-full", "off", "bad-memory-in", "bad-topic", "token-required")
THINGS = ("lighthouse", "crane", "ferry", "windmill", "foundry", "quarry", "granary", "smithy", "reservoir", "mill")
FILLER = " ".join(f"The {thing} has a gate of iron, and whoever keeps it walks the wall at night." for thing in THINGS)


class Door(NamedTuple):
    """A daemon as clients reach it."""

    number: int
    base_url: str
    own_url: str
    well_since: float
    """Since when nothing was done to the daemon itself, which then has to answer (`time.monotonic`)."""

    @property
    def is_well(self) -> bool:
        return self.well_since < NEVER


def posted(url: str, body: object, headers: Mapping[str, str]) -> Answer | str:
    """The answer, or what went wrong where there is none."""
    try:
        return ask(url, body, headers=headers, seconds=PATIENCE_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"


class Writer(threading.Thread):
    """One agent, in one topic."""

    def __init__(self, name: str, topic: str, ledger: Ledger, doors: Callable[[], Sequence[Door]]) -> None:
        super().__init__(name=name, daemon=True)
        self._topic = topic
        self._ledger = ledger
        self._doors = doors
        self._chance = random.Random(name)
        self._facts = 0
        self._conversations = 0
        self._history: list[dict[str, str]] = []
        self._noted: list[Fact] = []
        self._ended = threading.Event()

    def end(self) -> None:
        """Say no more, and wait for the answer to the last request."""
        self._ended.set()

    def run(self) -> None:
        deeds = [self._state, self._note, self._note_long, self._update, self._praise]
        weights = [55, 25, 3, 7, 10]
        while not self._ended.is_set():
            self._chance.choices(deeds, weights)[0]()
            self._ended.wait(self._chance.expovariate(1 / THINK_SECONDS))

    # -- what it does ---------------------------------------------------------------------------------------------

    def _state(self) -> None:
        """State a fact in a chat."""
        if len(self._history) >= 2 * TURNS or not self._history:
            self._conversations += 1
            self._history = []
        fact = self._fact(1)
        fact.conversation = f"{self.name}-{self._conversations}"
        text = f"For the record {fact.key}: the code word of the {self._thing()} is {min(fact.words)}. Note it."
        self._history.append({"role": "user", "content": text})
        headers = {"X-Memory-Session": fact.conversation}
        body = {"model": "tiny", "messages": self._history}

        def say(door: Door) -> bool:
            answer = self._ask(door, f"{door.base_url}/t/{self._topic}/v1/chat/completions", body, headers, fails=False)
            memory = "" if answer is None else str(answer.headers["X-Memory-Status"])
            fact.answers.append(memory)
            if answer is None:
                return False
            self._ledger.count(f"chat: {memory}")
            message = json.loads(answer.body)["choices"][0]["message"]
            reply.append({"role": "assistant", "content": message["content"]})
            fact.acknowledged = memory not in UNPROMISED
            return True

        reply: list[dict[str, str]] = []
        if self._again(fact, say):
            self._history += reply
        else:
            self._history = []

    def _note(self, parts: int = 1) -> None:
        """Store a note, which can be corrected later."""
        fact = self._fact(parts)
        text = f"Note {fact.key}: the password of the {self._thing()} is {min(fact.words)}."
        if parts > 1:
            text = "\n\n".join(f"Chapter {name} of the book {min(fact.words)}. {FILLER}" for name in fact.names)

        def take(door: Door) -> bool:
            body = {"topic_id": self._topic, "notes": [{"content": text}]}
            answer = self._ask(door, f"{door.own_url}/memd/notes", body, {}, fails=True)
            if answer is None:
                return False
            fact.chunk_ids = list(json.loads(answer.body)["notes"][0]["chunk_ids"])
            fact.acknowledged = True
            return True

        if self._again(fact, take) and parts == 1:
            self._noted.append(fact)

    def _note_long(self) -> None:
        self._note(PARTS)

    def _update(self) -> None:
        """Replace a note by another word."""
        fact = self._chosen(lambda fact: not fact.is_updated and not fact.steps and not fact.steps_in_doubt)
        if fact is None:
            return
        before, after = min(fact.words), f"new{self._chance.randrange(10**8)}"
        text = f"Note {fact.key}: the password of the {self._thing()} is {after}."
        fact.is_updated, fact.words = True, {before, after}
        done = self._correct(fact, {"action": "Update", "content": text})
        if done is not None:
            fact.words = {after} if done else {before}

    def _praise(self) -> None:
        """Call a note helpful."""
        fact = self._chosen(lambda fact: not fact.is_updated and fact.steps + fact.steps_in_doubt < 3)
        if fact is None:
            return
        fact.steps_in_doubt += 1
        done = self._correct(fact, {"action": "Helpful"})
        if done is not None:
            fact.steps_in_doubt -= 1
            fact.steps += done

    # -- how ------------------------------------------------------------------------------------------------------

    def _correct(self, fact: Fact, correction: dict[str, str]) -> bool | None:
        """Whether it was applied; None if nobody knows."""
        body = {"topic_id": self._topic, "chunk_ids": fact.chunk_ids, "reason": "the keeper said so", **correction}
        headers, answer = {"Idempotency-Key": f"{self.name}-{self._chance.random()}"}, None
        for _ in range(TRIES):
            door = self._door()
            answer = self._ask(door, f"{door.own_url}/memd/corrections", body, headers, fails=True)
            self._ledger.count(f"correction: {'unanswered' if answer is None else answer.status}")
            if answer is not None or self._ended.wait(0.05):
                break
        if answer is None:
            return None
        told = json.loads(answer.body)
        return bool(told["applied"]) and not told["failed"]

    def _again(self, fact: Fact, say: Callable[[Door], bool]) -> bool:
        """Say something until somebody answers it; whether somebody has."""
        for _ in range(TRIES):
            door, asked = self._door(), time.monotonic()
            if say(door):
                if fact.acknowledged:
                    self._ledger.promise(door.number, self._topic, asked)
                return True
            self._ledger.count("said again")
            if self._ended.wait(0.05):
                break
        return False

    def _ask(self, door: Door, url: str, body: object, headers: Mapping[str, str], *, fails: bool) -> Answer | None:
        """An answer with 200. `fails`: whether another one is none of the daemon's faults, where it cannot store."""
        asked = time.monotonic()
        answer = posted(url, body, headers)
        was_well = door.is_well and door in self._doors()
        if not isinstance(answer, str) and answer.status == 200:
            if was_well:
                self._ledger.took(asked, url.partition("/v1/")[2] or url.partition("/memd/")[2])
            return answer
        what = answer if isinstance(answer, str) else f"{answer.status} {answer.body[:300]!r}"
        self._ledger.count(f"failed: {what[:60]}")
        if was_well and not fails:
            self._ledger.refuse(door.number, url, what)
        return None

    def _door(self) -> Door:
        """Mostly of a daemon that is well, as a balancer chooses."""
        doors = self._doors()
        well = [door for door in doors if door.is_well]
        return self._chance.choice(well if well and self._chance.random() < 0.95 else doors)

    def _fact(self, parts: int) -> Fact:
        self._facts += 1
        fact = Fact(f"F-{self.name}-{self._facts}", self._topic, {f"word{self._chance.randrange(10**8)}"}, parts)
        self._ledger.add(fact)
        return fact

    def _chosen(self, is_fit: Callable[[Fact], bool]) -> Fact | None:
        fit = [fact for fact in self._noted[-30:] if is_fit(fact)]
        return self._chance.choice(fit) if fit else None

    def _thing(self) -> str:
        return self._chance.choice(THINGS)
