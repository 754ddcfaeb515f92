"""When the hot buffer is too full, where a conversation may be cut, and who gives way in a window."""

import itertools
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import msgspec
import pytest
from conftest import Serving
from histories import conversation_of, said
from hypothesis import given
from hypothesis import strategies as st
from recording_upstream import RecordingUpstream
from strict_llama import StrictLlama

from memd.conversation.compaction import (
    UNLIMITED,
    Departure,
    Thresholds,
    cut_positions,
    departure,
    finished_end,
    keeps_earlier_blocks,
    part_starts,
    return_position,
    thresholds,
    turns,
)
from memd.conversation.conversation import Conversation, Line
from memd.messages import Message, ToolCall
from memd.settings.model import BufferSettings, InjectionSettings

THREE_TURNS = ("u:1", "a:2", "u:3", "a:4", "u:5", "a:6")


# -- cuts -------------------------------------------------------------------------------------------------------------


def test_what_a_program_wrote_in_the_users_name_opens_no_turn() -> None:
    loop = ("u:1", "a:2", "u:3", "c:read#1", "t:x#1", "p:be quick", "c:read#2", "t:x#2")
    assert cut_positions(conversation_of(*loop)) == [2]
    assert turns(conversation_of(*loop))[-1].units == (range(3, 6), range(6, 8))
    assert [*part_starts(said(one) for one in loop)] == [0, 2, 6]


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
    shown = [(history[p], message) for p in positions if (message := conversation.messages[p].message) is not None]
    calls = {call.id for _, message in shown for call in message.tool_calls}
    answered = {message.tool_call_id for text, message in shown if text.startswith("t:")}
    has_result = {one.partition("#")[2] for one in history if one.startswith("t:")}
    assert stay[0] == "u:q" and conversation.last_user_position() in positions
    assert answered <= calls and calls & has_result <= answered
    assert doubled(stay) <= doubled([shorthand(said(one)) for one in history])


def doubled(texts: Sequence[str]) -> int:
    """How often two user messages stand side by side."""
    return sum(one[0] == other[0] == "u" for one, other in itertools.pairwise(texts))


@pytest.mark.parametrize(
    ("fraction", "excess", "cut"), [(0.5, 0, 4), (0.1, 0, 2), (0.34, 0, 4), (1.0, 0, 4), (0.1, 30, 4), (0.5, 9_999, 4)]
)
def test_the_fraction_and_the_excess_are_taken_where_turns_allow_it(fraction: float, excess: int, cut: int) -> None:
    assert departure(conversation_of(*THREE_TURNS), fraction=fraction, excess_tokens=excess) == Departure(cut)
    assert departure(conversation_of(), fraction=fraction, excess_tokens=excess).is_empty


SAID_BEFORE = ("u:q", "a:one", "u:w", "a:two", "a:three")
ENDED = (*LOOP, "a:done", "u:thanks")
DEPARTURES: dict[str, tuple[tuple[str, ...], dict[str, int], dict[str, Any], str]] = {
    "of an open turn the oldest results become lines": (
        LOOP, {}, {"fraction": 0.1, "excess_tokens": 250}, "u:q c:#1 - c:#2 t:r2 c:#3 t:r3 c:#4 t:r4",
    ),
    "whole units leave where lines do not free enough": (
        LOOP, {"c": 400}, {"fraction": 0.1, "excess_tokens": 1_700}, "u:q c:#3 - c:#4 t:r4",
    ),
    "but never the newest": (LOOP, {"c": 400}, {"fraction": 0.4, "excess_tokens": 9_000}, "u:q c:#4 t:r4"),
    "results that the model has not read stay with the last finished turn": (
        (*SAID_BEFORE, "r:files", "u:next"), {}, {}, "u:w a:three u:files u:next",
    ),
    "unless the request would be refused": (
        (*SAID_BEFORE, "r:files", "u:next"), {}, {"forced": True}, "u:next",
    ),
    "so does a call that was interrupted": (
        (*SAID_BEFORE, "c:f#1", "t:r#1", "u:next"), {}, {}, "u:w c:#1 t:r u:next",
    ),
    "results that it has read leave": ((*SAID_BEFORE, "r:files", "a:four", "u:next"), {}, {}, "u:next"),
    "the newest result stays": (
        ("u:q", "c:f#1", "t:huge#1"), {"t": 9_000}, {"fraction": 0.5, "excess_tokens": 5_000}, "u:q c:#1 t:huge",
    ),
    "and becomes a line where the request would be refused": (
        ("u:q", "c:f#1", "t:huge#1"), {"t": 9_000}, {"fraction": 0.5, "excess_tokens": 5_000, "forced": True},
        "u:q c:#1 -",
    ),
    "a long finished turn leaves unit by unit": (
        ENDED, {}, {"fraction": 0.4, "excess_tokens": 100}, "u:q c:#3 t:r3 c:#4 t:r4 a:done u:thanks",
    ),
    "or all of it": (ENDED, {}, {"excess_tokens": 100}, "u:thanks"),
    "of what is durable alone": (
        ENDED, {}, {"fraction": 0.9, "excess_tokens": 100, "upto": 4},
        "u:q c:#2 t:r2 c:#3 t:r3 c:#4 t:r4 a:done u:thanks",
    ),
}  # fmt: skip
"""Aider puts the files of a question behind the history, in the user's name."""


