"""The agents of bench/soak.py: what they do, and what they were promised.

Each keeps a ledger of facts that nobody else knows. A fact counts as acknowledged when the answer to the request that
stated it has come whole, and did not say that it could not be written (`X-Memory-Status: degraded:store`): from then on
memd has it, whoever is killed (config.yaml: "A killed process loses nothing").
What became of an Update that was interrupted, nobody can know: then the old word and the new one are both right.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

import aiohttp
from soak_upstream import PROBE_HEADER, SEEN_HEADER, SLOWLY_HEADER
from vectors import sentences

Manner = Literal["whole history", "trimmed history", "only what is new"]
MANNERS: tuple[Manner, ...] = ("whole history", "trimmed history", "only what is new")

TRIMMED_MESSAGES = 12
THINK_SECONDS = 0.5
NAP_SECONDS = 8.0
"""Longer than a topic stays in memory unused."""
AGAIN_SECONDS = 0.2
ANSWER_SECONDS_MAX = 60.0
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_log",
            "parameters": {"type": "object", "properties": {"service": {"type": "string"}}},
        },
    }
]
PATH = "/v1/chat/completions"

Body = dict[str, Any]


@dataclass
class Fact:
    """One statement."""

    key: str
    topic: str
    words: list[str]
    """Any of these is right; more than one only where an Update was interrupted."""
    acknowledged: bool = False
    updated: bool = False


@dataclass
class Ledger:
    """What all agents know of all they did."""

    facts: dict[str, Fact] = field(default_factory=dict)
    replaced: list[tuple[str, str]] = field(default_factory=list)
    """Topic and id of the chunks whose Update was acknowledged."""
    steps: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Topic and id of a chunk → Helpful less Unhelpful that were acknowledged."""
    doubtful: set[tuple[str, str]] = field(default_factory=set)
    """Chunks with a correction of which it is not known whether it took effect."""
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Answer:
    """A whole answer of status 200."""

    message: Body
    out: Body
    seen: Body
    status: str
    """X-Memory-Status."""

    @property
    def is_promise(self) -> bool:
        """Whether memd has what was said."""
        return self.status not in ("degraded:store", "degraded:disk-full")


class NotAnsweredError(Exception):
    """The answer did not come, did not come whole, or was an error."""


