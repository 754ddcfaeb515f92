"""`memd demo`: a long conversation through the whole daemon, with a model that knows nothing but its prompt."""
