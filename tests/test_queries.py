"""The parameters of memd's own routes: decoded strictly, and what is wrong with one is said by name."""

from __future__ import annotations

from datetime import datetime
from urllib.parse import parse_qsl

import pytest
from multidict import MultiDict

from memd.admin.queries import (
    BufferQuery,
    ChunksQuery,
    LogQuery,
    NoQuery,
    Query,
    SearchQuery,
    TurnsQuery,
    decode_query,
    moment,
)
from memd.errors import BadQuestion

HOW = "write it like 2026-11-20T14:30"


def decoded(query: str, kind: type[Query]) -> Query:
    return decode_query(MultiDict(parse_qsl(query, keep_blank_values=True)), kind)


def test_what_is_not_given_has_its_default() -> None:
    assert decoded("", LogQuery) == LogQuery(topic=(), before=None, limit=50)
    assert decoded("", NoQuery) == NoQuery()


def test_parameters_are_decoded_in_their_types() -> None:
    query = decoded("topic=a&topic=b&limit=7&all=1&contains=12&before=1763647200000000", ChunksQuery)
    assert query == ChunksQuery(topic=("a", "b"), limit=7, all=True, contains="12", before=query.before)
    assert query.before == 1763647200000000
    assert decoded("topic=null&before=null", TurnsQuery) == TurnsQuery(topic="null", before="null")
    assert decoded("topic=7", BufferQuery).topic == "7"


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
        ("before=soon", LogQuery, "the parameter before: 'soon' is no canonical_id and no time; " + HOW),
        ("q=x&as_of=", SearchQuery, "the parameter as_of: '' is no canonical_id and no time; " + HOW),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(query: str, kind: type[LogQuery], message: str) -> None:
    with pytest.raises(BadQuestion) as refused:
        decoded(query, kind)
    assert str(refused.value) == message


def test_a_moment_is_a_canonical_id_a_time_or_the_end_of_a_day() -> None:
    assert moment("1763647200000000") == 1763647200000000
    assert moment("2026-11-20T14:30:00+00:00") == 1795185000000000
    assert moment("2026-11-20") == datetime(2026, 11, 21).timestamp() * 1e6  # of this machine's zone


@pytest.mark.parametrize("text", ["", "soon", "-5", "2026-13-01", "9999-12-31", "12345678901234567890"])
def test_no_moment_is_guessed_at(text: str) -> None:
    with pytest.raises(ValueError, match="is no canonical_id and no time"):
        moment(text)
