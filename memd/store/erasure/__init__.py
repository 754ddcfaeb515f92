"""Erasure: the one thing that changes what is stored, because its owner asks for that.

Rule: what is to be erased is written down first, as ids and never as text (`ledger`); every step can be done again; so
whatever interrupts an erasure, the next start finishes it. A record keeps its place, its ids and its length (`stub`).
"""
