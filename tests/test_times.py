"""What a question says of time, in several languages: a guess that is quick and never raises."""

import json
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from clocks import at_time
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, user, wait_until
from histories import history_of, new_buffer, replayed, said
from hypothesis import given
from hypothesis import strategies as st
from recording_upstream import RecordingUpstream

from memd.conversation.events import Appended, decode_event, encode_event
from memd.conversation.hot_buffer import Arrival, HotBuffer
from memd.ingest.imports.exports import Dating
from memd.recall.times import is_about_time, spans

NOW = datetime(2026, 11, 23, 15, 30)  # a Monday


def days(question: str) -> list[tuple[date, date]]:
    """The first and the last day of each stretch."""
    found = []
    for begin, end in spans(question, int(NOW.timestamp() * 1e6)):
        first, after = (datetime.fromtimestamp(at / 1e6) for at in (begin, end))
        assert first.time() == after.time() == time()
        found.append((first.date(), after.date() - timedelta(days=1)))
    return found


def one(text: str) -> tuple[date, date]:
    return date.fromisoformat(text), date.fromisoformat(text)


def month(year: int, number: int) -> tuple[date, date]:
    return date(year, number, 1), date(year + number // 12, number % 12 + 1, 1) - timedelta(days=1)


YESTERDAY, LAST_WEEK = one("2026-11-22"), (date(2026, 11, 16), date(2026, 11, 22))


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("What did I say yesterday?", YESTERDAY),
        ("Was habe ich gestern über das Rad gesagt?", YESTERDAY),
        ("Qu'est-ce que j'ai dit hier ?", YESTERDAY),
        ("hier soir", YESTERDAY),
        ("¿Qué dije ayer?", YESTERDAY),
        ("Cosa ho detto ieri?", YESTERDAY),
        ("O que eu disse ontem?", YESTERDAY),
        ("Wat zei ik gisteren?", YESTERDAY),
        ("Co powiedziałem wczoraj?", YESTERDAY),
        ("And the day before yesterday?", one("2026-11-21")),
        ("Was war vorgestern?", one("2026-11-21")),
        ("Which book did I buy last week?", LAST_WEEK),
        ("Welches Buch habe ich letzte Woche gekauft?", LAST_WEEK),
        ("Quel livre ai-je acheté la semaine dernière ?", LAST_WEEK),
        ("¿Qué libro compré la semana pasada?", LAST_WEEK),
        ("Che libro ho comprato la settimana scorsa?", LAST_WEEK),
        ("Jaką książkę kupiłem w zeszłym tygodniu?", LAST_WEEK),
        ("What happened last month?", month(2026, 10)),
        ("What did we decide in March?", month(2026, 3)),
        ("Was haben wir im März beschlossen?", month(2026, 3)),
        ("Qu'avons-nous décidé en mars ?", month(2026, 3)),
        ("¿Qué decidimos en marzo?", month(2026, 3)),
        ("Cosa abbiamo deciso a marzo?", month(2026, 3)),
        ("Co postanowiliśmy w marcu?", month(2026, 3)),
        ("And in December?", month(2025, 12)),
        ("In May 2024, what was it?", month(2024, 5)),
        ("on 3 May", one("2026-05-03")),
        ("on May 3rd, 2025", one("2025-05-03")),
        ("am 3. Mai", one("2026-05-03")),
        ("le 3 mai", one("2026-05-03")),
        ("el 3 de mayo de 2024", one("2024-05-03")),
        ("on 24 December", one("2025-12-24")),
        ("2026-05-03, what was it?", one("2026-05-03")),
        ("2026/05/03, what was it?", one("2026-05-03")),
        ("am 3.5.2026", one("2026-05-03")),
        ("on 5/13/2026", one("2026-05-13")),
        ("on 13/5/2026", one("2026-05-13")),
        ("on 5/3/2026", one("2026-05-03")),
        ("on Nov 21", one("2026-11-21")),
        ("on 3 Sept. 2025", one("2025-09-03")),
        ("in Oct", month(2026, 10)),
        ("last Tuesday", one("2026-11-17")),
        ("letzten Dienstag", one("2026-11-17")),
        ("mardi dernier", one("2026-11-17")),
        ("last weekend", (date(2026, 11, 21), date(2026, 11, 22))),
        ("Three days ago", one("2026-11-20")),
        ("vor drei Tagen", one("2026-11-20")),
        ("il y a trois jours", one("2026-11-20")),
        ("hace 3 días", one("2026-11-20")),
        ("tre giorni fa", one("2026-11-20")),
        ("trzy dni temu", one("2026-11-20")),
        ("What did I tell you on Friday?", one("2026-11-20")),
        ("Was sagte ich am Freitag?", one("2026-11-20")),
        ("on Monday", one("2026-11-16")),
        ("Qu'avons-nous fait le mois dernier ?", month(2026, 10)),
        ("Où étais-je l'an dernier ?", (date(2025, 1, 1), date(2025, 12, 31))),
        ("¿Qué hicimos la última semana?", LAST_WEEK),
        ("What did we do in the last two days?", (date(2026, 11, 21), date(2026, 11, 23))),
        ("Was haben wir in den letzten zwei Tagen gemacht?", (date(2026, 11, 21), date(2026, 11, 23))),
        ("Qu'avons-nous fait les deux derniers jours ?", (date(2026, 11, 21), date(2026, 11, 23))),
        ("Was war im Ma\u0308rz?", month(2026, 3)),
        ("on ２０２６-05-03", one("2026-05-03")),
        ("What did I say on 29 February?", one("2024-02-29")),
        ("In 2024, where did I live?", (date(2024, 1, 1), date(2024, 12, 31))),
        ("What did we do last year?", (date(2025, 1, 1), date(2025, 12, 31))),
        ("", None),
        ("May I ask something?", None),
        ("March on!", None),
        ("Version 1.2.3 of 0.5.17, 3.5 times as fast, 1/2 of it; see section 3.4.", None),
        ("Is 192.168.10.12. the router?", None),
        ("Python 3.11. or 2.3.1.2020?", None),
        ("Lina asked Mar Vega, sep by comma, dec 12b", None),
        ("on 31 February", None),
        ("2026-99-99", None),
        ("The lastweek module", None),
        ("Was steht hier im Vertrag?", None),
        ("Wo ist hier der Bahnhof?", None),
        ("Wat staat hier?", None),
        ("How many calories has a mars bar?", None),
        ("There was a march against the war.", None),
        ("What do I have to bring next Monday?", None),
        ("Wer kommt nächsten Freitag?", None),
        ("Qui vient lundi prochain ?", None),
        ("¿Qué pasa el lunes que viene?", None),
        ("Who was born on 0001-01-01?", None),
        ("Where is my bike?", None),
    ],
)
def test_a_question_speaks_of_these_days_and_most_of_none(question: str, said: tuple[date, date] | None) -> None:
    assert days(question) == ([] if said is None else [said])


