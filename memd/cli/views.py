"""`memd search`, `digest`, `related`, `entities` and `usage`: what is stored, and what it took.

Rule: the daemon searches and adds up; these commands only show its answers.
"""

from __future__ import annotations

import click
from rich.console import Group
from rich.text import Text

from memd.admin import reads
from memd.admin import usage as usages
from memd.admin.reads import Digest, Entities, RelatedChunks
from memd.admin.usage import UsageByDay
from memd.cli.flags import FOUND_SOMETHING
from memd.cli.operations import RouteAnswer, shows
from memd.cli.tables import Lines, indented, marks_of, table, time_of
from memd.recall.explained import INJECTED, FoundChunk, SearchAnswer
from memd.wording import counted, day_and_time, for_terminal, name_for_terminal

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
    answer, given, exit_code = asked.answer, asked.given.keys(), 0 if asked.answer.tokens else FOUND_SOMETHING
    if not answer.chunks and not asked.daemon.ask(reads.log_page, limit=1).events:
        return [NOTHING_STORED], exit_code
    is_reranked = bool(asked.config.rerank.url)  # by whose order, not by the scores
    ranked = answer.chunks if is_reranked else sorted(answer.chunks, key=lambda chunk: -chunk.score)
    injected = [chunk for chunk in ranked if chunk.verdict == INJECTED]
    others = [chunk for chunk in ranked if chunk.verdict != INJECTED] if explain else []
    names = ("id", "topic"), *((one.id, one.topic_id) for one in injected + others)
    widths = [max(map(len, column)) for column in zip(*names, strict=True)]
    shown: Lines = [_candidate(chunk, *widths, explain=explain) for chunk in injected + others]
    if others:
        shown.insert(len(injected), Text("What would not be injected, and why", "bold"))
    if shown:
        verdict = "              verdict" if explain else ""
        order = "              in the reranker's order" if is_reranked and not explain else ""
        shown.insert(0, Text(f"score  {'id':{widths[0]}}  {'topic':{widths[1]}}  said{verdict}{order}", "dim"))
    if not answer.chunks:
        chosen = ", of what was chosen," if given - {"q", "topic", "as_of", "limit"} else ""
        where = "found" if answer.note is not None else f"stored{chosen}"
        shown.append(f"Nothing is {where} that has to do with it.")
    elif not answer.tokens:
        shown.append("Nothing would be injected; --explain shows the candidates and why.")
    else:
        tokens, chunks = f"{answer.tokens:,} of {answer.budget_tokens:,} tokens", counted(len(injected), "chunk")
        whole = f"{chunks} of a block of {tokens}." if "limit" in given else f"{chunks}, {tokens}, would be injected."
        shown.append(whole)
    shown += [] if answer.note is None else [answer.note]
    if "topic" not in given and len(answer.topics) > 1 and len({chunk.topic_id for chunk in injected}) != 1:
        shown.append(f"All {len(answer.topics):,} topics were searched; --topic names one.")
    return shown, exit_code


def _candidate(chunk: FoundChunk, id_width: int, topic_width: int, *, explain: bool) -> Group:
    topic, said = (f"{chunk.topic_id:{topic_width}}", "cyan"), f"  {day_and_time(chunk.said_at)}"
    score = f"{chunk.score:.3f}", "bold"
    head = Text.assemble(score, f"  {chunk.id:{id_width}}  ", topic, said, *marks_of(chunk))
    parts: Lines = [head]
    if explain:
        head.append(f"  {chunk.verdict}", "green" if chunk.verdict == INJECTED else "yellow")
        echo = "" if chunk.echo == 1 else f", times {chunk.echo:.2f} as an echo"
        echo += "" if chunk.time == 1 else f", times {chunk.time:g} for its time"
        summed = (
            f"meaning {chunk.meaning:.3f} (cosine {chunk.cosine:.3f}) + words {chunk.words:.3f} + feedback "
            f"{chunk.feedback:.3f} + neighbours {chunk.neighbours:.3f}, times {chunk.multiplier:g}{echo}; "
            f"{counted(chunk.tokens, 'token')}"
        )
        parts.append(indented(summed))
    return Group(*parts, indented(chunk.content, below=1))


