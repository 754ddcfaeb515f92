"""Shares: who has the most gives way, and nobody can throw out what another has."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from archiver_stage import Stage, live_entries
from daemon_in_process import house_in
from histories import history_of, new_buffer, receive, said, talk
from hypothesis import given
from hypothesis import strategies as st

import memd.receipts
from memd.conversation.conversation import Conversation
from memd.conversation.events import Injected
from memd.conversation.hot_buffer import HotBuffer
from memd.ingest.erasing import Concern
from memd.ingest.redaction import Redactor
from memd.messages import BlockChunk
from memd.principals import surplus
from memd.receipts import Receipt, ReceiptRing, Receipts
from memd.settings.model import Config, ConversationSettings, IngestSettings
from memd.store.disk import LocalDisk, Wiper
from memd.telemetry.events import SUBSCRIBERS_MAX, Events

MALLORY = "mallory"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9))), st.integers(0, 60))
def test_what_stays_fits_and_nobody_within_a_share_loses_anything(things: list[tuple[str, int]], room: int) -> None:
    leaving = [one.place for one in surplus(things, room)]
    had, lost = Counter[str](), Counter[str]()
    for place, (author, size) in enumerate(things):
        had[author] += size
        lost[author] += size if place in leaving else 0
    assert had.total() - lost.total() <= max(room, 0)
    assert not leaving or had.total() - lost.total() + things[leaving[-1]][1] > room, "no more than has to"
    for author in had:
        assert not lost[author] or had[author] * len(had) > room
        places = [place for place, one in enumerate(things) if one[0] == author]
        assert [place for place in leaving if place in places] == places[: len([p for p in leaving if p in places])]


def test_of_too_many_who_listen_the_oldest_of_whoever_has_the_most_is_told_to_leave_and_why() -> None:
    events, streams, kept = Events(), [], []
    ann = events.subscription("ann")
    hers = ann.__enter__()
    for _ in range(SUBSCRIBERS_MAX):
        streams.append((one := events.subscription(MALLORY)).__enter__())
        kept.append(one)
    name, told = streams[0].get_nowait()
    assert name == "end" and f"mallory had the most of them: {SUBSCRIBERS_MAX}" in told["reason"]
    events.publish("stored", {"topic_id": "t"})
    assert hers.get_nowait() == ("stored", {"topic_id": "t"})
    with events.subscription("bob") as his:
        events.publish("stored", {"topic_id": "t"})
        assert his.get_nowait()[0] == hers.get_nowait()[0] == "stored"


def answered(buffer: HotBuffer, author: str, question: str) -> Conversation:
    arrival = buffer.receive(history_of([said(f"u:{question}")]), 0.0, 1, author)
    message = msgspec.structs.replace(said(f"a:It is so: {question}"), author=author)
    return buffer.reply(arrival, message, 10, 0.0)


async def test_who_opens_many_conversations_closes_his_own_and_nobody_elses() -> None:
    stage = Stage(Config(conversation=ConversationSettings(max_open=4)))
    topic = await stage.topics.get("talk")
    hers = answered(topic.buffer, "ann", "Where is the oil of the lamp?")
    for number in range(8):
        answered(topic.buffer, MALLORY, f"What is the number {number} of the harbour?")
    await stage.archiver.tend_topic(topic)
    assert hers in topic.buffer.conversations() and len(topic.buffer.conversations()) == 4
    await stage.close()


async def test_a_conversation_whose_answer_is_awaited_is_not_closed_however_many_there_are() -> None:
    stage = Stage(Config(conversation=ConversationSettings(max_open=1)))
    topic = await stage.topics.get("talk")
    arrival = receive(topic.buffer, "u:Where is the oil of the lamp?")
    with topic.buffer.awaited(arrival.conversation):
        talk(topic.buffer, "u:When does the ferry leave?", "a:At nine.")
        await stage.archiver.tend_topic(topic)
        assert topic.buffer.is_open(arrival.conversation)
        topic.buffer.reply(arrival, said("a:In the cellar."), 10, 0.0)
    await stage.archiver.tend_topic(topic)
    await stage.archiver.store(topic, arrival.conversation, 2)
    contents = [entry.content for entry in live_entries(topic)]
    assert "Where is the oil of the lamp?\nIn the cellar." in contents
    await stage.close()


def test_what_others_were_shown_is_not_forgotten_for_somebody_who_asks_again_and_again() -> None:
    buffer = new_buffer()

    def shown(number: int) -> list[BlockChunk]:
        uuid = number.to_bytes(16, "big")
        return [BlockChunk(uuid.hex()[-8:], uuid, "default", 1)]

    buffer.record(Injected(list(shown(1)), "ann"))
    for number in range(2, 100):
        buffer.record(Injected(list(shown(number)), MALLORY))
    assert buffer.resolve("00000001") is not None, "she may correct it still"
    assert buffer.resolve("00000002") is None
    again = new_buffer()
    again.replay(buffer.retelling()())
    assert again.injected_uuids() == buffer.injected_uuids()


@pytest.mark.thorough
async def test_topics_that_others_use_stay_open_while_one_opens_hundreds(tmp_path: Path) -> None:
    stage = Stage(Config())
    hers = await stage.topics.get("hers")
    hers.used_by = "ann"
    for number in range(260):
        with (await stage.topics.get(f"topic{number}")).used():
            pass
        (await stage.topics.get(f"topic{number}")).used_by = MALLORY
    await stage.topics.let_idle_go()
    assert stage.topics.is_open("hers") and len(stage.topics.opened()) <= 256
    await stage.close()


def test_receipts_of_others_stay_while_one_fills_the_file(tmp_path: Path) -> None:
    ring = ReceiptRing(LocalDisk(), tmp_path, 64_000)

    def keep(number: int, author: str) -> None:
        one = Receipt(
            turn_id=f"{number}", at=number, topic_id="t", api="chat", mode="full", model="tiny", author=author
        )
        ring.append(msgspec.json.encode(one))

    for number in range(3):
        keep(number, "ann")
    for number in range(3, 1_000):
        keep(number, MALLORY)
    lines = ring.lines()
    kept = [msgspec.json.decode(line, type=Receipt) for line in lines]
    assert [int(one.turn_id) for one in kept if one.author == "ann"] == [2, 1, 0]
    numbers = [int(one.turn_id) for one in kept if one.author == MALLORY]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] == 999 and numbers[-1] > 500
    assert sum(map(len, lines)) < 64_000
    ring.close()


# Receipts: read where nobody waits for it, and without the texts that are erased while they are written


async def test_the_event_loop_decodes_no_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: set[int] = set()
    lines, receipt_in = ReceiptRing.lines, memd.receipts.receipt_in

    def watched_lines(ring: ReceiptRing) -> list[bytes]:
        readers.add(threading.get_ident())
        return lines(ring)

    def watched(line: bytes) -> Receipt | None:
        readers.add(threading.get_ident())
        return receipt_in(line)

    async with house_in(tmp_path) as house:
        await house.chat("chief", "The lamp is on the brass plate.")
        await house.settled()
        monkeypatch.setattr(ReceiptRing, "lines", watched_lines)
        monkeypatch.setattr(memd.receipts, "receipt_in", watched)
        _, page = await house.ask("chief", "/memd/turns")
        [turn] = page["turns"]
        _, page = await house.ask("chief", "/memd/conversations")
        conversation = f"/memd/conversations/{page['conversations'][0]['conversation']}"
        for path in ("/memd/receipts", f"/memd/turns/{turn['turn_id']}", conversation, "/memd/usage", "/memd/figures"):
            readers.clear()
            assert (await house.ask("chief", path))[0] == 200
            assert readers and threading.get_ident() not in readers, path
        readers.clear()
        assert (await house.ask("house", "/memd/audit"))[0] == 200
        assert readers and threading.get_ident() not in readers


async def test_a_receipt_is_kept_without_what_is_being_erased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, encoded = ReceiptRing(LocalDisk(), tmp_path, 64_000), msgspec.json.encode
    encoding, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def encode(receipt: object) -> bytes:
        line = encoded(receipt)
        if threading.current_thread().name.startswith("writer"):
            loop.call_soon_threadsafe(encoding.set)
            goes_on.wait(10)
        return line

    with ThreadPoolExecutor(1, thread_name_prefix="writer") as writer:
        receipts = Receipts(ring, writer, Redactor.of(IngestSettings()), Events())
        asked = Receipt(turn_id="1", at=1, topic_id="harbour", api="chat", mode="full", model="m", asked="the walrus")
        monkeypatch.setattr(msgspec.json, "encode", encode)
        with receipts.awaited("1"):
            writing = asyncio.create_task(receipts.keep(asked))
            await encoding.wait()
            erasing = receipts.blanked(tmp_path, Concern("harbour"), Wiper(LocalDisk()))
            entering = asyncio.create_task(erasing.__aenter__())
            await asyncio.wait([entering], timeout=0.2)  # it has nothing to wait for, or waits for what is written
            goes_on.set()
            await asyncio.gather(writing, entering)
            await erasing.__aexit__(None, None, None)
    assert [b"walrus" in line for line in ring.lines()] == [False]
