"""The audit: what was done with the memory and by whom, in files whose lines hang together."""
