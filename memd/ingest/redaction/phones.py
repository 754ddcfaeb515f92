"""Finds phone numbers, by Google's libphonenumber (its port `phonenumbers`).

Rule: a number counts only where its country's numbering plan has it. Without a country code it counts only in the
countries that the settings name, and there only as people write it, in the plan's groups, or behind a word for a phone:
a bare row of digits is more often an id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from phonenumbers import (
    Leniency,
    PhoneNumber,
    PhoneNumberFormat,
    PhoneNumberMatcher,
    format_number,
    is_valid_number,
    parse,
)
from phonenumbers import NumberParseException as NoNumber

from memd.ingest.redaction.spans import Find, Span, apart

_WORD_BEFORE = re.compile(
    r"(?i:(?<![a-z])(?:tel(?:efon\w{0,4}|éfono|éphone|efone|efoon|ephone)?|(?:tele)?phone|fon|mobile?\w{0,8}|cell(?:ulare)?"
    r"|fax|call|ring|sms|whats ?app|viber|signal|handy(?:nummer)?|rufnummer|kom(?:órka|\.)?|portable|m[óo]vil"
    r"|celular|puhelin|gsm|телефон|тел|моб|τηλ(?:έφωνο)?)|电话|電話|手机|手機|携帯|전화|휴대폰|โทร|טלפון|هاتف|جوال|फ़ोन|फोन|मोबाइल)"
    r"(?:[ _-]?(?:no|nr|num(?:ber|mer|ero)?|number))?\W{0,12}\Z"
)
_BEFORE_CHARACTERS = 40
_AREA_DIGITS_MIN = 3  # 030, 0171; people group what follows as they like
_DIGITS = re.compile(r"\d+")
_SEPARATED = re.compile(r"\d\D+\d")
_CODE_BEGINS = re.compile(r"[(\s]*(?:[+＋]|00)")
DIGITS_MIN, DIGITS_MAX = 7, 17
_WITH_CODE = re.compile(r"\(?[+＋]\(?\d[\d ()./\u00a0\u2010-\u2015-]{5,30}")
_GROUPS = re.compile(
    r"(?<![\w.,:/+-])(?!\d{4}-\d\d-\d\d|\d{1,3}(?:\.\d{1,3}){3}(?![\d.]))"  # not a date, not an address
    r"\(?\d{1,6}+\)?(?:[ \u00a0./\u2010-\u2015-]{1,2}\(?\d{1,10}+\)?)++(?!\w)"
)
_ROW = re.compile(rf"(?<![\w.,/+-])\d{{{DIGITS_MIN},{DIGITS_MAX}}}+(?![\w.]?\d)")
_TRIES_MAX = 6  # parts of one place that the library looks at
_GROUPS_MAX = 12  # of three numbers in a row; more are a table
_SINGLE_DIGITS_MAX = 3  # 0 and 1 in front of an area
_BEFORE, _BEHIND = 4, 12  # what stands around a number tells that it is none, or is its extension
# +48… and 0048… of any country, as libphonenumber reads the second only where it is told from where one calls.
_DIALLED_ABROAD = re.compile(
    r"(?<![\w.,:/+-])00(?P<rest>[1-9]\d{0,2}[ ()./-]{1,2}\d[\d ()./-]{5,16}\d)(?![\w/-]|[.,]\d)"
)


def phone_numbers(countries: Sequence[str]) -> Find:
    """The finder of numbers with a country code, and of those that these countries (ISO 3166) write without one."""

    def find(text: str) -> Iterator[Span]:
        spans = [*_abroad(text), *(span for at in _WITH_CODE.finditer(text) for span in _in(None, text, at))]
        if countries:
            spans += (span for at in _candidates(text) for country in countries for span in _in(country, text, at))
        yield from apart(spans)

    return find


def _candidates(text: str) -> Iterator[re.Match[str]]:
    """Digits in groups, and rows of digits behind a word for a phone: the library is slow where most are none."""
    for found in _GROUPS.finditer(text):
        groups = _DIGITS.findall(found[0])
        is_list = len(groups) > _GROUPS_MAX or sum(len(group) == 1 for group in groups) > _SINGLE_DIGITS_MAX
        if not is_list and sum(map(len, groups)) >= DIGITS_MIN:
            yield found
    for found in _ROW.finditer(text):
        if _is_behind_word(text, found.start()):
            yield found


def _in(country: str | None, text: str, place: re.Match[str]) -> Iterator[Span]:
    """The numbers that begin in a place of the text."""
    begin = max(0, place.start() - _BEFORE)
    for match in PhoneNumberMatcher(text[begin : place.end() + _BEHIND], country, Leniency.VALID, _TRIES_MAX):
        start = begin + match.start
        if place.start() <= start < place.end() and (
            _CODE_BEGINS.match(match.raw_string)
            or _is_written_as_one(match.number, match.raw_string)
            or _is_behind_word(text, start)
        ):
            yield start, begin + match.end


def _is_behind_word(text: str, start: int) -> bool:
    return bool(_WORD_BEFORE.search(text[max(0, start - _BEFORE_CHARACTERS) : start]))


def _abroad(text: str) -> Iterator[Span]:
    for found in _DIALLED_ABROAD.finditer(text):
        try:
            number = parse(f"+{found['rest']}")
        except NoNumber:
            continue
        if is_valid_number(number):
            yield found.span()


def _is_written_as_one(number: PhoneNumber, written: str) -> bool:
    """Whether a number without country code has the groups that its country writes, or begins with an area code."""
    if not _SEPARATED.search(written):
        return False
    groups = _DIGITS.findall(written)
    if groups[0].startswith("0") and len(groups[0]) >= _AREA_DIGITS_MIN:
        return True
    national = _DIGITS.findall(format_number(number, PhoneNumberFormat.NATIONAL))
    return groups == national or groups == _DIGITS.findall(format_number(number, PhoneNumberFormat.INTERNATIONAL))[1:]
