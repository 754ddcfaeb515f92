"""Erasing in a daemon: what would go, doing it in every place where the text is, and retention, which does it by age.

Rule: an erasure is the owner's explicit act, or retention that he has asked for; nothing else erases. The order is:
the ledger, receipts, the journal, the log with its indexes, the ledger again.
"""
