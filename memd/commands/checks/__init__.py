"""What `memd check` looks at, one module per place.

Rule: a check returns an `Outcome` or several and raises nothing that it can foresee; it changes nothing on disk and
nothing in a daemon.
"""
