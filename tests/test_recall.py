"""Recall: from a question to the chunks that are shown, over a real log with the real model."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from memd.embedding.embedder import Embedder
from memd.embedding.encoder import Encoder
from memd.embedding.loading import load_embedder
from memd.entries import Draft, Entry, Erased, Section, Speaker, Status, WallTime
from memd.recall.block import line_of
from memd.recall.columns import Searchable
from memd.recall.corrections import undo
from memd.recall.explained import Verdict
from memd.recall.question import PARTS_MAX, parts_of
from memd.recall.retrieve import Budget, Candidate, Filters, Retrieved, Retriever
from memd.selection import Selection
from memd.settings.model import EmbeddingSettings, RetrievalSettings
from memd.store.disk import LocalDisk, Wiper
from memd.store.log.segment import PendingChunk, PendingSegment, PendingView, UnstoredText
from memd.store.snapshot import Snapshot
from memd.store.store import ModelId, Store, StoreShared, TopicLog

BUDGET = Budget(2000)
FACTS = ("The spare key hangs behind the blue bicycle.", "The spare key is copied at the shop in Mill Lane.")
TALK = (
    "The boat house needs a new lock before winter.",
    "Bread is baked on Tuesdays and Fridays.",
    "Anna wants to paint the boat house green.",
    "The cellar floods every spring when the river rises.",
    "Ticket QX_7741 was closed; the mill wheel turns again.",
    "Tom's train leaves at ten past six.",
)
UTILITY_STEPS = (0, 0, 3, -2, 0, 1)


PAINT, BREAD = "Who paints the boat house?", "When is bread baked?"


def _words(text: str) -> int:
    return len(text.split())


def _store(path: Path, embedder: Embedder, *, entries_max: int = 1000) -> Store:
    return Store(
        path,
        StoreShared(
            model=ModelId(embedder.dimension, embedder.fingerprint),
            segment_entries_max=entries_max,
            line_tokens=lambda entry: _words(line_of(entry)),
        ),
    )


def _draft(embedder: Embedder, number: int, text: str, **members: Any) -> Draft:
    vector = embedder.embed(text).astype("<f4").tobytes()
    plain = Draft(uuid=bytes([number]) * 16, content=text, vector=vector, created_at=1, roles=("user",))
    return msgspec.structs.replace(plain, **members)


async def asked(
    topics: TopicLog | Sequence[Searchable],
    question: str,
    filters: Filters | None = None,
    budget: Budget = BUDGET,
    /,
    embedder: Embedder | None = None,
    **settings: Any,
) -> Retrieved:
    """The answer to a question; a token is a word."""
    encoder = Encoder(embedder or load_embedder(EmbeddingSettings()))
    retriever = Retriever(encoder, RetrievalSettings(**settings), count=_words)
    try:
        return await retriever.retrieve(question, [topics] if isinstance(topics, TopicLog) else topics, budget, filters)
    finally:
        retriever.close()
        encoder.close()


def contents(retrieved: Retrieved) -> list[str]:
    """Of the chunks that are shown, best first."""
    return [one.entry.content for one in retrieved.candidates if one.verdict is Verdict.INJECTED]


def by_content(retrieved: Retrieved) -> dict[str, Candidate]:
    return {one.entry.content: one for one in retrieved.candidates}


EVERYTHING = Filters(everything=True)


async def test_an_index_whose_words_are_not_made_yet_is_searched_by_meaning(tmp_path: Path, embedder: Embedder) -> None:
    store = _store(tmp_path, embedder, entries_max=len(TALK))
    store.topic("default").append([_draft(embedder, number, text) for number, text in enumerate(TALK)])
    store.close()
    [words] = (tmp_path / "default" / "segments").glob("*.words")
    words.unlink()
    store = _store(tmp_path, embedder, entries_max=len(TALK))
    store.topic("default").load()
    assert contents(await asked(store.topic("default"), "When does the cellar flood?"))[0] == TALK[3]


class ErasedWhileAsked:
    """A topic in which a chunk is erased right after a search has begun."""

    def __init__(self, log: TopicLog, uuid: bytes) -> None:
        self.topic_id, self.unstored = log.topic_id, log.unstored
        self._log, self._uuid = log, uuid
        self.snapshots = 0

    def snapshot(self) -> Snapshot:
        before, self.snapshots = self._log.snapshot(), self.snapshots + 1
        if self.snapshots == 1:
            self._log.erase({self._uuid}, Erased(at=1, by="ann"), Wiper(LocalDisk()))
        return before


async def test_a_search_that_an_erasure_overtakes_finds_all_else_and_reports_no_damage(
    topic: TopicLog, caplog: pytest.LogCaptureFixture
) -> None:
    overtaken = ErasedWhileAsked(topic, bytes([1]) * 16)  # of the bread
    topic.load()
    found = await asked([overtaken], "Who paints the boat house, and when is bread baked?")
    assert TALK[2] in contents(found) and TALK[1] not in contents(found) and overtaken.snapshots > 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.fixture
def log(tmp_path: Path, embedder: Embedder) -> Iterator[TopicLog]:
    """A topic without an entry."""
    store = _store(tmp_path, embedder)
    yield store.topic("default")
    store.close()


@pytest.fixture(params=[False, True], ids=["growing", "sealed"])
def topic(request: pytest.FixtureRequest, tmp_path: Path, embedder: Embedder) -> Iterator[TopicLog]:
    """A talk, in one growing segment or most of it in a sealed one."""
    store = _store(tmp_path, embedder, entries_max=4 if request.param else 1000)
    talk = store.topic("default")
    pairs = enumerate(zip(TALK, UTILITY_STEPS, strict=True))
    drafts = [_draft(embedder, number, text, utility_steps=steps) for number, (text, steps) in pairs]
    talk.append(drafts[:4])
    talk.append(drafts[4:])
    yield talk
    store.close()


# -- the question ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("Where is the key?", ["Where is the key?"]),
        ("I was in Rome. Where did we eat? And when?", ["Where did we eat?", "And when?", "I was in Rome."]),
        (
            "Which value had LIMIT, what did report 2 show, and why?",
            [
                "Which value had LIMIT, what did report 2 show, and why?",
                "Which value had LIMIT",
                "what did report 2 show",
            ],
        ),
        ("Look:\n```\nfor x in y:\n    print(x)\n```\nWhy is that slow", ["Why is that slow", "Look:"]),
        ("Tell me:\n- the port\n- the host name\n", ["- the host name", "Tell me:", "the port", "the host name"]),
        (
            "About these:\n1. the port\n12. the host name\nThat is all.",
            ["That is all.", "About these:", "the port", "the host name"],
        ),
        (
            "Go on. Report the codes of the northern crane, the wooden ferry and the mill.",
            [
                "Report the codes of the northern crane, the wooden ferry and the mill.",
                "Go on.",
                "Report the codes of the northern crane",
                "the wooden ferry and the mill.",
            ],
        ),
        ("Schau am 3. Oktober nach, ja?", ["Schau am 3. Oktober nach, ja?"]),
        ("钥匙在哪里？它是蓝色的。谁有它？", ["钥匙在哪里？", "谁有它？"]),
        ("أين المفتاح؟ لا أعرف.", ["أين المفتاح؟", "لا أعرف."]),
        ("Πού είναι το κλειδί; Δεν ξέρω.", ["Πού είναι το κλειδί;", "Δεν ξέρω."]),
        ("<user_query>\nMend the ferry\n</user_query>\n<files open=2>\n</files>", ["Mend the ferry"]),
        ("<ErrorCode 0x80070005>", ["<ErrorCode 0x80070005>"]),
        ("", []),
        (" \n```\n---\n", []),
    ],
)
def test_sentences_that_ask_clauses_the_ends_and_items_of_lists_are_parts(message: str, parts: list[str]) -> None:
    assert list(parts_of(message))[: len(parts)] == parts


def test_a_message_has_few_short_parts_of_which_the_end_is_one() -> None:
    before = "After all that we have tried with the pump, the filter and the two valves behind the boiler, "
    message = f"{before * 4}where is the spare key?"
    _, end, *_ = parts_of(message)
    assert end.endswith("where is the spare key?") and len(end) <= 200
    assert list(parts_of("会" * 300 + "？"))[1] == "会" * 43 + "？"

    for message in ("x" * 1_000_000, "a? " * 500, "会" * 300_000, "\n" * 100_000, "- item\n" * 10_000, "\ud83d?" * 9):
        parts = parts_of(message)
        assert len(parts) <= PARTS_MAX and all(0 < len(part) <= 400 for part in parts)


CODE = "\n".join(
    f"    def handle_{number}(self, request): return self.table[request.key_{number}]" for number in range(90)
)


async def test_each_part_of_a_question_finds_its_own(topic: TopicLog) -> None:
    wanted = {TALK[2], TALK[1], TALK[5]}
    found = await asked(topic, "Who paints the boat house? When is bread baked? When does Tom's train leave?")
    assert wanted <= set(contents(found))
    found = await asked(
        topic, "Tell me: who paints the boat house, when is bread baked, and when does Tom's train leave?"
    )
    assert wanted <= set(contents(found))


async def test_no_part_of_a_question_takes_the_room_of_another(log: TopicLog, embedder: Embedder) -> None:
    """Whoever asked the same before, and many calls that are like one part of it, left none for the other part."""
    asking = "What is the release branch, which value did LIMIT have in src/mod_03.py, and what id did report 2 show?"
    report = "Step 2.\n[call report 2]\nreport 2: id QX-20077\n" + "\n".join(
        f"2026-11-{day:02}T12:31 ERROR session.beacon took {day * 37} ms for anchor c{day}97f" for day in range(1, 13)
    )
    calls = [f"[call edit src/mod_{one:02}.py] the value of LIMIT in src/mod_{one:02}.py is next" for one in range(60)]
    texts = [f"Before I go: {asking[0].lower()}{asking[1:]}", report, "The release branch is heron-blue.", *calls]
    log.append([_draft(embedder, number, text) for number, text in enumerate(texts)])
    found = contents(await asked(log, asking, None, Budget(300)))
    assert {report, texts[2]} <= set(found)


async def test_what_is_asked_between_the_first_and_the_last_sentence_is_found(topic: TopicLog) -> None:
    assert TALK[2] in contents(await asked(topic, "Go on as before. Name who paints the boat house. Noted in ZX_81."))


async def test_a_clause_that_tells_little_stands_behind_one_with_a_name(log: TopicLog, embedder: Embedder) -> None:
    codes = ["The release code of the copper crane is ZX_81.", "The release code of the northern mill is ZX_82."]
    results = ["\n".join([*CODE.splitlines()[:8], code]) for code in codes]
    done = "All was done at noon."
    log.append([_draft(embedder, number, text) for number, text in enumerate([*TALK, done, *results])])
    question = "When all is done, report the release codes of the copper crane, the northern mill."
    found = by_content(await asked(log, question, EVERYTHING))
    assert min(found[one].parts.score for one in results) > found[done].parts.score


@pytest.mark.parametrize("lines", [8, 16])
@pytest.mark.parametrize(
    "call",
    ["", "\n[call read crane]", "\n[call read crane]\nno such file", "\n[call list]" + "\nno such list, a file" * 6],
)
async def test_in_mid_turn_what_the_model_says_it_looks_for_stands_behind_the_result_that_has_it(
    log: TopicLog, embedder: Embedder, call: str, lines: int
) -> None:
    mention = f"Now I need the release code of the copper crane.{call}"
    speakers = [Speaker(0, "assistant")]
    if (at := mention.find("no such")) > 0:
        speakers.append(Speaker(at, "tool"))
    result = "\n".join([*CODE.splitlines()[:lines], "The release code of the crane is ZX_81."])
    log.append(
        [
            _draft(embedder, 1, mention, roles=tuple(one.role for one in speakers), speakers=tuple(speakers)),
            _draft(embedder, 2, result, roles=("assistant", "tool")),
            _draft(embedder, 3, "A crane is painted each spring.", speakers=()),  # as what takes the place of others
            *(_draft(embedder, number, text) for number, text in enumerate(TALK, 4)),
        ]
    )
    question = "When all is done, report the release code of the copper crane."
    assert contents(await asked(log, question))[0] == mention
    assert contents(await asked(log, question, Filters(step="Let me look into the next file.")))[0] == result


@pytest.mark.parametrize(
    "question", ["Who is my tax adviser?", "What is my starter called?", "Which band did we book?", "tax adviser"]
)
async def test_a_question_whose_two_words_a_chunk_has_is_answered_among_many_chunks(
    log: TopicLog, embedder: Embedder, question: str
) -> None:
    facts = [
        "My tax adviser is Frau Weidemann; she wants the home office days: I worked 143 days from home in 2024.",
        "My sourdough starter is called Bruno. I feed it with rye every evening, but the loaf stays flat.",
        "For the wedding we booked the band Nachtzug; the deposit was 400 euros, the rest is due on the day.",
    ]
    things = "harbour", "ledger", "violin", "copper", "meadow", "turbine", "fence", "sailor", "cabbage", "lantern"
    others = [
        f"Note {number}: the {one} beside the {other} was painted red last year."
        for number, (one, other) in enumerate(itertools.islice(itertools.permutations(things, 2), 100))
    ]
    log.append([_draft(embedder, number, text) for number, text in enumerate([*facts, *others])])
    [fact] = [fact for fact in facts if any(word in fact for word in ("adviser", "called", "band") if word in question)]
    assert fact in contents(await asked(log, question))


async def test_a_note_is_first_by_its_whole_text_though_its_end_alone_is_about_nothing_stored(
    log: TopicLog, embedder: Embedder
) -> None:
    plan = (
        "The {} of the northern line was chosen after two weeks of trials, in which the foreman and the people of the"
        " early shift wrote down each stop with its reason, and it stays as it is until the audit in autumn, when the"
        " figures of all four lines are laid side by side. Set: {}."
    )
    measures = "belt speed", "oil pressure", "shift length", "scrap rate", "crew size"
    notes = [plan.format(what, value) for what in measures for value in range(30, 40)]
    log.append(
        [
            _draft(embedder, number, note, kind="note", roles=(), part=Section(bytes([number]) * 16))
            for number, note in enumerate(notes)
        ]
    )
    assert [contents(await asked(log, note))[0] for note in notes] == notes


@pytest.mark.parametrize("lines", [4, 14])
async def test_a_near_clause_finds_its_own_in_a_far_sentence(log: TopicLog, embedder: Embedder, lines: int) -> None:
    codes = ["See the silent lighthouse 709: ZX_81.", "See the copper greenhouse 835: ZX_82."]
    results = ["\n".join([*CODE.splitlines()[:lines], code]) for code in codes]
    log.append([_draft(embedder, number, text) for number, text in enumerate([*TALK, *results])])
    question = "When all is done, report the release codes of the silent lighthouse 709, the copper greenhouse 835."
    assert {*results} <= {*contents(await asked(log, question))}


class WithWaiting(UnstoredText):
    """A topic, and texts that were said and are not stored."""

    def __init__(self, log: TopicLog, drafts: Sequence[Draft], embedder: Embedder) -> None:
        table = Encoder(embedder).table
        assert table is not None
        self.topic_id, self.snapshot = log.topic_id, log.snapshot
        self._segment = PendingSegment(table.dimension, table.vectors)
        entries = [one.as_entry(public_id=one.uuid.hex()[:4], canonical_id=1, group_left=0) for one in drafts]
        self._segment.hold(list(map(PendingChunk, drafts, entries)))

    def unstored(self) -> UnstoredText:
        return self

    def __bool__(self) -> bool:
        return True

    def chunks(self, but: Collection[bytes] = (), until: float | None = None) -> PendingView:
        return self._segment.view()


async def test_what_waits_is_as_near_to_a_question_that_the_table_reads_as_what_is_stored(
    tmp_path: Path, embedder: Embedder
) -> None:
    """The table has a vector of both: long work that ended a moment ago hid what was said before it."""
    drafts = [_draft(embedder, number, text) for number, text in enumerate(TALK)]
    cosine, meaning = [0.0, 0.0], [0.0, 0.0]
    for waiting in (0, 1):
        log = _store(tmp_path / str(waiting), embedder).topic("default")
        log.append(drafts[1 - waiting :: 2])
        topic = WithWaiting(log, drafts[waiting::2], embedder)
        for question in (PAINT, BREAD, "When does the cellar flood?", "When does Tom's train leave?"):
            for number, text in enumerate(TALK):
                found = by_content(await asked([topic], question, EVERYTHING, question="table")).get(text)
                cosine[number % 2 == waiting] += found.parts.cosine if found else 0
                meaning[number % 2 == waiting] += found.parts.meaning if found else 0
    assert cosine[1] == pytest.approx(cosine[0], rel=0.1)
    assert meaning[1] < 2.3 * meaning[0], "what is far is nearer to it by the table alone"


@pytest.mark.parametrize("question", ["\ud83d where is the boat \ude00 house?", "boat house\0?", "🦭" * 500])
async def test_any_string_is_a_question(topic: TopicLog, question: str) -> None:
    assert (await asked(topic, question)).trouble is None


# -- relevance ---------------------------------------------------------------------------------------------------------


async def test_what_was_said_beside_the_answer_counts_more_for_it(log: TopicLog, embedder: Embedder) -> None:
    lines = ("Where did Tom hide the spare key?", "Below the third flower pot.", "Bread is baked on Fridays.")
    log.append([_draft(embedder, number, text) for number, text in enumerate([*TALK, *lines])])
    beside = by_content(await asked(log, "Where is the spare key?", EVERYTHING))
    alone = by_content(await asked(log, "Where is the spare key?", EVERYTHING, neighbour_weight=0.0))
    assert beside[lines[1]].parts.neighbours > 0 and alone[lines[1]].parts.neighbours == 0
    assert beside[lines[1]].parts.score > beside[TALK[3]].parts.score


async def test_near_copies_are_found_by_their_own_questions(log: TopicLog, embedder: Embedder) -> None:
    rooms = [f"Room {100 + number} has the door code {7000 + 13 * number}." for number in range(40)]
    authors = ["ann", "bob"]
    drafts = [_draft(embedder, number, text, author=authors[number % 2]) for number, text in enumerate(rooms)]
    log.append(drafts)
    found = [contents(await asked(log, f"What is the door code of room {100 + number}?"))[:1] for number in range(40)]
    by_text = [contents(await asked(log, text))[:1] for text in rooms[::4]]
    assert found == [[text] for text in rooms]
    assert by_text == [[text] for text in rooms[::4]]


# -- echoes and corrections --------------------------------------------------------------------------------------------


def _answer(embedder: Embedder, number: int, text: str, shown: Sequence[Entry]) -> Draft:
    uuids = tuple(one.uuid for one in shown)
    return _draft(embedder, number, text, roles=("user", "assistant"), speakers=(Speaker(0, "assistant"),), shown=uuids)


async def test_what_only_the_model_said_stands_behind_what_a_person_or_a_tool_said(
    log: TopicLog, embedder: Embedder
) -> None:
    said = {role: f"The {role}'s boat leaves the northern pier at nine." for role in ("assistant", "user", "tool")}
    log.append([_draft(embedder, at, text, roles=(role,)) for at, (role, text) in enumerate(said.items())])
    found = await asked(log, "When does a boat leave the northern pier?", EVERYTHING)
    echoes = {role: by_content(found)[text].parts.echo for role, text in said.items()}
    assert echoes == {"assistant": pytest.approx(0.6), "user": 1, "tool": 1}
    assert contents(found)[-1] == said["assistant"]


ECHOES = (
    "The port of the staging server is 8443.",
    "You told me: the port of the staging server is 8443.",
    "[mem:bab9] user: The port of the staging server is 8443.",
)


@pytest.mark.parametrize("echo", ECHOES)
async def test_an_answer_stands_behind_what_it_was_shown(log: TopicLog, embedder: Embedder, echo: str) -> None:
    [told] = log.append([_draft(embedder, 1, ECHOES[0])])
    log.append([_answer(embedder, 2, echo + " ", [told])])
    question = "On which port is the staging server?"
    before = by_content(await asked(log, question, EVERYTHING))
    assert before[echo + " "].parts.score <= 0.9 * before[ECHOES[0]].parts.score + 1e-6
    gone = msgspec.structs.replace(told.as_draft(), content="", vector=b"", status=Status.DEPRECATED, action="Update")
    log.append([gone, _draft(embedder, 3, "The port of the staging server is 9443.", supersedes=(told.uuid,))])
    after = await asked(log, question, EVERYTHING)
    assert contents(after)[0] == "The port of the staging server is 9443."
    assert by_content(after)[echo + " "].parts.echo <= 0.5

    async def append(drafts: Sequence[Draft]) -> Sequence[Entry]:
        return log.append(drafts)

    await undo(
        log.snapshot(),
        log.snapshot().history(told.uuid)[-1].canonical_id,
        "no",
        encoder=Encoder(embedder),
        append=append,
    )
    again = by_content(await asked(log, question, EVERYTHING))
    assert again[echo + " "].parts.echo > 0.5, "what it quotes is true again"


async def test_an_answer_beside_a_corrected_fact_is_not_weak_for_another(log: TopicLog, embedder: Embedder) -> None:
    """As said in a turn whose block had the former text of something else: a soak missed a tenth of its facts."""
    [told] = log.append([_draft(embedder, 1, ECHOES[0])])
    other = "Noted: the spare key of the boat house hangs behind the blue bicycle."
    log.append([_answer(embedder, 2, other, [told])])
    gone = msgspec.structs.replace(told.as_draft(), content="", vector=b"", status=Status.DEPRECATED, action="Update")
    log.append([gone, _draft(embedder, 3, "The port of the staging server is 9443.", supersedes=(told.uuid,))])
    found = await asked(log, "Where hangs the spare key of the boat house?", EVERYTHING)
    assert contents(found)[0] == other
    assert by_content(found)[other].parts.echo == 1


async def test_a_fact_told_beside_a_like_question_goes_first(log: TopicLog, embedder: Embedder) -> None:
    [question] = log.append([_draft(embedder, 1, "What does ERR_5000 mean?")])
    others = ("The garden shed needs red paint.", "My sister forgot the summer holiday.", "The train leaves at noon.")
    log.append([_draft(embedder, 10 + number, text) for number, text in enumerate(others)])
    told = "On the staging server ERR_7421 means that the disk is full."
    log.append([_answer(embedder, 50, told, [question])])
    found = await asked(log, "Which machine says ERR_7421?", EVERYTHING)
    assert contents(found)[0] == told
    assert by_content(found)[told].parts.echo == 1


async def test_no_later_text_takes_an_earlier_one_out(log: TopicLog, embedder: Embedder) -> None:
    question, answer = "Where do we keep the spare key?", "The spare key is kept behind the blue bicycle."
    log.append([_draft(embedder, 1, f"{question} {answer}", author="ann")])
    nonsense = [f"{question} Somewhere on the moon, number {number}." for number in range(5)]
    log.append([_draft(embedder, 10 + number, text, author="eve") for number, text in enumerate(nonsense)])
    log.append([_draft(embedder, 30 + number, f"{question} {answer}.", author="eve") for number in range(2)])
    found = await asked(log, question)
    assert f"{question} {answer}" in contents(found)


# -- the budget, and what is in the prompt -----------------------------------------------------------------------------


async def test_what_an_earlier_block_shows_takes_its_place_and_is_not_shown_again(topic: TopicLog) -> None:
    question = "Who paints the boat house?"
    plain = await asked(topic, question)
    best = plain.candidates[0]
    again = await asked(topic, question, Filters(shown_uuids={best.entry.uuid}))
    assert by_content(again)[best.entry.content].verdict is Verdict.EARLIER
    assert best.entry.content not in {one.entry.content for one in again.shown}
    tight = await asked(topic, question, Filters(shown_uuids={best.entry.uuid}), Budget(best.tokens + 4))
    assert tight.shown == ()


async def test_what_is_in_the_prompt_is_not_shown_and_takes_no_place(log: TopicLog, embedder: Embedder) -> None:
    keys = [_draft(embedder, number, f"The spare key number {number} hangs there.") for number in range(60)]
    log.append([*(msgspec.structs.replace(one, digests=(b"d" * 16,)) for one in keys[:58]), *keys[58:]])
    filters = Filters(visible_digests={b"d" * 16})
    found = await asked(log, "Where hangs spare key number 3?", filters, top_k=2)
    listed = await asked(log, "Where hangs spare key number 3?", msgspec.structs.replace(filters, everything=True))
    assert {one.entry.content for one in found.shown} == {one.content for one in keys[58:]}
    assert Verdict.VISIBLE not in {one.verdict for one in found.candidates}
    assert len([one for one in listed.candidates if one.verdict is Verdict.INJECTED]) == 2


async def test_of_a_chunk_that_two_topics_have_the_own_topic_s_entry_counts(tmp_path: Path, embedder: Embedder) -> None:
    store = _store(tmp_path, embedder)
    own, home, other = store.topic("own"), store.topic("home"), store.topic("other")
    for at, (topic, steps) in enumerate(((home, 0), (own, 1), (other, 2)), 1):
        topic.append([_draft(embedder, 7, FACTS[0], utility_steps=steps, origin_id=at)])
    question = "Where is the spare key?"
    [known] = (await asked([own, home, other], question)).shown
    store.close()
    assert (known.topic_id, known.entry.utility_steps) == ("own", 1)


async def test_a_word_that_is_rare_among_all_topics_is_rare_in_a_topic_of_one_chunk(
    tmp_path: Path, embedder: Embedder
) -> None:
    store = _store(tmp_path, embedder)
    crate = "Take the tokio-modbus crate for the winch, it speaks RTU as well."
    names = [
        "Some suggestions: Klara, Paula, Frieda.",
        *(f"The boat has sailed for {days} days." for days in range(40)),
    ]
    store.topic("names").append([_draft(embedder, number, text) for number, text in enumerate(names)])
    store.topic("crates").append([_draft(embedder, 100, crate)])
    found = await asked([store.topic("names"), store.topic("crates")], "Which crate did you suggest for Modbus?")
    store.close()
    assert contents(found)[0] == crate


# -- what fails --------------------------------------------------------------------------------------------------------


async def test_a_damaged_entry_costs_its_own_chunk_alone(tmp_path: Path, log: TopicLog, embedder: Embedder) -> None:
    log.append([_draft(embedder, number, text) for number, text in enumerate(FACTS)])
    active = tmp_path / "default" / "active.bin"
    active.write_bytes(active.read_bytes().replace(b"blue bicycle", b"bl\0e bicycle"))
    found = await asked(log, "Where is the spare key?")
    assert contents(found) == [FACTS[1]]


@pytest.mark.parametrize("question", ["table", "model", "auto"])
async def test_who_reads_the_question_is_a_setting(topic: TopicLog, question: str) -> None:
    clear = await asked(topic, "Who paints the boat house?", question=question)
    vague = await asked(topic, "Any idea about vehicles?", question=question)
    assert contents(clear)[0] == TALK[2]
    assert (clear.is_model_asked, vague.is_model_asked) == {
        "table": (False, False),
        "model": (True, True),
        "auto": (False, True),
    }[question]


async def test_what_stands_beside_a_question_is_not_read_by_the_model(topic: TopicLog) -> None:
    code = "for row in table: total += row.size * factor"
    assert not (await asked(topic, f"{code}\nWho paints the boat house?")).is_model_asked
    nothing = await asked(topic, f"{code}\nHow are you today?")
    assert nothing.is_model_asked and contents(nothing) == []
    told = await asked(topic, "Is this still so? Loaves come out of the oven twice weekly.")
    assert told.is_model_asked and contents(told) != []


async def test_a_time_in_a_question_does_not_drown_in_what_is_not_wanted(tmp_path: Path, embedder: Embedder) -> None:
    question = "Where did the key hang on 2026-03-05?"
    asked_for, away = embedder.embed(question), np.eye(embedder.dimension, dtype=np.float32)
    said = {True: 1_772_700_000_000_000, False: 1_700_000_000_000_000}
    drafts: list[Draft] = []

    def add(text: str, source: str, far: float, *, then: bool) -> None:
        vector = asked_for + far * away[len(drafts)]
        plain = _draft(embedder, len(drafts), text, source=source, kind="document", roles=("document",))
        vector = (vector / np.linalg.norm(vector)).astype("<f4")
        drafts.append(msgspec.structs.replace(plain, vector=vector.tobytes(), said_at=said[then]))

    for number in range(100):
        add(f"one {number}", "other.md", 0.5, then=True)
        add(f"two {number}", "wanted.md", 1.0, then=False)
    add("Behind a bicycle.", "wanted.md", 1.5, then=True)
    store = _store(tmp_path, embedder, entries_max=101)
    topic = store.topic("default")
    topic.append(drafts[:101])
    topic.append(drafts[101:])
    topic.append([_draft(embedder, 250, "filler")])
    topic.merge([number for view in topic.snapshot().indexes for number in view.index.segment_ids])
    found = await asked(topic, question, Filters(wanted=Selection(sources=("wanted.md",)), everything=True))
    assert "Behind a bicycle." in by_content(found)


@pytest.mark.parametrize("parts", [(PAINT,), ("QX_7741",), (BREAD,), ("zebra",), (PAINT, BREAD)])
async def test_with_all_weights_at_0_recall_is_the_plain_formula(
    topic: TopicLog, embedder: Embedder, parts: tuple[str, ...]
) -> None:
    question = " ".join(parts)
    plain = []
    for text, steps in zip(TALK, UTILITY_STEPS, strict=True):
        cosine = max(float(np.dot(embedder.embed(text), embedder.embed(part))) for part in parts)
        plain.append((max(0.0, cosine) * 1.5**steps, text))
    expected = sorted((one for one in plain if one[0] >= 0.2), reverse=True)
    weights: dict[str, Any] = dict.fromkeys(("lexical_weight", "neighbour_weight", "feedback_weight"), 0.0)
    found = await asked(topic, question, EVERYTHING, question="model", recall_budget_ms=60_000, **weights)
    scores = {one.entry.content: one.parts.score for one in found.candidates if one.parts.score >= 0.2}
    assert scores == pytest.approx({text: score for score, text in expected}, abs=1e-5)


@pytest.mark.parametrize("length", [200, 600, 5_000])
@pytest.mark.parametrize("question", ["Who paints the boat house?", "Tell me who paints the boat house"])
async def test_a_question_on_a_line_of_pasted_code_finds_its_own(topic: TopicLog, question: str, length: int) -> None:
    code = "!function(e,t){for(var i=0;i<t.length;i++)e.appendChild(t[i].cloneNode(!0))}(window,rows);" * 60
    assert TALK[2] in contents(await asked(topic, f"{code[-length:]} {question}"))


@pytest.mark.parametrize("message", ["{question}\n{code}", "{code}\n{question}", "{code}\n\n{question} Thanks!"])
async def test_a_question_beside_pasted_code_finds_what_it_finds_alone(topic: TopicLog, message: str) -> None:
    question = "Who wants to paint the boat house?"
    alone = await asked(topic, question)
    beside = await asked(topic, message.format(question=question, code=CODE))
    assert contents(alone)[0] == contents(beside)[0] == TALK[2]


async def test_a_copy_waits_until_the_others_are_in(log: TopicLog, embedder: Embedder) -> None:
    text = "The ferry to the island leaves at nine from the old pier."
    copies = [_draft(embedder, number, text) for number in range(3)]
    log.append([*copies, _draft(embedder, 9, "The ferry needs an hour to the island when the sea is calm.")])
    found = contents(await asked(log, "When does the ferry to the island leave?"))
    assert found[0] == text and found[1] != text and len(found) == 4


async def test_what_was_told_beside_an_answer_is_not_held_against_it(log: TopicLog, embedder: Embedder) -> None:
    [shown, *_] = log.append([_draft(embedder, number, text) for number, text in enumerate(TALK)])
    told = "The trace ends in src/ui/cache_panel.ts:112, I told you. Noted, I look into it."
    log.append([_answer(embedder, 9, told, [shown])])
    found = await asked(log, "cache_panel.ts:112")
    assert contents(found)[0] == told and found.candidates[0].parts.echo == 1


async def test_words_do_not_keep_the_model_from_a_part_without_a_vector(log: TopicLog, embedder: Embedder) -> None:
    names = " ".join(f"Q{number}" for number in range(100, 116))
    texts = [f"{names} was closed {number} times." for number in range(2)]
    texts += [f"Bread is baked on day {number}." for number in range(60)]
    log.append([_draft(embedder, number, text) for number, text in enumerate(texts)])
    assert (await asked(log, f"{names}?", question="model")).is_model_asked


@pytest.mark.parametrize(
    "question",
    ["Anna paints the boat house? And Anna paints the boat house?", "What did I say on 1 January 1970?"],
    ids=["two parts", "a time"],
)
async def test_what_was_unhelpful_four_times_is_never_shown(log: TopicLog, embedder: Embedder, question: str) -> None:
    """Two parts that it answers, or the day on which it was said, count for it in what it is beside others."""
    day_us = 86_400_000_000
    blamed = _draft(embedder, 1, "Anna paints the boat house", utility_steps=-4)
    others = [_draft(embedder, number, text) for number, text in enumerate(["Noted.", *TALK], 2)]
    log.append([msgspec.structs.replace(one, created_at=day_us // 2) for one in (blamed, *others)])
    found = contents(await asked(log, question, Filters(asked_at=WallTime(40 * day_us))))
    assert found and blamed.content not in found


async def test_what_helped_is_among_what_was_said_at_a_time(log: TopicLog, embedder: Embedder) -> None:
    day_us = 86_400_000_000
    drafts = [_draft(embedder, number, text, utility_steps=10 * (number == 2)) for number, text in enumerate(TALK)]
    log.append([msgspec.structs.replace(one, created_at=day_us // 2) for one in drafts])
    found = contents(await asked(log, "What did I say on 1 January 1970?", Filters(asked_at=WallTime(40 * day_us))))
    assert {*found} == {*TALK}


async def test_unhelpful_chunks_keep_no_other_from_being_found(log: TopicLog, embedder: Embedder) -> None:
    question, away = "Where does the spare key hang?", np.eye(embedder.dimension, dtype=np.float32)

    def add(number: int, text: str, far: float, steps: int = 0) -> None:
        vector = embedder.embed(question) + far * away[number]
        plain = _draft(embedder, number, text, utility_steps=steps)
        log.append([msgspec.structs.replace(plain, vector=(vector / np.linalg.norm(vector)).astype("<f4").tobytes())])

    for number in range(119):
        add(number, f"The spare key hangs at place {number}.", 0.3, -5)
    log.append([_draft(embedder, 120 + number, text) for number, text in enumerate(TALK)])
    add(119, "It is behind the bicycle.", 0.7)
    assert "It is behind the bicycle." in contents(await asked(log, question))


@pytest.mark.parametrize("kind", ["document", "note"])
async def test_what_is_of_another_source_is_no_neighbour(log: TopicLog, embedder: Embedder, kind: str) -> None:
    log.append([_draft(embedder, 1, FACTS[0], kind=kind, source="keys.md"), _draft(embedder, 2, "Yes.")])
    log.append([_draft(embedder, 3, "That is all.")])
    found = by_content(await asked(log, "Where is the spare key?", EVERYTHING))
    assert found[FACTS[0]].parts.neighbours == 0
