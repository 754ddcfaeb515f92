"""`memd check`: is everything ready, and if not, what to do. A check is a function, declared with its name:
`@check("lock")`; it yields what it finds, and an error that it raises is its failure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Literal, ParamSpec

import msgspec

from memd.errors import MemdError

Mark = Literal["ok", "warning", "failed"]
"""ok: nothing to do (a remedy is only a hint). warning: memd works, but not as well as it could. failed: it does not
work, or something is lost."""
Asked = ParamSpec("Asked")


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    check: str = ""
    mark: Mark
    said: str
    remedy: str = ""


def ok(said: str, hint: str = "", check: str = "") -> CheckResult:
    """The check passed."""
    return CheckResult(check=check, mark="ok", said=said, remedy=hint)


def warning(said: str, remedy: str, check: str = "") -> CheckResult:
    """memd works, but not as well as it could."""
    return CheckResult(check=check, mark="warning", said=said, remedy=remedy)


def failed(said: str, remedy: str, check: str = "") -> CheckResult:
    """memd does not work, or something is lost."""
    return CheckResult(check=check, mark="failed", said=said, remedy=remedy)


def failed_with(error: MemdError, check: str = "") -> CheckResult:
    """A failure with the text of a `MemdError`: what happened and, after the last semicolon, what to do."""
    said, _, remedy = str(error).rpartition("; ")
    return failed(said or remedy, remedy if said else "", check)


def check(name: str) -> Callable[[Callable[Asked, Iterator[CheckResult]]], Callable[Asked, Iterator[CheckResult]]]:
    """Declare that a function is the check of this name."""

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
