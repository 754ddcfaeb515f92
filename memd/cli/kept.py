"""The files of the topics, for commands that read them: those of the folder, or a copy of what a cluster has.

Rule: the copy of one daemon is never read as if it were all there is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from memd.settings.model import Config
from memd.store.disk import LocalDisk
from memd.store.encryption.opening import disk_of
from memd.store.layout import check_no_cluster
from memd.store.shared.joining import shared_log


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
