"""Chunking with the real tokenizer, and with the real embedding model where meaning decides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from effort import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from memd.assets import ranks_bytes
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.loading import load_embedder
from memd.entries import Speaker, Vector, text_with_roles
from memd.ingest.chunking import Chunk, Split, Utterance, split
from memd.ingest.pieces import candidate_pieces
from memd.settings.model import ChunkingSettings

COUNTER = TokenCounter(cl100k_base(ranks_bytes()))
CHUNKING = ChunkingSettings()

PROSE = "We moved the session store to PostgreSQL last week. Redis kept evicting sessions at night. Nobody noticed! "
CODE = "```python\ndef port() -> int:\n    # the gateway listens here\n\n    return 8765\n```\n"
LIST = "Steps:\n- stop the server\n- copy the folder\n  with everything in it\n- start it again\n\n"
TABLE = "| host | port |\n|---|---|\n| alpha | 8765 |\n| beta | 8766 |\n\n"
TRACE = (
    "Traceback (most recent call last):\n"
    '  File "app.py", line 3, in <module>\n    main()\n'
    '  File "app.py", line 2, in main\n    raise ValueError("no port. None!")\n'
    "ValueError: no port. None!\n\n"
)
BUILDING_BLOCKS = [
    PROSE,
    CODE,
    LIST,
    TABLE,
    TRACE,
    "ok",
    "",
    "\n\n\n",
    "记忆系统保存对话。它从不忘记！",
    "Привет, мир. Как дела?\n",
    "x" * 3000,
    "aB3+/" * 400,
    "word " * 500,
    "a\n" * 400,
    " " * 900,
    "👩‍👩‍👧" * 60,
    "```\nnever closed\n",
    "\x00\ud800",
    '{"a":1,"b":[2]},' * 150,
]


def source(role: str, text: str) -> Utterance:
    return Utterance(text, role, hashlib.blake2b(f"{role}{text!r}".encode(), digest_size=16).digest())


def hashed(text: str) -> Vector:
    """A stand-in model: the same text has the same vector, and about half of all neighbours are alike."""
    vector = np.zeros(4, dtype=np.float32)
    vector[hashlib.sha256(repr(text).encode()).digest()[0] % 2] = 1
    return vector


def never() -> bool:
    return False


def chunked(
    sources: Sequence[Utterance],
    embed: Callable[[str], Vector] = hashed,
    expired: Callable[[], bool] = never,
    chunking: ChunkingSettings = CHUNKING,
) -> Split:
    return split(sources, settings=chunking, count=COUNTER.count, embed=embed, expired=expired)


def pieces_of(text: str, opening: str = "", whole_tokens: int = 0) -> list[str]:
    return candidate_pieces(
        text, opening=opening, whole_tokens=whole_tokens, max_tokens=CHUNKING.max_tokens, count=COUNTER.count
    )


@cache
def real_embed() -> Callable[[str], Vector]:
    return load_embedder("bundled", threads=2).embed


def shown(chunk: Chunk) -> str:
    return text_with_roles(chunk.content, chunk.speakers)


def taken_apart(chunks: Sequence[Chunk], sources: Sequence[Utterance]) -> list[str]:
    """The text that the chunks have of each message, by their speakers; fails if a chunk holds anything else."""
    found: list[str] = []
    for chunk in chunks:
        ends = [*(speaker.offset - 1 for speaker in chunk.speakers[1:]), len(chunk.content)]
        assert all(chunk.content[end] == "\n" for end in ends[:-1])
        for speaker, end, digest in zip(chunk.speakers, ends, chunk.digests, strict=True):
            if not speaker.continues:
                found.append("")
            found[-1] += chunk.content[speaker.offset : end]
            said = sources[len(found) - 1]
            assert (speaker.role, digest) == (said.role, said.digest)
    return found


def assert_covered(chunks: Sequence[Chunk], sources: Sequence[Utterance]) -> None:
    """The chunks are verbatim, in order, and leave no gap but the newlines where messages meet."""
    whole = "\n".join(source.text for source in sources)
    joints = {len("\n".join(source.text for source in sources[:end])) for end in range(1, len(sources))}
    covered = 0
    for chunk in chunks:
        latest_start = covered + (covered in joints)
        start = whole.rfind(chunk.content, 0, latest_start + len(chunk.content))
        assert start >= 0
        covered = max(covered, start + len(chunk.content))
    assert covered == len(whole)


def assert_bounds(chunks: Sequence[Chunk], chunking: ChunkingSettings = CHUNKING) -> None:
    tokens = [COUNTER.count(shown(chunk)) for chunk in chunks]
    assert max(tokens, default=0) <= chunking.max_tokens
    for number in range(1, len(chunks)):
        if tokens[number] < chunking.min_tokens:  # then it does not fit to the one before it
            joined = shown(chunks[number - 1]) + "\n" + shown(chunks[number])
            assert COUNTER.count(joined) >= chunking.max_tokens


messages = st.lists(
    st.builds(
        source,
        st.sampled_from(["user", "assistant", "tool"]),
        st.lists(st.sampled_from(BUILDING_BLOCKS) | st.text(max_size=200), max_size=6).map("".join),
    ),
    max_size=6,
)


@settings(max_examples=scaled(150))
@given(messages)
def test_the_chunks_of_a_message_put_together_are_its_text(sources: list[Utterance]) -> None:
    result = chunked(sources)
    assert not result.used_fallback
    assert taken_apart(result.chunks, sources) == [source.text for source in sources]
    assert_bounds(result.chunks)
    assert chunked(sources) == result


@settings(max_examples=scaled(150))
@given(
    st.lists(st.sampled_from(BUILDING_BLOCKS) | st.text(max_size=300), max_size=8).map("".join),
    st.sampled_from([0, 20, 100, 10_000]),
)
def test_pieces_joined_are_the_text_and_fit_the_limit(text: str, whole_tokens: int) -> None:
    pieces = pieces_of(text, whole_tokens=whole_tokens)
    assert "".join(pieces) == text
    assert all(0 < COUNTER.count(piece) <= CHUNKING.max_tokens for piece in pieces)


@settings(max_examples=scaled(60))
@given(
    messages,
    st.integers(0, 5),
    st.sampled_from([CHUNKING, ChunkingSettings(min_tokens=1, max_tokens=20, overlap_tokens=1000)]),
)
def test_when_time_runs_out_everything_is_still_in_a_chunk(
    sources: list[Utterance], calls: int, chunking: ChunkingSettings
) -> None:
    left = [calls]

    def expired() -> bool:
        left[0] -= 1
        return left[0] < 0

    result = chunked(sources, expired=expired, chunking=chunking)
    assert {digest for chunk in result.chunks for digest in chunk.digests} == {source.digest for source in sources}
    assert_covered(result.chunks, sources)


def test_a_short_rest_within_the_overlap_is_one_window() -> None:
    chunking = ChunkingSettings(min_tokens=1, overlap_tokens=1000)
    sources = [source("user", "One. Two.")]
    result = chunked(sources, expired=lambda: True, chunking=chunking)
    assert result.used_fallback
    assert [shown(chunk) for chunk in result.chunks] == ["user: One. Two."]


def test_fixed_windows_have_150_to_200_tokens_and_share_up_to_20() -> None:
    sources = [source("user", " ".join(f"{PROSE}Number {number}." for number in range(60)))]
    result = chunked(sources, expired=lambda: True)
    assert result.used_fallback
    contents = [chunk.content for chunk in result.chunks]
    assert all(150 <= COUNTER.count(shown(chunk)) <= 200 for chunk in result.chunks[:-1])
    rebuilt = contents[0]
    for content in contents[1:]:
        shared = next(size for size in range(len(content), 0, -1) if rebuilt.endswith(content[:size]))
        assert 10 <= COUNTER.count(content[:shared]) <= 20
        rebuilt += content[shared:]
    assert rebuilt == sources[0].text


def test_what_was_split_before_the_time_ran_out_is_kept() -> None:
    sources = [source("user", PROSE * 30)]
    whole = chunked(sources, embed=hashed)
    partly = chunked(sources, embed=hashed, expired=iter([False] * 8 + [True] * 1000).__next__)
    assert partly.used_fallback and not whole.used_fallback
    assert partly.chunks[:2] == whole.chunks[:2]


@pytest.mark.parametrize("block", [CODE, LIST, TABLE, TRACE])
def test_what_is_one_thing_is_one_piece(block: str) -> None:
    assert block in pieces_of(f"{PROSE}\n\n{block}{PROSE}")


def test_a_code_block_is_not_cut_where_it_fits() -> None:
    sources = [source(role, f"{PROSE * 2}\n{CODE}{PROSE}") for role in ("user", "assistant")] * 5
    chunks = chunked(sources, embed=real_embed()).chunks
    assert sum(chunk.content.count(CODE) for chunk in chunks) == 10


def test_a_code_block_directly_behind_the_role_is_seen() -> None:
    code = "```\n\n" + "x = 1. Y = 2.\n\n" * 3 + "```\n"
    assert pieces_of(f"{code}Done.", opening="user: ") == [code, "Done."]


def test_a_code_block_that_does_not_fit_is_cut_at_lines() -> None:
    code = "```\n" + "".join(f"    value[{number}] = compute({number})\n" for number in range(200)) + "```\n"
    pieces = pieces_of(code)
    assert len(pieces) > 3 and "".join(pieces) == code
    assert all(piece.endswith("\n") for piece in pieces)


def test_prose_is_cut_into_sentences_in_any_script() -> None:
    assert pieces_of("One. Two! Three? e.g. this 3.14 stays.") == ["One. ", "Two! ", "Three? e.g. this 3.14 stays."]
    assert pieces_of("记忆系统保存对话。它从不忘记！好吗？") == ["记忆系统保存对话。", "它从不忘记！", "好吗？"]


def test_a_short_message_and_a_short_paragraph_are_one_piece() -> None:
    short = "One. Two! Three?"
    assert pieces_of(short, whole_tokens=6) == [short]
    assert pieces_of(short, whole_tokens=5) == ["One. ", "Two! ", "Three?"]
    long = " ".join(f"Sentence number {number} of a longer paragraph." for number in range(9))
    pieces = pieces_of(f"{short}\n\n{long}", whole_tokens=20)
    assert pieces[0] == f"{short}\n\n" and len(pieces) == 10
    assert pieces_of(short * 100, whole_tokens=10_000)[0] != short * 100, "never more than max_tokens"


def test_a_chunk_does_not_end_within_a_short_message() -> None:
    sentences = "The gateway listens on port 8765. The password is rotated on Mondays. Backups leave at two. "
    sources = [source("user" if number % 2 else "assistant", sentences * 2) for number in range(6)]
    for chunk in chunked(sources).chunks:
        assert shown(chunk).startswith(("user: ", "assistant: ")) and chunk.content.endswith("at two. ")


def test_tiny_turns_share_a_chunk_and_open_with_their_roles() -> None:
    sources = [source("user", "Which port?"), source("assistant", "8765."), source("user", "Thanks!")]
    (chunk,) = chunked(sources).chunks
    assert chunk.content == "Which port?\n8765.\nThanks!"
    assert shown(chunk) == "user: Which port?\nassistant: 8765.\nuser: Thanks!"
    assert chunk.speakers == (Speaker(0, "user"), Speaker(12, "assistant"), Speaker(18, "user"))
    assert chunk.digests == tuple(source.digest for source in sources)


def test_texts_without_a_speaker_are_put_together_as_they_are() -> None:
    for expired in (never, lambda: True):
        (chunk,) = chunked([Utterance("Milk."), Utterance("Bread.")], expired=expired).chunks
        assert chunk == Chunk("Milk.\nBread.", speakers=(), digests=())


def test_nothing_is_embedded_where_nothing_can_be_decided() -> None:
    def refuse(text: str) -> Vector:
        raise AssertionError(f"embedded {text!r}")

    assert chunked([], embed=refuse) == Split((), used_fallback=False)
    chunked([source("user", "Which port?"), source("assistant", "8765. As always. Why?")], embed=refuse)


def test_a_boundary_is_set_where_the_subject_changes() -> None:
    database = (
        "The database is PostgreSQL. The database server is PostgreSQL 16. The PostgreSQL database has a replica. "
    )
    garden = "Tomatoes want sun and water. Water the tomatoes in the sun. Tomatoes like much sun and much water. "
    loose = ChunkingSettings(similarity=0.35, min_tokens=15)
    chunks = chunked([source("user", database + garden)], embed=real_embed(), chunking=loose).chunks
    assert [chunk.content for chunk in chunks] == [database, garden]
    assert [shown(chunk) for chunk in chunks] == ["user: " + database, garden]
    assert [chunk.speakers for chunk in chunks] == [(Speaker(0, "user"),), (Speaker(0, "user", continues=True),)]


def test_no_text_is_too_long_or_too_odd() -> None:
    for unit in ("a", " ", "\n", "a\n", "aB3+", "记忆。", '{"a":1},'):
        sources = [source("tool", unit * (scaled(200_000) // len(unit)))]
        chunks = chunked(sources).chunks
        assert taken_apart(chunks, sources) == [sources[0].text]
        assert_bounds(chunks)
