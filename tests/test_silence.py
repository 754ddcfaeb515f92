"""Small talk and questions about nothing stored bring nothing into the prompt, and memd tells why."""

from __future__ import annotations

import itertools
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import Answer, DaemonProcess, ask, wait_until
from recording_upstream import recording_upstream

from memd.recall.small_talk import is_small_talk

pytestmark = pytest.mark.process

WHO = ("Ingrid", "Marek", "the landlord", "my sister", "the baker", "our neighbour", "Aunt Tove", "the plumber")
WHAT = (
    "repaired the roof of the boat house",
    "lent us the long ladder for the cellar",
    "wants to plant two pear trees behind the mill",
    "sold the old piano to the music school",
    "found the spare key of the harbour office",
    "cooked fish soup for the whole crew",
)
WHEN = (
    "before the storm came in",
    "while it was raining all day",
    "on the way back from Bergen",
    "as soon as the ferry ran again",
    "a week after the village fair",
    "when nobody expected it any more",
    "although the workshop was closed",
)
FACT = "Hello there! Thanks a lot, the code of the boat shed's alarm is 7731."


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A topic of more than three hundred chunks, with greetings and thanks among them."""
    folder = tmp_path_factory.mktemp("silence")
    file = folder / "talk.jsonl"
    facts = [f"{who} {what} {when}." for who, what, when in itertools.product(WHO, WHAT, WHEN)]
    messages = [part for text in [FACT, *facts] for part in ({"role": "user", "content": text}, ANSWERED)]
    file.write_text(json.dumps({"messages": messages}))
    with recording_upstream() as upstream:
        daemon = DaemonProcess(folder, upstream.url, {"chunking": {"min_tokens": 1}})
        assert daemon.run("import", str(file)).returncode == 0
        daemon.start()
        yield daemon
        daemon.discard()


def asked(daemon: DaemonProcess, *texts: str) -> Answer:
    """The answer to the last of some user messages, the others answered."""
    messages = [part for text in texts for part in ({"role": "user", "content": text}, ANSWERED)][:-1]
    return daemon.chat(messages, headers={"X-Memory-Mode": "readonly"})


ANSWERED = {"role": "assistant", "content": "Yes."}


def receipt_of(daemon: DaemonProcess, answer: Answer) -> Any:
    url = f"{daemon.own_url}/memd/turns/{answer.headers['X-Memory-Turn']}"
    wait_until(lambda: ask(url).status == 200, lambda: "no receipt")
    return ask(url).json


def status(daemon: DaemonProcess, *texts: str) -> tuple[str, str]:
    headers = asked(daemon, *texts).headers
    return headers["X-Memory-Status"], headers.get("X-Memory-Injected", "")


def searched(daemon: DaemonProcess, question: str) -> Any:
    return ask(f"{daemon.own_url}/memd/search?topic=default&q={urllib.parse.quote(question)}").json


def test_the_topic_has_hundreds_of_chunks_and_is_asked(told: DaemonProcess) -> None:
    assert len(told.export()) > 300
    for question in ("Who sold the piano?", "What is the code of the alarm?", "the long ladder", "ladder?"):
        assert status(told, question)[0] == "injected", question


@pytest.mark.parametrize(
    "text",
    [
        "thanks!",
        "hi",
        "Good morning :)",
        "👍",
        "ok thanks, that's all",
        "Danke!",
        "¡Hola!",
        "Merci beaucoup",
        "ありがとう",
    ],
)
def test_small_talk_brings_nothing(told: DaemonProcess, text: str) -> None:
    assert status(told, text) == ("none", "")
    assert searched(told, text)["note"].startswith("Nothing is shown: the question is small talk.")


@pytest.mark.parametrize(
    "question",
    [
        "zzzqqq",
        "Write a haiku about rust lifetimes",
        "What is the capital of Mongolia?",
        "Wie funktioniert ein Kernreaktor?",
        "¿Quién pintó Las Meninas?",
        "黑洞是怎么形成的?",
    ],
)
def test_a_question_about_nothing_stored_brings_nothing_and_says_why(told: DaemonProcess, question: str) -> None:
    assert status(told, question) == ("none", "")
    found = searched(told, question)
    assert found["tokens"] == 0
    assert found["note"] is None or "too little evidence (retrieval.min_evidence)" in found["note"]
    assert {chunk["verdict"] for chunk in found["chunks"]} <= {
        "below retrieval.min_score",
        "too little evidence (retrieval.min_evidence)",
    }
    assert all(chunk["evidence"] < 0.22 for chunk in found["chunks"])


def test_thanks_do_not_bring_what_was_asked_before_but_telling_to_go_on_does(told: DaemonProcess) -> None:
    question = "What is the code of the alarm of the boat shed?"
    assert status(told, question, "thanks a lot!") == ("none", "")
    for text in ("yes", "go on", "and the digits again, please"):
        assert status(told, question, text)[0] == "injected", text


def test_the_receipt_of_a_turn_says_why_nothing_was_shown(told: DaemonProcess) -> None:
    answer = asked(told, "thanks!")
    assert receipt_of(told, answer)["note"] == "Nothing is shown: the question is small talk."
    assert "the question is small talk" in told.run("turn", answer.headers["X-Memory-Turn"]).stdout
    receipt = receipt_of(told, asked(told, "Write a haiku about rust lifetimes"))
    assert receipt["note"] == "Nothing is shown: too little evidence (retrieval.min_evidence)."
    assert receipt_of(told, asked(told, "Who sold the piano?"))["note"] is None


def test_the_block_ends_where_scores_fall_far_below_the_best(told: DaemonProcess) -> None:
    found = searched(told, "What is the code of the boat shed's alarm?")
    verdicts = [chunk["verdict"] for chunk in found["chunks"]]
    assert verdicts[0] == "injected" and "far below the best (retrieval.min_share)" in verdicts
    assert found["tokens"] < found["budget_tokens"] / 2
    best = found["chunks"][0]["score"]
    assert all(chunk["score"] >= 0.17 * best for chunk in found["chunks"] if chunk["verdict"] == "injected")


def test_what_the_settings_say_is_enough_is_shown(told: DaemonProcess, tmp_path: Path) -> None:
    settings = {"retrieval": {"min_evidence": 0, "min_share": 0, "min_score": 0.05}}
    other = DaemonProcess(tmp_path, told.upstream, settings)
    try:
        assert other.run("import", str(told.folder / "talk.jsonl")).returncode == 0
        other.start()
        assert status(other, "What is the capital of Mongolia?")[0] == "injected"
        assert status(other, "thanks!") == ("none", "")
    finally:
        other.discard()


@pytest.mark.parametrize(
    "text",
    [
        "thanks, and the port?",
        "yes",
        "continue",
        "do it",
        "fix it",
        "weiter",
        "et moi ?",
        "What was great?",
        "cheers, how is my team?",
        "hi, how is my weekend going?",
        "hi, which database did we choose?",
        "thank you " * 20,
    ],
)
def test_whatever_asks_or_tells_to_go_on_is_no_small_talk(text: str) -> None:
    assert not is_small_talk(text)


@pytest.mark.parametrize(
    "text",
    [
        "धन्यवाद!",
        "नमस्ते",
        "สวัสดีครับ",
        "Gu\u0308nayd\u0131n",
        "ＨＥＬＬＯ",
        "شُكْراً",
        "\u200fمرحبا\u200f",
        "謝謝你",
        "Terima kasih",
    ],
)
def test_small_talk_is_known_however_its_letters_are_encoded(text: str) -> None:
    assert is_small_talk(text)
