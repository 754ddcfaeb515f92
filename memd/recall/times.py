"""Finds the times that a question names ("yesterday", "in March", "vor zwei Wochen"), as spans in the past.

Rule: pure except for the time zone. A guess, used as a boost and never as a filter: a missed expression costs the
boost, a misread one a little order. The words of eight languages are data (assets/times.toml). One pass of one
expression over the end of the question takes 0.1 ms. dateparser's search takes 3 ms with given languages and 91 ms
without (measured), and reads "we" as Wednesday.
"""

from __future__ import annotations

import re
import unicodedata
from calendar import isleap
from collections.abc import Iterable, Sequence
from datetime import date, datetime, time, timedelta
from itertools import islice

from memd.assets import words_of
from memd.caching import late_pattern
from memd.store.lexical.analyzer import language_of_text
from memd.wording import day_of

CHARACTERS_MAX = 250
"""Length of the end of a message that is searched; people ask there."""
SPANS_MAX = 4
_YEARS_MAX = 100
Span = tuple[int, int]
"""Begin and end (exclusive), in microseconds since the epoch."""

_W = words_of("times")


def _any(words: Iterable[str]) -> str:
    return "|".join(words)


_UNITS: dict[str, str] = _W["units"]
_NUMBER = rf"\d{{1,3}}|{_any(_W['numbers'])}"
_UNIT, _MONTH, _WEEKDAY = _any(_UNITS.values()), _any(_W["months"]), _any(_W["weekdays"])
_NEXT, _LAST, _OF, _NTH = _W["next"], _W["last"], rf"(?:(?:{_W['of']})\s)?", rf"(?:{_W['ordinal']})?"
_TIMES = late_pattern(
    r"(?<!\w)(?:"
    # Future times are matched only so that no part of them matches as a past one.
    rf"(?P<coming>(?:{_NEXT})\s(?:{_UNIT}|{_WEEKDAY}|{_MONTH})|(?:{_UNIT}|{_WEEKDAY}|{_MONTH})\s(?:{_W['next_behind']}))"
    r"|(?P<iso>\d{4}[-/]\d\d[-/]\d\d)"
    r"|(?<!\d[./])(?P<one>\d{1,2})(?P<sign>[./])(?P<two>\d{1,2})(?P=sign)(?P<y5>(?:19|20)\d\d)"
    rf"|(?P<plain>{_any(_W['days_ago'])})"
    rf"|(?:{_W['ago_before']})\s(?P<n1>{_NUMBER})\s(?P<u1>{_UNIT})"
    rf"|(?P<n2>{_NUMBER})\s(?P<u2>{_UNIT})\s(?:{_W['ago_behind']})"
    rf"|(?:{_LAST})\s(?P<n3>{_NUMBER})\s(?P<u6>{_UNIT})|(?P<n4>{_NUMBER})\s(?:{_LAST})\s(?P<u7>{_UNIT})"
    rf"|(?:{_LAST})\s(?P<u3>{_UNIT})|(?P<u4>{_UNIT})\s(?:{_W['last_behind']})|(?:{_W['this']})\s(?P<u5>{_UNIT})"
    rf"|(?P<d1>\d{{1,2}}){_NTH}\s{_OF}(?P<m1>{_MONTH})\b\.?(?:,?\s{_OF}(?P<y1>\d{{4}}))?"
    rf"|(?P<m2>{_MONTH})\b\.?\s(?P<d2>\d{{1,2}}){_NTH}(?!\d)(?:,?\s(?P<y2>\d{{4}}))?"
    rf"|(?:{_W['in_month']}|{_LAST})\s(?P<m3>{_MONTH})(?:\s{_OF}(?P<y3>\d{{4}}))?"
    rf"|(?P<m4>{_MONTH})\s{_OF}(?P<y4>\d{{4}})"
    rf"|(?:(?:{_LAST})\s)?(?P<weekday>{_WEEKDAY})(?:\s(?:{_W['last_behind']}))?"
    rf"|(?:{_W['in_year']})\s(?P<year>(?:19|20)\d\d)"
    r")(?!\w)"
)
_WORD = re.compile(r"[^\W\d_]+")
_WHAT = frozenset(_W["asking"].split())
_TALK = _WHAT | frozenset(_W["talking"].split())
"""The words of questions that ask only for a time, not for a subject."""


def spans(question: str, now_us: int) -> tuple[Span, ...]:
    """Return the spans that a question names, at most `SPANS_MAX`; `now_us`: the time of the question."""
    today = day_of(now_us)
    found = (_span(match, today) for match in islice(_TIMES.finditer(_end(question)), SPANS_MAX))
    return tuple(span for span in dict.fromkeys(found) if span is not None)


