"""Why a database cannot be used, in a sentence with what to do, and whether that may pass by itself.

Rule: only what is known not to pass ends a start; all else is tried again. libpq hands on the words of a server that
refuses a connection, without their code: in another language than English they are shown, and it is tried again.
"""

from __future__ import annotations

import re

NOT_PRIMARY = ("25006",)
"""SQLSTATE of a server that is a standby, or a database that is read-only."""
TO_PRIMARY = "let store.url lead to the primary (of several hosts with target_session_attrs=read-write)"
_ANY = "check that store.url is right and that the server runs"
_MAY_NOT = "42501"
_LASTING = [
    (re.compile(pattern), f"{remedy} in store.url")
    for pattern, remedy in (
        (r'database "[^"]*" does not exist|no such database', "make it (CREATE DATABASE), or correct its name"),
        (r"password authentication failed|no password supplied|SASL auth", "correct user and password"),
        (r'role "[^"]*" (does not exist|is not permitted)|no such user', "make that user, or correct its name"),
        (r"pg_hba\.conf", "let this user in from this machine, or correct who it is"),
        (r"invalid response to SSL|expected authentication request", "something else listens there: correct the port"),
        (r"not support SSL|root certificate|certificate verify|match host name", "correct sslmode and sslrootcert"),
        (r"is bad: invalid", "correct it"),
    )
]
"""The answers to a wrong `store.url`."""
_PASSING = (
    ("resolve host", "if it stays so, correct the host in store.url"),
    ("timeout expired", "nothing answers there as PostgreSQL does: if it stays so, correct host and port in store.url"),
    ("refused", "start the server, or correct host and port in store.url"),
)
_ATTEMPT = re.compile(r"failed: |is bad: |failed to resolve")


def words_of(error: Exception) -> str:
    """The words of an error, without its details: those quote the row that was refused."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    return primary or str(error).strip().partition("\n")[0].strip() or type(error).__name__


def remedy_of(error: Exception) -> tuple[str, bool]:
    """Return what to do, and whether there is no use in trying again."""
    state = getattr(error, "sqlstate", None)
    if state is not None:
        is_forbidden = state == _MAY_NOT
        grant = "grant this user CREATE on its schema, and its tables"
        return (grant if is_forbidden else TO_PRIMARY if state in NOT_PRIMARY else _ANY), is_forbidden
    attempts = [line for line in str(error).splitlines() if _ATTEMPT.search(line)]
    found = [next((remedy for pattern, remedy in _LASTING if pattern.search(line)), None) for line in attempts]
    if found and found[0] is not None:
        return found[0], None not in found
    return next((remedy for words, remedy in _PASSING if words in str(error)), _ANY), False
