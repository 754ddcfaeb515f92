"""`memd digest`, `related` and `entities`: what is stored, seen as a whole.

Rule: the daemon computes; these commands only show its answers.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memd.admin.views import Digest, Entities, RelatedChunks, ViewRoutes
from memd.cli.flags import FOUND_SOMETHING
from memd.cli.operations import Asked, Lines, shows
from memd.wording import counted, for_terminal

INDENT = 2


@click.command()
@shows(ViewRoutes.digest)
def digest(asked: Asked[Digest]) -> tuple[Lines, int]:
    """Show what was said, by day or week.

    Exit code 1 if there is nothing.

    Example: memd digest --from 2026-11-20
    """
    return _or_nothing(asked, _digest_lines(asked.answer), "Nothing was said then.")


@click.command()
@shows(ViewRoutes.related, id="ID")
def related(asked: Asked[RelatedChunks]) -> tuple[Lines, int]:
    """Show what belongs to the chunk ID without being said beside it.

    Chunks near in meaning, with the same rare names, or of the same half hour; exit code 1 if there are none.

    Example: memd related 9ada
    """
    return _or_nothing(asked, _related_lines(asked.answer), "Nothing else has to do with it.")


@click.command()
@shows(ViewRoutes.entities, name="[NAME]")
def entities(asked: Asked[Entities]) -> tuple[Lines, int]:
    """Show the names in what is stored, or the chunks that have NAME.

    Exit code 1 if there are none.

    Example: memd entities --kind path
    """
    return _or_nothing(asked, _entity_lines(asked.answer), "No such name is stored.")


def _or_nothing(asked: Asked[Any], lines: Lines, nothing: str) -> tuple[Lines, int]:
    return (lines, 0) if lines or asked.as_json else ([nothing], FOUND_SOMETHING)


def _digest_lines(answer: Digest) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for period in answer.periods:
        days = period.first if answer.by == "day" else f"{period.first} to {period.last}"
        lines.append(Text.assemble((days, "bold"), f"  {counted(period.chunks, 'chunk')}"))
        if period.words:
            lines.append(_indented(", ".join(period.words), "cyan"))
        lines += [_indented(f"{one.id}  {one.text}") for one in period.sentences]
        lines.append("")
    return lines


def _related_lines(answer: RelatedChunks) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for one in answer.chunks:
        said = datetime.fromtimestamp(one.said_at / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
        why = [] if one.cosine is None else [f"cosine {one.cosine:.2f}"]
        why += [f"shares {for_terminal(', '.join(one.shared))}"] if one.shared else []
        why += [] if one.seconds_apart is None else [f"{counted(one.seconds_apart // 60, 'minute')} apart"]
        head = Text.assemble((f"{one.score:.3f}", "bold"), f"  {one.id}  ", (one.topic_id, "cyan"), f"  {said}  ")
        lines.append(Group(head.append("; ".join(why), "green"), _indented(one.content), ""))
    return lines


def _entity_lines(answer: Entities) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for one in answer.entities:
        ids = " ".join(chunk.id for chunk in one.chunks) + ("" if len(one.chunks) == one.count else " …")
        name = (for_terminal(one.name), "bold")
        lines.append(Text.assemble(f"{one.count:>6}  ", name, f"  {one.kind}  ", (ids, "dim")))
    if answer.total > len(answer.entities):
        lines.append(f"{len(answer.entities):,} of {counted(answer.total, 'name')}; --limit shows more.")
    return lines


def _indented(text: str, style: str = "") -> RenderableType:
    return Padding(Text(for_terminal(text), style), (0, 0, 0, INDENT), expand=False)
