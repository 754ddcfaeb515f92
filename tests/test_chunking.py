"""Chunking with the real tokenizer."""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from archiver_stage import COUNTER, DATA_DIR, DIMENSION, HashEmbedder
from crash_files import CrashFiles
from effort import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from memd.entries import Draft, Speaker
from memd.ingest.chunking import Utterance, split
from memd.ingest.pipeline import Cutter, Drafter
from memd.ingest.readers.text import GivenDocument, GivenSection
from memd.ingest.redaction import Redactor, last_look
from memd.settings.model import ChunkingSettings, Config, IngestSettings
from memd.store.store import ModelId, Store, StoreShared, TopicLog

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
    "\ud83d" * 700,
    '{"a":1,"b":[2]},' * 150,
]


def source(role: str, text: str) -> Utterance:
    return Utterance(text, role, hashlib.blake2b(f"{role}{text!r}".encode(), digest_size=16).digest())


def chunked(sources: Sequence[Utterance], chunking: ChunkingSettings = CHUNKING) -> tuple[Draft, ...]:
    return split(sources, settings=chunking, tokenizer=COUNTER)


def shown(chunk: Draft) -> str:
    return chunk.displayed


def taken_apart(chunks: Sequence[Draft], sources: Sequence[Utterance]) -> list[str]:
    """The text that the chunks have of each message, by their speakers; fails if a chunk holds anything else."""
    found: list[str] = []
    for chunk in chunks:
        assert chunk.speakers is not UNSET
        ends = [*(speaker.offset - 1 for speaker in chunk.speakers[1:]), len(chunk.content)]
        assert all(chunk.content[end] == "\n" for end in ends[:-1])
        for speaker, end, digest in zip(chunk.speakers, ends, chunk.digests, strict=True):
            if not speaker.continues:
                found.append("")
            found[-1] += chunk.content[speaker.offset : end]
            said = sources[len(found) - 1]
            assert (speaker.role, digest) == (said.role, said.digest)
    return found


def assert_bounds(chunks: Sequence[Draft], chunking: ChunkingSettings = CHUNKING) -> None:
    tokens = [COUNTER.count(shown(chunk)) for chunk in chunks]
    assert max(tokens, default=0) <= chunking.max_tokens
    for number in range(1, len(chunks)):
        both = chunks[number - 1 : number + 1]
        is_talk = all(one.roles == ("assistant",) and "```" not in one.content for one in both)
        if tokens[number] < chunking.min_tokens and is_talk:  # then it does not fit to the one before it
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
    chunks = chunked(sources)
    assert taken_apart(chunks, sources) == [source.text for source in sources]
    assert_bounds(chunks)
    assert chunked(sources) == chunks


def test_a_code_block_is_not_cut_where_it_fits_and_at_lines_where_it_does_not() -> None:
    sources = [source(role, f"{PROSE * 2}\n{CODE}{PROSE}") for role in ("user", "assistant")] * 5
    chunks = chunked(sources)
    assert sum(chunk.content.count(CODE) for chunk in chunks) == 10

    code = "```\n" + "".join(f"    value[{number}] = compute({number})\n" for number in range(200)) + "```\n"
    chunks = chunked([source("assistant", code)])
    assert len(chunks) > 3 and "".join(chunk.content for chunk in chunks) == code
    assert all(chunk.content.endswith("\n") for chunk in chunks)


@pytest.mark.parametrize("speaker", ["tool", None])
def test_the_rows_of_a_table_that_is_cut_have_its_header_row_beside_them(speaker: str | None) -> None:
    rows = [f"| Lamp {number} of the north hall | {number}.50 |" for number in range(120)]
    lines = ["Our prices:", "", "| Product | Price |", "|---|--:|", *rows, "", "Ask | Bo.", "", PROSE * 6]
    call = source("assistant", "[call prices]\n" + PROSE)
    sources = [Utterance("\n".join(lines))] if speaker is None else [call, source(speaker, "\n".join(lines))]
    chunks = chunked(sources)
    assert "".join(chunk.content for chunk in chunks).endswith("\n".join(lines))
    inside = [chunk for chunk in chunks if chunk.content.startswith("| Lamp")]
    assert len(inside) > 2
    for chunk in chunks:
        if chunk in inside:
            assert (chunk.columns, chunk.displayed) == (lines[2], f"{lines[2]}\n{chunk.content}")
            assert chunk.embedded_text.startswith(lines[2])
        else:
            assert chunk.columns is UNSET


def test_a_chunk_ends_neither_within_a_short_message_nor_between_a_call_and_its_result() -> None:
    sentences = "The gateway listens on port 8765. The password is rotated on Mondays. Backups leave at two. "
    sources = [source("user" if number % 2 else "assistant", sentences * 2) for number in range(6)]
    for chunk in chunked(sources):
        assert shown(chunk).startswith(("user: ", "assistant: ")) and chunk.content.endswith("at two. ")

    call = msgspec.structs.replace(source("assistant", f"{PROSE * 2}\n[call read {{'path': 'pier.txt'}}]"), calls=True)
    first, second, *_ = chunked([source("user", "Look."), call, source("tool", f"{PROSE * 3}\n\n" * 6)])
    assert [speaker.role for speaker in first.speakers or ()] == ["user", "assistant", "tool"]
    assert [speaker.role for speaker in second.speakers or ()] == ["tool"]

    call = msgspec.structs.replace(source("assistant", "[call bash {'command': 'python3 report.py 2'}]"), calls=True)
    lines = [f"2026-11-07T12:31 INFO session.queue took {number} ms for anchor {number:x}\n" for number in range(40)]
    result = source("tool", "report 2: id QX-20077\n" + "".join(lines))
    chunks = chunked([call, result])
    assert "report.py 2" in chunks[0].content and "id QX-20077" in chunks[0].content
    assert taken_apart(chunks, [call, result]) == [call.text, result.text]
    assert_bounds(chunks)


