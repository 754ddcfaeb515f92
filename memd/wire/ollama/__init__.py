"""Ollama's own API: `POST /api/chat`."""
