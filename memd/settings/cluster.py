"""The settings of a cluster: several daemons that share their topics.

Rule: a daemon is one of many if, and only if, `cluster.database` is set; there is nothing else to be set.
"""

from __future__ import annotations

import msgspec


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The log that several daemons share."""

    database: str = ""
    """The PostgreSQL database that has it, postgresql://USER@HOST/DATABASE; empty: `data_dir` has all topics."""

    @property
    def is_on(self) -> bool:
        """Whether this daemon is one of many, and `data_dir` a copy."""
        return bool(self.database)
