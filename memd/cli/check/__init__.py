"""`memd check`: is everything ready, and if not, what to do."""
