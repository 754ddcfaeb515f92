"""Documents: which files there are, what stands in them, and what of it is new."""
