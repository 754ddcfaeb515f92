"""`memd search`, `digest`, `related`, `entities` and `usage`: what is stored, and what it took.

Rule: the daemon searches and adds up; these commands only show its answers.
"""

from __future__ import annotations

from collections.abc import Set
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memd.admin import reads
from memd.admin import usage as usages
from memd.admin.reads import Digest, Entities, RelatedChunks
from memd.admin.usage import UsageByDay, UsageRow
from memd.cli.flags import FOUND_SOMETHING, origin_words, warning_words
from memd.cli.history import time_of
from memd.cli.operations import Lines, RouteAnswer, shows
from memd.cli.tables import table
from memd.recall.explained import INJECTED, FoundChunk, SearchAnswer
from memd.wording import counted, for_terminal, name_for_terminal

NOTHING_STORED = (
    "Nothing is stored yet. What is said through memd is (`memd serve`), and `memd add PATH` and `memd remember` put "
    "something in."
)


@click.command()
@shows(reads.search, q="QUESTION")
@click.option("--explain", is_flag=True, help="Also what would not be injected, with the parts of each score and why.")
def search(asked: RouteAnswer[SearchAnswer], *, explain: bool) -> tuple[Lines, int]:
    """Show the chunks that a new chat with QUESTION would get.

    Exit code 1 if there are none.

    Example: memd search "Which port does the shop listen on?"
    """
    answer, exit_code = asked.answer, 0 if asked.answer.tokens else FOUND_SOMETHING
    if not answer.chunks and not asked.daemon.ask(reads.log_page, limit=1).events:
        return [NOTHING_STORED], exit_code
    return _candidate_lines(answer, asked.given.keys(), explain=explain), exit_code


def _candidate_lines(answer: SearchAnswer, given: Set[str], *, explain: bool) -> list[RenderableType]:
    """Return the answer as text: the chunks that would be injected, best first; with `explain` all candidates."""
    injected = [chunk for chunk in answer.chunks if chunk.verdict == INJECTED]
    others = [chunk for chunk in answer.chunks if chunk.verdict != INJECTED] if explain else []
    listed = injected + others
    names = ("id", "topic"), *((one.id, one.topic_id) for one in listed)
    widths = [max(map(len, column)) for column in zip(*names, strict=True)]
    shown: list[RenderableType] = [_candidate(chunk, *widths, explain=explain) for chunk in listed]
    if others:
        shown.insert(len(injected), Text("What would not be injected, and why", "bold"))
    if shown:
        verdict = "              verdict" if explain else ""
        shown.insert(0, Text(f"score  {'id':{widths[0]}}  {'topic':{widths[1]}}  said{verdict}", "dim"))
    if not answer.chunks:
        where = (
            "found"
            if answer.note is not None
            else "stored, of what was chosen,"
            if given - {"q", "topic", "as_of", "limit"}
            else "stored"
        )
        shown.append(f"Nothing is {where} that has to do with it.")
    elif not answer.tokens:
        shown.append("Nothing would be injected; --explain shows the candidates and why.")
    else:
        tokens = f"{answer.tokens:,} of {answer.budget_tokens:,} tokens"
        chunks = counted(len(injected), "chunk")
        whole = f"{chunks} of a block of {tokens}." if "limit" in given else f"{chunks}, {tokens}, would be injected."
        shown.append(whole)
    if answer.note is not None:
        shown.append(answer.note)
    if "topic" not in given:
        shown.append("Every topic that you may read was searched; --topic names one.")
    return shown


