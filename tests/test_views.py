"""Views of what is stored and of what was asked: digest, related chunks, names, figures over time, conversations."""

import json
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from candidates import entry
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, wait_until
from recording_upstream import RecordingUpstream

from memd.admin.reads import QUARTER_US
from memd.admin.routing import PeriodQuery
from memd.admin.turns import PERIODS_MAX, ConversationsQuery, FiguresQuery, conversation_of, figures_of, usage_of
from memd.entries import Speaker
from memd.errors import BadQuestion, NotFound
from memd.recall.digest import Said, digest
from memd.receipts import Receipt
from memd.selection import Since, Until

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
    assert got(told, "digest?to=1999-01-01") == {"by": "day", "periods": [], "note": None}
    assert ask(f"{told.own_url}/memd/digest?by=month").status == 400

    names = got(told, "entities")
    known = {one["name"]: one for one in names["entities"]}
    assert (known["Anna Kowalska"]["kind"], known["Anna Kowalska"]["count"]) == ("name", 3)
    assert (known["ERR_7421"]["kind"], known["ERR_7421"]["count"]) == ("identifier", 2)
    assert names["total"] == len(known) and "Thanks" not in known and "Äpfeln" not in known
    assert [one["name"] for one in got(told, "entities?kind=path")["entities"]] == ["src/import/night"]
    [anna] = got(told, "entities?name=anna%20KOWALSKA&limit=2")["entities"]
    assert anna["count"] == 3 and len(anna["chunks"]) == 2
    assert got(told, "entities?name=Nobody") == {"entities": [], "total": 0, "note": None}

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


# Figures over time and the tokens of requests

HOUR, DAY = 3_600_000_000, 86_400_000_000
NOON = int(datetime(2026, 11, 20, 12).timestamp() * 1e6)
QUARTER = NOON // QUARTER_US


def line(at: int, memory_ms: float = 10.0, **more: Any) -> bytes:
    base: dict[str, Any] = {"turn_id": "0", "api": "chat", "mode": "full", "http_status": 200, "forwarded_tokens": 70}
    timings = {"memory": memory_ms, "upstream": memory_ms * 2}
    return msgspec.json.encode(
        Receipt(at=at, **{"topic_id": "work", "model": "tiny", "timings_ms": timings, **base, **more})
    )


def test_requests_are_added_up_by_hour_and_hours_without_any_are_there() -> None:
    lines = [
        line(NOON + 2 * HOUR, memory_ms=30, prompt_tokens=100, cached_tokens=60, completion_tokens=9, memory_tokens=7),
        line(NOON, memory_ms=10, question="Where?"),
        line(NOON + 1, memory_ms=20, http_status=500, prompt_tokens=1_000),
        line(NOON, topic_id="home"),
        b"{",
    ]
    told = figures_of(lines, {}, FiguresQuery(topic=("work",)))
    assert (told.by, told.since) == ("hour", NOON)
    assert [one.at for one in told.periods] == [NOON, NOON + HOUR, NOON + 2 * HOUR]
    first, second, third = told.periods
    assert (first.requests, first.prompt_tokens, first.questions, first.found) == (2, 70, 1, 0)
    assert (first.memory_ms, first.memory_ms_high, first.first_byte_ms) == (15, 19.5, 20)
    assert (second.requests, second.memory_ms, second.first_byte_ms) == (0, None, None)
    assert (third.prompt_tokens, third.cached_tokens, third.completion_tokens, third.memory_tokens) == (100, 60, 9, 7)


def test_nothing_known_is_no_period_and_the_log_goes_on_where_nothing_was_written() -> None:
    grown = {QUARTER - 400: (5, 500), QUARTER: (1, 10), QUARTER + 1: (2, 20), QUARTER + 8: (1, 5)}
    told = figures_of([], grown, FiguresQuery(by="hour", since=NOON))  # type: ignore[arg-type]  # decoded from text
    assert [(one.stored, one.log_bytes) for one in told.periods] == [(3, 530), (0, 530), (1, 535)]
    days = figures_of([], grown, FiguresQuery(by="day"))
    assert [(one.stored, one.log_bytes) for one in days.periods][-1] == (4, 535)
    assert sum(one.stored for one in days.periods) == 9

    assert figures_of([], {}, FiguresQuery()).periods == ()
    told = figures_of([line(NOON)], {QUARTER - 40 * PERIODS_MAX: (1, 100)}, FiguresQuery(by="hour"))
    assert len(told.periods) == PERIODS_MAX
    assert (told.periods[-1].at, told.periods[-1].requests, told.periods[-1].log_bytes) == (NOON, 1, 100)
    assert figures_of([], {QUARTER: (1, 1), QUARTER - 4 * 24 * 300: (1, 1)}, FiguresQuery()).by == "week"


