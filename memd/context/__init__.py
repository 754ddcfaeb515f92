"""Decisions about the live conversation: what is new, what fits, what is stored, what is recalled and how it is shown.

Rule: pure. Everything here takes values and returns values; clocks, embedders, disks are passed in or live elsewhere.
"""
