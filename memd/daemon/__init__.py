"""The daemon: assembly of its parts, start and shutdown."""
