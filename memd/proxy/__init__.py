"""The proxy: the part of memd that clients reach, and the life of their requests."""