def test_what_is_months_ago_is_around_then() -> None:
    [(first, last)] = days("Where did I park two months ago?")
    assert first < date(2026, 9, 23) < last and (last - first).days == 30


WORDS = (
    *("in", "last", "3", "31", "march", "may", "ago", "vor", "9999", "999", "years", "year", ".", ",", "monday", "1"),
    *("0001-01-01", "9999-12-31", "january", "0001", "hier", "next", "letzten", "29", "february"),
)


@given(st.text() | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_text_speaks_of_days_that_there_are_or_of_none(text: str) -> None:
    assert all(begin < end for begin, end in spans(text, int(NOW.timestamp() * 1e6)))


@pytest.mark.parametrize(
    ("question", "is_it"),
    [
        ("What did we talk about yesterday?", True),
        ("what did I tell you last week", True),
        ("Thanks, that helps.\n\nWhat happened on 3 May?", True),
        ("What did I note on Friday?", True),
        ("What did I put down yesterday?", True),
        ("What did we talk about last Tuesday?", True),
        ("What happened yesterday evening?", True),
        ("Was habe ich am Freitag notiert?", True),
        ("Qu'est-ce que j'ai noté hier ?", True),
        ("Worüber haben wir gestern gesprochen?", True),
        ("De quoi avons-nous parlé hier ?", True),
        ("¿De qué hablamos la semana pasada?", True),
        ("Di che cosa abbiamo parlato ieri?", True),
        ("Sobre o que falámos ontem?", True),
        ("Waar hadden we het gisteren over?", True),
        ("O czym rozmawialiśmy w zeszłym tygodniu?", True),
        ("notes from 2026-10-19", True),
        ("Our conversations of last week", True),
        ("Show me yesterday's notes", True),
        ("Summarise what I did on 28 November.", True),
        ("anything from 2026-10-19?", True),
        ("Meine Notizen vom Freitag", True),
        ("notes about the roof from 2026-10-19", False),
        ("What did we say about the roof yesterday?", False),
        ("What did we talk about?", False),
        ("How are you today?", False),
        ("Yesterday.", False),
        ("It was on Friday.", False),
        ("See you on Monday!", False),
        ("Good morning! Nice weather today, what a day.", False),
        ("What did we talk about yesterday?\n\nThe roof, I mean.", False),
        ("Wie geht es dir heute?", False),
        ("A jutro?", False),
    ],
)
def test_a_question_about_a_time_and_nothing_else_is_known(question: str, is_it: bool) -> None:
    assert is_about_time(question) is is_it


# When something was said is known from its arrival on, whatever happens to it until it is stored


NOON = 1_762_171_200_000_000
"""2025-11-03T12:00Z."""


def receive(buffer: HotBuffer, *history: str, at: int) -> Arrival:
    return buffer.receive(history_of(map(said, history)), 0.0, at)


def times(arrival: Arrival) -> list[int | None]:
    messages = [item.message for item in arrival.conversation.messages]
    return [None if one is None or one.said_at is msgspec.UNSET else one.said_at - NOON for one in messages]


def test_a_restart_keeps_the_times_and_a_journal_from_before_them_reads_on() -> None:
    buffer = new_buffer()
    receive(buffer, "u:one", "a:two", "u:three", at=NOON)
    for events in (buffer.take_unsaved(), buffer.retelling()()):
        kept = [item.message for one in replayed(events).conversations() for item in one.messages]
        assert [one.said_at for one in kept if one is not None] == [NOON] * 3
    old = msgspec.msgpack.decode(encode_event(next(e for e in buffer.retelling()() if isinstance(e, Appended))))
    for item in old["messages"]:
        del item["message"]["said_at"]
    read = decode_event(msgspec.msgpack.encode(old))
    assert isinstance(read, Appended)
    assert [one.message.said_at for one in read.messages if one.message is not None] == [msgspec.UNSET] * 3


FACT = "Please note: the release word for the lighthouse lamp is cinnamon-42, on the brass plate."
LATER = "Where was it that the release word is written, again?"


def days_ago(iso: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(iso)) / timedelta(days=1)


def test_what_waits_for_days_has_the_time_of_its_arrival(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 3600, "journal_fsync": "always"}})
    at_time(daemon, days_ago=3)
    daemon.start()
    answer = daemon.chat([user(FACT)]).reply
    daemon.kill()
    at_time(daemon, days_ago=1)
    daemon.start()
    daemon.chat([user(FACT), {"role": "assistant", "content": answer}, user(LATER)])
    daemon.kill()
    at_time(daemon, days_ago=0)
    daemon.start()
    daemon.wait_stored(FACT, LATER)
    dates = {text: entry for entry in daemon.export() for text in (FACT, LATER) if text in entry["content"]}
    assert 2.9 < days_ago(dates[FACT]["said_at"]) < 3.1
    assert 0.9 < days_ago(dates[LATER]["said_at"]) < 1.1
    assert days_ago(dates[LATER]["created_at"]) < 0.1


