"""The times that a question speaks of ("yesterday", "in March", "vor zwei Wochen"), as stretches of the past.

Rule: pure but for the time zone. A guess, used as a boost and never as a filter: an expression that is missed costs the
boost, one that is misread a little order. English, German, French, Spanish, Italian, Portuguese, Dutch and Polish. One
pass of one expression over the end of the question takes 0.1 ms; dateparser's search takes 3 ms where it is told the
languages and 91 ms where it is not (measured), and takes "we" for a Wednesday.
"""

from __future__ import annotations

import re
import unicodedata
from calendar import isleap
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from itertools import islice
from typing import TypeVar

from memd.recall.days import day_of
from memd.store.lexical.analyzer import language_of_text

CHARACTERS_MAX = 250
"""People ask at the end of what they write."""
SPANS_MAX = 4
_YEARS_MAX = 100
Key = TypeVar("Key", int, str)
Span = tuple[int, int]
"""Microseconds since the epoch: from when on, and before when."""

_DAYS_AGO = {
    0: "today|heute|aujourd'hui|hoy|oggi|hoje|vandaag|dzisiaj|dziś|this morning|heute morgen|ce matin|esta mañana",
    1: "yesterday|last night|gestern|hier soir|hier matin|hier|ayer|anoche|ieri|ontem|gisteren|wczoraj",
    2: "day before yesterday|vorgestern|avant-hier|anteayer|l'altro ieri|anteontem|eergisteren|przedwczoraj",
}
_HERE = "hier"
"""Yesterday in French, and here in German and Dutch."""
_WEEKDAYS = {
    0: "monday|montag|lundi|lunes|lunedì|segunda-feira|maandag|poniedziałek",
    1: "tuesday|dienstag|mardi|martes|martedì|terça-feira|dinsdag|wtorek",
    2: "wednesday|mittwoch|mercredi|miércoles|mercoledì|quarta-feira|woensdag|środa|środę",
    3: "thursday|donnerstag|jeudi|jueves|giovedì|quinta-feira|donderdag|czwartek",
    4: "friday|freitag|vendredi|viernes|venerdì|sexta-feira|vrijdag|piątek",
    5: "saturday|samstag|samedi|sábado|sabato|zaterdag|sobota|sobotę",
    6: "sunday|sonntag|dimanche|domingo|domenica|zondag|niedziela|niedzielę",
}
_MONTHS = {
    0: "january|januar|janvier|enero|gennaio|janeiro|januari|styczeń|styczniu|stycznia",
    1: "february|februar|février|febrero|febbraio|fevereiro|februari|luty|lutym|lutego",
    2: "march|märz|mars|marzo|março|maart|marzec|marcu|marca",
    3: "april|avril|abril|aprile|kwiecień|kwietniu|kwietnia",
    4: "may|mai|mayo|maggio|maio|mei|maj|maju|maja",
    5: "june|juni|juin|junio|giugno|junho|czerwiec|czerwcu|czerwca",
    6: "july|juli|juillet|julio|luglio|julho|lipiec|lipcu|lipca",
    7: "august|août|agosto|augustus|sierpień|sierpniu|sierpnia",
    8: "september|septembre|septiembre|settembre|setembro|wrzesień|wrześniu|września",
    9: "october|oktober|octobre|octubre|ottobre|outubro|październik|październiku|października",
    10: "november|novembre|noviembre|novembro|listopad|listopadzie|listopada",
    11: "december|dezember|décembre|diciembre|dicembre|dezembro|grudzień|grudniu|grudnia",
}
_UNITS = {
    "day": "days?|tag(?:e|en)?|jours?|días?|giorn[oi]|dias?|dag(?:en)?|dzień|dni",
    "week": "weeks?|wochen?|semaines?|semanas?|settiman[ae]|weken|tydzień|tygodni(?:e|u)?",
    "month": "months?|monat(?:e|en|s)?|mois|mes(?:es)?|mes[ei]|meses|mês|maand(?:en)?|miesi(?:ąc[eau]?|ęcy)",
    "year": "years?|jahr(?:e|en|es)?|ans?|années?|años?|ann[oi]|anos?|jaar|jaren|rok(?:u)?|lata?",
}
_NUMBERS = {
    1: "a|an|one|einem|einer|ein|eine|un|une|una|um|uma|een|jeden",
    2: "two|a couple of|zwei|deux|dos|due|dois|duas|twee|dwa|dwie",
    3: "three|a few|drei|trois|tres|tre|três|drie|trzy",
    4: "four|vier|quatre|cuatro|quattro|quatro|cztery",
    5: "five|fünf|cinq|cinco|cinque|vijf|pięć",
    6: "six|sechs|seis|sei|zes|sześć",
    7: "seven|sieben|sept|siete|sette|sete|zeven|siedem",
    8: "eight|acht|huit|ocho|otto|oito|osiem",
    9: "nine|neun|neuf|nueve|nove|negen|dziewięć",
    10: "ten|zehn|dix|diez|dieci|dez|tien|dziesięć",
}
_LAST = (
    "last|past|previous|letzte[nrsm]?|vergangene[nrsm]?|vorige[nrsm]?|vorig|afgelopen|laatste|zeszł(?:y|ym|ego|ą|ej)"
    "|derni(?:er|ère)s|últim[oa]s?|ultim[aeio]|ostatni(?:m|ch|ego|ej|e|a)?"
)
_LAST_BEHIND = "derni(?:er|ère)|passée?|pasad[oa]|scors[oa]|passad[oa]|temu"
_THIS = "this|diese[nrsm]?|cette|ce|esta|este|questa|questo|deze|dit|t(?:ym|en|ym)"
_NEXT = (
    "next|coming|nächste[nrsm]?|kommende[nrsm]?|prochaine?|próxim[oa]|prossim[oa]|volgende?|komende?"
    "|następn(?:y|ym|ego|ą|ej)|przyszł(?:y|ym|ego|ą|ej)"
)
_NEXT_BEHIND = "prochaine?|próxim[oa]|prossim[oa]|que v(?:iene|em)"
_AGO_BEHIND = "ago|geleden|fa|temu|atrás"
_AGO_BEFORE = "vor|il y a|hace|há"


