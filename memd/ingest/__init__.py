"""From what was said to entries of the log: cutting, redaction, embedding, storing, importing."""
