"""Reads files into sections that know their headings, page or sheet: one format, or family of formats, a module.

Rule: a reader is `sections(path)`, which yields `GivenSection`s in order and raises `BadDocument` with the reason. All
but text and Markdown are read in a process of their own (`process.py`, `child.py`), whose memory and time are limited.
"""
