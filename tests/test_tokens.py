"""Token counts with the bundled cl100k_base ranks, and the drift between them and a model's own."""

import base64
import random

import pytest
from effort import scaled
from hypothesis import given
from hypothesis import strategies as st

from memd.assets import ranks_bytes
from memd.conversation.tokens import ATTACHMENT_TOKENS, MESSAGE_OVERHEAD, Drift, TokenCounter, cl100k_base
from memd.messages import Message, ToolCall


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("hello world", 2), ("antidisestablishmentarianism", 6), ("2 + 2 = 4", 7), ("お誕生日おめでとう", 9)],
)
def test_counts_are_those_that_openai_publishes_for_cl100k_base(counter: TokenCounter, text: str, tokens: int) -> None:
    assert counter.count(text) == tokens  # the strings of the OpenAI cookbook's comparison of encodings


@pytest.mark.parametrize(
    "unit", ["a", " ", "\t ", "\n", "aB3+", "记忆系统保存对话的内容", "👩‍👩‍👧", "7", "=", "\ud800", "\x00"]
)
@pytest.mark.parametrize("ending", ["", "x\n"])
def test_a_megabyte_of_anything_is_counted(counter: TokenCounter, unit: str, ending: str) -> None:
    text = unit * (scaled(1_000_000) // len(unit)) + ending
    assert 0 < counter.count(text) < 5 * len(text)


PROSE = "It was a bright cold day in April, and the clocks were striking thirteen. "
CODE = "    if self.left[0] != 4711:\n        return found(number, x=0.25)\n"
LONG = {
    "prose": PROSE * 3000,
    "code": CODE * 3000,
    "Chinese": "记忆系统保存对话的内容，然后回答问题。" * 5000,
    "random": base64.b64encode(random.Random(1).randbytes(150_000)).decode(),
    "a little longer than what is counted": PROSE * 275,
    "by turns": PROSE * 1500
    + CODE * 1000
    + base64.b64encode(random.Random(2).randbytes(60_000)).decode()
    + PROSE * 500,
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_text_is_estimated_from_samples_and_rather_too_high(counter: TokenCounter, name: str) -> None:
    exact, estimated = counter.count(LONG[name]), counter.estimate(LONG[name])
    assert 0.98 * exact <= estimated <= (1.2 if name == "by turns" else 1.05) * exact
    assert estimated == counter.estimate(LONG[name])


@pytest.mark.parametrize("unit", ["a", " ", "\n", "记", "👩‍👩‍👧", "\ud800", "\x00"])
def test_no_text_takes_longer_to_estimate_than_its_samples(counter: TokenCounter, unit: str) -> None:
    counted: list[str] = []
    sampled = TokenCounter(cl100k_base(ranks_bytes()))
    sampled.count = lambda text: counted.append(text) or counter.count(text)  # type: ignore[method-assign, func-returns-value]
    assert sampled.estimate(unit * (scaled(1_000_000) // len(unit))) > 0
    assert sum(map(len, counted)) <= 20_000


def test_a_message_counts_its_text_its_calls_its_attachments_and_the_template(counter: TokenCounter) -> None:
    plain = Message(role="user", text="hello world")
    assert counter.message(plain, plain.content_digest) == 2 + MESSAGE_OVERHEAD
    seeing = Message(role="user", text="hello world", attachments=(bytes(16),))
    assert counter.message(seeing, seeing.content_digest) == 2 + MESSAGE_OVERHEAD + ATTACHMENT_TOKENS
    calling = Message(role="assistant", text="", tool_calls=(ToolCall("call_1", "weather", '{"city": "Paris"}'),))
    assert counter.message(calling, calling.content_digest) > 2 * MESSAGE_OVERHEAD + 6


def test_outer_white_space_is_counted_although_the_digest_ignores_it(counter: TokenCounter) -> None:
    bare, padded = Message(role="user", text="hi"), Message(role="user", text="hi" + "\n \t" * 1000)
    assert bare.content_digest == padded.content_digest
    assert counter.message(padded, padded.content_digest) > counter.message(bare, bare.content_digest) + 500


def test_the_first_answer_of_a_model_with_a_token_per_character_is_enough() -> None:
    drift = Drift()
    drift.observe("tiny", 1000, 4500)
    assert drift.factor("tiny") == pytest.approx(4.5)
    assert drift.drifted("tiny", 101) == 455
    assert drift.factor("other") == 1.0


@given(st.lists(st.tuples(st.integers(-10, 10**7), st.integers(-10, 10**9))))
def test_drift_stays_within_its_bounds(samples: list[tuple[int, int]]) -> None:
    drift = Drift()
    for raw, said in samples:
        drift.observe("m", raw, said)
    assert Drift.FACTOR_MIN <= drift.factor("m") <= Drift.FACTOR_MAX


def test_only_so_many_models_are_remembered_the_oldest_is_forgotten() -> None:
    drift = Drift()
    for number in range(Drift.MODELS_MAX + 1):
        drift.observe(str(number), 1000, 2000)
    assert drift.factor("0") == 1.0
    assert drift.factor(str(Drift.MODELS_MAX)) == 2.0
