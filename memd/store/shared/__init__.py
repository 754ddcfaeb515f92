"""Topics shared by several daemons: PostgreSQL has the log, and each daemon has replicas of the topics it uses.

Rule: the log is append-only and its highest canonical_id wins, so it needs no owner. Only this folder uses SQL; apart
from the bytes of a log file, it does not interpret rows.
"""
