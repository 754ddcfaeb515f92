"""The files of the topics, for commands that read them: those of the folder, or a copy of what a cluster keeps.

Rule: a cache of a cluster is never read as if it were all there is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from memd.settings.model import Config
from memd.store.disk import LocalDisk
from memd.store.layout import check_no_cluster


@contextmanager
def topics_folder(config: Config, files: LocalDisk, topic_id: str | None = None) -> Iterator[Path]:
    """Yield a folder with the files of all topics, or at least of one.

    Raises:
        StoreError: it is the cache of a cluster that the settings do not name, or the cluster cannot be read.
    """
    if not config.store.is_shared:
        check_no_cluster(files, config.data_dir)
        yield config.data_dir
        return
    from memd.cli.ingest import progress  # these take a moment
    from memd.store.bucket.objects import Bucket
    from memd.store.cluster.database import Database
    from memd.store.cluster.reading import copy_of

    bucket = Bucket.of(config.store.bucket_settings, os.environ, "store")
    with ExitStack() as until_then:
        database = until_then.enter_context(closing(Database(config.store.url)))
        with progress("reading the cluster") as advanced:
            copied = copy_of(database, bucket, files, config.data_dir, topic_id, advanced)
            folder = until_then.enter_context(copied)
        yield folder