def _any(table: Mapping[Key, str]) -> str:
    return "|".join(table.values())


_NUMBER = rf"\d{{1,3}}|{_any(_NUMBERS)}"
_UNIT, _MONTH, _WEEKDAY = _any(_UNITS), _any(_MONTHS), _any(_WEEKDAYS)
_TIMES = re.compile(
    r"(?<!\w)(?:"
    # What is to come is nothing that was said: it is matched so that nothing in it is.
    rf"(?P<coming>(?:{_NEXT})\s(?:{_UNIT}|{_WEEKDAY}|{_MONTH})|(?:{_UNIT}|{_WEEKDAY}|{_MONTH})\s(?:{_NEXT_BEHIND}))"
    r"|(?P<iso>\d{4}-\d\d-\d\d)"
    rf"|(?P<plain>{_any(_DAYS_AGO)})"
    rf"|(?:{_AGO_BEFORE})\s(?P<n1>{_NUMBER})\s(?P<u1>{_UNIT})"
    rf"|(?P<n2>{_NUMBER})\s(?P<u2>{_UNIT})\s(?:{_AGO_BEHIND})"
    rf"|(?:{_LAST})\s(?P<n3>{_NUMBER})\s(?P<u6>{_UNIT})|(?P<n4>{_NUMBER})\s(?:{_LAST})\s(?P<u7>{_UNIT})"
    rf"|(?:{_LAST})\s(?P<u3>{_UNIT})|(?P<u4>{_UNIT})\s(?:{_LAST_BEHIND})|(?:{_THIS})\s(?P<u5>{_UNIT})"
    rf"|(?P<d1>\d{{1,2}})(?:st|nd|rd|th|\.|er|º)?\s(?:of\s|de\s)?(?P<m1>{_MONTH})(?:,?\s(?:de\s)?(?P<y1>\d{{4}}))?"
    rf"|(?P<m2>{_MONTH})\s(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?(?!\d)(?:,?\s(?P<y2>\d{{4}}))?"
    rf"|(?:in|im|en|em|a(?=\s\w+[oe]\b)|w|since|during|{_LAST})\s(?P<m3>{_MONTH})(?:\s(?:de\s|of\s)?(?P<y3>\d{{4}}))?"
    rf"|(?P<m4>{_MONTH})\s(?:de\s)?(?P<y4>\d{{4}})"
    rf"|(?P<weekday>{_WEEKDAY})"
    r"|(?:in|en|im jahr|em|nel|w)\s(?P<year>(?:19|20)\d\d)"
    r")(?!\w)"
)
_WORD = re.compile(r"[^\W\d_]+")
_WHAT = frozenset(
    _WORD.findall("what which was worüber wovon worum quoi que qu qué che cosa wat waar waarover waarvan co czym")
)
_TALK = _WHAT | frozenset(
    _WORD.findall("""
    did do have has had been were we i you me us our the a of on in at to about that say said tell told talk talked
    talking speak spoke speaking discuss discussed mention mentioned ask asked chat chatted happen happened note
    noted notes write wrote written put down decide decided agree agreed work worked working all everything else
    again haben habe hast hatten wir ich du mir dir uns über von an am im ging es denn alles gesprochen geredet
    gesagt erzählt besprochen diskutiert notiert aufgeschrieben geschrieben erwähnt gefragt unterhalten passiert
    gemacht gearbeitet beschlossen sagte sprachen de d avons ai as nous je j tu m le la en est ce s il parlé dit
    discuté raconté mentionné demandé passé fait noté écrit hemos he anoté anotado apunté apuntado escribí escrito
    anotamos hablamos hablé hablado dije dijimos dijiste dicho conté mencioné pregunté pasó hicimos hice sobre lo el
    todo di abbiamo ho hai parlato detto discusso raccontato menzionato chiesto successo fatto annotato scritto è mi
    tutto o os falámos falamos falei disse dissemos contei mencionei perguntei aconteceu fizemos anotei escrevi em
    na no tudo eu nós hadden hebben heb ik jij op er is het gehad over gesproken gezegd verteld besproken genoemd
    gevraagd gebeurd genoteerd opgeschreven geschreven zei zeiden praatten spraken w się my ja rozmawialiśmy
    rozmawiałyśmy mówiliśmy mówiłem mówiłam powiedziałem powiedziałam powiedzieliśmy pisałem pisałam zapisałem
    zapisałam zanotowałem zanotowałam pytałem pytałam omawialiśmy robiliśmy działo wydarzyło było wszystko
    """)
)
"""The words of questions about what was said at a time, whatever it was."""


