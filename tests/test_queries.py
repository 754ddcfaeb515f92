"""The parameters of memd's own routes: decoded strictly, and what is wrong with one is said by name."""

from __future__ import annotations

import time
from datetime import datetime
from urllib.parse import parse_qsl

import pytest
from multidict import MultiDict

from memd.admin.queries import NoQuery, Query, decode_query
from memd.admin.reads import ChunksQuery, LogQuery, SearchQuery
from memd.errors import BadQuestion
from memd.selection import Selection, moment, since, until

HOW = "write it like 2026-11-20 or 2026-11-20T14:30"


def decoded(query: str, kind: type[Query]) -> Query:
    return decode_query(MultiDict(parse_qsl(query, keep_blank_values=True)), kind)


@pytest.mark.parametrize(
    ("query", "kind", "message"),
    [
        ("topics=work", LogQuery, "this route has no parameter 'topics'; it has topic, before, limit"),
        ("verbose=", NoQuery, "this route has no parameter 'verbose'; it has none at all"),
        ("limit=1&limit=2", LogQuery, "the parameter limit is given 2 times; give it once"),
        ("limit=501", LogQuery, "the parameter limit: Expected `int` <= 500"),
        ("limit=", LogQuery, "the parameter limit: Expected `int`, got `str`"),
        ("limit=99999999999999999999", LogQuery, "the parameter limit: Expected `int` <= 500"),
        ("all=perhaps", ChunksQuery, "the parameter all: Expected `bool`, got `str`"),
        ("", SearchQuery, "the parameter q is missing"),
        ("q=%20", SearchQuery, "the parameter q: Expected `str` matching regex '\\\\S'"),
        ("q=" + "x" * 100_001, SearchQuery, "the parameter q: Expected `str` of length <= 100000"),
        ("before=soon", LogQuery, "the parameter before: 'soon' is no time; " + HOW),
        ("q=x&as_of=", SearchQuery, "the parameter as_of: '' is no time; " + HOW),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(query: str, kind: type[LogQuery], message: str) -> None:
    with pytest.raises(BadQuestion) as refused:
        decoded(query, kind)
    assert str(refused.value) == message


def test_a_kind_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadQuestion, match="there is no kind 'nope'; give turn, note, document"):
        _ = decoded("q=x&kind=turn&kind=nope", SearchQuery).wanted


def test_a_moment_is_a_canonical_id_a_time_or_the_end_of_a_day() -> None:
    assert moment("1763647200000000") == 1763647200000000
    assert moment("2026-11-20T14:30:00+00:00") == 1795185000000000
    assert moment("2026-11-20") == datetime(2026, 11, 21).timestamp() * 1e6  # of this machine's zone


def test_what_is_asked_for_begins_with_the_beginning_of_a_day_and_ends_with_the_end_of_one() -> None:
    assert since("2026-11-20") == datetime(2026, 11, 20).timestamp() * 1e6
    query = decoded("q=x&from=2026-11-20&to=2026-11-20&role=user&kind=turn&kind=note&tag=b&contains=A", SearchQuery)
    begin, end = (int(datetime(2026, 11, day).timestamp() * 1e6) for day in (20, 21))
    assert query.wanted == Selection(begin, end, ("user",), ("turn", "note"), (), ("b",), "A")
    tags = ("a", "b")
    assert query.wanted.admits(begin, ("user",), "note", None, tags, "banana")
    assert not query.wanted.admits(end, ("user",), "note", None, tags, "banana")
    assert not query.wanted.admits(begin, ("tool",), "note", None, tags, "banana")
    assert not query.wanted.admits(begin, ("user",), "document", None, tags, "banana")
    assert not query.wanted.admits(begin, ("user",), "note", None, tags, "cherry")
    assert not query.wanted.admits(begin, ("user",), "note", None, ("a",), "banana")


@pytest.mark.parametrize(("day", "hours"), [("2026-03-29", 23), ("2026-10-25", 25), ("20261120", 24)])
def test_a_day_is_as_long_as_it_is_where_clocks_change(day: str, hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        wanted = decoded(f"q=x&from={day}&to={day}", SearchQuery).wanted
    finally:
        monkeypatch.undo()
        time.tzset()
    assert wanted.since is not None and wanted.until is not None
    assert wanted.until - wanted.since == hours * 3600 * 1_000_000


@pytest.mark.parametrize("query", ["from=2026-02-01&to=2026-01-31", "from=1763647200000000&to=1763647200000000"])
def test_a_choice_that_can_admit_nothing_is_refused(query: str) -> None:
    with pytest.raises(BadQuestion, match="`from` is not before `to`"):
        _ = decoded(f"q=x&{query}", SearchQuery).wanted


@pytest.mark.parametrize("text", ["2026", "1763647200", "1763647200000", "17"])
def test_a_number_that_is_no_date_and_too_small_for_a_canonical_id_is_no_time_at_which_something_was_said(
    text: str,
) -> None:
    for read in (since, until):
        with pytest.raises(ValueError, match="is no time"):
            read(text)