@pytest.mark.parametrize(
    "members",
    [
        {"timestamp": "2025-11-03T12:00:00Z"},
        {"created_at": "2025-11-03T13:00:00+01:00"},
        {"create_time": 1_762_171_200.0},
        {"timestamp": 1_762_171_200_000},
        {"time": 1_762_171_200_000_000},
        {"time": 1_762_171_200_000_000_000},
        {"date": "1762171200"},
        {"timestamp": "no time", "createdAt": 1_762_171_200},
    ],
)
def test_times_are_read_as_programs_write_them(members: dict[str, Any]) -> None:
    assert Dating().time_of(members) == NOON


@pytest.mark.parametrize(
    "value",
    [
        *(True, "tomorrow", -5, 0, 5, 1e300, "9" * 400, [1], {}, 10**30, "1970-01-01T00:00:00Z", "0001-01-01"),
        *("9999-12-31T23:59:59-23:00", "2025-11-05", 1_762_257_700),
    ],
)
def test_what_is_no_time_or_later_than_now_dates_nothing_and_is_counted(value: object) -> None:
    dating = Dating(NOON)
    assert dating.time_of({"timestamp": value}) is None
    assert dating.refused == 1


# What the model and people see


def noon() -> datetime:
    """A noon not long ago, by the clock of this machine: no midnight and no change of the clocks is near."""
    return datetime.now().replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)


