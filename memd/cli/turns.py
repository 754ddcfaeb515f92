"""`memd turn`: what memory did in a turn.

Rule: the daemon answers from its receipts; the command only shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memd.admin.receipts import Receipt
from memd.cli.flags import config_of_existing, print_lines, settings_flags
from memd.cli.history import INDENT, time_of
from memd.cli.operations import Lines
from memd.cli.running import daemon_for
from memd.errors import BadQuestion
from memd.recall.explained import SearchAnswer
from memd.settings.model import Config
from memd.wording import counted, for_terminal, memory_words, name_for_terminal

QUESTION_CHARACTERS = 60


@click.command()
@settings_flags
@click.option("--replay", is_flag=True, help="Also the chunks that the question would find now, and the difference.")
@click.option("--then", is_flag=True, help="The same out of what was stored when the turn began.")
@click.option("--topic", help="Without ID: only turns of this topic.")
@click.option("--limit", type=click.IntRange(1, 500), default=20, help="Without ID: how many turns. Default: 20.")
@click.option("--steps", is_flag=True, help="Without ID: also each step of a tool loop.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.argument("turn_id", metavar="[ID]", required=False)
def turn(
    config_path: Path | None,
    data_dir: str | None,
    replay: bool,
    then: bool,
    topic: str | None,
    limit: int,
    steps: bool,
    as_json: bool,
    turn_id: str | None,
) -> int:
    """Show what memory did in a turn, and why.

    ID is in the header X-Memory-Turn of the answer; without it the latest turns are listed.

    Example: memd turn 5e0c9f1a2b3c4d5e
    """
    if turn_id is None and (replay or then):
        raise BadQuestion("--replay and --then are of one turn: give its ID; `memd turn` lists the latest")
    config = config_of_existing(config_path, data_dir)
    if turn_id is None:
        told, lines = _latest(config, topic, limit, steps=steps)
    elif replay or then:
        told, lines = _replayed(config, turn_id, then=then)
    else:
        told, lines = _receipt(config, turn_id)
    click.echo(told) if as_json else print_lines(lines)
    return 0


class Replayed(msgspec.Struct, frozen=True):
    """A turn, and the chunks that its question would get now."""

    turn: Receipt
    now: SearchAnswer
    gained: tuple[str, ...]
    lost: tuple[str, ...]
    kept: tuple[str, ...]


def _latest(config: Config, topic: str | None, limit: int, *, steps: bool) -> tuple[bytes, Lines]:
    """Return the latest turns, as JSON and as text."""
    with daemon_for(config) as daemon:
        told = daemon.get("/memd/turns", topic=topic, limit=limit, steps=int(steps))
        turns = msgspec.json.decode(told, type=dict[str, list[dict[str, Any]]])["turns"]
        if topic is not None and not turns:
            daemon.get("/memd/log", topic=topic, limit=1)  # raises BadQuestion if there is no such topic
    if not turns:
        return told, ["No turn has a receipt yet; turns get one while receipts.enabled is true."]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("turn", "when", "topic", "memory", "asked"):
        table.add_column(name, no_wrap=name in ("turn", "when"))
    for one in turns:
        asked = "(a step of its turn)" if one["is_step"] else one["asked"]
        is_kept = one["mode"] == "full" and not one["is_retry"]
        words = memory_words(one["status"], len(one["shown"]), is_kept=is_kept, http_status=one["http_status"])
        words += [counted(one["steps"], "step")] if one.get("steps") else []
        asked = for_terminal(" ".join(asked.split())[:QUESTION_CHARACTERS])
        table.add_row(one["turn_id"], time_of(one["at"])[5:-3], one["topic_id"], ", ".join(words), Text(asked))
    return told, [table]


def _receipt(config: Config, turn_id: str) -> tuple[bytes, Lines]:
    """Return one turn, as JSON and as text."""
    with daemon_for(config) as daemon:
        told = daemon.get(f"/memd/turns/{_path(turn_id)}")
    return told, _lines(msgspec.json.decode(told, type=Receipt))


def _replayed(config: Config, turn_id: str, *, then: bool) -> tuple[bytes, Lines]:
    """Return one turn and the difference to now, or to what was stored then, as JSON and as text."""
    with daemon_for(config) as daemon:
        told = daemon.get(f"/memd/turns/{_path(turn_id)}/replay", then="true" if then else None)
    replay = msgspec.json.decode(told, type=Replayed)
    texts = {chunk.id: chunk.content for chunk in replay.now.chunks}
    lines = _lines(replay.turn)
    when = "out of what was stored then" if then else "now"
    lines.append(Text(f"The same question {when}", style="bold"))
    lines.append(f"  the same: {' '.join(replay.kept) or 'nothing'}")
    lines += [Text(f"- {id_}", style="red") for id_ in replay.lost]
    for id_ in replay.gained:
        lines += [Text(f"+ {id_}", style="green"), _indented(texts.get(id_, ""))]
    if not replay.lost and not replay.gained:
        lines.append("  nothing is different")
    return told, lines


def _lines(one: Receipt) -> Lines:
    kind = " (a step of its turn)" if one.is_step else " (a retry)" if one.is_retry else ""
    answered = "no answer" if one.http_status is None else f"HTTP {one.http_status}"
    by = f"  by {name_for_terminal(one.author)}" if one.author else ""
    head = (f"  {time_of(one.at)}  ", (one.topic_id, "cyan"), f"  {one.status}{kind}{by}")
    lines: Lines = [
        Text.assemble((one.turn_id, "bold"), *head),
        Text(f"{one.api}, mode {one.mode}, model {for_terminal(one.model) or '-'}, {answered}"),
        _costs(one),
        *_left(one),
        "milliseconds: " + ", ".join(f"{name} {value:.1f}" for name, value in one.timings_ms.items()),
    ]
    if one.error:
        lines.append(Text(f"error: {for_terminal(one.error)}", style="red"))
    if one.question is not None:
        lines += [Text("Asked", style="bold"), _indented(f"{one.question}\n\n{one.step}".strip())]
    if one.note is not None:
        lines.append(one.note)
    if one.candidates:
        lines.append(_candidates(one))
    if one.block is not None:
        lines += [Text("The block, as the model saw it", style="bold"), _indented(one.block)]
    return lines


def _costs(one: Receipt) -> str:
    told = (
        f"memory took {one.memory_tokens:,} tokens ({one.block_tokens:,} of them new) of about {one.forwarded_tokens:,}"
    )
    if one.prompt_tokens is None:
        return told
    read = "" if one.cached_tokens is None else f", of which it knew {one.cached_tokens:,}"
    return f"{told}; the model counts {one.prompt_tokens:,}{read}"


def _left(one: Receipt) -> Lines:
    told = [f"{counted(one.left_out, 'message')} not in the prompt"] if one.left_out else []
    told += [f"a line in place of {counted(one.replaced, 'result')}"] if one.replaced else []
    told += [f"{counted(one.freed_tokens, 'token')} left for this turn"] if one.freed_tokens else []
    return [", ".join(told)] if told else []


def _candidates(one: Receipt) -> RenderableType:
    title = f"Candidates for a budget of {counted(one.budget_tokens, 'token')}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in (
        "id",
        "said",
        "score",
        "cosine",
        "meaning",
        "words",
        "feedback",
        "neighbours",
        "times",
        "tokens",
        "verdict",
    ):
        table.add_column(
            name, justify="left" if name in ("id", "said", "verdict") else "right", no_wrap=name != "verdict"
        )
    for chunk in one.candidates:
        parts = (chunk.score, chunk.cosine, chunk.meaning, chunk.words, chunk.feedback, chunk.neighbours)
        cells = [f"{value:.3f}" for value in parts]
        said = time_of(chunk.said_at)[:10] if chunk.said_at else ""
        table.add_row(
            chunk.id,
            said,
            *cells,
            f"{chunk.multiplier * chunk.echo * chunk.time:.3g}",
            str(chunk.tokens),
            chunk.verdict,
        )
    return table


def _indented(text: str) -> RenderableType:
    return Padding(Text(for_terminal(text)), (0, 0, 1, INDENT), expand=False)


def _path(turn_id: str) -> str:
    if not set(turn_id) <= set("0123456789abcdef"):
        raise BadQuestion(f"{turn_id[:60]!r} is no turn's id: those are 16 hexadecimal digits; `memd turn` lists them")
    return turn_id
