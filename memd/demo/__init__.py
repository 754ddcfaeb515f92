"""`memd demo`: a long conversation through the whole daemon, with a model that knows nothing but its prompt.

Rule: what is shown has happened. The daemon is the real one, the stand-in model answers questions from its prompt
alone, and a claim that fails to show ends the demo with exit code 1.
"""
