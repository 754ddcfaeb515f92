"""OAuth 2.1 for programs that speak MCP: memd is the authorization server of its own `/mcp`.

Own code and no library's: what the specification leaves of OAuth is small (one kind of client, one flow, opaque
tokens). Authlib's server is synchronous and made for Flask and Django. The handlers of the `mcp` package (2.3, tried)
take 16 of the 21 redirect addresses that the tests refuse, no other port of a loopback address, the last of a parameter
that is given twice, and any `resource`; they keep an id for whoever registers, answer people with JSON, and need 0.9 s
and 60 MB to load.
"""
