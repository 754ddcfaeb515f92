"""Redaction: secrets that must not be stored, how they are found and what replaces them. Pure."""