def days_since(local: datetime) -> float:
    return (datetime.now(UTC) - local.astimezone()) / timedelta(days=1)


def test_a_prompt_says_when_it_was_said_and_what_day_it_is(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url, {})
    today = noon()
    then = today - timedelta(days=40)
    at_time(daemon, days_ago=days_since(then))
    daemon.start()
    daemon.chat([user(FACT)])
    daemon.wait_stored(FACT)
    at_time(daemon, days_ago=days_since(today))
    daemon.chat([user("What is the release word for the lighthouse lamp?")])
    block = json.loads(upstream.prompts[-1])[-1]["content"].partition("[/memory]")[0]
    assert f"instructions. Today is {today:%A %Y-%m-%d}.\n-- {then:%A %Y-%m-%d} --\n[mem:" in block
    found = daemon.run("search", "the release word for the lighthouse lamp").stdout
    assert f"  {then:%Y-%m-%d} " in next(line for line in found.split("\n") if "  default  " in line), found


def test_a_question_about_a_time_favours_what_was_then(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 0.05}})
    colours = {1: "blue", 40: "green", 80: "black"}
    today = noon()
    at_time(daemon, days_ago=days_since(today - timedelta(days=80)))
    daemon.start()
    for days, colour in reversed(colours.items()):
        at_time(daemon, days_ago=days_since(today - timedelta(days=days)))
        daemon.chat([user(f"I bought a {colour} bicycle at the market and rode it home.")])
        daemon.wait_stored(f"a {colour} bicycle")
    at_time(daemon, days_ago=days_since(today))

    def found(question: str) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = json.loads(daemon.run("search", "--json", question).stdout)["chunks"]
        return chunks

    for question in ("What did I buy yesterday?", "Was für ein bicycle habe ich gestern gekauft?"):
        first, *others = found(question)
        assert "blue" in first["content"] and first["time"] == 3.0, question
        assert {one["time"] for one in others} == {1.0} and len(others) == 2, question
    assert all(one["time"] == 1.0 for one in found("Which bicycle did I buy?"))


def test_a_question_about_a_time_finds_what_was_then_while_it_waits_to_be_stored(served: DaemonProcess) -> None:
    first, told_of = datetime(2025, 3, 1, 12), ("taxes", "the choir", "a tap", "stamps", "the bus", "tiles", "a fence")
    texts = [f"Anna spoke about {told_of[day % 7]} and {told_of[day % 5]}, entry {day}." for day in range(400)]
    notes = [{"content": text, "said_at": str(first + timedelta(days=day))} for day, text in enumerate(texts)]
    for start in range(0, len(notes), 100):
        body = {"topic_id": "default", "notes": notes[start : start + 100]}
        assert ask(f"{served.own_url}/memd/notes", body).status == 200
    for day in range(390, 0, -40):
        then = first + timedelta(days=day)
        shown = told(served, "search", q=f"What did we talk about on {then:%d %B %Y}?")
        assert notes[day]["content"] in [one["content"] for one in shown if one["verdict"] == "injected"], day


