"""Topics that several daemons have: PostgreSQL has the log, each daemon is a replica of what it was asked for.

Rule: the log is append-only and its highest canonical_id wins, so it needs no owner. Nothing outside of this folder
knows SQL; nothing in it knows what a row says, but for the bytes of a log file.
"""
