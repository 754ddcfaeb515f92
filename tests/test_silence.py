"""Small talk and questions about nothing stored bring nothing into the prompt, and memd tells why."""

import inspect
import itertools
import json
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Serving
from daemon_in_process import Client
from daemon_process import Answer, DaemonProcess, ask, wait_until
from recording_upstream import recording_upstream

pytestmark = pytest.mark.process

WHO = ("Ingrid", "Marek", "the landlord", "my sister", "the baker", "our neighbour", "Aunt Tove", "the plumber")
WHAT = (
    *("repaired the roof of the boat house", "lent us the long ladder for the cellar"),
    *("wants to plant two pear trees behind the mill", "sold the old piano to the music school"),
    *("found the spare key of the harbour office", "cooked fish soup for the whole crew"),
)
WHEN = (
    *("before the storm came in", "while it was raining all day", "on the way back from Bergen"),
    *("as soon as the ferry ran again", "a week after the village fair", "when nobody expected it any more"),
    "although the workshop was closed",
)
RARE = (
    "For the bread of the summer feast take two pounds of rye and one of wheat, a spoon of salt, warm milk and "
    "caraway; let it rise over night, knead it in the morning, and bake it until the crust sounds hollow."
)
FACT = "Hello there! Thanks a lot, the code of the boat shed's alarm is 7731."


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A topic of more than three hundred chunks, with greetings and thanks among them."""
    folder = tmp_path_factory.mktemp("silence")
    file = folder / "talk.jsonl"
    facts = [f"{who} {what} {when}." for who, what, when in itertools.product(WHO, WHAT, WHEN)]
    messages = [part for text in [FACT, RARE, *facts] for part in ({"role": "user", "content": text}, ANSWERED)]
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


def test_what_is_asked_for_is_found_in_hundreds_of_chunks_also_by_a_name_or_a_single_word(told: DaemonProcess) -> None:
    assert len(told.export()) > 300
    for question in ("Who sold the piano?", "What is the code of the alarm?", "the long ladder", "ladder?"):
        assert status(told, question)[0] == "injected", question
    for question in ("Who is Marek?", "When is Marek back?", "marek", "Tell me about Tove!"):
        assert searched(told, question)["note"] is None, "the model has never heard the name; the words know it"
        assert status(told, question)[0] == "injected", question
    for word in ("caraway", "CARAWAY?", "Hollow"):
        shown = [chunk["content"] for chunk in searched(told, word)["chunks"] if chunk["verdict"] == "injected"]
        assert any(RARE in content for content in shown), word
    asked_before = ("What is the code of the alarm of the boat shed?", "thanks a lot!")
    assert status(told, *asked_before) == status(told, "Convert 7731 meters to miles.") == ("none", "")
    assert status(told, "7731?")[0] == "injected", "by itself it is what is asked for"


@pytest.mark.parametrize(
    "text",
    [
        *("thanks!", "hi", "Good morning :)", "👍", "ok thanks, that's all", "Danke!", "¡Hola!", "Merci beaucoup"),
        "ありがとう",
    ],
)
def test_small_talk_brings_nothing(told: DaemonProcess, text: str) -> None:
    assert status(told, text) == ("none", "")
    assert searched(told, text)["note"].startswith("Nothing is shown: nothing is near the question.")


def test_a_question_about_a_time_at_which_nothing_was_said_hears_that(told: DaemonProcess) -> None:
    said = "Nothing is shown: nothing was said at the time that the question asks for."
    assert searched(told, "What did I say last week?")["note"] == said
    assert status(told, "What did I say last week?") == ("none", "")


@pytest.mark.parametrize(
    "question",
    [
        *("zzzqqq", "Write a haiku about rust lifetimes", "What is the capital of Mongolia?"),
        *("Wie funktioniert ein Kernreaktor?", "¿Quién pintó Las Meninas?", "黑洞是怎么形成的?"),
    ],
)
def test_a_question_about_nothing_stored_brings_nothing_and_says_why(told: DaemonProcess, question: str) -> None:
    assert status(told, question) == ("none", "")
    found = searched(told, question)
    assert found["tokens"] == 0 and found["note"] == "Nothing is shown: nothing is near the question."
    assert {chunk["verdict"] for chunk in found["chunks"]} <= {"nothing is near the question"}
    assert found["is_model_asked"] and all(chunk["cosine"] < 0.39 for chunk in found["chunks"])


def test_the_receipt_of_a_turn_says_why_nothing_was_shown(told: DaemonProcess) -> None:
    answer = asked(told, "Write a haiku about rust lifetimes")
    assert receipt_of(told, answer)["note"] == "Nothing is shown: nothing is near the question."
    assert "nothing is near the question" in told.run("turn", answer.headers["X-Memory-Turn"]).stdout
    assert receipt_of(told, asked(told, "Who sold the piano?"))["note"] is None
    memory_in = {"topic_id": "talk", "related_topic_ids": ["default"]}
    said = [{"role": "user", "content": "Who sold the piano?"}]
    said += [{"role": "assistant", "content": told.chat(said, memory_in=memory_in).reply}]
    answer = told.chat([*said, {"role": "user", "content": "Write a haiku about rust lifetimes"}], memory_in=memory_in)
    note = "Nothing new is shown: nothing is near the question; earlier blocks stay."
    assert (stays := receipt_of(told, answer))["note"] == note and stays["shown"], stays


CODE = "\n".join(
    f"    row_{number} = parse_row(lines[{number}], is_strict=True, separator=SEMICOLON)" for number in range(20)
)
MANUAL = """# Maintenance
Clean the nozzles every 60 firings with a brass needle. Spare parts: nozzles article 71-4402, igniter article 71-9018.
"""
SALES = "# Note {0}\n\nOn day {0} the studio sold mugs and bowls to customer number {0}, who paid in cash.\n"
GERMAN = "# Notizen\n\nDer Ofen wird am Montag gereinigt, und die neue Lieferung der Glasuren kommt erst im Dezember.\n"


def test_a_document_in_another_language_makes_no_question_silent(serving: Serving, tmp_path: Path) -> None:
    daemon = serving({})
    files = {"manual.md": MANUAL, "sales.md": "\n".join(map(SALES.format, range(40))), "notizen.md": GERMAN}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for number, topic in ((2, "english"), (3, "both")):
        daemon.run("add", *(str(tmp_path / name) for name in list(files)[:number]), "--topic", topic)
        found = json.loads(daemon.run("search", "article number of the igniter", "--topic", topic, "--json").stdout)
        assert found["note"] is None and "igniter article" in found["chunks"][0]["content"], topic


def test_where_little_is_stored_what_is_less_near_is_shown(told: DaemonProcess, daemon: DaemonProcess) -> None:
    """The nearest of few is seldom near by chance: with one threshold for all every eighth first question was lost."""
    shellfish, question = "My sister is allergic to walnuts and shellfish.", "Which ingredients must I avoid?"
    daemon.chat([{"role": "user", "content": shellfish}])
    daemon.wait_stored(shellfish)
    assert shellfish in searched(daemon, question)["chunks"][0]["content"]
    assert searched(daemon, question)["note"] is None
    assert status(told, question) == ("none", "")


def test_in_a_language_that_the_model_cannot_read_words_decide_what_is_near(daemon: DaemonProcess) -> None:
    """Its vectors of all German texts are alike."""
    who = ("Ingrid", "Der Bäcker", "Meine Schwester", "Unser Nachbar", "Der Klempner", "Die Vermieterin")
    what = (
        "hat das Dach des Bootshauses repariert",
        "möchte zwei Birnbäume hinter der Mühle pflanzen",
        "verkaufte das alte Klavier an die Musikschule",
        "fand den Ersatzschlüssel des Hafenbüros",
        "kochte Fischsuppe für die ganze Mannschaft",
    )
    notes = [{"content": f"{one} {other}, bevor der Sturm kam."} for one, other in itertools.product(who, what)]
    assert ask(f"{daemon.own_url}/memd/notes", {"topic_id": "default", "notes": notes}).status == 200
    daemon.wait_stored(notes[-1]["content"])
    for nothing in ("Erzähl mir einen Witz", "Wie funktioniert ein Kernreaktor?", "Wer schrieb die Zauberflöte?"):
        assert status(daemon, nothing) == ("none", ""), nothing
    assert status(daemon, "Wer kochte die Fischsuppe?")[0] == "injected"


def test_what_helped_once_is_not_shown_for_everything(daemon: DaemonProcess) -> None:
    retries, key = "Failed payments are retried four times.", "Our neighbour Lena has the spare key of the garage."
    daemon.chat([{"role": "user", "content": retries}])
    daemon.chat([{"role": "user", "content": key}])
    daemon.wait_stored(retries, key)
    [helped] = [one["id"] for one in daemon.export() if retries in one["content"]]
    assert daemon.run("correct", helped, "--helpful", "--steps", "4").returncode == 0
    shown = [one for one in searched(daemon, "Who is Lena?")["chunks"] if one["verdict"] == "injected"]
    assert [key in one["content"] for one in shown] == [True]
    assert retries in searched(daemon, "How often are failed payments retried?")["chunks"][0]["content"]


def test_what_was_said_at_a_time_is_shown_although_no_word_is_near(daemon: DaemonProcess) -> None:
    said = "The plumber wants two hundred crowns for the tap."
    daemon.chat([{"role": "user", "content": said}])
    daemon.wait_stored(said)
    assert said in searched(daemon, "What did we talk about today?")["chunks"][0]["content"]
    assert status(daemon, "What did we talk about today?")[0] == "injected"
    assert status(daemon, "What did we talk about last year?") == ("none", "")


async def test_a_decision_beside_a_tool_s_result_is_found_by_its_words_before_the_model_has_read_it(
    client: Client,
) -> None:
    """Until then the vector of both in one chunk is that of the result."""
    decision = "Freight prices are rounded down to five cents."
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "tariff.py"}'}}
    said: list[dict[str, Any]] = [{"role": "user", "content": decision}]
    said += [{"role": "assistant", "content": "", "tool_calls": [call]}]
    topic = await client.daemon.topics.get("default")
    async with topic.storing:
        await client.send([*said, {"role": "tool", "tool_call_id": "c1", "content": CODE}])
        for fact in itertools.product(WHO, WHAT):
            await client.send([{"role": "user", "content": "\n\n".join(f"{' '.join(fact)} {when}." for when in WHEN)}])
        for question, status in (("How are freight prices rounded?", "injected"), ("Tell me a joke!", "none")):
            assert (await client.ask(question, mode="readonly"))[1] == status, question
        assert not [*topic.log.snapshot().latest_places()]


WISH = "Please always run the linter before you push."
PASTED = inspect.getsource(shutil.copymode)
CALLED = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "copying.py"}'}}
ERROR = """error[E0382]: borrow of moved value: `chmod_func`
  --> src/main.rs:14:20
   |
