"""The texts by which well-known programs are known (`assets/programs.toml`), and which of them are in force.

Rule: one table. A list in `ingest.ignore`, `ignore_system` or `strip` stands in place of its rules of that kind, and
`ingest.programs: false` turns off all of them.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec

from memd.assets import words_of
from memd.settings.model import IngestSettings

Kind = Literal["ignore", "ignore_system", "message", "reply", "result", "strip", "sub_agent"]
_STANDS_FOR = {
    "TO_ITS_END": r"[^<]*+(?:<(?!/?\1>)[^<]*+)*+</\1>",
    "REST": r"[\s\S]*",
    "OPENS_LINE": r"<(?<![^\n]<)",
}
"""Words in a pattern of the table, which says what they mean."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the table."""

    kind: Kind
    of: str
    """Where its words stand: program, version and file, several of them with `;` between."""
    pattern: str
    """A regular expression."""


class Programs(msgspec.Struct, frozen=True):
    """The patterns in force, by their kind (see the table)."""

    ignore: tuple[str, ...] = ()
    ignore_system: tuple[str, ...] = ()
    message: tuple[str, ...] = ()
    reply: tuple[str, ...] = ()
    result: tuple[str, ...] = ()
    strip: tuple[str, ...] = ()
    sub_agent: tuple[str, ...] = ()


@cache
def rules() -> tuple[Rule, ...]:
    """The table, in its order. Raises OSError: the package was installed without its data files."""
    found = msgspec.convert(words_of("programs")["rules"], tuple[Rule, ...])
    return tuple(msgspec.structs.replace(rule, pattern=_written_out(rule.pattern)) for rule in found)


def programs_of(settings: IngestSettings) -> Programs:
    """The patterns that these settings leave in force."""
    own = {kind: getattr(settings, kind, None) for kind in Programs.__struct_fields__}
    known = rules() if settings.programs else ()
    return Programs(
        **{
            kind: tuple(rule.pattern for rule in known if rule.kind == kind) if given is None else given
            for kind, given in own.items()
        }
    )


def _written_out(pattern: str) -> str:
    for word, meaning in _STANDS_FOR.items():
        pattern = pattern.replace(word, meaning)
    return pattern
