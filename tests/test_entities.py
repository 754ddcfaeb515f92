"""Names in what is stored: the rules that find them, their index, and the chunks that belong together by them."""

from __future__ import annotations

import pytest
from candidates import entry

from memd.entries import Section
from memd.store.lexical.analyzer import Kind, entities_of, kind_of


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "I met Anna Kowalska at the Blue Heron Cafe in Leeds on Tuesday. She's from New York.",
            ["Anna Kowalska", "Blue Heron Cafe", "Leeds", "New York"],
        ),
        ("Bread is baked there. Flour comes later. What a day!", []),
        ("Thanks Oscar! Marie's flat and Oscar's are in Rue de la Paix.", ["Oscar", "Rue de la Paix"]),
        ("Ask ann@example.org about ABC-123, #4521 and PR.", ["ann@example.org", "ABC-123", "#4521", "PR"]),
        (
            "Call parseHttpRequest in src/wire/session.py, retry_with_backoff and /etc/hosts; PostgreSQL v2.3.1.",
            ["parseHttpRequest", "src/wire/session.py", "retry_with_backoff", "/etc/hosts", "PostgreSQL", "v2.3.1"],
        ),
        ("On 10/11/2023 or 2024-01-02 and/or later: 12 of 345, 3.5 kg.", []),
        ("See http://a.example/b?c=1.", ["http://a.example/b?c=1"]),
        ("Ich habe gestern Herrn Müller in seiner Werkstatt in Köln getroffen und einen Hund gekauft.", []),
        ("Hier soir j'ai vu Marie Dupont à Lyon avec sa mère.", ["Marie Dupont", "Lyon"]),
        ("Она живёт в Казани и работает с Анной.", ["Казани", "Анной"]),
        ("昨天我在 GitHub 上看到 memd 的 PR", ["GitHub", "PR"]),
        ("", []),
    ],
)
def test_names_are_found_by_how_they_are_written(text: str, names: list[str]) -> None:
    assert entities_of(text) == names


def test_what_stands_below_a_heading_opens_a_sentence() -> None:
    part = Section(hash=b"", heading=("Handbook", "Holiday"))
    chunk = entry("1", "Ask four weeks before, and tell Marta.", kind="document", source="guide.md", part=part)
    assert entities_of(chunk.named_text) == ["Marta"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Anna Kowalska", Kind.NAME),
        ("ann@example.org", Kind.EMAIL),
        ("http://a.example", Kind.LINK),
        ("src/app.py", Kind.PATH),
        ("v2.3.1", Kind.VERSION),
        ("ABC-123", Kind.TICKET),
        ("parseHttp", Kind.IDENTIFIER),
    ],
)
def test_how_a_name_is_written_tells_its_kind(name: str, kind: Kind) -> None:
    assert kind_of(name) is kind


def test_a_text_made_to_be_slow_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quadratic matching of a chunk's length would take minutes."""
    for text in ("A" * 20_000, "a_" * 10_000, "Aa " * 7_000, "a/" * 10_000, "a." * 10_000, "a@" * 10_000, "A'" * 9_000):
        entities_of(text)
