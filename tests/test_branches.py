"""What is in the log, whatever clients make of their histories: all that was said, and once."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from archiver_stage import Stage, live_entries
from conftest import MakeDaemon, Serving
from daemon_in_process import Client, daemon_in_process
from daemon_process import DaemonProcess, wait_until
from histories import history_of, receive, said, talk
from recording_upstream import (
    EVENT_STREAM,
    RecordingUpstream,
    Request,
    Response,
    answered,
    chat_answer,
    recording_upstream,
    streamed,
)

from memd.conversation.hot_buffer import Arrival
from memd.ingest.topics import Topic
from memd.messages import Message
from memd.settings.model import Config, ConversationSettings

DOCUMENT = "u:Here is the log of the lighthouse for May: the lamp failed twice.", "a:I have read it."
QUESTIONS = [(f"u:Question {number} about the lamp?", f"a:The answer to question {number}.") for number in range(6)]
STEPS = 12
LATER = 10_000.0


@pytest.fixture
def stage_config() -> Config:
    return Config(conversation=ConversationSettings(max_open=64))


async def stored_texts(stage: Stage, topic: Topic) -> str:
    """All that is in the log once everything has come to rest."""
    for conversation in topic.buffer.conversations():
        conversation.used_at = -LATER
    await stage.archiver.tend_topic(topic)
    return "\n".join(entry.content for entry in live_entries(topic))


def take(topic: Topic, messages: Sequence[Message]) -> Arrival:
    """A request with these messages."""
    return topic.buffer.receive(history_of(messages), 0.0)


def assert_each_once(text: str, shorthands: Sequence[str]) -> None:
    counts = {one: text.count(said(one).text) for one in shorthands}
    assert all(count == 1 for count in counts.values()), counts


ASKED = "u:Tell me about the lamp."
BEGUN, REST = "The lamp stands on the second", " landing, behind the rope."
LOOKED_UP = [*DOCUMENT, "u:Which bucket?", "c:list#1", "t:The backups of March are in KESTREL7.#1"]
WHOLE, SHORT = "a:It is KESTREL7, as far as I can see in the list.", "a:It is KESTREL7"
THANKED = "u:Thanks.", "a:Not at all."
NOTED = "u:Answer briefly, in one sentence.", "a:Keeper Olsen keeps it."
SLIDING = (
    "u:Plan it.",
    "a:Done.",
    "u:ok",
    "a:Day one.",
    "u:Book it.",
    "a:Done.",
    "u:ok",
    "a:Booked.",
    "u:Paid?",
    "a:Yes.",
)
HISTORIES: dict[str, tuple[Sequence[Sequence[str]], Sequence[str]]] = {
    "questions fan out from one beginning": (
        [DOCUMENT, *([*DOCUMENT, *pair] for pair in QUESTIONS)],
        [*DOCUMENT, *(text for pair in QUESTIONS for text in pair)],
    ),
    "a turn is edited away": (
        [[*DOCUMENT, "u:How often?", "a:Twice.", *THANKED], [*DOCUMENT, "u:On which days?", "a:The 3rd and the 9th."]],
        [*DOCUMENT, "u:How often?", "a:Twice.", *THANKED, "u:On which", "a:The 3rd"],
    ),
    "an answer is continued": (
        [[ASKED, f"a:{BEGUN}"], [ASKED, f"a:{BEGUN}", f"a:{REST}"], [ASKED, f"a:{BEGUN}{REST}", *THANKED]],
        [ASKED, f"a:{BEGUN}", f"a:{REST}", *THANKED],
    ),
    "an answer is edited and continued": (
        [
            [ASKED, f"a:{BEGUN}, and the keeper sees it."],
            [ASKED, f"a:{BEGUN}", f"a:{REST}"],
            [ASKED, f"a:{BEGUN}{REST}", *THANKED],
        ],
        [ASKED, f"a:{BEGUN}", f"a:{REST}", *THANKED],
    ),
    "an edited answer is continued by a server that repeats it": (
        [
            [ASKED, f"a:{BEGUN}, and the keeper sees it."],
            [ASKED, f"a:{BEGUN}", f"a:{BEGUN}{REST}"],
            [ASKED, f"a:{BEGUN}{REST}", *THANKED],
        ],
        [ASKED, f"a:{BEGUN}", f"a:{REST}", *THANKED],
    ),
    "an answer is continued behind a space of the client's": (
        [[ASKED, f"a:{BEGUN}"], [ASKED, f"a:{BEGUN} ", f"a:{REST[1:]}"], [ASKED, f"a:{BEGUN} {REST[1:]}", *THANKED]],
        [ASKED, f"a:{BEGUN}", f"a:{REST[1:]}", *THANKED],
    ),
    "an answer is continued twice": (
        [
            [ASKED, f"a:{BEGUN}"],
            [ASKED, f"a:{BEGUN}", f"a:{REST}"],
            [ASKED, f"a:{BEGUN}{REST}", "a: It is green."],
            [ASKED, f"a:{BEGUN}{REST} It is green.", *THANKED],
        ],
        [ASKED, f"a:{BEGUN}", f"a:{REST}", "a: It is green.", *THANKED],
    ),
    "an answer is continued anew": (
        [
            [ASKED, f"a:{BEGUN}"],
            [ASKED, f"a:{BEGUN}", "a: stair."],
            [ASKED, f"a:{BEGUN}", f"a:{REST}"],
            [ASKED, f"a:{BEGUN}{REST}", *THANKED],
        ],
        [ASKED, f"a:{BEGUN}", f"a:{REST}", *THANKED],
    ),
    "agents answer one another as the model does": (
        [
            [ASKED, f"a:{BEGUN}.", "a:I go and look."],
            [ASKED, f"a:{BEGUN}.", "a:I go and look.", "a:It is green."],
            [ASKED, f"a:{BEGUN}.", "a:I go and look.", "a:It is green.", *THANKED],
        ],
        [ASKED, f"a:{BEGUN}.", "a:I go and look.", "a:It is green.", *THANKED],
    ),
    "an answer is continued at a word that asks for it": (
        [
            [ASKED, f"a:{BEGUN}"],
            [ASKED, f"a:{BEGUN}", "s:[Continue.]", f"a:{REST}"],
            [ASKED, f"a:{BEGUN}{REST}", "s:[Continue.]", "a:It is green."],
            [ASKED, f"a:{BEGUN}{REST} It is green.", *THANKED],
        ],
        [ASKED, f"a:{BEGUN}", f"a:{REST}", "a:It is green.", *THANKED],
    ),
    "every answer begins with words that the client does not keep": (
        [
            [ASKED, "a:The keeper:", f"a:{BEGUN}"],
            [ASKED, f"a:{BEGUN}", "u:How often?", "a:The keeper:", "a:Twice."],
            [ASKED, f"a:{BEGUN}", "u:How often?", "a:Twice.", *THANKED],
        ],
        [ASKED, f"a:{BEGUN}", "u:How often?", "a:Twice.", *THANKED],
    ),
    "a result is dropped and its answer changed": (
        [[*LOOKED_UP, f"{SHORT} [1]."], [*LOOKED_UP[:3], f"{SHORT}.", *THANKED]],
        [LOOKED_UP[4], f"{SHORT} [1].", f"{SHORT}.", *THANKED],
    ),
    "an answer behind a call is cut short": (
        [[*LOOKED_UP, WHOLE], [*LOOKED_UP[:3], f"{SHORT}, as far", *THANKED]],
        [LOOKED_UP[2], LOOKED_UP[4], SHORT, WHOLE, *THANKED],
    ),
    "an answer is cut short": (
        [[*LOOKED_UP[:3], WHOLE], [*LOOKED_UP[:3], f"{SHORT}, as far", *THANKED]],
        [LOOKED_UP[2], SHORT, WHOLE, *THANKED],
    ),
    "a note stays behind the last message": (
        [
            ["u:Who keeps it?", *NOTED],
            ["u:Who keeps it?", NOTED[1], "u:Since when?", NOTED[0], "a:Since May, says he."],
        ],
        [NOTED[1], "a:Since May, says he."],
    ),
    "a window of three slides over words that recur": (
        [SLIDING[max(0, turn - 2) : turn + 2] for turn in range(0, len(SLIDING), 2)],
        [SLIDING[0], *SLIDING[3:5], *SLIDING[7:]],
    ),
}
"""What a client sends one after the other, and what is to be in the log."""


@pytest.mark.parametrize("is_stored", [False, True], ids=["at once", "after what was before is stored"])
@pytest.mark.parametrize("name", HISTORIES)
async def test_whatever_a_client_makes_of_its_history_all_that_was_said_is_stored_once(
    stage: Stage, topic: Topic, name: str, is_stored: bool
) -> None:
    talks, once = HISTORIES[name]
    for messages in talks:
        talk(topic.buffer, *messages)
        if is_stored:
            await stored_texts(stage, topic)
    assert_each_once(await stored_texts(stage, topic), once)


async def test_questions_that_fan_out_at_once_are_all_stored(stage: Stage, topic: Topic) -> None:
    talk(topic.buffer, *DOCUMENT)
    arrivals = [receive(topic.buffer, *DOCUMENT, question) for question, _ in QUESTIONS]
    await stage.archiver.tend_topic(topic)  # no branch is closed while its answer is awaited
    for arrival, (_, answer) in zip(arrivals, QUESTIONS, strict=True):
        topic.buffer.reply(arrival, said(answer), 10, 0.0)
    assert_each_once(await stored_texts(stage, topic), [*DOCUMENT, *(text for pair in QUESTIONS for text in pair)])


async def test_an_answer_that_was_given_anew_is_stored_as_it_is_now(stage: Stage, topic: Topic) -> None:
    for number in range(4):
        talk(topic.buffer, *DOCUMENT, "u:How often?", f"a:Version {number} of the answer.")
    text = await stored_texts(stage, topic)
    assert_each_once(text, [*DOCUMENT, "u:How often?", "a:Version 3 of the answer."])
    assert text.count("Version") == 1


async def test_an_answer_that_was_given_anew_after_it_was_stored_is_stored_with_its_question(
    stage: Stage, topic: Topic
) -> None:
    for number in range(3):
        talk(topic.buffer, *DOCUMENT, "u:How often?", f"a:Version {number} of the answer.")
        await stored_texts(stage, topic)
    contents = [entry.content for entry in live_entries(topic) if "Version" in entry.content]
    assert contents == [f"How often?\nVersion {number} of the answer." for number in range(3)]
    await stage.archiver.tend_topic(topic)
    assert len(live_entries(topic)) == 4, "and once"


@pytest.mark.parametrize("is_stored", [False, True])
async def test_an_answer_is_the_one_of_several_choices_from_which_the_client_goes_on(
    stage: Stage, topic: Topic, is_stored: bool
) -> None:
    """The first choice of `n: 2` counts until then; what is stored by then stays."""
    talk(topic.buffer, *DOCUMENT, "u:How often?", "a:Twice.")
    if is_stored:
        await stored_texts(stage, topic)
    talk(topic.buffer, *DOCUMENT, "u:How often?", "a:Two times in May.", *THANKED)
    text = await stored_texts(stage, topic)
    assert_each_once(text, [*DOCUMENT, "a:Two times in May.", *THANKED])
    assert text.count("Twice.") == is_stored and text.count("How often?\nTwo times in May.") == 1


@pytest.mark.parametrize("is_late", [False, True])
async def test_half_an_answer_takes_the_place_of_no_whole_one(stage: Stage, topic: Topic, is_late: bool) -> None:
    """Late: of a request that was left, told when the next one is answered already, as a loaded machine does."""
    half = msgspec.structs.replace(said("a:Three ti"), interrupted=True)
    first = receive(topic.buffer, *DOCUMENT, "u:How often?")
    if not is_late:
        topic.buffer.reply(first, said("a:Twice."), 10, 0.0)
    second = receive(topic.buffer, *DOCUMENT, "u:How often?")
    if is_late:
        topic.buffer.reply(second, said("a:Twice."), 10, 0.0)
    topic.buffer.reply(first if is_late else second, half, 10, 0.0)
    assert_each_once(await stored_texts(stage, topic), [*DOCUMENT, "a:Twice.", "a:Three ti"])


def call(number: int) -> list[str]:
    return [f"c:read_{number}#{number}", f"t:The content of file {number}, which is long.#{number}"]


def pruned(history: list[str]) -> list[str]:
    """The history of a client that keeps the last two results (opencode and Cline do so with more)."""
    results = [position for position, one in enumerate(history) if one.startswith("t:The content")]
    return [f"t:[cleared]#{one.partition('#')[2]}" if i in results[:-2] else one for i, one in enumerate(history)]


async def test_results_that_a_client_prunes_step_by_step_are_stored_once_and_whole(stage: Stage, topic: Topic) -> None:
    history = ["u:Read the files of the lighthouse."]
    for number in range(STEPS):
        history += call(number)
        talk(topic.buffer, *pruned(history)[:-1])
    talk(topic.buffer, *pruned(history), "a:All are read.")
    text = await stored_texts(stage, topic)
    assert_each_once(text, [f"t:The content of file {number}," for number in range(STEPS)])
    assert_each_once(text, [history[0], "a:All are read."])
    assert "[cleared]" not in text


async def test_a_history_that_is_rewritten_behind_the_back_of_the_log_is_not_stored_again(
    stage: Stage, topic: Topic
) -> None:
    history = [*DOCUMENT, *(text for pair in QUESTIONS for text in pair)]
    talk(topic.buffer, *history)
    await stored_texts(stage, topic)
    before = len(live_entries(topic))
    changed = ["u:Another document, in the place of the first one.", *history[1:4], *history[6:]]
    talk(topic.buffer, *changed, "u:More?", "a:No more.")
    assert_each_once(await stored_texts(stage, topic), [*history, changed[0], "u:More?", "a:No more."])
    assert len(live_entries(topic)) - before <= 2


async def test_branches_whose_messages_are_stored_or_live_on_do_not_stay_open(stage: Stage, topic: Topic) -> None:
    history = ["u:Read the files of the lighthouse."]
    for number in range(STEPS):
        history += call(number)
        talk(topic.buffer, *pruned(history)[:-1])
        await stored_texts(stage, topic)
        assert len(topic.buffer.conversations()) <= 2


async def test_several_tasks_that_rewrite_at_once_lose_nothing(stage: Stage, topic: Topic) -> None:
    async def client(name: str) -> list[str]:
        history: list[str] = []
        for number in range(STEPS):
            history.append(f"u:Question {number} of {name}.")
            arrival = receive(topic.buffer, *history)
            await asyncio.sleep(0)
            history.append(f"a:Answer {number} to {name}.")
            topic.buffer.reply(arrival, said(history[-1]), 10, 0.0)
            if number % 3 == 2:
                del history[2:4]
            await stage.archiver.tend_topic(topic)
        return [f"u:Question {n} of {name}." for n in range(STEPS)] + [f"a:Answer {n} to {name}." for n in range(STEPS)]

    everything = [text for texts in await asyncio.gather(client("Ann"), client("Bob")) for text in texts]
    assert_each_once(await stored_texts(stage, topic), everything)


@pytest.mark.parametrize("answer", [REST, f"{BEGUN}{REST}"], ids=["goes on", "repeats the beginning"])
async def test_a_prefill_and_its_answer_are_one_message(stage: Stage, topic: Topic, answer: str) -> None:
    talk(topic.buffer, ASKED, f"a:{BEGUN}", f"a:{answer}")
    assert (await stored_texts(stage, topic)) == f"Tell me about the lamp.\n{BEGUN}{REST}"


async def test_an_answer_that_the_client_gave_its_agents_name_is_stored_once(stage: Stage, topic: Topic) -> None:
    history = [*DOCUMENT, "u:How often?", "a:Twice in May, the harbour master says."]
    talk(topic.buffer, *history)
    messages = [said(one) for one in (*history, "u:And in June?")]
    names = ["researcher" if one.role == "assistant" else "" for one in messages]
    take(topic, [msgspec.structs.replace(one, name=name) for one, name in zip(messages, names, strict=True)])
    assert_each_once(await stored_texts(stage, topic), [*history, "u:And in June?"])


def spoken(calls: str, text: str) -> Message:
    """A message that says something and calls tools."""
    return msgspec.structs.replace(said(calls), text=text)


FIRST, SECOND = "t:The first list.#1", "t:The second list.#2"
IN_PARTS = {
    "the text first": [spoken("c:look#1", "I look."), said(FIRST), said("c:look#2"), said(SECOND)],
    "the text last": [said("c:look#1"), said(FIRST), spoken("c:look#2", "I look."), said(SECOND)],
}


@pytest.mark.parametrize("parts", IN_PARTS.values(), ids=IN_PARTS)
async def test_an_answer_whose_client_sends_it_in_parts_is_stored_once(
    stage: Stage, topic: Topic, parts: list[Message]
) -> None:
    asked = [*map(said, (*DOCUMENT, "u:How often?"))]
    told = [*asked, *parts, said("a:Twice."), said("u:And in June?")]
    topic.buffer.reply(take(topic, asked), spoken("c:look#1,2", "I look."), 10, 0.0)
    topic.buffer.reply(take(topic, told[:-2]), told[-2], 10, 0.0)
    take(topic, told)
    text = await stored_texts(stage, topic)
    assert_each_once(text, [*DOCUMENT, "a:I look.", "t:The first list.", "t:The second list.", "u:And in June?"])
    assert text.count("[call look {}]") == 2


async def test_an_answer_of_which_a_client_sends_a_part_only_is_stored_whole(stage: Stage, topic: Topic) -> None:
    asked = [*map(said, (*DOCUMENT, "u:How often?"))]
    topic.buffer.reply(take(topic, asked), spoken("c:look#1,2", "I look."), 10, 0.0)
    take(topic, [*asked, said("c:look#1"), said("t:The first list.#1"), said("u:Stop.")])
    text = await stored_texts(stage, topic)
    assert_each_once(text, [*DOCUMENT, "a:I look.", "t:The first list.", "u:Stop."])
    assert text.count("[call look {}]") == 3


@pytest.fixture
def wide(make_daemon: MakeDaemon) -> Iterator[tuple[DaemonProcess, RecordingUpstream]]:
    """A daemon in front of a model with a wide window."""
    with recording_upstream(window=8192) as upstream:
        yield make_daemon(upstream.url).start(), upstream


@pytest.mark.parametrize(("mode", "restarts"), [("full", True), ("readonly", False)])
def test_going_back_shows_all_that_fits_whatever_another_branch_left_out(
    wide: tuple[DaemonProcess, RecordingUpstream], mode: str, restarts: bool
) -> None:
    (daemon, upstream), words = wide, iter(range(100_000))

    def turn(count: int) -> list[dict[str, str]]:
        asked = " ".join(f"word{next(words)}" for _ in range(count // 3))
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": "Noted."}]

    messages = [message for _ in range(4) for message in turn(300)]
    kept = list(messages)
    for _ in range(7):
        messages += turn(1_500)
        daemon.chat(messages[:-1])
    assert len(json.loads(upstream.prompts[-1])) < len(messages) - 1, "the oldest turns have left"
    daemon.wait_stored(messages[-4]["content"][:100])
    if restarts:
        daemon.restart()
    went_back = [*kept, {"role": "user", "content": "And the first of all words?"}]
    daemon.chat(went_back, headers={"X-Memory-Mode": mode})
    assert [one["role"] for one in json.loads(upstream.prompts[-1])] == [one["role"] for one in went_back]


def test_a_branch_that_does_not_fit_shows_its_newest_half(wide: tuple[DaemonProcess, RecordingUpstream]) -> None:
    daemon, upstream = wide
    messages: list[dict[str, str]] = []
    for number in range(14):
        asked = " ".join(f"word{number}x{place}" for place in range(200))
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": f"Noted {number}."}]
        daemon.chat(messages[:-1])
    went_back = [*messages[:20], {"role": "user", "content": "And the first of all words?"}]
    daemon.chat(went_back)
    assert 4 <= len(json.loads(upstream.prompts[-1])) < len(went_back)


def test_the_prompt_of_a_client_that_rewrites_its_last_message_begins_anew_as_seldom_as_others(
    make_daemon: MakeDaemon,
) -> None:
    begun: list[int] = []
    told = [""]
    with recording_upstream(window=2048) as upstream:
        upstream.answer = lambda _: answered({"role": "assistant", "content": told[-1]})
        daemon = make_daemon(upstream.url).start()
        for topic, reminder in (("plain", ""), ("reminded", " Answer briefly, please.")):
            history: list[Json] = []
            openings = []
            for turn in range(24):
                asked = f"Turn {turn}: " + " ".join(f"word{turn}x{place}" for place in range(15))
                told.append(f"So: {asked}")
                daemon.in_topic(topic).chat([*history, {"role": "user", "content": asked + reminder}])
                openings.append(json.loads(upstream.prompts[-1])[0]["content"].partition("Turn ")[2][:3])
                history += [{"role": "user", "content": asked}, {"role": "assistant", "content": told[-1]}]
            begun.append(sum(one != other for one, other in itertools.pairwise(openings)))
    plain, reminded = begun
    assert 0 < reminded <= plain + 2, begun


# What clients write back otherwise than it was said is stored once, also what an earlier version has stored


Json = dict[str, Any]

RENAME: Json = {"role": "user", "content": "Rename the constant in the harbour module, please."}


def edit(call_id: str, **more: object) -> Json:
    """An answer that calls a tool, as the model wrote it or as the client sends it back."""
    given = {"path": "harbour.py", "old": "LIMIT_A", "new": "LIMIT_B"}
    function = {"name": "edit", "arguments": json.dumps(given | more)}
    call = {"id": call_id, "type": "function", "function": function} if call_id else {"function": function}
    return {"role": "assistant", "content": "I change the constant now.", "tool_calls": [call]}


def result(call_id: str, text: str) -> Json:
    """The result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_a_message_of_several_branches_waits_once(serving: Serving, upstream: RecordingUpstream) -> None:
    daemon = serving({"buffer": {"store_after_seconds": 3600}})
    upstream.answer = lambda _: answered(edit("next"))  # the turn is not over
    history = [RENAME]
    for number in range(6):
        history += [edit(f"c{number}"), result(f"c{number}", f"The harbour has {number} piers now.")]
    daemon.chat(history)
    for end in (3, 5, 7, 9):
        daemon.chat([*history[:end], {"role": "user", "content": f"Stop, look at pier {end} first."}])
    waiting = len(history) + 1 + 4 * 2
    told = f"{waiting} messages are not in the log yet"
    wait_until(lambda: told in daemon.run("stats").stdout, lambda: daemon.run("stats").stdout)


