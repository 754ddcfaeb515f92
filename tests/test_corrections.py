"""What corrections append to the log, and which ids they cannot reach."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from candidates import entry
from hypothesis import given
from hypothesis import strategies as st

from memd.entries import HELPFUL_STEPS_MAX, UNHELPFUL_STEPS_MAX, Action, Correction, Draft, Entry, Status, clamped_steps
from memd.recall.corrections import Plan, plan

NOW_US = 1_700_000_000_000_000
FIRST, SECOND, THIRD = (entry(name, f"user: {name}", at=at) for at, name in enumerate(("aaaa", "bbbb", "cccc"), 1))


class Topic:
    """A log that is a dictionary: the present entry of each chunk, found by its public id or its full uuid.

    A chunk that it does not have is looked for in the related topic, as the daemon does.
    """

    def __init__(self, *entries: Entry, related: Topic | None = None) -> None:
        self.related = related
        self.entries = {one.uuid: one for one in entries}
        self.canonical_ids = itertools.count(100)
        self.uuids = (number.to_bytes(16, "big") for number in itertools.count(1))

    def plan(self, *corrections: Correction) -> Plan:
        return plan(
            corrections,
            find=self.find,
            embed=lambda text: f"vector of {text}".encode(),
            new_uuid=lambda: next(self.uuids),
            now_us=NOW_US,
        )

    def correct(self, *corrections: Correction) -> Plan:
        """Plan and append, as one request does."""
        outcome = self.plan(*corrections)
        for draft in outcome.drafts:
            members = {name: getattr(draft, name) for name in Draft.__struct_fields__}
            members["public_id"] = draft.public_id or draft.uuid.hex()[-4:]
            members["canonical_id"] = next(self.canonical_ids)
            members["origin_id"] = draft.origin_id or members["canonical_id"]
            self.entries[draft.uuid] = Entry(**members)
        return outcome

    def find(self, chunk_id: str) -> Entry | None:
        found = next((one for one in self.entries.values() if chunk_id in (one.public_id, one.uuid.hex())), None)
        return self.related.find(chunk_id) if found is None and self.related is not None else found

    def steps(self, one: Entry) -> int:
        return self.entries[one.uuid].utility_steps


def said(action: Action, *chunk_ids: str, content: str | None = None, reason: str = "because") -> Correction:
    return Correction(chunk_ids, action, reason, content)


# -- utility ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "steps"), [("Helpful", 1), ("Unhelpful", -1)])
def test_praise_and_blame_append_a_full_copy_with_another_utility(action: Action, steps: int) -> None:
    chunk = entry("aaaa", at=7, origin_id=3, utility_steps=2, digests=(b"d" * 16,), unknown={"later": 1}, source="x")
    (draft,) = Topic(chunk).plan(said(action, "aaaa", reason="it was")).drafts
    changed = {"utility_steps", "action", "reason"}
    for name in set(Draft.__struct_fields__) - changed:
        assert getattr(draft, name) == getattr(chunk, name), name
    assert (draft.utility_steps, draft.action, draft.reason) == (2 + steps, action, "it was")


@pytest.mark.parametrize(
    ("action", "opposite", "bound"),
    [
        ("Helpful", "Unhelpful", HELPFUL_STEPS_MAX),
        ("Unhelpful", "Helpful", -UNHELPFUL_STEPS_MAX),
    ],
)
def test_beyond_the_bound_a_correction_is_recorded_and_changes_nothing(
    action: Action, opposite: Action, bound: int
) -> None:
    topic = Topic(FIRST)
    topic.correct(*[said(action, "aaaa")] * abs(bound))
    assert topic.steps(FIRST) == bound
    (further,) = topic.correct(said(action, "aaaa", reason="once more")).drafts
    assert (further.utility_steps, further.reason) == (bound, "once more")
    topic.correct(said(opposite, "aaaa"))
    assert abs(topic.steps(FIRST)) == abs(bound) - 1, "what was clamped is not owed"


# -- Update -----------------------------------------------------------------------------------------------------------


def test_an_update_keeps_the_kind_and_the_source_of_what_it_replaces_where_they_agree() -> None:
    page, other = (entry(name, kind="document", source=f"{name}.md") for name in ("aaaa", "bbbb"))
    topic = Topic(page, other, THIRD)
    made = [topic.plan(said("Update", *ids, content="new")).drafts[-1] for ids in (["aaaa"], ["aaaa", "bbbb"])]
    made.append(topic.plan(said("Update", "aaaa", "cccc", content="new")).drafts[-1])
    assert [(draft.kind, draft.source) for draft in made] == [
        ("document", "aaaa.md"),
        ("document", None),
        ("turn", None),
    ]


# -- ids that cannot be corrected -------------------------------------------------------------------------------------


def test_dead_and_unknown_ids_fail_while_the_others_of_the_correction_apply() -> None:
    dead = entry("dddd", status=Status.DEPRECATED, vector=b"")
    topic = Topic(FIRST, dead, SECOND)
    outcome = topic.correct(said("Helpful", "dddd", "aaaa", "eeee", "bbbb"))
    assert outcome.failed == ("dddd", "eeee")
    assert [draft.uuid for draft in outcome.drafts] == [FIRST.uuid, SECOND.uuid]


@pytest.mark.parametrize("then", ["Helpful", "Unhelpful", "Update"])
def test_what_an_earlier_correction_of_the_request_deprecated_is_dead_for_the_later_ones(then: Action) -> None:
    outcome = Topic(FIRST, SECOND).plan(said("Update", "aaaa"), said(then, "aaaa", "bbbb"))
    assert outcome.failed == ("aaaa",)
    assert [draft.uuid for draft in outcome.drafts] == [FIRST.uuid, SECOND.uuid]


def test_praise_before_an_update_of_the_same_request_still_counts_in_the_audit() -> None:
    praised, gone, new = Topic(FIRST).plan(said("Helpful", "aaaa"), said("Update", "aaaa", content="new")).drafts
    assert (praised.utility_steps, praised.status) == (1, Status.ACTIVE)
    assert (gone.utility_steps, gone.status) == (1, Status.DEPRECATED)
    assert new.utility_steps == 0, "the new chunk has yet to prove itself"


# -- chunks of related topics -----------------------------------------------------------------------------------------


def test_a_chunk_of_another_topic_keeps_its_identity_as_it_is_adopted() -> None:
    foreign = entry("abcd", "user: elsewhere", at=50, origin_id=20, utility_steps=4, public_id="abcde")
    home = Topic(foreign)
    here = Topic(related=home)
    (draft,) = here.correct(said("Helpful", "abcde")).drafts
    assert (draft.uuid, draft.public_id, draft.origin_id) == (foreign.uuid, "abcde", 20)
    assert (draft.utility_steps, draft.vector, draft.content) == (5, foreign.vector, "user: elsewhere")
    here.correct(said("Helpful", "abcde"))
    assert here.steps(foreign) == 6 and home.steps(foreign) == 4, "from then on it lives here; its home is untouched"


# -- all of it --------------------------------------------------------------------------------------------------------

NAMES = ["aaaa", "bbbb", "cccc", "eeee"]
CORRECTIONS = st.builds(
    said,
    st.sampled_from(["Helpful", "Unhelpful", "Helpful", "Update"]),
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    content=st.none() | st.just("new"),
)


@given(st.lists(CORRECTIONS, max_size=25), st.integers(1, 25))
def test_corrections_have_the_same_effect_in_one_request_or_in_several(
    corrections: Sequence[Correction], size: int
) -> None:
    together, apart = Topic(FIRST, SECOND, THIRD), Topic(FIRST, SECOND, THIRD)
    outcome = together.correct(*corrections)
    parts = [apart.correct(*corrections[at : at + size]) for at in range(0, len(corrections), size)]
    assert outcome.drafts == tuple(draft for part in parts for draft in part.drafts)
    assert outcome.failed == tuple(one for part in parts for one in part.failed)
    assert together.entries == apart.entries


@given(st.lists(CORRECTIONS, max_size=25))
def test_no_entry_breaks_the_rules_of_the_log(corrections: Sequence[Correction]) -> None:
    for draft in Topic(FIRST, SECOND, THIRD).plan(*corrections).drafts:
        assert draft.utility_steps == clamped_steps(draft.utility_steps)
        assert (draft.status is Status.DEPRECATED) == (draft.vector == b"") == (draft.content == "")
        assert draft.action in ("Helpful", "Unhelpful", "Update") and draft.reason == "because"


def test_opposite_corrections_cancel_exactly() -> None:
    topic = Topic(FIRST)
    topic.correct(*[said("Helpful", "aaaa")] * 7)
    topic.correct(*[said("Unhelpful", "aaaa")] * 7)
    assert topic.entries[FIRST.uuid].utility_steps == 0


def test_an_id_named_twice_in_one_correction_counts_once() -> None:
    topic = Topic(FIRST)
    assert len(topic.correct(said("Helpful", "aaaa", "aaaa", FIRST.uuid.hex())).drafts) == 1
    assert topic.steps(FIRST) == 1


def test_separate_corrections_of_one_request_each_count() -> None:
    topic = Topic(FIRST)
    outcome = topic.correct(said("Helpful", "aaaa"), said("Helpful", "aaaa"), said("Unhelpful", "aaaa"))
    assert [draft.utility_steps for draft in outcome.drafts] == [1, 2, 1]
    assert topic.steps(FIRST) == 1


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_an_update_without_content_only_deprecates(content: str | None) -> None:
    (draft,) = Topic(FIRST).plan(said("Update", "aaaa", content=content)).drafts
    assert draft.uuid == FIRST.uuid and draft.status is Status.DEPRECATED


def test_the_new_text_is_kept_verbatim() -> None:
    assert Topic(FIRST).plan(said("Update", "aaaa", content="  two\nlines ")).drafts[-1].content == "  two\nlines "


def test_an_update_of_which_no_id_can_be_corrected_adds_nothing() -> None:
    assert Topic(FIRST).plan(said("Update", "dddd", content="new")) == Plan((), ("dddd",))
