"""The lexical index: analyzer, postings, BM25."""