async def logged(client: Client) -> list[str]:
    """The live chunks, once all is stored."""
    await client.stored()
    return [entry.content for entry in live_entries(await client.daemon.topics.get("default"))]


async def say(client: Client, history: list[Json], reply: Json) -> None:
    """One request with its answer."""
    client.upstream.answer = lambda _: answered(reply)
    await client.chat(history)
    await client.settled()


@pytest.mark.parametrize(
    ("said", "came_back"),
    [
        (edit("c1"), edit("c1", replace_all=False)),
        (
            {"role": "assistant", "content": "The first pier.\r\nThe second pier.  \r\nThe third.\t\n\nThat is all."},
            {"role": "assistant", "content": "The first pier.\nThe second pier.\nThe third.\n\nThat is all."},
        ),
        (
            {"role": "assistant", "content": "<think>Hm, well.</think>The third pier."},
            {
                "role": "assistant",
                "content": '<details type="reasoning" done="true">\n> Hm, well.\n</details>\nThe third pier.',
            },
        ),
        (
            {"role": "assistant", "content": "[THINK]Hm, well.[/THINK]The third pier."},
            {
                "role": "assistant",
                "content": '<details type="reasoning" done="true">\n> Hm, well.\n</details>\nThe third pier.',
            },
        ),
        (
            {
                "role": "assistant",
                "content": "Die Br\u00fccke: https://bridge.example/a?y=1, b.example, https://c.example, a@b.example",
            },
            {
                "role": "assistant",
                "content": "Die Bru\u0308cke: [https://bridge.example/a?y=1](https://bridge.example/a?y=1), "
                "[b.example](https://b.example/), <https://c.example>, [a@b.example](mailto:a@b.example)",
            },
        ),
    ],
    ids=["defaults", "line ends", "thinking", "other thinking", "NFD and links"],
)
async def test_an_answer_that_comes_back_rewritten_is_stored_once(client: Client, said: Json, came_back: Json) -> None:
    await say(client, [RENAME], said)
    behind = [result("c1", "Done.")] if "tool_calls" in said else [{"role": "user", "content": "Which is longest?"}]
    await say(client, [RENAME, came_back, *behind], {"role": "assistant", "content": "It is the longest of all."})
    topic = await client.daemon.topics.get("default")
    assert len(topic.buffer.conversations()) == 1
    stored = await logged(client)
    assert sum(RENAME["content"] in text for text in stored) == 1, stored


