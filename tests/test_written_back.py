"""What clients write back otherwise than it was said is stored once, also what an earlier version has stored."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from archiver_stage import live_entries
from daemon_in_process import Client, daemon_in_process
from recording_upstream import COMMON, Request, Response

from memd.messages import Message

Json = dict[str, Any]

ASKED: Json = {"role": "user", "content": "Rename the constant in the harbour module, please."}


def edit(call_id: str, **more: object) -> Json:
    """An answer that calls a tool, as the model wrote it or as the client sends it back."""
    given = {"path": "harbour.py", "old": "LIMIT_A", "new": "LIMIT_B"}
    function = {"name": "edit", "arguments": json.dumps(given | more)}
    call = {"id": call_id, "type": "function", "function": function} if call_id else {"function": function}
    return {"role": "assistant", "content": "I change the constant now.", "tool_calls": [call]}


def result(call_id: str, text: str) -> Json:
    """The result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def answered(message: Json, _: Request) -> Response:
    """The model's message."""
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return Response((json.dumps({"choices": [choice], "object": "chat.completion", **COMMON}).encode(),))


async def logged(client: Client) -> list[str]:
    """The live chunks, once all is stored."""
    await client.stored()
    return [entry.content for entry in live_entries(await client.daemon.topics.get("default"))]


async def say(client: Client, history: list[Json], reply: Json) -> None:
    """One request with its answer."""
    client.upstream.answer = partial(answered, reply)
    await client.chat(history)
    await client.settled()


@pytest.mark.parametrize(
    ("said", "came_back"),
    [
        (edit("c1"), edit("c1", replace_all=False)),
        (
            {"role": "assistant", "content": "The first pier.\r\nThe second pier.  \r\nThe third."},
            {"role": "assistant", "content": "The first pier.\nThe second pier.\nThe third."},
        ),
        (
            {"role": "assistant", "content": "<think>Hm, well.</think>The third pier."},
            {
                "role": "assistant",
                "content": '<details type="reasoning" done="true">\n> Hm, well.\n</details>\nThe third pier.',
            },
        ),
        (
            {"role": "assistant", "content": "Die Br\u00fccke: see https://bridge.example/a now."},
            {
                "role": "assistant",
                "content": "Die Bru\u0308cke: see [https://bridge.example/a](https://bridge.example/a) now.",
            },
        ),
    ],
    ids=["defaults", "line ends", "thinking", "NFD and links"],
)
async def test_an_answer_that_comes_back_rewritten_is_stored_once(client: Client, said: Json, came_back: Json) -> None:
    await say(client, [ASKED], said)
    behind = [result("c1", "Done.")] if "tool_calls" in said else [{"role": "user", "content": "Which is longest?"}]
    await say(client, [ASKED, came_back, *behind], {"role": "assistant", "content": "It is the longest of all."})
    topic = await client.daemon.topics.get("default")
    assert len(topic.buffer.conversations()) == 1
    stored = await logged(client)
    assert sum(ASKED["content"] in text for text in stored) == 1, stored


@pytest.mark.parametrize("ids", [["call_1"] * 6, [""] * 6, [f"call_{number % 2}" for number in range(6)]])
async def test_calls_whose_ids_repeat_or_are_missing_are_all_stored(client: Client, ids: list[str]) -> None:
    history = [ASKED]
    for number, call_id in enumerate(ids):
        reply = edit(call_id, step=number)
        await say(client, history, reply)
        history += [reply, result(call_id, f"Result number {number}: pier {number * 7} is open. " * 60)]
    await say(client, history, {"role": "assistant", "content": "All are done."})
    stored = "\n".join(await logged(client))
    for number in range(len(ids)):
        assert stored.count(f'"step": {number}') == 1 and f"Result number {number}:" in stored


@pytest.mark.parametrize("has_journal", [True, False])
async def test_what_an_earlier_version_has_stored_is_not_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_journal: bool
) -> None:
    history = [
        ASKED,
        edit("c1"),
        result("c1", "Done:  \r\none place."),
        {"role": "assistant", "content": "The constant is LIMIT_B now.\r\nEverywhere."},
    ]
    with monkeypatch.context() as earlier:
        earlier.setattr(Message, "content_digest", property(lambda message: message.former_digest))
        async with daemon_in_process(tmp_path) as client:
            for end in (1, 3):
                await say(client, history[:end], history[end])
            await client.stored()
            [last] = [
                one for one in live_entries(await client.daemon.topics.get("default")) if "is LIMIT_B" in one.content
            ]
            correction = {"action": "Update", "reason": "x", "content": "It is LIMIT_C."}
            await client.correct("default", chunk_ids=[last.uuid.hex()], **correction)
            before = await logged(client)
    if not has_journal:
        (tmp_path / "memory" / "default" / "hot.log").unlink()
    async with daemon_in_process(tmp_path) as client:
        await say(client, [*history, {"role": "user", "content": "Thanks."}], {"role": "assistant", "content": "Sure."})
        after = await logged(client)
        assert sorted(after) == sorted([*before, "Thanks.\nSure."])
