"""Encryption at rest: a disk that holds nothing of a topic but AES-256-GCM.

Rule: the `cryptography` package is an extra, imported when a key is first used. Everything above the disk reads and
writes plain bytes at plain offsets and does not know of it.
"""