@click.command()
@shows(reads.digest, nothing="Nothing was said then.")
def digest(asked: RouteAnswer[Digest]) -> tuple[Lines, int]:
    """Show what was said, by day or week.

    Exit code 1 if there is nothing.

    Example: memd digest --from 2026-11-20
    """
    lines: Lines = []
    for period in asked.answer.periods:
        days = period.first if asked.answer.by == "day" else f"{period.first} to {period.last}"
        lines.append(Text.assemble((days, "bold"), f"  {counted(period.chunks, 'chunk')}"))
        lines += [indented(", ".join(period.words), "cyan")] if period.words else []
        lines += [*(indented(f"{one.id}  {one.text}") for one in period.sentences), ""]
    return lines, 0


@click.command()
@shows(reads.related, id="ID", nothing="Nothing else has to do with it.")
def related(asked: RouteAnswer[RelatedChunks]) -> tuple[Lines, int]:
    """Show what belongs to the chunk ID without being said beside it.

    Chunks near in meaning, with the same rare names, or of the same half hour; exit code 1 if there are none.

    Example: memd related 9ada
    """
    lines: Lines = []
    for one in asked.answer.chunks:
        why = [] if one.cosine is None else [f"cosine {one.cosine:.2f}"]
        why += [f"shares {for_terminal(', '.join(one.shared))}"] if one.shared else []
        why += [] if one.seconds_apart is None else [f"{counted(one.seconds_apart // 60, 'minute')} apart"]
        said = f"  {day_and_time(one.said_at)}  "
        head = Text.assemble((f"{one.score:.3f}", "bold"), f"  {one.id}  ", (one.topic_id, "cyan"), said)
        lines.append(Group(head.append("; ".join(why), "green"), indented(one.content), ""))
    return lines, 0


@click.command()
@shows(reads.entities, name="[NAME]", nothing="No such name is stored.")
def entities(asked: RouteAnswer[Entities]) -> tuple[Lines, int]:
    """Show the names in what is stored, or the chunks that have NAME.

    Exit code 1 if there are none.

    Example: memd entities --kind path
    """
    lines: Lines = []
    for one in asked.answer.entities:
        ids = " ".join(chunk.id for chunk in one.chunks) + ("" if len(one.chunks) == one.count else " …")
        name = (for_terminal(one.name), "bold")
        lines.append(Text.assemble(f"{one.count:>6}  ", name, f"  {one.kind}  ", (ids, "dim")))
    if asked.answer.total > len(lines):
        lines.append(f"{len(lines):,} of {counted(asked.answer.total, 'name')}; --limit shows more.")
    return lines, 0


_COLUMNS = {
    "requests": "requests",
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "answer": "completion_tokens",
    "memory": "memory_tokens",
}
"""The figures of `UsageRow`, by their columns."""


@click.command()
@shows(usages.usage)
def usage(asked: RouteAnswer[UsageByDay]) -> tuple[Lines, int]:
    """Show the tokens that requests took, by day, topic and model.

    Exit code 1 if no receipt is kept.

    Example: memd usage --from 2026-11-01
    """
    rows, topics = asked.answer.rows, asked.given.get("topic")
    if not rows:
        if topics:
            asked.daemon.ask(reads.log_page, topic=topics, limit=1)  # raises BadQuestion if there is no such topic
        return ["No request has a receipt; requests get one while receipts.enabled is true."], FOUND_SOMETHING
    models = {row.model for row in rows}
    which = ("topic", "model") if len(models) > 1 else ("topic",)
    shown = table("day", *which, *_COLUMNS, right=_COLUMNS, whole=("day", *_COLUMNS), show_footer=True)
    totals = [f"{sum(getattr(row, name) for row in rows):,}" for name in _COLUMNS.values()]
    for column, footer in zip(shown.columns, ("all", *("" for _ in which), *totals), strict=True):
        column.footer = footer
    for row in rows:
        cells = (row.topic_id, Text(name_for_terminal(row.model)))[: len(which)]
        shown.add_row(row.day, *cells, *(f"{getattr(row, name):,}" for name in _COLUMNS.values()))
    lines: Lines = [shown]
    if len(models) == 1 and rows[0].model:
        lines.append(f"Each request named the model {name_for_terminal(rows[0].model)}.")
    if estimated := sum(row.estimated for row in rows):
        lines.append(f"Of {counted(estimated, 'request')} the model server told no tokens: memd estimated them.")
    if asked.answer.since is not None:
        lines.append(f"The oldest receipt that is kept is of {time_of(asked.answer.since)}.")
    return lines, 0
