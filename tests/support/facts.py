"""Facts that tests tell a daemon, each far from the others, and a question."""

POSTGRES = (
    "For the booking service we chose PostgreSQL because exclusion constraints rule out double bookings of a room."
)
INODES = "The build fails with ERR_7421 when the artefact cache has run out of inodes; clear the folder objects."
CAKE = "My sister Ingrid gets married in Bergen in June and the cake has to be without hazelnuts, almonds are fine."
FACTS = (POSTGRES, INODES, CAKE)
QUESTION = "Which database does the booking service use?"
"""Near to the first of these; with `NO_NEIGHBOURS` it alone is shown."""
NO_NEIGHBOURS = {"retrieval": {"min_score": 0.2}}
