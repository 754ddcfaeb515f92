"""Bytes ⇄ values: request bodies, the sideband, server-sent events and captured replies.

Rule: pure. Parsers take bytes from anyone, in any split, and raise nothing but their declared error; what memd does not
have to change keeps its bytes.
"""
