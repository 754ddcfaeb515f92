"""Indexes over the log: vectors (HNSW), uuids, texts, digests, public ids.

Rule: everything here is derived and can be rebuilt from the log, so its files may change with a rebuild. An index file
is opened only after its checksum was verified, because hnswlib can crash on a damaged one. `meta` says what is on disk
and needs no native library; `sealing` and `merging` build; `sealed_index` searches.
"""