@pytest.mark.parametrize("name", DEPARTURES)
def test_what_leaves_and_what_stays(name: str) -> None:
    history, tokens, asked, stay = DEPARTURES[name]
    conversation = weighed(*history, **tokens)
    chosen = departure(conversation, **({"fraction": 1.0, "excess_tokens": 9_000} | asked))
    assert taken(conversation, chosen) == stay.split()


def test_it_gives_way_down_to_half_of_what_it_may_keep_but_not_to_a_result_that_takes_much() -> None:
    conversation = weighed("u:q", *(one for n in range(10) for one in (f"c:f#{n}", f"t:r{n}#{n}")))
    taken(conversation, departure(conversation, fraction=0.5, excess_tokens=1_100))
    assert 1_500 <= conversation.visible_tokens() <= 2_000, "of 5,110 it may keep 4,010"

    conversation = weighed(*LOOP)
    conversation.messages[8] = msgspec.structs.replace(conversation.messages[8], tokens=3_000)
    stay = taken(conversation, departure(conversation, fraction=0.5, excess_tokens=300))
    assert stay == ["u:q", "c:#1", "-", "c:#2", "-", "c:#3", "-", "c:#4", "t:r4"]


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


# -- reply, memory and history in one window ------------------------------------------------------------------------


def limits(window: int | None, soft: Any = "auto", hard: Any = "auto", block: int = 2_000, **asked: Any) -> Thresholds:
    buffer, injection = BufferSettings(soft_tokens=soft, hard_tokens=hard), InjectionSettings(budget_tokens=block)
    request = {"counts_reply": False, "max_tokens": None, "standing_tokens": 0} | asked
    return thresholds(buffer, injection, window=window, **request)


