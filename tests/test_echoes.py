"""Answers that repeat what memory showed, and questions asked again, do not crowd out or outlive the fact."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from asked_again import ASKED, SIMILAR, USELESS
from recording_upstream import chat_answer
from test_boilerplate import stored
from test_turn import Client, daemon_in_process

from memd.entries import Entry
from memd.recall.fusion import Evidence
from memd.recall.topic_search import TopicSearch
from memd.settings.model import RetrievalSettings
from memd.store.store import Hit, Snapshot
from memd.store.tools.export import export
from memd.store.tools.export_line import decode_line

FACT = "For the record: the staging database listens on port 5432, behind the blue gateway."
TOLD_IN_OTHER_WORDS = (
    "Bruno set up the new machine on Friday: Postgres for staging answers on 5432 there, the firewall lets the office"
    " in, and backups go to the NAS in the cellar at three every night."
)


async def ask(client: Client, question: str, answer: str) -> str:
    """Ask in a chat of its own, get this answer, have it stored; return the prompt."""
    client.upstream.answer = lambda request: chat_answer(request, text=answer)
    headers = {"X-Memory-Session": str(len(client.upstream.chats))}
    body = {"messages": [{"role": "user", "content": question}]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{client.daemon.base_url}/v1/chat/completions", json=body, headers=headers) as answered,
    ):
        assert answered.status == 200
        await answered.read()
    await stored(client)
    return client.upstream.prompts[-1]


def fact_in(snapshot: Snapshot) -> Entry:
    """The chunk with the fact."""
    [fact] = [one for place in snapshot.latest_places() if FACT in (one := snapshot.read(place)).content]
    return fact


def shown(prompt: str) -> list[str]:
    """The chunks of the block in a prompt."""
    _, opening, block = prompt.partition("[memory]")
    return block.partition("[/memory]")[0].split("[mem:")[1:] if opening else []


@pytest.mark.parametrize("variants", [1, 40], ids=["the same question", "similar questions"])
async def test_after_forty_useless_answers_the_fact_is_in_the_block(
    tmp_path: Path, variants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = SIMILAR[:variants]
    async with daemon_in_process(tmp_path, window=32_768) as client:
        await ask(client, TOLD_IN_OTHER_WORDS, "Noted.")
        for number in range(40):
            await ask(client, questions[number % variants], USELESS[number % len(USELESS)])
        looked_for: list[int] = []
        evidence = TopicSearch.evidence

        def counted(search: TopicSearch, k: int, settings: RetrievalSettings) -> tuple[list[Hit], Evidence]:
            looked_for.append(k)
            return evidence(search, k, settings)

        monkeypatch.setattr(TopicSearch, "evidence", counted)
        chunks = shown(await ask(client, "Tell me the port of the staging database.", "5432."))
        assert sorted(set(looked_for)) == looked_for, "what answers had been shown is found before anything is scored"
        assert any(TOLD_IN_OTHER_WORDS in chunk for chunk in chunks)
        best = max((await client.receipt())["candidates"], key=lambda one: one.score)
        assert best.echo == 1 and best.verdict == "injected"


async def test_after_an_update_no_old_answer_tells_the_old_value(tmp_path: Path) -> None:
    async with daemon_in_process(tmp_path, window=32_768) as client:
        await ask(client, FACT, "Noted.")
        for number in range(5):
            await ask(
                client, ASKED[number], f"It is port 5432, {'as you said' if number % 2 else 'behind the gateway'}."
            )
        await ask(client, "Which colour has the gateway?", "The gateway is blue.")
        topic = await client.daemon.topics.get("default")
        correction = {
            "chunk_ids": [fact_in(topic.log.snapshot()).uuid.hex()],
            "action": "Update",
            "reason": "moved",
            "content": "The staging database listens on port 6000, behind the blue gateway.",
        }
        await client.ask(ASKED[0], memory_in={"corrections": [correction]})
        chunks = shown(await ask(client, ASKED[5], "6000."))
        assert any("6000" in chunk for chunk in chunks)
        assert not any("5432" in chunk for chunk in chunks)
        chunks = shown(await ask(client, "What colour does the gateway have?", "Blue."))
        assert any("The gateway is blue." in chunk for chunk in chunks), "what was not corrected stays"


async def test_after_two_updates_of_one_fact_what_was_said_beside_it_is_still_found(tmp_path: Path) -> None:
    """What the second Update took out is not what the first one had put in its place."""
    cooling = "By the way: the cooling of rack7 hums when it has thirty degrees."
    async with daemon_in_process(tmp_path, window=32_768) as client:
        await ask(client, "For the record: the staging database of rack7 listens on port 5432.", "Noted.")
        await ask(client, f"On which port does the staging database of rack7 listen? {cooling}", "I noted the hum.")
        for former, port in (("5432", "6000"), ("6000", "7000")):
            snapshot = (await client.daemon.topics.get("default")).log.snapshot()
            entries = [snapshot.read(place) for place in snapshot.latest_places() if snapshot.is_live(place)]
            [fact] = [one for one in entries if f"listens on port {former}" in one.content]
            content = f"The staging database of rack7 listens on port {port}."
            correction = {"chunk_ids": [fact.uuid.hex()], "action": "Update", "reason": "moved", "content": content}
            await client.ask(f"{ASKED[0]} ({port})", memory_in={"corrections": [correction]})
            chunks = shown(
                await ask(client, f"Which port has the staging database of rack7 after {former}?", "It moved.")
            )
            assert any(content in chunk for chunk in chunks)
        chunks = shown(await ask(client, "What does the cooling of rack7 do?", "It hums."))
        assert any(cooling in chunk for chunk in chunks)


async def test_what_a_reply_was_shown_survives_a_restart_and_is_exported(tmp_path: Path) -> None:
    async with daemon_in_process(tmp_path) as client:
        await ask(client, FACT, "Noted.")
        client.upstream.answer = lambda request: chat_answer(request, text="5432.")
        await client.ask(ASKED[0])
        await client.settled()
        topic = await client.daemon.topics.get("default")
        fact = fact_in(topic.log.snapshot())
    async with daemon_in_process(tmp_path) as client:
        await stored(client)
        snapshot = (await client.daemon.topics.get("default")).log.snapshot()
        newest = snapshot.read(next(snapshot.latest_places()))
        assert newest.shown == (fact.uuid,)
        lines = list(export(client.daemon.config.data_dir, client.daemon.store.files, topic_id=None, live_only=True))
        assert lines[-1]["shown"] == [fact.uuid.hex()]
        assert decode_line(json.dumps(lines[-1]).encode())[1].shown == (fact.uuid,)


async def test_of_an_answer_and_the_one_given_anew_the_newer_is_shown(tmp_path: Path) -> None:
    question = "On which port does the staging database listen, and who set it up?"
    async with daemon_in_process(tmp_path) as client:
        for answer in ("Port 5432, Bruno did.", "Port 6000, Ada did, in March."):
            client.upstream.answer = partial(chat_answer, text=answer)
            await client.ask(question)  # the same chat: the user asks for another answer
            await client.stored()
        chunks = shown(await client.chat([{"role": "user", "content": "Which port has the staging database?"}]))
    assert [("6000" in chunk, "5432" in chunk) for chunk in chunks] == [(True, False)], chunks


LIKE_FACTS = [
    ("Ticket {} is assigned to {}.", "101", "102", "Marta", "Jonas", "Who has ticket {}?"),
    ("The {} service listens on port {}.", "billing", "mail", "8080", "9090", "On which port is the {} service?"),
    ("{} sits in room {}.", "Anna", "Piet", "417", "233", "Where does {} sit?"),
    ("The {} costs {} euros.", "lamp", "kettle", "49", "59", "What does the {} cost?"),
    ("The meeting about the {} is on {}.", "budget", "garden", "Tuesday", "Friday", "When is the {} meeting?"),
    ("The {} server stands in {}.", "backup", "print", "Oslo", "Bergen", "Where is the {} server?"),
    ("Version {} was released by {}.", "3.1", "3.2", "Ada", "Bruno", "Who released version {}?"),
    ("The key of the {} hangs on hook {}.", "cellar", "attic", "12", "15", "Where is the key of the {}?"),
]
"""A form of facts, two things, what is true of both at first, what of the first one later; the question about them."""


async def corrected(client: Client, old: str, new: str) -> None:
    """Update the chunk in which a user said something."""
    snapshot = (await client.daemon.topics.get("default")).log.snapshot()
    entries = [snapshot.read(place) for place in snapshot.latest_places() if snapshot.is_live(place)]
    [fact] = [one for one in entries if one.content.startswith(old)]
    await client.correct("default", action="Update", chunk_ids=[fact.uuid.hex()], reason="changed", content=new)


async def test_an_update_of_one_fact_hides_no_other_of_which_the_same_was_true(tmp_path: Path) -> None:
    """Whoever says something else after having been shown the first fact states a new one."""
    lost = []
    for number, (form, one, other, value, later, question) in enumerate(LIKE_FACTS):
        async with daemon_in_process(tmp_path / str(number), window=32_768) as client:
            first, second = form.format(one, value), form.format(other, value)
            await ask(client, first, "Noted.")
            assert first in (await ask(client, second, f"I noted that: {second}"))
            await corrected(client, first, form.format(one, later))
            chunks = shown(await ask(client, question.format(other), "As you said."))
            lost += [] if any(second in chunk for chunk in chunks) else [second]
            chunks = shown(await ask(client, question.format(one), "As you said."))
            assert any(form.format(one, later) in chunk for chunk in chunks)
            assert not any(first in chunk for chunk in chunks)
    assert lost == []


async def test_what_a_tool_reports_after_an_update_is_no_old_answer(tmp_path: Path) -> None:
    report = "ticket 102: open, assigned to Marta, due on Friday"
    call = {"id": "c1", "type": "function", "function": {"name": "ticket", "arguments": '{"number": 102}'}}
    async with daemon_in_process(tmp_path, window=32_768) as client:
        await ask(client, "Ticket 101 is assigned to Marta.", "Noted.")
        prompt = await client.chat([{"role": "user", "content": "What about ticket 102, and who has ticket 101?"}])
        assert "Ticket 101 is assigned to Marta." in prompt
        await client.chat(
            [
                {"role": "user", "content": "What about ticket 102, and who has ticket 101?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": report},
            ]
        )
        await stored(client)
        await corrected(client, "Ticket 101", "Ticket 101 is assigned to Jonas.")
        chunks = shown(await ask(client, "Who has ticket 102?", "Marta."))
        assert any(report in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("answer", "is_kept"),
    [
        ("Ticket 102 is assigned to Marta.", True),
        ("Marta waters the plants in the hall, feeds the fish and sorts the mail of the whole floor.", True),
        ("Ticket 101 is assigned to Marta.", False),
        ("Marta has ticket 101, as far as I know since Monday.", False),
    ],
)
async def test_an_answer_about_something_else_is_kept_and_one_with_the_old_value_is_not(
    tmp_path: Path, answer: str, is_kept: bool
) -> None:
    async with daemon_in_process(tmp_path, window=32_768) as client:
        await ask(client, "Ticket 101 is assigned to Marta.", "Noted.")
        assert "Ticket 101" in await ask(client, "Who looks after that ticket?", answer)
        await corrected(client, "Ticket 101", "Ticket 101 is assigned to Jonas.")
        chunks = shown(await ask(client, "Which ticket has whom? And who looks after it?", "As you said."))
        assert any("Jonas" in chunk for chunk in chunks)
        assert any(answer in chunk for chunk in chunks) is is_kept


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (
            "How do I connect to it?",
            "Use psql with host and user, e.g. `psql -h staging.internal -p 5432 -U app`, then migrate.",
        ),
        (
            "Make a table of its settings",
            "| host | staging.internal |\n|---|---|\n| port | 5432 |\n| user | app |\n| pool size | 20 |",
        ),
        ("Und auf welchem Port?", "Die Datenbank lauscht auf Port 5432; trage ihn bitte in deine Konfiguration ein."),
        ("So 5432 is what I put in for it. Right?", "Right: the staging database listens on port 5432."),
        ("Thanks, I typed port 5432 for the staging database.", "Good. The staging database listens on 5432."),
    ],
)
async def test_an_old_value_is_held_back_however_an_answer_wraps_it(tmp_path: Path, asked: str, answer: str) -> None:
    fact, question = "The staging database listens on port {}.", "On which port does the staging database listen?"
    async with daemon_in_process(tmp_path, window=32_768) as client:
        await ask(client, fact.format(5432), "Noted.")
        assert fact.format(5432) in await ask(client, f"About the staging database: {asked}", answer)
        await corrected(client, fact.format(5432), fact.format(6000))
        chunks = shown(await ask(client, question, "As you said."))
    assert any("6000" in chunk for chunk in chunks)
    assert not any("5432" in chunk for chunk in chunks), chunks


@pytest.mark.parametrize("answer", ["Got it, the mail service uses port 8080 from now on.", "Okay, it has port 8080."])
async def test_a_user_s_other_fact_is_kept_however_the_model_confirms_it(tmp_path: Path, answer: str) -> None:
    fact = "The {} service listens on port {}."
    async with daemon_in_process(tmp_path, window=32_768) as client:
        await ask(client, fact.format("billing", 8080), "Noted.")
        assert "billing" in await ask(client, fact.format("mail", 8080), answer)
        await corrected(client, fact.format("billing", 8080), fact.format("billing", 9090))
        chunks = shown(await ask(client, "On which port is the mail service?", "As you said."))
    assert any(fact.format("mail", 8080) in chunk for chunk in chunks), chunks
