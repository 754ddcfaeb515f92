"""Commands over a whole data directory: backup, verify, export, disk usage.

Rule: they never write to the directory that they read, need no lock and work beside a running daemon. Only `backup`
needs a local disk (hard links).
"""
