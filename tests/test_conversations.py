"""Conversations are read from beginning to end: recent ones from receipts, older and imported ones from the log."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from recording_upstream import RecordingUpstream

from memd.admin.turns import ConversationsQuery, conversation_of
from memd.errors import BadQuestion, NotFound
from memd.receipts import Receipt

MINUTE = 60_000_000


def line(turn_id: str, at: int, conversation: str, position: int, asked: str, **more: Any) -> bytes:
    base: dict[str, Any] = {"topic_id": "work", "api": "chat", "mode": "full", "model": "tiny", "reply": f"To {asked}"}
    told = {"turn_id": turn_id, "at": at, "conversation": conversation, "position": position, "asked": asked}
    return msgspec.json.encode(Receipt(**{**base, **told, **more}))


def asked(lines: list[bytes], conversation: str) -> list[str]:
    return [turn.asked for turn in conversation_of(lines[::-1], conversation, ConversationsQuery()).turns]


def test_a_conversation_has_its_turns_oldest_first_and_the_first_words_as_its_title() -> None:
    lines = [
        line("1", 10, "a", 0, "How do I oil\n the lathe?"),
        line("2", 20, "b", 0, "Something else."),
        line("3", 30, "a", 2, "And the saw?", is_step=True),
        b'{"turn_id":"4","at":40,"topic_id":"work","conversation":"a"',  # torn by a crash
    ]
    told = conversation_of(lines[::-1], "a", ConversationsQuery())
    assert (told.title, told.is_whole, told.of) == ("How do I oil the lathe?", True, 2)
    assert [(turn.asked, turn.reply) for turn in told.turns] == [
        ("How do I oil\n the lathe?", "To How do I oil\n the lathe?"),
        ("And the saw?", "To And the saw?"),
    ]
    assert [turn.turn_id for turn in conversation_of(lines[::-1], "a", ConversationsQuery(skip=1, limit=1)).turns] == [
        "3"
    ]
    assert not conversation_of([lines[2]], "a", ConversationsQuery()).is_whole


def test_a_branch_begins_with_what_it_shares_and_not_with_what_it_replaced() -> None:
    lines = [
        line("1", 10, "a", 0, "one"),
        line("2", 20, "a", 2, "two"),
        line("3", 30, "b", 2, "two, edited", branched=("a", 2)),
        line("4", 40, "b", 4, "three"),
        line("5", 50, "c", 4, "three", branched=("b", 5)),  # answered anew
        line("6", 60, "d", 1, "four", branched=("c", None)),  # the client has rewritten the history
    ]
    assert asked(lines, "a") == ["one", "two"]
    assert asked(lines, "b") == ["one", "two, edited", "three"]
    assert asked(lines, "c") == ["one", "two, edited", "three"]
    assert asked(lines, "d") == ["one", "two, edited", "three", "four"]
    assert conversation_of(lines[::-1], "c", ConversationsQuery()).branches == ("a", "b", "d")


def test_chats_that_began_with_the_same_words_are_two() -> None:
    lines = [line("1", 10, "a", 0, "hi"), line("2", 20, "b", 0, "hi", branched=("a", 1)), line("3", 30, "b", 2, "you")]
    assert asked(lines, "b") == ["hi", "you"]
    assert conversation_of(lines[::-1], "a", ConversationsQuery()).branches == ()


def test_branches_that_name_each_other_as_their_beginning_end() -> None:
    lines = [line("1", 10, "a", 2, "one", branched=("b", 2)), line("2", 20, "b", 4, "two", branched=("a", 4))]
    assert asked(lines, "b") == ["one", "two"]


def test_an_unknown_conversation_and_one_of_several_topics_are_refused() -> None:
    lines = [line("1", 10, "a", 0, "one"), line("2", 20, "a", 0, "two", topic_id="home")]
    with pytest.raises(NotFound, match="there is no conversation 'x'"):
        conversation_of(lines, "x", ConversationsQuery())
    with pytest.raises(BadQuestion, match="name the topic"):
        conversation_of(lines, "a", ConversationsQuery())
    assert conversation_of(lines, "a", ConversationsQuery(topic=("home",))).title == "two"


@pytest.fixture
def daemon(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    return make_daemon(upstream.url, {"buffer": {"idle_seconds": 0.1}}).start()


def chat(daemon: DaemonProcess, *texts: str, topic: str = "work") -> str:
    """One request, of alternating speakers; the reply."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    answer = daemon.chat(messages, memory_in={"topic_id": topic})
    return str(answer.json["choices"][0]["message"]["content"])


