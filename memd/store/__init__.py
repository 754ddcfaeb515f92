"""The log on disk, its indexes and the search over them: the only code that touches the data directory.

Rule: the log is the only truth and only grows; everything else on disk is derived from it and can be rebuilt. Nothing
here knows an event loop. One thread per topic appends, any number read immutable snapshots.

From the disk up: `disk` (the only seam to it), `layout` (file names), `log/`, `claim` (the right to
write), `lexical/`, `index/`, `snapshot` (a topic at one point in time, now or earlier, all of it or some), `opening` (a
topic after a start or a crash), `topic` (one log), `store` (the directory). Beside them: `erasure`, `encryption/`,
`shared/` (topics of several daemons), `bucket/` (the backup), `audit`, `receipts`, `tools/`.
"""
