"""The lexical index: the analyzer, BM25 queries, tantivy's files.

Rule: derived from the log. A change of terms or fields raises `stamp.FORMAT`, so that every index is rebuilt.
"""