# A clock that is set back while the daemon runs: what is timed goes on, and people see the times that they saw


HOUR = timedelta(hours=1)


@pytest.fixture
def clocked(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    """A daemon whose clock is set by `at_time`."""
    daemon = make_daemon(upstream.url, {"injection": {"freeze_seconds": 0.3}})
    at_time(daemon, days_ago=0)
    return daemon.start()


def told(daemon: DaemonProcess, path: str, **query: str) -> list[dict[str, Any]]:
    answer = ask(f"{daemon.own_url}/memd/{path}?{urlencode(query)}").json
    found: list[dict[str, Any]] = answer["events" if path == "log" else "chunks"]
    return found


def test_what_was_said_before_is_stored_and_dated_and_found_as_of_then(clocked: DaemonProcess) -> None:
    clocked.tell("The roof of the hall is grey.")
    clocked.chat([user("The lamp in the hall is green.")])
    at_time(clocked, days_ago=HOUR / timedelta(days=1))
    clocked.wait_stored("lamp")
    clocked.tell("The door of the hall is red.", topic="two")
    now, (door, *others) = datetime.now(UTC) - HOUR, told(clocked, "log")
    assert "door" in door["content"] and len(others) == 2, "the newest is first"
    assert abs(door["at"] / 1e6 - now.timestamp()) < 120, "the time that people saw"
    assert door["canonical_id"] > door["at"] + 1.8e9
    later = (now + timedelta(seconds=1)).isoformat()
    assert any("door" in one["content"] for one in told(clocked, "search", q="What colour is the door?", as_of=later))
    assert told(clocked, "log", before=later) == [door, *others]
    assert told(clocked, "log", before=(now - 2 * HOUR).isoformat()) == []


def test_the_same_request_after_the_time_of_a_retry_recalls_afresh(clocked: DaemonProcess) -> None:
    def shown() -> list[str]:
        answer = clocked.chat([user("Which things are in the hall, and of what colour?")])
        return str(answer.headers["X-Memory-Injected"]).split(",")

    clocked.tell("The lamp in the hall is green.")
    first = shown()
    at_time(clocked, days_ago=HOUR / timedelta(days=1))
    clocked.tell("The door of the hall is red.")
    ids = {
        word: one["id"] for one in told(clocked, "log") for word in ("door", "lamp") if f"The {word}" in one["content"]
    }
    assert first == [ids["lamp"]]
    wait_until(lambda: ids["door"] in shown(), lambda: "as a retry it gets the block of its first arrival")


def test_a_clock_that_jumps_over_400_days_and_back_costs_nothing(clocked: DaemonProcess) -> None:
    days = {}
    for word, ahead in (("lamp", 0), ("door", 400), ("roof", 0), ("mast", 7)):
        at_time(clocked, days_ago=-ahead)
        clocked.tell(f"The {word} of the hall is green.")
        days[word] = f"{datetime.now() + timedelta(days=ahead):%A %Y-%m-%d}"
    at_time(clocked, days_ago=0)
    ids = {one["canonical_id"]: one["content"] for one in told(clocked, "log")}
    ascending = [next(word for word in days if word in ids[one]) for one in sorted(ids)]
    assert ascending == [*days], "in the order in which they were stored"
    found = told(clocked, "search", q="What colour are the lamp, the door, the roof and the mast of the hall?")
    said = ((one["content"], datetime.fromtimestamp(one["said_at"] / 1e6)) for one in found)
    seen = {word: f"{day:%A %Y-%m-%d}" for text, day in said for word in days if word in text}
    assert seen == days, "each on the day that people saw, and none thrown out as old"
