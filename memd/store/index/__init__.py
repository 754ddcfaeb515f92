"""Indexes over the log: of vectors and words.

Rule: everything here is derived and can be rebuilt from the log, so its files may change with a rebuild. An index file
is opened only after its checksum was verified, because a damaged one returns wrong results.
"""
