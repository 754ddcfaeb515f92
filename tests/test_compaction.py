"""When the hot buffer is too full, and where a conversation may be cut."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from types import FrameType

import msgspec
import pytest
from histories import conversation_of, said
from hypothesis import given
from hypothesis import strategies as st

from memd.conversation.compaction import (
    Departure,
    cut_positions,
    departure,
    finished_end,
    is_stored_kind,
    part_starts,
    return_position,
    surplus_instructions,
    turns,
)
from memd.conversation.conversation import Conversation, Line
from memd.messages import Message, ToolCall

THREE_TURNS = ("u:1", "a:2", "u:3", "a:4", "u:5", "a:6")


# -- cuts -------------------------------------------------------------------------------------------------------------


def test_a_conversation_is_cut_in_front_of_its_user_messages() -> None:
    assert cut_positions(conversation_of(*THREE_TURNS)) == [2, 4]


def test_what_a_program_wrote_in_the_users_name_opens_no_turn() -> None:
    loop = ("u:1", "a:2", "u:3", "c:read#1", "t:x#1", "p:be quick", "c:read#2", "t:x#2")
    assert cut_positions(conversation_of(*loop)) == [2]
    assert turns(conversation_of(*loop))[-1].units == (range(3, 6), range(6, 8))
    assert [*part_starts(said(one) for one in loop)] == [0, 2, 6]


@pytest.mark.parametrize(
    ("history", "cuts"),
    [
        (("u:1", "c:read#1", "u:hurry", "t:x#1", "a:2", "u:3"), [5]),
        (("u:1", "c:read#1,2", "t:x#1", "u:hurry", "t:x#2", "a:2", "u:3"), [6]),
        (("u:1", "c:read#1", "u:a", "c:read#2", "u:b", "t:x#2", "u:c", "t:x#1", "u:3"), [8]),
        (("u:1", "c:read#1", "u:never answered", "a:2", "u:3"), [2, 4]),
        (("u:1", "t:x#9", "u:3"), [2]),
    ],
    ids=["spoken in between", "parallel calls", "nested", "no result", "no call"],
)
def test_a_call_stays_with_its_results(history: tuple[str, ...], cuts: list[int]) -> None:
    assert cut_positions(conversation_of(*history)) == cuts


@pytest.mark.parametrize(
    ("history", "starts"),
    [
        (("u:1", "a:2", "u:3", "a:4", "a:5"), [0, 2]),
        (("u:1", "c:read#1,2", "t:x#1", "t:x#2", "a:2", "u:3"), [0, 5]),
        (
            ("u:1", "a:Let me see.", "c:read#1", "t:x#1", "c:read#2", "t:x#2", "a:And", "c:read#3", "t:x#3", "a:z"),
            [0, 4, 7],
        ),
        (("c:read#1", "c:read#2", "t:x#1", "t:x#2", "c:read#3"), [0, 4]),
        ((), []),
    ],
    ids=["no calls", "one round", "two rounds", "parallel calls one by one", "nothing"],
)
def test_a_part_is_a_turn_or_one_round_of_calls_with_their_results(history: tuple[str, ...], starts: list[int]) -> None:
    assert [*part_starts(said(one) for one in history)] == starts


def test_calls_that_nothing_answers_are_not_gone_through_one_by_one() -> None:
    """On the event loop 300,000 of them took seconds."""
    conversation = conversation_of("u:1", "a:2", "t:x#call_7")
    item = conversation.messages[1]
    calls = tuple(ToolCall(f"call_{number}", "look", "{}") for number in range(10_000))
    conversation.messages[1] = msgspec.structs.replace(item, message=Message("assistant", "", tool_calls=calls))
    steps = 0

    def count(_frame: FrameType, event: str, _: object) -> None:
        nonlocal steps
        steps += event == "call"  # of a generator too, each time it goes on

    sys.setprofile(count)
    try:
        found = turns(conversation), departure(conversation, fraction=0.5)
    finally:
        sys.setprofile(None)
    assert [unit for turn in found[0] for unit in turn.units] == [range(1, 3)]
    assert steps < 1000


def test_calls_of_the_older_function_api_stay_with_their_results() -> None:
    conversation = conversation_of("u:1", "a:2", "u:3")
    call, result = Message("assistant", "", tool_calls=(ToolCall("", "f", "{}"),)), Message("function", "x", name="f")
    for position, message in enumerate([call, Message("user", "hurry"), result]):
        item = conversation.messages[0]
        conversation.messages.insert(position + 1, type(item)(item.digest, item.content_digest, 10, message))
    assert cut_positions(conversation) == [5]


ANSWERS: list[tuple[str, ...]] = [
    ("a:x",),
    ("c:f#1", "t:r#1", "a:x"),
    ("c:f#1,2", "t:r#2", "t:r#1", "a:x"),
    ("c:f#1", "u:h", "t:r#1"),
    ("c:f#1",),
    (),
]
TURNS = st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=8)


def taken(conversation: Conversation, chosen: Departure) -> list[str]:
    """The texts that stay in the prompt, in shorthand; `-` for a result that a line replaces."""
    conversation.mark_left_out(chosen.left_out)
    conversation.mark_gone(chosen.gone, {position: Line("-", 4) for position in chosen.replaced})
    stay = [(p, conversation.messages[p].message) for p in conversation.visible_positions()]
    return ["-" if p in conversation.lines else shorthand(message) for p, message in stay if message is not None]


def shorthand(message: Message) -> str:
    if message.tool_calls:
        return f"c:#{','.join(call.id for call in message.tool_calls)}"
    return f"{message.role[0]}:{message.text}"


def weighed(*history: str, left_out: int = 0, **tokens: int) -> Conversation:
    """A conversation whose results weigh 500 tokens, or as given by kind, and all else 10."""
    conversation = conversation_of(*history)
    weights = {"t": 500} | tokens
    for position, one in enumerate(history):
        item = conversation.messages[position]
        conversation.messages[position] = msgspec.structs.replace(item, tokens=weights.get(one[0], 10))
    return conversation


LOOP = ("u:q", "c:f#1", "t:r1#1", "c:f#2", "t:r2#2", "c:f#3", "t:r3#3", "c:f#4", "t:r4#4")
"""An open turn of four units."""


@given(TURNS, st.floats(0, 1), st.integers(0, 3_000), st.booleans())
def test_whatever_leaves_the_prompt_stays_valid(
    answers: list[tuple[str, ...]], fraction: float, excess: int, forced: bool
) -> None:
    numbered = [[one.replace("#", f"#{n}").replace(",", f",{n}") for one in answer] for n, answer in enumerate(answers)]
    history = [one for answer in numbered for one in ("u:q", *answer)]
    conversation = weighed(*history)
    stay = taken(conversation, departure(conversation, fraction=fraction, excess_tokens=excess, forced=forced))
    positions = conversation.visible_positions()
    calls = {one for position in positions for one in call_ids(conversation, position)}
    results = [conversation.messages[p].message for p in positions if history[p].startswith("t:")]
    answered = {result.tool_call_id for result in results if result is not None}
    has_result = {one.partition("#")[2] for one in history if one.startswith("t:")}
    assert stay[0] == "u:q" and conversation.last_user_position() in positions
    assert answered <= calls and calls & has_result <= answered
    assert doubled(stay) <= doubled([shorthand(said(one)) for one in history])


def doubled(texts: Sequence[str]) -> int:
    """How often two user messages stand side by side."""
    return sum(one[0] == other[0] == "u" for one, other in itertools.pairwise(texts))


def call_ids(conversation: Conversation, position: int) -> list[str]:
    message = conversation.messages[position].message
    return [] if message is None else [call.id for call in message.tool_calls]


@pytest.mark.parametrize(
    ("fraction", "excess", "cut"), [(0.5, 0, 4), (0.1, 0, 2), (0.34, 0, 4), (1.0, 0, 4), (0.1, 30, 4), (0.5, 9_999, 4)]
)
def test_at_least_the_fraction_and_the_excess_are_taken_where_turns_allow_it(
    fraction: float, excess: int, cut: int
) -> None:
    assert departure(conversation_of(*THREE_TURNS), fraction=fraction, excess_tokens=excess) == Departure(cut)


def test_nothing_is_taken_of_a_single_turn_without_tools() -> None:
    assert departure(conversation_of("u:1", "a:2"), fraction=0.5, excess_tokens=99).is_empty
    assert departure(conversation_of("u:1"), fraction=0.5, excess_tokens=99).is_empty
    assert departure(conversation_of(), fraction=0.5).is_empty


def test_of_an_open_turn_that_is_too_long_the_oldest_results_become_lines() -> None:
    stay = taken(conversation := weighed(*LOOP), departure(conversation, fraction=0.1, excess_tokens=250))
    assert stay == ["u:q", "c:#1", "-", "c:#2", "t:r2", "c:#3", "t:r3", "c:#4", "t:r4"]


def test_it_gives_way_down_to_half_of_what_it_may_keep() -> None:
    conversation = weighed("u:q", *(one for n in range(10) for one in (f"c:f#{n}", f"t:r{n}#{n}")))
    taken(conversation, departure(conversation, fraction=0.5, excess_tokens=1_100))
    assert 1_500 <= conversation.visible_tokens() <= 2_000, "of 5,110 it may keep 4,010"


def test_where_lines_do_not_free_enough_whole_units_of_the_open_turn_leave_but_never_the_newest() -> None:
    conversation = weighed(*LOOP, c=400)
    assert taken(conversation, departure(conversation, fraction=0.1, excess_tokens=1_700)) == [
        "u:q", "c:#3", "-", "c:#4", "t:r4",
    ]  # fmt: skip
    assert taken(conversation, departure(conversation, fraction=0.4, excess_tokens=9_000)) == ["u:q", "c:#4", "t:r4"]


def test_calls_and_lines_stay_where_they_take_little_and_the_newest_result_takes_much() -> None:
    conversation = weighed(*LOOP)
    conversation.messages[8] = msgspec.structs.replace(conversation.messages[8], tokens=3_000)
    stay = taken(conversation, departure(conversation, fraction=0.5, excess_tokens=300))
    assert stay == ["u:q", "c:#1", "-", "c:#2", "-", "c:#3", "-", "c:#4", "t:r4"]


def test_results_that_the_model_has_not_read_stay_with_the_last_finished_turn() -> None:
    """Aider puts the files of a question behind the history, in the user's name."""
    said_before = ("u:q", "a:one", "u:w", "a:two", "a:three")
    given = weighed(*said_before, "r:the files", "u:next")
    assert taken(given, departure(given, fraction=1.0, excess_tokens=9_000)) == [
        "u:w",
        "a:three",
        "u:the files",
        "u:next",
    ]
    forced = weighed(*said_before, "r:the files", "u:next")
    assert taken(forced, departure(forced, fraction=1.0, excess_tokens=9_000, forced=True)) == ["u:next"]
    interrupted = weighed(*said_before, "c:f#1", "t:r#1", "u:next")
    assert taken(interrupted, departure(interrupted, fraction=1.0, excess_tokens=9_000)) == [
        "u:w",
        "c:#1",
        "t:r",
        "u:next",
    ]
    read = weighed(*said_before, "r:the files", "a:four", "u:next")
    assert taken(read, departure(read, fraction=1.0, excess_tokens=9_000)) == ["u:next"]


