"""Histories that come again: what is known of them changes nothing but the time that it takes (`MessageCache`)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from archiver_stage import Stage, live_entries
from histories import talk

from memd.entries import Draft, Entry
from memd.ingest import unstored
from memd.ingest.topics import Topic
from memd.wire.api import MessageCache
from memd.wire.chat import CHAT
from memd.wire.ollama import OLLAMA
from memd.wire.request import ModelRequest

APIS = [CHAT, OLLAMA]
SPACES = ("", " ", "\n", "\t \r\n")


def listed(messages: list[dict[str, Any]], space: str = " ") -> bytes:
    """The list as a client writes it, with `space` around its elements."""
    return f"[{space}{f'{space},{space}'.join(map(json.dumps, messages))}{space}]".encode()


def body(text: bytes) -> bytes:
    return b'{"model": "m", "messages": %b, "stream": false}' % text


def told(request: ModelRequest) -> tuple[Any, ...]:
    raws = [bytes(raw) for raw in request.raw_messages]
    return raws, request.messages, request.digests, request.continues, request.model, request.instructions


def message(chosen: random.Random) -> dict[str, Any]:
    role = chosen.choice(["user", "assistant", "assistant", "tool", "system"])
    said: dict[str, Any] = {"role": role, "content": chosen.choice(["a", "b", 'an "assistant" says ],[', "ß\n"])}
    if role == "assistant" and chosen.random() < 0.3:
        said["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    return said | ({"tool_call_id": "1"} if role == "tool" else {})


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
@pytest.mark.parametrize("seed", range(8))
def test_a_history_that_goes_on_or_was_changed_is_read_as_if_it_came_for_the_first_time(api: Any, seed: int) -> None:
    chosen, cache = random.Random(seed), MessageCache()
    talks: list[list[dict[str, Any]]] = [[], []]
    for _ in range(30):
        talk = chosen.choice(talks)
        if talk and chosen.random() < 0.2:
            talk[chosen.randrange(len(talk))] = message(chosen)
        if talk and chosen.random() < 0.2:
            del talk[chosen.randrange(len(talk)) :]
        talk += [message(chosen) for _ in range(chosen.randrange(3))]
        sent = body(listed(talk, chosen.choice(SPACES)))
        assert told(api.parse(sent, cache)) == told(api.parse(sent))


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_of_a_history_that_goes_on_only_what_is_new_is_read(api: Any) -> None:
    talk = [{"role": ("user", "assistant")[number % 2], "content": "x" * number} for number in range(9)]
    cache = MessageCache()
    first = api.parse(body(listed(talk[:7])), cache)
    second = api.parse(body(listed(talk)), cache)
    assert all(now is before for now, before in zip(second.messages, first.messages, strict=False))
    assert (first.read_before, second.read_before) == (0, 7)


def test_two_answers_that_are_one_are_joined_where_the_second_comes_behind_a_known_one() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    asked: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I look."}]
    more: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    cache = MessageCache()
    for sent in (asked, asked + more, [*asked, *more, {"role": "user", "content": "c"}]):
        assert told(CHAT.parse(body(listed(sent)), cache)) == told(CHAT.parse(body(listed(sent))))


# A history of thousands of turns: it is stored in steps of one batch each, and the event loop does not retell it


TURNS = 200
STEP_CHARACTERS = 8_000


def long_history() -> list[str]:
    said = (f"In night {night} the lamp was lit. " * 60 for night in range(TURNS))
    return [one for text in said for one in (f"u:{text}", f"a:So be it. {text}")]


@pytest.mark.thorough
async def test_each_part_of_a_long_history_is_listed_once_and_not_with_each_batch_and_search(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = talk(topic.buffer, *long_history())
    listed: list[int] = []
    real = unstored.Part

    def counted(*args: Any, **more: Any) -> unstored.Part:
        listed.append(args[1])
        return real(*args, **more)

    monkeypatch.setattr(unstored, "Part", counted)
    storing = asyncio.ensure_future(stage.archiver.store(topic, conversation, len(conversation)))
    while not storing.done():
        topic.unstored()
        await asyncio.wait([storing], timeout=0.01)
    assert await storing and not topic.unstored()
    assert len(listed) < 2 * TURNS, "once, for searches and for the log"
    assert len({digest for entry in live_entries(topic) for digest in entry.digests}) == len(conversation)


async def test_thousands_of_short_messages_are_stored_in_steps(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [f"u:{chr(0x4E00 + number)}" for number in range(2 * TURNS)]
    conversation = talk(topic.buffer, *said, "a:So be it.")
    steps: list[int] = []
    real = topic.log.append

    def append(drafts: Sequence[Draft], made_at: int | None = None) -> list[Entry]:
        steps.append(len(drafts))
        return real(drafts, made_at)

    monkeypatch.setattr(topic.log, "append", append)
    assert await stage.archiver.store(topic, conversation, len(conversation))
    assert len(live_entries(topic)) == len(said)
    assert max(steps) <= STEP_CHARACTERS / 40, "a second's work of the model"
