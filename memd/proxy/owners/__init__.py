"""Requests that belong to another daemon: passed on to the one that has the topic, or answered here when it is gone."""