def test_results_of_the_newest_unit_become_lines_only_where_the_request_would_be_refused() -> None:
    conversation = weighed("u:q", "c:f#1", "t:huge#1", t=9_000)
    assert departure(conversation, fraction=0.5, excess_tokens=5_000).is_empty
    assert taken(conversation, departure(conversation, fraction=0.5, excess_tokens=5_000, forced=True)) == [
        "u:q", "c:#1", "-",
    ]  # fmt: skip


def test_a_long_finished_turn_leaves_unit_by_unit() -> None:
    conversation = weighed(*LOOP, "a:done", "u:thanks")
    stay = taken(conversation, departure(conversation, fraction=0.4, excess_tokens=100))
    assert stay == ["u:q", "c:#3", "t:r3", "c:#4", "t:r4", "a:done", "u:thanks"]
    assert taken(conversation, departure(conversation, fraction=1.0, excess_tokens=100)) == ["u:thanks"]


def test_only_what_is_durable_leaves() -> None:
    conversation = weighed(*LOOP, "a:done", "u:thanks")
    assert departure(conversation, fraction=0.9, excess_tokens=100, upto=4).gone == (1, 2)
    assert departure(conversation, fraction=0.9, excess_tokens=100, upto=0).is_empty


def test_instructions_in_mid_conversation_stay_until_they_take_too_much() -> None:
    conversation = conversation_of("u:1", "s:be brief", "a:2", "u:3", "s:in French", "a:4", "u:5")
    stay = taken(conversation, departure(conversation, fraction=1.0, excess_tokens=99))
    assert stay == ["s:be brief", "s:in French", "u:5"]
    assert surplus_instructions(conversation, 20) == []
    assert surplus_instructions(conversation, 19) == [1]
    conversation.mark_gone([1], {})
    assert conversation.visible_positions() == [4, 6] and conversation.owed == {1}


