"""Messages that are not in the log yet: they wait in the journals, and commands that read the log say so.

Rule: the journals are read as they are on disk; nothing is repaired, stored or opened for writing.
"""

from __future__ import annotations

from pathlib import Path

from memd.ingest.unstored import waiting_in
from memd.store.disk import LocalDisk
from memd.store.layout import TopicLayout, topic_ids_in
from memd.wording import counted


def waiting_messages(data_dir: Path, files: LocalDisk, topic_id: str | None = None) -> int:
    """How many messages of all topics, or of one, are in a journal and not in the log.

    Raises:
        StoreError: a journal cannot be read.
    """
    named = topic_ids_in(files, data_dir) if topic_id is None else [topic_id]
    return sum(waiting_in(TopicLayout(data_dir, name).hot, files) for name in named)


def waiting_note(messages: int) -> str | None:
    """Say that so many messages are not in the log yet; None if all are."""
    if not messages:
        return None
    are, wait = ("is", "waits") if messages == 1 else ("are", "wait")
    told = f"{counted(messages, 'message')} {are} not in the log yet and {wait} in the journal (hot.log)"
    return (
        f"{told}: memd stores them while it runs. `memd search` and `memd show` find what is answered already, and the "
        "rest once it is stored, when its conversation has rested (buffer.idle_seconds)"
    )
