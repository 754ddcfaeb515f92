"""Metrics, the request log, logging, live events and background tasks."""
