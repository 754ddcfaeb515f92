"""MemoryIn as clients write it, MemoryOut as they read it, and the headers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import all_text, plain_values

from memd.errors import BadMemoryIn
from memd.selection import Selection
from memd.wire.sideband import (
    InjectedChunk,
    MemoryIn,
    MemoryOut,
    decode_memory_in,
    memory_headers,
    splice_memory_out_json,
)

OUT = MemoryOut((InjectedChunk("a3f9", "default", 1795210136000001),))


def decode(value: Any) -> MemoryIn:
    return decode_memory_in(json.dumps(value).encode())


@pytest.mark.parametrize("empty", [b"{}", b' "{}"', b'{"topic_id":null,"related_topic_ids":null,"corrections":null}'])
def test_everything_is_optional_and_null_is_absent(empty: bytes) -> None:
    assert decode_memory_in(empty) == MemoryIn()


HELPFUL = {"chunk_ids": ["a"], "action": "Helpful", "reason": "r"}


@pytest.mark.parametrize(
    ("malformed", "told"),
    [
        ({"topik": "a"}, "did you mean topic_id?"),
        ({"topicId": "a"}, "did you mean topic_id?"),
        ({"correction": []}, "did you mean corrections?"),
        ({"corrections": [HELPFUL | {"contnet": "b"}]}, "did you mean content? - at `memory_in.corrections[0]`"),
        ({"xylophonist": 1}, "a member that memd does not know; expected {topic_id?"),
        ({"xylophonist` - at `$": [{"a": 1e308}]}, "a member that memd does not know"),
        ([], "memory_in"),
        (7, "memory_in"),
        ("not json", "memory_in"),
        ('"{}"', "memory_in"),
        ({"topic_id": 5}, "memory_in.topic_id"),
        ({"topic_id": "../etc"}, "memory_in.topic_id"),
        ({"topic_id": ""}, "memory_in.topic_id"),
        ({"topic_id": "a\n"}, "memory_in.topic_id"),
        ({"related_topic_ids": "a"}, "memory_in.related_topic_ids"),
        ({"related_topic_ids": ["a", "/b"]}, "memory_in.related_topic_ids[1]"),
        ({"corrections": {}}, "memory_in.corrections"),
        ({"corrections": [{"action": "Helpful", "reason": "r"}]}, "chunk_ids"),
        ({"corrections": [HELPFUL | {"chunk_ids": []}]}, "at `memory_in.corrections[0].chunk_ids`"),
        ({"corrections": [{"chunk_ids": ["a"], "action": "Helpful"}]}, "reason"),
        ({"corrections": [HELPFUL | {"chunk_ids": [7]}]}, "memory_in.corrections"),
        ({"corrections": [HELPFUL | {"action": "updates"}]}, "[0].action`; it is Update or Helpful or Unhelpful"),
        *(({"corrections": [HELPFUL | {"steps": steps}]}, "[0].steps") for steps in (0, 11, "many")),
        ({"corrections": [HELPFUL | {"content": "new"}]}, "memory_in.corrections[0].content"),
        ({"filter": {"from": "xylophonist"}}, "memory_in.filter.from is no time"),
        ({"filter": {"to": "9999-12-31"}}, "memory_in.filter.to is no time"),
        ({"filter": {"from": 1763647200}}, "memory_in.filter.from is no time"),
        ({"filter": {"from": "2026-02-01", "to": "2026-01-01"}}, "memory_in.filter: `from` is not before `to`"),
        ({"filter": {"form": "2026-11-20"}}, "did you mean from?"),
        ({"filter": {"kinds": "note"}}, "memory_in.filter.kinds"),
        ({"filter": []}, "memory_in.filter"),
    ],
)
def test_a_malformed_memory_in_is_refused_and_the_field_named_and_nothing_quoted(malformed: Any, told: str) -> None:
    for value in (malformed, json.dumps(malformed)) if isinstance(malformed, dict) else (malformed,):
        with pytest.raises(BadMemoryIn) as refusal:
            decode(value)
        assert told in str(refusal.value)
        assert "$" not in str(refusal.value) and "xylophonist" not in str(refusal.value), "it is logged"


@given(st.text(), st.text(), st.sampled_from(["topic_id", "related_topic_ids", "action", "chunk_ids", "content"]))
def test_what_is_said_of_a_malformed_memory_in_quotes_nothing_of_it(before: str, after: str, field: str) -> None:
    odd = f"{before}xylophonist{after} !"
    correction = {"chunk_ids": ["a"], "action": "Helpful", "reason": odd}
    malformed = {
        "topic_id": {"topic_id": odd},
        "related_topic_ids": {"related_topic_ids": [odd]},
        "action": {"corrections": [{**correction, "action": odd}]},
        "chunk_ids": {"corrections": [{**correction, "chunk_ids": odd}]},
        "content": {"corrections": [{**correction, "content": odd}]},
    }[field]
    with pytest.raises(BadMemoryIn) as refusal:
        decode(malformed)
    assert "xylophonist" not in str(refusal.value)
    assert field in str(refusal.value)


@given(st.binary() | plain_values.map(lambda value: json.dumps(value).encode()))
def test_no_memory_in_raises_anything_but_the_declared_error(raw: bytes) -> None:
    try:
        memory_in = decode_memory_in(raw)
    except BadMemoryIn:
        return
    assert isinstance(memory_in, MemoryIn)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"later":' + b"[" * 5000,
        b'"' + b"[" * 5000 + b'"',
        b'{"topic_id":"\xff"}',
        b'{"topic_id":"\\ud800"}',
        b'"\xff"',
    ],
)
def test_hostile_json_is_a_malformed_memory_in(raw: bytes) -> None:
    with pytest.raises(BadMemoryIn):
        decode_memory_in(raw)


@given(st.dictionaries(all_text, plain_values), st.sampled_from(["", " \n"]), st.sampled_from([None, 2]))
def test_memory_out_is_added_to_a_json_body_and_no_other_byte_changes(
    members: dict[str, Any], white_space: str, indent: int | None
) -> None:
    body = (json.dumps(members, indent=indent) + white_space).encode()
    member = (b"," if members else b"") + b'"memory_out":' + msgspec.json.encode(OUT)
    spliced = splice_memory_out_json(body, OUT)
    assert json.loads(spliced) == members | {"memory_out": json.loads(msgspec.json.encode(OUT))}
    at = spliced.rindex(member)
    assert spliced[:at] + spliced[at + len(member) :] == body


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"no", b'{"a":1', b'{"a":1}}', b"\x1f\x8b\x08", b'{"a":' + b"[" * 5000 + b"}"]
)
def test_a_body_that_is_not_a_json_object_is_left_alone(body: bytes) -> None:
    assert splice_memory_out_json(body, OUT) == body


def test_headers_say_status_ids_turn_mode_and_timings() -> None:
    headers = memory_headers(
        status="injected",
        injected_ids=["a3f9", "b2e1"],
        turn_id="0f3c",
        mode="full",
        timings_ms={"embed": 1.23, "search": 0.4, "inject": 0.1},
    )
    assert dict(headers) == {
        "X-Memory-Status": "injected",
        "X-Memory-Injected": "a3f9,b2e1",
        "X-Memory-Turn": "0f3c",
        "X-Memory-Mode": "full",
        "Server-Timing": "embed;dur=1.2, search;dur=0.4, inject;dur=0.1",
    }
    assert "Server-Timing" not in dict(memory_headers(status="off", turn_id="0f3c", mode="off"))


@given(st.text(), st.lists(st.text(max_size=9)), st.text(), st.text(), st.dictionaries(st.text(), st.floats()))
def test_no_header_value_can_end_its_line(
    status: str, ids: list[str], turn_id: str, mode: str, timings: dict[str, float]
) -> None:
    headers = memory_headers(status=status, injected_ids=ids, turn_id=turn_id, mode=mode, timings_ms=timings)
    assert all(value.isascii() and value.isprintable() for _, value in headers)


def test_injected_ids_are_cut_at_a_whole_id() -> None:
    ids = [f"{number:06x}" for number in range(2000)]
    value = dict(memory_headers(status="injected", injected_ids=ids, turn_id="t", mode="full"))["X-Memory-Injected"]
    assert 4090 <= len(value) <= 4096
    assert value.split(",") == ids[: len(value.split(","))]


def test_a_filter_is_read_with_its_times() -> None:
    raw = b'{"filter":{"from":"2026-11-20T00:00:00Z","to":1795185000000000,"kinds":["note"],"sources":["a.md"]}}'
    wanted = Selection(1795132800000000, 1795185000000000, kinds=("note",), sources=("a.md",))
    assert decode_memory_in(raw).filter == wanted
    assert decode_memory_in(b'{"filter":null}').filter is None