async def test_a_word_of_another_chats_question_with_the_same_long_answer_is_a_question_of_its_own(
    client: Client,
) -> None:
    refusal = "I cannot help with that at this time; " + "I can explain a subject, plan your day or write a text, " * 8
    client.upstream.answer = partial(chat_answer, text=refusal)
    await client.ask("Deploy")
    await client.stored()
    longer = "Deploy the payments service to Frankfurt; the vault code is 7714"
    history = [{"role": "user", "content": longer}, {"role": "assistant", "content": refusal}]
    await say(
        client,
        [*history, {"role": "user", "content": "And the second matter?"}],
        {"role": "assistant", "content": "Fine."},
    )
    stored = await logged(client)
    assert any(text.startswith(f"{longer}\nI cannot help") for text in stored), stored


@pytest.mark.parametrize("begun", ["The mill burned down in May.", "Hi"])
async def test_words_that_lie_in_the_first_question_of_another_chat_are_stored(client: Client, begun: str) -> None:
    """The model has answered both alike."""
    reply: Json = {"role": "assistant", "content": "OK."}
    other = f"I was thinking. {begun} Somebody claims that; what is to be done?"
    await say(client, [{"role": "user", "content": other}], reply)
    asked = [{"role": "user", "content": begun}, reply, {"role": "user", "content": "Who told me that?"}]
    await say(client, asked, reply)
    shown = json.loads(client.upstream.prompts[-1])
    assert [one["content"].rpartition("[/memory]\n\n")[2] for one in shown] == [one["content"] for one in asked]
    stored = await logged(client)
    assert sorted(stored) == sorted([f"{other}\nOK.", f"{begun}\nOK.", "Who told me that?\nOK."]), stored