class Agent:
    """One client: several conversations in one topic, one after the other."""

    def __init__(
        self, number: int, topic: str, manner: Manner, ledger: Ledger, url: Callable[[], str], ended: Callable[[], bool]
    ) -> None:
        self.topic = topic
        self._name = f"A{number:02}"
        self._manner = manner
        self._ledger = ledger
        self._url = url
        self._ended = ended
        self._chance = random.Random(1000 + number)
        self._facts: list[Fact] = []
        self._history: list[Body] = []
        self._session_name = ""
        self._turns_left = 0
        self._conversations = 0
        self._naps = manner == "whole history" and number % 4 == 3

    async def live(self) -> None:
        """Until told to end."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS_MAX)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            self._session = session
            while not self._ended():
                if self._turns_left == 0:
                    self._open_conversation()
                self._turns_left -= 1
                await self._deed()
                pause = NAP_SECONDS if self._naps and self._chance.random() < 0.02 else 0.0
                await asyncio.sleep(pause + self._chance.expovariate(1 / THINK_SECONDS))

    async def _deed(self) -> None:
        deed = self._chance.choices(
            [self._state, self._state_and_cancel, self._use_tools, self._ask, self._edit, self._repeat],
            [45, 15, 12, 20, 4, 4],
        )[0]
        await deed()

    # -- what an agent does ------------------------------------------------------------------------------------

    def _open_conversation(self) -> None:
        self._conversations += 1
        self._history = []
        self._session_name = f"{self._name}-{self._conversations}"
        self._turns_left = self._chance.randrange(8, 50)

    async def _state(self) -> None:
        """State a fact."""
        fact, text = self._new_fact()
        self._acknowledge(fact, await self._turn(text))

    async def _state_and_cancel(self) -> None:
        """State a fact, leave before the answer, and say it again, or say something else instead."""
        fact, text = self._new_fact()
        for _ in range(self._chance.randrange(1, 3)):
            await self._cancelled([{"role": "user", "content": text}])
        if self._manner != "only what is new" and self._chance.random() < 0.3:
            self._ledger.counts["facts withdrawn"] += 1  # never answered; what memd makes of it is its own affair
            await self._turn(self._filler())
        else:
            self._acknowledge(fact, await self._turn(text))

    async def _use_tools(self) -> None:
        """A tool loop with parallel calls; the fact is in the question."""
        fact, text = self._new_fact()
        steps = self._chance.randrange(1, 4)
        self._acknowledge(fact, await self._turn(f"{text} Please look it up in {steps} steps.", tools=True))

    async def _ask(self) -> None:
        """Ask for an early fact, and correct what was shown on the next turn."""
        known = [fact for fact in self._facts[:-20] if fact.acknowledged and len(fact.words) == 1]
        if not known:
            return
        fact = self._chance.choice(known)
        answer = await self._turn(f"What is the code word of {fact.key}? {self._filler(1)}", memory_in={})
        if answer is None:
            return
        self._ledger.counts["asked"] += 1
        found = [(chunk_id, said) for chunk_id, said in answer.seen["found"] if states(said, fact)]
        if not found:
            self._ledger.counts["asked, not shown"] += 1
            return
        await self._correct(fact, *found[0])

    async def _correct(self, fact: Fact, chunk_id: str, said: str) -> None:
        place, before = (self.topic, chunk_id), fact.words[0]
        kind = self._chance.choice(["Update", "Helpful", "Unhelpful", None])
        praised = self._ledger.steps[place] > 0 and place not in self._ledger.doubtful
        if kind is None or (kind == "Unhelpful" and not praised):  # what is blamed need not be recalled
            return
        correction: Body = {"chunk_ids": [chunk_id], "action": kind, "reason": f"{self._name} checked it"}
        if kind == "Update":
            fact.words = [before, f"{before.rstrip('0123456789')}{self._chance.randrange(10**6)}"]
            correction["content"] = said.replace(before, fact.words[1])
        answer = await self._turn(f"Thanks, noted. {self._filler(1)}", memory_in={"corrections": [correction]})
        failed = answer is not None and any(s["type"] == "correction_failed" for s in answer.out.get("signals", []))
        self._ledger.counts["corrections"] += 1
        if answer is None:
            self._ledger.doubtful.add(place)
        elif failed:  # nothing was changed
            fact.words = [before]
            self._ledger.counts["corrections refused"] += 1
        elif kind == "Update":
            fact.words, fact.updated = fact.words[1:], True
            self._ledger.replaced.append(place)
        else:
            self._ledger.steps[place] += 1 if kind == "Helpful" else -1  # once, however often it was sent

    async def _edit(self) -> None:
        """Say something, then say something else in its place; no fact is in either."""
        if self._manner == "only what is new":
            return
        before = list(self._history)
        if await self._turn(self._filler()) is not None:
            self._history = before
            await self._turn(self._filler())
            self._ledger.counts["edits"] += 1

    async def _repeat(self) -> None:
        """State a fact and send the very same request again, as if the answer had been lost on the way.

        From a client that sends only what is new, the same words again are a new turn.
        """
        if self._manner == "only what is new":
            return
        fact, text = self._new_fact()
        before = list(self._history)
        first = await self._turn(text)
        if first is None:
            return
        self._acknowledge(fact, first)
        after, self._history = self._history, before
        broken_before = self._ledger.counts["not answered"]
        sent = [{"role": "user", "content": text}]
        try:
            again = await self._once(self._messages(sent), stream=False, memory_in=None, tools=False)
        except NotAnsweredError:
            return
        finally:
            self._history = after
        self._ledger.counts["repeated"] += 1
        if broken_before != self._ledger.counts["not answered"]:
            return
        if not first.seen["block"]:  # nothing was found: what was told since may answer
            self._ledger.counts["repeated, the first without a block"] += 1
        elif again.seen["block"] != first.seen["block"]:
            self._ledger.counts["repeated, another block"] += 1

    # -- one turn ----------------------------------------------------------------------------------------------

    async def _turn(self, text: str, *, memory_in: Body | None = None, tools: bool = False) -> Answer | None:
        """A user's message and all steps to the final answer; None if it is time to end before that."""
        new: list[Body] = [{"role": "user", "content": text}]
        stream = self._chance.random() < 0.5
        while True:
            answer = await self._until_answered(new, stream=stream, memory_in=memory_in, tools=tools)
            if answer is None:
                return None
            self._history += [*new, answer.message]
            calls = answer.message.get("tool_calls")
            if not calls:
                return answer
            new = [{"role": "tool", "tool_call_id": call["id"], "content": self._log_lines()} for call in calls]

    async def _until_answered(
        self, new: list[Body], *, stream: bool, memory_in: Body | None, tools: bool
    ) -> Answer | None:
        while not self._ended():
            try:
                return await self._once(self._messages(new), stream=stream, memory_in=memory_in, tools=tools)
            except NotAnsweredError:
                self._ledger.counts["not answered"] += 1
                await asyncio.sleep(AGAIN_SECONDS)
        return None

    def _messages(self, new: list[Body]) -> list[Body]:
        """What this client sends when it has something new to say."""
        if self._manner == "only what is new":
            return new
        kept = self._history
        if self._manner == "trimmed history":
            kept = kept[-TRIMMED_MESSAGES:]
            questions = [place for place, message in enumerate(kept) if message["role"] == "user"]
            kept = kept[questions[0] :] if questions else kept
        return [*kept, *new]

    async def _once(self, messages: list[Body], *, stream: bool, memory_in: Body | None, tools: bool) -> Answer:
        """One request.

        Raises:
            NotAnsweredError: see there.
        """
        self._ledger.counts["requests"] += 1
        body: Body = {"model": "soak", "messages": messages, "stream": stream, "max_tokens": 200}
        if tools:
            body["tools"] = TOOLS
        if memory_in is not None:
            body["metadata"] = {"memory_in": json.dumps(memory_in)}
        try:
            async with self._session.post(self._address(), json=body, headers=self._headers()) as answer:
                data = await answer.read()
                if answer.status != 200:
                    self._ledger.counts[f"status {answer.status}"] += 1
                    raise NotAnsweredError
                status = answer.headers.get("X-Memory-Status", "")
                if status not in ("none", "injected"):
                    self._ledger.counts[f"memory {status}"] += 1
                seen = json.loads(unquote(answer.headers.get(SEEN_HEADER, "{}")))
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise NotAnsweredError from error
        message, out = read_stream(data) if stream else read_whole(data)
        return Answer(message, out, seen, status)

    async def _cancelled(self, new: list[Body]) -> None:
        """Send it and leave: before the first token, or in the middle of the answer."""
        in_the_middle = self._chance.random() < 0.5
        stream = in_the_middle or self._chance.random() < 0.5
        body = {"model": "soak", "messages": self._messages(new), "stream": stream}
        headers = {**self._headers(), SLOWLY_HEADER: "1"}
        patience = ANSWER_SECONDS_MAX if in_the_middle else self._chance.uniform(0.005, 0.15)
        self._ledger.counts["requests"] += 1
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
            async with (
                asyncio.timeout(patience),
                self._session.post(self._address(), json=body, headers=headers) as answer,
            ):
                for _ in range(2):
                    await answer.content.readany()
                answer.close()
        self._ledger.counts["cancelled in the middle" if in_the_middle else "cancelled early"] += 1

    def _address(self) -> str:
        return f"{self._url()}/t/{self.topic}{PATH}"

    def _headers(self) -> dict[str, str]:
        if self._manner != "only what is new":
            return {}
        return {"X-Memory-History": "daemon", "X-Memory-Session": self._session_name}

    # -- what it says ------------------------------------------------------------------------------------------

    def _new_fact(self) -> tuple[Fact, str]:
        key = f"{self._name}-F{len(self._facts):05}"
        fact = Fact(key, self.topic, [f"{self._chance.choice(_WORDS)}{self._chance.randrange(10**6)}"])
        self._facts.append(fact)
        self._ledger.facts[key] = fact
        return fact, f"{self._filler()} The code word of {key} is {fact.words[0]}. {self._filler()}"

    def _acknowledge(self, fact: Fact, answer: Answer | None) -> None:
        fact.acknowledged = answer is not None and answer.is_promise
        if answer is not None and not answer.is_promise:
            self._ledger.counts["facts not promised"] += 1

    def _filler(self, count: int = 2) -> str:
        said = sentences(count, self._chance.randrange(1 << 30))
        return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in said)

    def _log_lines(self) -> str:
        return "\n".join(
            f"2026-11-21T{self._chance.randrange(24):02}:07 INFO [{self._chance.randrange(10**5)}] {sentence}"
            for sentence in sentences(self._chance.randrange(2, 8), self._chance.randrange(1 << 30))
        )


