"""Who may write and neither read nor correct: takes nobody's words out of recall, and hears nothing of them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from daemon_in_process import House, house_in

from memd.embedding.encoder import Encoder

TOPIC = "team-a"
WORDS = {
    "chat": "The release word for the lighthouse lamp is cinnamon-42.",
    "import": "The barometer in the watch room was made in Trieste in 1911.",
    "note": "The ferry to the northern island leaves from berth seventeen.",
    "document": "The lightning rod of the tower is inspected by the firm Osterkamp.",
}
QUESTIONS = {
    "chat": "What is the release word for the lighthouse lamp?",
    "import": "Where was the barometer in the watch room made?",
    "note": "From which berth does the ferry to the northern island leave?",
    "document": "Which firm inspects the lightning rod of the tower?",
}
OTHERS = {
    "import": "The barometer in the watch room was thrown away by the keeper.",
    "note": "The ferry to the northern island leaves from the fish market.",
    "document": "The lightning rod of the tower is inspected by nobody at all.",
}


def part(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "text": text}, {"role": "assistant", "text": "Noted."}]
    return {"topic_id": TOPIC, "part": {"source": "claude:talk", "messages": messages}}


def note(text: str) -> dict[str, Any]:
    return {"topic_id": TOPIC, "notes": [{"content": text, "source": "board"}]}


def document(text: str) -> dict[str, Any]:
    sections = [{"text": text, "heading": ["Tower"]}]
    return {
        "topic_id": TOPIC,
        "document": {
            "source": "docs/tower.md",
            "hash": hashlib.sha256(text.encode()).hexdigest(),
            "sections": sections,
        },
    }


def file(text: str) -> dict[str, Any]:
    return {"topic_id": TOPIC, "file": {"name": "tower.md", "content": base64.b64encode(text.encode()).decode()}}


WAYS = {
    "import": ("/memd/import/messages", part),
    "note": ("/memd/notes", note),
    "document": ("/memd/documents", document),
    "file": ("/memd/documents", file),
}


async def write(house: House, name: str, way: str, text: str) -> Any:
    path, body = WAYS[way]
    status, answer = await house.ask(name, path, body(text))
    assert status == 200, answer
    await house.settled()
    return answer


async def found(house: House, question: str) -> list[tuple[str, str]]:
    status, answer = await house.ask("ann", "/memd/search?limit=50&topic=" + TOPIC + "&q=" + question.replace(" ", "+"))
    assert status == 200, answer
    return [(one.get("author", ""), one["content"]) for one in answer["chunks"]]


async def test_with_the_right_to_write_alone_nobody_takes_the_words_of_others_out_of_recall(house: House) -> None:
    assert (await house.chat("ann", WORDS["chat"]))[0] == 200
    await house.settled()
    for way in OTHERS:
        await write(house, "ann", way, WORDS[way])
    _, exported = await house.ask("ann", f"/memd/export?topic={TOPIC}")
    lines = [json.loads(line) for line in exported.splitlines()]
    assert len(lines) >= len(WORDS)

    for way, text in OTHERS.items():
        await write(house, "write", way, WORDS[way])  # the same words, and others in their place
        await write(house, "write", way, text)
    await write(house, "write", "import", WORDS["chat"])
    dead = [{**line, "status": "Deprecated", "content": "", "speakers": []} for line in lines]
    ids = [line["id"] for line in lines]
    refused: tuple[tuple[str, dict[str, object]], ...] = (
        ("/memd/import/entries", {"topic_id": TOPIC, "lines": [{"line": one} for one in dead]}),
        ("/memd/documents/remove", {"topic_id": TOPIC, "sources": ["docs/tower.md"], "below": True}),
        ("/memd/corrections", {"topic_id": TOPIC, "chunk_ids": ids, "action": "Update"}),
        ("/memd/corrections", {"topic_id": TOPIC, "chunk_ids": ids, "action": "Unhelpful", "steps": 10}),
        ("/memd/erase", {"topic_id": TOPIC, "chunk_ids": ids}),
    )
    for path, body in refused:
        status, answer = await house.ask("write", path, body)
        assert status in (400, 403) or path == "/memd/documents/remove", answer  # that one takes out its own
    assert (await house.chat("write", WORDS["chat"]))[0] == 403

    for way, question in QUESTIONS.items():
        assert any(one == "ann" and WORDS[way] in text for one, text in await found(house, question)), way
        status, _, _ = await house.chat("ann", question)
        assert status == 200 and WORDS[way] in house.upstream.prompts[-1], way
    for way in ("import", "note"):
        assert any(one == "write" and OTHERS[way] in text for one, text in await found(house, QUESTIONS[way])), way


async def test_who_may_read_and_write_but_not_correct_stands_beside_others_in_every_way(house: House) -> None:
    question, hers, his = QUESTIONS["chat"], "It is cinnamon-42, as Ann says.", "It is turnip-13, as everybody knows."
    assert (await house.chat("ann", WORDS["chat"]))[0] == 200
    assert (await house.chat("ann", question, hers, "Thank you for the release word."))[0] == 200
    await house.settled()
    for way in OTHERS:
        await write(house, "ann", way, WORDS[way])
    for _ in range(2):  # asked again and answered otherwise, and two near copies of all
        assert (await house.chat("scribe", question, his, "Thank you for that word."))[0] == 200
        for number, text in enumerate(WORDS.values()):
            assert (await house.chat("scribe", f"{text} ({number})"))[0] == 200
            await write(house, "scribe", "import", f"{text} {number}")
            await write(house, "scribe", "note", f"{text} {number}!")
    assert (await house.ask("scribe", *(WAYS["document"][0], document(OTHERS["document"]))))[0] == 403
    await house.settled()
    _, told = await house.ask("ann", f"/memd/chunks?topic={TOPIC}&author=ann")
    known = "\n".join(one["content"] for one in told["chunks"])
    assert all(words in known for words in (*WORDS.values(), hers))
    for way, asked in QUESTIONS.items():
        assert any(one == "ann" and WORDS[way] in text for one, text in await found(house, asked)), way
        status, _, _ = await house.chat("ann", asked + " Tell me.")
        assert status == 200 and WORDS[way] in house.upstream.prompts[-1], way
    assert any(one == "scribe" and his in text for one, text in await found(house, "Is it turnip-13?"))


def shape(answer: Any) -> Any:
    """An answer without its ids."""
    if isinstance(answer, dict):
        return {name: shape(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [shape(one) for one in answer]
    return "…" if isinstance(answer, str) else answer


@pytest.mark.parametrize("way", WAYS)
async def test_a_writer_who_may_not_read_hears_the_same_whether_it_was_said_before_or_not(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded: list[list[str]] = []
    embed_texts = Encoder.embed_texts

    def noted(self: Encoder, texts: Sequence[str]) -> Any:
        embedded.append(list(texts))
        return embed_texts(self, texts)

    monkeypatch.setattr(Encoder, "embed_texts", noted)
    words, answers = WORDS.get(way, WORDS["document"]), []
    for folder, is_known in (("known", True), ("new", False)):
        async with house_in(tmp_path / folder) as house:
            if is_known:
                await write(house, "ann", way, words)
            embedded.clear()
            answers.append((shape(await write(house, "write", way, words)), [*embedded]))
    assert answers[0] == answers[1], "the work, and so its time, is the same too"
