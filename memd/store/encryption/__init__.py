"""Encryption at rest: a disk that holds nothing of a topic but AES-256-GCM.

Rule: only `opening` is imported from outside before a directory is known to be encrypted: the `cryptography` package
is an extra. Everything above the disk reads and writes plain bytes at plain offsets and does not know of it.
"""