def test_a_daemon_tells_what_it_did(serving: Serving) -> None:
    daemon = serving({"buffer": {"idle_seconds": 0.1}})
    url = f"{daemon.own_url}/memd/figures"
    assert ask(url).json["periods"] == []
    for text in ("The lamp of the lighthouse is on the brass plate.", "Where is the lamp of the lighthouse?"):
        daemon.chat([{"role": "user", "content": text}], memory_in={"topic_id": "work"})
        wait_until(lambda: daemon.export() != [], lambda: "not stored")
    wait_until(lambda: sum(one["requests"] for one in ask(url).json["periods"]) == 2, lambda: str(ask(url).body))
    periods = ask(f"{url}?topic=work&by=day").json["periods"]
    assert sum(one["found"] for one in periods) == 1 and sum(one["injected"] for one in periods) == 1
    assert periods[-1]["log_bytes"] > 100 and periods[-1]["memory_ms"] > 0


# The tokens of requests, by day, topic and model


def test_counts_of_the_model_server_come_before_estimates_and_refused_requests_cost_nothing() -> None:
    told: dict[str, Any] = {"prompt_tokens": 100, "cached_tokens": 60, "completion_tokens": 9, "memory_tokens": 30}
    lines = [
        b'{"redaction":"x"}',
        line(NOON, **told),
        line(NOON + 1, **told),
        line(NOON + 2),
        line(NOON, model="big", prompt_tokens=5),
        line(NOON + DAY, topic_id="home", prompt_tokens=1),
        line(NOON, topic_id="bad", model="", forwarded_tokens=0),  # it went on without memory: nothing was estimated
        line(NOON, http_status=500, prompt_tokens=1_000),
        line(NOON, http_status=None, prompt_tokens=1_000),
        line(NOON, **told)[:-9],  # torn by a crash
    ]
    usage = usage_of(lines, PeriodQuery())
    figures = [(row.day, row.topic_id, row.model, row.requests, row.prompt_tokens) for row in usage.rows]
    assert figures == [
        ("2026-11-21", "home", "tiny", 1, 1),
        ("2026-11-20", "bad", "", 1, 0),
        ("2026-11-20", "work", "big", 1, 5),
        ("2026-11-20", "work", "tiny", 3, 270),
    ]
    assert usage.rows[1].estimated == 0
    row = usage.rows[3]
    assert (row.cached_tokens, row.completion_tokens, row.memory_tokens, row.estimated) == (120, 18, 60, 1)
    assert usage.since == NOON
    assert [row.topic_id for row in usage_of(lines, PeriodQuery(topic=("home",))).rows] == ["home"]
    that_day = PeriodQuery(since=Since(NOON + 1), to=Until(NOON + DAY))
    assert [row.day for row in usage_of(lines, that_day).rows] == ["2026-11-20"]


def test_the_command_shows_what_requests_took(served: DaemonProcess) -> None:
    empty = served.run("usage")
    assert empty.returncode == 1 and "No request has a receipt" in empty.stdout
    for text in ("Where is the oil for the lamp?", "And the wick?"):
        served.chat([{"role": "user", "content": text}], memory_in={"topic_id": "work"})

    turns = f"{served.own_url}/memd/turns?topic=work"
    wait_until(lambda: len(ask(turns).json["turns"]) == 2, lambda: repr(served))
    rows = json.loads(served.run("usage", "--json").stdout)["rows"]
    assert sum(row["requests"] for row in rows if row["topic_id"] == "work") == 2
    later = served.run("usage", "--from", "2999-01-01")
    assert later.returncode == 1 and "that was asked for has a receipt; the oldest that is kept is of" in later.stdout
    shown = served.run("usage", "--topic", "work").stdout
    at = ask(f"{served.own_url}/memd/turns").json["turns"][0]["at"]
    assert f"{datetime.fromtimestamp(at / 1e6):%Y-%m-%d}" in shown and "work" in shown and "The oldest receipt" in shown
    assert served.run("usage", "--topic", "nowhere").returncode == 2


