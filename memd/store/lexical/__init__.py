"""Words: the analyzer, and the columns of what chunks say.

Rule: derived from the log. A change of terms raises `postings.FORMAT`, so that they are made anew.
"""
