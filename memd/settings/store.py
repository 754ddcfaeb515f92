"""The settings of the store: what stays in memory, and of a cluster the database and the bucket.

Rule: a daemon is in a cluster if, and only if, `store.url` is set.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from memd.settings.backup import BackupSettings, BucketUrl


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The open topics that are kept in memory, and the database and bucket of topics that several daemons share."""

    topic_idle_seconds: Annotated[float, Meta(ge=0.01, le=3_600)] = 600.0
    """A topic without a request for this long is closed; its next request reads it from disk."""
    memory_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] = 4 << 30
    """Above this the least recently used topics are closed sooner; never one in use."""
    url: str = ""
    """The PostgreSQL database of a cluster: postgresql://USER@HOST/DATABASE; empty: topics are in `data_dir` alone."""
    bucket: BucketUrl = ""
    """With `url`: the bucket that has the files which are never written again; `data_dir` is a cache of both."""
    endpoint: str = ""
    """Of the bucket's server, where it is not Amazon's; empty: what AWS_ENDPOINT_URL says."""
    region: str = ""
    """The bucket's region; empty: what AWS_REGION says."""
    access_key: str = ""
    """The id of the key; empty: AWS_ACCESS_KEY_ID, or what the machine's role gives."""
    secret_key: str = ""
    """The key itself, better in MEMD_STORE_SECRET_KEY than in a file; empty: AWS_SECRET_ACCESS_KEY."""
    own_url: str = ""
    """With `url`: the address at which the other daemons reach this one; empty: that of `listen`."""
    lease_seconds: Annotated[float, Meta(ge=0.5, le=600)] = 5.0
    """With `url`: for so long the topics of a daemon that has died, or is cut off, wait for another one."""

    @property
    def is_shared(self) -> bool:
        """Whether there is a cluster."""
        return bool(self.url)

    @property
    def bucket_settings(self) -> BackupSettings:
        """The bucket, as `Bucket.of` wants it."""
        return BackupSettings(
            bucket=self.bucket,
            endpoint=self.endpoint,
            region=self.region,
            access_key=self.access_key,
            secret_key=self.secret_key,
        )
