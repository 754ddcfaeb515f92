"""OAuth 2.1 for programs that speak MCP: memd is the authorization server of its own `/mcp`.

Own code and no library's: what the specification leaves of OAuth is small (one kind of client, one flow, opaque
tokens). Authlib's server is synchronous and made for Flask and Django; the server of the `mcp` package keeps secrets of
clients as they are, compares loopback addresses with their port, does not look at the `resource` of a token request and
answers people with JSON.

    clients.py     a client and its id; which addresses an answer may go to                                  pure
    exchange.py    what clients ask and get: metadata, registration, authorization, tokens; every refusal    pure
    grants.py      who was allowed what: codes, access and refresh tokens, their ends                        pure
    ledger.py      the grants of this daemon, and their file
    consent.py     the page on which a person allows it                                                      pure
    endpoint.py    the routes
"""
