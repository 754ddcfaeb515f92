"""The log: byte formats, columns of entries, segments, recovery after a crash, the journal.

Rule: the format of these files is a promise (docs/format.md, tests/golden/): change it only with a new format version.
Nothing here depends on an index. Bottom up: `format`, `columns`, `segment`, `recovery`; `journal` writes.
"""
