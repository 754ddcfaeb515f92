"""OAuth 2.1 for programs that use MCP: memd is the authorization server of its own `/mcp`.

Implemented here rather than with a library: MCP needs only a small part of OAuth (one kind of client, one flow, opaque
tokens). Authlib's server is synchronous and made for Flask and Django. The handlers of the `mcp` package (2.3, tried)
accept 16 of the 21 redirect addresses that the tests reject, no other port of a loopback address, the last value of a
repeated parameter, and any `resource`. They store an id for everyone who registers, answer people with JSON, and need
0.9 s and 60 MB to load.
"""
