"""OAuth 2.1 for programs that speak MCP: memd is the authorization server of its own `/mcp`.

Own code and no library's: what the specification leaves of OAuth is small (one kind of client, one flow, opaque
tokens). Authlib's server is synchronous and made for Flask and Django; the server of the `mcp` package keeps secrets of
clients as they are, compares loopback addresses with their port, does not look at the `resource` of a token request and
answers people with JSON.

    protocol.py    a client and its id; what clients ask and get: metadata, permission, tokens; every refusal    pure
    grants.py      who was allowed what: codes, access and refresh tokens, their ends                            pure
    consent.py     the page on which a person allows it                                                          pure
    ledger.py      the grants of this daemon, and their file, or those of a cluster
    endpoint.py    the routes
"""
