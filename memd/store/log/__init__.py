"""The log: byte formats, columns of entries, segments, recovery after a crash, the journal.

Rule: the format of these files is a promise (docs/format.md, tests/golden/): change it only with a new format version.
Nothing here knows an index or a local disk. From the bytes up: `range_crc`, `format`, `columns`, `segment`, `recovery`;
`append_file` and `journal` write.
"""
