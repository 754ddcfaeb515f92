"""A daemon's part in a cluster: the database, the bucket, and its own address among the others'.

Rule: a daemon starts also while the database is away; but not with settings that cannot be right.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from memd.errors import StoreError
from memd.settings.model import Config
from memd.settings.store import StoreSettings
from memd.store.bucket.objects import Bucket
from memd.store.cluster.book import SharedBook
from memd.store.cluster.bucket_watch import BucketWatch
from memd.store.cluster.daemons import DISK, DaemonNotices, marks_of, seen
from memd.store.cluster.database import Database
from memd.store.cluster.erasures import SharedErasures
from memd.store.cluster.postgres_shelf import PostgresShelf
from memd.store.disk import LocalDisk
from memd.store.log.format import ModelId

log = logging.getLogger("memd")


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """All that the daemons of a cluster share, as one of them has it."""

    database: Database
    bucket: Bucket
    watch: BucketWatch
    own_url: str
    """At which the other daemons reach the model address of this one."""
    lease_seconds: float
    trouble: StoreError | None = None
    """Why it could not be reached at first."""

    @classmethod
    def joined(cls, settings: StoreSettings, env: Mapping[str, str], own_url: str) -> Cluster:
        """Return the cluster of the settings, which need not be reachable now. May take some seconds.

        Args:
            own_url: where the settings do not say it.

        Raises:
            StoreError: packages are missing, the database has the schema of a newer memd, or a URL is wrong and cannot
                become right by itself.
        """
        database, bucket = Database(settings.url), Bucket.of(settings.bucket_settings, env, "store")
        cluster = cls(
            database=database,
            bucket=bucket,
            watch=BucketWatch(bucket, lambda: database.cluster),
            own_url=settings.own_url.rstrip("/") or own_url,
            lease_seconds=settings.lease_seconds,
        )
        try:
            cluster.database.connect()
        except StoreError as error:
            if not cluster.database.is_away:
                raise
            said = "the cluster cannot be reached yet; it is tried again, and requests go on without memory"
            log.error(said, extra={"error": error})
            return msgspec.structs.replace(cluster, trouble=error)
        return cluster

    def shelf(self, files: LocalDisk, data_dir: Path) -> PostgresShelf:
        """The topics of the cluster, with this directory as their cache. Raises WrongKey if this daemon has another key
        than the cluster, as far as that can be known now."""
        shelf = PostgresShelf(
            self.database, self.bucket, files, data_dir, url=self.own_url, lease_seconds=self.lease_seconds
        )
        if self.trouble is None:
            shelf.check_key()
        return shelf

    def others(self) -> list[str]:
        """Return the URLs of the other daemons that were heard of lately. Raises StoreError if nobody can say."""
        return [one.url for one in seen(self.database) if one.url != self.own_url]

    def others_with_room(self) -> list[str]:
        """Return those of them whose disks are in no trouble. Raises as `others`."""
        return [one.url for one in seen(self.database) if one.url != self.own_url and DISK not in one.marks]

    def notices(self, version: str, config: Config, model: ModelId) -> DaemonNotices:
        """Tells the other daemons of this one."""
        return DaemonNotices(self.database, self.own_url, version, marks_of(config, model))

    def erasures(self, files: LocalDisk, data_dir: Path) -> SharedErasures:
        """The erasures in it, as this daemon follows them."""
        return SharedErasures(SharedBook(self.database, "erasures"), files, data_dir)

    @property
    def place(self) -> str:
        """Where memory is, in words."""
        return f"{self.database.place} and {self.bucket.url}"
