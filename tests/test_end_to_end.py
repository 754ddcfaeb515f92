"""The main job on a real llama.cpp: what was said long ago, in another chat, before a restart, reaches the model.

Rule: the model itself is the witness. Its weights answer one thing if `[mem:` was in the prompt and another if not.
"""

import json
import random
from typing import Any

from conftest import REPLY, REPLY_WITH_MEMORY, WINDOW, MakeDaemon
from daemon_process import Answer, DaemonProcess, text_of, user
from recording_upstream import recording_upstream

FORGETFUL = "".join(REPLY)
REMEMBERING = "".join(REPLY_WITH_MEMORY)

FACT = "Please note: the release word for the lighthouse lamp is cinnamon-42, written on the brass plate."
QUESTION = "What is the release word for the lighthouse lamp?"
SYSTEM = {"role": "system", "content": "You look after a lighthouse."}
TURNS = 60


def test_what_was_said_sixty_turns_ago_reaches_the_model_in_a_new_chat_also_after_a_restart(
    daemon: DaemonProcess,
) -> None:
    history = talk(daemon)
    assert sum(len(message["content"]) for message in history) > 1.25 * WINDOW, "the history must not fit the window"
    assert_remembered(daemon)
    before = daemon.export()
    daemon.restart()
    after = daemon.export()
    assert after[: len(before)] == before
    assert_remembered(daemon)
    assert daemon.run("verify").returncode == 0


def test_a_history_that_arrives_again_after_a_restart_is_not_stored_again(make_daemon: MakeDaemon) -> None:
    with recording_upstream(window=2048) as upstream:
        daemon = make_daemon(upstream.url).start()
        history = [SYSTEM]
        for text in small_talk():
            history.append(user(text))
            history.append({"role": "assistant", "content": daemon.chat(history).reply})
        assert len(json.loads(upstream.prompts[-1])) < len(history) / 2, "the oldest turns must have left the prompt"
        daemon.restart()
        assert daemon.chat([*history, user("And what is for dinner?")]).status == 200
        daemon.restart()
    contents = [entry["content"] for entry in daemon.export()]
    assert len(contents) == len(set(contents))
    assert sum("cinnamon-42" in content for content in contents) == 1
    assert not any(SYSTEM["content"] in content for content in contents), "instructions are no conversation"


def test_a_chunk_is_found_by_an_identifier_that_means_nothing_also_after_a_restart(
    make_daemon: MakeDaemon, llama: str
) -> None:
    labelled = "Grandmother's plum jam takes a kilo of sugar; the jar on the top shelf is labelled ZK_9913."
    daemon = make_daemon(llama, {"retrieval": {"top_k": 2}}).start()
    for text in (labelled, *small_talk()[:12]):
        daemon.chat([user(text)])

    def shown_for(question: str) -> list[str]:
        chunks = daemon.chat([user(question)], memory_in={}).json["memory_out"]["injected_chunks"]
        contents = {entry["id"]: entry["content"] for entry in daemon.export()}
        return [contents[chunk["id"]] for chunk in chunks]

    assert any(labelled in content for content in shown_for("Look up zk_9913 in the error table of the ferry, please."))
    daemon.restart()
    assert any(labelled in content for content in shown_for("9913?"))


def test_what_was_asked_before_it_was_told_is_answered_as_soon_as_it_is_told(daemon: DaemonProcess) -> None:
    """The same request again is a retry, but it has no block to keep."""
    assert daemon.chat([user(QUESTION)]).reply == FORGETFUL
    daemon.chat([user(FACT)])
    assert daemon.chat([user(QUESTION)]).reply == REMEMBERING


def talk(daemon: DaemonProcess) -> list[dict[str, str]]:
    """`TURNS` turns about many things, the whole history with each; the fact comes third. Returns the history."""
    history = [SYSTEM]
    for number, text in enumerate(small_talk()):
        history.append(user(text))
        if number % 10 == 9:
            with daemon.stream(history) as stream:
                reply = text_of(list(stream))
                assert stream.ended_properly
        else:
            reply = daemon.chat(history).reply  # a prompt beyond the window would be answered with an error
        if number == 0:
            assert reply == FORGETFUL, "nothing was said yet that could be remembered"
        assert reply in (FORGETFUL, REMEMBERING)
        history.append({"role": "assistant", "content": reply})
    return history


def assert_remembered(daemon: DaemonProcess) -> None:
    """A new chat that asks for the fact is answered from memory, streaming and not, and says which chunks it used."""
    answer = daemon.chat([SYSTEM, user(QUESTION)], memory_in={})
    assert answer.reply == REMEMBERING, repr(daemon)
    assert_shown(daemon, answer.json["memory_out"])
    assert answer.headers["X-Memory-Status"] == "injected"
    assert_plain(daemon.chat([SYSTEM, user("I forgot. " + QUESTION)]))
    with daemon.stream([SYSTEM, user("Quickly: " + QUESTION)], memory_in={}) as stream:
        chunks = list(stream)
        assert stream.ended_properly
    assert text_of(chunks) == REMEMBERING
    [memory_out] = [chunk["memory_out"] for chunk in chunks if "memory_out" in chunk]
    assert_shown(daemon, memory_out)


def assert_plain(answer: Answer) -> None:
    """A client that knows nothing of memd gets an answer without `memory_out`, but with memory."""
    assert answer.reply == REMEMBERING
    assert "memory_out" not in answer.json


def assert_shown(daemon: DaemonProcess, memory_out: dict[str, Any]) -> None:
    contents = {entry["id"]: entry["content"] for entry in daemon.export()}
    shown = [chunk["id"] for chunk in memory_out["injected_chunks"]]
    assert set(shown) <= set(contents)
    assert any("cinnamon-42" in contents[chunk_id] for chunk_id in shown)


def small_talk() -> list[str]:
    """What the keeper says in `TURNS` turns: no two alike, the fact among the first."""
    chance = random.Random(20)
    things = ["stove", "boat", "barometer", "staircase", "flag", "goat", "radio", "well", "window", "path", "ladder"]
    states = ["needs paint", "works again", "was repaired", "makes a noise", "is wet", "was moved", "looks fine"]
    causes = ["the storm", "last winter", "the visitors", "the salt", "old age", "the inspection", "my mistake"]
    wishes = ["order a part", "write to the harbour", "ask my brother", "wait for spring", "leave it", "paint it red"]
    texts = []
    for number in range(TURNS):
        thing, other = chance.sample(things, 2)
        texts.append(
            f"Day {number + 1}. The {thing} {chance.choice(states)} because of {chance.choice(causes)}, so I will "
            f"{chance.choice(wishes)}. Yesterday the {other} {chance.choice(states)}; nobody noticed but me, and the "
            f"log book for page {chance.randrange(100, 1000)} says the same."
        )
    texts[2] = FACT
    return texts