async def test_a_question_that_got_no_answer_may_be_a_later_one_of_another_chat(client: Client) -> None:
    client.upstream.answer = lambda _: Response((b"{}",), status=500)
    await client.ask("Who keeps the lamp?")
    client.upstream.answer = chat_answer
    status, _, _ = await client.ask("Good morning.", "Good morning to you.", "Who keeps the lamp?")
    assert status == 200 and sum("Good morning to you." in text for text in await logged(client)) == 1


@pytest.mark.parametrize("is_stored", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("reminded", [range(1), range(1, 9)], ids=["out of it", "into it"])
@pytest.mark.parametrize("session", ["", "lamps"], ids=["long answers", "in a session"])
async def test_a_first_exchange_is_stored_once_where_a_reminder_is_put_into_its_question_or_taken_out_of_it(
    client: Client, session: str, reminded: range, is_stored: bool
) -> None:
    more = "" if session else "who has served at the pier in the north for many years, " * 8
    told = [f"Keeper {number} does. {more}" for number in range(3)]
    history: list[Json] = []
    for number, answer in enumerate(told):
        history.append({"role": "user", "content": f"Who keeps lamp {number}?"})
        note = "\n\nAnswer briefly, please." if number in reminded else ""
        said = [history[0] | {"content": history[0]["content"] + note}, *history[1:]]
        client.upstream.answer = partial(chat_answer, text=answer)
        await client.send(said, {"X-Memory-Session": session} if session else {})
        history.append({"role": "assistant", "content": answer})
        await (client.stored() if is_stored else client.settled())
    stored = "\n".join(await logged(client))
    assert [stored.count(answer.strip()) for answer in told] == [1, 1, 1]
    assert stored.count("Answer briefly, please.") == 1 and stored.count("lamp 0?") == (1 if 0 in reminded else 2)


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("is_failed", [False, True], ids=["answered", "failed"])
@pytest.mark.parametrize("said", [(), ("I make porcelain.", "I see.")], ids=["first question", "in mid-chat"])
async def test_a_question_that_is_asked_again_is_not_prompted_with_the_answers_it_got(
    client: Client, said: tuple[str, ...], is_failed: bool, is_stored: bool
) -> None:
    question, wrong = "How hot do I fire porcelain in reduction?", ("At 1220 degrees.", "At 1290 degrees.")
    if said:
        await client.ask(*said[:1])
    for reply in wrong:
        client.upstream.answer = partial(chat_answer, text=reply)
        await client.ask(*said, question)
        assert "degrees" not in client.upstream.prompts[-1]
        await (client.stored() if is_stored else client.settled())
    if is_failed:
        client.upstream.answer = lambda _: Response((b"{}",), status=500)
        await client.ask(*said, question)
    client.upstream.answer = chat_answer
    await client.ask("In reduction I fire porcelain at cone 10.")
    await client.settled()
    await client.ask(*said, question)
    assert "cone 10" in client.upstream.prompts[-1] and "degrees" not in client.upstream.prompts[-1]
    await client.ask("Tell me: " + question)
    assert not is_stored or "1220" in client.upstream.prompts[-1], "another chat is told what was stored by then"


NAMES = {"user": "Bob", "assistant": "The keeper"}
ADDED: dict[str, Callable[[list[Json]], list[Json]]] = {
    "a note behind the last message": lambda said: [*said, {"role": "system", "content": "Stay in character."}],
    "the beginning of the answer": lambda said: [*said, {"role": "assistant", "content": "The keeper:"}],
    "names": lambda said: [one | {"content": f"{NAMES[one['role']]}: {one['content']}"} for one in said],
}
"""What a client makes of each prompt and does not keep."""


@pytest.mark.parametrize("is_looked_for", [False, True])
async def test_the_beginning_of_an_answer_is_not_stored_while_the_model_goes_on_with_it(
    client: Client, is_looked_for: bool
) -> None:
    gate, whole = threading.Event(), streamed("It is keeper 3.").parts
    client.upstream.answer = lambda _: Response((b": ping\n\n", b"".join(whole)), headers=EVENT_STREAM, gate=gate)
    topic = await client.daemon.topics.get("default")
    async with client.post("Who keeps lamp 7?", "The keeper: ", stream=True) as answer:
        assert await answer.content.readuntil(b"\n\n") == b": ping\n\n"
        if is_looked_for:
            async with client.session.get(f"{client.daemon.own_url}/memd/search?q=keeper") as found:
                assert found.status == 200
        await client.daemon.archiver.tend_topic(topic)
        assert live_entries(topic) == []
        gate.set()
        assert (await answer.read()).endswith(b"[DONE]\n\n")
    await client.settled()
    [stored] = await logged(client)
    assert "Who keeps lamp 7?" in stored and "The keeper: It is keeper 3." in stored


@pytest.mark.parametrize("is_stored", [False, True])
async def test_an_answer_that_the_client_cut_and_let_the_model_continue_is_stored_once(
    client: Client, is_stored: bool
) -> None:
    """As the continue button of llama.cpp's page does, after the answer was edited."""
    asked, begun, rest = {"role": "user", "content": "Who keeps it?"}, "The keeper of lamp 7", " is Olsen, since May."
    for history, told in (
        ([asked], f"{begun} lives on the pier."),
        ([asked, {"role": "assistant", "content": begun}], rest),
        ([asked, {"role": "assistant", "content": begun + rest}, {"role": "user", "content": "Thanks."}], "Yes."),
    ):
        await say(client, history, {"role": "assistant", "content": told})
        if is_stored:
            await client.stored()
    assert_each_once("\n".join(await logged(client)), ["u:Who keeps it?", f"a:{begun}", f"a:{rest}", "u:Thanks."])


@pytest.mark.parametrize("is_stored", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("name", ADDED)
async def test_whatever_a_client_adds_to_each_prompt_questions_and_answers_are_stored_together_and_once(
    client: Client, name: str, is_stored: bool
) -> None:
    history: list[Json] = []
    pairs = [(f"Question {number}: who keeps lamp {number * 7}?", f"It is keeper {number * 3}.") for number in range(4)]
    for asked, told in pairs:
        history.append({"role": "user", "content": asked})
        await say(client, ADDED[name](history), {"role": "assistant", "content": told})
        history.append({"role": "assistant", "content": told})
        if is_stored:
            await client.stored()
    stored = await logged(client)
    for asked, told in pairs:
        assert [told in text for text in stored if asked in text] == [True], stored
        assert sum(told in text for text in stored) == 1, stored


@pytest.mark.parametrize("ids", [["call_1"] * 6, [""] * 6, [f"call_{number % 2}" for number in range(6)]])
async def test_calls_whose_ids_repeat_or_are_missing_are_all_stored(client: Client, ids: list[str]) -> None:
    history = [RENAME]
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
        RENAME,
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


# Questions whose answer takes longer than a conversation may be idle, or never comes


QUESTION = "Where does the spare key of the lighthouse hang?"
LOST = "Which day is the ferry late?"
CRATE, WHERE = "The crate ZQ48351 stands in hall V49932B.", "In which hall does the crate ZQ48351 stand?"


def test_a_question_waits_for_its_answer_however_long_the_model_takes(
    serving: Serving, upstream: RecordingUpstream
) -> None:
    gate = threading.Event()

    def answer(request: Request) -> Response:
        if LOST.encode() in request.body:
            return Response((b'{"error": {"message": "broken"}}',), status=500)
        [body] = chat_answer(request).parts
        return Response((body[:1], body[1:]), gate=gate)

    upstream.answer = answer
    daemon = serving({"buffer": {"store_after_seconds": 0.2, "idle_seconds": 1}})
    asking = threading.Thread(target=daemon.chat, args=([{"role": "user", "content": QUESTION}],))
    asking.start()
    wait_until(lambda: bool(upstream.chats), lambda: "it was not asked")
    daemon.chat([{"role": "user", "content": LOST}])

    def stored() -> list[str]:
        return [entry["content"] for entry in daemon.export(settled=False)]

    wait_until(lambda: LOST in stored(), lambda: f"idle, and not stored: {stored()}")
    assert QUESTION not in stored(), "asked before that one"
    gate.set()
    asking.join()
    wait_until(lambda: any(text.startswith(f"{QUESTION}\n") for text in stored()), lambda: f"{stored()}")


def test_what_was_said_without_an_answer_is_found_in_the_next_chat_also_after_a_kill(
    serving: Serving, upstream: RecordingUpstream
) -> None:
    def answer(request: Request) -> Response:
        if CRATE.encode() in request.body and WHERE.encode() not in request.body:
            return Response((b'{"error": {"message": "broken"}}',), status=500)
        return chat_answer(request)

    upstream.answer = answer
    daemon = serving({"buffer": {"store_after_seconds": 300}})
    daemon.chat([{"role": "user", "content": CRATE}])

    def is_found() -> bool:
        daemon.chat([{"role": "user", "content": WHERE}], {"X-Memory-Mode": "readonly"})
        return CRATE in upstream.chats[-1].body.decode()

    for _ in range(2):
        wait_until(is_found, lambda: "it is not found")
        daemon.kill()
        daemon.start()