def spans(question: str, now_us: int) -> tuple[Span, ...]:
    """Return the stretches of time that a question speaks of, at most `SPANS_MAX`; `now_us`: when it is asked."""
    today = day_of(now_us)
    found = (_span(match, today) for match in islice(_TIMES.finditer(_end(question)), SPANS_MAX))
    return tuple(span for span in dict.fromkeys(found) if span is not None)


def is_about_time(question: str) -> bool:
    """Whether a question asks for nothing but a time ("What did we talk about yesterday?"): no words can match."""
    asked = _end(question).rsplit("\n", 1)[-1]
    without, count = _TIMES.subn(" ", asked)
    rest = set(_WORD.findall(without))
    return count > 0 and rest <= _TALK and not rest.isdisjoint(_WHAT)


def _end(question: str) -> str:
    return unicodedata.normalize("NFKC", question[-CHARACTERS_MAX:]).casefold().replace("’", "'")


def _span(match: re.Match[str], today: date) -> Span | None:
    """The stretch that an expression means; None if it is to come, or there are no such days."""
    if match["coming"] or (match["plain"] == _HERE and language_of_text(match.string) != "fr"):
        return None
    try:
        begin, end = (int(datetime.combine(day, time()).timestamp()) * 1_000_000 for day in _days(match, today))
    except (ValueError, OverflowError):  # 31 February; before the year 1, or in it
        return None
    return begin, end


