"""What one check found.

Rule: whatever is not ok says what to do about it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memd.errors import MemdError

Mark = Literal["ok", "warning", "failed"]
"""ok: nothing to do (a remedy is a hint then). warning: memd works, but not as well as it could. failed: it does not
work, or something is lost."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    check: str
    mark: Mark
    said: str
    remedy: str = ""


def ok(check: str, said: str, hint: str = "") -> Outcome:
    """All is well."""
    return Outcome(check=check, mark="ok", said=said, remedy=hint)


def warning(check: str, said: str, remedy: str) -> Outcome:
    """It works, but."""
    return Outcome(check=check, mark="warning", said=said, remedy=remedy)


def failed(check: str, said: str, remedy: str) -> Outcome:
    """It does not work."""
    return Outcome(check=check, mark="failed", said=said, remedy=remedy)


def failed_with(check: str, error: MemdError) -> Outcome:
    """A failure in the words of an error of ours: what happened, and behind the last semicolon what to do."""
    said, _, remedy = str(error).rpartition("; ")
    return failed(check, said or remedy, remedy if said else "")
