"""Which conversation a request belongs to, and what a conversation keeps."""

from __future__ import annotations

import itertools

import pytest
from histories import conversation_of, said

from memd.conversation import matching
from memd.conversation.conversation import Conversation, Run, as_buffered
from memd.conversation.matching import ConversationIndex, Match, _rejoin, match

LONG = ("u:1", "a:2", "u:3", "a:4", "u:5", "a:6")


def matched(conversations: list[Conversation], *history: str, session: str | None = None) -> Match:
    index = ConversationIndex()
    for conversation in reversed(conversations):
        index.note(conversation)
    return match(index, [said(one).content_digest for one in history], session)


def test_a_branch_of_a_conversation_that_a_damaged_journal_cut_short_has_what_is_left() -> None:
    assert len(conversation_of(*LONG[:2]).fork("branch", 5)) == 2
    assert len(Conversation("empty").fork("branch", 2)) == 0


def in_session(session: str, *history: str) -> Conversation:
    conversation = conversation_of(*history)
    conversation.session = session
    return conversation


@pytest.mark.parametrize("start", [1, 2, 3, 4])
def test_a_trimmed_history_rejoins_its_conversation(start: int) -> None:
    conversation = conversation_of(*LONG)
    assert matched([conversation], *LONG[start:], "u:7") == Match(conversation, start, 6 - start)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (("u:3", "a:4", "u:5", "u:7"), (2, 3)),
        (("u:3", "a:4", "u:5", "a:changed", "u:7"), (2, 3)),
        (("u:3", "a:4", "u:5"), (2, 3)),
        (("u:3", "a:4", "u:edited"), (2, 2)),
    ],
    ids=["answer never came", "answer changed", "regenerate", "edit"],
)
def test_a_trimmed_history_may_differ_in_its_last_exchange(history: tuple[str, ...], expected: tuple[int, int]) -> None:
    conversation = conversation_of(*LONG)
    assert matched([conversation], *history) == Match(conversation, *expected)


@pytest.mark.parametrize(
    ("history", "runs"),
    [
        (("u:edited", *LONG[1:], "u:7"), [(1, 1, 5)]),
        ((*LONG[:2], "u:edited", *LONG[3:], "u:7"), [(0, 0, 2), (3, 3, 3)]),
        ((*LONG[2:4], "u:edited", "a:6", "u:7"), [(0, 2, 2), (3, 5, 1)]),
        (("u:0", *LONG, "u:7"), [(1, 0, 6)]),
    ],
    ids=["the first message replaced", "an edit", "an edit in a trimmed history", "a message put in front"],
)
def test_a_rewritten_history_has_the_messages_that_stayed(history: tuple[str, ...], runs: list[Run]) -> None:
    conversation = conversation_of(*LONG)
    found = matched([conversation, conversation_of("u:1", "a:no")], *history)
    assert found.conversation is conversation and list(found.runs) == runs and found.known == matching.total(runs)


class Counted(bytes):
    """Contents that count how often two of them are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__eq__(other)

    __hash__ = bytes.__hash__


def test_a_history_in_which_the_same_few_words_recur_is_not_compared_from_each_of_them_on() -> None:
    def contents(edited: int) -> list[bytes]:
        words = ["u:go" if place % 2 else "a:ok" for place in range(4_000)]
        words[edited] = "u:edited"
        return [Counted(said(word).content_digest) for word in words]

    index, known = ConversationIndex(), Conversation("known")
    known.messages = as_buffered(known, [said("u:go")] * 4_000, contents(3_000), [1] * 4_000)
    index.note(known)
    Counted.compared = 0
    match(index, contents(2_000), None)
    assert Counted.compared < 50 * 4_000, "quadratic, they are a million"


@pytest.mark.parametrize("after", [-1, 0, 2])
def test_where_few_words_recur_a_trimmed_history_rejoins_where_it_shares_most(after: int) -> None:
    known = [item.content_digest for item in conversation_of("u:go", "a:ok", "u:go", "u:go", "a:ok", "u:go").messages]
    for size in range(6):
        for contents in itertools.product({*known, b"new"}, repeat=size):
            fitting = [
                place
                for place in range(after + 1, len(known) - 1)
                if (run := max(2, len(known) - 2 - place)) and known[place : place + run] == list(contents[:run])
            ]
            found = _rejoin(known, conversation_of(), list(contents), after=after)
            assert (None if found is None else found.offset) == (min(fitting) if fitting else None)


def test_a_trimmed_history_rejoins_the_conversation_with_which_it_shares_most() -> None:
    recent = conversation_of("u:x", "u:thanks", "a:welcome")
    right = conversation_of("u:1", "a:2", "u:3", "u:thanks", "a:welcome")
    assert matched([recent, right], "a:2", "u:3", "u:thanks", "a:welcome", "u:new") == Match(right, 1, 4)


@pytest.mark.parametrize("head", [1, 2, 3])
@pytest.mark.parametrize("start", [3, 4])
def test_a_history_trimmed_in_its_middle_rejoins_its_conversation(head: int, start: int) -> None:
    conversation = conversation_of(*LONG)
    history = (*LONG[:head], *LONG[max(start, head) :], "u:7")
    gap = max(start, head) - head
    expected = Match(conversation, gap, 6 - gap, head) if gap else Match(conversation, 0, 6)
    assert matched([conversation], *history) == expected


def test_with_a_session_the_same_words_after_an_answer_are_a_new_message() -> None:
    mine = in_session("mine", *LONG)
    assert matched([mine], "u:5", session="mine") == Match(mine, 6, 0)
