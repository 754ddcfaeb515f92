"""The settings of the continuous backup to a bucket.

Rule: credentials are given as those of every other program that uses a bucket, in the AWS_ variables of the
environment; the two settings for them are for machines on which those belong to something else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

BucketUrl = Annotated[str, Meta(pattern=r"^(?:s3://[A-Za-z0-9][A-Za-z0-9.-]*(?:/[A-Za-z0-9._-]+)*/?)?$")]


class BackupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The continuous backup to a bucket."""

    bucket: BucketUrl = ""
    """Where it goes: s3://BUCKET/PREFIX; empty: nowhere."""
    endpoint: str = ""
    """The server's address, where it is not Amazon's (MinIO, Garage, Ceph, R2); empty: what AWS_ENDPOINT_URL says."""
    region: str = ""
    """The bucket's region; empty: what AWS_REGION says."""
    access_key: str = ""
    """The id of the key; empty: AWS_ACCESS_KEY_ID, or what the machine's role gives."""
    secret_key: str = ""
    """The key itself, better in MEMD_BACKUP_SECRET_KEY than in a file; empty: AWS_SECRET_ACCESS_KEY."""
    seconds: Annotated[float, Meta(ge=0.1, le=3_600)] = 10.0
    """How often what has changed is written to it: what a lost disk costs at most."""
    keep_days: Annotated[int, Meta(ge=1, le=3_650)] = 7
    """How far back `memd restore --until` reaches."""

    @property
    def is_on(self) -> bool:
        """Whether there is a bucket."""
        return bool(self.bucket)
