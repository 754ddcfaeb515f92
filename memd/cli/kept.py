"""The files of the topics and the messages that wait in their journals, for commands that read them.

Rule: nothing is repaired, stored or opened for writing. Of a cluster a copy of all it has is read: that of one daemon
is never read as if it were all there is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from memd.ingest.topic import waiting_in
from memd.settings.model import Config
from memd.store.disk import LocalDisk
from memd.store.encryption.opening import disk_of
from memd.store.layout import TopicLayout, check_no_cluster, topic_ids_in
from memd.store.shared.postgres import shared_log
from memd.wording import counted


@contextmanager
def topics_folder(config: Config, topic_id: str | None = None) -> Iterator[tuple[Path, LocalDisk]]:
    """Yield a folder with the files of all topics, or at least of one, and its disk.

    Raises:
        StoreError: it is the copy of a cluster that the settings do not name, or the cluster cannot be read.
    """
    if not config.cluster.is_on:
        check_no_cluster(files := disk_of(config), config.data_dir)
        yield config.data_dir, files
        return
    from memd.cli.ingest import progress  # these take a moment
    from memd.store.shared.moving import into_folder

    with closing(shared_log(config)) as kept, tempfile.TemporaryDirectory(prefix="memd-") as folder:
        kept.connect()
        files = disk_of(msgspec.structs.replace(config, data_dir=Path(folder)), creating=True)
        with progress("reading the cluster") as advanced:
            names = None if topic_id is None else [topic_id]
            for done, of, _ in into_folder(kept, Path(folder), files, names):
                advanced(done, of)
        yield Path(folder), files


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
