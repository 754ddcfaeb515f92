"""Whole-directory operations: backup, verify, export, disk usage."""
