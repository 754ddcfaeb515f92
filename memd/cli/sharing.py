"""The tokens and grants of a cluster, for commands: in its database, with any daemon running or none.

Rule: without `store.url` nothing here connects anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from memd.settings.model import Config
from memd.store.disk import DiskFiles
from memd.store.layout import check_no_cluster
from memd.store.token_list import TokenFile, TokenList

if TYPE_CHECKING:
    from memd.store.cluster.book import BookName, SharedBook


@contextmanager
def shared_book(config: Config, name: BookName) -> Iterator[SharedBook]:
    """A book of the cluster; raises StoreError where the database cannot be used."""
    from memd.store.cluster.book import SharedBook  # needs the extra `cluster`
    from memd.store.cluster.database import Database

    with closing(Database(config.store.url, connections_max=1)) as database:
        yield SharedBook(database, name)


@contextmanager
def token_list(config: Config) -> Iterator[TokenList]:
    """The list of `memd token`; raises StoreError where the database cannot be used."""
    if not config.store.is_shared:
        check_no_cluster(DiskFiles(), config.data_dir)
        yield TokenFile(DiskFiles(), config.data_dir)
        return
    from memd.store.cluster.tokens import SharedTokens  # as above

    with shared_book(config, "tokens") as book:
        yield SharedTokens(book)
