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


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    check: str
    mark: Mark
    said: str
    remedy: str = ""


def ok(check: str, said: str, hint: str = "") -> CheckResult:
    """All is well."""
    return CheckResult(check=check, mark="ok", said=said, remedy=hint)


def warning(check: str, said: str, remedy: str) -> CheckResult:
    """It works, but."""
    return CheckResult(check=check, mark="warning", said=said, remedy=remedy)


def failed(check: str, said: str, remedy: str) -> CheckResult:
    """It does not work."""
    return CheckResult(check=check, mark="failed", said=said, remedy=remedy)


def failed_with(check: str, error: MemdError) -> CheckResult:
    """A failure in the words of an error of ours: what happened, and behind the last semicolon what to do."""
    said, _, remedy = str(error).rpartition("; ")
    return failed(check, said or remedy, remedy if said else "")
