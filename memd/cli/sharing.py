"""The books of a cluster, for commands: in its database, with any daemon running or none.

Rule: without `cluster.database` nothing here connects anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from memd.settings.model import Config
from memd.store.disk import DiskFiles
from memd.store.layout import check_no_cluster
from memd.store.shared.books import SharedBook, SharedTokens
from memd.store.shared.joining import shared_log
from memd.store.token_list import TokenFile, TokenList


@contextmanager
def shared_book(config: Config, name: str) -> Iterator[SharedBook]:
    """A book of the cluster; raises StoreError where the database cannot be used."""
    with closing(shared_log(config)) as kept:
        kept.connect()
        yield SharedBook(kept, name)


@contextmanager
def token_list(config: Config) -> Iterator[TokenList]:
    """The list of `memd token`; raises StoreError where the database cannot be used."""
    if not config.cluster.is_on:
        check_no_cluster(DiskFiles(), config.data_dir)
        yield TokenFile(DiskFiles(), config.data_dir)
        return
    with shared_book(config, "tokens") as book:
        yield SharedTokens(book)
