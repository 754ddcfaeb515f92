"""`memd import`: entries of the log out of lines of `memd export` and out of conversations.

Rule: a line is imported whole or not at all, lines in their order, and what is in the log already is left out; so an
import that was interrupted is resumed by doing it again. Vectors are made anew. A chunk that an export speaks of keeps
its uuid, its history and its place in time (`origin_id`); only its canonical ids are new.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from memd.assets import ranks_bytes
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.embedder import EmbedMany
from memd.entries import DEFAULT_TOPIC_ID, Draft, Status, Vector, checked_topic_id
from memd.errors import BadImport, BadRequestBody, BadTopicId
from memd.ingest.dates import Dating
from memd.ingest.offline import Advanced, append_and_seal, ignore_progress, opened
from memd.ingest.pipeline import Drafter, unstored_runs
from memd.ingest.redaction.redactor import Redactor
from memd.messages import Message, chain_all, leading_count
from memd.settings.model import Config
from memd.speech import Speech
from memd.store.log.columns import uuid_bytes
from memd.store.store import Store
from memd.store.tools.export_line import decode_line, state_of
from memd.wire.chat.message import parse_message

GROUP_ENTRIES = 256
"""Entries of an export that are appended with one fsync: about three seconds of embedding."""
STRETCH_MESSAGES = 64
"""Messages of a conversation after which the next user message begins a new append."""
_AHEAD_US = 86_400_000_000
"""A clock that is a day ahead, or in another time zone, is no reason to lose a date."""
_VECTORS_MAX = 4096  # the corrections of a chunk repeat its text


class ImportCounts(msgspec.Struct):
    """Figures of one import."""

    lines: int = 0
    entries: int = 0
    """Of exports: appended."""
    entries_known: int = 0
    conversations: int = 0
    chunks: int = 0
    """Of conversations: appended."""
    messages_known: int = 0
    """Of conversations: messages whose text is in the log already, and those that are not remembered at all."""
    times_refused: int = 0
    """Of conversations: times that cannot be, in the future or before 1980; the message is dated as if it had none."""
    redacted: Counter[str] = msgspec.field(default_factory=Counter)
    """The number of secrets that were replaced in the appended entries, by the name of the pattern."""


class _LineKind(msgspec.Struct, frozen=True):
    """The members that distinguish the kinds of lines."""

    uuid: Raw = Raw()
    messages: Raw = Raw()


_kind_decoder = msgspec.json.Decoder(_LineKind)
_list_decoder = msgspec.json.Decoder(list[Raw])


def import_file(
    config: Config, path: Path, *, topic_id: str | None, advanced: Advanced = ignore_progress
) -> ImportCounts:
    """Import a file into the log of `config.data_dir`; see `Importer`.

    Raises:
        StoreLocked: a daemon is running on it.
        MemdError: see `Importer.run`.
    """
    counter = TokenCounter(cl100k_base(ranks_bytes()))
    with opened(config) as (store, embedder):
        importer = Importer(store, config, counter, embedder.embed_many, embedder.same_cosine, topic_id=topic_id)
        importer.run(path, advanced)
        return importer.counts


class _RecentVectors:
    """`embed_many` that keeps the vectors of the last `_VECTORS_MAX` different texts."""

    def __init__(self, embed_many: EmbedMany) -> None:
        self._embed_many = embed_many
        self._vectors: OrderedDict[str, Vector] = OrderedDict()

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if missing:
            self._vectors.update(zip(missing, self._embed_many(missing), strict=True))
        found = np.stack([self._vectors[text] for text in texts])
        while len(self._vectors) > _VECTORS_MAX:
            self._vectors.popitem(last=False)
        return found


class Importer:
    """One import into an open store. `counts` may be read at any time."""

    def __init__(
        self,
        store: Store,
        config: Config,
        counter: TokenCounter,
        embed_many: EmbedMany,
        same_cosine: Callable[[float], float] = float,
        *,
        topic_id: str | None = None,
    ) -> None:
        """`topic_id`: where everything goes; None: entries to the topics they came from, conversations to `default`.

        Raises:
            BadTopicId: not a topic name.
        """
        self.counts = ImportCounts()
        self._store = store
        self._embed_many = _RecentVectors(embed_many)
        self._redactor = Redactor.of(config.ingest)
        self._speech = Speech(config.ingest.strip)
        self._drafter = Drafter(config, counter, self._embed_many, same_cosine, redactor=self._redactor)
        self._dating = Dating(time.time_ns() // 1000 + _AHEAD_US)
        self._topic_id = checked_topic_id(topic_id) if topic_id is not None else None
        self._pending: list[Draft] = []
        self._pending_topic_id = ""
        self._histories: dict[tuple[str, bytes], list[bytes] | None] = {}
        """By topic and chunk: the states that the log had and the file has not come to yet; None once the file has gone
        beyond them."""

    def run(self, path: Path, advanced: Advanced = ignore_progress) -> None:
        """Import a file; `advanced` is called with the bytes done and to do.

        Raises:
            BadImport: a line cannot be imported; those before it are, those behind it are not.
            MemdError: as before, because of the model or the disk.
        """
        try:
            with path.open("rb") as file:
                size, done = path.stat().st_size, 0
                for number, line in enumerate(file, 1):
                    name = f"{path}, line {number}"
                    try:
                        self._line(line, name)
                    except BadTopicId as error:
                        raise BadImport(f"{name}: {error}; --topic gives all that is imported another one") from error
                    done += len(line)
                    advanced(done, size)
        except OSError as error:
            raise BadImport(f"{path}: cannot be read ({error.strerror or error}); name another file") from error
        finally:
            self._flush()

    def _line(self, line: bytes, name: str) -> None:
        if not line.strip():
            return
        try:
            parsed = _parsed(line, self._dating)
        except (ValueError, RecursionError, BadRequestBody, BadTopicId) as error:
            raise BadImport(
                f"{name}: is neither an entry of `memd export` nor a conversation (an array of messages, or an object "
                f"with `messages`): {error}; what stands before it is imported: correct it and import the file again"
            ) from error
        if isinstance(parsed, list):
            self._conversation(parsed)
        else:
            self._entry(*parsed)
        self.counts.lines += 1

    # -- entries of an export -----------------------------------------------------------------------------------

    def _entry(self, topic_id: str, draft: Draft) -> None:
        topic_id = self._topic_id or topic_id
        read, draft = draft, self._redactor.draft(draft)  # before it is looked up: the log has it redacted
        if self._is_known(topic_id, draft) and not self._belongs_to_the_last(topic_id, draft):
            self.counts.entries_known += 1
            return
        self.counts.redacted += self._redactor.replaced(read, draft)
        if draft.status is Status.ACTIVE:
            vector = self._embed_many([draft.embedded_text])[0].astype("<f4").tobytes()
            draft = msgspec.structs.replace(draft, vector=vector)
        # Entries of different topics keep the order that they have in the file.
        if topic_id != self._pending_topic_id or len(self._pending) >= GROUP_ENTRIES:
            self._flush()
            self._pending_topic_id = topic_id
        self._pending.append(draft)
        assert draft.origin_id is not None, "every line has it"
        self._store.observe_canonical_id(draft.origin_id)

    def _is_known(self, topic_id: str, draft: Draft) -> bool:
        """Whether the log has this state of the chunk, and no line before it that the log has not.

        A chunk may be in one state several times (praised, blamed, praised): states are compared in order.
        """
        key = topic_id, draft.uuid
        if key not in self._histories:
            snapshot = self._store.topic(topic_id).snapshot()
            self._histories[key] = [state_of(entry) for entry in snapshot.history(draft.uuid)]
        ahead = self._histories[key]
        state = state_of(draft)
        if ahead is None or state not in ahead:
            self._histories[key] = None
            return False
        self._histories[key] = ahead[ahead.index(state) + 1 :]
        return True

    def _belongs_to_the_last(self, topic_id: str, draft: Draft) -> bool:
        """Whether this is a chunk that the log has, and the last entry there takes out what the chunk replaced.

        So it is where live chunks were imported before the whole history. It is appended once more, to be found behind
        that entry: else who undoes the Update would bring back the old chunk and leave the new one.
        """
        key = topic_id, draft.uuid
        if draft.action != "Update" or self._histories[key] != []:
            return False
        if self._pending and topic_id == self._pending_topic_id:
            last, status = self._pending[-1].uuid, self._pending[-1].status
        else:
            views = list(self._store.topic(topic_id).snapshot().views.values())
            row = next(view.rows[-1] for view in reversed(views) if len(view.rows))
            last, status = uuid_bytes(row["uuid_high"], row["uuid_low"]), Status(row["status"])
        if status is Status.ACTIVE or last not in draft.supersedes:
            return False
        self._histories[key] = None
        return True

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            append_and_seal(self._store.topic(self._pending_topic_id), pending)
            self.counts.entries += len(pending)

    # -- conversations ------------------------------------------------------------------------------------------

    def _conversation(self, messages: Sequence[Message]) -> None:
        self._flush()
        said = [self._speech.heard(message) for message in messages[leading_count(messages) :]]
        digests = chain_all(message.content_digest for message in said)
        topic = self._store.topic(self._topic_id or DEFAULT_TOPIC_ID)
        for stretch in _stretches(list(zip(digests, said, strict=True))):
            runs = unstored_runs(topic, stretch, self._redactor)
            self.counts.messages_known += len(stretch) - sum(map(len, runs))
            drafts = self._drafter.drafts(topic, runs)
            append_and_seal(topic, drafts)
            self.counts.chunks += len(drafts)
            self.counts.redacted += self._redactor.marks([draft.content for draft in drafts])
        self.counts.conversations += 1
        self.counts.times_refused = self._dating.refused


def _parsed(line: bytes, dating: Dating) -> list[Message] | tuple[str, Draft]:
    """A conversation, or an entry, without its vector, with its topic.

    Raises:
        ValueError, RecursionError, BadRequestBody, BadTopicId: it is neither.
    """
    begun = None
    if line.lstrip().startswith(b"{"):
        members = _kind_decoder.decode(line)
        if bytes(members.uuid):
            return decode_line(line)
        begun = dating.told_time(line)
        line = bytes(members.messages)
        if not line:
            raise BadRequestBody("it has neither `uuid` nor `messages`")
    listed = _list_decoder.decode(line)
    messages = [
        message if at is None else msgspec.structs.replace(message, said_at=at)
        for message, at in zip(map(parse_message, listed), dating.told_times(listed, begun), strict=True)
    ]
    if not all(message.role for message in messages):
        raise BadRequestBody("a message has no role")
    return messages


def _stretches(messages: Sequence[tuple[bytes, Message]]) -> list[list[tuple[bytes, Message]]]:
    """Cut a conversation into parts that are appended one by one; each begins with a turn, as no chunk crosses two."""
    stretches: list[list[tuple[bytes, Message]]] = []
    for digest, message in messages:
        if not stretches or (message.role == "user" and len(stretches[-1]) >= STRETCH_MESSAGES):
            stretches.append([])
        stretches[-1].append((digest, message))
    return stretches