# Conversations, from beginning to end

MINUTE = 60_000_000


def turn_line(turn_id: str, at: int, conversation: str, position: int, asked: str, **more: Any) -> bytes:
    base: dict[str, Any] = {"topic_id": "work", "api": "chat", "mode": "full", "model": "tiny", "reply": f"To {asked}"}
    told = {"turn_id": turn_id, "at": at, "conversation": conversation, "position": position, "asked": asked}
    return msgspec.json.encode(Receipt(**{**base, **told, **more}))


def asked(lines: list[bytes], conversation: str) -> list[str]:
    return [turn.asked for turn in conversation_of(lines[::-1], conversation, ConversationsQuery()).turns]


def test_a_conversation_has_its_turns_oldest_first_and_the_first_words_as_its_title() -> None:
    lines = [
        turn_line("1", 10, "a", 0, "How do I oil\n the lathe?"),
        turn_line("2", 20, "b", 0, "Something else."),
        turn_line("3", 30, "a", 2, "And the saw?", is_step=True),
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
        turn_line("1", 10, "a", 0, "one"),
        turn_line("2", 20, "a", 2, "two"),
        turn_line("3", 30, "b", 2, "two, edited", branched=("a", 2)),
        turn_line("4", 40, "b", 4, "three"),
        turn_line("5", 50, "c", 4, "three", branched=("b", 5)),  # answered anew
        turn_line("6", 60, "d", 1, "four", branched=("c", None)),  # the client has rewritten the history
    ]
    assert asked(lines, "a") == ["one", "two"]
    assert asked(lines, "b") == ["one", "two, edited", "three"]
    assert asked(lines, "c") == ["one", "two, edited", "three"]
    assert asked(lines, "d") == ["one", "two, edited", "three", "four"]
    assert conversation_of(lines[::-1], "c", ConversationsQuery()).branches == ("a", "b", "d")

    lines = [
        turn_line("1", 10, "a", 0, "hi"),
        turn_line("2", 20, "b", 0, "hi", branched=("a", 1)),
        turn_line("3", 30, "b", 2, "you"),
    ]
    assert asked(lines, "b") == ["hi", "you"]
    assert conversation_of(lines[::-1], "a", ConversationsQuery()).branches == ()

    lines = [turn_line("1", 10, "a", 2, "one", branched=("b", 2)), turn_line("2", 20, "b", 4, "two", branched=("a", 4))]
    assert asked(lines, "b") == ["one", "two"]


def test_an_unknown_conversation_and_one_of_several_topics_are_refused() -> None:
    lines = [turn_line("1", 10, "a", 0, "one"), turn_line("2", 20, "a", 0, "two", topic_id="home")]
    with pytest.raises(NotFound, match="there is no conversation 'x'"):
        conversation_of(lines, "x", ConversationsQuery())
    with pytest.raises(BadQuestion, match="name the topic"):
        conversation_of(lines, "a", ConversationsQuery())
    assert conversation_of(lines, "a", ConversationsQuery(topic=("home",))).title == "two"


@pytest.fixture
def daemon(serving: Serving) -> DaemonProcess:
    return serving({"buffer": {"idle_seconds": 0.1}})


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


def test_what_is_older_than_the_receipts_or_imported_is_listed_from_the_log_and_read_in_order(serving: Serving) -> None:
    daemon = serving({"buffer": {"idle_seconds": 0.1}, "receipts": {"enabled": False}})
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


def test_a_longer_pause_ends_a_conversation_of_the_log(serving: Serving) -> None:
    daemon = serving({"buffer": {"idle_seconds": 0.1}, "receipts": {"enabled": False}})
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