14 |     start(chmod_func);
   |           ---------- value moved here
   |
   = note: move occurs because `chmod_func` has type `Config`"""
BESIDE_CODE = {
    "an error that is pasted above it": [{"role": "user", "content": f"{ERROR}\n\n{WISH}"}],
    "an error that is pasted below it": [{"role": "user", "content": f"{WISH}\n\n{ERROR}\n\n{ERROR}"}],
    "fenced": [{"role": "user", "content": f"{WISH}\n\n```python\n{PASTED}```"}],
    "fenced without a language": [{"role": "user", "content": f"```\n{PASTED}```\n{WISH}"}],
    "a tool's result": [
        {"role": "user", "content": WISH},
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": PASTED},
    ],
}


@pytest.mark.parametrize("messages", BESIDE_CODE.values(), ids=BESIDE_CODE)
def test_what_is_said_beside_code_is_found_and_so_is_the_code(
    serving: Serving, tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    daemon, file = serving({}), tmp_path / "talk.json"
    daemon.terminate()
    file.write_text(json.dumps({"messages": [*messages, ANSWERED]}))
    assert daemon.run("import", str(file)).returncode == 0
    daemon.start()
    for question in ("What has to be done before pushing?", "chmod_func?"):
        assert status(daemon, question)[0] == "injected", question