_WORDS = ("amber", "birch", "cobalt", "dune", "ember", "fjord", "gravel", "heron", "iris", "juniper", "kelp", "lichen")


class Walker(Agent):
    """A client that goes through many topics, one fact in each, round after round."""

    topics = 300

    async def _deed(self) -> None:
        self.topic = f"walked-{self._conversations % self.topics}"
        self._open_conversation()
        await self._state()


def states(said: str, fact: Fact) -> bool:
    """Whether a text has a word that is right for the fact."""
    return any(f"{fact.key} is {word}" in said for word in fact.words)


async def probed(session: aiohttp.ClientSession, url: str, fact: Fact) -> bool:
    """Whether a fresh chat that leaves no trace is shown the fact."""
    messages = [{"role": "user", "content": f"What is the code word of {fact.key}?"}]
    headers = {"X-Memory-Mode": "readonly", PROBE_HEADER: "1"}
    async with session.post(
        f"{url}/t/{fact.topic}{PATH}", json={"model": "soak", "messages": messages}, headers=headers
    ) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        seen = json.loads(unquote(answer.headers[SEEN_HEADER]))
    return any(states(said, fact) for _, said in seen["found"])


def read_whole(data: bytes) -> tuple[Body, Body]:
    """The message and the MemoryOut of an answer that was not streamed."""
    body = json.loads(data)
    return body["choices"][0]["message"], body.get("memory_out", {})


def read_stream(data: bytes) -> tuple[Body, Body]:
    """The same of a stream.

    Raises:
        NotAnsweredError: it has no end.
    """
    if b"data: [DONE]" not in data:
        raise NotAnsweredError
    message: Body = {"role": "assistant", "content": ""}
    out: Body = {}
    calls: list[Body] = []
    for line in data.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        out = event.get("memory_out", out)
        for delta in (choice["delta"] for choice in event["choices"]):
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls", []):
                if part["index"] == len(calls):
                    calls.append({key: value for key, value in part.items() if key != "index"})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    return message, out
