"""`memd check`: is everything ready, and if not, what to do. A check is a function declared with its name,
`@check("lock")`. It yields findings; an error that it raises counts as a failure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Literal, ParamSpec, get_args

import msgspec

from memd.errors import MemdError
from memd.wording import with_remedy

Mark = Literal["ok", "warning", "failed"]
"""ok: nothing to do (a remedy is only a hint). warning: memd works, but could work better. failed: it does not work, or
data is lost."""
Asked = ParamSpec("Asked")


class CheckResult(msgspec.Struct, frozen=True):
    """One line of the report."""

    mark: Mark
    said: str
    remedy: str = ""
    check: str = ""


ok, warning, failed = (functools.partial(CheckResult, mark) for mark in get_args(Mark))


def failed_with(error: MemdError, check: str = "") -> CheckResult:
    """Return a failure with the text of a `MemdError`: the problem and the remedy."""
    return failed(*with_remedy(str(error)), check)


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
