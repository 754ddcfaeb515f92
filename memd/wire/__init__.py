"""Bytes to values and back: request bodies, the sideband, server-sent events and captured replies.

Rule: pure. Parsers accept any bytes, split anywhere, and raise nothing but their declared error; a part of a request or
reply that memd does not change keeps its bytes.
"""