def test_the_part_that_comes_back_is_found_without_a_count_for_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = conversation_of(*["u:the same"] * 2_000)
    conversation.mark_left_out(1_999)
    counted: list[int] = []
    real = Conversation.tokens_between

    def tokens_between(self: Conversation, start: int, end: int) -> int:
        counted.append(start)
        return real(self, start, end)

    monkeypatch.setattr(Conversation, "tokens_between", tokens_between)
    opened = range(len(conversation))
    assert return_position(conversation, opened, 0, whole_max=100, part_max=95) == 1_991
    assert return_position(conversation, opened, 0, whole_max=100, part_max=5) is None
    assert return_position(conversation, opened, 0, whole_max=20_000, part_max=95) == 0
    assert len(counted) < 50


# -- what can be stored while a conversation goes on ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("history", "end"),
    [
        ((), 0),
        (("u:1",), 0),
        (("u:1", "a:2"), 2),
        (("u:1", "a:2", "u:3"), 2),
        (("u:1", "a:2", "u:3", "c:read#1"), 2),
        (("u:1", "a:2", "u:3", "c:read#1", "t:x#1"), 2),
        (("u:1", "a:2", "u:3", "c:read#1", "t:x#1", "a:4"), 6),
        (("u:1", "c:read#1", "u:never mind", "a:2"), 4),
        (("u:1", "a:2", "u:3", "c:read#1", "u:hurry", "t:x#1"), 2),
    ],
)
def test_what_is_finished_ends_with_a_complete_exchange(history: tuple[str, ...], end: int) -> None:
    assert finished_end(conversation_of(*history)) == end


@pytest.mark.parametrize(
    ("message", "stored"),
    [
        (Message("user", "hello"), True),
        (Message("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),)), True),
        (Message("tool", "result"), True),
        (Message("user", "[image]", attachments=(b"x" * 16,)), True),
        (Message("assistant", " \n"), False),
        (Message("system", "be brief"), False),
        (Message("developer", "be brief"), False),
    ],
)
def test_empty_messages_and_instructions_are_not_remembered(message: Message, stored: bool) -> None:
    assert is_stored_kind(message) is stored
