"""Conversations out of the exports and session files of other programs, and memd's own exports."""
