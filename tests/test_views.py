"""`memd digest`, `related` and `entities`, and their routes: views of what is stored."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from candidates import entry
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask
from recording_upstream import RecordingUpstream

from memd.entries import Speaker
from memd.recall.digest import Said, digest

SAID = {
    "2024-05-01": (
        "Anna Kowalska rents the old boat house, the boat house stands at the north pier. The boat needs paint.",
        "We bought paint and a new rope for the boat of Anna Kowalska, and the boat floats again. Thanks, bye!",
    ),
    "2024-05-02": (
        "The importer stops with ERR_7421 when the folder src/import/night is full; the importer has to be restarted.",
        "After ERR_7421 we emptied the folder, so the importer of the night runs again without a single error.",
    ),
    "2024-05-20": (
        "Wir haben in Köln das Boot gestrichen, und danach gab es Kuchen mit Äpfeln aus dem Garten der Nachbarin.",
        "Anna Kowalska asked about the boat house again: the rent of the boat house rises in June, she says.",
    ),
}


@pytest.fixture
def told(make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path) -> DaemonProcess:
    """A daemon with three days, of which each text is a conversation."""
    daemon = make_daemon(upstream.url, {"upstream": {"url": upstream.url}})
    chats = [
        [{"role": "user", "content": text, "timestamp": f"{day}T{10 + 3 * hour}:00:00"}]
        for day, texts in SAID.items()
        for hour, text in enumerate(texts)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    done = daemon.run("import", str(file), "--topic", "work", "--config", str(daemon.config))
    assert done.returncode == 0, done.stderr
    return daemon.start()


def got(daemon: DaemonProcess, path: str) -> Any:
    return ask(f"{daemon.own_url}/memd/{path}").json


def test_a_view_shows_periods_names_and_what_belongs_together_and_stores_nothing(told: DaemonProcess) -> None:
    before = told.export()

    days = got(told, "digest?topic=work&by=day&sentences=1")
    assert days["by"] == "day" and [one["first"] for one in days["periods"]] == list(SAID)
    first, second, third = days["periods"]
    assert first["chunks"] == 2 and first["last"] == "2024-05-01"
    assert "boat" in first["words"] and "importer" in second["words"] and "Folder" not in second["words"]
    assert "ERR_7421" in second["sentences"][0]["text"] and len(second["sentences"]) == 1
    assert "Thanks" not in json.dumps(first["sentences"]), "a greeting says nothing"
    assert third["sentences"][0]["id"] in {entry["id"] for entry in before}

    weeks = got(told, "digest?topic=work")
    assert weeks["by"] == "week"
    assert [(one["first"], one["last"]) for one in weeks["periods"]] == [
        ("2024-04-29", "2024-05-05"),
        ("2024-05-20", "2024-05-26"),
    ]
    assert [one["first"] for one in got(told, "digest?from=2024-05-02&to=2024-05-02")["periods"]] == ["2024-05-02"]
    assert got(told, "digest?to=1999-01-01") == {"by": "day", "periods": []}
    assert ask(f"{told.own_url}/memd/digest?by=month").status == 400

    names = got(told, "entities")
    known = {one["name"]: one for one in names["entities"]}
    assert (known["Anna Kowalska"]["kind"], known["Anna Kowalska"]["count"]) == ("name", 3)
    assert (known["ERR_7421"]["kind"], known["ERR_7421"]["count"]) == ("identifier", 2)
    assert names["total"] == len(known) and "Thanks" not in known and "Äpfeln" not in known
    assert [one["name"] for one in got(told, "entities?kind=path")["entities"]] == ["src/import/night"]
    [anna] = got(told, "entities?name=anna%20KOWALSKA&limit=2")["entities"]
    assert anna["count"] == 3 and len(anna["chunks"]) == 2
    assert got(told, "entities?name=Nobody") == {"entities": [], "total": 0}

    house = next(entry["id"] for entry in before if entry["content"].startswith("Anna Kowalska rents"))
    found = got(told, f"chunks/{house}/related")
    best = found["chunks"][0]
    assert found["id"] == house and best["content"].endswith("she says.") and best["shared"] == ["Anna Kowalska"]
    assert not any("bought paint" in one["content"] for one in found["chunks"]), "it was said just after it"
    assert ask(f"{told.own_url}/memd/chunks/ffffffffffff/related").status == 404
    assert told.export() == before


def test_a_mark_inside_a_word_ends_no_sentence_and_takes_no_time() -> None:
    began = time.process_time()
    said = ["=" * 5_000 + "!b", "The old bridge near the mill was closed in spring."]
    _, (day,) = digest([Said("work", entry("1", "\n".join(said)))], "day", 3)
    assert [one.text for one in day.sentences] == said[1:]
    assert time.process_time() - began < 3, "it takes a millisecond; ten seconds if each character is tried to the end"


PASTED = """def booking_port(settings: Settings, default: int) -> int:
    return settings.booking.port if settings.booking else default
