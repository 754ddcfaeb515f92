"""The log on disk, its indexes and the search over them.

Rule: the log is the only truth and only grows; whatever else is on disk is derived from it and can be removed. Nothing
here knows an event loop. One thread writes, any number read from immutable snapshots. The modules, from the disk up:
`files` (the only code that touches it), `format` (bytes ⇄ values), `recovery` (a log file after a crash), `vectors`
(search), `superseded` (which entry of a chunk counts), `segment` (a log file in memory), `snapshot` (a point in time),
`log` (the store); beside them `journal` (hot.log) and the two that only read, `verify` and `export`.
"""