def test_talk_shares_no_chunk_with_steps_and_code_beside_it_unless_it_is_tiny() -> None:
    call = msgspec.structs.replace(source("assistant", "[call read {'path': 'pier.txt'}]"), calls=True)
    result, done = (
        source("tool", "The lamp of the pier is 40 W."),
        source("assistant", "The lamp of the pier has 40 W."),
    )
    asked = source("user", "Which lamp does the pier have, and how bright is it?")
    assert [chunk.roles for chunk in chunked([asked, call, result, done])] == [
        ("user",),
        ("assistant", "tool"),
        ("assistant",),
    ]
    [chunk] = chunked([source("user", "Look."), call, result, source("assistant", "40 W.")])
    assert chunk.roles == ("user", "assistant", "tool")

    texts = [chunk.content for chunk in chunked([source("user", f"{asked.text}\n{CODE}{done.text}")])]
    assert texts == [f"{asked.text}\n", CODE, done.text]
    assert len(chunked([source("user", f"Like this:\n{CODE}")])) == 1
    pasted = "npm ERR! code ERESOLVE\nnpm ERR! peer react@^17.0.0 from dnd@13.1.0 (node:internal/1105:14)\n\n"
    assert [chunk.content for chunk in chunked([source("user", f"{pasted}{asked.text}")])] == [pasted, asked.text]
    assert len(chunked([source("assistant", f"{pasted}{asked.text}")])) == 1, "only users paste"


def test_tiny_turns_share_a_chunk_and_open_with_their_roles() -> None:
    sources = [source("user", "Which port?"), source("assistant", "8765."), source("user", "Thanks!")]
    (chunk,) = chunked(sources)
    assert chunk.content == "Which port?\n8765.\nThanks!"
    assert shown(chunk) == "user: Which port?\nassistant: 8765.\nuser: Thanks!"
    assert chunk.speakers == (Speaker(0, "user"), Speaker(12, "assistant"), Speaker(18, "user"))
    assert chunk.digests == tuple(source.digest for source in sources)


def test_no_text_is_too_long_or_too_odd() -> None:
    for unit in ("a", " ", "\n", "a\n", "aB3+", "记忆。", '{"a":1},', "\ud83d"):
        sources = [source("tool", unit * (scaled(200_000) // len(unit)))]
        chunks = chunked(sources)
        assert taken_apart(chunks, sources) == [sources[0].text]
        assert_bounds(chunks)


# From messages to drafts: what of another kind or source is not what a topic has


@pytest.fixture
def embedder() -> HashEmbedder:
    return HashEmbedder()


@pytest.fixture
def topic(embedder: HashEmbedder) -> Iterator[TopicLog]:
    store = Store(
        DATA_DIR,
        StoreShared(
            model=ModelId(DIMENSION, embedder.fingerprint),
            segment_entries_max=3,
            draft_filter=last_look(Redactor.of(IngestSettings(redact=True, redact_patterns=OWN))),
            files=CrashFiles(),
        ),
    )
    yield store.topic("talk")
    store.close()


OWN = {"whole": r"^tangerine .*"}
"""A pattern that fits a chunk where it does not fit the message that the chunk was cut from."""


def drafter(embedder: HashEmbedder, redactor: Redactor | None = None) -> Drafter:
    config = Config(ingest=IngestSettings(redact=True, redact_patterns=OWN))
    cutter = Cutter(config.chunking, COUNTER, redactor or Redactor.of(config.ingest))
    return Drafter(cutter, config.dedupe.cosine, embedder.embed_many)


def test_a_document_is_redacted_before_it_is_cut(embedder: HashEmbedder) -> None:
    pem = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQ\n" * 60 + "-----END PRIVATE KEY-----"
    sections = (GivenSection(text=f"The key:\n{pem}"), GivenSection(text=" \n"))
    document = GivenDocument(source="keys.md", hash="0" * 64, sections=sections)
    (draft,) = drafter(embedder).cutter.cut_document(document)
    assert draft.content == "The key:\n[redacted:private_key]"


def test_a_chunk_is_redacted_though_its_message_had_nothing(topic: TopicLog, embedder: HashEmbedder) -> None:
    filler = "word " * 40 + ".\n\n"
    text = f"{filler}{filler}" + "tangerine " * 60
    redactor = Redactor.of(IngestSettings(redact=True, redact_patterns=OWN))
    assert redactor.text(text) == text
    drafts = drafter(embedder).drafts(topic, [[Utterance(text, "user", bytes(16))]])
    assert [draft.content for draft in drafts][-1] == "[redacted:whole]"
    topic.append(drafts)
    assert all(draft.vector == embedder.embed_many([draft.content])[0].tobytes() for draft in drafts)