def _candidate(chunk: FoundChunk, id_width: int, topic_width: int, *, explain: bool) -> RenderableType:
    said = datetime.fromtimestamp(chunk.said_at / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    topic = f"{chunk.topic_id:{topic_width}}", "cyan"
    head = Text.assemble((f"{chunk.score:.3f}", "bold"), f"  {chunk.id:{id_width}}  ", topic, f"  {said}")
    head.append(origin_words(chunk), "magenta")
    head.append(warning_words(chunk), "yellow")
    if explain:
        head.append(f"  {chunk.verdict}", "green" if chunk.verdict == INJECTED else "yellow")
    parts: list[RenderableType] = [head]
    if explain:
        echo = "" if chunk.echo == 1 else f", times {chunk.echo:.2f} as an echo"
        echo += "" if chunk.time == 1 else f", times {chunk.time:g} for its time"
        parts.append(
            Padding(
                f"meaning {chunk.meaning:.3f} (cosine {chunk.cosine:.3f}) + words {chunk.words:.3f} + feedback "
                f"{chunk.feedback:.3f} + neighbours {chunk.neighbours:.3f}, times {chunk.multiplier:g}{echo}; "
                f"{counted(chunk.tokens, 'token')}",
                (0, 0, 0, INDENT),
                expand=False,
            )
        )
    parts.append(Padding(Text(for_terminal(chunk.content)), (0, 0, 1, INDENT), expand=False))
    return Group(*parts)


INDENT = 2


@click.command()
@shows(reads.digest)
def digest(asked: RouteAnswer[Digest]) -> tuple[Lines, int]:
    """Show what was said, by day or week.

    Exit code 1 if there is nothing.

    Example: memd digest --from 2026-11-20
    """
    return _or_nothing(asked, _digest_lines(asked.answer), "Nothing was said then.")


@click.command()
@shows(reads.related, id="ID")
def related(asked: RouteAnswer[RelatedChunks]) -> tuple[Lines, int]:
    """Show what belongs to the chunk ID without being said beside it.

    Chunks near in meaning, with the same rare names, or of the same half hour; exit code 1 if there are none.

    Example: memd related 9ada
    """
    return _or_nothing(asked, _related_lines(asked.answer), "Nothing else has to do with it.")


@click.command()
@shows(reads.entities, name="[NAME]")
def entities(asked: RouteAnswer[Entities]) -> tuple[Lines, int]:
    """Show the names in what is stored, or the chunks that have NAME.

    Exit code 1 if there are none.

    Example: memd entities --kind path
    """
    return _or_nothing(asked, _entity_lines(asked.answer), "No such name is stored.")


def _or_nothing(asked: RouteAnswer[Any], lines: Lines, nothing: str) -> tuple[Lines, int]:
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


_COLUMNS = ("requests", "prompt", "cached", "answer", "memory")


@click.command()
@shows(usages.usage)
def usage(asked: RouteAnswer[UsageByDay]) -> tuple[Lines, int]:
    """Show the tokens that requests took, by day, topic and model.

    Exit code 1 if no receipt is kept.

    Example: memd usage --from 2026-11-01
    """
    rows, topics = asked.answer.rows, asked.given.get("topic")
    if topics and not rows:
        asked.daemon.ask(reads.log_page, topic=topics, limit=1)  # raises BadQuestion if there is no such topic
    return _usage_lines(asked.answer), 0 if rows else FOUND_SOMETHING


def _usage_lines(answer: UsageByDay) -> list[RenderableType]:
    if not answer.rows:
        return ["No request has a receipt; requests get one while receipts.enabled is true."]
    models = {row.model for row in answer.rows}
    which = ("topic", "model") if len(models) > 1 else ("topic",)
    shown = table("day", *which, *_COLUMNS, right=_COLUMNS, whole=("day", *_COLUMNS), show_footer=True)
    total = UsageRow("", "", "")
    for row in answer.rows:
        for name in UsageRow.__struct_fields__[3:]:
            setattr(total, name, getattr(total, name) + getattr(row, name))
    for column, footer in zip(shown.columns, ("all", *("" for _ in which), *_usage_figures(total)), strict=True):
        column.footer = footer
    for row in answer.rows:
        cells = (row.topic_id, Text(name_for_terminal(row.model)))
        shown.add_row(row.day, *cells[: len(which)], *_usage_figures(row))
    lines: list[RenderableType] = [shown]
    if len(models) == 1 and answer.rows[0].model:
        lines.append(f"Each request named the model {name_for_terminal(answer.rows[0].model)}.")
    if total.estimated:
        lines.append(f"Of {counted(total.estimated, 'request')} the model server told no tokens: memd estimated them.")
    if answer.since is not None:
        lines.append(f"The oldest receipt that is kept is of {time_of(answer.since)}.")
    return lines


def _usage_figures(row: UsageRow) -> list[str]:
    figures = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.memory_tokens)
    return [f"{figure:,}" for figure in figures]
