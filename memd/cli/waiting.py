"""Messages that are not in the log yet: they wait in the journals, and commands that read the log say so.

Rule: the journals are read as they are on disk; nothing is repaired, stored or opened for writing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from memd.conversation.events import BufferEvent, decode_event
from memd.conversation.hot_buffer import HotBuffer
from memd.errors import ForeignFile
from memd.ingest.unstored import unstored_messages
from memd.store.disk import LocalDisk
from memd.store.layout import TopicLayout, topic_ids_in
from memd.store.log.journal import read_journal
from memd.wording import counted


def waiting_messages(data_dir: Path, files: LocalDisk, topic_id: str | None = None) -> int:
    """How many messages of all topics, or of one, are in a journal and not in the log.

    Raises:
        StoreError: a journal cannot be read.
    """
    named = topic_ids_in(files, data_dir) if topic_id is None else [topic_id]
    return sum(_in_journal(TopicLayout(data_dir, name).hot, files) for name in named)


def waiting_note(messages: int) -> str | None:
    """Say that so many messages are not in the log yet; None if all are."""
    if not messages:
        return None
    are, wait = ("is", "waits") if messages == 1 else ("are", "wait")
    told = f"{counted(messages, 'message')} {are} not in the log yet and {wait} in the journal (hot.log)"
    return f"{told}: memd stores them while it runs, and `memd search` and `memd show` find them already"


def _in_journal(path: Path, files: LocalDisk) -> int:
    events: list[BufferEvent] = []
    try:
        payloads = read_journal(path, files)
    except ForeignFile:
        return 0  # nothing of it is stored in this topic; a daemon and `memd verify` say so
    for payload in payloads:
        try:
            events.append(decode_event(payload))
        except msgspec.DecodeError:
            continue  # of another version; a daemon says so
    buffer = HotBuffer(lambda: "", 1)
    buffer.replay(events)
    return unstored_messages(buffer)
