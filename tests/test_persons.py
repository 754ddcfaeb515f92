"""Redaction of persons: addresses, phone numbers, national ids and listed words; look-alikes; who pays for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import phonenumbers
import pytest
from daemon_process import clean_environment

from memd.errors import ConfigError
from memd.ingest.redaction import persons
from memd.ingest.redaction.redactor import Redactor
from memd.settings.model import IngestSettings

DATA = json.loads((Path(__file__).parent.parent / "bench" / "data" / "persons.json").read_text())
BRACKETS = re.compile(r"\[((?:[^\[\]]|\[(?:at|dot)\])*)\]")


def redactor(*persons: Any, countries: tuple[str, ...] = (), listed: tuple[str, ...] = ()) -> Redactor:
    return Redactor.of(
        IngestSettings(
            redact=True, redact_builtin=(), redact_persons=persons, redact_countries=countries, redact_words=listed
        )
    )


def test_a_country_that_is_none_is_refused_since_its_numbers_would_stay() -> None:
    with pytest.raises(ConfigError, match="redact_countries: UK is no country"):
        redactor("phone", countries=("PL", "UK"))


SENTENCES = [
    (kind, marked, (country,) if len(country) == 2 else ())
    for kind, sentences in DATA.items()
    if kind != "countries"
    for marked, country in sentences["found"]
    if country != "twice"
]


@pytest.mark.parametrize(("kind", "marked", "countries"), SENTENCES)
def test_of_a_sentence_about_a_person_the_number_or_address_is_gone_and_nothing_else(
    kind: str, marked: str, countries: tuple[str, ...]
) -> None:
    text, expected = BRACKETS.sub(r"\1", marked), BRACKETS.sub(f"[redacted:{kind}]", marked)
    if "44051401359: [" in marked:  # said twice, in brackets once
        expected = expected.replace("44051401359", "[redacted:national_id]")
    assert redactor(kind, countries=countries).text(text) == expected


@pytest.mark.parametrize("kind", ["email", "phone", "national_id"])
def test_what_only_looks_like_a_persons_is_left_alone(kind: str) -> None:
    taken = [text for text in DATA[kind]["left"] if redactor(kind).text(text) is not text]
    assert taken == (["999-99-9999"] if kind == "national_id" else []), "the ITIN has no check digit"


def test_numbers_without_country_code_or_name_are_found_in_the_countries_that_are_named() -> None:
    text = "601 234 567 and (415) 555-2671, 44051401359 and 54362315K"
    everywhere = redactor("phone", "national_id")
    assert everywhere.text(text) is text
    in_poland = redactor("phone", "national_id", countries=("PL",))
    assert in_poland.text(text) == ("[redacted:phone] and (415) 555-2671, [redacted:national_id] and 54362315K")
    both = redactor("phone", "national_id", countries=("ES", "US"))
    assert both.text(text) == "601 234 567 and [redacted:phone], 44051401359 and [redacted:national_id]"


def test_every_kind_of_id_has_its_check_and_every_layout_is_come_upon() -> None:
    for kind in persons.KINDS:
        assert all(callable(import_module(f"stdnum.{name}").is_valid) for name in kind.checks)
        for layout in (*kind.alone, *kind.at_home, *kind.named):
            assert persons._ID_BEGINS.match(re.sub("[A*]", "X", layout).replace("_", " ")), layout


LISTED = (
    "Müller", "Anna Nowak", "Łódź", "田中太郎", "김철수", "हिन्दी", "falcon", "NTT株式会社", "นายสมชาย",
    "Jean-Luc Picard", "tomasz", "Straße", "Νίκος", "ёлка", "محمد",
)  # fmt: skip
WORDS = {
    "Herr MULLER, Müllerin, Mu\u0308ller": "Herr [redacted:word], Müllerin, [redacted:word]",
    "anna  nowak, ANNA_NOWAK; Anna\n# Nowak. Annanowak": "[redacted:word], [redacted:word]; [redacted:word]. Annanowak",
    "Anna said: Nowak": "Anna said: Nowak",
    "lodz": "[redacted:word]",
    "私は田中太郎です 田中 太郎": "私は[redacted:word]です [redacted:word]",
    "김철수가 왔다": "[redacted:word]가 왔다",
    "हिन्दी में": "[redacted:word] में",
    "my_falcon_x myFalcon falcons 计划Falcon项目": "my_[redacted:word]_x myFalcon falcons 计划[redacted:word]项目",
    "ｎｔｔ株式会社 NTT 株式会社": "[redacted:word] [redacted:word]",
    "ผมนายสมชายครับ": "ผม[redacted:word]ครับ",
    "jean luc\nPICARD": "[redacted:word]",
    "C:\\home\\tomasz\\x": "C:\\home\\[redacted:word]\\x",
    '{"a": "M\\u00fcller\\nfalcon"}': '{"a": "[redacted:word]\\n[redacted:word]"}',
    "STRASSE, ΝΙΚΟΣ, елка, مُحَمَّد": "[redacted:word], [redacted:word], [redacted:word], [redacted:word]",
    "[redacted:word] word": "[redacted:word] word",
}


@pytest.mark.parametrize(("text", "expected"), WORDS.items())
def test_listed_words_are_gone_in_any_script_and_only_as_whole_words(text: str, expected: str) -> None:
    redacted = redactor(listed=LISTED).text(text)
    assert redacted == expected
    assert redactor(listed=LISTED).text(redacted) == redacted


def test_json_stays_json() -> None:
    everything = redactor("email", "phone", "national_id", listed=("Zoë",), countries=("PL",))
    text = "tel. 601234567\nzoe@example.org\nZoë\n44051401359 \U0001f600"
    for written in (json.dumps({"a": text}), json.dumps({"a": json.dumps([text])})):
        kept = everything.arguments(written)
        assert set(json.loads(kept)) == {"a"} and kept.count("[redacted:") == 4
        assert not re.search("601234567|example|Zo|44051401359", kept)


def test_a_number_at_which_its_library_fails_is_taken_for_one() -> None:
    with pytest.raises(KeyError):
        import_module("stdnum.cn.ric").is_valid("110001194912310029")
    assert redactor("national_id").text("110001194912310029") == "[redacted:national_id]"


# Work


@pytest.mark.parametrize(
    "part", ["1", "1 ", "12/12 12/12, ", "601 234 567, ", "tel 601234567 ", "+48601 ", "+1+1 ", "(12) "]
)
def test_the_library_of_phone_numbers_sees_a_few_times_the_text_at_most(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    seen: list[int] = []
    matcher = phonenumbers.PhoneNumberMatcher

    def counted(text: str, *rest: Any) -> Any:
        seen.append(len(text))
        return matcher(text, *rest)

    monkeypatch.setattr(phonenumbers, "PhoneNumberMatcher", counted)
    find = persons.phone_numbers(("PL",))
    for size in (1_000, 4_000):
        seen.clear()
        list(find((part * size)[:size]))
        assert sum(seen) <= 6 * size


# What is not asked for

IMPORTED = """
import sys
from memd.ingest.redaction.redactor import Redactor
from memd.settings.model import IngestSettings
Redactor.of(IngestSettings(redact=True)).text("anna@example.org +48 601 234 567")
print([name for name in ("phonenumbers", "stdnum", "memd.ingest.redaction.words") if name in sys.modules])
"""


@pytest.mark.process
def test_nothing_is_imported_for_what_is_not_asked_for() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, env=clean_environment())
    assert run.stdout == "[]\n", run.stderr


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    with pytest.raises(ConfigError, match=r"needs the package phonenumbers, .* pip install 'memd-proxy\[persons\]'"):
        redactor("phone")
    assert redactor("email").names == ("email",)
