"""The log on disk, its indexes and the search over them: the only code that touches the data directory.

Rule: the log is the only truth and only grows; everything else on disk is derived from it and can be rebuilt. Nothing
here uses an event loop. One thread per topic appends; any number read immutable snapshots.

Bottom up: `disk` (the only access to it), `layout` (file names), `log/`, `claim` (the right to write), `lexical/`,
`index/`, `snapshot` (a topic at one point in time, whole or in part), `topic` (one log, opened and repaired), `store`
(the directory). Beside them: `erasure`, `encryption/`, `shared/` (topics of several daemons), `bucket/` (the backup),
`audit`, `receipts`, `tools/`.
"""