def is_about_time(question: str) -> bool:
    """Return True if a question asks only for a time ("What did we talk about yesterday?"): no words can match then."""
    asked = _end(question).rsplit("\n", 1)[-1]
    without, count = _TIMES.subn(" ", asked)
    rest = set(_WORD.findall(without))
    return count > 0 and rest <= _TALK and not rest.isdisjoint(_WHAT)


def _end(question: str) -> str:
    return unicodedata.normalize("NFKC", question[-CHARACTERS_MAX:]).casefold().replace("’", "'")


def _span(match: re.Match[str], today: date) -> Span | None:
    """Return the span of an expression; None if it is in the future, or there are no such days."""
    if match["coming"] or (match["plain"] == _W["here"] and language_of_text(match.string) != _W["here_language"]):
        return None
    try:
        begin, end = (int(datetime.combine(day, time()).timestamp()) * 1_000_000 for day in _days(match, today))
    except (ValueError, OverflowError):  # 31 February; before the year 1, or in it
        return None
    return begin, end


def _days(match: re.Match[str], today: date) -> tuple[date, date]:
    """Return the first day of an expression, and the day after the last. Raises ValueError, OverflowError: there are no
    such days."""
    kind = match.groupdict()
    if kind["iso"]:
        return _from(date.fromisoformat(kind["iso"].replace("/", "-")))
    if kind["one"]:
        return _from(_numeric(kind, language_of_text(match.string)))
    if kind["plain"]:
        return _from(today - timedelta(days=_nth(_W["days_ago"], kind["plain"])))
    if kind["weekday"]:
        back = (today.weekday() - _nth(_W["weekdays"], kind["weekday"])) % 7 or 7
        return _from(today - timedelta(days=back))
    if kind["year"]:
        return date(int(kind["year"]), 1, 1), date(int(kind["year"]) + 1, 1, 1)
    for n, u in (("n1", "u1"), ("n2", "u2")):
        if kind[u]:
            return _ago(_count(kind[n]), _unit(kind[u]), today)
    for n, u in (("n3", "u6"), ("n4", "u7")):
        if kind[u]:
            return _ago(_count(kind[n]), _unit(kind[u]), today)[0], today + timedelta(days=1)
    if kind["u3"] or kind["u4"]:
        return _calendar(_unit(kind["u3"] or kind["u4"]), today, back=1)
    if kind["u5"]:
        return _calendar(_unit(kind["u5"]), today, back=0)
    return _dated(kind, today)


def _numeric(kind: dict[str, str | None], language: str | None) -> date:
    """Return the day of a date in figures. English with slashes: month first if both orders are possible."""
    day, month = int(kind["one"] or 0), int(kind["two"] or 0)
    if kind["sign"] == "/" and (month > 12 or (day <= 12 and language is None)):
        day, month = month, day
    return date(int(kind["y5"] or 0), month, day)


def _dated(kind: dict[str, str | None], today: date) -> tuple[date, date]:
    number = next(n for n in "1234" if kind[f"m{n}"])
    month, year, day = _nth(_W["months"], str(kind[f"m{number}"])) + 1, kind[f"y{number}"], kind.get(f"d{number}")
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
    """Return the span around the day so many units ago; longer ago it is wider, as people are less exact."""
    if unit == "day":
        day, slack = today - timedelta(days=number), number // 7
    elif unit in ("week", "weekend"):
        day, slack = today - timedelta(weeks=number), 3 + number // 2
    else:
        months = number if unit == "month" else 12 * min(number, _YEARS_MAX)
        first, _ = _calendar("month", today, back=months)
        day, slack = first + timedelta(days=min(today.day, 28) - 1), 15 if unit == "month" else 90
    return day - timedelta(days=slack), day + timedelta(days=slack + 1)


def _calendar(unit: str, today: date, *, back: int) -> tuple[date, date]:
    """Return the calendar day, week, weekend, month or year `back` before the present one."""
    if unit == "day":
        return _from(today - timedelta(days=back))
    if unit in ("week", "weekend"):
        monday = today - timedelta(days=today.weekday() + 7 * back)
        return monday + timedelta(days=5 * (unit == "weekend")), monday + timedelta(days=7)
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
    return int(number) if number.isdecimal() else 1 + _nth(_W["numbers"], number)


def _nth(table: Sequence[str], word: str) -> int:
    return next(place for place, words in enumerate(table) if re.fullmatch(words, word))


def _unit(word: str) -> str:
    return next(unit for unit, words in _UNITS.items() if re.fullmatch(words, word))
