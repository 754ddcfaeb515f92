"""Indexes over the log: vectors, uuids, texts, digests, public ids.

Rule: everything here is derived and can be rebuilt from the log, so its files may change with a rebuild. An index file
is opened only after its checksum was verified, as a damaged one finds the wrong things. `meta` says what is on disk
and needs no native library; `sealing` and `merging` build; `sealed_index` searches.
"""
