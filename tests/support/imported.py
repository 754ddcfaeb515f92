"""The daemon's side of an import, within the process of a test: it appends to a store that the test opened.

Rule: it does what the routes do (memd/admin/documents.py), without a daemon around it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from memd.admin.documents import EntriesBody, MessagesBody
from memd.conversation.tokens import TokenCounter
from memd.embedding.embedder import EmbedMany
from memd.ingest.imports.files import files_of, read
from memd.ingest.imports.parts import LinesTaken, PartTaken, Sending, line_drafts, part_drafts
from memd.ingest.imports.threads import Dating
from memd.ingest.offline import append_and_seal
from memd.ingest.pipeline import Drafter
from memd.ingest.redaction.redactor import Redactor
from memd.messages import Speech
from memd.settings.loading import programs_of
from memd.settings.model import Config
from memd.store.store import Store


class Appending:
    """Answers the two routes."""

    def __init__(self, store: Store, counter: TokenCounter, embed_many: EmbedMany) -> None:
        config = Config()
        self._store = store
        programs = programs_of(config.ingest)
        self._speech = Speech(programs.strip, programs.message, programs.reply, programs.result)
        self._drafter = Drafter(config, counter, embed_many, redactor=Redactor.of(config.ingest))

    def post(self, path: str, body: object) -> bytes:
        """Answer a request; the body goes through JSON, as it does on its way to a daemon."""
        sent = msgspec.json.encode(body)
        if path.endswith("/entries"):
            return msgspec.json.encode(self._lines(msgspec.json.decode(sent, type=EntriesBody)))
        return msgspec.json.encode(self._part(msgspec.json.decode(sent, type=MessagesBody)))

    def _lines(self, body: EntriesBody) -> LinesTaken:
        topic = self._store.topic(body.topic_id)
        drafts, taken = line_drafts(topic, body.lines, self._drafter)
        for draft in drafts:
            assert draft.origin_id is not None
            self._store.clock.observe(draft.origin_id)
        append_and_seal(topic, drafts)
        return taken

    def _part(self, body: MessagesBody) -> PartTaken:
        topic = self._store.topic(body.topic_id)
        drafts, taken = part_drafts(topic, body.part, self._drafter, self._speech)
        append_and_seal(topic, drafts)
        return taken


def imported(
    path: Path,
    store: Store,
    counter: TokenCounter,
    embed_many: EmbedMany,
    *,
    topic_id: str | None = None,
    wanted: str | None = None,
) -> Sending:
    """Import the files at a path as the command does; what was sent and what was not."""
    sending = Sending(Appending(store, counter, embed_many).post, topic_id)
    dating = Dating()
    for file in files_of([path]):
        for name, found in read(file, dating, wanted, lambda _: None):
            sending.take(name, found)
    sending.end()
    return sending


def problems_of(sending: Sending) -> list[str]:
    """Each problem as the command writes it, without the path."""
    return [f"{Path(name).name}, {one.place}: {one.problem}" for name, one in sending.problems]