@pytest.mark.parametrize(
    ("window", "max_tokens", "standing", "expected"),
    [
        # window, max_tokens, system prompt and tools → injection, history, room of history and blocks
        (131_072, None, 0, (2_000, 120_880, 122_880)),
        (131_072, 4_096, 10_000, (2_000, 114_976, 116_976)),
        (32_768, 1_024, 1_500, (2_000, 28_244, 30_244)),
        (32_768, 32_000, 18_000, (2_000, 10_720, 12_720)),  # issue 17: half of the window stayed empty
        (16_384, 8_192, 6_000, (2_000, 8_336, 9_360)),  # the same
        (8_192, 512, 500, (2_000, 6_668, 7_180)),
        (4_096, None, 0, (1_024, 3_328, 3_584)),
        (4_096, 256, 500, (1_024, 3_084, 3_340)),
        (4_096, 100_000, 0, (1_024, 3_328, 3_584)),
        (4_096, -1, 0, (1_024, 3_328, 3_584)),
        (4_096, None, 5_000, (1_024, 0, 0)),
        (512, None, 0, (128, 416, 448)),
        (1, None, 0, (0, 1, 1)),
    ],
)
def test_thresholds_follow_from_the_window(
    window: int, max_tokens: int | None, standing: int, expected: tuple[int, int, int]
) -> None:
    injection, hard, room = expected
    found = limits(window, max_tokens=max_tokens, standing_tokens=standing)
    assert found == Thresholds(injection, 4_000, hard * 7 // 8, hard, room, standing, window)


def test_thresholds_without_a_window_and_those_set_by_hand() -> None:
    found = limits(None, max_tokens=32_000, standing_tokens=18_000)
    assert found.room == UNLIMITED and found.hard > 10**15 and found.soft > 10**15
    assert keeps_earlier_blocks(found, text=10**9, earlier=4_000, current=0)
    assert found.injection == 2_000

    assert (limits(32_768, soft=1_000, hard=2_000).soft, limits(32_768, soft=1_000, hard=2_000).hard) == (1_000, 2_000)
    assert limits(32_768, hard=2_000).soft == 1_750
    assert (limits(None, soft=6_000, hard=8_000).soft, limits(None, soft=6_000, hard=8_000).hard) == (6_000, 8_000)
    assert limits(None, hard=8_000).room == 10_000
    assert limits(4_096, hard=50_000).hard == limits(4_096).hard
    assert limits(4_096, soft=50_000, hard=50_000).soft == limits(4_096).hard

    counted = limits(32_768, counts_reply=True, max_tokens=20_000, standing_tokens=2_000)
    assert counted.room == 32_768 - 20_000 - 2_000
    assert limits(32_768, counts_reply=True) == limits(32_768), "without max_tokens it takes what is left"


@given(
    st.integers(1, 300_000),
    st.none() | st.integers(-1, 10**9),
    st.integers(0, 100_000),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_history_memory_and_a_reply_always_fit_the_window(
    window: int, max_tokens: int | None, standing: int, injection: int, counts_reply: bool
) -> None:
    found = limits(window, max_tokens=max_tokens, standing_tokens=standing, block=injection, counts_reply=counts_reply)
    asked = max_tokens if max_tokens is not None and max_tokens > 0 else window // 8
    assert 0 <= found.soft <= found.hard <= found.room
    assert found.room == 0 or found.room + standing + min(asked, max(512, window // 16), window // 2) <= window
    assert found.injection <= window // 4 and 0 <= found.injection_min <= max(window // 16, 0)


# -- the blocks of earlier turns --------------------------------------------------------------------------------------

CITIES = ["Oslo", "Lima", "Cairo", "Quito", "Perth", "Turin", "Basel", "Osaka", "Delhi", "Accra", "Sofia", "Malmo"]
SHOWN_MIN = 108
"""Of three codes in each of 40 turns. 44 were, where what earlier blocks showed took the room of what was asked for."""


@pytest.mark.parametrize(("window", "moves_max"), [(4_096, 8), (2_048, 16)])
def test_blocks_and_history_leave_together_and_for_what_is_asked(
    serving: Serving, upstream: RecordingUpstream, window: int, moves_max: int
) -> None:
    strict = StrictLlama(window)
    upstream.answer, upstream.answers_all = strict, True
    daemon = serving({"retrieval": {"recall_budget_ms": 5_000, "timeout_ms": 30_000}})
    for number, city in enumerate(CITIES):
        for store in range(3):
            said = f"In {city} store {store} has the door code {1000 + 37 * number + store}. Its clerk, who likes jazz"
            said += (
                f" from {city}, gets {number + store} lorries a month with {number * 3 + store} pallets of tea each."
            )
            daemon.chat([{"role": "user", "content": said}])
    daemon.export()  # stored
    history: list[dict[str, str]] = []
    prompts = []
    for turn in range(40):
        asked = f"What are the door codes of the stores in {CITIES[turn % len(CITIES)]}, and who is the clerk? "
        history.append({"role": "user", "content": asked + "Take your time with the answer, as always. " * 14})
        daemon.chat(history)
        prompts.append(strict.prompts[-1].parts)
        history.append({"role": "assistant", "content": "Noted."})
    assert any("[mem:" in part for part in prompts[-1]) and len(prompts[-1]) < len(history)
    moves = sum(now[: len(before)] != before for before, now in itertools.pairwise(prompts))
    assert 0 < moves <= moves_max, moves
    asked_for = ((turn, turn % len(CITIES), store) for turn in range(40) for store in range(3))
    shown = sum(
        f"In {CITIES[city]} store {store} has the door code {1000 + 37 * city + store}" in "".join(prompts[turn])
        for turn, city, store in asked_for
    )
    assert shown >= SHOWN_MIN, shown
