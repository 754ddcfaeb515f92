"""The fields of an entry: one definition for drafts, the log, export, import and redaction."""

from __future__ import annotations

import json

import msgspec
import pytest
from drafts import DIMENSION, draft, unit_vector
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from memd.entries import Entry, Speaker, Status
from memd.ingest.redaction import Redactor
from memd.settings.model import IngestSettings
from memd.store.log.format import decode_entry, encode_entry
from memd.store.tools.export import as_line, decode_line, state_of

SECRET = "sk-0123456789abcdefABCDEF"


def entry(**changes: object) -> Entry:
    made = draft("one").as_entry(public_id="", canonical_id=1_700_000_000_000_001, group_left=0)
    return msgspec.structs.replace(made, public_id=made.uuid.hex()[:4], **changes)


def spoken(content: str, *speakers: Speaker) -> Entry:
    return entry(content=content, speakers=speakers)


# Who speaks


@pytest.mark.parametrize("offsets", [(-1,), (0, 0), (5, 3), (0, 9)])
def test_offsets_that_do_not_ascend_within_the_text_do_not_fit(offsets: tuple[int, ...]) -> None:
    said = spoken("8 chars.", *(Speaker(offset, "user") for offset in offsets))
    assert not said.speakers_fit
    line = json.dumps(as_line(said, "talk", live=True)).encode()
    with pytest.raises(ValueError, match="offset"):
        decode_line(line)


# One definition


speakers = st.just(UNSET) | st.lists(st.sampled_from(["user", "tool"]), max_size=3).map(
    lambda roles: tuple(Speaker(offset, role, continues=offset == 1) for offset, role in enumerate(roles))
)


names = st.just(UNSET) | st.text(min_size=1)


@given(st.text(min_size=3), speakers, st.none() | st.text(), st.sampled_from(Status), st.integers(-4, 10), names, names)
def test_the_log_and_a_line_of_an_export_keep_every_field(
    content: str,
    speakers: tuple[Speaker, ...],
    source: str | None,
    status: Status,
    steps: int,
    author: str,
    action_by: str,
) -> None:
    is_active = status is Status.ACTIVE
    vector = unit_vector("one").tobytes() if is_active else b""
    said = entry(
        content=content if is_active else "",
        speakers=speakers if is_active else UNSET,
        source=source,
        status=status,
        utility_steps=steps,
        vector=vector,
        supersedes=(bytes(16),),
        author=author,
        action_by=action_by,
    )
    assert decode_entry(encode_entry(said), dimension=DIMENSION) == said
    topic_id, read = decode_line(msgspec.json.encode(as_line(said, "talk", live=is_active)))
    assert topic_id == "talk"
    assert read == msgspec.structs.replace(said.as_draft(), vector=b"", digests=())
    assert state_of(read) == state_of(said)


def test_who_speaks_is_written_only_where_it_is_known() -> None:
    old, new = entry(), spoken("hello", Speaker(0, "user"))
    assert "speakers" not in msgspec.msgpack.decode(encode_entry(old))
    assert "speakers" not in as_line(old, "talk", live=True)
    assert msgspec.msgpack.decode(encode_entry(new))["speakers"] == [{"offset": 0, "role": "user"}]
    assert as_line(new, "talk", live=True)["speakers"] == [{"offset": 0, "role": "user"}]


def test_a_field_of_a_later_version_is_carried_along_and_redacted() -> None:
    payload = msgspec.msgpack.encode(msgspec.msgpack.decode(encode_entry(entry())) | {"weather": SECRET, "moons": [7]})
    read = decode_entry(payload, dimension=DIMENSION)
    assert read.unknown == {"weather": SECRET, "moons": [7]}
    kept = Redactor.of(IngestSettings(redact=True)).draft(read.as_draft())
    written = msgspec.msgpack.decode(encode_entry(kept.as_entry(public_id="abcd", canonical_id=7, group_left=0)))
    assert (written["weather"], written["moons"]) == ("[redacted:api_key]", [7])
