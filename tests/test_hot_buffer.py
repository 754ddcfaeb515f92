"""The hot buffer: what clients do to conversations, and that its journal tells the whole story."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import msgspec
import pytest
from effort import scaled
from histories import WINDOW_TURNS, block, digest_at, glance, new_buffer, receive, replayed, said, state, talk, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from memd.conversation import compaction
from memd.conversation.conversation import Conversation, History, Line, TurnKey
from memd.conversation.events import (
    BufferEvent,
    Closed,
    Departed,
    Forgotten,
    Injected,
    Marked,
    Placed,
    Returned,
    decode_event,
    encode_event,
)
from memd.conversation.hot_buffer import Arrival, HotBuffer
from memd.conversation.matching import ConversationIndex, match
from memd.ingest.unstored import ListedParts, Part, each_part, owed_parts
from memd.messages import BlockChunk, chain_all

LONG = ("u:1", "a:2", "u:3", "a:4", "u:5", "a:6")


def left_out(buffer: HotBuffer, conversation: Conversation, position: int) -> None:
    buffer.mark(conversation, stored=position)
    buffer.mark(conversation, left_out=position)


def names(buffer: HotBuffer, *, abandoned: bool = False) -> list[str]:
    return [one.id for one in buffer.conversations() if one.abandoned is abandoned]


def shown_texts(conversation: Conversation) -> list[str]:
    items = (conversation.messages[position] for position in conversation.visible_positions())
    return [item.message.text for item in items if item.message is not None]


def test_where_a_client_moves_its_files_to_the_end_what_the_model_has_not_answered_is_in_the_prompt() -> None:
    buffer = new_buffer()
    begun = ("u:rename it", "a:first edit", "r:edit failed")
    before = talk(buffer, *begun, "a:second edit", "p:no edits", "a:", "r:files", "a:", "r:edit failed", "a:third edit")
    buffer.mark(before, stored=len(before))
    buffer.record(Departed(before.id, list(range(1, 9)), {}))
    asked = (
        *begun,
        "a:second edit",
        "r:edit failed",
        "a:third edit",
        "p:no edits",
        "a:",
        "r:files",
        "a:",
        "r:edit failed",
    )
    arrival = receive(buffer, *asked)
    shown = shown_texts(arrival.conversation)
    assert shown[0] == "rename it"
    assert shown[-5:] == ["no edits", "", "files", "", "edit failed"], "they said the same when they left"
    assert shown[1:-5] == ["third edit"], "units go as a whole"


# -- one client -------------------------------------------------------------------------------------------------------


@given(
    heads=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    tails=st.lists(st.integers(3, 7), min_size=12, max_size=12),
    words=st.lists(st.sampled_from(["go", "ok", "why", "no"]), min_size=30, max_size=30),
)
def test_however_a_client_trims_its_history_there_is_one_conversation_with_all_of_it(
    heads: list[int], tails: list[int], words: list[str]
) -> None:
    buffer = new_buffer()
    everything: list[str] = []
    for turn, (head, tail) in enumerate(zip(heads, tails, strict=False)):
        # Numbered now and then only: the words repeat, as they do where people speak.
        everything += [f"u:{words[2 * turn]} {turn // 3}"]
        sent = everything if len(everything) <= head + tail else [*everything[:head], *everything[-tail:]]
        arrival = receive(buffer, *sent)
        everything += [f"a:{words[2 * turn + 1]} {turn}"]
        buffer.reply(arrival, said(everything[-1]), 10, 0.0)
    [conversation] = buffer.conversations()
    assert conversation.end_digest == digest_at(everything)


@pytest.mark.parametrize(
    ("asked", "whole"),
    [
        (("u:3", "a:4", "u:5", "u:7"), "1 2 3 4 5 7"),
        (("u:3", "a:4", "u:5", "a:changed", "u:7"), "1 2 3 4 5 changed 7"),
        (("u:3", "a:4", "u:5"), "1 2 3 4 5"),
        (("u:3", "a:4", "u:edited"), "1 2 3 4 edited"),
    ],
    ids=["answer never came", "answer changed", "regenerate", "edit"],
)
def test_a_trimmed_history_may_differ_in_its_last_exchange(asked: tuple[str, ...], whole: str) -> None:
    buffer = new_buffer()
    talk(buffer, *LONG)
    arrival = receive(buffer, *asked)
    assert texts(arrival.conversation) == whole.split() and arrival.offset == 2 and not arrival.opened


def test_a_window_that_slides_over_few_recurring_words_goes_on_with_its_conversation() -> None:
    chance, kept = Random(4), 0
    for _ in range(300):
        buffer, everything, head, window = new_buffer(), [], chance.choice([0, 0, 1, 2]), chance.choice([3, 4, 5, 8])
        for turn in range(12):
            for kind, often in ("u", 0.5), ("a", 0.4):
                word = chance.choice(["ok", "no", "go on", "thanks"]) if chance.random() < often else str(turn)
                everything.append(f"{kind}:{word}")
            asked = everything[:-1]
            talk(buffer, *(asked if len(asked) <= head + window else asked[:head] + asked[-window:]), everything[-1])
        kept += len(buffer.conversations()) == 1
    assert kept >= 295, "in the others the window may as well be an earlier place"


def test_with_a_session_newest_messages_alone_make_one_conversation_in_which_each_is_once() -> None:
    buffer = new_buffer()
    talk(buffer, "u:1", "a:2", session="s")
    conversation = talk(buffer, "u:3", "a:4", session="s")
    arrival = receive(buffer, "u:5", session="s")
    assert arrival.conversation is conversation and texts(conversation) == ["1", "2", "3", "4", "5"]
    assert (arrival.offset, arrival.end) == (4, 5) and names(buffer) == ["1"]

    again = receive(buffer, "u:5", session="s")
    assert again.conversation is conversation and texts(conversation) == ["1", "2", "3", "4", "5"]
    assert (again.offset, again.end) == (4, 5)


# -- several at once --------------------------------------------------------------------------------------------------


def test_two_agents_that_begin_with_the_same_words_part_at_their_answers() -> None:
    buffer = new_buffer()
    one, two = receive(buffer, "u:go"), receive(buffer, "u:go")
    first = buffer.reply(one, said("a:1"), 10, 0.0)
    second = buffer.reply(two, said("a:2"), 10, 0.0)
    talk(buffer, "u:go", "a:1", "u:more", "a:3")
    talk(buffer, "u:go", "a:2", "u:else", "a:4")
    assert texts(first) == ["go", "1", "more", "3"] and texts(second) == ["go", "2", "else", "4"]
    assert names(buffer) == [first.id, second.id]


def test_a_new_conversation_that_begins_like_a_longer_one_does_not_give_that_one_up() -> None:
    buffer = new_buffer()
    longer = talk(buffer, *LONG)
    other = talk(buffer, "u:1", "a:something else")
    assert not longer.abandoned and texts(other) == ["1", "something else"]
    receive(buffer, "u:1", "u:2")
    assert not longer.abandoned


def test_an_answer_for_which_the_client_did_not_wait_does_not_give_up_what_the_client_went_on_with() -> None:
    buffer = new_buffer()
    talk(buffer, "u:1", "a:2")
    first = receive(buffer, "u:1", "a:2", "u:3")
    second = receive(buffer, "u:1", "a:2", "u:3", "u:wait")
    late = buffer.reply(first, said("a:late"), 10, 0.0)
    assert texts(late) == ["1", "2", "3", "late"] and second.conversation is not late
    assert not second.conversation.abandoned and names(buffer)[-1] == second.conversation.id
    assert texts(buffer.reply(second, said("a:4"), 10, 0.0)) == ["1", "2", "3", "wait", "4"]


def test_an_answer_that_the_client_has_sent_back_already_is_not_repeated() -> None:
    buffer = new_buffer()
    arrival = receive(buffer, "u:1")
    receive(buffer, "u:1", "a:2", "u:3")
    assert texts(buffer.reply(arrival, said("a: 2 "), 10, 0.0)) == ["1", "2", "3"] and names(buffer) == ["1"]


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
    known.messages = History([said("u:go")] * 4_000, contents(3_000), lambda some, _: [1] * len(some)).behind(known)
    index.note(known)
    Counted.compared = 0
    match(index, History([], contents(2_000), lambda *_: []))
    assert Counted.compared < 50 * 4_000, "quadratic, they are a million"


def test_a_trimmed_history_rejoins_the_conversation_with_which_it_shares_most() -> None:
    buffer = new_buffer()
    right = receive(buffer, "u:1", "a:2", "u:3", "u:thanks", "a:welcome").conversation
    receive(buffer, "u:x", "u:thanks", "a:welcome")
    arrival = receive(buffer, "a:2", "u:3", "u:thanks", "a:welcome", "u:new")
    assert arrival.conversation is right and texts(right) == ["1", "2", "3", "thanks", "welcome", "new"]


# -- what has left the prompt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [LONG[:1], LONG[:3], (*LONG[:2], "u:edited"), ("a:4", "u:5")], ids=repr)
def test_a_request_that_goes_back_has_its_open_turn_in_the_prompt(history: tuple[str, ...]) -> None:
    buffer = new_buffer()
    conversation = talk(buffer, *LONG, "u:7", "a:8")
    left_out(buffer, conversation, 6)
    for arrival in (glance(buffer, *history), receive(buffer, *history)):
        branch = arrival.conversation
        opened = arrival.offset + max(i for i, one in enumerate(history) if one.startswith("u:"))
        assert arrival.end == len(branch) and branch.left_out <= opened
        assert texts(branch)[opened:] == [said(one).text for one in history[opened - arrival.offset :]]


def test_compaction_of_a_conversation_cannot_reach_a_request_that_went_back_in_it() -> None:
    buffer = new_buffer()
    conversation = talk(buffer, *LONG)
    arrival = receive(buffer, *LONG[:3])
    left_out(buffer, conversation, 4)
    assert texts(arrival.conversation) == ["1", "2", "3"]


def test_a_branch_shares_marks_and_blocks_up_to_where_it_leaves() -> None:
    buffer = new_buffer()
    conversation = talk(buffer, *LONG)
    for end in (1, 3, 5):
        buffer.record(Placed(conversation.id, digest_at(LONG[:end]), block(str(end))))
    left_out(buffer, conversation, 2)
    buffer.mark(conversation, stored=6)
    branch = receive(buffer, *LONG[:4], "u:edited").conversation
    assert (branch.stored, branch.left_out) == (4, 2)
    assert branch.blocks == {digest_at(LONG[:3]): block("3")}


def test_a_request_within_the_freeze_after_its_first_arrival_is_a_retry() -> None:
    buffer = new_buffer()
    conversation, key = receive(buffer, "u:1").conversation, TurnKey(digest_at(["u:1"]), b"")
    assert not buffer.note_arrival(conversation, key, 100.0, 120.0)
    assert buffer.note_arrival(conversation, key, 219.0, 120.0)
    assert not buffer.note_arrival(conversation, key, 221.0, 120.0)
    assert buffer.note_arrival(conversation, key, 300.0, 120.0)
    assert not buffer.note_arrival(conversation, key, 200.0, 120.0), "a clock was set back over a restart"


# -- what may be corrected --------------------------------------------------------------------------------------------


def shown(chunk_id: str, uuid: bytes, topic_id: str = "default") -> BlockChunk:
    return BlockChunk(chunk_id, uuid, topic_id, 1)


def test_ids_are_forgotten_after_the_configured_number_of_turns() -> None:
    buffer = new_buffer()
    for number in range(WINDOW_TURNS + 1):
        buffer.record(Injected([shown(f"000{number}", bytes([number]) * 16)]))
    assert buffer.resolve("0000") is None and buffer.resolve("0001") is not None


# -- the journal ------------------------------------------------------------------------------------------------------


def test_a_conversation_that_was_closed_stays_closed_and_takes_no_more() -> None:
    buffer = new_buffer()
    arrival = receive(buffer, "u:1")
    buffer.record(Closed(arrival.conversation.id))
    assert not buffer.is_open(arrival.conversation) and buffer.conversations() == []
    buffer.mark(arrival.conversation, stored=1)
    buffer.record(Placed(arrival.conversation.id, digest_at(["u:1"]), block("1")))
    assert replayed(buffer.take_unsaved()).conversations() == []


def test_an_event_of_another_version_is_refused_by_the_decoder_and_one_with_a_later_field_read() -> None:
    unknown, unfinished = ({"type": "renamed"}, {"type": "opened"})
    for payload in (b"", b"\xc1", msgspec.msgpack.encode(unknown), msgspec.msgpack.encode(unfinished)):
        with pytest.raises(msgspec.DecodeError):
            decode_event(payload)

    event = {"type": "marked", "conversation": "1", "stored": 2, "left_out": 1, "later": True}
    assert decode_event(msgspec.msgpack.encode(event)) == Marked("1", 2, 1)


class Client:
    """A client with its own history, as far as a test must know it."""

    def __init__(self, history: Sequence[str], session: str | None) -> None:
        self.history = list(history)
        self.session = session


class ClientsAndRestarts(RuleBasedStateMachine):
    """Clients that talk, edit, regenerate, retry, trim, overtake themselves; compaction, closing, restarts.

    The model is simple: whatever was said is in an open conversation, in the log, or on a branch that was given up; and
    the journal gives back the buffer.
    """

    clients = Bundle("clients")
    arrivals = Bundle("arrivals")

    @initialize(target=clients)
    def begin(self) -> Client:
        self.names = (str(number) for number in itertools.count(1))
        self.buffer = HotBuffer(lambda: next(self.names), WINDOW_TURNS)
        self._list()
        self.journal: list[BufferEvent] = []
        self.said: set[bytes] = set()
        self.gone: set[bytes] = set()  # in the log, or given up and closed
        self.clock = 0.0
        client = Client(["u:x"], None)
        self.the_model_answers(self.it_asks(client, 0), "a:yes")
        self.it_talks_for_a_while(client, 3, "y")
        return client

    @rule(target=clients, words=st.sampled_from("xyz"), session=st.sampled_from([None, None, "s", "t"]))
    def a_client_comes(self, words: str, session: str | None) -> Client:
        return Client([f"u:{words}"], session)

    @rule(client=clients, turns=st.integers(1, 4), words=st.sampled_from("xyz"))
    def it_talks_for_a_while(self, client: Client, turns: int, words: str) -> None:
        for _ in range(turns):
            client.history.append(f"u:{words}{len(client.history)}")
            self.the_model_answers(self.it_asks(client, 0), "a:yes")

    @rule(client=clients, words=st.sampled_from("xyz"))
    def it_says_more(self, client: Client, words: str) -> None:
        client.history.append(f"u:{words}{len(client.history)}")

    @rule(client=clients)
    def it_reports_a_tool_result(self, client: Client) -> None:
        if client.history and client.history[-1].startswith("c:"):
            client.history.append(f"t:done#{client.history[-1].partition('#')[2]}")

    @rule(client=clients, data=st.data())
    def it_goes_back(self, client: Client, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(client.history) - 1))
        client.history[position:] = [f"u:edited{data.draw(st.integers(0, 2))}"]

    @rule(client=clients, data=st.data(), said_instead=st.sampled_from(["", "u:other words", "a:no", "s:remember"]))
    def it_rewrites_its_history(self, client: Client, data: st.DataObject, said_instead: str) -> None:
        """A message is edited, deleted, put in front or pruned."""
        position = data.draw(st.integers(0, len(client.history) - 1))
        former = client.history[position]
        if former.startswith(("t:", "c:")):  # a call and its result stay together
            client.history[position] = former.replace("t:done", "t:-")
        else:
            client.history[position : position + data.draw(st.integers(0, 1))] = [said_instead] if said_instead else []
        client.history = client.history or ["u:from the beginning"]

    @rule(client=clients)
    def it_drops_the_answer(self, client: Client) -> None:
        if len(client.history) > 1:
            client.history.pop()

    @rule(target=arrivals, client=clients, trim=st.sampled_from([0, 0, 0, 1, 2, 4, 99]))
    def it_asks(self, client: Client, trim: int) -> tuple[Client, Arrival]:
        history = client.history[min(trim, len(client.history) - 1) :]
        self.clock += 1
        before = state(self.buffer)
        seen = glance(self.buffer, *history, session=client.session)
        assert state(self.buffer) == before
        arrival = receive(self.buffer, *history, session=client.session, now=self.clock)
        conversation = arrival.conversation
        assert [one.digest for one in seen.conversation.messages] == [one.digest for one in conversation.messages]
        assert conversation.session == client.session or client.session is None
        assert not conversation.abandoned
        asked = [said(one).content_digest for one in history]
        # An edit may look like a history without its middle: when it says again what was said there later.
        found = conversation.messages[: arrival.head] + conversation.messages[arrival.offset + arrival.head :]
        assert [one.content_digest for one in found] == asked
        assert arrival.end == arrival.offset + len(asked) == len(conversation)
        opened = max((i for i, one in enumerate(history) if one.startswith("u:")), default=len(history) - 1)
        assert conversation.left_out <= arrival.offset + opened or opened < arrival.head
        self.said.update(one.identity for one in conversation.messages)
        key = TurnKey(conversation.end_digest, b"")
        self.buffer.note_arrival(conversation, key, self.clock, 5.0)
        assert self.buffer.note_arrival(conversation, key, self.clock, 5.0)
        return client, arrival

    @rule(asked=consumes(arrivals), answer=st.sampled_from(["a:yes", "a:no", "c:read"]))
    def the_model_answers(self, asked: tuple[Client, Arrival], answer: str) -> None:
        client, arrival = asked
        if not self.buffer.is_open(arrival.conversation):
            return
        answer += f"#{len(client.history)}" if answer.startswith("c:") else ""
        last, told = arrival.conversation.messages[arrival.end - 1], said(answer)
        begun = "" if arrival.beginning is None else arrival.beginning.text
        if begun and told.text.startswith(begun):  # as some servers repeat it
            begun, told = "", msgspec.structs.replace(told, text=told.text[len(begun) :])
        conversation = self.buffer.reply(arrival, said(answer), 10, self.clock)
        assert self.buffer.is_open(conversation)
        answered = conversation.messages[min(arrival.end, len(conversation) - 1)]
        if len(conversation) > arrival.end:
            assert answered.content_digest in (told.content_digest, said(answer).content_digest)
        else:  # the request ended with the beginning of the answer
            assert answered.message is not None and answered.message.text == begun + said(answer).text
            self.gone.add(last.identity)  # the whole answer has it
        self.said.add(answered.identity)
        client.history.append(answer)

    @rule(data=st.data(), fraction=st.sampled_from([0.1, 0.5, 1.0]), stored=st.booleans(), excess=st.integers(0, 99))
    def a_conversation_is_compacted(self, data: st.DataObject, fraction: float, stored: bool, excess: int) -> None:
        conversation = self._any(data)
        if conversation is None:
            return
        chosen = compaction.departure(conversation, fraction=fraction, excess_tokens=excess, forced=True)
        if stored:
            self.gone.update(one.identity for one in conversation.messages[: chosen.end])
            self.buffer.mark(conversation, stored=chosen.end)
        self.buffer.mark(conversation, left_out=chosen.left_out)
        lines = {position: Line("[memd: …]", 9) for position in chosen.replaced}
        self.buffer.record(Departed(conversation.id, list(chosen.gone), lines))
        assert not any(conversation.is_visible(position) for position in chosen.gone)
        assert conversation.left_out >= chosen.left_out and conversation.lines.items() >= lines.items()

    @rule(data=st.data(), closing=st.sampled_from([False, False, False, True]))
    def a_conversation_is_stored(self, data: st.DataObject, closing: bool) -> None:
        conversation = self._any(data)
        if conversation is None:
            return
        end = len(conversation) if closing else compaction.finished_end(conversation)
        self.gone.update(one.identity for one in conversation.messages[:end])
        if not conversation.abandoned:
            self.buffer.mark(conversation, stored=end)
        if closing:
            self.buffer.record(Closed(conversation.id))

    @rule(data=st.data(), name=st.sampled_from(["b", "c"]))
    def a_block_is_placed(self, data: st.DataObject, name: str) -> None:
        conversation = self._any(data)
        position = None if conversation is None else conversation.last_user_position()
        if conversation is not None and position is not None and conversation.is_visible(position):
            self.buffer.record(Placed(conversation.id, conversation.messages[position].digest, block(name)))
            self.buffer.record(Injected(list(block(name).chunks)))

    @rule(data=st.data())
    def the_oldest_block_is_removed(self, data: st.DataObject) -> None:
        conversation = self._any(data)
        if conversation is not None:
            self.buffer.remove_blocks(conversation, list(conversation.blocks)[:1])

    @rule(rewritten=st.booleans())
    def the_daemon_restarts(self, rewritten: bool) -> None:
        self._save()
        if rewritten:
            self.journal = self.buffer.retelling()()
        before = state(self.buffer)
        self.buffer = HotBuffer(lambda: next(self.names), WINDOW_TURNS)
        self.buffer.replay(self.journal)
        self._list()
        assert state(self.buffer) == before

    @rule(data=st.data())
    def a_damaged_journal_is_replayed(self, data: st.DataObject) -> None:
        self._save()
        kept = data.draw(st.lists(st.booleans(), min_size=len(self.journal), max_size=len(self.journal)))
        rest = replayed([event for event, keep in zip(self.journal, kept, strict=True) if keep])
        for conversation in rest.conversations():
            assert 0 <= conversation.left_out <= len(conversation) and 0 <= conversation.stored <= len(conversation)
        receive(rest, "u:x", "a:yes", "u:x2")

    @invariant()
    def nothing_is_lost(self) -> None:
        held = {
            one.identity
            for conversation in self.buffer.conversations()
            for one in conversation.messages
            if one.message is not None
        }
        assert self.said <= held | self.gone

    @invariant()
    def conversations_are_sound(self) -> None:
        for conversation in self.buffer.conversations():
            messages = conversation.messages
            assert 0 <= conversation.left_out <= len(messages) and 0 <= conversation.stored <= len(messages)
            assert [one.digest for one in messages] == chain_all(one.content_digest for one in messages)
            for position, one in enumerate(messages):
                is_settled = position < conversation.left_out and position < conversation.stored
                # What a rewritten history has behind an edit may be in the log beyond the mark.
                in_log = position < conversation.left_out and one.identity in self.gone
                stays = position in conversation.kept or position in conversation.owed
                assert (is_settled and not stays) <= (one.message is None) <= ((is_settled or in_log) and not stays)
                assert position >= conversation.left_out or one.digest not in conversation.blocks

    @invariant()
    def what_is_kept_of_a_conversation_is_what_it_is(self) -> None:
        for one in self.buffer.conversations():
            assert list(self.listed.of(one)) == [*each_part(one)]
            assert one.left_out_count() == len(one) - len(one.visible_positions())
            assert one.visible_tokens() == sum(map(one.tokens_at, range(len(one))))
        waiting = [[*each_part(one)] for one in self.buffer.conversations() if one.stored < one.wanted_end]
        owed = [owed_parts(one) for one in self.buffer.conversations() if one.owed]
        assert self.listed.refresh() == (any(waiting) or bool(owed))
        assert self.waiting == Counter(key for parts in (*waiting, *owed) for key in {part.key for part in parts})

    @invariant()
    def the_journal_gives_back_the_buffer(self) -> None:
        self._save()
        assert state(replayed(self.journal)) == state(self.buffer)
        assert state(replayed(self.buffer.retelling()())) == state(self.buffer)

    def _list(self) -> None:
        self.waiting: Counter[tuple[bytes, ...]] = Counter()

        def told(gone: Sequence[Part], new: Sequence[Part]) -> None:
            self.waiting.update(part.key for part in new)
            self.waiting.subtract(part.key for part in gone)
            self.waiting = +self.waiting

        self.listed = ListedParts(self.buffer, told)

    def _save(self) -> None:
        self.journal += self.buffer.take_unsaved()

    def _any(self, data: st.DataObject) -> Conversation | None:
        conversations = self.buffer.conversations()
        return data.draw(st.sampled_from(conversations)) if conversations else None


TestClientsAndRestarts = ClientsAndRestarts.TestCase
TestClientsAndRestarts.settings = settings(max_examples=scaled(100), stateful_step_count=60)


def test_the_journal_of_a_history_that_is_rewritten_at_every_step_does_not_grow_with_its_square() -> None:
    buffer = new_buffer()
    history, bytes_said = ["u:Read the files."], 0
    for step in range(scaled(250)):
        history += [f"c:read#{step}", f"t:The content of file {step}. {'word ' * 60}#{step}"]
        bytes_said += len(history[-1])
        if step >= 3:
            history[-7] = f"t:[cleared]#{step - 3}"
        receive(buffer, *history)
        for branch in buffer.conversations()[:-1]:
            buffer.record(Closed(branch.id))
    live = sum(len(encode_event(event)) for event in buffer.take_unsaved())
    assert live <= 3 * bytes_said
    assert sum(len(encode_event(event)) for event in buffer.retelling()()) <= 3 * bytes_said


def test_branches_are_told_as_ranges_of_each_other() -> None:
    buffer = new_buffer()
    long = ["u:" + "the document " * 100, "a:" + "its content " * 100]
    for number in range(20):
        talk(buffer, *long, f"u:question {number}", f"a:answer {number}")
        talk(buffer, f"u:instead {number}", *long[1:], f"u:question {number}", f"a:answer {number}")
    assert sum(len(encode_event(event)) for event in buffer.retelling()()) < 10 * sum(map(len, long)), (
        "40 times, if each branch were written out"
    )


ERASED = ["u:The walrus keeps the key under the step.", "a:Noted.", "u:And the lamp?", "a:Behind the rope."]
GOES_ON = [*ERASED, "u:And the ferry?", "a:At nine."]


def _goes_back(buffer: HotBuffer, conversation: Conversation) -> None:
    talk(buffer, ERASED[0], "a:Noted again.")


def _changes_what_was_said_before(buffer: HotBuffer, conversation: Conversation) -> None:
    talk(buffer, "u:Hello.", "a:Hello.", *GOES_ON, "u:And the mail?", "a:On Mondays.")


def _finds_room_again(buffer: HotBuffer, conversation: Conversation) -> None:
    buffer.record(Returned(conversation.id, 0, {position: said(ERASED[position]) for position in range(4)}))
    talk(buffer, *GOES_ON, "u:And the mail?", "a:On Mondays.")
    talk(buffer, ERASED[0], "a:Noted again.")


def _says_what_the_log_has_lost(buffer: HotBuffer, conversation: Conversation) -> None:
    buffer.lower_marks(lambda digest: False)
    talk(buffer, *GOES_ON, "u:And the mail?", "a:On Mondays.")


@pytest.mark.parametrize(
    "send", [_goes_back, _changes_what_was_said_before, _finds_room_again, _says_what_the_log_has_lost]
)
@pytest.mark.parametrize("left_out", [0, 4])
def test_what_was_erased_is_not_taken_in_again_in_a_chat_that_still_has_it(
    send: Callable[[HotBuffer, Conversation], None], left_out: int
) -> None:
    buffer = new_buffer()
    conversation = talk(buffer, *GOES_ON)
    buffer.mark(conversation, stored=6, left_out=left_out)
    buffer.record(Forgotten([digest_at(ERASED[:1])], []))
    send(buffer, conversation)
    for one in (buffer, replayed(buffer.retelling()())):
        kept = [text for conversation in one.conversations() for text in texts(conversation)]
        assert "Behind the rope." in kept or left_out, "the rest is here"
        assert said(ERASED[0]).text not in kept
