"""Live conversations: matching of requests, the hot buffer, token counts and the window. Pure."""
