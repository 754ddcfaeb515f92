"""Who gives way when reply, memory and history do not fit the window together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from conftest import MakeDaemon
from hypothesis import given
from hypothesis import strategies as st
from recording_upstream import RecordingUpstream
from strict_llama import StrictLlama

from memd.conversation.compaction import UNLIMITED, Thresholds, keeps_earlier_blocks, thresholds


def limits(window: int | None, **given_instead: Any) -> Thresholds:
    settings: dict[str, Any] = {
        "counts_reply": False,
        "max_tokens": None,
        "standing_tokens": 0,
        "soft": "auto",
        "hard": "auto",
        "injection_tokens": 2_000,
        "sticky_tokens": 4_000,
    }
    return thresholds(window=window, **(settings | given_instead))


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


def test_as_long_as_no_window_is_known_nothing_leaves() -> None:
    found = limits(None, max_tokens=32_000, standing_tokens=18_000)
    assert found.room == UNLIMITED and found.hard > 10**15 and found.soft > 10**15
    assert keeps_earlier_blocks(found, text=10**9, earlier=4_000, current=0)
    assert found.injection == 2_000


def test_a_threshold_set_by_hand_is_an_upper_bound_whether_the_window_is_known_or_not() -> None:
    assert (limits(32_768, soft=1_000, hard=2_000).soft, limits(32_768, soft=1_000, hard=2_000).hard) == (1_000, 2_000)
    assert limits(32_768, hard=2_000).soft == 1_750
    assert (limits(None, soft=6_000, hard=8_000).soft, limits(None, soft=6_000, hard=8_000).hard) == (6_000, 8_000)
    assert limits(None, hard=8_000).room == 10_000
    assert limits(4_096, hard=50_000).hard == limits(4_096).hard
    assert limits(4_096, soft=50_000, hard=50_000).soft == limits(4_096).hard


def test_where_the_server_counts_max_tokens_the_reply_does_not_shrink() -> None:
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
    found = limits(
        window,
        max_tokens=max_tokens,
        standing_tokens=standing,
        injection_tokens=injection,
        counts_reply=counts_reply,
    )
    asked = max_tokens if max_tokens is not None and max_tokens > 0 else window // 8
    assert 0 <= found.soft <= found.hard <= found.room
    assert found.room == 0 or found.room + standing + min(asked, max(512, window // 16), window // 2) <= window
    assert found.injection <= window // 4 and 0 <= found.injection_min <= max(window // 16, 0)


# -- the blocks of earlier turns --------------------------------------------------------------------------------------

CITIES = ["Oslo", "Lima", "Cairo", "Quito", "Perth", "Turin", "Basel", "Osaka", "Delhi", "Accra", "Sofia", "Malmo"]
MOVES_MAX = 8
"""In 40 turns; it is 4, and was 19 where the blocks left alone and the history some turns later."""


def test_blocks_and_history_leave_together_and_the_prompt_stays_as_it_is_for_many_turns(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    strict = StrictLlama(4_096)
    upstream.answer, upstream.answers_all = strict, True
    daemon = make_daemon(upstream.url, {"retrieval": {"recall_budget_ms": 5_000, "timeout_ms": 30_000}}).start()
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
    assert 0 < moves <= MOVES_MAX, moves
