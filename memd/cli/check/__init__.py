"""`memd check`: is everything ready, and if not, what to do."""

from __future__ import annotations

from typing import Literal

import msgspec

from memd.errors import MemdError

Mark = Literal["ok", "warning", "failed"]
"""ok: nothing to do (a remedy is only a hint). warning: memd works, but not as well as it could. failed: it does not
work, or something is lost."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    check: str
    mark: Mark
    said: str
    remedy: str = ""


def ok(check: str, said: str, hint: str = "") -> CheckResult:
    """The check passed."""
    return CheckResult(check=check, mark="ok", said=said, remedy=hint)


def warning(check: str, said: str, remedy: str) -> CheckResult:
    """memd works, but not as well as it could."""
    return CheckResult(check=check, mark="warning", said=said, remedy=remedy)


def failed(check: str, said: str, remedy: str) -> CheckResult:
    """memd does not work, or something is lost."""
    return CheckResult(check=check, mark="failed", said=said, remedy=remedy)


def failed_with(check: str, error: MemdError) -> CheckResult:
    """A failure with the text of a `MemdError`: what happened and, after the last semicolon, what to do."""
    said, _, remedy = str(error).rpartition("; ")
    return failed(check, said or remedy, remedy if said else "")
