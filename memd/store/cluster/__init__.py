"""A shelf that several machines share: PostgreSQL for what changes, a bucket for what does not (extra `cluster`).

Nothing here is imported unless such a shelf is wanted.
"""
