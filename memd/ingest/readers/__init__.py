"""Reads files into sections that know their headings, page or sheet.

Rule: a reader is a function of a path that yields `GivenSection`s in order and raises `BadDocument` with the reason.
All but text and short Markdown is read in a process of its own, whose memory and time are limited.
"""