for booking in self._bookings_of(stand, week): self._close(booking, reason)
"""


def test_a_digest_tells_what_was_said_and_not_what_was_pasted() -> None:
    said = "The booking service of the shop listens on another port from today on."
    asked = f"{said}\n```python\n{PASTED}```\n{PASTED}"
    result = "The listing of the folder has forty modules, and each one of them has a test."
    speakers = (Speaker(0, "user"), Speaker(len(asked) + 1, "tool"))
    both = msgspec.structs.replace(entry("1", f"{asked}\n{result}"), speakers=speakers)
    _, (day,) = digest([Said("work", both)], "day", 3)
    assert [one.text for one in day.sentences] == [said] and "modules" not in day.words
    _, (day,) = digest([Said("work", entry("1", PASTED))], "day", 3)
    assert day.sentences, "of a day on which nothing else was said, the code tells something"


@pytest.mark.parametrize(
    ("texts", "words", "sentence"),
    [
        (
            ("Die Katze und der Hund sind bei der Oma und die Katze schläft.", "Der Hund und die Katze waren das."),
            {"Katze", "Hund", "Oma", "schläft"},
            "Die Katze und der Hund sind bei der Oma und die Katze schläft.",
        ),
        (
            ("मेरे कुत्ते का नाम शेरू है और वह सिर्फ़ मछली खाता है। बिल्ली दूध पीती है।", "कुत्ते को मछली दो।"),
            {"कुत्ते", "मछली"},
            "मेरे कुत्ते का नाम शेरू है और वह सिर्फ़ मछली खाता है।",
        ),
        (("会议定在星期五下午，会议室在三楼。", "会议改期。"), {"会议"}, "会议定在星期五下午，会议室在三楼。"),
        (("札幌の歯医者にポチと行きました。", "ポチは元気。"), {"札幌", "ポチ"}, "札幌の歯医者にポチと行きました。"),
    ],
)
def test_a_digest_tells_words_and_sentences_of_other_languages(
    texts: tuple[str, str], words: set[str], sentence: str
) -> None:
    _, (day,) = digest([Said("work", entry(str(place), text)) for place, text in enumerate(texts)], "day", 3)
    assert words <= set(day.words) and {"und", "der", "die", "और"}.isdisjoint(word.lower() for word in day.words)
    assert sentence in [one.text for one in day.sentences]


def test_the_commands_show_the_same_beside_a_daemon_and_without(told: DaemonProcess) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        done = told.run(arguments[0], "--config", str(told.config), *arguments[1:])
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    asked: tuple[tuple[str, ...], ...] = (
        ("digest", "--by", "day", "--from", "2024-05-02"),
        ("entities", "--kind", "identifier"),
        ("related", next(entry["id"] for entry in told.export() if "rents" in entry["content"])),
    )
    beside = [run(*one) for one in asked]
    assert "2024-05-02" in beside[0] and "2024-05-20" in beside[0] and "2024-05-01" not in beside[0]
    assert "2  ERR_7421  identifier" in beside[1]
    assert [json.loads(run(*one, "--json")) for one in asked]
    assert "Nothing was said then" in run("digest", "--to", "1999-01-01", code=1)
    assert "No such name" in run("entities", "Nobody", code=1)
    assert "is no chunk's id" in run("related", "xyz", code=2)
    assert "the question is empty" in run("search", " ", code=2)
    assert "give its ID" in run("turn", "--then", code=2)
    for command in ("entities", "digest", "log", "sources", "turn", "export", "search rent", "undo 5", "show 0123"):
        refused = run(*command.split(), "--topic", "nowhere", code=2)
        assert "there is no topic" in refused and "nowhere" in refused
    assert "no topic 'nowhere'" in run("correct", "--helpful", "0123", "--topic", "nowhere", code=2)
    told.terminate()
    assert [run(*one) for one in asked] == beside
