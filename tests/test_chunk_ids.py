"""Ids of chunks: how people and models write them, and what they name."""

from __future__ import annotations

import uuid

import msgspec
import pytest
from crash_files import CrashFiles
from drafts import draft, open_store, seal_all

from memd.admin import history
from memd.entries import digits_of_id
from memd.errors import BadQuestion
from memd.store.store import Snapshot

UUIDS = [bytes.fromhex(digits.ljust(32, "0")) for digits in ("a3f91", "a3f92", "beef")]


@pytest.fixture(params=[False, True], ids=["growing", "sealed"])
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    topic = open_store(CrashFiles()).topic("talk")
    for number, one in enumerate(UUIDS):
        topic.append([msgspec.structs.replace(draft(number), uuid=one)])
    if request.param:
        seal_all(topic)
    return topic.snapshot()


@pytest.mark.parametrize(
    ("written", "digits"),
    [
        ("a3f9", "a3f9"),
        (" mem:A3F9 ", "a3f9"),
        ("[mem:a3f9]", "a3f9"),
        (str(uuid.UUID(bytes=UUIDS[0])), UUIDS[0].hex()),
        *((one, None) for one in ("", "a", "a3f", "mem:", "zzzz", "[mem:a3f9] and", UUIDS[0].hex() + "0", "../a3f9")),
    ],
)
def test_an_id_has_four_digits_at_least_and_is_read_however_it_is_written(written: str, digits: str | None) -> None:
    assert digits_of_id(written) == digits


def test_digits_name_the_chunk_whose_public_id_they_are_or_those_that_begin_so(snapshot: Snapshot) -> None:
    shown, longer, other = UUIDS
    for digits, named in (("a3f9", [shown]), ("a3f92", [longer]), ("a3f910", [shown]), (other.hex(), [other])):
        assert snapshot.named(digits) == named
        assert history.named([snapshot], f"mem:{digits}") == (snapshot, named[0])
    assert snapshot.named("a3fa") == []


def test_one_digit_names_no_chunk_though_a_sixteenth_of_them_begin_with_it(snapshot: Snapshot) -> None:
    with pytest.raises(BadQuestion, match="four digits or more"):
        history.named([snapshot], "b")
