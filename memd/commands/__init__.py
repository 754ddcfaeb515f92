"""What the larger commands of `memd` do: ask a running daemon or look themselves, and show it.

Rule: gathering and showing are apart; what is gathered is a msgspec struct, which `--json` prints as it is. Stored text
is untrusted: it goes to a terminal only through `wording.for_terminal`.
"""
