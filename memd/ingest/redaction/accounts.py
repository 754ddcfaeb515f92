"""Finds numbers of bank accounts (IBAN).

Rule: one counts only where its country, its length and its check digits are right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memd.ingest.redaction.spans import Span

# ISO 13616 as registered by SWIFT: country and length.
_COUNTRIES = {
    15: "NO",
    16: "BE",
    18: "DK FI FK FO GL NL SD",
    19: "MK SI",
    20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ OM SO TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST",
    26: "IS TR",
    27: "BI DJ FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
    29: "BR EG PS QA UA",
    30: "JO KW MU YE",
    31: "MT SC",
    32: "LC",
    33: "RU",
}
_LENGTHS = {country: length for length, countries in _COUNTRIES.items() for country in countries.split()}
_BEGIN = re.compile(r"[A-Z]{2}[0-9]{2}(?=[ \u00a0-]?[A-Z0-9]{4}[ \u00a0-]?[A-Z0-9]{4})")
_BEFORE = re.compile(r"[A-Za-z0-9]")
_ESCAPE = re.compile(r"\\[nrt]")
_WRITTEN_MAX = 42  # 34 characters in groups of four


def account_numbers(text: str) -> Iterator[Span]:
    """International bank account numbers, with or without spaces between their groups."""
    for found in _BEGIN.finditer(text):
        begin = found.start()
        is_within = _BEFORE.match(text, begin - 1) and not _ESCAPE.match(text, begin - 2) if begin else None
        length = None if is_within else _LENGTHS.get(found[0][:2])
        end = None if length is None else _end(text, begin, length)
        if end is not None:
            yield begin, end


def _end(text: str, start: int, length: int) -> int | None:
    """The end of the number of `length` characters that begins at `start`; None if there is none."""
    number = ""
    for place in range(start, min(len(text), start + _WRITTEN_MAX)):
        if text[place] not in " \u00a0-":
            number += text[place]
        if len(number) == length:
            is_alone = not (text[place + 1 : place + 2].isascii() and text[place + 1 : place + 2].isalnum())
            return place + 1 if is_alone and _passes_check(number) else None
    return None


def _passes_check(number: str) -> bool:
    """ISO 7064, MOD 97-10."""
    if not (number.isascii() and number.isalnum() and number == number.upper()):
        return False
    return int("".join(str(int(character, 36)) for character in number[4:] + number[:4])) % 97 == 1
