"""Words: the analyzer, and the columns of words in chunks.

Rule: derived from the log. A change of terms raises `postings.FORMAT`, so that they are rebuilt.
"""
