"""`memd search` shows what a prompt would get and why, with a daemon and without, and changes nothing."""

import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, user, wait_until
from facts import FACTS, NO_NEIGHBOURS, QUESTION
from recording_upstream import RecordingUpstream, Request, Response, chat_answer

from memd.cli.main import main
from memd.selection import moment, since, until
from memd.store.tools.export import shown_text

HOSTILE = "A hostile line: \x1b[2J\x1b]0;owned\x07 and \u202etxet desrever, which a terminal must never see as it is."


@pytest.fixture
def told(serving: Serving, upstream: RecordingUpstream) -> DaemonProcess:
    """A daemon that was told the facts, each in a conversation of its own, the last one in another topic."""
    # Commands need to know the window of the upstream.
    daemon = serving({"upstream": {"url": upstream.url}} | NO_NEIGHBOURS)
    daemon.tell(*FACTS, topic="work")
    daemon.tell(HOSTILE, topic="other")
    return daemon


def found(daemon: DaemonProcess, *arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(
        daemon.run("search", "--json", "--config", str(daemon.config), *arguments).stdout
    )
    return answer


def test_a_running_daemon_and_the_log_alone_give_the_same_answer(told: DaemonProcess) -> None:
    beside = found(told, "--topic", "work", QUESTION)
    assert beside["chunks"][0]["content"].startswith(f"user: {FACTS[0]}")
    entries = told.export()
    told.terminate()
    assert found(told, "--topic", "work", QUESTION) == beside
    assert told.export() == entries
    assert told.run("verify").returncode == 0


def test_a_search_explains_itself_to_people_and_programs_and_does_nothing_to_a_terminal(told: DaemonProcess) -> None:
    chunks = found(told, "ERR_7421")["chunks"]
    assert {chunk["topic_id"] for chunk in chunks} == {"work", "other"}, "all topics are searched"
    for chunk in chunks:
        parts = chunk["meaning"] + chunk["words"] + chunk["feedback"] + chunk["neighbours"]
        assert chunk["score"] == pytest.approx(parts * chunk["multiplier"], abs=1e-5)
    assert chunks[0]["words"] > 0 and "inodes" in chunks[0]["content"]
    assert {chunk["verdict"] for chunk in chunks} == {"injected", "too weak"}

    for command in (("search", QUESTION), ("search", "--explain", QUESTION), ("stats",), ("turn",), ("log",)):
        printed = told.run(*command).stdout
        assert printed.endswith("\n") and not re.search(r"[ \t]$", printed, re.MULTILINE), (command, printed)

    plain = told.run("search", QUESTION)
    title, row = plain.stdout.splitlines()[:2]
    assert title.index("topic") == row.index(" work") + 1 and row[title.index("said") :].startswith("20"), plain.stdout
    assert plain.returncode == 0 and "exclusion constraints" in plain.stdout and "hazelnuts" not in plain.stdout
    assert re.search(r"1 chunk, \d+ of 1,024 tokens, would be shown to the model\.", plain.stdout)
    limited = told.run("search", "--limit", "1", QUESTION).stdout
    assert re.search(r"1 chunk of what would be shown to the model, \d+ of 1,024 tokens in all\.", limited)
    explained = told.run("search", "--explain", QUESTION).stdout
    assert "hazelnuts" in explained and "too weak" in explained and "meaning 0." in explained
    shown = re.findall(
        r"^\d\.\d{3} .*  (shown to the model|too weak)\n.*meaning .*feedback .*neighbours", explained, re.MULTILINE
    )
    assert len(shown) == explained.count("meaning ") > len(FACTS), "every candidate"

    hostile = told.run("search", "--explain", "--topic", "other", "A hostile line for a terminal").stdout
    assert "\\x1b[2J" in hostile and "\\x202e" in hostile
    assert not set(hostile) & {"\x1b", "\x07", "\u202e"}


def test_the_best_score_is_shown_first_though_a_shorter_chunk_takes_its_room_first(tmp_path: Path) -> None:
    reasons = (
        "because exclusion constraints rule out double bookings of a room; the team compared it with MySQL, SQLite"
    )
    for note in (
        f"The booking service uses PostgreSQL 16, {reasons} and MongoDB over weeks, wrote the results down in the "
        "wiki, and decided in a meeting in October that the booking service stays with it.",
        "The booking service uses a database.",
        "Bookings are in a database.",
    ):
        assert CliRunner().invoke(main, ["remember", note, "--data-dir", str(tmp_path)]).exit_code == 0
    ask_it = ["search", "Which database does the booking service use and why?", "--data-dir", str(tmp_path)]
    scores = [one["score"] for one in json.loads(CliRunner().invoke(main, [*ask_it, "--json"]).stdout)["chunks"]]
    assert scores != sorted(scores, reverse=True), "else this shows nothing"
    for more in ([], ["--explain"]):
        shown = re.findall(r"^(\d\.\d{3})  ", CliRunner().invoke(main, [*ask_it, *more]).stdout, re.MULTILINE)
        assert shown == [f"{one:.3f}" for one in sorted(scores, reverse=True)]


def test_a_limit_counts_what_is_shown_first(tmp_path: Path) -> None:
    def memd(*arguments: str) -> str:
        return CliRunner().invoke(main, [*arguments, "--data-dir", str(tmp_path)]).stdout

    short = re.findall(r"mem:(\w+)", memd("remember", "The cat likes milk."))
    memd("correct", "--unhelpful", "--steps", "2", *short)
    long = "A cat sat by the harbour wall, " + ", ".join(f"boat {number} went by at noon" for number in range(20))
    memd("remember", long)
    both = json.loads(memd("search", "cat", "--json"))["chunks"]
    assert [one["verdict"] for one in both] == ["injected", "too weak"]
    one = memd("search", "cat", "--limit", "1")
    assert "harbour wall" in one and re.search(r"1 chunk of what would be shown to the model, \d+ of 2,000 tokens", one)


def test_where_nothing_is_known_nothing_is_shown(told: DaemonProcess) -> None:
    answer = told.run("search", "How many moons does Jupiter have?")
    assert answer.returncode == 1 and "Nothing would be shown to the model" in answer.stdout
    assert answer.stdout.endswith("All 2 topics were searched; --topic names one.\n")
    for arguments in (["--topic", "work", QUESTION], [QUESTION]):
        assert "were searched" not in told.run("search", *arguments).stdout, "what was found says where it is"
    for end in (told.terminate, lambda: None):
        refused = told.run("search", "--topic", "nowhere", QUESTION)
        assert refused.returncode == 2 and "there is no topic 'nowhere'" in refused.stderr
        end()


def test_a_search_finds_only_what_was_asked_for_and_refuses_what_cannot_be_meant(told: DaemonProcess) -> None:
    listed = told.run("search", "--contains", "postgresql")
    assert listed.returncode == 0 and "PostgreSQL" in listed.stdout and "\n\n\n" not in listed.stdout
    chunks = json.loads(told.run("search", "--topic", "work", "--json").stdout)["chunks"]
    assert len(chunks) > 1 and all(one["topic_id"] == "work" for one in chunks)
    assert told.run("search", "--topic", "work", "--limit", "1").stdout.endswith("or an earlier --to.\n")
    nothing = told.run("search", "--to", "2001-01-01", "--tag", "nobody")
    assert nothing.returncode == 1 and "like that" in nothing.stdout and "No chunk has tag 'nobody'" in nothing.stdout
    for vague in ([], ["--limit", "3"], ["--as-of", "2026-11-20"], ["--topic", "work", "--explain"]):
        refused = told.run("search", *vague)
        assert refused.returncode == 2 and "QUESTION is missing; for example: memd search" in refused.stderr

    def texts(*arguments: str) -> list[str]:
        return [
            chunk["content"]
            for chunk in found(told, *arguments, "Why did we choose PostgreSQL, and the cake?")["chunks"]
        ]

    assert {FACTS[0], FACTS[2]} <= {text.split(": ", 1)[1].split("\n")[0] for text in texts()}
    assert all("cake" in text for text in texts("--contains", "CAKE")) and texts("--contains", "CAKE")
    assert texts("--from", "2020-01-01") and not texts("--to", "2020-01-01")
    assert texts("--role", "user") and not texts("--role", "tool")
    assert texts("--kind", "turn") and not texts("--kind", "note")
    assert len(texts("--limit", "1")) == 1
    [cake] = ask(f"{told.own_url}/memd/chunks?from=2020-01-01&role=user&contains=cake").json["chunks"]
    assert FACTS[2] in cake["content"]
    assert ask(f"{told.own_url}/memd/chunks?to=2020-01-01").json["chunks"] == []

    wrong = {
        "from=soon": "parameter from",
        "to=9999-12-31": "parameter to",
        "from=2026": "parameter from",
        "from=1763647200": "parameter from",  # seconds
        "to=1763647200000": "parameter to",
        "to=17": "parameter to",
        "from=1763647200000000&to=1763647200000000": "`from` is not before `to`",
        "from=2026-01-01&from=2026-01-02": "from is given 2 times",
        "from=2026-02-01&to=2026-01-01": "`from` is not before `to`",
        "kinds=turn": "no parameter 'kinds'",
        "until=2020-01-01": "'until'; it has",
        "limit=0": "limit",
    }
    for route, (query, named) in itertools.product(("search?q=cake&", "chunks?", "days?"), wrong.items()):
        wrongly = ask(f"{told.own_url}/memd/{route}{query}")
        assert wrongly.status == 400 and named in wrongly.json["error"]["message"], (route, query)


def test_an_empty_log_has_nothing(served: DaemonProcess) -> None:
    for end in (served.terminate, lambda: None):
        found = served.run("search", QUESTION)
        assert found.returncode == 1 and "Nothing is stored yet" in found.stdout and "memd add PATH" in found.stdout
        end()


def test_the_past_is_searched_as_it_was(told: DaemonProcess) -> None:
    entry = next(entry for entry in told.export() if "PostgreSQL" in entry["content"])
    told.chat([user(QUESTION)], memory_in={"topic_id": "work"})  # an id can be corrected when it was shown
    correction = {"chunk_ids": [entry["id"]], "action": "Update", "reason": "moved", "content": "We moved to SQLite."}
    told.chat([user("Noted, thank you.")], memory_in={"topic_id": "work", "corrections": [correction]})
    wait_until(lambda: any("SQLite" in one["content"] for one in told.export()), lambda: "not corrected")
    ask_now = ("--topic", "work", QUESTION)
    ask_then = ("--as-of", str(entry["canonical_id"]), *ask_now)
    for end in (told.terminate, lambda: None):
        now = [chunk["content"] for chunk in found(told, *ask_now)["chunks"]]
        then = found(told, *ask_then)
        assert not any("PostgreSQL because" in content for content in now)
        assert [chunk["content"] for chunk in then["chunks"]] == [shown_text(entry)], "the only one at that time"
        assert then["chunks"][0]["words"] > 0, "its words are searched too"
        assert then["as_of"] == entry["canonical_id"]
        end()
    assert found(told, "--as-of", "2000-01-01", QUESTION)["chunks"] == []
    refused = told.run("search", "--as-of", "yesterday", QUESTION)
    assert refused.returncode == 2 and "is no time" in refused.stderr


def test_a_note_of_a_year_ago_is_chosen_by_all_that_is_known_of_it(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, told: DaemonProcess
) -> None:
    line = next(entry for entry in told.export() if entry["topic_id"] == "work")  # which topic is stored first is open
    note = line | {
        "uuid": "ab" * 16,
        "id": "abab",
        "content": "The boiler was serviced by Kessler and Sons.",
        "kind": "note",
        "source": "house/boiler.md",
        "tags": ["house", "heating"],
        "said_at": "2025-11-03T22:30:00.000000Z",
        "speakers": [],
        "roles": [],
    }
    told.terminate()
    file = told.folder / "note.jsonl"
    file.write_text(json.dumps(note) + "\n")
    assert "1 entry imported" in told.run("import", str(file)).stdout
    told.start()
    assert [entry["tags"] for entry in told.export() if entry["kind"] == "note"] == [["house", "heating"]]
    wanted = [
        *("kind=note", "source=house/boiler.md", "tag=heating", "to=2025-12-31&topic=work", "contains=KESSLER%20AND"),
        *("from=2025-11-03T23:29%2B01:00&to=2025-11-03T22:31Z", "from=2025-11-03&to=1762300000000000&tag=x&tag=house"),
    ]
    unwanted = [
        *("kind=turn", "source=house/boiler", "tag=garden", "from=2025-12-01", "role=user", "kind=note&contains=cake"),
        *("from=2025-11-03T22:31Z", "to=2025-11-03T23:30%2B01:00"),
    ]
    for query in (*wanted, *unwanted):
        listed = ask(f"{told.own_url}/memd/chunks?{query}").json["chunks"]
        searched = ask(f"{told.own_url}/memd/search?q=Who+serviced+the+boiler%3F&{query}").json["chunks"]
        days = ask(f"{told.own_url}/memd/days?{query}").json["days"]
        for chunks in (listed, searched):
            assert ("abab" in {chunk["id"] for chunk in chunks}) == (query in wanted), query
        assert any(day["day"].startswith("2025-11-0") for day in days) == (query in wanted), query
    assert "serviced" in told.run("search", "--tag", "heating", "--to", "2025-12-31", "Who serviced the boiler?").stdout

    def injected(**given: Any) -> bool:
        asked = {"topic_id": "work", "filter": given}
        told.chat([user("Who serviced the boiler?")], memory_in=asked, headers={"X-Memory-Mode": "readonly"})
        return "Kessler" in upstream.prompts[-1]

    assert injected(kinds=["note"], sources=["house/boiler.md", "x"], to=1762300000000000)
    assert injected(**{"from": "2025-11-03T22:30:00Z"}) and not injected(sources=["x"])
    assert not injected(to="2025-11-03T23:30:00+01:00")


def test_a_moment_is_a_canonical_id_a_time_or_the_end_of_a_day() -> None:
    assert moment("1763647200000000") == 1763647200000000
    assert moment("2026-11-20T14:30:00+00:00") == 1795185000000000
    assert moment("2026-11-20") == datetime(2026, 11, 21).timestamp() * 1e6  # of this machine's zone


@pytest.mark.parametrize(("day", "hours"), [("2026-03-29", 23), ("2026-10-25", 25), ("20261120", 24)])
def test_a_day_is_as_long_as_it_is_where_clocks_change(day: str, hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert until(day) - since(day) == hours * 3600 * 1_000_000
    finally:
        monkeypatch.undo()
        time.tzset()


# One recall: the receipt of a prompt, the route, the command and replay agree on ids, verdicts and tokens


WINDOW = 4096  # the recording upstream's
PLACES = ("the boat house", "the mill", "the cellar", "the harbour office", "the north tower", "the old bakery")
THINGS = ("lock", "door", "roof", "stove", "window")
ABOUT_KEYS = "What did Ingrid say about the keys, the lock and the door of the boat house and the mill?"
RELEVANT = {"injected", "no room in the budget", "in the block of an earlier turn"}


def facts() -> list[str]:
    """Thirty notes of about seventy tokens about one subject: far more than the budget of a block."""
    return [
        f"Note {number}: Ingrid said that the {thing} of {place} has key number {number * 37 % 101}, that it was "
        f"mended in the week of {number % 28 + 1} May by a locksmith from Mill Lane, who charged {number * 13} crowns, "
        f"and that the spare hangs on hook {number} behind the blue cupboard beside the stairs."
        for number, (place, thing) in enumerate((place, thing) for place in PLACES for thing in THINGS)
    ]


def with_usage(request: Request) -> Response:
    """An answer of a model that counts more tokens than the bundled tokenizer: one for three bytes of the body."""
    return chat_answer(request, usage={"prompt_tokens": len(request.body) // 3, "completion_tokens": 1})


@pytest.fixture
def many_told(serving: Serving, upstream: RecordingUpstream) -> DaemonProcess:
    daemon = serving()
    upstream.answer = with_usage
    daemon.chat([{"role": "user", "content": " ".join(facts()[:10])}], memory_in={"topic_id": "elsewhere"})
    upstream.answer = chat_answer  # from now on nothing new is learned of the model's tokens
    for fact in facts():
        daemon.chat([{"role": "user", "content": fact}], memory_in={"topic_id": "work"})
    wait_until(lambda: unstored(daemon) == [], lambda: f"not stored: {unstored(daemon)}")
    return daemon


def unstored(daemon: DaemonProcess) -> list[str]:
    stored = "\n".join(entry["content"] for entry in daemon.export() if entry["topic_id"] == "work")
    return [fact for fact in facts() if fact not in stored]


def relevant(chunks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float]]:
    """Id, verdict and score of the candidates that are worth showing, best first."""
    return [(one["id"], one["verdict"], one["score"]) for one in chunks if one["verdict"] in RELEVANT]


def test_a_prompt_search_and_replay_show_the_same_chunks_for_the_same_reasons(many_told: DaemonProcess) -> None:
    answer = many_told.chat(
        [{"role": "user", "content": ABOUT_KEYS}], {"X-Memory-Mode": "readonly"}, memory_in={"topic_id": "work"}
    )
    turn = f"{many_told.own_url}/memd/turns/{answer.headers['X-Memory-Turn']}"
    wait_until(lambda: ask(turn).status == 200, lambda: "no receipt")
    receipt = ask(turn).json
    by_route = ask(f"{many_told.own_url}/memd/search?topic=work&q={ABOUT_KEYS.replace(' ', '+')}").json
    by_command = json.loads(many_told.run("search", "--json", "--topic", "work", ABOUT_KEYS).stdout)
    replay = ask(f"{turn}/replay").json

    verdicts = [one["verdict"] for one in receipt["candidates"]]
    assert receipt["budget_tokens"] == WINDOW // 4 and {"injected", "no room in the budget"} <= set(verdicts)
    assert receipt["block_tokens"] > len(receipt["block"]) / 3.6, "drifted: a raw token has four characters and more"
    injected = [one for one in receipt["candidates"] if one["verdict"] == "injected"]
    assert {one["id"] for one in injected} == set(receipt["shown"])
    for search in (by_route, by_command, replay["now"]):
        assert search["budget_tokens"] == receipt["budget_tokens"]
        listed = relevant(receipt["candidates"])  # of those without room the best
        assert relevant(search["chunks"])[: len(listed)] == listed
        assert {one["id"]: one["tokens"] for one in search["chunks"] if one["verdict"] == "injected"} == {
            one["id"]: one["tokens"] for one in injected
        }, "in the model's tokens"
        assert abs(search["tokens"] - receipt["block_tokens"]) <= 1
    assert (replay["gained"], replay["lost"]) == ([], [])
    assert sorted(replay["kept"]) == sorted(receipt["shown"])
