"""The embedding model: from text to unit vectors."""
