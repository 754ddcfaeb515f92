"""What a question says of time, in several languages: a guess that is quick and never raises."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    ],
)
def test_a_question_speaks_of_these_days(question: str, said: tuple[date, date]) -> None:
    assert days(question) == [said]


def test_what_is_months_ago_is_around_then() -> None:
    [(first, last)] = days("Where did I park two months ago?")
    assert first < date(2026, 9, 23) < last and (last - first).days == 30


@pytest.mark.parametrize(
    "question",
    [
        "",
        "May I ask something?",
        "March on!",
        "on 31 February",
        "2026-99-99",
        "The lastweek module",
        "Was steht hier im Vertrag?",
        "Wo ist hier der Bahnhof?",
        "Wat staat hier?",
        "How many calories has a mars bar?",
        "There was a march against the war.",
        "What do I have to bring next Monday?",
        "Wer kommt nächsten Freitag?",
        "Qui vient lundi prochain ?",
        "¿Qué pasa el lunes que viene?",
        "Who was born on 0001-01-01?",
        "Where is my bike?",
    ],
)
def test_most_questions_speak_of_no_day(question: str) -> None:
    assert days(question) == []


@given(
    st.text()
    | st.lists(
        st.sampled_from(
            [
                "in",
                "last",
                "3",
                "31",
                "march",
                "may",
                "ago",
                "vor",
                "9999",
                "999",
                "years",
                "year",
                ".",
                ",",
                "monday",
                "0001-01-01",
                "9999-12-31",
                "1",
                "january",
                "0001",
                "hier",
                "next",
                "letzten",
                "29",
                "february",
            ]
        )
    ).map(" ".join)
)
def test_any_text_speaks_of_days_that_there_are_or_of_none(text: str) -> None:
    assert all(begin < end for begin, end in spans(text, int(NOW.timestamp() * 1e6)))


@pytest.mark.parametrize(
    "question",
    [
        "What did we talk about yesterday?",
        "what did I tell you last week",
        "Thanks, that helps.\n\nWhat happened on 3 May?",
        "What did I note on Friday?",
        "What did I put down yesterday?",
        "Was habe ich am Freitag notiert?",
        "Qu'est-ce que j'ai noté hier ?",
        "Worüber haben wir gestern gesprochen?",
        "De quoi avons-nous parlé hier ?",
        "¿De qué hablamos la semana pasada?",
        "Di che cosa abbiamo parlato ieri?",
        "Sobre o que falámos ontem?",
        "Waar hadden we het gisteren over?",
        "O czym rozmawialiśmy w zeszłym tygodniu?",
    ],
)
def test_a_question_about_a_time_and_nothing_else_is_known(question: str) -> None:
    assert is_about_time(question)


@pytest.mark.parametrize(
    "question",
    [
        "What did we say about the roof yesterday?",
        "What did we talk about?",
        "How are you today?",
        "Yesterday.",
        "It was on Friday.",
        "See you on Monday!",
        "Good morning! Nice weather today, what a day.",
        "What did we talk about yesterday?\n\nThe roof, I mean.",
        "Wie geht es dir heute?",
        "A jutro?",
    ],
)
def test_what_names_something_else_or_asks_for_nothing_is_not_taken_for_one(question: str) -> None:
    assert not is_about_time(question)
