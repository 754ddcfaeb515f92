"""Finds numbers by which states know their people: PESEL, CPF, codice fiscale and some fifty more.

Rule: the layout is the number's, and `python-stdnum` finds its check digits, its date of birth and its regions right. A
layout that other numbers have as well counts only beside the number's name, or in a country that the settings name:
`KINDS` says which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module

import msgspec

from memd.ingest.redaction.spans import Find, Span, apart

BEFORE_CHARACTERS, BEHIND_CHARACTERS = 60, 24
"""How far from a number its name may stand."""


class _Kind(msgspec.Struct, frozen=True):
    """One kind of number. In a layout 9 is a digit, A a capital letter, * either, _ a space; all else is itself."""

    countries: str
    check: str
    """The module of `stdnum` whose `is_valid` tells; of several with a + any."""
    names: str
    """Names of it, with | between them; one in capitals counts in small letters only in front of : or =."""
    alone: str = ""
    """Layouts that no other number is likely to have: found wherever they stand."""
    at_home: str = ""
    """Layouts that are found beside a name, or where the settings name one of the countries."""
    named: str = ""
    """Layouts that are found beside a name only: nine digits of anything pass a check digit one time in ten."""


_13 = "9999999999999"
KINDS = (
    _Kind("PL", "pl.pesel", "PESEL", at_home="99999999999"),
    _Kind("NL", "nl.bsn", "BSN|burgerservicenummer|sofinummer|sofi-nummer", named="999999999 9999.99.999 9999_99_999"),
    _Kind("ES", "es.dni", "DNI|NIF|documento nacional", at_home="99999999A 99999999-A 99.999.999-A"),
    _Kind("ES", "es.nie", "NIE|NIF|extranjero", at_home="A9999999A A-9999999-A"),
    _Kind("BR", "br.cpf", "CPF|cadastro de pessoa", alone="999.999.999-99", named="99999999999 999999999-99"),
    _Kind("RO", "ro.cnp", "CNP|cod numeric personal", at_home=_13),
    _Kind("IT", "it.codicefiscale", "codice fiscale|codicefiscale|codice_fiscale|C.F.|CF", alone="AAAAAA99A99A999A",
          named="AAA_AAA_99A99_A999A"),
    _Kind("FR", "fr.nir", "NIR|sécurité sociale|securite sociale|numéro de sécu|INSEE",
          alone="9_99_99_99_999_999_99", at_home="999999999999999 9999999999999_99"),
    _Kind("FR", "fr.nif", "numéro fiscal|numero fiscal|SPI", named="9999999999999 99_99_999_999_999"),
    _Kind("DE", "de.idnr", "steuer-id|steuerid|steuer-identifikationsnummer|steuerliche identifikationsnummer|"
          "steueridentifikationsnummer|steuer-idnr|idnr|TIN", at_home="99999999999 99_999_999_999"),
    _Kind("GR", "gr.amka", "AMKA|ΑΜΚΑ|α.μ.κ.α", at_home="99999999999"),
    _Kind("SE", "se.personnummer", "personnummer|personnr|PNR|samordningsnummer",
          at_home="999999-9999 99999999-9999 999999+9999 999999999999", named="9999999999"),
    _Kind("NO", "no.fodselsnummer", "fødselsnummer|fodselsnummer|personnummer|FNR", at_home="99999999999 999999_99999"),
    _Kind("DK", "dk.cpr", "CPR|personnummer", at_home="999999-9999", named="9999999999"),
    _Kind("FI", "fi.hetu", "HETU|henkilötunnus|henkilotunnus", alone="999999-999A 999999A999A",
          at_home="999999-9999 999999A9999"),
    _Kind("IS", "is_.kennitala", "kennitala|KT", at_home="999999-9999", named="9999999999"),
    _Kind("EE", "ee.ik", "isikukood", at_home="99999999999"),
    _Kind("LT", "lt.asmens", "asmens kodas|asmens kodo|asmens kodą", at_home="99999999999"),
    _Kind("LV", "lv.pvn", "personas kods|personas kodu|personas koda", at_home="999999-99999", named="99999999999"),
    _Kind("BE", "be.nn+be.bis", "NISS|INSZ|rijksregisternummer|registre national|numéro national",
          alone="99.99.99-999.99", at_home="99999999999 999999-999-99 99_99_99_999_99"),
    _Kind("BG", "bg.egn", "EGN|ЕГН|единен граждански номер", at_home="9999999999"),
    _Kind("CH", "ch.ssn", "AHV|AVS|AHVN13|NAVS", alone="999.9999.9999.99", at_home=_13),
    _Kind("CZ SK", "cz.rc", "rodné číslo|rodne cislo|RČ|RC", alone="999999/9999", named="9999999999"),
    _Kind("HR", "hr.oib", "OIB|osobni identifikacijski broj", named="99999999999"),
    _Kind("SI RS BA ME MK HR", "si.emso", "EMŠO|EMSO|JMBG|ЈМБГ|ЕМБГ|matični broj|матични број", at_home=_13),
    _Kind("IE", "ie.pps", "PPS|PPSN|personal public service", at_home="9999999A 9999999AA"),
    _Kind("PT", "pt.cc", "cartão de cidadão|cartao de cidadao|cartão do cidadão",
          alone="99999999_9_AA9 99999999_9AA9", named="999999999AA9"),
    _Kind("PT", "pt.nif", "NIF|contribuinte", named="999999999 999_999_999"),
    _Kind("GB", "gb.nhs", "NHS", named="999_999_9999 999-999-9999 9999999999"),
    _Kind("GB", "gb.utr", "UTR|taxpayer reference", named="9999999999 99999_99999"),
    _Kind("US", "us.ssn+us.itin", "SSN|ITIN|social security", alone="999-99-9999", named="999999999 999_99_9999"),
    _Kind("CA", "ca.sin", "SIN|NAS|social insurance|assurance sociale", named="999999999 999_999_999 999-999-999"),
    _Kind("IN", "in_.aadhaar", "aadhaar|aadhar|adhaar|आधार|UIDAI",
          at_home="9999_9999_9999 9999-9999-9999", named="999999999999"),
    _Kind("CN", "cn.ric", "身份证|身份證|公民身份|resident id",
          alone="999999999999999999 99999999999999999X 99999999999999999x"),
    _Kind("KR", "kr.rrn", "주민등록번호|주민번호|RRN", alone="999999-9999999", named=_13),
    _Kind("JP", "jp.in_", "マイナンバー|個人番号|my number", named="999999999999 9999_9999_9999 9999-9999-9999"),
    _Kind("TH", "th.pin", "บัตรประชาชน|เลขประจำตัว|thai id", alone="9-9999-99999-99-9",
          named="9999999999999 9_9999_99999_99_9"),
    _Kind("ID", "id.nik", "NIK|KTP|induk kependudukan", named="9999999999999999"),
    _Kind("MY", "my.nric", "NRIC|MyKad|kad pengenalan", at_home="999999-99-9999", named="999999999999"),
    _Kind("PK", "pk.cnic", "CNIC|NADRA", at_home="99999-9999999-9", named=_13),
    _Kind("IL", "il.idnr", "תעודת זהות|מספר זהות|ת.ז|ת\"ז|ת״ז|teudat zehut", named="999999999 99999999-9"),
    _Kind("TR", "tr.tckimlik", "TCKN|TC no|T.C.|kimlik no|kimlik numarası|tckimlik", at_home="99999999999"),
    _Kind("ZA", "za.idnr", "south african id|RSA id|SA id|id number", at_home="9999999999999 999999_9999_99_9"),
    _Kind("RU", "ru.inn", "ИНН|INN", named="999999999999"),
    _Kind("UA", "ua.rntrc", "РНОКПП|ІПН|RNTRC", named="9999999999"),
    _Kind("MX", "mx.curp", "CURP", alone="AAAA999999AAAAAA99 AAAA999999AAAAAAA9"),
    _Kind("AR", "ar.cuit", "CUIT|CUIL", at_home="99-99999999-9", named="99999999999"),
    _Kind("CL", "cl.rut", "RUT|RUN", alone="99.999.999-*", at_home="99999999-*", named="99999999*"),
    _Kind("DO", "do.cedula", "cédula|cedula", at_home="999-9999999-9", named="99999999999"),
    _Kind("EC", "ec.ci", "cédula|cedula", named="9999999999 999999999-9"),
    _Kind("AU", "au.tfn", "TFN|tax file", named="999999999 999_999_999"),
    _Kind("NZ", "nz.ird", "IRD", named="99999999 999999999 99-999-999 999-999-999"),
    _Kind("AT", "at.vnr", "SVNR|SV-Nr|sozialversicherungsnummer|versicherungsnummer", at_home="9999_999999",
          named="9999999999"),
)  # fmt: skip
_ANY_NAME = (
    "national id|national identity|national identification|identity number|identity card|identity no|personalausweis"
    "|dowód osobisty|dowodu osobistego|tax id|tax number"
)
_CLASSES = {"9": "[0-9]", "A": "[A-Z]", "*": "[0-9A-Z]", "_": "[ \u00a0]"}
_BLANK, _SIGNS = re.compile("[ \u00a0]"), re.compile("[ \u00a0./-]")
_IS_KEY = re.compile(r"[\"'\]\\]{0,4}[ \t]?[:=]")  # "sin": 046454286
_NO_SPACES_FROM = "\u0e00"
# Not within a word, a hash, an id in groups or a decimal fraction.
_LEFT = r"(?<![A-Za-z\u00c0-\u024f0-9_$€£])(?<![0-9][.:/+-])(?<![0-9a-f]-)(?<![A-Z]-)"
_RIGHT = r"(?![A-Za-z\u00c0-\u024f0-9_]|[./:+-][0-9]|-[0-9a-zA-Z])"
# Eight signs from a digit on, or the letters in front of NIE, codice fiscale and CURP.
_BEGINS = re.compile(
    _LEFT + r"(?:(?=[0-9](?:[ \u00a0./+-]?[0-9A-Z]){7})[0-9]++|[XYZKLM](?=-?[0-9]{7})"
    r"|[A-Z]{6}(?=[0-9]{2})|[A-Z]{4}(?=[0-9]{6})|[A-Z]{3}(?=[ \u00a0][A-Z]{3}[ \u00a0][0-9]))"
)


class _Layout(msgspec.Struct, frozen=True):
    """A way to write numbers, and who writes them so."""

    pattern: re.Pattern[str]
    kinds: tuple[tuple[_Kind, bool], ...]
    """With whether a name has to stand beside it."""


_Beginning = tuple[bool, int]
"""Whether a number begins with digits, and how many digits or letters these are."""


def national_ids(countries: Sequence[str]) -> Find:
    """The finder of these numbers; in the countries (ISO 3166) a name need not stand beside them."""
    layouts = _layouts(frozenset(countries))

    def found(text: str) -> Iterator[Span]:
        end, names = 0, _Names(text)
        for begin in _BEGINS.finditer(text):
            beginning = text[begin.start()].isdigit(), begin.end() - begin.start()
            for layout in layouts.get(beginning, ()) if begin.start() >= end else ():
                number = layout.pattern.match(text, begin.start())
                if number is not None and _is_one(number, layout.kinds, names):
                    end = number.end()
                    yield number.span()
                    break

    return lambda text: apart(found(text))


def _layouts(countries: frozenset[str]) -> dict[_Beginning, list[_Layout]]:
    """All layouts by how they begin, the longest first."""
    kinds: dict[str, list[tuple[_Kind, bool]]] = {}
    for kind in KINDS:
        is_home = not countries.isdisjoint(kind.countries.split())
        for layouts, needs_name in ((kind.alone, False), (kind.at_home, not is_home), (kind.named, True)):
            for layout in layouts.split():
                kinds.setdefault(layout, []).append((kind, needs_name))
    by_beginning: dict[_Beginning, list[_Layout]] = {}
    for layout, of in sorted(kinds.items(), key=lambda item: -len(item[0])):
        pattern = re.compile("".join(_CLASSES.get(sign, re.escape(sign)) for sign in layout) + _RIGHT)
        begun = len(layout) - len(layout.lstrip(layout[0]))
        by_beginning.setdefault((layout[0] == "9", begun), []).append(_Layout(pattern, tuple(of)))
    return by_beginning


def _is_one(number: re.Match[str], kinds: tuple[tuple[_Kind, bool], ...], names: _Names) -> bool:
    return any(
        _passes(kind.check, number[0])
        for kind, needs_name in kinds
        if not needs_name or names.are_beside(number, kind.names) or names.are_beside(number, _ANY_NAME)
    )


class _Names:
    """Where a text has the names of numbers. One that it has nowhere is looked for once."""

    def __init__(self, text: str) -> None:
        self._text = text
        lowered = text.lower()
        self._lowered = lowered if len(lowered) == len(text) else text  # a letter became two: as it is written
        self._present: dict[str, list[str]] = {}

    def are_beside(self, number: re.Match[str], names: str) -> bool:
        """Whether one of these names, with | between them, stands before the number or behind it."""
        if names not in self._present:
            self._present[names] = [name for name in names.split("|") if name.lower() in self._lowered]
        return any(
            self._stands(name, max(0, number.start() - BEFORE_CHARACTERS), number.start())
            or self._stands(name, number.end(), number.end() + BEHIND_CHARACTERS)
            for name in self._present[names]
        )

    def _stands(self, name: str, begin: int, end: int) -> bool:
        at = self._lowered.find(name.lower(), begin, end)
        while at >= 0:
            behind = at + len(name)
            is_part = _joins(self._text[max(0, at - 1) : at], name[0]) or _joins(
                self._text[behind : behind + 1], name[-1]
            )
            is_meant = name.upper() != name or self._text[at:behind] == name or _IS_KEY.match(self._text, behind)
            if is_meant and not is_part:
                return True
            at = self._lowered.find(name.lower(), at + 1, end)
        return False


def _joins(neighbour: str, sign: str) -> bool:
    """Whether a name's first or last sign and its neighbour are in one word; scripts without spaces have none."""
    return neighbour.isalnum() and sign.isalnum() and sign < _NO_SPACES_FROM


def _passes(check: str, number: str) -> bool:
    """Whether one of the checks finds the number right, as it stands or without the signs between its groups."""
    forms = {_BLANK.sub("", number).upper(), _SIGNS.sub("", number).upper()}
    return any(_is_right(one, form) for one in _checks(check) for form in forms)


def _is_right(check: Callable[[str], bool], number: str) -> bool:
    try:
        return check(number)
    except Exception:  # `stdnum.cn.ric` has a KeyError for counties that are no more; its check digit was right
        return True


@cache
def _checks(names: str) -> tuple[Callable[[str], bool], ...]:
    return tuple(import_module(f"stdnum.{name}").is_valid for name in names.split("+"))
