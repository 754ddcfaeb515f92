"""Encryption at rest: a disk that stores topics only as AES-256-GCM.

Rule: the `cryptography` package is an extra, imported when a key is first used. Code above the disk reads and writes
plain bytes at plain offsets and does not depend on encryption.
"""
