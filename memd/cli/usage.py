"""`memd usage`: the tokens that requests took.

Rule: the daemon adds up; the command only shows its answer.
"""

from __future__ import annotations

import click
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memd.admin.usage import UsageByDay, UsageRoutes, UsageRow
from memd.cli.flags import FOUND_SOMETHING
from memd.cli.history import time_of
from memd.cli.operations import Asked, Lines, shows
from memd.wording import counted, name_for_terminal

_COLUMNS = ("requests", "prompt", "cached", "answer", "memory")


@click.command()
@shows(UsageRoutes.usage)
def usage(asked: Asked[UsageByDay]) -> tuple[Lines, int]:
    """Show the tokens that requests took, by day, topic and model.

    Exit code 1 if no receipt is kept.

    Example: memd usage --from 2026-11-01
    """
    rows, topics = asked.answer.rows, asked.given.get("topic")
    if topics and not rows:
        asked.daemon.get("/memd/log", topic=topics, limit=1)  # raises BadQuestion if there is no such topic
    return _lines(asked.answer), 0 if rows else FOUND_SOMETHING


def _lines(answer: UsageByDay) -> list[RenderableType]:
    if not answer.rows:
        return ["No request has a receipt; requests get one while receipts.enabled is true."]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_footer=True)
    total = UsageRow("", "", "")
    for row in answer.rows:
        for name in UsageRow.__struct_fields__[3:]:
            setattr(total, name, getattr(total, name) + getattr(row, name))
    for name, footer in (("day", "all"), ("topic", ""), ("model", "")):
        table.add_column(name, footer, no_wrap=name == "day")
    for name, footer in zip(_COLUMNS, _figures(total), strict=True):
        table.add_column(name, footer, justify="right", no_wrap=True)
    for row in answer.rows:
        table.add_row(row.day, row.topic_id, Text(name_for_terminal(row.model)), *_figures(row))
    lines: list[RenderableType] = [table]
    if total.estimated:
        lines.append(f"Of {counted(total.estimated, 'request')} the model server told no tokens: memd estimated them.")
    if answer.since is not None:
        lines.append(f"The oldest receipt that is kept is of {time_of(answer.since)}.")
    return lines


def _figures(row: UsageRow) -> list[str]:
    figures = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.memory_tokens)
    return [f"{figure:,}" for figure in figures]
