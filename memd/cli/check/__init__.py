"""`memd check`: is everything ready, and if not, what to do. A check is a function declared with its name,
`@check("lock")`. It yields findings; an error that it raises counts as a failure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Literal, ParamSpec

import msgspec

from memd.errors import MemdError

Mark = Literal["ok", "warning", "failed"]
"""ok: nothing to do (a remedy is only a hint). warning: memd works, but could work better. failed: it does not work, or
data is lost."""
Asked = ParamSpec("Asked")


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    check: str = ""
    mark: Mark
    said: str
    remedy: str = ""


def ok(said: str, hint: str = "", check: str = "") -> CheckResult:
    """Return the result of a passed check."""
    return CheckResult(check=check, mark="ok", said=said, remedy=hint)


def warning(said: str, remedy: str, check: str = "") -> CheckResult:
    """Return the result of a check if memd works, but could work better."""
    return CheckResult(check=check, mark="warning", said=said, remedy=remedy)


def failed(said: str, remedy: str, check: str = "") -> CheckResult:
    """Return the result of a check if memd does not work, or data is lost."""
    return CheckResult(check=check, mark="failed", said=said, remedy=remedy)


def failed_with(error: MemdError, check: str = "") -> CheckResult:
    """Return a failure with the text of a `MemdError`: the problem and, after the last semicolon, the remedy."""
    said, _, remedy = str(error).rpartition("; ")
    return failed(said or remedy, remedy if said else "", check)


def check(name: str) -> Callable[[Callable[Asked, Iterator[CheckResult]]], Callable[Asked, Iterator[CheckResult]]]:
    """Register a function as the check of this name."""

    def declared(found: Callable[Asked, Iterator[CheckResult]]) -> Callable[Asked, Iterator[CheckResult]]:
        @functools.wraps(found)
        def named(*args: Asked.args, **more: Asked.kwargs) -> Iterator[CheckResult]:
            try:
                for one in found(*args, **more):
                    yield one if one.check else msgspec.structs.replace(one, check=name)
            except MemdError as error:
                yield failed_with(error, name)

        return named

    return declared
