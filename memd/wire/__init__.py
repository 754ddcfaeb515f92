"""Bytes to values and back: request bodies, the sideband, server-sent events and captured replies.

Rule: pure. Parsers accept any bytes, split anywhere, and raise only their declared error. Parts of a request or reply
that memd does not change keep their bytes.
"""