def _days(match: re.Match[str], today: date) -> tuple[date, date]:
    """The first day that an expression means, and the day after the last.

    Raises:
        ValueError, OverflowError: there are no such days.
    """
    kind = match.groupdict()
    if kind["iso"]:
        return _from(date.fromisoformat(kind["iso"]))
    if kind["plain"]:
        return _from(today - timedelta(days=_place(_DAYS_AGO, kind["plain"])))
    if kind["weekday"]:
        back = (today.weekday() - _place(_WEEKDAYS, kind["weekday"])) % 7 or 7
        return _from(today - timedelta(days=back))
    if kind["year"]:
        return date(int(kind["year"]), 1, 1), date(int(kind["year"]) + 1, 1, 1)
    for n, u in (("n1", "u1"), ("n2", "u2")):
        if kind[u]:
            return _ago(_count(kind[n]), _place(_UNITS, kind[u]), today)
    for n, u in (("n3", "u6"), ("n4", "u7")):
        if kind[u]:
            return _ago(_count(kind[n]), _place(_UNITS, kind[u]), today)[0], today + timedelta(days=1)
    if kind["u3"] or kind["u4"]:
        return _calendar(_place(_UNITS, kind["u3"] or kind["u4"]), today, back=1)
    if kind["u5"]:
        return _calendar(_place(_UNITS, kind["u5"]), today, back=0)
    return _dated(kind, today)


def _dated(kind: dict[str, str | None], today: date) -> tuple[date, date]:
    number = next(n for n in "1234" if kind[f"m{n}"])
    month, year, day = _place(_MONTHS, str(kind[f"m{number}"])) + 1, kind[f"y{number}"], kind.get(f"d{number}")
    if day is None:
        begun = today.year if month <= today.month else today.year - 1
        return _month(int(year or begun), month)
    this = int(year or today.year)
    if year is None and (month, int(day)) > (today.month, today.day):
        this -= 1
    while year is None and (month, int(day)) == (2, 29) and not isleap(this):
        this -= 1
    return _from(date(this, month, int(day)))


def _ago(number: int, unit: str, today: date) -> tuple[date, date]:
    """So many units back, and around it: the longer ago, the less exactly people mean it."""
    if unit == "day":
        day, slack = today - timedelta(days=number), number // 7
    elif unit == "week":
        day, slack = today - timedelta(weeks=number), 3 + number // 2
    else:
        months = number if unit == "month" else 12 * min(number, _YEARS_MAX)
        first, _ = _calendar("month", today, back=months)
        day, slack = first + timedelta(days=min(today.day, 28) - 1), 15 if unit == "month" else 90
    return day - timedelta(days=slack), day + timedelta(days=slack + 1)


def _calendar(unit: str, today: date, *, back: int) -> tuple[date, date]:
    """The day, week, month or year of the calendar that is `back` before this one."""
    if unit == "day":
        return _from(today - timedelta(days=back))
    if unit == "week":
        monday = today - timedelta(days=today.weekday() + 7 * back)
        return monday, monday + timedelta(days=7)
    if unit == "year":
        return date(today.year - back, 1, 1), date(today.year - back + 1, 1, 1)
    months = 12 * today.year + today.month - 1 - back
    return _month(months // 12, months % 12 + 1)


def _month(year: int, month: int) -> tuple[date, date]:
    first, after = (date(year + (month + more - 1) // 12, (month + more - 1) % 12 + 1, 1) for more in (0, 1))
    return first, after


def _from(day: date) -> tuple[date, date]:
    return day, day + timedelta(days=1)


def _count(number: str) -> int:
    return int(number) if number.isdecimal() else _place(_NUMBERS, number)


def _place(table: dict[Key, str], word: str) -> Key:
    return next(key for key, words in table.items() if re.fullmatch(words, word))
