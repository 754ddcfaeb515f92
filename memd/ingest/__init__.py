"""From what was said, and other sources, to entries of the log: cutting, redaction, embedding, storing, importing."""