def turns_of(daemon: DaemonProcess) -> int:
    return len(ask(f"{daemon.own_url}/memd/turns").json["turns"])


def test_the_list_has_live_conversations_and_each_tells_what_was_shown_and_said(daemon: DaemonProcess) -> None:
    fact = "The release word for the lighthouse lamp is cinnamon-42, on the brass plate."
    chat(daemon, fact)
    wait_until(lambda: daemon.export() != [], lambda: "not stored")
    question = "What is the release word for the lamp?"
    reply = chat(daemon, question)
    chat(daemon, question)  # a retry is no conversation of its own
    chat(daemon, question, reply, "And where does it stand?")
    wait_until(lambda: turns_of(daemon) == 4, lambda: "no receipts")
    listed = ask(f"{daemon.own_url}/memd/conversations").json
    assert [(one["title"], one["turns"]) for one in listed["conversations"]] == [(question, 2), (fact, 1)]
    assert listed["of"] == 2
    path = f"{daemon.own_url}/memd/conversations/{listed['conversations'][0]['conversation']}"
    told = ask(path).json
    assert [turn["asked"] for turn in told["turns"]] == [question, "And where does it stand?"]
    assert told["turns"][0]["reply"] == reply
    assert "cinnamon-42" in told["turns"][0]["block"] and told["turns"][0]["injected"] == 1
    assert ask(f"{path}?topic=nowhere").status == 404


def test_what_is_older_than_the_receipts_or_imported_is_listed_from_the_log_and_read_in_order(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"idle_seconds": 0.1}, "receipts": {"enabled": False}}).start()
    began = 1_700_000_000_000_000
    said = ["The harbour opens at six.", "The ferry leaves at seven.", "The lamp needs oil."]
    for number in (2, 0, 1):  # not in the order in which it was said
        message = {"role": "user", "text": said[number], "said_at": began + number * MINUTE}
        part = {"source": f"chat-{number % 2}", "messages": [message]}
        answer = ask(f"{daemon.own_url}/memd/import/messages", {"topic_id": "old", "part": part})
        assert answer.status == 200, answer.body
    chat(daemon, "The brass plate was polished today.")
    wait_until(lambda: len(daemon.export()) >= 4, lambda: str(daemon.export()))  # a late reply is a chunk of its own
    listed = ask(f"{daemon.own_url}/memd/conversations").json["conversations"]
    first = listed[0]
    assert (first["topic_id"], first["source"], first["title"]) == ("work", None, "The brass plate was polished today.")
    assert [(one["topic_id"], one["source"], one["title"], one["chunks"]) for one in listed[1:]] == [
        ("old", "chat-0", said[0], 2),
        ("old", "chat-1", said[1], 1),
    ]
    assert (listed[1]["began_at"], listed[1]["last_at"]) == (began, began + 2 * MINUTE)
    assert ask(f"{daemon.own_url}/memd/conversations?skip=2&limit=1").json["conversations"] == listed[2:]

    def read(query: str) -> list[str]:
        told = ask(f"{daemon.own_url}/memd/transcript?{query}").json
        return [chunk["content"].removeprefix("user: ") for chunk in told["chunks"]]

    assert read("topic=old") == said
    assert read("topic=old&skip=1&limit=1") == said[1:2]
    assert read("source=chat-0") == [said[0], said[2]]
    assert read(f"from={began}&to={began + 2 * MINUTE}") == said[:2]
    assert ask(f"{daemon.own_url}/memd/transcript?topic=old&contains=LAMP").status == 400
    assert ask(f"{daemon.own_url}/memd/transcript?topic=old&limit=1").json["of"] == 3


def test_a_longer_pause_ends_a_conversation_of_the_log(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"idle_seconds": 0.1}, "receipts": {"enabled": False}}).start()
    chat(daemon, "The harbour opens at six.")
    wait_until(lambda: daemon.export() != [], lambda: "not stored")
    known = daemon.export()[0]
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(("The ferry leaves at seven.", "The lamp needs oil.")):
        said_at = (datetime.fromisoformat(known["said_at"]) - timedelta(minutes=90 - number)).isoformat()
        own = {"uuid": str(number) * 32, "id": str(number) * 4, "content": text, "said_at": said_at, "speakers": []}
        lines.append({**known, **own})
    (daemon.folder / "lines.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    assert daemon.run("import", str(daemon.folder / "lines.jsonl"), "--topic", "work").returncode == 0
    listed = ask(f"{daemon.own_url}/memd/conversations").json["conversations"]
    assert [one["title"] for one in listed] == ["The harbour opens at six.", "The ferry leaves at seven."]
    assert listed[1]["chunks"] == 2
