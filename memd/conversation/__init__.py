"""The live conversation: matching requests to it, the hot buffer, tokens and the window. Pure."""
