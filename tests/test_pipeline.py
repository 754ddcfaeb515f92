"""From messages to drafts: what a topic has is left out, and what is of another kind or source is not what it has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from archiver_stage import COUNTER, DATA_DIR, DIMENSION, HashEmbedder
from crash_files import CrashFiles

from memd.ingest.chunking import Utterance
from memd.ingest.pipeline import Drafter
from memd.ingest.readers import GivenDocument, GivenSection
from memd.ingest.redaction.redactor import Redactor, last_look
from memd.settings.model import Config, IngestSettings
from memd.store.store import ModelId, Store, StoreShared, TopicLog

SENTENCE = "The ferry does not run in January."


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
    return Drafter(config, COUNTER, embedder.embed_many, redactor=redactor or Redactor.of(config.ingest))


def test_a_sentence_of_a_chat_and_the_same_of_two_documents_are_three_chunks(
    topic: TopicLog, embedder: HashEmbedder
) -> None:
    make = drafter(embedder)
    places = [("turn", None), ("document", "a.md"), ("document", "b.md"), ("note", None)]
    for number, (kind, source) in enumerate(places):
        run = [Utterance(SENTENCE, "user", bytes([number]) * 16)]
        (draft,) = topic_drafts = make.drafts(topic, [run], kind=kind, source=source)
        assert (draft.kind, draft.source) == (kind, source)
        topic.append(topic_drafts)
        assert make.drafts(topic, [run], kind=kind, source=source) == [], "but twice in one place it is one"
    assert topic.snapshot().live_count == len(places)


def test_a_document_is_redacted_before_it_is_cut(embedder: HashEmbedder) -> None:
    pem = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQ\n" * 60 + "-----END PRIVATE KEY-----"
    sections = (GivenSection(text=f"The key:\n{pem}"), GivenSection(text=" \n"))
    document = GivenDocument(source="keys.md", hash="0" * 64, sections=sections)
    (draft,) = drafter(embedder).cutter.cut_document(document)
    assert draft.content == "The key:\n[redacted:private_key]"


def test_a_chunk_is_redacted_though_the_message_that_it_was_cut_from_had_nothing(
    topic: TopicLog, embedder: HashEmbedder
) -> None:
    filler = "word " * 40 + ".\n\n"
    text = f"{filler}{filler}" + "tangerine " * 60
    redactor = Redactor.of(IngestSettings(redact=True, redact_patterns=OWN))
    assert redactor.text(text) == text
    drafts = drafter(embedder).drafts(topic, [[Utterance(text, "user", bytes(16))]])
    assert [draft.content for draft in drafts][-1] == "[redacted:whole]"
    topic.append(drafts)
    assert all(draft.vector == embedder.embed_many([draft.content])[0].tobytes() for draft in drafts)
