"""The files of the log: their format, segments, the journal, recovery."""
